"""The checkpoint that a run leaves, and from which another may start."""

import pickle
import zipfile
from pathlib import Path
from textwrap import shorten

from speedrun.base.errors import UserError
from speedrun.base.files import read_json

CHECKPOINT = "checkpoint.pt"
SIZES = ("num_layers", "num_heads", "model_dim")  # that a run keeps from the one it starts from
MAKE_ONE = "python tools/run_milestone.py {} --scale tiny --save-checkpoint"


def find_checkpoint(run: Path) -> Path:
    """The checkpoint of a run's folder, or the file itself; UserError if there is none."""
    file = run / CHECKPOINT if run.is_dir() else run
    if not run.exists():
        raise UserError(f"{run} does not exist; name a run's folder or its checkpoint")
    if not (run.is_dir() or run.is_file()):
        raise UserError(f"{run} is neither a run's folder nor a checkpoint")
    if not file.is_file():
        raise UserError(f"{run} holds no {CHECKPOINT}; make one: "
                        "python tools/run_milestone.py ID --save-checkpoint")
    return file


def scale_of(checkpoint: Path) -> str | None:
    """The scale of the run that left the checkpoint, from its summary; None without one."""
    summary = read_json(checkpoint.with_name("summary.json"))
    return summary.get("scale") if isinstance(summary, dict) else None


def check_start(values: dict[str, object]) -> None:
    """Raises UserError where `checkpoint`, one of the hyperparameters, is no checkpoint, or one of
    other sizes than theirs; its table of tokens may be smaller. Does nothing without one."""
    if not values.get("checkpoint"):
        return
    file = Path(values["checkpoint"])
    found = read_checkpoint(find_checkpoint(file))["hyperparameters"]
    for name in SIZES:
        if name in values and found.get(name) != values[name]:
            raise UserError(f"{file} has {name}={found.get(name)}, and the run {values[name]}; add"
                            f" --set {name}={found.get(name)}, or start from another run")
    if found.get("vocab_size", 0) > values.get("vocab_size", 0) > 0:
        raise UserError(f"{file} has vocab_size={found['vocab_size']}, more than the run's"
                        f" {values['vocab_size']}; start from another run")


def read_checkpoint(file: Path) -> dict:
    """A snapshot's checkpoint, dict(step, hyperparameters, model), with the tensors on the CPU.

    Raises UserError, one line, for a file that is damaged, holds code or is no checkpoint.
    """
    import torch  # takes seconds

    try:
        with zipfile.ZipFile(file) as archive:
            if bad := archive.testzip():  # torch does not compare the check sums that it stores
                raise zipfile.BadZipFile(f"wrong check sum of {bad}")
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{file} holds pickled code, which is not run; only weights and plain "
                        "values are loaded") from None
    except PermissionError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except Exception as error:  # random bytes fail in many ways
        raise UserError(f"{file} is damaged, or no checkpoint: {brief(error)}") from None
    kinds = dict(step=int, hyperparameters=dict, model=dict)
    if not (isinstance(checkpoint, dict)
            and all(isinstance(checkpoint.get(name), kind) for name, kind in kinds.items())):
        raise UserError(f"{file} is not a snapshot's checkpoint, which has {', '.join(kinds)}")
    return checkpoint


def brief(error: BaseException) -> str:
    """The beginning of an exception's text, in one line."""
    return shorten(str(error) or type(error).__name__, 200, placeholder=" …")
