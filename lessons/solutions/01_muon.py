"""Exercises of lesson 01: checks, hints, solutions and typical wrong answers."""

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

m01 = load_snapshot(load_manifest().get("01").script)

# ---- 1: an odd polynomial of the singular values ----

CUBIC, QUINTIC = (1.5, -0.5, 0.0), (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix, a, b, c, rounds):
    """The right one."""
    return orthogonalise_from(matrix / matrix.norm(), a, b, c, rounds)


def orthogonalise_from(X, a, b, c, rounds):
    """The rounds without the division."""
    for _ in range(rounds):
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
    return X


def entrywise(matrix, a, b, c, rounds):
    """Your powers are of entries; the third power of a matrix here is X @ X.mT @ X"""
    X = matrix / matrix.norm()
    for _ in range(rounds):
        X = a * X + b * X**3 + c * X**5
    return X


def not_normalised(matrix, a, b, c, rounds):
    """You did not divide by the Frobenius norm first: singular values above 1 run away"""
    return orthogonalise_from(matrix, a, b, c, rounds)


def normalised_each_round(matrix, a, b, c, rounds):
    """You divide by the norm in every round; once, before the first, is enough"""
    X = matrix
    for _ in range(rounds):
        X = X / X.norm()
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
    return X


def spectral_norm(matrix, a, b, c, rounds):
    """You divide by the largest singular value; take the Frobenius norm, which costs no SVD"""
    return orthogonalise_from(matrix / torch.linalg.matrix_norm(matrix, 2), a, b, c, rounds)


def no_fifth(matrix, a, b, c, rounds):
    """The cubic is right, the quintic is not: its last term is c times A @ A @ X"""
    return orthogonalise(matrix, a, b, 0.0, rounds)


def third_for_fifth(matrix, a, b, c, rounds):
    """The last term of yours is c A A, which is not (XX')² X: multiply by X once more"""
    X = matrix / matrix.norm()
    for _ in range(rounds):
        A = X @ X.mT
        X = a * X + (b + c) * A @ X
    return X


def square_of_entries(matrix, a, b, c, rounds):
    """Your A * A squares entries; the last term needs the matrix product A @ A"""
    X = matrix / matrix.norm()
    for _ in range(rounds):
        A = X @ X.mT
        X = a * X + (b * A + c * A * A) @ X
    return X


def exact(matrix, a, b, c, rounds):
    """Yours sets every singular value to 1; apply the polynomial with a, b and c"""
    P, _S, Qt = torch.linalg.svd(matrix, full_matrices=False)
    return P @ Qt


def five_rounds(matrix, a, b, c, rounds):
    """Yours makes five rounds, whatever `rounds` says"""
    return orthogonalise(matrix, a, b, c, 5)


def one_round(matrix, a, b, c, rounds):
    """Yours makes one round, whatever `rounds` says"""
    return orthogonalise(matrix, a, b, c, 1)


def round_too_many(matrix, a, b, c, rounds):
    """Yours makes one round too many"""
    return orthogonalise(matrix, a, b, c, rounds + 1)


def transposed(matrix, a, b, c, rounds):
    """Yours is the transpose of the right matrix; undo the transpose at the end"""
    return orthogonalise(matrix, a, b, c, rounds).mT


WRONG_POLYNOMIALS = [entrywise, not_normalised, normalised_each_round, spectral_norm, no_fifth,
                     third_for_fifth, square_of_entries, exact, five_rounds, one_round,
                     round_too_many, transposed]


def gram_from_the_right(matrix, a, b, c, rounds):
    """X' X does not fit a tall matrix on the left."""
    X = matrix / matrix.norm()
    for _ in range(rounds):
        A = X.mT @ X
        X = a * X + (b * A + c * A @ A) @ X
    return X


def divides_in_place(matrix, a, b, c, rounds):
    """Momentum itself would be divided."""
    matrix /= matrix.norm()
    return orthogonalise_from(matrix, a, b, c, rounds)


def results(function):
    """What it makes of a square, a tall and a wide matrix with both polynomials."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((6, 6), (10, 4), (4, 10)):
        matrix = torch.randn(shape, generator=generator)
        for coefficients in (CUBIC, QUINTIC):
            for rounds in (1, 5):
                given = matrix.clone()
                try:
                    made.append((shape, rounds, function(given, *coefficients, rounds)))
                except RuntimeError as problem:
                    raise AssertionError(
                        f"your products do not fit a matrix of shape {shape} ({problem}); the Gram"
                        " matrix that multiplies X from the left is X @ X.mT") from None
                assert given.equal(matrix), (
                    "Your function changes `matrix` itself, which may be the momentum that the next"
                    " step needs; make a new one: X = matrix / ...")
    return made


def check_1(answer):
    """Three shapes, two polynomials, one round and five."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    came, expected = results(answer), results(orthogonalise)
    for shape, _rounds, matrix in came:
        assert torch.is_tensor(matrix), (
            f"for a {shape} matrix yours returns {type(matrix).__name__}: return the matrix X")
    if same(came, expected):
        return
    for wrong in WRONG_POLYNOMIALS:
        assert not same(came, results(wrong)), wrong.__doc__
    for (shape, rounds, got), (_, _, wanted) in zip(came, expected, strict=True):
        assert got.shape == wanted.shape, (
            f"a {shape} matrix comes out as {tuple(got.shape)}; the shape must stay")
        values, right = (torch.linalg.svdvals(m.nan_to_num()).tolist() for m in (got, wanted))
        assert torch.allclose(got, wanted, atol=1e-4), (
            f"{rounds} rounds on a {shape} matrix give the largest singular value {values[0]:.3f} "
            f"and the smallest {values[-1]:.3f}, not {right[0]:.3f} and {right[-1]:.3f}")


def same(some, others):
    """Whether the matrices agree to rounding."""
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-4, equal_nan=True)
               for (_, _, a), (_, _, b) in zip(some, others, strict=True))


# ---- 2: the update from a gradient of rank one ----

RANK_ONE_RMS = 0.696436 / 8  # five rounds take 1 to 0.696436; 8 = 64 / sqrt(64)
WRONG_RMS = {
    1.0: "unit RMS needs all 64 singular values, and U has one",
    0.125: "the one singular value does not stay 1: the lesson prints it, 'quintic, from 1'",
    0.696436: "that is the singular value after five rounds, not yet spread over the entries",
    0.696436 / 64: "that is only NS(U); Muon multiplies by sqrt(64)",
}


def check_2(answer):
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


def number(answer):
    """The answer as a float."""
    try:
        return float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"a number is expected, not {answer!r}") from None


# ---- 3: beat AdamW in small batches ----

RATES = [0.01 * 2**k for k in range(11)]  # 0.01 to 10.24
GOAL = 0.88  # of AdamW's error


def memory_error(rule, steps=100, batch=16):
    """Each seed's final error over all pairs, weighted by frequency, at the best rate, and that
    rate, as the lesson's train_memory finds them."""
    often = 1 / torch.arange(1, 65)
    often /= often.sum()
    draws = [torch.Generator().manual_seed(seed) for seed in range(3)]
    keys, values = torch.stack([torch.randn(2, 64, 64, generator=draw) for draw in draws], 1)
    keys = keys / 8
    weights, state = torch.zeros(3, len(RATES), 64, 64), {}
    rates = torch.tensor(RATES).view(-1, 1, 1)
    for step in range(steps):
        pairs = torch.stack([often.multinomial(batch, True, generator=draw) for draw in draws])
        noise = torch.stack([torch.randn(batch, 64, generator=draw) for draw in draws])
        x, y = (table.gather(1, pairs[:, :, None].expand(-1, -1, 64)) for table in (keys, values))
        x, y = x[:, None], (y + noise)[:, None]
        grads = (x @ weights.mT - y).mT @ x / batch
        try:
            update = rule(grads, state)
        except RuntimeError as problem:
            raise AssertionError(
                f"your rule fails on grads of shape {tuple(grads.shape)} ({problem}); the lesson's"
                " newton_schulz takes any batch of matrices, m01.newton_schulz only (N, m, n)"
            ) from None
        assert torch.is_tensor(update) and update.shape == grads.shape, (
            f"a rule returns an update of the shape of grads, {tuple(grads.shape)}: three seeds, "
            f"{len(RATES)} rates, 64 x 64; yours returns {getattr(update, 'shape', update)}")
        weights = weights - rates * (1 - step / steps) * update
    errors = (keys[:, None] @ weights.mT - values[:, None]).square().mean(3) @ often
    errors = errors.nan_to_num(1e9, 1e9)
    best = errors.mean(0).argmin()
    return errors[:, best], RATES[best]


def adamw_rule(grads, state):
    """The lesson's AdamW."""
    state["step"] = step = state.get("step", 0) + 1
    mean = state.setdefault("mean", torch.zeros_like(grads)).lerp_(grads, 0.1)
    square = state.setdefault("square", torch.zeros_like(grads)).lerp_(grads.square(), 0.05)
    return mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)


def averaged(grads, state, beta):
    """Nesterov momentum."""
    return m01.nesterov_update(grads, state.setdefault("buffer", torch.zeros_like(grads)), beta)


def newton_schulz(matrices):
    """01's, for any batch."""
    return m01.newton_schulz(matrices.flatten(0, -3), torch.float32).view_as(matrices)


def shorter_momentum(grads, state):
    """Muon with a memory of five batches, not twenty."""
    return newton_schulz(averaged(grads, state, 0.8))


def record_rule(grads, state):
    """Muon as the record runs it."""
    return newton_schulz(averaged(grads, state, 0.95))


def no_momentum(grads, state):
    """Muon on bare gradients."""
    return newton_schulz(grads)


def only_momentum(grads, state):
    """No orthogonalisation."""
    return averaged(grads, state, 0.8)


def uphill(grads, state):
    """The wrong sign."""
    return -shorter_momentum(grads, state)


def too_small(grads, state):
    """Scaled far below the rates."""
    return 1e-4 * shorter_momentum(grads, state)


def one_matrix(grads, state):
    """Forgets that seeds and rates are trained side by side."""
    return newton_schulz(averaged(grads, state, 0.8))[0, 0]


def check_3(answer):
    """Trains the rule and AdamW in the memory."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    import lesson

    (errors, rate), (others, _rate) = memory_error(answer), memory_error(adamw_rule)
    error, adamw = errors.mean().item(), others.mean().item()
    if error <= GOAL * adamw:
        lesson.must_end_lower(errors, others, f"yours, at the rate {rate:.3g},", "AdamW",
                              "Far enough below on average, but not in every seed")
        return
    said = f"{error:.4f} is {abs(1 - error / adamw):.0%} {'below' if error < adamw else 'above'}"
    assert error < 1, (
        f"at its best rate it ends at {error:.3g}, above 1, the error of an empty memory: the"
        " update points uphill. It is subtracted, so return a direction like the gradient's")
    assert error < 0.9, (
        f"it ends at {error:.3g}, nearly 1, the error of an empty memory: the update is too small"
        f" for rates up to {RATES[-1]:g}; orthogonalised, it has singular values near 1")
    known = {rule: memory_error(rule)[0].mean().item() for rule in (record_rule, no_momentum)}
    why = "is the update orthogonal, and averaged over few enough batches?"
    if abs(error / known[record_rule] - 1) < 1e-3:
        why = "with 0.95 the average reaches back twenty batches, a fifth of the run: shorten it"
    elif abs(error / known[no_momentum] - 1) < 1e-3:
        why = ("without an average the noise of 16 pairs is orthogonalised too: keep a short one,"
               " in a buffer that stays in state")
    raise AssertionError(f"{said} AdamW's {adamw:.4f}, and the goal is 12 % below; {why}")


EXERCISES = {
    "1": dict(
        check=check_1,
        hints=[
            "What is the third power here, written with @ and .mT? What does it do to P S Q'?",
            "X³ stands for (XX')X, X⁵ for (XX')(XX')X. Only the start divides by the norm.",
            "X = matrix / matrix.norm(). Then, `rounds` times: A = X @ X.mT, and X becomes the sum "
            "of a X, b A X and c A A X.",
            "for _ in range(rounds):\n"
            "    A = X @ X.mT\n"
            "    X = a * X + (b * A + c * A @ A) @ X\n"
            "return ...",
        ],
        solution=orthogonalise,
        wrong=[*WRONG_POLYNOMIALS, gram_from_the_right, divides_in_place],
    ),
    "2": dict(
        check=check_2,
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
    "3": dict(
        check=check_3,
        hints=[
            "In the table, in batches of 16, Muon without momentum is already ahead of AdamW. What "
            "lies between no momentum and 0.95?",
            "A factor mu averages about 1 / (1 - mu) batches. 100 steps of 16 noisy pairs need an "
            "average over a handful of them.",
            "Keep a buffer in state, as muon_rule does; nesterov_update with a factor well below "
            "0.95; then newton_schulz.",
            "buffer = state.setdefault('buffer', torch.zeros_like(grads))\n"
            "return newton_schulz(m01.nesterov_update(grads, buffer, ...))  # five batches: 0.8",
        ],
        solution=shorter_momentum,
        wrong=[record_rule, no_momentum, only_momentum, adamw_rule, one_matrix, uphill, too_small],
    ),
}
