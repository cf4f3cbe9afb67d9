"""The checks by name, with the milestone from which on each holds, and their hints."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedrun.manifest import Manifest, Milestone, load_manifest
from speedrun.schema import Texts, build

CATALOG = Path(__file__).with_name("checks.toml")
LEVELS = 4  # of hints: a nudge, the mathematics, the steps, the diff


@dataclass(frozen=True)
class Check:
    """One `[[check]]` entry: it holds for the milestone `since` and its descendants; a later entry
    of the same name replaces it for its own. blocks: where in a snapshot the answer stands."""

    name: str
    since: str
    nudge: str
    mathematics: str
    steps: str
    blocks: Texts = ()

    def hint(self, level: int) -> str:
        """The text of level 1, 2 or 3."""
        return (self.nudge, self.mathematics, self.steps)[level - 1]


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
