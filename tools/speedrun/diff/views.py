"""Prints a comparison in two further ways: as a unified diff and in two columns."""

import re
from collections.abc import Sequence
from difflib import unified_diff
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from speedrun.diff.align import ADDED, CHANGED, REMOVED, Gap, shown
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side
from speedrun.diff.terminal import FAINT, STYLES, gap_line, print_title, styled, visible

NARROWEST = 8  # columns of a side
BETWEEN = " │ "
TAB = 4


def print_unified(console: Console, old: Side, new: Side) -> None:
    """The unified diff of two files; into a pipe it is byte for byte what `patch` takes."""
    _print_unified(console, old.text, new.text, (old.name, new.name), (1, 1))


def print_unified_blocks(
    console: Console, old: Side, new: Side, changes: Sequence[Change]
) -> None:
    """A unified diff of each of these blocks, with the line numbers of the files."""
    for change in changes:
        print_title(console, change)
        blocks = change.old, change.new
        texts = [block.text + "\n" if block else "" for block in blocks]
        starts = [block.line if block else 1 for block in blocks]
        _print_unified(console, *texts, (old.name, new.name), starts)


def print_side_by_side(console: Console, comparison: Difference, context: int = 3) -> None:
    """The old lines on the left and the new ones on the right, with `context` lines around.

    On a terminal long lines go on below; in a pipe the left column is as wide as its longest line.
    """
    if console.is_terminal:
        width = max(NARROWEST, (console.width - len(BETWEEN)) // 2)
    else:
        lines = [row.old for change in comparison.changes for row in change.rows if row.old]
        width = max((styled(" ", line).cell_len for line in lines), default=NARROWEST)
    for change in comparison.changes:
        print_title(console, change)
        for item in shown(change.rows, context):
            if isinstance(item, Gap):
                console.print(Text(gap_line(item), style=FAINT))
                continue
            signs = (REMOVED, ADDED) if item.mark == CHANGED else (item.mark, item.mark)
            sides = [_fold(styled(sign, line), width, console.is_terminal) if line else []
                     for sign, line in zip(signs, (item.old, item.new), strict=True)]
            for left, right in zip_longest(*sides, fillvalue=Text()):
                left = left.copy()
                left.append(" " * (width - left.cell_len))
                whole = Text.assemble(left, (BETWEEN, FAINT), right)
                whole.rstrip()
                console.print(whole)


def _fold(text, width, fold):
    """The text in pieces of at most `width` characters, if it is to be folded."""
    text.expand_tabs(TAB)
    if not fold or len(text) <= width:
        return [text]
    return [text[i : i + width] for i in range(0, len(text), width)]


def _print_unified(console, old, new, names, starts):
    a, b = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in (old, new))
    styles = {"+": STYLES[ADDED], "-": STYLES[REMOVED], "@": "cyan"}
    names = [name.replace("\n", "?") for name in names]
    for number, line in enumerate(unified_diff(a, b, *names)):
        if line.startswith("@@"):
            line = re.sub(r"([-+])(\d+)", lambda m: _shifted(m, starts), line)
        end = "" if line.endswith("\n") else "\n\\ No newline at end of file\n"
        if console.is_terminal:
            style = "bold" if number < 2 else styles.get(line[0], "")
            console.print(Text(visible(line + end), style=style), end="")
        else:  # untouched: rich would replace tabs
            console.file.write(line + end)


def _shifted(match, starts):
    """The line number of a hunk's header, counted from where the block starts in its file."""
    sign, number = match.groups()
    return f"{sign}{int(number) + starts[sign == '+'] - 1}"
