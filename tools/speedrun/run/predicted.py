"""What the stored predictions tell about the memory of a run, where none can be tried."""

from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.scripts.find import Script, code_hash
from speedrun.scripts.sizes import SCHEDULE, micro_batches

SIZES = (12, 16, 24, 32, 80)  # GiB of GPUs; the last one's is the records'
# Hyperparameters that leave a prediction's bytes per token as they are; any other may change them.
MAY_DIFFER = (
    "train_files", "val_files", "val_tokens", "total_batch_size", "seq_len", "micro_batch_size",
    "train_steps", *SCHEDULE, "val_loss_every", "train_loss_every", "save_checkpoint", "seed",
    "kernel_warmup_steps",
)


def find_prediction(script: Script, options: dict[str, object]) -> StoredPrediction | None:
    """The prediction of a milestone's code of today with these hyperparameters in place of its own;
    None if there is none, or if one of them changes the memory."""
    try:
        found = script.milestone and load_predictions().get(script.milestone.id)
    except (OSError, ValueError):  # make_figures.py says what is wrong
        return None
    changed = {name for name, value in options.items()
               if script.typed(name, value) != script.hyperparameters[name]}
    fits = found and found.code == code_hash(script.path) and changed <= {*MAY_DIFFER}
    return found if fits else None


def largest_predicted(prediction: StoredPrediction, hyperparameters: dict[str, object],
                      world_size: int, room: float) -> tuple[int, int]:
    """The largest micro batch that divides the batch among the ranks and is predicted to take no
    more than `room` bytes: its sequences, and their tokens.

    Where not even one sequence fits, its tokens are halved until it does (to nothing: (0, 0)).
    """
    seq_len = hyperparameters["seq_len"]
    while seq_len:
        sizes = micro_batches({**hyperparameters, "seq_len": seq_len}, world_size)
        fitting = [n for n in sizes if prediction.alone(n * seq_len) <= room]
        if fitting:
            return fitting[-1], seq_len
        seq_len //= 2
    return 0, 0
