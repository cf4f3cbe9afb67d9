"""Replaces the learner's script by a milestone's and keeps the old one beside it."""

import itertools
import os
import stat
from pathlib import Path

from speedrun.checks.standing import replace_file
from speedrun.launch import RunError
from speedrun.manifest import Milestone


def take(script: Path, milestone: Milestone) -> Path | None:
    """Makes `script` a copy of the milestone's; returns where its old text is kept.

    The old text is first written to script's name with the lowest free number, train_gpt.1.py; then
    the script is replaced at one go. Returns None if there was nothing to keep: no file, or
    the same text. Raises RunError, one line, if the script changes meanwhile, and OSError.
    """
    new = milestone.script.read_bytes()
    try:
        old = script.read_bytes()
    except FileNotFoundError:
        replace_file(script, new)
        return None
    if old == new:
        return None
    kept = _keep(script, old)
    if script.read_bytes() != old:
        raise RunError(f"{script} changed while it was being kept as {kept.name}; try again")
    replace_file(script, new, stat.S_IMODE(script.stat().st_mode))
    return kept


def _keep(script, old):
    """Writes the text under a name that no file has yet."""
    for number in itertools.count(1):
        kept = script.with_name(f"{script.stem}.{number}{script.suffix}")
        try:
            file = open(kept, "xb")
        except FileExistsError:
            continue
        try:
            with file:
                file.write(old)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            kept.unlink()
            raise
        return kept
