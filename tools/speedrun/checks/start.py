"""Checks of how a model starts: its size, its initial values and its first loss."""

from collections import Counter
from collections.abc import Iterator

import torch

from speedrun.checks.matrices import Mapping, Matrices, find_matrices
from speedrun.checks.outcome import Outcome, number, verdict

NAMES = dict(q="queries", k="keys", v="values", o="attention output", up="MLP up",
             down="MLP down", embed="embedding", head="head", positions="position table")
# Enough tokens and channels that the seed hardly matters to the first loss.
FIRST_LOSS = dict(vocab_size=512, model_dim=64, num_heads=2, num_layers=2, seq_len=32, bos_id=511)


def check_parameter_count(subject) -> Iterator[Outcome]:
    """At the record's sizes, without memory for the numbers."""
    wanted = subject.milestone.parameters
    with torch.device("meta"):
        model = subject.module.GPT(subject.module.Hyperparameters())
        theirs = subject.reference.GPT(subject.reference.Hyperparameters())
    shapes = [_matrix_shapes(net, module.Hyperparameters().model_dim)
              for net, module in ((model, subject.module), (theirs, subject.reference))]
    have = sum(p.numel() for p in model.parameters())
    told = [f"{word} {_shapes(some)}" for word, some in (
        ("lacks", shapes[1] - shapes[0]), ("has", shapes[0] - shapes[1])) if some]
    yield verdict("parameter count", have == wanted, f"{wanted:,} at the record's sizes",
                  f"{have:,}", f"Compared with the milestone your model {', but '.join(told)}."
                  if told else "")


def _matrix_shapes(model, width):
    """How often each shape of a parameter occurs; squares on top of each other count as squares."""
    shapes = Counter()
    for p in model.parameters():
        n = p.size(0) // width if p.ndim == 2 and p.shape[1] == width else 1
        stacked = n in (2, 3) and p.size(0) == n * width
        shapes.update([(width, width)] * n if stacked else [tuple(p.shape)])
    return shapes


def check_start(subject) -> Iterator[Outcome]:
    """The initial values of all matrices: which are zero, and how far the others spread."""
    mapping = subject.model.mapping or Mapping()
    mine, theirs = fresh(subject)
    mine, theirs = mine.read(mapping), theirs.read(Mapping())
    zero = {role for role in theirs if _spread(theirs[role]) == 0}
    roles = [role for role in theirs if role in mine]
    not_zero = [role for role in roles if role in zero and _spread(mine[role]) > 0]
    if zero:
        told = " and ".join(NAMES[role] for role in roles if role in zero)
        yield verdict("zeroed matrices", not not_zero, f"{told} start at zero",
                      "not zero: " + ", ".join(NAMES[role] for role in not_zero),
                      "nn.init.zeros_ on what writes to the stream (and, from 04 on, the head); "
                      "then every block starts as the identity.")
    others = {role: (_spread(theirs[role]), _spread(mine[role])) for role in roles
              if role not in zero}
    wrong = {role: (want, have) for role, (want, have) in others.items()
             if not 0.9 * want < have < 1.1 * want}
    expected = ", ".join(f"{NAMES[role]} {number(want)}" for role, (want, _) in wrong.items())
    got = ", ".join(f"{NAMES[role]} {number(have)}" for role, (_, have) in wrong.items())
    meaning = "Zero on both sides of a product: no gradient would ever flow." if any(
        have == 0 for _, have in wrong.values()) else (
        "A tied table keeps nn.Linear's init, an embedding of its own nn.Embedding's N(0, 1); all "
        "else is nn.Linear's, uniform within 1 / sqrt(fan_in).")
    yield verdict("initial values", not wrong, f"standard deviations at width 32: {expected}",
                  got, meaning)


def check_first_loss(subject) -> Iterator[Outcome]:
    """The loss before the first step, on uniform tokens, the mean of three seeds."""
    tokens = torch.randint(510, (16, 33), generator=torch.Generator().manual_seed(0))
    losses = []
    for module, make in ((subject.reference, subject.reference_args),
                         (subject.module, subject.args)):
        some = []
        for seed in range(3):
            torch.manual_seed(seed)
            net = module.GPT(make(**FIRST_LOSS)).eval()
            with torch.no_grad():
                some.append(net(tokens[:, :-1], tokens[:, 1:]).item())
        losses.append(torch.tensor(some))
    want, have = (some.mean().item() for some in losses)
    band = 0.1 if losses[0].std() > 1e-4 else 0.001  # over seeds it varies by up to 0.03
    yield verdict("initial loss", abs(want - have) <= band,
                  f"{want:.3f} within {band:.3f} (for 512 tokens and width 64)", f"{have:.3f}",
                  "The first loss follows from the initial values: do their checks pass? Far below "
                  "ln(vocabulary) = 6.24 the target has leaked into the input.")


def fresh(subject) -> list[Matrices]:
    """The matrices of the learner's and of the milestone's model as they are initialised."""
    found = []
    for module, args in ((subject.module, subject.args()),
                         (subject.reference, subject.reference_args())):
        torch.manual_seed(0)
        found.append(find_matrices(module.GPT(args), args))
    return found


def _spread(weight):
    tensors = weight if isinstance(weight, list) else [weight]
    return torch.cat([t.flatten() for t in tensors]).float().std().item()


def _shapes(some: Counter) -> str:
    """Some shapes in words, with how often each occurs."""
    return ", ".join(_shape(shape, some[shape]) for shape in sorted(some)[:4])


def _shape(shape, count):
    plural = "s" if count > 1 else ""
    if len(shape) < 2:
        size = f" of {shape[0]}" if shape else ""
        return f"{count} {'vector' if shape else 'single number'}{plural}{size}"
    return (f"{count} of " if plural else "") + " x ".join(map(str, shape))
