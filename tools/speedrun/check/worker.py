"""Runs jobs of speedrun.check.trace, each in processes of its own.

torch is imported once, here, and every job is a fork: this process has no threads, beside which a
fork could wait for ever, and never runs a line of the learner's script itself.
"""

import faulthandler
import gc
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # optimizers import it: once here, not in every job
import torch.nn.attention.flex_attention  # noqa: F401

from speedrun.check import spy, trace
from speedrun.run.failure import ending, last_words
from speedrun.scripts.load import load_snapshot

LARGEST_FILE = 256 << 20  # bytes that a job may write into one file, its output included
PATIENCE_S = 3  # for ranks that another has left alone
POLL_S = 0.01
ORPHAN_S = 10  # beyond its limit, after which a job ends by itself: who started it was killed


def run(tasks: list["Task"], deadline: float) -> None:
    """Runs tasks to their end, as many at a time as there are cores, four at most.

    Raises TimeoutError at the deadline, a point in time of time.monotonic. When it returns or
    raises, nothing runs any more.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting, running = list(tasks), []
    try:
        while waiting or running:
            while waiting and (not running or waiting[0].job.world + sum(
                    task.job.world for task in running) <= min(4, cores)):
                running.append(waiting.pop(0))
                running[-1].start()
            running = [task for task in running if not task.ended()]
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_S)
    finally:
        for task in running:
            task.stop()


class Task:
    """A job of trace.JOBS, done with a script by processes, one for each rank, in a new folder
    beside the script's.

    limit: in seconds; options: further arguments of the job. When it has ended it has its
    `observations`, the `seconds` that it took, its `folder`, and whether it `hung`.
    """

    def __init__(self, script: Path, job: str, values: dict, limit: float, options: dict):
        self.script, self.job, self.values = script, trace.JOBS[job], values
        self.limit, self.options, self.hung = limit, options, False
        self.alive, self.codes = {}, {}  # {process: its rank}, {rank that ended: its exit code}

    def start(self) -> None:
        """Starts the processes."""
        self.folder = Path(tempfile.mkdtemp(dir=self.script.parents[1]))
        self.started = time.monotonic()
        self.end = self.started + self.limit
        sys.stdout.flush()
        gc.freeze()
        for rank in range(self.job.world):
            if (pid := os.fork()) == 0:
                _work(self, rank)
            os.setpgid(pid, pid)  # a group with all that it starts, out of reach of Ctrl-C
            self.alive[pid] = rank

    def ended(self) -> bool:
        """Whether no process runs any more; stops those whose time is up, and collects."""
        for pid, rank in list(self.alive.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.alive[pid]
                _kill_group(pid)
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                if self.codes[rank] != 0:
                    self.end = min(self.end, time.monotonic() + PATIENCE_S)
        if self.alive and time.monotonic() > self.end:
            self.hung = not any(self.codes.values())
            if self.hung:
                for pid in self.alive:  # where is it?
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)
            self.stop()
        if not self.alive:
            self.seconds = time.monotonic() - self.started
            self.observations = self._collected()
        return not self.alive

    def stop(self) -> None:
        """Kills what still runs."""
        for pid in self.alive:
            _kill_group(pid)
            os.waitpid(pid, 0)
        self.alive = {}

    def _collected(self):
        """The observations of all ranks together, and of what stopped them the likeliest cause."""
        found, errors, states = {}, [], []
        for rank in range(self.job.world):
            file = self.folder / f"rank{rank}.pkl"
            if file.exists():
                seen = pickle.loads(file.read_bytes())
                if error := seen.pop(self.job.what, None):
                    lonely = "onnection" in error[1] or "gloo" in error[1]
                    errors.append((3 if lonely else 0, error))
                if "state" in seen:
                    states.append(seen.pop("state")[1])
                found |= {what: value for what, value in seen.items() if what not in found}
            elif rank in self.codes:
                how, words = ending(self.codes[rank]), last_words(self._output(rank))[:200]
                how += f"; the last line that it wrote: {words}" if words else ""
                errors.append((1, ["error", f"the process {how}", 0, ""]))
            elif self.hung:
                how = f"no end: still running after {self.limit:.0f} s"
                errors.append((2, ["error", how, *self._place(rank)]))
        if errors:
            found[self.job.what] = min(errors, key=lambda error: error[0])[1]
        if len(states) > 1:
            keepers = Counter(part for state in states for part in state.items())
            own = sum(size for (_, size), ranks in keepers.items() if ranks == 1)
            found["numbers of the optimizers' state that one rank alone keeps"] = [
                "at least", own, 0.8]
        return found

    def _place(self, rank):
        """Number and text of the script's line in which a rank was when it was stopped."""
        place = re.search(rf'File "{re.escape(str(self.script))}", line (\d+)',
                          self._output(rank))
        number = int(place[1]) if place else 0
        lines = ["", *self.script.read_text(encoding="utf-8").split("\n")]
        return number, lines[number].strip()[:100]

    def _output(self, rank):
        """The end of what a rank wrote."""
        with open(self.folder / f"output{rank}", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 4000))
            return file.read().decode("utf-8", "replace")


def _kill_group(pid):
    with suppress(OSError):  # nothing of it is left
        os.killpg(pid, signal.SIGKILL)


def _work(task, rank):
    """What a forked process does: the job, then its end."""
    code, folder = 1, task.folder
    try:
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        for descriptor, stream in ((null, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, stream)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        signal.alarm(int(task.limit) + ORPHAN_S)
        faulthandler.register(signal.SIGUSR1, file=output)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of a launcher that started the command
            os.environ.pop(name, None)
        os.environ |= dict(CHECKED_SCRIPT=str(task.script), TMPDIR=str(folder))
        tempfile.tempdir = str(folder)
        world = task.job.world
        if world > 1:
            os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                               LOCAL_WORLD_SIZE=str(world), CHECKED_STORE=f"{folder}/store")
        sys.argv = [str(task.script)]
        torch.manual_seed(0)
        file = folder / f"rank{rank}"
        file.write_bytes(pickle.dumps(_observe(task, rank)))
        os.replace(file, f"{file}.pkl")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)


def _observe(task, rank):
    note, shards = trace.Observations(), task.folder.parent / "shards"
    files = {f"{split}_files": str(shards / f"{split}_*.bin") for split in ("train", "val")}
    try:
        spy.stand_ins()
        task.job.function(load_snapshot(task.script), {**files, **task.values}, note, rank=rank,
                          folder=task.folder / "log", shards=shards, **task.options)
    except BaseException as error:  # the learner's script may do anything
        note[task.job.what] = ["error", *trace.explain(error)]
    return dict(note)


def write_shards(folder: Path) -> None:
    """Writes shards whose lengths no batch divides, in another order than their names', and broken
    ones. Documents begin with token 1; a token mostly follows from the ones before."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    followers = rng.integers(2, 61, (61, 3))

    def stream(length):
        tokens = np.ones(length, np.int64)
        for i in range(1, length):
            if rng.random() > 0.12:  # else a document begins
                choice = tokens[i - 3] % 3 if i > 2 and rng.random() < 0.8 else rng.integers(3)
                tokens[i] = followers[tokens[i - 1], choice]
        return tokens

    def write(name, tokens, magic=20240520, count=None):
        header = np.zeros(256, "<i4")
        header[:3] = magic, 1, len(tokens) if count is None else count
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())

    for name, length in (("train_3", 140), ("train_1", 300), ("train_2", 390), ("val_0", 301)):
        write(name, stream(length))
    write("cut", stream(500), count=600)
    write("magic", stream(500), magic=1)
    write("beyond", stream(500) + 61)
    write("short", stream(100))
    write("exact", stream(128))  # as many as a step takes, and no target for the last one
