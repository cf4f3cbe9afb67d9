"""The committed tiny runs: their table, and that they are of today's code and rates.

Run: .venv/bin/python -m pytest tests/test_ladder.py
"""

import dataclasses

import pytest

from speedrun.compare.results import Comparison, Entry, Run
from speedrun.figures.ladder import draw_ladder, ladder_table, load_ladder, stale_entries
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.scripts.find import code_hash

MANIFEST = load_manifest()
COMMITTED = REPOSITORY / "history" / "tiny.json"


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
            milestone.name, milestone.id, code_hash(milestone.script),
            dict(MANIFEST.overrides(milestone, "tiny"), val_loss_every="20"),
            tokens_per_step=4096, runs=runs,
        ))
    return Comparison(entries, entries[0].curve[-1][1], "the final loss of 00_baseline")


def test_committed_runs_are_fresh():
    assert stale_entries(load_ladder(COMMITTED), MANIFEST) == []


def test_committed_runs_are_comparable():
    ladder = load_ladder(COMMITTED)
    assert [entry.milestone for entry in ladder.entries] == [m.id for m in MANIFEST.written()]
    for entry in ladder.entries:
        assert sorted(run.seed for run in entry.runs) == [0, 1, 2]
        sizes = MANIFEST.overrides(MANIFEST.get(entry.milestone), "tiny")
        assert entry.tokens_per_step == int(sizes["total_batch_size"]) and entry.device == "cpu"
        assert len({tuple(step for step, _ in run.val_curve) for run in entry.runs}) == 1
    first = ladder.entries[0]
    assert ladder.target == pytest.approx(sum(first.final_losses) / 3)


def test_staleness_is_found():
    ids = [milestone.id for milestone in MANIFEST.written()]
    ladder = invented(*ids)
    assert stale_entries(ladder, MANIFEST) == []
    ladder.entries[1].code = "another"
    ladder.entries[2].options["muon_lr"] = 7.0
    ladder.entries[3].runs.pop()
    del ladder.entries[4]
    assert [line.split(":")[0] for line in stale_entries(ladder, MANIFEST)] == ids[1:5]


def test_table():
    ladder = invented("00", "00a", "01", "02", "03")
    assert "same losses" not in ladder_table(ladder, MANIFEST)
    ladder.entries[4].runs[:] = ladder.entries[3].runs
    *lines, _empty, total = ladder_table(ladder, MANIFEST).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["00_baseline", "819,200", "—", "—", "2.0100 ± 0.0100", "3"]
    assert cells[1][1] == "792,689"  # 4096 * 200 * (5 - 2.01) / (5 - 1.91)
    assert cells[1][2] == "-3.2%"
    assert cells[2][3] == "793,520"  # to 00a's 1.91: 4096 * 200 * (5 - 1.91) / (5 - 1.81)
    assert cells[4][2].endswith("(systems: the same losses)")
    assert total == "The clocks of these 15 runs add up to 3.0 hours."


def test_a_ladder_with_runs_missing_has_dashes(tmp_path):
    ladder = invented("00", "00a", "01")
    ladder.entries[1].runs.clear()
    del ladder.entries[2].runs[1:]
    rows = [line.split("|")[5].strip() for line in ladder_table(ladder, MANIFEST).splitlines()[2:5]]
    assert rows == ["2.0100 ± 0.0100", "— ± —", "1.8000 ± —"]
    draw_ladder(ladder, tmp_path / "tiny.png")
    assert (tmp_path / "tiny.png").stat().st_size


def test_table_says_where_a_milestone_needs_more():
    ladder = invented("00", "00a")
    slow = ladder.entries[1]
    slow.runs[:] = [
        dataclasses.replace(run, val_curve=[(0, 5.0), (200, 2.3), (300, 1.9)]) for run in slow.runs
    ]
    assert "not fewer at this scale" in ladder_table(ladder, MANIFEST).splitlines()[3]
