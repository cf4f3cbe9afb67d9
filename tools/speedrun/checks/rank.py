"""Runs of a script on several ranks, started by speedrun.checks.ranks with a folder as argument.

torch is imported once, by a server without threads that the ranks are forks of (on Windows, where
there is none, by each rank).
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from speedrun.checks import sizes
from speedrun.checks.child import end_with
from speedrun.checks.matrices import Mapping
from speedrun.checks.probe import Probe
from speedrun.checks.short_run import train
from speedrun.checks.subject import explain
from speedrun.checks.survey import survey
from speedrun.snapshot import load_snapshot

PATIENCE_S = 5  # for a rank that is left alone by the others
SILENT = "it ended without an answer"


def main(folder: Path) -> None:
    """Does the jobs of request.json one after the other, until one does not come to its end."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    threading.Thread(target=end_with, args=(request["parent"],), daemon=True).start()
    for job in request["jobs"]:
        _run(folder, request, job)
        if not all(_complete(folder, job, rank) for rank in range(job["world"])):
            return


def _context():
    """How processes are started. A fork of this process could wait for ever: it has threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__spec__.name, "torch._dynamo"])  # optimizers import the latter
    return context


def _run(folder, request, job):
    """Starts the ranks of a job and waits: for all of them, or for the time limit, or, once one of
    them has failed, for the others to say why."""
    context = _context()
    # The store of the ranks' rendezvous, as torchrun holds it: no port is chosen before it is free.
    store = dist.TCPStore("127.0.0.1", 0, job["world"], is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=_rank, args=(folder, request, job, rank, store.port))
             for rank in range(job["world"])]
    for process in ranks:
        process.start()
    deadline, failed = time.monotonic() + request["limit"], False
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if not failed and any(process.exitcode for process in ranks):
            deadline, failed = time.monotonic() + PATIENCE_S, True
        time.sleep(0.02)
    left = [process.is_alive() for process in ranks]
    for rank, process in enumerate(ranks):
        process.kill()
        process.join()
        file = folder / f"{job['name']}{rank}.pt"
        if not left[rank] and not file.exists():
            torch.save(dict(error=f"{SILENT} (exit code {process.exitcode})"), file)


def _complete(folder, job, rank):
    file = folder / f"{job['name']}{rank}.pt"
    return file.exists() and "error" not in torch.load(file, weights_only=True)


def _rank(folder, request, job, rank, port):
    """One rank: writes <job><rank>.pt, what the job finds out or `error`, and ends."""
    parent = os.getppid()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(job["world"]), LOCAL_WORLD_SIZE=str(job["world"]), RANK=str(rank),
        LOCAL_RANK=str(rank))
    script = Path(request["script"])
    mapping = Mapping(**request["mapping"] | {"order": tuple(request["mapping"]["order"])})
    try:
        module = load_snapshot(script)
        args = sizes.arguments(module, job["values"])
        answer = JOBS[job["name"]](folder, module, args, mapping)
    except BaseException as error:  # the learner's script may do anything
        answer = dict(error=explain(error, script))
    file = folder / f"{job['name']}{rank}.pt"
    torch.save(answer, file.with_suffix(".partial"))
    os.replace(file.with_suffix(".partial"), file)
    # Threads of a process group may outlive the interpreter and abort it.
    os._exit(1 if "error" in answer else 0)


def _train(folder, module, args, mapping):
    """The fields of Run."""
    initial = torch.load(folder / "initial.pt", weights_only=True)["initial"]
    return asdict(train(module, args, initial, mapping))


def _step(folder, module, args, mapping):
    """How each matrix of the layers moves in each step, in the order of `survey`."""
    return dict(moves=[matrix.moves for matrix in survey(Probe(module, args), mapping)])


JOBS = {"train": _train, "step": _step}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
