"""Finds out from a failed launch which rank failed first, and how."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from speedrun.run.torchrun import NODES_PATIENCE_S

SIGKILL = 9  # by number, as the launcher reports it: Windows has no such name

_CLOSED = re.compile(r"Sending process (\d+) closing signal")
_FAILED = re.compile(r"rank\s*: (\d+) \(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, before each line of a rank's traceback
_SPOKEN = re.compile(r"(?:\S+: )?error: (.*)|AssertionError: (.*)")  # argparse names the program
_ALONE = re.compile("waiting for clients|client socket has timed out")  # torch's, of machines
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Failure:
    """Why a run failed: `text` for the user, one line, and the exit code to end with (1..255).

    rank: the one that failed first, if it is known; spoken: whether the text is an assertion's or
    an `error:` line of the script's, so that nothing is left to look up; stopped: whether a signal
    to the launching process ended the run.
    """

    text: str
    exit_code: int
    rank: int | None = None
    spoken: bool = False
    stopped: bool = False


def rank_stderr(ranks_dir: Path) -> dict[int, Path]:
    """The stderr files that the launcher left below ranks_dir, {local rank: file}."""
    return {int(file.parent.name): file for file in ranks_dir.glob("*/attempt_0/*/stderr.log")}


def explain(report: str, stderr_files: dict[int, Path], launcher_exit_code: int) -> Failure:
    """The Failure behind a launcher's report (its stderr) and the ranks' stderr files.

    Ranks that the launcher closed are victims and left out. Of those that failed by themselves
    (a broken connection makes others fail too) the first cause is the one killed from outside,
    else one that speaks for itself, else the one that fell silent first.
    """
    closed = set(_CLOSED.findall(report))
    failed = []
    for rank, local_rank, exit_code, pid in _FAILED.findall(report):
        if pid in closed:
            continue
        words, silent_since = "", 0.0
        if file := stderr_files.get(int(local_rank)):
            words = last_words(file.read_text(encoding="utf-8", errors="replace"))
            silent_since = file.stat().st_mtime
        spoken = _SPOKEN.fullmatch(words)
        order = (int(exit_code) != -SIGKILL, spoken is None, silent_since)
        failed.append((order, int(rank), int(exit_code), words, spoken))
    if not failed:
        words = last_words(report) if launcher_exit_code >= 0 else ""  # killed: it could not say
        if _ALONE.search(words):
            text = (f"not all nodes met at --rdzv-endpoint within {NODES_PATIENCE_S // 60} minutes;"
                    " start the same command on each, with its own --node-rank")
            return Failure(text, 1, spoken=True)
        text = f"the launcher {ending(launcher_exit_code)}"
        return Failure(f"{text}: {words}" if words else text, _status(launcher_exit_code))
    _, rank, exit_code, words, spoken = min(failed)
    if exit_code < 0 or not words:
        return Failure(f"rank {rank} {ending(exit_code)}", _status(exit_code), rank)
    text = (spoken[1] or spoken[2]) if spoken else words
    if len(stderr_files) > 1 or rank > 0:
        text = f"rank {rank}: {text}"
    return Failure(text, _status(exit_code), rank, spoken=spoken is not None)


def last_words(stderr: str) -> str:
    """The line of a program's stderr that tells why it ended; "" if there is nothing.

    That is its last `error:` line, else the line with the exception below its last traceback, else
    its last line. What the interpreter ignored while it ended is no reason.
    """
    lines = [_PREFIX.sub("", line.rstrip()) for line in stderr.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.match(r"(\S+: )?error: ", line)]
    if errors:
        return errors[-1]
    for start in reversed(range(len(lines))):
        if lines[start] == _TRACEBACK and not lines[start - 1].startswith("Exception ignored"):
            below = [line for line in lines[start + 1 :] if not line.startswith(" ")]
            if below:
                return " ".join(below[: 2 if below[0].endswith(":") else 1])
    return lines[-1] if lines else ""


def ending(exit_code: int) -> str:
    """How a process ended, in words; a negative exit code is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (out of memory?)" if exit_code == -SIGKILL else ""
    if name == "SIGBUS":  # a part of a mapped file is not there
        hint = " (was a shard cut short?)"
    return f"was killed by {name}{hint}"


def _status(exit_code):
    """An exit code as shells report it: killed by signal N is 128 + N."""
    if exit_code < 0:
        return 128 - exit_code
    return exit_code if 0 < exit_code < 256 else 1
