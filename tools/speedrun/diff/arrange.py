"""In which order a difference is shown, and what stands beside a block: why it changes, and which
milestones changed it."""

from dataclasses import dataclass

from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side, ideas_between, is_step
from speedrun.diff.origin import Owners, owners_between
from speedrun.history.blocks import FREE, UNCOUNTED
from speedrun.history.guide import whys
from speedrun.history.manifest import load_manifest

MOST_OWNERS = 2  # of a block between distant milestones, up to which each one's why is shown


@dataclass(frozen=True)
class Arranged:
    """A difference as it is shown: the block in which one sees the idea, if it is one idea's
    change, then the others in reading order; `last` are retunes, headings, imports and the card.

    whys: {block: [(id of a milestone, or "" where there is only one, why it changes the block)]};
    owners: between distant milestones, who changed each line.
    """

    changes: tuple[Change, ...]
    last: tuple[Change, ...]
    whys: dict[str, list[tuple[str, str]]]
    owners: Owners | None

    @property
    def all(self) -> tuple[Change, ...]:
        """All changes, in order."""
        return (*self.changes, *self.last)


def arrange(old: Side, new: Side, comparison: Difference) -> Arranged:
    """The Arranged of a comparison of two sides. Raises UserError for a guide that does not fit."""
    ideas = [m for _, m in ideas_between(old, new)]
    shown = ideas[0].shows if len(ideas) == 1 else None
    first = [c for c in comparison.changes if c.name == shown]
    last = [c for c in comparison.changes if c.name != shown and (
        c.name in UNCOUNTED or c.name.startswith("heading: "))]
    last.sort(key=lambda c: (c.name in FREE, c.name == FREE[0]))  # imports, then the card
    rest = [c for c in comparison.changes if c not in first and c not in last]
    both = old.milestone and new.milestone
    owners = owners_between(load_manifest(), old.milestone, new.milestone) if both else None
    reasons = {}
    if is_step(old, new):
        reasons = {block: [("", why)] for block, why in whys(new.milestone).items()}
    elif owners:
        for c in comparison.changes:
            by = owners.of(c.rows)
            if len(by) <= MOST_OWNERS:
                reasons[c.name] = [(m.id, whys(m)[c.name]) for m in by if c.name in whys(m)]
    return Arranged((*first, *rest), tuple(last), reasons, owners)
