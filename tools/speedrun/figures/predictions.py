"""The stored predictions: made, checked, and shown."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from speedrun.base.files import locked, replace_file
from speedrun.base.text import json_text, markdown
from speedrun.history.manifest import Manifest, Milestone, load_manifest
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.predict.cards import CARDS
from speedrun.predict.runs import observe
from speedrun.run.fit_batch import MARGIN, SIZES, largest_predicted
from speedrun.scripts.find import Script, code_hash, find_script
from speedrun.scripts.sizes import length_names

CARD, WORLD_SIZE = CARDS["h100"], 8  # the records'
TOKENS = (8_192, 65_536)  # of the two forward passes that give the line of one GPU's memory


def predict_stale(path: Path) -> None:
    """Predicts again what is missing or stale in the file at `path` and keeps each as it comes.

    Raises ValueError or OSError for a file that cannot be read, and as `make_prediction`.
    """
    manifest = load_manifest()
    stored = load_predictions(path) if path.exists() else {}
    for milestone in manifest.milestones:
        if fault := _fault(milestone, stored):
            print(f"predicting {milestone.id}: {fault}", flush=True)
            made = make_prediction(milestone)
            with locked(path):  # another call may have kept others meanwhile
                stored = load_predictions(path) if path.exists() else {}
                stored[milestone.slug] = made
                write_predictions(path, {
                    m.slug: stored[m.slug] for m in manifest.milestones if m.slug in stored})


def write_predictions(path: Path, predictions: Mapping[str, StoredPrediction]) -> None:
    """Writes the file at `path` for load_predictions; what is not known of one is left out."""
    entries = {slug: {name: value for name, value in asdict(prediction).items()
                      if value is not None} for slug, prediction in predictions.items()}
    replace_file(path, (json_text(entries, indent=1) + "\n").encode())


def make_prediction(milestone: Milestone) -> StoredPrediction:
    """Predicts what a milestone needs, compiled; takes minutes. Raises as `observe`."""
    script = find_script(milestone.id)
    record = observe(script, CARD, WORLD_SIZE, {}, compiled=True)
    launches = Counter(launch.phase == "optimizer" for launch in record.launches)
    return StoredPrediction(
        code_hash(milestone.script), record.peak, **memory_alone(script), saved=record.saved,
        pass_launches=launches[False], optimizer_launches=launches[True],
        optimizer_state=record.memory["optimizer state"],
        sent=round(sum(map(_ring_bytes, *zip(*record.collectives.items(), strict=True)))))


def _ring_bytes(kind, size):
    """Bytes that each rank sends in a ring: an all-reduce is a reduce-scatter and an all-gather."""
    return size * (2 if kind.startswith("allreduce") else 1) * (WORLD_SIZE - 1) / WORLD_SIZE


def memory_alone(script: Script) -> dict[str, float]:
    """The fields of a StoredPrediction that tell the memory of one GPU, by their names, from two
    runs. Raises as `observe`."""
    lengths = length_names(script.hyperparameters)
    tokens, peaks, val_peaks = [], [], []
    for wanted in TOKENS:
        seq_len = min(wanted, script.hyperparameters[lengths[0]])
        rows = wanted // seq_len
        tokens.append(rows * seq_len)
        found = observe(script, CARD, 1, {
            **dict.fromkeys(lengths, seq_len), "micro_batch_size": rows,
            "total_batch_size": 2 * tokens[-1]}, compiled=True)
        peaks.append(found.peak)
        val_peaks.append(found.peaks["validation"])

    def per_token(peaks):
        return (peaks[1] - peaks[0]) / (tokens[1] - tokens[0])

    line = dict(fixed=round(peaks[0] - per_token(peaks) * tokens[0]),
                per_token=round(per_token(peaks), 1))
    apart = lengths[0] != lengths[1]
    return line | dict(val_per_token=round(per_token(val_peaks), 1)) if apart else line


def stale_entries(stored: Mapping[str, StoredPrediction], manifest: Manifest) -> list[str]:
    """A line for each milestone whose script has changed since it was predicted."""
    return [f"{milestone.id}: {fault}" for milestone in manifest.milestones
            if milestone.slug in stored and (fault := _fault(milestone, stored))]


def _fault(milestone, stored):
    if milestone.slug not in stored:
        return "not predicted"
    fresh = stored[milestone.slug].code == code_hash(milestone.script)
    return None if fresh else "the script has changed since it was predicted"


def memory_table(stored: Mapping[str, StoredPrediction], manifest: Manifest) -> str:
    """A Markdown table: the largest micro-batch of one GPU by its memory; predicted neighbours that
    have the same share a row."""
    def largest(m):
        own = find_script(m.id).hyperparameters
        rooms = (MARGIN * gib * 2**30 for gib in SIZES)
        return [str(largest_predicted(stored[m.slug], own, 1, room) or "none") for room in rooms]

    predicted = (m for m in manifest.milestones if m.slug in stored)
    head = ["milestones", *(f"{gib} GB" for gib in SIZES)]
    return markdown(head, [[", ".join(m.id for m in alike), *sizes]
                           for sizes, alike in groupby(predicted, largest)], right=head[1:])
