"""Starts an examination in a process of its own and follows it, whatever the script does there.

The process has a time limit, a session of its own that is killed at the end, and nowhere to print;
it answers through a file.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.check.outcome import Outcome
from speedrun.history.manifest import Milestone
from speedrun.run.failure import ending

START_S = 60  # for the import of torch and the end of what runs, on top of the time limit


def check(script: Path, milestone: Milestone, limit: float) -> Iterator[Outcome]:
    """Yields the outcomes of an examination as they come.

    limit: seconds after which the script is stopped; that becomes an outcome too. Raises UserError
    if torch is not installed, and OSError if the script cannot be read.
    """
    source = script.read_bytes()  # whatever becomes of the file meanwhile
    with tempfile.TemporaryDirectory(prefix="check_train-", ignore_cleanup_errors=True) as folder:
        Path(folder, "source.py").write_bytes(source)
        answers = Path(folder, "answers.jsonl")
        answers.touch()
        process = _start(Path(folder), milestone, limit)
        ended = False
        try:
            for answer in _follow(process, answers, time.monotonic() + limit + START_S):
                ended |= "end" in answer
                if "name" in answer:
                    yield Outcome(**answer)
            if not ended:
                yield _cut_short(process, Path(folder, "errors"))
        finally:
            _kill(process)


def _start(folder, milestone, limit):
    tools = Path(__file__).parents[2]
    # What a killed process leaves in its temporary folder goes with ours.
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(tools),
                       TMPDIR=str(folder), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of a launcher that started the command
        environment.pop(name, None)
    command = [sys.executable, "-m", "speedrun.check.examine", str(folder), milestone.id,
               str(limit), str(os.getpid())]
    with open(folder / "errors", "wb") as errors:
        return subprocess.Popen(command, env=environment, cwd=tools, stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)


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


def _cut_short(process, errors):
    """The Outcome of an examination that did not come to its end."""
    lines = errors.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if "No module named 'torch'" in last:
        raise UserError("torch is not installed here: pip install -r requirements.txt")
    how = "has no end" if process.poll() is None else ending(process.returncode)
    return Outcome("checker", "an examination that comes to its end", f"its process {how}",
                   f"Its last line: {last[:200]}" if last else "")


def _kill(process):
    """Ends the process and what it started, and waits for it."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass
    process.wait()
