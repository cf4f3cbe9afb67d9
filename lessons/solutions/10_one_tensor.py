"""Exercises of lesson 10: their checks, hints and solutions."""

import torch

# ---- 1: two neurons ----


def check_length(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a length, not {answer!r}") from None
    meanings = {
        1.0: "that is its length before; both neurons become equally long, so this one grows",
        2.0: "that is the mean of the two lengths; the matrix's length stays, and it is the root of"
             " the sum of squares",
        1.58: "that is the matrix's length divided by 2; two neurons of it make a matrix that is"
              " shorter by a factor of sqrt(2)",
        3.0: "that is the second neuron's length before; both end equally long, but the matrix does"
             " not become longer",
        3.16: "that is the whole matrix's length; two neurons share it",
        4.47: "without c both are as long as 1 / sqrt(0.05), whatever the matrix was; c gives the"
              " matrix its old length back",
        5.0: "that is the square of its length, (1 + 9) / 2; take the root",
    }
    if abs(value - 5**0.5) > 0.01:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.02 else (
            "both neurons become equally long, and the root of the sum of their squares stays"
            " sqrt(1 + 9)")
        raise AssertionError(f"{value:g} is not the first neuron's length: {why}")


# ---- 2: even_out ----


def even_out(updates, mean_square, beta):
    mean_square.lerp_(updates.square().mean(-2, keepdim=True), 1 - beta)
    scaled = updates / mean_square.clamp(min=1e-10).sqrt()
    old, new = (t.norm(dim=(-2, -1), keepdim=True) for t in (updates, scaled))
    return scaled * old / new.clamp(min=1e-10)


def _by_rows(updates, mean_square, beta):
    return updates / updates.norm(dim=-1, keepdim=True).clamp(min=1e-10)


def _without_norm(updates, mean_square, beta):
    mean_square.lerp_(updates.square().mean(-2, keepdim=True), 1 - beta)
    return updates / mean_square.clamp(min=1e-10).sqrt()


def _one_norm_for_all(updates, mean_square, beta):
    scaled = _without_norm(updates, mean_square, beta)
    return scaled * updates.norm() / scaled.norm().clamp(min=1e-10)


def _without_memory(updates, mean_square, beta):
    mean_square.lerp_(updates.square().mean(-2, keepdim=True), 1 - beta)
    scaled = updates / updates.square().mean(-2, keepdim=True).clamp(min=1e-10).sqrt()
    old, new = (t.norm(dim=(-2, -1), keepdim=True) for t in (updates, scaled))
    return scaled * old / new.clamp(min=1e-10)


def _the_old_mean(updates, mean_square, beta):
    before = mean_square.clone()
    even_out(updates, mean_square, beta)
    return even_out(updates, before, 1.0)


def _without_root(updates, mean_square, beta):
    mean_square.lerp_(updates.square().mean(-2, keepdim=True), 1 - beta)
    scaled = updates / mean_square.clamp(min=1e-10)
    old, new = (t.norm(dim=(-2, -1), keepdim=True) for t in (updates, scaled))
    return scaled * old / new.clamp(min=1e-10)


def _sums(updates, mean_square, beta):
    mean_square.lerp_(updates.square().sum(-2, keepdim=True), 1 - beta)
    return even_out(updates, mean_square.clone(), 1.0)


def _turned(updates, mean_square, beta):
    return even_out(updates, mean_square, 1 - beta)


def _per_column(updates, mean_square, beta):
    scaled = _without_norm(updates, mean_square, beta)
    old, new = (t.norm(dim=-2, keepdim=True) for t in (updates, scaled))
    return scaled * old / new.clamp(min=1e-10)


def _without_keepdim(updates, mean_square, beta):
    mean_square.lerp_(updates.square().mean(-2), 1 - beta)
    return updates / mean_square.sqrt()


def _not_a_number(updates, mean_square, beta):
    mean_square.lerp_(updates.square().mean(-2, keepdim=True), 1 - beta)
    scaled = updates / mean_square.sqrt()
    return scaled * updates.norm(dim=(-2, -1), keepdim=True) / scaled.norm(
        dim=(-2, -1), keepdim=True)


def check_even_out(answer):
    assert callable(answer), f"expected the function even_out, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    updates = torch.randn(3, 4, 6, generator=draw) * torch.rand(3, 1, 6, generator=draw)
    updates[1] *= 5
    before = torch.rand(3, 1, 6, generator=draw)
    means, kept = before.clone(), updates.clone()
    try:
        result = answer(updates, means, 0.8)
    except RuntimeError as problem:
        if "shape" not in f"{problem}":
            raise
        raise AssertionError(
            f"{problem}: updates are (N, m, n) and mean_square (N, 1, n), a number per column; take"
            " the mean over dim -2 and keep that dimension, keepdim=True") from None
    assert isinstance(result, torch.Tensor), (
        f"your function returns {result!r}; return the scaled updates")
    assert torch.equal(updates, kept), (
        "your function changes `updates`; only mean_square should change in place")
    assert result.shape == updates.shape, (
        f"your result has shape {tuple(result.shape)}, and the updates {tuple(updates.shape)}")
    assert not torch.equal(means, before), (
        "mean_square is unchanged after the call; update it in place, so that the next step has it")
    turned = before.lerp(updates.square().mean(-2, keepdim=True), 0.8)
    assert not torch.allclose(means, turned), (
        "your mean_square takes 0.8 of the new squares with beta = 0.8; keep 0.8 of the old ones"
        " and take 0.2 of the new")
    summed = before.lerp(updates.square().sum(-2, keepdim=True), 0.2)
    assert not torch.allclose(means, summed), (
        "your mean_square takes a column's sum of squares; take its mean over the m rows")
    right_means = before.clone()
    right = even_out(updates, right_means, 0.8)
    assert torch.allclose(means, right_means, atol=1e-6), (
        "after a step mean_square should be beta times the old plus (1 - beta) times the mean over"
        " a column's m entries of the squares; yours is something else")
    lengths, wanted = (t.norm(dim=(-2, -1)) for t in (result, updates))
    assert torch.allclose(lengths, wanted, rtol=1e-4), (
        f"the first matrix had length {wanted[0]:.3f} and has {lengths[0]:.3f} now; multiply each"
        " matrix by a number of its own, which gives it its old length back")
    assert not torch.allclose(result, updates, atol=1e-5), (
        "your result is the updates: each column gets its own old length back, which undoes the"
        " division. Give the length back to the whole matrix, by one number")
    names = {
        "this step's squares alone, without the mean of earlier steps": _without_memory,
        "the mean from before this step; update it first": _the_old_mean,
        "the mean square itself; take its root, which is a length": _without_root,
    }
    for name, slip in names.items():
        assert not torch.allclose(result, slip(updates, before.clone(), 0.8), atol=1e-5), (
            f"the matrices' lengths are right, but you divide each column by {name}")
    assert torch.allclose(result, right, atol=1e-5), (
        "the matrices' lengths are right, but their columns' shares are not: divide each column by"
        " the root of its mean square, which includes this step")
    zeros = answer(torch.zeros(1, 4, 6), torch.zeros(1, 1, 6), 0.95)
    assert torch.equal(zeros, torch.zeros(1, 4, 6)), (
        f"a matrix of zeros becomes {zeros.flatten()[0].item()}: in the first two steps every"
        " matrix's gradient is zero; keep both denominators above zero")


# ---- 3: which weights decay ----

PAIRS, WIDTH, STEPS, RATE, STRENGTH = 24, 64, 300, 0.03, 20.0
SMALLER, ERROR = 0.08, 1.4  # what the rule has to reach


def train_memory(removed):
    """The errors and the weights' lengths of a linear memory, of three seeds: keys (PAIRS,
    WIDTH) to values, trained by Adam from large weights; removed(weight, update) decays."""
    draws = [torch.Generator().manual_seed(seed) for seed in range(3)]

    def normal(*shape):
        return torch.stack([torch.randn(shape, generator=draw) for draw in draws])

    keys, values = normal(PAIRS, WIDTH) / 8, normal(PAIRS, WIDTH)
    weight = normal(WIDTH, WIDTH) / 2
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, STEPS + 1):
        chosen = torch.stack([torch.randint(PAIRS, (16,), generator=draw) for draw in draws])
        x, y = (torch.stack([rows[i] for rows, i in zip(table, chosen, strict=True)])
                for table in (keys, values))
        grad = (x @ weight.mT - y - 0.3 * normal(16, WIDTH)).mT @ x / 16  # noisy values
        mean.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.05)
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        rate = RATE * (1 - (step - 1) / STEPS)
        weight = weight - rate * (update + STRENGTH * rate * removed(weight, update))
    error = (keys @ weight.mT - values).square().mean((1, 2))
    return error, weight.norm(dim=(1, 2))


def cautious(weight, update):
    return weight * (update * weight >= 0)


def everything(weight, update):
    return weight


def _by_if(weight, update):
    return weight if weight * update > 0 else 0 * weight


def nothing(weight, update):
    return torch.zeros_like(weight)


def check_removed(answer):
    assert callable(answer), f"expected the function removed, not {answer!r}"
    weight, update = torch.tensor([[2.0, -2.0], [2.0, -2.0]]), torch.tensor([[1.0], [-1.0]])
    update = update.expand(2, 2).contiguous()
    try:
        part = answer(weight.clone(), update.clone())
    except RuntimeError as problem:
        if "ambiguous" not in f"{problem}":
            raise
        raise AssertionError(
            "an `if` decides once for the whole tensor; each weight needs its own decision, so"
            " multiply by a mask") from None
    assert isinstance(part, torch.Tensor) and part.shape == weight.shape, (
        f"for weights of shape (2, 2) your rule returns {part!r}; return a tensor of that shape")
    growing = (part * weight < 0).nonzero().tolist()
    assert not growing, (
        f"your rule removes {part[tuple(growing[0])]:g} from a weight of"
        f" {weight[tuple(growing[0])]:g}, which grows by it: what decays has the weight's sign")
    import lesson

    runs = [train_memory(rule) for rule in (answer, nothing, everything)]
    (error, length), (least, longest), (plain, _) = (
        [each.mean().item() for each in run] for run in runs)
    found = (f"the weights end {1 - length / longest:.1%} smaller than without decay, with"
             f" {error / least:.2f} times the error")
    assert error == error, "the memory diverges under your rule; return a part of the weight itself"
    if length > (1 - SMALLER) * longest:
        kept = ((part == 0) & (update * weight > 0)).nonzero().tolist()
        why = "each chosen weight should decay in proportion to its size"
        chosen = part[0, 0].item()  # a weight of 2 with an update of 1
        if 0 < chosen < 2:
            why = f"for a weight of 2 that may decay your rule returns {chosen:g}; return all of it"
        if kept:
            at = tuple(kept[0])
            why = (f"your rule does not decay a weight of {weight[at]:g} whose update is"
                   f" {update[at]:g}, which takes it towards zero")
        raise AssertionError(f"{found}; that is too little decay: {why}")
    if error > ERROR * least:
        pulled = (part * update < 0).nonzero().tolist()
        why = "your rule removes too much at once"
        if pulled:
            at = tuple(pulled[0])
            why = (f"your rule also decays a weight of {weight[at]:g} whose update is"
                   f" {update[at]:g}, which makes it larger: the loss needs its size")
        raise AssertionError(f"{found} (plain decay: {plain / least:.1f} times); {why}")
    lesson.must_end_lower(runs[0][1], runs[1][1], "the weights' length", "the one without decay",
                          "Smaller on average, but not in every seed")
    print(f"{found}; plain decay makes it {plain / least:.1f} times")


EXERCISES = {
    "1": dict(
        check=check_length,
        hints=[
            "Which of the two is longer afterwards? Which length of the matrix stays?",
            "M_j = 0.05 e_j in the first step, so O_j / sqrt(M_j) has the same length for every j.",
            "Both neurons are equally long, and the sum of their squares is still 1 + 9.",
            "Two equal squares that sum to 10: the length is the root of 5.",
        ],
        solution=5**0.5,
        wrong=[1, 2, 10**0.5 / 2, 10**0.5, 20**0.5, 5, 7, "long"],
    ),
    "2": dict(
        check=check_even_out,
        hints=[
            "Which three things happen: to mean_square, to the columns, to the matrix's length?",
            "Means over dim -2 belong to a column; a matrix's length is its norm over (-2, -1)."
            " Keep both dimensions with keepdim=True.",
            "mean_square.lerp_(squares, 1 - beta); divide by its root, clamped from below;"
            " multiply by the old norm over the new one, clamped from below as well.",
            "scaled = updates / mean_square.clamp(min=1e-10).sqrt(); return scaled * old / new,"
            " with old and new the norms of updates and scaled over dim=(-2, -1), ...",
        ],
        solution=even_out,
        wrong=[_by_rows, _without_norm, _one_norm_for_all, _without_memory, _the_old_mean,
               _without_root, _sums, _turned, _not_a_number, _per_column, _without_keepdim,
               lambda updates, mean_square, beta: None],
    ),
    "3": dict(
        check=check_removed,
        hints=[
            "When does a smaller weight do no harm? Its update shows it.",
            "The update is subtracted. Where update and weight have the same sign, the step moves"
            " the weight towards zero: the loss agrees.",
            "Keep those weights and set the others to zero; a comparison of a product with 0 is a"
            " mask.",
            "update * weight >= 0 is the mask; multiply ...",
        ],
        solution=cautious,
        wrong=[everything, nothing,
               lambda weight, update: weight * (update * weight < 0),
               lambda weight, update: weight.abs(),
               lambda weight, update: weight * (update > 0),
               lambda weight, update: weight * (weight.abs() < weight.abs().mean()),
               lambda weight, update: weight / 4, _by_if,
               lambda weight, update: weight * (update * weight > 0) / 2,
               lambda weight, update: update * (update * weight > 0),
               lambda weight, update: 1.0],
    ),
}
