"""Finds a model's matrices by their shapes, whatever they are called, and writes weights into them.

Four square matrices per layer (queries, keys, values, output) may stand alone or on top of each
other; in which order, and how the dimensions of a head are paired for the rotation, is a Mapping.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from speedrun.checks.outcome import NotThere

ATTENTION = ("q", "k", "v", "o")


class Unfamiliar(NotThere):
    """A model whose matrices have not the shapes of the milestone's."""


@dataclass(frozen=True)
class Mapping:
    """Which square matrix of a layer is q, k, v and o; which of PAIRINGS the rotation has; whether
    stacked matrices take turns head by head instead of standing one above the other."""

    order: tuple[int, ...] = (0, 1, 2, 3)
    pairing: int = 0
    by_head: bool = False


@dataclass
class Matrices:
    """The parameters of a model with `args`: tables of the vocabulary, position table or None, per
    layer the four squares as (parameter, rows of it, rows of it by head), the MLP's two, and the
    rest as (name, parameter)."""

    args: object
    embed: torch.Tensor = None
    head: torch.Tensor = None
    positions: torch.Tensor | None = None
    squares: list = field(default_factory=list)
    up: list = field(default_factory=list)
    down: list = field(default_factory=list)
    scalars: list = field(default_factory=list)

    def hidden(self) -> list[tuple[torch.Tensor, int]]:
        """The parameters of the layers, each with the number of squares in it (1: a whole)."""
        counted = {}
        for parameter, _, _ in self.squares:
            counted.setdefault(id(parameter), [parameter, 0])[1] += 1
        return [(p, n) for p, n in counted.values()] + [(p, 1) for p in self.up + self.down]

    def layer_of(self, role: str, layer: int, mapping: Mapping) -> tuple[torch.Tensor, object]:
        """(parameter, index of its rows) of one matrix; role: one of ATTENTION, up, down."""
        if role not in ATTENTION:
            return getattr(self, role)[layer], slice(None)
        number = mapping.order[ATTENTION.index(role)]
        parameter, rows, rows_by_head = self.squares[4 * layer + number]
        rows = rows_by_head if mapping.by_head else rows
        if role in ("q", "k"):
            head_dim = self.args.model_dim // self.args.num_heads
            inverse = torch.argsort(pairings(head_dim)[mapping.pairing])
            rows = rows.view(-1, head_dim)[:, inverse].flatten()
        return parameter, rows

    def write(self, weights: dict, mapping: Mapping) -> None:
        """Puts weights {role: one tensor per layer, or the tensor} into the parameters."""
        with torch.no_grad():
            for role in (*ATTENTION, "up", "down"):
                for layer, weight in enumerate(weights[role]):
                    parameter, rows = self.layer_of(role, layer, mapping)
                    parameter[rows] = weight
            self.head.copy_(weights["head"])  # if there is but one table, the embedding's count
            self.embed.copy_(weights["embed"])
            if self.positions is not None and "positions" in weights:
                self.positions.copy_(weights["positions"])

    def read(self, mapping: Mapping, of=lambda parameter: parameter) -> dict:
        """The weights {role: ...} as `write` takes them; of: what to read of each parameter, such
        as its gradient."""
        found = {
            role: [of(p)[rows].detach().clone() for p, rows in (
                self.layer_of(role, layer, mapping) for layer in range(self.args.num_layers))]
            for role in (*ATTENTION, "up", "down")
        }
        tables = dict(embed=self.embed, head=self.head, positions=self.positions)
        return found | {role: of(table).detach().clone() for role, table in tables.items()
                        if table is not None}


def pairings(head_dim: int) -> list[torch.Tensor]:
    """Orders of a head's dimensions that turn one way of pairing them for the rotation into
    another: halves, halves turning the other way, neighbours, neighbours the other way."""
    halves = torch.arange(head_dim).view(2, -1)
    return [order.flatten() for order in (halves, halves.flip(0), halves.T, halves.flip(0).T)]


def mappings(matrices: Matrices) -> Iterator[Mapping]:
    """All Mappings that a model may have, the usual ones first."""
    stacked = any(n > 1 for _, n in matrices.hidden())
    for by_head in (False, True) if stacked else (False,):
        for order in itertools.permutations(range(4)):
            for pairing in range(4):
                yield Mapping(order, pairing, by_head)


def find_matrices(model: torch.nn.Module, args) -> Matrices:
    """The Matrices of a model made from `args`. Raises Unfamiliar if the shapes do not fit."""
    C, V, T, L = args.model_dim, args.vocab_size, args.seq_len, args.num_layers
    found, tables, strange = Matrices(args), [], []
    for name, p in model.named_parameters():
        if p.ndim == 2 and V in p.shape:
            tables.append(p)
        elif p.shape == (T, C):
            found.positions = p
        elif p.shape == (4 * C, C):
            found.up.append(p)
        elif p.shape == (C, 4 * C):
            found.down.append(p)
        elif p.ndim == 2 and p.size(1) == C and p.size(0) in (C, 2 * C, 3 * C):
            n, head_dim = p.size(0) // C, C // args.num_heads
            rows = torch.arange(n * C)
            by_head = rows.view(args.num_heads, n, head_dim).transpose(0, 1)
            found.squares += [(p, rows[i * C : (i + 1) * C], by_head[i].flatten())
                              for i in range(n)]
        elif p.numel() <= 2 * L:
            found.scalars.append((name, p))
        else:
            strange.append(f"{name} {_shape(p)}")
    _refuse(found, tables, strange, args)
    found.embed, found.head = tables[0], tables[-1]
    if len(tables) == 2 and _is_head(model, tables[0], args):
        found.embed, found.head = tables[1], tables[0]
    return found


def _refuse(found, tables, strange, args):
    C, L = args.model_dim, args.num_layers
    counts = {"square matrices": (len(found.squares), 4 * L),
              f"{4 * C} x {C} matrices": (len(found.up), L),
              f"{C} x {4 * C} matrices": (len(found.down), L)}
    wrong = {what: pair for what, pair in counts.items() if pair[0] != pair[1]}
    where = f"a model with {L} layers of width {C} and {args.vocab_size} tokens"
    if wrong:
        raise Unfamiliar(
            f"{where} has " + ", ".join(f"{want} {what}" for what, (_, want) in wrong.items()),
            "yours has " + ", ".join(str(have) for have, _ in wrong.values())
            + (f", and {', '.join(strange[:3])}" if strange else ""),
            "A layer has queries, keys, values, output (stacked or not), MLP up and MLP down, "
            "stored as nn.Linear does: outputs x inputs.")
    if strange:
        raise Unfamiliar(f"{where} has layers' matrices, tables of the vocabulary and scalars",
                         f"yours also has {', '.join(strange[:3])}",
                         "Biases and norm weights are not part of any milestone.")
    if len(tables) not in (1, 2) or any(table.shape[1] != C for table in tables):
        raise Unfamiliar(f"{where} has one {args.vocab_size} x {C} table, or two: embedding, head",
                         f"yours has {len(tables)}: {', '.join(map(_shape, tables)) or 'none'}")


def _is_head(model, table, args):
    """Whether the table makes logits: its row of a token that does not occur changes them."""
    inputs = torch.full((1, 4), 2)
    with torch.no_grad():
        kept = {name: p.clone() for name, p in model.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=generator))
        before = model(inputs)
        table[5].add_(1.0)
        changed = not torch.equal(model(inputs), before)
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    return changed


def _shape(p):
    return " x ".join(map(str, p.shape))
