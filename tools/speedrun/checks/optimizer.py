"""Checks of how the matrices of the layers move: whether it is by the milestone's Muon."""

from collections.abc import Iterator
from functools import cache, partial

from speedrun.checks.classify import Rule, classify
from speedrun.checks.muon import MOMENTA, SCALES, WAYS
from speedrun.checks.outcome import Outcome, number, verdict
from speedrun.checks.sizes import PROBE
from speedrun.checks.subject import reference_subject
from speedrun.checks.survey import Moved, survey, told

SCHEDULES = {
    "constant": "muon_momentum in every step",
    "warm-up": "a momentum that grows from muon_momentum_start to muon_momentum in "
               "momentum_warmup_steps steps",
    "early": "that growing momentum, but one step early",
    "late": "that growing momentum, but one step late",
    "start": "muon_momentum_start in every step",
}
SHAPES = {"square": (32, 32), "wide": (32, 128), "tall": (128, 32)}  # at the checks' width


def check_muon(subject) -> Iterator[Outcome]:
    """Compares the rule by which each hidden matrix moves with the milestone's."""
    matrices = survey(subject.probe, subject.model.mapping)
    found = list(zip(matrices, classify(matrices, subject.probe.args), strict=True))
    theirs = rules_of(subject.milestone.id)
    yield from _ways(found, theirs["square"], subject.shares_work)
    if any(rule.way not in ("five", "joint") for _, rule in found):
        return
    found = [pair for pair in found if pair[1].way == "five"]
    yield from _momenta(found, theirs["square"])
    if found and all(rule.sizes for _, rule in found):
        yield from _sizes(found, theirs)
        yield _rates(found, subject)


@cache
def rules_of(id: str) -> dict[str, Rule]:
    """The Rule of a milestone's own snapshot for each kind of matrix."""
    with reference_subject(id) as subject:
        matrices = survey(subject.probe, None)
        rules = classify(matrices, subject.probe.args)
    return {matrix.kind: rule for matrix, rule in zip(matrices, rules, strict=True)}


def _compare(name, found, right, expected, words, meaning) -> Outcome:
    """The Outcome of a check of each rule: right(rule), words(rule), and meaning(rule) of the first
    that is not right."""
    rules = {id(matrix): rule for matrix, rule in found}
    got, odd = told([matrix for matrix, _ in found], lambda m: right(rules[id(m)]),
                    lambda m: words(rules[id(m)]))
    return verdict(name, odd is None, expected, got, meaning(rules[id(odd)]) if odd else "")


def _ways(found, theirs, shared):
    low, high = theirs.spectrum

    def words(rule):
        text = WAYS[rule.way][0]
        if rule.way == "other":
            text += (f" (from {rule.spectrum[0]:.3f} to {rule.spectrum[1]:.3f} times their RMS; "
                     f"expected {low:.3f} to {high:.3f})")
        if rule.way == "decay":
            text += f" by {number(rule.shrink)} of themselves in a step"
        return text

    def meaning(rule):
        alone = " With one rank, rank 0 owns all matrices." if shared else ""
        return WAYS[rule.way][1] + (alone if rule.way == "still" else "")

    yield _compare("orthogonal updates", found, lambda rule: rule.way in (theirs.way, "joint"),
                   WAYS[theirs.way][0], words, meaning)
    if any(matrix.stack for matrix, _ in found):
        yield _compare("stacked matrices", found, lambda rule: rule.way != "joint",
                       "each matrix of a stack is made orthogonal by itself", words,
                       lambda rule: WAYS["joint"][1])


def _momenta(found, theirs):
    unknown = ("something else", "The order in a step: M <- mu M + G, update G + mu M, "
               "Newton-Schulz, then the weights. Or a momentum other than args.muon_momentum?")
    kinds = _compare("momentum", found, lambda rule: rule.momentum == theirs.momentum,
                     MOMENTA[theirs.momentum][0],
                     lambda rule: MOMENTA.get(rule.momentum, unknown)[0],
                     lambda rule: MOMENTA.get(rule.momentum, unknown)[1])
    fixed = theirs.schedule == "constant"
    literal = "{} in every step, whatever the hyperparameters say"
    schedules = _compare(
        "momentum" if fixed else "momentum schedule", found,
        lambda rule: rule.momentum is None or rule.schedule == theirs.schedule,
        SCHEDULES[theirs.schedule],
        lambda rule: SCHEDULES.get(rule.schedule, literal.format(rule.schedule)),
        lambda rule: "Give Muon args.muon_momentum." if fixed else
        "Set group[\"momentum\"] before the optimizer's step, from the number of that step.")
    if not (fixed and kinds.passed):
        yield kinds
    if not fixed or kinds.passed:
        yield schedules


def _sizes(found: list[tuple[Moved, Rule]], theirs: dict[str, Rule]):
    """The size of the first step, for square, wide and tall matrices."""
    ratios = {id(rule): rule.sizes[0] / theirs[matrix.kind].sizes[0] for matrix, rule in found}
    first = {matrix.kind: rule.sizes[0] for matrix, rule in reversed(found)}
    for kind, (rows, cols) in SHAPES.items():
        some = [pair for pair in found if pair[0].kind == kind]
        stacked = {id(rule) for matrix, rule in some if matrix.stack}
        yield _compare(
            f"update of a {kind} matrix", some, lambda rule: abs(ratios[id(rule)] - 1) < 0.01,
            f"{rows} x {cols} with lr {PROBE['muon_lr']}: RMS {number(theirs[kind].rms)}",
            lambda rule: f"RMS {number(rule.rms)}, {number(ratios[id(rule)])} times as much",
            partial(_reason, [ratios[id(rule)] for _, rule in some], stacked, first, theirs))


def _reason(ratios, stacked, first, theirs, rule) -> str:
    """What lies behind the size of a rule's step; ratios: of all matrices of its kind."""
    if max(ratios) < 1.01 * min(ratios):
        return _factor(first, theirs)
    if id(rule) in stacked:
        return "Take the shape of the matrix that is made orthogonal, not of the stack it is in."
    return "Not all matrices of this shape move alike: in which group is each, and at which rate?"


def _factor(first: dict[str, float], theirs: dict[str, Rule]) -> str:
    """What lies behind sizes of a first step, by kind."""
    wanted = {kind: rule.sizes[0] for kind, rule in theirs.items()}
    right, name = (next((name for name in SCALES if _fits(sizes, name)), None)
                   for sizes in (wanted, first))
    ratios = [first.get(kind, 0.0) / size for kind, size in wanted.items()]
    if name:
        meaning = f"Your factor is {name}; the milestone's is {right}."
        if name == "sqrt(max(1, cols / rows))":
            meaning += " Are rows and columns swapped?"
        if f"sqrt({name})" == right:
            meaning += " Is the factor applied twice?"
        return meaning
    if max(ratios) < 1.01 * min(ratios):
        return (f"All kinds are off by the same factor {number(ratios[0])}: is lr what --muon_lr "
                "says, and is it applied once?")
    return f"The milestone's factor is {right} for a matrix of rows x cols."


def _fits(sizes, name):
    return all(abs(sizes.get(kind, 0.0) / (PROBE["muon_lr"] * SCALES[name](*shape)) - 1) < 0.01
               for kind, shape in SHAPES.items())


def _rates(found, subject) -> Outcome:
    """Whether each step is as large as the script's own lr_multiplier says."""
    args = subject.args(**PROBE)
    factors = [subject.module.lr_multiplier(step, args) for step in range(args.train_steps)]

    def right(rule):
        return len(rule.sizes) == len(factors) and all(
            abs(size * factors[0] - factor * rule.sizes[0]) < 0.01 * rule.sizes[0]
            for size, factor in zip(rule.sizes, factors, strict=True))

    return _compare(
        "rates in the loop", found, right,
        f"the last step {number(factors[-1] / (factors[0] or 1))} times as large as the first, as "
        "lr_multiplier says", lambda rule: f"{number(rule.sizes[-1] / rule.sizes[0])} times",
        lambda rule: "Every group's lr is initial_lr times lr_multiplier(step, args), set before "
        "the optimizers step.")
