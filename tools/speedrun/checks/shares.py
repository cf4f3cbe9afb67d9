"""Compares the steps of several ranks with those of one: who moves which matrix?"""

import torch

from speedrun.checks.outcome import Outcome
from speedrun.checks.survey import named, survey

NAME = "five ranks"
CLOSE = 1e-3  # relative to the size of a move


def moved_alike(subject, runs: list[dict]) -> Outcome:
    """The Outcome of steps with gradients from outside, the same on all ranks.

    runs: of each rank `moves`, per matrix the move of each step.
    """
    found = survey(subject.probe, subject.model.mapping)
    world, first = len(runs), [[moves[:1] for moves in run["moves"]] for run in runs]
    whole, wanted = [run["moves"] for run in runs], [matrix.moves for matrix in found]
    start = [moves[:1] for moves in wanted]
    expected = f"with {world} ranks every matrix moves as with one"

    def outcome(got, meaning):
        return Outcome(NAME, expected, got, meaning)

    if all(_same(rank, wanted) for rank in whole):
        return Outcome(NAME)
    still = [i for i in range(len(found)) if all(_still(rank[i]) for rank in whole)]
    if still:
        names = named([found[i] for i in still], found)
        return outcome(f"with {world} ranks these matrices never move: {names}",
                       f"{len(found)} matrices on {world} ranks leave a remainder: who owns those?")
    if all(_same(rank, start, 1 / world) for rank in first):
        return outcome(f"each moves 1/{world} as far", "You average; sum instead.")
    if all(_same(rank, start, world) for rank in first):
        return outcome(f"each moves {world} times as far",
                       "Every rank has the update already, or the sum is made twice.")
    if all(_same(rank, start) for rank in first):
        return outcome("the first step is right, a later one is not",
                       "Does the buffer start from zeros in every step, and does a matrix keep its "
                       "owner, who has its momentum?")
    if all(any(_still(moves) for moves in rank) for rank in whole):
        return outcome("each rank moves only some of the matrices",
                       "The updates of the other ranks never arrive: sum the buffer over the ranks "
                       "(dist.all_reduce), then move all matrices.")
    wrong = [i for i in range(len(found)) if not all(_same([rank[i]], [wanted[i]])
                                                     for rank in whole)]
    return outcome(f"others for {named([found[i] for i in wrong], found)}",
                   "Does each slice of the buffer go to the matrix that it was made for?")


def _still(moves: list[torch.Tensor]) -> bool:
    """Whether a matrix stands still in all steps."""
    return all(not move.any() for move in moves)


def _same(moves, wanted, factor: float = 1.0) -> bool:
    """Whether the moves of all matrices are the wanted ones times a factor."""
    return all(
        len(some) == len(others) and all(
            (a - factor * b).norm() <= CLOSE * factor * b.norm()
            for a, b in zip(some, others, strict=True))
        for some, others in zip(moves, wanted, strict=True))
