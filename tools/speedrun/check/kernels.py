"""What a GPU's kernels compute, on a CPU's tensors: kernels in Triton's language run as Python, and
PyTorch's kernels for attention take dense masks.
"""

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import ModuleType, SimpleNamespace

import torch

SMALL, LARGE = 16, 64  # tiles from SMALL on are also tried smaller, see `shrunk`


class Pointer:
    """An address in a tensor's memory, or a tensor of them: `index` counts elements.

    `wide` gets the tensor's address where an index has 64 bits.
    """

    def __init__(self, tensor: torch.Tensor, wide: set, index: torch.Tensor | int = 0):
        self.tensor, self.wide, self.index = tensor, wide, index
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.tensor, self.wide, self.index + offset)

    __radd__ = __add__

    def elements(self, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """All elements, those that the addresses name, and which of these the mask leaves (None:
        all).

        Raises IndexError for an address outside of the tensor that the mask leaves.
        """
        index = torch.as_tensor(self.index)
        if index.dtype == torch.int64 and torch.is_tensor(self.index):
            self.wide.add(self.tensor.data_ptr())
        if mask is not None:
            mask = torch.as_tensor(mask)
            index = index.where(mask, 0)
            mask = mask.expand(index.shape)
        for bound in map(int, index.aminmax()):
            if not 0 <= bound < self.tensor.numel():
                raise IndexError(f"a kernel's address {bound} in a tensor of "
                                 f"{self.tensor.numel()} elements")
        return self.tensor.view(-1), index.long(), mask


def _load(pointer, mask=None, other=0.0, **_):
    elements, index, mask = pointer.elements(mask)
    bits = torch.uint8 if elements.itemsize == 1 else elements.dtype  # PyTorch cannot index bytes
    found = elements.view(bits)[index]
    if mask is not None:
        found = found.where(mask, torch.as_tensor(other, dtype=elements.dtype).view(bits))
    return found.view(elements.dtype)


def _store(pointer, value, mask=None, **_):
    elements, index, mask = pointer.elements(mask)
    value = torch.as_tensor(value, dtype=elements.dtype).expand(index.shape)
    if elements.itemsize == 1:
        elements, value = elements.view(torch.uint8), value.contiguous().view(torch.uint8)
    if mask is not None:
        index, value = index[mask], value[mask]
    elements[index] = value


def _atomic_max(pointer, value, **_):
    _store(pointer, torch.maximum(_load(pointer), value))


def _dot(a, b, acc=None, **_):
    product = a.float() @ b.float()
    return product if acc is None else acc + product


def _swizzle2d(i, j, rows, columns, group):
    flat = i * columns + j
    first = flat // (group * columns) * group
    height = min(rows - first, group)
    return first + flat % (group * columns) % height, flat % (group * columns) // height


def _cdiv(a, b):
    return -(-a // b)


def modules(launched: Callable[[bool | None, int], None]) -> dict[str, ModuleType]:
    """Stand-ins for triton and triton.language, by name; kernels of what imports them run.

    launched(same, wide) is called then; same: whether tiles of all sizes that are tuned give one
    result, or None where the kernel uses something of the language that is not here; wide: how many
    tensors it addresses in 64 bits.
    """
    place = SimpleNamespace(ids=(), sizes=())
    language = ModuleType("triton.language")
    vars(language).update(
        program_id=lambda axis: torch.tensor([place.ids[axis]], dtype=torch.int32),
        num_programs=lambda axis: place.sizes[axis],
        load=_load, store=_store, atomic_max=_atomic_max, dot=_dot, swizzle2d=_swizzle2d,
        cdiv=_cdiv, constexpr=int,
        arange=partial(torch.arange, dtype=torch.int32),
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
        where=torch.where, trans=lambda x: x.T, range=range, static_range=range,
        exp=torch.exp, log=torch.log, sqrt=torch.sqrt, rsqrt=torch.rsqrt, abs=torch.abs,
        sigmoid=torch.sigmoid,
        maximum=lambda a, b, **_: torch.maximum(*map(torch.as_tensor, (a, b))),  # pass NaN on
        minimum=lambda a, b, **_: torch.minimum(*map(torch.as_tensor, (a, b))),
        clamp=lambda x, low, high, **_: x.clamp(low, high),
        PropagateNan=SimpleNamespace(ALL=None, NONE=None),
        sum=lambda x, axis=None: x.sum() if axis is None else x.sum(axis),
        max=lambda x, axis=None: x.max() if axis is None else x.amax(axis),
        multiple_of=lambda x, *_: x, max_contiguous=lambda x, *_: x,
        **{str(dtype).removeprefix("torch."): dtype for dtype in (
            torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)})

    def run(function, counts, values, sizes):
        """All programs of a grid; values: {name: argument}. Returns the number of tensors that they
        address in 64 bits."""
        place.sizes, wide = counts, set()
        given = {name: Pointer(value, wide) if isinstance(value, torch.Tensor) else value
                 for name, value in values.items()}
        for place.ids in itertools.product(*map(range, counts)):
            function(**given, **sizes)
        return len(wide)

    class Kernel:
        def __init__(self, function, forms=()):
            self.function, self.seen = function, set()
            self.forms = [form for n, form in enumerate(forms) if form not in forms[:n]] or [{}]

        def __getitem__(self, grid):
            return partial(self.launch, grid)

        def launch(self, grid, *args, num_warps=0, num_stages=0, **named):
            """Runs the first form; at the first call with these tensors, all forms with smaller
            tiles, too."""
            def counts(sizes):
                some = tuple(grid(sizes) if callable(grid) else grid)
                return some + (1,) * (3 - len(some))

            values = dict(zip(signature(self.function).parameters, args, strict=False)) | named
            sizes = {name: size for name, size in self.forms[0].items() if name not in values}
            before = {name: value.clone() for name, value in values.items()
                      if isinstance(value, torch.Tensor)}
            try:
                wide = run(self.function, counts(sizes | values), values, sizes)
                same = tuple(before) in self.seen or all(
                    self.agrees(counts, values, before, form) for form in self.forms)
                self.seen.add(tuple(before))
            except (AttributeError, TypeError, NotImplementedError):
                same, wide = None, 0
            launched(same, wide)

        def agrees(self, counts, values, before, form):
            """Whether a form with smaller tiles makes of the first matrices what is there now."""
            sizes = {name: shrunk(size) if type(size) is int and size >= SMALL else size
                     for name, size in form.items()}
            rows, batch, *rest = counts(sizes | values)
            copies = {name: tensor.clone() for name, tensor in before.items()}
            if all(len(tensor) == batch for tensor in before.values() if tensor.ndim > 1):
                batch = min(batch, 2)
                copies = {name: tensor[:batch] if tensor.ndim > 1 else tensor
                          for name, tensor in copies.items()}
            run(self.function, (rows, batch, *rest), values | copies, sizes)
            return all(_close(copy, values[name][: len(copy)] if copy.ndim else values[name])
                       for name, copy in copies.items())

    def jit(function=None, **_):
        return Kernel(function) if function else jit

    def autotune(configs, **_):
        return lambda kernel: Kernel(kernel.function, [config.kwargs for config in configs])

    top = ModuleType("triton")
    vars(top).update(
        language=language, jit=jit, autotune=autotune, cdiv=_cdiv,
        next_power_of_2=lambda n: 2 ** math.ceil(math.log2(n)),
        Config=lambda kwargs, *_, **__: SimpleNamespace(kwargs=kwargs))
    return {"triton": top, "triton.language": language}


def _close(a, b):
    """Whether two results are the same but for rounding; in eight bits it is seldom but coarse."""
    if a.itemsize == 1:
        return bool((a.float() - b.float()).norm() <= 0.02 * b.float().norm())
    return torch.allclose(a, b, 1e-3, 1e-4, equal_nan=True)


def shrunk(size):
    """A tile's size made smaller, and again while it is large: matrices of a few rows fill several
    such tiles, and not the last one, as 3 divides few sizes."""
    size = 3 * size // 16
    return shrunk(size) if size > LARGE else size


def as_compiled(mask):
    """A block mask whose rule knows which tiles are listed, how many are, and whether one is listed
    twice: without compilation FlexAttention applies the rule to all pairs."""
    def listed(counts, columns):
        N = columns.size(-1)
        some = torch.where(torch.arange(N) < counts[..., None], columns, N).long()
        return torch.zeros(*columns.shape[:-1], N + 1, dtype=torch.bool).scatter(-1, some, True)

    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    B, H, *_ = partial.shape
    rows, cols = mask.BLOCK_SIZE

    def rule(b, h, q, k):
        tile = b % B, h % H, q // rows, k // cols
        return partial[tile] & mask.mask_mod(b, h, q, k) | full[tile]

    seen = copy.copy(mask)
    seen.mask_mod = rule
    return seen, int((partial | full)[..., :-1].sum()), bool((partial & full)[..., :-1].any())


def varlen_attn(q, k, v, starts, starts_k, longest, longest_k, *, scale=None,
                 window_size=(-1, -1)):
    """What torch's varlen_attn computes, from a dense mask. Left out is what the kernel would not
    read: what is longer than said, or comes after the last start."""
    if starts.dtype != torch.int32 or starts_k.dtype != torch.int32:
        raise RuntimeError("cumulative sequence lengths must be int32")
    t = torch.arange(len(q), dtype=torch.int32)
    number = torch.searchsorted(starts, t, right=True)  # of the document
    number_k = torch.searchsorted(starts_k, t, right=True)
    position = t - starts[number - 1]
    back = t[:, None] - t
    left, right = (len(q) if size < 0 else size for size in window_size)
    seen = (number[:, None] == number_k) & (back <= left) & (back >= -right)
    y = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=scale).transpose(0, 1)
    read = (number < len(starts)) & (position < min(longest, longest_k))
    return y.where(read[:, None, None], 0)
