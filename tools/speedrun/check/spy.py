"""What stands in a running script's way: it watches models, optimizers, messages and the clock.

Nothing here knows a milestone; what takes long or cannot be seen from outside is replaced.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
import time
import types
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
               "reduce_scatter_tensor", "all_to_all_single", "all_to_all", "reduce", "gather",
               "scatter", "send", "recv", "isend", "irecv")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm")
CLOCKS = ("perf_counter", "time", "monotonic", "process_time")


class Enough(BaseException):
    """Ends a run that has shown what it was started for."""


def load(script, name="train_gpt"):
    """The script as a module, with a stand-in for torch.compile and counters in its way."""
    module = types.ModuleType(name)
    module.__file__ = str(script)
    module.__spec__ = importlib.util.spec_from_file_location(name, script)
    sys.modules[name] = module
    exec(compile(Path(script).read_bytes(), str(script), "exec"), module.__dict__)
    return module


def arguments(module, values):
    """The script's Hyperparameters with these values, as far as it has fields of their names."""
    known = {field.name for field in dataclasses.fields(module.Hyperparameters)}
    return module.Hyperparameters(**{name: v for name, v in values.items() if name in known})


def draw(name, like, number=0):
    """Random values for the tensor called `name`: the same in every script."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
    return torch.randn(like.shape, generator=generator).to(like.dtype)


@torch.no_grad()
def fill(model, scale=1.0):
    """Gives every weight of a model values that follow from its name; none is zero. scale: that of
    the matrices."""
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_floating_point():
            width = tensor.shape[-1] if tensor.ndim > 1 else 1
            centre, spread = (0.0, 1.2 / width**0.5) if tensor.ndim > 1 else (0.6, 0.3)
            spread *= scale if tensor.ndim > 1 else 1.0
            tensor.copy_(centre + spread * draw(name, tensor.float()))


class Clock:
    """Time as the script sees it: only the model's work takes any, so that logs can be compared."""

    def __init__(self):
        self.now = 1000.0

    def stand_in(self, module):
        """Replaces the clocks in the script's namespace."""
        for name, value in list(vars(module).items()):
            if value is time:
                setattr(module, name, _Time(self))
            for clock in CLOCKS:
                if value is getattr(time, clock):
                    setattr(module, name, lambda: self.now)


class _Time:
    def __init__(self, clock):
        self._clock = clock

    def __getattr__(self, name):
        if name in CLOCKS:
            return lambda: self._clock.now
        if name.removesuffix("_ns") in CLOCKS:
            return lambda: int(self._clock.now * 1e9)
        return getattr(time, name)


class Meter(TorchDispatchMode):
    """Counts matrix products by phase and dtype, and readings of numbers inside the model."""

    def __init__(self, spy):
        super().__init__()
        self.spy, self.work, self.readings = spy, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            a, b = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)][-2:]
            key = (self.spy.phase(), str(a.dtype).removeprefix("torch."), self.spy.compiled > 0)
            flops = 2 * a.numel() * b.shape[-1]
            self.work[key] = self.work.get(key, 0) + flops
        elif name == "_local_scalar_dense" and self.spy.phase() in ("training", "validation"):
            self.readings += 1
        return out


class Spy:
    """Watches a run of a script's main: its models, optimizers, calls and messages.

    filled: the model gets the weights of `fill` when it is made. gradients: the optimizers get
    gradients from outside. stop: the run ends at the model's first call.
    """

    def __init__(self, module, filled=True, gradients=False, stop=False):
        self.module, self.filled, self.gradients, self.stop = module, filled, gradients, stop
        self.models, self.calls, self.kinds, self.losses = [], [], {}, []
        self.optimizers, self.depth, self.steps = [], 0, {}
        self.moves, self.before, self.sent, self.dtypes = [], {}, {}, {}
        self.forward, self.compiled, self.phase_name = 0, 0, ""
        self.initial, self.clock, self.meter = None, Clock(), Meter(self)
        self.wrapped_calls = self.all_calls = 0
        self.numbers, self.changing = {}, set()

    def phase(self):
        """What the script is doing: training (forward), validation, step, or other."""
        if self.depth:
            return "step"
        return self.phase_name if self.forward else "other"

    def __enter__(self):
        self.clock.stand_in(self.module)
        model, spy = self.module.GPT, self
        made, called = model.__init__, model.forward

        @functools.wraps(made)
        def init(net, *args, **kwargs):
            made(net, *args, **kwargs)
            if spy.filled:
                fill(net)
            spy.models.append(net)
            for name, part in net.named_modules():
                part.register_forward_hook(functools.partial(spy.saw_output, name))

        @functools.wraps(called)
        def forward(net, *args, **kwargs):
            return spy.call(called, net, args, kwargs)

        model.__init__, model.forward = init, forward
        if callable(validate := getattr(self.module, "validate", None)):
            @functools.wraps(validate)
            def told(*args, **kwargs):
                loss = validate(*args, **kwargs)
                self.losses.append(loss)
                return loss
            self.module.validate = told
        self.hooks = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step)]
        SPIES.append(self)
        return self

    def __exit__(self, *_):
        SPIES.remove(self)
        for hook in self.hooks:
            hook.remove()

    def saw_output(self, name, part, inputs, output):
        """Keeps the dtype of what a part of the model returns."""
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor):
            dtype = str(output.dtype).removeprefix("torch.")
            self.dtypes.setdefault(f"{name or 'GPT'}", set()).add(dtype)

    def call(self, function, net, args, kwargs):
        """One call of the model."""
        if self.initial is None:
            self.initial = {n: p.detach().clone() for n, p in net.named_parameters()}
            if self.stop:
                raise Enough
        training = torch.is_grad_enabled()
        self.clock.now += 0.01 if training else 1.0
        self.phase_name = "training" if training else "validation"
        kind = [_kind(value) for value in (*args, *kwargs.values())]
        self.kinds.setdefault(self.phase_name, set()).add(", ".join(kind))
        if training:
            keep = [v.clone() if isinstance(v, torch.Tensor) else v for v in args]
            self.calls.append((keep, {k: v.clone() if isinstance(v, torch.Tensor) else v
                                      for k, v in kwargs.items()}))
        numbers = {f"{name}.{key}".lstrip("."): value for name, part in net.named_modules()
                   for key, value in vars(part).items() if type(value) in (int, float, bool)}
        for key, value in numbers.items():
            if self.numbers.setdefault(key, value) != value and not key.endswith("training"):
                self.changing.add(key)
        self.all_calls += 1
        self.wrapped_calls += self.compiled > 0
        self.forward += 1
        try:
            return function(net, *args, **kwargs)
        finally:
            self.forward -= 1

    def names(self):
        """{id of a parameter: its name}."""
        return {id(p): name for net in self.models for name, p in net.named_parameters()}

    def before_step(self, optimizer, *_):
        """Puts gradients in, and remembers the weights."""
        self.depth += 1
        if self.depth > 1:
            return
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        number = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        names = self.names()
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(p), "a tensor that is no parameter of the model")
            if self.gradients:
                # Not zero anywhere, of another size in each step, rows and columns alike.
                gradient = 0.02 * number * draw(name, p, number)
                if p.grad is None:
                    p.grad = gradient
                else:
                    p.grad.copy_(gradient)
            self.before[name] = p.detach().clone()

    def after_step(self, optimizer, *_):
        """Keeps how the weights have moved."""
        self.depth -= 1
        if self.depth:
            return
        number, names = self.steps[id(optimizer)], self.names()
        while len(self.moves) < number:
            self.moves.append({})
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(p), "a tensor that is no parameter of the model")
            self.moves[number - 1][name] = p.detach() - self.before[name]


SPIES = []  # those that watch just now
# Every process group of this process. Nothing may free one: the destructor of a gloo group waits,
# with Python's lock, for a thread that may be waiting for that lock (pytorch issue 56297).
GROUPS = []


def _kind(value):
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of {value.ndim} dimensions"
    return type(value).__name__


class Compiled(torch.nn.Module):
    """What the stand-in for torch.compile makes of a module."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, *args, **kwargs):
        return _inside(self._orig_mod, *args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


def _inside(function, *args, **kwargs):
    for spy in SPIES:
        spy.compiled += 1
    try:
        return function(*args, **kwargs)
    finally:
        for spy in SPIES:
            spy.compiled -= 1


def stand_ins():
    """Replaces what would take long or cannot be seen from outside: torch.compile counts calls and
    compiles nothing, collectives are counted, and the process group meets in a file."""
    def compile(model=None, *, disable=False, **options):
        if model is None:
            return functools.partial(compile, disable=disable)
        if disable:
            return model
        if isinstance(model, torch.nn.Module):
            return Compiled(model)
        return functools.wraps(model)(functools.partial(_inside, model))

    torch.compile = compile
    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, _counted(name, getattr(dist, name)))
    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(*args, **kwargs):
        if os.environ.get("CHECKED_STORE"):
            for key in ("init_method", "device_id"):
                kwargs.pop(key, None)
            world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
            store = dist.FileStore(os.environ["CHECKED_STORE"], world)
            kwargs |= dict(store=store, world_size=world, rank=rank)
        init(*args, **kwargs)
        GROUPS.append(dist.group.WORLD)

    dist.init_process_group = torch.distributed.init_process_group = init_process_group
    ddp = torch.nn.parallel.DistributedDataParallel
    made = ddp.__init__

    @functools.wraps(made)
    def ddp_init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.register_comm_hook(None, _reduce)

    ddp.__init__ = ddp_init


def _reduce(state, bucket):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    _count("gradients", bucket.buffer())
    return allreduce_hook(None, bucket)


def _count(kind, tensor):
    for spy in SPIES:
        key = ("step" if spy.depth else "other", kind, str(tensor.dtype).removeprefix("torch."))
        spy.sent[key] = spy.sent.get(key, 0) + tensor.numel() * tensor.element_size()


def _counted(name, function):
    @functools.wraps(function)
    def collective(*args, **kwargs):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if tensors:
            _count(name, max(tensors, key=torch.Tensor.numel))
        return function(*args, **kwargs)

    return collective


def run(module, values, folder, spy, meter=False):
    """Runs main in the folder; returns the lines of its log below the script's own text."""
    args = arguments(module, {**values, "log_dir": str(folder)})
    with spy:
        try:
            with spy.meter if meter else open(os.devnull):
                module.main(args)
        except Enough:
            pass
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    log = Path(folder, "log.txt")
    if not log.exists():
        return []
    text = log.read_text(encoding="utf-8", errors="replace")
    own = Path(module.__file__).read_text(encoding="utf-8")
    if text.startswith(own):
        text = text[len(own):]
    else:
        text = "the script's own text is missing\n" + text
    text = text.replace(str(folder), "LOG_DIR")
    return text.splitlines()


EPSILONS = {}  # of F.rms_norm, {dtype of its input: the values used}


def note_epsilons():
    """Notes with which epsilon F.rms_norm is called; its default depends on the dtype."""
    function = torch.nn.functional.rms_norm

    @functools.wraps(function)
    def rms_norm(input, normalized_shape, weight=None, eps=None):
        used = torch.finfo(input.dtype).eps if eps is None else eps
        EPSILONS.setdefault(str(input.dtype).removeprefix("torch."), set()).add(f"{used:.3g}")
        return function(input, normalized_shape, weight, eps)

    torch.nn.functional.rms_norm = rms_norm


FLEX = [0, ""]  # calls of flex_attention, and how many rows the last one's mask is made for


def count_flex():
    """Counts the calls of FlexAttention, which works eagerly on a CPU."""
    from torch.nn.attention import flex_attention as flex

    function = flex.flex_attention

    @functools.wraps(function)
    def flex_attention(*args, **kwargs):
        FLEX[0] += 1
        mask = kwargs.get("block_mask")
        FLEX[1] = str(mask.shape[0]) if hasattr(mask, "shape") else "no block mask"
        return function(*args, **kwargs)

    flex.flex_attention = flex_attention
