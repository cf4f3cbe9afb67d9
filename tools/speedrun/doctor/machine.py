"""Asks this machine what it has, for doctor.py; works on a bare Python, without any package."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from speedrun.history.manifest import REPOSITORY
from speedrun.run.data import BUILTIN, FINEWEB, has_shards
from speedrun.run.gpus import visible_gpus, visible_memory

REQUIREMENTS = REPOSITORY / "requirements.txt"
# Triton compiles for GPUs, the others hold FlashAttention-3: as Dao-AILab's repository builds it,
# and Hugging Face's client, which downloads it built.
MODULES = ("triton", "flash_attn_interface", "kernels")
COMPILERS = {"C": ("CC", "gcc", "clang", "cc", "cl"), "C++": ("CXX", "g++", "clang++", "c++", "cl")}


@dataclass(frozen=True)
class Torch:
    """What an importable torch can do: the CUDA version that it is built for (None: without),
    whether it finds a usable device, why not if it said so, (major, minor) compute capability of
    each visible GPU, collective backends, and whether it has FlexAttention."""

    version: str
    cuda: str | None
    sees_cuda: bool
    why_not: str | None
    capabilities: tuple[tuple[int, int], ...]
    backends: tuple[str, ...]
    flex_attention: bool


@dataclass(frozen=True)
class Gpus:
    """The visible GPUs as nvidia-smi shows them: names, memory in MiB (0: not told), driver."""

    names: tuple[str, ...]
    memory_mib: tuple[int, ...]
    driver: str | None


@dataclass(frozen=True)
class Packages:
    """The pins of requirements.txt and what is installed, name -> version (None: not there), and
    whether the repository's own .venv is whole but belongs to another Python than this one."""

    pins: dict[str, str]
    installed: dict[str, str | None]
    unused_venv: bool


@dataclass(frozen=True)
class Machine:
    """All that was found. torch_error: why torch cannot be imported; modules: those of MODULES that
    are there; compilers: language -> path or None; memory and disk in bytes (None: not told);
    train_shards and val_shards: files of FineWeb; has_corpus: the embedded corpus is made."""

    python: str
    packages: Packages
    torch: Torch | None
    torch_error: str | None
    gpus: Gpus
    modules: tuple[str, ...]
    compilers: dict[str, str | None]
    cores: int
    memory: int | None
    memory_available: int | None
    disk_free: int
    train_shards: int
    val_shards: int
    has_corpus: bool


def probe() -> Machine:
    """Asks for everything; takes as long as importing torch does."""
    torch, torch_error = probe_torch()
    memory, available = probe_memory()
    train_shards, val_shards, has_corpus = probe_shards()
    return Machine(
        platform.python_version(), probe_packages(), torch, torch_error, probe_gpus(),
        probe_modules(), probe_compilers(), probe_cores(), memory, available, probe_disk(),
        train_shards, val_shards, has_corpus,
    )


def probe_torch() -> tuple[Torch | None, str | None]:
    """The Torch and None, or None and why it cannot be imported ("not installed" if it is not)."""
    if not _importable("torch"):
        return None, "not installed"
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a library that is missing, a build for another machine
        return None, f"cannot be imported: {_one_line(error)}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sees_cuda = torch.cuda.is_available()
        count = torch.cuda.device_count() if sees_cuda else 0
        capabilities = tuple(torch.cuda.get_device_capability(i) for i in range(count))
    backends = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    return Torch(
        torch.__version__, torch.version.cuda, sees_cuda,
        _one_line(said[0].message) if said and not sees_cuda else None, capabilities,
        tuple(name for name, there in backends.items() if dist.is_available() and there()),
        _importable("torch.nn.attention.flex_attention"),
    ), None


def probe_gpus() -> Gpus:
    """The visible GPUs; none where there is no nvidia-smi."""
    names = visible_gpus()
    if not names:
        return Gpus((), (), None)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        driver = answer.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return Gpus(tuple(names), tuple(visible_memory()), driver)


def probe_packages(requirements: Path = REQUIREMENTS) -> Packages:
    """The pins in a requirements file and the versions that are installed."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    pins = dict(m.groups() for line in lines if (m := re.match(r"([\w.-]+)==([^\s;#]+)", line)))
    installed = {}
    for name in pins:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    venv = REPOSITORY / ".venv"
    is_this = venv.exists() and Path(sys.prefix).resolve() == venv.resolve()
    return Packages(pins, installed, (venv / ".installed").exists() and not is_this)


def probe_modules() -> tuple[str, ...]:
    """Those of MODULES that can be imported."""
    return tuple(filter(_importable, MODULES))


def probe_compilers() -> dict[str, str | None]:
    """Path of a compiler for each language, or None."""
    return {
        language: next(filter(None, map(shutil.which, (os.environ.get(variable, ""), *programs))),
                       None)
        for language, (variable, *programs) in COMPILERS.items()
    }


def probe_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def probe_memory() -> tuple[int | None, int | None]:
    """Memory and how much of it is available, in bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        return sizes["MemTotal"], sizes.get("MemAvailable")
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, ValueError, OSError):
        return None, None


def probe_disk() -> int:
    """Bytes that are free where data and runs are written."""
    return shutil.disk_usage(REPOSITORY).free


def probe_shards() -> tuple[int, int, bool]:
    """Training and validation shards of FineWeb, and whether the embedded corpus is made."""
    train, val = (len(list(FINEWEB.glob(f"*_{split}_*.bin"))) for split in ("train", "val"))
    return train, val, has_shards(BUILTIN)


def _importable(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the package around it is missing, or half imported
        return False


def _one_line(message):
    text = " ".join(str(message).split())
    return text if len(text) <= 160 else text[:160] + " …"
