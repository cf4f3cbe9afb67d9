"""A prediction as text for people and as JSON for programs."""

import json
from dataclasses import asdict

from speedrun.base.text import UNKNOWN
from speedrun.predict.cards import Card
from speedrun.predict.prediction import GROUPS, Prediction, Time
from speedrun.run.fit_batch import MARGIN

NEAR = 0.9  # of a card's shared memory
LEGEND = """\
rows: sequences per forward pass; run: without validation, if each GPU reaches {mfu:.0%} of its peak
in bf16 (--mfu, an assumption); saved: from a forward pass to its backward pass
launches: of one micro-step and the optimizers, operator by operator unless --compiled
products (without fused attention unless --compiled), traffic, collectives: of a step of a rank"""
MOST_REGISTERS = 255  # that a thread can have, on every card
WITHOUT_COMPILER = (" operator by operator; may still fit, because a run's compiled code needs less"
                    " (--compiled predicts it)")
LEFT_OUT = (
    "Not in it: what compilation fuses (it takes less memory, fewer bytes and launches), the pairs",
    "of a fused attention, and what the allocator cannot hand out.",
)
COMPILED_LEFT_OUT = (
    "Compiled by torch 2.13.0 with triton 3.7, the only versions for which this is made.",
    "Attention is counted halfway through training, as if each sequence was one document; a kernel",
    "is assembled in the first form that tuning would try. Not in the memory: buffers inside",
    "attention's kernels, and what the allocator cannot hand out.",
)


def to_text(title: str, card: Card, world_size: int, prediction: Prediction,
            largest: Prediction | None, time: Time | None = None, compiles: bool = True) -> str:
    """What a step needs of each GPU, a fact a line; `largest` is the largest micro batch's; time:
    None if it cannot be predicted; compiles: whether a run of the script compiles its model."""
    p, caveat = prediction, WITHOUT_COMPILER * (compiles and not prediction.graphs)
    lines = [f"{title} on {world_size} x {card.name}, {p.micro_batch} sequences per forward pass; "
             f"{'compiled' if p.graphs else 'operator by operator'}"]
    lines.append(f"peak memory      {_gib(p.peak)} of {_gib(card.memory)}:"
                 f" {_verdict(p, card, caveat)}")
    lines += [f"  {phase:14} {_gib(size)}" for phase, size in p.peaks.items()]
    lines.append("what stays       " + ", ".join(
        f"{part} {_gib(size)}" for part, size in p.memory.items()))
    if largest is None:
        lines.append(f"largest batch    not even one sequence leaves {1 - MARGIN:.0%} free"
                     + caveat)
    else:
        lines.append(f"largest batch    {largest.micro_batch} sequences per forward pass, "
                     f"{_gib(largest.peak)}")
    lines += [f"time             {words}" for words in _time_words(time, card)]
    lines.append("a step of a rank")
    lines += [f"  products       {flops / 1e12:.1f} TFLOP in {dtype}" for dtype, flops in
              p.flops.items()]
    lines.append(f"  memory traffic {p.moved / 1e12:.2f} TB")
    lines += [f"  {name:14} {size / 1e6:.1f} MB" for name, size in p.collectives.items()]
    lines.append(f"  {'saved':14} {_gib(p.saved)} from a forward pass to its backward pass")
    lines.append("launches         of one forward and backward pass, and of the optimizer")
    for group, (count, moved, flops) in _by_group(p).items():
        if count:
            lines.append(f"  {group:14} {count:5,} {moved / 1e9:8.1f} GB {flops / 1e12:7.1f} TFLOP")
    if p.graphs:
        again = p.recompiled or "none"
        lines.append(f"graphs           {p.graphs}, {again} of them after the warm-up")
        lines += [*_kernel_lines(p, card), *COMPILED_LEFT_OUT]
    else:
        lines += LEFT_OUT
    return "\n".join(lines)


def to_columns(predictions: dict[str, Prediction], times: dict[str, Time | None]
               ) -> dict[str, list[str]]:
    """Several predictions, {title: prediction}, and times by the same titles, for print_table;
    LEGEND goes below."""
    all_of_them = predictions.values()
    return {
        "": list(predictions),
        "rows": [f"{p.micro_batch}" for p in all_of_them],
        "peak": [_gib(p.peak) for p in all_of_them],
        "run": [span(times[title].run_s) if times[title] else UNKNOWN for title in predictions],
        "saved": [_gib(p.saved) for p in all_of_them],
        "launches": [f"{len(p.launches):,}" for p in all_of_them],
        "products": [f"{sum(p.flops.values()) / 1e12:.1f} TFLOP" for p in all_of_them],
        "traffic": [f"{p.moved / 1e12:.2f} TB" for p in all_of_them],
        "collectives": [f"{sum(p.collectives.values()) / 1e6:.1f} MB" for p in all_of_them],
    }


def span(seconds: float) -> str:
    """A time to read: 426 ms, 9.1 min, 1.5 h, 2.1 days."""
    for unit, name, least in ((86400, "days", 48 * 3600), (3600, "h", 5400), (60, "min", 90),
                              (1, "s", 1)):
        if seconds >= least:
            return f"{seconds / unit:.1f} {name}"
    return f"{1000 * seconds:.0f} ms"


def _time_words(time, card):
    """What the line on time says."""
    if time is None:
        return [f"not predicted: {card.name} has no bfloat16 tensor cores, without which the"
                " record's sizes take days; it is fit for the tiny scale only"]
    return [f"a step {span(time.step_s)}, the run {span(time.run_s)}, without validation, if each"
            f" GPU reaches {time.mfu:.0%}", f"of its {time.peak / 1e12:,.0f} TFLOP/s in bf16"
            " (--mfu; an assumption: nothing was timed)"]


def _verdict(p, card, caveat):
    """Whether the peak fits the card; caveat: that an eager one says little of compiled code."""
    if p.fits(card):
        return "fits"
    if p.peak <= card.memory:
        return f"fits, with less than {1 - MARGIN:.0%} to spare"
    return "too much" + caveat if caveat else "does not fit"


def _by_group(p):
    """{group: (launches, bytes, FLOPs)}."""
    groups = {group: [launch for launch in p.launches if launch.group == group] for group in GROUPS}
    return {group: (len(of), sum(launch.moved for launch in of), sum(launch.flops for launch in of))
            for group, of in groups.items()}


def _kernel_lines(p, card):
    """How many kernels Triton made, and those that spill, use all that the card has, or more."""
    notable = [kernel for kernel in p.kernels
               if kernel.spilled or kernel.registers == MOST_REGISTERS
               or kernel.shared > NEAR * card.shared]
    too_large = sum(kernel.shared > card.shared for kernel in p.kernels)
    fit = f"{too_large} of them do not fit" if too_large else "all fit"
    lines = [f"kernels          {len(p.kernels)} of Triton's: {fit}, "
             f"{sum(kernel.spilled > 0 for kernel in p.kernels)} spill"]
    for kernel in dict.fromkeys(notable):
        lines += [f"  {kernel.name}",
                  f"    {kernel.registers} registers, {kernel.spilled} bytes spilled, "
                  f"{kernel.shared:,} of {card.shared:,} bytes shared"]
    return lines


def to_json(title: str, card: Card, world_size: int, prediction: Prediction,
            largest: Prediction | None, time: Time | None = None) -> str:
    """The same as one JSON object; bytes, FLOPs and seconds; launches by group."""
    launches = {group: dict(zip(("launches", "moved", "flops"), totals, strict=True))
                for group, totals in _by_group(prediction).items()}
    return json.dumps(dict(
        script=title, gpu=card.name, world_size=world_size,
        **asdict(prediction) | dict(launches=launches),
        largest_micro_batch=largest and largest.micro_batch, time=time and asdict(time),
    ))


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
