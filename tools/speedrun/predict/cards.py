"""The GPUs for which a prediction can be made."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A GPU: its name as CUDA reports it, bytes of memory, CUDA's compute capability times ten,
    number of multiprocessors."""

    name: str
    memory: float
    sm: int
    multiprocessors: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that one block of threads can have."""
        return SHARED[self.sm]

    @property
    def threads(self) -> int:
        """Threads that a multiprocessor holds at a time."""
        return THREADS[self.sm]

    @property
    def bf16(self) -> bool:
        """Whether its tensor cores compute in bfloat16."""
        return self.sm >= 80


# From the technical specifications per compute capability in NVIDIA's CUDA C++ Programming Guide.
SHARED = {75: 64 * 2**10, 80: 163 * 2**10, 86: 99 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10,
          100: 227 * 2**10, 120: 99 * 2**10}
THREADS = {75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}

# From NVIDIA's data sheets and architecture white papers.
CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", 80 * 2**30, 90, 132),
    "h200": Card("NVIDIA H200", 141e9, 90, 132),
    "b200": Card("NVIDIA B200", 180e9, 100, 148),
    "a100": Card("NVIDIA A100-SXM4-80GB", 80 * 2**30, 80, 108),
    "l40s": Card("NVIDIA L40S", 48 * 2**30, 89, 142),
    "rtx6000ada": Card("NVIDIA RTX 6000 Ada Generation", 48 * 2**30, 89, 142),
    "5090": Card("NVIDIA GeForce RTX 5090", 32 * 2**30, 120, 170),
    "4090": Card("NVIDIA GeForce RTX 4090", 24 * 2**30, 89, 128),
    "3090": Card("NVIDIA GeForce RTX 3090", 24 * 2**30, 86, 82),
    "l4": Card("NVIDIA L4", 24 * 2**30, 89, 58),
    "t4": Card("Tesla T4", 15 * 2**30, 75, 40),  # 16 GiB, of which error correction takes one
}
