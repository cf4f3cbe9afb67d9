"""Measure what a snapshot costs beside its arithmetic: its own overhead and its loader."""

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch.optim import optimizer

from speedrun.run.log import read_log


@dataclass(frozen=True)
class StepTime:
    """Seconds of a run's training steps, in all and by part; validation is not among them."""

    steps: int
    total: float
    forward: float
    backward: float
    optimizer: float

    @property
    def outside(self) -> float:
        """Share of the time spent outside forward, backward and optimizer, 0 to 1."""
        return 1 - (self.forward + self.backward + self.optimizer) / self.total


@dataclass(frozen=True)
class LoaderTime:
    """Tokens read, seconds taken, and by how many bytes the process's anonymous memory (all but
    the page cache) had grown at the end; None where the system does not tell."""

    tokens: int
    seconds: float
    grown_bytes: int | None


def time_steps(module: ModuleType, args) -> StepTime:
    """Trains with a snapshot's `main(args)` on the CPU and times the parts of its steps.

    args are the module's Hyperparameters. Raises ValueError for a GPU or a compiled model, whose
    work is not over when a call returns, and for kernel warm-up steps, which are not training.
    """
    if torch.cuda.is_available() or args.compile or args.kernel_warmup_steps:
        raise ValueError("steps are timed on a CPU, with compile=False and kernel_warmup_steps=0")
    seconds = dict(forward=0.0, backward=0.0, optimizer=0.0)
    running = []  # starts of the calls under way: an optimizer's step may call its parent class's

    def begin(*_):
        running.append(time.perf_counter())

    def end(part):
        elapsed = time.perf_counter() - running.pop()
        if not running and torch.is_grad_enabled():  # otherwise it validates
            seconds[part] += elapsed

    def timed(part, call):
        def timed_call(*positional, **named):
            begin()
            result = call(*positional, **named)
            end(part)
            return result

        return timed_call

    with ExitStack() as stack:
        for hook in (optimizer.register_optimizer_step_pre_hook(begin),
                     optimizer.register_optimizer_step_post_hook(lambda *_: end("optimizer"))):
            stack.callback(hook.remove)
        for owner, part in ((module.GPT, "forward"), (torch.Tensor, "backward")):
            stack.enter_context(patch.object(owner, part, timed(part, getattr(owner, part))))
        module.main(args)
    last = read_log(Path(args.log_dir, "log.txt")).last
    return StepTime(last.step, last.train_time_ms / 1000, **seconds)


def time_loader(module: ModuleType, args, tokens: int) -> LoaderTime:
    """Reads at least `tokens` training tokens through a snapshot's `token_batches`, to the CPU.

    args are the module's Hyperparameters, whose train_files are read from the first shard on.
    """
    batches = module.token_batches(
        args.train_files, args.total_batch_size, args, 0, 1, torch.device("cpu"))
    next(batches)
    before, count, start = _anonymous_bytes(), 0, time.perf_counter()
    while count < tokens:
        count += next(batches)[0].numel()
    seconds, after = time.perf_counter() - start, _anonymous_bytes()
    return LoaderTime(count, seconds, None if before is None else after - before)


def _anonymous_bytes():
    if sys.platform != "linux":
        return None
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("RssAnon:")[1].split()[0])
