"""The folders of token shards that runs read, and the commands that fill them."""

import glob
import hashlib
import json
import math
import os
import re
import shlex
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.files import replace_file
from speedrun.base.text import short
from speedrun.history.manifest import REPOSITORY
from speedrun.run.failure import error_line

FINEWEB = REPOSITORY / "data" / "fineweb10B"  # GPT-2 tokens, for the record scale
BUILTIN = REPOSITORY / "data" / "builtin"  # bytes, for the tiny scale
BUILTIN_GPT2 = REPOSITORY / "data" / "builtin_gpt2"  # the same text in GPT-2 tokens, to measure on
BUILTIN_IDS = REPOSITORY / "data" / "builtin_ids"  # its bytes, documents as GPT-2's tokens begin
GPT2_START = 50256  # the token with which a document begins there
GPT2_SHARD_TOKENS = 2_200_000  # 8 validation sequences of 262,144; the text has 4.9 million
FINEWEB_SHARDS = 103  # training shards that there are
FINEWEB_SHARD_TOKENS = 100_000_000
MAGIC, VERSION = 20240520, 1  # the first two of the 256 int32 in a shard's header
HEADER_BYTES = 1024
TOKEN_BYTES = 2
DOCUMENT_START = 256  # byte-level shards hold bytes, 0 to 255, and this token


def patterns(folder: Path) -> dict[str, str]:
    """The hyperparameters train_files and val_files for the shards of a folder."""
    escaped = Path(glob.escape(short(folder)))  # a script looks for shards by the pattern
    return {f"{split}_files": str(escaped / f"*_{split}_*.bin") for split in ("train", "val")}


def folder_of(pattern: str) -> Path:
    """The folder in which a pattern looks for shards."""
    return Path(re.sub(r"\[([*?[])\]", r"\1", str(Path(pattern).parent)))


def shards_in(folder: Path, split: str) -> list[Path]:
    """The folder's shards of a split, "train" or "val", in order; as for a script, a file is none
    whose name begins with a dot (macOS puts ._x beside each x on some disks)."""
    return sorted(map(Path, glob.glob(f"{glob.escape(str(folder))}/*_{split}_*.bin")))


def has_shards(folder: Path) -> bool:
    """Whether the folder holds training and validation shards."""
    return all(shards_in(folder, split) for split in ("train", "val"))


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
    first = min(shards_in(folder, "val"), default=None)
    if first is None or not first.is_file():
        return True
    with open(first, "rb") as file:
        file.seek(HEADER_BYTES)
        data = file.read(65536 * TOKEN_BYTES)
    tokens = struct.unpack_from(f"<{len(data) // TOKEN_BYTES}H", data)
    return max(tokens, default=0) <= DOCUMENT_START


def fingerprint(folder: Path) -> str | None:
    """The fingerprint of the embedded corpus in the folder; None for other shards.

    It covers every byte of the shards as they are now: 16 hex digits of their SHA-256, validation
    first, as data/builtin_corpus.py computes it. Raises OSError if a shard cannot be read.
    """
    if not (folder / "corpus.json").exists():
        return None
    content = hashlib.sha256()
    for split in ("val", "train"):
        for shard in shards_in(folder, split):
            content.update(shard.read_bytes())
    return content.hexdigest()[:16]


def make_builtin() -> None:
    """Makes the embedded corpus if it is not there. Raises UserError if that fails."""
    fill(BUILTIN, "builtin_corpus.py")


def make_builtin_gpt2() -> None:
    """Makes its text's shards in GPT-2 tokens if they are not there. Raises UserError if that
    fails, for example where tiktoken can neither find nor fetch its vocabulary."""
    import numpy as np  # a dry run does without

    if has_shards(BUILTIN_GPT2):
        return
    make_builtin()
    with tempfile.TemporaryDirectory() as folder, open(
            Path(folder, "builtin.jsonl"), "w", encoding="utf-8") as file:
        for shard in (*shards_in(BUILTIN, "train"), *shards_in(BUILTIN, "val")):
            tokens = np.fromfile(shard, "<u2", offset=HEADER_BYTES)
            for document in np.split(tokens, np.flatnonzero(tokens == DOCUMENT_START)[1:]):
                text = document[1:].astype(np.uint8).tobytes().decode("utf-8", "replace")
                print(json.dumps({"text": text}), file=file)
        file.flush()
        fill(BUILTIN_GPT2, "fineweb.py", "--input", file.name,
              "--shard-size", str(GPT2_SHARD_TOKENS))


def make_builtin_ids() -> None:
    """Makes two equal shards of its bytes, for training and validation, whose documents begin as
    GPT-2's do: they need no vocabulary, and steps take as long. Raises UserError if that fails."""
    import numpy as np  # a dry run does without

    make_builtin()
    try:
        BUILTIN_IDS.mkdir(exist_ok=True)
        shards = sorted(BUILTIN.glob("*_train_*.bin"))
        for split, shard in (("train", shards[0]), ("val", shards[-1])):
            tokens = np.fromfile(shard, "<u2", offset=HEADER_BYTES)
            tokens[tokens == DOCUMENT_START] = GPT2_START
            head = shard.read_bytes()[:HEADER_BYTES]
            replace_file(BUILTIN_IDS / f"bytes_{split}_000001.bin", head + tokens.tobytes())
    except OSError as error:
        raise UserError(f"cannot write in {short(BUILTIN_IDS)}: {error.strerror}") from None


def fill(folder: Path, script: str, *options: str) -> None:
    """Runs a script of data/, by its name, which fills the folder if it is not whole. Raises
    UserError with the script's reason if that fails."""
    made = subprocess.run(
        [sys.executable, str(REPOSITORY / "data" / script), "--out", str(folder), *options],
        capture_output=True, encoding="utf-8", errors="replace",
    )
    if made.returncode:
        reason = error_line(made.stderr).removeprefix("error: ")
        raise UserError(f"data/{script} failed: {reason or 'no reason given'}")


def steps_by_shard(step_tokens: Iterable[int], shards: Iterable[int]) -> Iterator[list[int]]:
    """Yields for each shard, of so many tokens, those of the optimizer steps that it serves.

    A step takes step_tokens inputs and one token more for the last target; that token is also the
    first input of the next step. A tail too short for a step is skipped.
    """
    steps = iter(step_tokens)
    step = next(steps, math.inf)
    for tokens in shards:
        served, left = [], tokens - 1
        while step <= left:
            served.append(step)
            left -= step
            step = next(steps, math.inf)
        yield served


def shards_read(step_tokens: Iterable[int]) -> int:
    """The number of different training shards of FineWeb that a run with these steps opens."""
    return sum(map(bool, steps_by_shard(step_tokens, [FINEWEB_SHARD_TOKENS] * FINEWEB_SHARDS)))
