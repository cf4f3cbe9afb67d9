"""Inductor for a GPU that is not there: it lowers graphs as ever, and runs them on fake tensors
with kernels that do nothing but tell of their launches.

`install` changes this process for good, as in fake_cuda, and was written for its version of torch.
"""

import contextlib
import importlib.metadata
import math
import types

import torch
from torch.utils._python_dispatch import _disable_current_modes

from speedrun.predict.cards import Card
from speedrun.predict.observer import Observer
from speedrun.predict.silent_kernel import SilentKernel

TRITON = "3.7.1"  # tried with fake_cuda's torch

_shapes = torch.library.Library("aten", "IMPL", "Meta")  # what it registers lives as long as it


def reason_against() -> str | None:
    """Why nothing can be compiled here, beside fake_cuda's reasons, in one line; None if it can."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "missing"
    if not version.startswith(TRITON.rpartition(".")[0]):
        return (f"compiled predictions need triton {TRITON}; here it is {version}: "
                f"pip install --no-deps triton=={TRITON}")
    return None


class Compiler:
    """What Inductor made since `install`: graphs is their number, backward's and those of
    DistributedDataParallel's pieces included; sources {source: name} are its Triton kernels.
    """

    def __init__(self):
        self.graphs = 0
        self.sources: dict[str, str] = {}


def install(card: Card, compiler: Compiler, observer: Observer) -> None:
    """Lets torch.compile work for `card` and tell of it; after fake_cuda's install."""
    _describe(card)
    _configure()
    _keep_modes_out_of_dynamo()
    _replace_kernels(compiler, observer)
    _replace_runtime(compiler, observer)


def _describe(card):
    """Answers what Dynamo, Inductor and Triton ask about the device."""
    import triton
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    major, minor = divmod(card.sm, 10)
    properties = types.SimpleNamespace(
        name=card.name, major=major, minor=minor, total_memory=int(card.memory), warp_size=32,
        multi_processor_count=card.multiprocessors, regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=card.threads, max_threads_per_block=1024,
        shared_memory_per_block_optin=card.shared, gcnArchName="")
    answers = {
        "get_device_properties": properties,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "current_stream": None, "memory_allocated": 0, "_lazy_init": None,
        "_exchange_device": 0, "_maybe_exchange_device": 0,
    }
    for function, answer in answers.items():
        setattr(torch.cuda, function, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.device = torch.cuda._DeviceGuard = lambda index: contextlib.nullcontext()
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    interface = device_interface.CudaInterface  # has kept the functions as they were
    for name in [name for name in vars(interface) if hasattr(torch.cuda, name)]:
        if name not in ("Event", "Stream", "stream"):
            setattr(interface, name, staticmethod(getattr(torch.cuda, name)))
    interface.exchange_device = interface.maybe_exchange_device = staticmethod(lambda index: 0)
    interface.get_raw_stream = staticmethod(lambda index: 0)

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", card.sm, 32)

        def get_current_device(self):
            return 0

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None  # would look for a driver of the machine's


def _configure():
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # workers would not know of the fake device
    inductor.fx_graph_cache = functorch.enable_autograd_cache = False  # every graph is to be seen
    inductor.joint_graph_constant_folding = False  # computes with values, and there are none
    inductor.force_shape_pad = True  # otherwise it is tried out on the device
    inductor.use_static_triton_launcher = False  # keeps no assembled kernel to look into


def _keep_modes_out_of_dynamo():
    """Dynamo sets dispatch modes aside when it compiles, but not on DDPOptimizer's way into it."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    compile_frame = CatchErrorsWrapper.__call__

    def without_modes(self, *args, **kwargs):
        with _disable_current_modes():
            return compile_frame(self, *args, **kwargs)

    CatchErrorsWrapper.__call__ = without_modes


def _replace_kernels(compiler, observer):
    """Triton kernels are kept as sources, and their launches are told to the observer. A kernel of
    the script's own is compiled in the first of its forms: there is no card to time them on."""
    import triton
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.triton import TritonKernel

    autotune, describe = triton.autotune, TritonKernel.inductor_meta_per_kernel

    def describe_with_bytes(self):
        return {**describe(self), "touched": _touched(self)}

    def kernel(self, name, source, *args, **kwargs):
        compiler.sources[source] = name
        return SilentKernel(name, source, observer)

    triton.autotune = lambda configs, **kwargs: autotune(configs[:1], **kwargs)
    TritonKernel.inductor_meta_per_kernel = describe_with_bytes
    AsyncCompile.triton = kernel


def _touched(kernel):
    """{pointer argument: bytes that the kernel touches} of a Triton kernel of Inductor's; an
    argument is missing where that is not known.

    Inductor's own estimate counts a whole buffer where a kernel reads a broadcast part of it, and
    one part twice where a kernel reads it in two orders, as a rotary embedding does.
    """
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    args, touched = kernel.args, {}
    for name, accesses in kernel.features.buf_accesses().items():
        found = (args.inplace_buffers.get(name) or args.input_buffers.get(name)
                 or args.output_buffers.get(name))
        pointer = getattr(found, "inner_name", found)
        if isinstance(pointer, str) and all(isinstance(dep, MemoryDep) for dep in accesses):
            size = _distinct_elements(accesses) * V.graph.get_dtype(name).itemsize
            touched[pointer] = max(size, touched.get(pointer, 0))
    return touched


def _distinct_elements(accesses):
    """Elements that a kernel's accesses to a buffer touch. Accesses that span the same range count
    once, and so do all that look rows up."""
    from torch._inductor.virtualized import V
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    spans = {}
    for dep in accesses:
        sizes = [V.graph.sizevars.optimization_hint(size) for size in dep.size]
        if dep.is_indirect():
            spans["rows looked up"] = math.prod(sizes)
            continue
        ranges = [ValueRanges(0, size - 1) for size in sizes]
        span = bound_sympy(dep.index, dict(zip(dep.var_names, ranges, strict=True)))
        spans[span] = min(dep.numel_hint(), span.upper - span.lower + 1)
    return int(sum(spans.values()))


def _replace_runtime(compiler, observer):
    """Graphs are counted; what they call of C++ gets a form that fake tensors understand."""
    from torch._inductor.graph import GraphLowering

    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0")
    guards._empty_strided_cpu = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype)
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(
        tensor, size, stride, tensor.storage_offset() + offset)
    guards.assert_size_stride = guards.assert_alignment = lambda *args: None
    # torch knows the shapes of an FP8 product, but not of one into memory that is there already
    _shapes.impl("_scaled_mm.out", lambda *args, out, **kwargs: out)
    load = GraphLowering.compile_to_module

    def load_observed(self):
        module = load(self)
        compiler.graphs += 1
        call = module.call

        def observed(args):
            with torch.no_grad(), observer.within_compiled():
                return call(args)

        module.call = observed
        return module

    GraphLowering.compile_to_module = load_observed
