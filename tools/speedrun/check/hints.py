"""Hints to a block, and known wrong edits of it, from the milestones' guides.

What a guide says of a block holds until a descendant changes the block. After the guide's texts, at
most three, comes the block as the milestone has it.
"""

import re
import sys
from collections.abc import Iterator

from speedrun.base.errors import UserError
from speedrun.check.screen import Screen
from speedrun.history.blocks import changed_blocks
from speedrun.history.guide import Guide, Hint, Slip, blocks_of, load_guide
from speedrun.history.manifest import Milestone, load_manifest
from speedrun.history.schema import nearest

TITLES = ("a nudge", "the mathematics", "the steps", "the diff")
LEVELS = len(TITLES)


def slips_of(block: str, milestone: Milestone) -> tuple[Slip, ...]:
    """The slips of a block at a milestone: those of the last milestone that changed it."""
    return tuple(slip for slip in next(_guides(block, milestone)).slips if slip.block == block)


def applicable_slips(block: str, milestone: Milestone, text: str) -> list[tuple[Slip, str]]:
    """[(slip, script with it)]: the slips of a block of this name that can be made in the
    milestone's script `text`, wherever they were written; the milestone's own come first."""
    own = slips_of(block, milestone)
    others = [slip for other in load_manifest().milestones for slip in load_guide(other).slips
              if slip.block == block and slip not in own]
    found = {}
    for slip in (*own, *others):
        if wrong := slip.apply(text):
            found.setdefault(wrong, slip)
    return [(slip, wrong) for wrong, slip in found.items()]


def find_hint(name: str, milestone: Milestone) -> Hint | None:
    """The hint to a block, by its name in any case, or to a look, such as syntax: that of the last
    milestone that changed it and has one."""
    def found(block):
        hints = (hint for guide in _guides(block, milestone) for hint in guide.hints)
        return next((hint for hint in hints if hint.block == block and hint.levels), None)

    if hint := found(name):  # Stage and stage are two blocks
        return hint
    known = (hint.block for guide in _guides(None, milestone) for hint in guide.hints
             if hint.levels and hint.block.casefold() == name.casefold())
    return next(filter(None, map(found, known)), None)


def _guides(block, milestone) -> Iterator[Guide]:
    """The guides of the milestones that changed a block (None: any), the youngest first; the
    root's is last, and for a block that it has borrowed come those of the lender."""
    for m in load_manifest().lineage(milestone):
        if block is None or m.parent is None or block in m.changes:
            borrowed = m.borrows and (block is None or block in m.borrows.blocks)
            if block is None or not borrowed:
                yield load_guide(m)
            if borrowed:
                yield from _guides(block, load_manifest().get(m.borrows.lender))


def hint_of(name: str, milestone: Milestone) -> Hint:
    """The hint to a block (or to a look, such as syntax) that counts for a milestone.

    A block that nobody wrote hints for has the fourth level alone. Raises UserError, exit code 2,
    if the milestone and the guides know no such name.
    """
    name = name.strip()
    if hint := find_hint(name, milestone):
        return hint
    blocks = {block.casefold(): block for block in blocks_of(milestone.script.read_text("utf-8"))}
    if name.casefold() in blocks:
        return Hint(blocks[name.casefold()])
    later = next((m.id for m in load_manifest().descendants(milestone)
                  if name.casefold() in map(str.casefold, m.changes)), None)
    near = nearest(name, blocks.values())
    hint = f"{later} adds it" if later else f"did you mean {near}?" if near else (
        f"it has: {', '.join(blocks.values())}")
    raise UserError(f'{milestone.id} has no block "{name}"; {hint}', 2)


def next_level(hint: Hint, level: int) -> int:
    """The first level from `level` on that has something to say."""
    return next(n for n in range(level, LEVELS + 1) if _texts(hint)[n - 1])


def _texts(hint):
    """The texts of all levels; that of the last one is made."""
    return hint.nudge, hint.mathematics, hint.steps, "the diff"


def print_hint(hint: Hint, milestone: Milestone, level: int) -> None:
    """Prints a hint at a level from 1 to 4."""
    screen = Screen(sys.stdout)
    title = f"hint {level} of {LEVELS}, {TITLES[level - 1]}"
    screen.line(f"{milestone.id}, {hint.block}: {title}", "bold")
    if level < LEVELS:
        text = _texts(hint)[level - 1].strip()
        text = re.sub(r"\n(?!\d)", " ", text)  # numbered lines stay apart
        parent = milestone.parent or milestone.id
        screen.text(text.replace("$id", milestone.id).replace("$parent", parent))
        after = next_level(hint, level + 1)
        left_out = "".join(f" (no hint {n}: {TITLES[n - 1]})" for n in range(level + 1, after))
        screen.line(f"--hint {after} says more{left_out}.", "dim")
    elif not _print_block(hint.block, milestone):
        screen.text("No block of the milestone has the answer: it is in the line that the message "
                    "names.")


def _print_block(name, milestone):
    """Prints how the block changed last, in this milestone or the nearest ancestor, or the block of
    the root; returns whether there is one."""
    from speedrun.diff.difference import find_difference
    from speedrun.diff.terminal import make_console, print_changes

    console, line = make_console(sys.stdout), load_manifest().lineage(milestone)
    for child, parent in zip(line, line[1:], strict=False):
        texts = [m.script.read_text(encoding="utf-8") for m in (parent, child)]
        if name in changed_blocks(*texts):
            console.print(f"\n{parent.name} → {child.name}", style="bold")
            print_changes(console, find_difference(*texts).only([name]))
            return True
    text = blocks_of(line[-1].script.read_text("utf-8")).get(name)
    if text:
        console.print(f"\n{line[-1].name}: {name}", style="bold")
        console.print(text, markup=False, highlight=False)
    return bool(text)
