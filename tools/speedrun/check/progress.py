"""Keeps the learner's progress and every version of the script: nothing is ever lost."""

import hashlib
import itertools
import json
import stat
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.files import replace_file
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
    """The standing of each milestone, {slug: Standing}, started over (and a note says so) where the
    file holds something else. Without a file (None) nothing is kept.

    Raises UserError, one line, for a file that is keyed by ids, as it was once.
    """

    def __init__(self, file: Path | None):
        self.file = file
        self.standings: dict[str, Standing] = {}
        try:
            text = file.read_text(encoding="utf-8") if file else "{}"
            kept = json.loads(text)
            if old := [name for name in kept if slug_in(name) is None]:
                raise UserError(f"{file} names milestones by ids such as {old[0]}, which may mean"
                                " another one now; delete it, and progress starts over")
            self.standings = {slug_in(name): Standing(**raw) for name, raw in kept.items()}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError, RecursionError):
            print(f"note: {file.name} could not be read; progress starts over", file=sys.stderr)

    def of(self, milestone: Milestone) -> Standing:
        """The standing of a milestone, an empty one if there is none yet."""
        return self.standings.setdefault(milestone.slug, Standing())

    def save(self) -> None:
        """Writes the file, whole or not at all; where that is impossible, a note says why."""
        if self.file is not None:
            kept = {slug: asdict(standing) for slug, standing in sorted(self.standings.items())}
            text = json.dumps(kept, indent=1)
            try:
                replace_file(self.file, f"{text}\n".encode())
            except UserError as error:
                print(f"note: progress was not kept: {visible(str(error))}", file=sys.stderr)


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
    numbered = (script.with_name(f"{script.stem}.{n}{script.suffix}") for n in itertools.count(1))
    kept = next(file for file in numbered if not file.exists())
    replace_file(kept, old)
    if script.read_bytes() != old:
        raise UserError(f"{script} changed while it was being kept as {kept.name}; try again")
    replace_file(script, new, stat.S_IMODE(script.stat().st_mode))
    return kept
