"""Split what each record gained into fewer tokens and faster tokens, and draw it.

Minutes are tokens times minutes per token, so the logarithms of both gains add up to that of all.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from speedrun.compare.plot import new_figure
from speedrun.history.manifest import Manifest

TICKS = (0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5)
ROW = 0.38  # the height of a bar, of 1 from one record to the next


class Gain(NamedTuple):
    """What the last record of one or several milestones gained over their parent's.

    whole, tokens and speed are natural logarithms of the parent's minutes, tokens and minutes per
    token over their own. tokens and speed are None where one of the two runs' tokens is not known.
    """

    label: str
    minutes: float
    whole: float
    tokens: float | None
    speed: float | None


def gains(manifest: Manifest) -> list[Gain]:
    """Return the gain of every milestone with a time, over the nearest ancestor that has one;
    milestones that end in one record share one."""
    found = []
    for m in manifest.milestones:
        parent = next((a for a in manifest.lineage(m)[1:] if a.minutes), None)
        if not (m.minutes and parent):
            continue
        if found and m.record == parent.record:
            found[-1] = found[-1]._replace(label=f"{found[-1].label}, {m.id}")
            continue
        whole, tokens, speed = math.log(parent.minutes / m.minutes), None, None
        # A root's minutes are those of record #1: another trainer, which read other tokens.
        if parent.parent and parent.tokens and m.tokens:
            tokens = math.log(parent.tokens / m.tokens)
            speed = whole - tokens
        label = f"{m.id} {m.slug.replace('_', ' ')}"
        found.append(Gain(label, m.minutes, whole, tokens, speed))
    return found


def totals(found: Sequence[Gain]) -> tuple[float, float, float]:
    """Return by which factors fewer tokens, faster tokens and unsplit gains shortened the run."""
    split = [gain for gain in found if gain.tokens is not None]
    return (math.exp(sum(gain.tokens for gain in split)),
            math.exp(sum(gain.speed for gain in split)),
            math.exp(sum(gain.whole for gain in found if gain.tokens is None)))


def shown_in(manifest: Manifest) -> list:
    """Return all that the picture shows; rounded, because logarithms differ between machines."""
    return [[value if isinstance(value, str | None) else round(value, 6) for value in gain]
            for gain in gains(manifest)]


def draw_causes(manifest: Manifest):
    """Draw what every milestone gained; return the figure, 1600 pixels wide."""
    found = gains(manifest)
    figure, (axes,) = new_figure((8, 1.4 + 0.25 * len(found)))
    panel(axes, found)
    return figure


def panel(axes, found: Sequence[Gain]) -> None:
    """Draw on the axes two bars for each gain, one if it is not split, and the minutes after it."""
    bars = [[], [], []]  # (row, length) of fewer tokens, faster tokens, not split
    for row, gain in enumerate(found):
        if gain.tokens is None:
            bars[2].append((row, gain.whole))
        else:
            bars[0].append((row - ROW / 2, gain.tokens))
            bars[1].append((row + ROW / 2, gain.speed))
        axes.text(1.01, row, f"{gain.minutes:g}", transform=axes.get_yaxis_transform(),
                  va="center", fontsize=9)
    axes.text(1.01, -1, "minutes", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    names = "fewer tokens", "faster tokens", "not split"
    styles = (dict(color="black"), dict(color="0.65"),
              dict(facecolor="white", edgecolor="black", hatch="////"))
    for name, style, factor, ends in zip(names, styles, totals(found), bars, strict=True):
        if ends:
            axes.barh(*zip(*ends, strict=True), height=2 * ROW if "hatch" in style else ROW,
                      label=f"{name}: {factor:.2f} times in all", **style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="times fewer minutes for this reason (log scale); left of 1: more minutes",
             ylim=(len(found) - 0.4, -1.4), axisbelow=True)
    axes.set_xticks([math.log(tick) for tick in TICKS], [f"{tick:g}" for tick in TICKS])
    axes.set_yticks(range(len(found)), [gain.label for gain in found], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.4), frameon=False)
