"""What tools/check_train.py does: lists, checks, hints, watches and takes."""

import sys
import time
from contextlib import closing

from speedrun.checks.catalog import load_catalog
from speedrun.checks.hints import print_hint
from speedrun.checks.learner import Learner
from speedrun.checks.session import check
from speedrun.checks.standing import Standing, hash_of
from speedrun.checks.take import take
from speedrun.dataset import short
from speedrun.launch import RunError
from speedrun.manifest import ManifestError, Milestone, load_manifest

POLL_S = 0.3


def find_milestone(id: str) -> Milestone:
    """The written milestone called `id` that has checks of its own.

    Raises RunError, one line, if there is none, if it is not written or has no checks yet.
    """
    try:
        milestone = load_manifest().get(id)
    except ManifestError as error:
        raise RunError(f"{error} (--list shows all)") from None
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
        standing = learner.progress.of(m.id)
        state = _state(standing) if m.id in _checked() else "no checks yet"
        rows.append(("x" if standing.done else " ", f"{m.id} {m.title}", state))
    learner.screen.standings(rows)
    return 0


def _state(standing: Standing) -> str:
    """A standing in words; nothing is checked for it."""
    states = ["taken"] if standing.taken else []
    if standing.done:
        states.append("passed")
    elif standing.failing and not standing.taken:
        states.append(f"{standing.passed} of {standing.seen} checks, next: {standing.failing}")
    text = ", ".join(states)
    if standing.done and standing.failing:
        text += f"; last check stopped at {standing.failing}"
    if standing.given and not standing.taken:
        text += f" ({standing.given} hint{'s' if standing.given > 1 else ''})"
    return text


def check_once(learner: Learner, milestone: Milestone, limit: float) -> bool:
    """Checks the script, shows what comes and keeps it; returns whether all passed."""
    outcomes, current = [], hash_of(learner.existing())
    learner.screen.line(f"{short(learner.script)} against {milestone.name}", "bold")
    shown = None
    with closing(check(learner.script, milestone, limit)) as found:
        for group, outcome in found:
            if group not in (shown, outcome.name):
                learner.screen.line(group)
            shown = group
            learner.screen.outcome(outcome)
            outcomes.append(outcome)
    learner.progress.of(milestone.id).record(outcomes, current)
    learner.progress.save()
    passed = sum(outcome.passed for outcome in outcomes)
    if passed < len(outcomes):
        learner.screen.line(f"{passed} of {len(outcomes)} checks so far pass. Stuck?", "bold")
        learner.screen.command(learner.command(f"{milestone.id} --hint"))
        return False
    children = [m for m in load_manifest().children(milestone.id) if m.id in _checked()]
    then = f" Next: {children[0].id}, {children[0].title}." if children else ""
    learner.screen.line(f"All {len(outcomes)} checks pass: this is {milestone.name}.{then}", "bold")
    return True


def give_hint(learner: Learner, milestone: Milestone, level: int | None, name: str | None,
              limit: float) -> int:
    """Gives a hint to the check `name` (None: the first failing one; the script is checked anew if
    it has changed since), at a level (None: one further than last time).

    Raises RunError, with exit code 2, if the milestone has no check of that name.
    """
    standing = learner.progress.of(milestone.id)
    if name is None:
        name = _first_failing(learner, milestone, limit)
        if not name:
            learner.screen.line(f"All checks of {milestone.name} pass; no hint is needed.")
            return 0
    else:
        name = _known(name, milestone)
    entry = load_catalog().get(name, milestone)
    level = entry.next_level(level or standing.hints.get(name, 0) + 1)
    print_hint(name, milestone, level, load_catalog())
    standing.hinted(name, level)
    learner.progress.save()
    return 0


def _first_failing(learner, milestone, limit) -> str:
    current, standing = hash_of(learner.existing()), learner.progress.of(milestone.id)
    if standing.script != current or learner.progress.file is None:
        outcomes = [outcome for _, outcome in check(learner.script, milestone, limit)]
        standing.record(outcomes, current)
        learner.progress.save()
    return standing.failing


def _known(name, milestone) -> str:
    """The name of a check as the catalog spells it."""
    names = load_catalog().names(milestone)
    for known in names:
        if known.casefold() == name.strip().casefold():
            return known
    raise RunError(f'{milestone.id} has no check "{name}"; it has: {", ".join(names)}', status=2)


def watch(learner: Learner, milestone: Milestone, limit: float) -> int:
    """Checks the script now and at every change, until Ctrl-C; returns the exit code."""
    learner.existing()
    try:
        while True:
            stamp = _stamp(learner.script)
            if stamp is not None:
                check_once(learner, milestone, limit)
                learner.screen.line("Watching; Ctrl-C ends it.")
                sys.stdout.flush()
            while _stamp(learner.script) in (stamp, None):  # None: an editor is just replacing it
                time.sleep(POLL_S)
            print()
    except KeyboardInterrupt:
        print("\nstopped watching")
        return 0


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


def _stamp(script):
    try:
        status = script.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
