"""The parts by which milestones are measured, as tasks of take_turns, and what comes of them."""

import getpass
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.files import REPOSITORY
from speedrun.compare import plans
from speedrun.compare.turns import CAN_STOP, End, Launch, Task
from speedrun.history.manifest import Milestone
from speedrun.history.measured import MOST_LETTERS, Measurement, Timing
from speedrun.run.failure import REPORT, describe_exit, error_line, explain, rank_stderr
from speedrun.run.fit_batch import MARGIN, OUT_OF_MEMORY
from speedrun.run.gpus import watched_clock
from speedrun.run.kernels import OK, PATIENCE_S, TRIALS, trial_command
from speedrun.run.log import read_log
from speedrun.run.torchrun import rank_environment
from speedrun.scripts.find import code_hash, paths_taken

# Losses may differ by this, before any step and later: bfloat16 rounds, and training drifts (on a
# CPU, by up to 0.002 and 0.034 in a dozen milestones).
AT_FIRST, LATER = 0.01, 0.1
SEEN = 1e-4  # a log's losses have four decimals
# Those that tell most come first: the last of 2025 and today's, the first Muon, FP8's head, the
# prelude's last, the kernels of 2026, FlexAttention.
ORDER = ("09", "14i", "01", "05i", "p6d", "12c", "05d", "13e", "00", "07")
SHARE_S, WHOLE_S, SMALL_S = 1200, 7200, 900  # limits of a timed and of a small run
SMALL_GIB, TRIAL_GIB = 3, 2  # of a GPU's memory, that a small run and a trial take
CORES, HOST_GIB, MOST_SLOTS = 2, 8, 8  # of this machine for a program that compiles; most of these


def _slots():
    """Programs that may compile at once here."""
    if not CAN_STOP:
        return 1
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(MOST_SLOTS, cores // CORES, int(memory / HOST_GIB)))


class Parts:
    """What is left to measure, as tasks for take_turns, and what has been found.

    A milestone has three tasks: "time", and "cpu" and "gpu", whose losses are compared; without a
    GPU, "gpu" is a second run on the CPU. "try" tasks are TRIALS.
    """

    def __init__(self, milestones: Sequence[Milestone], found: Measurement, out: Path, scale: str,
                 data: Path | None):
        self.found, self.machine = found, found.machine
        self.out, self.scale, self.data = out, scale, data
        self.milestones = sorted(milestones, key=lambda m: (
            ORDER.index(m.id) if m.id in ORDER else len(ORDER)))
        self.slots = _slots() if self.machine.share else 1
        self.on_gpu = self.machine.gpu != "CPU"
        self.gib = MARGIN * (self.machine.memory or 0) / 1024
        self.plans, self.sequences, self.ended = {}, {}, set()
        self.watch = ExitStack()  # the clock's, of whole steps
        self.of_task, self.waiting = {}, []
        for m in self.milestones:
            self._add_parts(m)
        self.known = len(self.milestones) - len(set(map(id, self.of_task.values())))
        if self.of_task and self.on_gpu:
            self.waiting[:0] = [
                Task(f"try:{name}", lambda name=name: self._launch_trial(name), TRIAL_GIB,
                     PATIENCE_S) for name in TRIALS]

    def _add_parts(self, m):
        """Adds a milestone's parts that are not known of its script as it is today."""
        timing, on_gpu = self.found.timings.get(m.slug), self.on_gpu
        if timing and timing.code != code_hash(m.script):
            timing = self.found.timings.pop(m.slug) and None
        if timing is None:
            gib = plans.expected_gib(m) if self.scale == "record" else SMALL_GIB
            self._add("time", m, self._launch_timed, gib * on_gpu,
                      SHARE_S if self.machine.share else WHOLE_S)
        if timing is None or timing.within is None:
            trials = frozenset(f"try:{name}" for name in TRIALS)
            self._add("cpu", m, self._launch_small, 0, SMALL_S)
            self._add("gpu", m, self._launch_small, SMALL_GIB * on_gpu, SMALL_S, trials)

    def _add(self, part, m, launch, gib, limit_s, after=frozenset()):
        name = f"{part}:{m.slug}"
        self.of_task[name] = m
        self.waiting.append(Task(name, lambda: launch(name, m), gib, limit_s, after))

    def summary(self):
        """How far it came."""
        timings = [self.found.timings[m.slug] for m in self.milestones
                   if m.slug in self.found.timings]
        compared = sum(timing.within is not None for timing in timings)
        return (f"{len(timings)} of {len(self.milestones)} milestones are timed; the losses of"
                f" {compared} were compared with a CPU's")

    # ---- how a task is started ----

    def _environment(self):
        """For a program that torch's launcher does not start."""
        path = os.pathsep.join(filter(None, [
            str(REPOSITORY / "tools"), os.environ.get("PYTHONPATH")]))
        return rank_environment(self.out) | {"PYTHONPATH": path} | (
            {} if self.slots == 1 else {"OMP_NUM_THREADS": "1",
                                        "TORCHINDUCTOR_COMPILE_THREADS": str(CORES)})

    def _launch_trial(self, name):
        return Launch(trial_command(name), self._environment(), self._stderr_file(f"try:{name}"))

    def _launch_timed(self, task, m):
        plan = plans.timed_plan(m, self.machine, self.scale, self.data, self.out,
                                self.sequences.get(m.slug))
        if not self.machine.share:
            self.watch.pop_all().close()
            self.clock = self.watch.enter_context(watched_clock())
            return self._launch(task, plan, plan.script_command)
        script, *options = plan.script_command
        return self._launch(task, plan, [
            "-m", "speedrun.compare.share", script, str(self.machine.steps), *options])

    def _launch_small(self, task, m):
        on_gpu = task.startswith("gpu:")
        plan = plans.small_plan(
            m, self.machine.count if on_gpu else 1, self.out / f"{m.name}-{task[:3]}",
            self.found.kernels if on_gpu else None)
        launch = self._launch(task, plan, plan.script_command)
        if not on_gpu:
            launch.environment["CUDA_VISIBLE_DEVICES"] = ""
        return launch

    def _launch(self, task, plan, arguments):
        """A run of a plan: by itself as one rank, through torch's launcher as several."""
        self.plans[task] = plan
        if plan.nproc == 1:
            return Launch([sys.executable, *arguments], self._environment(),
                          self._stderr_file(task))
        plan.ranks_dir.mkdir(parents=True)
        return Launch(plan.command, rank_environment(plan.ranks_dir), plan.ranks_dir / REPORT)

    def _stderr_file(self, task):
        return self.out / f"{task.replace(':', '_')}.txt"

    # ---- what came of it ----

    def take(self, task: Task, result: dict | End) -> Iterator[str]:
        """Keeps a result of take_turns; yields lines about it."""
        part, _, name = task.name.partition(":")
        if part == "try":
            if isinstance(result, End):
                self.found.kernels[name] = _anonymous(self._fault(task, result) or OK)
                yield f"{name}: {self.found.kernels[name]}"
            return
        m = self.of_task[task.name]
        try:
            if not isinstance(result, End):
                yield f"{m.name}: {self._keep_share(m, result)}"
            elif not self._starts_again(task, result):
                self.ended.add(task.name)
                if fault := self._fault(task, result):
                    raise UserError(fault)
                if part == "time" and not self.machine.share:
                    yield f"{m.name}: {self._keep_whole(m)}"
                if m.slug not in self.found.timings and part == "time":
                    raise UserError("it ended without having been timed")
                if line := self._compared(m):
                    yield f"{m.name}: {line}"
        except UserError as error:
            self.found.failed[m.slug] = _anonymous(str(error).partition("\n")[0])
            self.waiting[:] = [it for it in self.waiting if self.of_task.get(it.name) is not m]
            yield f"{m.name}: failed: {self.found.failed[m.slug]}"

    def _fault(self, task, end):
        """Why a task failed; "" if it did not."""
        if end.reason or not end.code:
            return end.reason
        plan = self.plans.get(task.name)
        if plan and plan.nproc > 1:
            return explain(plan.ranks_dir, end.code).text
        return (error_line(self._stderr(task)) if end.code > 0 else "") or describe_exit(end.code)

    def _stderr(self, task):
        plan = self.plans.get(task.name)
        files = [self._stderr_file(task.name)] if plan is None or plan.nproc == 1 else (
            rank_stderr(plan.ranks_dir).values())
        return "\n".join(file.read_text("utf-8", "replace") for file in files)

    def _starts_again(self, task, end):
        """Whether it does, where the GPU's memory was short: alone, then with fewer sequences."""
        if not (end.code and OUT_OF_MEMORY.search(self._stderr(task))):
            return False
        plan, m = self.plans[task.name], self.of_task[task.name]
        if end.shared:
            with suppress(OSError):  # it has not begun a log
                plan.out.rename(plan.out.with_name(f"{plan.out.name}-beside-others"))
        elif task.name.startswith("time:") and (fewer := plans.fewer_sequences(plan)):
            self.sequences[m.slug] = fewer
        else:
            return False
        self.waiting.insert(0, replace(task, gib=self.gib))
        return True

    def _keep_share(self, m, result):
        """Keeps what share.py has found; returns a line."""
        plan = self.plans[f"time:{m.slug}"]
        result = {name: value for name, value in result.items() if name != "event"}
        return self._keep(m, plan.hyperparameters, result)

    def _keep_whole(self, m):
        """Keeps what a run's log says of whole steps; returns a line."""
        self.watch.pop_all().close()
        log = read_log(self.plans[f"time:{m.slug}"].out / "log.txt")
        exact = [(s.step, s.step * s.step_avg_ms) for s in log.steps if s.val_loss is not None]
        on_gpu = log.environment.get("device", "cpu") != "cpu"
        return self._keep(m, log.hyperparameters, dict(
            step_ms=[round((there - here) / (last - first), 3)
                     for (first, here), (last, there) in pairwise(exact)],
            peak_memory_mib=log.peak_memory_mib, **self.clock, paths=paths_taken(
                m.script.read_text(encoding="utf-8"), log.hyperparameters, on_gpu)))

    def _keep(self, m, values, measured):
        timing = Timing(code_hash(m.script), micro_batch=values["micro_batch_size"],
                        passes=plans.passes(values, self.machine), **measured)
        self.found.timings[m.slug] = timing
        self.found.failed.pop(m.slug, None)
        return (f"{timing.step_text}, {timing.memory_text}{timing.compiled_text}\n"
                f"    {timing.paths}")

    def _compared(self, m):
        """Compares the losses when all of a milestone's parts have ended: a line. Raises UserError
        where they are too far apart."""
        small = [f"{part}:{m.slug}" for part in ("cpu", "gpu")]
        if not self.ended.issuperset(small) or m.slug not in self.found.timings:
            return None
        curves = [read_log(self.plans[task].out / "log.txt").val_curve for task in small]
        within = SEEN
        for (step, known), (_, loss) in zip(*curves, strict=True):
            if not abs(loss - known) <= (LATER if step else AT_FIRST):
                raise UserError(f"with tiny sizes the loss at step {step} is {loss:.4f}, on a CPU"
                                f" {known:.4f}")
            within = max(within, round(abs(loss - known), 4))
        self.found.timings[m.slug] = replace(self.found.timings[m.slug], within=within)
        self.found.failed.pop(m.slug, None)
        return f"with tiny sizes the losses are within {within} of a CPU's"


def _anonymous(line):
    """The line without what says who measured, and where: the names of the machine and the user,
    the folders of a path."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0], Path.home().name}
    with suppress(KeyError, OSError, ImportError):  # in a container the user may have no name
        names.add(getpass.getuser())
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    line = re.sub(rf"\b({'|'.join(map(re.escape, longest_first))})\b", "…", line)
    line = re.sub(r"(~|[A-Za-z]:|[\w.…-]*)[/\\]\S*[/\\]", "", line)
    return re.sub(r"[@/\\]|\b(\d+\.){3}\d+\b", "…", line)[:MOST_LETTERS]
