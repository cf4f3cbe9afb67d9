"""Finds out from a probe what an optimizer does to the hidden matrices."""

from dataclasses import dataclass, field

import torch

from speedrun.checks.muon import MOMENTA, WAYS, momentum_updates, orthogonal
from speedrun.checks.outcome import NotThere
from speedrun.checks.probe import Probe

TOLERANCE = 2e-3  # relative; float32 leaves some 1e-5
GUESSES = [way for way in WAYS if way not in ("rough", "other", "strange", "joint")]


@dataclass
class Rule:
    """How hidden matrices move.

    way: a key of WAYS, `joint` how stacked matrices are treated ("" if there are none); momentum:
    a key of MOMENTA or None if no kind fits; schedule: the name of the momenta that fit; sizes:
    {"square": ...} the size of a full step relative to an orthogonal matrix; cooled: the last
    step's size relative to the first's; rms: of the first move's entries, by kind; spectrum: the
    least and the largest singular value of the first move, relative to their RMS.
    """

    way: str
    joint: str = ""
    momentum: str | None = None
    schedule: str | None = None
    sizes: dict[str, float] = field(default_factory=dict)
    cooled: float | None = None
    rms: dict[str, float] = field(default_factory=dict)
    spectrum: tuple[float, float] = (0.0, 0.0)


def classify(probe: Probe) -> Rule:
    """The Rule by which the hidden matrices of a probe moved. Raises NotThere if they did not."""
    singles, stacks = _hidden(probe)
    ways = {kind: _way(*example) for kind, example in singles.items()}
    rule = Rule(next((way for way in ways.values() if way != "five"), "five"))
    gradients, moves = next(iter(singles.values()))
    rule.spectrum = _spectrum(gradients[0], moves[0])
    if stacks:
        gradients, moves, parts = stacks[0]
        joint = -orthogonal(gradients[0], "joint")
        rule.joint = "joint" if _size(moves[0], joint) else "apart"
    if rule.way in ("rough", "other", "strange"):
        return rule

    rule.momentum, rule.schedule = _momentum(singles, rule.way, schedules(probe.args))
    if rule.momentum is None:
        return rule
    momenta = schedules(probe.args)[rule.schedule]
    for kind, (gradients, moves) in singles.items():
        updates = momentum_updates(gradients, momenta, rule.momentum)
        found = [_size(move, -orthogonal(update, rule.way))
                 for move, update in zip(moves, updates, strict=True)]
        rule.sizes[kind] = found[0]
        rule.rms[kind] = moves[0].square().mean().sqrt().item()
        if kind == "square" and None not in found:
            rule.cooled = found[-1] / found[0]
    return rule


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
    named["literal"] = [0.95 for _ in steps]
    return named


def _hidden(probe):
    """One example of each kind of matrix, (gradients, moves), and of each stack with its parts."""
    singles, stacks = {}, []
    for p, parts in sorted(probe.matrices.hidden(), key=lambda pair: pair[1]):
        gradients, moves = probe.gradients.get(id(p)), probe.moves_of(p)
        if not moves:
            raise NotThere("an optimizer moves the layers' matrices", "some are in none of them")
        if parts > 1:
            stacks.append((gradients, moves, parts))
            for i in range(parts):  # as separate matrices they must not differ from square ones
                rows = slice(i * p.size(1), (i + 1) * p.size(1))
                singles.setdefault("square", ([g[rows] for g in gradients],
                                              [m[rows] for m in moves]))
        else:
            kind = "square" if p.size(0) == p.size(1) else (
                "tall" if p.size(0) > p.size(1) else "wide")
            singles.setdefault(kind, (gradients, moves))
    return singles, stacks


def _way(gradients, moves):
    """The way that fits the first step, in which momentum does not matter."""
    for way in GUESSES:
        if _size(moves[0], -orthogonal(gradients[0], way)):
            return way
    against = -moves[0] * gradients[0].sign()
    if ((against / against.median() - 1).abs() < 0.15).float().mean() > 0.9:
        return "sign"  # with some weight decay
    left, _, right = torch.linalg.svd(gradients[0], full_matrices=False)
    turned = left.T @ moves[0] @ right.T
    noise = (turned - turned.diag().diag()).norm() / turned.norm()
    inside = (moves[0] - left @ turned @ right).norm() / moves[0].norm()
    if max(noise, inside) < TOLERANCE:
        return "other"
    return "rough" if max(noise, inside) < 0.1 else "strange"


def _momentum(singles, way, named):
    for schedule, momenta in named.items():
        for kind in MOMENTA:
            if all(_size(move, -orthogonal(update, way))
                   for gradients, moves in singles.values()
                   for move, update in zip(moves, momentum_updates(gradients, momenta, kind),
                                           strict=True)):
                return kind, schedule
    return None, None


def _spectrum(grad, move):
    values = torch.linalg.svdvals(move)
    scale = values.square().mean().sqrt()
    return (values.min() / scale).item(), (values.max() / scale).item()


def _size(move, direction) -> float | None:
    """The factor by which the move is the direction, or None if it is none."""
    size = ((move * direction).sum() / direction.square().sum()).item()
    apart = (move - size * direction).norm() / move.norm().clamp(min=1e-30)
    return size if apart < TOLERANCE and size > 0 else None
