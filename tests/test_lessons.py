"""What notebooks use works, and their exercises tell right from wrong.

Run: .venv/bin/python -m pytest tests/test_lessons.py
"""

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

import open_lessons
import run_lessons
from ranks import warm_context
from speedrun.history.manifest import REPOSITORY
from speedrun.site.lessons import make_lesson

LESSONS = REPOSITORY / "lessons"
SOLUTIONS = sorted((LESSONS / "solutions").glob("*.py"))


def load_solutions(path):
    spec = importlib.util.spec_from_file_location(f"solutions_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXERCISES


@pytest.fixture(scope="module")
def lesson():
    sys.path.insert(0, str(LESSONS))
    matplotlib.use("agg")
    import lesson

    return lesson


# The third exercise of a lesson trains, and so do these: by default one is tried, else if asked.
TRAINING = {("02", "1"), ("03", "2"), ("05q", "2"), ("e0", "2")}
exercises = pytest.mark.parametrize("path, number", [
    pytest.param(path, number, id=f"{path.stem}-{number}",
                 marks=pytest.mark.slow if path != SOLUTIONS[-1] and (
                     number == "3" or (path.stem.split("_")[0], number) in TRAINING) else [])
    for path in SOLUTIONS for number in "123"])


@exercises
def test_exercise_tells_right_from_wrong(path, number, lesson, capsys):
    exercise = load_solutions(path)[number]
    name = f"{path.stem.split('_')[0]}.{number}"
    assert not lesson.check(name, ...)
    assert "waits for your answer" in capsys.readouterr().out
    for right in (exercise["solution"], *exercise.get("right", ())):
        assert lesson.check(name, right), f"{right!r} must pass: {capsys.readouterr().out}"
    assert len(exercise["wrong"]) >= 2
    unbounded = () if callable(exercise["solution"]) else (float("nan"), "inf")
    for wrong in (*exercise["wrong"], *unbounded):
        capsys.readouterr()
        assert not lesson.check(name, wrong), f"{wrong!r} must not pass"
        said = capsys.readouterr().out
        assert said.startswith("Not yet: ") and len(said) > 60, said
    assert len(exercise["hints"]) == 4 and len(set(exercise["hints"])) == 4
    lesson.hint(name, 4)
    assert exercise["hints"][3] in capsys.readouterr().out


def test_a_diff_shows_the_reason_unless_told_not_to(lesson, monkeypatch):
    shown = []
    monkeypatch.setattr(lesson, "display", lambda what: shown.append(what.data))
    monkeypatch.setattr(lesson, "whys", lambda m: {"GPT": f"Because of {m.id}."})
    for why in (True, False):
        lesson.show_diff("03e", "04", "GPT", why=why)
    assert shown[0].startswith("**`GPT`**\n\nBecause of 04.\n\n```diff\n")
    assert shown[1].startswith("**`GPT`**\n```diff\n") and "Because" not in shown[1]


def test_a_definition_is_checked_where_it_is_written(lesson, capsys, tmp_path):
    source = 'import lesson\n\n\n@lesson.check("01.1")\ndef step(*given):\n    {}\n'
    for body, said in (("...", "waits for your answer"), ("return 1", "Not yet: "),
                       ("return none", "Not yet: your line `return none` raises NameError: ")):
        file = tmp_path / f"answer_{len(body)}.py"
        file.write_text(source.format(body), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert said in capsys.readouterr().out
        assert module.step.__name__ == "step"
    file = tmp_path / "with_lambdas.py"  # a lambda's source is the statement that holds it
    file.write_text('import lesson\n\nstep = lesson.check("01.1")(\n    lambda *given: none)\n'
                    'step = lambda *given: none\nlesson.check("01.1")(step)\n\n\n'
                    '@lesson.check("01.1")\nclass Step:\n    call = lambda self: ...\n', "utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert [line[:9] for line in capsys.readouterr().out.splitlines()] == ["Not yet: "] * 3


@pytest.mark.parametrize("guess, measured, said", [
    (..., 16, "measured: 16 rows\n"),
    (15, 16, "You guessed 15: close."), (9, 16, "You guessed 9: the right size."),
    (1.3, 548.2, "You guessed 1.3: a surprise."), (-30, -16, "You guessed -30: the right size."),
    (40, 16, "You guessed 40: a surprise."), ("Yes ", "yes", "You guessed Yes : right."),
    ("abc", 16, "Your guess 'abc' is not a finite"), (float("nan"), 1, "guess nan is not a finite"),
    ("no", "yes", "You guessed no: a surprise."), (0.5, 0.50001, "measured: 0.5 rows."),
    (0.2, 0.0, "You guessed 0.2: a surprise."), (0, 0.0, "You guessed 0: right."),
    (256, "512", "You guessed 256: a surprise."), (512.0, "512", "You guessed 512.0: right."),
    (512, "none", "You guessed 512: a surprise."),
])
def test_a_guess_is_scored(guess, measured, said, lesson, capsys, monkeypatch):
    monkeypatch.delenv(lesson.OPENED, raising=False)
    lesson.reveal(guess, measured, "rows")
    assert said in capsys.readouterr().out
    monkeypatch.setenv(lesson.OPENED, "1")
    lesson.reveal(guess, measured, "rows", word="computed")
    said = said.replace("measured:", "computed:").removesuffix("\n")
    assert said in (printed := capsys.readouterr().out)
    assert ("You have not guessed" in printed) == (guess is ...)


def test_an_exercise_or_a_level_that_does_not_exist(lesson, capsys):
    assert not lesson.check("01.9", 1)
    for exercise, level in (("01.9", 1), ("01.1", 0), ("01.1", 9)):
        lesson.hint(exercise, level)
    unknown = "There is no exercise 01.9; this lesson has 01.1, 01.2, 01.3"
    assert capsys.readouterr().out.splitlines() == [
        unknown, unknown, *(f"Hints have levels 1 to 4, not {level}" for level in (0, 9))]


def test_good_guesses_are_counted(lesson, monkeypatch, capsys):
    monkeypatch.setattr(lesson, "_verdicts", [])
    for guess in (16, 40, 12):
        lesson.reveal(guess, 16)
    assert capsys.readouterr().out.splitlines()[-1].endswith("Good so far: 2 of 3")


@pytest.mark.parametrize("gains, said", [
    ([0.03, 0.04, 0.035], "measured: first. You guessed first: right."),
    ([0.03, 0.08, 0.04], "measured: first has the largest mean, but 3 seeds do not show it above"
     " second. So they cannot say which is largest; no guess is graded\n"),
    ([0.02, 0.2, -0.01], "measured: first has the largest mean, but 3 seeds do not show it above"
     " second or above third or to be a gain. So"),
])
def test_a_guess_is_graded_only_where_the_seeds_decide(gains, said, lesson, capsys, monkeypatch):
    monkeypatch.setattr(lesson, "_verdicts", [])
    lesson.reveal_largest("first", {
        "third": [0.01, -0.01, 0.0], "second": [0.02, 0.021, 0.022],
        "first": lesson.torch.tensor(gains, dtype=float)})
    assert capsys.readouterr().out.startswith(said)
    assert bool(lesson._verdicts) == said.startswith("measured: first.")


@pytest.mark.parametrize("half, said", [
    ([2.4, 2.45, 2.5], "measured: 512. You guessed 256: a surprise."),  # a choice has no size
    ([2.2, 2.45, 2.5], "measured: 512 has the lowest mean, but 3 seeds do not show it below 256."),
])
def test_the_lowest_of_losses_is_a_choice(half, said, lesson, capsys, monkeypatch):
    monkeypatch.setattr(lesson, "_verdicts", [])
    lesson.reveal_lowest(256, {256: half, 512: [2.3, 2.3, 2.4], 1024: [2.5, 2.6, 2.7]})
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize("change, parent, said", [
    ([2.0, 2.1, 2.05], [2.1, 2.2, 2.16], "Shown: 14c ends 0.1033 below 14b (by seed 0.1000,"
     " 0.1000, 0.1100; standard error 0.0033)"),
    ([2.1, 2.2, 2.16], [2.0, 2.1, 2.05], "Shown: 14c ends 0.1033 above 14b"),
    ([2.0, 2.2, 2.05], [2.1, 2.1, 2.16], "No difference seen: 14c ends 0.0367 below 14b (by seed"
     " 0.1000, -0.1000, 0.1100; standard error 0.0684). At this spread 3 seeds could show 0.1368"),
    ([2.0, 2.1, 2.0], [2.3, 2.101, 2.001], "Not shown: 14c ends 0.1007 below"),  # one seed did it
    ([2.3, 2.101, 2.001], [2.0, 2.1, 2.0], "Not shown: 14c ends 0.1007 above"),
    ([2.0, 2.1, 2.0], [2.0, 2.1, 2.0], "No difference seen: 14c ends exactly as 14b, in every"),
    ([2.00002, 1.99999, 1.999996], [2, 2, 2], "No difference seen: 14c ends 0.000002 above 14b (by"
     " seed 0.000020, -0.000010, -0.000004; standard error 0.000009). At this spread 3 seeds could"
     " show 0.000018 or more"),
    ([1.3007, 1.3184, 1.3263], [1.3, 1.3, 1.3], "Not shown: 14c ends 0.01513 above 14b (by seed"
     " 0.00070, 0.01840, 0.02630; standard error 0.00757). At this spread 3 seeds could show"
     " 0.01514 or more"),
    ([2.0, 2.1, 2.1], [2.1, 2.2, 2.2], "Shown: 14c ends 0.1000 below 14b (by seed 0.1000, 0.1000,"
     " 0.1000; standard error 0)"),
    ([2.1, 2.1, 2.2], [2.1, 2.2, 2.3], "No difference seen: 14c ends 0.0667 below 14b (by seed"
     " 0.0000, 0.1000, 0.1000; standard error 0.0333). Not all seeds have that sign"),
])
def test_a_verdict_needs_every_seed(change, parent, said, lesson, capsys):
    lesson.verdict(lesson.torch.tensor(change, dtype=float), parent, "14c", "14b")
    assert capsys.readouterr().out.startswith(said)
    if said.startswith("Shown: 14c ends 0.1033 below"):
        lesson.must_end_lower(change, parent, "14c", "14b", "Why.", 0.1)
    for margin in (0, 0.2) if "below" in said and said[0] != "S" else (0.2,):
        with pytest.raises(AssertionError, match=r"14c ends .*Why\.$"):
            lesson.must_end_lower(change, parent, "14c", "14b", "Why.", margin)


def test_a_verdict_on_percentages(lesson, capsys):
    lesson.verdict([7, 0, 0.25], [82.5, 84.125, 81.0625], "the share", "the other", verb="is")
    assert capsys.readouterr().out == ("Shown: the share is 80.1 below the other (by seed 75.5,"
                                       " 84.1, 80.8; standard error 2.5)\n")


def test_clocked_functions_take_turns(lesson, monkeypatch, capsys):
    calls = []
    medians = lesson.clock({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert calls == ["a", "b"] * 4 and medians.keys() == {"a", "b"}
    assert "n = 3" in capsys.readouterr().out
    slow, fast = lesson.clock({"a": lambda: None, "b": lambda: None}, 3), lesson.clock(
        {"a": lambda: None, "b": lambda: None}, 3, shortest=True)
    assert slow.keys() == fast.keys() and "at least" in capsys.readouterr().out
    ticks = iter([0, 9, 10, 11, 20, 23])  # seconds: the first round takes nine
    monkeypatch.setattr(lesson, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert lesson.clock({"a": lambda: None}, rounds=2) == {"a": 2000}


def sum_of_ranks(rank, factor):
    import torch
    import torch.distributed as dist

    total = torch.tensor(factor * rank)
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads()


def fails_on_rank_1(rank):
    if rank == 1:
        raise ValueError("rank 1 has had enough")


def test_work_runs_on_real_ranks(lesson, monkeypatch):
    monkeypatch.setattr(lesson.multiprocessing, "get_context", lambda _: warm_context())  # faster
    assert lesson.on_ranks(3, sum_of_ranks, 10) == [(30, 1)] * 3
    with pytest.raises(ValueError, match="rank 1 has had enough"):
        lesson.on_ranks(2, fails_on_rank_1)


def test_a_lambda_is_an_answer(lesson, capsys):
    lesson.check("13.2")(lambda inputs, rows: None)
    assert capsys.readouterr().out.startswith("Not yet: return a tensor")


def test_a_picture_follows_the_page_and_keeps_its_letters(lesson, monkeypatch):
    shown = []
    monkeypatch.setattr(lesson, "display", lambda svg: shown.append(svg.data))
    lesson.draw(lesson.curves({"loss": [2, 1]}, "A & B", "step", "nats"),
                lesson.cells([[0, 1]], "", "", "", colors={"no": "white", "yes": "orange"}))
    lines, picture = map(ElementTree.fromstring, shown)
    assert lines.find("{*}title").text == "A & B: nats, step" and "mask" not in shown[0]
    texts = [*lines.iter("{http://www.w3.org/2000/svg}text"),
             *picture.iter("{http://www.w3.org/2000/svg}text")]
    sizes = [float(re.search(r"font-size:([\d.]+)px", text.get("style"))[1]) for text in texts]
    assert min(sizes) >= 11 and "A & B" in [text.text for text in texts]
    for width in (float(svg.get("viewBox").split()[2]) for svg in (lines, picture)):
        assert width <= 390 - 40 and f"min-width:{width:g}px" in lines.get("style")
    assert "fill:light-dark(#000000,#e6e6e6)" in lines.get("style")
    assert "light-dark(#ffffff,#171717)" in shown[0] and 'class="paper"' in shown[0]
    images = [*picture.iter("{http://www.w3.org/2000/svg}image")]
    assert [image.get("class") for image in images] == ["flipped"]
    assert "#ffa500" in shown[1] and "light-dark(#ffa500" not in shown[1]  # flipped with it
    assert '<g class="flipped" fill="#000000">' in shown[1]
    again = len(shown)
    lesson.draw(lesson.curves({"loss": [2, 1]}, "A & B", "step", "nats"))
    assert shown[again] == shown[0]  # so that a notebook run again changes where numbers do


def test_no_title_is_cut_and_no_legend_lies_on_a_line(lesson, monkeypatch):
    drawn = []
    monkeypatch.setattr(lesson, "themed_svg", lambda figure, _: drawn.append(figure) or "<svg/>")
    monkeypatch.setattr(lesson, "display", lambda svg: None)
    zigzag = {f"a line with a long name {k}": [k, 9, 0] * 9 for k in range(5)}
    spans = {"row": [(name, 1.0) for name in ("the whole step", "all-reduce", "apply all of it")]}
    lesson.draw(lesson.bars({"a name of 18 letters": 1, "b": 2}, 11 * "word", ""),
                lesson.curves(zigzag, "", "", ""), lesson.timeline(spans, ""),
                lesson.curves({"a": [9, 1, 1, 1], "b": [8, 1, 1, 1]}, "", "", ""))
    named, below, rows, inside = drawn
    for figure in drawn:
        figure.draw_without_rendering()
        for text in [*figure.texts, *figure.legends]:
            box = text.get_window_extent()
            assert 0 <= box.x0 and box.x1 <= figure.bbox.width, text
    assert named.get_suptitle() == 11 * "word" and not named.axes[0].get_title()
    for figure in (below, rows):
        assert figure.legends[0].get_window_extent().y1 <= figure.axes[0].bbox.y0
    assert below.axes[0].bbox.height > 0.9 * inside.axes[0].bbox.height
    assert inside.axes[0].get_legend() and not inside.legends


def test_a_logarithmic_axis_has_at_least_two_numbers(lesson):
    figure, (narrow, wide) = lesson.plt.subplots(2, figsize=(4.7, 7))
    lesson.curves({"a": ([1, 4, 16, 64], [300, 700, 2000, 4000])}, "", "", "", log="xy")(narrow)
    lesson.curves({"a": [3e-3, 2, 4]}, "", "", "", log="y")(wide)
    figure.draw_without_rendering()
    numbers = [[text.get_text() for text in axis.get_ticklabels(which="both")] for axis in
               (narrow.xaxis, narrow.yaxis, wide.yaxis)]
    assert numbers[0] == ["1", "4", "16", "64"] and {"500", "1,000", "2,000"} <= {*numbers[1]}
    assert sum("10" in text for text in numbers[2]) > 2 and "2" not in numbers[2]


def test_a_walk_lists_lessons_and_their_hours(lesson, monkeypatch):
    shown = []
    monkeypatch.setattr(lesson, "display", lambda markdown: shown.append(markdown.data))
    lesson.walk("05d", "13")
    lesson.walk()
    title = "[05d · A mask from tiles, and a smaller model](05d_tile_mask.ipynb)"
    assert f"| ☐ {title} | 30 | 40 |" in shown[0].splitlines()
    assert len(shown[0].splitlines()) == 5 and shown[0].splitlines()[-1].startswith("| together | ")
    assert shown[1].count("☐") == len(SOLUTIONS)


def test_long_names_of_bars_lie(lesson):
    axes = lesson.plt.subplots()[1]
    lesson.bars({"a long name of a bar": 1, "another long name": [2, 3], "c": 2}, "", "loss",
                ylim=(0.5, None))(axes)
    assert [bar.get_width() for bar in axes.patches] == [1, 2.5, 2]
    assert axes.get_xlabel() == "loss" and axes.get_xlim() == (0.5, 3.125)  # a little past 3
    upright = lesson.plt.subplots()[1]
    lesson.bars({"a": 1, "b": [2, 3]}, "", "loss", ylim=(0.5, None))(upright)
    assert upright.get_ylim() == (0.5, 3.125)


def test_panels_show_what_they_get(lesson):
    figure, (lines, bars, cells, spans) = lesson.plt.subplots(1, 4)
    lesson.curves({"one": [1, 2], "runs": ([0, 5], [[1, 3], [3, 5]])}, "", "", "", log="y")(lines)
    one, _thin, _thin_too, mean = lines.get_lines()
    assert list(one.get_ydata()) == [1, 2] and list(mean.get_ydata()) == [2, 4]
    assert list(mean.get_xdata()) == [0, 5] and lines.get_yscale() == "log"
    lesson.bars({"a": [1, 1, 4], "b": 5}, "", "")(bars)
    assert [bar.get_height() for bar in bars.patches] == [2, 5]
    lesson.cells([[0, 1], [2, 0]], "", "", "", numbers=True)(cells)
    assert [text.get_text() for text in cells.texts] == ["0", "1", "2", "0"]
    lesson.timeline({"rank 0": [("work", 3.0), ("wait", 1.0)]}, "")(spans)
    assert [(bar.get_x(), bar.get_width()) for bar in spans.patches[:2]] == [(0, 3), (3, 1)]


def test_a_slider_redraws_where_one_can_move_it(lesson, monkeypatch):
    shown, offered = [], []
    monkeypatch.setattr(lesson, "draw", lambda panel, size: shown.append(panel))
    monkeypatch.delenv(lesson.OPENED, raising=False)
    lesson.slider(lambda value: f"panel of {value}", "depth", range(4), start=2)
    assert shown == ["panel of 2"]
    assert f'"{lesson.OPENED}"' in Path(open_lessons.__file__).read_text(encoding="utf-8")
    monkeypatch.setenv(lesson.OPENED, "1")
    monkeypatch.setattr("ipywidgets.interact", lambda *args, **names: offered.append((args, names)))
    lesson.slider(lambda value: f"panel of {value}", "depth", range(4), start=2)
    (((redraw,), names),) = offered
    assert names["value"].value == 2 and list(names["value"].options) == [0, 1, 2, 3]
    redraw(3)
    assert shown[1:] == ["panel of 3"]


@pytest.mark.parametrize("count, height", [(5, 3.5), (14, 3.5), (65, 11)])
def test_names_of_bars_do_not_overlap(lesson, count, height):
    figure, axes = lesson.plt.subplots(figsize=(4.7, height))
    lesson.bars({f"{number:02}m": 1 for number in range(count)}, "", "")(axes)
    figure.draw_without_rendering()
    upright, flat = ([label.get_window_extent() for label in axis.get_ticklabels()]
                     for axis in (axes.xaxis, axes.yaxis))
    if count == 5:
        assert all(a.x1 + 3 < b.x0 for a, b in zip(upright, upright[1:], strict=False))
    else:
        assert len(flat) == count
        assert all(a.y0 >= b.y1 - 3 for a, b in zip(flat, flat[1:], strict=False))  # 3: descenders


def test_an_answer_that_crashes_is_told_not_raised(lesson, capsys):
    def crashes(*args):
        raise KeyError("head_dim")

    first = SOLUTIONS[0].stem.split("_")[0]
    assert not lesson.check(f"{first}.1", crashes)
    assert "Not yet" in capsys.readouterr().out


def test_missing_checks_are_told_apart_from_a_wrong_answer(lesson, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lesson, "REPOSITORY", tmp_path)
    assert not lesson.check("01.1", 3)
    said = capsys.readouterr().out
    assert said.startswith("The checks of exercise 01.1 were not found") and "Not yet" not in said


def test_show_diff_shows_the_change(lesson, monkeypatch):
    shown = []
    monkeypatch.setattr(lesson, "display", lambda markdown: shown.append(markdown.data))
    lesson.show_diff("02", "03", "Muon", why=False)
    assert len(shown) == 1 and shown[0].startswith("**`Muon`**\n```diff\n")
    assert "+            dist.all_reduce(flat)" in shown[0]
    shown.clear()
    lesson.show_diff("02", "03")
    assert [text.split("`")[1] for text in shown][-1] == "Muon"


def test_milestone_without_tiny_runs_is_told_and_skipped(lesson, tmp_path, monkeypatch, capsys):
    (entry,) = lesson.tiny_entries("01").values()
    assert entry.milestone == "muon" and not capsys.readouterr().out
    runs = lesson.tiny_runs()
    runs.entries = [entry]
    monkeypatch.setattr(lesson, "tiny_runs", lambda: runs)
    axes = lesson.plt.subplots()[1]
    lesson.tiny_curves("00", "01")(axes)
    assert "00_baseline: no tiny runs" in capsys.readouterr().out
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["01_muon"]
    shown = []
    monkeypatch.setattr(lesson, "display", lambda markdown: shown.append(markdown.data))
    lesson.progress_table("01")
    lines = {line.split()[1]: line for line in shown[0].splitlines() if line.startswith("| 0")}
    assert "not measured" in lines["00_baseline"] and "not measured" not in lines["01_muon"]


def test_official_curves_are_the_manifests(lesson):
    axes = lesson.plt.subplots()[1]
    lesson.official_curves("00", "01")(axes)
    lone, curve, _goal = axes.get_lines()
    assert lone.get_marker() == "x" and len(lone.get_xdata()) == 1  # 00 kept no curve
    assert list(curve.get_ydata()) == [loss for _, loss in lesson.MANIFEST.get("01").curve]


def test_train_here_returns_the_log_and_prints_nothing(lesson, monkeypatch, capsys):
    sizes = dict(lesson.MANIFEST.overrides(lesson.MANIFEST.get("01"), "tiny"), model_dim=32,
                 train_steps=2, val_tokens=4096, total_batch_size=1024, kernel_warmup_steps=0)
    log = lesson.train_here(lesson.snapshot("01"), **sizes)
    assert [step for step, _ in log.val_curve] == [0, 2] and not capsys.readouterr().out
    calls = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(lesson.gc, name, lambda name=name: calls.append(name))
    with pytest.raises(ZeroDivisionError):
        lesson.train_here(SimpleNamespace(Hyperparameters=dict, main=lambda args: 1 / 0))
    assert calls == ["freeze", "unfreeze"]


def test_train_is_cached(lesson, tmp_path, monkeypatch):
    """Runs stand still here: that a plan trains is for test_comparison.py and others."""
    plans = []

    def run(plan, _):
        plans.append(plan)
        plan.out.mkdir()
        (plan.out / "log.txt").write_text(
            f"step:2/2 val_loss:{len(plans)} train_time:9ms step_avg:4.50ms\n", "utf-8")
        (plan.out / "summary.json").touch()

    monkeypatch.setattr(lesson, "CACHE", tmp_path)
    monkeypatch.setattr(lesson, "run", run)
    sizes = dict(train_steps=2, val_tokens=4096, kernel_warmup_steps=0)
    curves = [lesson.train("01", **sizes).val_curve for _ in range(2)]
    assert curves == [[(2, 1.0)]] * 2 and len(plans) == 1
    assert (plans[0].script.milestone.id, plans[0].scale) == ("01", "tiny")
    assert sizes.items() <= plans[0].hyperparameters.items()
    (plans[0].out / "summary.json").unlink()  # as if it had been cut short
    assert lesson.train("01", **sizes).val_curve == [(2, 2.0)]
    assert lesson.train("01", **sizes, seed=1).val_curve == [(2, 3.0)]  # another run
    assert plans[1].out == plans[0].out != plans[2].out
    assert len([*tmp_path.glob("[!.]*")]) == 2  # beside locks
    overrides = lesson.MANIFEST.overrides
    monkeypatch.setattr(type(lesson.MANIFEST), "overrides",
                        lambda _, *of: overrides(*of) | {"muon_lr": 1e-3})
    assert lesson.train("01", **sizes).val_curve == [(2, 4.0)]  # at other tiny values


# ---- run_lessons.py ----

def test_pieces_of_text_are_joined_up_to_the_next_picture():
    from nbformat import v4

    outputs = [v4.new_output("stream", text="a"), v4.new_output("stream", text="b"),
               v4.new_output("display_data"), v4.new_output("stream", text="c")]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(outputs=outputs)])
    run_lessons.clean(notebook)
    assert [output.get("text") for output in notebook.cells[0].outputs] == ["ab", None, "c"]



@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of notebooks in the place of lessons/, and a function that runs the command."""
    monkeypatch.setattr(run_lessons, "LESSONS", tmp_path)

    def write(name, *sources):
        notebook = nbformat.v4.new_notebook()
        notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"},
                             "somebody": "else"}
        notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
        notebook.cells[0].metadata.update(collapsed=True, tags=["setup"])
        nbformat.write(notebook, tmp_path / name)
        return tmp_path / name

    def run(*names):
        monkeypatch.setattr(sys, "argv", ["run_lessons.py", *names])
        return run_lessons.main()

    return write, run


def test_outputs_are_kept_without_traces(folder, capsys):
    write, run = folder
    path = write("01_good.ipynb", "import sys\nprint(1, flush=True)\nprint(2, flush=True)\n"
                 "print('warning', file=sys.stderr)", "import os\nos.listdir()")
    for name in ("02.ipynb", "03_last.ipynb"):
        write(name, "1")
    assert run("01", "03") == 0
    assert re.fullmatch(r"01_good.ipynb \d+ s\n03_last.ipynb \d+ s\n", capsys.readouterr().out)
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in notebook.cells] == [1, 2]
    (printed, warned), (value,) = (cell.outputs for cell in notebook.cells)
    assert (printed.text, warned.text) == ("1\n2\n", "warning\n")
    assert "01_good.ipynb" in value.data["text/plain"], "cells run in the notebooks' folder"
    assert set(notebook.metadata) == {"kernelspec"}
    assert notebook.cells[0].metadata == {"tags": ["setup"]} and not notebook.cells[1].metadata


def test_a_notebook_that_fails_is_one_line_and_keeps_its_outputs(folder, capsys):
    write, run = folder
    faults = {
        "01_bad.ipynb": "ZeroDivisionError: division by zero", "02_dead.ipynb": "Kernel died",
        **dict.fromkeys(("03_cut.ipynb", "04_empty.ipynb", "05_list.ipynb"),
                        "it is not a notebook; git restore it, or remove it if it is yours"),
        "06_other.ipynb": "its kernel julia is not installed here; git restore it"}
    cells = ["1 / 0", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", *"1111"]
    paths = [write(name, cell) for name, cell in zip(faults, cells, strict=True)]
    for path, text in zip(paths[2:5], ("{", "{}", "[]"), strict=True):
        path.write_text(text, encoding="utf-8")
    paths[5].write_text(paths[5].read_text("utf-8").replace('"python3"', '"julia"'), "utf-8")
    before = [path.read_bytes() for path in paths]
    good = write("07_good.ipynb", "1")
    good.write_text(good.read_text("utf-8").replace('"kernelspec"', '"no_spec"'), "utf-8")
    kinds = ("01", "02"), ("03", "04", "05"), ("06", "07")  # each fails by itself
    assert [run(*names) for names in kinds] == [1, 1, 1]
    assert [path.read_bytes() for path in paths] == before
    seen = capsys.readouterr()
    for line, (name, said) in zip(seen.err.splitlines(), faults.items(), strict=True):
        assert line.startswith(f"{name} failed: {said}")
    assert seen.out.startswith("07_good.ipynb ")


def test_a_notebook_is_written_whole_and_not_over_an_edit(folder, monkeypatch, capsys):
    write, run = folder
    path = write("01.ipynb", "1")
    monkeypatch.setattr(run_lessons, "execute", lambda client: None)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(run_lessons.UserError, match="01.ipynb cannot be written: full"):
            run()
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1

    def late(client):
        raise CellTimeoutError(f"after {client.timeout} seconds\nthe cell")

    monkeypatch.setattr(run_lessons, "execute", late)
    assert run() == 1 and path.read_bytes() == before
    assert capsys.readouterr().err == "01.ipynb failed: after 180 seconds\n"
    edited = before + b"\n"
    monkeypatch.setattr(run_lessons, "execute", lambda client: path.write_bytes(edited))
    assert run() == 1 and path.read_bytes() == edited
    assert capsys.readouterr().err == (
        "01.ipynb failed: it was changed while it ran; run it again\n")


@pytest.mark.skipif(os.name == "nt", reason="has no signals")
@pytest.mark.parametrize("signum, text", [
    (signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")])
@pytest.mark.parametrize("when", ["a start", "a cell"])
def test_a_signal_ends_all_notebooks(folder, monkeypatch, when, signum, text):
    write, run = folder
    start = NotebookClient.async_start_new_kernel_client

    async def interrupted(client):
        signal.raise_signal(signum)
        return await start(client)

    if when == "a start":
        monkeypatch.setattr(NotebookClient, "async_start_new_kernel_client", interrupted)
    write("01.ipynb", f"import os, time; os.kill(os.getppid(), {signum:d}); time.sleep(100)")
    second = write("02.ipynb", "open('ran', 'w')")
    with pytest.raises(run_lessons.Stopped, match=f"^{text}$") as ended:
        run()
    assert ended.value.status == 128 + signum and not second.with_name("ran").exists()


def test_an_unknown_notebook_is_one_line(folder):
    for name, said in (("77", "77"), ("", "an empty name")):
        with pytest.raises(run_lessons.UserError, match=f"^no notebook in .* begins with {said}$"):
            folder[1](name)


# ---- open_lessons.py ----


@pytest.fixture
def copies(tmp_path):
    """Two notebooks with outputs, their copies, and a function that copies them again."""
    lessons, mine = tmp_path / "lessons", tmp_path / "mine"
    lessons.mkdir()

    def write(name, source):
        notebook = nbformat.v4.new_notebook()
        answer = nbformat.v4.new_output("stream", text="the answer")
        notebook.cells = [nbformat.v4.new_markdown_cell("# A"),
                          nbformat.v4.new_code_cell(source, outputs=[answer], execution_count=1,
                                                    metadata={"tags": ["setup"]})]
        nbformat.write(notebook, lessons / name)

    write("00_a.ipynb", "1")
    write("01_b.ipynb", "1")
    assert open_lessons.copy_lessons(lessons, mine) == []
    return write, mine, lambda: open_lessons.copy_lessons(lessons, mine)


def test_copies_have_no_outputs(copies):
    _write, mine, _copy = copies
    assert sorted(path.name for path in mine.iterdir()) == ["00_a.ipynb", "01_b.ipynb"]
    notebook = nbformat.read(mine / "00_a.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[1].source == "1"
    assert (notebook.cells[1].outputs, notebook.cells[1].execution_count) == ([], None)
    assert notebook.cells[1].metadata["jupyter"] == {"source_hidden": True}  # folded away
    html = make_lesson(mine.parent / "lessons" / "00_a.ipynb", lambda link: link).html
    assert '<details class="setup"><summary>Set-up code</summary><div class="input">' in html
    assert html.index("</details>") < html.index("the answer")


@pytest.mark.parametrize("change", ["source", "words", "output", "their own notebook", "no JSON"])
def test_a_copy_that_the_reader_changed_is_never_overwritten(copies, change):
    write, mine, copy = copies
    file = mine / "00_a.ipynb"
    notebook = nbformat.read(file, as_version=4)
    if change == "source":
        notebook.cells[1].source = "guess = 3"
    elif change == "words":
        notebook.cells[0].source = "# A, as I see it"
    elif change == "output":
        notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="mine")]
    else:
        notebook = nbformat.v4.new_notebook()
    nbformat.write(notebook, file)
    if change == "no JSON":
        file.write_text("{", encoding="utf-8")
    before = file.read_bytes()
    if change in ("source", "words", "output"):
        assert copy() == []  # the lesson is not newer
    write("00_a.ipynb", "2")
    write("01_b.ipynb", "2")
    assert copy() == ["00_a.ipynb"] and file.read_bytes() == before
    assert json.loads((mine / "01_b.ipynb").read_text())["cells"][1]["source"] == ["2"]


@pytest.mark.parametrize("content", [b'{"cells": [', b"[]", b"{}", b"\xe9"])
def test_a_lesson_that_is_damaged_leaves_nothing(tmp_path, copies, content):
    lessons, mine = tmp_path / "lessons", tmp_path / "new"
    (lessons / "01_b.ipynb").write_bytes(content)
    with pytest.raises(open_lessons.UserError, match="01_b.ipynb is not .*; git restore it, or re"):
        open_lessons.copy_lessons(lessons, mine)
    assert not mine.exists()
    (lessons / "01_b.ipynb").unlink()
    mine.symlink_to(mine)
    with pytest.raises(open_lessons.UserError, match="is a file or a broken link, not a folder"):
        open_lessons.copy_lessons(lessons, mine)


def test_jupyterlab_opens_the_first_notebook(monkeypatch, capsys):
    copied, started = [], []
    monkeypatch.setattr(open_lessons, "copy_lessons", lambda *of: copied.append(of) or ["01.ipynb"])
    monkeypatch.setattr(sys, "argv", ["open_lessons.py"])
    monkeypatch.setitem(sys.modules, "jupyterlab", SimpleNamespace())
    monkeypatch.setenv("LESSONS_OPENED", "")
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    open_lessons.main()
    assert copied == [(LESSONS, REPOSITORY / "my_lessons")]
    assert started == [(sys.executable, [
        sys.executable, "-m", "jupyter", "lab", "--allow-root",
        f"--ServerApp.root_dir={REPOSITORY}",
        "--LabApp.default_url=/lab/tree/my_lessons/start_here.ipynb"])]
    assert os.environ["LESSONS_OPENED"] == "1" and capsys.readouterr().out == (
        "01.ipynb: your copy is kept, but the lesson is newer; rename yours to get it\n"
        "Open the address below that ends in start_here.ipynb?token=...\n")


def test_git_ignores_the_copies():
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"{open_lessons.COPIES.name}/" in ignored
    assert open_lessons.COPIES.parent == open_lessons.LESSONS.parent  # so relative links still hold
