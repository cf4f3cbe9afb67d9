"""Checks of how parameters move: Muon for the matrices of the layers, Adam for the rest."""

from collections.abc import Iterator
from functools import cache

import torch

from speedrun.checks.classify import Rule, classify
from speedrun.checks.muon import MOMENTA, SCALES, WAYS
from speedrun.checks.outcome import Outcome, number, verdict
from speedrun.checks.sizes import PROBE
from speedrun.checks.start import NAMES
from speedrun.checks.subject import reference_subject

SCHEDULES = {
    "constant": "muon_momentum in every step",
    "warm-up": "a momentum that grows from muon_momentum_start to muon_momentum in "
               "momentum_warmup_steps steps",
    "early": "that growing momentum, but one step early",
    "late": "that growing momentum, but one step late",
    "start": "muon_momentum_start in every step",
    "literal": "0.95 in every step, whatever the hyperparameters say",
}
SHAPES = {"square": (32, 32), "wide": (32, 128), "tall": (128, 32)}  # at the checks' width


def check_muon(subject) -> Iterator[Outcome]:
    """Compares the rule by which hidden matrices move with the milestone's."""
    mine = classify(subject.probe)
    theirs = rule_of(subject.milestone.id)
    low, high = theirs.spectrum
    got, meaning = WAYS[mine.way]
    if mine.way == "other":
        got += f" (from {mine.spectrum[0]:.3f} to {mine.spectrum[1]:.3f} times their RMS; " \
               f"expected {low:.3f} to {high:.3f})"
    yield verdict("orthogonal updates", mine.way == theirs.way, WAYS[theirs.way][0], got, meaning)
    if mine.joint or theirs.joint:
        yield verdict("stacked matrices", mine.joint != "joint",
                      "each matrix of a stack is made orthogonal by itself", *WAYS["joint"])
    if mine.way != theirs.way:
        return
    kind = MOMENTA.get(mine.momentum, ("something else", "The order in a step: M <- mu M + G, "
                                       "update G + mu M, Newton-Schulz, then the weights."))
    yield verdict("momentum", mine.momentum == theirs.momentum, MOMENTA[theirs.momentum][0], *kind)
    if mine.momentum is None:
        return
    if theirs.schedule != "constant" or mine.schedule != theirs.schedule:
        yield verdict("momentum schedule", mine.schedule == theirs.schedule,
                      SCHEDULES[theirs.schedule], SCHEDULES[mine.schedule],
                      "Set group[\"momentum\"] before the optimizer's step, from the number of "
                      "that step.")
    yield from _sizes(mine, theirs)
    good = mine.cooled is not None and abs(mine.cooled / theirs.cooled - 1) < 0.01
    yield verdict("rates in the loop", good,
                  f"the last step {number(theirs.cooled)} times as large as the first, as "
                  "lr_multiplier says", f"{number(mine.cooled or 0)} times",
                  "Every group's lr is initial_lr times lr_multiplier(step, args), set before the "
                  "optimizers step.")


@cache
def rule_of(id: str) -> Rule:
    """The Rule of a milestone's own snapshot."""
    with reference_subject(id) as subject:
        return classify(subject.probe)


def _sizes(mine: Rule, theirs: Rule):
    """The size of a step, for a square, a wide and a tall matrix."""
    ratios = {kind: mine.sizes[kind] / theirs.sizes[kind]
              if kind in mine.sizes and mine.sizes[kind] else 0.0 for kind in SHAPES}
    rate = PROBE["muon_lr"]
    right, name = (next((name for name in SCALES if _fits(rule, name, rate)), None)
                   for rule in (theirs, mine))
    uniform = max(ratios.values()) < 1.01 * min(ratios.values())
    if name:
        meaning = f"Your factor is {name}; the milestone's is {right}."
        if name == "sqrt(max(1, cols / rows))":
            meaning += " Are rows and columns swapped?"
        if f"sqrt({name})" == right:
            meaning += " Is the factor applied twice?"
    elif uniform:
        meaning = (f"All kinds are off by the same factor {number(ratios['square'])}: is lr what "
                   "--muon_lr says, and is it applied once?")
    else:
        meaning = f"The milestone's factor is {right} for a matrix of rows x cols."
    for kind, (rows, cols) in SHAPES.items():
        yield verdict(f"update of a {kind} matrix", abs(ratios[kind] - 1) < 0.01,
                      f"{rows} x {cols} with lr {rate}: RMS {number(theirs.rms[kind])}",
                      f"RMS {number(mine.rms.get(kind, 0.0))}, {number(ratios[kind])} times as "
                      "much", meaning)


def _fits(rule, name, rate):
    return all(rule.sizes.get(kind) and
               abs(rule.sizes[kind] / (rate * SCALES[name](*shape)) - 1) < 0.01
               for kind, shape in SHAPES.items())


def check_adam(subject) -> Iterator[Outcome]:
    """Compares the steps of everything else with those of torch's AdamW."""
    probe, args = subject.probe, subject.reference_args(**PROBE)
    matrices = probe.matrices
    rest = {"embed": matrices.embed, "head": matrices.head, "positions": matrices.positions}
    if matrices.head is matrices.embed:
        del rest["head"]
    rest |= dict(matrices.scalars)
    for role, p in rest.items():
        if p is None:
            continue
        label = NAMES.get(role, role)
        rate_name = _rate_name(role, args)
        moves = probe.moves_of(p)
        if not moves:
            yield Outcome("Adam", f"Adam moves the {label}", "no optimizer has it",
                          "Every parameter belongs to just one group.")
            return
        factors = [subject.reference.lr_multiplier(step, args) for step in range(len(moves))]
        wanted = _adam_moves(p, probe, args, getattr(args, rate_name), factors, moves)
        if not _same(moves[0], wanted[0]):
            want = number(getattr(args, rate_name))
            yield Outcome("Adam", f"first step of the {label}: {want}, its {rate_name}, in every "
                          "entry", _first_step(moves[0], args),
                          "Compare the parameter groups and their rates.")
            return
        late = [step for step, pair in enumerate(zip(moves, wanted, strict=True))
                if not _same(*pair)]
        if late:
            yield Outcome("Adam", f"steps of the {label} as Adam makes them with betas "
                          f"{args.adam_beta1}, {args.adam_beta2}",
                          f"another step {late[0]} (the first is 0)",
                          "Betas from the hyperparameters? And the rate of each step from "
                          "lr_multiplier?")
            return
    yield Outcome("Adam")


def _rate_name(role, args):
    own = {"embed": "embed_lr", "head": "head_lr"}.get(role, "scalar_lr")
    return own if hasattr(args, own) else "adam_lr"


def _adam_moves(p, probe, args, rate, factors, moves):
    with torch.no_grad():
        twin = torch.nn.Parameter((p.detach() - sum(moves)).float())
    decay = getattr(args, "weight_decay", 0.0)
    adam = torch.optim.AdamW([twin], lr=rate, betas=(args.adam_beta1, args.adam_beta2),
                             eps=args.adam_eps, weight_decay=decay)
    found = []
    for grad, factor in zip(probe.gradients[id(p)], factors, strict=True):
        before = twin.detach().clone()
        adam.param_groups[0]["lr"] = rate * factor
        twin.grad = grad.float()
        adam.step()
        found.append(twin.detach() - before)
    return found


def _first_step(move, args):
    sizes = move.abs().flatten()
    if sizes.max() < 1e-12:
        return "it does not move"
    if sizes.max() > 1.05 * sizes.median():
        return f"entries move by {number(sizes.min())} to {number(sizes.max())}, as Adam's do not"
    size = sizes.median().item()
    named = [name for name in vars(args) if name.endswith("_lr")
             and abs(size / getattr(args, name) - 1) < 0.02]
    return f"every entry moves by {number(size)}" + (f", which is {named[0]}" if named else "")


def _same(a, b):
    return ((a - b).norm() <= 1e-2 * b.norm()).item()
