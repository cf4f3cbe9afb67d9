"""Sums up a finished run: figures from its log, beside the official ones."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from speedrun.base.files import read_texts
from speedrun.base.text import json_text, visible
from speedrun.history.manifest import slug_in
from speedrun.run.gpus import peak_flops
from speedrun.run.log import SCRIPT, RunLog, Step
from speedrun.run.plan import Plan

# What is printed, in reading order: attribute of Summary, its title and its format.
_ROWS = {
    "val_loss": ("val_loss", "{:.4f}"), "steps": ("steps", "{:,}"), "tokens": ("tokens", "{:,}"),
    "train_time_s": ("train_time", "{:,.1f} s"), "step_avg_ms": ("step_avg", "{:.2f} ms"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"), "mfu": ("MFU", "{:.1%}"),
    "peak_memory_mib": ("peak_memory", "{:,} MiB"), "conversations": ("conversations", "{}"),
    "padding": ("padding", "{}"), "scale": ("scale", "{}"),
    "data": ("data", "{}"), "data_fingerprint": ("fingerprint", "{}"), "device": ("device", "{}"),
    "changed": ("changed", "{}"),
}


@dataclass(frozen=True)
class Summary:
    """The figures of a run; None if unknown.

    milestone is a slug, val_loss in nats per token, tokens over all steps, times in seconds and
    milliseconds, mfu as a fraction of the peak of all GPUs, peak_memory_mib of rank 0,
    data_fingerprint of the embedded corpus or of conversations, whose text depends on the Python
    version; data that changed during the run have none. rows: what an epoch of fine-tuning holds,
    as its log says it, else empty; tokens leave padding out. `official` holds the record's figures
    under the same names, or is empty if the runs do not compare. changed: what was changed under
    the run, in words, or "".
    """

    milestone: str | None
    script: str
    scale: str
    data: str | None
    data_fingerprint: str | None
    device: str | None
    world_size: int
    val_loss: float | None
    steps: int
    tokens: int | None
    train_time_s: float | None
    step_avg_ms: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_mib: int | None
    rows: dict[str, float]
    log: str
    official: dict[str, float | int]
    changed: str = ""


def summarize(plan: Plan, log: RunLog, data: str | None = None, changed: str = "") -> Summary:
    """The Summary of the run that `plan` described and `log` recorded (at least one step).

    data: the fingerprint of its data; changed: what was changed under the run, in words."""
    timed = _last(log.steps, "step_avg_ms")
    batch = log.tokens_per_step
    world_size = int(log.environment.get("world_size", plan.nproc * plan.nodes.count))
    step_avg_ms = timed.step_avg_ms
    steps_ms = step_avg_ms and timed.step * step_avg_ms
    tokens_per_s = 1000 * log.tokens_after(timed.step) / steps_ms if batch and steps_ms else None
    device = log.environment.get("device", ", ".join(sorted(set(plan.gpus))) or None)
    peak = peak_flops(device) if device else None
    flops = None
    if tokens_per_s and peak:  # then the log has the hyperparameters
        from speedrun.scripts.flops import flops_if_countable  # torch, which takes seconds

        flops = flops_if_countable(plan.out / SCRIPT, log.hyperparameters)
    return Summary(
        milestone=plan.script.milestone.slug if plan.script.milestone else None,
        script=str(plan.script.path),
        scale=plan.scale,
        data=str(plan.data) if plan.data else log.hyperparameters.get("train_files")
        or log.hyperparameters.get("train_file"),
        data_fingerprint=data,
        device=device,
        world_size=world_size,
        val_loss=_last(log.steps, "val_loss").val_loss,
        steps=log.last.step,
        tokens=log.tokens_after(log.last.step) if batch else None,
        train_time_s=timed.train_time_ms and timed.train_time_ms / 1000,
        step_avg_ms=step_avg_ms,
        tokens_per_s=tokens_per_s,
        mfu=flops * tokens_per_s / (peak * world_size) if flops else None,
        peak_memory_mib=log.peak_memory_mib,
        rows=log.rows,
        log=str(plan.out / "log.txt"),
        official=_official(plan, log),
        changed=changed,
    )


def corpus_of(folder: Path) -> str | None:
    """The fingerprint of the embedded corpus that a run in the folder was trained on, from its
    summary; None if it has none."""
    return read_texts(folder / "summary.json").get("data_fingerprint")


def milestone_of(folder: Path) -> str | None:
    """The slug of the milestone that was run in the folder, from its summary; None without one."""
    name = read_texts(folder / "summary.json").get("milestone")
    return slug_in(name) if name else None


def to_json(summary: Summary) -> str:
    """The summary as a JSON object; a loss that is not finite becomes null."""
    return json_text(asdict(summary), indent=2)


def print_summary(summary: Summary, stream: TextIO) -> None:
    """Prints the known figures as a table to a text stream, beside the official ones, if any."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = {**vars(summary), "data": summary.data and visible(Path(summary.data).name),
             "device": summary.device and f"{summary.world_size} x {summary.device}",
             "conversations": None, "padding": None, **_shown_rows(summary.rows)}
    official = summary.official and {**summary.official, "device": "8 x H100"}
    columns = 3 if official else 2
    table = Table(box=box.SIMPLE_HEAD if stream.isatty() else None, pad_edge=False)
    for title in (summary.milestone or "", "this run", "official")[:columns]:
        table.add_column(title, justify="right" if table.columns else "left", overflow="fold")
    for name, (title, text) in _ROWS.items():
        if shown[name] not in (None, ""):
            official_text = text.format(official[name]) if name in official else ""
            table.add_row(*(title, text.format(shown[name]), official_text)[:columns])
    Console(file=stream, highlight=False).print(table)


def _shown_rows(rows):
    """What is printed of an epoch's rows."""
    if not rows:
        return {}
    return {"conversations": "{read:,}, cut {cut:,}, dropped {dropped:,}".format(**rows),
            "padding": "{waste:.1%} of an epoch's slots, {waste_alone:.1%} with a row for each"
                       .format(**rows)}


def _last(steps, name):
    """The last step line with this value, preferably of a validation, where times are exact; an
    empty one if there is none."""
    found = [step for step in steps if getattr(step, name) is not None]
    exact = [step for step in found if step.val_loss is not None and step.step > 0]
    return (exact or found or [Step(0)])[-1]


def _official(plan, log):
    """The record's figures, if this run has its scale, its batch and all of its steps."""
    record, batch = plan.script.milestone, log.tokens_per_step
    if record is None or plan.scale != "record" or (log.last.step, batch) != (
            record.train_steps, record.tokens_per_step):
        return {}
    figures = {
        "val_loss": record.val_loss, "steps": record.train_steps,
        "tokens": record.tokens,
        # without a step time of its own, the minutes are another run's
        "train_time_s": record.step_avg_ms and 60 * record.minutes,
        "step_avg_ms": record.step_avg_ms,
        "tokens_per_s": record.step_avg_ms and 1000 * record.tokens / record.train_steps
        / record.step_avg_ms,
    }
    return {name: value for name, value in figures.items() if value is not None}
