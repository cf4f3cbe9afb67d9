"""The table of what the stations take on one GPU."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.text import UNKNOWN, markdown
from speedrun.history.manifest import Manifest
from speedrun.history.predictions import StoredPrediction
from speedrun.history.schema import Curve, build
from speedrun.predict.cards import CARDS
from speedrun.predict.runs import run_flops
from speedrun.run.data import shards_read
from speedrun.run.fit_batch import MARGIN, largest_predicted
from speedrun.run.gpus import peak_flops
from speedrun.scripts.find import find_script

MFU = 0.4  # what is assumed, as in predict.py
SHOWN = {"h100": "H100", "4090": "4090", "a100": "A100"}  # cards with a column
RECORD_GPUS, GIB = 8, 24  # of a record's machine; of the memory that has a column


@dataclass(frozen=True)
class Log:
    """What public logs say of one milestone, by its slug, on one GPU: means of so many runs."""

    milestone: str
    gpu: str
    torch: str
    runs: int
    steps: int
    seconds: float
    val_loss: float
    peak_memory_mib: int
    curve: Curve
    source: str


def load_log(path: Path) -> Log:
    """The Log in a TOML file. Raises ValueError, one line, for what does not fit, OSError for an
    unreadable file."""
    return build(f"{path.name}: ", Log, tomllib.loads(path.read_text(encoding="utf-8")))


def one_gpu_table(stored: Mapping[str, StoredPrediction], manifest: Manifest, log: Log) -> str:
    """A Markdown table: the stations that have a time and the logged milestone, the
    last first. Counts the FLOPs of those that are not predicted."""
    head = ["milestone", "record, GPU-hours", *(f"{name}, hours" for name in SHOWN.values()),
            f"in {GIB} GB", "shards", "loss at step"]
    return markdown(head, [
        _row(m, stored.get(m.slug), log if m.slug == log.milestone else None)
        for m in reversed(manifest.milestones)
        if m.minutes and (m.is_station or m.slug == log.milestone)
    ], right=head[1:-1])


def _row(milestone, prediction, log):
    script = find_script(milestone.id)
    flops = (prediction and prediction.run_flops) or run_flops(script, {})  # seconds, with torch
    texts = {card: f"{flops / (MFU * peak_flops(CARDS[card].name)) / 3600:.2g}" for card in SHOWN}
    if log:
        texts["h100"] = f"**{log.seconds / 3600:.2g}**, another script's logs"
    fits = prediction and largest_predicted(
        prediction, script.hyperparameters, 1, MARGIN * GIB * 2**30)
    return [f"[{milestone.id}](speedrun/{milestone.name}) {milestone.title}",
            f"{milestone.minutes * RECORD_GPUS / 60:.2g}",
            *texts.values(), str(fits or UNKNOWN),
            str(shards_read(milestone.step_tokens_read)),
            _losses(log.curve if log else milestone.curve)]


def _losses(curve):
    """Three points of a curve: an early one, the one in the middle, the last."""
    later = [point for point in curve if point[0] >= 250]
    if not later:
        return UNKNOWN
    middle = min(later, key=lambda point: abs(point[0] - later[-1][0] / 2))
    return ", ".join(f"{loss:.2f} at {step:,}" for step, loss in dict.fromkeys(
        (later[0], middle, later[-1])))
