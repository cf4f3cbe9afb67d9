"""Keeps the learner's progress in a file beside the script."""

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from speedrun.checks.outcome import Outcome
from speedrun.launch import RunError

FILE = ".progress.json"


@dataclass
class Standing:
    """What is known of one milestone: checks passed and seen when the script was last checked, the
    first that failed or "", the script's hash then, whether it passed once, whether the
    milestone's own script was taken; of hints the last level given for the message that a check has
    now, {check: level}, the messages by their hashes, and how many were given in all."""

    passed: int = 0
    seen: int = 0
    failing: str = ""
    script: str = ""
    done: bool = False
    taken: bool = False
    hints: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    given: int = 0

    def record(self, outcomes: list[Outcome], script: str) -> None:
        """Notes what the checks of a script with this hash found. Hints to a check begin anew when
        it passes or says something else."""
        failed = {outcome.name: outcome for outcome in reversed(outcomes) if not outcome.passed}
        self.passed = sum(outcome.passed for outcome in outcomes)
        self.seen, self.script = len(outcomes), script
        self.failing = next((o.name for o in outcomes if not o.passed), "")
        self.done |= not failed
        for name in {outcome.name for outcome in outcomes}:
            text = f"{failed.get(name, '')}".encode("utf-8", "replace")
            message = hashlib.sha256(text).hexdigest()[:16]
            if name not in failed or self.messages.get(name, message) != message:
                self.hints.pop(name, None)
            self.messages[name] = message

    def hinted(self, check: str, level: int) -> None:
        """Notes that a hint was given."""
        self.hints[check] = max(level, self.hints.get(check, 0))
        self.given += 1


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
        except OSError as error:
            raise RunError(f"{file}, where the progress is kept, cannot be read: {error.strerror}; "
                           "move it away") from None
        except (ValueError, TypeError, AttributeError):
            self.note = f"note: {file.name} could not be read; progress starts anew"

    def of(self, id: str) -> Standing:
        """The standing of a milestone, an empty one if there is none yet."""
        return self.standings.setdefault(id, Standing())

    def save(self) -> None:
        """Writes the file, whole or not at all. Raises RunError if that is impossible."""
        if self.file is None:
            return
        text = json.dumps({id: asdict(s) for id, s in sorted(self.standings.items())}, indent=1)
        replace_file(self.file, (text + "\n").encode())


def progress_beside(script: Path) -> Progress:
    """The Progress of the script's folder. Raises RunError if there is one that cannot be read."""
    return Progress(script.parent / FILE)


def hash_of(script: Path) -> str:
    """A hash of the file. Raises OSError if it cannot be read."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def replace_file(file: Path, content: bytes, mode: int | None = None) -> None:
    """Gives the file its new content at one go, under permissions `mode` if that is not None.

    Raises RunError, one line, if that is impossible; the file is then as it was.
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
        raise RunError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _standing(raw):
    """A Standing from what the file holds. Raises TypeError or ValueError if it is none."""
    standing = Standing(**raw)
    for name, value in asdict(Standing()).items():
        if type(getattr(standing, name)) is not type(value):
            raise ValueError(name)
    for values, kind in ((standing.hints, int), (standing.messages, str)):
        if not all(type(value) is kind for value in values.values()):
            raise ValueError(kind)
    return standing
