"""The small sizes at which a script is checked, and the tokens that it trains on; needs numpy."""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

from speedrun.manifest import REPOSITORY

# No two of vocabulary, sequence, width and their multiples are alike: a tensor's shape tells what
# it is. Four layers are the fewest in which the order of two skip connections shows.
SIZES = dict(
    vocab_size=72, seq_len=24, model_dim=32, num_heads=2, num_layers=4,
    micro_batch_size=4, total_batch_size=192, val_tokens=192,
    val_loss_every=0, train_loss_every=0, kernel_warmup_steps=0, save_checkpoint=False, seed=0,
    compile=False, bf16=False, flex_attention=False, bos_id=1, window_start=2, window_end=20,
)
# A run long enough for every phase of every schedule, after a warm-up that must leave no trace. The
# scalars stand still: the exact gradient
# of some is zero, and Adam makes whole steps of what round-off leaves.
TRAINING = dict(
    train_steps=12, warmup_steps=3, cooldown_steps=4, momentum_warmup_steps=4, val_loss_every=1,
    train_loss_every=1, kernel_warmup_steps=2, head_lr=0.03, scalar_lr=0.0,
)
# Steps with gradients from outside. Numbers that no milestone has show whether the fields are used.
PROBE = dict(
    train_steps=4, warmup_steps=0, cooldown_steps=2, momentum_warmup_steps=3,
    muon_lr=0.011, muon_momentum_start=0.6, muon_momentum=0.87, adam_lr=0.0042, embed_lr=0.31,
    head_lr=0.0073, scalar_lr=0.023,
)


def arguments(module: ModuleType, values: dict[str, object]):
    """The module's Hyperparameters with these values, as far as it has fields of their names."""
    known = {field.name for field in dataclasses.fields(module.Hyperparameters)}
    return module.Hyperparameters(**{name: v for name, v in values.items() if name in known})


def write_shards(folder: Path) -> dict[str, str]:
    """Writes two short training shards and one for validation; returns train_files and val_files.

    Documents begin with token 1. A token follows from the one before and, mostly, the one three
    places back, so that it matters how far the model sees.
    """
    import numpy as np

    sys.path.insert(0, str(REPOSITORY / "data"))
    try:
        import shards
    finally:
        sys.path.pop(0)

    rng = np.random.default_rng(0)
    followers = rng.integers(2, SIZES["vocab_size"], (SIZES["vocab_size"], 3))

    def stream(length):
        tokens = np.ones(length, dtype=np.int64)
        for i in range(1, length):
            if rng.random() > 0.08:  # else a document begins
                choice = tokens[i - 3] % 3 if i > 2 and rng.random() < 0.8 else rng.integers(3)
                tokens[i] = followers[tokens[i - 1], choice]
        return tokens

    for name, length in (("train_000001", 900), ("train_000002", 1300), ("val_000000", 400)):
        shards.write(folder / f"micro_{name}.bin", stream(length))
    return {f"{split}_files": str(folder / f"*_{split}_*.bin") for split in ("train", "val")}
