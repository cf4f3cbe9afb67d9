"""Checks of the names that tools, tests and lessons rely on: whether they are there and work."""

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from speedrun.checks.matrices import Unfamiliar, find_matrices
from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.sizes import SIZES
from speedrun.checks.subject import explain

FUNCTIONS = ("lr_multiplier", "window_size")


def needs(*names: str):
    """A check that has nothing to say if the script lacks one of the names: check_names has."""
    def decorate(check):
        def checked(subject) -> Iterator[Outcome]:
            if all(hasattr(subject.module, name) for name in names):
                yield from check(subject)
        return checked
    return decorate


def check_names(subject) -> Iterator[Outcome]:
    """The classes and functions by name."""
    wanted = ["Hyperparameters", "parse_args", "GPT", "main"]
    wanted += [name for name in FUNCTIONS if hasattr(subject.reference, name)]
    missing = [name for name in wanted if not hasattr(subject.module, name)]
    yield verdict("names", not missing, ", ".join(wanted), f"no {', '.join(missing)}",
                  "Tools find these parts by their names.")


@needs("Hyperparameters")
def check_fields(subject) -> Iterator[Outcome]:
    """The names and types of the hyperparameters."""
    mine, theirs = subject.module.Hyperparameters, subject.reference.Hyperparameters
    if not (dataclasses.is_dataclass(mine)):
        yield Outcome("fields", "a dataclass Hyperparameters", f"{mine!r} is none")
        return
    mine, theirs = mine(), theirs()
    wanted = {f.name: type(getattr(theirs, f.name)) for f in dataclasses.fields(theirs)}
    missing = [name for name in wanted if not hasattr(mine, name)]
    others = [f"{name} is {type(getattr(mine, name)).__name__}, not {kind.__name__}"
              for name, kind in wanted.items()
              if name not in missing and type(getattr(mine, name)) is not kind]
    got = ([f"no {', '.join(missing)}"] if missing else []) + others
    yield verdict("fields", not got,
                  "the milestone's hyperparameters, by name and type", "; ".join(got),
                  "Every number of a run is a field of Hyperparameters, so that --name=value can "
                  "change it.")


@needs("parse_args")
def check_parse_args(subject) -> Iterator[Outcome]:
    """That options change hyperparameters."""
    args = subject.module.parse_args(["--train_steps=7", "--adam_eps=0.5", "--bf16=False"])
    got = [getattr(args, name, None) for name in ("train_steps", "adam_eps", "bf16")]
    yield verdict("parse_args", got == [7, 0.5, False],
                  "--train_steps=7 --adam_eps=0.5 --bf16=False arrive as 7, 0.5, False",
                  f"they arrive as {', '.join(map(str, got))}")


@needs("Hyperparameters", "GPT")
def check_forward(subject) -> Iterator[Outcome]:
    """That GPT(args) makes logits without targets and their mean loss with them."""
    model = subject.module.GPT(subject.args()).eval()
    inputs, targets = subject.tokens()
    shape = (*inputs.shape, SIZES["vocab_size"])
    with torch.no_grad():
        logits, loss = model(inputs), model(inputs, targets)
    if not isinstance(logits, torch.Tensor) or logits.shape != shape:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        yield Outcome("forward", f"GPT(args)(inputs) gives logits of shape {shape}", f"{got}")
        return
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        yield Outcome("forward", "GPT(args)(inputs, targets) gives the loss, one number",
                      f"{type(loss).__name__} of shape {getattr(loss, 'shape', None)}")
        return
    want = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).item()
    yield verdict("forward", abs(want - loss.item()) < 1e-3,
                  f"a loss of {want:.4f}, the mean cross entropy of the logits",
                  f"{loss.item():.4f}", "Mean over all tokens, in nats.")


@needs("Hyperparameters", "GPT")
def check_matrices(subject) -> Iterator[Outcome]:
    """Whether the model's matrices have the milestone's shapes, by which all else knows them."""
    args = subject.args()
    try:
        find_matrices(subject.module.GPT(args).eval(), args)
    except Unfamiliar as error:
        yield Outcome("matrices", error.expected, error.got, error.meaning)
    else:
        yield Outcome("matrices")


@needs("Hyperparameters", "GPT")
def check_window_argument(subject) -> Iterator[Outcome]:
    """That forward takes a window, where the milestone has one."""
    if not subject.has_window:
        return
    model = subject.module.GPT(subject.args()).eval()
    try:
        with torch.no_grad():
            model(*subject.tokens(), torch.tensor(5, dtype=torch.int32))
    except TypeError as error:
        yield Outcome("forward's window",
                      "forward(inputs, targets, window) with the window as an int32 tensor",
                      explain(error, subject.script),
                      "The window is the third argument; without it all of a document is visible.")
        return
    yield Outcome("forward's window")


@needs("Hyperparameters", "GPT", "main")
def check_main(subject) -> Iterator[Outcome]:
    """That main(args) trains and returns the losses; its run is what the optimizer's checks use."""
    losses, steps = subject.probe.losses, subject.probe.args.train_steps
    try:
        good = losses[-1][0] == steps and all(math.isfinite(loss) for _, loss in losses)
    except (TypeError, IndexError, ValueError):
        good = False
    yield verdict("main", good, f"main(args) returns [..., ({steps}, validation loss)]",
                  f"{losses!r}"[:100] or "nothing")
