"""Runs a script through torch.distributed.run and leaves no process behind."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RUN_MARK = "SPEEDRUN_RUN"  # environment variable by which a run's processes are recognised
RANK_PATIENCE_S = 5  # from a rank's SIGTERM to its SIGKILL; the launcher's own default is 30
LAUNCHER_PATIENCE_S = 15  # longer than the launcher needs to end its ranks
STOP_SIGNALS = [signum for signum in signal.Signals  # not every system has them all
                if signum.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")]
# torch 2.13 has new names for these, and warns on every rank; torch 2.11 knows the old ones alone,
# so scripts keep them.
RENAMED = ("all_gather_into_tensor", "reduce_scatter_tensor")
QUIET = [f"ignore:`torch.distributed.{name}` is deprecated:FutureWarning" for name in RENAMED]
# Settings of PyTorch's GPU memory, under today's name and an older one, which wins if both are set.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Stop:
    """The first signal that asked this process to stop, or None; it ends the launcher too, and
    later ones change nothing."""

    def __init__(self):
        self.signum: signal.Signals | None = None
        self.launcher: subprocess.Popen | None = None

    def __call__(self, signum, frame):
        if self.signum is None:
            self.signum = signal.Signals(signum)
            if self.launcher is not None:
                _end(self.launcher)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Inside the block, Ctrl-C, SIGTERM and SIGHUP to this process are noted in its Stop and do no
    more, except those that are ignored (by nohup, say). For the main thread only."""
    previous, stop = {}, Stop()
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, stop)
    try:
        yield stop
    finally:
        for signum, old in previous.items():
            signal.signal(signum, old)


def launch(command: list[str], report: Path, on_line: Callable[[str], None], stop: Stop) -> int:
    """Runs the command, hands each line of its stdout to `on_line` and returns its exit code.

    report: file for the launcher's own stderr; stop: of the stop_signals block around this. A stop
    ends the run; whatever ends it (an exception of on_line too), its processes are gone on return.
    Raises OSError if the command or the report cannot be started.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = {
        "GOMP_SPINCOUNT": "1000",  # waiting threads give a shared CPU away sooner
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANK_PATIENCE_S),
        **os.environ,
        "PYTHONUNBUFFERED": "1",  # a pipe would hold back rank 0's lines
        "PYTHONWARNINGS": ",".join(filter(None, (*QUIET, os.environ.get("PYTHONWARNINGS")))),
        RUN_MARK: mark,
    }
    if not environment.keys() & ALLOCATOR:  # as in the records' scripts: fewer gaps in the memory
        environment[ALLOCATOR[0]] = "expandable_segments:True"
    with open(report, "wb") as stderr:
        launcher = stop.launcher = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, encoding="utf-8", errors="replace",
            # The terminal's Ctrl-C reaches only us, so there is one way to stop (POSIX, Windows).
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        reaper = threading.Thread(target=_reap, args=(launcher, mark), daemon=True)
        reaper.start()
        try:
            if stop.signum is not None:  # the signal came before there was a launcher
                _end(launcher)
            for line in launcher.stdout:
                on_line(line.rstrip("\r\n"))
        except BaseException:
            _end(launcher)
            raise
        finally:
            reaper.join()
            launcher.stdout.close()
    return launcher.returncode


def _end(launcher):
    """Asks the launcher to end its ranks and itself; kills it if it does not."""
    launcher.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
    killer = threading.Timer(LAUNCHER_PATIENCE_S, launcher.kill)
    killer.daemon = True
    killer.start()


def _reap(launcher, mark):
    """Waits for the launcher, then kills the processes of the run that outlived it (on Linux).

    None does unless the launcher itself was killed or was stopped while it started its ranks. This
    also closes the pipe that such a rank would hold open.
    """
    variable = f"{RUN_MARK}={mark}".encode()
    launcher.wait()
    looked_in_vain = 0
    while looked_in_vain < 3:  # for a moment, a process that starts shows no environment
        looked_in_vain += 1
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended meanwhile, or is not ours to read
                if variable in environ.read_bytes().split(b"\0"):
                    looked_in_vain = 0
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        time.sleep(0.05)
