"""A diff tells the change by block and by structure, in every view, and never hides a line.

Run: .venv/bin/python -m pytest tests/test_diff_milestones.py
"""

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import diff_milestones
from snapshots import MILESTONES
from speedrun.base import cli
from speedrun.base.errors import Stopped, UserError
from speedrun.diff import facts, terminal
from speedrun.diff import html as diff_html
from speedrun.diff.align import (
    ADDED,
    CHANGED,
    FOLDED,
    INDENTED,
    SAME,
    Line,
    Row,
    align,
    counts,
    folded_line,
    mark_moved,
    passages,
)
from speedrun.diff.arrange import arrange
from speedrun.diff.difference import find_difference
from speedrun.diff.facts import (
    changed_hyperparameters,
    changed_values,
    gained,
    gained_briefly,
    ideas_between,
    not_comparable,
    read_side,
    summary_line,
)
from speedrun.diff.origin import Owners, block_life
from speedrun.diff.structure import CODE, FORMATTING, classify, methods
from speedrun.diff.terminal import make_console, print_arranged, print_changes
from speedrun.history.blocks import FREE, Block, split_blocks
from speedrun.history.manifest import REPOSITORY, load_manifest

CHILDREN = [milestone for milestone in MILESTONES if milestone.parent]

FILE = '''"""Card."""

import os

# ---------- Optimizer ----------

LIMIT = 3


def first(x):
    """Adds one."""
    # why
    y = x + 1
    return max(y, LIMIT) + os.getpid() + sum(range(x))


def second(values):
    total = 0
    for value in values:
        total += value
    return total


# ---------- Model ----------


class Pair:
    """Two numbers."""

    width: int = 2

    def left(self):
        return self.a

    # The other one.
    def right(self):
        return self.b * 2

    def both(self):
        for value in (self.a, self.b):
            print(value)
'''
PROPERTY = '''class Pair:
    @property
    def x(self):
        return self.y

    @x.setter
    def x(self, value):
        self.y = value
'''
FIRST = FILE[FILE.index("def first") : FILE.index("def second")]
SECOND = FILE[FILE.index("def second") : FILE.index("# ---------- Model")]


def changes(new, old=FILE):
    """{block: its Change}"""
    comparison = find_difference(old, new)
    assert comparison.refused is None
    return {change.name: change for change in comparison.changes}


def replaced(old, new):
    """The file with one piece of text replaced."""
    assert FILE.count(old) == 1
    return FILE.replace(old, new)


def marked(change, but=SAME):
    """The rows that are not the same on both sides, as `-old` and `+new`; but: nor of this mark."""
    return [mark + line.text for row in change.rows if row.mark not in (SAME, but)
            for mark, line in (("-", row.old), ("+", row.new)) if line]


# ---- structure, not line noise ----


def test_equal_files_have_no_change():
    comparison = find_difference(FILE, FILE)
    assert comparison.changes == () and len(comparison.unchanged) == len(split_blocks(FILE))


def test_moved_function_is_moved():
    (change,) = changes(FILE.replace(SECOND, "").replace(FIRST, SECOND + FIRST)).values()
    assert (change.name, change.words, change.rows) == ("second", ("moved",), ())
    assert terminal._briefly(change) == "second (moved)"


def test_blocks_of_other_names_are_added_and_removed():
    found = changes(FILE.replace("second", "add_up"))
    assert [(c.name, c.words) for c in found.values()] == [
        ("second", ("removed",)), ("add_up", ("added",))]
    assert counts(found["add_up"].rows)[1] == counts(found["second"].rows)[0] == 0


def test_reading_order_has_removed_blocks_where_they_stood():
    new = replaced("LIMIT = 3\n", "").replace(SECOND, "").replace("width: int = 2", "width = 2")
    assert list(changes(new)) == ["LIMIT", "second", "Pair"]


@pytest.mark.parametrize("old, new", [
    ("    return max(y, LIMIT) + os", "    return max(\n        y,\n        LIMIT,\n    ) + os"),
    ("# The other one.\n    def right", "# The other one.\n\n    def right"),
])
def test_layout_alone_is_formatting_only(old, new):
    (change,) = changes(replaced(old, new)).values()
    assert (change.words, change.rows) == (("formatting only",), ())


@pytest.mark.parametrize("old, new, word", [
    ("    # why\n    y = x + 1\n", "    y = x + 1\n    # why\n", "comments only"),
    ('    """Adds one."""\n', "", "docstring only"),
    ('Adds one."""\n    # why', 'Adds 1."""\n    # wherefore', "comments and docstring only"),
    ("# The other one.", "# Another.", "comments only"),
])
def test_words_about_the_code_are_told_as_such(old, new, word):
    (change,) = changes(replaced(old, new)).values()
    assert change.words == (word,)
    assert marked(change)


def test_code_is_never_called_words():
    for old, new in (("total += value", 'total += "value"'),
                     ("    return total", "        return total"), (LEFT, ""),
                     ("class Pair:", "class Pair:\n    def none(self):\n        pass\n")):
        (change,) = changes(replaced(old, new)).values()
        assert change.words == () and marked(change)
    assert classify("class A:", "class A(B):") == {CODE}  # a head by itself is no statement
    note = "# at the margin\n    def f(self):\n        return 1\n"
    assert classify(note, note.replace("1", "2")) == {CODE}
    assert classify(note, note.replace("1\n", "1\n\n")) == {FORMATTING}
    text = Block("text", 'TEXT = """\nclass A:\n"""', 1)
    assert methods(text) == (Block("", text.text, 1),)


def test_changed_constant_is_marked_in_its_line():
    (change,) = changes(replaced("LIMIT = 3", "LIMIT = 3.5e-4")).values()
    (row,) = change.rows
    assert row.mark == CHANGED
    assert [row.old.text[s:e] for s, e in row.old.spans] == ["3"]
    assert [row.new.text[s:e] for s, e in row.new.spans] == ["3.5e-4"]


def test_a_comment_does_not_make_lines_alike():
    note = "  # the steps of a run that is short"
    new = [Line(1, f"for x in y:{note}"), Line(2, "limit = 4")]
    rows = align([Line(1, f"limit = 3{note}")], new)
    assert [row.mark for row in rows] == [ADDED, CHANGED]


def test_added_decorator_is_one_line():
    (change,) = changes(replaced("def second", "@torch.no_grad()\ndef second")).values()
    assert marked(change) == ["+@torch.no_grad()"]
    (change,) = changes(replaced("    # The other", "    @property\n    # The other")).values()
    assert marked(change) == ["+    @property"]


LEFT = "    def left(self):\n        return self.a\n\n"


def test_reordered_methods_are_told():
    (change,) = changes(replaced(LEFT, "") + "\n" + LEFT.rstrip("\n") + "\n").values()
    assert change.words == ("methods reordered: left",)
    assert marked(change) == []
    new = replaced(LEFT, "").replace("* 2", "* 3") + "\n" + LEFT.rstrip("\n") + "\n"
    (change,) = changes(new).values()
    assert change.words == ("methods reordered: left",)
    assert marked(change) == ["-        return self.b * 2", "+        return self.b * 3"]


def test_lines_put_below_a_condition_are_re_indented():
    body = "    total = 0\n    for value in values:\n        total += value\n"
    new = replaced(body, "    if values:\n" + re.sub("^", "    ", body, flags=re.M).rstrip(" "))
    (change,) = changes(new).values()
    assert counts(change.rows) == (1, 0, 3)
    assert [row.new.text for row in change.rows if row.mark == INDENTED][0] == "        total = 0"
    lines = [f"x{i} = {i}" for i in range(250)]  # too many to be looked at in pairs
    old, new = "\n  ".join(["def f():", *lines]), "\n    ".join(["def f():\n  if 1:", *lines])
    (change,) = changes(new, old).values()
    assert counts(change.rows) == (1, 0, 250)


def test_long_runs_are_folded():
    lines = [f"    x = {i}" for i in range(30)]
    old = "def f(x):\n" + "\n".join(lines)
    (change,) = changes(old.replace("x = 15", "y = 15"), old).values()
    folded = [rows for kind, rows in passages(change.rows, context=2) if kind == FOLDED]
    assert [len(rows) for rows in folded] == [14, 12]
    body = "\n".join(f"    {line}" for line in lines)
    (change,) = changes(f"def f(x):\n    if x:\n{body}", old).values()
    (rows,) = [rows for kind, rows in passages(change.rows, context=2) if kind == FOLDED]
    assert folded_line(rows) == "⋯ 24 lines re-indented"


@pytest.mark.parametrize("marks, kinds", [
    ("-       +", "~       ~"), ("~        ~", "~   ⋯⋯   ~"), ("      ~>", "⋯⋯⋯   ~>"),
    (" >>>>>>>>>> ", " >>>>⋯⋯>>>> "), (">>>>>>>>>>", ">>>>⋯⋯>>>>"), ("+>>>>>>>>-", "~>>>>>>>>~"),
])
def test_lines_further_than_three_from_a_change_are_folded(marks, kinds):
    rows = [Row(mark, Line(1, "x"), Line(1, "x")) for mark in marks]
    assert "".join(kind * len(group) for kind, group in passages(rows)) == kinds


@pytest.mark.parametrize("old, new, rows", [
    ("lr = 3 * warm", "lr = 3.5e-4 + x * warm", ["~lr = [3] * warm|lr = [3.5e-4 + x] * warm"]),
    ("f(x)", "f(x, y)", ["~f(x)|f(x[, y])"]), ("f(x, y)", "f(x)", ["~f(x[, y])|f(x)"]),
    ("a b", "a c", ["~a [b]|a [c]"]), ("a b c d", "a b x y z", ["~a b c d|a b x y z"]),
    ("a b c d", "a b c x\na b c d e", ["+|a b c x", "~a b c d|a b c d [e]"]),
    ("a 1\n)", "a 2\n  )", ["~a [1]|a [2]", ">)|  )"]),
    ("a 1\na 2", "a 3\na 4\nb", ["~a [1]|a [3]", "~a [2]|a [4]", "+|b"]),
    ("a 1\na 2\na 5", "a 3\na 4\nb", ["~a 1|a 3", "~a 2|a 4", "~a 5|b"]),  # too many to look at
])
def test_words_that_changed_in_lines_that_are_alike(old, new, rows, monkeypatch):
    def shown(line):
        text = line.text if line else ""
        for start, end in reversed(line.spans if line else ()):
            text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
        return text

    monkeypatch.setattr("speedrun.diff.align.MOST_PAIRS", 6)
    found = align(*([Line(n, line) for n, line in enumerate(text.split("\n"), start=1)]
                    for text in (old, new)))
    assert [f"{row.mark}{shown(row.old)}|{shown(row.new)}" for row in found] == rows


# ---- lines that moved ----


@pytest.mark.parametrize("gone, came, moved", [
    ({1: "x" * 20}, {9: "    " + "x" * 20}, ([1], [9])),
    ({1: "x" * 19 + " = ()"}, {9: "x" * 19 + " = ()"}, ([], [])),
    ({1: "x" * 10, 2: "y" * 10}, {8: "x" * 10, 9: "y" * 10}, ([1, 2], [8, 9])),
    ({1: "x" * 10, 3: "y" * 10}, {8: "x" * 10, 9: "y" * 10}, ([], [])),
    ({1: "x" * 10, 2: "y" * 10}, {7: "x" * 10, 9: "y" * 10}, ([], [])),
    ({1: "x" * 20, 3: "x" * 20}, {9: "x" * 20}, ([1], [9])),
    ({1: "x" * 20}, {7: "x" * 20, 9: "x" * 20}, ([1], [7])),
    ({1: "x" * 20, 3: "y" * 20}, {7: "x" * 20, 9: "y" * 20}, ([1, 3], [7, 9])),
])
def test_a_run_of_twenty_letters_and_digits_counts_as_moved(gone, came, moved):
    old, new = mark_moved([
        [Row(CHANGED, Line(*line, ((0, 2),)), Line(50, "z")) for line in gone.items()],
        [Row(ADDED, None, Line(*line)) for line in came.items()]])
    assert all((row.old.spans == ()) == row.old.moved for row in old)
    assert ([row.old.number for row in old if row.old.moved],
            [row.new.number for row in new if row.new.moved]) == moved


LOOP = "    for value in values:\n        total += value\n    return total"


def moved_lines(found):
    """The texts of the lines that moved away, and of those that moved here."""
    rows = [row for change in found.values() for row in change.rows]
    return ([row.old.text for row in rows if row.old and row.old.moved],
            [row.new.text for row in rows if row.new and row.new.moved])


def test_lines_that_only_moved_are_marked_on_both_sides():
    new = replaced(LOOP, "    return third(values, total)").replace(
        "# ---------- Model", f"def third(values, total):\n{LOOP}\n\n\n# ---------- Model")
    found = changes(new)
    assert moved_lines(found) == (LOOP.split("\n"),) * 2
    assert found["third"].fate == "added, +4, 3 of them moved"
    indented = changes(new.replace(LOOP, "    if 1:\n" + re.sub("^", "    ", LOOP, flags=re.M)))
    assert [line.strip() for line in moved_lines(indented)[1]] == [
        line.strip() for line in LOOP.split("\n")]
    stream = io.StringIO()
    print_changes(make_console(stream), find_difference(FILE, new))
    away, _, here = stream.getvalue().partition("── third")
    assert "\n«     return total\n" in away and "\n»     return total\n" in here
    for name, look, line in ("second", "l old went", "«"), ("third", "r new went", "»"):
        cells = [cell for _, cells, _ in diff_html.passages_of(found[name]) for cell in cells]
        assert [cell[2] for cell in cells if cell[0] == look] == [line] * 3
    assert "\n+     return third(" in stream.getvalue() and "\n- " not in stream.getvalue()


def test_a_line_that_moved_to_a_block_that_is_not_shown_is_removed():
    old, new = read_side("13").text, read_side("13a").text
    whole = {change.name: change for change in find_difference(old, new).changes}
    (alone,) = find_difference(old, new).only(["GPT"]).changes
    assert "moved" in whole["GPT"].fate and "moved" not in alone.fate
    assert counts(alone.rows) == counts(whole["GPT"].rows)


def test_a_short_line_that_occurs_elsewhere_has_not_moved():
    new = replaced("    total = 0\n", "").replace("    # why\n", "    # why\n    total = 0\n")
    assert moved_lines(changes(new)) == ([], [])  # too few letters to be more than chance
    assert moved_lines(changes(replaced("y = x + 1", "y = x + 2"))) == ([], [])


def test_a_moved_line_of_a_milestone_is_seen():
    comparison = find_difference(read_side("10f").text, read_side("11").text)
    fates = {change.name: change.fate for change in find_difference(
        read_side("13").text, read_side("13a").text).changes}
    assert fates["ValueEmbeds"].endswith("2 of them moved") and comparison.changes


# ---- order, reasons and owners ----


def arranged(a, b, names=()):
    sides = read_side(a), read_side(b)
    return arrange(*sides, find_difference(*(side.text for side in sides)).only(names))


def test_the_ideas_block_comes_first_and_retunes_last():
    for milestone in CHILDREN[::5]:
        found = arranged(milestone.parent, milestone.id)
        assert found.changes[0].name == milestone.shows
        places = [c.new.line for c in found.changes[1:] if c.new]
        assert places == sorted(places)
        names = [c.name for c in found.last]
        assert {"card", "Hyperparameters"} & {c.name for c in found.changes} <= {milestone.shows}
        assert not names or names[-1] == "card"
    comparison = find_difference(read_side("03").text, read_side("04").text)
    assert {c.name for c in arranged("03", "04").all} == {c.name for c in comparison.changes}
    assert [c.name for c in arranged("03", "04").changes][:2] == ["muon_momentum", "Linear"]


@pytest.fixture
def reasons(monkeypatch):
    monkeypatch.setattr("speedrun.diff.arrange.whys", lambda m: {
        "GPT": f"Because of {m.id}, which is a reason of so many words that it takes two lines in a"
        " terminal, and a third word or two."})


@pytest.mark.parametrize("width, asked, shown", [(80, True, True), (120, False, False)])
def test_reasons_stand_below_the_blocks_name(width, asked, shown, reasons):
    stream = io.StringIO()
    console = Console(file=stream, width=width, soft_wrap=True, highlight=False, markup=False)
    print_arranged(console, arranged("03e", "04"), reasons=asked)
    lines = stream.getvalue().split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("── GPT"))
    assert lines[at + 1].startswith("  │ Because of 04, which") is shown
    assert not shown or (lines[at + 2].startswith("  │ ") and max(map(len, lines[at + 1 : at + 3]))
                         <= min(width, 100))


def test_distant_reasons_are_those_of_few_owners(reasons):
    assert arranged("03", "04").whys["Muon"] == []  # 03a's, which gives none
    assert "GPT" not in arranged("03", "04").whys  # five of them
    assert "GPT" not in arranged("03a", "03e").whys  # three
    assert [id for id, _ in arranged("03c", "03e").whys["GPT"]] == ["03d", "03e"]


def test_words_of_a_program_have_the_colours_of_their_kinds():
    for line, colours in (("@cache", "nnnnnn"), ("def f(x):  # why", "kkk n      ccccc"),
                          ("return x is not 12 + f'a'", "kkkkkk   kk kkk mm   ssss"),
                          ("class A(B): pass", "kkkkk n     kkkk")):
        assert diff_html._colours(line).rstrip() == colours
    lines = Line(1, "y = '<\x1b' + 12", ((4, 8), (11, 13))), Line(2, "not")
    assert diff_html.coloured(lines) == [
        'y = <mark><span class="s">&#39;&lt;␛&#39;</span></mark> + '
        '<mark><span class="m">12</span></mark>', '<span class="k">not</span>']


def test_a_reason_for_hyperparameters_stands_below_their_table(monkeypatch):
    for module in ("arrange", "terminal"):
        monkeypatch.setattr(f"speedrun.diff.{module}.whys", lambda m: {"Hyperparameters": "Tuned."})
    shown = diff("04").stdout
    assert shown.count("Tuned.") == 1
    assert re.search(r"muon_lr .*\n(  \w.*\n)*  │ Tuned.\n\nblocks: ", shown)
    assert "Tuned." not in diff("04", "--no-why").stdout + diff("04", "03e").stdout
    for parent, child in (("03e", "04"), ("05k", "05l")):  # 05l shows its idea in this block
        old, new = read_side(parent), read_side(child)
        page = diff_html.make_page(old, new, find_difference(old.text, new.text))
        assert page.count("Tuned.") == 1 and '</table>\n<p class="why">Tuned.</p>' in page


def test_a_reason_names_its_milestone_once(reasons):
    stream = io.StringIO()
    console = Console(file=stream, width=100, soft_wrap=True, highlight=False, markup=False)
    print_arranged(console, arranged("03b", "03d"))
    text = stream.getvalue()
    one = text[text.index("── GPT") :].split("\n\n")[0]
    assert "  │ 03d: Because of 03d" in one and "  by 03d" not in one
    print_arranged(console, arranged("03c", "03e"))
    text = stream.getvalue()
    assert "\n  by 03d, 03e\n" in text[text.rindex("── GPT") :]  # a hunk is both's
    print_arranged(console, arranged("03", "04"))
    text = stream.getvalue()[len(text) :]
    assert "  reasons: --steps --blocks GPT\n" in text[text.index("── GPT") :]
    assert "--blocks card" not in text and "--blocks Muon\n" not in text  # 03a alone changed it


def test_no_formula_is_split():
    words = "a bound of 0.5 / sqrt(in) or 2 sigmoid(0) = 1 or +-b"
    for width in range(24, 60):
        stream = io.StringIO()
        console = Console(file=stream, width=width, soft_wrap=True, highlight=False, markup=False)
        terminal._print_wrapped(console, words)
        text = stream.getvalue()
        assert " ".join(text.split()) == words
        assert "0.5 / sqrt(in)" in text and "2 sigmoid(0) = 1" in text


def test_a_spilled_line_goes_on_indented_on_a_terminal():
    new = replaced("    y = x + 1", "    y = x + 1  # " + "long " * 20)
    for is_terminal in (True, False):
        stream = io.StringIO()
        print_changes(Console(file=stream, force_terminal=is_terminal, width=60, soft_wrap=True,
                              color_system=None), find_difference(FILE, new))
        at = stream.getvalue().index("+     y = x")
        first, second, *_ = stream.getvalue()[at:].split("\n")
        assert (first.rstrip() == "+     y = x + 1  # " + ("long " * 20).rstrip()) != is_terminal
        assert (second.startswith("+" + " " * 11 + "↪ long") and len(second) <= 60
                and 55 < len(first) <= 60) is is_terminal  # no word more would have found room


def test_retunes_are_folded_on_a_terminal_only():
    def printed(a, b, is_terminal, names=(), **options):
        console = Console(file=(stream := io.StringIO()), force_terminal=is_terminal, width=90,
                          soft_wrap=True, color_system=None)
        print_arranged(console, arranged(a, b, names), **options)
        return stream.getvalue()

    for is_terminal in (True, False):
        text = printed("03e", "04", is_terminal)
        assert ("not shown: Hyperparameters (+6 -6), card (+5 -5)" in text) is is_terminal
        assert ("── Hyperparameters" in text) is not is_terminal
        assert not is_terminal or "--blocks Hyperparameters card shows them" in text
    text = printed("05h", "05i", True)
    assert re.search(r"not shown: Hyperparameters \(\S+ \S+\), heading Kernels \(\+1\), ", text)
    assert '--blocks Hyperparameters "heading: Kernels" card shows them' in text
    for options in {"fold": False}, {"names": ["card"]}:  # as asked for, or nothing else is there
        assert "── card" in printed("03e", "04", True, **options)


def test_steps_are_the_diffs_one_by_one():
    shown = diff("03c", "04", "--steps").stdout
    for a, b in (("03c", "03d"), ("03d", "03e"), ("03e", "04")):
        alone = diff(a, b).stdout
        assert alone in shown and alone.count("\n") > 10
    assert len(re.findall("^─{10,}$", shown, re.M)) == 3
    blocks = diff("03b", "04", "--steps", "--blocks", "muon_momentum", "Linear").stdout
    assert re.findall("── (.*) added", blocks) == ["muon_momentum ", "Linear "]
    assert blocks.count("── ") == 2  # each at its step, where the other is not changed or not there
    between = diff("05l", "05r", "--steps", "--stat", "--blocks", "aligned_rows").stdout
    assert re.findall("  aligned_rows  (added|removed)", between) == ["added", "removed"]
    refused = diff("04", "03c", "--steps")
    assert refused.returncode == 2 and refused.stderr.endswith(
        "04_skip_connections is not an ancestor of 03c_momentum_warmup; swap them\n")
    for a in "p2", "train":
        assert diff(a, "04", "--steps").stderr.endswith(" not an ancestor of 04_skip_connections\n")


# ---- nothing is hidden ----


@pytest.mark.parametrize("old, new", [
    ("00", "05"), ("05", "00"), ("03", "04"), (FILE, FILE.replace("value", "x").replace("_", "__")),
    (PROPERTY, PROPERTY.replace("self.y", "self.z")),
], ids=["00-05", "05-00", "03-04", "made-up", "two methods of one name"])
def test_rows_hold_every_line_of_a_block(old, new):
    if len(old) == 2:
        old, new = (load_manifest().get(id).script.read_text("utf-8") for id in (old, new))
    for change in changes(new, old).values():
        if not change.rows:
            continue
        for side, block, text in (("old", change.old, old), ("new", change.new, new)):
            found = [line for row in change.rows if (line := getattr(row, side))]
            assert sorted(line.text for line in found) == sorted(
                block.text.split("\n") if block else [])
            lines = text.split("\n")
            assert all(lines[x.number - 1] == x.text for x in found)


def test_neighbours_differ_as_declared():
    for milestone in CHILDREN[::6]:  # all of them are in test_chain.py
        parent = load_manifest().get(milestone.parent)
        old, new = (m.script.read_text(encoding="utf-8") for m in (parent, milestone))
        comparison = find_difference(old, new)
        names = [change.name for change in comparison.changes if change.name not in FREE]
        assert sorted(names) == sorted(milestone.changes)
        words = {word for change in comparison.changes for word in change.words}
        assert words <= {"added", "removed", "docstring only", "comments only"}


@pytest.mark.parametrize("new, reason", [
    (replaced("y = x + 1", "y = = 1"), "new is not Python: line 13: invalid syntax"),
    (replaced("def second", "def first"), "new has no clear blocks: two blocks are called first"),
    ("x = 1\0", "new is not Python: source code string cannot contain null bytes"),
    ("x = " + "(" * 1000 + ")" * 1000, "new is not Python: line 1: too many nested parentheses"),
    (("x" * 99 + " = 1\n") * 2, "new has no clear blocks: two blocks are called …"),
])
def test_a_file_without_blocks_is_compared_line_by_line(new, reason):
    comparison = find_difference(FILE, new)
    assert comparison.refused == reason
    (change,) = comparison.changes
    assert [row.new.text for row in change.rows if row.new] == new.rstrip("\n").split("\n")
    assert find_difference(new, new).changes == ()


def test_comments_behind_the_last_statement_count():
    (change,) = changes(FILE + "# the end\n").values()
    assert change.words == ("added",)


def test_a_form_feed_does_not_shift_the_lines():
    (change,) = changes(replaced("LIMIT = 3\n", "\f\nLIMIT = 4\n")).values()
    assert (change.name, marked(change)) == ("LIMIT", ["-LIMIT = 3", "+LIMIT = 4"])


# ---- facts ----


def test_figures_and_hyperparameters_that_moved(tmp_path):
    old, new = read_side("03"), read_side("04")
    m, n = old.milestone, new.milestone
    assert changed_values(old, new)["official figures"] == [
        ("minutes", f"{m.minutes:g}", f"{n.minutes:g}"),
        ("steps", f"{m.train_steps:,}", f"{n.train_steps:,}"),
        ("tokens", f"{m.tokens:,}", f"{n.tokens:,}"),
        ("val loss", f"{m.val_loss:.4f}", f"{n.val_loss:.4f}"),
        ("parameters", f"{m.parameters:,}", f"{n.parameters:,}"),
    ]
    for a, b in (("p6c", "p6d"), ("p6c", "04")):  # the prelude's, which no record has
        own = changed_values(read_side(a), read_side(b))
        assert own["figures"] and "official figures" not in own
    for a, b, hidden in (("03", "03a", "minutes"), ("07", "08", "minutes steps tokens parameters")):
        figures = changed_values(read_side(a), read_side(b))["official figures"]
        assert [name for name, *_ in figures] == [
            name for name in facts.FIGURES if name not in hidden.split()]  # or the same
    alone = changed_values(read_side("05h"), read_side("05i"))["official figures"]
    assert ("val loss", "—", "3.2770") in alone  # 05h was not measured
    assert ("minutes", "—", "3.142") in alone
    moved = changed_values(read_side("13b"), read_side("13d"))  # a script of other steps
    assert ("steps", "1,555", "1,775") in moved["official figures"]
    numbers = changed_values(old, new)["hyperparameters"]
    assert {("muon_lr", "3.6e-4", "0.04"), ("head_lr", None, "0.008")} <= set(numbers)
    numbers = changed_hyperparameters(read_side("00b"), read_side("01"))
    assert {("adam_lr", "1.8e-3", None), ("embed_lr", None, "3.6e-3")} <= set(numbers)
    numbers = changed_hyperparameters(read_side("05h"), read_side("05i"))
    (fp8,) = [new for name, _, new in numbers if name == "use_fp8"]
    assert fp8.endswith(" >= (8, 9)") and "lambda" not in fp8
    assert "#" not in fp8, "its comment would hide the rest"
    assert diff("05h", "05i", "--stat").stdout.count("\n  use_fp8 ") == 1  # of several lines
    copy = tmp_path / "copy.py"
    copy.write_text(old.text.replace("524_288", "512 * 1024").replace("0.95", "0.9"), "utf-8")
    assert read_side(str(copy)).figures() == {
        "steps": f"{m.train_steps:,}", "tokens": f"{m.tokens:,}"}
    assert [name for name, _, _ in changed_hyperparameters(old, read_side(str(copy)))] == [
        "muon_momentum", "adam_beta2"]
    assert changed_values(old, read_side(str(copy))).keys() == {"hyperparameters"}
    assert changed_values(read_side(str(copy)), old).keys() == {"hyperparameters"}


def test_the_ideas_between_two_milestones_are_told():
    sides = {id: read_side(id) for id in ("02", "04")} | {"train": read_side("train")}
    first, last = (MILESTONES.index(load_manifest().get(id)) for id in ("03", "04"))
    between = [(f"{m.id} {m.title}.", m) for m in MILESTONES[first : last + 1]]
    assert ideas_between(sides["02"], sides["04"]) == between
    assert ideas_between(sides["04"], sides["02"]) == [
        (f"Undoes {title}", m) for title, m in reversed(between)]
    assert ideas_between(sides["train"], sides["04"]) == between[-1:]
    assert sides["train"].name == "train"
    assert ideas_between(sides["04"], sides["train"]) == []
    assert ideas_between(sides["04"], sides["04"]) == []
    told = {m.id: lines for _, m, lines in gained_briefly(sides["02"], sides["04"])}
    assert [id for id, lines in told.items() if any("not comparable" in line for line in lines)
            and not load_manifest().get(id).minutes] == [], "without figures nothing is compared"


def test_what_an_idea_gained_in_a_few_words(monkeypatch):
    effects = [SimpleNamespace(measured=measured, how="a run", whole=whole, caveat=caveat)
               for measured, whole, caveat in (("9 s", 7, None), ("2 s", None, "small"),
                                               ("3 s", None, "old"))]
    milestones = [SimpleNamespace(id=id, gain=gain, effect=effects[:most], minutes=minutes)
                  for id, gain, most, minutes in (("1", None, 3, None), ("2", "4 s", 3, 5),
                                                  ("3", None, 1, None))]
    titles = ["1 A.", "Undoes 2 B.", "3 C."]
    for name, value in dict(
            ideas_between=lambda *_: zip(titles, milestones, strict=True), is_step=lambda *_: False,
            own_gain=lambda _, m: m.gain, timed_parts=lambda m: m.effect[1:], gain_words=str,
            incomparable_lines=lambda m: [f"{m.id} is apart"]).items():
        monkeypatch.setattr(facts, name, value)
    assert [lines for _, _, lines in gained_briefly(None, None)] == [
        ["2 s, a run", "caveat: small"],
        ["2 had gained: 4 s", "caveat: small; old", "2 is apart"], []]


# ---- the command ----


def diff(*arguments, cwd=REPOSITORY, **environment):
    """What the command prints, into a pipe, and its exit code; in this process."""
    out, errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["diff_milestones.py", *map(str, arguments)])
        patch.setattr(cli.signal, "signal", lambda *_: None)  # Ctrl-C goes on ending the tests
        for name, value in {"COLUMNS": "40", **environment}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.run_command(diff_milestones.main)
    out.seek(0)
    return SimpleNamespace(returncode=ended.value.code, stdout=out.read(), stderr=errors.getvalue())


@pytest.fixture
def files(tmp_path):
    """Two files, one of which has no line end at its end."""
    (tmp_path / "a.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "b.py").write_text(
        replaced("LIMIT = 3", "LIMIT = 4  # " + "long " * 40).rstrip("\n"), encoding="utf-8")
    return tmp_path


def test_output_in_a_pipe_is_plain_and_whole():
    ended = diff("03", "04")
    assert ended.returncode == 0, ended.stderr
    assert "\x1b" not in ended.stdout
    head, _, body = ended.stdout.partition("\n── ")
    idea = load_manifest().get("04").idea
    for told in (f"{idea} Records: #11", "minutes 13.1 → 7.2", "2 added"):
        assert told in " ".join(head.split())
    comparison = find_difference(read_side("03").text, read_side("04").text)
    for change in comparison.changes:
        for line in marked(change, but=INDENTED):
            assert (f"{line[0]} {line[1:]}".rstrip() if line[1:] else line[0]) in body.split("\n")


def test_the_newer_script_and_the_caveats_are_named():
    shown = diff("12", COLUMNS="100").stdout.split("\n")
    assert shown[1] == "history/speedrun/12_bfloat16_weights/train_gpt.py"
    assert diff("00", "train").stdout.split("\n")[1] == "train/train_gpt.py"
    assert "Records" not in diff("p4").stdout
    at = shown.index("measured effect")
    caveat = "caveat: contains the interleaving of Adam and Muon, which this chain does not have"
    assert f"    {caveat}" in shown[at : at + 5]


def test_the_way_back_says_what_had_been_gained():
    shown = " ".join(diff("04", "03e", COLUMNS="100").stdout.split())
    assert "Undoes 04 Skip connections." in shown
    assert ("04 had gained: 34.04 s less (-7.3%), two official records caveat: the record also "
            "doubles") in shown
    assert "had gained" not in diff("03e", "04").stdout


def test_figures_that_do_not_compare_throughout_are_named():
    note = "official figures do not compare throughout: see 03a, 03d"
    for option in ((), ["--stat"]):
        assert note in " ".join(diff("03", "05", *option, COLUMNS="100").stdout.split())
        assert "do not compare" not in diff("03e", "05", *option, COLUMNS="100").stdout
    assert "see 03d, 03a" in " ".join(diff("05", "03", COLUMNS="100").stdout.split())
    alone = " ".join(diff("03a", COLUMNS="100").stdout.split())
    assert alone.count("time not comparable with 03:") == 1
    step = " ".join(diff("03", "05", "--steps", "--stat", COLUMNS="100").stdout.split())
    assert "time not comparable with 03: 03 has the 13.1 minutes of #6;" in step


def test_a_milestone_alone_is_compared_with_its_parent():
    alone = diff("04", "--stat")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == diff("03e", "--stat", "04").stdout != diff("03", "04", "--stat").stdout
    assert "\n  │ " in diff("04").stdout and "\n  │ " not in diff("04", "--no-why").stdout
    for blocks, folded in ([], True), (["--blocks", "GPT", "card"], False):
        assert ("not shown: " in diff("04", *blocks, FORCE_COLOR="1").stdout) is folded


def test_stat(files):
    old, new = read_side("03"), read_side("04")
    size = find_difference(old.text, new.text).size
    lines = diff("03", "04", "--stat").stdout.splitlines()
    assert re.fullmatch(r"blocks: \d+ changed, 2 added, \d+ unchanged", lines[2])
    added, removed = re.search(r" and Hyperparameters: \+(\d+) -(\d+)$", lines[3]).groups()
    assert (int(added), int(removed)) == size
    parameters = [f"{side.milestone.parameters:,}" for side in (old, new)]
    assert f"  parameters  {' → '.join(parameters)}" in lines
    assert "  muon_lr                3.6e-4 → 0.04" in lines
    assert "  head_lr                0.008  (added)" in lines
    assert diff("a.py", "b.py", "--stat", cwd=files).stdout.splitlines()[2:] == [
        "blocks: 1 changed, 4 unchanged",  # card and two headings are not counted
        "lines: +1 -1; without card, imports and Hyperparameters: +1 -1", "  LIMIT  +1 -1"]


def patched(text, patch):
    """The text with a unified diff applied."""
    lines, result, at = re.findall(r"[^\n]*\n|[^\n]+$", text), [], 0
    patch = re.sub(r"\n\\ No newline at end of file", "\0", patch)
    for line in patch.splitlines(keepends=True)[2:]:
        if line.startswith("@@"):
            start = int(re.match(r"@@ -(\d+)", line)[1]) - 1
            result += lines[at:start]
            at = start
            continue
        body = line[1:].replace("\0\n", "")
        if line[0] != "+":
            assert lines[at] == body
            at += 1
        if line[0] != "-":
            result.append(body)
    return "".join(result + lines[at:])


def test_full_is_a_patch(files):
    (files / "a.py").write_text(replaced("y = x", "\ty = '\x1b' + x"), encoding="utf-8")
    for a, b in (("a.py", "b.py"), ("b.py", "a.py")):
        ended = diff(a, b, "--full", cwd=files)
        assert ended.stdout.startswith(f"--- {a}\n+++ {b}\n")
        old, new = ((files / name).read_text("utf-8") for name in (a, b))
        assert patched(old, ended.stdout) == new


EDITS = (("Card.", "Other."), ("os\n\n", "os\nimport re\n\n"), ("- Optim", "- Adam"),
         ("LIMIT = 3\n", "MOST = 4\nMORE = 5\n"), ("* 2", "* 3"),
         ("    total = 0", "    if values:\n        total = 0"))
TEXTS = {"": """\
a.py → b.py

blocks: 3 changed, 2 added, 1 removed, 1 unchanged

── LIMIT  removed, -1  (line 7)
- LIMIT = 3

── MOST  added, +1  (line 8)
+ MOST = 4

── MORE  added, +1  (line 9)
+ MORE = 5

── second  +1, 1 line re-indented  (line 17 → 19)
  def second(values):
+     if values:
>         total = 0
      for value in values:
          total += value
      return total

── Pair  +1 -1  (line 27 → 30)
  ⋯ 7 lines the same

      # The other one.
      def right(self):
-         return self.b * 2
+         return self.b * 3

      def both(self):
          for value in (self.a, self.b):
              print(value)

── heading: Optimizer  removed, -1  (line 5)
- # ---------- Optimizer ----------

── heading: Adamizer  added, +1  (line 6)
+ # ---------- Adamizer ----------

── imports  +1  (line 3)
  import os
+ import re

── card  docstring only, +1 -1  (line 1)
- \"""Card.\"""
+ \"""Other.\"""
""", "--side-by-side --blocks second": """\
a.py → b.py

blocks: 1 changed

── second  +1, 1 line re-indented  (line 17 → 19)
  def second(values):      │   def second(values):
                           │ +     if values:
>     total = 0            │ >         total = 0
      for value in values: │       for value in values:
          total += value   │           total += value
      return total         │       return total
""", "--full --blocks second": """\

── second  +1, 1 line re-indented  (line 17 → 19)
--- a.py
+++ b.py
@@ -17,5 +19,6 @@
 def second(values):
-    total = 0
+    if values:
+        total = 0
     for value in values:
         total += value
     return total
""", "--stat": """\
a.py → b.py

blocks: 3 changed, 2 added, 1 removed, 1 unchanged
lines: +7 -4; without card, imports and Hyperparameters: +5 -3
  card                docstring only, +1 -1
  imports             +1
  heading: Optimizer  removed, -1
  LIMIT               removed, -1
  heading: Adamizer   added, +1
  MOST                added, +1
  MORE                added, +1
  second              +1, 1 line re-indented
  Pair                +1 -1
"""}


@pytest.mark.parametrize("options", TEXTS)
def test_the_whole_text(options, files):
    new = FILE
    for edit in EDITS:
        assert new.count(edit[0]) == 1
        new = new.replace(*edit)
    (files / "b.py").write_text(new, encoding="utf-8")
    assert diff("a.py", "b.py", *options.split(), cwd=files).stdout == TEXTS[options]


def test_side_by_side_in_a_pipe_cuts_no_line(files):
    lines = diff("a.py", "b.py", "--side-by-side", cwd=files).stdout.split("\n")
    assert ["- LIMIT = 3 ", " + LIMIT = 4  # " + ("long " * 40).rstrip()] in [
        line.split("│") for line in lines]


@pytest.mark.parametrize("width", [20, 40, 120])
def test_two_columns_stay_within_a_terminal(width):
    comparison = find_difference(read_side("03").text, read_side("04").text).only(["MLP", "GPT"])
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, soft_wrap=True)
    print_changes(console, comparison, in_columns=True)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in stream.getvalue().split("\n")]
    beside = [line for line in lines if " │" in line]
    assert beside and all(len(line) <= width for line in beside)
    right = "".join(line.partition(" │ ")[2] for line in beside)
    assert "self.skip_weights = nn.Parameter(torch.ones(args.num_layers // 2))" in right


def test_colour_on_a_terminal_marks_words_and_disarms_control_characters(monkeypatch, files):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    found = find_difference(FILE, replaced("LIMIT = 3", "LIMIT = '\x1b[2J'"))
    print_changes(make_console(stream), found)
    assert "\x1b[2J" not in stream.getvalue() and "␛" in stream.getvalue()
    assert re.search(r"\x1b\[31m- LIMIT = \x1b\[0m\x1b\[1;4;31m3\x1b\[0m", stream.getvalue())
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    print_changes(make_console(stream), find_difference(FILE, replaced("LIMIT = 3", "LIMIT = 4")))
    assert "- LIMIT = " in stream.getvalue() and "[31m" not in stream.getvalue()
    monkeypatch.delenv("NO_COLOR")
    stream = io.StringIO()
    (files / "b.py").write_text(replaced("LIMIT = 3", "LIMIT = '\x1b[2J'"), encoding="utf-8")
    sides = [read_side(str(files / name)) for name in ("a.py", "b.py")]
    terminal.print_unified(make_console(stream), *sides, None)
    assert re.match(r"\x1b\[1m--- .*a.py\x1b\[0m\n\x1b\[1m\+\+\+ .*b.py\x1b\[0m", stream.getvalue())
    assert "\x1b[31m-LIMIT = 3" in stream.getvalue() and "\x1b[32m+LIMIT" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()
    stream = io.StringIO()
    terminal._print_values(make_console(stream), "figures", [("steps", "1", "2")])
    assert "\x1b[31m1\x1b[0m" in stream.getvalue() and "\x1b[32m2\x1b[0m" in stream.getvalue()
    stream = io.StringIO()
    terminal.print_origins(make_console(stream), [("a", MILESTONES[1]), ("b", MILESTONES[1])])
    assert re.match(r"\x1b\[1;36m00a.*\n\x1b\[2m00a", stream.getvalue())  # bright where it begins


def test_syntax_error_is_one_line_and_a_plain_diff(files):
    (files / "\x1b[2J.py").write_text(replaced("y = x + 1", "y = = 1"), encoding="utf-8")
    ended = diff("a.py", "\x1b[2J.py", cwd=files)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "compared line by line: ␛[2J.py is not Python: line 13: invalid syntax" in ended.stdout
    assert "\n-     y = x + 1\n+     y = = 1\n" in ended.stdout


def test_nothing_to_show_is_said(files):
    (files / "b.py").write_text(FILE.replace("\n\n\ndef", "\n\ndef"), encoding="utf-8")
    (files / "c.py").write_bytes(FILE.replace("\n", "\r\n").encode())
    assert diff("a.py", "a.py", cwd=files).stdout.endswith("\nno difference\n")
    assert diff("a.py", "a.py", "--full", cwd=files).stdout.endswith("no difference\n")
    assert "the blocks are the same" in diff("a.py", "b.py", "--blocks", "Pair", cwd=files).stdout
    assert "the blocks are the same" in diff("a.py", "b.py", cwd=files).stdout
    assert diff("a.py", "b.py", "--full", cwd=files).stdout.startswith("--- a.py")
    assert "other line endings" in diff("a.py", "c.py", cwd=files).stdout
    for name in "ab":
        (files / f"{name}.py").write_text(f'"""{name}"""\n', encoding="utf-8")
    assert "\nblocks: none but card and headings\n" in diff("a.py", "b.py", cwd=files).stdout


@pytest.mark.parametrize("arguments, status, message", [
    ([], 2, "name a milestone (03, muon), train or a Python file"),
    (["00"], 1, "00 has no parent; name two"),
    (["03", "4x"], 1, 'no milestone "4x"; did you mean 04_skip_connections?'),
    (["03", "none.py"], 1, "none.py is not a file"),
    (["03", "04", "--blocks", "MLP", "Muno"], 1, 'no block is called "Muno"; did you mean Muon?'),
    (["03e", "04", "--blocks", "Nope"], 1, '"Nope"; these differ: card, Hyperparameters, GPT\n'),
    (["a.py", "a.py", "--blocks", "Nope"], 1, '"Nope"; these differ: none\n'),
    (["README.md", "04"], 1, 'no milestone "README.md": that is a file; --help says what can be'),
    (["", "04"], 1, 'no milestone "": the name is empty; --help says what can be named here'),
    (["03", "04", "--nproc", "2"], 2, "--nproc goes with --time"),
    (["03", "04", "--train-steps", "2"], 2, "--train-steps goes with --time"),
    (["03", "04", "--steps", "--time"], 2, "--steps prints; it goes with neither --html nor --tim"),
    (["03", "04", "--steps", "--html", "x.html"], 2, "--steps prints; it goes with neither --html"),
    (["03", "04", "--steps", "--blocks", "GPT", "GTP"], 1, 'called "GTP"; did you mean GPT?'),
    (["03", "04", "--scale", "tiny"], 2, "--scale goes with --time"),
    (["03", "04", "--html", "none/x.HTML"], 1, "/none\n"),
    (["--html", "b.py", "04"], 1, "--html b.py: the file's name must end in .html"),
    (["04", "--origin", "--html", "b.py"], 1, "--html b.py: the file's name must end in .html"),
    (["03", "04", "--html", "folder.html"], 1, "is not a regular file"),
    (["03", "04", "--html", "link.html"], 1, "--html link.html: it is a link to b.py"),
    (["03", "binary.py"], 1, "binary.py is not a text that can be read"),
    (["03", "a.py", "--time"], 1, "a.py has no class Hyperparameters"),
    (["a.py", "bad.py", "--blocks", "first"], 1, "no blocks to choose from: bad.py is not Python"),
])
def test_wrong_input_is_one_line(files, arguments, status, message):
    (files / "binary.py").write_bytes(b"\xff\xfe\0x")
    (files / "bad.py").write_text("def", encoding="utf-8")
    (files / "README.md").touch()
    (files / "folder.html").mkdir()
    (files / "link.html").symlink_to("b.py")
    before = (files / "b.py").read_bytes()
    ended = diff(*arguments, cwd=files)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert message in ended.stderr
    assert (files / "b.py").read_bytes() == before


@pytest.mark.parametrize("module", ["diff_milestones", "make_figures"])
def test_help_imports_nothing_slow(module):
    slow = {"rich", "pygments", "jinja2", "difflib", "numpy", "torch", "matplotlib"}
    code = f"import sys, {module}; print(*{slow} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY / "tools",
                         capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


# ---- the page ----


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps what a reader sees."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.cells, self.marked = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "code":
            self.cells.append((dict(self.last)["class"].split(), ""))
        if tag == "div":
            self.last = attrs
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "code" in self.open:
            side, text = self.cells.pop()
            self.cells.append((side, text + data))
        if "mark" in self.open:
            self.marked.append(data)


def page(new, old=FILE, tmp_path=None):
    """The page of two texts."""
    for name, text in (("a.py", old), ("b.py", new)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    sides = [read_side(str(tmp_path / name)) for name in ("a.py", "b.py")]
    return diff_html.make_page(*sides, find_difference(old, new, ("a", "b")))


def test_page_shows_both_sides_and_marks_words(tmp_path):
    seen = Reader(page(replaced("y = x + 1", "y = x + 2"), tmp_path=tmp_path))
    sides = {side: [text for classes, text in seen.cells if side in classes] for side in "lr"}
    (change,) = changes(replaced("y = x + 1", "y = x + 2")).values()
    assert sides["l"] == [row.old.text for row in change.rows]
    assert sides["r"] == [row.new.text for row in change.rows]
    assert seen.marked == ["1", "2"]
    assert ("section", "id", "b1") in seen.attributes and ("a", "href", "#b1") in seen.attributes


def test_cells_of_a_page_have_their_places():
    new = replaced("    total = 0", "    if values:\n        total = 0").replace("+= v", "+= 2 * v")
    (change,) = changes(new).values()
    m = load_manifest().get("01")
    assert [(note, [f"{look}: {row}{sign} {line}" for look, row, sign, line, _ in cells], by)
            for note, cells, by in diff_html.passages_of(change, owners=Owners({18: m}, {}))] == [
        ("", ["l same: 1 17", "r same: 1 17"], [m]), ("", ["r new: 1+ 18"], []),
        ("", ["l same: 1 18", "r moved: 1> 19"], []), ("", ["l same: 1 19", "r same: 1 20"], []),
        ("", ["l old: 1- 20", "r new: 1+ 21"], []), ("", ["l same: 1 21", "r same: 1 22"], [])]


def test_page_of_milestones_holds_every_changed_line():
    sides = [read_side(id) for id in ("00", "05")]
    comparison = find_difference(sides[0].text, sides[1].text)
    seen = Reader(diff_html.make_page(*sides, comparison))
    texts = {kind: [text for classes, text in seen.cells if kind in classes]
             for kind in ("old", "new")}
    lines = [line for change in comparison.changes for line in marked(change, but=INDENTED)]
    assert sorted(texts["old"]) == sorted(x[1:] for x in lines if x[0] == "-")
    assert sorted(texts["new"]) == sorted(x[1:] for x in lines if x[0] == "+")


@pytest.mark.parametrize("a, b", [("03", "03a"), ("03", "05")])
def test_page_says_what_the_terminal_says(a, b):
    old, new = read_side(a), read_side(b)
    comparison = find_difference(old.text, new.text)
    page = diff_html.make_page(old, new, comparison).partition("<main")[2]
    shown = " ".join(unescape(re.sub("<[^>]+>", "", page)).lower().split())
    brief = [line for _, _, lines in gained_briefly(old, new) for line in lines]
    values = [row for rows in changed_values(old, new).values() for row in rows]
    for words in (f"{old.name} → {new.name}", *gained(old, new), *brief, *(
            f"{line}." for line in not_comparable(old, new)[: b == "05"]),
            *(f"{name}{x} → {y}" for name, x, y in values if None not in (x, y)),
            *(f"{name}{y} added" for name, x, y in values if x is None),
            summary_line(old, new, comparison)):
        assert shown.count(" ".join(words.lower().split())) == 1, words


def test_page_escapes_everything_and_needs_no_network(tmp_path):
    evil = "</code><script src=http://x.example/>&amp;<b a='\">"
    text = page(replaced("# why", f"# {evil}\x1b"), tmp_path=tmp_path)
    seen = Reader(text)
    assert f"    # {evil}␛" in [cell for _, cell in seen.cells]
    references = [a for a in seen.attributes if a[1] in ("src", "href", "srcset", "action", "data")]
    assert all(value.startswith("#") for _, _, value in references)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert text.count("<script") == 1
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in style and "max-width: 800px" in style


def test_page_of_a_file_without_blocks(tmp_path):
    seen = Reader(page("def first(:\n", tmp_path=tmp_path))
    assert "def first(:" in [text for classes, text in seen.cells if "new" in classes]


def test_page_is_written(tmp_path):
    target = tmp_path / "x.HTML"
    target.write_text("before", encoding="utf-8")
    ended = diff("02", "03", "--html", target)
    assert (ended.returncode, ended.stdout) == (0, f"wrote {target}\n")
    assert Reader(target.read_text("utf-8")).cells and list(tmp_path.iterdir()) == [target]
    lines = load_manifest().get("p0").script.read_text("utf-8").count("\n")
    lives = len(block_life(load_manifest(), "MLP"))
    for arguments, title, size in (
            (["p0", "--origin"], '<span class="id">p0</span> Every line', f"{lines} lines"),
            (["--life", "MLP"], "<code>MLP</code>", f"{lives} versions")):
        ended = diff(*arguments, "--html", target)
        assert (ended.returncode, ended.stdout) == (0, f"wrote {target}\n")
        assert f"<h1>{title}" in target.read_text("utf-8") and size in target.read_text("utf-8")


# ---- timing ----


@pytest.fixture
def fake_runs(monkeypatch, tmp_path):
    """Milestones whose runs write a log at once: 03 with steps of 10 ms, 04 with steps of 15 ms;
    (milestone, seed) of each."""
    made = []

    def run(plan, stream):
        made.append((plan.script.name, plan.options["seed"]))
        assert plan.options["train_steps"] == 5
        ms = {"distributed_muon": 10, "skip_connections": 15}[plan.script.name]
        plan.out.mkdir(parents=True)
        Path(plan.out, "log.txt").write_text(
            'environment:{"device": "some device", "world_size": 1}\n'
            'hyperparameters:{"total_batch_size": 4096, "vocab_size": 257}\n'
            f"step:5/5 val_loss:3.0 train_time:{5 * ms}ms step_avg:{ms:.2f}ms\n", "utf-8")

    monkeypatch.setattr("speedrun.compare.collect.run", run)
    (tmp_path / "runs" / "diff").mkdir(parents=True)  # another comparison took the name just now
    names = iter(["diff", "diff-2"])
    monkeypatch.setattr("speedrun.run.plan.fresh_out", lambda _: tmp_path / "runs" / next(names))
    monkeypatch.setattr(sys, "argv", ["diff", "03", "04", "--stat", "--time", "--scale", "tiny",
                                      "--nproc", "1", "--train-steps", "5"])
    return made


def test_scripts_take_turns(fake_runs, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--html", str(tmp_path / "x.html")])
    assert diff_milestones.main() == 0
    both = "distributed_muon", "skip_connections"
    assert fake_runs == [(slug, seed) for seed in "01" for slug in both]
    assert len(list((tmp_path / "runs" / "diff-2").iterdir())) == 4
    out, error = capfd.readouterr()
    assert error.splitlines()[-2:] == [
        f"[4/4] 04_skip_connections, seed 1: {tmp_path}/runs/diff-2/1-skip_connections-seed1",
        "[4/4] 04_skip_connections, seed 1: val_loss 3.0000"] and error.count(", seed ") == 8
    view, _, table = out.partition("\n  muon_lr")
    assert view.startswith("03_distributed_muon → 04_") and "\nblocks: " in view
    assert "15.0 (15.0–15.0) ms" in table and "trained on 1 x some device" in table
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "<td>15.0 (15.0–15.0) ms</td>" in page and Reader(page).cells
    assert "trained on 1 x some device" in page


def test_a_failing_run_is_told_below_the_diff(fake_runs, monkeypatch, capfd):
    def fail(plan, stream):
        ran.append((plan.scale, plan.nproc, plan.options["train_steps"]))
        raise UserError("rank 0 ended with exit code 3")

    ran = []
    monkeypatch.setattr("speedrun.compare.collect.run", fail)
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-3], "2"])
    assert diff_milestones.main() == 1
    assert ran == [("tiny", 2, 40)] * 4  # by default
    out, _ = capfd.readouterr()
    assert "\nfailed: 03_distributed_muon, seed 0: rank 0 ended with exit code 3\n" in out
    assert out.startswith("03_distributed_muon → 04_skip_connections\n")


def test_a_signal_ends_the_runs(fake_runs, monkeypatch):
    def stop(plan, stream):
        raise Stopped("interrupted", 130)

    monkeypatch.setattr("speedrun.compare.collect.run", stop)
    with pytest.raises(Stopped):
        diff_milestones.main()
    asked = {}
    monkeypatch.setattr("speedrun.compare.collect.collect", lambda *_, **options: (
        asked.update(options), Stopped("interrupted", 130)))
    with pytest.raises(Stopped):
        diff_milestones.main()
    assert asked == dict(scale="tiny", nproc=1, steps=5)
