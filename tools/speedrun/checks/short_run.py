"""A short run of a script from given initial weights: its losses, work, memory and weights."""

import hashlib
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from speedrun.checks.matrices import Mapping, find_matrices
from speedrun.checks.probe import models_of, one_process_group, stepping
from speedrun.checks.sizes import TRAINING
from speedrun.checks.subject import reference_subject
from speedrun.runlog import read_log

BAND = 1e-4  # nats; float32 and another order of sums leave less than 1e-6 here


@dataclass
class Run:
    """Losses [(step, loss)] of a run, the FLOPs of the matrix products in its optimizers' first
    steps, the elements of their states for hidden matrices, a hash of the weights at the end, what
    forward got as window in each call, the train_loss of each step as logged and the seconds that
    it took (both filled by `train_alone`).
    """

    losses: list
    flops: int
    state: int
    weights: str
    windows: list = field(default_factory=list)
    logged: list = field(default_factory=list)
    seconds: float = 0.0


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
    optimizers, open_counters, flops, windows = {}, {}, 0, []

    def note(model, inputs, named):
        windows.append(_kind(named.get("window", inputs[2] if len(inputs) > 2 else None)))

    def ready(model):
        find_matrices(model, args).write(initial, mapping)
        model.register_forward_pre_hook(note, with_kwargs=True)

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
    return Run([list(pair) for pair in losses], flops, state, digest.hexdigest(), windows)


def _kind(window):
    """What a window is, in a word; "" if there is none."""
    if window is None:
        return ""
    dtype = str(getattr(window, "dtype", "")).removeprefix("torch.")
    return f"{dtype} {type(window).__name__}".strip()


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


def train_alone(module, args, initial: dict, mapping: Mapping) -> Run:
    """The Run of a single rank, with what it logs. Raises what main raises."""
    begin = time.monotonic()
    run = train(module, args, initial, mapping)
    run.seconds = time.monotonic() - begin
    try:
        run.logged = read_log(Path(args.log_dir, "log.txt")).train_curve
    except (OSError, ValueError):
        pass  # a script without a log logs no loss
    return run


def agree(mine, theirs, band: float = BAND) -> tuple[bool, int]:
    """Whether two loss curves agree, and the index of the first pair that does not."""
    steps = [pair[0] for pair in mine] == [pair[0] for pair in theirs]
    apart = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False))
             if not abs(a[1] - b[1]) <= band]
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
        return initial, train_alone(subject.module, args, initial, Mapping())
