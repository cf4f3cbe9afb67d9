"""Runs a script on its ranks, through torch's launcher, and leaves no process behind."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.run.failure import FAILURES, NODES_PATIENCE_S, REPORT

LAUNCHER = Path(__file__).with_name("launcher.py")
# environment variable: launcher.py writes the failed ranks there; it also marks a run's processes
MARK = "SPEEDRUN_FAILURES"
RANK_PATIENCE_S = 5  # from a rank's SIGTERM to its SIGKILL; the launcher's own default is 30
LAUNCHER_PATIENCE_S = 15  # longer than the launcher needs to end its ranks
LEAST_FILES = 64  # open at once; 20 are too few, 32 do for one rank
STOP_SIGNALS = [signum for signum in signal.Signals  # not every system has them all
                if signum.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")]
# torch 2.13 has new names for these, and warns on every rank; torch 2.11 has only the old ones,
# so scripts keep them.
RENAMED = ("all_gather_into_tensor", "reduce_scatter_tensor")
QUIET = [f"ignore:`torch.distributed.{name}` is deprecated:FutureWarning" for name in RENAMED]
# Settings of PyTorch's GPU memory, under today's name and an older one, which wins if both are set.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Nodes:
    """The machines of a run: how many, which one this is, and host:port of machine 0."""

    count: int = 1
    rank: int = 0
    endpoint: str | None = None

    @property
    def ranks(self) -> str:
        """The name of the launcher's folder on this machine, as machines may share the run's."""
        return "ranks" if self.count == 1 else f"ranks_node{self.rank}"


def check_nodes(nodes: Nodes) -> None:
    """Raises UserError for a machine that is not in the run, and an address without port or use."""
    if nodes.rank >= nodes.count:
        raise UserError(f"--node-rank {nodes.rank}: the nodes are 0 to {nodes.count - 1}")
    if nodes.count == 1 and nodes.endpoint is not None:
        raise UserError("--rdzv-endpoint is for a run on several machines: add --nnodes", 2)
    host, _, port = (nodes.endpoint or "").rpartition(":")
    if nodes.count > 1 and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"--rdzv-endpoint {nodes.endpoint}: --nnodes needs HOST:PORT, an address of"
                        " node 0 and a free port there, such as first-machine:29500")


def announce_nodes(nodes: Nodes, stream: TextIO) -> None:
    """Prints that a run on several machines waits for them; UserError if they cannot meet."""
    if nodes.count == 1:
        return
    host, _, port = nodes.endpoint.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), port)
        if nodes.rank == 0:
            socket.create_server(("", int(port))).close()
    except socket.gaierror as error:
        raise UserError(f"--rdzv-endpoint {nodes.endpoint}: {host} has no address"
                        f" ({error.strerror}); name node 0 as this machine knows it") from None
    except OSError as error:
        raise UserError(f"--rdzv-endpoint {nodes.endpoint}: port {port} cannot be opened here"
                        f" ({os.strerror(error.errno)}); give all nodes another") from None
    print(f"waiting for all {nodes.count} nodes at {nodes.endpoint}, at most"
          f" {NODES_PATIENCE_S // 60} minutes", file=stream, flush=True)


def check_open_files() -> None:
    """Raises UserError if torch's launcher cannot open its files; it would wait for ever."""
    if os.name == "nt":  # its limits are far above
        return
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < LEAST_FILES:  # infinity is -1
        raise UserError(f"a process may open only {limit} files here; first type: ulimit -n 1024")


def launcher_command(nodes: Nodes) -> list[str]:
    """The arguments of Python that start torch's launcher, up to where the machines meet."""
    if nodes.count == 1:
        return [short(LAUNCHER), "--standalone", "--local-addr=127.0.0.1"]
    return [short(LAUNCHER), f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}",
            f"--rdzv-endpoint={nodes.endpoint}", f"--rdzv-conf=timeout={NODES_PATIENCE_S}"]


class Stop:
    """The first signal that asked this process to stop, or None; it ends the launcher too, and
    later ones change nothing. reason: why no signal but this process itself did, or ""."""

    def __init__(self):
        self.signum: signal.Signals | None = None
        self.reason = ""
        self.launcher: subprocess.Popen | None = None

    def __call__(self, signum, frame):
        if self.signum is None:
            self.signum = signal.Signals(signum)
            if self.launcher is not None:
                _end(self.launcher)

    def give_up(self, reason: str) -> None:
        """Ends the launcher as a signal does."""
        if self.signum is None:
            self.reason = reason
            self(signal.SIGTERM, None)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Inside the block, Ctrl-C, SIGTERM and SIGHUP to this process only call its Stop, except those
    that are ignored (under nohup, for example). For the main thread only."""
    previous, stop = {}, Stop()
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, stop)
    try:
        yield stop
    finally:
        for signum, old in previous.items():
            signal.signal(signum, old)


def rank_environment(folder: Path) -> dict[str, str]:
    """The environment of a run's ranks; folder: gets the launcher's FAILURES."""
    environment = {
        "GOMP_SPINCOUNT": "1000",  # waiting threads give a shared CPU away sooner
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANK_PATIENCE_S),
        # torch's launcher takes a PET_NNODES that some cluster left behind for --nnodes
        **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
        "PYTHONUNBUFFERED": "1",  # a pipe would hold back rank 0's lines
        "PYTHONWARNINGS": ",".join(filter(None, (*QUIET, os.environ.get("PYTHONWARNINGS")))),
        MARK: str(folder.absolute() / FAILURES),
    }
    environment.pop("PYTHONOPTIMIZE", None)  # which would skip a script's own checks
    if not environment.keys() & ALLOCATOR:  # as in the records' scripts: fewer gaps in the memory
        environment[ALLOCATOR[0]] = "expandable_segments:True"
    return environment


def run_ranks(command: list[str], folder: Path, on_line: Callable[[str], None], stop: Stop) -> int:
    """Runs the command, passes each line of its stdout to `on_line` and returns its exit code.

    folder: gets the launcher's REPORT and FAILURES; stop: of the stop_signals block around this. A
    stop ends the run. When this returns or raises (also an exception of on_line), all processes of
    the run have ended. Raises OSError if the command or the report cannot be started.
    """
    environment = rank_environment(folder)
    with open(folder / REPORT, "wb") as stderr:
        launcher = stop.launcher = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, encoding="utf-8", errors="replace",
            # The terminal's Ctrl-C reaches only this process, so there is one way to stop.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        reaper = threading.Thread(target=_reap, args=(launcher, environment[MARK]), daemon=True)
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


def _reap(launcher, failures):
    """Waits for the launcher, then kills the processes of the run that outlived it (on Linux).

    Some do only if the launcher was killed, or was stopped while it started its ranks. Killing them
    also closes the pipe that they hold open.
    """
    variable = os.fsencode(f"{MARK}={failures}")
    launcher.wait()
    empty_looks = 0
    while empty_looks < 3:  # for a moment, a process that starts shows no environment
        empty_looks += 1
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended meanwhile, or is not ours to read
                if variable in environ.read_bytes().split(b"\0"):
                    empty_looks = 0
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        time.sleep(0.05)
