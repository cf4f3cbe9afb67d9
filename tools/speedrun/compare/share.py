"""Times one rank's share of a step, in a process of its own: measure.py starts it in its turn.

    python -m speedrun.compare.share path/to/train_gpt.py STEPS --name=value ...

The script's own training loop runs, with the schedules held where they are in the middle of a run:
one window, one length of rows. It compiles during its first steps; then it waits for its turn, and
the next STEPS steps are timed. It trains no further, and does not validate.
"""

import inspect
import itertools
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

from speedrun.run.gpus import watched_clock
from speedrun.scripts.find import load_snapshot, paths_taken

# Steps before the turn, in which everything is compiled: Adam takes every second step, and FP8's
# scales are exact up to step 16.
FIRST = 20
ALONE = 4  # further steps, in which the GPU becomes quiet
PARTS = 6  # of the timed steps, each with a time of its own


class Timed(Exception):
    """All steps were timed; it ends the script's training."""


def hold_schedules(module: ModuleType, step: int, args) -> None:
    """Keeps each of a script's schedules, its functions of (step, args), at its value in this step
    under these hyperparameters."""
    for name, schedule in inspect.getmembers(module, inspect.isfunction):
        code = schedule.__code__
        if code.co_varnames[:code.co_argcount] == ("step", "args"):
            setattr(module, name, lambda *_, schedule=schedule: schedule(step, args))


def time_share(script: Path, steps: int, options: list[str]) -> None:
    """Trains the script with its command line's options, and prints what turns.py reads: the
    result "timed", with the fields of a Timing that only the run knows."""
    import torch

    from speedrun.compat import compiled_graphs

    module = load_snapshot(script)
    args = module.parse_args(options)
    hold_schedules(module, args.train_steps // 2, args)
    on_gpu = torch.cuda.is_available()
    synchronize = torch.get_device_module("cuda" if on_gpu else "cpu").synchronize
    train, marks, seen = module.train, [], SimpleNamespace()
    ends = {FIRST + ALONE + round(steps * part / PARTS) for part in range(PARTS + 1)}

    def train_and_note(*arguments):
        seen.begin = time.perf_counter()
        train(*arguments)

    def step_ended(log, step, *_):
        if step == FIRST:
            synchronize()
            seen.first_s = time.perf_counter() - seen.begin
            say(event="ready")
            if not sys.stdin.readline():
                sys.exit("the process that gives turns has ended")
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            seen.clock = watch.enter_context(watched_clock())
        elif step in ends:
            synchronize()
            marks.append((step, time.perf_counter()))
        if step == max(ends):
            raise Timed

    module.train, module.Log.step = train_and_note, step_ended
    with ExitStack() as watch, suppress(Timed):
        module.main(args)
    step_ms = [1000 * (end - start) / (last - first)
               for (first, start), (last, end) in itertools.pairwise(marks)]
    found = dict(step_ms=[round(ms, 3) for ms in step_ms], **seen.clock,
                 paths=paths_taken(script.read_text(encoding="utf-8"), vars(args), on_gpu))
    if on_gpu:
        found["peak_memory_mib"] = torch.cuda.max_memory_allocated() // 2**20
    if args.compile:
        found["graphs"], found["breaks"] = compiled_graphs()
        found["compile_s"] = round(seen.first_s - FIRST * statistics.fmean(step_ms) / 1000)
    say(event="timed", **{name: value for name, value in found.items() if value})
    say(event="over")


def say(**what: object) -> None:
    """Prints a line for the process that gives turns."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    time_share(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # threads that prefetch, and NCCL, are still at work
