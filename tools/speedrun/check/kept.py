"""Keeps what milestones' own scripts show from check to check, so that only the learner's run."""

import hashlib
import io
import os
import pickle
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
    return FOLDER / f"{slug}-{found.hexdigest()[:16]}.pickle"


def load(file: Path) -> object | None:
    """The content that `save` was given, or None if the file is missing or damaged."""
    with suppress(Exception):  # damage shows in many ways
        return unpacked(file.read_bytes())


def save(file: Path, content: object) -> None:
    """Keeps the content, and the latest files beside this one; keeps nothing where nothing can be
    written."""
    with suppress(OSError, UserError):
        file.parent.mkdir(exist_ok=True)
        replace_file(file, packed(content))
        for old in sorted(file.parent.glob("*-*"), key=os.path.getmtime)[:-LATEST]:
            old.unlink(missing_ok=True)


def packed(content: object) -> bytes:
    """Dictionaries, lists, numbers, texts and tensors as bytes for `unpacked`: tensors without what
    torch writes with each, which takes most of the time. A view's other elements are left out."""
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(content)
    return stream.getvalue()


def unpacked(content: bytes) -> object:
    """What `packed` was given. Only for bytes of the checker's own: a pickle can run any code."""
    return pickle.loads(content)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        numbers = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        return _tensor, (numbers.tobytes(), value.dtype, tuple(value.shape))


def _tensor(numbers, dtype, shape):
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)
