"""Checks with several ranks: the losses of one, and each rank's share of work and memory."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.rank import SILENT
from speedrun.checks.shares import moved_alike
from speedrun.checks.short_run import agree, training_of
from speedrun.checks.sizes import PROBE, TRAINING

# Two share evenly; five do not: neither 24 matrices nor 16, three of them stacked, can be dealt so.
WORLDS = {"train": ("two ranks", 2), "step": ("five ranks", 5)}
FIVE = dict(micro_batch_size=1, total_batch_size=120, val_tokens=120)
LARGEST_SHARE = 0.6  # of the whole; matrices cannot always be dealt evenly
# A run on several ranks may take so many times as long as on one, after the time for a start.
SLOWER, START_S = 20, 20


def check_ranks(subject) -> Iterator[Outcome]:
    """Trains on two ranks, makes steps on five, and compares with one rank, once that one has the
    right losses."""
    if subject.single is None:
        return
    answers = run_ranks(subject)
    for job, (name, world) in WORLDS.items():
        if failure := _failure(name, world, answers[job]):
            yield failure
            return
    steps = moved_alike(subject, answers["step"])
    for outcome in _compare(subject.single, answers["train"], steps.meaning):
        yield outcome
        if outcome.name == "two ranks" and outcome.passed:  # else its reason is told already
            yield steps


def _failure(name, world, runs) -> Outcome | None:
    """The Outcome if a rank did not come to its end."""
    expected = f"all {world} ranks train to the end"
    errors = [(SILENT in run["error"], rank, run["error"]) for rank, run in enumerate(runs)
              if run and "error" in run]
    if errors:  # one that says what is wrong comes first: the others were left alone
        _, rank, error = min(errors)
        return Outcome(name, expected, f"rank {rank}: {error}",
                       "All ranks must come to every collective call, in the same order.")
    left = [str(rank) for rank, run in enumerate(runs) if run is None]
    if left:
        return Outcome(name, expected, f"no end: rank{'s' if len(left) > 1 else ''} "
                       f"{', '.join(left)} still waiting",
                       "Every rank must make the same calls of all_reduce; one rank waits for "
                       "another.")
    return None


def _compare(single, runs, meaning) -> Iterator[Outcome]:
    """The outcomes of the training on two ranks; meaning: of wrong losses, if it is known."""
    good, first = agree(runs[0]["losses"], single.losses)
    step = single.losses[first][0]
    yield verdict("two ranks", good,
                  f"the losses of one rank, {single.losses[first][1]:.4f} after step {step}",
                  f"{runs[0]['losses'][first][1]:.4f}",
                  meaning or "Each matrix needs its owner's update on every rank: fill in your "
                  "own, leave the rest zero, and sum over the ranks (all_reduce), once.")
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


def run_ranks(subject) -> dict[str, list[dict | None]]:
    """{job: what each rank answered}: what the job finds out, `error` in one line, or None of a
    rank that was stopped."""
    folder = Path(subject.folder, f"ranks{subject.runs}")
    folder.mkdir()
    initial, _ = training_of(subject.milestone.id)
    torch.save(dict(initial=initial), folder / "initial.pt")
    values = {"train": TRAINING, "step": {**PROBE, **FIVE}}
    jobs = [dict(name=job, world=world, values=subject.values(**values[job]))
            for job, (_, world) in WORLDS.items()]
    request = dict(script=str(subject.script), mapping=vars(subject.model.mapping), jobs=jobs,
                   parent=os.getpid(), limit=START_S + SLOWER * subject.single.seconds)
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    tools = str(Path(__file__).parents[2])
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=tools)
    with subprocess.Popen(
        [sys.executable, "-m", "speedrun.checks.rank", str(folder)], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as leader:
        try:
            leader.wait()
        finally:
            leader.kill()
    return {job: [_answer(folder / f"{job}{rank}.pt") for rank in range(world)]
            for job, (_, world) in WORLDS.items()}


def _answer(file):
    return torch.load(file, weights_only=True) if file.exists() else None
