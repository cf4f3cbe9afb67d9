"""The repository's folder; files written whole or not at all; JSON that may be missing."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speedrun.base.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]


def replace_file(file: Path, content: bytes, mode: int | None = None, to_disk: bool = True) -> None:
    """Gives the file its new content in one step, with permissions `mode` if that is not None.

    Where it is a link, the file that it names gets the content.
    to_disk: waits until the disk has it, as for what cannot be made again within seconds.
    Raises UserError, one line, if that is impossible; the file is then as it was.
    """
    file = Path(os.path.realpath(file))
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(content)
            if to_disk:
                out.flush()
                os.fsync(out.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # a read-only disk refuses even if there is no such file
            temporary.unlink()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Inside the block no other process is inside such a block for the same file: what changes a
    file that several may change reads it there, changes it and writes it. The lock is a hidden file
    beside it, which stays. Raises UserError, one line, where that cannot be written."""
    from filelock import FileLock

    lock = FileLock(file.with_name(f".{file.name.removeprefix('.')}.lock"))
    try:
        os.listdir(file.parent)  # filelock would make the folder
        lock.acquire()
    except OSError as error:
        raise UserError(f"{error.filename or lock.lock_file} cannot be written:"
                        f" {error.strerror or error}") from None
    try:
        for left in file.parent.glob(f".{file.name}.????????.tmp"):  # by a writer that was killed
            left.unlink()
        yield
    finally:
        lock.release()


def check_output(option: str, file: Path, suffix: str) -> None:
    """Raises UserError, one line, if `replace_file` should not write: the name does not end in
    `suffix`, as where the option has swallowed a log or a script that was to be read; its folder is
    missing, or it is a link, a folder or a device.

    option: names the file in the message, for example "--png".
    """
    if not file.name.lower().endswith(suffix):
        raise UserError(f"{option} {file}: the file's name must end in {suffix}")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.absolute().parent}")
    if file.is_symlink():
        raise UserError(f"{option} {file}: it is a link to {os.readlink(file)}; name a file")
    if file.exists() and not file.is_file():
        raise UserError(f"{option} {file}: it exists and is not a regular file")


def read_json(file: Path) -> object:
    """The content of a JSON file, or None if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_texts(file: Path) -> dict[str, str]:
    """The values of a JSON object that are texts; none if the file cannot be read or holds
    something else."""
    found = read_json(file)
    return {name: value for name, value in found.items() if isinstance(value, str)
            } if isinstance(found, dict) else {}
