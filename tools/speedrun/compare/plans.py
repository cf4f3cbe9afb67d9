"""Plans the runs by which measure.py measures a milestone: a timed one at the record's batch, or at
one rank's share of it, and small ones whose losses are compared."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from speedrun.history.fields import default_hyperparameters
from speedrun.history.glossary import load_glossary
from speedrun.history.handles import handles_of
from speedrun.history.manifest import Milestone
from speedrun.history.measured import Machine
from speedrun.run.fit_batch import MARGIN, find_prediction, largest_predicted
from speedrun.run.gpus import RECORD_MIB
from speedrun.run.kernels import OK
from speedrun.run.plan import Plan, make_plan
from speedrun.scripts.find import Script, find_script
from speedrun.scripts.sizes import length_names, micro_batches

PARTS = 6  # of a timed run, each between two validations, where the clock is exact
FOLLOWED = 20  # steps that a GPU's losses have to follow a CPU's
NEEDED = ("train_files", "train_steps", "total_batch_size", "micro_batch_size", "val_tokens",
          "val_loss_every")
UNKNOWN_GIB = 44  # for a rank's share, where neither a prediction nor the record says it
MORE_GIB = 6  # on one GPU than on one of eight: the whole states of the optimizers


def measurable(milestone: Milestone) -> bool:
    """Whether its program trains on shards, in steps that can be timed."""
    known = default_hyperparameters(milestone.script)
    return all(name in known for name in (*NEEDED, *length_names(known)))


def timed_plan(milestone: Milestone, machine: Machine, scale: str, data: Path | None, out: Path,
               most: int | None = None) -> Plan:
    """The Plan of a timed run on all ranks of the machine or, if that measures a share, of one
    rank's share of a step, whose schedules and length share.py sees to.

    most: sequences of a forward pass at most (None: the record's, fewer on smaller GPUs, as is
    predicted); out: where the folder of the run is made. Raises UserError as make_plan.
    """
    script = find_script(milestone.id)
    own = script.hyperparameters | (script.tiny if scale == "tiny" else {})
    train, val = length_names(own)
    if machine.share:
        rows = own["total_batch_size"] // machine.share // own[train]
        changes = dict(total_batch_size=rows * own[train], val_loss_every=0, kernel_warmup_steps=0)
    else:
        changes = dict(val_loss_every=max(1, machine.steps // PARTS))
    if machine.share or _is_small(machine):  # long sequences of validation may not fit
        changes[val] = own[train]
    for name, nothing in handles_of(milestone).EMPTY_FILES.items():
        if not Path(own[name]).exists():
            changes[name] = nothing
    sizes = own | changes | dict(val_tokens=0)
    most = most or _largest_fitting(script, sizes, machine)
    micro = max((n for n in micro_batches(sizes, machine.count) if n <= most), default=most)
    changes |= dict(micro_batch_size=micro, val_tokens=micro * sizes[val] * machine.count)
    return make_plan(
        milestone.id, scale=scale, data=data, nproc=machine.count,
        steps=None if machine.share else machine.steps, out=out / f"{milestone.name}-timed{micro}",
        settings=[f"{name}={value}" for name, value in changes.items() if name in own])


def fewer_sequences(plan: Plan) -> int | None:
    """The next smaller number of sequences of a forward pass that divides a step; None: none."""
    values = plan.hyperparameters
    possible = micro_batches(values | dict(val_tokens=0), plan.nproc)
    return max((n for n in possible if n < values["micro_batch_size"]), default=None)


def passes(values: Mapping[str, object], machine: Machine) -> int:
    """Forward passes of a rank in a step of a run with these hyperparameters."""
    train, _ = length_names(values)
    return values["total_batch_size"] // (
        values["micro_batch_size"] * values[train] * machine.count)


def expected_gib(milestone: Milestone) -> float:
    """GiB that one rank's share of the record's step takes on a GPU, about."""
    script = find_script(milestone.id)
    own = script.hyperparameters
    if prediction := find_prediction(script, {}):
        train, _ = length_names(own)
        return prediction.alone(own["micro_batch_size"] * own[train]) / 2**30
    peak = milestone.peak_memory_mib
    return peak / 1024 + MORE_GIB if peak else UNKNOWN_GIB


def small_plan(milestone: Milestone, ranks: int, out: Path,
               kernels: Mapping[str, str] | None) -> Plan:
    """The Plan of a small run whose losses are compared: on the CPU (kernels: None), or where it
    may take each of these kernels that is OK. Raises UserError as make_plan."""
    script, glossary = find_script(milestone.id), load_glossary()
    settings = [f"val_loss_every={FOLLOWED // 4}", f"val_tokens={script.tiny['total_batch_size']}"]
    settings += [f"{name}={math.ceil(script.tiny[name] / unit) * unit}"  # on the CPU, too
                 for name, _, unit in glossary.multiples() if script.tiny.get(name, 0) % unit]
    if kernels is not None:
        needs = glossary.column("needs")
        settings += [f"{name}=True" for name, value in script.tiny.items()
                     if value is False and kernels.get(needs.get(name)) == OK]
    with _hidden_gpus(hidden=kernels is None):
        return make_plan(milestone.id, scale="tiny", steps=FOLLOWED, nproc=ranks,
                         settings=settings, out=out)


def _is_small(machine):
    """Whether its GPUs have less memory than the records'."""
    return 0 < (machine.memory or 0) < RECORD_MIB


def _largest_fitting(script: Script, sizes, machine):
    """The record's sequences of a forward pass, or fewer that are predicted to fit."""
    usual = sizes["micro_batch_size"]
    prediction = _is_small(machine) and find_prediction(script, {})
    if not prediction:
        return usual
    found = largest_predicted(prediction, sizes, machine.count, MARGIN * machine.memory * 2**20)
    return min(usual, found.sequences) if found and not found.shortened(sizes) else 1


@contextmanager
def _hidden_gpus(hidden: bool) -> Iterator[None]:
    """Inside the block, this process's plans see no GPU, if it is hidden."""
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    if hidden:
        os.environ[name] = ""
    try:
        yield
    finally:
        if hidden:
            del os.environ[name]
            if visible is not None:
                os.environ[name] = visible
