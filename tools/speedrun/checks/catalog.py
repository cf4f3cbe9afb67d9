"""The checks by name, with the milestone from which on each holds, and their hints."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template

from speedrun.manifest import Manifest, Milestone, load_manifest
from speedrun.schema import Texts, build

CATALOG = Path(__file__).with_name("checks.toml")
LEVELS = 4  # of hints: a nudge, the mathematics, the steps, the diff


@dataclass(frozen=True)
class Check:
    """One `[[check]]` entry: it holds for the milestone `since` and its descendants; a later entry
    of the same name replaces it for its own. blocks: where in a snapshot the answer stands.
    mathematics is "" where there is none."""

    name: str
    since: str
    nudge: str
    steps: str
    mathematics: str = ""
    blocks: Texts = ()

    def hint(self, level: int, milestone: Milestone) -> str:
        """The text of level 1, 2 or 3 for a milestone, a paragraph or step per line; "" if there is
        none."""
        text = (self.nudge, self.mathematics, self.steps)[level - 1].strip()
        text = Template(text).substitute(id=milestone.id, parent=milestone.parent)
        return re.sub(r"\n(?!\d\. )", " ", text)

    def next_level(self, level: int) -> int:
        """The level from `level` on that has something to say."""
        return level + 1 if level == 2 and not self.mathematics else min(level, LEVELS)


class Catalog:
    """All entries, and which of them hold for a milestone."""

    def __init__(self, checks: list[Check], manifest: Manifest):
        self.checks = checks
        self.manifest = manifest

    def get(self, name: str, milestone: Milestone) -> Check:
        """The entry of a check for a milestone. Raises KeyError if it has none."""
        entries = {check.since: check for check in self.checks if check.name == name}
        for id in self.lineage(milestone):
            if id in entries:
                return entries[id]
        raise KeyError(f"{milestone.id} has no check {name!r}")

    def names(self, milestone: Milestone) -> list[str]:
        """The names of all checks that hold for a milestone."""
        return list(dict.fromkeys(c.name for c in self.checks if self.applies(c.name, milestone)))

    def applies(self, name: str, milestone: Milestone) -> bool:
        """Whether a check holds for a milestone."""
        line = self.lineage(milestone)
        return any(check.name == name and check.since in line for check in self.checks)

    def lineage(self, milestone: Milestone) -> list[str]:
        """Ids from the milestone up to the root of its chain."""
        ids = [milestone.id]
        while (parent := self.manifest.get(ids[-1]).parent) is not None:
            ids.append(parent)
        return ids


@cache
def load_catalog() -> Catalog:
    """The Catalog of checks.toml. Raises ValueError, one line, for an entry that does not fit."""
    raw = tomllib.loads(CATALOG.read_text(encoding="utf-8"))
    checks = [build(f'check "{entry.get("name", "?")}"', Check, entry) for entry in raw["check"]]
    return Catalog(checks, load_manifest())
