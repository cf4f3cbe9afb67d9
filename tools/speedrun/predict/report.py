"""A prediction as text for people and as JSON for programs."""

import json
from dataclasses import asdict

from speedrun.predict.cards import Card
from speedrun.predict.prediction import Prediction
from speedrun.run.fit_batch import MARGIN

LEFT_OUT = (
    "Not in it: what compilation fuses (it takes less memory and fewer bytes), attention's pairs,",
    "the exchange over the links, launches, the host, and what the allocator cannot hand out.",
)


def to_text(title: str, card: Card, world_size: int, prediction: Prediction,
            largest: Prediction | None) -> str:
    """What a step needs of each GPU, a fact a line; `largest` is the largest micro batch's."""
    p = prediction
    lines = [f"{title} on {world_size} x {card.name}, {p.micro_batch} sequences per forward pass; "
             "operator by operator"]
    fits = "fits" if p.fits(card) else "does not fit"
    lines.append(f"peak memory      {_gib(p.peak)} of {_gib(card.memory)}: {fits} "
                 f"({MARGIN:.0%} may be used)")
    lines += [f"  {phase:14} {_gib(size)}" for phase, size in p.peaks.items()]
    lines.append("what stays       " + ", ".join(
        f"{part} {_gib(size)}" for part, size in p.memory.items()))
    if largest is None:
        lines.append("largest batch    not even one sequence fits")
    else:
        lines.append(f"largest batch    {largest.micro_batch} sequences per forward pass, "
                     f"{_gib(largest.peak)}")
    lines.append("a step of a rank")
    lines += [f"  products       {flops / 1e12:.1f} TFLOP in {dtype}" for dtype, flops in
              p.flops.items()]
    lines.append(f"  memory traffic {p.moved / 1e12:.2f} TB")
    lines += [f"  {name:14} {size / 1e6:.1f} MB" for name, size in p.collectives.items()]
    products, traffic = p.step_ms(card)
    lines.append(f"  at full speed  products {products:.0f} ms, memory traffic {traffic:.0f} ms")
    return "\n".join([*lines, *LEFT_OUT])


def to_json(title: str, card: Card, world_size: int, prediction: Prediction,
            largest: Prediction | None) -> str:
    """The same as one JSON object; bytes, FLOPs and milliseconds."""
    return json.dumps(dict(
        script=title, gpu=card.name, world_size=world_size, **asdict(prediction),
        products_and_traffic_ms=prediction.step_ms(card),
        largest_micro_batch=largest and largest.micro_batch,
    ), indent=2)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
