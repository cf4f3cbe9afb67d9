"""Read history/results/predictions.json: what milestones are predicted to need at record scale."""

import json
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.files import REPOSITORY
from speedrun.history.schema import build

PREDICTIONS = REPOSITORY / "history" / "results" / "predictions.json"


@dataclass(frozen=True)
class StoredPrediction:
    """What was predicted of a milestone's compiled code; make_figures.py --predict writes it.

    code: the script's hash then. Of a GPU, one of eight H100s, with the record's sizes: bytes at
    their peak; bytes saved from a forward pass to its backward pass; launches of one such pass and
    of the optimizers in a step; bytes of optimizer_state; bytes sent to other ranks in a step.
    On one GPU: fixed bytes, and more bytes per_token of a forward pass; val_per_token of one in
    validation, only where its sequences have a length of their own. run_flops: of forward and
    backward passes over the whole run.
    """

    code: str
    peak: int
    fixed: int
    per_token: float
    val_per_token: float | None = None
    saved: int | None = None
    pass_launches: int | None = None
    optimizer_launches: int | None = None
    optimizer_state: int | None = None
    sent: int | None = None
    run_flops: float | None = None

    def alone(self, tokens: int, val_tokens: int = 0) -> float:
        """Bytes at their peak on one GPU with so many tokens in a forward pass of training and in
        one of validation, which counts only where its sequences have a length of their own."""
        return self.fixed + max(self.per_token * tokens, (self.val_per_token or 0) * val_tokens)


def load_predictions(path: Path = PREDICTIONS) -> dict[str, StoredPrediction]:
    """The predictions in the file at `path`, by milestone's slug, in its order.

    Raises ValueError, one line, for an entry that does not fit, OSError for an unreadable file.
    """
    name = Path(path).name
    try:
        entries = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{name}: must be an object with a prediction for each slug")
    return {slug: build(f"{name}: {slug}: ", StoredPrediction, entry)
            for slug, entry in entries.items()}
