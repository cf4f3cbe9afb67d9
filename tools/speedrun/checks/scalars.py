"""Check of the learned scalars: where they start, and what each of them does."""

from collections import Counter
from collections.abc import Iterator

import torch

from speedrun.checks.matrices import Mapping, Matrices
from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.start import fresh


def check_scalars(subject) -> Iterator[Outcome]:
    """Learned scalars: where they start, and that each acts as one of the milestone's."""
    mine, theirs = fresh(subject)
    want, have = _starts(theirs), _starts(mine)
    if not want:
        yield verdict("learned scalars", not have, "none", f"{have.total()} of them")
        return
    good, mixture = want == have, mixture_start(subject)
    got = ", ".join(f"{have[value]} x {value:g}" for value in sorted(have)) or "none"
    yield verdict("learned scalars", good, _told(theirs),
                  got if mixture is None else f"the mixture starts at {mixture:g}, not 0.5",
                  "A number that shall be learned is an nn.Parameter of the model; a constant or a "
                  "buffer is not." if have.total() < want.total() else
                  "Where each starts: half of the first layer's values, all of the stream and none "
                  "of the embedding, all of a skip.")
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


def mixture_start(subject) -> float | None:
    """Where the mixture of the values starts if that is the only scalar that starts elsewhere."""
    mine, theirs = map(_starts, fresh(subject))
    missing, extra = theirs - mine, mine - theirs
    if set(missing) == {0.5} and len(extra) == 1 and missing.total() == extra.total():
        return next(iter(extra))
    return None


def _starts(matrices: Matrices) -> Counter:
    """How often each number occurs among the scalars."""
    return Counter(round(x, 3) for _, p in matrices.scalars for x in p.detach().flatten().tolist())


def _told(matrices: Matrices) -> str:
    """The milestone's scalars in words: what each block has, then the others."""
    layers, inside, others = matrices.args.num_layers, [], []
    for name, p in matrices.scalars:
        values, label = p.detach().flatten().tolist(), name.rpartition(".")[2]
        if name.startswith("blocks.0."):
            inside.append(f"{label} {', '.join(f'{x:g}' for x in values)}")
        elif not name.startswith("blocks."):
            others.append(f"{len(values)} {label.replace('_', ' ')} of {values[0]:g}")
    return f"in each of {layers} blocks {' and '.join(inside)}; {', '.join(others)}"


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


def _alike(a, b):
    return ((a - b).abs().max() <= 1e-3 * b.std()).item()


