"""Compares two scripts block by block, by their structure and not only by their lines."""

from dataclasses import dataclass, replace
from functools import cache
from textwrap import shorten

from speedrun.base.errors import UserError
from speedrun.diff.align import INDENTED, SAME, Line, Row, align, counts, mark_moved
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
        parts += [f"{indented} line{'s' * (indented > 1)} re-indented"] * bool(indented)
        moved = max(sum(line is not None and line.moved for line in side)
                    for side in ([row.old for row in self.rows], [row.new for row in self.rows]))
        parts += [f"{moved} of them moved"] * bool(moved)
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

    @property
    def lines(self) -> tuple[int, int]:
        """Lines added and removed; a line that is only re-indented is neither."""
        return counts([row for change in self.changes for row in change.rows])[:2]

    @property
    def size(self) -> tuple[int, int]:
        """The lines without those of card, imports and Hyperparameters."""
        return Difference(tuple(c for c in self.changes if c.name not in UNCOUNTED)).lines

    def only(self, names: list[str]) -> "Difference":
        """The same for the blocks of these names: a line that moved to another block is then a
        removed one. Raises UserError for an unknown name, and if there are no blocks."""
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
            _marked([change for change in self.changes if change.name in names]),
            tuple(name for name in self.unchanged if name in names),
        )


@cache
def find_difference(old: str, new: str, names: tuple[str, str] = ("old", "new")) -> Difference:
    """The Difference of two texts; `names` are what its `refused` calls them."""
    blocks, sources = [], (old.split("\n"), new.split("\n"))
    for name, text in zip(names, (old, new), strict=True):
        try:
            blocks.append(split_blocks(text))
        except SyntaxError as error:
            line = f"line {error.lineno}: " if error.lineno else ""  # none for a null byte
            return _as_text(old, new, f"{name} is not Python: {line}{error.msg}")
        except (ValueError, RecursionError, MemoryError) as error:
            reason = shorten(str(error), LONGEST_REASON, placeholder=" …")
            return _as_text(old, new, f"{name} has no clear blocks: {reason}")
    changes, unchanged = [], []
    for a, b, moved in match(*blocks):
        if a and b and a.text == b.text and not moved:
            unchanged.append(b.name)
        else:
            changes.append(_change(a, b, moved, sources))
    return Difference(_marked(changes), tuple(unchanged))


def block_change(old: str, new: str, name: str) -> Change | None:
    """The Change of one block between two texts, "" for none; None if its lines are the same, even
    if they moved. Raises what `split_blocks` raises."""
    a, b = (next((block for block in split_blocks(text) if block.name == name), None)
            for text in (old, new))
    if (a and a.text) == (b and b.text):
        return None
    return _change(a, b, False, (old.split("\n"), new.split("\n")))


def kept_lines(old: str, new: str) -> dict[int, int]:
    """{number of a line in `new`: its number in `old`} of the lines that stayed or were only
    re-indented, also where their block moved. Blank lines above a block go with it.

    Raises what `split_blocks` raises.
    """
    sources, kept = (old.split("\n"), new.split("\n")), {}
    for a, b, _ in match(split_blocks(old), split_blocks(new)):
        if not (a and b):
            continue
        parts = [(a, b, False)] if a.text == b.text else match(methods(a), methods(b))
        pairs = [pair for x, y, _ in parts if x and y for pair in _kept(x, y, sources)]
        kept.update(pairs)
        for y, x in [*pairs, (b.line, a.line)]:
            while min(x, y) > 1 and sources[0][x - 2] == sources[1][y - 2] == "":
                x, y = x - 1, y - 1
                kept.setdefault(y, x)
    return kept


def _kept(old, new, sources):
    """(line now, line before) of what stayed of a block or method, perhaps re-indented."""
    if old.text == new.text:  # to align takes long
        numbers = (_numbers(block, block.text.split("\n"), source)
                   for block, source in zip((new, old), sources[::-1], strict=True))
        return zip(*numbers, strict=True)
    return [(row.new.number, row.old.number) for row in _rows(old, new, sources)
            if row.mark in (SAME, INDENTED)]


def _marked(changes):
    """The changes, with the lines marked that moved from one to another, or within one."""
    rows = mark_moved([change.rows for change in changes])
    return tuple(map(lambda change, rows: replace(change, rows=rows), changes, rows))


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
    """The Lines of a block."""
    if block is None:
        return []
    texts = block.text.split("\n")
    return [Line(*pair) for pair in zip(_numbers(block, texts, source), texts, strict=True)]


def _numbers(block, texts, source):
    """The numbers of a block's lines; other lines of the file may come between its imports."""
    first = block.line - 1
    if source[first : first + len(texts)] == texts:
        return range(block.line, block.line + len(texts))
    numbers = [first]
    for text in texts:
        numbers.append(source.index(text, numbers[-1]) + 1)
    return numbers[1:]
