"""Ranks for tests: forks of one warm server, which imports torch once and has no threads.

A fork of the test's own process could wait for ever for a lock that one of its threads held.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch.distributed as dist

# What takes time to import; test_smoke also makes snapshots.py read all milestones, once for all.
WARM = ["torch._dynamo", "torch.nn.attention.flex_attention", "torch.nn.attention.varlen", "numpy",
        "pytest", "test_smoke"]


def warm_context(get_context=multiprocessing.get_context):
    """The context whose processes are forks of the server, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return get_context("spawn")
    from multiprocessing import forkserver

    context = get_context("forkserver")
    context.set_forkserver_preload(WARM)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()  # it imports before it knows this process's path
    return context


def start_ranks(world_size, job, *arguments, timeout=120):
    """Calls job(*arguments) in that many ranks and returns what each returned and what it printed,
    [(result, text), ...] in the order of ranks.

    A world of one is a process as without torchrun. The job and what it returns must be picklable.
    Raises AssertionError with a rank's traceback if one fails, or if they take longer than
    `timeout` seconds; then all of them are ended.
    """
    context, path = warm_context(), os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        ranks, answers = [], {}
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            world = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size)
            process = context.Process(target=_rank, daemon=True, args=(
                job, arguments, world if world_size > 1 else {}, path, str(Path(folder, "store")),
                theirs, timeout))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            deadline = time.monotonic() + timeout
            waiting = {ours: rank for rank, (_, ours) in enumerate(ranks)}
            while waiting:
                ready = wait(waiting, max(0, deadline - time.monotonic()))
                assert ready, f"ranks {sorted(waiting.values())} did not end in {timeout} s"
                for ours in ready:
                    rank = waiting.pop(ours)
                    try:
                        answers[rank], failure = ours.recv()
                    except EOFError:
                        failure = "it ended without a word"
                    assert failure is None, f"rank {rank} of {world_size}: {failure}"
        finally:
            for process, ours in ranks:
                if len(answers) < world_size:
                    process.kill()
                process.join()
                ours.close()
    return [answers[rank] for rank in range(world_size)]


def run_tool(script, *arguments, timeout=120):
    """Runs a command to its end in a fork of the warm server, so that it need not import torch;
    returns a subprocess.CompletedProcess."""
    words = [str(script), *map(str, arguments)]
    (((status, errors), output),) = start_ranks(1, _tool, words, timeout=timeout)
    return subprocess.CompletedProcess(words, status, output, errors)


def _tool(words):
    """What the fork runs; returns the exit code and what was written to stderr."""
    sys.argv, status = words, 0
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
    return status, errors.getvalue()


def _rank(job, arguments, environment, path, store, answer, timeout):
    """What one rank runs; the ranks meet at a file, which needs no free port."""
    gc.freeze()  # what the server imported is no garbage: no collection need walk through it,
    gc.unfreeze = lambda: None  # whatever a run asks for
    os.environ.update({name: str(value) for name, value in environment.items()}, PYTHONPATH=path)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    init, groups = dist.init_process_group, []  # kept: freeing one can wait for ever (spy.GROUPS)

    def init_over_a_file(*positional, store_file=store, **named):
        named["timeout"] = timedelta(seconds=timeout)
        if environment:
            rank, world_size = environment["RANK"], environment["WORLD_SIZE"]
            named |= dict(rank=rank, world_size=world_size)
            named["store"] = dist.FileStore(store_file, world_size)
        init(*positional, **named)
        groups.append(dist.group.WORLD)

    dist.init_process_group = init_over_a_file
    printed = io.BytesIO()
    try:
        stdout = io.TextIOWrapper(printed, encoding="utf-8", write_through=True)
        with contextlib.redirect_stdout(stdout):
            result = job(*arguments)
        answer.send(((result, printed.getvalue().decode()), None))
    except BaseException:
        answer.send((None, traceback.format_exc() + printed.getvalue().decode()[-1000:]))
