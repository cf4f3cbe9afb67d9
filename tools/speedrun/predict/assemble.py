"""Triton kernels that Inductor wrote, assembled for the card that they were written for."""

import functools
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
    try; in a process with fake_compiler's install. About half a second for each."""
    return [Kernel(name, *_resources(source.replace(name, "kernel")))
            for source, name in sources.items()]


@functools.cache
def _resources(source):
    """Registers, bytes spilled and bytes shared; many kernels differ by their name alone."""
    tuner = PyCodeCache.load(source).kernel
    assembled = tuner._precompile_config(tuner.configs[0]).kernel
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True,
                               encoding="utf-8", check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack), assembled.metadata.shared
