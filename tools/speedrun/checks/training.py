"""Checks of a short run: its losses, beside the milestone's own from the same initial weights."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from speedrun.checks.matrices import Mapping, find_matrices
from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.probe import models_of, one_process_group, stepping
from speedrun.checks.sizes import TRAINING
from speedrun.checks.subject import reference_subject

BAND = 1e-4  # nats; float32 and another order of sums leave less than 1e-6 here


@dataclass
class Run:
    """Losses [(step, loss)] of a run, the FLOPs of the matrix products in its optimizers' first
    steps, the elements of their states for hidden matrices, and a hash of the weights at the end.
    """

    losses: list
    flops: int
    state: int
    weights: str


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products inside the block."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def train(module, args, initial: dict, mapping: Mapping) -> Run:
    """Runs main from the initial weights {role: ...}. Raises what main raises."""
    optimizers, open_counters, flops = {}, {}, 0

    def ready(model):
        find_matrices(model, args).write(initial, mapping)

    def pre(optimizer):
        if id(optimizer) not in optimizers:
            optimizers[id(optimizer)] = optimizer
            open_counters[id(optimizer)] = Products()
            open_counters[id(optimizer)].__enter__()

    def post(optimizer):
        nonlocal flops
        counter = open_counters.pop(id(optimizer), None)
        if counter is not None:
            counter.__exit__(None, None, None)
            flops += counter.flops

    with models_of(module, ready) as models, stepping(pre, post), one_process_group():
        losses = module.main(args)
    hidden = {id(p): p for p, _ in find_matrices(models[0], args).hidden()}
    digest = hashlib.sha256()
    for p in models[0].parameters():
        digest.update(p.detach().contiguous().numpy().tobytes())
    state = _state_size(optimizers.values(), hidden)
    return Run([list(pair) for pair in losses], flops, state, digest.hexdigest())


def _state_size(optimizers, hidden):
    """Elements of what optimizers keep per hidden matrix, wherever they keep it; buffers for all
    matrices together do not count."""
    largest = max(p.numel() for p in hidden.values())
    kept = {}

    def walk(thing, depth):
        if hasattr(thing, "untyped_storage"):
            if id(thing) not in hidden and thing.ndim == 2:
                kept[thing.untyped_storage().data_ptr()] = thing
        elif depth:
            values = thing.values() if isinstance(thing, dict) else thing
            if isinstance(thing, dict | list | tuple):
                for value in values:
                    walk(value, depth - 1)

    for optimizer in optimizers:
        if any(id(p) in hidden for group in optimizer.param_groups for p in group["params"]):
            own = {key: value for key, value in vars(optimizer).items() if key != "param_groups"}
            own["state"] = {k: v for k, v in optimizer.state.items() if id(k) in hidden}
            walk(own, 5)
    return sum(t.numel() for t in kept.values()
               if t.untyped_storage().nbytes() <= largest * t.element_size())


def check_training(subject) -> Iterator[Outcome]:
    """Compares the validation losses of a short run, step by step."""
    initial, want = training_of(subject.milestone.id)
    have = train(subject.module, subject.args(**TRAINING), initial, subject.model.mapping)
    good, first = agree(have.losses, want.losses)
    meaning = ""
    if good:
        subject.single = have  # what two ranks are compared with
    else:
        meaning = next((words for words, change in _slips(subject.reference) if agree(
            have.losses, _changed(subject, change).losses)[0]), _ALL_RIGHT)
    yield verdict("training losses", good, *_told(want.losses, have.losses, first), meaning)


_ALL_RIGHT = ("The parts are right, so look at how main puts them together: batches, accumulation, "
              "what is set in each step.")


def agree(mine, theirs) -> tuple[bool, int]:
    """Whether two loss curves agree, and the index of the first pair that does not."""
    steps = [pair[0] for pair in mine] == [pair[0] for pair in theirs]
    apart = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False))
             if not abs(a[1] - b[1]) <= BAND]
    return steps and not apart, apart[0] if apart else 0


@cache
def training_of(id: str) -> tuple[dict, Run]:
    """The initial weights of a milestone's own short run, and the run."""
    initial = {}
    with reference_subject(id) as subject:
        args = subject.args(**TRAINING)

        def keep(model):
            initial.update(find_matrices(model, args).read(Mapping()))

        no_steps = subject.args(**{**TRAINING, "train_steps": 0})
        with models_of(subject.module, keep), one_process_group():
            subject.module.main(no_steps)
        return initial, train(subject.module, args, initial, Mapping())


def _told(want, have, first):
    if [pair[0] for pair in have] != [pair[0] for pair in want]:
        return (f"validations after steps {', '.join(str(s) for s, _ in want)}",
                ", ".join(str(pair[0]) for pair in have))
    step, loss = want[first]
    return (f"a validation loss of {loss:.4f} after {step} of {want[-1][0]} steps",
            f"{have[first][1]:.4f}")


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
