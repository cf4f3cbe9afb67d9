"""Exercises of lesson 13: their checks, hints and solutions."""

import torch
import torch.nn.functional as F

# ---- 1: rows of one's own ----


def check_share(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of percent, not {answer!r}") from None
    meanings = {
        86.3: "that is the share of pairs that share a row; the question is about the others",
        0.137: "that is a fraction; answer in percent",
        27.2: "that is the share of rows with exactly one pair; the question counts pairs, of which"
              " there are about twice as many as rows",
        43.4: "that is rows in use per pair; most of these rows hold several pairs",
        50.3: "that is rows per pair, as if the hash filled every row before it used one twice; a"
              " hash does not know which rows are taken",
        0.0: "one other pair misses a row with probability 1 - 1 / 251,519, which is close to 1;"
             " that many misses in a row are possible",
        198.8: "that is the mean number of pairs in a row, in percent; it takes an exponential from"
               " there",
        36.8: "that is exp(-1), for as many pairs as rows; here pairs are nearly twice as many",
    }
    if abs(value - 13.7) > 0.3:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.1 else (
            "each of the other 499,999 pairs must miss one row of 251,519; multiply their"
            " probabilities to miss")
        raise AssertionError(f"{value:g} percent is not the share with a row of its own: {why}")


# ---- 2: the hash ----


def bigram_rows(inputs, rows):
    hashes = (36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1]) % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _wraps(inputs, rows):
    return (36313 * inputs ^ 27191 * inputs.roll(1, 1)) % (rows - 1)


def _flat(inputs, rows):
    return bigram_rows(inputs.flatten()[None], rows).view_as(inputs)


def _next(inputs, rows):
    hashes = (36313 * inputs[:, :-1] ^ 27191 * inputs[:, 1:]) % (rows - 1)
    return F.pad(hashes, (0, 1), value=rows - 1)


def _swapped(inputs, rows):
    hashes = (27191 * inputs[:, 1:] ^ 36313 * inputs[:, :-1]) % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _added(inputs, rows):
    hashes = (36313 * inputs[:, 1:] + 27191 * inputs[:, :-1]) % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _all_rows(inputs, rows):
    hashes = (36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1]) % rows
    return F.pad(hashes, (1, 0), value=rows - 1)


def _zero_before(inputs, rows):
    return (36313 * inputs ^ 27191 * F.pad(inputs, (1, -1))) % (rows - 1)


def _row_0(inputs, rows):
    return F.pad(bigram_rows(inputs, rows)[:, 1:], (1, 0))


def _overwritten(inputs, rows):
    inputs = inputs.clone()
    inputs[:, 0] = rows - 1
    return bigram_rows(inputs, rows)


def _without_brackets(inputs, rows):
    hashes = 36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1] % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _row_as_token(inputs, rows):
    before = inputs.roll(1, 1)
    before[:, 0] = rows - 1
    return (36313 * inputs ^ 27191 * before) % (rows - 1)


def _row_too_far(inputs, rows):
    return F.pad(bigram_rows(inputs, rows)[:, 1:], (1, 0), value=rows)


def _too_short(inputs, rows):
    return bigram_rows(inputs, rows)[:, 1:]


def check_rows(answer):
    assert callable(answer), f"expected the function bigram_rows, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    cases = [(torch.tensor([[50256, 464, 3290, 318, 257]]), 251_520),
             (torch.randint(264, (3, 7), generator=draw), 64)]
    names = {
        "a row's first token is paired with the row's last one, which the model should not see yet;"
        " it has no previous token, so use the last row of the table": _wraps,
        "a first token is paired with the end of the row above, another text; all first tokens"
        " should use the last row of the table": _flat,
        "each token is paired with the next one, which it should predict; pair it with the previous"
        " one": _next,
        "the factors are swapped: the token's is 36313, the previous token's 27191": _swapped,
        "the products are added; they should be combined by XOR, ^": _added,
        "hashes go up to the last row, which is kept for tokens without a previous one; the modulus"
        " is rows - 1": _all_rows,
        "a first token is hashed as if token 0 were before it; it should use the last row":
            _zero_before,
        "first tokens use row 0, which is also some pairs' row; they should use the last row":
            _row_0,
        "without brackets % belongs to the previous token's product only: in Python ^ binds less"
        " than %. Put the XOR into brackets": _without_brackets,
        "a first token is hashed as if token rows - 1 were before it; rows - 1 is its row, not its"
        " predecessor": _row_as_token,
        "your first tokens use row number `rows`, which is one too many: rows count from 0":
            _row_too_far,
        "your first token is overwritten before the second one is hashed, as in the record; the"
        " second token should see its true predecessor": _overwritten,
    }
    for inputs, rows in cases:
        given = inputs.clone()
        result = answer(given, rows)
        assert torch.equal(given, inputs), (
            "your function changes the tokens; the embedding still needs them afterwards")
        right = bigram_rows(inputs, rows)
        assert isinstance(result, torch.Tensor) and result.shape == right.shape, (
            f"return a tensor of shape {tuple(right.shape)}, one row of the table for each token;"
            f" yours is {getattr(result, 'shape', result)!r}")
        if torch.equal(result, right):
            continue
        for why, slip in names.items():
            wrong = slip(inputs, rows)
            assert not torch.equal(result, wrong) or torch.equal(wrong, right), why
        raise AssertionError(
            f"tokens {inputs[0].tolist()} and {rows:,} rows should give {right[0].tolist()}, not"
            f" {result[0].tolist()}: (36313 token XOR 27191 previous token) mod (rows - 1)")


# ---- 3: a loss's gradients ----

CAP = 23.0, 5.0, 7.5


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
    for targets, weights in (
        ([[1], [0], [5], [3]], [1.0]), ([[1, 3], [2, 2], [4, -1], [-1, -1]], [1.0, 0.5]),
        ([[1, 3, 0], [2, 2, 5], [4, 5, -1], [3, -1, -1]], [1.0, 0.5, 0.25]),
    ):
        inputs = logits.clone(), torch.tensor(targets), torch.tensor(weights).double()
        given = [tensor.clone() for tensor in inputs]
        try:
            result = answer(*given, CAP)
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
        right = reference(*inputs, CAP)
        if torch.allclose(result.double(), right, atol=1e-6):
            continue
        for why, slip in names.items():
            wrong = slip(*inputs, CAP)
            assert not torch.allclose(result.double(), wrong, atol=1e-6), (
                f"with targets {targets}: {why}")
        raise AssertionError(
            f"with targets {targets} the first row's gradients should be"
            f" {[round(g, 4) for g in right[0].tolist()]}, not"
            f" {[round(g, 4) for g in result[0].tolist()]}")
    try:
        with torch.inference_mode():
            answer(logits.clone(), torch.tensor(targets), torch.tensor(weights).double(), CAP)
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


EXERCISES = {
    "1": dict(
        check=check_share,
        hints=[
            "With which probability does one other pair fall into another row than yours?",
            "All others must miss: (1 - 1 / R) to the power n - 1, nearly exp(-n / R).",
            "R = 251,519, n = 500,000: n / R = 1.988.",
            "100 exp(-1.988) = ...",
        ],
        solution=13.7,
        wrong=[43.4, 86.3, 0.137, 27.2, 50.3, 0, 198.8, 60.5, 36.8, "few"],
    ),
    "2": dict(
        check=check_rows,
        hints=[
            "Which tokens of a row have a previous one, and what do the others get?",
            "Hash inputs[:, 1:] with inputs[:, :-1]; the first column has no pair and gets the last"
            " row's number, rows - 1.",
            "In Python ^ binds less than * and %, so put the XOR into brackets; then % (rows - 1),"
            " then pad with one column in front.",
            "hashes = (36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1]) % (rows - 1), then pad ...",
        ],
        solution=bigram_rows,
        wrong=[_wraps, _flat, _next, _swapped, _added, _all_rows, _zero_before, _row_0,
               _overwritten, _too_short, _without_brackets, _row_as_token, _row_too_far,
               lambda inputs, rows: None],
    ),
    "3": dict(
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
               lambda logits, targets, weights, cap: None],
    ),
}
