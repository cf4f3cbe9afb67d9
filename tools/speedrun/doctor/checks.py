"""Finds out what this machine can run; works on a Python without any package, too."""

import importlib.metadata
import os
import platform
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import repeat
from textwrap import shorten
from types import ModuleType

from speedrun import install_command
from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding, Report
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import REPOSITORY, Manifest, Milestone
from speedrun.run.data import (
    BUILTIN,
    FINEWEB,
    fetch_command,
    has_shards,
    shards_in,
    shards_read,
)
from speedrun.run.fit_batch import MARGIN, find_prediction, largest_predicted
from speedrun.run.gpus import (
    BFLOAT16,
    FLOAT8,
    RECORD_MIB,
    cuda_fault,
    differing,
    find_fault,
    peak_flops,
    taken_by_others,
    visible_capabilities,
    visible_gpus,
    visible_memory,
)
from speedrun.run.kernels import OK as TRIED
from speedrun.run.kernels import try_kernel
from speedrun.run.plan import choose_scale
from speedrun.scripts.find import find_script, load_snapshot, paths_taken, switches

REQUIREMENTS = REPOSITORY / "requirements.txt"
NEEDED = {"numpy", "rich"}  # imported by the snapshots and by run_milestone.py, apart from torch
COMPILERS = {"C": ("CC", "gcc", "clang", "cc", "cl"), "C++": ("CXX", "g++", "clang++", "c++", "cl")}
LEAST_BYTES = 10**8  # the embedded corpus takes 20 MB, a log and a checkpoint at tiny scale 5
HOPPER = (9, 0)  # compute capability
PYTHON, TORCHES = ("3.11", "3.13"), ("2.11", "2.15")  # tried on a CPU: the first and the last
# As Dao-AILab's repository builds it, and as PyTorch looks for it.
FLASH_ATTENTION = "flash_attn_interface"


def examine(manifest: Manifest, asked: Milestone | None = None) -> Report:
    """The Report on this machine and the milestones, with advice for the one that is asked for
    (None: the last of the first chain); takes as long as importing torch."""
    first, gpus = manifest.milestones[0], visible_gpus()
    asked = asked or [m for m in manifest.milestones if m.chain == first.chain][-1]
    fault = cuda_fault() if gpus else find_fault()
    capability = min(visible_capabilities(), default=None) if gpus else None
    scale, reason = choose_scale(
        None, None, [] if fault else gpus, capability=capability, fault=fault)
    torch, torch_check = find_torch()
    checks = [
        Finding("Python", OK, f"{platform.python_version()} (tried: {' to '.join(PYTHON)})"),
        torch_check, package_check(),
        *gpu_checks(torch, gpus, visible_memory() if gpus else [], scale, asked),
    ]
    if torch is not None:
        checks += [rank_check(torch), *kernel_checks(torch, manifest)]
    checks += [
        compiler_check(on_gpus=torch is not None and torch.cuda.is_available()), computer_check(),
        *storage_checks(bool(gpus), asked), Finding("scale", OK, f"{scale} ({reason})"),
    ]
    return Report(scale, checks, [milestone_check(m, torch) for m in manifest.milestones])


# ---- software ----


def pins() -> dict[str, str]:
    """The versions in requirements.txt, {name of a package: version}."""
    text = REQUIREMENTS.read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", text, re.MULTILINE))


def reinstall() -> str:
    """The command that installs the pinned torch from the package index."""
    return f"pip install --force-reinstall torch=={pins()['torch']}"


def find_torch() -> tuple[ModuleType | None, Finding]:
    """The module torch, None if it cannot be imported, and its line; takes seconds."""
    if find_spec("torch") is None:
        return None, Finding("torch", FIX, "not installed", install_command())
    try:
        import torch
        import torch.distributed
    except Exception as error:  # a missing library, a build for another machine
        return None, Finding("torch", FIX, _brief(f"cannot be imported: {error}"), reinstall())
    version, pinned = torch.__version__, pins()["torch"]
    if version.partition("+")[0] == pinned:
        return torch, Finding("torch", OK, f"{version}, as pinned")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    least, most = (tuple(map(int, text.split("."))) for text in TORCHES)
    text = f"{version}; tested with {pinned}, tried with {' to '.join(TORCHES)} on a CPU"
    if least <= numbers <= most:
        return torch, Finding("torch", OK, text)
    return torch, Finding("torch", NOTE, text, f"pip install torch=={pinned}")


def package_check() -> Finding:
    """All pinned packages except torch."""
    missing, other, pinned = [], [], pins()
    del pinned["torch"]
    for name, version in pinned.items():
        try:
            if (found := importlib.metadata.version(name)) != version:
                other.append(f"{name} {found} instead of {version}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if not (missing or other):
        return Finding("packages", OK, f"{len(pinned)} more as pinned")
    parts = [f"not installed: {', '.join(missing)}"] if missing else []
    return Finding("packages", FIX if NEEDED & set(missing) else NOTE, "; ".join(parts + other),
                   install_command())


def compiler_check(on_gpus: bool) -> Finding:
    """Compilers for the code that torch and Triton generate. on_gpus: torch uses GPUs."""
    found = {}
    for language, (variable, *programs) in COMPILERS.items():
        paths = map(shutil.which, [os.environ.get(variable, ""), *programs])
        found[language] = next(filter(None, paths), None)
    missing = [language for language, path in found.items() if path is None]
    if not missing:
        return Finding("compiler", OK, ", ".join(found.values()))
    use = "Triton needs one for C" if on_gpus else "only --set compile=True needs one"
    return Finding("compiler", FIX if on_gpus and "C" in missing else ABSENT,
                   f"none for {' and '.join(missing)}; {use}",
                   "sudo apt-get install build-essential")


# ---- hardware ----


def computer_check() -> Finding:
    """Cores and memory, as far as the system reports them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} core{'s' * (cores != 1)}"
    if hasattr(os, "sysconf"):
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        text += f", {size / 2**30:.1f} GiB of memory"
    return Finding("CPU", OK, text)


def gpu_checks(torch: ModuleType | None, gpus: Sequence[str], memory: Sequence[int],
               scale: str, asked: Milestone) -> Iterator[Finding]:
    """A line for each kind of GPU, and one for CUDA. torch: None if it cannot be imported; gpus:
    names of the visible ones; memory: MiB of each; scale: the one that would be chosen; asked: what
    the advice is for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = torch is not None and torch.cuda.is_available()
    if not gpus and (fault := find_fault()):
        yield Finding("GPU", NOTE, f"none visible: {_brief(fault)}; a CPU runs the tiny scale",
                      "repair the NVIDIA driver until nvidia-smi lists the GPUs")
    elif not gpus and has_cuda:
        yield Finding("GPU", NOTE, "torch can use one, but nvidia-smi, by which the tools find it,"
                      " is not there; they run the tiny scale", "install the driver's nvidia-smi")
    elif not gpus:
        yield Finding("GPU", ABSENT, "none visible; a CPU runs the tiny scale")
    elif torch is None or has_cuda:
        kinds = zip(gpus, memory, capabilities_of(torch) if torch else repeat(None), strict=False)
        for kind, number in Counter(kinds).items():
            yield _kind_check(number, *kind, scale, asked)
        for fault in filter(None, (differing(gpus), taken_by_others())):
            yield Finding("GPU", NOTE, fault, "choose with CUDA_VISIBLE_DEVICES=N")
    else:
        fault, do = "this torch is a build without CUDA", reinstall()
        if torch.version.cuda:
            fault = ": ".join(["torch cannot use CUDA", *(str(it.message) for it in caught[:1])])
            do = f"update the NVIDIA driver to one for CUDA {torch.version.cuda}"
        if known := cuda_fault():
            fault, _, do = known.rpartition(": ")
        names = ", ".join(f"{number} x {name}" for name, number in Counter(gpus).items())
        # the tiny scale runs on a CPU, too
        yield Finding("GPU", FIX if scale == "record" else NOTE, f"{names}, but {fault}", do)

    if torch is not None:
        cuda = torch.version.cuda
        text = f"torch is built for {cuda}" if cuda else "torch is a build without it"
        yield Finding("CUDA", OK if has_cuda else ABSENT, text)


def _kind_check(number, name, mib, capability, scale, asked):
    """The line of a number of equal GPUs. mib: memory, 0 if it is not known."""
    peak = peak_flops(name)
    memory = f"{mib / 1024:.0f} GiB" if mib else "memory not known"
    speed = f"{peak / 1e12:.0f} TFLOP/s in bf16" if peak else "peak not known, so no MFU is shown"
    text = f"{number} x {name}, {memory}, {speed}"
    if capability and capability < BFLOAT16:
        return Finding("GPU", NOTE, f"{text}; no bfloat16 tensor cores, so only the tiny scale",
                       f"python tools/run_milestone.py {asked.id} --scale tiny")
    if scale == "record" and 0 < mib < RECORD_MIB:
        return Finding("GPU", NOTE, f"{text}; the records' have 80 GB", advice(asked, mib))
    return Finding("GPU", OK, text)


def advice(milestone: Milestone, mib: int) -> str:
    """The command that trains a milestone on one GPU of `mib` MiB, with sequences that are
    predicted to fit; --device-batch auto, which tries, if nothing is predicted."""
    script = find_script(milestone.id)
    predicted = find_prediction(script, {})
    found = predicted and largest_predicted(
        predicted, script.hyperparameters, 1, MARGIN * mib * 2**20)
    size = f"{found.sequences}{found.shortened(script.hyperparameters)}" if found else "auto"
    return f"python tools/run_milestone.py {milestone.id} --nproc 1 --device-batch {size}"


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


def kernel_checks(torch: ModuleType, manifest: Manifest) -> Iterator[Finding]:
    """Triton, FlexAttention, FP8 and FlashAttention, each tried if it is here, and how many of the
    milestones use them."""
    needs, instead = load_glossary().column("needs"), load_glossary().column("cpu")
    capabilities = capabilities_of(torch)
    least, on_hopper = min(capabilities, default=(0, 0)), set(capabilities) == {HOPPER}
    kernels = {  # name: whether it is here, what it needs
        "Triton": (find_spec("triton"), "not installed, only compiling for GPUs needs it"),
        "FlexAttention": (capabilities and torch.__version__ >= "2.5",
                          "trains on GPUs only, since torch 2.5"),
        "FP8": (least >= FLOAT8, "needs compute capability 8.9 (Ada, Hopper and later)"),
        "FlashAttn-3": (on_hopper and find_spec(FLASH_ATTENTION),
                        f"FA2 in its place: no {FLASH_ATTENTION} here, see requirements.txt"
                        if on_hopper else "needs Hopper (H100, H200)"),
    }
    used = [{needs.get(name) for name in switches(m.script.read_text(encoding="utf-8"))}
            for m in manifest.milestones]
    for name, (is_here, need) in kernels.items():
        users = sum(name in some for some in used)
        used_by = f"used by {users} milestone{'s' * (users != 1)}"
        fallback = "FlashAttn-2" if name == "FlashAttn-3" and least >= BFLOAT16 else None
        trial = capabilities and (name if is_here else fallback)
        if trial and (error := try_kernel(trial)) != TRIED:
            off = "".join(f" --set {switch}={instead[switch]}" for switch in needs
                          if needs[switch] == name)
            yield Finding(name, FIX, f"{trial} fails, {_brief(error)}; {used_by}",
                          f"run without it, as far as a script has these:{off}")
        elif is_here:
            yield Finding(name, OK, f"{'works' if capabilities else 'there'}; {used_by}")
        elif name == "Triton" and capabilities:
            yield Finding(name, FIX, f"{need}; {used_by}", reinstall())
        else:
            yield Finding(name, ABSENT, f"{need}; {used_by}")


# ---- disk, shards, milestones ----


def count_shards() -> tuple[int, int]:
    """How many training and validation shards of FineWeb are here."""
    return tuple(len(shards_in(FINEWEB, split)) for split in ("train", "val"))


def storage_checks(has_gpus: bool, asked: Milestone) -> Iterator[Finding]:
    """The disk, the shards of FineWeb, beside those that the milestone `asked` reads, and the
    embedded corpus. Only a machine with GPUs is advised to fetch shards."""
    free, (train, val) = shutil.disk_usage(REPOSITORY).free, count_shards()
    if free < LEAST_BYTES:
        yield Finding("disk", FIX, f"{free / 1e9:.2f} GB free; a run at tiny scale takes 0.1",
                      "free some space")
    else:
        yield Finding("disk", OK, f"{free / 1e9:.1f} GB free; a shard of FineWeb takes 0.2")
    pretrains = "train_files" in find_script(asked.id).hyperparameters
    reads = shards_read(asked.step_tokens_read) if pretrains else 0
    found = (f"{train} training shard{'s' * (train != 1)}, {val} of validation;"
             f" {asked.id} reads {reads or 'none'}")
    if not pretrains or val and train >= reads:
        yield Finding("FineWeb", OK, found)
    else:
        yield Finding("FineWeb", NOTE if has_gpus else ABSENT,
                      f"{found}, at record scale only",
                      fetch_command(shards=reads) if has_gpus else None)
    yield Finding("corpus", OK, "made, for the tiny scale" if has_shards(BUILTIN)
                  else "the first run at tiny scale makes it")


def milestone_check(milestone: Milestone, torch: ModuleType | None) -> Finding:
    """Whether a milestone's script can be imported, and the paths that it takes here. torch: None
    if it cannot be imported. What a run of it needs, the run itself says."""
    if torch is None:
        return Finding(milestone.name, ABSENT, "not known without torch")
    try:
        source = milestone.script.read_text(encoding="utf-8")
        module = load_snapshot(milestone.script)
        values = vars(module.Hyperparameters())
    except Exception as error:  # an import may fail in any way
        return Finding(milestone.name, FIX, _brief(f"{type(error).__name__}: {error}"),
                       install_command())
    return Finding(milestone.name, OK, paths_taken(source, values, torch.cuda.is_available()))


def _brief(text):
    return shorten(text, 200, placeholder=" …")
