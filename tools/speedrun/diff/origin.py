"""Follows lines and blocks through a chain: who brought or removed each line, and all versions of
a block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from speedrun.base.errors import UserError
from speedrun.diff.align import SAME, Row
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


@dataclass(frozen=True)
class Owners:
    """Who changed what between a milestone and a descendant: {number of a line: milestone} of the
    lines that the descendant has more (`added`) and of those that it lost (`removed`)."""

    added: dict[int, Milestone]
    removed: dict[int, Milestone]

    def of(self, rows: Iterable[Row]) -> list[Milestone]:
        """The owners of rows of the difference between the two, in the order of the chain."""
        found = {self.added.get(row.new.number) for row in rows if row.new and row.mark != SAME}
        found |= {self.removed.get(row.old.number) for row in rows if row.old and row.mark != SAME}
        return sorted(found - {None}, key=lambda m: m.name)


def owners_between(manifest: Manifest, old: Milestone, new: Milestone) -> Owners | None:
    """The Owners between a milestone and its descendant; None where `new` does not descend from
    `old`, or is its child, which owns everything.

    The last milestone that changed a line owns it; of a line that an ancestor lost, the first.
    """
    line = manifest.lineage(new)
    if old not in line[2:]:
        return None
    line = line[: line.index(old) + 1][::-1]
    texts = [read_script(m) for m in line]
    from_old = {n: n for n in _numbers(texts[0])}  # {line now: line in `old`}
    added, removed = {}, {}
    for m, before, after in zip(line[1:], texts, texts[1:], strict=False):
        kept = kept_lines(before, after)  # {line after: line before}
        stayed = {n: from_old[k] for n, k in kept.items() if k in from_old}
        lost = set(from_old.values()) - set(stayed.values())
        removed.update(dict.fromkeys(lost, m))
        added = {n: added[kept[n]] if kept.get(n) in added else m
                 for n in _numbers(after) if n not in stayed}
        from_old = stayed
    return Owners(added, removed)


def block_life(manifest: Manifest, name: str) -> list[Version]:
    """The versions of a block, in the manifest's order: a version is where the block differs from
    the parent's. Where a milestone declares another block as its successor, the life goes on there.

    Raises UserError where no script has such a block.
    """
    versions, names = [], {}  # names: {id: what the block is called from that milestone on}
    for m in manifest.milestones:
        now = [names.get(m.parent, name)]
        now += [s.by for s in m.succession if s.block == now[0]]
        names[m.id] = now[-1]
        parent = read_script(manifest.get(m.parent)) if m.parent else ""
        for one in now:
            if change := block_change(parent, read_script(m), one):
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


def _numbers(text):
    """The numbers of a text's lines."""
    return range(1, len(text.removesuffix("\n").split("\n")) + 1)


def read_script(milestone: Milestone) -> str:
    """The text of a milestone's script."""
    return milestone.script.read_text(encoding="utf-8")
