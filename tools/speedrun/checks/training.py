"""Checks of a short run: its losses, beside the milestone's own from the same initial weights."""

from collections.abc import Iterator
from contextlib import contextmanager

from speedrun.checks.matrices import Mapping
from speedrun.checks.outcome import Outcome, number, verdict
from speedrun.checks.short_run import BAND, Run, agree, train, train_alone, training_of
from speedrun.checks.sizes import TRAINING

LOGGED_BAND = BAND + 1e-4  # a log has four decimals


def check_training(subject) -> Iterator[Outcome]:
    """Compares the losses of a short run, step by step: what is logged, and the validations."""
    initial, want = training_of(subject.milestone.id)
    have = train_alone(subject.module, subject.args(**TRAINING), initial, subject.model.mapping)
    good, first = agree(have.losses, want.losses)
    # The first loss comes before any step, so it must be right in a run that is not.
    yield _check_logged(have.logged, want.logged, last=None if good else 1)
    meaning = ""
    if good:
        subject.single = have  # what two ranks are compared with
    else:
        meaning = _explained(subject, have.losses, want.losses)
    yield verdict("training losses", good, *_told(want.losses, have.losses, first), meaning)


def _check_logged(have, want, last) -> Outcome:
    """The train_loss lines of the log up to the `last`, which the optimizers need not obey: they
    do not notice a factor of the loss."""
    have, want = have[:last], want[:last]
    good, first = agree(have, want, LOGGED_BAND)
    got = "no such line in log.txt"
    if [step for step, _ in have] == [step for step, _ in want]:
        ratio = have[first][1] / want[first][1]
        got = f"{have[first][1]:.4f}, {number(ratio)} times as much"
    step, loss = want[first]
    return verdict("train_loss in the log", good, f"train_loss:{loss:.4f} in the line of step "
                   f"{step}, with --train_loss_every=1", got,
                   "It is the mean over the micro-steps: divide each loss by grad_accum_steps "
                   "before backward(), and add up what was divided.")


def _told(want, have, first):
    if [pair[0] for pair in have] != [pair[0] for pair in want]:
        return (f"validations after steps {', '.join(str(s) for s, _ in want)}",
                ", ".join(str(pair[0]) for pair in have))
    step, loss = want[first]
    return (f"a validation loss of {loss:.4f} after {step} of {want[-1][0]} steps",
            f"{have[first][1]:.4f}")


def _explained(subject, have, want) -> str:
    """What usually lies behind losses that are not the wanted ones."""
    without = train(subject.module, subject.args(**{**TRAINING, "kernel_warmup_steps": 0}),
                    training_of(subject.milestone.id)[0], subject.model.mapping)
    if agree(without.losses, want)[0]:
        return ("The warm-up before the clock is not undone: keep momentum in self.state[param], "
                "which state_dict saves.")
    return next((words for words, change in _slips(subject.reference)
                 if agree(have, _changed(subject, change).losses)[0]), _UNKNOWN)


_UNKNOWN = ("No check of a part found this. Look at which parameters each optimizer gets, at "
            "weight_decay, and at the loop.")


def _slips(reference):
    """Usual slips of main: what to say, and the milestone's functions that make the same slip."""
    forward, lr = reference.GPT.forward, reference.lr_multiplier

    def see_all_in_validation(self, inputs, targets=None, window=None):
        return forward(self, inputs, targets, window if self.training else None)

    def see_all(self, inputs, targets=None, window=None):
        return forward(self, inputs, targets)

    yield "The learning rate never changes: set each group's lr in every step.", {
        "lr_multiplier": lambda step, args: 1.0}
    yield "The learning rate is one step early: step counts from 0.", {
        "lr_multiplier": lambda step, args: lr(step + 1, args)}
    if hasattr(reference, "window_size"):
        window = reference.window_size
        yield "Validation sees whole documents: pass the window of the step there too.", {
            "forward": see_all_in_validation}
        yield "The window reaches neither training nor validation.", {"forward": see_all}
        yield "The window stays as it was at the start: set it in every step.", {
            "window_size": lambda step, args: window(0, args)}
        yield "The window is one step late.", {
            "window_size": lambda step, args: window(max(step - 1, 0), args)}


def _changed(subject, change) -> Run:
    initial, _ = training_of(subject.milestone.id)
    with _patched(subject.reference, change):
        return train(subject.reference, subject.reference_args(**TRAINING), initial, Mapping())


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
