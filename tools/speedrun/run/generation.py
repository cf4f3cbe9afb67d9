"""Runs a script that generates text: no ranks, no log; its answers are passed on as they come."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from speedrun.base.errors import Stopped, UserError
from speedrun.run.checkpoint import check_start
from speedrun.run.failure import describe_exit, error_line, strip_kind
from speedrun.run.plan import Plan
from speedrun.run.torchrun import stop_signals

# The script's last line.
_SPEED = re.compile(rb"^tokens:(\d+) time:(\d+)ms tokens_per_second:([\d.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Answers:
    """What a script printed before its last line, and what that says: tokens drawn, seconds without
    loading the model, tokens per second."""

    text: bytes
    tokens: int
    seconds: float
    tokens_per_s: float


def generate(plan: Plan, write: Callable[[bytes], object] | None = None) -> Answers:
    """Runs the plan's script in this machine's one process.

    write: gets the bytes of its stdout as soon as there are any. Raises UserError, one line, if it
    cannot start or fails, Stopped if a signal to this process ends it, and whatever `write` does.
    """
    check_start(plan.hyperparameters, plan.script.milestone or plan.script.tiny_of)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    environment.pop("PYTHONOPTIMIZE", None)  # which would skip a script's own checks
    printed = bytearray()
    with stop_signals() as stop, tempfile.TemporaryFile() as stderr:
        child = stop.launcher = subprocess.Popen(
            plan.command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, start_new_session=True)
        try:
            while piece := child.stdout.read1():
                printed += piece
                if write:
                    write(piece)
        except BaseException:
            child.kill()
            raise
        finally:
            child.stdout.close()
            child.wait()
        if stop.signum:
            raise Stopped(f"stopped by {stop.signum.name}", 128 + stop.signum)
        stderr.seek(0)
        words = error_line(stderr.read().decode(errors="replace"))
    if child.returncode:
        raise UserError(strip_kind(words) or f"the script {describe_exit(child.returncode)}")
    found = list(_SPEED.finditer(printed))
    if not found:
        raise UserError("the script ended without its last line, tokens:… time:…ms "
                        "tokens_per_second:…")
    tokens, milliseconds, tokens_per_s = map(float, found[-1].groups())
    return Answers(bytes(printed[: found[-1].start()]), int(tokens), milliseconds / 1000,
                   tokens_per_s)
