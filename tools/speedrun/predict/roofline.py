"""The time of a training step as a range, from what each of its kernels moves and computes.

A kernel takes the longer of two times: its bytes at the memory's bandwidth, its FLOPs at the peak
of the tensor cores. At the lower end both are the data sheet's, the host keeps ahead and the links
work beside the kernels: no GPU is faster. At the upper end they are the shares below, the host
issues one kernel after the other, and no byte to other GPUs travels while kernels run.
"""

from collections.abc import Iterable
from textwrap import wrap

from speedrun.base.text import number_ranges
from speedrun.predict.cards import NVLINK_OF_A100, Card
from speedrun.predict.prediction import Prediction

# Of the data sheet's rates at the upper end. PRODUCTS is fitted: the most, in hundredths, with
# which the steps of these records on eight H100s lie in the range; #5 is the slowest.
# None of them has products in FP8; the same share of FP8's own peak is assumed.
FITTED_ON = (5, 6, 11, 12, 13)
PRODUCTS = 0.46
# FlashAttention-2 on an H100, heads of 128: 260 TFLOP/s both ways for 1,024 tokens, 322 to 370 for
# 16,384 (arXiv 2407.08608, figures 5 and 6). FlexAttention comes to 85 or 90 % of the latter (its
# authors' announcement, August 2024), counted in whole tiles.
ATTENTION, FLEX_ATTENTION = 0.26, 0.3
# By their instructions the loss's two kernels take 19 ms on an H100, by their bytes 6. The others
# take 28 for their bytes: at 0.9 of the bandwidth, all together need 1.5 times as long.
TRAFFIC = 0.67
LINKS = 0.8  # assumed of NCCL's rings
LAUNCH = 5e-6  # seconds of the host for a kernel, assumed
WIDTH = 98  # columns of the note


def step_ms(prediction: Prediction, card: Card, world_size: int) -> tuple[float, float]:
    """The least and the most milliseconds of a step of a compiled prediction."""
    passes = [launch for launch in prediction.launches if launch.phase != "optimizer"]
    step = (prediction.micro_steps - 1) * passes + list(prediction.launches)
    sent = _exchange(prediction.collectives, card, world_size)
    least = sum(_seconds(launch, card, 1, 1) for launch in step)
    most = _in_turn(_seconds(launch, card, _share(launch), TRAFFIC) for launch in step)
    return 1000 * max(least, sent), 1000 * (most + sent / LINKS)


def note(card: Card, world_size: int) -> list[str]:
    """What the two ends of `step_ms` are, and what is in neither, as lines."""
    kind = "NVLink" if card.links >= NVLINK_OF_A100 else "PCIe with 16 lanes, assumed"
    links = f"; links of {card.links / 1e9:.0f} GB/s each way ({kind})" if world_size > 1 else ""
    return wrap(
        "The least time takes the data sheet's rates and hides what goes to other GPUs. The most"
        f" takes {PRODUCTS:.0%} of the peak for products, fitted on records"
        f" {number_ranges(FITTED_ON)} on eight H100s; {ATTENTION:.0%} for attention,"
        f" {FLEX_ATTENTION:.0%} where it skips tiles; {TRAFFIC:.0%} of the bandwidth;"
        f" {1e6 * LAUNCH:.0f} us of the host for a kernel; and hides nothing{links}. In neither:"
        " waiting for data or for a slower GPU, and clocks that fall under load.", WIDTH)


def _exchange(collectives, card, world_size):
    """Seconds that the bytes take over the links at their full rate: in a ring each GPU sends what
    is reduced twice, all else once, but for its own part."""
    part = (world_size - 1) / world_size
    return sum((2 if name.startswith("allreduce") else 1) * size * part / card.links
               for name, size in collectives.items())


def _share(launch):
    """The share of the peak at which it computes: attention's FLOPs, or those of a product."""
    if launch.group != "attention":
        return PRODUCTS
    return FLEX_ATTENTION if launch.kind == "triton" else ATTENTION


def _seconds(launch, card, computing, moving):
    """The time of a kernel at these shares of the card's rates."""
    return max(launch.flops / (computing * card.flops_in(launch.dtype)),
               launch.moved / (moving * card.bandwidth))


def _in_turn(kernels: Iterable[float]) -> float:
    """The end of the last kernel: each begins once the one before it has ended and the host, which
    never waits, has issued it."""
    issued = ended = 0.0
    for seconds in kernels:
        issued += LAUNCH
        ended = max(issued, ended) + seconds
    return ended
