"""Triton kernels that Inductor wrote, assembled for the card that they were written for."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from torch._inductor.codecache import PyCodeCache

from speedrun.predict.launches import Kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def assemble(sources: dict[str, str]) -> list[Kernel]:
    """The kernels of {source: name}, each in the first of the forms that tuning on a card would
    try; in a process with fake_compiler's install. Takes a fifth of a second for each."""
    return [_assemble(name, source) for source, name in sources.items()]


def _assemble(name, source):
    tuner = getattr(PyCodeCache.load(source), name)
    assembled = tuner._precompile_config(tuner.configs[0]).kernel
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True,
                               encoding="utf-8", check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Kernel(name, int(registers), int(stack), assembled.metadata.shared)
