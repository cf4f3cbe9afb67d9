"""torch's launcher for one machine: takes the same arguments, and listens to this machine only.

Its stores unpickle what they receive, and would listen on every network interface.
"""

import socket

import torch.distributed


class LoopbackStore(torch.distributed.TCPStore):
    """A TCPStore whose server, if it has one, is bound to 127.0.0.1."""

    def __init__(self, host_name, port, *args, is_master=False, multi_tenant=False, **options):
        if is_master:  # each has a port of its own, so no server serves two
            listener = socket.create_server(("127.0.0.1", port))
            host_name, port = listener.getsockname()
            options |= dict(master_listen_fd=listener.detach(), wait_for_workers=False)
        super().__init__(host_name, port, *args, is_master=is_master, **options)


if __name__ == "__main__":
    torch.distributed.TCPStore = LoopbackStore  # before the launcher's modules import the name
    from torch.distributed.run import main

    main()
