"""Schedules as functions of the step s, from 0, and a milestone's features and numbers f."""

import math


def lr_multiplier(f, s):
    """What rates are multiplied by in step s."""
    if f.rates in ("cooldown", "stages"):
        y = min(1, max(0, (1 - s / f.scheduled_steps) / f.cooldown_frac))
        peaks = (1, f.second_stage_peak, f.third_stage_peak) if f.rates == "stages" else (1, 1, 1)
        return peaks[min(2, stage(f, s))] * y + f.final_lr_multiplier * (1 - y)
    warmup = f.warmup_steps if f.rates != "no warm-up" else 0
    if s < warmup:
        return (s + 1) / warmup
    share = (s - warmup) / (f.train_steps - warmup)
    if f.rates == "line":  # to 1 / 11
        return (0.1 + 1 - share) / 1.1
    if f.rates == "cosine":
        return (1 + math.cos(math.pi * share)) / 2
    return min(1, (f.train_steps - s) / f.cooldown_steps)  # arXiv 2405.18392


def stage(f, s):
    """The third of the schedule in which step s is, 3 after it; until 10d of one step more."""
    return min(3, 3 * s // (f.scheduled_steps + (f.rates != "stages")))


def muon_momentum(f, s):
    """From 0.85 to 0.95, record #9; and back over the last steps, record #39."""
    if f.momentum != "warms up":
        return f.muon_momentum
    share = min(1, s / f.momentum_warmup_steps)
    if f.momentum_cooldown_steps:
        share = min(share, (f.train_steps - s) / f.momentum_cooldown_steps)
    return f.muon_momentum_start + (f.muon_momentum - f.muon_momentum_start) * share


def window(f, s):
    """Tokens of the long window in step s, and in the validation before it."""
    x = s / (f.scheduled_steps or f.train_steps)
    if f.windows == "64 tokens":  # record #13; 1792 is 28 of them
        return 64 * math.floor(1 + 27 * x)
    if f.windows == "tiles":  # record #16
        return 128 * math.floor(1 + 13.5 * x)
    if f.windows == "tiles, rounded up":  # record #19
        return 128 * max(1, math.ceil(13.5 * x - 1e-12))
    last = stage(f, s) if f.rates == "stages" else 3 if s >= f.train_steps else min(2, stage(f, s))
    return stage_windows(f)[last] if f.scale == "yarn" else stage_windows(f)[min(2, last)]


def stage_windows(f):
    """Windows of the three stages, and from 06b of what follows them. Record #29."""
    found = [f.window_start + k * f.window_growth for k in range(3)]
    return found + [f.window_end] if f.scale == "yarn" else found


def target_weights(f, s):
    """Weights of the next targets (record #53) and, last, of the prefix (record #88)."""
    x, which = s / f.scheduled_steps, stage(f, s)
    second, third = f.second_target_weight, f.third_target_weight
    found = ([1, second, third * (1 - 3 * x)], [1, second * (2 - 3 * x)], [1], [1])[which]
    return found + [f.prefix_weight * (1, 2 - 3 * x, 0, 0)[which]] if f.prefixes else found


def last_tied_step(f):
    """The step after which embedding and head part: an odd one, in which Adam moves (#53, #54)."""
    return math.ceil(f.scheduled_steps * f.tied_frac) | 1
