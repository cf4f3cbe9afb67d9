"""Prints a comparison in two further ways: as a unified diff and in two columns."""

import re
from collections.abc import Sequence
from difflib import unified_diff
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from speedrun.base.text import visible
from speedrun.diff.align import ADDED, CHANGED, FOLDED, REMOVED, passages
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side
from speedrun.diff.terminal import FAINT, STYLES, print_title, styled
from speedrun.diff.words import folded_line

NARROWEST = 8  # columns of a side
BETWEEN = " │ "
TAB = 4


def print_unified(
    console: Console, old: Side, new: Side, changes: Sequence[Change] | None = None
) -> None:
    """The unified diff of two files, or of each of these blocks with the line numbers of the files.

    Into a pipe, that of two files is byte for byte what `patch` takes.
    """
    names = [side.name.replace("\n", "?") for side in (old, new)]
    if changes is None:
        _print_unified(console, (old.text, new.text), names, (1, 1))
    for change in changes or ():
        print_title(console, change)
        blocks = change.old, change.new
        texts = [block.text + "\n" if block else "" for block in blocks]
        _print_unified(console, texts, names, [block.line if block else 1 for block in blocks])


def print_side_by_side(console: Console, comparison: Difference) -> None:
    """The old lines on the left and the new ones on the right, with some lines around a change.

    On a terminal long lines go on below; in a pipe the left column is as wide as its longest line.
    """
    if console.is_terminal:
        width = max(NARROWEST, (console.width - len(BETWEEN)) // 2)
    else:
        lines = [row.old for change in comparison.changes for row in change.rows if row.old]
        width = max((styled(" ", line).cell_len for line in lines), default=NARROWEST)
    for change in comparison.changes:
        print_title(console, change)
        for kind, rows in passages(change.rows):
            if kind == FOLDED:
                console.print(Text(folded_line(rows), style=FAINT))
                continue
            for row in rows:
                signs = (REMOVED, ADDED) if kind == CHANGED else (kind, kind)
                sides = [_pieces(styled(sign, line), width, console.is_terminal) if line else []
                         for sign, line in zip(signs, (row.old, row.new), strict=True)]
                for left, right in zip_longest(*sides, fillvalue=Text()):
                    space = " " * (width - left.cell_len)
                    whole = Text.assemble(left, space, (BETWEEN, FAINT), right)
                    whole.rstrip()
                    console.print(whole)


def _pieces(text, width, fold):
    """The text in pieces of at most `width` characters, if it is to be folded."""
    text.expand_tabs(TAB)
    return text.divide(range(width, len(text), width) if fold else ())


def _print_unified(console, texts, names, starts):
    """Prints the unified diff of two texts that begin in the lines `starts` of their files."""
    a, b = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in texts)
    styles = {"+": STYLES[ADDED], "-": STYLES[REMOVED], "@": "cyan"}
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
