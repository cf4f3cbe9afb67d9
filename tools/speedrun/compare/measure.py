"""Measures milestones on the GPUs of this machine: first a small run that must follow a CPU's
losses, then a short one at the record's batch, timed."""

import getpass
import io
import itertools
import math
import os
import platform
import re
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from speedrun.base.errors import Stopped, UserError
from speedrun.base.text import short
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import Milestone
from speedrun.history.measured import (
    MOST_LETTERS,
    Machine,
    Measurement,
    Timing,
    load_measurement,
    write_measurement,
)
from speedrun.run.data import BUILTIN_GPT2, FINEWEB, fetch_command, has_shards, make_builtin_gpt2
from speedrun.run.execute import run
from speedrun.run.fit_batch import fit_micro_batch
from speedrun.run.gpus import RECORD_MIB, gpu_facts, visible_gpus, visible_memory, watched_clock
from speedrun.run.kernels import OK, TRIALS, try_kernel
from speedrun.run.log import read_log
from speedrun.run.plan import AUTO, make_plan
from speedrun.scripts.find import code_hash, find_script, paths_taken
from speedrun.scripts.sizes import length_names

STEPS = 60  # of a timed run, with the schedules in proportion
PARTS = 6  # of it, each between two validations, where the clock is exact
FOLLOWED = 20  # steps that a GPU's losses have to follow a CPU's
RECORD_RANKS = 8
NEEDED = ("train_steps", "total_batch_size", "micro_batch_size", "val_tokens", "val_loss_every")
# Losses may differ by this, before any step and later: bfloat16 rounds, and training drifts (on a
# CPU, by up to 0.002 and 0.034 in a dozen milestones).
AT_FIRST, LATER = 0.01, 0.1


def measure(
    milestones: Sequence[Milestone], folder: Path, out: Path, stream: TextIO, *,
    scale: str = "record", steps: int = STEPS, nproc: int | None = None, data: Path | None = None,
) -> tuple[Path, Measurement, Stopped | None]:
    """Measures the milestones, and writes a file in `folder` after each of them.

    What the file holds already is kept, unless the milestone's script has changed since. A
    milestone that fails does not end the others; a signal ends them all, and is returned.

    out: a folder for the runs; stream: gets a line per milestone; scale: "tiny" tries the command
    itself; steps: of a timed run; nproc: ranks (None: one per GPU); data: shards (None: FineWeb,
    else the embedded text). Raises UserError, one line, before anything runs.
    """
    gpus = visible_gpus()[:nproc]
    if not gpus and scale == "record":
        raise UserError("nvidia-smi shows no GPU, so there is nothing to measure;"
                        " --scale tiny tries the command here")
    if len(set(gpus)) > 1:
        raise UserError(f"the GPUs differ ({', '.join(gpus)}); choose equal ones:"
                        " CUDA_VISIBLE_DEVICES=0")
    data, tokens = _tokens(data, scale)
    tries = map(out.joinpath, map("try{}".format, itertools.count(1)))
    out = next(path for path in tries if not path.exists())  # an interrupted one keeps its logs
    machine = _machine(gpus, nproc or len(gpus) or 1, tokens, steps)
    file = folder / machine.file_name
    found = load_measurement(file) if file.exists() else Measurement(machine)
    if changed := [name for name, value in vars(machine).items()
                   if value != getattr(found.machine, name)]:
        raise UserError(f"{short(file)} was measured with another {', '.join(changed)};"
                        " move it away, then start again")
    waiting = [m for m in milestones if m.slug not in found.timings
               or found.timings[m.slug].code != code_hash(m.script)]
    for line in _announced(machine, file, waiting, len(milestones), found):
        print(line, file=stream, flush=True)
    if waiting and gpus:
        for name in TRIALS:
            found.kernels[name] = _anonymous(try_kernel(name))
            print(f"{name}: {found.kernels[name]}", file=stream, flush=True)

    for number, m in enumerate(waiting, start=1):
        start, head = time.monotonic(), f"[{number}/{len(waiting)}] {m.name}:"
        try:
            _check_losses(m, out, machine.count, found.kernels, on_gpus=bool(gpus))
            timed = _time(m, out, scale, steps, machine.count, data)
        except Stopped as error:
            return file, found, error
        except UserError as error:
            found.failed[m.slug] = _anonymous(str(error).partition("\n")[0])
            print(head, "failed:", found.failed[m.slug], file=stream, flush=True)
        else:
            found.failed.pop(m.slug, None)
            wall_s = math.ceil(time.monotonic() - start)
            timing = Timing(code_hash(m.script), wall_s=wall_s, **timed)
            found.timings[m.slug] = timing
            left = _minutes(_seconds(found) * (len(waiting) - number))
            left = f"; about {left} left" if number < len(waiting) else ""
            print(head, f"{timing.step_text}, {timing.memory_text}{left}\n    {timing.paths}",
                  file=stream, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_measurement(file, found)
    return file, found, None


def _tokens(data, scale):
    """The folder of the shards (None: the scale's own) and the name of their text."""
    if data or scale == "tiny":
        return data, "other" if data else "embedded text"
    if has_shards(FINEWEB):
        return FINEWEB, "FineWeb"
    try:
        make_builtin_gpt2()
    except UserError as error:
        raise UserError(f"no shards in {short(FINEWEB)}, and {error}; fetch some:"
                        f" {fetch_command(shards=1)}") from None
    return BUILTIN_GPT2, "embedded text"


def _machine(gpus, count, tokens, steps):
    import torch

    if gpus and not torch.cuda.is_available():
        raise UserError("torch cannot use the GPUs; python tools/doctor.py shows why")
    nccl = torch.cuda.nccl.version() if gpus else ()
    memory = min(visible_memory()[:count], default=0)
    return Machine(
        gpu=gpus[0] if gpus else "CPU", count=count, tokens=tokens, steps=steps,
        python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl)) or None, memory=memory or None, **gpu_facts())


def _announced(machine, file, waiting, all_of_them, found):
    """What is going to happen, in lines."""
    yield f"{machine.name}, {machine.tokens}, {machine.steps} steps; results: {short(file)}"
    if len(waiting) < all_of_them:
        yield f"{all_of_them - len(waiting)} of {all_of_them} milestones were measured before"
    if machine.count < RECORD_RANKS:
        yield (f"the records' steps run on {RECORD_RANKS} GPUs; {machine.count} here accumulate"
               " gradients over more forward passes")
    if found.timings:
        yield f"the rest takes about {_minutes(len(waiting) * _seconds(found))}"
    elif official := [m.step_avg_ms for m in waiting if m.step_avg_ms]:
        seconds = statistics.fmean(official) / 1000 * machine.steps * len(waiting)
        yield (f"the timed steps alone took the records' GPUs {_minutes(seconds)}; with the same"
               f" speed, {_minutes(seconds * RECORD_RANKS / machine.count)} here. Starting and"
               " compiling takes longer: the first milestone shows how long")


def _seconds(found):
    """Mean seconds per milestone so far."""
    return statistics.fmean(timing.wall_s for timing in found.timings.values())


def _minutes(seconds):
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"


def _script_of(milestone):
    """Its Script. Raises UserError for a program whose steps cannot be timed, one that generates
    text, for example."""
    script = find_script(milestone.id)
    known = script.hyperparameters
    if missing := [name for name in (*NEEDED, *length_names(known)) if name not in known]:
        raise UserError(f"{script.path.name} has no {missing[0]}, so it has no step to time")
    return script


def _check_losses(milestone, out, nproc, kernels, on_gpus):
    """Raises UserError where a small run on the GPUs does not have a CPU's losses."""
    script, glossary = _script_of(milestone), load_glossary()
    settings = [f"val_loss_every={FOLLOWED // 4}",
                f"val_tokens={script.tiny['total_batch_size']}"]
    settings += [f"{name}={math.ceil(script.tiny[name] / unit) * unit}"  # on the CPU, too
                 for name, _, unit in glossary.multiples() if script.tiny.get(name, 0) % unit]
    needs = glossary.column("needs")
    switched_on = [f"{name}=True" for name, value in script.tiny.items()
                   if value is False and kernels.get(needs.get(name)) == OK]

    def losses(where, ranks, more):
        plan = make_plan(milestone.id, scale="tiny", steps=FOLLOWED, nproc=ranks,
                         settings=[*settings, *more], out=out / f"{milestone.name}-{where}")
        run(plan, io.StringIO())
        return read_log(plan.out / "log.txt").val_curve

    with _without_gpus():
        expected = losses("cpu", 1, [])
    found = losses("gpu" if on_gpus else "again", nproc, switched_on)
    for (step, loss), (_, known) in zip(found, expected, strict=True):
        if not abs(loss - known) <= (LATER if step else AT_FIRST):
            raise UserError(f"with tiny sizes the loss at step {step} is {loss:.4f}, on a CPU"
                            f" {known:.4f}")


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Inside the block, this process's runs see no GPU."""
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        del os.environ[name]
        if visible is not None:
            os.environ[name] = visible


def _time(milestone, out, scale, steps, nproc, data):
    """The fields of a Timing but its code and wall_s, from a run. Raises UserError if it fails."""
    script = _script_of(milestone)
    own = script.hyperparameters | (script.tiny if scale == "tiny" else {})
    train_len, val_len = (own[name] for name in length_names(own))
    small = 0 < min(visible_memory()[:nproc], default=0) < RECORD_MIB
    plan = make_plan(
        milestone.id, scale=scale, data=data, steps=steps, nproc=nproc,
        device_batch=AUTO if small else None, out=out / f"{milestone.name}-timed",
        settings=[f"val_loss_every={max(1, steps // PARTS)}",
                  f"val_tokens={own['micro_batch_size'] * val_len * nproc}"])
    plan = fit_micro_batch(plan, io.StringIO())
    with watched_clock() as clock:
        run(plan, io.StringIO())
    log = read_log(plan.out / "log.txt")
    exact = [(s.step, s.step * s.step_avg_ms) for s in log.steps if s.val_loss is not None]
    micro_batch, batch = (log.hyperparameters[name]
                          for name in ("micro_batch_size", "total_batch_size"))
    on_gpus = log.environment.get("device", "cpu") != "cpu"
    return dict(
        step_ms=[round((there - here) / (last - first), 3)
                 for (first, here), (last, there) in pairwise(exact)],
        passes=batch // (micro_batch * train_len * nproc), micro_batch=micro_batch,
        paths=paths_taken(script.path.read_text(encoding="utf-8"), log.hyperparameters, on_gpus),
        peak_memory_mib=log.peak_memory_mib, **clock)


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
