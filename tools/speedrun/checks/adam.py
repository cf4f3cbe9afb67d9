"""Checks of how everything but the matrices of the layers moves: by Adam, each at its rate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from speedrun.checks.outcome import Outcome, number
from speedrun.checks.sizes import PROBE
from speedrun.checks.start import NAMES

TOLERANCE = 1e-4  # relative; float32 leaves some 1e-5


@dataclass(frozen=True)
class Adam:
    """AdamW's numbers, the rate's factor in each step, and whether gradients are first divided by
    their norm."""

    rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    factors: tuple[float, ...]
    unit: bool = False

    def moves(self, weight: torch.Tensor, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """How a weight moves with the gradients of some steps."""
        twin, found = torch.nn.Parameter(weight.clone()), []
        adam = torch.optim.AdamW([twin], lr=self.rate, betas=self.betas, eps=self.eps,
                                 weight_decay=self.weight_decay)
        for gradient, factor in zip(gradients, self.factors, strict=True):
            before = twin.detach().clone()
            adam.param_groups[0]["lr"] = self.rate * factor
            twin.grad = gradient / (gradient.norm() + 1e-6) if self.unit else gradient.clone()
            adam.step()
            found.append(twin.detach() - before)
        return found


# Usual slips: what changes, what it is in words, and what to do.
SLIPS = [
    (dict(unit=True), "steps of gradients that were divided by their norms",
     "That was 00's NormalizedAdamW: take torch's own."),
    (dict(betas=(0.9, 0.999)), "steps with betas 0.9, 0.999",
     "These are torch's own: betas=(args.adam_beta1, args.adam_beta2)."),
    (dict(factors=(1.0,) * PROBE["train_steps"]), "the same rate in every step",
     "Every group's lr is initial_lr times lr_multiplier(step, args), set before the step."),
]


def check_adam(subject) -> Iterator[Outcome]:
    """Compares the steps of everything else with those of torch's AdamW, at the rates of the
    script's own lr_multiplier, which has a check of its own."""
    args, matrices = subject.reference_args(**PROBE), subject.probe.matrices
    rest = {"embed": matrices.embed, "head": matrices.head, "positions": matrices.positions}
    if matrices.head is matrices.embed:
        del rest["head"]
    rest |= dict(matrices.scalars)
    own = subject.args(**PROBE)
    factors = tuple(subject.module.lr_multiplier(step, own) for step in range(args.train_steps))
    for role, p in rest.items():
        if p is None:
            continue
        name = _rate_name(role, args)
        adam = Adam(getattr(args, name), (args.adam_beta1, args.adam_beta2), args.adam_eps,
                    getattr(args, "weight_decay", 0.0), factors)
        outcome = _compare(subject.probe, p, adam, NAMES.get(role, role), name, args)
        if not outcome.passed:
            yield outcome
            return
    yield Outcome("Adam")


def _rate_name(role, args):
    own = {"embed": "embed_lr", "head": "head_lr"}.get(role, "scalar_lr")
    return own if hasattr(args, own) else "adam_lr"


def _compare(probe, p, adam, label, rate_name, args) -> Outcome:
    """The Outcome for one parameter, which shall move as `adam` moves it."""
    moves = probe.moves_of(p)
    if not moves:
        return Outcome("Adam", f"Adam moves the {label}", "no optimizer has it",
                       "Every parameter belongs to just one group.")
    weight, gradients = probe.weights[id(p)][0], probe.gradients[id(p)]
    wanted = adam.moves(weight, gradients)
    apart = [step for step, pair in enumerate(zip(moves, wanted, strict=True)) if not _same(*pair)]
    if not apart:
        return Outcome("Adam")
    expected = (f"steps of the {label} as AdamW makes them with {rate_name}, betas "
                f"{adam.betas[0]}, {adam.betas[1]} and weight_decay {adam.weight_decay:g}")
    for change, words, meaning in [*SLIPS, *_decay(adam, moves[0], wanted[0], weight, args)]:
        other = replace(adam, **change).moves(weight, gradients)
        if all(map(_same, moves, other)):
            return Outcome("Adam", expected, words, meaning)
    if apart[0] == 0:
        return Outcome("Adam", f"first step of the {label}: {number(adam.rate)}, its {rate_name}, "
                       "in every entry", *_first_step(moves[0], wanted[0], adam.rate, args))
    return Outcome("Adam", expected, f"another step {apart[0]} (the first is 0)",
                   "Betas and eps from the hyperparameters? And the rate of each step from "
                   "lr_multiplier: does the learning rate check pass?")


def _decay(adam, move, wanted, weight, args):
    """The slip of the weight decay that a first move hints at."""
    share = -((move - wanted) * weight).sum() / weight.square().sum()
    decay = adam.weight_decay + share.item() / (adam.rate * adam.factors[0] or 1)
    if decay > 1e-5:
        own = " (torch's own for AdamW)" if abs(decay - 0.01) < 1e-3 else ""
        yield (dict(weight_decay=decay),
               f"the rate is right, and the weights also shrink: weight_decay {decay:.2g}{own}",
               f"Pass weight_decay, which is {adam.weight_decay:g} here."
               if hasattr(args, "weight_decay") else
               "Pass weight_decay=0, or use torch.optim.Adam.")


def _first_step(move, wanted, rate, args):
    """(got, meaning) of a first move that is not the wanted one."""
    sizes = move.abs().flatten()
    size = sizes.median().item()
    if sizes.max() < 1e-12:
        return "it does not move", "Is its rate zero?"
    if abs(size - wanted.abs().median().item()) < 0.02 * size:
        others = ((move - wanted).abs() > 1e-3 * size).float().mean()
        return (f"the rate is right, but {number(100 * others)}% of the entries move otherwise",
                "What else enters the step? weight_decay, eps?")
    if sizes.max() > 1.05 * size:
        return (f"entries move by {number(sizes.min())} to {number(sizes.max())}, as Adam's do not",
                "Is it with Adam at all, and at eps=args.adam_eps?")
    named = [name for name in vars(args) if name.endswith("_lr")
             and abs(size / getattr(args, name) - 1) < 0.02]
    return (f"every entry moves by {number(size)}" + (f", which is {named[0]}" if named else ""),
            "Compare the parameter groups and their rates.")


def _same(a, b):
    return ((a - b).norm() <= TOLERANCE * b.norm()).item()
