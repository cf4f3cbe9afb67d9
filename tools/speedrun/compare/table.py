"""A comparison as text: for a terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields

from speedrun.base.text import UNKNOWN, markdown
from speedrun.compare.results import Comparison, Score, scores

LEFT = ""  # the heading of the labels


def columns(comparison: Comparison) -> dict[str, list[str]]:
    """The table as texts, {heading: one cell per entry}; an unknown figure is a dash."""
    table = scores(comparison)
    target = UNKNOWN if comparison.target is None else f"{comparison.target:.4g}"

    def cells(name, form):
        values = [getattr(row, name) for row in table]
        return [UNKNOWN if value is None else form.format(value) for value in values]

    made = {
        LEFT: [row.label for row in table],
        "runs": [f"{row.runs}" + f", {row.failed} failed" * bool(row.failed) for row in table],
        "steps": cells("steps", "{:,}"),
        "tokens": [_count(row.tokens) for row in table],
        f"tokens to {target}": [_count(row.tokens_to_target) for row in table],
        "val loss": [_with_deviation(row) for row in table],
        "p": cells("p_value", "{:.2g}"),
        "step": [_step(row) for row in table],
        "tokens/s": cells("tokens_per_s", "{:,.0f}"),
        "MFU": cells("mfu", "{:.1%}"),
        "memory": cells("peak_memory_mib", "{:,} MiB"),
        f"time to {target}": [_seconds(row.seconds_to_target) for row in table],
        "speed-up": cells("speed_up", "{:.2f}x"),
    }
    return made


def notes(comparison: Comparison) -> list[str]:
    """What the reader must know beside the table, a line each."""
    table = scores(comparison)
    lines = []
    if comparison.target is not None:
        lines.append(f"target: {comparison.target:.4f}, {comparison.target_is}; tokens and time to"
                     " it are interpolated between validations of the mean curve")
    if any(row.runs > 1 for row in table):
        lines.append("val loss: mean ± standard deviation over the runs; step: median over the"
                     " runs, least to most")
    if any(row.p_value is not None for row in table):
        lines.append("p: one-sided t-test, the chance of such losses if their true mean were the"
                     " target")
    for entry in comparison.entries:
        lines += [f"failed: {entry.label}, {failure}" for failure in entry.failures]
    return lines


def to_markdown(comparison: Comparison) -> str:
    """The table in Markdown, without the columns of which nothing is known."""
    shown = known(columns(comparison))
    head = list(shown)
    return markdown(head, zip(*shown.values(), strict=True), right=head[1:]) + "\n"


def to_csv(comparison: Comparison) -> str:
    """Every figure of every entry, unrounded; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(Score)]
    writer.writerow([*names, "final_losses"])
    for row, entry in zip(scores(comparison), comparison.entries, strict=True):
        values = [getattr(row, name) for name in names]
        values = ["" if value is None else value for value in values]
        span = names.index("step_avg_range")
        values[span] = _join(values[span])
        writer.writerow([*values, _join(entry.final_losses)])
    return text.getvalue()


def known(table: dict[str, list[str]]) -> dict[str, list[str]]:
    """The columns in which at least one cell is known."""
    return {head: cells for head, cells in table.items() if set(cells) != {UNKNOWN}}


def print_comparison(comparison: Comparison, stream) -> None:
    """Prints table and notes; entry by entry where the table is wider than a terminal."""
    shown = known(columns(comparison))
    widths = [max(map(len, [head, *cells])) for head, cells in shown.items()]
    total = sum(widths) + 2 * (len(widths) - 1)
    if stream.isatty():
        _print_rich(shown, total, stream)
    else:
        for line in [list(shown), *zip(*shown.values(), strict=True)]:
            first, *rest = (cell.rjust(w) for cell, w in zip(line, widths, strict=True))
            print("  ".join([first.strip().ljust(widths[0]), *rest]), file=stream)
    for line in notes(comparison):
        print(line, file=stream)


def _print_rich(shown, width, stream):
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False)
    if width + 2 * len(shown) <= console.width:
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for head in shown:
            grid.add_column(head, justify="right" if head != LEFT else "left", no_wrap=True)
        for line in zip(*shown.values(), strict=True):
            grid.add_row(*line)
        console.print(grid)
        return
    for i, label in enumerate(shown[LEFT]):
        grid = Table(title=label, title_justify="left", box=None, show_header=False, pad_edge=False)
        for head, cells in shown.items():
            if head != LEFT:
                grid.add_row(head, cells[i])
        console.print(grid, "")


def _join(values: Sequence[float]) -> str:
    return " ".join(map(str, values))


def _count(tokens):
    if tokens is None:
        return UNKNOWN
    for unit, size in {"B": 1e9, "M": 1e6}.items():
        if tokens >= size:
            return f"{tokens / size:.2f}{unit}"
    return f"{tokens:,.0f}"


def _with_deviation(row):
    if row.val_loss is None:
        return UNKNOWN
    spread = "" if row.val_loss_sd is None else f" ± {row.val_loss_sd:.4f}"
    return f"{row.val_loss:.4f}{spread}"


def _step(row):
    if row.step_avg_ms is None:
        return UNKNOWN
    text = f"{row.step_avg_ms:.1f}"
    if row.runs > 1:
        text += f" ({row.step_avg_range[0]:.1f}–{row.step_avg_range[1]:.1f})"
    return f"{text} ms"


def _seconds(seconds):
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.2f} min"
