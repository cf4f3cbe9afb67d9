"""How a run's hyperparameters follow from fewer steps or more ranks.

They are {name: value} of a script's defaults and overrides, values as numbers or as text.
"""

import math

# phases that some records count in steps
SCHEDULE = ("warmup_steps", "cooldown_steps", "momentum_warmup_steps")


def training_tokens(hyperparameters: dict[str, object], steps: int | None) -> int | None:
    """Tokens of a run of `steps` steps (None: the script's own), or None where it does not tell."""
    steps = steps or whole(hyperparameters.get("train_steps"))
    batch = whole(hyperparameters.get("total_batch_size"))
    return steps * batch if steps and batch else None


def scaled_phases(hyperparameters: dict[str, object], steps: int) -> dict[str, tuple[int, int]]:
    """The phases counted in steps, {name: (old, new)}, such that a schedule cut to `steps` steps
    keeps its shape. Phases of 0 steps are left out."""
    full = whole(hyperparameters.get("train_steps"))
    if full in (None, 0, steps):
        return {}
    phases = {name: whole(hyperparameters.get(name)) for name in SCHEDULE}
    return {name: (old, old * steps // full) for name, old in phases.items() if old}


def fitting_micro_batch(hyperparameters: dict[str, object], world_size: int) -> int | None:
    """A smaller micro_batch_size with which a step divides among the ranks; None where there is no
    need or no way (the script says what is wrong)."""
    names = ("total_batch_size", "seq_len", "micro_batch_size")
    batch, seq_len, micro_batch = (whole(hyperparameters.get(name)) for name in names)
    if not (batch and seq_len and micro_batch) or batch % (seq_len * world_size):
        return None
    sequences = batch // (seq_len * world_size)  # of a step, per rank
    fitting = math.gcd(sequences, micro_batch)
    return fitting if fitting != micro_batch else None


def whole(value: object) -> int | None:
    """The value as an int, or None if it is none."""
    text = str(value).replace("_", "")
    return int(text) if text.isdecimal() else None
