"""Reads training logs: those of the snapshots and those of the public speedrun records.

    log = read_log("runs/01-20250101-120000/log.txt")
    log.val_curve                    # [(0, 5.5452), (50, 3.1034), ...]

    log = RunLog()                   # or line by line, while the run goes on
    event = log.feed(line)           # a Step, a Fact or None

Lines that count:

    step:20/200 val_loss:3.2800 train_time:1234ms step_avg:61.70ms
    step:20/200 train_loss:3.3000 train_time:1234ms step_avg:nanms
    s:250 tel:4.1234                     llm.c: a validation
    s:250 trl:4.2345 lr:0.0018 norm:0.3  llm.c: a training step
    environment:{"python": "3.11.7", ...}    or    python:3.11.7 torch:2.13.0 device:cpu ...
    hyperparameters:{"train_steps": 200, ...}
    peak_memory:34217MiB             or    peak memory allocated: 34217 MiB reserved: 49936 MiB
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = "train_gpt.py"  # a run's copy of its script, beside its log.txt, whatever its name was
RULE = "=" * 100  # stands below the script's own text and below the header

_STEP = re.compile(r"step:(\d+)/(\d+) (\S.*)")
_LLMC_STEP = re.compile(r"s:(\d+) (tel|trl):(\S+)(?: .*)?")
_PEAK_MEMORY = re.compile(r"peak[_ ]memory[^\d]*(\d+) ?MiB.*")
_ENVIRONMENT_WORD = re.compile(r"(\w+):(.*?)(?= \w+:|$)")  # a value may hold spaces


@dataclass(frozen=True)
class Step:
    """One step line; what the line does not tell is None.

    Losses are in nats per token, times in milliseconds: `train_time_ms` since the clock started,
    `step_avg_ms` per optimizer step. `train_steps` is the length of the whole run.
    """

    step: int
    train_steps: int | None = None
    val_loss: float | None = None
    train_loss: float | None = None
    train_time_ms: float | None = None
    step_avg_ms: float | None = None


@dataclass(frozen=True)
class Fact:
    """One line that describes the run: `name` is the attribute of RunLog that it filled."""

    name: str
    value: object


@dataclass
class RunLog:
    """What a log has told so far.

    steps: every step line in order; hyperparameters and environment: name -> value, empty where
    the log has none; peak_memory_mib: in MiB, or None.
    """

    steps: list[Step] = field(default_factory=list)
    hyperparameters: dict[str, object] = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)
    peak_memory_mib: int | None = None

    def feed(self, line: str) -> Step | Fact | None:
        """Takes the next line (with or without its line break).

        Returns the Step or the Fact that the line held, else None. A line cut short holds none.
        """
        line = line.rstrip("\r\n")
        if line == RULE:
            self.steps.clear()  # above a rule stand only texts that quote step lines
            return None
        event = _parse(line)
        if isinstance(event, Step):
            self.steps.append(event)
        elif event is not None:
            setattr(self, event.name, event.value)
        return event

    @property
    def val_curve(self) -> list[tuple[int, float]]:
        """The validation losses as [(step, loss), ...]."""
        return [(s.step, s.val_loss) for s in self.steps if s.val_loss is not None]

    @property
    def train_curve(self) -> list[tuple[int, float]]:
        """The training losses as [(step, loss), ...]."""
        return [(s.step, s.train_loss) for s in self.steps if s.train_loss is not None]

    @property
    def last(self) -> Step | None:
        """The last step line, or None."""
        return self.steps[-1] if self.steps else None

    @property
    def finished(self) -> bool:
        """Whether the validation after the last step is there (llm.c's logs do not tell: False)."""
        return any(s.val_loss is not None and s.step == s.train_steps for s in self.steps)


def read_log(path: str | Path) -> RunLog:
    """The RunLog of a file.

    A log that was cut in mid-line is read up to there. Raises ValueError, in one line, if the file
    is no training log, and OSError if it cannot be read.
    """
    log = RunLog()
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            # Only llm.c's lines do not show where they end: 3.28 may be the start of 3.2834.
            if line.endswith("\n") or not line.startswith("s:"):
                log.feed(line)
    if not log.steps and not log.hyperparameters:
        raise ValueError(f"{Path(path)} is not a training log: no line like 'step:0/100 ...'")
    return log


def _parse(line):
    """The Step or the Fact in a line, or None."""
    try:
        if line.startswith("step:"):
            return _parse_step(line)
        if line.startswith("s:"):
            return _parse_llmc_step(line)
        for name in ("environment", "hyperparameters"):
            if line.startswith(f"{name}:{{"):
                return Fact(name, json.loads(line.partition(":")[2]))
    except ValueError:
        return None  # looks like one, and is cut short or something else
    if line.startswith("python:") and " torch:" in line:
        return Fact("environment", dict(_ENVIRONMENT_WORD.findall(line)))
    if match := _PEAK_MEMORY.fullmatch(line):
        return Fact("peak_memory_mib", int(match[1]))
    return None


def _parse_step(line):
    match = _STEP.fullmatch(line)
    words = dict(word.split(":", 1) for word in match[3].split()) if match else {}
    if not words.get("step_avg", "").endswith("ms"):
        return None  # the last word, so without it the line is cut
    return Step(
        step=int(match[1]), train_steps=int(match[2]),
        val_loss=_number(words.get("val_loss")), train_loss=_number(words.get("train_loss")),
        train_time_ms=_milliseconds(words.get("train_time")),
        step_avg_ms=_milliseconds(words["step_avg"]),
    )


def _parse_llmc_step(line):
    match = _LLMC_STEP.fullmatch(line)
    if match is None:
        return None
    name = {"tel": "val_loss", "trl": "train_loss"}[match[2]]
    return Step(step=int(match[1]), **{name: _number(match[3])})


def _number(text):
    return None if text is None else float(text)


def _milliseconds(text):
    """`12.5ms` -> 12.5; the early records' `nanms` (no average yet) -> None."""
    return None if text in (None, "nanms") else float(text.removesuffix("ms"))
