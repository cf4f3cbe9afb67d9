"""The report on this machine: what is fine, what is missing and not needed, what to repair."""

import os
import platform

from speedrun.doctor.accelerators import gpu_checks, kernel_checks, rank_check
from speedrun.doctor.milestones import milestone_check
from speedrun.doctor.report import OK, Finding, Report
from speedrun.doctor.software import compiler_check, find_torch, package_check
from speedrun.doctor.storage import storage_checks
from speedrun.history.manifest import Manifest
from speedrun.run.gpus import visible_gpus, visible_memory
from speedrun.run.plan import choose_scale


def examine(manifest: Manifest) -> Report:
    """The Report on this machine and the milestones; takes as long as importing torch."""
    gpus = visible_gpus()
    scale, reason = choose_scale(None, None, gpus)
    torch, torch_line = find_torch()
    checks = [
        Finding("Python", OK, f"{platform.python_version()} (3.11 or newer is needed)"),
        torch_line, package_check(), *gpu_checks(torch, gpus, scale),
    ]
    memory = min(visible_memory(), default=0)
    milestones = [milestone_check(milestone, torch, manifest, scale, len(gpus) or 1, memory)
                  for milestone in manifest.milestones]
    if torch is not None:
        switches = {m.id: line.switches
                    for m, line in zip(manifest.milestones, milestones, strict=True)}
        checks += [rank_check(torch), *kernel_checks(torch, switches)]
    checks += [
        compiler_check(on_gpus=torch is not None and torch.cuda.is_available()),
        _computer(),
        *storage_checks(bool(gpus), max((line.shards_needed for line in milestones), default=0)),
        Finding("scale", OK, f"{scale} ({reason})"),
    ]
    return Report(scale, checks, milestones)


def _computer():
    """The line of cores and memory, as far as the system tells them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} core{'s' * (cores != 1)}"
    if hasattr(os, "sysconf"):
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        text += f", {size / 2**30:.1f} GiB of memory"
    return Finding("CPU", OK, text)
