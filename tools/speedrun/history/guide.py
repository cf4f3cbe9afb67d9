"""Reads a milestone's guide.toml: why it changes each block, hints for a learner who writes it,
slips, known wrong edits, and right variants."""

import tomllib
from dataclasses import dataclass, field
from functools import cache

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.blocks import FREE, UNCOUNTED, split_blocks
from speedrun.history.fields import retuned
from speedrun.history.manifest import Milestone
from speedrun.history.schema import Pairs, Text, build, check_keys

LONGEST_WHY = 40  # words


@dataclass(frozen=True)
class Hint:
    """The texts for a block. why: what its change does for the idea, shown beside the diff; the
    others are levels of help for a learner, of which an empty one is left out."""

    block: str
    nudge: str = ""
    mathematics: str = ""
    steps: str = ""
    why: str = ""

    @property
    def levels(self) -> bool:
        """Whether it helps a learner, and does not only explain."""
        return bool(self.nudge or self.mathematics or self.steps)


@dataclass(frozen=True, eq=False)
class Slip:
    """A wrong edit of a block: old becomes new, and `words` say what is wrong then. more: further
    (old, new) that belong to it, in the same block."""

    name: str
    block: str
    old: str
    new: Text
    words: str
    more: Pairs = ()

    def apply(self, text: str) -> str | None:
        """The script with the slip in it, or None if its block has not each old text just once."""
        block = edited = blocks_of(text).get(self.block, "")
        for old, new in ((self.old, self.new), *self.more):
            if block.count(old) != 1:
                return None
            edited = edited.replace(old, new)
        return text.replace(block, edited, 1)


@dataclass(frozen=True, eq=False)
class Right:
    """Another wording of a milestone's script, which the checker accepts. Each (old, new) of the
    edits is replaced wherever old occurs; `blocks` are replaced whole, {name: new text}."""

    name: str
    edits: Pairs = ()
    blocks: dict = field(default_factory=dict)

    def apply(self, text: str, snapshot: str) -> str | None:
        """The script with this wording; its blocks' old texts are those of the snapshot. None if
        the script has not all that is replaced."""
        blocks = blocks_of(snapshot)
        edits = [*self.edits, *((blocks.get(name), new.strip("\n"))
                                for name, new in self.blocks.items())]
        if not all(old and old in text for old, _ in edits):
            return None
        for old, new in edits:
            text = text.replace(old, new)
        return text


@dataclass(frozen=True)
class Guide:
    """What a guide.toml holds."""

    hints: tuple[Hint, ...] = ()
    slips: tuple[Slip, ...] = ()
    rights: tuple[Right, ...] = ()


KINDS = {"hint": Hint, "slip": Slip, "right": Right}


@cache
def load_guide(milestone: Milestone) -> Guide:
    """The milestone's own guide, an empty one without a file. Raises UserError, one line, for an
    entry that does not fit, and OSError."""
    file = milestone.folder / "guide.toml"
    if not file.exists():
        return Guide()
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        check_keys("", table, KINDS, ())
        entries = {key: [build(f"{key} {number}: ", kind, entry)
                         for number, entry in enumerate(table.get(key, ()), start=1)]
                   for key, kind in KINDS.items()}
    except ValueError as error:
        raise UserError(f"{short(file)}: {error}") from None
    for number, hint in enumerate(entries["hint"], start=1):
        words = len(hint.why.split())
        if words > LONGEST_WHY:
            raise UserError(f'{short(file)}: hint {number}: "why" has {words} words, at most'
                            f" {LONGEST_WHY} fit beside a diff")
    return Guide(*map(tuple, entries.values()))


def whys(milestone: Milestone) -> dict[str, str]:
    """{block: why the milestone changes, adds or removes it} of the blocks with such a text."""
    return {hint.block: hint.why for hint in load_guide(milestone).hints if hint.why}


def unexplained(milestone: Milestone, parent: Milestone) -> list[str]:
    """The declared blocks that need a why and have none. Headings need none, and hyperparameters
    only if the parent has one that is removed or has another default. Raises ValueError, one line,
    for a script that is not Python, and as load_guide."""
    known = whys(milestone)
    free = FREE if retuned(parent.script, milestone.script) else UNCOUNTED
    return [name for name in milestone.changes if name not in known
            and name not in free and not name.startswith("heading: ")]


@cache
def blocks_of(text: str) -> dict[str, str]:
    """{name: text} of a script's blocks, without headings."""
    return {b.name: b.text for b in split_blocks(text) if not b.name.startswith("heading: ")}
