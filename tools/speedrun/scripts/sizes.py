"""Adapts a run's hyperparameters to fewer steps, more ranks or the memory of a device.

They are {name: value} of a script's defaults and overrides, values as numbers or as text; the
glossary explains them.
"""

from collections.abc import Container, Mapping

from speedrun.history.glossary import load_glossary
from speedrun.history.tokens import tokens_after

# token ids of the embedded corpus: the bytes and the start of a document; padded for 8 ranks; with
# the three further markers of a conversation
BYTE_VOCABULARIES = (257, 264, 260)
LONGEST_DENSE = 16_384  # rows of a dense T x T mask beyond which it is too large

MOST_SEQUENCES = 2**20  # of a micro-batch; no memory holds more


def length_names(hyperparameters: Container[str]) -> tuple[str, str]:
    """The names of the hyperparameters for the tokens of a training sequence and of a validation
    sequence: the same name twice in a script that has one length."""
    both, *separate = map(load_glossary().of_kind, ("length", "train length", "val length"))
    return tuple(next((name for name in some if name in hyperparameters), both[0])
                 for some in separate)


def fitting(values: Mapping[str, object], hyperparameters: Container[str]) -> dict[str, object]:
    """Those of the values, {name: value}, whose hyperparameters a script has."""
    return {name: value for name, value in values.items() if name in hyperparameters}


def longest_dense(defaults: Mapping[str, object]) -> int:
    """Tokens of a sequence beyond which a dense mask is too large, from a script's own
    hyperparameters: where it pairs heads (the letter P), a token has two rows of the mask."""
    return LONGEST_DENSE // (1 + ("P" in (defaults.get("window_pattern") or "")))


def training_tokens(hyperparameters: dict[str, object], steps: int | None) -> int | None:
    """Tokens of a run of `steps` steps (None: the script's own), or None if it is not known."""
    steps = steps or whole(hyperparameters.get("train_steps"))
    batch = whole(hyperparameters.get("total_batch_size"))
    return tokens_after(hyperparameters, steps) if steps and batch else None


def scaled_phases(hyperparameters: dict[str, object], steps: int) -> dict[str, tuple[int, int]]:
    """The phases counted in steps, {name: (old, new)}, such that a schedule cut to `steps` steps
    keeps its shape; a phase has at least one step."""
    full = whole(hyperparameters.get("train_steps"))
    if full in (None, 0, steps):
        return {}
    phases = {name: whole(hyperparameters.get(name)) for name in load_glossary().of_kind("phase")}
    return {name: (old, max(1, old * steps // full)) for name, old in phases.items() if old}


def micro_batches(hyperparameters: dict[str, object], world_size: int) -> list[int]:
    """Every micro_batch_size with which a step and a validation divide among the ranks, ascending;
    empty if it is impossible (speedrun.run.preflight reports why)."""
    names = ("total_batch_size", "val_tokens", *length_names(hyperparameters))
    batch, val_tokens, *lengths = (whole(hyperparameters.get(name)) for name in names)
    if not (batch and all(lengths)):
        return []
    train, val = (length * world_size for length in lengths)  # tokens of one sequence per rank
    return [n for n in range(1, min(batch // train, MOST_SEQUENCES) + 1)
            if batch % (n * train) == 0 and (val_tokens or 0) % (n * val) == 0]


def fitting_micro_batch(hyperparameters: dict[str, object], world_size: int) -> int | None:
    """The largest part of micro_batch_size with which a step and a validation divide among the
    ranks; None if it need not change or cannot fit (speedrun.run.preflight reports why)."""
    usual = whole(hyperparameters.get("micro_batch_size"))
    parts = [n for n in micro_batches(hyperparameters, world_size) if usual and usual % n == 0]
    fitting = max(parts, default=usual)
    return fitting if fitting != usual else None


def trial_sizes(
    hyperparameters: dict[str, object], micro_batch: int, world_size: int
) -> dict[str, object]:
    """The hyperparameters that change in a run that measures the memory of `micro_batch` sequences:
    two steps of up to two micro-batches, and one micro-batch of validation.

    A shorter run would need less memory: gradients exist since the second micro-batch, the
    optimizers' states since the second step, the kernel warm-up keeps copies to restore, and where
    the batch grows, the second step is the largest.
    """
    sizes = {name: whole(value) or 0 for name, value in hyperparameters.items()}
    tokens, val_tokens = (micro_batch * sizes[name] * world_size for name in length_names(sizes))
    trial = dict(
        micro_batch_size=micro_batch, val_tokens=val_tokens, train_steps=2, warmup_steps=1,
        scheduled_steps=1,
        total_batch_size=min(2 * tokens, sizes["total_batch_size"]),
        kernel_warmup_steps=min(2, sizes.get("kernel_warmup_steps", 0)),
        save_checkpoint=False, **dict.fromkeys(load_glossary().of_kind("interval"), 0),
    )
    return {name: value for name, value in trial.items() if name in hyperparameters}


def whole(value: object) -> int | None:
    """The value as an int, or None if it is not a whole number."""
    text = str(value).replace("_", "")
    return int(text) if text.isdecimal() else None
