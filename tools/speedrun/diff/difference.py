"""Compares two scripts block by block, by their structure and not only by their lines."""

from dataclasses import dataclass
from textwrap import shorten

from speedrun.base.errors import UserError
from speedrun.diff.align import Line, Row, align, counts
from speedrun.diff.structure import CODE, FORMATTING, classify, match, methods
from speedrun.history.blocks import UNCOUNTED, Block, split_blocks
from speedrun.history.schema import nearest

LONGEST_REASON = 100  # characters; a file may repeat dozens of names


@dataclass(frozen=True)
class Change:
    """A block that differs. old or new is None if it was added or removed.

    words: what happened to it apart from changed lines ("moved", "comments only");
    rows: its lines, in reading order, empty if none of them is worth a look.
    """

    name: str
    old: Block | None
    new: Block | None
    words: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def fate(self) -> str:
        """What happened to the block: in words, then the numbers of lines added and removed."""
        added, removed, indented = counts(self.rows)
        lines = [f"+{added}"] * bool(added) + [f"-{removed}"] * bool(removed)
        parts = [*self.words, " ".join(lines)]
        parts += [f"{indented} lines re-indented"] * bool(indented)
        return ", ".join(filter(None, parts)) or "lines without text"

    @property
    def place(self) -> str:
        """The line where the block begins, in both files if that differs."""
        lines = [block.line for block in (self.old, self.new) if block]
        return "line " + " → ".join(map(str, dict.fromkeys(lines)))


@dataclass(frozen=True)
class Difference:
    """The changes from one file to another, in reading order, and the names of the blocks that
    stayed. `refused` says why the files have no blocks; then the change is that of all lines."""

    changes: tuple[Change, ...]
    unchanged: tuple[str, ...] = ()
    refused: str | None = None

    def lines(self, counted_only: bool = False) -> tuple[int, int]:
        """Lines added and removed; counted_only leaves card, imports and Hyperparameters out."""
        rows = [row for change in self.changes for row in change.rows
                if not (counted_only and change.name in UNCOUNTED)]
        return counts(rows)[:2]

    def only(self, names: list[str]) -> "Difference":
        """The same for the blocks of these names. Raises UserError for an unknown one, and if there
        are no blocks."""
        if not names:
            return self
        if self.refused:
            raise UserError(f"there are no blocks to choose from: {self.refused}")
        changed = [change.name for change in self.changes]
        known = {*self.unchanged, *changed}
        for name in names:
            if name not in known:
                near = nearest(name, known)
                hint = f"these differ: {', '.join(changed) or 'none'}"
                hint = f"did you mean {near}?" if near else hint
                raise UserError(f'no block is called "{name}"; {hint}')
        return Difference(
            tuple(change for change in self.changes if change.name in names),
            tuple(name for name in self.unchanged if name in names),
        )


def find_difference(old: str, new: str, names: tuple[str, str] = ("old", "new")) -> Difference:
    """The Difference of two texts; `names` are what its `refused` calls them."""
    blocks, sources = [], (old.split("\n"), new.split("\n"))
    for name, text in zip(names, (old, new), strict=True):
        try:
            blocks.append(split_blocks(text))
        except SyntaxError as error:
            return _as_text(old, new, f"{name} is not Python: line {error.lineno}: {error.msg}")
        except (ValueError, RecursionError, MemoryError) as error:
            reason = shorten(str(error), LONGEST_REASON, placeholder=" …")
            return _as_text(old, new, f"{name} has no clear blocks: {reason}")
    changes, unchanged = [], []
    for a, b, moved in match(*blocks):
        if a and b and a.text == b.text and not moved:
            unchanged.append(b.name)
        else:
            changes.append(_change(a, b, moved, sources))
    return Difference(tuple(changes), tuple(unchanged))


def _as_text(old, new, reason):
    a, b = (Block("all lines", text.removesuffix("\n"), 1) for text in (old, new))
    rows = _rows(a, b, (old.split("\n"), new.split("\n")))
    changes = [Change(a.name, a, b, (), rows)] if old != new else []
    return Difference(tuple(changes), refused=reason)


def _change(old, new, moved, sources):
    """The Change of a block; sources: the lines of both files."""
    words, parts = ["moved"] * moved, [(old, new, moved)]
    if not (old and new):
        words.append("added" if new else "removed")
    else:
        parts = match(methods(old), methods(new))
        if reordered := [b.name for _, b, moved in parts if moved]:
            words.append(f"methods reordered: {', '.join(reordered)}")
        kinds = set()
        for a, b, _ in parts:
            kinds |= classify(a.text, b.text) if a and b else {CODE}
        if kinds and CODE not in kinds:
            words.append(f"{' and '.join(sorted(kinds - {FORMATTING} or kinds))} only")
        if kinds <= {FORMATTING}:
            parts = []  # there is nothing to see
    rows = [row for a, b, _ in parts for row in _rows(a, b, sources)]
    return Change((new or old).name, old, new, tuple(words), tuple(rows))


def _rows(old, new, sources):
    """The rows of two blocks, of which one may be None."""
    return tuple(align(*map(_lines, (old, new), sources)))


def _lines(block, source):
    """The Lines of a block; other lines of the file may come between those of its imports."""
    lines, number = [], block.line - 1 if block else 0
    for text in block.text.split("\n") if block else []:
        number = source.index(text, number) + 1
        lines.append(Line(number, text))
    return lines
