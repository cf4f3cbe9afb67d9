"""Runs jobs of speedrun.check.trace, each in processes of its own.

torch is imported once, here, and every job is a fork: this process has no threads, beside which a
fork could wait for ever, and never runs a line of the learner's script itself.
"""

import faulthandler
import gc
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from speedrun.check import kept, trace, watched
from speedrun.run.failure import describe_exit, error_line
from speedrun.scripts.find import load_snapshot

FORK = multiprocessing.get_context("fork")
torch.set_num_threads(1)  # here too: differences are looked for between the forks
LARGEST_FILE = 256 << 20  # bytes that a job may write into one file, its output included
# A process at rest for so many seconds waits for ever: on a busy machine one that computes gets
# more than this share of a core. Ranks that another has left alone wait less long.
AT_REST_S, LEFT_ALONE_S, SHARE = 20, 3, 0.005
LONGEST_S = 120  # seconds, and 20 times a limit, where it cannot be seen whether a process computes
POLL_S = 0.02
LARGE_SHARD = 32 << 20  # tokens
ENDING = {signal.SIGINT, signal.SIGTERM}
GRACE_S = 1  # seconds of computing beyond its limit, at which a process says where it is
COMPUTES = "it does not end: it computes more than ten times as long as the milestone"
SAYS_WHERE = "(most recent call first):"  # as faulthandler does
WAITS = "it does not end: it waits for something that does not come"


# What is wrong with files of `write_shards`, and the hyperparameters that choose them: how
# the names of the shards begin, or a file's name.
BROKEN_INPUT = {
    "a shard that is cut short": {"train_files": "cut"},
    "a file that is not a shard": {"train_files": "magic"},
    "a token beyond the vocabulary": {"train_files": "beyond"},
    "a shard with too few tokens": {"val_files": "short"},
    "a shard with no target for a step's end": {
        "train_files": "exact", "train_seq_len": 16, "total_batch_size": 128},
    "no shard": {"train_files": "none"},
    "a shard of very short documents": {
        "train_files": "crowded", "train_seq_len": 64, "total_batch_size": 128},
    "a conversation that is out of turn": {"train_file": "turns.jsonl"},
    "too few conversations for a step": {"train_file": "few.jsonl"},
    "no checkpoint": {"checkpoint": "none.pt"},
    "no table of prefixes": {"prefix_file": "none.bin"},
}


def run_tasks(tasks: list["Task"], budget: float) -> float:
    """Runs tasks to their end, as many at a time as there are cores, four at most; a task's ranks
    wait for each other, so they count as one.

    Returns the seconds that they computed, on all cores together; raises TimeoutError when these
    reach the budget: how busy the machine is does not matter. When it returns or raises, nothing
    runs any more.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting, running = list(tasks), []
    try:
        while waiting or running:
            while waiting and len(running) < min(4, cores):
                running.append(waiting.pop(0))
                running[-1].start()
            running = [task for task in running if not task.ended()]
            if sum(sum(task.used) for task in tasks) > budget:
                raise TimeoutError
            time.sleep(POLL_S)
        return sum(sum(task.used) for task in tasks)
    finally:
        for task in running:
            task.stop()


class Task:
    """A job of trace.ALL, done with a script by processes, one for each rank, in a new folder
    beside the script's.

    limit: seconds that each may compute; options: further arguments of the job. When it has ended
    it has its `observations`, the `seconds` that its longest process computed, its `folder`, and
    whether it `hung`.
    """

    def __init__(self, script: Path, job: str, values: dict, limit: float, options: dict):
        self.script, self.job, self.values = script, trace.ALL[job], values
        self.limit, self.options, self.ranks, self.hung = limit, options, [], False
        self.used, self.observations = [], None  # seconds that each rank has computed
        self.world = options.get("world", self.job.world)

    def start(self) -> None:
        """Starts the processes."""
        self.folder = Path(tempfile.mkdtemp(dir=self.script.parents[1]))
        self.end = time.monotonic() + LONGEST_S + 20 * self.limit
        self.moved, self.used = (time.monotonic(), 0.0), [0.0] * self.world
        gc.freeze()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until `stop` knows the processes
        try:
            for rank in range(self.world):
                process = FORK.Process(target=_work, args=(self, rank))
                process.start()
                os.setpgid(process.pid, process.pid)  # with all it starts, out of Ctrl-C's reach
                self.ranks.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def ended(self) -> bool:
        """Whether it has ended, if need be by force; it has its observations then."""
        codes = [process.exitcode for process in self.ranks]  # None of one that still runs
        if None in codes and not self._waits(any(codes)):
            return False
        for process, code in zip(self.ranks, codes, strict=True):
            if code is None:
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGXCPU)  # it says where it is
        if None in codes:
            time.sleep(10 * POLL_S)
        self.stop()
        self.observations = self._collected(codes)
        self.seconds = max(self.used)
        return True

    def _waits(self, left_alone):
        """Whether its processes do nothing any more, by what they have computed so far; left_alone:
        one has failed."""
        for rank, process in enumerate(self.ranks):
            if (computed := _computed(process.pid)) is not None:
                self.used[rank] = max(self.used[rank], computed)
        now, used = time.monotonic(), sum(self.used)
        since, then = self.moved
        if used - then > SHARE * AT_REST_S:
            self.moved = now, used
        elif now - since > (LEFT_ALONE_S if left_alone else AT_REST_S) and (
                used or any(_sleeps(process.pid) for process in self.ranks)):
            return True  # else none has had its first turn yet
        return now > self.end

    def stop(self) -> None:
        """Kills what still runs."""
        for process in self.ranks:
            with suppress(OSError):  # nothing of its group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.join()

    def _collected(self, codes):
        """The observations of all ranks together, and of what stopped them the likeliest cause."""
        found, errors, states, beginnings = {}, [], [], []
        for rank, code in enumerate(codes):
            file, output = self.folder / f"rank{rank}.pkl", self._output(rank)
            if file.exists():
                seen, self.used[rank] = kept.unpacked(file.read_bytes())
                if error := seen.pop(self.job.what, None):
                    lonely = "onnection" in error[1] or "gloo" in error[1]
                    errors.append((3 if lonely else 0, error))
                if "state" in seen:
                    states.append(seen.pop("state")[1])
                if "beginning" in seen:
                    beginnings.append(seen.pop("beginning")[1])
                found |= {what: value for what, value in seen.items() if what not in found}
            elif code is None or code == -signal.SIGKILL and SAYS_WHERE in output:
                self.hung = True
                how = WAITS if code is None else COMPUTES
                errors.append((2, ["error", how, *self._place(output)]))
            else:
                how, words = describe_exit(code), error_line(output)[:200]
                how += f"; the last line that it wrote: {words}" if words else ""
                errors.append((1, ["error", f"the process {how}", 0, ""]))
        if errors:
            found[self.job.what] = min(errors, key=lambda error: error[0])[1]
        if len(beginnings) > 1:
            same = all(beginning == beginnings[0] for beginning in beginnings)
            found["all ranks begin with the same weights"] = ["fact", str(same), 0.0]
        if len(states) > 1:
            keepers = Counter(part for state in states for part in state.items())
            own = sum(size for (_, size), ranks in keepers.items() if ranks == 1)
            found["numbers of the optimizers' state that only one rank keeps"] = [
                "at least", own, 0.8]
            found["numbers of the optimizers' state on all ranks together"] = [
                "at most", sum(sum(state.values()) for state in states), (1.15, 64)]
        return found

    def _place(self, output):
        """Number and text of the script's line in which a rank was at the end of its time."""
        place = re.search(rf'File "{re.escape(str(self.script))}", line (\d+)', output)
        number = int(place[1]) if place else 0
        lines = ["", *self.script.read_text(encoding="utf-8").split("\n")]
        return number, lines[number].strip()[:100]

    def _output(self, rank):
        """The end of what a rank wrote."""
        with open(self.folder / f"output{rank}", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 20_000))
            return file.read().decode("utf-8", "replace")


def _work(task, rank):
    """What a forked process does: the job, then its end."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    folder, world = task.folder, task.world
    os.chdir(folder)
    output = os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    faulthandler.register(signal.SIGXCPU, file=output)
    limit = math.ceil(min(task.limit, 1e6))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + GRACE_S))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of a launcher that started the command
        os.environ.pop(name, None)
    if world > 1:
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                           LOCAL_WORLD_SIZE=str(world), CHECKED_STORE=f"{folder}/store")
    os.environ |= dict(CHECKED_SCRIPT=str(task.script), TMPDIR=str(folder))
    tempfile.tempdir, sys.argv = str(folder), [str(task.script)]
    torch.manual_seed(0)
    file = folder / f"rank{rank}"
    seen, spent = _observe(task, rank), resource.getrusage(resource.RUSAGE_SELF)
    file.write_bytes(kept.packed((seen, spent.ru_utime + spent.ru_stime)))
    os.replace(file, f"{file}.pkl")
    sys.stdout.flush()
    os._exit(0)  # whatever threads the script has left


def _status(pid):
    """What Linux tells of a process, from its state on; see proc(5)."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _computed(pid):
    """Seconds that a process has computed, or None where that cannot be seen."""
    with suppress(OSError, IndexError, ValueError):
        fields = _status(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _sleeps(pid):
    """Whether a process waits for something other than its turn."""
    with suppress(OSError, IndexError):
        return _status(pid)[0] == "S"


def _observe(task, rank):
    note, shards = trace.Observations(), task.folder.parent / "shards"
    files = {f"{split}_files": str(shards / f"{split}_*.bin") for split in ("train", "val")}
    files |= {f"{split}_file": str(shards / f"{split}.jsonl") for split in ("train", "val")}
    files["prefix_file"] = str(shards / "prefixes.bin")
    try:
        if task.job.spied:
            watched.stand_ins()
        module = load_snapshot(task.script)
        if hasattr(module.Hyperparameters, "checkpoint") and "bos_id" in task.values:
            files["checkpoint"] = watched.save_start(
                module, task.values, task.folder / f"start{rank}.pt")
        task.job.function(module, {**files, **task.values}, note, rank=rank,
                          folder=task.folder / "log", shards=shards, **task.options)
    except BaseException as error:  # the learner's script may do anything
        note[task.job.what] = ["error", *trace.explain(error)]
    return dict(note)


def write_shards(folder: Path) -> None:
    """Writes shards whose lengths no batch divides, in another order than their names', and broken
    ones. Documents begin with token 1; a shard's last one is longer than a row, and one more row of
    them would complete a step; one in validation is longer than any window."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)

    def write(name, length, shift=0, magic=20240520, count=None, share=0.12,
              long=0):
        tokens = np.where(rng.random(length) < share, 1, rng.integers(2, 61, length))
        tokens[-37:] = [1, *np.maximum(tokens[-36:], 2)]
        tokens[2 : 2 + long] = [1, *np.maximum(tokens[3 : 2 + long], 2)][:long]
        tokens[tokens > 1] += shift
        save(name, tokens, magic, count or length)

    def save(name, tokens, magic=20240520, count=None):
        header = np.zeros(256, "<i4")
        header[:3] = magic, 1, count or len(tokens)
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())

    for name, length in (("train_3", 140), ("train_1", 300), ("train_2", 390)):
        write(name, length)
    write("val_0", 301, long=45)
    write("cut", 500, count=600)
    write("magic", 500, magic=1)
    write("beyond", 500, shift=61)
    write("short", 100)
    write("crowded", 500, share=1)
    write_conversations(folder / "train.jsonl", rng, 37, longer=14)
    write_conversations(folder / "val.jsonl", rng, 8)  # one is dropped: 7 rows
    write_conversations(folder / "few.jsonl", rng, 3)
    turns = [dict(role="assistant", content="a"), dict(role="user", content="b")]
    lines = (folder / "train.jsonl").read_text(encoding="utf-8")
    (folder / "turns.jsonl").write_text(f"{lines}{json.dumps({'messages': turns})}\n", "utf-8")
    high = rng.integers(49_000, 50_256, 70_000)  # ids near the end of the record's vocabulary
    high[[0, 66_000, *range(66_020, 70_000, 13)]] = 50_256  # the first document has 66,000 tokens
    save("high", high)
    with open(folder / "high.bin", "r+b") as file:  # zeros, so that reading all of it shows
        file.truncate(1024 + 2 * LARGE_SHARD)
        file.seek(8)
        file.write(np.array(LARGE_SHARD, "<i4").tobytes())
    write("exact", 128)  # as many as a step takes, and no target for the last one
    # 40 tokens have a prefix, for some it is token 0; those beyond the table have none.
    prefixes = [-1] * 8 + [token // 4 for token in range(40)] + [-1] * 4
    np.array(prefixes, "<i4").tofile(folder / "prefixes.bin")


def write_conversations(file: Path, rng: np.random.Generator, count: int, longer: int = 0) -> None:
    """Writes conversations of other lengths and forms than each other: some with a system message,
    several turns or characters of several bytes; one is too long for a row of the checker's, and of
    one no answer is left there. Blank lines stand between them. longer: characters of one more
    answer, with which best fit packs other rows than first fit."""
    def text(longest):
        return "".join(rng.choice([*"abcde ü"], rng.integers(1, longest)))

    lines = []
    for number in range(count):
        turns = [text(5), text(6)] * (1 + (number % 5 == 3))
        if number == 2:
            turns = [text(4), "far too long " * 3]
        if number == 5:
            turns = ["what is far too long " * 3, text(4)]
        messages = [dict(role=role, content=turn)
                    for role, turn in zip(("user", "assistant") * 2, turns, strict=False)]
        if number % 4 == 1:
            messages.insert(0, dict(role="system", content=text(3)))
        lines.append(json.dumps({"messages": messages}))
    if longer:
        messages = [dict(role="user", content=""), dict(role="assistant", content="a" * longer)]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
