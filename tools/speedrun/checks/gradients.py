"""Check of the gradients, which may be wrong where the logits are right."""

from collections.abc import Iterator

import torch

from speedrun.checks.matrices import Mapping
from speedrun.checks.model import CLOSE
from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.start import NAMES


def check_gradients(subject) -> Iterator[Outcome]:
    """Compares the gradients of all matrices; equal logits do not promise equal gradients."""
    model = subject.model
    if model.mapping is None:
        return
    inputs, targets = subject.tokens()
    both = []
    for net, matrices, mapping in ((model.model, model.matrices, model.mapping),
                                   (model.theirs, model.their_matrices, Mapping())):
        matrices.write(model.weights, mapping)
        net.zero_grad(set_to_none=True)
        net(inputs, targets).backward()
        both.append(matrices.read(mapping, of=_gradient))
    wrong = [role for role in both[1] if not _all_close(both[0][role], both[1][role])]
    yield verdict("gradients", not wrong, "the milestone's gradients for given weights",
                  "others for " + ", ".join(NAMES[role] for role in wrong),
                  "Logits agree, so something is cut off from the gradient: detach, no_grad, "
                  ".data or item()?")


def _gradient(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _all_close(mine, theirs):
    if not isinstance(mine, list):
        mine, theirs = [mine], [theirs]
    scale = max(t.abs().max() for t in theirs) or 1.0
    return all((a - b).abs().max() <= CLOSE * scale for a, b in zip(mine, theirs, strict=True))
