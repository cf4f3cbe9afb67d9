"""Finds out from a failed launch which rank failed first, and how."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 15
SIGKILL = 9  # by number, as the launcher reports it: Windows has no such name

_CLOSED = re.compile(r"Sending process (\d+) closing signal")
_FAILED = re.compile(r"rank\s*: (\d+) \(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+) \(pid: (\d+)\)")


@dataclass(frozen=True)
class Failure:
    """Why a run failed: `text` for the user, the exit code to end with (1..255).

    `spoken` tells that the text is the script's own `error:` line, so nothing is left to look up;
    `stopped` that a signal to the launching process ended the run.
    """

    text: str
    exit_code: int
    spoken: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class _Rank:
    rank: int
    exit_code: int  # negative: killed by that signal
    stderr: str
    silent_since: float  # when it wrote to stderr for the last time

    @property
    def error_line(self):
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        return lines[-1].removeprefix("error: ") if lines else None


def rank_stderr(ranks_dir: Path) -> dict[int, Path]:
    """The stderr files that the launcher left below ranks_dir, {local rank: file}."""
    return {int(file.parent.name): file for file in ranks_dir.glob("*/attempt_0/*/stderr.log")}


def explain(report: str, stderr_files: dict[int, Path], launcher_exit_code: int) -> Failure:
    """The Failure behind a launcher's report (its stderr) and the ranks' stderr files.

    Ranks that the launcher closed are victims and left out. Of those that failed by themselves
    (a broken connection makes others fail too) the first cause is the one killed from outside,
    else the one with an `error:` line, else the one that fell silent first.
    """
    closed = set(_CLOSED.findall(report))
    failed = [
        _rank(int(rank), int(exit_code), stderr_files.get(int(local_rank)))
        for rank, local_rank, exit_code, pid in _FAILED.findall(report)
        if pid not in closed
    ]
    if not failed:
        tail = _tail(report) if launcher_exit_code >= 0 else ""  # killed: it could not say why
        text = f"the launcher {ending(launcher_exit_code)}{tail}"
        return Failure(text, _status(launcher_exit_code))
    first = min(
        failed,
        key=lambda r: (r.exit_code != -SIGKILL, r.error_line is None, r.silent_since),
    )
    if first.error_line and first.exit_code != -SIGKILL:
        return Failure(first.error_line, _status(first.exit_code), spoken=True)
    text = f"rank {first.rank} {ending(first.exit_code)}{_tail(first.stderr)}"
    return Failure(text, _status(first.exit_code))


def _rank(rank, exit_code, file):
    if file is None:
        return _Rank(rank, exit_code, "", 0.0)
    text = file.read_text(encoding="utf-8", errors="replace")
    return _Rank(rank, exit_code, text, file.stat().st_mtime)


def ending(exit_code: int) -> str:
    """How a process ended, in words; a negative exit code is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (out of memory?)" if exit_code == -SIGKILL else ""
    return f"was killed by {name}{hint}"


def _status(exit_code):
    """An exit code as shells report it: killed by signal N is 128 + N."""
    if exit_code < 0:
        return 128 - exit_code
    return exit_code if 0 < exit_code < 256 else 1


def _tail(text):
    """The last lines below a colon, or nothing."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return "\n".join(["; the end of its stderr:", *lines]) if lines else ""
