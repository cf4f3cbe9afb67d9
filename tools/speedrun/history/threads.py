"""Read history/threads.toml: ideas that run through several milestones, step by step."""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from speedrun.base.files import REPOSITORY
from speedrun.history.manifest import Manifest, Milestone
from speedrun.history.schema import Entries, Texts, build, check_keys

THREADS = REPOSITORY / "history" / "threads.toml"
# What may move along a thread: a property of Milestone, and how a page calls and writes it.
NUMBERS = {"parameters": ("parameters", "{:,}"), "tokens_per_step": ("tokens per step", "{:,}")}


@dataclass(frozen=True)
class Step:
    """A milestone of a thread: its slug; the blocks of its diff that belong to the thread; of
    these, only the passages that hold one of the texts in `only`, if any are named; a sentence;
    reads: a pattern whose group is the step's number as the script has it."""

    milestone: str
    blocks: Texts
    says: str
    only: Texts = ()
    reads: str | None = None


@dataclass(frozen=True)
class Thread:
    """An idea: its name in addresses, its title, what it is about, the number that moves along it
    (a key of NUMBERS, or words where every step `reads` it), and its Steps, tables in the file."""

    name: str
    title: str
    about: str
    number: str | None = None
    step: Entries = ()


def load_threads(manifest: Manifest, path: Path = THREADS) -> tuple[Thread, ...]:
    """Return the threads in the file at `path`.

    Raises OSError for an unreadable file, ValueError, one line, for an entry that does not fit: an
    unknown milestone, milestones that are not in the chain's order, a block that the milestone does
    not change, a pattern that the script does not hold.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    check_keys(f"{name}: ", table, ("thread",), ("thread",))
    return tuple(_thread(f"{name}: {entry.get('name', 'a thread')}: ", entry, manifest)
                 for entry in table["thread"])


def number_of(thread: Thread, step: Step, milestone: Milestone) -> str:
    """The step's number as text; "" where the milestone has none."""
    if step.reads:
        return re.search(step.reads, milestone.script.read_text(encoding="utf-8"))[1]
    if thread.number not in NUMBERS:
        return ""
    value = getattr(milestone, thread.number)
    return NUMBERS[thread.number][1].format(value) if value else ""


def number_name(thread: Thread) -> str:
    """What the numbers of a thread are, in words; "" for a thread without."""
    return NUMBERS.get(thread.number, (thread.number or "",))[0]


def _thread(where, entry, manifest):
    thread = build(where, Thread, entry)
    steps = tuple(build(f"{where}step: ", Step, step) for step in thread.step)
    order = [m.slug for m in manifest.milestones]
    places = []
    for step in steps:
        if step.milestone not in order:
            raise ValueError(f'{where}there is no milestone "{step.milestone}"')
        places.append(order.index(step.milestone))
        milestone = manifest.get(step.milestone)
        for block in set(step.blocks) - set(milestone.changes):
            raise ValueError(f"{where}{step.milestone} changes no {block}")
        script = milestone.script.read_text(encoding="utf-8")
        if step.reads and not re.search(step.reads, script):
            raise ValueError(f"{where}{step.milestone}: the script does not hold {step.reads}")
    if places != sorted(set(places)):
        raise ValueError(f"{where}its milestones should be in their chain's order")
    return replace(thread, step=steps)
