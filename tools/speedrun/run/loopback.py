"""torch's launcher for one machine: takes the same arguments, listens to this machine only, and
ends when the process that started it was killed.

Its stores unpickle what they receive, and would listen on every network interface.
"""

import os
import signal
import socket
import threading
import time

PARENT = os.getppid()  # before torch, whose import takes seconds

import torch.distributed  # noqa: E402


class LoopbackStore(torch.distributed.TCPStore):
    """A TCPStore whose server, if it has one, is bound to 127.0.0.1."""

    def __init__(self, host_name, port, *args, is_master=False, multi_tenant=False, **options):
        if is_master:  # each has a port of its own, so no server serves two
            listener = socket.create_server(("127.0.0.1", port))
            host_name, port = listener.getsockname()
            options |= dict(master_listen_fd=listener.detach(), wait_for_workers=False)
        super().__init__(host_name, port, *args, is_master=is_master, **options)


def end_with_parent():
    """Ends this process and its ranks, as SIGTERM does, once its parent has ended."""
    while os.getppid() == PARENT:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.distributed.TCPStore = LoopbackStore  # before the launcher's modules import the name
    from torch.distributed.run import main

    main()
