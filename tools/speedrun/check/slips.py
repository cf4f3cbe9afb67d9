"""Known wrong edits, from slips.toml: they test the checker, and give words to what it finds."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedrun.history.blocks import split_blocks
from speedrun.history.manifest import Milestone, load_manifest

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
        block = _block(text, self.block)
        return all(block.count(old) == 1 for old, _ in ((self.old, self.new), *self.more))

    def apply(self, text: str) -> str:
        """The script with the slip in it. Raises ValueError if it does not fit."""
        if not self.applies(text):
            raise ValueError(f"slip {self.name!r} does not fit {self.block}")
        block = edited = _block(text, self.block)
        for old, new in ((self.old, self.new), *self.more):
            edited = edited.replace(old, new)
        return text.replace(block, edited, 1)


def _block(text, name):
    return next((b.text for b in _split(text) if b.name == name), "")


@cache
def _split(text):
    return split_blocks(text)


@cache
def load_slips() -> tuple[Slip, ...]:
    """All slips, in the order of the table. Raises ValueError for an entry that does not fit."""
    raw = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    found = []
    for entry in raw.get("slip", []):
        try:
            more = tuple((old, new) for old, new in entry.get("more", ()))
            found.append(Slip(**{**entry, "more": more}))
        except (TypeError, ValueError) as error:
            raise ValueError(f'slip "{entry.get("name", "?")}": {error}') from None
    return tuple(found)


def cases() -> list[tuple[Milestone, Slip]]:
    """Every slip at every milestone at which it is new: a root, or one that changes its block."""
    found = []
    for milestone in load_manifest().written():
        text = milestone.script.read_text(encoding="utf-8")
        line = [ancestor.id for ancestor in load_manifest().lineage(milestone)]
        for slip in load_slips():
            new = milestone.parent is None or slip.block in milestone.changes
            wrong = (not slip.since or slip.since in line) and slip.until not in line
            if new and wrong and slip.applies(text):
                found.append((milestone, slip))
    return found


def slips_of(block: str, text: str) -> list[Slip]:
    """The slips of a block that fit a milestone's text and have words."""
    return [slip for slip in load_slips()
            if slip.block == block and slip.words and slip.applies(text)]
