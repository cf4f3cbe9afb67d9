"""Says in words what a comparison found, for the terminal and for the page."""

from speedrun.diff.align import Gap, counts
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side


def what(change: Change) -> str:
    """What happened to a block: in words, and the lines that came and went."""
    added, removed, indented = counts(change.rows)
    lines = [f"+{added}"] * bool(added) + [f"-{removed}"] * bool(removed)
    parts = [*change.words, " ".join(lines)]
    parts += [f"{indented} lines re-indented"] * bool(indented)
    return ", ".join(filter(None, parts)) or "lines without text"


def where(change: Change) -> str:
    """The line where a block begins, in both files if that differs."""
    lines = [block.line for block in (change.old, change.new) if block]
    return "line " + " → ".join(map(str, dict.fromkeys(lines)))


def gap_line(gap: Gap) -> str:
    """What stands in the place of lines that are not shown."""
    return f"⋯ {gap.lines} lines {'re-indented' if gap.indented else 'the same'}"


def summary_line(comparison: Difference) -> str:
    """What there is to show: how many blocks, or why there are none."""
    if comparison.refused:
        return f"compared line by line: {comparison.refused}"
    return f"blocks: {blocks_line(comparison)}"


def blocks_line(comparison: Difference) -> str:
    """How many blocks changed, came, went and stayed, in one line."""
    both = sum(bool(change.old and change.new) for change in comparison.changes)
    added = sum(change.old is None for change in comparison.changes)
    parts = [(both, "changed"), (added, "added"),
             (len(comparison.changes) - both - added, "removed"),
             (len(comparison.unchanged), "unchanged")]
    return ", ".join(f"{count} {word}" for count, word in parts if count)


def no_change_line(old: Side, new: Side, comparison: Difference) -> str | None:
    """Why there is nothing to show, or None if there is something."""
    if comparison.changes:
        return None
    if old.text != new.text:
        return "the blocks are the same; --full also shows blank lines between blocks"
    if old.path.read_bytes() != new.path.read_bytes():
        return "the same text, in another encoding or with other line endings"
    return "no difference"
