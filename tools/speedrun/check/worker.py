"""Runs jobs of speedrun.check.trace, each in processes of its own.

torch is imported once, here, and every job is a fork: this process has no threads, beside which a
fork could wait for ever, and never runs a line of the learner's script itself.
"""

import faulthandler
import gc
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # optimizers import it: once here, not in every job
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks  # noqa: F401
import torch.nn.attention.flex_attention  # noqa: F401

from speedrun.check import spy, trace
from speedrun.run.failure import ending

LARGEST_FILE = 256 << 20  # bytes that a job may write into one file, its output included
PATIENCE_S = 3  # for ranks that another has left alone
POLL_S = 0.01


@dataclass
class Task:
    """A job to be done with a script. options: further arguments of the job; limit: in seconds."""

    script: Path
    job: str
    values: dict
    limit: float
    options: dict = field(default_factory=dict)


@dataclass
class Result:
    """What a job has seen, or what stopped it; seconds that it took; its folder."""

    observations: dict
    seconds: float
    folder: Path
    hung: bool = False


class Worker:
    """Starts tasks as there are cores, until a point in time (of time.monotonic)."""

    def __init__(self, folder: Path, deadline: float, parent: int):
        self.folder, self.deadline, self.parent = folder, deadline, parent
        self.cores = max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(
            os, "sched_getaffinity") else os.cpu_count() or 1))
        self.number = 0
        self.shards = folder / "shards"
        write_shards(self.shards)
        gc.freeze()

    def drive(self, generators: Iterable[Generator]) -> list:
        """Runs generators that yield Tasks and get Results, several at a time; returns what they
        return. One that yields None waits for another. Raises TimeoutError at the deadline, when
        nothing of them runs any more."""
        generators = list(generators)
        returned, waiting, idle, running = [None] * len(generators), [], [], {}

        def advance(index, result):
            try:
                task = generators[index].send(result)
                (waiting if task else idle).append((index, task))
            except StopIteration as ended:
                returned[index] = ended.value

        for index in range(len(generators)):
            advance(index, None)
        try:
            while waiting or running or idle:
                for index, _ in [idle.pop(0) for _ in list(idle)]:
                    advance(index, None)
                while waiting and (not running or sum(
                        len(r.ranks) for r in running.values()) + trace.JOBS[
                            waiting[0][1].job][1] <= self.cores):
                    index, task = waiting.pop(0)
                    self.number += 1
                    running[index] = Running(task, self.folder / f"job{self.number}", self.shards)
                for index, job in list(running.items()):
                    if job.ended():
                        del running[index]
                        advance(index, job.result())
                if os.getppid() != self.parent:
                    sys.exit(1)
                if time.monotonic() > self.deadline:
                    raise TimeoutError
                time.sleep(POLL_S)
        finally:
            for job in running.values():
                job.stop()
        return returned


class Running:
    """A task whose processes are running."""

    def __init__(self, task, folder, shards):
        self.task, self.folder, self.started = task, folder, time.monotonic()
        self.limit, self.hung = self.started + task.limit, False
        world = trace.JOBS[task.job][1]
        folder.mkdir()
        sys.stdout.flush()
        self.ranks = {}
        for rank in range(world):
            if (pid := os.fork()) == 0:
                _work(task, folder, shards, rank, world)
            self.ranks[pid] = rank
        self.alive, self.codes = set(self.ranks), {}

    def ended(self):
        for pid in list(self.alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.alive.discard(pid)
                self.codes[self.ranks[pid]] = os.waitstatus_to_exitcode(status)
                if self.codes[self.ranks[pid]] != 0:
                    self.limit = min(self.limit, time.monotonic() + PATIENCE_S)
        if self.alive and time.monotonic() > self.limit:
            self.hung = all(code == 0 for code in self.codes.values())
            if self.hung:
                for pid in self.alive:  # where is it?
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)
            self.stop()
        return not self.alive

    def stop(self):
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.alive = set()

    def result(self):
        """The observations of all ranks together."""
        found, errors, states = {}, [], []
        for rank in range(len(self.ranks)):
            file, code = self.folder / f"rank{rank}.pkl", self.codes.get(rank)
            seen = pickle.loads(file.read_bytes()) if file.exists() else None
            if seen is None:
                if code is not None:
                    errors.append((1, ["error", f"the process {ending(code)}"
                                       + self._last_words(rank), 0, ""]))
                elif self.hung:
                    errors.append((2, ["error", "no end: still running after "
                                       f"{self.task.limit:.0f} s", *self._place(rank)]))
                continue
            states.append(seen.pop("state", [0, {}])[1])
            for what, value in seen.items():
                if value[0] == "error" and value[-1] == "fatal":
                    lonely = "onnection" in value[1] or "gloo" in value[1]
                    errors.append((3 if lonely else 0, value[:4]))
                else:
                    found.setdefault(what, value)
        if errors:
            found[trace.JOBS[self.task.job][2]] = min(errors, key=lambda e: e[0])[1]
        if len(states) > 1:
            sets = [set(state.items()) for state in states]
            own = sum(n for i, state in enumerate(sets) for _, n in
                      state - set().union(*(s for j, s in enumerate(sets) if j != i)))
            found["optimizer state that only one of the ranks keeps"] = ["own state", own, 0]
        return Result(found, time.monotonic() - self.started, self.folder, self.hung)

    def _place(self, rank):
        """Number and text of the script's line in which a rank was when it was stopped."""
        wanted = f'File "{self.task.script}", line '
        number = next((line.partition(wanted)[2].split()[0] for line in self._output(rank)
                       if wanted in line), "0")
        lines = self.task.script.read_text(encoding="utf-8").split("\n")
        return int(number), lines[int(number) - 1].strip()[:100] if int(number) else ""

    def _output(self, rank):
        """The last lines that a rank wrote."""
        with open(self.folder / f"output{rank}", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 4000))
            return file.read().decode("utf-8", "replace").splitlines()

    def _last_words(self, rank):
        lines = self._output(rank)
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; the last line that it wrote: {last[:200]}" if last else ""


def _work(task, folder, shards, rank, world):
    """What a forked process does: the job, then its end."""
    code = 1
    try:
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        for descriptor, stream in ((null, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, stream)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        faulthandler.register(signal.SIGUSR1, file=output)
        os.environ["CHECKED_SCRIPT"] = str(task.script)
        if world > 1:
            os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                               LOCAL_WORLD_SIZE=str(world), CHECKED_STORE=str(folder / "store"))
        sys.argv = [str(task.script)]
        torch.manual_seed(0)
        observations = _observe(task, folder, shards, rank)
        file = folder / f"rank{rank}"
        file.write_bytes(pickle.dumps(observations))
        os.replace(file, f"{file}.pkl")
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)


def _observe(task, folder, shards, rank):
    function, _, what = trace.JOBS[task.job]
    note = trace.Observations()
    patterns = {f"{split}_files": str(shards / f"{split}_*.bin") for split in ("train", "val")}
    try:
        spy.stand_ins()
        spy.count_flex()
        spy.note_epsilons()
        module = spy.load(task.script)
        note.doing = what
        function(module, {**patterns, **task.values}, note, folder=folder / "log", rank=rank,
                 shards=shards, **task.options)
    except BaseException as error:  # the learner's script may do anything
        note[what] = ["error", *trace.explain(error), "fatal"]
    return dict(note)


def write_shards(folder: Path) -> None:
    """Writes shards whose lengths no batch divides, in another order than their names', and broken
    ones. Documents begin with token 1; a token mostly follows from the ones before."""
    folder.mkdir()
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
