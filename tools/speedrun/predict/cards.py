"""The GPUs for which a prediction can be made."""

from dataclasses import dataclass

from speedrun.run.gpus import peak_flops


@dataclass(frozen=True)
class Card:
    """A GPU: its name as CUDA tells it, bytes of memory, bytes per second to and from it, CUDA's
    compute capability times ten, multiprocessors, bytes per second to the GPUs beside it."""

    name: str
    memory: float
    bandwidth: float
    sm: int
    multiprocessors: int
    links: float

    @property
    def flops(self) -> float:
        """Dense bfloat16 FLOP/s."""
        return peak_flops(self.name)

    def flops_in(self, dtype: str | None) -> float:
        """Dense FLOP/s of products in this dtype: FP8 has its own rate, all others bfloat16's."""
        return self.flops * (FP8 if dtype and dtype.startswith("float8") else 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that one block of threads can have."""
        return SHARED[self.sm]

    @property
    def threads(self) -> int:
        """Threads that a multiprocessor holds at a time."""
        return 2048 if self.sm in (80, 90) else 1536


# Products in FP8, summed in float32, against bfloat16. NVIDIA's figures with sparsity: 3,958 and
# 1,979 TFLOP/s (H100 and H200, data sheets); without: 330.3 and 165.2 (RTX 4090, Ada white paper),
# 419 and 209.5 (RTX 5090, RTX Blackwell white paper). Cards before the 4090's have no FP8.
FP8 = 2

# From the technical specifications per compute capability in NVIDIA's CUDA C++ Programming Guide.
SHARED = {80: 163 * 2**10, 86: 99 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10, 120: 99 * 2**10}

NVLINK, NVLINK_OF_A100 = 450e9, 300e9  # half of the data sheets' figures, which count both ways
PCIE_4, PCIE_5 = 32e9, 64e9  # of 16 lanes: assumed at home, where no card is asked how it sits

# From NVIDIA's data sheets and architecture white papers.
CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", 80 * 2**30, 3.35e12, 90, 132, NVLINK),
    "h200": Card("NVIDIA H200", 141e9, 4.8e12, 90, 132, NVLINK),
    "a100": Card("NVIDIA A100-SXM4-80GB", 80 * 2**30, 2.039e12, 80, 108, NVLINK_OF_A100),
    "5090": Card("NVIDIA GeForce RTX 5090", 32 * 2**30, 1.792e12, 120, 170, PCIE_5),
    "4090": Card("NVIDIA GeForce RTX 4090", 24 * 2**30, 1.008e12, 89, 128, PCIE_4),
    "3090": Card("NVIDIA GeForce RTX 3090", 24 * 2**30, 0.936e12, 86, 82, PCIE_4),
}
