"""The GPUs of this machine and their peak speed, without importing torch."""

import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

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
    (r"\bB200\b", 2250e12),  # HGX B200 data sheet, an eighth of it
    (r"\bA100\b", 312e12),  # A100 data sheet, SXM4 and PCIe alike
    (r"\bL40S\b", 362.05e12),  # L40S data sheet
    (r"\bRTX 6000 Ada\b", 364.2e12),  # Ada professional white paper
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
BFLOAT16, FLOAT8 = (8, 0), (8, 9)  # least compute capabilities of tensor cores for these numbers
# The least driver for a CUDA build of torch, by CUDA's major version, from CUDA's release notes:
# minor version compatibility.
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
TAKEN = 0.15  # of a GPU's memory in other programs' hands, from which on a run is warned
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


def visible_capabilities() -> list[tuple[int, int]]:
    """The (major, minor) compute capabilities of the visible GPUs whose driver reports them."""
    found = (re.fullmatch(r"(\d+)\.(\d+)", text) for text in _of_visible_gpus("compute_cap"))
    return [(int(match[1]), int(match[2])) for match in found if match]


def differing(gpus: Sequence[str]) -> str | None:
    """A line on GPUs of different names; None if all are alike."""
    if len(set(gpus)) < 2:
        return None
    kinds = ", ".join(f"{number} x {name}" for name, number in Counter(gpus).items())
    return (f"{kinds}: all take the same share, so the smallest and slowest sets the size and the"
            " pace; CUDA_VISIBLE_DEVICES=0 takes only the first")


def taken_by_others() -> str | None:
    """A line on the visible GPUs of whose memory other programs hold more than TAKEN now; None if
    there are none."""
    full = []
    for number, (used, whole) in enumerate(zip(
            _of_visible_gpus("memory.used"), visible_memory(), strict=False)):
        if used.isdecimal() and int(used) > TAKEN * whole > 0:
            full.append(f"GPU {number}: {int(used) / 1024:.1f} of {whole / 1024:.1f} GiB")
    return f"{', '.join(full)} taken by other programs, which nvidia-smi lists" if full else None


def cuda_fault() -> str | None:
    """Why the installed torch cannot use the GPUs that nvidia-smi lists, with the remedy, in one
    line; None if nothing speaks against it. Reads torch's version without importing it."""
    drivers, spec = _of_visible_gpus("driver_version"), find_spec("torch")
    if not (drivers and spec and spec.origin):
        return None
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b.*= '((\d+)\.\d+)'", version, re.MULTILINE)
    if cuda is None:
        return "torch is a build without CUDA; for the GPU: pip install --force-reinstall torch"
    least = LEAST_DRIVER.get(cuda[2], 0)
    if not drivers[0].partition(".")[0].isdecimal() or int(drivers[0].partition(".")[0]) >= least:
        return None
    return (f"driver {drivers[0]} is too old for this torch, which is built for CUDA {cuda[1]}:"
            f" update it to {least} or newer")


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
