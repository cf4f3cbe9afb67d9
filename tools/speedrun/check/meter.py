"""Counts a running script's operations, beside its messages to other ranks or not."""

import functools
from collections import Counter

import torch

from speedrun.check.weights import dtype_name
from speedrun.compat import SCALED_MM, Watching, arguments_of, tree_leaves

# Their relative error is their input's absolute one, which 16 bits make large.
CURVED = ("exp", "log", "sigmoid", "tanh", "logsumexp", "_softmax", "_log_softmax")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm")


class Message:
    """An optimizer's collective that does not block, under way until the script waits for it."""

    def __init__(self, spy, handle, kind):
        self.spy, self.handle, self.kind, self.accompanied = spy, handle, kind, False
        spy.under_way.add(self)

    def wait(self, *args, **kwargs):
        """Waits."""
        if self in self.spy.under_way:
            self.spy.under_way.remove(self)
            self.spy.accompanied[self.kind] += self.accompanied
        return self.handle.wait(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.handle, name)


class Meter(Watching):
    """Counts matrix products, those in bfloat16, those in compiled code and those beside messages,
    and numbers read from tensors."""

    def __init__(self, spy):
        super().__init__()
        self.spy, self.readings = spy, Counter()  # {phase: numbers read from tensors}
        self.work, self.low = Counter(), Counter()  # {phase: operations}
        self.compiled, self.beside = Counter(), Counter()
        self.scaled = 0  # numbers that are multiplied by one in a tensor without dimensions
        self.precise = {}  # {part of the model: whether it computes in float32, among others}
        self.curved = {}  # {"exp in GPT": whether each call of this function there is in float32}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        (name, computes), phase = _seen(func), self.spy.phase
        if name in PRODUCTS:
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            a, b = tensors[:2] if name == "_scaled_mm" else tensors[-2:]
            operations = 2 * a.numel() * b.shape[-1]
            self.work[phase] += operations
            self.low[phase] += operations * (a.dtype == torch.bfloat16)
            self.compiled[phase] += operations * (self.spy.compiled > 0)
            self.beside[phase] += operations * bool(self.spy.under_way)
        elif name == "_local_scalar_dense":
            self.readings[phase] += 1
        elif name == "mul" and any(getattr(arg, "ndim", 1) == 0 for arg in args):
            self.scaled += out.numel()
        if name in CURVED and self.spy.parts:
            what = f"{name.strip('_')} in {self.spy.parts[-1]}"
            self.curved[what] = self.curved.get(what, True) and out.dtype == torch.float32
        if computes:
            if self.spy.parts and name != "_to_copy" and getattr(out, "ndim", 0) > 2:
                part = self.spy.parts[-1]
                self.precise[part] = self.precise.get(part, False) or out.dtype == torch.float32
            for message in self.spy.under_way:
                message.accompanied = True
        return out


@functools.cache
def _seen(func):
    """The name of an operation, and whether it computes something."""
    name = func.overloadpacket.__name__
    return name, func.namespace == "aten" and not func.is_view and "empty" not in name


def eight_bits(args: tuple, kwargs: dict) -> tuple[str, list[float]] | None:
    """What a product of eight bits multiplies, in words: dtypes, how it sums, and what a GPU
    would not take; then both factors' scales. None if it is not in eight bits."""
    names = [argument.name for argument in arguments_of(SCALED_MM)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    a, b = given.get("self", given.get("input")), given["mat2"]
    if a.dtype.itemsize > 1:
        return None
    fast, taken = given.get("use_fast_accum"), a.stride(1) == 1 and b.stride(0) == 1
    words = (f"{' and '.join(sorted(map(dtype_name, (a.dtype, b.dtype))))}"
             f"{', summed fast' * bool(fast)}"
             f"{', in an order of numbers that GPUs do not take' * (not taken)}")
    return words, [1 / float(given[name]) for name in ("scale_a", "scale_b")]
