"""Exercises of lesson 12: their checks, hints and solutions."""

import torch

# ---- 1: what the model reads ----


def check_read(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number, not {answer!r}") from None
    meanings = {
        1.014: "that is the pair's float32 number; the model reads its upper half, a bfloat16"
               " number, and between 1 and 2 these are 1/128 apart",
        1.015625: "that is the bfloat16 number nearest to 1.014; 12 cuts the number, because the"
                  " remainder has to hold the rest",
        1.0: "that is where plain bfloat16 stays; in a pair, the remainder keeps each 0.001, until"
             " they add up to a whole distance between neighbours",
        1.109375: "that is 14 distances between neighbours; one addition is less than a distance",
        0.014: "that is what was added; the weight starts at 1",
    }
    if abs(value - 1.0078125) > 2e-4:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 2e-4 else (
            "add up in float32 first; then cut the sum to a bfloat16 number, which between 1 and 2"
            " is a multiple of 1/128")
        raise AssertionError(f"{value:g} is not what the model reads: {why}")


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


# ---- 3: a remainder of 8 bits ----


def _join_24(weight, remainder):
    return ((weight.view(torch.int16).int() << 16) | (remainder.int() << 8)).view(torch.float32)


def _store_24(weight, remainder, bits):
    weight.copy_((bits >> 16).short().view(torch.bfloat16))
    remainder.copy_(((bits >> 8) & 0xFF).to(torch.uint8))


def subtract_24(weight, remainder, change):
    exact = _join_24(weight, remainder) - change
    _store_24(weight, remainder, exact.view(torch.int32) + 0x80)


def _cut_24(weight, remainder, change):
    exact = _join_24(weight, remainder) - change
    _store_24(weight, remainder, exact.view(torch.int32))


def _rounds_the_weight(weight, remainder, change):
    exact = _join_24(weight, remainder) - change
    _store_24(weight, remainder, exact.view(torch.int32) + 0x80)
    weight.copy_(exact)


def _does_not_carry(weight, remainder, change):
    bits = (_join_24(weight, remainder) - change).view(torch.int32)
    _store_24(weight, remainder, bits)
    remainder.copy_((((bits + 0x80) >> 8) & 0xFF).to(torch.uint8))


def _lowest_bits(weight, remainder, change):
    bits = (_join_24(weight, remainder) - change).view(torch.int32)
    _store_24(weight, remainder, bits)
    remainder.copy_((bits & 0xFF).to(torch.uint8))


def _forgets_24(weight, remainder, change):
    _store_24(weight, remainder, (weight.float() - change).view(torch.int32) + 0x80)


def _not_shifted(weight, remainder, change):
    bits = (weight.view(torch.int16).int() << 16) | remainder.int()
    _store_24(weight, remainder, (bits.view(torch.float32) - change).view(torch.int32) + 0x80)


def _adds_24(weight, remainder, change):
    subtract_24(weight, remainder, -change)


def _plain_24(weight, remainder, change):
    weight.copy_(weight.float() - change)


def _returns_24(weight, remainder, change):
    weight, remainder = weight.clone(), remainder.clone()
    subtract_24(weight, remainder, change)
    return weight, remainder


def train_map(step):
    """The error of a linear map after 600 updates by step(weight, remainder, change)."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(64, 32, generator=draw)
    right = 0.2 * torch.randn(32, 32, generator=draw)
    weight = (0.2 * torch.randn(32, 32, generator=draw)).bfloat16()
    remainder = torch.zeros(32, 32, dtype=torch.uint8)
    for _step in range(600):
        gap = weight.float() - right
        step(weight, remainder, 0.002 * keys.T @ (keys @ gap) / 64)
    return (keys @ (weight.float() - right)).square().mean().item()


def check_subtract_24(answer):
    assert callable(answer), f"expected the function subtract_24, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    start = torch.tensor([0.1, -0.1, 1.0, 0.0, -0.0, *torch.randn(251, generator=draw)])
    weight, remainder = start.bfloat16(), torch.zeros(256, dtype=torch.uint8)
    for step in range(20):
        change = 0.01 * torch.randn(256, generator=draw)
        kept, before = change.clone(), (weight.clone(), remainder.clone())
        answer(weight, remainder, change)
        assert torch.equal(change, kept), "your function changes `change`; it should only read it"
        exact = (_join_24(*before) - change).view(torch.int32)
        down = exact & ~0xFF
        up = down + 0x100  # the next one away from zero; at a tie both are near
        found = _join_24(weight, remainder).view(torch.int32)
        nearest = torch.where(exact - down < 0x80, down, up)
        if ((found == nearest) | ((found == down) & (exact - down == 0x80))).all():
            continue
        slips = {
            "your last 8 bits are cut off, so each update pulls every weight a little towards zero,"
            " and nothing keeps the rest. Round them: add half of the last bit that stays, 0x80,"
            " before the shift": _cut_24,
            "your weight is rounded to the nearest bfloat16 number, and the remainder then counts"
            " the difference twice. Only the last 8 bits may be rounded": _rounds_the_weight,
            "where rounding up turns a remainder of 255 into 256, the weight should get the carry."
            " Round all 32 bits first, then split them": _does_not_carry,
            "your remainder holds the lowest 8 bits; it should hold bits 8 to 15, the 8 below the"
            " weight's": _lowest_bits,
            "the update starts from the weight only; join it with its remainder first": _forgets_24,
            "your remainder is joined as the lowest 8 bits; shift it by 8, below the weight's":
                _not_shifted,
            "your change is added; it should be subtracted": _adds_24,
            "the weight moves, but the remainder stays as it was: that is plain bfloat16":
                _plain_24,
        }
        assert not all(torch.equal(*pair) for pair in zip(before, (weight, remainder),
                                                          strict=True)), (
            "weight and remainder are as before: store the result in both in place, with copy_")
        for why, slip in slips.items():
            mine = before[0].clone(), before[1].clone()
            slip(*mine, change)
            if torch.equal(_join_24(*mine).view(torch.int32), found):
                raise AssertionError(f"after {step + 1} updates the 24 bits are not right: {why}")
        raise AssertionError(
            f"after {step + 1} updates {int((found != nearest).sum())} of 256 numbers are not the"
            " nearest with 24 bits: join, subtract in float32, round all 32 bits at once to a"
            " multiple of 256, then store bits 16 to 31 and bits 8 to 15")
    mine, plain = train_map(answer), train_map(_plain_24)
    assert mine < 0.5 * plain, (
        f"the linear map's error ends at {mine:.2g} with your function and at {plain:.2g} with"
        " plain bfloat16; 24 bits should end far below")
    print(f"the linear map's error after 600 updates: {mine:.3g} with your 24 bits,"
          f" {plain:.3g} with plain bfloat16")


EXERCISES = {
    "1": dict(
        check=check_read,
        hints=[
            "The pair is a float32 number, and the model reads its upper half. Which float32 number"
            " is it after fourteen additions?",
            "Between 1 and 2 neighbouring bfloat16 numbers are 1/128 = 0.0078 apart. Cutting goes"
            " to the one below, however near the one above is.",
            "1.014 lies between 1 + 1/128 and 1 + 2/128 = 1.0156; which of the two is below?",
            "1 + 1/128 = ...",
        ],
        solution=1 + 1 / 128,
        wrong=[1.014, 1.015625, 1.0, 1 + 14 / 128, 0.014, 1.01, "more"],
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
        check=check_subtract_24,
        hints=[
            "Exercise 2's pair loses nothing, so its number is cut. What is lost here, and what"
            " does cutting it do to all weights, update after update?",
            "The 32 bits are the weight's 16, the remainder's 8 and 8 zeros. After the subtraction"
            " the last 8 are no longer zero: add 0x80 to the 32 bits, so that cutting them rounds.",
            "1. (weight as int16, widened) << 16, or'ed with the remainder << 8, viewed as float32."
            " 2. Subtract. 3. View as int32, add 0x80. 4. Store bits 16 to 31 and bits 8 to 15.",
            "bits = exact.view(torch.int32) + 0x80; the weight copies (bits >> 16).short(), viewed"
            " as bfloat16; the remainder copies ((bits >> 8) & 0xFF).to(torch.uint8) ...",
        ],
        solution=subtract_24,
        wrong=[_cut_24, _rounds_the_weight, _does_not_carry, _lowest_bits, _forgets_24,
               _not_shifted, _adds_24, _plain_24, _returns_24, subtract,
               lambda weight, remainder, change: None],
    ),
}
