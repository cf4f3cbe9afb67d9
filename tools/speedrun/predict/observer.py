"""Counts what a script does with its fake devices: memory, products, collectives, launches."""

import ast
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils.flop_counter import flop_registry

from speedrun.compat import (
    FakeTensor,
    TorchDispatchMode,
    arguments_of,
    is_tracing,
    storage_key,
    tree_leaves,
)
from speedrun.predict.prediction import Launch

ALLOCATION = 512  # bytes: the caching allocator of CUDA rounds up to a multiple of this
WORKSPACES = 2 * 32 * 2**20  # bytes of cuBLAS and cuBLASLt, which share them: see Observer
_aten = torch.ops.aten
PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
DEVICE = torch.ops.prim.device.default  # asked for a tensor's device, two times out of three
# Operators that start nothing on a device though they are no views.
NO_LAUNCH = re.compile("aten::(new_empty|empty|detach|set_|lift_fresh|_unsafe_view)")
OVERWRITE = {"copy_", "fill_", "zero_"}  # write their first argument without reading it
COPY_FIRST = {"addmm", "baddbmm"}  # copy the summand to `out`, then add the product to that
# Kernels of the snapshots' own that multiply: of x x' the tiles on one side of the diagonal; a b.
SYMMETRIC, SQUARED_RELU = "symmetric_kernel", "relu2_kernel"


class Observer(TorchDispatchMode):
    """While active: bytes of CUDA storages alive and at their peak, FLOPs by dtype, bytes that
    operators and kernels read and write, the bytes of every collective, and every launch.

    Alive from the start are the workspaces of cuBLAS: PyTorch allocates 32 MiB (on GPUs before
    Hopper 8 MiB) for each thread that multiplies matrices, the main thread and autograd's, and
    keeps them (ATen/cuda/CublasHandlePool.cpp). What a compiler does with tensors while it traces
    does not count. keys_per_query, to be set before attention is computed: keys that a query sees.
    graphs: how many were compiled, backward's and those of DistributedDataParallel's pieces
    included; sources {source: name}: their Triton kernels. Raises TypeError at a matrix product of
    two dtypes, which real CUDA refuses and fake tensors let pass.
    """

    def __init__(self):
        super().__init__()
        self.live = WORKSPACES  # bytes
        self.alive: dict[int, int] = {}  # {storage: bytes}
        self.launches: list[Launch] = []
        self.graphs = 0
        self.sources: dict[str, str] = {}
        self.phase = "forward"  # that a launch belongs to
        self.saved = 0  # bytes that the last forward pass left to its backward pass
        self.compiled = False  # whether an operator is called by compiled code
        self.keys_per_query: float | None = None  # None: not known
        self.reset()

    @classmethod
    def is_infra_mode(cls):
        return True  # else Dynamo would compile nothing under it

    def reset(self) -> None:
        """Starts to count anew; what is in memory stays there."""
        self.peak = self.live
        self.flops: Counter[str] = Counter()  # by dtype
        self.moved = 0.0  # bytes
        self.collectives: Counter[str] = Counter()  # bytes by kind and dtype

    def totals(self) -> dict[str, object]:
        """What was counted since `reset`, but graphs from the start; a collective is named
        "allreduce float32"."""
        return {"peak": self.peak, "flops": dict(self.flops), "moved": self.moved,
                "collectives": dict(self.collectives), "graphs": self.graphs}

    def begin_pass(self) -> None:
        """A micro-step begins: launches are noted from here on."""
        self.launches.clear()
        self.phase, self.live_before = "forward", self.live

    def begin_backward(self) -> None:
        """The forward pass is over; what it made and kept is for the backward pass."""
        self.phase, self.saved = "backward", self.live - self.live_before

    def launched(self, kind: str, name: str, moved: float, flops: float, dtype: str | None) -> None:
        """Counts a launch of this phase; arguments as in Launch."""
        self.launches.append(Launch(self.phase, kind, name, moved, flops, dtype))
        self.moved += moved
        if flops:
            self.flops[dtype] += flops

    def kernel(self, name: str, source: str) -> "SilentKernel":
        """What stands for a Triton kernel, Inductor's or the script's own.

        Raises TypeError if the script's own takes a float64: torch 2.13 passes a Python number as
        one unless it is a constant, and the kernel computes in float64 or does not compile.
        """
        double = re.findall(r"'(\w+)': 'fp64'", source)
        if double and not name.startswith("triton_"):
            raise TypeError(
                f"{name} takes {', '.join(double)} as float64; use tl.constexpr or a tensor")
        self.sources[source] = name
        return SilentKernel(name, source, self)

    def observed(self, call: Callable) -> Callable:
        """Counts a compiled graph; returns what runs in place of its `call`."""
        self.graphs += 1

        def run(args):
            self.compiled = True
            try:
                with torch.no_grad():
                    return call(args)
            finally:
                self.compiled = False

        return run

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is DEVICE or (not self.compiled and is_tracing()):
            return operator(*args, **kwargs)
        inputs = _on_cuda((args, kwargs))
        if operator.overloadpacket in PRODUCTS and len({tensor.dtype for tensor in inputs}) > 1:
            raise TypeError(f"{operator} of " + " and ".join(
                f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for tensor in inputs))
        result = operator(*args, **kwargs)
        outputs = _on_cuda(result)
        for tensor in outputs:
            self._allocate(tensor)
        name = _short_name(operator)
        if operator.namespace == "c10d":
            # of a gather or scatter the whole; a rank's own share, the other tensor, is part of it
            whole = [max(inputs, key=lambda tensor: tensor.nbytes)]
            for tensor in whole if "gather" in name or "scatter" in name else inputs:
                kind = f"{name.strip('_')} {str(tensor.dtype)[6:]}"
                self.collectives[kind] += tensor.nbytes
        elif not (operator.is_view or NO_LAUNCH.match(operator.name())) and (inputs or outputs):
            kind = "library" if self.compiled else "eager"
            if name in COPY_FIRST and "out" in kwargs:
                self.launched(kind, "copy_", 2 * kwargs["out"].nbytes, 0, None)
            self.launched(kind, name, _moved(operator, args, kwargs, outputs),
                          *self._work(operator, args, kwargs, result, inputs))
        return result

    def _work(self, operator, args, kwargs, result, inputs):
        """FLOPs of a product or of attention, and their dtype.

        Half of attention's pairs count if it is causal. FlashAttention over documents of any length
        is two products forward, five backward; without keys_per_query it is not counted.
        """
        count = flop_registry.get(operator.overloadpacket)
        if count is None or not inputs:
            return 0, None
        dtype = str(inputs[0].dtype)[6:]
        if operator.namespace == "torch_attn":
            products = 5 if "backward" in operator.name() else 2
            return products * 2 * inputs[0].numel() * (self.keys_per_query or 0), dtype
        names = [argument.name for argument in arguments_of(operator)]
        causal = dict(zip(names, args, strict=False)).get("is_causal") is True
        return count(*args, **kwargs, out_val=result) / (2 if causal else 1), dtype

    def _allocate(self, tensor):
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key not in self.alive:
            self.alive[key] = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
            self.live += self.alive[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key):
        self.live -= self.alive.pop(key)


class SilentKernel:
    """Tells the observer of its launches and does nothing else."""

    def __init__(self, name: str, source: str, observer: Observer):
        self.name, self.observer = name, observer
        arguments = re.search(rf"def {name}\((.*?)\):", source, re.DOTALL)[1]
        self.arguments = [argument.split(":")[0].strip() for argument in arguments.split(",")]
        self.twice = {argument for argument in self.arguments if argument.startswith("in_out")
                      and (f"tl.load({argument} " in source) == (f"tl.store({argument} " in source)}
        touched = re.search(r"'touched': (\{.*?\})", source)
        fixed_shape = re.search(r"^ +\w+numel = \d+$", source, re.MULTILINE)
        self.touched = ast.literal_eval(touched[1]) if touched and fixed_shape else {}

    def run(self, *values, **kwargs):
        """A launch with these arguments of the kernel."""
        tensors = {name: value for name, value in zip(self.arguments, values, strict=False)
                   if isinstance(value, torch.Tensor)}
        self.observer.launched("triton", self.name, self._moved(tensors), *self._work(tensors))

    def _moved(self, tensors):
        """Bytes read and written: each argument's touched bytes, all of them where they are not
        known, as in FlexAttention and in kernels for changing shapes.

        An argument that is updated in place (in_out) counts twice, but not where it only takes over
        the memory of another buffer, which is not read, or where its new value is not stored.
        """
        return sum((1 + (name in self.twice)) * min(tensor.nbytes, self.touched.get(name, math.inf))
                   for name, tensor in tensors.items())

    def _work(self, tensors):
        """FLOPs of a kernel that multiplies, and their dtype.

        Of FlexAttention two products forward; backward computes the scores and their gradients once
        for queries and once for keys, seven products in all. Half a product in 05o's kernel, one in
        12c's.
        """
        if self.name == SYMMETRIC:
            batch, rows, columns = tensors["x"].shape
            return batch * rows * rows * columns, str(tensors["x"].dtype)[6:]
        if self.name == SQUARED_RELU:
            a, out = tensors["a"], tensors["out"]  # (M, K), (M, N)
            return 2 * a.numel() * out.size(1), str(a.dtype)[6:]
        if "arg_Q" not in tensors:
            return 0, None
        query, products = tensors["arg_Q"], 7 if "arg_DQ" in tensors else 2
        keys = self.observer.keys_per_query or tensors["arg_K"].size(-2)
        return products * 2 * query.numel() * keys, str(query.dtype)[6:]


def _moved(operator, args, kwargs, outputs):
    """Bytes that an operator reads and writes, if each tensor goes to memory once."""
    written = {id(tensor): tensor for tensor in outputs}
    read = {}
    arguments = arguments_of(operator)
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args):])]
    for argument, value in zip(arguments, values, strict=True):
        tensors = {id(tensor): tensor for tensor in _on_cuda(value)}
        if argument.is_write and argument.name != "grads":  # Adam's: written only to unscale them
            written |= tensors
        if not argument.is_out and not (argument.is_write and _short_name(operator) in OVERWRITE):
            read |= tensors
    return sum(_touched(tensor) for tensor in (*read.values(), *written.values()))


def _short_name(operator):
    """"mm" of aten::mm.out."""
    return operator.name().partition("::")[2].partition(".")[0]


def _touched(tensor):
    """Bytes of memory behind a tensor: what is expanded counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def _on_cuda(tree):
    return [leaf for leaf in tree_leaves(tree)
            if isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda"]
