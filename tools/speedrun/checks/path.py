"""What tools/check_train.py does: lists, checks, hints, watches and takes."""

import shlex
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from speedrun.checks.catalog import LEVELS, load_catalog
from speedrun.checks.hints import print_hint
from speedrun.checks.outcome import Outcome
from speedrun.checks.session import check
from speedrun.checks.show import Screen
from speedrun.checks.standing import Progress, hash_of, progress_beside
from speedrun.checks.take import take
from speedrun.dataset import short
from speedrun.launch import RunError
from speedrun.manifest import REPOSITORY, Milestone, load_manifest

OWN = REPOSITORY / "train" / "train_gpt.py"
POLL_S = 0.3


@dataclass
class Learner:
    """The learner's script, the progress beside it, and where to show things."""

    script: Path
    progress: Progress
    screen: Screen


def open_path(script: Path | None) -> Learner:
    """The Learner of a script (None: train/train_gpt.py), which need not exist yet.

    No progress is kept beside a milestone's own script. Raises OSError if the progress cannot be
    opened.
    """
    script = Path(script or OWN).absolute()
    snapshots = [m.script for m in load_manifest().written()]
    own = script.resolve() in snapshots
    learner = Learner(script, Progress(None) if own else progress_beside(script),
                      Screen(sys.stdout))
    if learner.progress.note:
        print(learner.progress.note, file=sys.stderr)
    return learner


def find_milestone(id: str) -> Milestone:
    """The written milestone called `id` that has checks of its own.

    Raises ManifestError, which names the nearest, if there is none; RunError if it is not written
    or has no checks yet.
    """
    milestone = load_manifest().get(id)
    if not milestone.written:
        raise RunError(f"milestone {milestone.name} is not written yet; --list shows what is")
    if milestone.id not in _checked():
        raise RunError(f"milestone {milestone.name} has no checks yet; they go up to "
                       f"{max(_checked())}")
    return milestone


def show_list(learner: Learner) -> int:
    """Shows every written milestone and how far the script is; returns the exit code."""
    rows = []
    for m in load_manifest().written():
        s = learner.progress.of(m.id)
        if m.id not in _checked():
            state = "no checks yet"
        elif s.done:
            state = "taken, passes" if s.taken else "passes"
        elif s.taken:
            state = "taken"
        elif s.seen:
            state = f"{s.passed} of {s.seen} checks, next: {s.failing}"
        else:
            state = ""
        if s.hints and not s.taken:
            state += f" ({sum(s.hints.values())} hints)"
        rows.append(("x" if s.done else " ", f"{m.id} {m.title}", state))
    learner.screen.standings(rows)
    return 0


def check_once(learner: Learner, milestone: Milestone, limit: float) -> bool:
    """Checks the script, shows what comes and keeps it; returns whether all passed."""
    outcomes, current = [], hash_of(_existing(learner.script))
    learner.screen.line(f"{short(learner.script)} against {milestone.name}", "bold")
    shown = None
    with closing(check(learner.script, milestone, limit)) as found:
        for group, outcome in found:
            if group not in (shown, outcome.name):
                learner.screen.line(group)
            shown = group
            learner.screen.outcome(outcome)
            outcomes.append(outcome)
    _keep(learner, milestone, outcomes, current)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if failed:
        other = "" if learner.script == OWN else f" --script {shlex.quote(short(learner.script))}"
        learner.screen.line(f"{len(failed)} of {len(outcomes)} checks so far do not pass. Stuck?",
                            "bold")
        learner.screen.command(f"python tools/check_train.py {milestone.id} --hint{other}")
        return False
    children = [m for m in load_manifest().children(milestone.id) if m.id in _checked()]
    then = f" Next: {children[0].id}, {children[0].title}." if children else ""
    learner.screen.line(f"All {len(outcomes)} checks pass: this is {milestone.name}.{then}", "bold")
    return True


def give_hint(learner: Learner, milestone: Milestone, level: int | None, limit: float) -> int:
    """Gives a hint to the first failing check (None: one level further than last time).

    The script is checked anew if it has changed since.
    """
    current = hash_of(_existing(learner.script))
    standing = learner.progress.of(milestone.id)
    if standing.script != current or learner.progress.file is None:
        outcomes = [outcome for _, outcome in check(learner.script, milestone, limit)]
        _keep(learner, milestone, outcomes, current)
    if not standing.failing:
        learner.screen.line(f"All checks of {milestone.name} pass; no hint is needed.")
        return 0
    name = standing.failing
    level = level or min(standing.hints.get(name, 0) + 1, LEVELS)
    print_hint(name, milestone, level, load_catalog())
    standing.hints[name] = max(level, standing.hints.get(name, 0))
    learner.progress.save()
    return 0


def watch(learner: Learner, milestone: Milestone, limit: float) -> int:
    """Checks the script now and at every change, until Ctrl-C."""
    _existing(learner.script)
    while True:
        stamp = _stamp(learner.script)
        if stamp is not None:
            check_once(learner, milestone, limit)
            learner.screen.line("Watching; Ctrl-C ends it.")
            sys.stdout.flush()
        while _stamp(learner.script) in (stamp, None):  # None: an editor is just replacing it
            time.sleep(POLL_S)
        print()


def take_milestone(learner: Learner, milestone: Milestone) -> int:
    """Makes the milestone the learner's script and says where the old one is."""
    if learner.progress.file is None:
        raise RunError(f"{short(learner.script)} is a milestone itself, not your script")
    existed = learner.script.exists()
    kept = take(learner.script, milestone)
    learner.progress.of(milestone.id).taken = True
    learner.progress.save()
    name = short(learner.script)
    if kept:
        learner.screen.line(f"{name} is {milestone.name} now; yours is kept: {short(kept)}")
    elif existed:
        learner.screen.line(f"{name} is {milestone.name} already; nothing to do")
    else:
        learner.screen.line(f"{name} is {milestone.name} now")
    return 0


def _checked() -> set[str]:
    """Ids of the milestones that have checks of their own: the chain up to the last `since`."""
    catalog = load_catalog()
    last = max(check.since for check in catalog.checks)
    return set(catalog.lineage(catalog.manifest.get(last)))


def _keep(learner, milestone, outcomes: list[Outcome], script_hash):
    standing = learner.progress.of(milestone.id)
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    standing.passed, standing.seen = len(outcomes) - len(failed), len(outcomes)
    standing.failing, standing.script = next(iter(failed), ""), script_hash
    standing.done |= not failed
    learner.progress.save()


def _existing(script):
    if not script.is_file():
        raise RunError(f"there is no {short(script)}; --take makes one: "
                       "python tools/check_train.py 00 --take")
    return script


def _stamp(script):
    try:
        status = script.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
