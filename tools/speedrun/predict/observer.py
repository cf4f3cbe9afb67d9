"""Counts what a script does with its fake devices: memory, products, collectives, launches."""

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Iterator

import torch
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from speedrun.predict.launches import Launch

ALLOCATION = 512  # bytes: the caching allocator of CUDA rounds up to a multiple of this
WORKSPACES = 2 * 32 * 2**20  # bytes of cuBLAS and cuBLASLt, which share them: see Observer
_aten = torch.ops.aten
PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
DEVICE = torch.ops.prim.device.default  # asked for a tensor's device, two times out of three
# Operators that start nothing on a device though they are no views.
NO_LAUNCH = re.compile("aten::(new_empty|empty|detach|set_|lift_fresh|_unsafe_view)")
OVERWRITE = {"copy_", "fill_", "zero_"}  # write their first argument without reading it
COPY_FIRST = {"addmm", "baddbmm"}  # copy the summand to `out`, then add the product to that


class Observer(TorchDispatchMode):
    """While active: bytes of CUDA storages alive and at their peak, FLOPs by dtype, bytes that
    operators and kernels read and write, the bytes of every collective, and every launch.

    Alive from the start are the workspaces of cuBLAS: PyTorch allocates 32 MiB (on GPUs before
    Hopper 8 MiB) for each thread that multiplies matrices, the main thread and autograd's, and
    keeps them (ATen/cuda/CublasHandlePool.cpp). What a compiler does with tensors while it traces
    does not count. keys_per_query, to be set before attention is computed: keys that a query sees.
    Raises TypeError at a matrix product of two dtypes, which real CUDA refuses and fake tensors let
    pass.
    """

    def __init__(self):
        super().__init__()
        self.live = WORKSPACES  # bytes
        self.alive: dict[int, int] = {}  # {storage: bytes}
        self.launches: list[Launch] = []
        self.phase = "forward"  # that a launch belongs to
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
        """What was counted since `reset`; a collective is named "allreduce float32"."""
        return {"peak": self.peak, "flops": dict(self.flops), "moved": self.moved,
                "collectives": dict(self.collectives)}

    def launched(self, kind: str, name: str, moved: float, flops: float, dtype: str | None) -> None:
        """Counts a launch of this phase; arguments as in Launch."""
        self.launches.append(Launch(self.phase, kind, name, moved, flops, dtype))
        self.moved += moved
        if flops:
            self.flops[dtype] += flops

    @contextlib.contextmanager
    def within_compiled(self) -> Iterator[None]:
        """Operators called inside are compiled code's."""
        self.compiled = True
        try:
            yield
        finally:
            self.compiled = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tracing = TracingContext.try_get() or CompileContext.current_compile_id()
        if operator is DEVICE or (tracing and not self.compiled):
            return operator(*args, **kwargs)
        inputs = _on_cuda((args, kwargs))
        if operator._overloadpacket in PRODUCTS and len({tensor.dtype for tensor in inputs}) > 1:
            raise TypeError(f"{operator} of " + " and ".join(
                f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for tensor in inputs))
        result = operator(*args, **kwargs)
        outputs = _on_cuda(result)
        for tensor in outputs:
            self._allocate(tensor.untyped_storage())
        name = operator._opname
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
        count = flop_registry.get(operator._overloadpacket)
        if count is None or not inputs:
            return 0, None
        dtype = str(inputs[0].dtype)[6:]
        if operator.namespace == "torch_attn":
            products = 5 if "backward" in operator._opname else 2
            return products * 2 * inputs[0].numel() * (self.keys_per_query or 0), dtype
        names = [argument.name for argument in operator._schema.arguments]
        causal = dict(zip(names, args, strict=False)).get("is_causal") is True
        return count(*args, **kwargs, out_val=result) / (2 if causal else 1), dtype

    def _allocate(self, storage):
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
            self.live += self.alive[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key):
        self.live -= self.alive.pop(key)


def _moved(operator, args, kwargs, outputs):
    """Bytes that an operator reads and writes, if each tensor goes to memory once."""
    written = {id(tensor): tensor for tensor in outputs}
    read = {}
    arguments = operator._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args):])]
    for argument, value in zip(arguments, values, strict=True):
        tensors = {id(tensor): tensor for tensor in _on_cuda(value)}
        if argument.is_write and argument.name != "grads":  # Adam's: written only to unscale them
            written |= tensors
        if not argument.is_out and not (argument.is_write and operator._opname in OVERWRITE):
            read |= tensors
    return sum(_touched(tensor) for tensor in (*read.values(), *written.values()))


def _touched(tensor):
    """Bytes of memory behind a tensor: what is expanded counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def _on_cuda(tree):
    return [leaf for leaf in tree_leaves(tree)
            if isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda"]
