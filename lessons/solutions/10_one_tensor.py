"""Checks, hints and solutions of lesson 10."""

import torch

# ---- 1: two neurons ----


def check_length(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a length, not {answer!r}") from None
    meanings = {
        1.0: "that is its length before; both neurons become equally long, so this one grows",
        2.0: "that is the mean of the two lengths; what stays is the matrix's length, the root of"
             " the sum of squares",
        1.58: "that is the matrix's length divided by 2; two lengths of it make only 0.71 of it",
        3.16: "that is the whole matrix's length; two neurons share it",
        4.47: "without the last condition both are as long as 1 / sqrt(0.05), whatever the matrix"
              " was; c brings the matrix back to its old length",
    }
    if abs(value - 5**0.5) > 0.01:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.02 else (
            "both neurons become equally long, and the root of the sum of their squares stays"
            " sqrt(1 + 9)")
        raise AssertionError(f"{value:g} is not the first neuron's length: {why}")


# ---- 2: even_out ----


def even_out(updates, mean_squares, beta):
    squares = updates.square().mean(-2, keepdim=True)
    mean_squares.lerp_(squares, 1 - beta)
    evened = updates / mean_squares.clamp(min=1e-10).sqrt()
    norms = [t.norm(dim=(-2, -1), keepdim=True) for t in (updates, evened)]
    return evened * norms[0] / norms[1].clamp(min=1e-10)


def check_even_out(answer):
    assert callable(answer), f"expected the function even_out, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    updates = torch.randn(3, 4, 6, generator=draw) * torch.rand(3, 1, 6, generator=draw)
    before = torch.rand(3, 1, 6, generator=draw)
    means, kept = before.clone(), updates.clone()
    result = answer(updates, means, 0.8)
    assert isinstance(result, torch.Tensor), (
        f"the function returns {result!r}; return the updates that result")
    assert torch.equal(updates, kept), (
        "your function changes `updates` themselves, of which Muon keeps the momentum; only"
        " mean_squares should change in place")
    assert result.shape == updates.shape, (
        f"the result has shape {tuple(result.shape)}, and the updates {tuple(updates.shape)}")
    right_means = before.clone()
    right = even_out(updates, right_means, 0.8)
    assert not torch.equal(means, before), (
        "mean_squares is unchanged after the call; move it in place, so that the next step has it")
    turned = before.lerp(updates.square().mean(-2, keepdim=True), 0.8)
    assert not torch.allclose(means, turned), (
        "mean_squares takes 0.8 of the new squares with beta = 0.8; it should keep 0.8 of the old"
        " ones and take 0.2 of the new")
    assert torch.allclose(means, right_means, atol=1e-6), (
        "after a step mean_squares is not beta times the old plus (1 - beta) times the mean over"
        " a column's m entries of the squares")
    lengths, wanted = (t.norm(dim=(-2, -1)) for t in (result, updates))
    assert torch.allclose(lengths, wanted, rtol=1e-4), (
        f"the first matrix had length {wanted[0]:.3f} and has {lengths[0]:.3f} now; multiply each"
        " matrix by one number that gives it its old length back")
    assert torch.allclose(result, right, atol=1e-5), (
        "the matrix's length is right, but its neurons' shares are not: divide each column by the"
        " root of its mean square over all steps, this one included")
    zeros = answer(torch.zeros(1, 4, 6), torch.zeros(1, 1, 6), 0.95)
    assert torch.equal(zeros, torch.zeros(1, 4, 6)), (
        f"a matrix of zeros becomes {zeros.flatten()[0].item()}: in the first steps every gradient"
        " of a matrix is zero; keep both denominators above zero")


# ---- 3: which weights decay ----

PAIRS, WIDTH, STEPS, RATE, STRENGTH = 24, 64, 300, 0.03, 10.0


def train_memory(removed):
    """The error and the weights' length of a linear memory, for three seeds: keys (PAIRS, WIDTH)
    to values, trained by Adam from large weights; `removed` is what decays."""
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
        grad = (x @ weight.mT - y - 0.3 * normal(16, WIDTH)).mT @ x / 16
        mean.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.05)
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        rate = RATE * (1 - (step - 1) / STEPS)
        weight = weight - rate * (update + STRENGTH * rate * removed(weight, update))
    error = (keys @ weight.mT - values).square().mean((1, 2))
    return error.mean().item(), weight.norm(dim=(1, 2)).mean().item()


def cautious(weight, update):
    return weight * (update * weight >= 0)


def check_removed(answer):
    assert callable(answer), f"expected the function removed, not {answer!r}"
    weight, update = torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.ones(2, 2)
    part = answer(weight, update)
    assert isinstance(part, torch.Tensor) and part.shape == weight.shape, (
        f"for weights of shape (2, 2) the rule returns {part!r}; return a tensor of their shape")
    (error, length), (least_error, longest) = train_memory(answer), train_memory(torch.zeros_like)
    plain_error, _ = train_memory(lambda weight, update: weight)
    found = (f"the weights end {1 - length / longest:.1%} smaller than without decay, and the"
             f" error is {error / least_error:.2f} times as large")
    assert error == error, "the memory diverges under your rule; return a part of the weight itself"
    assert length <= 0.96 * longest, (
        f"{found}; that is too little decay: which weights may lose size without harm?")
    assert error <= 1.25 * least_error, (
        f"{found}; plain decay makes it {plain_error / least_error:.2f} times: your rule pulls on"
        " weights that the loss holds where they are, whose update points away from zero")
    print(f"{found}; plain decay makes it {plain_error / least_error:.2f} times as large")


# ---- typical wrong answers: every check must refuse them ----


def _by_rows(updates, mean_squares, beta):
    return updates / updates.norm(dim=-1, keepdim=True).clamp(min=1e-10)


def _without_norm(updates, mean_squares, beta):
    mean_squares.lerp_(updates.square().mean(-2, keepdim=True), 1 - beta)
    return updates / mean_squares.clamp(min=1e-10).sqrt()


def _without_memory(updates, mean_squares, beta):
    squares = updates.square().mean(-2, keepdim=True)
    mean_squares.lerp_(squares, 1 - beta)
    evened = updates / squares.clamp(min=1e-10).sqrt()
    return evened * updates.norm(dim=(-2, -1), keepdim=True) / evened.norm(
        dim=(-2, -1), keepdim=True).clamp(min=1e-10)


def _turned(updates, mean_squares, beta):
    return even_out(updates, mean_squares, 1 - beta)


def _not_a_number(updates, mean_squares, beta):
    mean_squares.lerp_(updates.square().mean(-2, keepdim=True), 1 - beta)
    evened = updates / mean_squares.sqrt()
    return evened * updates.norm(dim=(-2, -1), keepdim=True) / evened.norm(
        dim=(-2, -1), keepdim=True)


EXERCISES = {
    "1": dict(
        check=check_length,
        hints=[
            "Which of the two is longer afterwards? What stays of the whole matrix?",
            "M_j = 0.05 e_j in the first step, so O_j / sqrt(M_j) has one length for every j.",
            "Both neurons are equally long, and the sum of their squares is still 1 + 9.",
            "Two equal squares that sum to 10: the length is the root of 5.",
        ],
        solution=5**0.5,
        wrong=[1, 2, 10**0.5 / 2, 10**0.5, 20**0.5, 7, "long"],
    ),
    "2": dict(
        check=check_even_out,
        hints=[
            "Three things: the new mean squares, the division, the matrix's length.",
            "Means over dim -2 belong to a column; a matrix's length is its norm over (-2, -1)."
            " Keep both dimensions with keepdim=True.",
            "mean_squares.lerp_(squares, 1 - beta); divide by its root, clamped from below;"
            " multiply by the old norm over the new one, clamped from below as well.",
            "evened = updates / mean_squares.clamp(min=1e-10).sqrt(); return evened * old / new,"
            " with old and new the norms of updates and evened over dim=(-2, -1), ...",
        ],
        solution=even_out,
        wrong=[_by_rows, _without_norm, _without_memory, _turned, _not_a_number,
               lambda updates, mean_squares, beta: None],
    ),
    "3": dict(
        check=check_removed,
        hints=[
            "When does a weight that shrinks do no harm? Ask its update.",
            "The update is subtracted. Where update and weight have one sign, the step moves the"
            " weight towards zero: the loss agrees.",
            "Keep those weights and set the others to zero; a comparison of a product with 0 is a"
            " mask.",
            "update * weight >= 0 is the mask; multiply ...",
        ],
        solution=cautious,
        wrong=[lambda weight, update: weight, lambda weight, update: 0 * weight,
               lambda weight, update: weight * (update * weight < 0),
               lambda weight, update: weight.abs(), lambda weight, update: 1.0],
    ),
}
