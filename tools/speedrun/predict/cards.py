"""The GPUs for which a prediction can be made."""

from dataclasses import dataclass

from speedrun.run.gpus import peak_flops


@dataclass(frozen=True)
class Card:
    """A GPU: its name as CUDA tells it, bytes of memory, bytes per second to and from it."""

    name: str
    memory: float
    bandwidth: float

    @property
    def flops(self) -> float:
        """Dense bfloat16 FLOP/s."""
        return peak_flops(self.name)


# Memory and bandwidth are those of NVIDIA's data sheets.
CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", 80 * 2**30, 3.35e12),
    "h200": Card("NVIDIA H200", 141e9, 4.8e12),
    "a100": Card("NVIDIA A100-SXM4-80GB", 80 * 2**30, 2.039e12),
    "5090": Card("NVIDIA GeForce RTX 5090", 32 * 2**30, 1.792e12),
    "4090": Card("NVIDIA GeForce RTX 4090", 24 * 2**30, 1.008e12),
    "3090": Card("NVIDIA GeForce RTX 3090", 24 * 2**30, 0.936e12),
}
