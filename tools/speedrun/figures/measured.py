"""The table of what owners of GPUs measured, beside official and predicted figures."""

from collections.abc import Mapping, Sequence

from speedrun.base.text import UNKNOWN, markdown
from speedrun.figures.tables import cell
from speedrun.history.manifest import Manifest
from speedrun.history.measured import Measurement
from speedrun.history.predictions import StoredPrediction
from speedrun.scripts.find import code_hash

NOT_YET = "not measured"
MIB = 2**20


def measured_table(measured: Sequence[Measurement], stored: Mapping[str, StoredPrediction],
                   manifest: Manifest) -> str:
    """A Markdown table with a row for each milestone of every chain, and two columns for each
    machine that measured; below it, a line for each machine."""
    head = ["milestone", "step, official", "peak, official", "peak, predicted", "error"]
    for heading in [found.machine.name for found in measured] or ["measured"]:
        head += [f"step, {heading}", f"peak, {heading}"]
    rows = []
    for m in manifest.milestones:
        peak = stored[m.slug].peak / MIB if m.slug in stored else None
        error = peak and m.peak_memory_mib and peak / m.peak_memory_mib - 1
        row = [m.name, cell(m.step_avg_ms, "{:,.2f} ms"), cell(m.peak_memory_mib, "{:,d} MiB"),
               "not predicted" if peak is None else f"{peak:,.0f} MiB",
               cell(error, "{:+.0%}")]
        for found in measured:
            row += _cells(found, m)
        rows.append(row if measured else [*row, NOT_YET, NOT_YET])
    lines = [markdown(head, rows, right=head[1:]), *map(_conditions, measured)]
    return "\n\n".join(lines)


def _cells(found, milestone):
    """Step and peak that one machine measured of a milestone."""
    timing = found.timings.get(milestone.slug)
    if timing is None:
        return ["failed" if milestone.slug in found.failed else NOT_YET, UNKNOWN]
    text = timing.step_text
    if timing.passes > 1:
        text += f", {timing.passes} passes"
    if timing.code != code_hash(milestone.script):
        text += ", an earlier script"
    return [text, timing.memory_text]


def _conditions(found):
    """Under which conditions a machine measured, and what failed there."""
    machine = found.machine
    facts = [f"PyTorch {machine.torch}", machine.driver and f"driver {machine.driver}",
             machine.nccl and f"NCCL {machine.nccl}",
             machine.power_limit and f"power limit {machine.power_limit} W",
             machine.max_clock and f"clocks up to {machine.max_clock} MHz",
             f"{machine.steps} steps on tokens of {machine.tokens}"]
    failed = [f"{name}: {text}" for name, text in (*found.kernels.items(), *found.failed.items())
              if text != "ok"]
    return (f"**{machine.name}**: {', '.join(filter(None, facts))}."
            + (f" Failed: {'; '.join(failed)}." if failed else ""))


def rates(measured: Sequence[Measurement], slug: str, tokens_per_step: int) -> str:
    """Tokens per second of a milestone on each machine that measured it, as a table's cell."""
    found = [f"{1000 * tokens_per_step / it.timings[slug].mean_ms:,.0f} on {it.machine.name}"
             for it in measured if slug in it.timings]
    return "; ".join(found) or NOT_YET
