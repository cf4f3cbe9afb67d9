"""Split what each idea gained by itself into fewer tokens and faster tokens.

Time is tokens times time per token, so the logarithms of both gains add up to that of all.
"""

import math
from typing import NamedTuple

from speedrun.history.gains import own_gain
from speedrun.history.manifest import Manifest


class Cause(NamedTuple):
    """What one idea gained by itself, where something isolates it.

    seconds: those that it saved; whole, tokens and speed: natural logarithms of the time, tokens
    and time per token before it over those after it; tokens and speed are None where one of the two
    runs' tokens is not known.
    """

    label: str
    seconds: float
    whole: float
    tokens: float | None
    speed: float | None


def causes(manifest: Manifest) -> list[Cause]:
    """Return what each idea gained by itself, in the order of the milestones, without those that
    nothing isolates."""
    found = []
    for m in manifest.milestones:
        if gain := own_gain(manifest, m):
            parts = [-math.log(part) if part else None for part in (gain.tokens, gain.speed)]
            found.append(Cause(f"{m.id} {m.slug.replace('_', ' ')}", -gain.seconds,
                               -math.log(gain.ratio), *parts))
    return found


def totals(manifest: Manifest, last: str) -> tuple[float, float, float]:
    """Return by which factors fewer tokens and faster tokens shortened the run from the second
    record to that of the milestone called `last`, and the factor of the first record's minutes,
    those of another trainer, over the second's: the product is that of all minutes.

    Upgrades of PyTorch and better machines are part of faster tokens.
    """
    end = manifest.get(last)
    line = [m for m in reversed(manifest.lineage(end)) if m.minutes]
    first, second = line[:2]
    tokens = second.tokens / end.tokens
    return tokens, second.minutes / end.minutes / tokens, first.minutes / second.minutes
