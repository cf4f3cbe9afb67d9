"""Asks for GPUs and for what runs on them."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby, repeat
from types import ModuleType

from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding
from speedrun.doctor.software import reinstall
from speedrun.history.glossary import load_glossary
from speedrun.run.gpus import peak_flops, visible_memory

RECORD_GPU_MIB = 79_000  # of the H100s, 80 GB: what the snapshots' micro-batches are made for
BFLOAT16, FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)  # compute capabilities
# As Dao-AILab's repository builds it, and as PyTorch looks for it.
FLASH_ATTENTION = "flash_attn_interface"


def gpu_checks(torch: ModuleType | None, gpus: Sequence[str], scale: str) -> Iterator[Finding]:
    """A line for each kind of GPU, and one for CUDA. torch: None if it cannot be imported; gpus:
    names of the visible ones; scale: the one that would be chosen."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sees_cuda = torch is not None and torch.cuda.is_available()
    if not gpus:
        yield Finding("GPU", ABSENT, "none visible; a CPU runs the tiny scale")
    elif torch is None or sees_cuda:
        capabilities = capabilities_of(torch) if torch else repeat(None)
        kinds = Counter(zip(gpus, visible_memory(), capabilities, strict=False))
        for kind, number in kinds.items():
            yield _kind_check(number, *kind, scale)
    else:
        fault, do = "this torch is a build without CUDA", reinstall()
        if torch.version.cuda:
            fault = ": ".join(["torch cannot use CUDA", *(str(it.message) for it in said[:1])])
            do = f"update the NVIDIA driver to one for CUDA {torch.version.cuda}"
        names = ", ".join(f"{number} x {name}" for name, number in Counter(gpus).items())
        # the tiny scale runs on a CPU, too
        yield Finding("GPU", FIX if scale == "record" else NOTE, f"{names}, but {fault}", do)

    if torch is not None:
        cuda = torch.version.cuda
        text = f"torch is built for {cuda}" if cuda else "torch is a build without it"
        yield Finding("CUDA", OK if sees_cuda else ABSENT, text)


def _kind_check(number, name, mib, capability, scale):
    """The line of a number of equal GPUs. mib: memory, 0 where it is not told."""
    peak = peak_flops(name)
    text = ", ".join([
        f"{number} x {name}",
        f"{mib / 1024:.0f} GiB" if mib else "memory not told",
        f"{peak / 1e12:.0f} TFLOP/s in bf16" if peak else "peak not known, so no MFU is shown",
    ])
    if capability and capability < BFLOAT16:
        return Finding("GPU", NOTE, f"{text}; no bfloat16 tensor cores",
                       "python tools/run_milestone.py 01 --set bf16=False")
    if scale == "record" and 0 < mib < RECORD_GPU_MIB:
        return Finding("GPU", NOTE, f"{text}; the records' have 80 GB",
                       "python tools/run_milestone.py 01 --device-batch auto")
    return Finding("GPU", OK, text)


def capabilities_of(torch: ModuleType) -> list[tuple[int, int]]:
    """The (major, minor) compute capability of each GPU that torch can use."""
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def rank_check(torch: ModuleType) -> Finding:
    """The collective backend that a run would take."""
    dist = torch.distributed
    needed, where = ("nccl", "GPUs") if torch.cuda.is_available() else ("gloo", "a CPU")
    if dist.is_available() and dist.is_backend_available(needed):
        return Finding("ranks", OK, f"{needed} on {where}")
    return Finding("ranks", FIX, f"torch lacks {needed}, which joins ranks on {where}",
                   f"{reinstall()} (on Windows: in WSL)")


def kernel_checks(torch: ModuleType, switches: dict[str, dict[str, bool]]) -> Iterator[Finding]:
    """Triton, FlexAttention, FP8 and FlashAttention-3, and which milestones use them.

    switches: id of a milestone -> {name of a hyperparameter that asks the machine: answer}.
    """
    needs = load_glossary().column("needs")

    def users_of(name, only_on=False):
        """The milestones with a switch that needs this, perhaps only where it is on."""
        return [id for id, values in switches.items() if any(
            needs.get(switch) == name and (value or not only_on)
            for switch, value in values.items())]

    def used(ids):
        """The users in words, neighbours in the chain as a range."""
        order = list(switches)
        groups = groupby(ids, lambda id: order.index(id) - ids.index(id))
        ranges = [f"{first} to {others[-1]}" if others else first
                  for first, *others in (list(group) for _, group in groups)]
        users = "all milestones" if len(ids) == len(switches) else ", ".join(ranges)
        return f"used by {users or 'no milestone'}"

    compiled = users_of("Triton", only_on=True)
    if find_spec("triton"):
        yield Finding("Triton", OK, f"there; {used(compiled)}")
    elif compiled:
        yield Finding("Triton", FIX, f"not installed; {used(compiled)}", reinstall())
    else:
        yield Finding("Triton", ABSENT, "only compiling for GPUs needs it")

    capabilities = capabilities_of(torch)
    on_hopper = set(capabilities) == {HOPPER}
    flash = find_spec(FLASH_ATTENTION) is not None
    # name, where it is, what it needs
    kernels = [
        ("FlexAttention", "there" if capabilities and torch.__version__ >= "2.5" else None,
         "trains on GPUs only, from torch 2.5 on"),
        ("FP8", "there" if min(capabilities, default=(0, 0)) >= FLOAT8 else None,
         "needs compute capability 8.9 (Ada, Hopper and later)"),
        ("FlashAttn-3", "there" if on_hopper and flash else None,
         f"FA2 in its place: no {FLASH_ATTENTION} here, see requirements.txt"
         if on_hopper else "needs Hopper (H100, H200)"),
    ]
    for name, where, need in kernels:
        status, text = (OK, where) if where else (ABSENT, need)
        yield Finding(name, status, f"{text}; {used(users_of(name))}")
