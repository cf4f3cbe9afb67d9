"""Draws the curves of a comparison: loss over steps, over tokens and over seconds."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from speedrun.compare.results import Comparison, Entry
from speedrun.compare.stats import mean_curve

HASH_KEY = "Data-SHA256"  # the name of the PNG text chunk that holds data_hash
# Okabe and Ito's colours, told apart by most eyes, and markers for a reader in grey.
STYLES = [
    ("#000000", "o"), ("#0072B2", "s"), ("#D55E00", "^"), ("#009E73", "D"), ("#CC79A7", "v"),
    ("#56B4E9", "P"), ("#E69F00", "X"), ("#666666", "*"),
]
AXES = {"steps": "optimizer step", "tokens": "million tokens", "seconds": "training time, seconds"}


def curves_of(entry: Entry) -> dict[str, list[list[tuple[float, float]]]]:
    """The curves of each run over steps, millions of tokens and seconds, as far as known."""
    found = {"steps": [run.val_curve for run in entry.runs], "tokens": [], "seconds": []}
    for run in entry.runs:
        if entry.tokens_per_step:
            scale = entry.tokens_per_step / 1e6
            found["tokens"].append([(step * scale, loss) for step, loss in run.val_curve])
        clock = dict(run.seconds)
        timed = [(clock[step], loss) for step, loss in run.val_curve if step in clock]
        if timed:
            found["seconds"].append(timed)
    return found


def data_hash(
    comparison: Comparison, official: dict[str, list], panels: Sequence[str] = tuple(AXES)
) -> str:
    """The hexadecimal SHA-256 of all that the picture shows."""
    shown = [[entry.label, curves_of(entry)] for entry in comparison.entries]
    text = json.dumps([shown, comparison.target, official, panels])
    return hashlib.sha256(text.encode()).hexdigest()


def draw_comparison(
    comparison: Comparison,
    path: Path,
    official: dict[str, list[tuple[int, float]]],
    panels: Sequence[str] = tuple(AXES),
) -> None:
    """Writes a PNG: each run a thin line, the mean of an entry's a thick one.

    official: label -> curve [(step, loss), ...] of an entry's record, drawn dashed over steps and
    tokens. panels: keys of AXES, those of which nothing is known are left out. Raises OSError if
    the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "font.family": "DejaVu Sans"})
    entries = [entry for entry in comparison.entries if entry.runs]
    names = [name for name in panels if any(curves_of(entry)[name] for entry in entries)]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4 + 3 * len(names), 5), dpi=200, sharey=True, squeeze=False,
        facecolor="white", layout="constrained",
    )
    for panel, name in zip(axes[0], names, strict=True):
        for i, entry in enumerate(entries):
            color, marker = STYLES[i % len(STYLES)]
            face = color if i < len(STYLES) else "white"  # the second round is hollow
            curves = curves_of(entry)[name]
            for curve in curves if len(curves) > 1 else []:
                panel.plot(*zip(*curve, strict=True), color=color, linewidth=0.6, alpha=0.5)
            # Clocks differ from run to run: over seconds the runs themselves are the picture.
            mean = mean_curve(curves) if name != "seconds" else curves[0] if curves else []
            if mean:
                panel.plot(*zip(*mean, strict=True), color=color, linewidth=1.6, marker=marker,
                           markersize=4, markerfacecolor=face,
                           markevery=max(1, len(mean) // 10),
                           label=entry.label if panel is axes[0][0] else None)
            if entry.label in official and name != "seconds":
                scale = entry.tokens_per_step / 1e6 if name == "tokens" else 1
                record = [(step * scale, loss) for step, loss in official[entry.label]]
                panel.plot(*zip(*record, strict=True), color=color, linestyle="--", linewidth=1.2,
                           label=f"{entry.label}, official" if panel is axes[0][0] else None)
        if comparison.target is not None:
            panel.axhline(comparison.target, color="0.6", linewidth=0.8, zorder=0)
        panel.set_xlabel(AXES[name])
        panel.grid(color="0.92", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("validation loss, nats per token")
    low, high = _limits(comparison, entries, official)
    axes[0][0].set_ylim(low, high)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={
        HASH_KEY: data_hash(comparison, official, panels), "Software": None})
    plt.close(figure)


def _limits(comparison, entries, official):
    """Loss limits that leave out the steep first part, which would flatten all the rest."""
    curves = [run.val_curve for entry in entries for run in entry.runs] + list(official.values())
    losses = [loss for curve in curves for _, loss in curve]
    early = [curve[1][1] for curve in curves if len(curve) > 2]
    low = min([*losses, *([comparison.target] if comparison.target else [])])
    high = max(early) if early else max(losses)
    room = 0.05 * (high - low) or 0.1
    return low - room, high + room
