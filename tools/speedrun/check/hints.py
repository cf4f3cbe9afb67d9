"""Hints to a block, from hints.toml: three texts, then the block as the milestone has it.

The fourth level is made from the snapshots when it is asked for; no diff is stored.
"""

import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.history.blocks import split_blocks
from speedrun.history.manifest import Milestone, load_manifest

TABLE = Path(__file__).with_name("hints.toml")
LEVELS = 4
TITLES = {1: "a nudge", 2: "the mathematics", 3: "the steps", 4: "the diff"}


@dataclass(frozen=True)
class Hint:
    """The texts for a block, from milestone `since` of a chain on ("" for any); a text may be
    empty, and its level is left out then."""

    block: str
    since: str = ""
    nudge: str = ""
    mathematics: str = ""
    steps: str = ""

    def next_level(self, level: int) -> int:
        """The first level from `level` on that has something to say."""
        texts = {1: self.nudge, 2: self.mathematics, 3: self.steps, LEVELS: "the diff"}
        return next(n for n in range(level, LEVELS + 1) if texts[n])


@cache
def load_hints() -> tuple[Hint, ...]:
    """All hints. Raises ValueError for an entry that does not fit."""
    found = []
    for entry in tomllib.loads(TABLE.read_text(encoding="utf-8"))["hint"]:
        try:
            found.append(Hint(**{key: value.strip() for key, value in entry.items()}))
        except (TypeError, AttributeError) as error:
            raise ValueError(f'hint "{entry.get("block", "?")}": {error}') from None
    return tuple(found)


def hint_of(name: str, milestone: Milestone) -> Hint:
    """The hint to a block (or to a look, such as syntax) that counts for a milestone.

    A block that nobody wrote hints for has the fourth level alone. Raises UserError, exit code 2,
    if the milestone and the table know no such name.
    """
    entries = {(h.block.casefold(), h.since): h for h in load_hints()}
    wanted = name.strip().casefold()
    for id in [*(m.id for m in load_manifest().lineage(milestone)), ""]:
        if (wanted, id) in entries:
            return entries[wanted, id]
    blocks = _blocks(milestone)
    for block in blocks:
        if block.casefold() == wanted:
            return Hint(block)
    if wanted in {h.block.casefold() for h in load_hints()}:
        return Hint(name)
    raise UserError(f'{milestone.id} has no block "{name}"; it has: {", ".join(blocks)}', 2)


def print_hint(hint: Hint, milestone: Milestone, level: int) -> None:
    """Prints a hint at a level from 1 to 4."""
    from speedrun.check.screen import Screen

    screen = Screen(sys.stdout)
    screen.line(f"{milestone.id}, {hint.block}: hint {level} of {LEVELS}, {TITLES[level]}", "bold")
    if level < LEVELS:
        text = (hint.nudge, hint.mathematics, hint.steps)[level - 1]
        parent = milestone.parent or milestone.id
        screen.text(_joined(text).replace("$id", milestone.id).replace("$parent", parent))
        screen.line(f"--hint {hint.next_level(level + 1)} says more.", "dim")
    elif not _print_block(hint.block, milestone):
        screen.text("No block of the milestone has the answer: it is in the line that the message "
                    "names.")


def _joined(text):
    """A line that begins with a number is a line of its own, others are joined."""
    lines = []
    for line in text.split("\n"):
        if lines and not line[:1].isdigit():
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


def _blocks(milestone):
    """{name: text} of the milestone's blocks, without headings."""
    source = milestone.script.read_text(encoding="utf-8")
    return {b.name: b.text for b in split_blocks(source) if not b.name.startswith("heading: ")}


def _print_block(name, milestone):
    """Prints how the block changed last, in this milestone or the nearest ancestor."""
    from speedrun.diff.difference import find_difference
    from speedrun.diff.terminal import make_console, print_changes

    console = make_console(sys.stdout)
    for child in load_manifest().lineage(milestone):
        if child.parent is None:
            if text := _blocks(child).get(name):
                console.print(f"\n{child.name}: {name}", style="bold")
                console.print(text, markup=False, highlight=False)
            return bool(text)
        parent = load_manifest().get(child.parent)
        if _blocks(parent).get(name) != _blocks(child).get(name):
            texts = (m.script.read_text(encoding="utf-8") for m in (parent, child))
            difference = find_difference(*texts)
            console.print(f"\n{parent.name} → {child.name}", style="bold")
            print_changes(console, difference.only([name]))
            return True
    return False
