"""Counts what a script does with its fake devices: memory, products, collectives."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ALLOCATION = 512  # bytes: the caching allocator of CUDA rounds up to a multiple of this
_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


class Observer(TorchDispatchMode):
    """While active: bytes of CUDA storages alive and at their peak, FLOPs by dtype, bytes that
    operators read and write, and the bytes and calls of every collective.

    Raises TypeError at a matrix product of two dtypes, which real CUDA refuses and fake tensors
    let pass.
    """

    def __init__(self):
        super().__init__()
        self.live = 0  # bytes
        self.alive: dict[int, int] = {}  # {storage: bytes}
        self.reset()

    def reset(self) -> None:
        """Starts to count anew; what is in memory stays there."""
        self.peak = self.live
        self.flops: Counter[str] = Counter()  # by dtype
        self.moved = 0  # bytes read and written by operators that are no views
        self.collectives: Counter[str] = Counter()  # bytes by kind and dtype

    def totals(self) -> dict[str, object]:
        """What was counted since `reset`; a collective is named "all_reduce float32"."""
        return {"peak": self.peak, "live": self.live, "flops": dict(self.flops),
                "moved": self.moved, "collectives": dict(self.collectives)}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = _on_cuda((args, kwargs))
        if operator in PRODUCTS and len({tensor.dtype for tensor in inputs}) > 1:
            raise TypeError(f"{operator} of " + " and ".join(
                f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for tensor in inputs))
        result = operator(*args, **kwargs)
        outputs = _on_cuda(result)
        for tensor in outputs:
            self._allocate(tensor.untyped_storage())
        if operator.namespace == "c10d":
            for tensor in inputs:
                kind = f"{operator._opname.strip('_')} {str(tensor.dtype)[6:]}"
                self.collectives[kind] += tensor.nbytes
        elif not operator.is_view:
            self.moved += sum(tensor.nbytes for tensor in (*inputs, *outputs))
        if inputs and operator._overloadpacket in flop_registry:
            count = flop_registry[operator._overloadpacket](*args, **kwargs, out_val=result)
            self.flops[str(inputs[0].dtype)[6:]] += count
        return result

    def _allocate(self, storage):
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
            self.live += self.alive[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key):
        self.live -= self.alive.pop(key)


def _on_cuda(tree):
    return [leaf for leaf in tree_leaves(tree)
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"]
