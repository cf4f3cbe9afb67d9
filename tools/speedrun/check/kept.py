"""Keeps what milestones' own scripts show from check to check, so that only the learner's run."""

import hashlib
import io
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from speedrun.base.errors import UserError
from speedrun.base.files import REPOSITORY, replace_file

FOLDER = REPOSITORY / "train" / ".traces"
LATEST = 8  # files that are kept, of some megabytes each


def file_of(slug: str, text: str, values: dict[str, object]) -> Path:
    """The file for a milestone's script and hyperparameters: another one where the checks, torch,
    Python or the machine are others."""
    parts = [text, repr(sorted(values.items())), torch.__version__, platform.python_version(),
             platform.platform(), platform.processor()]
    code = sorted((REPOSITORY / "tools" / "speedrun").rglob("*.py"))
    glossary = REPOSITORY / "history" / "hyperparameters.toml"
    found = hashlib.sha256("\0".join(parts).encode())
    for file in (*code, glossary):
        found.update(file.read_bytes())
    return FOLDER / f"{slug}-{found.hexdigest()[:16]}.pt"


def load(file: Path) -> dict | None:
    """The content that `save` was given, or None if the file is missing or damaged."""
    with suppress(Exception):  # damage shows in many ways
        return torch.load(file, weights_only=True)


def save(file: Path, content: dict) -> None:
    """Keeps dictionaries, lists, numbers, texts and tensors, and the latest files beside this one;
    keeps nothing where nothing can be written."""
    stream = io.BytesIO()
    torch.save(content, stream)
    with suppress(OSError, UserError):
        file.parent.mkdir(exist_ok=True)
        replace_file(file, stream.getvalue())
        for old in sorted(file.parent.glob("*.pt"), key=os.path.getmtime)[:-LATEST]:
            old.unlink(missing_ok=True)
