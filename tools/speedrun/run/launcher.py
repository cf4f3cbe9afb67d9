"""The program that starts a run's ranks: torch's launcher, with the same arguments. It ends when
the process that started it was killed, and writes into a file which ranks failed by themselves.

With --standalone it listens only to this machine: torch's stores unpickle what they receive, and
would listen on every network interface.
"""

import json
import os
import signal
import socket
import sys
import threading
import time

PARENT = os.getppid()  # before torch, whose import takes seconds

import torch.distributed  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import SubprocessContext  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

FAILURES = "SPEEDRUN_FAILURES"  # environment variable: the file that gets the failed ranks
stopped = set()  # ids of the processes that were running when the launcher ended them


class LoopbackStore(torch.distributed.TCPStore):
    """A TCPStore whose server, if it has one, is bound to 127.0.0.1."""

    def __init__(self, host_name, port, *args, is_master=False, multi_tenant=False, **options):
        if is_master:  # each has a port of its own, so no server serves two
            listener = socket.create_server(("127.0.0.1", port))
            host_name, port = listener.getsockname()
            options |= dict(master_listen_fd=listener.detach(), wait_for_workers=False)
        super().__init__(host_name, port, *args, is_master=is_master, **options)


def close(context, death_sig=None, timeout=30, close=SubprocessContext.close):
    """Ends the ranks of a context as torch does, and notes which were running until then. After a
    failure torch itself would wait for 30 seconds, whatever its environment variable says."""
    processes = [handler.proc for handler in context.subprocess_handlers.values()]
    stopped.update(process.pid for process in processes if process.poll() is None)
    close(context, death_sig, int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", timeout)))


def end_with_parent():
    """Ends this process and its ranks, as SIGTERM does, once its parent has ended."""
    while os.getppid() == PARENT:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    SubprocessContext.close = close
    if "--standalone" in sys.argv:
        torch.distributed.TCPStore = LoopbackStore  # before the launcher's modules import the name
    from torch.distributed.run import main

    try:
        main()
    except ChildFailedError as error:
        if FAILURES in os.environ:
            failures = [(rank, failure.local_rank, failure.exitcode)
                        for rank, failure in error.failures.items() if failure.pid not in stopped]
            with open(os.environ[FAILURES], "w", encoding="utf-8") as file:
                json.dump(failures, file)
        raise
