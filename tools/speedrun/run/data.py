"""The folders of token shards that runs read, and the commands that fill them."""

import glob
import hashlib
import os
import re
import shlex
import stat
import struct
import subprocess
import sys
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.manifest import REPOSITORY
from speedrun.run.failure import error_line

FINEWEB = REPOSITORY / "data" / "fineweb10B"  # GPT-2 tokens, for the record scale
BUILTIN = REPOSITORY / "data" / "builtin"  # bytes, for the tiny scale
FINEWEB_SHARDS = 103  # training shards that there are
FINEWEB_SHARD_TOKENS = 100_000_000
MAGIC, VERSION = 20240520, 1  # the first two of the 256 int32 in a shard's header
HEADER_BYTES = 1024
TOKEN_BYTES = 2


def patterns(folder: Path) -> dict[str, str]:
    """The hyperparameters train_files and val_files for the shards of a folder."""
    escaped = Path(glob.escape(short(folder)))  # a script looks for shards by the pattern
    return {f"{split}_files": str(escaped / f"*_{split}_*.bin") for split in ("train", "val")}


def folder_of(pattern: str) -> Path:
    """The folder in which a pattern looks for shards."""
    return Path(re.sub(r"\[([*?[])\]", r"\1", str(Path(pattern).parent)))


def has_shards(folder: Path) -> bool:
    """Whether the folder holds training and validation shards."""
    return all(any(folder.glob(f"*_{split}_*.bin")) for split in ("train", "val"))


def fetch_command(folder: Path = FINEWEB, shards: int | None = None) -> str:
    """The command that fetches this number of training shards of FineWeb into the folder, or that
    makes the embedded corpus if it is that folder."""
    if folder.resolve() == BUILTIN:
        return f"python {short(REPOSITORY / 'data' / 'builtin_corpus.py')}"
    out = "" if folder.resolve() == FINEWEB else f" --out {shlex.quote(short(folder))}"
    return f"python {short(REPOSITORY / 'data' / 'cached_fineweb10B.py')} {shards or 'N'}{out}"


def shard_length(file: str | Path) -> int:
    """The number of tokens in a shard. Raises UserError for a file that is not a whole shard, and
    OSError for one that cannot be read."""
    again = "make or fetch it again"
    if Path(file).absolute().parent == BUILTIN:
        again = f"make it again: {fetch_command(BUILTIN)}"
    if not stat.S_ISREG(os.stat(file).st_mode):  # a pipe would wait for its writer
        raise UserError(f"{file} is not a regular file, so it is not a token shard; remove it")
    with open(file, "rb") as shard:
        header = shard.read(HEADER_BYTES)
        size = os.fstat(shard.fileno()).st_size
    known = struct.pack("<2i", MAGIC, VERSION)
    if len(header) < HEADER_BYTES or not header.startswith(known):
        raise UserError(f"{file} is not a token shard (magic {MAGIC}, version {VERSION}); {again}")
    (length,) = struct.unpack_from("<i", header, len(known))
    if size != HEADER_BYTES + TOKEN_BYTES * length:
        raise UserError(f"{file} has {size} bytes, not {HEADER_BYTES} + {TOKEN_BYTES} * {length}"
                       f" tokens; {again}")
    return length


def holds_bytes(folder: Path) -> bool:
    """Whether the shards look byte-level: the first tokens of a validation shard are at most 256.
    Without such a shard, they do."""
    first = min(folder.glob("*_val_*.bin"), default=None)
    if first is None or not first.is_file():
        return True
    with open(first, "rb") as file:
        file.seek(HEADER_BYTES)
        data = file.read(65536 * TOKEN_BYTES)
    return max(struct.unpack_from(f"<{len(data) // TOKEN_BYTES}H", data), default=0) <= 256


def fingerprint(folder: Path) -> str | None:
    """The fingerprint of the embedded corpus in the folder; None for other shards.

    It covers every byte of the shards as they are now: 16 hex digits of their SHA-256, validation
    first, as data/builtin_corpus.py computes it. Raises OSError if a shard cannot be read.
    """
    if not (folder / "corpus.json").exists():
        return None
    content = hashlib.sha256()
    for split in ("val", "train"):
        for shard in sorted(folder.glob(f"*_{split}_*.bin")):
            content.update(shard.read_bytes())
    return content.hexdigest()[:16]


def make_builtin() -> None:
    """Makes the embedded corpus if it is not there. Raises UserError if that fails."""
    script = REPOSITORY / "data" / "builtin_corpus.py"
    made = subprocess.run(
        [sys.executable, str(script), "--out", str(BUILTIN)],
        capture_output=True, encoding="utf-8", errors="replace",
    )
    if made.returncode:
        reason = error_line(made.stderr).removeprefix("error: ")
        raise UserError(f"cannot make the embedded corpus: {reason or 'no reason given'}")


def steps_per_shard(tokens_per_step: int, shard_tokens: int = FINEWEB_SHARD_TOKENS) -> int:
    """The number of optimizer steps that one shard serves.

    A step takes `tokens_per_step` inputs and one token more for the last target; that token is
    also the first input of the next step. A tail too short for a step is skipped.
    """
    return (shard_tokens - 1) // tokens_per_step


def shards_read(train_steps: int, tokens_per_step: int) -> int:
    """The number of different training shards that a run of `train_steps` steps opens."""
    return min(FINEWEB_SHARDS, -(-train_steps // steps_per_shard(tokens_per_step)))
