"""The .bin shard format: 256 little-endian int32 of header, then uint16 little-endian tokens."""

import argparse
import os
import secrets
import sys
from contextlib import contextmanager
from pathlib import Path

LEAST_PYTHON = (3, 11)
if sys.version_info < LEAST_PYTHON:
    sys.exit("error: this is Python {}.{}; 3.11 or newer is needed".format(*sys.version_info))
MISSING = "error: {} is not installed here: make .venv/installed, then . .venv/bin/activate"
try:
    import numpy as np
except ModuleNotFoundError:
    sys.exit(MISSING.format("numpy"))

MAGIC, VERSION = 20240520, 1
ROUTES = ("HF_ENDPOINT", "https_proxy", "http_proxy", "all_proxy")  # variables that steer downloads
HEADER = np.dtype("<i4")  # 256 of them: magic, version, token count, then zeros
TOKEN = np.dtype("<u2")
HEADER_BYTES = 256 * HEADER.itemsize


def fineweb_name(index):
    """Returns the file name of FineWeb's shard `index`: 0 is validation, training starts at 1."""
    return f"fineweb_{'train' if index else 'val'}_{index:06d}.bin"


def as_tokens(ids):
    """Returns token ids (any sequence of ints) as uint16; ValueError if one does not fit."""
    ids = np.asarray(ids)
    if ids.dtype != TOKEN and ids.size and not 0 <= ids.min() <= ids.max() < 2**16:
        raise ValueError(f"token ids must lie in 0..65535, not {ids.min()}..{ids.max()}")
    return np.ascontiguousarray(ids, TOKEN)


@contextmanager
def atomic_file(path):
    """Yields a binary file that becomes `path` when the block ends, and vanishes if it raises."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def folder(name):
    """The path of a folder, for argparse, also with the ~ that a shell leaves in --out=~/data; an
    empty one would be the current folder."""
    if not name:
        raise argparse.ArgumentTypeError("the folder's name is empty")
    return Path(os.path.expanduser(name))


def network():
    """What to check after a download that failed: the network, and the variables that steer it."""
    steering = [name for name in os.environ if name in ROUTES or name.lower() in ROUTES]
    return "the network" + (f" and {', '.join(steering)}, which you have set" if steering else "")


@contextmanager
def only_writer(folder, names, wait=False):
    """Keeps other processes from writing into `folder` (made if missing) while the block does.

    names: glob patterns of the files that it writes; a killed writer's temporary files are removed.
    wait: waits for another writer, else ValueError.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another process is filling {folder}; wait until it has ended, or choose"
                         " another --out") from None
    try:
        for left in (left for name in names for left in folder.glob(f".{name}.????????.tmp")):
            left.unlink()
        yield
    finally:
        lock.release()


@contextmanager
def filling(folder, stopped):
    """Ends the process with one line where the block, which writes into `folder`, fails.

    Arguments: the folder, refused if it is none, and what to say after Ctrl-C. The exit code is 1
    for an OSError, a ValueError or a package that is missing or broken, 130 for Ctrl-C.
    """
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise ValueError(f"--out {folder} is not a folder; name one")
        yield
    except KeyboardInterrupt:
        print(f"\nstopped; {stopped}", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(MISSING.format(error.name))
    except ImportError as error:  # httpx, where a proxy needs a package that is not there
        sys.exit(f"error: {str(error).splitlines()[0]}")
    except OSError as error:
        if error.strerror:  # a full disk's error names no file
            error = f"{error.filename2 or error.filename or folder}: {error.strerror}"
        sys.exit(f"error: {error}")
    except ValueError as error:
        sys.exit(f"error: {error}")


def write(path, tokens):
    """Writes a shard, whole or not at all.

    Arguments: the path, and the token ids (a sequence of fewer than 2^31 ints in 0..65535).
    Raises ValueError if an id does not fit uint16, OSError if the file cannot be written.
    """
    tokens = as_tokens(tokens)
    header = np.zeros(256, HEADER)
    header[:3] = MAGIC, VERSION, len(tokens)
    with atomic_file(Path(path)) as file:
        file.write(header)
        file.write(tokens)


def verify(path):
    """Checks magic, version and size of a shard without reading its tokens.

    Returns the token count. Raises ValueError, in one sentence, if the file is not a whole shard,
    and OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES), np.uint8)
        size = os.fstat(file.fileno()).st_size
    if size < HEADER_BYTES:
        raise ValueError(f"{path}: truncated, {size} bytes where the header takes {HEADER_BYTES}")
    magic, version, count = map(int, header.view(HEADER)[:3])
    if magic != MAGIC:
        raise ValueError(f"{path}: not a token shard (magic {magic}, expected {MAGIC})")
    if version != VERSION:
        raise ValueError(f"{path}: shard version {version}, expected {VERSION}")
    expected = HEADER_BYTES + count * TOKEN.itemsize
    if size != expected:
        fault = "truncated" if size < expected else "too long"
        raise ValueError(f"{path}: {fault}, {size} bytes where {count} tokens take {expected}")
    return count


def is_valid(path):
    """Returns whether `path` is a whole shard (see `verify`)."""
    try:
        verify(path)
    except (OSError, ValueError):
        return False
    return True


def read(path):
    """Returns the tokens of a shard as a uint16 array; raises what `verify` raises."""
    return np.fromfile(path, TOKEN, count=verify(path), offset=HEADER_BYTES)
