"""Checks of a short run: its losses, beside the milestone's own from the same initial weights."""

from collections.abc import Iterator

from speedrun.checks.outcome import Outcome, number, verdict
from speedrun.checks.short_run import BAND, agree, train, train_alone, training_of
from speedrun.checks.sizes import TRAINING
from speedrun.checks.slips import slip_of

LOGGED_BAND = BAND + 1e-4  # a log has four decimals


def check_training(subject) -> Iterator[Outcome]:
    """Compares the losses of a short run, step by step: what is logged, and the validations."""
    initial, want = training_of(subject.milestone.id)
    have = train_alone(subject.module, subject.args(**TRAINING), initial, subject.model.mapping)
    good, first = agree(have.losses, want.losses)
    # The first loss comes before any step, so it must be right in a run that is not.
    yield _check_logged(have.logged, want.logged, last=None if good else 1)
    if subject.has_window:
        yield _check_windows(have.windows)
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


def _check_windows(kinds: list[str]) -> Outcome:
    """That compiled code would serve all calls of forward: what each got as window is alike."""
    name, expected = "window in main", "forward gets one int32 tensor as window in every call"
    given = [kind for kind in kinds if kind]
    numbers = [kind for kind in given if not kind.endswith("Tensor")]
    if numbers:
        return Outcome(name, expected, f"forward got the window as {numbers[0]}",
                       "Compiled code is made anew for each value; make one int32 tensor and fill_ "
                       "it.")
    if given and not kinds[0]:
        return Outcome(name, expected, "the warm-up calls the model without the window",
                       "That compiles another graph: pass the window there too.")
    return verdict(name, len(set(given)) <= 1, expected, f"now {', now '.join(sorted(set(given)))}",
                   "Each of them compiles another graph.")


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
    return slip_of(subject, have) or _UNKNOWN


_UNKNOWN = ("No check of a part found this. Look at which parameters each optimizer gets, at "
            "weight_decay, and at the loop.")
