"""Judges a machine: what is fine, what is missing and not needed, what to repair."""

from speedrun.doctor.accelerators import gpu_checks, kernel_checks, rank_check, reinstall
from speedrun.doctor.machine import Machine
from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding, MilestoneFinding, Report, count
from speedrun.doctor.storage import fetch, needed_shards, storage_checks
from speedrun.history.manifest import Manifest
from speedrun.run.plan import choose_scale
from speedrun.scripts.sizes import micro_batches

NEEDED = ("numpy", "rich")  # imported by the snapshots and by run_milestone.py, besides torch
LEAST_MEMORY = 2**29  # a rank at tiny scale was seen to take 0.43 GiB (05)


def examine(machine: Machine, manifest: Manifest, ways: dict) -> Report:
    """The Report on a machine and the written milestones.

    ways: id -> speedrun.doctor.switches.Way of every written milestone; empty without torch.
    """
    milestones = manifest.written()
    scale, reason = choose_scale(None, None, list(machine.gpus.names))
    checks = [
        Finding("Python", OK, f"{machine.python} (3.11 or newer is needed)"),
        _torch(machine), _packages(machine), *gpu_checks(machine, scale), rank_check(machine),
        *kernel_checks(machine, ways), _compiler(machine),
        Finding("CPU", OK, count(machine.cores, "core")), _memory(machine),
        *storage_checks(machine, milestones), Finding("scale", OK, f"{scale} ({reason})"),
    ]
    if reasons := dict.fromkeys(_why(way) for way in ways.values() if way.switches):
        longest = max(reasons, key=len)  # later milestones ask the same and more
        checks.append(Finding("switches", OK, longest))
    lines = [_milestone(m, ways.get(m.id), machine, manifest, scale) for m in milestones]
    return Report(scale, checks, lines)


def _torch(machine):
    pinned = machine.packages.pins["torch"]
    if machine.torch is None:
        do = reinstall(machine)
        if machine.torch_error == "not installed":
            do = "pip install -r requirements.txt"
            if machine.packages.unused_venv:
                do = ". .venv/bin/activate (it is installed there)"
        return Finding("torch", FIX, machine.torch_error, do)
    version = machine.torch.version
    if version.partition("+")[0] == pinned:
        return Finding("torch", OK, f"{version}, as pinned")
    return Finding("torch", NOTE, f"{version}; everything was tested with {pinned}",
                 f"pip install torch=={pinned}")


def _packages(machine):
    """All pinned packages but torch."""
    pins = machine.packages.pins
    installed = {name: version for name, version in machine.packages.installed.items()
                 if name != "torch"}
    missing = [name for name, version in installed.items() if version is None]
    other = [f"{name} {version} instead of {pins[name]}" for name, version in installed.items()
             if version not in (None, pins[name])]
    if not (missing or other):
        return Finding("packages", OK, f"{len(installed)} more as pinned")
    parts = [f"not installed: {', '.join(missing)}"] if missing else []
    status = FIX if set(missing) & set(NEEDED) else NOTE
    return Finding("packages", status, "; ".join(parts + other), "pip install -r requirements.txt")


def _compiler(machine):
    found = [path for path in machine.compilers.values() if path]
    if len(found) == len(machine.compilers):
        return Finding("compiler", OK, ", ".join(found))
    missing = [language for language, path in machine.compilers.items() if not path]
    on_gpus = machine.torch is not None and machine.torch.sees_cuda
    text = f"none for {' and '.join(missing)}; " + (
        "Triton needs one for C" if on_gpus else "only --set compile=True needs one")
    status = FIX if on_gpus and "C" in missing else ABSENT
    return Finding("compiler", status, text, "sudo apt-get install build-essential")


def _memory(machine):
    if machine.memory is None:
        return Finding("memory", OK, "this system does not tell")
    free = machine.memory if machine.memory_available is None else machine.memory_available
    text = f"{machine.memory / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    if free >= LEAST_MEMORY:
        return Finding("memory", OK, text)
    return Finding("memory", FIX, f"{text}; a rank at tiny scale takes almost 0.5",
                 "close other programs")


def _milestone(milestone, way, machine, manifest, scale):
    needed = needed_shards(milestone)
    facts = dict(shards_needed=needed, shards_here=machine.train_shards)
    if way is None:
        return MilestoneFinding(milestone.name, ABSENT, "not known without torch", **facts)
    if way.fault:
        return MilestoneFinding(milestone.name, FIX, way.fault, "pip install -r requirements.txt",
                              **facts)
    text = _path(way, machine)
    facts |= dict(switches=way.switches, why=_why(way))
    sizes = way.hyperparameters | manifest.overrides(milestone, scale)
    ranks = len(machine.gpus.names) or 1
    dealable = [n for n in range(1, ranks + 1) if micro_batches(sizes, n)]
    if ranks not in dealable:
        return MilestoneFinding(
            milestone.name, FIX, f"{text}; a step does not divide among {ranks} ranks",
            f"python tools/run_milestone.py {milestone.id} --nproc {max(dealable, default=1)}",
            **facts,
        )
    if needed:
        text += f"; {min(machine.train_shards, needed)} of {needed} shards"
    short_of_shards = scale == "record" and machine.train_shards < needed
    return MilestoneFinding(
        milestone.name, NOTE if short_of_shards else OK, text,
        fetch(needed) if short_of_shards else None, **facts,
    )


def _path(way, machine):
    """What the milestone will run as: device, precision, and its other switches."""
    switches = dict(way.switches)
    words = ["CUDA" if machine.torch.sees_cuda else "CPU",
             "bf16" if switches.pop("bf16", False) else "float32"]
    if switches.pop("compile", False):
        words.append("compiled")
    for name, on in switches.items():
        comment = f" ({way.comments[name]})" if way.comments[name] and not on else ""
        part = name.removeprefix("use_")
        words.append(part if on else f"no {part}{comment}")
    return ", ".join(words)


def _why(way):
    """Which switches are on or off, and the answer of the machine that made them so."""
    reasons = {}
    for name, on in way.switches.items():
        reasons.setdefault((way.questions[name], on), []).append(name)
    return "; ".join(f"{', '.join(names)} {'on' if on else 'off'}: {question} is {on}"
                     for (question, on), names in reasons.items())
