"""Reads training logs: those of the snapshots and those of the public speedrun records.

    log = read_log("runs/muon-20250101-120000/log.txt")
    log.val_curve                    # [(0, 5.5452), (50, 3.1034), ...]

    log = RunLog()                   # or line by line, during the run
    event = log.feed(line)           # a Step, the name of a fact or None

Lines that count:

    step:20/200 val_loss:3.2800 train_time:1234ms step_avg:61.70ms
    step:20/200 train_loss:3.3000 train_time:1.234s step_avg:nanms
    s:250 tel:4.1234                     llm.c: a validation
    s:250 trl:4.2345 lr:0.0018 norm:0.3  llm.c: a training step
    environment:{"python": "3.11.7", ...}    or    python:3.11.7 torch:2.13.0 device:cpu ...
    hyperparameters:{"train_steps": 200, ...}
    rows:{"read": 5565, "tokens": 620706, ...}          fine-tuning: what an epoch's rows hold
    peak_memory:34217MiB             or    peak memory allocated: 34217 MiB reserved: 49936 MiB
"""

import codecs
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from speedrun.history.tokens import tokens_after

SCRIPT = "train_gpt.py"  # a run's copy of its script, beside its log.txt, whatever its name was
RULE = "=" * 100  # below the script's own text and below the header

_STEP = re.compile(r"step:(?P<step>\d+)/(?P<train_steps>\d+) (?P<words>\S.*)")
_LLMC_STEP = re.compile(r"s:(?P<step>\d+) (?P<loss>tel|trl):(?P<value>\S+)(?: .*)?")
_LLMC_LOSS = {"tel": "val_loss", "trl": "train_loss"}
_HEADER = re.compile(r"(environment|hyperparameters|rows):(\{.*)")
_PEAK_MEMORY = re.compile(r"peak[_ ]memory[^\d]*(\d+) ?MiB.*")
_ENVIRONMENT_WORD = re.compile(r"(\w+):(.*?)(?= \w+:|$)")  # a value may hold spaces


@dataclass(frozen=True)
class Step:
    """One step line; a value that the line does not have is None.

    Losses are in nats per token, times in milliseconds: `train_time_ms` since the clock started,
    `step_avg_ms` per optimizer step. `train_steps` is the length of the whole run.
    """

    step: int
    train_steps: int | None = None
    val_loss: float | None = None
    train_loss: float | None = None
    train_time_ms: float | None = None
    step_avg_ms: float | None = None


@dataclass
class RunLog:
    """The content of a log so far.

    steps: every step line in order; unread: the number of lines that begin as one and are not
    understood; hyperparameters, environment and rows: name -> value, empty
    where the log has none; peak_memory_mib: in MiB, or None.
    """

    steps: list[Step] = field(default_factory=list)
    hyperparameters: dict[str, object] = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: int | None = None
    unread: int = 0

    def feed(self, line: str) -> Step | str | None:
        """Takes the next line (with or without its line break).

        Returns the Step in the line, or the name of the attribute that the line filled, else None.
        A line cut short has no effect.
        """
        line = line.rstrip("\r\n")
        if line == RULE:
            self.steps.clear()  # the text above a rule only quotes step lines
            self.unread = 0
        try:
            if step := _step(line):
                self.steps.append(step)
                return step
            if fact := _fact(line):
                setattr(self, *fact)
                return fact[0]
        except (ValueError, RecursionError):  # looks like one, but is cut short or something else
            pass
        self.unread += _STEP.match(line) is not None
        return None

    @property
    def val_curve(self) -> list[tuple[int, float]]:
        """The validation losses as [(step, loss), ...]."""
        return [(s.step, s.val_loss) for s in self.steps if s.val_loss is not None]

    @property
    def train_curve(self) -> list[tuple[int, float]]:
        """The training losses as [(step, loss), ...]."""
        return [(s.step, s.train_loss) for s in self.steps if s.train_loss is not None]

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of an optimizer step over all ranks, without padding; on average where rows hold
        different numbers of them."""
        slots = self.hyperparameters.get("total_batch_size")
        if not (slots and self.rows):
            return slots
        rows = slots / self.hyperparameters["seq_len"]
        return round(rows * self.rows["tokens"] / self.rows["rows"])

    def tokens_after(self, steps: int) -> int:
        """Tokens of the first `steps` steps; tokens_per_step has to be known."""
        values = {**self.hyperparameters, "total_batch_size": self.tokens_per_step}
        return tokens_after(values, steps)

    @property
    def last(self) -> Step | None:
        """The last step line, or None."""
        return self.steps[-1] if self.steps else None


def read_log(path: str | Path) -> RunLog:
    """The RunLog of a file.

    A log that was cut in mid-line is read up to there. Raises ValueError, in one line, if the file
    is no training log or its tokens cannot be counted, and OSError if it cannot be read.
    """
    log = RunLog()
    with open(path, "rb") as file:  # PowerShell writes UTF-16 where a run's output is redirected
        is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    with open(path, encoding="utf-16" if is_utf16 else "utf-8", errors="replace") as file:
        for line in file:
            # Only llm.c's lines do not mark their end: 3.28 may be the start of 3.2834.
            if line.endswith("\n") or not line.startswith("s:"):
                log.feed(line)
    if not log.steps and not log.hyperparameters:
        raise ValueError(f"{Path(path)} is not a training log: no line like 'step:0/100 ...'")
    try:
        log.tokens_per_step and log.tokens_after(1)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise ValueError(f"{Path(path)} is damaged: its hyperparameters or rows give no number of"
                         " tokens per step") from None
    return log


def _step(line):
    """The Step in a line, or None. Raises ValueError for a word that should be a number."""
    if match := _LLMC_STEP.fullmatch(line):
        return Step(int(match["step"]), **{_LLMC_LOSS[match["loss"]]: _number(match["value"])})
    match = _STEP.fullmatch(line)
    words = dict(word.split(":", 1) for word in match["words"].split()) if match else {}
    if not words.get("step_avg", "").endswith("s"):
        return None  # the last word, so without it the line is cut
    names = ("val_loss", "train_loss", "train_time", "step_avg")
    return Step(int(match["step"]), int(match["train_steps"]),
                *(_number(words.get(name, "nanms")) for name in names))


def _number(text):
    """The number in `3.28` or `12.5ms`, milliseconds for `0.0125s`; None for the early records'
    `nanms` (no average yet)."""
    if text == "nanms":
        return None
    if text.endswith("s") and not text.endswith("ms"):
        return 1000 * float(text.removesuffix("s"))
    return float(text.removesuffix("ms"))


def _fact(line):
    """(attribute of RunLog, value) in a line, or None. Raises ValueError for bad JSON."""
    if match := _HEADER.fullmatch(line):
        return match[1], json.loads(match[2])
    if line.startswith("python:") and " torch:" in line:
        return "environment", dict(_ENVIRONMENT_WORD.findall(line))
    if match := _PEAK_MEMORY.fullmatch(line):
        return "peak_memory_mib", int(match[1])
    return None
