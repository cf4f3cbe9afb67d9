"""The committed tiny runs: their table, and that they are of today's code and rates.

Run: .venv/bin/python -m pytest tests/test_ladder.py
"""

import dataclasses
import json
import sys

import pytest

from speedrun.base.errors import Stopped, UserError
from speedrun.compare.results import Comparison, Entry, Run
from speedrun.figures import ladder as ladders
from speedrun.figures.charts import FILE, ladder_chart
from speedrun.figures.ladder import (
    TinyRun,
    ladder_table,
    load_ladder,
    run_stale,
    stale_entries,
)
from speedrun.history.fields import default_hyperparameters
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.scripts.find import code_hash

MANIFEST = load_manifest().of_chain()
SOME = dataclasses.replace(MANIFEST, milestones=MANIFEST.milestones[:9])
COMMITTED = REPOSITORY / "history" / "results" / "tiny.jsonl"


def invented(*ids, final=2.0):
    """A ladder with three runs of each milestone, each later one a tenth better."""
    entries = []
    for i, id in enumerate(ids):
        milestone = MANIFEST.get(id)
        runs = [
            Run(log="", steps=200, seed=seed, seconds=[(0, 0.0), (200, 720.0)],
                val_curve=[(0, 5.0), (200, final - 0.1 * i + seed / 100)])
            for seed in range(3)
        ]
        entries.append(Entry(
            milestone.name, milestone.slug, code_hash(milestone.script, kernels=False),
            dict(MANIFEST.overrides(milestone, "tiny"), val_loss_every="20"),
            tokens_per_step=4096, runs=runs,
        ))
    return Comparison(entries, entries[0].curve[-1][1], "the final loss of 00_baseline")


def test_committed_runs_are_fresh():
    assert stale_entries(load_ladder(COMMITTED, MANIFEST), MANIFEST) == []


def test_committed_runs_are_comparable():
    ladder = load_ladder(COMMITTED, MANIFEST)
    assert [entry.milestone for entry in ladder.entries] == [m.slug for m in MANIFEST.milestones]
    for entry in ladder.entries:
        assert sorted(run.seed for run in entry.runs) == [*range(len(entry.runs))]
        sizes = MANIFEST.overrides(MANIFEST.get(entry.milestone), "tiny")
        assert entry.tokens_per_step == int(sizes["total_batch_size"]) and entry.device == "cpu"
        assert len({tuple(step for step, _ in run.val_curve) for run in entry.runs}) == 1
    first = ladder.entries[0]
    assert ladder.target == pytest.approx(sum(first.final_losses) / len(first.runs))


def test_staleness_is_found():
    ids = [milestone.id for milestone in MANIFEST.milestones]
    ladder = invented(*ids)
    assert stale_entries(ladder, MANIFEST) == []
    ladder.entries[1].code = "another"
    ladder.entries[2].options["train_steps"] = 7
    ladder.entries[3].runs.pop()  # the table shows how many there are
    ladder.entries[5].options.pop("train_steps")  # so these runs had the script's default
    del ladder.entries[4]
    assert stale_entries(ladder, MANIFEST) == [
        f"{ids[1]}: the script has changed since its runs",
        *(f"{ids[i]}: the tiny hyperparameters have changed since its runs" for i in (2, 5))]


def line_of(of, seed, **changes):
    """A line of the file: a run that is fresh."""
    options = {**MANIFEST.overrides(of, "tiny"), "val_loss_every": 20}
    return json.dumps(dataclasses.asdict(TinyRun(
        of.slug, code_hash(of.script, kernels=False), seed, "abc", "cpu", 4096, 200, 9.5, options,
        ((0, 5.0), (200, 2.0 + seed / 100)), ((0, 0.0), (200, 60.0)))) | changes)


def test_a_file_is_read_a_run_a_line(tmp_path):
    first, second = MANIFEST.milestones[:2]
    file = tmp_path / "tiny.jsonl"
    lines = [line_of(m, seed) for m in (second, first) for seed in range(3)]
    file.write_text("\n".join([*lines, line_of(first, 0, milestone="gone")]), encoding="utf-8")
    ladder = load_ladder(file, MANIFEST)
    assert [entry.label for entry in ladder.entries] == [first.name, second.name]
    assert [run.seed for run in ladder.entries[0].runs] == [0, 1, 2]
    assert ladder.target == pytest.approx(2.01) and ladder.data_fingerprint == "abc"
    assert stale_entries(ladder, MANIFEST) == [] and not ladder.mixed
    file.write_text("\n".join([*lines[:-1], line_of(first, 2, corpus="b", code="c")]), "utf-8")
    ladder = load_ladder(file, MANIFEST)
    assert ladder.mixed and len(stale_entries(ladder, MANIFEST)) == 1
    for line, message in ((line_of(first, 0, steps=0), 'line 1: "steps" must be a whole number'),
                          ("{", "line 1: Expecting property name"), ("[]", "line 1: it must be a"),
                          ("", "tiny.jsonl: there is no run in it"),
                          (f"{line_of(first, 0)}\n" * 2, "line 2: a second run of .* with seed 0")):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_ladder(file, MANIFEST)


@pytest.mark.parametrize("end", [None, Stopped("interrupted", 130), "rank 0 ended"])
def test_only_what_is_stale_runs_again(end, tmp_path, monkeypatch, capsys):
    first, second, third, *others = SOME.milestones
    file = tmp_path / "tiny.jsonl"
    file.write_text("\n".join(
        [line_of(m, seed) for m in others for seed in range(3)] + [line_of(first, 1)]
        + [line_of(second, seed, code="another") for seed in range(3)]), encoding="utf-8")
    asked = []

    def collect(texts, seeds, out, stream, *, scale, settings):
        asked.append((*texts, [*seeds], out, scale, settings))
        made, bad = invented(*texts), texts == [third.slug] and end
        made.data_fingerprint, (entry,) = "abc", made.entries
        entry.options["train_files"] = "a*"
        entry.device, entry.failures = "cpu", [bad, "x"] if isinstance(bad, str) else []
        entry.runs[:] = [dataclasses.replace(entry.runs[seed], step_avg_ms=9.5) for seed in seeds]
        return made, bad if isinstance(bad, Stopped) else None

    monkeypatch.setattr(ladders, "collect", collect)
    if end:
        with pytest.raises(UserError, match=str(end)):
            run_stale(file, SOME, sys.stdout)
    else:
        run_stale(file, SOME, sys.stdout)
        run_stale(file, SOME, sys.stdout)  # nothing is left to do
    assert asked == [(m.slug, seeds, f"tiny-{m.slug}", "tiny", ["val_loss_every=20"])
                     for m, seeds in ((first, [0, 2]), (second, [0, 1, 2]), (third, [0, 1, 2]))]
    assert capsys.readouterr().out == (
        f"running {first.id}: fewer than 3 runs\nrunning {second.id}: the script has changed since"
        f" its runs\nrunning {third.id}: fewer than 3 runs\n")
    own = default_hyperparameters(first.script)
    options = json.loads(line_of(first, 0))["options"].items()
    assert json.loads(file.read_text("utf-8").partition("\n")[0]) == json.loads(line_of(
        first, 1)), "kept"
    assert json.loads(file.read_text("utf-8").splitlines()[1]) == json.loads(line_of(
        first, 0, seconds=[[0, 0.0], [200, 720.0]],
        options={name: value for name, value in options if own[name] != value}))
    assert stale_entries(load_ladder(file, SOME), SOME) == []
    slugs = [json.loads(line)["milestone"] for line in file.read_text("utf-8").splitlines()]
    expected = [m.slug for m in SOME.milestones if not (end and m is third)]
    assert slugs == [slug for slug in expected for _ in range(3)]


def test_chains_run_that_train_from_nothing(tmp_path, monkeypatch):
    history, ran = load_manifest(), []
    rung, other = history.of_chain("prelude").milestones[:2]
    script = tmp_path / "generate.py"
    script.write_text("class Hyperparameters:\n    seed: int = 0\n", encoding="utf-8")
    some = dataclasses.replace(history, milestones=(
        MANIFEST.milestones[0], rung, dataclasses.replace(other, script=script)))
    file = tmp_path / "tiny.jsonl"
    file.write_text("\n".join(line_of(MANIFEST.milestones[0], seed) for seed in range(3)), "utf-8")

    def run(milestone, seeds, *_):
        ran.append(milestone.slug)
        return [TinyRun(**json.loads(line_of(milestone, seed))) for seed in seeds]

    monkeypatch.setattr(ladders, "_run", run)
    run_stale(file, some, sys.stdout)
    assert ran == [rung.slug], "the second one has no shards"
    assert stale_entries(load_ladder(file, some), some) == []
    assert [e.label for e in load_ladder(file, MANIFEST).entries] == [MANIFEST.milestones[0].name]
    assert load_ladder(file, history.of_chain("prelude")).target == pytest.approx(2.01)


def test_what_another_call_has_run_meanwhile_is_kept(tmp_path, monkeypatch):
    file, ran = tmp_path / "tiny.jsonl", []
    some = dataclasses.replace(SOME, milestones=SOME.milestones[:2])

    def run(milestone, seeds, *_):
        ran.append(milestone.id)
        file.write_text("\n".join(line_of(some.milestones[1], seed) for seed in range(3)), "utf-8")
        return [TinyRun(**json.loads(line_of(milestone, seed))) for seed in seeds]

    monkeypatch.setattr(ladders, "_run", run)
    run_stale(file, some, sys.stdout)
    first, second = load_ladder(file, some).entries
    assert ran == [some.milestones[0].id] and len(first.runs) == len(second.runs) == 3


@pytest.mark.parametrize("apart, asked, number", [(1e-4, [[0]], 1), (2e-4, [[0], [1, 2]], 3)])
def test_a_systems_step_with_its_parents_losses_runs_once(
        apart, asked, number, tmp_path, monkeypatch):
    step = next(m for m in SOME.milestones if m.kind == "systems")
    file, seen = tmp_path / "tiny.jsonl", []
    file.write_text("\n".join(line_of(m, seed) for m in SOME.milestones for seed in range(3)
                              if m is not step), encoding="utf-8")

    def collect(texts, seeds, out, stream, **options):
        seen.append([*seeds])
        made = invented(*texts)
        made.data_fingerprint, made.entries[0].device = "abc", "cpu"
        made.entries[0].runs = [
            Run("", 200, [(0, 5.0), (200, 2.0 + seed / 100 - apart)], [(0, 0.0), (200, 60.0)],
                seed, 9.5) for seed in seeds]
        return made, None

    monkeypatch.setattr(ladders, "collect", collect)
    run_stale(file, SOME, sys.stdout)
    ladder = load_ladder(file, SOME)
    assert seen == asked and stale_entries(ladder, SOME) == []
    (entry,) = [entry for entry in ladder.entries if entry.milestone == step.slug]
    assert [run.step_avg_ms for run in entry.runs].count(None) == 3 - number, "their clock is not"
    borrowed = [2.01, 2.02] if number == 1 else [2.01 - apart, 2.02 - apart]
    assert entry.final_losses == pytest.approx([2.0 - apart, *borrowed], abs=1e-9)
    table = ladder_table(ladder, SOME)
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {step.name} ")]
    assert line.endswith(f" {number} |") and ("the same losses" in line) == (number == 1)
    runs = 3 * (len(SOME.milestones) - 1) + number
    assert f"\nThese {runs} runs took {runs / 60:.1f} hours by their own clocks" in table


def test_table():
    ladder = invented("00", "00b", "01", "02", "03")
    assert "same losses" not in ladder_table(ladder, MANIFEST)
    ladder.entries[4].runs[:] = ladder.entries[3].runs
    *lines, _empty, total = ladder_table(ladder, MANIFEST).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["00_baseline", "819,200", "—", "—", "2.0100 ± 0.0100", "3"]
    assert cells[1][1] == "792,689"  # 4096 * 200 * (5 - 2.01) / (5 - 1.91)
    assert cells[1][2] == "-3.2%"
    assert cells[2][3] == "793,520"  # to 00b's 1.91: 4096 * 200 * (5 - 1.91) / (5 - 1.81)
    assert cells[4][2].endswith("(systems: the same losses)")
    ladder.entries[1].runs[:] = [
        dataclasses.replace(run, val_curve=[(0, 5.0), (200, 2.3), (300, 1.9)])
        for run in ladder.entries[1].runs]
    assert "not fewer at this scale" in ladder_table(ladder, MANIFEST).splitlines()[3]
    assert total == ("These 15 runs took 3.0 hours by their own clocks, "
                     "which include waits on a busy machine.")


def test_a_ladder_with_runs_missing_has_dashes():
    ladder = invented("00", "00b", "01")
    ladder.entries[1].runs.clear()
    del ladder.entries[2].runs[1:]
    rows = [line.split("|")[5].strip() for line in ladder_table(ladder, MANIFEST).splitlines()[2:5]]
    assert rows == ["2.0100 ± 0.0100", "—", "1.8000"]
    drawn = ladder_chart(ladder, MANIFEST, FILE)
    assert [point.text for point in drawn.points if point.milestone] == [
        "00 The baseline: 2.0100", "01 Muon: 1.8000"]
