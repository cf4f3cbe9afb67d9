"""What tools/check_train.py does: lists, checks, gives hints, watches and takes."""

import gc
import os
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.check.hints import LEVELS, hint_of, next_level, print_hint
from speedrun.check.plan import left_to_write
from speedrun.check.progress import FILE, Progress, Standing, hash_of, take
from speedrun.check.screen import Outcome, Screen
from speedrun.check.syntax import check_syntax
from speedrun.history.manifest import Milestone, load_manifest

POLL_S = 0.3


@dataclass
class Learner:
    """The learner's script, the progress beside it, and where to show things."""

    script: Path
    progress: Progress
    screen: Screen
    root: Milestone  # from which the milestones descend that the script is to become

    def existing(self) -> Path:
        """The script. Raises UserError, which says how to make one, if there is none."""
        if self.script.exists() and not self.script.is_file():
            raise UserError(f"{short(self.script)} is not a regular file; name another script")
        if not self.script.is_file():
            raise UserError(f"there is no {short(self.script)}; --take makes one: "
                           + self.command(f"{self.root.id} --take"))
        return self.script

    def command(self, arguments: str) -> str:
        """The command line that does something with this script."""
        own = self.script == load_manifest().learners_script(self.root)
        other = "" if own else f" --script {shlex.quote(short(self.script))}"
        return f"python tools/check_train.py {arguments}{other}"


def open_learner(script: Path | None, milestone: Milestone | None = None) -> Learner:
    """The Learner of a script (None: that of the milestone's chain in train/), which need not exist
    yet; milestone: what it is to become (None: one that descends from the first root).

    No progress is kept beside a milestone's own script. Raises UserError, one line, if it is a
    folder or its progress cannot be read.
    """
    manifest = load_manifest()
    root = manifest.lineage(milestone or manifest.milestones[0])[-1]
    if script is None:
        script = manifest.learners_script(root)
        script.parent.mkdir(exist_ok=True)
    script = script.absolute()
    if script.is_dir():
        raise UserError(f"{short(script)} is a folder, not a script; name the file in it")
    own = script.resolve() in [m.script for m in manifest.milestones]
    progress = Progress(None if own else script.parent / FILE)
    return Learner(script, progress, Screen(sys.stdout), root)


def show_list(learner: Learner) -> None:
    """Shows the milestones that the script can become and how far it is."""
    line = [learner.root, *load_manifest().descendants(learner.root)]
    width = max(len(f"{m.id} {m.title}") for m in line)
    for m in line:
        standing = learner.progress.of(m)
        mark, name = "x" if standing.done else " ", f"{m.id} {m.title}"
        learner.screen.line(f"{mark} {name:<{width}}  {_state(standing)}".rstrip())


def _state(standing: Standing) -> str:
    """A standing in words; nothing is checked for it."""
    states = ["taken"] if standing.taken else []
    if standing.done:
        states.append("passed")
    elif standing.failing and not standing.taken:
        states.append(f"{standing.passed} of {standing.seen} checks, next: {standing.next}")
    text = ", ".join(states)
    if standing.done and standing.failing:
        text += f"; last check stopped at {standing.next}"
    if standing.given and not standing.taken:
        text += f" ({standing.given} hint{'s' if standing.given > 1 else ''})"
    return text


def check(script: Path, milestone: Milestone, limit: float) -> Iterator[Outcome]:
    """Yields the outcomes of an examination as they come.

    limit: seconds of computing after which the script is stopped; that becomes an outcome too, and
    so do files that it deletes. Raises OSError if the script cannot be read.
    """
    source = script.read_bytes()  # whatever becomes of the file meanwhile
    warnings.simplefilter("ignore")  # of the compiler, about the script
    syntax = check_syntax(source)
    yield syntax
    if not syntax.passed:
        return
    with tempfile.TemporaryDirectory(prefix="check_train-", ignore_cleanup_errors=True) as folder:
        # torch reads these when it is imported
        os.environ |= dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
                           TORCHINDUCTOR_CACHE_DIR=folder)
        gc.disable()  # what is imported is no garbage, and collections would walk through all of it
        from speedrun.check.examine import Examination, examine

        gc.enable()
        try:
            yield from examine(source, Examination(Path(folder), limit, milestone))
        except TimeoutError as error:
            yield Outcome("time", f"an answer within {limit:g} s of computing",
                          f"none: {str(error) or 'the script'} was stopped",
                          "--timeout gives it more time.")
        except FileNotFoundError as error:
            yield Outcome("files", "the folder in which the script runs stays",
                          f"{Path(error.filename or folder).name} is missing",
                          "Your script, or another program, deletes files while it is checked.")


def check_once(learner: Learner, milestone: Milestone, limit: float) -> bool:
    """Checks the script, shows what comes and keeps it; returns whether all passed."""
    outcomes, current = [], hash_of(learner.existing())
    learner.screen.line(f"{short(learner.script)} against {milestone.name}", "bold")
    with closing(check(learner.script, milestone, limit)) as found:
        for part, some in groupby(found, key=lambda outcome: outcome.part):
            learner.screen.line(part)
            for outcome in some:
                learner.screen.outcome(outcome)
                outcomes.append(outcome)
    passed = sum(outcome.passed for outcome in outcomes)
    if passed < len(outcomes) and milestone.slug not in learner.progress.standings:
        with suppress(SyntaxError, ValueError):
            text = learner.script.read_text(encoding="utf-8-sig")
            if lines := left_to_write(milestone, text):
                learner.screen.line(f"On the way to {milestone.name}:", "bold")
                for line in lines:
                    learner.screen.line(f"  {line}")
    if {outcome.name for outcome in outcomes if not outcome.passed} == {"time"}:
        learner.screen.line("The time was not enough for a verdict. With more:", "bold")
        learner.screen.command(learner.command(f"{milestone.id} --timeout {3 * limit:g}"))
    elif passed < len(outcomes):
        learner.screen.line(f"{passed} of {len(outcomes)} checks pass. Stuck?", "bold")
        learner.screen.command(learner.command(f"{milestone.id} --hint"))
        if follower := _next_after(learner, milestone):
            learner.screen.line(f"You have not passed {follower.id}, which comes first:", "bold")
            learner.screen.command(learner.command(follower.id))
    else:
        children = load_manifest().children(milestone.id)
        then = f" Next: {children[0].id}, {children[0].title}." if children else ""
        learner.screen.line(f"All {passed} checks pass: this is {milestone.name}.{then}", "bold")
    with learner.progress.changing(milestone) as standing:
        standing.record(outcomes, current)
    return passed == len(outcomes)


def _next_after(learner, milestone):
    """The milestone that follows the last one on the way to `milestone` that was passed or taken;
    None if that is `milestone` itself, or if none was."""
    line = load_manifest().lineage(milestone)
    for child, parent in zip(line, line[1:], strict=False):
        standing = learner.progress.standings.get(parent.slug)
        if standing and (standing.done or standing.taken):
            return None if child is milestone else child
    return None


def give_hint(learner: Learner, milestone: Milestone, level: int | None, name: str | None,
              limit: float) -> None:
    """Gives a hint to the block `name` (None: the first at fault; the script is checked anew if it
    has changed since), at a level (None: one further than last time).

    Raises UserError, with exit code 2, if the milestone has no block of that name.
    """
    standing = learner.progress.of(milestone)
    if name is None:
        current = hash_of(learner.existing())
        if standing.script != current:
            outcomes = list(check(learner.script, milestone, limit))
            with learner.progress.changing(milestone) as standing:
                standing.record(outcomes, current)
        if not standing.failing:
            learner.screen.line(f"All checks of {milestone.name} pass; no hint is needed.")
            return
    try:
        hint = hint_of(name or standing.next, milestone)
    except UserError:
        if name:
            raise
        learner.screen.line(f'No hint belongs to "{standing.next}": the lines of the check below'
                            f' "FAIL  {standing.next}" say what is wrong.')
        return
    level = next_level(hint, min(level or standing.hints.get(hint.block, 0) + 1, LEVELS))
    print_hint(hint, milestone, level)
    with learner.progress.changing(milestone) as standing:
        standing.hints[hint.block] = max(level, standing.hints.get(hint.block, 0))
        standing.given += 1


def watch(learner: Learner, milestone: Milestone, limit: float) -> None:
    """Checks the script now and at every change, until Ctrl-C."""
    learner.existing()
    try:
        while True:
            stamp = _stamp(learner.script)
            if stamp is not None:
                with suppress(FileNotFoundError):  # an editor is just replacing it
                    check_once(learner, milestone, limit)
                learner.screen.line("Watching; Ctrl-C ends it.")
            while _stamp(learner.script) in (stamp, None):
                time.sleep(POLL_S)
            print()
    except KeyboardInterrupt:
        print("\nstopped watching")


def _stamp(script):
    with suppress(OSError):
        return hash_of(script)


def take_milestone(learner: Learner, milestone: Milestone) -> None:
    """Makes the milestone the learner's script and says where the old one is."""
    name = short(learner.script)
    if learner.progress.file is None:
        raise UserError(f"{name} is a milestone itself, not your script")
    existed = learner.script.exists()
    kept = take(learner.script, milestone)
    with learner.progress.changing(milestone) as standing:
        standing.taken = True
    state = "already; nothing to do" if existed and not kept else "now"
    state += f"; yours is kept: {short(kept)}" if kept else ""
    learner.screen.line(f"{name} is {milestone.name} {state}")
