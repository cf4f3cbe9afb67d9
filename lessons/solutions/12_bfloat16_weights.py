"""Exercises of lesson 12: their checks, hints and solutions."""

import torch

# ---- 1: a sum in bfloat16 ----


def check_sum(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected the weight's last value, not {answer!r}") from None
    weight = torch.zeros((), dtype=torch.bfloat16)
    for _addition in range(1000):
        weight = (weight.float() + 0.003).bfloat16()
    meanings = {
        3.0: "that is float32's sum; in bfloat16 an addition below half the distance to the next"
             " number changes nothing",
        0.5: "between 0.5 and 1 neighbours are 1/256 = 0.0039 apart, and half of that is 0.00195:"
             " 0.003 still moves the weight, even too far",
        2.0: "between 1 and 2 neighbours are 1/128 = 0.0078 apart; is 0.003 more than half of it?",
        0.25: "between 0.25 and 0.5 neighbours are 1/512 = 0.00195 apart, less than 0.003",
        0.0: "the grid is finer near 0: the first additions are kept",
    }
    if abs(value - weight.item()) > 1e-6:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.02 else (
            "find the power of two from which half the distance between neighbours is more than"
            " 0.003; a bfloat16 number has 8 significant bits")
        raise AssertionError(f"{value:g} is not where the weight ends: {why}")


# ---- 2: a float32 update of two halves ----


def subtract(weight, remainder, change):
    upper = weight.view(torch.int16).int() << 16
    exact = (upper | (remainder.int() & 0xFFFF)).view(torch.float32) - change
    bits = exact.view(torch.int32)
    weight.copy_((bits >> 16).short().view(torch.bfloat16))
    remainder.copy_(bits.short())


def _exact(weight, remainder):
    upper = weight.view(torch.int16).int() << 16
    return (upper | (remainder.int() & 0xFFFF)).view(torch.float32)


def _unmasked(weight, remainder, change):
    upper = weight.view(torch.int16).int() << 16
    bits = ((upper | remainder.int()).view(torch.float32) - change).view(torch.int32)
    weight.copy_((bits >> 16).short().view(torch.bfloat16))
    remainder.copy_(bits.short())


def _added_unmasked(weight, remainder, change):
    upper = weight.view(torch.int16).int() << 16
    bits = ((upper + remainder.int()).view(torch.float32) - change).view(torch.int32)
    weight.copy_((bits >> 16).short().view(torch.bfloat16))
    remainder.copy_(bits.short())


def _rounds(weight, remainder, change):
    exact = _exact(weight, remainder) - change
    weight.copy_(exact)
    remainder.copy_(exact.view(torch.int32).short())


def _forgets(weight, remainder, change):
    bits = (weight.float() - change).view(torch.int32)
    weight.copy_((bits >> 16).short().view(torch.bfloat16))
    remainder.copy_(bits.short())


def _keeps_old_remainder(weight, remainder, change):
    bits = (_exact(weight, remainder) - change).view(torch.int32)
    weight.copy_((bits >> 16).short().view(torch.bfloat16))


def _adds(weight, remainder, change):
    subtract(weight, remainder, -change)


def _returns(weight, remainder, change):
    bits = (_exact(weight, remainder) - change).view(torch.int32)
    return (bits >> 16).short().view(torch.bfloat16), bits.short()


def _plain(weight, remainder, change):
    weight.copy_(weight.float() - change)


def _values_added(weight, remainder, change):
    bits = (weight.float() + remainder.float() / 2**16 - change).view(torch.int32)
    weight.copy_((bits >> 16).short().view(torch.bfloat16))
    remainder.copy_(bits.short())


def _viewed_wide(weight, remainder, change):
    upper = weight.view(torch.int32) << 16
    weight.copy_((upper | (remainder.int() & 0xFFFF)).view(torch.float32) - change)


def _values_not_bits(weight, remainder, change):
    exact = _exact(weight, remainder) - change
    weight.copy_((exact.view(torch.int32) >> 16).short())  # a number, not a pattern of bits
    remainder.copy_(exact.view(torch.int32).short())


def check_subtract(answer):
    assert callable(answer), f"expected the function subtract, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    start = torch.tensor([0.1, -0.1, 1.0, 0.0, -0.0, *torch.randn(59, generator=draw)]).bfloat16()
    weight, remainder = start.clone(), torch.zeros(64, dtype=torch.int16)
    exact = start.float()
    for step in range(20):
        change = 0.01 * torch.randn(64, generator=draw)
        kept = change.clone()
        before = weight.clone(), remainder.clone()
        try:
            answer(weight, remainder, change)
        except RuntimeError as problem:
            if "size" not in f"{problem}":
                raise
            raise AssertionError(
                f"{problem}: two 16-bit numbers viewed as a 32-bit type become one number. View the"
                " weight as int16, then widen with .int()") from None
        assert torch.equal(change, kept), "your function changes `change`; it should only read it"
        exact -= change
        if torch.equal(_exact(weight, remainder).view(torch.int32), exact.view(torch.int32)):
            continue
        slips = {
            "your remainder is widened with its sign: from 0x8000 on it is negative, and its upper"
            " 16 bits overwrite the weight's. Mask it with 0xFFFF": _unmasked,
            "your remainder is added with its sign: from 0x8000 on it is negative. Mask it with"
            " 0xFFFF": _added_unmasked,
            "your weight is rounded to the nearest, and the remainder then counts the difference"
            " twice. Cut it: shift the bits by 16 and view them as bfloat16": _rounds,
            "the update starts from the weight only; join it with its remainder first, which holds"
            " what earlier updates left": _forgets,
            "the remainder keeps its old bits; store the result's lower 16 bits in it":
                _keeps_old_remainder,
            "your change is added; it should be subtracted": _adds,
            "the weight moves, but the remainder stays as it was: that is plain bfloat16": _plain,
            "your remainder is added as a number, but it is bits: the lower half of the weight's"
            " 32": _values_added,
            "the bits are copied into the weight as if they were a number; view the int16 as"
            " bfloat16 first": _values_not_bits,
        }
        assert not all(torch.equal(*pair) for pair in zip(before, (weight, remainder),
                                                          strict=True)), (
            "weight and remainder are as before: store the result in both in place, with copy_")
        for why, slip in slips.items():
            mine = before[0].clone(), before[1].clone()
            slip(*mine, change)
            same = (torch.equal(one.view(torch.int16), other.view(torch.int16))
                    for one, other in zip(mine, (weight, remainder), strict=True))
            assert not all(same), f"after {step + 1} updates the pair is not float32's: {why}"
        wrong = (_exact(weight, remainder).view(torch.int32) != exact.view(torch.int32)).sum()
        raise AssertionError(
            f"after {step + 1} updates {wrong} of 64 pairs differ from float32's numbers: join the"
            " halves' bits as float32, subtract, then store the upper 16 bits and the lower 16")


# ---- 3: rounding at random ----


def rounded(numbers):
    bits = numbers.view(torch.int32) + torch.randint(0, 2**16, numbers.shape, dtype=torch.int32)
    return (bits >> 16).short().view(torch.bfloat16)


def _nearest(numbers):
    return numbers.bfloat16()


def _cut(numbers):
    return (numbers.view(torch.int32) >> 16).short().view(torch.bfloat16)


def _up(numbers):
    return ((numbers.view(torch.int32) + 0xFFFF) >> 16).short().view(torch.bfloat16)


def _coin(numbers):
    lower = numbers.view(torch.int32) & 0xFFFF
    up = (lower > 0) & (torch.rand(numbers.shape) < 0.5)
    return ((numbers.view(torch.int32) >> 16) + up).short().view(torch.bfloat16)


def _narrow(numbers):
    bits = numbers.view(torch.int32) + torch.randint(0, 2**15, numbers.shape, dtype=torch.int32)
    return (bits >> 16).short().view(torch.bfloat16)


def _noisy(numbers):
    return (numbers + 0.01 * torch.randn(numbers.shape)).bfloat16()


def _then_nearest(numbers):
    bits = numbers.view(torch.int32) + torch.randint(0, 2**16, numbers.shape, dtype=torch.int32)
    return bits.view(torch.float32).bfloat16()


def _one_draw(numbers):
    bits = numbers.view(torch.int32) + torch.randint(0, 2**16, (), dtype=torch.int32)
    return (bits >> 16).short().view(torch.bfloat16)


def train_memory(rounding):
    """Trains a memory of 64 pairs whose weights are rounded after each update; its errors."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(64, 32, generator=draw)
    right = 0.2 * torch.randn(32, 32, generator=draw)
    weight, errors = (0.2 * torch.randn(32, 32, generator=draw)).bfloat16(), []
    for _step in range(600):
        gap = weight.float() - right
        errors.append((keys @ gap).square().mean().item())
        weight = rounding(weight.float() - 0.002 * keys.T @ (keys @ gap) / 64)
    return errors


def check_rounded(answer):
    assert callable(answer), f"expected the function rounded, not {answer!r}"
    torch.manual_seed(0)
    for number in (1.0, -0.75, 0.0):
        result = answer(torch.full((64,), number))
        assert isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16, (
            "your function should return a bfloat16 tensor, not"
            f" {getattr(result, 'dtype', type(result).__name__)}")
        assert (result == number).all(), (
            f"{number:g} is a bfloat16 number already and should stay as it is, always")
    for number in (1.0 + 2**-9, 1.0 + 3 * 2**-9, -1.0 - 2**-9):
        numbers = torch.full((20_000,), number)
        result = answer(numbers)
        assert (numbers == number).all(), "your function changes its argument; it should not"
        low = 1.0 if abs(number) < 1 + 2**-7 else 1 + 2**-7
        outer = (result.float().abs() == low + 2**-7)
        assert (outer | (result.float().abs() == low)).all(), (
            f"{number:g} lies between two neighbours, {low:g} and {low + 2**-7:g}; some of your"
            " results are neither. Add random bits below the cut, then cut")
        wanted, share = (abs(number) - low) * 2**7, outer.float().mean().item()
        assert share not in (0.0, 1.0), (
            f"all {len(numbers):,} copies of {number:g} are rounded the same way; each should go"
            f" either way, away from zero with probability {wanted:g}, drawn separately")
        assert abs(share - wanted) < 0.02, (
            f"{100 * share:.0f}% of the copies of {number:g} are rounded away from zero instead of"
            f" {100 * wanted:.0f}%; the probability should be the number's place between its"
            " neighbours, the lower 16 bits divided by 65,536")
    mine, nearest = train_memory(answer), train_memory(_nearest)
    assert sum(mine[-50:]) < 0.5 * sum(nearest[-50:]), (
        f"with your rounding the memory's error ends at {sum(mine[-50:]) / 50:.2g}, with the"
        f" nearest at {sum(nearest[-50:]) / 50:.2g}; rounding at random should end far below")
    print(f"the memory's error: {mine[0]:.2g} at first, {sum(nearest[-50:]) / 50:.2g} with the"
          f" nearest, {sum(mine[-50:]) / 50:.2g} with yours")


EXERCISES = {
    "1": dict(
        check=check_sum,
        hints=[
            "How far apart are neighbouring bfloat16 numbers, and when is 0.003 rounded away?",
            "A bfloat16 number has 8 significant bits: between 2^k and 2^(k + 1) neighbours are"
            " 2^(k - 7) apart. An addition below half of that is lost.",
            "Half the distance is 2^(k - 8). Find the smallest k with 2^(k - 8) above 0.003; the"
            " weight stops when it reaches 2^k.",
            "2^-9 is 0.00195 and 2^-8 is 0.0039, so k = 0, ...",
        ],
        solution=1.0,
        wrong=[3.0, 0.5, 2.0, 0.25, 0, 0.768, "much"],
    ),
    "2": dict(
        check=check_subtract,
        hints=[
            "Which 32 bits is the float32 number made of?",
            "The weight's 16 bits, shifted up by 16, or'ed with the remainder's 16 bits without"
            " their sign.",
            "View the weight as int16, widen it with .int(), shift it; widen the remainder and mask"
            " it with 0xFFFF; view the result as float32. After the subtraction go the way back.",
            "bits = exact.view(torch.int32); the weight copies (bits >> 16).short(), viewed as"
            " bfloat16, and for the remainder ...",
        ],
        solution=subtract,
        wrong=[_unmasked, _added_unmasked, _rounds, _forgets, _keeps_old_remainder, _adds,
               _returns, _plain, _values_not_bits, _values_added, _viewed_wide,
               lambda weight, remainder, change: None],
    ),
    "3": dict(
        check=check_rounded,
        hints=[
            "What has to be added to the lower 16 bits so that a cut rounds up sometimes?",
            "Add a whole random number from 0 to 65,535 to the 32 bits: it carries into the upper"
            " half with a probability of the lower half divided by 65,536.",
            "View the numbers as int32, add torch.randint(0, 2**16, ...) of the same shape and"
            " type, shift by 16, view as bfloat16.",
            "bits = numbers.view(torch.int32) + torch.randint(0, 2**16, numbers.shape,"
            " dtype=torch.int32); then (bits >> 16).short() ...",
        ],
        solution=rounded,
        wrong=[_nearest, _cut, _up, _coin, _narrow, _noisy, _then_nearest, _one_draw,
               lambda numbers: numbers, lambda numbers: None],
    ),
}
