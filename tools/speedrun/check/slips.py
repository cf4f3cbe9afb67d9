"""Known wrong edits, from slips.toml: they test the checker, and give words to what it finds."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedrun.history.blocks import split_blocks

TABLE = Path(__file__).with_name("slips.toml")


@dataclass(frozen=True, eq=False)
class Slip:
    """A wrong edit of a block: old becomes new, and `words` say what is wrong then.

    It serves as a diagnosis wherever the block still has the old text. more: further (old, new)
    that belong to it, in the same block. since: id of the first milestone where it is
    wrong; until: of the first where it does no harm any more.
    """

    name: str
    block: str
    old: str
    new: str
    words: str = ""
    more: Sequence[Sequence[str]] = ()
    since: str = ""
    until: str = ""

    def apply(self, text: str) -> str | None:
        """The script with the slip in it, or None if its block has not each old text just once."""
        block = edited = _blocks(text).get(self.block, "")
        for old, new in ((self.old, self.new), *self.more):
            if block.count(old) != 1:
                return None
            edited = edited.replace(old, new)
        return text.replace(block, edited, 1)


@cache
def _blocks(text):
    return {block.name: block.text for block in split_blocks(text)}


@cache
def load_slips() -> tuple[Slip, ...]:
    """All slips, in the order of the table. Raises TypeError for an entry that does not fit."""
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["slip"]
    return tuple(Slip(**entry) for entry in entries)


def slips_of(block: str, text: str) -> list[tuple[str, str]]:
    """[(script, words)] of the slips of a block that fit a milestone's text and have words."""
    return [(edited, slip.words) for slip in load_slips()
            if slip.block == block and slip.words and (edited := slip.apply(text))]
