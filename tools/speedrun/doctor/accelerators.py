"""Judges what a machine has of GPUs and of what runs on them."""

from collections.abc import Iterator

from speedrun.doctor.machine import Machine
from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding, count, group
from speedrun.run.gpus import peak_flops

RECORD_GPU_MIB = 79_000  # of the H100s, 80 GB: what the snapshots' micro-batches are made for
BFLOAT16, FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)  # compute capabilities


def reinstall(machine: Machine) -> str:
    """The command that installs the pinned torch as the package index has it."""
    return f"pip install --force-reinstall torch=={machine.packages.pins['torch']}"


def gpu_checks(machine: Machine, scale: str) -> Iterator[Finding]:
    """A line for each kind of GPU, and one for CUDA. scale: the one that would be chosen."""
    gpus, torch = machine.gpus, machine.torch
    status = FIX if scale == "record" else NOTE  # the tiny scale runs on a CPU, too
    if not gpus.names:
        yield Finding("GPU", ABSENT, "none visible; a CPU runs the tiny scale")
    elif torch is None or torch.sees_cuda:
        yield from _kinds(machine, scale)
    elif torch.cuda is None:
        yield Finding("GPU", status, f"{group(gpus.names)}, but this torch is a build without CUDA",
                    reinstall(machine))
    else:
        said = f": {torch.why_not}" if torch.why_not else ""
        yield Finding("GPU", status, f"{group(gpus.names)}, but torch cannot use CUDA{said}",
                    f"update the NVIDIA driver to one for CUDA {torch.cuda}")

    text = "torch is a build without it"
    if torch is None:
        text = "not known without torch"
    elif torch.cuda:
        text = f"torch is built for {torch.cuda}"
    if gpus.names:
        text += f"; driver {gpus.driver or 'not told'}"
    yield Finding("CUDA", OK if torch and torch.sees_cuda else ABSENT, text)


def _kinds(machine, scale):
    gpus = machine.gpus
    capabilities = machine.torch.capabilities if machine.torch else (None,) * len(gpus.names)
    kinds = list(zip(gpus.names, gpus.memory_mib, capabilities, strict=False))
    for name, mib, capability in dict.fromkeys(kinds):
        peak = peak_flops(name)
        text = ", ".join([
            count(kinds.count((name, mib, capability)), name),
            f"{mib / 1024:.0f} GiB" if mib else "memory not told",
            f"{peak / 1e12:.0f} TFLOP/s in bf16" if peak else "peak not known, so no MFU is shown",
        ])
        if capability and capability < BFLOAT16:
            yield Finding("GPU", NOTE, f"{text}; no bfloat16 tensor cores",
                        "python tools/run_milestone.py 01 --set bf16=False")
        elif scale == "record" and 0 < mib < RECORD_GPU_MIB:
            yield Finding("GPU", NOTE, f"{text}; the records' have 80 GB",
                        "python tools/run_milestone.py 01 --device-batch auto")
        else:
            yield Finding("GPU", OK, text)


def rank_check(machine: Machine) -> Finding:
    """The collective backend that a run would take."""
    if machine.torch is None:
        return Finding("ranks", ABSENT, "not known without torch")
    backends = machine.torch.backends
    needed, where = ("nccl", "GPUs") if machine.torch.sees_cuda else ("gloo", "a CPU")
    if needed in backends:
        return Finding("ranks", OK, f"{needed} on {where} (torch has {', '.join(backends)})")
    return Finding("ranks", FIX, f"torch lacks {needed}, which joins ranks on {where}",
                 f"{reinstall(machine)} (on Windows: in WSL)")


def kernel_checks(machine: Machine, ways: dict) -> Iterator[Finding]:
    """Triton, FlexAttention, FP8 and FlashAttention-3, and which milestones use them.

    ways: id -> speedrun.doctor.switches.Way, empty without torch.
    """
    torch = machine.torch

    def users(ids):
        if set(ids) == set(ways):
            return "; all milestones use it" if ways else ""
        return f"; for {', '.join(ids)}" if ids else "; no written milestone uses it"

    def with_switch(part):
        return users([id for id, way in ways.items() if any(part in name for name in way.switches)])

    compiled = [id for id, way in ways.items() if way.switches.get("compile")]
    if "triton" in machine.modules:
        yield Finding("Triton", OK, f"there{users(compiled)}")
    elif compiled:
        yield Finding("Triton", FIX, f"not installed{users(compiled)}", reinstall(machine))
    else:
        yield Finding("Triton", ABSENT, "only compiling for GPUs needs it")

    if torch is None:
        yield Finding("FlexAttention", ABSENT, "not known without torch")
    elif not torch.flex_attention:
        yield Finding("FlexAttention", ABSENT, f"not in torch {torch.version}")
    elif torch.sees_cuda:
        yield Finding("FlexAttention", OK, f"there{with_switch('flex')}")
    else:
        yield Finding("FlexAttention", ABSENT, f"trains on GPUs only{with_switch('flex')}")

    capabilities = torch.capabilities if torch else ()
    enough = bool(capabilities) and min(capabilities) >= FLOAT8
    text = "there" if enough else "needs compute capability 8.9 (Ada, Hopper and later)"
    yield Finding("FP8", OK if enough else ABSENT, text + with_switch("fp8"))

    packages = [name for name in ("flash_attn_interface", "kernels") if name in machine.modules]
    on_hopper = bool(capabilities) and set(capabilities) == {HOPPER}
    if not on_hopper:
        yield Finding("FlashAttn-3", ABSENT, "needs Hopper (H100, H200)" + with_switch("flash"))
    elif packages:
        yield Finding("FlashAttn-3", OK, f"through {packages[0]}" + with_switch("flash"))
    else:
        yield Finding("FlashAttn-3", ABSENT, "no kernel installed" + with_switch("flash"),
                    "pip install kernels")
