"""The table of what owners of GPUs measured, beside official and predicted figures."""

from collections.abc import Mapping, Sequence

from speedrun.base.text import UNKNOWN, markdown
from speedrun.figures.tables import cell
from speedrun.history.fields import default_hyperparameters
from speedrun.history.handles import handles_of
from speedrun.history.manifest import Manifest, Milestone
from speedrun.history.measured import RECORD_RANKS, Machine, Measurement, Timing
from speedrun.history.predictions import StoredPrediction
from speedrun.scripts.find import code_hash
from speedrun.scripts.sizes import length_names

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
            row += _cells(found, m, stored.get(m.slug))
        rows.append(row if measured else [*row, NOT_YET, NOT_YET])
    lines = [markdown(head, rows, right=head[1:]), *map(_conditions, measured)]
    return "\n\n".join(lines)


def _cells(found, milestone, prediction):
    """Step and peak that one machine measured of a milestone; where it has fewer GPUs than the
    records', the peak that is predicted for their number."""
    timing = found.timings.get(milestone.slug)
    if timing is None or milestone.slug in found.failed:
        return ["failed" if milestone.slug in found.failed else NOT_YET, UNKNOWN]
    text = timing.step_text
    if timing.passes > 1:
        text += f", {timing.passes} passes"
    if timing.code != code_hash(milestone.script):
        text += ", an earlier script"
    peak = timing.memory_text
    if prediction and found.machine.count < RECORD_RANKS:
        expected = predicted_peak(prediction, milestone, found.machine, timing)
        peak += f" ({expected / MIB:,.0f} predicted)"
    return [text, peak]


def predicted_peak(prediction: StoredPrediction, milestone: Milestone, machine: Machine,
                   timing: Timing) -> float:
    """Bytes at the peak of one GPU, as predicted for this machine's number of ranks.

    What ranks share, above all the optimizers' states, is what a rank alone has more than one of
    eight, times 8/7; rank alone has all of it, one of N has an Nth.
    """
    own = default_hyperparameters(milestone.script)
    train, val = length_names(own)
    tokens, val_tokens = (timing.micro_batch * own[name] for name in (train, val))
    if machine.share:  # rows of the middle stage, no validation
        rows = handles_of(milestone).ROW_FACTORS
        return prediction.alone(tokens * rows[len(rows) // 2] / rows[-1])
    usual = (own["micro_batch_size"] * own[name] for name in (train, val))
    shared = (prediction.alone(*usual) - prediction.peak) / (1 - 1 / RECORD_RANKS)
    return prediction.alone(tokens, val_tokens) - shared * (1 - 1 / machine.count)


def _conditions(found):
    """Under which conditions a machine measured, and what failed there."""
    machine = found.machine
    facts = [f"PyTorch {machine.torch}", machine.driver and f"driver {machine.driver}",
             machine.nccl and f"NCCL {machine.nccl}",
             machine.power_limit and f"power limit {machine.power_limit} W",
             machine.max_clock and f"clocks up to {machine.max_clock} MHz",
             f"{machine.steps} steps on tokens of {machine.tokens}",
             machine.share and f"a step is one rank's share of {machine.share}, in the middle of"
             " the schedules"]
    failed = [f"{name}: {text}" for name, text in (*found.kernels.items(), *found.failed.items())
              if text != "ok"]
    return (f"**{machine.name}**: {', '.join(filter(None, facts))}."
            + (f" Failed: {'; '.join(failed)}." if failed else ""))


def rates(measured: Sequence[Measurement], slug: str, tokens_per_step: int) -> str:
    """Tokens per second of a milestone on each machine that measured it, as a table's cell."""
    found = [f"{1000 * tokens_per_step / (it.machine.share or 1) / it.timings[slug].mean_ms:,.0f}"
             f" on {it.machine.name}"
             for it in measured if slug in it.timings]
    return "; ".join(found) or NOT_YET
