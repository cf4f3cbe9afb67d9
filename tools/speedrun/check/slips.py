"""Known wrong edits, from slips.toml: they test the checker, and give words to what it finds."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedrun.history.blocks import split_blocks

TABLE = Path(__file__).with_name("slips.toml")


@dataclass(frozen=True)
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
    more: tuple[tuple[str, str], ...] = ()
    since: str = ""
    until: str = ""

    def applies(self, text: str) -> bool:
        """Whether the script's block has each old text just once."""
        block = _blocks(text).get(self.block, "")
        return all(block.count(old) == 1 for old, _ in ((self.old, self.new), *self.more))

    def apply(self, text: str) -> str:
        """The script, to which the slip applies, with the slip in it."""
        block = edited = _blocks(text)[self.block]
        for old, new in ((self.old, self.new), *self.more):
            edited = edited.replace(old, new)
        return text.replace(block, edited, 1)


@cache
def _blocks(text):
    return {block.name: block.text for block in split_blocks(text)}


@cache
def load_slips() -> tuple[Slip, ...]:
    """All slips, in the order of the table. Raises TypeError for an entry that does not fit."""
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["slip"]
    return tuple(Slip(**entry | {"more": tuple(map(tuple, entry.get("more", ())))})
                 for entry in entries)


def slips_of(block: str, text: str) -> list[Slip]:
    """The slips of a block that fit a milestone's text and have words."""
    return [slip for slip in load_slips()
            if slip.block == block and slip.words and slip.applies(text)]
