"""Carry a repaired block from a milestone to the descendants that still hold the old one."""

from dataclasses import dataclass

from speedrun.history.blocks import FREE, changed_blocks, split_blocks

CARRIED, ALREADY, DIFFERS = "carried", "already there", "differs"


@dataclass(frozen=True)
class Repair:
    """A block's name, its text before the repair and after it."""

    block: str
    old: str
    new: str


def repairs(before: str, after: str, wanted: list[str]) -> list[Repair]:
    """The blocks that differ between two texts of one script; only the wanted ones, if any are.

    Card and imports are every file's own and left out. Raises ValueError, one line, for a wanted
    block that is unknown, did not change or is free to differ, and for a block that one text
    lacks: where it belongs in a descendant is for a person to say.
    """
    changed = {
        name: pair for name, pair in changed_blocks(before, after).items() if name not in FREE
    }
    for name in wanted:
        if name in FREE:
            raise ValueError(f"{name} is every file's own; edit it by hand")
        if name not in changed:
            known = name in {block.name for block in split_blocks(after)}
            raise ValueError(f"block {name} {'did not change' if known else 'does not exist'}")
    found = [Repair(name, *pair) for name, pair in changed.items() if name in (wanted or changed)]
    for repair in found:
        if not (repair.old and repair.new):
            fate = "added" if repair.new else "removed"
            raise ValueError(f"block {repair.block} was {fate}; do so by hand in the descendants")
    return found


def carry(repair: Repair, source: str) -> tuple[str, str]:
    """Puts the repaired block into the text of a script that holds the old one byte for byte;
    returns CARRIED, ALREADY (it holds the new one) or DIFFERS (another or none), and the text."""
    block = next((b for b in split_blocks(source) if b.name == repair.block), None)
    if block is not None and block.text == repair.new:
        return ALREADY, source
    if block is None or block.text != repair.old:
        return DIFFERS, source
    lines, first = source.split("\n"), block.line - 1
    lines[first : first + block.text.count("\n") + 1] = repair.new.split("\n")
    return CARRIED, "\n".join(lines)
