"""Git, as the tools call it."""

import os
import shutil
import subprocess
from pathlib import Path

from speedrun.base.errors import UserError

ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_NAMESPACE")


def git(repository: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    """Runs a git command in the repository, also where variables that git sets for its hooks name
    another one; returns what it prints.

    stdin: what it reads. Raises UserError, one line with git's words, if it fails, or if there
    is no git.
    """
    if shutil.which("git") is None:
        raise UserError("git is not installed")
    here = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    command = ["git", "-C", str(repository), *arguments]
    ended = subprocess.run(command, input=stdin, capture_output=True, env=here)
    if ended.returncode:
        said = " ".join(ended.stderr.decode(errors="replace").split()) or "no reason given"
        raise UserError(f"git {arguments[0]}: {said.removeprefix('fatal: ')}")
    return ended.stdout
