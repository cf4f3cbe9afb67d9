"""Text for people: paths, control characters, Markdown tables."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

UNKNOWN = "—"  # not recorded, or not a single figure


def visible(text: str) -> str:
    """The text with each character that could control a terminal or has no glyph replaced by one
    symbol, so that columns stay; line ends and tabs stay."""
    def symbol(c):
        return chr(0x2400 + ord(c)) if ord(c) < 32 else "\N{REPLACEMENT CHARACTER}"

    return "".join(c if c.isprintable() or c in "\n\t" else symbol(c) for c in text)


def short(path: Path) -> str:
    """The path relative to the current folder if it is below it, else absolute; unchanged if the
    current folder was deleted."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return str(path)
    path = Path(os.path.abspath(path))
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
