"""Checks of how a model starts: its size, its initial values and its first loss."""

from collections.abc import Iterator

import torch

from speedrun.checks.matrices import Mapping, Matrices, find_matrices
from speedrun.checks.outcome import Outcome, number, verdict
from speedrun.checks.sizes import SIZES

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
    missing = [shape for shape in set(shapes[1]) if shapes[1].count(shape) > shapes[0].count(shape)]
    extra = [shape for shape in set(shapes[0]) if shapes[0].count(shape) > shapes[1].count(shape)]
    told = [f"{word} {_shapes(some)}" for word, some in (("lacks", missing), ("has", extra))
            if some]
    yield verdict("parameter count", have == wanted, f"{wanted:,} at the record's sizes",
                  f"{have:,}", f"Compared with the milestone your model {', but '.join(told)}."
                  if told else "")


def _matrix_shapes(model, width):
    """The shapes of all parameters; squares on top of each other count as squares."""
    shapes = []
    for p in model.parameters():
        n = p.size(0) // width if p.ndim == 2 and p.shape[1] == width else 1
        stacked = n in (2, 3) and p.size(0) == n * width
        shapes += [(width, width)] * n if stacked else [tuple(p.shape)]
    return shapes


def check_start(subject) -> Iterator[Outcome]:
    """The initial values of all matrices: which are zero, and how far the others spread."""
    mapping = subject.model.mapping or Mapping()
    mine, theirs = _fresh(subject)
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


def check_scalars(subject) -> Iterator[Outcome]:
    """Learned scalars: where they start, and that each acts as one of the milestone's."""
    mine, theirs = _fresh(subject)
    starts = [sorted(round(x, 3) for _, p in m.scalars for x in p.detach().flatten().tolist())
              for m in (theirs, mine)]
    if not starts[0]:
        yield verdict("learned scalars", not starts[1], "none", f"{len(starts[1])} of them")
        return
    good = starts[0] == starts[1]
    yield verdict("learned scalars", good, f"{_counted(starts[0])} at the start",
                  _counted(starts[1]) or "none",
                  "A number that shall be learned is an nn.Parameter of the model; a constant or a "
                  "buffer is not.")
    model = subject.model
    if not good or model.mapping is None:
        return
    want = _effects(model, model.theirs, model.their_matrices, Mapping())
    have = _effects(model, model.model, model.matrices, model.mapping)
    missing, left = [], [effect for _, effect in have]
    for name, effect in want:
        same = next((i for i, other in enumerate(left) if _alike(effect, other)), None)
        if same is None:
            missing.append(name)
        else:
            left.pop(same)
    yield verdict("what the scalars do", not missing,
                  "each of the milestone's scalars has its counterpart in your model",
                  f"nothing acts like its {', '.join(missing[:4])}"
                  + (f" and {len(missing) - 4} more" if len(missing) > 4 else ""),
                  "Which of two terms does the weight multiply, and is it x0 (the normalised "
                  "embedding) and the first layer's values that come in?")


def _fresh(subject) -> list[Matrices]:
    """The matrices of the learner's and of the milestone's model as they are initialised."""
    found = []
    for module, args in ((subject.module, subject.args()),
                         (subject.reference, subject.reference_args())):
        torch.manual_seed(0)
        found.append(find_matrices(module.GPT(args), args))
    return found


def _effects(model, net, matrices, mapping):
    """For each scalar its name and the logits after it has grown by 0.37."""
    matrices.write(model.weights, mapping)
    effects = []
    for name, p in matrices.scalars:
        for i in range(p.numel()):
            with torch.no_grad():
                kept = p.clone()
                p.view(-1)[i] += 0.37
                label = name if p.numel() == 1 else f"{name}[{i}]"
                effects.append((label, model.outputs(net)))
                p.copy_(kept)
    return effects


def check_storage(subject) -> Iterator[Outcome]:
    """What bf16=True stores in bfloat16."""
    dtypes = []
    for module, make in ((subject.reference, subject.reference_args),
                         (subject.module, subject.args)):
        net = module.GPT(make(bf16=True))
        few = 2 * SIZES["num_layers"]
        dtypes.append({("scalars" if p.numel() <= few else f"{p.size(0)} x {p.size(1)}", p.dtype)
                       for p in net.parameters()})
    wrong = sorted({shape for shape, _ in dtypes[0] ^ dtypes[1]})
    yield verdict("bfloat16 storage", not wrong,
                  "with bf16=True embedding and scalars are bfloat16, all other matrices float32",
                  f"another dtype for {', '.join(wrong)}",
                  "self.bfloat16() first, then every linear module back to float32.")


def _spread(weight):
    tensors = weight if isinstance(weight, list) else [weight]
    return torch.cat([t.flatten() for t in tensors]).float().std().item()


def _alike(a, b):
    return ((a - b).abs().max() <= 1e-3 * b.std()).item()


def _counted(values):
    return ", ".join(f"{values.count(v)} x {v:g}" for v in sorted(set(values)))


def _shapes(some):
    return ", ".join(" x ".join(map(str, shape)) or "a number" for shape in sorted(some)[:4])


