"""Shows a run's progress: one live line on a terminal, plain lines elsewhere."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Timer
from typing import TextIO

from speedrun.base.errors import UserError
from speedrun.base.text import visible
from speedrun.history.glossary import load_glossary
from speedrun.run.log import RULE, RunLog, Step
from speedrun.run.plan import Plan
from speedrun.scripts.find import paths_taken

END_PATIENCE_S = 30  # from a finished run's last line until its end is called late
GIVE_UP_S = 300  # from the same line until it is stopped
WIDE = 70  # columns from which on the live line also has a bar and tokens/s


class NotFinite(UserError):
    """A loss that is NaN or infinite, after which training on is useless."""


@contextmanager
def follow(
    plan: Plan, stream: TextIO, stop: Callable[[str], None] = lambda reason: None
) -> Iterator[Callable[[str], None]]:
    """Inside the block, its value is a function that shows a line of rank 0 on the text stream, and
    after the hyperparameters the paths that they select. It raises NotFinite after such a loss.

    stop: ends a script that does not end by itself after its last step; gets the reason.
    """
    log, source = RunLog(), plan.script.path.read_text(encoding="utf-8")
    late_end = []  # timers: a thread of the script may never end

    def paths():
        on_gpu = log.environment.get("device", "cpu") != "cpu"
        return paths_taken(source, log.hyperparameters, on_gpu, chosen=plan.options)

    def announce_late_end():
        print(f"step {log.last.step} was the last, but the script has not ended {END_PATIENCE_S} s"
              " later; Ctrl-C stops it and keeps the log", file=stream, flush=True)

    def give_up():
        stop(f"step {log.last.step} was the last, but the script did not end in {GIVE_UP_S} s, so"
             " it was stopped; does one of its threads never end?")

    def expect_end():
        cancel()
        late_end[:] = Timer(END_PATIENCE_S, announce_late_end), Timer(GIVE_UP_S, give_up)
        for timer in late_end:
            timer.daemon = True
            timer.start()

    def cancel():
        for timer in late_end:
            timer.cancel()

    def read(line):
        seen = log.feed(line)
        for name in ("val_loss", "train_loss") if isinstance(seen, Step) else ():
            if not math.isfinite(getattr(seen, name) or 0):
                raise NotFinite(f"{name} is {getattr(seen, name)} at step {seen.step}, so the run"
                                f" was stopped; lower a learning rate: {_rates(plan)}")
        last = log.last
        if last and last.step == last.train_steps and last.val_loss is not None:
            expect_end()
        return seen

    def show_line(line):
        print(visible(line), file=stream, flush=True)
        if read(line) == "hyperparameters":
            print(paths(), file=stream, flush=True)

    live = _live_line(plan, stream, log, read, paths) if stream.isatty() else nullcontext(show_line)
    try:
        with live as show:
            yield show
    finally:
        cancel()


@contextmanager
def _live_line(plan, stream, log, read, paths):
    """Inside the block, a function that shows a line of rank 0 on a terminal; `log`, `read` and
    `paths` are those of `follow`."""
    from rich import progress
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}")]
    if console.width >= WIDE:
        columns += [progress.BarColumn(None), progress.TextColumn("{task.fields[speed]}")]
    columns += [progress.TimeRemainingColumn(compact=True)]
    bar = progress.Progress(
        *columns, console=console, transient=True, refresh_per_second=5, expand=True)
    task, val_loss = bar.add_task("starting", total=None, speed=""), ""

    def show(line):
        nonlocal val_loss
        seen = read(line)
        if seen is None and line.strip() and line != RULE:  # facts are in the log and the summary
            console.print(visible(line), markup=False)
        if seen == "hyperparameters":
            console.print(paths(), markup=False)
        if not isinstance(seen, Step):
            return
        if seen.val_loss is not None:
            val_loss = f"val_loss {seen.val_loss:.4f}"
            clock = seen.train_time_ms
            seconds = "" if clock is None else f"  {clock / 1000:,.1f} s"
            console.print(f"step {seen.step:<6} {val_loss}{seconds}", markup=False)
        speed = ""
        if log.tokens_per_step and seen.step and seen.step_avg_ms:
            tokens = log.tokens_after(seen.step)
            speed = f"{1000 * tokens / (seen.step * seen.step_avg_ms):,.0f} tokens/s"
        bar.update(task, completed=seen.step, total=seen.train_steps, speed=speed,
                   description=f"step {seen.step}/{seen.train_steps} {val_loss}")

    with bar:
        yield show


def _rates(plan):
    """The run's learning rates, as `--set` takes them."""
    rates = load_glossary().of_kind("rate")
    return ", ".join(f"{name}={value}" for name, value in plan.hyperparameters.items()
                     if name in rates)
