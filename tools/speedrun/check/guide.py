"""Reads guide.toml: hints to the blocks that a milestone changes, and known wrong edits of them.

What a guide says of a block holds until a descendant changes the block.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.blocks import split_blocks
from speedrun.history.manifest import Milestone, load_manifest
from speedrun.history.schema import Pairs, Text, build, check_keys


@dataclass(frozen=True)
class Hint:
    """The texts for a block; the mathematics may be empty, and its level is left out then."""

    block: str
    nudge: str = ""
    mathematics: str = ""
    steps: str = ""


@dataclass(frozen=True, eq=False)
class Slip:
    """A wrong edit of a block: old becomes new, and `words` say what is wrong then; without words
    it only tests the checker. more: further (old, new) that belong to it, in the same block."""

    name: str
    block: str
    old: str
    new: Text
    words: str = ""
    more: Pairs = ()

    def apply(self, text: str) -> str | None:
        """The script with the slip in it, or None if its block has not each old text just once."""
        block = edited = _blocks(text).get(self.block, "")
        for old, new in ((self.old, self.new), *self.more):
            if block.count(old) != 1:
                return None
            edited = edited.replace(old, new)
        return text.replace(block, edited, 1)


@dataclass(frozen=True)
class Guide:
    """What a guide.toml holds."""

    hints: tuple[Hint, ...] = ()
    slips: tuple[Slip, ...] = ()


@cache
def load_guide(milestone: Milestone) -> Guide:
    """The milestone's own guide, an empty one without a file. Raises UserError, one line, for an
    entry that does not fit, and OSError."""
    file = milestone.folder / "guide.toml"
    if not file.exists():
        return Guide()
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        check_keys("", table, ("hint", "slip"), ())
        entries = {key: [build(f"{key} {number}: ", kind, entry)
                         for number, entry in enumerate(table.get(key, ()), start=1)]
                   for key, kind in (("hint", Hint), ("slip", Slip))}
    except ValueError as error:
        raise UserError(f"{short(file)}: {error}") from None
    return Guide(tuple(entries["hint"]), tuple(entries["slip"]))


def slips_of(block: str, milestone: Milestone) -> tuple[Slip, ...]:
    """The slips of a block at a milestone: those of the last milestone that changed it."""
    return tuple(slip for slip in next(_guides(block, milestone)).slips if slip.block == block)


def find_hint(name: str, milestone: Milestone) -> Hint | None:
    """The hint to a block, by its name in any case, or to a look, such as syntax: that of the last
    milestone that changed it and has one."""
    name = name.casefold()
    found = (hint for guide in _guides(name, milestone) for hint in guide.hints)
    return next((hint for hint in found if hint.block.casefold() == name), None)


def _guides(block, milestone) -> Iterator[Guide]:
    """The guides of the milestones that changed a block, the youngest first; the root's is last."""
    for m in load_manifest().lineage(milestone):
        if m.parent is None or block.casefold() in map(str.casefold, m.changes):
            yield load_guide(m)


@cache
def _blocks(text):
    return {block.name: block.text for block in split_blocks(text)}
