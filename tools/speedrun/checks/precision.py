"""Checks of bf16=True: what is stored in bfloat16, and whether a forward and backward pass run."""

from collections.abc import Iterator

import torch

from speedrun.checks.matrices import Matrices
from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.subject import explain

KINDS = ("embedding", "head", "position table", "scalars", "matrices of the layers")
SINGULAR = ("embedding", "head", "position table")
FORWARD = "bfloat16 forward"


def check_storage(subject) -> Iterator[Outcome]:
    """What bf16=True stores in bfloat16, for each kind of parameter."""
    model = subject.model
    mine = _stored(subject.module.GPT(subject.args(bf16=True)), model.model, model.matrices)
    theirs = _stored(subject.reference.GPT(subject.reference_args(bf16=True)), model.theirs,
                     model.their_matrices)
    wrong = []
    for kind in (kind for kind in KINDS if kind in mine.keys() & theirs.keys()):
        (want,), have = theirs[kind], mine[kind]
        verb = "is" if kind in SINGULAR else "are"
        some = "the" if len(have) == 1 else "some"
        wrong += [f"{some} {kind} {verb} {_short(other)}, not {_short(want)}"
                  for other in sorted(have - {want}, key=str)]
    by_dtype = {}
    for kind, (dtype,) in theirs.items():
        by_dtype.setdefault(_short(dtype), []).append(kind)
    expected = "; ".join(f"{', '.join(kinds)} in {dtype}" for dtype, kinds in by_dtype.items())
    yield verdict("bfloat16 storage", not wrong, f"with bf16=True {expected}", "; ".join(wrong),
                  "self.bfloat16() first, then every linear module back to float32.")


def _stored(stored, model, matrices: Matrices) -> dict[str, set]:
    """{kind: dtypes} of the model `stored`, whose parameters are in the order of those of `model`,
    to which the matrices belong."""
    kinds = {id(p): "matrices of the layers" for p in model.parameters()}
    kinds |= {id(p): "scalars" for _, p in matrices.scalars}
    kinds |= {id(matrices.positions): "position table", id(matrices.head): "head",
              id(matrices.embed): "embedding"}
    found = {}
    for own, twin in zip(stored.parameters(), model.parameters(), strict=True):
        found.setdefault(kinds[id(twin)], set()).add(own.dtype)
    return found


def check_forward(subject) -> Iterator[Outcome]:
    """One forward and backward pass in bfloat16, and the dtype of the logits."""
    expected = "with bf16=True a forward and backward pass, and float32 logits"
    reference = subject.reference.GPT(subject.reference_args(bf16=True))
    stored = any(p.dtype == torch.bfloat16 for p in reference.parameters())
    meaning = ("Cast the float32 weight where it is used, weight.to(x.dtype), and the logits with "
               ".float()." if stored else
               "Products under torch.autocast(device, torch.bfloat16), then logits.float().")
    net = subject.module.GPT(subject.args(bf16=True)).train()
    inputs, targets = subject.tokens()
    window = [torch.tensor(5, dtype=torch.int32)] if subject.has_window else []
    try:
        net(inputs, targets, *window).backward()
        with torch.no_grad():
            dtype = net(inputs, None, *window).dtype
    except Exception as error:
        yield Outcome(FORWARD, expected, f"it stops: {explain(error, subject.script)}", meaning)
        return
    yield verdict(FORWARD, dtype == torch.float32, expected, f"{_short(dtype)} logits", meaning)


def _short(dtype):
    return str(dtype).removeprefix("torch.")
