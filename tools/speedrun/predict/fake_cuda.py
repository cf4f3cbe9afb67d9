"""A CUDA device that is not there, for tensors without data (torch's FakeTensorMode).

`install` changes this process for good: call it in a process that does nothing else. It was written
for one version of torch on Linux, and `reason_against` says where it cannot work.
"""

import ctypes
import platform
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from speedrun.predict.cards import Card

TORCH = "2.13.0"

# Slots in the table of virtual functions of torch's CUDA hooks, and in the registry of device
# guards, and how many slots are copied or filled, more than there are: the numbers are TORCH's.
IS_BUILT, HAS_PRIMARY_CONTEXT, HAS_CUDA = 2, 4, 16
CUDA_GUARD = 1
HOOKS, GUARDS, GUARD_METHODS = 96, 24, 64


def reason_against() -> str | None:
    """Why the fake device cannot work here, in one line; None if it can."""
    here = f"{sys.platform} {platform.machine()}"
    if here != "linux x86_64":
        return f"predictions need Linux on x86-64; this is {here}"
    if torch.__version__.partition("+")[0] != TORCH:
        return f"predictions need torch {TORCH}; this is {torch.__version__}"
    if torch.cuda.is_available():
        return "predictions are for machines without a GPU; run_milestone.py measures on this one"
    return None


def install(world_size: int, card: Card) -> None:
    """Makes this process believe that it is rank 0 of `world_size`, each with such a card.

    Only where `reason_against` gives no reason.
    """
    _give_autograd_a_device()
    answers = {
        "is_available": True, "is_initialized": True, "device_count": world_size,
        "current_device": 0, "get_device_name": card.name, "is_bf16_supported": True,
        "get_device_capability": divmod(card.sm, 10),
        "max_memory_allocated": 0, "reset_peak_memory_stats": None, "set_device": None,
        "synchronize": None,
    }
    for function, answer in answers.items():
        setattr(torch.cuda, function, lambda *args, answer=answer, **kwargs: answer)
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


_kept = []  # what C++ points to must outlive this module's functions


def _function(result_type, result, *argument_types):
    """The address of a method that takes `self` and these arguments and returns `result`."""
    kind = ctypes.CFUNCTYPE(result_type, ctypes.c_void_p, *argument_types)
    function = kind(lambda *args: result)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value
