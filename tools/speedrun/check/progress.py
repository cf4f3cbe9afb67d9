"""Keeps the learner's progress and every version of the script: nothing is ever lost."""

import hashlib
import itertools
import json
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.files import locked, replace_file
from speedrun.base.text import visible
from speedrun.check.screen import Outcome
from speedrun.history.manifest import Milestone, slug_in

FILE = ".progress.json"


@dataclass
class Standing:
    """What is known of one milestone: outcomes that passed and all there were when the script was
    last examined, what failed then, {block: what it showed}, the script's hash; whether it passed
    once, whether the milestone's own script was taken; of hints the last level given for what a
    block shows now, {block: level}, and how many were given in all."""

    passed: int = 0
    seen: int = 0
    failing: dict[str, str] = field(default_factory=dict)
    script: str = ""
    done: bool = False
    taken: bool = False
    hints: dict[str, int] = field(default_factory=dict)
    given: int = 0

    @property
    def next(self) -> str:
        """The first block that failed, or ""."""
        return next(iter(self.failing), "")

    def record(self, outcomes: list[Outcome], script: str) -> None:
        """Notes what was found in a script with this hash. Hints to a block begin anew when it is
        right or shows something else."""
        before, self.failing = self.failing, {}
        for outcome in outcomes:
            if not outcome.passed:
                self.failing.setdefault(outcome.key, f"{outcome.expected} {outcome.got}")
        self.passed = sum(outcome.passed for outcome in outcomes)
        self.seen, self.script = len(outcomes), script
        self.done |= not self.failing
        for block in {outcome.key for outcome in outcomes} & self.hints.keys():
            now = self.failing.get(block)
            if now is None or now != before.get(block, now):
                del self.hints[block]


class Progress:
    """The standing of each milestone, {slug: Standing}, in a file that several commands may change
    at once. A damaged entry costs only itself; a note says so, and the next change keeps the file
    as it was under the lowest free number. Without a file (None) nothing is kept.

    Raises OSError for a file that cannot be read, a folder for example.
    """

    def __init__(self, file: Path | None):
        self.file = file
        self.standings, damaged = self._read()
        if damaged:
            print(f"note: {damaged} in {file.name} could not be read and counts as not done; the"
                  " file will be kept under a number", file=sys.stderr)

    def of(self, milestone: Milestone) -> Standing:
        """The standing of a milestone, an empty one if there is none yet; to change it, see
        `changing`."""
        return self.standings.get(milestone.slug) or Standing()

    @contextmanager
    def changing(self, milestone: Milestone) -> Iterator[Standing]:
        """The standing of a milestone as the file has it now, to change it inside the block, where
        no other command does. Then writes the file, whole or not at all; where that is impossible,
        a note says why."""
        if self.file is None:
            yield self.standings.setdefault(milestone.slug, Standing())
            return
        with ExitStack() as stack:
            problem = None
            try:
                stack.enter_context(locked(self.file))
                self.standings, damaged = self._read()
            except (OSError, UserError) as error:
                problem, damaged = error, ""
            yield self.standings.setdefault(milestone.slug, Standing())
            try:
                if problem:
                    raise problem
                if damaged:
                    replace_file(free_name(self.file), self.file.read_bytes())
                kept = {slug: asdict(one) for slug, one in sorted(self.standings.items())}
                replace_file(self.file, f"{json.dumps(kept, indent=1)}\n".encode())
            except (OSError, UserError) as error:
                print(f"note: progress was not kept: {visible(str(error))}", file=sys.stderr)

    def _read(self):
        """The file's standings, and the names of damaged entries, "everything" or ""."""
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8-sig")) if self.file else {}
            entries = kept.items()
        except FileNotFoundError:
            return {}, ""
        except (ValueError, AttributeError, RecursionError):
            return {}, "everything"
        standings = {slug_in(name): _standing(raw) for name, raw in entries}
        whole = {slug: one for slug, one in standings.items() if slug and one}
        damaged = [name for name, raw in entries if slug_in(name) not in whole]
        return whole, visible(", ".join(damaged))


def _standing(raw):
    """The Standing that an entry of the file holds, or None if it is damaged."""
    kinds = {name: type(value) for name, value in vars(Standing()).items()}
    if type(raw) is not dict or any(type(raw[name]) is not kinds.get(name) for name in raw):
        return None
    of_text = [*raw.get("failing", {}).values()], str
    of_numbers = [*raw.get("hints", {}).values()], int
    if any(type(value) is not kind for values, kind in (of_text, of_numbers) for value in values):
        return None
    return Standing(**raw)


def free_name(file: Path) -> Path:
    """The file's name with the lowest free number: train_gpt.1.py."""
    numbered = (file.with_name(f"{file.stem}.{n}{file.suffix}") for n in itertools.count(1))
    return next(name for name in numbered if not name.exists())


def hash_of(script: Path) -> str:
    """A hash of the file. Raises OSError if it cannot be read."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def take(script: Path, milestone: Milestone) -> Path | None:
    """Makes `script` a copy of the milestone's; returns where its old text is kept.

    The old text is first written to script's name with the lowest free number, train_gpt.1.py; then
    the script is replaced at one go. Returns None if there was nothing to keep: no file, or
    the same text. Raises UserError, one line, if the script changes meanwhile, and OSError.
    """
    new = milestone.script.read_bytes()
    if not script.exists():
        replace_file(script, new)
        return None
    old = script.read_bytes()
    if old == new:
        return None
    kept = free_name(script)
    replace_file(kept, old)
    if script.read_bytes() != old:
        raise UserError(f"{script} changed while it was being kept as {kept.name}; try again")
    replace_file(script, new, stat.S_IMODE(script.stat().st_mode))
    return kept
