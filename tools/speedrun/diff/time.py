"""Times two scripts on this machine: short runs in turn, A B A B, step by step."""

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from speedrun.base.errors import Stopped, UserError
from speedrun.base.text import short
from speedrun.run.execute import run
from speedrun.run.log import RunLog, read_log
from speedrun.run.plan import Plan, make_plan
from speedrun.scripts.find import find_script

ROUNDS = 2  # runs of each script
STEPS = 40
# Reading the loss after each step waits for the device, so that the clock tells each step's time.
SETTINGS = dict(train_loss_every=1, val_loss_every=0)
EXACT_AVERAGE = 100  # steps; below, the average times the step is the finer of the two readings


@dataclass(frozen=True)
class Timing:
    """Step times of one script in milliseconds, by run; the tokens of a step, or None; and a line
    on how it was run."""

    name: str
    runs: tuple[tuple[float, ...], ...]
    tokens_per_step: int | None
    how: str

    @property
    def median(self) -> float:
        """The median over the steps of all runs, milliseconds."""
        return statistics.median(ms for run in self.runs for ms in run)

    @property
    def middle_half(self) -> tuple[float, float]:
        """Between these lies half of the steps of all runs, milliseconds."""
        times = [ms for run in self.runs for ms in run]
        if len(times) < 2:
            return times[0], times[0]
        quarters = statistics.quantiles(times, n=4, method="inclusive")
        return quarters[0], quarters[2]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second at the median step time."""
        return self.tokens_per_step and 1000 * self.tokens_per_step / self.median


def plan_run(target: str, scale: str | None, nproc: int | None, steps: int | None) -> Plan:
    """The plan of a short run in a fresh folder. Raises what make_plan raises."""
    known = find_script(target).hyperparameters
    settings = [f"{name}={value}" for name, value in SETTINGS.items() if name in known]
    return make_plan(target, scale=scale, nproc=nproc, steps=steps or STEPS, settings=settings)


def time_in_turn(
    targets: Sequence[str], names: Sequence[str], stream: TextIO, *, scale: str | None = None,
    nproc: int | None = None, steps: int | None = None,
) -> list[Timing]:
    """Runs the scripts in turn and returns the Timing of each.

    names: what to call them; stream: for a line per run, and on a terminal its progress; the rest
    as for plan_run. Raises UserError, one line, for a run that fails.
    """
    runs, batches, how = [[] for _ in targets], [None for _ in targets], [""] * len(targets)
    for turn in range(ROUNDS * len(targets)):
        number = turn % len(targets)
        plan = plan_run(targets[number], scale, nproc, steps)
        print(f"[{turn + 1}/{ROUNDS * len(targets)}] {names[number]}: {short(plan.out)}",
              file=stream, flush=True)
        try:
            run(plan, stream if stream.isatty() else io.StringIO())
        except Stopped:
            raise
        except UserError as error:
            kept = f"; see {short(plan.out)}" if plan.out.exists() else ""
            raise UserError(f"{names[number]} failed: {_one_line(error)}{kept}",
                           error.status) from None
        log = read_log(plan.out / "log.txt")
        runs[number].append(tuple(step_times(log)))
        batches[number] = log.hyperparameters.get("total_batch_size")
        device = log.environment.get("device", "unknown device")
        how[number] = f"{plan.scale} scale, {plan.nproc} x {device}"
    return [Timing(*each) for each in zip(names, map(tuple, runs), batches, how, strict=True)]


def step_times(log: RunLog) -> list[float]:
    """Milliseconds of each training step after the first; of a log that tells no more than one
    step, the average. Raises UserError if it tells none."""
    clock = {}
    for step in log.steps:
        if step.step > 0 and step.step_avg_ms is not None and step.val_loss is None:
            exact = step.step < EXACT_AVERAGE or step.train_time_ms is None
            clock[step.step] = step.step_avg_ms * step.step if exact else step.train_time_ms
    times = [ms - clock[step - 1] for step, ms in clock.items() if step - 1 in clock]
    averages = [step.step_avg_ms for step in log.steps if step.step > 0 and step.step_avg_ms]
    if not times and not averages:
        raise UserError("the log tells no step times")
    return times or averages[-1:]


def timing_table(timings: Sequence[Timing]) -> tuple[str, list[tuple[str, ...]]]:
    """A caption, and the rows of a table: a head, then one per script."""
    first = timings[0].median
    rows = [("", "step (median)", "middle half", "by run", "ratio", "tokens/s")]
    for timing in timings:
        low, high = timing.middle_half
        speed = timing.tokens_per_s
        rows.append((
            timing.name, f"{timing.median:.1f} ms", f"{low:.1f} to {high:.1f}",
            ", ".join(f"{statistics.median(run):.1f}" for run in timing.runs),
            f"{timing.median / first:.3f}", f"{speed:,.0f}" if speed else "",
        ))
    steps = len(timings[0].runs[0])
    caption = f"timing: {timings[-1].how}, {ROUNDS} runs each in turn, {steps} steps timed in each"
    return caption, rows


def print_timing(timings: Sequence[Timing], stream: TextIO) -> None:
    """Prints the table, one line per figure, so that it fits a narrow terminal."""
    caption, rows = timing_table(timings)
    print(f"\n{caption}", file=stream)
    widths = [max(map(len, row)) for row in rows]
    for figure in zip(*rows, strict=True):
        cells = [f"{cell:>{width}}" for cell, width in zip(figure, widths, strict=True)]
        cells[0] = f"{figure[0]:<{widths[0]}}"
        print("  ".join(cells).rstrip(), file=stream)


def _one_line(error):
    """A failure's first line, and the last of the stderr that it quotes."""
    first, *rest = str(error).splitlines()
    said = [line for line in rest if not line.startswith("the log so far")]
    return ": ".join([first.partition(";")[0], *said[-1:]])
