"""Hints to a block: up to three texts of a guide, then the block as the milestone has it.

The fourth level is made from the snapshots when it is asked for; no diff is stored.
"""

import re
import sys

from speedrun.base.errors import UserError
from speedrun.check.guide import Hint, find_hint
from speedrun.check.screen import Screen
from speedrun.history.blocks import changed_blocks, split_blocks
from speedrun.history.manifest import Milestone, load_manifest

TITLES = ("a nudge", "the mathematics", "the steps", "the diff")
LEVELS = len(TITLES)


def hint_of(name: str, milestone: Milestone) -> Hint:
    """The hint to a block (or to a look, such as syntax) that counts for a milestone.

    A block that nobody wrote hints for has the fourth level alone. Raises UserError, exit code 2,
    if the milestone and the guides know no such name.
    """
    name = name.strip()
    if hint := find_hint(name, milestone):
        return hint
    blocks = {block.casefold(): block for block in _blocks(milestone)}
    if name.casefold() in blocks:
        return Hint(blocks[name.casefold()])
    names = ", ".join(blocks.values())
    raise UserError(f'{milestone.id} has no block "{name}"; it has: {names}', 2)


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
        screen.line(f"--hint {next_level(hint, level + 1)} says more.", "dim")
    elif not _print_block(hint.block, milestone):
        screen.text("No block of the milestone has the answer: it is in the line that the message "
                    "names.")


def _blocks(milestone):
    """{name: text} of the milestone's blocks, without headings."""
    source = milestone.script.read_text(encoding="utf-8")
    return {b.name: b.text for b in split_blocks(source) if not b.name.startswith("heading: ")}


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
    text = _blocks(line[-1]).get(name)
    if text:
        console.print(f"\n{line[-1].name}: {name}", style="bold")
        console.print(text, markup=False, highlight=False)
    return bool(text)
