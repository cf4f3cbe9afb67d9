"""torch's and triton's private names, all in one place, and a GPU that is not there.

They were written for one version of torch; in another they may be gone or mean something else, and
`reason_against` says so. What needs no private name does not belong here. The `install` functions
change their process for good: call them in one that does nothing else.
"""

import contextlib
import ctypes
import importlib.metadata
import math
import platform
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves", "tree_map_only"]
TORCH = "2.13.0"
TRITON = "3.7.1"  # tried with this torch

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
scaled_mm = torch._scaled_mm
SCALED_MM = torch.ops.aten._scaled_mm.default  # the same, as an operator

# Slots in the table of virtual functions of torch's CUDA hooks, and in the registry of device
# guards, and how many slots are copied or filled, more than there are: the numbers are TORCH's.
IS_BUILT, HAS_PRIMARY_CONTEXT, HAS_CUDA = 2, 4, 16
CUDA_GUARD = 1
HOOKS, GUARDS, GUARD_METHODS = 96, 24, 64

_kept = []  # what C++ points to, and what is registered with torch, must outlive its function


class Watching(TorchDispatchMode):
    """A mode that sees each operation and takes no time to hide from a compiler."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False


# ---- which version, and where ----


def reason_against(compiled: bool = False) -> str | None:
    """Why no fake GPU can be here, or nothing compiled for one, in one line; None if it can."""
    return other_version(compiled) or missing(compiled)


def other_version(compiled: bool = False) -> str | None:
    """Why private names may be wrong here, in one line; None in the versions that they are from."""
    if torch.__version__.partition("+")[0] != TORCH:
        return f"predictions need torch {TORCH}; this is {torch.__version__}"
    version = _triton()
    if compiled and version and not version.startswith(TRITON.rpartition(".")[0]):
        return (f"compiled predictions need triton {TRITON}; here it is {version}: "
                f"pip install --no-deps triton=={TRITON}")
    return None


def missing(compiled: bool = False) -> str | None:
    """What else this machine should have or not have, in one line; None if it is as needed."""
    here = f"{sys.platform} {platform.machine()}"
    if here != "linux x86_64":
        return f"predictions need Linux on x86-64; this is {here}"
    if torch.cuda.is_available():
        return "predictions are for machines without a GPU; run_milestone.py measures on this one"
    if compiled and not _triton():
        return (f"compiled predictions need triton {TRITON}, which is missing: "
                f"pip install --no-deps triton=={TRITON}")
    return None


def _triton():
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- what observers of a run ask ----


def is_tracing() -> bool:
    """Whether a compiler traces what is being called."""
    return bool(TracingContext.try_get() or CompileContext.current_compile_id())


def arguments_of(operator: torch._ops.OpOverload) -> list[torch.Argument]:
    """An operator's arguments, in order, with their name, is_write and is_out."""
    return operator._schema.arguments


def is_in_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return torch._C._current_graph_task_id() >= 0


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors of one storage share, for as long as it lives."""
    return tensor.untyped_storage()._cdata


def optimized_module() -> Callable[[nn.Module, Callable], nn.Module]:
    """A function that makes of a module what torch.compile does, with a function that compiles a
    call. Getting it imports torch's compiler, which takes a second."""
    from torch._dynamo import eval_frame

    def make(module, compiler):
        # It would look for the module among torch's own, in a table that takes half a second to
        # make and that every new process group throws away.
        with mock.patch.object(eval_frame.trace_rules, "check", lambda function: False):
            return eval_frame.OptimizedModule(module, compiler)

    return make


def compiled_graphs() -> tuple[int, int]:
    """How many graphs torch.compile has made in this process, and how often a call was cut."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# ---- a CUDA device that is not there ----


def install_device(world_size: int, card) -> None:
    """Makes this process believe that it is rank 0 of `world_size`, each with such a card (see
    speedrun.predict.cards); for tensors without data (FakeTensorMode).

    Only where `reason_against` gives no reason.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _give_autograd_a_device()
    answers = {
        "is_available": True, "is_initialized": True, "device_count": world_size,
        "current_device": 0, "get_device_name": card.name, "is_bf16_supported": True,
        "get_device_capability": divmod(card.sm, 10),
        "max_memory_allocated": 0, "reset_peak_memory_stats": None, "set_device": None,
        "synchronize": None,
    }
    _answer(answers)
    torch.Tensor.pin_memory = lambda self: self
    FakeTensorMode.avoid_device_init = True
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    # What a script asks of a tensor's value: any number will do, and assertions hold.
    FakeTensor.item = lambda self: 1.0
    FakeTensor.__format__ = lambda self, spec: format(1.0, spec)
    FakeTensor.__bool__ = lambda self: True
    nn.Module._apply = _apply
    join = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: join(
        "fake", store=FakeStore(), rank=0, world_size=world_size)


def _answer(answers):
    """Functions of torch.cuda answer so, whatever they are asked."""
    for function, answer in answers.items():
        setattr(torch.cuda, function, lambda *args, answer=answer, **kwargs: answer)


def _apply(module, change, changed=None):
    """Module._apply for tensors that cannot take over another's data: parameters are replaced, and
    tied ones stay one."""
    changed = {} if changed is None else changed
    for child in module.children():
        _apply(child, change, changed)
    for name, param in module._parameters.items():
        if param is not None:
            if param not in changed:
                with torch.no_grad():
                    changed[param] = nn.Parameter(change(param), param.requires_grad)
            module._parameters[name] = changed[param]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def _give_autograd_a_device():
    """Answers in place of CUDA's hooks, which autograd asks about devices."""
    torch.ones(1, requires_grad=True).sum().backward()  # starts a thread for each device: none
    torch.autograd.set_multithreading_enabled(False)
    library = ctypes.CDLL(f"{torch.__path__[0]}/lib/libtorch_cpu.so")
    library._ZN2at6detail12getCUDAHooksEv.restype = ctypes.POINTER(ctypes.c_void_p)
    hooks = library._ZN2at6detail12getCUDAHooksEv()
    methods = ctypes.cast(hooks[0], ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * HOOKS)(*methods[:HOOKS])
    table[HAS_PRIMARY_CONTEXT] = _function(ctypes.c_bool, False, ctypes.c_int8)
    if not torch.backends.cuda.is_built():
        table[IS_BUILT] = table[HAS_CUDA] = _function(ctypes.c_bool, True)
        guards = (ctypes.c_void_p * GUARDS).in_dll(
            ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so"),
            "_ZN3c104impl26device_guard_impl_registryE")
        zero = _function(ctypes.c_int8, 0)
        guard_methods = (ctypes.c_void_p * GUARD_METHODS)(*[zero] * GUARD_METHODS)
        guard = (ctypes.c_void_p * 1)(ctypes.addressof(guard_methods))
        guards[CUDA_GUARD] = ctypes.addressof(guard)
        _kept.extend((guard_methods, guard))
    _kept.append(table)
    hooks[0] = ctypes.addressof(table)
    torch._C._ensureCUDADeviceGuardSet()


def _function(result_type, result, *argument_types):
    """The address of a method that takes `self` and these arguments and returns `result`."""
    kind = ctypes.CFUNCTYPE(result_type, ctypes.c_void_p, *argument_types)
    function = kind(lambda *args: result)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value


def distributed_without_data(parallel: type, model: nn.Module, **options) -> nn.Module:
    """DistributedDataParallel, the class `parallel`, without what needs data: the exchange of first
    values, its log, and buckets that are built again in the order in which gradients came."""
    parallel = parallel(model, init_sync=False, **options)
    parallel.logger = _Silent()
    parallel.register_comm_hook(None, _all_reduce)
    parallel.reducer = _Reducer(parallel.reducer)
    return parallel


def _all_reduce(state, bucket):
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _Silent:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _Reducer:
    def __init__(self, reducer):
        self._reducer = reducer

    def _rebuild_buckets(self):
        return False

    def __getattr__(self, name):
        return getattr(self._reducer, name)


# ---- Inductor for a GPU that is not there ----


def install_compiler(card, kernel, observed) -> None:
    """Lets torch.compile work for `card`, after install_device: graphs are lowered as ever, and run
    on fake tensors. Only where `reason_against` gives no reason.

    kernel(name, source) gives the object whose `run` stands for a Triton kernel; observed(call)
    gives the function that runs in place of a graph's.
    """
    _describe(card)
    _configure()
    _keep_modes_out_of_dynamo()
    _replace_kernels(kernel)
    _replace_runtime(observed)


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
    _answer({
        "get_device_properties": properties,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "current_stream": None, "memory_allocated": 0, "_lazy_init": None,
        "_exchange_device": 0, "_maybe_exchange_device": 0,
    })
    torch.cuda.device = torch.cuda._DeviceGuard = lambda index: contextlib.nullcontext()
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    interface = device_interface.CudaInterface  # has kept the functions as they were
    for name in [name for name in vars(interface) if hasattr(torch.cuda, name)]:
        if name not in ("Event", "Stream", "stream"):
            setattr(interface, name, staticmethod(getattr(torch.cuda, name)))
    interface.exchange_device = interface.maybe_exchange_device = staticmethod(lambda index: 0)
    interface.get_raw_stream = staticmethod(lambda index: 0)
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", card.sm, 32), get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0)))
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


def _replace_kernels(kernel):
    """A kernel of the script's own is compiled in the first of its forms: there is no card to time
    them on."""
    import triton
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.triton import TritonKernel

    autotune, describe = triton.autotune, TritonKernel.inductor_meta_per_kernel
    triton.autotune = lambda configs, **kwargs: autotune(configs[:1], **kwargs)
    TritonKernel.inductor_meta_per_kernel = lambda self: {
        **describe(self), "touched": _touched(self)}
    AsyncCompile.triton = lambda self, name, source, *args, **kwargs: kernel(name, source)


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


def _replace_runtime(observed):
    """Graphs are observed; what they call of C++ gets a form that fake tensors understand."""
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
    shapes = torch.library.Library("aten", "IMPL", "Meta")
    shapes.impl("_scaled_mm.out", lambda *args, out, **kwargs: out)
    _kept.append(shapes)
    load = GraphLowering.compile_to_module

    def load_observed(self):
        module = load(self)
        module.call = observed(module.call)
        return module

    GraphLowering.compile_to_module = load_observed


def assemble(name: str, source: str) -> tuple[int, int, int]:
    """A Triton kernel that Inductor wrote, assembled for the fake card in the first of the forms
    that tuning would try: registers of a thread, bytes that a thread spills to memory, bytes of
    shared memory of a block. Takes a fifth of a second."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    tuner = getattr(PyCodeCache.load(source), name)
    assembled = tuner._precompile_config(tuner.configs[0]).kernel
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True,
                               encoding="utf-8", check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack), assembled.metadata.shared
