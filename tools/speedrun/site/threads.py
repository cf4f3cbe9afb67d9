"""What the page of a thread shows: of each step the lines, the reasons, the gain and the number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from speedrun.diff.align import SAME, Row
from speedrun.diff.difference import Change, find_difference
from speedrun.diff.origin import read_script
from speedrun.history.gains import Gain, own_gain
from speedrun.history.guide import whys
from speedrun.history.manifest import Manifest, Milestone
from speedrun.history.threads import Step, Thread, number_of

AROUND = 2  # unchanged lines that are kept on both sides of a passage


@dataclass(frozen=True)
class Shown:
    """A step as it is shown. number: as text; share: its length as a bar, of the thread's largest
    number; changes: [(change of a block, why it changes or None)]."""

    milestone: Milestone
    says: str
    number: str
    share: float
    gain: Gain | None
    changes: list[tuple[Change, str | None]]


def shown_steps(manifest: Manifest, thread: Thread) -> list[Shown]:
    """The steps of a thread. Raises ValueError, one line, for texts that no passage holds."""
    found = []
    for step in thread.step:
        m = manifest.get(step.milestone)
        found.append(Shown(m, step.says, number_of(thread, step, m), 0.0, own_gain(manifest, m),
                           _changes(manifest, m, thread, step)))
    sizes = [float(s.number.replace(",", "") or 0) for s in found]
    return [replace(s, share=size / max(sizes)) if size else s
            for s, size in zip(found, sizes, strict=True)]


def _changes(manifest, m, thread, step):
    if not step.blocks:
        return []
    texts = [read_script(manifest.get(m.parent)) if m.parent else "", read_script(m)]
    known, reasons = {c.name: c for c in find_difference(*texts).changes}, whys(m)
    changes = []
    for name in step.blocks:
        rows = passages_with(known[name].rows, step)
        if not rows:
            raise ValueError(f"history/threads.toml: {thread.name}: {m.slug}: no passage of {name}"
                             f" has {step.only}")
        changes.append((replace(known[name], rows=rows), reasons.get(name)))
    return changes


def passages_with(rows: Sequence[Row], step: Step) -> tuple[Row, ...]:
    """The rows of a step's passages, which hold one of its texts, and those around them; all rows,
    where the step names no texts."""
    if not step.only:
        return tuple(rows)
    kept, start = set(), 0
    while start < len(rows):
        end = start
        while end < len(rows) and (rows[end].mark == SAME) == (rows[start].mark == SAME):
            end += 1
        lines = [line.text for row in rows[start:end] for line in (row.old, row.new) if line]
        if rows[start].mark != SAME and any(text in line for text in step.only for line in lines):
            kept |= set(range(max(0, start - AROUND), min(len(rows), end + AROUND)))
        start = end
    return tuple(row for place, row in enumerate(rows) if place in kept)
