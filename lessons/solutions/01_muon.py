"""Exercises of lesson 01: checks, hints, solutions and typical wrong answers."""

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.load import load_snapshot

m01 = load_snapshot(load_manifest().get("01").script)

# ---- 1: the update from a gradient of rank one ----

RANK_ONE_RMS = 0.696436 / 8  # five rounds take 1 to 0.696436; 8 = 64 / sqrt(64)
WRONG_RMS = {
    1.0: "unit RMS needs all 64 singular values, and U has one",
    0.125: "the one singular value does not stay 1: read five rounds at 1 off the graph",
    0.696436: "that is the singular value after five rounds, not yet spread over the entries",
    0.696436 / 64: "that is NS(U) alone; Muon multiplies by sqrt(64)",
}


def check_1(answer):
    """The RMS within 3 %."""
    value = number(answer)
    for wrong, why in WRONG_RMS.items():
        assert abs(value / wrong - 1) > 0.03, f"{value:g} is too {size(value)}: {why}"
    assert abs(value / RANK_ONE_RMS - 1) < 0.03, (
        f"{value:g} is too {size(value)}; count the singular values of U, take the one through "
        f"five rounds, and spread it over 64 x 64 entries")


def size(value):
    """Which side of the right answer it is on."""
    return "large" if value > RANK_ONE_RMS else "small"


# ---- 2: one Muon step ----


def muon_step(weight, grad, buffer, lr, momentum):
    """The right one."""
    buffer.mul_(momentum).add_(grad)
    update = newton_schulz(grad + momentum * buffer)
    weight.sub_(lr * max(weight.shape) ** 0.5 * update)


def newton_schulz(matrix):
    """01's, which works on a batch of matrices, for one."""
    return m01.newton_schulz(matrix[None], torch.float32)[0]


def variant(weight, grad, buffer, lr, momentum, *, scale=None, dampened=False, nesterov=True,
            keep=True, sign=-1, orthogonal=True):
    """A Muon step with one thing wrong."""
    rows, cols = weight.shape
    summed = momentum * buffer + (1 - momentum if dampened else 1) * grad
    update = grad + momentum * summed if nesterov else summed
    if keep:
        buffer.copy_(summed)
    if orthogonal:
        update = newton_schulz(update)
    factor = max(rows, cols) ** 0.5 if scale is None else scale(rows, cols)
    weight.add_(sign * lr * factor * update)


def no_nesterov(*args):
    """What you orthogonalised is the buffer; Nesterov looks ahead: grad + momentum * buffer"""
    variant(*args, nesterov=False)


def dampened(*args):
    """Your gradient enters the buffer with weight 1 - momentum; Muon adds it whole"""
    variant(*args, dampened=True)


def forgotten_buffer(*args):
    """The first step is right, the second is not: the buffer must change in place"""
    variant(*args, keep=False)


def no_scale(*args):
    """The update lacks its factor, the root of the longer side"""
    variant(*args, scale=lambda rows, cols: 1)


def rows_scale(*args):
    """Your factor is the root of the rows; a wide matrix needs the root of its columns"""
    variant(*args, scale=lambda rows, cols: rows**0.5)


def ratio_scale(*args):
    """Your factor compares the sides; milestone 01 takes the root of the longer one"""
    variant(*args, scale=lambda rows, cols: max(1, rows / cols) ** 0.5)


def uphill(*args):
    """Your step climbs: the update is subtracted"""
    variant(*args, sign=1)


def not_orthogonal(*args):
    """Your update has the sizes of the momentum still; pass it through newton_schulz"""
    variant(*args, orthogonal=False)


WRONG_STEPS = [no_nesterov, dampened, forgotten_buffer, no_scale, rows_scale, ratio_scale, uphill,
               not_orthogonal]


def after_two_steps(step):
    """What two steps make of a square, a tall and a wide matrix."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((6, 6), (10, 4), (4, 10)):
        weight, buffer = torch.zeros(shape), torch.zeros(shape)
        for _ in range(2):
            with torch.no_grad():
                step(weight, torch.randn(shape, generator=generator), buffer, 0.1, 0.95)
        made.append(weight)
    return made


def muon_itself(weight, grad, buffer, lr, momentum):
    """The snapshot's optimizer, with the buffer handed in."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = grad
    optimizer = m01.Muon([parameter], lr=lr, momentum=momentum, bf16=False, compiled=False)
    optimizer.state[parameter]["momentum_buffer"] = buffer
    optimizer.step()
    weight.copy_(parameter.detach())


def check_2(answer):
    """Two steps on three shapes, against the snapshot's Muon."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    came, expected = after_two_steps(answer), after_two_steps(muon_itself)
    assert any(matrix.any() for matrix in came), (
        "the weight has not moved; change it in place (weight.sub_(...), not weight = ...)")
    if same(came, expected):
        return
    for wrong in WRONG_STEPS:
        assert not same(came, after_two_steps(wrong)), wrong.__doc__
    worst = max((a - b).abs().max().item() for a, b in zip(came, expected, strict=True))
    raise AssertionError(f"after two steps an entry is {worst:.2g} away from Muon's, at lr 0.1; "
                         "go through it in order: buffer, look-ahead, newton_schulz, factor, minus")


def same(some, others):
    """Whether the matrices agree to rounding."""
    return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(some, others, strict=True))


# ---- 3: the quintic that converges ----

CONVERGING = (15 / 8, -10 / 8, 3 / 8)


def check_3(answer):
    """The three coefficients to 1e-3, and the count."""
    values = [number(value) for value in answer] if isinstance(answer, tuple | list) else answer
    if torch.is_tensor(values):
        values = values.flatten().tolist()
    assert isinstance(values, list) and len(values) == 4, (
        f"(a, b, c, rounds) is expected, not {answer!r}")
    a, b, c, rounds = values
    for what, value, wanted in (("p(1)", a + b + c, 1), ("p'(1)", a + 3 * b + 5 * c, 0),
                                ("p''(1)", 6 * b + 20 * c, 0)):
        assert abs(value - wanted) < 1e-3, f"{what} is {value:.4g} with yours, not {wanted}"
    expected = rounds_needed(CONVERGING, 0.003)
    assert rounds == expected, (
        f"the coefficients are right, {rounds:g} rounds are not: apply p to 0.003 again and again, "
        "and stop when the value is 0.68 or more")


def rounds_needed(coefficients, start, low=0.68):
    """How often the quintic must be applied to bring `start` to `low` or above."""
    a, b, c = coefficients
    value, rounds = start, 0
    while value < low:
        value, rounds = a * value + b * value**3 + c * value**5, rounds + 1
    return rounds


def number(answer):
    """The answer as a float."""
    try:
        return float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"a number is expected, not {answer!r}") from None


EXERCISES = {
    "1": dict(
        check=check_1,
        hints=[
            "How many singular values of U are not zero? Only those can become about 1.",
            "The Frobenius norm of a rank-one matrix is its singular value, so Newton-Schulz starts"
            " at 1. The RMS of an m x n matrix is sqrt(sum of squared singular values / mn).",
            "Take 1 through five rounds: s. NS(U) has RMS s / 64. Multiply by sqrt(64).",
            "s is 0.696, so the RMS is 0.696 * 8 / 64.",
        ],
        solution=RANK_ONE_RMS,
        wrong=[1.0, 0.125, 0.696, 0.0109, 0.5],
    ),
    "2": dict(
        check=check_2,
        hints=[
            "Four things happen, in this order: buffer, look-ahead, orthogonalise, move.",
            "M <- momentum M + G;  U = G + momentum M;  W <- W - lr sqrt(max(m, n)) NS(U).",
            "buffer.mul_(...).add_(...), then the sum of grad and the decayed buffer, then "
            "newton_schulz, then weight.sub_(...): the trailing underscores change in place.",
            "buffer.mul_(momentum).add_(grad)\n"
            "update = newton_schulz(grad + momentum * buffer)\n"
            "scale = max(weight.shape) ** 0.5\n"
            "weight.sub_(...)",
        ],
        solution=muon_step,
        wrong=WRONG_STEPS,
    ),
    "3": dict(
        check=check_3,
        hints=[
            "Three conditions on three unknowns: a linear system.",
            "a + b + c = 1;  a + 3b + 5c = 0;  6b + 20c = 0.",
            "Solve it by hand or with torch.linalg.solve; then a while loop that applies p to 0.003"
            " and counts until the value is at least 0.68.",
            "The third condition gives b = -10/3 c; with the other two c = 3/8. The slope at 0 is"
            " a = 15/8, so each round less than doubles a small value.",
        ],
        solution=(*CONVERGING, 9),
        wrong=[(3.4445, -4.7750, 2.0315, 5), (1.5, -0.5, 0.0, 14), (*CONVERGING, 5),
               (*CONVERGING, 8)],
    ),
}
