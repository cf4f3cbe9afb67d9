"""Finds out from a probe what an optimizer does to each matrix of the layers."""

from dataclasses import dataclass, field

import torch

from speedrun.checks.muon import MOMENTA, WAYS, momentum_updates, orthogonal
from speedrun.checks.survey import Moved

TOLERANCE = 5e-4  # relative; float32 leaves some 1e-5
NAMED = list(WAYS)[: list(WAYS).index("sign") + 1]  # those that `orthogonal` has
GUESSES = [way for way in NAMED if way != "joint"]


@dataclass
class Rule:
    """How a matrix moves.

    way: a key of WAYS; shrink: the share of its weights that it loses in a step; spectrum: the
    least and the largest singular value of the first move, relative to their RMS. Where the way is
    Muon's there is more. momentum: a key of MOMENTA or None if no kind fits; schedule: the name of
    the momenta that fit; sizes: of each step, relative to an orthogonal matrix; rms: of the first
    move's entries.
    """

    way: str
    shrink: float = 0.0
    spectrum: tuple[float, float] = (0.0, 0.0)
    momentum: str | None = None
    schedule: str | None = None
    sizes: list[float] = field(default_factory=list)
    rms: float = 0.0


def classify(found: list[Moved], args) -> list[Rule]:
    """The Rule of each matrix; args: the probe's."""
    rules, searched = [], _candidates(args)
    for matrix in found:
        rule = Rule(*_way(matrix))
        rules.append(rule)
        if rule.way == "other":
            rule.spectrum = _spectrum(matrix.moves[0])
        if rule.way == "five":
            rule.rms = matrix.moves[0].square().mean().sqrt().item()
            rule.momentum, rule.schedule, rule.sizes = _momentum(matrix, rule.way, searched)
            # What one matrix has, others have too; what one search did not find, none will.
            hit = [c for c in searched if c[:2] == (rule.momentum, rule.schedule)]
            searched = hit + _candidates(args, literal=False)
    return rules


def _momentum(matrix, way, candidates) -> tuple[str | None, str | None, list[float]]:
    """The kind of momentum and the schedule that fit all steps, and their sizes."""
    for kind, schedule, momenta in candidates:
        sizes = _sizes(matrix.moves, momentum_updates(matrix.gradients, momenta, kind), way)
        if sizes:
            return kind, schedule, sizes
    return None, None, []


def _candidates(args, literal: bool = True) -> list[tuple[str, str, list[float]]]:
    """(kind of momentum, name of the schedule, momenta), the usual ones first; literal: also
    numbers that do not come from args."""
    some = schedules(args)
    if literal:
        some |= {f"{n / 100:g}": [n / 100 for _ in range(args.train_steps)] for n in range(1, 100)}
    return [(kind, name, momenta) for name, momenta in some.items() for kind in MOMENTA]


def schedules(args) -> dict[str, list[float]]:
    """Momenta of the probe's steps that a script may have, by name."""
    end, steps = args.muon_momentum, range(args.train_steps)
    named = {"constant": [end for _ in steps]}
    if hasattr(args, "muon_momentum_start"):
        start, n = args.muon_momentum_start, args.momentum_warmup_steps
        for name, shift in (("warm-up", 0), ("early", 1), ("late", -1)):
            shares = [min(1.0, max(0.0, (step + shift) / n)) for step in steps]
            named[name] = [start + share * (end - start) for share in shares]
        named["start"] = [start for _ in steps]
    return named


def _way(matrix) -> tuple[str, float]:
    """The way that fits the first step, in which momentum does not matter, and the share by which
    the weights shrink."""
    if not matrix.moves:
        return "none has it", 0.0
    grad, move, weight = matrix.gradients[0], matrix.moves[0], matrix.weights[0]
    if move.abs().max() < 1e-12:
        return "still", 0.0
    if matrix.stack and _size(matrix.stack[1], -orthogonal(matrix.stack[0], "joint")):
        return "joint", 0.0
    directions = {way: -orthogonal(grad, way) for way in GUESSES}
    for way, direction in directions.items():
        if size := _size(move, direction):
            return (way, 0.0) if size > 0 else ("backwards", 0.0)
    for way in ("five", "sign"):  # Adam's decay is told where Adam's steps are
        if shrink := _shrink(move, directions[way], weight):
            return "decay" if way == "five" else way, shrink
    return _by_singular_vectors(grad, move), 0.0


def _by_singular_vectors(grad, move):
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    turned = left.T @ move @ right.T
    noise = (turned - turned.diag().diag()).norm() / turned.norm()
    inside = (move - left @ turned @ right).norm() / move.norm()
    if max(noise, inside) < TOLERANCE:
        return "other"
    return "rough" if max(noise, inside) < 0.1 else "strange"


def _sizes(moves, updates, way) -> list[float]:
    """The size of each step along the updates, or [] if one goes another way."""
    sizes = []
    for move, update in zip(moves, updates, strict=True):
        size = _size(move, -orthogonal(update, way))
        if not size:
            return []
        sizes.append(size)
    return sizes


def _spectrum(move):
    values = torch.linalg.svdvals(move)
    scale = values.square().mean().sqrt()
    return (values.min() / scale).item(), (values.max() / scale).item()


def _size(move, direction) -> float | None:
    """The factor by which the move is the direction, negative if it goes the other way, or None if
    it is none."""
    size = ((move * direction).sum() / direction.square().sum()).item()
    apart = (move - size * direction).norm() / move.norm().clamp(min=1e-30)
    return size if apart < TOLERANCE else None


def _shrink(move, direction, weight) -> float | None:
    """The share of the weight that the move takes away besides going along the direction, or None
    if that does not make it up."""
    both = torch.stack((direction.flatten(), -weight.flatten()), dim=1)
    size, share = torch.linalg.lstsq(both, move.flatten()[:, None]).solution.flatten().tolist()
    apart = (move - size * direction + share * weight).norm() / move.norm()
    return share if apart < TOLERANCE and size > 0 else None
