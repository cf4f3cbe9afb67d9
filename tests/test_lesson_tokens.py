"""Lessons draw losses over the tokens that were read, also where the batch grows.

Run: .venv/bin/python -m pytest tests/test_lesson_tokens.py
"""

import sys

import matplotlib
import pytest

from speedrun.compare.results import Entry, Run
from speedrun.history.manifest import REPOSITORY


@pytest.fixture
def lesson():
    sys.path.insert(0, str(REPOSITORY / "lessons"))
    matplotlib.use("agg")
    import lesson

    return lesson


@pytest.mark.parametrize("id, billion", [("10c", 0.583_270_400), ("10d", 0.571_342_848)])
def test_official_curves_end_at_the_runs_tokens(lesson, id, billion):
    axes = lesson.plt.subplots()[1]
    lesson.official_curves(id)(axes)
    tokens = axes.get_lines()[0].get_xdata()
    assert tokens[0] == 0 and tokens[-1] == pytest.approx(billion)


def test_tiny_curves_count_the_tokens_of_a_growing_batch(lesson, monkeypatch):
    run = Run("log.txt", 7, [(0, 5.0), (2, 4.0), (7, 3.0)], [])
    growing = dict(scheduled_steps=6, second_stage_peak=1.51, third_stage_peak=1.93)
    entry = Entry("a run", tokens_per_step=1_000_000, batches=growing, runs=[run])
    monkeypatch.setattr(lesson, "tiny_entries", lambda *ids: {"10d": entry})
    axes = lesson.plt.subplots()[1]
    lesson.tiny_curves("10d")(axes)
    for line in axes.get_lines():  # of the run, and of the mean
        assert list(line.get_xdata()) == [0, 2, 2 * 1 + 2 * 2 + 3 * 3]
