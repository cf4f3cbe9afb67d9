"""Model FLOPs utilisation: what a run computes for its model, against the peak of its devices."""

from collections.abc import Sequence
from pathlib import Path

from speedrun.comparison import Entry
from speedrun.device import peak_flops
from speedrun.runlog import read_log


def training_flops(script: Path, hyperparameters: dict[str, object]) -> float | None:
    """FLOPs per token as flops.py counts them; None where there is no script or nothing to ask."""
    if not script.is_file() or not hyperparameters:
        return None
    from speedrun.flops import training_flops_per_token  # torch, which takes seconds

    return training_flops_per_token(script, hyperparameters)


def add_mfu(entries: Sequence[Entry], measure: bool) -> None:
    """Fills in flops_per_token and peak_flops of the entries, where both can be known.

    measure: take the speed of a large matrix product on this machine for a device of this machine
    whose data sheet is not known.
    """
    for entry in entries:
        entry.peak_flops = peak_flops(entry.device) if entry.device else None
    if measure:
        from speedrun.flops import measured_peak

        device, flops = measured_peak()
        for entry in entries:
            if entry.device == device:
                entry.peak_flops = entry.peak_flops or flops
    for entry in entries:
        if entry.peak_flops and entry.runs:
            log = Path(entry.runs[0].log)
            hyperparameters = read_log(log).hyperparameters
            entry.flops_per_token = training_flops(log.parent / "train_gpt.py", hyperparameters)
