"""What is predicted of a training step at record scale: data, without torch."""

import re
from dataclasses import dataclass

from speedrun.predict.cards import Card
from speedrun.run.fit_batch import MARGIN

STEPS = 2  # that a fake run makes; the first one creates the optimizers' states
# Of forward and backward: matrix products, attention, what Inductor fused, the rest (gradients
# copied and added between graphs); and all of the optimizer.
GROUPS = ("products", "attention", "fused", "other", "optimizer")


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a step: the last micro-step's forward and backward, the optimizer.

    phase: "forward", "backward" or "optimizer". kind: "triton"; "library" for what compiled code
    calls (cuBLAS, cuDNN); "eager" for operators outside of compiled code. moved: bytes read from
    and written to memory. flops: of matrix products and attention, in `dtype` (None without any).
    """

    phase: str
    kind: str
    name: str
    moved: float
    flops: float
    dtype: str | None

    @property
    def group(self) -> str:
        """What it belongs to, one of GROUPS."""
        if self.phase == "optimizer":
            return "optimizer"
        if self.flops:
            return "attention" if re.search("attention|attn", self.name) else "products"
        return "fused" if self.kind == "triton" else "other"


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel assembled for a card: registers of a thread, bytes that a thread spills to
    memory for want of them, bytes of shared memory of a block."""

    name: str
    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class Time:
    """Seconds of a step, the mean over the run, and of the run, if each GPU reaches the share `mfu`
    of its peak, in FLOP/s."""

    step_s: float
    run_s: float
    mfu: float
    peak: float


@dataclass(frozen=True)
class Prediction:
    """Of rank 0; bytes where nothing else is said.

    micro_batch: sequences per forward pass; micro_steps: passes of a step. peaks {phase: bytes};
    memory {part: bytes} of what stays from step to step. Of a step: flops {dtype: FLOPs} of matrix
    products, with attention's only if compiled; moved: bytes that operators or kernels read and
    write; collectives {kind and dtype: bytes}; launches: of a micro-step and the optimizers; saved:
    bytes that a micro-step's forward pass leaves to its backward pass. Only of a compiled run:
    graphs that were compiled, and how many of them after the warm-up; kernels as the card's
    assembler makes them.
    """

    micro_batch: int
    micro_steps: int
    peaks: dict[str, int]
    memory: dict[str, int]
    flops: dict[str, float]
    moved: float
    collectives: dict[str, float]
    launches: tuple[Launch, ...] = ()
    saved: int = 0
    graphs: int = 0
    recompiled: int = 0
    kernels: tuple[Kernel, ...] = ()

    @property
    def peak(self) -> int:
        """The largest of all phases."""
        return max(self.peaks.values())

    def fits(self, card: Card) -> bool:
        """Whether the peak leaves as much of the card's memory free as a trial run has to."""
        return self.peak <= MARGIN * card.memory
