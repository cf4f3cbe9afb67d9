"""Finds out what this machine can run; works on a Python without any package, too."""

import ast
import importlib.metadata
import os
import platform
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby, repeat
from textwrap import shorten
from types import ModuleType

from speedrun import install_command
from speedrun.base.errors import UserError
from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding, MilestoneFinding, Report
from speedrun.history.fields import default_hyperparameters
from speedrun.history.glossary import load_glossary
from speedrun.history.manifest import REPOSITORY, Manifest, Milestone
from speedrun.run.data import (
    BUILTIN,
    FINEWEB,
    FINEWEB_SHARD_TOKENS,
    fetch_command,
    has_shards,
    shard_length,
    shards_read,
)
from speedrun.run.fit_batch import MARGIN, find_prediction, largest_predicted
from speedrun.run.gpus import RECORD_MIB, find_fault, peak_flops, visible_gpus, visible_memory
from speedrun.run.kernels import OK as TRIED
from speedrun.run.kernels import try_kernel
from speedrun.run.plan import choose_scale
from speedrun.scripts.find import find_script, load_snapshot, paths_taken, switches
from speedrun.scripts.sizes import micro_batches

REQUIREMENTS = REPOSITORY / "requirements.txt"
NEEDED = {"numpy", "rich"}  # imported by the snapshots and by run_milestone.py, apart from torch
COMPILERS = {"C": ("CC", "gcc", "clang", "cc", "cl"), "C++": ("CXX", "g++", "clang++", "c++", "cl")}
SHARD_BYTES = 1024 + 2 * FINEWEB_SHARD_TOKENS  # a header, then 16 bits for each token
LEAST_BYTES = 10**8  # the embedded corpus takes 20 MB, a log and a checkpoint at tiny scale 5
BFLOAT16, FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)  # compute capabilities
# As Dao-AILab's repository builds it, and as PyTorch looks for it.
FLASH_ATTENTION = "flash_attn_interface"


def examine(manifest: Manifest) -> Report:
    """The Report on this machine and the milestones; takes as long as importing torch."""
    gpus = visible_gpus()
    memory = visible_memory() if gpus else []
    scale, reason = choose_scale(None, None, gpus)
    torch, torch_check = find_torch()
    milestones = [
        milestone_check(milestone, torch, manifest, scale, len(gpus) or 1, min(memory, default=0))
        for milestone in manifest.milestones]
    checks = [
        Finding("Python", OK, f"{platform.python_version()} (3.11 or newer is needed)"),
        torch_check, package_check(), *gpu_checks(torch, gpus, memory, scale),
    ]
    if torch is not None:
        used = {milestone.id: line.switches
                for milestone, line in zip(manifest.milestones, milestones, strict=True)}
        checks += [rank_check(torch), *kernel_checks(torch, used)]
    checks += [
        compiler_check(on_gpus=torch is not None and torch.cuda.is_available()), computer_check(),
        *storage_checks(bool(gpus), max((line.shards_needed for line in milestones), default=0)),
        Finding("scale", OK, f"{scale} ({reason})"),
    ]
    return Report(scale, checks, milestones)


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
    return torch, Finding("torch", NOTE, f"{version}; everything was tested with {pinned}",
                          f"pip install torch=={pinned}")


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
               scale: str) -> Iterator[Finding]:
    """A line for each kind of GPU, and one for CUDA. torch: None if it cannot be imported; gpus:
    names of the visible ones; memory: MiB of each; scale: the one that would be chosen."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = torch is not None and torch.cuda.is_available()
    if not gpus and (fault := find_fault()):
        yield Finding("GPU", NOTE, f"none visible: {_brief(fault)}; a CPU runs the tiny scale",
                      "repair the NVIDIA driver until nvidia-smi lists the GPUs")
    elif not gpus:
        yield Finding("GPU", ABSENT, "none visible; a CPU runs the tiny scale")
    elif torch is None or has_cuda:
        kinds = zip(gpus, memory, capabilities_of(torch) if torch else repeat(None), strict=False)
        for kind, number in Counter(kinds).items():
            yield _kind_check(number, *kind, scale)
    else:
        fault, do = "this torch is a build without CUDA", reinstall()
        if torch.version.cuda:
            fault = ": ".join(["torch cannot use CUDA", *(str(it.message) for it in caught[:1])])
            do = f"update the NVIDIA driver to one for CUDA {torch.version.cuda}"
        names = ", ".join(f"{number} x {name}" for name, number in Counter(gpus).items())
        # the tiny scale runs on a CPU, too
        yield Finding("GPU", FIX if scale == "record" else NOTE, f"{names}, but {fault}", do)

    if torch is not None:
        cuda = torch.version.cuda
        text = f"torch is built for {cuda}" if cuda else "torch is a build without it"
        yield Finding("CUDA", OK if has_cuda else ABSENT, text)


def _kind_check(number, name, mib, capability, scale):
    """The line of a number of equal GPUs. mib: memory, 0 if it is not known."""
    peak = peak_flops(name)
    text = ", ".join([
        f"{number} x {name}",
        f"{mib / 1024:.0f} GiB" if mib else "memory not known",
        f"{peak / 1e12:.0f} TFLOP/s in bf16" if peak else "peak not known, so no MFU is shown",
    ])
    if capability and capability < BFLOAT16:
        return Finding("GPU", NOTE, f"{text}; no bfloat16 tensor cores",
                       "python tools/run_milestone.py 01 --set bf16=False")
    if scale == "record" and 0 < mib < RECORD_MIB:
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


def kernel_checks(torch: ModuleType, used: dict[str, dict[str, bool]]) -> Iterator[Finding]:
    """Triton, FlexAttention, FP8 and FlashAttention, each tried if it is here, and which milestones
    use them.

    used: id of a milestone -> {hyperparameter that depends on the machine: its value here}.
    """
    needs, order = load_glossary().column("needs"), list(used)
    instead = load_glossary().column("cpu")
    capabilities = capabilities_of(torch)
    fallback = "FlashAttn-2" if min(capabilities, default=(0, 0)) >= BFLOAT16 else None
    on_hopper = set(capabilities) == {HOPPER}
    kernels = [  # name, whether it is here, what it needs
        ("Triton", find_spec("triton"), "not installed, only compiling for GPUs needs it"),
        ("FlexAttention", capabilities and torch.__version__ >= "2.5",
         "trains on GPUs only, since torch 2.5"),
        ("FP8", min(capabilities, default=(0, 0)) >= FLOAT8,
         "needs compute capability 8.9 (Ada, Hopper and later)"),
        ("FlashAttn-3", on_hopper and find_spec(FLASH_ATTENTION),
         f"FA2 in its place: no {FLASH_ATTENTION} here, see requirements.txt"
         if on_hopper else "needs Hopper (H100, H200)"),
    ]
    for name, is_here, need in kernels:
        users = [id for id, values in used.items()
                 if any(needs.get(switch) == name for switch in values)]
        groups = [list(group) for _, group in groupby(  # neighbours in the chain
            users, lambda id, users=users: order.index(id) - users.index(id))]
        ranges = [f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else ids[0] for ids in groups]
        who = "all milestones" if len(users) == len(used) else ", ".join(ranges)
        used_by = f"used by {who or 'no milestone'}"
        trial = name if is_here else fallback if name == "FlashAttn-3" else None
        error = try_kernel(trial) if trial and capabilities else TRIED
        if error != TRIED:
            off = "".join(f" --set {switch}={instead[switch]}" for switch in needs
                          if needs[switch] == name)
            yield Finding(name, FIX, f"{trial} fails, {_brief(error)}; {used_by}",
                          f"run without it, as far as a script has these:{off}")
            continue
        is_fault = name == "Triton" and not is_here and any(
            needs.get(switch) == name and value
            for values in used.values() for switch, value in values.items())
        here = "works" if capabilities else "there"
        yield Finding(name, OK if is_here else FIX if is_fault else ABSENT,
                      f"{here if is_here else need}; {used_by}", reinstall() if is_fault else None)


# ---- disk and shards ----


def count_shards() -> tuple[int, int]:
    """How many whole training and validation shards of FineWeb are here."""
    def is_whole(file):
        try:
            return shard_length(file) > 0
        except (OSError, UserError):
            return False

    return tuple(sum(map(is_whole, FINEWEB.glob(f"*_{split}_*.bin"))) for split in ("train", "val"))


def storage_checks(has_gpus: bool, most: int) -> Iterator[Finding]:
    """The disk, the shards of FineWeb and the embedded corpus. Only a machine with GPUs is advised
    to fetch `most` training shards, as many as any milestone reads."""
    train, val = count_shards()
    missing = max(0, most - train) + (val == 0)
    free, size = shutil.disk_usage(REPOSITORY).free, missing * SHARD_BYTES
    text = f"{free / 1e9:.1f} GB free"
    if missing:
        text += f"; the {missing} missing FineWeb shards take {size / 1e9:.1f} GB"
    if free < LEAST_BYTES:
        yield Finding("disk", FIX, f"{free / 1e9:.2f} GB free; a run at tiny scale takes 0.1",
                      "free some space")
    elif has_gpus and free < size:
        room = free // SHARD_BYTES - (val == 0)  # for training shards
        yield Finding("disk", NOTE, text,
                      fetch_command(shards=train + room) if room > 0 else "free some space")
    else:
        yield Finding("disk", OK, text)

    found = f"{train} training shard{'s' * (train != 1)}, {val} of validation"
    if not missing:
        yield Finding("FineWeb", OK, found)
    elif has_gpus:
        yield Finding("FineWeb", NOTE, f"{found}; the milestones read up to {most}",
                      fetch_command(shards=most))
    else:
        yield Finding("FineWeb", ABSENT, f"{found}; only the record scale reads them, up to {most}")
    yield Finding("corpus", OK, "made, for the tiny scale" if has_shards(BUILTIN)
                  else "the first run at tiny scale makes it")


# ---- milestones ----


def milestone_check(
    milestone: Milestone, torch: ModuleType | None, manifest: Manifest, scale: str, ranks: int,
    memory: int = 0,
) -> MilestoneFinding:
    """The line of a milestone, found by importing its script.

    torch: None if it cannot be imported; scale and ranks: those that would be chosen; memory: MiB
    of the smallest GPU, 0 if it is not known.
    """
    known = default_hyperparameters(milestone.script)
    needed = 0  # for a full run, record scale
    if "train_files" in known and milestone.train_steps:
        needed = shards_read(milestone.step_tokens_read)
    facts = dict(shards_needed=needed)

    def line(status, text, do=None):
        return MilestoneFinding(milestone.name, status, text, do, **facts)

    if torch is None:
        return line(ABSENT, "not known without torch")
    try:
        source = milestone.script.read_text(encoding="utf-8")
        module = load_snapshot(milestone.script)
        hyperparameters = vars(module.Hyperparameters())
    except Exception as error:  # an import may fail in any way
        return line(FIX, _brief(f"{type(error).__name__}: {error}"), install_command())
    if missing := missing_names(ast.parse(source), module):
        return line(FIX, f"torch {torch.__version__} lacks {', '.join(missing)}", install_command())

    facts["switches"] = {name: hyperparameters[name] for name in switches(source)}
    text = paths_taken(source, hyperparameters, torch.cuda.is_available())
    sizes = hyperparameters | manifest.overrides(milestone, scale)
    possible = [n for n in range(1, ranks + 1) if micro_batches(sizes, n)]
    if "total_batch_size" in known and ranks not in possible:
        return line(
            FIX, f"{text}; a step does not divide among {ranks} ranks",
            f"python tools/run_milestone.py {milestone.id} --nproc {max(possible, default=1)}")
    here, do = count_shards()[0], None
    if "checkpoint" in known:
        text += "; starts from a checkpoint"
    if needed:
        text += f"; {min(here, needed)} of {needed} shards"
    if scale == "record" and memory and torch.cuda.is_available():
        fitting, do = _what_fits(milestone, ranks, memory)
        text += fitting
    if scale == "record" and here < needed:
        do = fetch_command(shards=needed)
    return line(NOTE if do else OK, text, do)


def _what_fits(milestone, ranks, memory):
    """A remark on the largest micro-batch predicted to fit into `memory` MiB, and the command that
    tries it or, if nothing fits, trains tiny; "" and None if the script's own fits."""
    script, run = find_script(milestone.id), f"python tools/run_milestone.py {milestone.id}"
    own, prediction = script.hyperparameters, find_prediction(script, {})
    if prediction is None:
        return "", None
    found = largest_predicted(prediction, own, ranks, MARGIN * memory * 2**20)
    if found is None:
        return "; predicted to be too large for this memory", f"{run} --scale tiny"
    shorter = found.shortened(own)
    if not shorter and found.sequences >= own["micro_batch_size"]:
        return "", None
    return (f"; predicted to fit: {found} tokens at a time",
            f"{run} --device-batch auto{shorter}")


def missing_names(tree: ast.AST, module: ModuleType) -> list[str]:
    """The names, like torch.nn.functional.rms_norm, that a script uses of the modules that it
    imports and that these modules do not have, in order."""
    missing = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        try:
            owner = _meant(node.value, module)
        except AttributeError:  # a local name, or a name in a missing module
            continue
        if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
            missing.add(f"{owner.__name__}.{node.attr}")
    return sorted(missing)


def _meant(node, module):
    """What a name of the module means, or one that follows dots; AttributeError for the rest."""
    if isinstance(node, ast.Attribute):
        return getattr(_meant(node.value, module), node.attr)
    return getattr(module, node.id)


def _brief(text):
    return shorten(text, 200, placeholder=" …")
