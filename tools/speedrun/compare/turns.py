"""Runs programs side by side on one machine; while one of them is timed, all others are stopped.

A program that is to be timed prints the line {"event": "ready"}, waits for a line on its stdin, and
prints {"event": "over"} when it has been timed. Any other JSON object that it prints is a result;
what else it prints is ignored.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from speedrun.base.errors import UserError

TURN_S = 300  # that a turn may last: meanwhile everything else stands still
PATIENCE_S = 10  # from a program's SIGTERM to its SIGKILL
SMALL_GIB = 4  # a task that takes no more does not keep a larger one waiting for long
LOOK_S = 0.1  # from one look at signals and limits to the next
CAN_STOP = os.name != "nt"  # on Windows programs run one after the other


@dataclass(frozen=True)
class Launch:
    """How a program is started: its command, its environment, the file that gets its stderr."""

    command: Sequence[str]
    environment: Mapping[str, str]
    stderr: Path


@dataclass(frozen=True)
class Task:
    """A program that is to run: `prepare` decides how at the moment when it can start, or raises
    UserError; gib: GPU memory that it is expected to take; limit_s: seconds that it may run, those
    in which it is stopped not counted; after: names of tasks that have to end before it starts.
    """

    name: str
    prepare: Callable[[], Launch]
    gib: float = 0.0
    limit_s: float = 900.0
    after: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True)
class End:
    """How a task ended: its exit code (None if it did not start), why if that is known, the seconds
    that it ran, and whether others used the GPU meanwhile."""

    code: int | None
    reason: str = ""
    seconds: float = 0.0
    shared: bool = False


def take_turns(
    waiting: list[Task], slots: int, gib: float, seconds: float = float("inf"),
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Task, dict | End]]:
    """Yields (task, result) for each result of a task, a dict, and for its End.

    Takes the first of `waiting` that fits out of that list, again and again, so that the caller may
    add to it and remove from it; those that are cut off go back. slots: tasks that run at once;
    gib: GPU memory for them all, which a task takes that expects more, if it is alone. Ends when
    all have ended, after `seconds`, or when is_stopped(), and then ends what runs.
    """
    deadline = time.monotonic() + seconds
    running: list[_Job] = []
    ready: list[_Job] = []
    events: queue.Queue = queue.Queue()
    timed = None
    try:
        while (waiting or running) and time.monotonic() < deadline and not is_stopped():
            if timed is None and ready:
                timed = ready.pop(0)
                timed.begin_turn(running)
            task = None if timed or len(running) >= slots else _next(waiting, running, gib)
            if task is not None:
                waiting.remove(task)
                try:
                    job = _Job(task, events)
                except (UserError, OSError) as error:
                    yield task, End(None, str(error))
                    continue
                for other in running:
                    other.shared |= bool(task.gib)
                job.shared = any(other.task.gib for other in running)
                running.append(job)
                continue
            for job in running:
                if timed in (None, job):
                    job.end_if_late()
            try:
                job, said = events.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if said == {"event": "ready"}:
                ready.append(job)
            elif said in (None, {"event": "over"}):
                if job is timed:
                    timed = job.end_turn(running)
                if said is None:
                    running.remove(job)
                    ready = [other for other in ready if other is not job]
                    yield job.task, job.ended()
            elif isinstance(said, dict):
                yield job.task, said
    finally:
        _end(running)
        waiting[:0] = [job.task for job in running]


class _Job:
    """A task that runs."""

    def __init__(self, task, events):
        launch = task.prepare()
        self.task, self.reason, self.shared = task, "", False
        self.start, self.stopped_s, self.turn_start = time.monotonic(), 0.0, None
        with open(launch.stderr, "wb") as stderr:
            self.process = subprocess.Popen(
                launch.command, env=launch.environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8", errors="replace",
                start_new_session=True)  # a group of its own, which can be stopped
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def _listen(self, events):
        for line in self.process.stdout:
            if line.startswith("{"):
                with suppress(ValueError):  # it is cut short
                    events.put((self, json.loads(line)))
        self.process.wait()
        events.put((self, None))

    def tell(self, name):
        """Sends the signal of this name to the program and to what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            if CAN_STOP:
                os.killpg(self.process.pid, getattr(signal, name))
            elif name == "SIGKILL":
                self.process.kill()

    def seconds(self):
        return time.monotonic() - self.start - self.stopped_s

    def end_if_late(self):
        """Ends a program that takes longer than it may."""
        turn = self.turn_start and time.monotonic() - self.turn_start
        if turn and turn > TURN_S:
            self.reason = f"it was not timed within {TURN_S} s"
        elif self.seconds() > self.task.limit_s:
            self.reason = f"it did not end within {self.task.limit_s:g} s"
        else:
            return
        _end([self])

    def begin_turn(self, running):
        self.turn_start = time.monotonic()
        for other in running:
            if other is not self:
                other.tell("SIGSTOP")
        with suppress(OSError):  # it has ended, and its last event is on its way
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end_turn(self, running):
        """Lets the others go on; returns None, whose turn it is then."""
        for other in running:
            if other is not self:
                other.stopped_s += time.monotonic() - self.turn_start
                other.tell("SIGCONT")
        self.turn_start = None

    def ended(self):
        with suppress(OSError):
            self.process.stdin.close()
        return End(self.process.returncode, self.reason, self.seconds(), self.shared)


def _next(waiting, running, gib):
    """The first task that can start, or None. Only small ones overtake one that waits for memory,
    so that its turn comes."""
    left = gib - sum(job.task.gib for job in running)
    pending = {task.name for task in waiting} | {job.task.name for job in running}
    most = float("inf")
    for task in waiting:
        if task.after & pending or task.gib > most:
            continue
        if task.gib <= left or left == gib:
            return task
        most = SMALL_GIB
    return None


def _end(jobs):
    """Ends programs and all that they started; kills what does not end."""
    for job in jobs:
        job.tell("SIGTERM")
        job.tell("SIGCONT")  # a stopped program gets the other when it goes on
    until = time.monotonic() + PATIENCE_S
    for job in jobs:
        with suppress(subprocess.TimeoutExpired):
            job.process.wait(max(0, until - time.monotonic()))
        job.tell("SIGKILL")
