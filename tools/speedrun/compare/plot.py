"""The picture of a comparison: its curves over steps, over tokens and over seconds."""

import io
import math
import os
from itertools import cycle
from pathlib import Path

from speedrun.base.files import replace_file
from speedrun.compare.results import Comparison, Entry, mean_curve

# Okabe and Ito's colours, which most eyes can distinguish, and markers for a reader in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666")
STYLES = [  # colour, marker and what fills it: the second round is hollow, the third grey, ...
    (color, marker, fill or color) for fill in (None, "white", "#bbbbbb")
    for color, marker in zip(COLOURS, "os^DvPX*", strict=True)
]
AXES = {"steps": "optimizer step", "tokens": "million tokens", "seconds": "training time, seconds"}


def curves_of(entry: Entry) -> dict[str, list[list[tuple[float, float]]]]:
    """The curves of each run over steps, millions of tokens and seconds, as far as known."""
    found = {"steps": [run.val_curve for run in entry.runs], "tokens": [], "seconds": []}
    for run in entry.runs:
        if entry.tokens_per_step:
            found["tokens"].append(
                [(entry.tokens(step) / 1e6, loss) for step, loss in run.val_curve])
        clock = dict(run.seconds)
        if timed := [(clock[step], loss) for step, loss in run.val_curve if step in clock]:
            found["seconds"].append(timed)
    return found


def draw_comparison(comparison: Comparison, official: dict[str, dict[str, list]]):
    """Draws each run as a thin line, the mean of an entry's as a thick one; returns the figure.

    official: label -> {name in AXES: curve} of an entry's record, drawn dashed. Axes of which
    nothing is known are left out.
    """
    curves = {entry: curves_of(entry) for entry in comparison.entries if entry.runs}
    names = [name for name in AXES if any(found[name] for found in curves.values())]
    figure, axes = _new_figure((4 + 3 * len(names), 5), len(names))
    for panel, name in zip(axes, names, strict=True):
        for entry, style in zip(curves, cycle(STYLES)):
            _draw_entry(panel, name, entry, curves[entry][name], official.get(entry.label, {}),
                        style)
        if comparison.target is not None:
            panel.axhline(comparison.target, color="0.6", linewidth=0.8, zorder=0)
        panel.set(xlabel=AXES[name])
    first = axes[0]
    first.set(ylabel="validation loss, nats per token", ylim=_limits(comparison, curves, official))
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False, fontsize="small")
    return figure


def _new_figure(size, columns):
    """A matplotlib figure of a size in inches and its panels in a row, with one vertical axis."""
    os.environ["MPLBACKEND"] = "agg"  # files need no other, and an unknown name is an error
    import matplotlib  # takes a second: only when there is something to draw
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"font.size": 11, "font.family": "DejaVu Sans"})
    figure = Figure(size, dpi=200, facecolor="white", layout="constrained")
    panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for panel in panels:
        panel.grid(color="0.92", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save(figure, path: Path) -> None:
    """Writes a figure as a PNG. Raises UserError if the file cannot be written."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    replace_file(path, drawn.getvalue())


def _draw_entry(panel, name, entry, curves, record, style):
    """Draws the curves of an entry's runs over AXES[name], and that of its record."""
    color, marker, face = style
    for curve in curves if len(curves) > 1 else []:
        panel.plot(*zip(*curve, strict=True), color=color, linewidth=0.6, alpha=0.5)
    # Clocks differ from run to run: over seconds the runs themselves are the picture.
    mean = mean_curve(curves) if name != "seconds" else curves[0] if curves else []
    if mean:
        panel.plot(*zip(*mean, strict=True), color=color, linewidth=1.6, marker=marker,
                   markersize=4, markerfacecolor=face, markevery=max(1, len(mean) // 10),
                   label=entry.label)
    if name in record:
        panel.plot(*zip(*record[name], strict=True), color=color, linestyle="--", linewidth=1.2,
                   label=f"{entry.label}, official")


def _limits(comparison, entries, official):
    """Loss limits that leave out the steep first part, which would flatten all the rest."""
    curves = [run.val_curve for entry in entries for run in entry.runs]
    curves += [record["steps"] for record in official.values()]
    curves = [[loss for _, loss in curve if math.isfinite(loss)] for curve in curves]
    losses = [loss for curve in curves for loss in curve]
    if not losses:
        return None, None
    low = min([*losses, comparison.target or math.inf])
    high = max([curve[1] for curve in curves if len(curve) > 2] or losses)
    room = 0.05 * (high - low) or 0.1
    return low - room, high + room
