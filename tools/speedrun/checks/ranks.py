"""Checks with two ranks: the losses of one, and half of the optimizer's work and memory each."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.short_run import agree, training_of
from speedrun.checks.sizes import TRAINING

WORLD = 2
PATIENCE_S = 5  # for a rank that is left alone by the other
SILENT = "it ended without an answer"
LARGEST_SHARE = 0.6  # of the whole; matrices cannot always be dealt evenly


def check_ranks(subject) -> Iterator[Outcome]:
    """Trains on two ranks and compares losses, weights, work and memory with one rank's, once that
    one has the right losses."""
    if subject.single is None:
        return
    single, runs = subject.single, run_ranks(subject)
    errors = [(SILENT in run["error"], rank, run["error"]) for rank, run in enumerate(runs)
              if "error" in run]
    if errors:  # one that says what is wrong comes first: the other was stopped
        _, rank, error = min(errors)
        yield Outcome("two ranks", "both ranks train to the end", f"rank {rank}: {error}",
                      "Both ranks must come to every collective call, in the same order.")
        return
    good, first = agree(runs[0]["losses"], single.losses)
    step = single.losses[first][0]
    yield verdict("two ranks", good,
                  f"the losses of one rank, {single.losses[first][1]:.4f} after step {step}",
                  f"{runs[0]['losses'][first][1]:.4f}",
                  "Each matrix needs its owner's update on every rank: fill in your own, leave the "
                  "rest zero, and sum over the ranks (all_reduce), once.")
    yield verdict("equal weights", len({run["weights"] for run in runs}) == 1,
                  "the same weights on both ranks at the end", "they differ",
                  "Every rank must apply all updates, those of the other ranks too.")
    for name, key, what in (
        ("shared work", "flops", "of the matrix products in the optimizers' steps"),
        ("shared momentum", "state", "of the momentum"),
    ):
        whole = getattr(single, key)
        shares = [run[key] / whole if whole else 0.0 for run in runs]
        told = " and ".join(f"{share:.0%}" for share in shares)
        good = 0 < max(shares) <= LARGEST_SHARE and sum(shares) > 0.9 if whole else True
        yield verdict(name, good, f"about half {what} on each of two ranks", told,
                      "Each matrix has one owner, which alone keeps its momentum and "
                      "orthogonalises its update." if max(shares) > LARGEST_SHARE else
                      "Every matrix needs an owner.")


def run_ranks(subject) -> list[dict]:
    """What each rank answered: the fields of Run, or `error` in one line."""
    folder = Path(subject.folder, f"ranks{subject.runs}")
    folder.mkdir()
    mapping = vars(subject.model.mapping)
    initial, _ = training_of(subject.milestone.id)
    torch.save(dict(initial=initial), folder / "initial.pt")
    request = dict(script=str(subject.script), mapping=mapping,
                   values=subject.values(**TRAINING))
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    # The store of the ranks' rendezvous, as torchrun holds it: no port is chosen before it is free.
    store = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
    environment = dict(
        os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD), TORCHELASTIC_USE_AGENT_STORE="True",
        PYTHONPATH=str(Path(__file__).parents[2]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "speedrun.checks.rank", str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for rank in range(WORLD)
    ]
    try:
        _wait(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [_answer(folder / f"rank{rank}.json", process) for rank, process in enumerate(ranks)]


def _wait(ranks):
    """Until all have ended, or one has failed and the others have had time to say why."""
    deadline = None
    while any(process.poll() is None for process in ranks):
        if deadline is None and any(process.poll() for process in ranks):
            deadline = time.monotonic() + PATIENCE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _answer(file, process):
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return dict(error=f"{SILENT} (exit code {process.returncode})")
