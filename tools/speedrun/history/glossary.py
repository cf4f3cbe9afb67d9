"""Reads history/hyperparameters.toml: what each hyperparameter is, and the values of small runs."""

import math
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from speedrun.base.errors import UserError
from speedrun.base.files import REPOSITORY
from speedrun.history.schema import Texts, build

GLOSSARY = REPOSITORY / "history" / "hyperparameters.toml"
# The kinds of hyperparameters, and what each of them is.
KINDS = {
    "files": "a pattern of token shards", "input": "a file that a run reads",
    "text": "words", "output": "where or whether a run writes a file",
    "batch": "how a step's tokens are cut into passes",
    "length": "tokens of a sequence, in training and validation",
    "train length": "tokens of a training sequence",
    "val length": "tokens of a validation sequence", "tokens": "another number of tokens",
    "window": "how far attention looks, and how that grows", "pattern": "a letter per layer",
    "vocabulary": "the number of token ids", "token": "a token id", "width": "channels",
    "layers": "a number of layers", "layer": "a layer's index, from 0", "count": "another number",
    "rate": "a learning rate",
    "stage rate": "a later stage's peak rate; the batch grows with each stage",
    "fraction": "a part of a number or of the run, at most 1",
    "decay": "what a step leaves of a mean of earlier steps, below 1",
    "factor": "what a tensor is multiplied by, or a small summand",
    "steps": "steps that the run makes", "phase": "steps of a schedule, scaled with the run",
    "interval": "steps from one event to the next; 0: never", "seed": "of random numbers",
    "switch": "what depends on the machine", "flag": "which of two ways does the same",
}
NO_NUMBERS = ("files", "input", "text", "output", "pattern", "switch", "flag")
MAY_BE_ZERO = ("rate", "fraction", "decay", "factor", "interval", "seed", "token", "layer")


@dataclass(frozen=True)
class Hyperparameter:
    """One entry; hyperparameters.toml explains the keys. None: there is no such value."""

    meaning: str
    kind: Literal[tuple(KINDS)]
    unit: str = ""
    tiny: object = None
    check: object = None
    micro: object = None
    cpu: object = None
    words: Texts = ()
    needs: str = ""
    choices: Texts = ()
    refused: dict = field(default_factory=dict)
    least: object = None
    divides_by: object = None
    divides: str = ""
    below: str = ""
    at_most: str = ""
    letters: str = ""
    alphabet: str = ""
    multiple: dict = field(default_factory=dict)

    def refuses(self, value: object) -> bool:
        """Whether a value of a small run, None for none, should be a number and is not."""
        return self.kind not in NO_NUMBERS and not isinstance(value, int | float | None)

    def range_fault(self, value: float, default: float | None) -> str:
        """What to give instead of a number that is out of range, "" for one within; a script's
        default, if it is known, is within."""
        least = self.smallest if default is None else min(self.smallest, default)
        most = {"fraction": 1, "decay": 1}.get(self.kind, math.inf)
        most = most if default is None else max(most, default)
        below = self.kind == "decay" and most == 1
        if value >= least and (value < most if below else value <= most) and (
                value or not self.divides_by) and math.isfinite(value):
            return ""
        words = "a number above 0" if self.divides_by else f"a number from {least} on"
        return words + ("" if most == math.inf else f", {'below' if below else 'at most'} {most}")

    @property
    def smallest(self) -> int:
        """The smallest number that it may be."""
        return (0 if self.kind in MAY_BE_ZERO else 1) if self.least is None else self.least


class Glossary(dict):
    """{name: Hyperparameter}, in the order of the file."""

    def of_kind(self, *kinds: str) -> list[str]:
        """The names of the hyperparameters of these kinds."""
        return [name for name, entry in self.items() if entry.kind in kinds]

    def column(self, key: str) -> dict[str, object]:
        """{name: value} of the entries that have this key, such as "tiny" or "cpu"."""
        values = {name: getattr(entry, key) for name, entry in self.items()}
        return {name: value for name, value in values.items() if value not in (None, "", (), {})}

    def multiples(self) -> list[tuple[str, str, int]]:
        """(name, switch, number) for each hyperparameter that has to be a multiple of the number
        where a GPU has the switch on."""
        return [(name, *rule) for name, rules in self.column("multiple").items()
                for rule in rules.items()]


@cache
def load_glossary(path: Path = GLOSSARY) -> Glossary:
    """Reads the file, once in a process; UserError, one line, for an entry that does not fit,
    OSError where it cannot be read."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        entries = {key: build(f"{key}: ", Hyperparameter, entry) for key, entry in table.items()}
        for key, entry in entries.items():
            for other in (entry.divides, entry.below, entry.at_most, entry.letters,
                          *entry.multiple):
                if other and other not in entries:
                    raise ValueError(f'{key}: there is no hyperparameter "{other}"')
            for column in ("tiny", "check", "micro", "cpu"):
                if entry.refuses(value := getattr(entry, column)):
                    raise ValueError(f'{key}: "{column}" is not a number: {value!r}')
            if (entry.kind == "pattern") != bool(entry.alphabet):
                raise ValueError(f'{key}: "alphabet" goes with kind "pattern", and only with it')
    except ValueError as error:
        raise UserError(f"{path.name}: {error}") from None
    return Glossary(entries)
