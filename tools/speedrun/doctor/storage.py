"""Judges a machine's disk and its token shards."""

from collections.abc import Iterator, Sequence

from speedrun.doctor.machine import Machine
from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding, count
from speedrun.history.manifest import Milestone
from speedrun.run.data import (
    FINEWEB,
    FINEWEB_SHARD_TOKENS,
    HEADER_BYTES,
    TOKEN_BYTES,
    fetch_command,
    shards_read,
)

SHARD_BYTES = HEADER_BYTES + FINEWEB_SHARD_TOKENS * TOKEN_BYTES
LEAST_BYTES = 10**8  # the embedded corpus takes 20 MB, a log and a checkpoint at tiny scale 5


def needed_shards(milestone: Milestone) -> int:
    """Training shards that a full run at record scale reads; 0 where its figures do not tell."""
    if not (milestone.train_steps and milestone.tokens_per_step):
        return 0
    return shards_read(milestone.train_steps, milestone.tokens_per_step)


def fetch(shards: int) -> str:
    """The command that fetches this many training shards, and the one for validation."""
    return fetch_command(FINEWEB, shards * FINEWEB_SHARD_TOKENS)


def storage_checks(machine: Machine, milestones: Sequence[Milestone]) -> Iterator[Finding]:
    """The disk, the shards of FineWeb and the embedded corpus. Only a machine with GPUs is told to
    have the shards of all milestones."""
    has_gpus = bool(machine.gpus.names)
    most = max(map(needed_shards, milestones), default=0)
    missing = max(0, most - machine.train_shards) + (machine.val_shards == 0)
    free, size = machine.disk_free, missing * SHARD_BYTES
    room = free // SHARD_BYTES - (machine.val_shards == 0)  # for training shards
    text = f"{free / 1e9:.1f} GB free"
    if missing:
        text += f"; the {missing} FineWeb shards that are missing take {size / 1e9:.1f}"
    if free < LEAST_BYTES:
        yield Finding("disk", FIX, f"{free / 1e9:.2f} GB free; a run at tiny scale wants 0.1",
                    "free some space")
    elif has_gpus and free < size:
        yield Finding("disk", NOTE, text,
                    fetch(machine.train_shards + room) if room > 0 else "free some space")
    else:
        yield Finding("disk", OK, text)

    found = f"{count(machine.train_shards, 'training shard')}, {machine.val_shards} of validation"
    if not missing:
        yield Finding("FineWeb", OK, found)
    elif has_gpus:
        yield Finding("FineWeb", NOTE, f"{found}; the milestones read up to {most}", fetch(most))
    else:
        yield Finding("FineWeb", ABSENT, f"{found}; only the record scale reads them, up to {most}")
    yield Finding("corpus", OK, "made, for the tiny scale" if machine.has_corpus
                else "the first run at tiny scale makes it")
