"""What several runs of several scripts achieved, in a form that a file can keep."""

import json
import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from speedrun.compare.stats import crossing, mean_curve, p_value
from speedrun.run.log import RunLog
from speedrun.scripts.sizes import BYTE_VOCABULARIES

RECORD_TARGET = 3.28  # nats per token on FineWeb's validation tokens
OWN_TARGET = "the final loss of"


@dataclass(frozen=True)
class Run:
    """One run: losses in nats per token at its validations, and the clock there in seconds."""

    log: str
    steps: int
    val_curve: list[tuple[int, float]]
    seconds: list[tuple[int, float]]
    seed: int | None = None
    step_avg_ms: float | None = None
    peak_memory_mib: int | None = None


@dataclass(eq=False)  # so that it may be a key
class Entry:
    """Runs that differ in their seed alone, and a line for each that failed.

    milestone: its slug; code: hash of the script's code; options: the hyperparameters that were
    passed on; flops_per_token: of a training step; peak_flops: of one of the world_size devices,
    per second.
    """

    label: str
    milestone: str | None = None
    code: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    vocab_size: int | None = None
    tokens_per_step: int | None = None
    world_size: int = 1
    device: str | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The mean validation loss over the runs, by step."""
        return mean_curve([run.val_curve for run in self.runs])

    @property
    def final_losses(self) -> list[float]:
        """The last validation loss of each run."""
        return [run.val_curve[-1][1] for run in self.runs if run.val_curve]


@dataclass
class Comparison:
    """Entries and the loss that all of them are to reach; `target_is` says where it comes from.

    command: what was typed; data_fingerprint: of the embedded corpus, where that was trained on;
    mixed: whether runs were trained on different corpora, or on known beside unknown ones.
    """

    entries: list[Entry]
    target: float | None
    target_is: str
    command: str = ""
    data_fingerprint: str | None = None
    mixed: bool = False

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class Score:
    """The figures of an entry; what is not known, or not reached, is None.

    Losses in nats per token, times in milliseconds and seconds. val_step: of the last validation,
    if later steps have none. The mean curve decides when the target is reached; step_avg_ms is the
    median over the runs, between their least and most.
    """

    label: str
    runs: int
    failed: int
    steps: int | None = None
    tokens: int | None = None
    tokens_to_target: float | None = None
    val_loss: float | None = None
    val_step: int | None = None
    val_loss_sd: float | None = None
    p_value: float | None = None
    step_avg_ms: float | None = None
    step_avg_range: tuple[float, float] | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_mib: int | None = None
    seconds_to_target: float | None = None
    speed_up: float | None = None


def run_from_log(path: Path, log: RunLog) -> Run:
    """The Run that a log holds (at least one step line)."""
    # A validation's clock reading is exact, a step line's need not be.
    timed = [step for step in log.steps if step.train_time_ms is not None]
    exact = [step for step in timed if step.val_loss is not None]
    averages = [s.step_avg_ms for s in (exact or timed) if s.step > 0 and s.step_avg_ms is not None]
    return Run(
        log=str(path),
        steps=max(step.step for step in log.steps),
        val_curve=log.val_curve,
        seconds=[(step.step, step.train_time_ms / 1000) for step in exact],
        seed=log.hyperparameters.get("seed"),
        step_avg_ms=averages[-1] if averages else None,
        peak_memory_mib=log.peak_memory_mib,
    )


def choose_target(entries: list[Entry]) -> tuple[float | None, str]:
    """The loss to reach and where it comes from: 3.28 on GPT-2 tokens, on bytes what the first
    entry ends at (None if that is no finite number). Logs that do not tell their vocabulary are
    records."""
    if all(entry.vocab_size not in BYTE_VOCABULARIES for entry in entries):
        return RECORD_TARGET, "the records'"
    if not entries[0].curve:
        return None, "the first entry has no loss"
    if not math.isfinite(loss := entries[0].curve[-1][1]):
        return None, f"{entries[0].label} diverged"
    return loss, f"{OWN_TARGET} {entries[0].label}"


def scores(comparison: Comparison) -> list[Score]:
    """The figures of every entry, in order."""
    made = [_score(entry, comparison) if entry.runs else Score(entry.label, 0, len(entry.failures))
            for entry in comparison.entries]
    first = made[0].seconds_to_target
    return [replace(row, speed_up=first / row.seconds_to_target)
            if first and row.seconds_to_target else row for row in made]


def _score(entry, comparison):
    """The Score of an entry with runs, but for its speed-up."""
    target, batch = comparison.target, entry.tokens_per_step
    steps = max(run.steps for run in entry.runs)
    losses = entry.final_losses
    val_step = max((run.val_curve[-1][0] for run in entry.runs if run.val_curve), default=steps)
    finite = [loss for loss in losses if math.isfinite(loss)]
    reached = None if target is None else crossing(entry.curve, target)
    clock = dict(mean_curve([run.seconds for run in entry.runs]))
    over_seconds = [(clock[step], loss) for step, loss in entry.curve if step in clock]
    averages = [run.step_avg_ms for run in entry.runs if run.step_avg_ms]
    step_avg_ms = statistics.median(averages) if averages else None
    tokens_per_s = 1000 * batch / step_avg_ms if batch and step_avg_ms else None
    mfu = None
    if tokens_per_s and entry.flops_per_token and entry.peak_flops:
        mfu = entry.flops_per_token * tokens_per_s / (entry.peak_flops * entry.world_size)
    # A target taken from the entries themselves is no fixed number to test against.
    is_fixed = target is not None and not comparison.target_is.startswith(OWN_TARGET)
    return Score(
        label=entry.label, runs=len(entry.runs), failed=len(entry.failures), steps=steps,
        tokens=steps * batch if batch else None,
        tokens_to_target=reached * batch if batch and reached is not None else None,
        val_loss=statistics.fmean(losses) if losses else None,
        val_step=val_step if val_step < steps else None,
        val_loss_sd=statistics.stdev(finite) if len(finite) > 1 else None,
        p_value=p_value(losses, target) if is_fixed else None,
        step_avg_ms=step_avg_ms,
        step_avg_range=(min(averages), max(averages)) if averages else None,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        peak_memory_mib=max(run.peak_memory_mib or 0 for run in entry.runs) or None,
        seconds_to_target=None if target is None else crossing(over_seconds, target),
    )
