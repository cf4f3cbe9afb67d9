"""What a compiled training step starts on a GPU, and what its Triton kernels take of it."""

import re
from dataclasses import dataclass

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
