"""Checks of numbers: the hyperparameters' defaults and the schedules, step by step."""

import dataclasses
import math
from collections.abc import Iterator

from speedrun.checks.outcome import Outcome, number, verdict

# These depend on the machine or the clock.
FREE = ("log_dir", "compile", "bf16", "flex_attention")


def check_defaults(subject) -> Iterator[Outcome]:
    """The defaults are the record's."""
    mine, theirs = subject.module.Hyperparameters(), subject.reference.Hyperparameters()
    wanted = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs)
              if f.name not in FREE}
    wrong = [name for name, value in wanted.items() if getattr(mine, name) != value]
    yield verdict("hyperparameters", not wrong,
                  ", ".join(f"{name} {_text(wanted[name])}" for name in wrong),
                  ", ".join(f"{name} {_text(getattr(mine, name))}" for name in wrong),
                  "The defaults are the record's; smaller runs override them.")


def check_learning_rate(subject) -> Iterator[Outcome]:
    """lr_multiplier at every step of the record, and of a short run."""
    yield from _compare(subject, "learning rate", "lr_multiplier",
                        "From which step on, how long, and down to what? A record of N steps has "
                        "steps 0 to N - 1.", last=-1)


def check_window(subject) -> Iterator[Outcome]:
    """window_size at every step of the record."""
    if subject.has_window:
        yield from _compare(subject, "window schedule", "window_size",
                            "From window_start to window_end over train_steps, rounded down to a "
                            "multiple of window_start.", last=0)


def _compare(subject, name, function, meaning, last):
    """last: 0 if the function is asked after the last step too, else -1."""
    mine, theirs = getattr(subject.module, function), getattr(subject.reference, function)
    short = dict(train_steps=40, warmup_steps=5, cooldown_steps=10)
    for args, their_args in (
        (subject.module.Hyperparameters(), subject.reference.Hyperparameters()),
        (subject.args(**short), subject.reference_args(**short)),
    ):
        # a wrong default is reported as such; here it is the function that counts
        _set(args, their_args)
        pairs = [(float(theirs(step, their_args)), float(mine(step, args)))
                 for step in range(their_args.train_steps + 1 + last)]
        gaps = [_gap(*pair) for pair in pairs]
        if max(gaps) > 1e-6:
            step = gaps.index(max(gaps))  # where it is largest it tells most
            (want, have), n = pairs[step], sum(gap > 1e-6 for gap in gaps)
            yield Outcome(name, f"{function}({step}) = {number(want)} of {their_args.train_steps} "
                          "steps", f"{number(have)} (the largest of {n:,} differences)", meaning)
            return
    yield Outcome(name)


def _gap(want, have):
    """How far apart two values are, relative to large ones; a NaN is as far as can be."""
    gap = abs(have - want) / max(1.0, abs(want))
    return math.inf if math.isnan(gap) else gap


def _set(args, theirs):
    """Gives the learner's hyperparameters the milestone's values."""
    for field in dataclasses.fields(theirs):
        setattr(args, field.name, getattr(theirs, field.name))


def _text(value):
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
