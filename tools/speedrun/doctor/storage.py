"""Asks for room on the disk and for token shards."""

import shutil
from collections.abc import Iterator

from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding
from speedrun.history.manifest import REPOSITORY
from speedrun.run.data import BUILTIN, FINEWEB, FINEWEB_SHARD_TOKENS, fetch_command, has_shards

SHARD_BYTES = 1024 + 2 * FINEWEB_SHARD_TOKENS  # a header, then 16 bits for each token
LEAST_BYTES = 10**8  # the embedded corpus takes 20 MB, a log and a checkpoint at tiny scale 5


def count_shards() -> tuple[int, int]:
    """How many training and validation shards of FineWeb are here."""
    return tuple(len(list(FINEWEB.glob(f"*_{split}_*.bin"))) for split in ("train", "val"))


def fetch(shards: int) -> str:
    """The command that fetches this many training shards, and the one for validation."""
    return fetch_command(shards=shards)


def storage_checks(has_gpus: bool, most: int) -> Iterator[Finding]:
    """The disk, the shards of FineWeb and the embedded corpus. Only a machine with GPUs is told to
    have the training shards of all milestones, `most`."""
    train, val = count_shards()
    missing = max(0, most - train) + (val == 0)
    free, size = shutil.disk_usage(REPOSITORY).free, missing * SHARD_BYTES
    text = f"{free / 1e9:.1f} GB free"
    if missing:
        text += f"; the {missing} FineWeb shards that are missing take {size / 1e9:.1f}"
    if free < LEAST_BYTES:
        yield Finding("disk", FIX, f"{free / 1e9:.2f} GB free; a run at tiny scale wants 0.1",
                      "free some space")
    elif has_gpus and free < size:
        room = free // SHARD_BYTES - (val == 0)  # for training shards
        yield Finding("disk", NOTE, text, fetch(train + room) if room > 0 else "free some space")
    else:
        yield Finding("disk", OK, text)

    found = f"{train} training shard{'s' * (train != 1)}, {val} of validation"
    if not missing:
        yield Finding("FineWeb", OK, found)
    elif has_gpus:
        yield Finding("FineWeb", NOTE, f"{found}; the milestones read up to {most}", fetch(most))
    else:
        yield Finding("FineWeb", ABSENT, f"{found}; only the record scale reads them, up to {most}")
    yield Finding("corpus", OK, "made, for the tiny scale" if has_shards(BUILTIN)
                  else "the first run at tiny scale makes it")
