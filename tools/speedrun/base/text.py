"""Text for people and programs: paths, control characters, tables, JSON."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

UNKNOWN = "—"  # not recorded, or not a single figure
BETWEEN = 4  # characters at most from one column of a table to the next


def visible(text: str) -> str:
    """The text with each character that could control a terminal or has no glyph replaced by one
    symbol, so that columns stay; line ends and tabs stay."""
    def symbol(c):
        return chr(0x2400 + ord(c)) if ord(c) < 32 else "\N{REPLACEMENT CHARACTER}"

    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else symbol(c) for c in text)


def short(path: Path) -> str:
    """The path relative to the current folder if it is below it, else absolute."""
    here, path = Path.cwd(), Path(os.path.abspath(path))
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def number_ranges(numbers: Iterable[int]) -> str:
    """Record numbers as text: 22, 23, 24, 30 become "#22–#24, #30"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"#{a}" if a == b else f"#{a}–#{b}" for a, b in runs)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> str:
    """A Markdown table; the columns named in `right` are aligned to the right."""
    rule = ["---:" if name in right else "---" for name in head]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def json_text(value: object, indent: int | None = None) -> str:
    """A value of dictionaries, lists, tuples, texts and numbers as JSON; JSON has no NaN and no
    infinity, so each becomes null."""
    def finite(value):
        if isinstance(value, dict):
            return {key: finite(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def print_table(columns: dict[str, Sequence[str]], stream: TextIO) -> None:
    """Prints a table, {heading: cells}, whose first column holds the labels; entry by entry where
    it is wider than a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = sum(max(map(len, [head, *cells])) + BETWEEN for head, cells in columns.items())
    console = Console(file=stream, width=None if stream.isatty() else width, highlight=False,
                      markup=False, emoji=False)
    labels, *heads = columns
    lines = zip(*columns.values(), strict=True)
    if width <= console.width:
        grid = Table(box=box.SIMPLE_HEAD if stream.isatty() else None, pad_edge=False)
        grid.add_column(labels, no_wrap=True)
        for head in heads:
            grid.add_column(head, justify="right", no_wrap=True)
        for line in lines:
            grid.add_row(*line)
        console.print(grid)
    else:
        for label, *line in lines:
            grid = Table(title=label, title_justify="left", box=None, show_header=False,
                         pad_edge=False)
            for row in zip(heads, line, strict=True):
                grid.add_row(*row)
            console.print(grid, "")
