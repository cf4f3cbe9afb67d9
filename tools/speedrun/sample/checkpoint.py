"""Loads the model of a run from its checkpoint, through the run's own copy of its script."""

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import torch

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.glossary import load_glossary
from speedrun.run.log import SCRIPT
from speedrun.scripts.load import load_snapshot
from speedrun.scripts.sizes import LONGEST_DENSE, length_names

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, the device that it is on, its hyperparameters, the most tokens
    that it can be given at once, and the optimizer steps that it was trained for."""

    model: torch.nn.Module
    device: torch.device
    args: object
    context: int
    step: int


def load_run(run: Path) -> Trained:
    """The trained model of a run: its folder, or the path of its checkpoint.

    The model runs as on any machine: not compiled, without FlexAttention, in float32 unless it was
    trained in bfloat16 and CUDA is there. Code in the checkpoint is refused, never run; the script
    beside it is imported. Raises UserError, one line, for whatever does not fit together.
    """
    script, file = find_run(run)
    checkpoint = read_checkpoint(file)
    hyperparameters = checkpoint["hyperparameters"]
    cuda = torch.cuda.is_available()
    switches = load_glossary().column("cpu") | dict(bf16=cuda and hyperparameters.get("bf16"))
    known = {name: value for name, value in switches.items() if name in hyperparameters}
    try:
        module = load_snapshot(script)
        names = vars(module.Hyperparameters()).keys()
        if differing := sorted(names ^ hyperparameters.keys()):
            raise ValueError(f"only one of the two has {', '.join(differing)}")
        args = module.Hyperparameters(**{**hyperparameters, **known})
        model = module.GPT(args)
        model.load_state_dict(checkpoint["model"], strict=True)
        context = getattr(args, length_names(hyperparameters)[0])
    except (Exception, SystemExit) as error:  # a script of any origin, numbers of any kind
        raise UserError(f"{short(file)} does not fit {short(script)}: {_brief(error)}") from None
    device = torch.device("cuda" if cuda else "cpu")
    return Trained(model.to(device).eval(), device, args, min(context, LONGEST_DENSE),
                   checkpoint["step"])


def find_run(run: Path) -> tuple[Path, Path]:
    """The (script, checkpoint) of a run's folder or of a checkpoint's path; UserError if either is
    missing."""
    file = run / CHECKPOINT if run.is_dir() else run
    script = file.with_name(SCRIPT)
    if not run.exists():
        raise UserError(f"{run} is neither a run's folder nor a checkpoint")
    if not file.is_file():
        raise UserError(f"{run} holds no {CHECKPOINT}; make one: "
                        "python tools/run_milestone.py ID --save-checkpoint")
    if not script.is_file():
        raise UserError(f"{file} has no {SCRIPT} beside it; copy the run's script there "
                        "(the run's log.txt begins with it)")
    return script, file


def read_checkpoint(file: Path) -> dict:
    """What a snapshot saved, dict(step, hyperparameters, model), with the tensors on the CPU.

    Raises UserError, one line, for a file that is damaged, holds code or something else.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if bad := archive.testzip():  # torch does not compare the check sums that it stores
                raise zipfile.BadZipFile(f"wrong check sum of {bad}")
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{file} holds pickled code, which is not run; only weights and plain "
                       "values are loaded") from None
    except Exception as error:  # bytes at random have many ways to fail
        raise UserError(f"{file} is damaged, or no checkpoint: {_brief(error)}") from None
    kinds = dict(step=int, hyperparameters=dict, model=dict)
    if not (isinstance(checkpoint, dict)
            and all(isinstance(checkpoint.get(name), kind) for name, kind in kinds.items())):
        raise UserError(f"{file} is not a snapshot's checkpoint: it lacks {', '.join(kinds)}")
    return checkpoint


def _brief(error):
    """The beginning of an exception's text, in one line."""
    return shorten(str(error) or type(error).__name__, 200, placeholder=" …")
