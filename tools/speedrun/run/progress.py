"""Shows a run while it goes on: one live line on a terminal, plain lines elsewhere."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from speedrun.base.errors import UserError
from speedrun.base.text import visible
from speedrun.history.glossary import load_glossary
from speedrun.run.log import RULE, RunLog, Step
from speedrun.run.paths import paths_taken
from speedrun.run.plan import Plan

WIDE = 70  # columns from which on the live line also has a bar and tokens/s


class NotFinite(UserError):
    """A loss that is NaN or infinite, from which no run comes back; `text` names the rates."""


@contextmanager
def follow(plan: Plan, stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Inside the block, its value shows each line that rank 0 printed on the text stream, and after
    the hyperparameters which paths they mean. It raises NotFinite after such a loss."""
    log, source = RunLog(), plan.script.path.read_text(encoding="utf-8")

    def paths():
        on_gpu = log.environment.get("device", "cpu") != "cpu"
        return paths_taken(source, log.hyperparameters, on_gpu, chosen=plan.options)

    def read(line):
        told = log.feed(line)
        for name in ("val_loss", "train_loss") if isinstance(told, Step) else ():
            if not math.isfinite(getattr(told, name) or 0):
                raise NotFinite(f"{name} is {getattr(told, name)} at step {told.step}, so the run"
                                f" was stopped; lower a learning rate: {_rates(plan)}")
        return told

    def pass_on(line):
        print(visible(line), file=stream, flush=True)
        if read(line) == "hyperparameters":
            print(paths(), file=stream, flush=True)

    if not stream.isatty():
        yield pass_on
        return
    from rich import progress
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}")]
    if console.width >= WIDE:
        columns += [progress.BarColumn(None), progress.TextColumn("{task.fields[speed]}")]
    columns += [progress.TimeRemainingColumn(compact=True)]
    bar = progress.Progress(
        *columns, console=console, transient=True, refresh_per_second=5, expand=True)
    batch = plan.hyperparameters.get("total_batch_size")
    task, val_loss = bar.add_task("starting", total=None, speed=""), ""

    def show(line):
        nonlocal val_loss
        told = read(line)
        if told is None and line.strip() and line != RULE:  # facts are in the log and the summary
            console.print(visible(line), markup=False)
        if told == "hyperparameters":
            console.print(paths(), markup=False)
        if not isinstance(told, Step):
            return
        if told.val_loss is not None:
            val_loss = f"val_loss {told.val_loss:.4f}"
            clock = told.train_time_ms
            seconds = "" if clock is None else f"  {clock / 1000:,.1f} s"
            console.print(f"step {told.step:<6} {val_loss}{seconds}", markup=False)
        speed = ""
        if batch and told.step_avg_ms:
            speed = f"{1000 * batch / told.step_avg_ms:,.0f} tokens/s"
        bar.update(task, completed=told.step, total=told.train_steps, speed=speed,
                   description=f"step {told.step}/{told.train_steps} {val_loss}")

    with bar:
        yield show


def _rates(plan):
    """The run's learning rates, as `--set` takes them."""
    rates = load_glossary().of_kind("rate")
    return ", ".join(f"{name}={value}" for name, value in plan.hyperparameters.items()
                     if name in rates)
