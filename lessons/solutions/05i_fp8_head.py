"""Checks, hints and solutions of the exercises in lessons/05i_fp8_head.ipynb."""

import math

import torch
import torch.nn.functional as F

# ---- 1: the range of a scaled e4m3 ----


def check_range(answer):
    try:
        largest, smallest = (float(number) for number in answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected two numbers, (largest, smallest), not {answer!r}") from None
    def near(number, value):  # rounded to two digits it serves; the slips are 7 % apart or more
        return math.isclose(number, value, rel_tol=0.02)

    right_largest, right_smallest = 448 / 2**9, 2.0**-18
    if near(largest, right_largest) and near(smallest, right_smallest):
        return
    why = "take the format's largest and smallest value and undo the multiplication by 2**9"
    if near(largest, right_smallest) and near(smallest, right_largest):
        why = "the order is (largest, smallest); yours is swapped"
    elif largest > 448:
        why = "the scale multiplies weights before they are stored, so divide the format's values"
    elif near(largest, 480 / 2**9):
        why = "the code that would mean 480 stands for nan, so the largest value is 448"
    elif near(largest, 448):
        why = "that is the format's own limit; a weight is multiplied by 2**9 before it is stored"
    elif near(smallest, 2.0**-9):
        why = "the smallest is the format's own; divide it by 2**9, as the largest"
    elif near(largest, 57344 / 2**9):
        why = "those are e5m2's values; the weights are stored in e4m3"
    elif near(smallest, 2.0**-15):
        why = ("2**-6 is the smallest number with a full mantissa; below it the format goes on in"
               " steps of 2**-9 (subnormal numbers)")
    elif near(smallest, 2.0**-19):
        why = ("from there on weights round to something other than zero, but they round up to the"
               " smallest value itself, which is asked for")
    raise AssertionError(f"({largest:g}, {smallest:g}) is not the range of the weights: {why}")


# ---- 2: the two products of the backward pass ----

T, C, V = 48, 16, 32


def fp8_backward(x8, weight8, grad8, product):
    grad_x = product(grad8, weight8.T.contiguous())
    grad_weight = product(x8.T.contiguous(), grad8.T.contiguous()).T
    return grad_x, grad_weight


def product(a, b):
    """a (M, K) times b (N, K) transposed, as strict about layouts as a tensor core."""
    for name, matrix in (("first", a), ("second", b)):
        assert matrix.is_contiguous(), (
            f"the {name} operand {tuple(matrix.shape)} is a transposed view: its rows are not"
            " stored one after the other; .contiguous() makes a copy that is")
    assert a.size(1) == b.size(1), (
        f"operands {tuple(a.shape)} and {tuple(b.shape)} do not share the dimension that is summed"
        " over; it must be the last one of both")
    for matrix in (a, b):
        assert matrix.dtype.itemsize == 1, f"an operand is {matrix.dtype}, not an 8-bit format"
    return a.float() @ b.float().T


def check_backward(answer):
    assert callable(answer), f"expected the function fp8_backward, not {answer!r}"
    torch.manual_seed(0)
    x8 = torch.randn(T, C).to(torch.float8_e4m3fn)
    weight8 = torch.randn(V, C).to(torch.float8_e4m3fn)
    grad8 = torch.randn(T, V).to(torch.float8_e5m2)
    calls = []

    def counted(a, b):
        calls.append(1)
        return product(a, b)

    result = answer(x8, weight8, grad8, counted)
    assert isinstance(result, tuple | list) and len(result) == 2, (
        "expected the pair (grad_x, grad_weight); return both, in this order")
    right = (grad8.float() @ weight8.float(), grad8.float().T @ x8.float())
    for name, got, expected in zip(("grad_x", "grad_weight"), result, right, strict=True):
        shape = tuple(expected.shape)
        assert torch.is_tensor(got) and tuple(got.shape) == shape, (
            f"{name} should have the shape {shape} of what it is the gradient of, but is"
            f" {tuple(got.shape) if torch.is_tensor(got) else got!r}; transpose the result if the"
            " product came out the other way round")
        assert torch.allclose(got.float(), expected, rtol=1e-3, atol=1e-3), (
            f"{name} has the right shape and wrong values; sum over the tokens for grad_weight,"
            " over the vocabulary for grad_x")
    assert len(calls) == 2, (
        f"product was called {len(calls)} times; the exercise is to get both gradients from it,"
        " with one call for each")


# ---- 3: scales that follow the data ----

STEPS, LOSS_SCALE = 60, 2.0**-40


def choose_scale(tensor, dtype):
    largest = tensor.abs().max().item()
    if largest == 0:
        return 1.0
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest))


def always_one(tensor, dtype):
    return 1.0


def quantized(tensor, choose, dtype):
    """What is left of the tensor after `dtype`, in float32."""
    scale, limit = choose(tensor, dtype), torch.finfo(dtype).max
    return (scale * tensor).clamp(-limit, limit).to(dtype).float() / scale


def trained_loss(choose):
    """Trains a linear map with FP8 products, with a loss made tiny; its final loss in float32."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=random)
    labels = (x @ torch.randn(32, 16, generator=random)).argmax(1)
    weight = torch.zeros(16, 32)
    for _step in range(STEPS):
        if choose is None:  # float32
            x8, weight8 = x, weight
        else:
            x8, weight8 = (quantized(t, choose, torch.float8_e4m3fn) for t in (x, weight))
        logits = (x8 @ weight8.T).requires_grad_()
        (grad,) = torch.autograd.grad(LOSS_SCALE * F.cross_entropy(logits, labels), logits)
        if choose is not None:
            grad = quantized(grad, choose, torch.float8_e5m2)
        weight = weight - 1.0 * (grad.T @ x8) / LOSS_SCALE
    return F.cross_entropy(x @ weight.T, labels).item()


def check_scale(answer):
    assert callable(answer), f"expected the function choose_scale, not {answer!r}"
    random = torch.Generator().manual_seed(1)
    numbers = torch.randn(64, 32, generator=random)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for exponent in (-40, -3, 0, 5, 40):
            tensor = numbers * 2.0**exponent
            largest, limit = tensor.abs().max().item(), torch.finfo(dtype).max
            scale = answer(tensor, dtype)
            assert scale is not None, "the function returns nothing; return the scale, a number"
            scale = float(scale)
            assert math.isfinite(scale) and scale > 0, f"expected a positive scale, got {scale}"
            why = "round the exponent down"
            if float(answer(-tensor, dtype)) != scale:
                why = "a negative number can be the largest in size: take tensor.abs().max()"
            elif scale * largest > 2 * limit:
                why = "the scale must follow the largest number in size, not a typical one"
            assert scale * largest <= limit, (
                f"{dtype}: the largest number, {largest:.6g}, times your scale, {scale:.6g},"
                f" exceeds the limit {limit:g} by {100 * (scale * largest / limit - 1):.2g}"
                f" percent, so it would be cut off; {why}")
            assert scale * largest > limit / 2, (
                f"{dtype}: the largest number, {largest:.3g}, times your scale, {scale:.3g}, is"
                f" {scale * largest:.3g}; twice that is still within the limit {limit:g}, so small"
                " numbers are lost for nothing; how large may the scale be?")
            assert math.frexp(scale)[0] == 0.5, (
                f"{scale:.6g} is not a power of two; the multiplication itself would round. Round"
                " the exponent down to a whole number")
    try:
        scale = float(answer(torch.zeros(4, 4), torch.float8_e4m3fn))
    except (ZeroDivisionError, ValueError, OverflowError) as problem:
        raise AssertionError(
            f"your function fails on a tensor of zeros ({problem}), and the head's weights are"
            " initially zero") from None
    assert math.isfinite(scale) and scale > 0, (
        f"for a tensor of zeros, as the head's weights are at first, the scale is {scale}; any"
        " positive finite number will do there")
    ours, theirs, fixed = (trained_loss(choose) for choose in (answer, None, always_one))
    assert ours < theirs + 0.1 * (fixed - theirs), (
        f"trained with your scales the loss ends at {ours:.3f}, with float32 at {theirs:.3f}; the"
        f" gap must be below a tenth of that to {fixed:.3f}, which no scales give")
    print(f"loss: {ours:.4f} with your scales, {theirs:.4f} in float32, {fixed:.4f} without scales")


# ---- typical wrong answers: every check must refuse them ----


def _views_only(x8, weight8, grad8, product):
    return product(grad8, weight8.T), product(x8.T, grad8.T).T


def _not_transposed_back(x8, weight8, grad8, product):
    return (product(grad8, weight8.T.contiguous()),
            product(x8.T.contiguous(), grad8.T.contiguous()))


def _as_stored(x8, weight8, grad8, product):
    return product(grad8, weight8), product(x8, grad8).T


def _swapped(x8, weight8, grad8, product):
    return fp8_backward(x8, weight8, grad8, product)[::-1]


def _plain_float(x8, weight8, grad8, product):
    return grad8.float() @ weight8.float(), grad8.float().T @ x8.float()


def _exact_ratio(tensor, dtype):
    return torch.finfo(dtype).max / max(tensor.abs().max().item(), 1e-30)


def _rounded_up(tensor, dtype):
    return 2.0 ** math.ceil(math.log2(_exact_ratio(tensor, dtype)))


def _half(tensor, dtype):
    return choose_scale(tensor, dtype) / 2


def _without_abs(tensor, dtype):
    return choose_scale(tensor.clamp(min=0), dtype)


def _by_the_mean(tensor, dtype):
    return choose_scale(tensor.abs().mean(), dtype)


def _inverse(tensor, dtype):
    return 1 / choose_scale(tensor, dtype)


def _zero_forgotten(tensor, dtype):
    largest = tensor.abs().max().item()
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest))


def _one_format(tensor, dtype):
    return choose_scale(tensor, torch.float8_e4m3fn)


EXERCISES = {
    "1": dict(
        check=check_range,
        hints=[
            "The stored number is 2**9 times the weight. Which stored numbers are the extremes?",
            "The largest e4m3 is 448. The smallest above zero is subnormal: 2**-6 times 1/8.",
            "Divide both by the scale: 448 / 2**9 and 2**-9 / 2**9.",
            "448 / 512 is 7/8. A quotient of powers of two: subtract the exponents, -9 - 9.",
        ],
        solution=(0.875, 2.0**-18),
        right=[(0.88, 3.8e-6)],
        wrong=[(448.0, 2.0**-9), (448 * 512, 1.0), (0.9375, 2.0**-18), (0.875, 2.0**-15),
               (0.875, 2.0**-19), (2.0**-18, 0.875), 0.875],
    ),
    "2": dict(
        check=check_backward,
        hints=[
            "Write both gradients as ordinary matrix products first, with their shapes.",
            "grad_x = G W sums over the vocabulary V; grad_weight = G'X sums over the tokens T."
            " product(a, b) sums over the last dimension of both operands.",
            "For grad_x the weights are needed as (C, V): store them transposed. For the transposed"
            " grad_weight, (C, V), take x8 as (C, T) and grad8 as (V, T).",
            "product(grad8, weight8.T.contiguous()); product(x8.T.contiguous(), ...).T",
        ],
        solution=fp8_backward,
        wrong=[_views_only, _not_transposed_back, _as_stored, _swapped, _plain_float],
    ),
    "3": dict(
        check=check_scale,
        hints=[
            "Which number of the tensor decides how large the scale may be?",
            "The largest power of two s with s max|t| <= limit has the exponent"
            " floor(log2(limit / max|t|)).",
            "Take the largest absolute value as a Python number. If it is zero, return 1. Divide"
            " finfo(dtype).max by it. Take log2, round down, raise 2 to it.",
            "largest = tensor.abs().max().item(); 2.0 ** math.floor(math.log2(... / largest)), and"
            " something else where largest is 0.",
        ],
        solution=choose_scale,
        wrong=[always_one, _exact_ratio, _rounded_up, _half, _without_abs, _by_the_mean, _inverse,
               _zero_forgotten, _one_format],
    ),
}
