"""Reads history/measured/: what owners of GPUs measured, a file for each kind and number."""

import json
import re
import statistics
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

from speedrun.base.files import REPOSITORY, replace_file
from speedrun.base.text import json_text
from speedrun.history.schema import Numbers, build, check_keys

MEASURED = REPOSITORY / "history" / "measured"
MOST_LETTERS = 300  # of any text in a file
# What would say who measured, or where: a path, an address, a name at a machine.
PERSONAL = re.compile(r"(^|[\s'\"=(:])(~|[A-Za-z]:)?[/\\][\w.]|@|\b\d+\.\d+\.\d+\.\d+\b")


@dataclass(frozen=True)
class Timing:
    """What was measured of a milestone.

    code: the script's hash then; step_ms: milliseconds of a step, a mean for each part of the run,
    in order; peak_memory_mib: of rank 0; micro_batch: sequences of a forward pass on a GPU, and
    passes of them in a step; paths: the kernels taken; clock: MHz under load, the median.
    wall_s: seconds that all of it took, the comparison with a CPU included.
    """

    code: str
    step_ms: Numbers
    passes: int
    micro_batch: int
    paths: str
    wall_s: int
    peak_memory_mib: int | None = None
    clock: int | None = None

    @property
    def mean_ms(self) -> float:
        """Milliseconds of a step, over all of them."""
        return statistics.fmean(self.step_ms)

    @property
    def step_text(self) -> str:
        """The median of step_ms, the least and the most, and the mean, as records state it."""
        least, most, mean = min(self.step_ms), max(self.step_ms), self.mean_ms
        return (f"{statistics.median(self.step_ms):,.1f} ms"
                f" ({least:,.1f}–{most:,.1f}, mean {mean:,.1f})")

    @property
    def memory_text(self) -> str:
        """The peak, or that no GPU has one."""
        return f"{self.peak_memory_mib:,} MiB" if self.peak_memory_mib else "no GPU memory"


@dataclass(frozen=True)
class Machine:
    """Where it was measured: count GPUs of a kind, MiB of one's memory, versions, W of its power
    limit, MHz of its highest clocks; tokens: FineWeb's, or those of the embedded text."""

    gpu: str
    count: int
    tokens: Literal["FineWeb", "embedded text", "other"]
    steps: int
    python: str
    torch: str
    memory: int | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    power_limit: int | None = None
    max_clock: int | None = None
    max_memory_clock: int | None = None

    @property
    def name(self) -> str:
        """As a heading: 8 x H100 80GB HBM3."""
        return f"{self.count} x {re.sub(r'^NVIDIA (GeForce )?', '', self.gpu)}"

    @property
    def file_name(self) -> str:
        """As a file's: h100-80gb-hbm3-8.json."""
        words = re.findall(r"[a-z0-9]+", self.name.partition(" x ")[2].lower())
        return f"{'-'.join(words)}-{self.count}.json"


@dataclass
class Measurement:
    """A file: the machine, the kernels that were tried on their own, {name: "ok" or the error},
    the timings by milestone's slug, and why others failed."""

    machine: Machine
    kernels: dict[str, str] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def load_measurement(path: Path) -> Measurement:
    """The Measurement in a file. Raises ValueError, one line, for what does not fit or might say
    who measured, OSError for an unreadable file."""
    where = f"{path.name}: "
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}{error}") from None
    names = [f.name for f in fields(Measurement)]
    check_keys(where, table, names, names)
    for name in names[1:]:
        check_keys(f"{where}{name}: ", table[name], table[name], ())
    found = Measurement(
        build(f"{where}machine: ", Machine, table["machine"]), table["kernels"],
        {slug: build(f"{where}{slug}: ", Timing, timing)
         for slug, timing in table["timings"].items()}, table["failed"])
    for text in _texts(table):
        if len(text) > MOST_LETTERS or PERSONAL.search(text):
            raise ValueError(f"{where}{text[:MOST_LETTERS]!r} may say who measured; shorten it to"
                             " what is wrong")
    if path.name != found.machine.file_name:
        raise ValueError(f"{where}by its content, its name is {found.machine.file_name}")
    return found


def load_measurements(folder: Path = MEASURED) -> tuple[Measurement, ...]:
    """All files of the folder, sorted by name; raises as load_measurement."""
    return tuple(map(load_measurement, sorted(folder.glob("*.json"))))


def write_measurement(path: Path, measurement: Measurement) -> None:
    """Writes the file for load_measurement; what is not known is left out."""
    def known(table):
        if isinstance(table, dict):
            return {name: known(value) for name, value in table.items() if value is not None}
        return table

    replace_file(path, (json_text(known(asdict(measurement)), indent=1) + "\n").encode())


def _texts(value):
    """All strings in JSON's values, keys included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []
