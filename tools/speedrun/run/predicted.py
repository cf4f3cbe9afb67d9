"""What the stored predictions tell about the memory of a run, where none can be tried."""

from dataclasses import dataclass

from speedrun.history.glossary import load_glossary
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.scripts.find import Script, code_hash
from speedrun.scripts.sizes import length_names, micro_batches

SIZES = (12, 16, 24, 32, 80)  # GiB of GPUs; the last one's is the records'
# Kinds of hyperparameters that leave a prediction's bytes per token as they are.
MAY_DIFFER = ("files", "batch", "length", "train length", "val length", "steps", "phase",
              "interval", "output", "seed")


@dataclass(frozen=True)
class Fitting:
    """A micro batch that is predicted to fit: its sequences, {hyperparameter: tokens of a sequence}
    of training and then of validation, and bytes at their peak."""

    sequences: int
    lengths: dict[str, int]
    peak: float

    def __str__(self):
        """Sequences x tokens; of training / of validation where those differ."""
        return f"{self.sequences} x " + " / ".join(f"{n:,}" for n in self.lengths.values())

    def shortened(self, own: dict[str, object]) -> str:
        """The options that bring sequences to these lengths, a space before each."""
        return "".join(f" --set {name}={length}" for name, length in self.lengths.items()
                       if length < own[name])


def find_prediction(script: Script, options: dict[str, object]) -> StoredPrediction | None:
    """The prediction of a milestone's code of today with these hyperparameters in place of its own;
    None if there is none, or if one of them changes the memory."""
    try:
        found = script.milestone and load_predictions().get(script.milestone.slug)
    except (OSError, ValueError):  # make_figures.py says what is wrong
        return None
    if not found:
        return None
    changed = {name for name, value in options.items()
               if script.typed(name, value) != script.hyperparameters[name]}
    fits = changed <= {*load_glossary().of_kind(*MAY_DIFFER)}
    return found if fits and found.code == code_hash(script.path) else None


def largest_predicted(prediction: StoredPrediction, hyperparameters: dict[str, object],
                      world_size: int, room: float) -> Fitting | None:
    """The largest micro batch that divides the batch among the ranks and is predicted to take no
    more than `room` bytes.

    Where not even one sequence fits, those that are too long are halved until it does: sequences of
    training, and of validation where they have a length of their own. None if nothing fits.
    """
    train, val = length_names(hyperparameters)
    lengths = {name: hyperparameters[name] for name in (train, val)}
    while all(lengths.values()):
        peaks = {n: prediction.alone(n * lengths[train], n * lengths[val])
                 for n in micro_batches({**hyperparameters, **lengths}, world_size)}
        fitting = [n for n, peak in peaks.items() if peak <= room]
        if fitting:
            return Fitting(fitting[-1], lengths, peaks[fitting[-1]])
        lengths[train if prediction.alone(lengths[train]) > room else val] //= 2
    return None
