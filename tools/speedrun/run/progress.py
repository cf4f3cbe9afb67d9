"""Shows a run while it goes on: one live line on a terminal, plain lines elsewhere."""

from speedrun.run.log import RULE, RunLog, Step
from speedrun.run.plan import Plan

WIDE = 70  # columns from which on the live line also has a bar and tokens/s


def follow(plan: Plan, stream):
    """A context manager for the run; its value takes each line that rank 0 printed.

    stream: the text stream to show it on.
    """
    return _LiveLine(plan, stream) if stream.isatty() else _PlainLines(stream)


class _PlainLines:
    """Every line as it is."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        return lambda line: print(line, file=self.stream, flush=True)

    def __exit__(self, *exception):
        return None


class _LiveLine:
    """Step, loss, speed and time left in one line; validations and messages stay above it."""

    def __init__(self, plan, stream):
        from rich import progress
        from rich.console import Console

        self.tokens_per_step = plan.tokens_per_step
        self.log = RunLog()
        self.console = Console(file=stream, highlight=False)
        columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}")]
        if self.console.width >= WIDE:
            columns += [progress.BarColumn(bar_width=None)]
            columns += [progress.TextColumn("{task.fields[speed]}")]
        columns += [progress.TimeRemainingColumn(compact=True)]
        self.bar = progress.Progress(
            *columns, console=self.console, transient=True, refresh_per_second=5, expand=True)
        self.task = self.bar.add_task("starting", total=None, speed="")
        self.val_loss = ""

    def __enter__(self):
        self.bar.start()
        return self.show

    def __exit__(self, *exception):
        self.bar.stop()

    def show(self, line):
        event = self.log.feed(line)
        if event is None:
            if line.strip() and line != RULE:
                self.console.print(line, markup=False)
        elif isinstance(event, Step):  # facts are in the log and in the summary
            self._show_step(event)

    def _show_step(self, step):
        if step.val_loss is not None:
            self.val_loss = f"val_loss {step.val_loss:.4f}"
            line = f"step {step.step:<6} {self.val_loss}"
            if step.train_time_ms is not None:
                line += f"  {step.train_time_ms / 1000:,.1f} s"
            self.console.print(line, markup=False)
        speed = ""
        if self.tokens_per_step and step.step_avg_ms:
            speed = f"{1000 * self.tokens_per_step / step.step_avg_ms:,.0f} tokens/s"
        self.bar.update(
            self.task, completed=step.step, total=step.train_steps, speed=speed,
            description=f"step {step.step}/{step.train_steps} {self.val_loss}",
        )
