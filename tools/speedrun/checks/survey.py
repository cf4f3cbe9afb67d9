"""How each matrix of the layers moved in a probe, also where it is a part of a stack."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from speedrun.checks.matrices import ATTENTION, Mapping
from speedrun.checks.probe import Probe
from speedrun.checks.start import NAMES

ROLES = (*ATTENTION, "up", "down")
UNKNOWN = dict(zip(ATTENTION, (f"{nth} square matrix" for nth in (
    "first", "second", "third", "fourth")), strict=True))  # which is which is not known


@dataclass
class Moved:
    """A matrix: its layer, its name, its kind (square, wide, tall), and for each step its weights
    before, its gradient and its move; `stack` is (gradient, move) of the first step of the stack
    that it is a part of, or None."""

    layer: int
    name: str
    kind: str
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    moves: list[torch.Tensor]
    stack: tuple[torch.Tensor, torch.Tensor] | None = None


def survey(probe: Probe, mapping: Mapping | None) -> list[Moved]:
    """All matrices of the layers; moves are [] where no optimizer has the matrix.

    mapping: which matrix is which, None if that is not known.
    """
    found = []
    for layer in range(probe.args.num_layers):
        for role in ROLES:
            p, rows = _place(probe.matrices, role, layer, mapping or Mapping())
            several = [probe.weights, probe.gradients, probe.moves]
            weights, gradients, moves = ([t[rows] for t in some.get(id(p), [])] for some in several)
            stacked = moves and moves[0].shape != p.shape
            stack = (probe.gradients[id(p)][0], probe.moves[id(p)][0]) if stacked else None
            name = NAMES[role] if mapping else UNKNOWN.get(role, NAMES[role])
            kind = {"up": "tall", "down": "wide"}.get(role, "square")
            found.append(Moved(layer, name, kind, weights, gradients, moves, stack))
    return found


def _place(matrices, role, layer, mapping):
    """(parameter, its rows) of a matrix; the order of rows within it makes no difference here."""
    if role not in ATTENTION:
        return getattr(matrices, role)[layer], slice(None)
    p, rows, by_head = matrices.squares[4 * layer + mapping.order[ATTENTION.index(role)]]
    return p, by_head if mapping.by_head else rows


def told(found: list[Moved], right: Callable, words: Callable) -> tuple[str, Moved | None]:
    """What those matrices do for which right(matrix) is false, and the first of them.

    words(matrix): what it does. The matrices are named unless all do the same.
    """
    groups = {}
    for matrix in found:
        if not right(matrix):
            groups.setdefault(words(matrix), []).append(matrix)
    if not groups:
        return "", None
    first = next(iter(groups.values()))
    if len(first) == len(found):
        return next(iter(groups)), first[0]
    texts = [f"{named(group, found)}: {text}" for text, group in groups.items()]
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more, first[0]


def named(group: list[Moved], found: list[Moved]) -> str:
    """The matrices of a group in words, as in `layer 0 queries, keys`; found: all there are."""
    layers = {}  # names: the layers in which the group has just these
    for layer in _distinct(m.layer for m in group):
        layers.setdefault(tuple(m.name for m in group if m.layer == layer), []).append(layer)
    everything = _distinct(m.name for m in found)
    count = len(_distinct(m.layer for m in found))
    parts = []
    for names, some in layers.items():
        every = len(some) == count
        where = f"layer{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}"
        if list(names) == everything:
            parts.append(f"all matrices of {where}")
        else:
            what = ", ".join(names)
            parts.append(f"{what} of every layer" if every else f"{where} {what}")
    return " and ".join(parts)


def _distinct(some: Iterable) -> list:
    return list(dict.fromkeys(some))
