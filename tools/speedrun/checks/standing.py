"""Keeps the learner's progress in a file beside the script."""

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = ".progress.json"


@dataclass
class Standing:
    """What is known of one milestone: checks passed and seen when the script was last checked, the
    first that failed or "", the script's hash then, whether it passed once, whether the
    milestone's own script was taken, and the last level of hint given, {check: level}."""

    passed: int = 0
    seen: int = 0
    failing: str = ""
    script: str = ""
    done: bool = False
    taken: bool = False
    hints: dict[str, int] = field(default_factory=dict)


class Progress:
    """The standing of each milestone, {id: Standing}; `note` says that the file could not be read
    and is started anew, or is None. Without a file (None) nothing is kept."""

    def __init__(self, file: Path | None):
        self.file, self.note = file, None
        self.standings: dict[str, Standing] = {}
        try:
            text = file.read_text(encoding="utf-8") if file else "{}"
            self.standings = {str(id): _standing(raw) for id, raw in json.loads(text).items()}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError):
            self.note = f"note: {file.name} could not be read; progress starts anew"

    def of(self, id: str) -> Standing:
        """The standing of a milestone, an empty one if there is none yet."""
        return self.standings.setdefault(id, Standing())

    def save(self) -> None:
        """Writes the file, whole or not at all. Raises OSError if that is impossible."""
        if self.file is None:
            return
        text = json.dumps({id: asdict(s) for id, s in sorted(self.standings.items())}, indent=1)
        replace_file(self.file, (text + "\n").encode())


def progress_beside(script: Path) -> Progress:
    """The Progress of the script's folder. Raises OSError if there is one that cannot be opened."""
    return Progress(script.parent / FILE)


def hash_of(script: Path) -> str:
    """A hash of the file. Raises OSError if it cannot be read."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def replace_file(file: Path, content: bytes, mode: int | None = None) -> None:
    """Gives the file its new content at one go, under permissions `mode` if that is not None.

    Raises OSError if that is impossible; the file is then as it was.
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
    finally:
        temporary.unlink(missing_ok=True)


def _standing(raw):
    """A Standing from what the file holds. Raises TypeError or ValueError if it is none."""
    standing = Standing(**raw)
    for name, value in asdict(Standing()).items():
        if type(getattr(standing, name)) is not type(value):
            raise ValueError(name)
    if not all(type(level) is int for level in standing.hints.values()):
        raise ValueError("hints")
    return standing
