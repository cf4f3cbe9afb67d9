"""Finds out which rank of a failed run failed first, and why."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.files import read_json

NODES_PATIENCE_S = 600  # in which all machines of a run must have met
REPORT, FAILURES = "launcher.txt", "failures.json"  # the launcher's stderr, and the failed ranks
SIGKILL = 9  # by number: Windows has no such name

_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, before each line of a rank's traceback
_MESSAGE = re.compile(r"(?:\S+: )?error: (.*)|AssertionError: (.*)")  # argparse names the program
_NODES = re.compile("waiting for clients|client socket has timed out")  # torch's, of machines
_INTERFACE = re.compile(r"Unable to find address for: (\S+)")  # gloo's
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Failure:
    """Why a run failed: `text` for the user, one line, and the exit code to end with (1..255).

    rank: the one that failed first, if it is known; explained: whether the text is an assertion's
    or an `error:` line of the script's, so that nothing is left to look up; stopped: whether a
    signal to the launching process ended the run.
    """

    text: str
    exit_code: int
    rank: int | None = None
    explained: bool = False
    stopped: bool = False


def rank_stderr(ranks_dir: Path) -> dict[int, Path]:
    """The stderr files that the launcher left below ranks_dir, {local rank: file}."""
    return {int(file.parent.name): file for file in ranks_dir.glob("*/attempt_0/*/stderr.log")}


def explain(ranks_dir: Path, exit_code: int) -> Failure:
    """The Failure of a run, from the launcher's exit code and its files in ranks_dir: FAILURES,
    REPORT and the ranks' stderr.

    A broken connection makes other ranks fail too. The first cause is a rank killed from outside,
    else one that gives the reason itself, else the one whose stderr ends first.
    """
    failed, stderr_files = [], rank_stderr(ranks_dir)
    for rank, local_rank, status in read_json(ranks_dir / FAILURES) or []:
        words, last_write = "", 0.0
        if file := stderr_files.get(local_rank):
            words = error_line(file.read_text(encoding="utf-8", errors="replace"))
            last_write = file.stat().st_mtime
        message = _MESSAGE.fullmatch(words)
        order = (status != -SIGKILL, message is None, last_write)
        failed.append((order, rank, status, words, message))
    if not failed:
        report = (ranks_dir / REPORT).read_text(encoding="utf-8", errors="replace")
        words = error_line(report) if exit_code >= 0 else ""  # a killed launcher gives no reason
        if _NODES.search(words):
            text = (f"not all nodes met at --rdzv-endpoint within {NODES_PATIENCE_S // 60} minutes;"
                    " start the same command on each, with its own --node-rank")
            return Failure(text, 1, explained=True)
        text = f"the launcher {describe_exit(exit_code)}"
        return Failure(f"{text}: {words}" if words else text, _status(exit_code))
    _, rank, status, words, message = min(failed)
    if status < 0 or not words:
        return Failure(f"rank {rank} {describe_exit(status)}", _status(status), rank)
    if interface := _INTERFACE.search(words):
        return Failure(f"GLOO_SOCKET_IFNAME: this machine has no network interface {interface[1]};"
                       " unset the variable, or name one", 1, rank, explained=True)
    text = strip_kind(words)
    if len(stderr_files) > 1 or rank > 0:
        text = f"rank {rank}: {text}"
    return Failure(text, _status(status), rank, explained=message is not None)


def error_line(stderr: str) -> str:
    """The line of a program's stderr that gives the reason for its end; "" if there is nothing.

    That is its last `error:` line, else the line with the exception below its last traceback, else
    its last line. Exceptions that the interpreter ignored at its exit do not count.
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


def strip_kind(words: str) -> str:
    """An error line without what an assertion or argparse writes before its message."""
    message = _MESSAGE.fullmatch(words)
    return (message[1] or message[2]) if message else words


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words; a negative exit code is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hints = {"SIGKILL": " (out of memory?)", "SIGBUS": " (was a shard cut short?)"}  # mapped files
    return f"was killed by {name}{hints.get(name, '')}"


def _status(exit_code):
    """An exit code as shells report it: killed by signal N is 128 + N."""
    if exit_code < 0:
        return 128 - exit_code
    return exit_code if 0 < exit_code < 256 else 1
