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
RECORD_RANKS = 8
MOST_LETTERS = 300  # of any text in a file
# What would say who measured, or where: a path, an address, a name at a machine.
PERSONAL = re.compile(r"(^|[\s'\"=(:])(~|[A-Za-z]:)?[/\\][\w.]|@|\b\d+\.\d+\.\d+\.\d+\b")


@dataclass(frozen=True)
class Timing:
    """What was measured of a milestone.

    code: the script's hash then; step_ms: milliseconds of a step, a mean for each part of the run,
    in order; peak_memory_mib: of rank 0; micro_batch: sequences of a forward pass on a GPU, and
    passes of them in a step; paths: the kernels taken; clock: MHz under load, the median. Of a
    share: seconds that compilation took, beside others, the graphs that it made, and how often a
    graph was broken, if it was. within: a small run's losses differ from a CPU's by no more; None:
    they were not compared.
    """

    code: str
    step_ms: Numbers
    passes: int
    micro_batch: int
    paths: str
    peak_memory_mib: int | None = None
    clock: int | None = None
    compile_s: int | None = None
    graphs: int | None = None
    breaks: int | None = None
    within: float | None = None

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

    @property
    def compiled_text(self) -> str:
        """What compilation took, after a comma; "" if that is not known."""
        found = {"compiled in {} s": self.compile_s, "{} graphs": self.graphs,
                 "{} graph breaks": self.breaks}
        return "".join(f", {words.format(n)}" for words, n in found.items() if n)


@dataclass(frozen=True)
class Machine:
    """Where it was measured: count GPUs of a kind, MiB of one's memory, versions, W of its power
    limit, MHz of its highest clocks; tokens: FineWeb's, or those or bytes of the embedded text;
    share: a step was one rank's share of so many, without gradient accumulation."""

    gpu: str
    count: int
    tokens: Literal["FineWeb", "embedded text", "embedded bytes", "other"]
    steps: int
    python: str
    torch: str
    share: int | None = None
    memory: int | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    power_limit: int | None = None
    max_clock: int | None = None
    max_memory_clock: int | None = None

    @property
    def name(self) -> str:
        """As a heading: 8 x H100 80GB HBM3, or 1 of 8 x H100 80GB HBM3."""
        of = f" of {self.share}" if self.share else ""
        return f"{self.count}{of} x {re.sub(r'^NVIDIA (GeForce )?', '', self.gpu)}"

    @property
    def file_name(self) -> str:
        """As a file's: h100-80gb-hbm3-8.json, or h100-80gb-hbm3-1-of-8.json."""
        count, _, gpu = self.name.lower().partition(" x ")
        return f"{'-'.join(re.findall('[a-z0-9]+', f'{gpu} {count}'))}.json"


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
