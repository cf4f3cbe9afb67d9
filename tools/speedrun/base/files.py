"""Where the repository is; files that are written whole or not at all, JSON that may be missing."""

import json
import os
import secrets
from pathlib import Path

from speedrun.base.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]


def replace_file(file: Path, content: bytes, mode: int | None = None) -> None:
    """Gives the file its new content at one go, under permissions `mode` if that is not None.

    Raises UserError, one line, if that is impossible; the file is then as it was.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def read_json(file: Path) -> object:
    """What a JSON file holds, or None where there is none that can be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
