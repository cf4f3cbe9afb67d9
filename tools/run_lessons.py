#!/usr/bin/env python3
"""Run notebooks again and keep their outputs, without the traces of this machine.

    python tools/run_lessons.py                 all of them
    python tools/run_lessons.py 01 start_here   these

A notebook that fails keeps its old outputs.
"""

import argparse
import asyncio
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, run_command
from speedrun.base.errors import Stopped, UserError
from speedrun.base.files import replace_file
from speedrun.history.manifest import REPOSITORY

LESSONS = REPOSITORY / "lessons"
SECONDS = 180  # more than a lesson may take


def main() -> int:
    """Parses, runs, writes; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginning of a notebook's name")
    args = parser.parse_args()
    notebooks = sorted(LESSONS.glob("*.ipynb"))
    for name in args.names:
        if not name or not any(path.name.startswith(name) for path in notebooks):
            raise UserError(f"no notebook in lessons/ begins with {name or 'an empty name'}")
    if args.names:
        notebooks = [path for path in notebooks if path.name.startswith(tuple(args.names))]

    import nbformat  # these take a second to import
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    failed = 0
    for path in notebooks:
        try:
            before = path.read_bytes()
            notebook = nbformat.reads(before.decode(), as_version=4)
        except (ValueError, AttributeError, nbformat.ValidationError):
            failed += 1
            print(f"{path.name} failed: it is not a notebook; git restore it, or remove it if it is"
                  " yours", file=sys.stderr)
            continue
        start = time.perf_counter()
        client = NotebookClient(notebook, timeout=SECONDS, record_timing=False,
                                extra_arguments=["--log-level=ERROR"],  # it warns of TCP
                                resources={"metadata": {"path": str(LESSONS)}})
        try:
            execute(client)
        except NoSuchKernel as error:
            failed += 1
            print(f"{path.name} failed: its kernel {error.name} is not installed here; git restore"
                  " it", file=sys.stderr)
            continue
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed += 1
            reason = str(error).splitlines()[0]
            if isinstance(error, CellExecutionError):
                reason = f"{error.ename}: {error.evalue}"
            print(f"{path.name} failed: {reason}", file=sys.stderr)
            continue
        clean(notebook)
        if path.read_bytes() != before:
            failed += 1
            print(f"{path.name} failed: it was changed while it ran; run it again",
                  file=sys.stderr)
            continue
        replace_file(path, f"{nbformat.writes(notebook).rstrip()}\n".encode())
        print(f"{path.name} {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


def execute(client) -> None:
    """Runs the cells of a NotebookClient. Raises what it raises, and Stopped for Ctrl-C and
    SIGTERM, once the kernel has ended."""
    stopped = []

    def stop(signum, task):
        stopped.append(signum)
        client.shutdown_kernel = "immediate"  # one that ends in its own time prints a traceback
        task.cancel()

    async def run():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        with suppress(NotImplementedError):  # Windows
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(signum, stop, signum, task)
        loop.add_signal_handler = lambda *_: None  # nbclient's would end the kernel and go on
        await client.async_execute()

    try:
        asyncio.run(run())
    finally:
        for signum in stopped[:1]:
            text = "interrupted" if signum == signal.SIGINT else f"stopped by {signum.name}"
            raise Stopped(text, 128 + signum)


def clean(notebook) -> None:
    """Strips what differs from machine to machine; joins the pieces of what a cell printed."""
    notebook.metadata = {name: value for name, value in notebook.metadata.items()
                         if name == "kernelspec"}
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "tags"}
        if cell.cell_type != "code":
            continue
        joined = []
        for output in cell.outputs:
            last = joined[-1] if joined else {}
            if output.output_type == last.get("output_type") == "stream" and (
                output.name == last.name
            ):
                last.text += output.text
            else:
                joined.append(output)
        cell.outputs = joined


if __name__ == "__main__":
    run_command(main)
