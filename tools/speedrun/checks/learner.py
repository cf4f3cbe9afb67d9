"""The learner's script, its progress, and where to show things."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from speedrun.checks.show import Screen
from speedrun.checks.standing import Progress, progress_beside
from speedrun.dataset import short
from speedrun.launch import RunError
from speedrun.manifest import REPOSITORY, load_manifest

OWN = REPOSITORY / "train" / "train_gpt.py"


@dataclass
class Learner:
    """The learner's script, the progress beside it, and where to show things."""

    script: Path
    progress: Progress
    screen: Screen

    def existing(self) -> Path:
        """The script. Raises RunError, which says how to make one, if there is none."""
        if not self.script.is_file():
            raise RunError(f"there is no {short(self.script)}; --take makes one: "
                           + self.command("00 --take"))
        return self.script

    def command(self, arguments: str) -> str:
        """The command line that does something with this script."""
        other = "" if self.script == OWN else f" --script {shlex.quote(short(self.script))}"
        return f"python tools/check_train.py {arguments}{other}"


def open_path(script: Path | None) -> Learner:
    """The Learner of a script (None: train/train_gpt.py), which need not exist yet.

    No progress is kept beside a milestone's own script. Raises RunError, one line, if there can be
    no script of that name or its progress cannot be read.
    """
    script = Path(script or OWN).absolute()
    if script.is_dir():
        raise RunError(f"{short(script)} is a folder, not a script; name the file in it")
    if script.suffix != ".py":
        raise RunError(f"{short(script)} is not the name of a script: it ends with .py")
    if not script.parent.is_dir():
        raise RunError(f"there is no folder {short(script.parent)} for {script.name}")
    snapshots = [m.script for m in load_manifest().written()]
    own = script.resolve() in snapshots
    learner = Learner(script, Progress(None) if own else progress_beside(script),
                      Screen(sys.stdout))
    if learner.progress.note:
        print(learner.progress.note, file=sys.stderr)
    return learner
