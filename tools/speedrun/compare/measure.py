"""Measures milestones on the GPUs of this machine: a run at the record's batch, timed, and a small
one that must follow a CPU's losses. Everything found is written at once, part by part.

Each part is a program of its own. Where one rank's share of a step is measured, several compile
side by side, and all others are stopped while one of them is timed (turns.py).
"""

import itertools
import math
import platform
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from signal import SIGINT
from typing import TextIO

from speedrun.base.errors import Stopped, UserError
from speedrun.base.text import short
from speedrun.compare import plans
from speedrun.compare.parts import Parts
from speedrun.compare.turns import take_turns
from speedrun.history.manifest import Milestone
from speedrun.history.measured import (
    MEASURED,
    RECORD_RANKS,
    Machine,
    Measurement,
    load_measurement,
    write_measurement,
)
from speedrun.run.data import (
    BUILTIN_GPT2,
    BUILTIN_IDS,
    FINEWEB,
    has_shards,
    make_builtin,
    make_builtin_gpt2,
    make_builtin_ids,
)
from speedrun.run.gpus import find_fault, gpu_facts, visible_gpus, visible_memory
from speedrun.run.torchrun import stop_signals

STEPS = 60  # of a timed run
MOST_USED = 0.1  # share of a GPU's memory that other programs may hold, a desktop for example
MARGIN_S = 4  # of --minutes, to end what runs


def measure(
    milestones: Sequence[Milestone], folder: Path, out: Path, stream: TextIO, *,
    scale: str = "record", steps: int = STEPS, nproc: int | None = None, data: Path | None = None,
    share: bool | None = None, minutes: float = math.inf,
) -> tuple[Path, Measurement, Stopped | None]:
    """Measures the milestones that have steps to time, those that tell most first, and writes a
    file in `folder` after each part.

    What the file holds already is kept, unless the milestone's script has changed since. A
    milestone that fails does not end the others; a signal ends them all, and is returned.

    out: a folder for the runs; stream: gets a line per part; scale: "tiny" tries the command
    itself; steps: of a timed run; nproc: ranks (None: one per GPU); data: shards (None: FineWeb,
    else the embedded text, or its bytes where there is no vocabulary); share: whether one rank's
    share of a record's step is timed, not whole steps (None: if there is one rank); minutes: after
    which it ends. Raises UserError, one line, before anything runs, or when a result cannot be
    written.
    """
    begin = time.monotonic()
    if share and (nproc or 1) > 1:
        raise UserError(f"--share is one rank's; leave --nproc {nproc} out", 2)
    gpus = visible_gpus()[:1 if share else nproc]
    _check_gpus(gpus, scale)
    data, tokens = _tokens(data, scale)
    milestones = [m for m in milestones if plans.measurable(m)]
    tries = map(out.joinpath, map("try{}".format, itertools.count(1)))
    out = next(path for path in tries if not path.exists())  # an interrupted one keeps its logs
    count = len(gpus) or nproc or 1
    machine = _machine(gpus, count, tokens, steps, count == 1 if share is None else share)
    file = folder / machine.file_name
    found = _found_before(file, machine)
    parts = Parts(milestones, found, out, scale, data)
    for line in _announced(file, parts, minutes):
        print(line, file=stream, flush=True)
    for path in (folder, out):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write in {short(path)}: {error.strerror}") from None
    seconds = 60 * minutes - MARGIN_S - (time.monotonic() - begin)
    with stop_signals() as stop, parts.watch, closing(take_turns(
            parts.waiting, parts.slots, parts.gib, seconds, lambda: stop.signum)) as results:
        for task, result in results:
            for line in parts.take(task, result):
                print(line, file=stream, flush=True)
            write_measurement(file, found)
    print(parts.summary(), file=stream, flush=True)
    if stop.signum:
        text = "interrupted" if stop.signum == SIGINT else f"stopped by {stop.signum.name}"
        return file, found, Stopped(text, 128 + stop.signum)
    if parts.waiting:
        print(f"the time is over ({minutes:g} min); the same command goes on", file=stream)
    return file, found, None


def _check_gpus(gpus, scale):
    """Raises UserError for GPUs that cannot be measured."""
    if not gpus and scale == "record":
        raise UserError(f"{find_fault() or 'nvidia-smi shows no GPU'}, so there is nothing to"
                        " measure; --scale tiny tries the command here")
    if len(set(gpus)) > 1:
        raise UserError(f"the GPUs differ ({', '.join(gpus)}); choose equal ones:"
                        " CUDA_VISIBLE_DEVICES=0")
    memory = [*zip(gpus, visible_memory("used"), visible_memory(), strict=False)]
    free = [str(i) for i, (_, used, total) in enumerate(memory) if used <= MOST_USED * total]
    for number, (gpu, used, total) in enumerate(memory):
        if str(number) not in free:
            others = f", or choose others: CUDA_VISIBLE_DEVICES={','.join(free)}" if free else ""
            raise UserError(f"other programs hold {used / 1024:.1f} of {total / 1024:.1f} GiB of"
                            f" GPU {number}, {gpu}; end them{others}")


def _tokens(data, scale):
    """The folder of the shards (None: the scale's own) and the name of their text."""
    make_builtin()  # which small runs read
    if data or scale == "tiny":
        return data, "other" if data else "embedded text"
    if has_shards(FINEWEB):
        return FINEWEB, "FineWeb"
    try:
        make_builtin_gpt2()
        return BUILTIN_GPT2, "embedded text"
    except UserError:  # no internet and no vocabulary
        make_builtin_ids()
        return BUILTIN_IDS, "embedded bytes"


def _machine(gpus, count, tokens, steps, share):
    import torch

    if gpus and not torch.cuda.is_available():
        raise UserError("torch cannot use the GPUs; python tools/doctor.py shows why")
    nccl = torch.cuda.nccl.version() if gpus else ()
    memory = min(visible_memory()[:count], default=0)
    return Machine(
        gpu=gpus[0] if gpus else "CPU", count=count, tokens=tokens, steps=steps,
        share=RECORD_RANKS if share else None, python=platform.python_version(),
        torch=torch.__version__, cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl)) or None, memory=memory or None, **gpu_facts())


def _found_before(file, machine):
    """What the file holds. Raises UserError if another machine made it, or its folder's files."""
    others = [path for path in file.parent.glob("*.json")
              if path.name != file.name and file.parent != MEASURED]
    if others:
        raise UserError(f"{short(others[0])} was measured on other GPUs or with other ranks than"
                        f" {machine.name}; choose another --out")
    if not file.exists():
        return Measurement(machine)
    try:
        found = load_measurement(file)
    except ValueError as error:
        raise UserError(f"{error}; move it away, then start again") from None
    if changed := [name for name, value in vars(machine).items()
                   if value != getattr(found.machine, name)]:
        raise UserError(f"{short(file)} was measured with another {', '.join(changed)};"
                        " move it away, then start again")
    return found


def _announced(file, parts, minutes):
    """What is going to happen, in lines."""
    machine = parts.machine
    yield f"{machine.name}, {machine.tokens}, {machine.steps} steps; results: {short(file)}"
    if machine.share:
        yield (f"timed steps: one rank's share of {machine.share} of a record's step, without"
               " accumulation, in the middle of the run's schedules; up to"
               f" {parts.slots} program(s) compile at once, and one is timed at a time")
    elif machine.count < RECORD_RANKS:
        yield (f"the records' steps run on {RECORD_RANKS} GPUs; {machine.count} here accumulate"
               " gradients over more forward passes")
    if parts.known:
        yield f"{parts.known} of {len(parts.milestones)} milestones were measured before"
    if minutes < math.inf:
        yield f"it ends by itself after {minutes:g} min, and keeps what has finished"
