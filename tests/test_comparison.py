"""Comparing milestones: statistics, tables, picture and the command itself.

Run: .venv/bin/python -m pytest tests/test_comparison.py
"""

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from bisect import bisect
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import compare_milestones
from ranks import run_tool
from snapshots import (
    MICRO,
    MILESTONES,
    by_id,
    declaring,
    known_values,
    load_snapshot,
    micro_overrides,
    tried,
)
from speedrun.base.errors import Stopped, UserError
from speedrun.base.text import visible
from speedrun.compare import generation
from speedrun.compare.collect import collect
from speedrun.compare.generation import compare_generation
from speedrun.compare.plot import curves_of, draw_comparison, save
from speedrun.compare.results import (
    Comparison,
    Entry,
    Run,
    choose_target,
    crossing,
    mean_curve,
    p_value,
    scores,
)
from speedrun.compare.table import (
    _count,
    _seconds,
    columns,
    notes,
    print_comparison,
    to_csv,
    to_markdown,
)
from speedrun.history.manifest import REPOSITORY
from speedrun.run.generation import Answers
from speedrun.run.log import RULE
from speedrun.scripts.find import code_hash
from speedrun.scripts.flops import flops_if_countable, training_flops_per_token, visible_pairs
from speedrun.scripts.sizes import length_names

BY_ID = {milestone.id: milestone for milestone in MILESTONES}
COMMAND = [sys.executable, str(REPOSITORY / "tools" / "compare_milestones.py")]


# ---- statistics ----


def test_mean_curve_keeps_the_common_steps():
    curves = [[(0, 5.0), (10, 4.0), (20, 3.0)], [(0, 7.0), (20, 2.0), (30, 1.0)]]
    assert mean_curve(curves) == [(0, 6.0), (20, 2.5)]
    assert mean_curve([]) == []


def test_crossing_is_interpolated():
    curve = [(0, 5.0), (10, 4.0), (20, 3.0), (30, 3.5)]
    assert crossing(curve, 3.25) == 17.5
    assert crossing(curve, 4.0) == 10
    assert crossing(curve, 6.0) == 0
    assert crossing(curve, 2.9) is None
    assert crossing([], 1.0) is None


def test_p_value_of_a_worked_example():
    # mean 3.276, standard deviation 0.002, n = 5: t = -0.004 / (0.002 / sqrt(5)) = -4.4721,
    # whose lower tail with 4 degrees of freedom is 0.00552
    losses = [3.274, 3.274, 3.276, 3.278, 3.278]
    assert p_value(losses, 3.28) == pytest.approx(0.00552, abs=2e-5)
    assert p_value(losses, 3.272) > 0.99
    assert p_value(losses[:2], 3.28) is None
    assert p_value([3.2, 3.2, 3.2], 3.28) is None


# ---- figures of invented runs ----


def entry(label, *curves, step_ms=10.0, **fields):
    """An Entry whose runs have these validation curves and a clock of step_ms per step."""
    runs = [
        Run(log=f"{label}{i}", steps=curve[-1][0], val_curve=curve, seed=i,
            seconds=[(step, step * step_ms / 1000) for step, _ in curve],
            step_avg_ms=step_ms + i, peak_memory_mib=100 + i)
        for i, curve in enumerate(curves)
    ]
    return Entry(label, tokens_per_step=1000, runs=runs, **fields)


SLOW = [(0, 6.0), (100, 4.0), (200, 3.0)]
FAST = [(0, 6.0), (100, 2.5), (200, 2.0)]
GROWS = dict(scheduled_steps=200, second_stage_peak=1.0, third_stage_peak=1.0)


def test_rows():
    slow = entry("slow", SLOW, [(0, 6.0), (100, 4.2), (200, 3.2)])
    fast = entry("fast", FAST, flops_per_token=6e6, peak_flops=1e12, world_size=2)
    fast.failures.append("seed 1: out of memory")
    nothing = Entry("nothing", failures=["seed 0: no data"])
    comparison = Comparison([slow, fast, nothing], 3.1, "as asked")
    a, b, c = scores(comparison)
    assert (a.runs, a.steps, a.tokens) == (2, 200, 200_000)
    assert a.val_loss == pytest.approx(3.1) and a.val_loss_sd == pytest.approx(0.141421, abs=1e-6)
    assert a.tokens_to_target == pytest.approx(200_000) and a.seconds_to_target == pytest.approx(2)
    assert a.step_avg_ms == 10.5 and a.step_avg_range == (10, 11)
    assert a.tokens_per_s == pytest.approx(1e6 / 10.5) and a.mfu is None
    assert a.speed_up == 1 and a.peak_memory_mib == 101
    crossed = 100 * (6 - 3.1) / (6 - 2.5)  # steps
    assert b.tokens_to_target == pytest.approx(1000 * crossed)
    assert b.speed_up == pytest.approx(2 / (crossed / 100))
    assert b.mfu == pytest.approx(6e6 * 1e5 / 2e12)
    assert (b.failed, c.runs, c.failed, c.val_loss) == (1, 0, 1, None)
    slow.unread, slow.tokens_per_step, comparison.mixed = 3, 524_288, True
    slow.device, fast.device = "Y", "X"
    assert columns(comparison) == {
        "": ["slow", "fast", "nothing"], "runs": ["2", "1, 1 failed", "0, 1 failed"],
        "steps": ["200", "200", "—"], "tokens": ["104.86M", "200,000", "—"],
        "tokens to 3.1": ["104.86M", "82,857", "—"], "val loss": ["3.1000 ± 0.1414", "2.0000", "—"],
        "step": ["10.5 (10.0–11.0) ms", "10.0 ms", "—"], "tokens/s": ["49,932,190", "100,000", "—"],
        "MFU": ["—", "30.0%", "—"], "memory": ["101 MiB", "100 MiB", "—"],
        "time to 3.1": ["2.0 s", "0.8 s", "—"], "speed-up": ["1.00x", "2.41x", "—"]}
    assert notes(comparison) == [
        "target: 3.1000, as asked; tokens and time to it are interpolated between validations of"
        " the mean curve", "trained on 1 x Y, 2 x X",
        "not all runs are known to be of one corpus: only losses on the same tokens compare",
        "val loss: mean ± standard deviation over the runs; step: median over the runs, least to"
        " most", "slow: lines that begin like a step line and are not understood: 3",
        "failed: fast, seed 1: out of memory", "failed: nothing, seed 0: no data"]


@pytest.mark.parametrize("write, number, text", [
    (_count, 999_999, "999,999"), (_count, 1e6, "1.00M"), (_count, 999_990_000, "999.99M"),
    (_count, 1e9, "1.00B"), (_seconds, 119.94, "119.9 s"), (_seconds, 120, "2.00 min")])
def test_a_large_number_has_a_larger_unit(write, number, text):
    assert write(number) == text


def test_a_target_out_of_reach_is_a_dash():
    comparison = Comparison([entry("slow", SLOW), entry("fast", FAST)], 2.2, "as asked")
    a, b = scores(comparison)
    assert a.tokens_to_target is None and b.tokens_to_target is not None
    assert b.speed_up is None, "nothing to be faster than"
    assert columns(comparison)["tokens to 2.2"][0] == "—"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_says_so(loss):
    diverged = entry("00", [(0, 6.0), (100, loss)], vocab_size=257)
    target, reason = choose_target([diverged])
    assert (target, reason) == (None, "00 diverged")
    comparison = Comparison([diverged], target, reason)
    assert columns(comparison)["val loss"] == ["diverged"]
    assert notes(comparison) == ["no target: 00 diverged", "diverged: 00, 000"]
    found = json.loads(comparison.to_json(), parse_constant=pytest.fail)  # JSON has no NaN
    assert found["entries"][0]["runs"][0]["val_curve"] == [[0, 6.0], [100, None]]


def test_target():
    tiny = entry("00", SLOW, vocab_size=257)
    assert choose_target([tiny, entry("01", FAST, vocab_size=257)]) == (
        3.0, "the final loss of 00")
    assert choose_target([entry("public", SLOW)])[0] == 3.28
    assert choose_target([tiny, entry("public", FAST)])[0] == 3.0
    assert choose_target([Entry("00", vocab_size=264)])[0] is None


def test_p_is_told_only_against_a_fixed_target():
    curves = [[(0, 6.0), (100, loss)] for loss in (3.1, 3.12, 3.14)]
    one = entry("a", *curves)
    fixed = Comparison([one], 3.2, "as asked")
    assert scores(fixed)[0].p_value < 0.05 and columns(fixed)["p"] == ["0.01"]
    assert notes(fixed)[-1] == ("p: one-sided t-test, the chance of such losses if their true mean"
                                " were the target")
    assert scores(Comparison([one], 3.2, "the final loss of a"))[0].p_value is None
    diverged = entry("a", *curves, [(0, 6.0), (100, math.nan)])
    assert scores(Comparison([diverged], 3.2, "as asked"))[0].p_value is None


def test_csv_and_markdown():
    comparison = Comparison([entry("a", SLOW, FAST), entry("b", FAST)], 2.5, "as asked")
    table = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [line["label"] for line in table] == ["a", "b"] and table[0] == {
        "label": "a", "runs": "2", "failed": "0", "steps": "200", "tokens": "200000",
        "tokens_to_target": "200000.0", "val_loss": "2.5", "val_step": "", "p_value": "",
        "val_loss_sd": f"{0.5**0.5}", "step_avg_ms": "10.5", "step_avg_range": "10.0 11.0",
        "tokens_per_s": f"{2e9 / 21000}", "mfu": "", "peak_memory_mib": "101",
        "seconds_to_target": "2.0", "speed_up": "1.0", "final_losses": "3.0 2.0"}
    head, rule, first, _ = to_markdown(comparison).splitlines()
    assert (head, rule) == (
        "|  | runs | steps | tokens | tokens to 2.5 | val loss | step | tokens/s | memory | time to"
        " 2.5 | speed-up |", f"| --- |{' ---: |' * 10}")
    assert first == ("| a | 2 | 200 | 200,000 | 200,000 | 2.5000 ± 0.7071 | 10.5 (10.0–11.0) ms |"
                     " 95,238 | 101 MiB | 2.0 s | 1.00x |")


def test_names_cannot_steer_a_terminal():
    assert visible("a\x1b\x1f\x7f[2J\u202e\udc80é\n\t") == "a\u241b\u241f\ufffd[2J\ufffd\ufffdé\n\t"
    stream = io.StringIO()
    named = entry("a\x1b[2J", SLOW)
    named.failures.append("seed 1: \x1b[2J")
    print_comparison(Comparison([named], 3.0, "as asked"), stream)
    assert "\x1b" not in stream.getvalue() and stream.getvalue().count("␛[2J") == 3


@pytest.mark.parametrize("width", [40, 200])
def test_no_terminal_width_cuts_a_figure(width, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", str(width))
    comparison = Comparison([entry("slow", SLOW), entry("fast", FAST)], 3.0, "as asked")
    terminal = Terminal()
    print_comparison(comparison, terminal)
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert "…" not in text
    for cells in columns(comparison).values():
        assert all(cell in text for cell in cells if cell != "—")
    table = [line for line in text.splitlines() if not line.startswith(("target", "val loss"))]
    assert max(map(len, table)) <= width


def test_picture(tmp_path):
    comparison = Comparison([entry("a", SLOW, FAST), Entry("nothing")], 3.0, "as asked")
    drawn = set()
    for official in ({"a": {"steps": [(0, 6.5), (150, 3.3)], "tokens": [(0, 6.5), (2, 3.3)]}}, {}):
        save(draw_comparison(comparison, official), tmp_path / "curves.png")
        drawn.add((tmp_path / "curves.png").read_bytes())
    assert len(drawn) == 2 and all(png.startswith(b"\x89PNG") for png in drawn)
    assert curves_of(comparison.entries[0])["tokens"][0] == [(0, 6.0), (0.1, 4.0), (0.2, 3.0)]
    assert curves_of(comparison.entries[0])["seconds"][1] == [(0, 6.0), (1.0, 2.5), (2.0, 2.0)]
    assert curves_of(entry("a", SLOW, batches=GROWS))["tokens"] == [
        [(0, 6.0), (0.133, 4.0), (0.399, 3.0)]], "steps of three sizes"


def test_a_picture_has_all_runs_their_mean_the_record_and_the_target():
    some = entry("a", SLOW, [(0, 6.0), (100, 4.5), (200, 3.5)], milestone="muon")
    record = {"steps": [(0, 6.5), (150, 1.5)], "tokens": [(0, 6.5), (2, 1.5)]}
    figure = draw_comparison(Comparison([some, entry("b", FAST)], 1.0, "as asked"), {"a": record})
    for panel, name, x, end in zip(figure.axes, ("optimizer step", "million tokens",
                                                 "training time, seconds"), (1, 1000, 100),
                                   (150, 2, 0), strict=True):
        lines = [("", "-", 0.6, 6, 4, 3), ("", "-", 0.6, 6, 4.5, 3.5),
                 ("a", "-", 1.6, *((6, 4.25, 3.25) if end else (6, 4, 3))),
                 ("a, official", "--", 1.2, 6.5, 1.5), ("b", "-", 1.6, 6, 2.5, 2),
                 ("", "-", 0.8, 1, 1)]
        assert [(line.get_label().partition("_")[0], line.get_linestyle(), line.get_linewidth(),
                 *line.get_ydata()) for line in panel.lines] == [
                     line for line in lines if end or line[1] == "-"]
        assert [[*line.get_xdata()] for line in panel.lines if line.get_label()[0] in "ab"] == [
            [0, 100 / x, 200 / x], *[[0, end]] * bool(end), [0, 100 / x, 200 / x]]
        assert panel.get_xlabel() == name
    assert figure.axes[0].get_ylabel() == "validation loss, nats per token"
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "a, official", "b"]
    assert figure.axes[0].get_ylim() == pytest.approx((0.825, 4.675)), "without the steep start"


def test_generation_is_compared_in_turn_and_seed_by_seed(monkeypatch):
    made = iter([(100, b"a"), (300, b"a"), (2000, b"b"), (1000, b"b"), (400, b"c"), (1600, b"d")])
    plans, stream = [], io.StringIO()
    monkeypatch.setattr(generation, "make_plan", lambda script, **more: (script, *more.values()))
    monkeypatch.setattr(generation, "generate", lambda plan: plans.append(plan) or (
        lambda speed, text: Answers(text, 9, 9.0, speed))(*next(made)))
    compare_generation(["e0a", "e3:x=2"], range(5, 8), stream, settings=["y=1"], scale="tiny")
    assert plans == [(script, "tiny", [*settings, f"seed={seed}"]) for seed in (5, 6, 7) for
                     script, *settings in (("e0a", "y=1"), ("e3", "y=1", "x=2"))]
    assert stream.getvalue().splitlines()[-5:] == [
        "[6/6] e3:x=2, seed 7: 1,600 tokens/s",
        "        runs           tokens/s              speed   answers",
        "e0a        3    400 (100–2,000)  1.00x (1.00–1.00)  the same",
        "e3:x=2     3  1,000 (300–1,600)  3.00x (0.50–4.00)    others",
        "median over the runs, least to most; speed: against the first script, seed by seed"]


def test_what_generates_is_compared_with_its_like(tmp_path):
    log = str(write_log(tmp_path, "log.txt", [(0, 6)]))
    assert generation.only_generate(["e0a", "e4b"]) and not generation.only_generate(["00", log])
    for other in ("00", log):
        with pytest.raises(UserError, match="^stream generates text: only others that do compare"):
            generation.only_generate([other, "e4b"])


def test_runs_without_a_seed_are_no_copies():
    for seed, told in ((7, 1), (None, 0)):
        some = entry("a", SLOW)
        some.runs[:] = 2 * [replace(some.runs[0], seed=seed)]
        found = notes(Comparison([some], None, "as asked"))
        assert sum("one is a copy" in line for line in found) == told


def test_an_entry_looks_alike_in_all_panels():
    figure = draw_comparison(Comparison([entry("a", SLOW), entry("b", FAST)], None, "as asked"), {})
    looks = [{line.get_label(): (line.get_color(), line.get_marker(), line.get_markerfacecolor())
              for line in panel.lines if line.get_label() in "ab"} for panel in figure.axes]
    assert looks == 3 * [{"a": ("#000000", "o", "#000000"), "b": ("#0072B2", "s", "#0072B2")}]
    assert figure.axes[0].get_ylim() == pytest.approx((1.9, 4.1)), "without the steep first part"
    assert figure.dpi == 200  # a PNG of 100 is blurred on most screens


def test_official_curves_are_over_the_tokens_of_the_record():
    tiny = [Entry(name, name, tokens_per_step=4096) for name in (
        "muon", "flat_then_linear", "sublayer_scalars")]
    found = compare_milestones.official_curves(Comparison(tiny, None, "as asked"), True)
    assert found.keys() == {"muon", "sublayer_scalars"}, "a part of a record has no curve"
    assert found["muon"]["steps"][-1] == (6200, BY_ID["01"].val_loss)
    assert found["muon"]["tokens"][-1][0] == pytest.approx(6200 * 524_288 / 1e6)
    assert found["sublayer_scalars"]["tokens"][-1][0] == pytest.approx(395.706368), "steps grow"


def test_a_picture_of_runs_without_finite_losses(tmp_path):
    diverged = entry("diverged", [(0, math.inf), (2, math.nan)])
    for others in ([], [entry("fast", FAST)]):
        figure = draw_comparison(Comparison([diverged, *others], None, "as asked"), {})
        figure.savefig(tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size


# ---- FLOPs ----


@pytest.mark.parametrize("milestone", tried(declaring("Model", "Hyperparameters")), ids=by_id)
def test_flops_of_the_records(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)
    args = module.Hyperparameters()
    T, V = getattr(args, length_names(vars(args))[0]), known.get("head_rows", args.vocab_size)
    windows, exact = [known["record"].get("window", T)], False
    if table := known.get("window"):  # the mean over the steps of the schedule
        numbers = [bisect(table["changes"], s) for s in range(args.train_steps)]
        exact = "sizes" in table  # of the tokens before a token's own
        windows = [table["sizes"][n - 1] + 1 if exact else table["unit"] * n for n in numbers]
    if kinds := known.get("layers"):  # of a short window half the tiles, at least one
        short = [max(128, w // 2 // 128 * 128) for w in windows]
        if exact:
            short = [table["short"][n - 1] + 1 for n in numbers]
        windows = [w for kind, *_ in kinds for w in (windows if kind == "long" else short)]
    lengths = [T] * len(windows)
    if grown := known.get("stages"):
        lengths = [grown["rows"][bisect(grown["changes"], s) - 1]
                   for s in range(args.train_steps)] * len(kinds)
    visible = sum(w * t - w * (w - 1) / 2 for w, t in zip(windows, lengths, strict=True))
    visible /= sum(lengths)
    tile = known["record"].get("tile_size")
    if tile and not exact:  # in the last tile of a window half is seen
        visible -= sum((T - w) / T for w in windows) / len(windows) * (tile - 1) / 2
    attentions, mlps = (args.num_layers - (f"layer_without_{part}" in known["record"])
                        for part in ("attention", "mlp"))
    gates = 6 * known["record"].get("gate_channels", 0)  # a layer's weights
    gated = attentions  # and from 11d on value embeddings, by layer
    gated += known.get("gated_tables", 0)
    networks = known.get("networks", [])  # coefficients of each; 64 hidden channels
    if found := known.get("stream_gates"):  # and attentions' heads have no other gates
        networks, gated = [*networks, found["early"], found["late"]], gated - attentions
    weights = (attentions * 4 + mlps * 8) * 768**2 + gated * gates + V * 768
    weights += sum(64 * (768 + outputs) for outputs in networks)
    if known.get("composed_heads"):  # scores and values of 256 keys; the mixture is no product
        weights += 256 * (768 + 768)
    expected = 6 * weights + 12 * attentions * 768 * visible
    assert training_flops_per_token(milestone.script, asdict(args)) == pytest.approx(expected)


def test_visible_pairs():
    for T, window, tile in [(7, 3, 1), (7, 20, 1), (12, 4, 4), (12, 16, 4), (6, 2, 1)]:
        pairs = sum(q >= k and (q // tile - k // tile) * tile < window
                    for q in range(T) for k in range(T))
        assert visible_pairs(T, window, tile) == pairs


def test_flops_that_cannot_be_counted_are_not_known(tmp_path, capsys):
    script = tmp_path / "train_gpt.py"
    script.write_text("raise RuntimeError('needs a GPU,\\nsays the script')\n", encoding="utf-8")
    for _ in range(2):  # no half of a module is left of the first
        assert flops_if_countable(script, {}) is None
        assert capsys.readouterr().err == (f"MFU is not known: counting the FLOPs of {script} "
                                           "failed, RuntimeError: needs a GPU,\n")


# ---- the command ----


def compare(*arguments):
    return run_tool(COMMAND[1], *arguments)


def micro_settings(id, shards, **more):
    """--set options of a micro run that takes a second or two."""
    more |= dict(train_steps=4, val_loss_every=2)
    overrides = micro_overrides(BY_ID[id], shards, "unused", **more)
    del overrides["log_dir"]
    return [f"--set={name}={value}" for name, value in overrides.items()]


def test_a_targets_own_settings_win_over_those_of_all(monkeypatch, shards, tmp_path):
    plans = []

    def run(plan, stream):
        plans.append(plan)
        raise UserError("not run")

    monkeypatch.setattr("speedrun.compare.collect.run", run)
    for_all = [option.removeprefix("--set=") for option in micro_settings("02", shards)]
    found, _ = collect(["02", "02:muon_lr=0.5"], [3], tmp_path / "runs", stream := io.StringIO(),
                       scale="tiny", settings=[*for_all, "muon_lr=0.25"], command="typed")
    assert [plan.hyperparameters["muon_lr"] for plan in plans] == [0.25, 0.5]
    assert stream.getvalue().splitlines() == [
        f"[{turn}/2] 02_modern_arch{own}, seed 3: {said}" for turn, own, name in (
            (1, "", "0-modern_arch"), (2, " muon_lr=0.5", "1-modern_arch_muon_lr=0.5"))
        for said in (tmp_path / "runs" / f"{name}-seed3", "failed: not run")]
    assert [(one.label, one.milestone, one.code, one.failures) for one in found.entries] == [
        (f"02_modern_arch{own}", "modern_arch", code_hash(BY_ID["02"].script), ["seed 3: not run"])
        for own in ("", " muon_lr=0.5")]
    assert (found.command, found.data_fingerprint, found.mixed) == (
        "typed", plans[0].fingerprint, False)


def write_log(path, name, losses, hyperparameters=None, script="print(1)"):
    """A log in this project's format, or with hyperparameters=None a public one."""
    head = f"{script}\n{RULE}\n"
    if hyperparameters is not None:
        head += f"hyperparameters:{json.dumps(hyperparameters)}\n"
    lines = [f"step:{step}/200 val_loss:{loss:.4f} train_time:{10 * step}ms step_avg:10.00ms\n"
             for step, loss in losses]
    path = path / name
    path.write_text(head + f"{RULE}\n" + "".join(lines), encoding="utf-8")
    return path


def test_a_run_that_ends_is_told_with_its_loss(monkeypatch, shards, tmp_path):
    def run(plan, stream):
        plan.out.mkdir(parents=True)
        seed = plan.hyperparameters["seed"]
        log = write_log(plan.out, "log.txt", [(0, 6), (200, 3 + seed / 10)], plan.hyperparameters)
        log.write_text(log.read_text("utf-8") + seed * "step:1/2 cut short\n", "utf-8")

    monkeypatch.setattr("speedrun.compare.collect.run", run)
    found, stopped = collect(["00"], [3, 4], tmp_path, stream := io.StringIO(), scale="tiny",
                             settings=[o.removeprefix("--set=") for o in micro_settings(
                                 "00", shards)], command="typed")
    assert stopped is None and [(e.final_losses, e.unread) for e in found.entries] == [
        ([3.3, 3.4], 3 + 4)]
    assert stream.getvalue().splitlines()[1::2] == [
        f"[{turn}/2] 00_baseline, seed {seed}: val_loss 3.{seed}000"
        for turn, seed in ((1, 3), (2, 4))]


def test_logs_of_three_seeds_are_one_entry(tmp_path):
    logs = [
        write_log(tmp_path, f"seed{seed}.txt", [(0, 6), (200, 3.27 + seed / 1000)],
                  dict(seed=seed, log_dir=f"logs/{seed}", total_batch_size=1000, vocab_size=50304))
        for seed in range(3)
    ]
    other = write_log(tmp_path, "other.txt", [(0, 6), (200, 3.3)],
                      dict(seed=0, total_batch_size=2000, vocab_size=50304, **GROWS))
    (tmp_path / "public").mkdir()
    public = write_log(tmp_path, "public/log.txt", [(0, 6), (200, 3.29)])
    ended = compare(*logs, other, public.parent, "--csv", tmp_path / "table.csv")
    assert ended.returncode == 0, ended.stderr
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [line["runs"] for line in table] == ["3", "1", "1"]
    # the second stage begins after step 66, the third after step 133
    assert [line["tokens"] for line in table] == ["200000", f"{2000 * (200 + 133 + 66)}", ""]
    assert float(table[0]["val_loss"]) == pytest.approx(3.271)
    assert float(table[0]["p_value"]) < 0.01 and table[1]["p_value"] == ""
    assert "p: one-sided t-test" in ended.stdout


def test_an_unfinished_run_is_an_entry_of_its_own(tmp_path):
    hyperparameters = dict(log_dir="x", total_batch_size=1000, vocab_size=50304)
    logs = [write_log(tmp_path, f"{seed}.txt", [(0, 6), (last, 3.27)], hyperparameters | {
        "seed": seed}) for seed, last in enumerate((200, 150, 100))]
    for file, step in zip(logs[1:], (180, 200), strict=True):
        with open(file, "a", encoding="utf-8") as log:
            log.write(f"step:{step}/200 train_time:1800ms step_avg:10.00ms\n")
    ended = compare(*logs)
    assert ended.returncode == 0, ended.stderr
    runs = tmp_path / "runs" / "a"
    runs.mkdir(parents=True)
    again = shutil.copy(logs[0], runs / "log.txt")
    without = tmp_path / "without"
    without.mkdir()
    (without / "summary.json").touch()
    named, link = shutil.copy(logs[0], tmp_path / "log.json"), tmp_path / "link.json"
    link.symlink_to(named)
    same = runs / ".." / ".." / "log.json"
    killed = tmp_path / "killed"  # before its first line
    (killed / "ranks").mkdir(parents=True)
    (killed / "train_gpt.py").touch()
    for arguments, message in (((again, runs), f"{runs}: this log is named twice"),
                               ((without,), f"{without} is a run whose log.txt is missing"),
                               ((killed,), f"{killed} is a run whose log.txt is missing"),
                               ((runs, "--json", again), f"--json {again}: the file's name must"),
                               ((link, "--json", same), f"--json {same}: this file is read"),
                               ((runs.parent,), f"{runs.parent} is a folder of runs; name each")):
        refused = compare(*arguments)
        assert refused.returncode and refused.stderr.startswith(f"error: {message}")
    copied = compare(logs[0], runs).stdout
    assert "0: 2 runs have seed 0; if one is a copy, leave it out" in copied.splitlines()
    whole, part, killed = [re.split(r"  +", line) for line in ended.stdout.splitlines()[1:4]]
    assert whole[:2] == ["0", "1"] and "3.2700" in whole
    assert part[:2] == ["1, unfinished: 180 of 200 steps", "1"] and "3.2700 (step 150)" in part
    assert killed[:2] == ["2, unfinished: no validation after the last step", "1"]


@pytest.mark.parametrize("prints, known", [
    (("a", "a"), "a"), (("a", None), None), (("a", "b"), None), ((None, None), None)])
def test_the_corpus_of_finished_runs(prints, known, tmp_path):
    for name, print_ in zip("xy", prints, strict=True):
        (tmp_path / name).mkdir()
        write_log(tmp_path, f"{name}/log.txt", [(0, 6), (200, 3.3)])
        if print_:
            (tmp_path / name / "summary.json").write_text(
                json.dumps({"data_fingerprint": print_}), encoding="utf-8")
    ended = compare(tmp_path / "x", tmp_path / "y", "--json", tmp_path / "all.json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert found["data_fingerprint"] == known and found["mixed"] == (prints[0] != prints[1])


def test_trains_and_survives_a_failure(shards, tmp_path):
    """In turn, seed by seed, as test_diff_milestones.py shows."""
    settings = [option for option in micro_settings("01", shards) if "kernel" not in option]
    ended = compare(
        "01:vocab_size=3", "01:muon_lr=0.02", "--scale", "tiny", "--repeat", 1, "--seed", 5,
        "--out", tmp_path / "runs", "--json", tmp_path / "runs.json", "--png", tmp_path / "c.png",
        "--markdown", tmp_path / "c.md", *settings,
    )
    assert ended.returncode == 1, ended.stderr
    starts = re.findall(r"^\[\d/2\] (.*): \S+-seed5$", ended.stdout, re.MULTILINE)
    assert starts == ["01_muon vocab_size=3, seed 5", "01_muon muon_lr=0.02, seed 5"]
    bad, good = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))["entries"]
    assert [run["seed"] for run in good["runs"]] == [5] and not bad["runs"]
    assert good["milestone"] == "muon" and good["options"]["muon_lr"] == "0.02"
    assert good["options"]["vocab_size"] == str(MICRO["vocab_size"])
    assert len(bad["failures"]) == 1 and "beyond vocab_size=3" in bad["failures"][0]
    assert "failed: 01_muon vocab_size=3, seed 5" in ended.stdout
    assert (tmp_path / "c.png").stat().st_size > 10_000
    assert "01_muon muon_lr=0.02" in (tmp_path / "c.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGINT is sent the POSIX way")
def test_ctrl_c_keeps_what_has_finished(shards, tmp_path):
    endless = "01:train_steps=1000000"
    process = subprocess.Popen(
        [*COMMAND, "01", endless, "--scale", "tiny", "--out", str(tmp_path / "runs"),
         "--csv", str(tmp_path / "table.csv"), *micro_settings("01", shards)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    )
    log = tmp_path / "runs" / "1-muon_train_steps=1000000-seed0" / "log.txt"
    deadline = time.monotonic() + 300
    while not (log.exists() and "step:3/" in log.read_text("utf-8")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert error.startswith("error: interrupted")
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["runs"], second["runs"]) == ("1", "0")
    assert first["val_loss"] and first["label"] in out


@pytest.mark.parametrize("arguments, code, message", [
    (["01:no_such_rate=1"], 2, "no hyperparameter no_such_rate"),
    (["missing/log.txt"], 1, "there is no such log"),
    (["/dev/zero"], 1, "/dev/zero is not a regular file, so it is not a log; name another"),
    (["01", "--csv", "/no/such/folder/x.csv"], 1, "there is no folder"),
    (["01", "--png", "curves.xyz"], 1, "curves.xyz: the file's name must end in .png"),
    (["01", "--markdown", "logs/1.txt"], 1, "logs/1.txt: the file's name must end in .md"),
    (["e4b", "--target", "3.3"], 2, "--target is for scripts that train"),
    (["01", "02", "--ablate"], 2, "--ablate takes one milestone"),
    (["01", "--target", "nan"], 2, "nan is not a number from 0 on"),
    (["01", "--target", "inf"], 2, "inf is not a number from 0 on"),
    (["01:muon_lr"], 2, "01:muon_lr: give muon_lr a value, as in 01:muon_lr=0.01"),
    (["01:muon_lr=1,seed=2"], 2, "--set seed=2: the seed is chosen with --seed"),
    (["01:muon_lr=1,muon_lr=2"], 2, "muon_lr has two values"),
    (["01", "--repeat", "1001"], 2, "--repeat: 1001 runs of each script; at most 1,000"),
])
def test_wrong_input_is_one_line(arguments, code, message):
    ended = compare(*arguments)
    assert ended.returncode == code
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert message in ended.stderr and ended.stdout == ""


def test_a_file_that_is_no_log(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing to see\n", encoding="utf-8")
    ended = compare(path)
    assert ended.returncode == 1 and "is not a training log" in ended.stderr
    path.write_text('hyperparameters:{"train_steps": 3}\n', encoding="utf-8")
    assert "before its first step line" in compare(path).stderr


@pytest.mark.parametrize("facts, script, damaged", [
    ({"world_size": "x"}, "x = 1", True), ({}, "def (", True), ({"device": 3}, "x = 1", False)])
def test_a_log_or_a_script_that_was_damaged(tmp_path, facts, script, damaged):
    log = tmp_path / "log.txt"
    log.write_text(f"environment:{json.dumps(facts)}\nstep:1/1 val_loss:3 step_avg:1ms\n")
    (tmp_path / "train_gpt.py").write_text(script)
    ended = compare(log)
    assert ended.stderr.startswith(f"error: {log}, or the script beside it, is damaged: " * damaged)
    assert ended.returncode == damaged


def test_a_run_is_known_by_its_code(tmp_path):
    script = BY_ID["01"].script.read_text(encoding="utf-8")
    for name, old, new in (("my run", "# ", "#  "), ("another", "0.95", "0.96")):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name, "log.txt", [(0, 6), (200, 3.3)],
                  dict(seed=0, muon_lr=0.1, vocab_size=257), script=name)
        (tmp_path / name / "train_gpt.py").write_text(script.replace(old, new), encoding="utf-8")
    second = shutil.copytree(tmp_path / "my run", tmp_path / "second")
    text = (second / "log.txt").read_text(encoding="utf-8")
    (second / "log.txt").write_text(text.replace('"muon_lr": 0.1', '"muon_lr": 0.2'), "utf-8")
    ended = compare(tmp_path / "my run", second, tmp_path / "another",
                    "--json", tmp_path / "runs.json")
    assert ended.returncode == 0, ended.stderr
    written = (tmp_path / "runs.json").read_text(encoding="utf-8")
    found, second, other = json.loads(written)["entries"]
    assert (found["label"], found["milestone"]) == ("01_muon (my run)", "muon")
    assert (second["label"], second["milestone"]) == ("01_muon (second)", "muon")
    assert found["options"] == dict(muon_lr=0.1, vocab_size=257)
    assert found["runs"][0]["seconds"] == [[0, 0.0], [200, 2.0]]
    assert (other["label"], other["milestone"]) == ("another", None)


@pytest.mark.parametrize("stored, label", [
    ("05e_fp8_head", "05e-run (fp8_head)"), ("05e", "05e-run"),
    ("09_all_optimizations", "05e-run (backout)")])  # its older slug
def test_a_run_of_another_code_keeps_its_milestones_slug(stored, label, tmp_path):
    folder = tmp_path / "05e-run"  # an id which may mean another milestone now
    folder.mkdir()
    write_log(folder, "log.txt", [(0, 6), (200, 3.3)], dict(seed=0))
    (folder / "summary.json").write_text(json.dumps({"milestone": stored}), encoding="utf-8")
    compare(folder, "--json", tmp_path / "runs.json")
    (found,) = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))["entries"]
    assert (found["label"], found["milestone"]) == (label, None)


def test_ablation_leaves_out_each_gain_that_the_machine_has(monkeypatch, capsys):
    from speedrun.compare.collect import leave_one_out

    def stops(targets, *rest, **more):
        assert targets == ["p4", "p4:fused_attention=False", "p4:adam_backend=loop"]
        return Comparison([Entry("p4")], None, "as asked"), Stopped("interrupted", 130)

    monkeypatch.setattr(compare_milestones, "collect", stops)
    monkeypatch.setattr(sys, "argv", ["x", "p4", "--ablate", "--scale", "tiny"])
    with pytest.raises(UserError, match="^interrupted\nthe table holds what had f") as error:
        compare_milestones.main()
    assert error.value.status == 130
    assert capsys.readouterr().out.endswith(
        "off here: bf16=False is what this machine runs anyway\n"
        "off here: compile=False is what this machine runs anyway\n")
    targets, anyway = leave_one_out("p4", scale="tiny")
    assert targets == ["p4", "p4:fused_attention=False", "p4:adam_backend=loop"]
    assert anyway == ["bf16=False", "compile=False"]  # without a GPU
    targets, anyway = leave_one_out("p2", scale="tiny", settings=["fused_attention=False"])
    assert (targets, anyway) == (["p2"], ["bf16=False", "fused_attention=False"])
    for ranks in (1, 2):  # one rank shares with nobody
        targets, anyway = leave_one_out("p6d", scale="tiny", nproc=ranks)
        assert ("sharded=False" in anyway) == (ranks == 1) != ("p6d:sharded=False" in targets)
    with pytest.raises(UserError, match="01_muon declares no gain"):
        leave_one_out("01")


def test_every_option_reaches_the_runs(monkeypatch):
    def given(targets, seeds, out, stream, *, command, **options):
        raise LookupError(targets, [*seeds], out, options)

    monkeypatch.setattr(compare_milestones, "collect", given)
    for words, *expected in (
            ("", [0], "compare", dict(settings=[], scale=None, data=None, steps=None, nproc=None,
                                      start=None, target=None)),
            ("--set a=1 --set b=2 --scale tiny --data d --steps 7 --nproc 3 --from f --out o"
             " --target 3.3 --repeat 2 --seed 5", [5, 6], Path("o"),
             dict(settings=["a=1", "b=2"], scale="tiny", data=Path("d"), steps=7, nproc=3,
                  start=Path("f"), target=3.3))):
        monkeypatch.setattr(sys, "argv", ["x", "01", *words.split()])
        with pytest.raises(LookupError) as error:
            compare_milestones.main()
        assert error.value.args == (["01"], *expected)


def test_pictures_need_no_backend_of_the_users():
    code = (f"import sys; sys.path.insert(0, {str(REPOSITORY / 'tools')!r})\n"
            "from speedrun.compare.plot import _new_figure\n_new_figure((1, 1), 1)")
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"MPLBACKEND": "x"}, check=True)
