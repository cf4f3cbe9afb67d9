"""The checkpoint that a run leaves, and from which another may start."""

import hashlib
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from textwrap import shorten

from speedrun.base.errors import UserError
from speedrun.base.files import read_texts
from speedrun.history.blocks import section
from speedrun.history.manifest import Milestone, load_manifest, slug_in
from speedrun.run.log import SCRIPT

CHECKPOINT = "checkpoint.pt"
PARTIAL = "checkpoint.partial"  # while it is written
SIGNATURE = "script_sha256"  # a record of the file's archive: the script whose weights these are
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
    scale = read_texts(checkpoint.with_name("summary.json")).get("scale")
    return scale if scale in ("record", "tiny") else None


def sign(file: Path, script: Path) -> None:
    """Adds to a checkpoint the hash of the script that made it, unless it has one; the file is
    replaced at one go. Raises OSError if that is impossible."""
    if not zipfile.is_zipfile(file) or signed_hash(file):
        return
    partial = file.with_name(PARTIAL)
    shutil.copyfile(file, partial)
    with zipfile.ZipFile(partial, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{SIGNATURE}", hash_of(script))
    os.replace(partial, file)


def signed_hash(file: Path) -> str | None:
    """The hash of the script that made a checkpoint; None for one that was written by hand."""
    try:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.partition("/")[2] == SIGNATURE:
                    return archive.read(name).decode("ascii", "replace")
    except (OSError, zipfile.BadZipFile):  # read_checkpoint gives the reason
        pass
    return None


def hash_of(script: Path) -> str:
    """The SHA-256 of a script's text, whatever its line ends are; OSError if it cannot be read."""
    text = script.read_text(encoding="utf-8", errors="replace")
    return hashlib.sha256(text.encode()).hexdigest()


def check_script(file: Path, script: Path) -> None:
    """Raises UserError if a checkpoint names another script than the one at `script`."""
    signed = signed_hash(file)
    if signed and signed != hash_of(script):
        other = _with_hash(signed)
        owner = f", but of {other.name}" if other else ""
        raise UserError(f"{file} is not of the script beside it{owner}; copy its own run's script"
                        " there (that run's log.txt begins with it)")


def made_by(file: Path) -> Milestone | None:
    """The milestone whose script made a checkpoint: by the hash inside, else by the script beside
    it, else by the run's summary; None if it is not known."""
    script = file.with_name(SCRIPT)
    known = signed_hash(file) or (hash_of(script) if script.is_file() else "")
    slug = slug_in(read_texts(file.with_name("summary.json")).get("milestone", ""))
    return _with_hash(known) or next(
        (m for m in load_manifest().milestones if m.slug == slug), None)


def _with_hash(known):
    """The milestone whose script has a hash, None if none has."""
    return next((m for m in load_manifest().milestones if hash_of(m.script) == known), None)


def _check_model(file, milestone):
    """Refuses the checkpoint of a milestone with another model than that from which a milestone's
    chain starts: names and shapes of weights may be the same."""
    manifest, other = load_manifest(), made_by(file)
    borrows = manifest.lineage(milestone)[-1].borrows
    if not borrows or not other:
        return
    lender = manifest.get(borrows.lender)
    fitting = [section(m.script.read_text(encoding="utf-8"), "Model")
               for m in (lender, *manifest.of_chain(milestone.chain).milestones)]
    model = section(other.script.read_text(encoding="utf-8"), "Model")
    if any(name in borrows.blocks and model.get(name) not in [own.get(name) for own in fitting]
           for name in fitting[0]):
        raise UserError(f"{file} is of {other.name}, which has another model than {lender.name},"
                        f" from which {milestone.name} starts; make one:"
                        f" {MAKE_ONE.format(lender.id)}")


def check_start(values: dict[str, object], milestone: Milestone | None = None) -> None:
    """Raises UserError where `checkpoint`, one of the hyperparameters, is no checkpoint, or one of
    other sizes than theirs; its table of tokens may be smaller. Does nothing without one.

    milestone: that starts from it, which refuses another's model."""
    if not values.get("checkpoint"):
        return
    file = Path(values["checkpoint"])
    if milestone:
        _check_model(find_checkpoint(file), milestone)
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
