"""Prints hints to a check: three texts from the catalog, then the blocks as the milestone has them.

The fourth level is made from the snapshots when it is asked for; no diff is stored.
"""

import sys
from functools import cache

from speedrun.checks.catalog import LEVELS, Catalog
from speedrun.manifest import Milestone

TITLES = {1: "a nudge", 2: "the mathematics", 3: "the steps", 4: "the diff"}


def print_hint(name: str, milestone: Milestone, level: int, catalog: Catalog) -> None:
    """Prints the hint to the check `name` of a milestone at a level from 1 to 4."""
    from speedrun.checks.show import Screen

    check = catalog.get(name, milestone)
    screen = Screen(sys.stdout)
    screen.line(f"{milestone.id}, {name}: hint {level} of {LEVELS}, {TITLES[level]}", "bold")
    if level < LEVELS:
        screen.text(check.hint(level, milestone))
        screen.line(f"--hint {check.next_level(level + 1)} says more.", "dim")
    elif not _print_blocks(check.blocks, milestone, catalog):
        screen.text("No block of the milestone has the answer: it is in the line that the message "
                    "names.")


def _print_blocks(names, milestone, catalog) -> bool:
    """Prints how the blocks changed last, in this milestone or the nearest ancestor."""
    from speedrun.diff.terminal import make_console, print_changes

    console, left = make_console(sys.stdout), set(names)
    for id in catalog.lineage(milestone):
        child = catalog.manifest.get(id)
        if child.parent is None:
            _print_root(console, child, left)
            break
        parent = catalog.manifest.get(child.parent)
        difference = _difference(parent.script, child.script)
        known = left & set().union(*(change.names for change in difference.changes))
        if known:
            console.print(f"\n{parent.name} → {child.name}", style="bold")
            print_changes(console, difference.only(sorted(known)))
            left -= known
        if not left:
            break
    return bool(names)


@cache
def _difference(old, new):
    from speedrun.diff import compare

    return compare(*(script.read_text(encoding="utf-8") for script in (old, new)))


def _print_root(console, root, names):
    """Prints blocks that no milestone has changed."""
    from speedrun.blocks import split_blocks

    for block in split_blocks(root.script.read_text(encoding="utf-8")):
        if block.name in names:
            console.print(f"\n{root.name}: {block.name}", style="bold")
            console.print(block.text)
