"""Exercises of lesson 13d: their checks, hints and solutions."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# ---- 1: the largest gradient ----


def check_largest(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number, not {answer!r}") from None
    meanings = {
        1.75: "that bounds the gradient of the capped logit; the cap's slope is a factor, too",
        0.767: "that is the cap's steepest slope, as for one target of weight 1; the weights add up"
               " where targets are equal",
        5.37: "that takes 23 / 7.5 for the slope; the sigmoid's own derivative is at most 1 / 4",
        3.07: "that is 23 / 7.5, without the sigmoid's derivative and without the weights",
        10.06: "that takes 23 / 4; the inner derivative of (z + 5) / 7.5 is 1 / 7.5",
        40.25: "that is 23 times the weights; the slope also has 1 / 7.5 and at most 1 / 4",
        -1.342: "an absolute value is not negative",
        0.447: "that takes the mean of the weights; equal targets add theirs up",
    }
    if abs(value - 1.342) > 0.01:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.02 else (
            "bound the two factors of the chain rule one by one: the softmax part by the sum of the"
            " weights, and the cap by its steepest slope")
        raise AssertionError(f"{value:g} is not the bound: {why}")


# ---- 2: a loss's gradients ----

CAP = 23.0, 5.0, 7.5
OTHER_CAP = 12.0, 2.0, 4.0


def loss_grads(logits, targets, weights, cap):
    height, shift, width = cap
    share = torch.sigmoid((logits + shift) / width)
    weights = weights * (targets >= 0)
    grads = weights.sum(1, keepdim=True) * (height * share).softmax(1)
    grads = grads.scatter_add(1, targets.clamp(min=0), -weights)
    return grads * height / width * share * (1 - share)


def _without_slope(logits, targets, weights, cap):
    share = torch.sigmoid((logits + cap[1]) / cap[2])
    return loss_grads(logits, targets, weights, cap) / (cap[0] / cap[2] * share * (1 - share))


def _half_slope(logits, targets, weights, cap):
    return loss_grads(logits, targets, weights, cap) * cap[2] / cap[0]


def _slope_without_width(logits, targets, weights, cap):
    return loss_grads(logits, targets, weights, cap) * cap[2]


def _records_cap(logits, targets, weights, cap):
    return loss_grads(logits, targets, weights, CAP)


def _records_weights(logits, targets, weights, cap):
    weights = torch.tensor([1.0, 0.5, 0.25]).to(logits)
    return loss_grads(logits, targets, weights[: targets.size(1)], cap)


def _uncapped(logits, targets, weights, cap):
    weights = weights * (targets >= 0)
    grads = weights.sum(1, keepdim=True) * logits.softmax(1)
    return grads.scatter_add(1, targets.clamp(min=0), -weights)


def _all_weights(logits, targets, weights, cap):
    height, shift, width = cap
    share = torch.sigmoid((logits + shift) / width)
    grads = weights.sum() * (height * share).softmax(1)
    grads = grads.scatter_add(1, targets.clamp(min=0), -weights * (targets >= 0))
    return grads * height / width * share * (1 - share)


def _one_weight(logits, targets, weights, cap):
    height, shift, width = cap
    share = torch.sigmoid((logits + shift) / width)
    grads = (height * share).softmax(1).scatter_add(
        1, targets.clamp(min=0), -weights * (targets >= 0))
    return grads * height / width * share * (1 - share)


def _from_the_end(logits, targets, weights, cap):
    return loss_grads(logits, targets % logits.size(1), weights, cap)


def _from_the_start(logits, targets, weights, cap):
    return loss_grads(logits, targets.clamp(min=0), weights, cap)


def _overwrites(logits, targets, weights, cap):
    height, shift, width = cap
    share = torch.sigmoid((logits + shift) / width)
    kept = weights * (targets >= 0)
    grads = kept.sum(1, keepdim=True) * (height * share).softmax(1)
    hits = torch.zeros_like(grads)
    for k in range(targets.size(1)):
        rows = torch.nonzero(targets[:, k] >= 0)[:, 0]
        hits[rows, targets[rows, k]] = kept[rows, k]
    return (grads - hits) * height / width * share * (1 - share)


def _mean(logits, targets, weights, cap):
    return loss_grads(logits, targets, weights, cap) / len(logits)


def _negative(logits, targets, weights, cap):
    return -loss_grads(logits, targets, weights, cap)


def _share_in_softmax(logits, targets, weights, cap):
    height, shift, width = cap
    share = torch.sigmoid((logits + shift) / width)
    weights = weights * (targets >= 0)
    grads = weights.sum(1, keepdim=True) * share.softmax(1)
    return grads.scatter_add(1, targets.clamp(min=0), -weights) * height / width * share * (
        1 - share)


def _slope_of_capped(logits, targets, weights, cap):
    share = torch.sigmoid((logits + cap[1]) / cap[2])
    capped = cap[0] * share
    return _without_slope(logits, targets, weights, cap) * capped * (1 - capped)


def _minus_one_as_column(logits, targets, weights, cap):
    return torch.zeros_like(logits).scatter_add(1, targets, -weights * (targets >= 0))


def _by_autograd(logits, targets, weights, cap):
    return reference(logits, targets, weights, cap)


def _by_torch_func(logits, targets, weights, cap):
    def loss(logits):
        capped = cap[0] * torch.sigmoid((logits + cap[1]) / cap[2])
        log_probs = capped.log_softmax(1).gather(1, targets.clamp(min=0))
        return -(log_probs * weights * (targets >= 0)).sum()
    return torch.func.grad(loss)(logits)


class Refuses(TorchDispatchMode):
    """Raises RuntimeError at an operation that only a backward pass needs."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if "_backward" in operation.__name__:
            raise RuntimeError(operation.__name__)
        return operation(*args, **kwargs or {})


def reference(logits, targets, weights, cap):
    """The gradients by autograd, of PyTorch's own cross-entropy."""
    height, shift, width = cap
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        capped = height * torch.sigmoid((logits + shift) / width)
        loss = sum(weight * F.cross_entropy(capped, target, ignore_index=-1, reduction="sum")
                   for weight, target in zip(weights, targets.T, strict=True))
        return torch.autograd.grad(loss, logits)[0]


def train_table(grads_of, steps=60):
    """Losses of a table of logits that learns a language of pairs with these gradients."""
    draw = torch.Generator().manual_seed(0)
    chances = (2 * torch.randn(24, 24, generator=draw)).softmax(-1)
    table = torch.zeros(24, 24)
    losses = []
    for _step in range(steps):
        tokens = torch.randint(24, (64,), generator=draw)
        targets = torch.multinomial(chances[tokens], 1, generator=draw)
        capped = CAP[0] * torch.sigmoid((table[tokens] + CAP[1]) / CAP[2])
        losses.append(F.cross_entropy(capped, targets[:, 0]).item())
        table.index_add_(0, tokens, -grads_of(table[tokens], targets, torch.ones(1), CAP))
    return losses


def check_grads(answer):
    assert callable(answer), f"expected the function loss_grads, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(4, 6, generator=draw, dtype=torch.float64)
    names = {
        "the cap's slope is missing: the logits reach the softmax through the cap, so by the chain"
        " rule its derivative is a factor": _without_slope,
        "the factor height / width of the cap's slope is missing": _half_slope,
        "the cap's slope has height but not width: the inner derivative of (z + shift) / width is"
        " 1 / width": _slope_without_width,
        "you take 23, 5 and 7.5 for the cap; take height, shift and width from `cap`": _records_cap,
        "you take 1, 0.5 and 0.25 for the weights; take them from `weights`": _records_weights,
        "the softmax is that of the raw logits; cap them first": _uncapped,
        "your softmax is that of the sigmoid; the capped logits are height times it":
            _share_in_softmax,
        "you put the capped logit, height times s, into the slope s (1 - s); put s itself into it":
            _slope_of_capped,
        "a softmax counts for every target that exists, but you count missing targets, -1, as well:"
        " sum the weights of the valid ones only": _all_weights,
        "the softmax counts once; it should count with the sum of the row's valid weights":
            _one_weight,
        "target -1 means none, but you subtract its weight at the last column": _from_the_end,
        "target -1 means none, but you count it as token 0": _from_the_start,
        "two equal targets in a row overwrite each other; their weights should add up": _overwrites,
        "that is the mean over rows; return the gradients of the sum": _mean,
        "the sign is wrong: the gradient is positive where probability is to fall": _negative,
    }
    three = [[1, 3, 0], [2, 2, 5], [4, 5, -1], [3, -1, -1]]
    for targets, weights, cap in (
        ([[1], [0], [5], [3]], [1.0], CAP), ([[1, 3], [2, 2], [4, -1], [-1, -1]], [1.0, 0.5], CAP),
        (three, [1.0, 0.5, 0.25], CAP), (three, [1.0, 0.5, 0.25], OTHER_CAP),
        (three, [0.9, 0.3, 0.2], CAP),
    ):
        inputs = logits.clone(), torch.tensor(targets), torch.tensor(weights).double()
        given = [tensor.clone() for tensor in inputs]
        try:
            result = answer(*given, cap)
        except RuntimeError as problem:
            if (given[1] >= 0).all():
                raise
            raise AssertionError(
                f"{f'{problem}'.rstrip('.')}: a missing target, -1, is no column. Give it weight 0"
                " and any valid column, targets.clamp(min=0)") from None
        assert isinstance(result, torch.Tensor) and result.shape == logits.shape, (
            f"return gradients of the logits' shape {tuple(logits.shape)}, not"
            f" {getattr(result, 'shape', result)!r}")
        assert all(map(torch.equal, given, inputs)), (
            "your function changes its arguments; they are needed afterwards")
        right = reference(*inputs, cap)
        if torch.allclose(result.double(), right, atol=1e-6):
            continue
        for why, slip in names.items():
            wrong = slip(*inputs, cap)
            assert not torch.allclose(result.double(), wrong, atol=1e-6), (
                f"with targets {targets}: {why}")
        raise AssertionError(
            f"with targets {targets} the first row's gradients should be"
            f" {[round(g, 4) for g in right[0].tolist()]}, not"
            f" {[round(g, 4) for g in result[0].tolist()]}")
    try:
        with torch.inference_mode(), Refuses():
            answer(logits.clone(), torch.tensor(targets), torch.tensor(weights).double(), cap)
    except RuntimeError:
        raise AssertionError(
            "right numbers, but your function needs autograd, and a kernel has none: write the two"
            " factors of the chain rule") from None
    mine, right = train_table(answer), train_table(reference)
    assert abs(mine[-1] - right[-1]) < 1e-3, (
        f"single cases agree, but a table trained with your gradients ends at {mine[-1]:.3f} and"
        f" with autograd's at {right[-1]:.3f}: does your function depend on earlier calls?")
    print(f"a table trained with your gradients: loss {mine[0]:.2f} to {mine[-1]:.2f}, autograd's"
          f" {right[0]:.2f} to {right[-1]:.2f}")


# ---- 3: places in documents ----


def places(tokens, bos):
    place = np.arange(len(tokens))
    return place - np.maximum.accumulate(np.where(tokens == bos, place, 0))


def _from_one(tokens, bos):
    return places(tokens, bos) + 1


def _from_the_row(tokens, bos):
    return np.arange(len(tokens))


def _from_bos_upwards(tokens, bos):
    return places(np.minimum(tokens, bos), bos)


def _needs_a_start(tokens, bos):
    starts = np.flatnonzero(tokens == bos)
    starts = np.concatenate(([0], starts)) if starts[0] else starts
    place = np.arange(len(tokens))
    return place - starts[np.searchsorted(starts, place, "right") - 1]


def _number_of_document(tokens, bos):
    return np.cumsum(tokens == bos)


def _to_the_end(tokens, bos):
    return places(tokens[::-1], bos)[::-1]


def _one_late(tokens, bos):
    return np.concatenate(([0], places(tokens, bos)[:-1]))


def _last_start(tokens, bos):
    place = np.arange(len(tokens))
    return np.abs(place - place[tokens == bos].max(initial=0))


def check_places(answer):
    assert callable(answer), f"expected the function places, not {answer!r}"
    names = {
        "the opening token itself has place 0": _from_one,
        "you count from the row's start; each `bos` starts again at 0": _from_the_row,
        "those are the numbers of the documents; count tokens within each": _number_of_document,
        "you count to the next document's start; count from the own one's": _to_the_end,
        "a token larger than `bos` is a token like any other; only `bos` itself opens a document":
            _from_bos_upwards,
        "each place is that of the previous token": _one_late,
        "all distances are from the row's last document; take the latest start up to each token":
            _last_start,
    }
    draw = np.random.default_rng(0)
    for tokens in (np.array([9, 1, 2, 9, 3, 4, 5]), np.array([1, 2, 9, 9, 3]),
                   draw.integers(6, size=300) * 3, np.array([3, 12, 1, 2])):
        given = tokens.copy()
        try:
            result = np.asarray(answer(given, 9))
        except (IndexError, ValueError) as problem:
            if (tokens == 9).any():
                raise
            raise AssertionError(f"{problem}: the row {tokens.tolist()} has no bos = 9. It counts"
                                 " from its start") from None
        assert np.array_equal(given, tokens), "your function changes the tokens; they are needed"
        right = places(tokens, 9)
        assert result.shape == right.shape, (
            f"return one number per token, {len(tokens)} in all; your shape is {result.shape}")
        if np.array_equal(result, right):
            continue
        for why, slip in names.items():
            wrong = slip(tokens, 9)
            assert not np.array_equal(result, wrong) or np.array_equal(wrong, right), (
                f"in the row {tokens[:8].tolist()} with bos = 9: {why}")
        raise AssertionError(f"the row {tokens[:8].tolist()} with bos = 9 should give"
                             f" {right[:8].tolist()}, not {result[:8].tolist()}")


EXERCISES = {
    "1": dict(
        check=check_largest,
        hints=[
            "The chain rule has two factors, one from the softmax and one from the cap. How large"
            " can each be?",
            "The softmax part is the sum of the weights times a probability, less the weights of"
            " the targets at this token: between -1.75 and 1.75.",
            "The cap's slope is 23 / 7.5 times s (1 - s), and s (1 - s) is at most 1 / 4.",
            "1.75 * 23 / 7.5 / 4 = ...",
        ],
        solution=1.3417,
        wrong=[1.75, 0.767, 5.37, 3.07, 10.06, 0.447, -1.3417, "little"],
    ),
    "2": dict(
        check=check_grads,
        hints=[
            "Which two factors does the chain rule give, from the softmax and from the cap?",
            "With z = height s and s = sigmoid((l + shift) / width): the first factor is W p minus"
            " the targets' weights, the second height / width * s * (1 - s).",
            "Set the weights of targets -1 to 0, sum them for W, and subtract them at their columns"
            " with scatter_add, which adds up equal targets.",
            "grads = W * (height * share).softmax(1); grads.scatter_add(1, targets.clamp(min=0),"
            " -weights); then times the slope ...",
        ],
        solution=loss_grads,
        wrong=[_without_slope, _half_slope, _slope_without_width, _uncapped, _all_weights,
               _one_weight, _from_the_end, _from_the_start, _overwrites, _mean, _negative,
               _share_in_softmax, _slope_of_capped, _minus_one_as_column, _by_autograd,
               _by_torch_func, _records_cap, _records_weights,
               lambda logits, targets, weights, cap: None],
    ),
    "3": dict(
        check=check_places,
        hints=[
            "Where did the latest document start, as seen from each token?",
            "Mark the index of each `bos`, 0 elsewhere; a running maximum carries the latest on.",
            "place = np.arange(len(tokens)); starts = np.where(tokens == bos, place, 0); then"
            " np.maximum.accumulate, then subtract.",
            "return place - np.maximum.accumulate(np.where(...))",
        ],
        solution=places,
        wrong=[_from_one, _from_the_row, _number_of_document, _to_the_end, _one_late, _last_start,
               _from_bos_upwards, _needs_a_start, lambda tokens, bos: None],
    ),
}
