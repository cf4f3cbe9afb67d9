"""Usual slips of main: the milestone is made to slip in the same way, and the losses compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from speedrun.checks.matrices import Mapping
from speedrun.checks.short_run import agree, train, training_of
from speedrun.checks.sizes import TRAINING
from speedrun.checks.subject import reference_subject


def slip_of(subject, losses: list) -> str:
    """The words for the slip whose losses these are, or "" if it is none of those known here."""
    id = subject.milestone.id
    with reference_subject(id) as own:
        changes = dict(_slips(own.reference))
    return next((words for words in changes if agree(losses, _losses_with(id, words))[0]), "")


@cache
def _losses_with(id: str, words: str) -> list:
    """The losses of a milestone's own short run with the slip of these words."""
    initial, _ = training_of(id)
    with reference_subject(id) as subject:
        with _patched(subject.reference, dict(_slips(subject.reference))[words]):
            args = subject.reference_args(**TRAINING)
            return train(subject.reference, args, initial, Mapping()).losses


def _slips(reference) -> Iterator[tuple[str, dict]]:
    """What to say, and the milestone's functions that make the slip."""
    lr = reference.lr_multiplier
    yield "The learning rate never changes: set each group's lr in every step.", {
        "lr_multiplier": lambda step, args: 1.0}
    yield "The learning rate is one step early: step counts from 0.", {
        "lr_multiplier": lambda step, args: lr(step + 1, args)}
    if hasattr(reference, "window_size"):
        yield from _window_slips(reference)


def _window_slips(reference):
    forward, size = reference.GPT.forward, reference.window_size

    def validating_with(window_of):
        """A forward that takes another window in validation."""
        def changed(self, inputs, targets=None, window=None):
            return forward(self, inputs, targets, window if self.training else window_of(self.args))
        return {"forward": changed}

    def see_all(self, inputs, targets=None, window=None):
        return forward(self, inputs, targets)

    def windows(window_of):
        return {"window_size": window_of}

    yield ("Validation sees whole documents: pass the window of the step there too.",
           validating_with(lambda args: None))
    yield ("Validation sees window_end tokens: pass the window of the step there too.",
           validating_with(lambda args: torch.tensor(args.window_end, dtype=torch.int32)))
    yield "The window reaches neither training nor validation.", {"forward": see_all}
    yield ("The window stays as it was at the start: set it in every step.",
           windows(lambda step, args: size(0, args)))
    yield ("The window is window_end from the start.",
           windows(lambda step, args: args.window_end))
    yield ("The window is one step late.",
           windows(lambda step, args: size(max(step - 1, 0), args)))
    yield ("The window is one step early.", windows(lambda step, args: size(step + 1, args)))


@contextmanager
def _patched(module, change):
    owners = {name: module.GPT if name == "forward" else module for name in change}
    kept = {name: getattr(owner, name) for name, owner in owners.items()}
    for name, function in change.items():
        setattr(owners[name], name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(owners[name], name, function)
