"""What several runs of several scripts achieved: their curves, and the figures made of them."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from speedrun.base.text import json_text
from speedrun.history.tokens import tokens_after
from speedrun.run.log import RunLog
from speedrun.scripts.sizes import BYTE_VOCABULARIES

RECORD_TARGET = 3.28  # nats per token on FineWeb's validation tokens
OWN_TARGET = "the final loss of"

Curve = Sequence[tuple[float, float]]  # (x, loss) with rising x: steps, tokens or seconds


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
    """Runs that differ only in their seed, and a line for each that failed.

    milestone: its slug; code: hash of the script's code; options: the hyperparameters that were
    passed on; tokens_per_step: of the first step; batches: the hyperparameters by which the batch
    grows, if it does; flops_per_token: of a training step; peak_flops: of one of the world_size
    devices, per second; unread: lines of the logs that begin as a
    step line and are not understood.
    """

    label: str
    milestone: str | None = None
    code: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    vocab_size: int | None = None
    tokens_per_step: int | None = None
    batches: dict[str, object] = field(default_factory=dict)
    world_size: int = 1
    device: str | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unread: int = 0

    def tokens(self, steps: float | None) -> float | None:
        """Tokens of the first `steps` steps, or None if they are not known."""
        if steps is None or not self.tokens_per_step:
            return None
        return tokens_after({"total_batch_size": self.tokens_per_step, **self.batches}, steps)

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
    """Entries and the loss that all of them should reach; `target_is` says why this one.

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
        """All of it as JSON; a loss that is not finite becomes null."""
        return json_text(asdict(self)) + "\n"


@dataclass
class Score:
    """The figures of an entry; what is not known, or not reached, is None.

    Losses in nats per token, times in milliseconds and seconds. val_step: of the last validation,
    if later steps have none. The mean curve decides when the target is reached; step_avg_ms is the
    median over the runs, between their least and most.
    """

    label: str
    runs: int
    failed: int
    steps: int | None
    tokens: int | None
    tokens_to_target: float | None
    val_loss: float | None
    val_step: int | None
    val_loss_sd: float | None
    p_value: float | None
    step_avg_ms: float | None
    step_avg_range: tuple[float, float] | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_mib: int | None
    seconds_to_target: float | None
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
    """The loss to reach, and the reason for it: 3.28 on GPT-2 tokens, on bytes what the first
    entry ends at (None if that is no finite number). Logs without a vocabulary size are
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
    made = [_score(entry, comparison) for entry in comparison.entries]
    for row in made:
        if made[0].seconds_to_target and row.seconds_to_target:
            row.speed_up = made[0].seconds_to_target / row.seconds_to_target
    return made


def _score(entry, comparison):
    """The Score of an entry, but for its speed-up."""
    target, runs, losses = comparison.target, entry.runs, entry.final_losses
    steps = max((run.steps for run in runs), default=None)
    val_step = max((run.val_curve[-1][0] for run in runs if run.val_curve), default=steps)
    finite = [loss for loss in losses if math.isfinite(loss)]
    reached = None if target is None else crossing(entry.curve, target)
    clock = dict(mean_curve([run.seconds for run in runs]))
    over_seconds = [(clock[step], loss) for step, loss in entry.curve if step in clock]
    averages = [run.step_avg_ms for run in runs if run.step_avg_ms]
    step_avg_ms = statistics.median(averages) if averages else None
    tokens = entry.tokens(steps)
    tokens_per_s = 1000 * tokens / (steps * step_avg_ms) if tokens and step_avg_ms else None
    mfu = None
    if tokens_per_s and entry.flops_per_token and entry.peak_flops:
        mfu = entry.flops_per_token * tokens_per_s / (entry.peak_flops * entry.world_size)
    # A target taken from the entries themselves is not a fixed number to test against.
    is_fixed = target is not None and not comparison.target_is.startswith(OWN_TARGET)
    return Score(
        label=entry.label, runs=len(runs), failed=len(entry.failures), steps=steps,
        tokens=tokens or None,
        tokens_to_target=entry.tokens(reached),
        val_loss=statistics.fmean(losses) if losses else None,
        val_step=val_step if val_step != steps else None,
        val_loss_sd=statistics.stdev(finite) if len(finite) > 1 else None,
        p_value=p_value(losses, target) if is_fixed else None,
        step_avg_ms=step_avg_ms,
        step_avg_range=(min(averages), max(averages)) if averages else None,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        peak_memory_mib=max((run.peak_memory_mib or 0 for run in runs), default=0) or None,
        seconds_to_target=None if target is None else crossing(over_seconds, target),
    )


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean of several curves at the x that all of them have."""
    values = [dict(curve) for curve in curves]
    common = set.intersection(*map(set, values)) if values else set()
    return [(x, statistics.fmean(curve[x] for curve in values)) for x in sorted(common)]


def crossing(curve: Curve, target: float) -> float | None:
    """The first x at which the curve, straight between its points, is down at `target`; None if it
    never is."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (x, loss), (next_x, next_loss) in pairwise(curve):
        if next_loss <= target:
            return x + (next_x - x) * (loss - target) / (loss - next_loss)
    return None


def p_value(losses: Sequence[float], target: float) -> float | None:
    """How likely runs at least as good as these are if the true mean loss were `target`.

    A one-sided t-test over independent runs; a small value shows that the mean loss is below the
    target. None for fewer than three runs, or where they do not differ at all.
    """
    if len(losses) < 3 or not all(map(math.isfinite, losses)) or len(set(losses)) == 1:
        return None
    from scipy.stats import ttest_1samp  # takes a second to import

    return float(ttest_1samp(losses, target, alternative="less").pvalue)
