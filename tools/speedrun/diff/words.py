"""Says in words what a comparison found, for the terminal and for the page."""

from collections.abc import Sequence

from speedrun.base.text import visible
from speedrun.diff.align import FOLDED, INDENTED, Row, counts
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


def folded_line(rows: Sequence[Row]) -> str:
    """What stands in the place of lines that are not shown, alike in what happened to them."""
    fate = "re-indented" if rows[0].mark == INDENTED else "the same"
    return f"{FOLDED} {len(rows)} lines {fate}"


def summary_line(old: Side, new: Side, comparison: Difference) -> str:
    """How many blocks changed, came, went and stayed, or why there is nothing to tell of them."""
    changes = comparison.changes
    if not changes and old.text != new.text:
        return "the blocks are the same; --full also shows blank lines between blocks"
    if not changes and old.path.read_bytes() != new.path.read_bytes():
        return "the same text, in another encoding or with other line endings"
    if not changes:
        return "no difference"
    if comparison.refused:
        return f"compared line by line: {visible(comparison.refused)}"
    added = sum(change.old is None for change in changes)
    removed = sum(change.new is None for change in changes)
    parts = {"changed": len(changes) - added - removed, "added": added, "removed": removed,
             "unchanged": len(comparison.unchanged)}
    return "blocks: " + ", ".join(f"{count} {word}" for word, count in parts.items() if count)
