"""Asks for Python's packages and for compilers; works on a bare Python, without any package."""

import importlib.metadata
import os
import re
import shutil
from importlib.util import find_spec
from textwrap import shorten
from types import ModuleType

from speedrun.base.venv import install_command
from speedrun.doctor.report import ABSENT, FIX, NOTE, OK, Finding
from speedrun.history.manifest import REPOSITORY

REQUIREMENTS = REPOSITORY / "requirements.txt"
NEEDED = {"numpy", "rich"}  # imported by the snapshots and by run_milestone.py, besides torch
COMPILERS = {"C": ("CC", "gcc", "clang", "cc", "cl"), "C++": ("CXX", "g++", "clang++", "c++", "cl")}


def pins() -> dict[str, str]:
    """The versions in requirements.txt, {name of a package: version}."""
    text = REQUIREMENTS.read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", text, re.MULTILINE))


def reinstall() -> str:
    """The command that installs the pinned torch as the package index has it."""
    return f"pip install --force-reinstall torch=={pins()['torch']}"


def find_torch() -> tuple[ModuleType | None, Finding]:
    """The module torch, None if it cannot be imported, and its line; takes seconds."""
    if find_spec("torch") is None:
        return None, Finding("torch", FIX, "not installed", install_command())
    try:
        import torch
        import torch.distributed
    except Exception as error:  # a library that is missing, a build for another machine
        why = shorten(f"cannot be imported: {error}", 200, placeholder=" …")
        return None, Finding("torch", FIX, why, reinstall())
    version, pinned = torch.__version__, pins()["torch"]
    if version.partition("+")[0] == pinned:
        return torch, Finding("torch", OK, f"{version}, as pinned")
    return torch, Finding("torch", NOTE, f"{version}; everything was tested with {pinned}",
                          f"pip install torch=={pinned}")


def package_check() -> Finding:
    """All pinned packages but torch."""
    missing, other, wanted = [], [], pins()
    del wanted["torch"]
    for name, pinned in wanted.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if version != pinned:
            other.append(f"{name} {version} instead of {pinned}")
    if not (missing or other):
        return Finding("packages", OK, f"{len(wanted)} more as pinned")
    parts = [f"not installed: {', '.join(missing)}"] if missing else []
    return Finding("packages", FIX if NEEDED & set(missing) else NOTE, "; ".join(parts + other),
                   install_command())


def compiler_check(on_gpus: bool) -> Finding:
    """Compilers for what torch and Triton generate. on_gpus: torch uses them."""
    found, missing = [], []
    for language, (variable, *programs) in COMPILERS.items():
        paths = filter(None, map(shutil.which, [os.environ.get(variable, ""), *programs]))
        if path := next(paths, None):
            found.append(path)
        else:
            missing.append(language)
    if not missing:
        return Finding("compiler", OK, ", ".join(found))
    use = "Triton needs one for C" if on_gpus else "only --set compile=True needs one"
    return Finding("compiler", FIX if on_gpus and "C" in missing else ABSENT,
                   f"none for {' and '.join(missing)}; {use}",
                   "sudo apt-get install build-essential")
