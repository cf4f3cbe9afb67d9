"""What a milestone's idea did by itself: the `[[effect]]` entries of milestone.toml, and in words.

Standard library only, as everything that a manifest needs.
"""

from dataclasses import dataclass
from typing import Literal

from speedrun.history.schema import Counts, Flag, build, check_keys

# What an effect is measured in: its name, the format of its values, whether a share is meant.
QUANTITIES = {
    "val_loss": ("validation loss", ".4f"), "seconds": ("seconds", ".2f"),
    "step_ms": ("milliseconds per step", ".2f"), "steps": ("steps", ","),
    "tokens": ("tokens", ","), "memory_mib": ("memory in MiB", ","),
}
ESTIMATE = "author's estimate"
# The kinds of evidence, the strongest first.
EVIDENCE = ("ablation", "the record's own before and after", "two official records", ESTIMATE)
TIME, TOKENS = "time", "tokens"  # what of a milestone's figures may not be comparable


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One measurement or estimate of what an idea changes, from `before` to `after`.

    quantity: a key of QUANTITIES; delta: its change in words, for what has no two values; what:
    which two runs; source: a file or pull request of the public repository, below its folder
    records/track_1_short where it begins with a date. runs, steps, tokens: of both sides, 0 for not
    stated; steps and tokens belong to seconds. counts: whether seconds are part of the idea's own
    gain; those of equal steps that lower the loss, or of another machine, are not. whole: the
    number of a record that several milestones share, if the effect is that of all of it. caveat:
    what decides how to read the values, shown wherever they are; note: anything else.
    """

    quantity: Literal[tuple(QUANTITIES)]
    how: Literal[EVIDENCE]
    what: str
    source: str
    before: float | None = None
    after: float | None = None
    delta: str | None = None
    runs: Counts = ()
    steps: Counts = ()
    tokens: Counts = ()
    counts: Flag = True
    whole: int | None = None
    caveat: str = ""
    note: str = ""

    @property
    def measured(self) -> str:
        """The change: "seconds 84.70 → 81.91 (-3.3%), steps 1,480 → 1,415"."""
        name, form = QUANTITIES[self.quantity]
        if self.before is None:
            return f"{name}: {self.delta}"
        change = f"{self.after - self.before:+.4f}" if self.quantity == "val_loss" else (
            f"{self.after / self.before - 1:+.1%}")
        text = f"{name} {self.before:{form}} → {self.after:{form}} ({change})"
        for key in ("steps", "tokens"):
            sides = [f"{value:,}" for value in dict.fromkeys(getattr(self, key))]
            if len(sides) > 1:
                text += f", {key} {' → '.join(sides)}"
            elif sides:
                text += f", {sides[0]} {key} in both"
        return text

    @property
    def evidence(self) -> str:
        """How it is known, and the runs: "ablation; 10 and 10 runs"."""
        if not self.runs:
            return self.how
        before, after = self.runs
        if self.runs == (1, 1):
            return f"{self.how}; one run each"
        if not before:
            return f"{self.how}; {after} run{'s' * (after > 1)} after it, not stated before"
        return f"{self.how}; {before} and {after} runs"


@dataclass(frozen=True)
class Incomparable:
    """Which of a milestone's figures cannot be compared with its parent's ("time", "tokens"), and
    the reason, a sentence."""

    what: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Succession:
    """A removed block, and the block that does its work from this milestone on."""

    block: str
    by: str


def read_effects(tables: list[dict]) -> tuple[Effect, ...]:
    """The Effects of a milestone.toml's `[[effect]]` tables.

    Raises ValueError, one line, for an entry that does not fit.
    """
    found = []
    for number, table in enumerate(tables, start=1):
        where = f"effect {number}: "
        effect = build(where, Effect, table)
        both = effect.before is not None and effect.after is not None
        if both == (effect.delta is not None) or (effect.before is None) != (effect.after is None):
            raise ValueError(f'{where}it needs "before" and "after", or "delta"')
        for key in ("runs", "steps", "tokens"):
            sides = getattr(effect, key)
            if sides and (len(sides) != 2 or min(sides) < 0):
                raise ValueError(f'{where}"{key}" must be two whole numbers, before and after')
            if sides and key != "runs" and effect.quantity != "seconds":
                raise ValueError(f'{where}"{key}" goes with seconds')
        found.append(effect)
    return tuple(found)


def read_incomparable(table: dict) -> Incomparable | None:
    """The Incomparable of a milestone.toml's `[incomparable]`, None for an empty one.

    Raises ValueError, one line, for what does not fit.
    """
    if not table:
        return None
    check_keys("incomparable: ", table, ("what", "why"), ("what", "why"))
    what, why = table["what"], table["why"]
    if not (isinstance(what, list) and what and set(what) <= {TIME, TOKENS}):
        raise ValueError(f'incomparable: "what" must be a list of {TIME} and {TOKENS}')
    if not (isinstance(why, str) and why.strip()):
        raise ValueError('incomparable: "why" must be a string')
    return Incomparable(tuple(what), why)
