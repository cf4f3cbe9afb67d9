"""A comparison as text: for a terminal, as Markdown and as CSV."""

import csv
import io
import math
from collections import Counter
from dataclasses import asdict, fields
from typing import TextIO

from speedrun.base.text import UNKNOWN, markdown, print_table, visible
from speedrun.compare.results import Comparison, Score, scores

LEFT = ""  # the heading of the labels


def columns(comparison: Comparison) -> dict[str, list[str]]:
    """The table as texts, {heading: one cell per entry}, without columns of which nothing is known;
    an unknown figure is a dash."""
    table = scores(comparison)
    target = UNKNOWN if comparison.target is None else f"{comparison.target:.4g}"

    def cells(name, write):
        values = [getattr(row, name) for row in table]
        return [UNKNOWN if value is None else write(value) for value in values]

    made = {
        LEFT: [visible(row.label) for row in table],
        "runs": [f"{row.runs}" + f", {row.failed} failed" * bool(row.failed) for row in table],
        "steps": cells("steps", "{:,}".format),
        "tokens": cells("tokens", _count),
        f"tokens to {target}": cells("tokens_to_target", _count),
        "val loss": [loss_text(row) for row in table],
        "p": cells("p_value", "{:.2g}".format),
        "step": [_step(row) for row in table],
        "tokens/s": cells("tokens_per_s", "{:,.0f}".format),
        "MFU": cells("mfu", "{:.1%}".format),
        "memory": cells("peak_memory_mib", "{:,} MiB".format),
        f"time to {target}": cells("seconds_to_target", _seconds),
        "speed-up": cells("speed_up", "{:.2f}x".format),
    }
    return {head: cells for head, cells in made.items() if set(cells) != {UNKNOWN}}


def notes(comparison: Comparison) -> list[str]:
    """The remarks below the table, a line each."""
    table = scores(comparison)
    lines = []
    if comparison.target is not None:
        lines.append(f"target: {comparison.target:.4f}, {comparison.target_is}; tokens and time to"
                     " it are interpolated between validations of the mean curve")
    else:
        lines.append(f"no target: {comparison.target_is}")
    if devices := {f"{e.world_size} x {e.device}" for e in comparison.entries if e.device}:
        lines.append(f"trained on {', '.join(sorted(devices))}")
    if comparison.mixed:
        lines.append("not all runs are known to be of one corpus: only losses on the same tokens"
                     " compare")
    if any(row.runs > 1 for row in table):
        lines.append("val loss: mean ± standard deviation over the runs; step: median over the"
                     " runs, least to most")
    if any(row.p_value is not None for row in table):
        lines.append("p: one-sided t-test, the chance of such losses if their true mean were the"
                     " target")
    for entry in comparison.entries:
        seeds = Counter(run.seed for run in entry.runs if run.seed is not None)
        lines += [f"{entry.label}: {number} runs have seed {seed}; if one is a copy, leave it out"
                  for seed, number in seeds.items() if number > 1]
        if entry.unread:
            lines.append(f"{entry.label}: lines that begin like a step line and are not understood:"
                         f" {entry.unread}")
        lines += [f"failed: {entry.label}, {failure}" for failure in entry.failures]
        lines += [f"diverged: {entry.label}, {run.log}" for run in entry.runs
                  if run.val_curve and not math.isfinite(run.val_curve[-1][1])]
    return lines


def to_markdown(comparison: Comparison) -> str:
    """The table in Markdown."""
    table = columns(comparison)
    head = list(table)
    return markdown(head, zip(*table.values(), strict=True), right=head[1:]) + "\n"


def to_csv(comparison: Comparison) -> str:
    """Every figure of every entry, unrounded; what is not known is empty."""
    text = io.StringIO()
    names = [field.name for field in fields(Score)] + ["final_losses"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row, entry in zip(scores(comparison), comparison.entries, strict=True):
        values = asdict(row) | {"final_losses": entry.final_losses}
        for name in ("step_avg_range", "final_losses"):
            values[name] = " ".join(map(str, values[name] or ()))
        writer.writerow(values)
    return text.getvalue()


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    """Prints table and notes."""
    print_table(columns(comparison), stream)
    for line in notes(comparison):
        print(visible(line), file=stream)


def _count(tokens):
    for unit, size in {"B": 1e9, "M": 1e6}.items():
        if tokens >= size:
            return f"{tokens / size:.2f}{unit}"
    return f"{tokens:,.0f}"


def _seconds(seconds):
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.2f} min"


def loss_text(row: Score) -> str:
    """A row's last validation loss, with its standard deviation over the runs if several, and its
    step if that is not the last."""
    if row.val_loss is None:
        return UNKNOWN
    if not math.isfinite(row.val_loss):
        return "diverged"
    text = f"{row.val_loss:.4f}" + ("" if row.val_loss_sd is None else f" ± {row.val_loss_sd:.4f}")
    return text + ("" if row.val_step is None else f" (step {row.val_step:,})")


def _step(row):
    if row.step_avg_ms is None:
        return UNKNOWN
    span = " ({:.1f}–{:.1f})".format(*row.step_avg_range) if row.runs > 1 else ""
    return f"{row.step_avg_ms:.1f}{span} ms"
