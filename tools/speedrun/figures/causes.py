"""Split what each idea gained by itself into fewer tokens and faster tokens, and draw it.

Time is tokens times time per token, so the logarithms of both gains add up to that of all.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from speedrun.compare.plot import new_figure
from speedrun.history.gains import own_gain
from speedrun.history.manifest import Manifest

TICKS = (0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5)
ROW = 0.38  # the height of a bar, of 1 from one milestone to the next


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


def shown_in(manifest: Manifest) -> list:
    """Return all that the picture shows; rounded, because logarithms differ between machines."""
    return [[value if isinstance(value, str | None) else round(value, 6) for value in cause]
            for cause in causes(manifest)]


def draw_causes(manifest: Manifest):
    """Draw what every idea gained by itself; return the figure, 1600 pixels wide."""
    found = causes(manifest)
    figure, (axes,) = new_figure((8, 1.4 + 0.25 * len(found)))
    panel(axes, found)
    return figure


def panel(axes, found: Sequence[Cause]) -> None:
    """Draw on the axes two bars for each gain, one if it is not split, and the seconds saved."""
    bars = [[], [], []]  # (row, length) of fewer tokens, faster tokens, not split
    for row, cause in enumerate(found):
        if cause.tokens is None:
            bars[2].append((row, cause.whole))
        else:
            bars[0].append((row - ROW / 2, cause.tokens))
            bars[1].append((row + ROW / 2, cause.speed))
        axes.text(1.01, row, f"{cause.seconds:.1f}", transform=axes.get_yaxis_transform(),
                  va="center", fontsize=9)
    axes.text(1.01, -1, "seconds", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    names = "fewer tokens", "faster tokens", "not split"
    styles = (dict(color="black"), dict(color="0.65"),
              dict(facecolor="white", edgecolor="black", hatch="////"))
    for name, style, ends in zip(names, styles, bars, strict=True):
        if ends:
            axes.barh(*zip(*ends, strict=True), height=2 * ROW if "hatch" in style else ROW,
                      label=name, **style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="times less time for this reason (log scale); left of 1: more time",
             ylim=(len(found) - 0.4, -1.4), axisbelow=True)
    axes.set_xticks([math.log(tick) for tick in TICKS], [f"{tick:g}" for tick in TICKS])
    axes.set_yticks(range(len(found)), [cause.label for cause in found], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.4), frameon=False)
