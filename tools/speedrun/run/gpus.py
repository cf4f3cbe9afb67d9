"""The GPUs of this machine and their peak speed, without importing torch."""

import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# Dense bfloat16 tensor-core FLOP/s with float32 accumulation, from NVIDIA's data sheets and
# architecture white papers (data sheets that give the rate "with sparsity" are halved).
# The first pattern that is found in the device's name counts.
PEAK_BF16_FLOPS = [
    (r"\bMIG\b", None),  # a slice of a GPU has a slice of its peak
    (r"\bH200 NVL\b", 835.5e12),  # H200 data sheet
    (r"\bG?H200\b", 989.4e12),  # H200 and GH200 data sheets
    (r"\bH100 NVL\b", 835.5e12),  # H100 data sheet
    (r"\bH100 PCIe\b", 756e12),  # Hopper white paper
    (r"\bH100\b", 989.4e12),  # SXM5, Hopper white paper
    (r"\bA100\b", 312e12),  # A100 data sheet, SXM4 and PCIe alike
    (r"\bL40S\b", 362.05e12),  # L40S data sheet
    (r"\bL4\b", 121e12),  # L4 data sheet
    (r"\bA40\b", 149.7e12),  # A40 data sheet
    (r"\bA10\b", 125e12),  # A10 data sheet
    (r"\bRTX 5090\b(?! (D|Laptop))", 209.5e12),  # RTX Blackwell white paper
    (r"\bRTX 4090\b(?! (D|Laptop))", 165.2e12),  # Ada white paper
    (r"\bRTX 3090\b(?! Ti)", 71e12),  # Ampere GA102 white paper
]

# Names of ours for what nvidia-smi reports of a GPU; powers in W, clocks in MHz.
FACTS = {"driver": "driver_version", "power_limit": "power.limit",
         "max_clock": "clocks.max.sm", "max_memory_clock": "clocks.max.memory"}
PATIENCE_S = 20  # with nvidia-smi, which starts the driver first
BUSY, EVERY_MS = 50, 500  # percent from which on a GPU counts as busy; from one look to the next
RECORD_MIB = 79_000  # of the records' GPUs, 80 GB: the micro-batches are made for them


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the device called `name`, or None if it is not certain."""
    for pattern, flops in PEAK_BF16_FLOPS:
        if re.search(pattern, name):
            return flops
    return None


def visible_gpus() -> list[str]:
    """Names of the GPUs that a program started now would see, in order.

    Runs nvidia-smi and honours CUDA_VISIBLE_DEVICES (indices or the beginnings of UUIDs; as in
    CUDA, entries after an unknown one are ignored). A machine without nvidia-smi has none.
    """
    return _of_visible_gpus("name")


def visible_memory(what: str = "total") -> list[int]:
    """Memory in MiB of the GPUs that `visible_gpus` names, or what is "used" of it; 0 if nvidia-smi
    does not report it."""
    return [int(text) if text.isdecimal() else 0 for text in _of_visible_gpus(f"memory.{what}")]


def gpu_facts() -> dict[str, str | int]:
    """FACTS of the first visible GPU, without those that nvidia-smi does not report."""
    found = {name: _of_visible_gpus(query)[:1] for name, query in FACTS.items()}
    return {name: text if name == "driver" else round(float(text))
            for name, (text,) in ((name, texts) for name, texts in found.items() if texts)
            if name == "driver" or re.fullmatch(r"[\d.]+", text)}


@contextmanager
def watched_clock() -> Iterator[dict[str, int]]:
    """Inside the block nvidia-smi looks at the clocks; after it, the value has the median `clock`
    in MHz of all busy GPUs, if any was seen."""
    found, nvidia_smi = {}, shutil.which("nvidia-smi")
    if nvidia_smi is None:
        yield found
        return
    query = [nvidia_smi, "--query-gpu=clocks.sm,utilization.gpu", f"--loop-ms={EVERY_MS}",
             "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as lines:
        watch = subprocess.Popen(query, stdout=lines, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            watch.terminate()
            watch.wait()
            lines.seek(0)
            looks = re.findall(r"^(\d+), (\d+)$", lines.read(), re.MULTILINE)
    if busy := [int(clock) for clock, percent in looks if int(percent) >= BUSY]:
        found["clock"] = round(statistics.median(busy))


def find_fault() -> str | None:
    """Why nvidia-smi, which is installed, reports no GPUs, in one line; None if it does."""
    try:
        _ask("name")
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {PATIENCE_S} s"
    except subprocess.CalledProcessError as error:
        words = " ".join(f"{error.stdout} {error.stderr}".split()) or "it printed nothing"
        return f"nvidia-smi failed with exit code {error.returncode}: {words}"
    except OSError as error:
        return f"nvidia-smi cannot be run: {error.strerror}"
    return None


def _ask(name):
    """What nvidia-smi prints of a property, a line for each GPU; "" if it is not installed."""
    if (nvidia_smi := shutil.which("nvidia-smi")) is None:
        return ""
    query = [nvidia_smi, f"--query-gpu={name},uuid", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, encoding="utf-8", errors="replace",
                          timeout=PATIENCE_S, check=True).stdout


def _of_visible_gpus(name):
    """A property of each visible GPU, in order, from nvidia-smi: text, numbers without units."""
    try:
        answer = _ask(name)
    except (OSError, subprocess.SubprocessError):  # installed, but no driver or no device
        return []
    rows = [line.rpartition(",") for line in answer.splitlines() if "," in line]
    gpus = [(str(i), uuid.strip(), value.strip()) for i, (value, _, uuid) in enumerate(rows)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [value for _, _, value in gpus]
    values = []
    for entry in filter(None, visible.replace(" ", "").split(",")):
        found = [value for i, uuid, value in gpus if entry == i or uuid.startswith(entry)]
        if len(found) != 1:
            break
        values += found
    return values
