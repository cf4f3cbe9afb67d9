"""Exercises of lesson 05o: their checks, hints and solutions."""

import math
import timeit
from functools import cache

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

# ---- 1: tiles of 64 x 256 for 768 rows ----


def check_tiles(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of tiles, not {answer!r}") from None
    meanings = {
        36: "that is all of them; those wholly above the diagonal are mirror images",
        18: "half would be right if no tile straddled the diagonal, but many of these do",
        21: "that is the count for square tiles of 128; these have other sides",
        12: "that is only the first column of tiles, or a count of the skipped ones",
        15: "that leaves out tiles that the diagonal runs through; they hold entries nobody else"
            " computes",
    }
    if value != 24:
        raise AssertionError(
            f"expected the number of tiles that are not wholly above the diagonal, got {value:g};"
            f" {meanings.get(value, 'draw the three columns of tiles and go down each')}")


# ---- 2: only the tiles that are needed ----


def lower_tile(program):
    row = (math.isqrt(8 * program + 1) - 1) // 2
    return row, program - row * (row + 1) // 2


def _row_by_row(program):
    row = 0
    while program > row:
        row += 1
        program -= row
    return row, program


def check_lower_tile(answer):
    assert callable(answer), f"expected the function lower_tile, not {answer!r}"
    for side in (1, 2, 3, 6, 24):
        count = side * (side + 1) // 2
        seen = []
        for program in range(count):
            found = answer(program)
            assert found is not None, "the function returns nothing; return (row, column)"
            row, column = (int(number) for number in found)
            assert 0 <= column <= row, (
                f"program {program} got row {row}, column {column}, which is not on or below the"
                " diagonal; column must lie between 0 and row")
            seen.append((row, column))
        twice = [tile for tile in seen if seen.count(tile) > 1]
        assert not twice, (
            f"tile {twice[0]} is computed by {seen.count(twice[0])} programs; each tile needs"
            " exactly one, so rows 0, 1, 2 ... take 1, 2, 3 ... programs")
        outside = [tile for tile in seen if tile[0] >= side]
        assert not outside, (
            f"the first {count} programs must fill a triangle of {side} rows of tiles, but one of"
            f" them got {outside[0]}; finish a row before you begin the next")
        order = [tile for tile, right in zip(seen, sorted(seen), strict=True) if tile != right]
        assert not order, (
            f"program {seen.index(order[0])} got {order[0]}; each tile has one program, but in a"
            " row the columns go from 0 to the diagonal")
    took = min(timeit.repeat(lambda: answer(10**14), number=1, repeat=2))  # others may disturb
    assert took < 0.2, (
        f"program 10^14 takes {took:.1f} s: its row is number 14,142,135, so a loop over rows takes"
        " that many turns, and for 2^60 a hundred times as many; solve r (r + 1) / 2 <= program"
        " for r with math.isqrt")
    for program in (10**9, 2**60 - 1, (2**30 + 1) * 2**29 - 1, (2**30 + 1) * 2**29):
        row, column = answer(program)
        assert row * (row + 1) // 2 + column == program and 0 <= column <= row, (
            f"program {program} got ({row}, {column}); small numbers are right, but here a"
            " floating-point root is not exact: use math.isqrt")


# ---- 3: a gate that starts at 1 ----

STEPS, LENGTH, WINDOW, CHANNELS = 100, 24, 8, 4


def open_gate(x, weight):
    return 2 * (x[..., : weight.size(1)] @ weight.T).sigmoid()


def _record_gate(x, weight):
    return (x[..., : weight.size(1)] @ weight.T).sigmoid()


def _never_silent(x, weight):
    return 0.5 + (x[..., : weight.size(1)] @ weight.T).sigmoid()


def _always_open(x, weight):
    return torch.ones(*x.shape[:-1], weight.size(0)) + 0 * weight.sum()


def _one_for_all_heads(x, weight):
    return open_gate(x, weight).mean(-1, keepdim=True)


def _cut_from_the_gradient(x, weight):
    return open_gate(x, weight.detach()) + 0 * weight.sum()


def _last_channels(x, weight):
    return 2 * (x[..., -weight.size(1) :] @ weight.T).sigmoid()


def head_batch(count):
    """Numbers and flags (B, T, 16); the target is the number before if flagged, else 0."""
    x = torch.zeros(count, LENGTH, 16)
    flags, numbers = torch.rand(count, LENGTH) < 0.25, torch.randn(count, LENGTH)
    x[..., 0], x[..., 1], x[..., 2] = flags, numbers, 1
    return x, flags * numbers.roll(1, 1)


def error_with(gate, seed):
    """Trains one head of 05o behind a gate; the mean squared error at the end."""
    module = load_snapshot(load_manifest().get("05o").script)
    args = module.Hyperparameters(num_heads=1, model_dim=16, attention_scale=15 / 16)
    torch.manual_seed(seed)
    head = module.CausalSelfAttention(args, module.Rotary(16, LENGTH))
    torch.nn.init.normal_(head.c_qkvo.data[3], std=0.1)
    weight = torch.nn.Parameter(torch.zeros(1, CHANNELS))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - WINDOW)
    adam = torch.optim.Adam([*head.parameters(), weight], betas=(0.9, 0.95))
    for step in range(STEPS + 1):
        x, y = head_batch(32)
        # With one head the gate may as well stand behind the output matrix.
        output = (head(x, None, mask) * gate(x, weight))[..., 0]
        loss = (output - y)[:, 1:].square().mean()
        if step < STEPS:
            adam.param_groups[0]["lr"] = 0.05 * min(1, 2 * (STEPS - step) / STEPS)
            loss.backward()
            adam.step()
            adam.zero_grad()
    return loss.item()


@cache
def errors_without():
    return [error_with(_always_open, seed) for seed in range(3)]


def check_gate(answer):
    import lesson

    assert callable(answer), f"expected the function open_gate, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 16, generator=generator), torch.zeros(3, CHANNELS)
    gates = answer(x, weight)
    assert gates is not None, "the function returns nothing; return the gates, (B, T, H)"
    assert tuple(gates.shape) == (2, 5, 3), (
        f"expected gates of shape (B, T, H) = (2, 5, 3), one for each head, got"
        f" {tuple(gates.shape)}; weight has a row for each head")
    assert torch.allclose(gates, torch.ones(2, 5, 3)), (
        f"with a weight of zeros every gate must be 1, yours go from {gates.min():.3g} to"
        f" {gates.max():.3g}; what does a sigmoid give at 0?")
    weight = torch.randn(3, CHANNELS, generator=generator)
    other = x.clone()
    other[..., CHANNELS:] = 0
    assert torch.allclose(answer(x, weight), answer(other, weight)), (
        f"the gates should read only the first {CHANNELS} channels of x, as many as weight has"
        " columns; yours change with later ones")
    ours, theirs = [error_with(answer, seed) for seed in range(3)], errors_without()
    lesson.must_end_lower(ours, theirs, "the error with your gate", "the error without one",
                          "Can your gate come close to 0, and does weight get a gradient?",
                          0.8 * sum(theirs) / 3)  # so that at most a fifth is left


EXERCISES = {
    "1": dict(
        check=check_tiles,
        hints=[
            "There are 12 rows of tiles but only 3 columns. Go down one column at a time.",
            "A tile is skipped if row + 64 <= column, where row and column are its first entry's.",
            "Column 0 skips nothing. In column 256 the tiles of rows 0, 64, 128 and 192 are"
            " skipped. Do column 512.",
            "12 + 8 + 4.",
        ],
        solution=24,
        wrong=[36, 18, 21, 12, 15, "many"],
    ),
    "2": dict(
        check=check_lower_tile,
        hints=[
            "Number the tiles row by row: 0 | 1 2 | 3 4 5 | ... Which number begins row r?",
            "Row r begins with program r (r + 1) / 2. You look for the largest r whose beginning is"
            " not beyond the program.",
            "Solve r (r + 1) / 2 <= p: r is the whole part of (sqrt(8 p + 1) - 1) / 2. The column"
            " is what remains after the row's beginning.",
            "row = (math.isqrt(8 * program + 1) - 1) // 2; column = program - row * (row + 1) // 2",
        ],
        solution=lower_tile,
        wrong=[
            lambda program: divmod(program, 6),
            lambda program: (int(program**0.5), program - int(program**0.5) ** 2),
            lambda program: lower_tile(program)[::-1],
            lambda program: (lower_tile(program)[0], 0),
            lambda program: (lower_tile(program)[0], lower_tile(program)[0]
                             - lower_tile(program)[1]),
            _row_by_row,
            lambda program: (program, 0),
            lambda program: (int(((8 * program + 1) ** 0.5 - 1) / 2),
                             program - int(((8 * program + 1) ** 0.5 - 1) / 2)
                             * (int(((8 * program + 1) ** 0.5 - 1) / 2) + 1) // 2),
        ],
    ),
    "3": dict(
        check=check_gate,
        hints=[
            "A sigmoid of 0 is a half. What factor makes that 1, and is 0 still within reach?",
            "gate_h = 2 sigmoid(w_h . x[:n]), where n is the number of columns of weight.",
            "Take as many channels of x as weight has columns. Multiply by the transposed weight."
            " Then the sigmoid, times 2.",
            "return 2 * (x[..., : weight.size(1)] @ weight.T)....",
        ],
        solution=open_gate,
        wrong=[_record_gate, _never_silent, _always_open, _one_for_all_heads,
               _cut_from_the_gradient, _last_channels],
    ),
}
