"""What is checked: the learner's module beside the milestone's, at the same sizes; needs torch."""

import tempfile
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from speedrun.checks import sizes
from speedrun.checks.catalog import load_catalog
from speedrun.checks.probe import Probe
from speedrun.manifest import Milestone, load_manifest
from speedrun.snapshot import load_snapshot


@dataclass
class Subject:
    """A script, the milestone that it shall be, and a folder for what runs write."""

    script: Path
    milestone: Milestone
    folder: Path
    runs: int = field(default=0, init=False)
    single: object = field(default=None, init=False)  # the short run on one rank, if it is right

    @cached_property
    def module(self):
        """The learner's script, imported. Raises whatever that raises."""
        return load_snapshot(self.script)

    @cached_property
    def reference(self):
        """The milestone's snapshot."""
        return load_snapshot(self.milestone.script)

    @cached_property
    def model(self):
        """The learner's model beside the milestone's. Raises Unfamiliar if the matrices' shapes do
        not fit."""
        from speedrun.checks.model import Model

        return Model(self)

    @cached_property
    def probe(self):
        """The learner's script with gradients from outside. Raises what Probe raises."""
        return Probe(self.module, self.args(**sizes.PROBE))

    @cached_property
    def tiny(self) -> dict[str, object]:
        """The milestone's hyperparameters at the tiny scale, for its learning rates."""
        return load_manifest().overrides(self.milestone, "tiny")

    @cached_property
    def shards(self) -> dict[str, str]:
        """train_files and val_files of short shards."""
        return sizes.write_shards(self.folder)

    def values(self, **more) -> dict[str, object]:
        """Hyperparameters of a small model or run, with a fresh log folder."""
        self.runs += 1
        log_dir = str(self.folder / f"log{self.runs}")
        return {**self.tiny, **sizes.SIZES, **self.shards, "log_dir": log_dir, **more}

    def args(self, **more):
        """The same as the learner's Hyperparameters."""
        return sizes.arguments(self.module, self.values(**more))

    def reference_args(self, **more):
        """The same as the milestone's Hyperparameters."""
        return sizes.arguments(self.reference, self.values(**more))

    @property
    def has_window(self) -> bool:
        """Whether the milestone's forward takes a window."""
        return hasattr(self.reference, "window_size")

    @property
    def shares_work(self) -> bool:
        """Whether the milestone's ranks divide the matrices among themselves."""
        return load_catalog().applies("shared work", self.milestone)

    def tokens(self, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (batch, seq_len) of random tokens, with documents that begin."""
        generator = torch.Generator().manual_seed(1)
        length = sizes.SIZES["seq_len"] + 1
        tokens = torch.randint(2, sizes.SIZES["vocab_size"], (batch, length), generator=generator)
        tokens[0, [3, 11]] = tokens[-1, 7] = sizes.SIZES["bos_id"]
        return tokens[:, :-1], tokens[:, 1:]


@contextmanager
def reference_subject(id: str):
    """A written milestone as a Subject itself, with a folder that goes again."""
    milestone = load_manifest().get(id)
    with tempfile.TemporaryDirectory(prefix="check_train-") as folder:
        yield Subject(milestone.script, milestone, Path(folder))


def line_in(error: BaseException, script: Path) -> traceback.FrameSummary | None:
    """The last line of the script that an exception went through, or None."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if f.filename == str(script)), None)


def explain(error: BaseException, script: Path) -> str:
    """An exception in one line, with number and text of the last line of the script that it went
    through."""
    what = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        text = f"it ends the process: sys.exit({error.code!r})"
    else:
        text = f"{type(error).__name__}: {what}" if what else type(error).__name__
    text = text if len(text) < 300 else text[:300] + " …"
    line = line_in(error, script)
    if line is None:
        return text
    source = (line.line or "").strip()
    source = source if len(source) <= 80 else source[:80] + " …"
    return f"line {line.lineno}: {text}" + (f", at `{source}`" if source else "")
