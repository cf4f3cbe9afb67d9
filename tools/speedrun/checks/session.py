"""Starts the checks in a child process and follows them, whatever the learner's script does there.

The child has a time limit, a process group of its own that is killed at the end, and nowhere to
print; it answers through a file.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from speedrun.checks.outcome import Outcome
from speedrun.failure import ending
from speedrun.launch import RunError
from speedrun.manifest import Milestone

TIME_LIMIT_S = 120
TAIL_BYTES = 2000


def check(script: Path, milestone: Milestone, limit: float) -> Iterator[tuple[str, Outcome]]:
    """Yields (group, outcome) of the checks of a script, as they come.

    limit: seconds after which the script is stopped. That, and an end of the process before that of
    the checks, become an outcome too. Raises RunError if torch is not installed.
    """
    group, name, ended = "import", "import", False
    with tempfile.TemporaryDirectory(prefix="check_train-", ignore_cleanup_errors=True) as folder:
        answers = Path(folder, "answers.jsonl")
        answers.touch()
        process = _start(script, milestone, answers)
        tail = bytearray()
        drain = threading.Thread(target=_drain, args=(process.stderr, tail), daemon=True)
        drain.start()
        try:
            for answer in _follow(process, answers, time.monotonic() + limit):
                if "begin" in answer:
                    group, name = answer["begin"]
                elif "outcome" in answer:
                    yield answer["group"], Outcome(**answer["outcome"])
                ended |= "end" in answer
            if not ended:
                yield group, _cut_short(name, process, limit, drain, tail)
        finally:
            _kill(process)


def _drain(stream, tail):
    """Reads a stream to its end and keeps its last bytes."""
    while chunk := stream.read1(1 << 16):
        tail += chunk
        del tail[:-TAIL_BYTES]


def _start(script, milestone, answers):
    tools = Path(__file__).parents[2]
    # What a killed process leaves in its temporary folder goes with ours.
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(tools),
                       TMPDIR=str(answers.parent))
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of a launcher that started the command
        environment.pop(name, None)
    command = [sys.executable, "-m", "speedrun.checks.child", str(script), milestone.id,
               str(answers), str(os.getpid())]
    return subprocess.Popen(
        command, env=environment, cwd=tools, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True)


def _follow(process, answers, deadline):
    """The answers as they are written, until the process has ended or the time is up."""
    with open(answers, encoding="utf-8") as file:
        line = ""
        while True:
            gone = process.poll() is not None  # asked before reading, so that nothing is missed
            while part := file.readline():
                line += part
                if line.endswith("\n"):
                    yield json.loads(line)
                    line = ""
            if gone or time.monotonic() > deadline:
                return
            time.sleep(0.05)


def _cut_short(name, process, limit, drain, tail):
    """The Outcome of a check that did not come to its end."""
    if process.poll() is None:
        return Outcome(name, f"an answer within {limit:g} s", "none: the script was stopped",
                       "Does something wait or loop without end? --timeout gives it more time.")
    drain.join(1)  # a process that outlives its parent may hold the stream open
    lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines()]
    last = next(filter(None, reversed(lines)), "")
    if "No module named 'torch'" in last:
        raise RunError("torch is not installed here: pip install -r requirements.txt")
    return Outcome(name, "checks that come to their end",
                   f"the process {ending(process.returncode)}",
                   f"The last line that it wrote to stderr: {last[:200]}" if last else "")


def _kill(process):
    """Ends the child and what it started, and waits for it."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass
    process.wait()
