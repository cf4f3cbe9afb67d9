"""Exercises of lesson 10d: their checks, hints and solutions."""

import torch
import torch.nn.functional as F

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

m10f = load_snapshot(load_manifest().get("10f").script)

# ---- 1: tokens of a growing batch ----


def check_tokens(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of tokens, not {answer!r}") from None
    meanings = {
        210_000: "that is 35 steps in each stage; the 5 further steps come after the stages, which"
                 " have 34, 33 and 33",
        1_712_000: "a step's 1,000 tokens are those of all its rows; do not multiply by eight",
        105_000: "that is without growth: all 105 steps as in the first stage",
        199_000: "the 5 further steps are missing, and the first stage has 34 steps: step 33 is in"
                 " it, because 3 x 33 / 100 rounds down to 0",
        200_000: "the 5 further steps are missing, and a third of 100 steps is not a whole number",
        215_000: "a third of 100 steps is not a whole number: the first stage has 34 steps,"
                 " because 3 x 33 / 100 rounds down to 0",
        204_000: "the further steps are as large as the last stage's, not as the first one's",
        219_000: "the further steps do not grow again: they are as large as the last stage's",
        315_000: "that is 105 steps of the last stage's size",
        216_000: "the third stage has 33 steps; the extra one of 100 is in the first stage",
        214: "count tokens, not thousands",
    }
    if value != 214_000:
        raise AssertionError(
            f"expected the tokens of all 105 steps, got {value:,.0f}; "
            + meanings.get(value, "count the steps of each stage by its formula, rounded down"))


# ---- 2: the rate's multiplier ----


def multiplier(step, steps, peaks, cooldown, final):
    if step >= steps:
        return final
    remaining = min(1.0, (1 - step / steps) / cooldown)
    return peaks[len(peaks) * step // steps] * remaining + (1 - remaining) * final


def _one_peak(step, steps, peaks, cooldown, final):
    return multiplier(step, steps, peaks[:1] * len(peaks), cooldown, final)


def _scales_all(step, steps, peaks, cooldown, final):
    at = min(len(peaks) - 1, len(peaks) * step // steps)
    return peaks[at] * multiplier(step, steps, [1.0] * len(peaks), cooldown, final)


def _cooldown_from_the_start(step, steps, peaks, cooldown, final):
    return multiplier(step, steps, peaks, 1.0, final)


def _rounds_to_nearest(step, steps, peaks, cooldown, final):
    stage = min(len(peaks) - 1, round(len(peaks) * step / steps))
    return multiplier(step, steps, [peaks[stage]] * len(peaks), cooldown, final)


def _to_zero(step, steps, peaks, cooldown, final):
    return multiplier(step, steps, peaks, cooldown, 0.0)


def _cooldown_turned(step, steps, peaks, cooldown, final):
    return multiplier(step, steps, peaks, 1 - cooldown, final)


def _without_cooldown(step, steps, peaks, cooldown, final):
    return final if step >= steps else peaks[len(peaks) * step // steps]


def _mixed_up(step, steps, peaks, cooldown, final):
    remaining = min(1.0, max(0.0, 1 - step / steps) / cooldown)
    return final if step >= steps else (
        peaks[len(peaks) * step // steps] * (1 - remaining) + remaining * final)


def _falls_on(step, steps, peaks, cooldown, final):
    remaining = min(1.0, (1 - step / steps) / cooldown)
    return peaks[min(len(peaks) - 1, len(peaks) * step // steps)] * remaining + (
        1 - remaining) * final


def _floor(step, steps, peaks, cooldown, final):
    remaining = min(1.0, (1 - step / steps) / cooldown)
    return final if step >= steps else peaks[len(peaks) * step // steps] * max(remaining, final)


def _thirds(step, steps, peaks, cooldown, final):
    remaining = min(1.0, (1 - step / steps) / cooldown)
    return final if step >= steps else peaks[3 * step // steps] * remaining + (
        1 - remaining) * final


def rates(function, setting):
    """{step: multiplier} at the steps where something changes."""
    steps, found = setting[0], {}
    for step in (0, steps // 3, steps // 3 + 1, steps // 2 + 1, 2 * steps // 3,
                 2 * steps // 3 + 1, steps - 1, steps, steps + 39):
        try:
            found[step] = function(step, *setting)
        except IndexError:
            raise AssertionError(
                f"at step {step} of {steps} your function looks beyond the {len(setting[1])} peaks;"
                + (" after the last step the rate is `final`" if step >= steps else
                   " there are as many stages as peaks, not always three")) from None
        assert isinstance(found[step], int | float), (
            f"at step {step} your function returns {found[step]!r}; return a number")
    return found


def alike(some, others):
    return all(abs(some[step] - others[step]) < 1e-6 for step in some)


def check_multiplier(answer):
    assert callable(answer), f"expected the function multiplier, not {answer!r}"
    peaks = [1.0, 1.51, 1.93]
    slips = {
        "your rate has the same peak in every stage; take the stage's": _one_peak,
        "your peak also multiplies `final`; the rate falls to `final` itself": _scales_all,
        "your rate falls from the first step on; it should fall in the last `cooldown` of the"
        " steps": _cooldown_from_the_start,
        "your stages change half a stage early: round the stage's number down": _rounds_to_nearest,
        "your rate falls to 0; it should fall to `final`": _to_zero,
        "your rate starts to fall at the fraction `cooldown`; it should fall during the last"
        " `cooldown` of the steps": _cooldown_turned,
        "your rate does not fall before the last step; `cooldown` is a fraction of the steps, so"
        " remaining = (1 - step / steps) / cooldown": _without_cooldown,
        "your `remaining` is the share of `final`; it should be the peak's": _mixed_up,
        "your rate goes on falling after the last scheduled step; it should be `final` then":
            _falls_on,
        "your rate falls towards 0 and stops at a floor; it should approach `final` along a line":
            _floor,
        "your stages are thirds of the steps; there are as many stages as peaks": _thirds,
    }
    for setting in ((2050, peaks, 0.55, 0.1), (100, [1.0, 1.3, 1.6, 1.8], 0.4, 0.2)):
        found, rights = rates(answer, setting), rates(multiplier, setting)
        for step, right in rights.items():
            if abs(found[step] - right) > 1e-6:
                why = "peak * remaining + final * (1 - remaining), with remaining from 1 down to 0"
                for name, slip in slips.items():
                    if alike(found, rates(slip, setting)):
                        why = name
                raise AssertionError(f"at step {step} of {setting[0]} the multiplier is"
                                     f" {right:.6f}, and yours is {found[step]:.6f}: {why}")


# ---- 3: two tokens after the match ----

NAMES, TRIPLES, ROWS, STEPS, WIDTH = 16, 12, 32, 120, 64


def offset_by(k, n):
    parts = list(k.chunk(4, dim=-1))
    for i in (1, 3):
        parts[i] = torch.cat((parts[i][:, :n], parts[i][:, : k.size(1) - n]), dim=1)
    return torch.cat(parts, dim=-1)


def _by_one(k, n):
    return offset_by(k, 1)


def _round_about(k, n):
    parts = k.chunk(4, dim=-1)
    return torch.cat((parts[0], parts[1].roll(n, 1), parts[2], parts[3].roll(n, 1)), dim=-1)


def _all_channels(k, n):
    return torch.cat((k[:, :n], k[:, : k.size(1) - n]), dim=1)


def _rotating_channels(k, n):
    halves = k.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)
    return offset_by(halves, n).unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)


def _second_half(k, n):
    rotating, fixed = k.chunk(2, dim=-1)
    return torch.cat((rotating, torch.cat((fixed[:, :n], fixed[:, : k.size(1) - n]), 1)), -1)


def _into_the_future(k, n):
    return offset_by(k.flip(1), n).flip(1)


def _zeros_first(k, n):
    parts = list(k.chunk(4, dim=-1))
    for i in (1, 3):
        parts[i] = F.pad(parts[i], (0, 0, 0, 0, n, 0))[:, : k.size(1)]
    return torch.cat(parts, dim=-1)


def _sixteen_channels(k, n):
    new = k.clone()
    for channels in (slice(4, 8), slice(12, 16)):
        new[:, n:, :, channels] = k[:, : k.size(1) - n, :, channels]
    return new


def _minus_n(k, n):
    parts = list(k.chunk(4, dim=-1))
    for i in (1, 3):
        parts[i] = torch.cat((parts[i][:, :n], parts[i][:, :-n]), dim=1)
    return torch.cat(parts, dim=-1)


def _in_place(k, n):
    for part in k.chunk(4, dim=-1)[1::2]:
        for t in range(n, k.size(1)):  # what an overlapping copy does
            part[:, t] = part[:, t - n]
    return k


def error_with(offset):
    """The share of wrong answers of one attention layer on rows of name, filler, number; each name
    has one number in a row, and is asked for when it occurs again."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    args = m10f.Hyperparameters(model_dim=WIDTH, num_heads=1, window_pattern="L",
                                attention_kernel="dense")
    rotary = m10f.Rotary(WIDTH, 3 * TRIPLES)
    rotary.set_window(args.window_start, args)
    rotary.scale = 0.25
    attention = m10f.CausalSelfAttention(args, rotary, 0)
    embed, head = (torch.nn.Embedding(3 * NAMES, WIDTH) for _ in range(2))
    torch.nn.init.zeros_(head.weight)
    params = [param for part in (attention, embed, head) for param in part.parameters()]
    adam, wrong = torch.optim.Adam(params, betas=(0.9, 0.95)), []
    mask = torch.ones(3 * TRIPLES, 3 * TRIPLES, dtype=torch.bool).tril()
    own, m10f.offset_keys = m10f.offset_keys, offset
    try:
        for step in range(STEPS):
            names, fillers = (torch.randint(NAMES, (ROWS, TRIPLES), generator=draw)
                              for _ in range(2))
            numbers = torch.randint(NAMES, (ROWS, NAMES), generator=draw).gather(1, names)
            tokens = torch.stack((names, NAMES + fillers, 2 * NAMES + numbers), 2).flatten(1)
            again = (names[:, :, None] == names[:, None]).tril(-1).any(-1)
            x = m10f.norm(embed(tokens))
            x = x + attention(m10f.norm(x), None, dict(value=1.0, output=1.0), mask)
            logits = (m10f.norm(x) @ head.weight.T)[:, ::3][again]
            loss = F.cross_entropy(logits, 2 * NAMES + numbers[again])
            adam.param_groups[0]["lr"] = 0.03 * min(1, 2 * (STEPS - step) / STEPS)
            adam.zero_grad()
            loss.backward()
            adam.step()
            wrong.append((logits.argmax(-1) != 2 * NAMES + numbers[again]).float().mean().item())
    finally:
        m10f.offset_keys = own
    return sum(wrong[-10:]) / 10


def check_offset(answer):
    assert callable(answer), f"expected the function offset_by, not {answer!r}"
    k = torch.arange(6.0).view(1, 6, 1, 1).expand(2, 6, 3, 32).contiguous()  # k_t = t everywhere
    for n in (1, 2, 0):
        before = k.clone()
        try:
            found = answer(before, n)
        except RuntimeError:
            if n:
                raise
            raise AssertionError(
                "with n = 0 your function fails: k[:, :-0] is empty, not all of k. End the slice at"
                " k.size(1) - n") from None
        assert isinstance(found, torch.Tensor) and found.shape == k.shape, (
            f"for keys of shape (2, 6, 3, 32) your function returns {found!r:.60}; return keys of"
            " that shape")
        assert torch.equal(before, k), (
            "your function writes into k itself: a copy within one tensor may read what it has just"
            " written. Build a new tensor")
        parts = {name: part[0, :, 0, 0].tolist() for name, part in zip(
            ("0 to D/4", "D/4 to D/2", "D/2 to 3D/4", "3D/4 to D"), found.chunk(4, -1),
            strict=True)}
        wanted = {name: part[0, :, 0, 0].tolist() for name, part in zip(
            parts, offset_by(k, n).chunk(4, -1), strict=True)}
        for name, values in parts.items():
            right = [int(value) for value in wanted[name]]
            assert values == wanted[name], (
                f"with k_t = t and n = {n}, channels {name} should hold {right}, and yours hold"
                f" {[int(value) for value in values]}: " + (
                    "these channels rotate and stay" if name in ("0 to D/4", "D/2 to 3D/4") else
                    "these channels are fixed; each holds the value of n tokens before, and the"
                    " first n tokens keep their own"))
    draw = torch.randn(2, 6, 3, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(answer(draw, 2), offset_by(draw, 2)), (
        "with random keys your function mixes up channels, heads or rows; k_t = t hides that")
    ours, by_one = error_with(lambda k: answer(k, 2)), error_with(m10f.offset_keys)
    assert ours < by_one / 3, (
        f"expected less than a third of the errors with an offset of one, {by_one:.0%}, and yours"
        f" are {ours:.0%}")
    print(f"wrong answers after {STEPS} steps: {ours:.0%} with your offset of two,"
          f" {by_one:.0%} with an offset of one")


EXERCISES = {
    "1": dict(
        check=check_tokens,
        hints=[
            "How many of the 105 steps are in each stage?",
            "A step's stage is 3 x step / 100, rounded down, and its tokens are 1,000 x (stage + 1)"
            " but at most 3,000.",
            "Steps 0 to 33 are in the first stage, 34 to 66 in the second, 67 to 99 in the third;"
            " 100 to 104 come after the stages.",
            "34 x 1,000 + 33 x 2,000 + 33 x 3,000 + 5 x 3,000 = ...",
        ],
        solution=214_000,
        wrong=[210_000, 1_712_000, 105_000, 199_000, 200_000, 215_000, 204_000, 219_000, 315_000,
               216_000, 214, "many"],
    ),
    "2": dict(
        check=check_multiplier,
        hints=[
            "Which three things depend on the step: the stage, the share that remains, or both?",
            "remaining = min(1, (1 - step / steps) / cooldown); the stage is"
            " len(peaks) * step / steps, rounded down.",
            "Return `final` from step `steps` on. Before that, take the stage's peak and mix it"
            " with `final` by `remaining`.",
            "peaks[len(peaks) * step // steps] * remaining + (1 - remaining) * final",
        ],
        solution=multiplier,
        wrong=[_one_peak, _scales_all, _cooldown_from_the_start, _rounds_to_nearest, _to_zero,
               _cooldown_turned, _without_cooldown, _mixed_up, _falls_on, _floor, _thirds,
               lambda step, steps, peaks, cooldown, final: peaks[len(peaks) * step // steps],
               lambda step, steps, peaks, cooldown, final: None],
    ),
    "3": dict(
        check=check_offset,
        hints=[
            "Which quarters of the channels are fixed, and which token's values should they hold?",
            "Channels D/4 to D/2 and 3D/4 to D: new k_t = k_(t - n) for t >= n, and k_t before.",
            "Cut k into four along its channels. Of parts 1 and 3, join the first n tokens and all"
            " but the last n along the tokens. Join the four parts again.",
            "parts = list(k.chunk(4, dim=-1)); parts[i] = torch.cat((parts[i][:, :n],"
            " parts[i][:, : k.size(1) - n]), dim=1) for i in (1, 3); ...",
        ],
        solution=offset_by,
        wrong=[_by_one, _round_about, _all_channels, _rotating_channels, _second_half,
               _into_the_future, _zeros_first, _in_place, _sixteen_channels, _minus_n,
               lambda k, n: None],
    ),
}
