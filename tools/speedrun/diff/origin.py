"""Follows lines and blocks through a chain: who brought each line, and all versions of a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from speedrun.base.errors import UserError
from speedrun.diff.difference import Change, block_change, kept_lines
from speedrun.history.blocks import split_blocks
from speedrun.history.manifest import Manifest, Milestone
from speedrun.history.schema import nearest


@dataclass(frozen=True)
class Version:
    """What a milestone did to a block; `change` has no rows' old side where it added the block."""

    milestone: Milestone
    change: Change


@cache
def line_origins(manifest: Manifest, milestone: Milestone) -> list[tuple[str, Milestone]]:
    """(line, the milestone that added it or last changed it) for each line of a script.

    A line keeps its origin when its block moves or when it is re-indented.
    """
    text, before, kept = read_script(milestone), [], {}
    if milestone.parent:
        parent = manifest.get(milestone.parent)
        before, kept = line_origins(manifest, parent), kept_lines(read_script(parent), text)
    lines = text.removesuffix("\n").split("\n")
    return [(line, before[kept[n] - 1][1] if n in kept else milestone)
            for n, line in enumerate(lines, start=1)]


def block_life(manifest: Manifest, name: str) -> list[Version]:
    """The versions of a block, in the manifest's order: a version is where the block differs from
    the parent's. Raises UserError where no script has such a block."""
    versions = []
    for m in manifest.milestones:
        parent = read_script(manifest.get(m.parent)) if m.parent else ""
        if change := block_change(parent, read_script(m), name):
            versions.append(Version(m, change))
    if not versions:
        known = {b.name for m in manifest.milestones for b in split_blocks(read_script(m))}
        near = nearest(name, known)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f'no block is called "{name}"{hint}')
    return versions


def count_lines(origins: Sequence[tuple[str, Milestone]]) -> list[tuple[Milestone, int]]:
    """(milestone, its lines), in the order of the chain, of what line_origins returns."""
    counts = {}
    for _, m in origins:
        counts[m] = counts.get(m, 0) + 1
    return sorted(counts.items(), key=lambda pair: pair[0].name)


def read_script(milestone: Milestone) -> str:
    """The text of a milestone's script."""
    return milestone.script.read_text(encoding="utf-8")
