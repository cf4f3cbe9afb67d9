"""Runs a script's main where the current spy sees it.

What would take long, or cannot be seen from outside, is replaced for the whole process.
"""

import functools
import gc
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention
from torch.optim import optimizer as optim

from speedrun.check.kernels import modules
from speedrun.check.spy import Enough, Spy
from speedrun.check.weights import arguments, fill
from speedrun.compat import optimized_module

try:
    from torch.nn.attention import varlen
except ImportError:  # an older torch
    varlen = None

make_optimized = optimized_module()  # now: no spy should see its import
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor",
               "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_to_all_single", "all_to_all", "reduce", "gather",
               "scatter", "send", "recv", "isend", "irecv")
CLOCKS = ("perf_counter", "time", "monotonic", "process_time")


def observed(function, method):
    """The function, with each call made through a method of the current spy."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        return getattr(Spy.current, method)(function, *args, **kwargs)

    return call


def observe(owner, name, method):
    """Replaces a function of a module or class by the observed one."""
    setattr(owner, name, observed(getattr(owner, name), method))


@functools.cache
def watch(module):
    """Lets spies see what a script's model and validate do."""
    observe(module.GPT, "__init__", "make")
    observe(module.GPT, "forward", "call")
    if callable(getattr(module, "validate", None)):
        observe(module, "validate", "validate")


def stand_ins():
    """Replaces what would take long or cannot be seen from outside: torch.compile compiles nothing,
    and clocks are the spy's."""
    Spy()
    for clock in CLOCKS:
        setattr(time, clock, lambda: Spy.current.now)
        setattr(time, f"{clock}_ns", lambda: int(Spy.current.now * 1e9))
    optim.register_optimizer_step_pre_hook(lambda o, *_: Spy.current.before_step(o))
    optim.register_optimizer_step_post_hook(lambda o, *_: Spy.current.after_step(o))
    torch.compile = _compile
    gc.unfreeze = lambda: None  # else a script's collections walk through all of torch
    threading.setprofile(lambda *event: Spy.current.saw_thread(*event))
    observe(threading.Thread, "start", "start")
    observe(torch, "save", "save")
    sys.addaudithook(lambda *event: Spy.current.saw_event(*event))
    observe(torch.nn.functional, "rms_norm", "norm")
    observe(torch, "_scaled_mm", "multiply")
    observe(flex_attention, "flex_attention", "attend")
    if varlen:
        observe(varlen, "varlen_attn", "attend_to_packs")
        observe(torch.nn.attention, "activate_flash_attention_impl", "activate")
    observe(torch.nn.parallel.DistributedDataParallel, "__init__", "distribute")
    observe(dist, "init_process_group", "meet")
    for name in COLLECTIVES:
        observe(dist, name, "send")


def _compile(model=None, *, disable=False, **options):
    if model is None:
        return functools.partial(_compile, disable=disable)
    if disable:
        return model
    if isinstance(model, torch.nn.Module):
        return make_optimized(model, lambda function: observed(function, "call_compiled"))
    return observed(model, "call_compiled")


@contextmanager
def triton():
    """Puts something in the place of Triton, which a CPU has no use for and may lack: what a script
    imports meanwhile has kernels that run, and the current spy sees each launch."""
    made = modules(lambda *seen: Spy.current.saw_kernel(*seen))
    for module in made.values():
        module.__spec__ = ModuleSpec(module.__name__, None)
    with mock.patch.dict(sys.modules, made):
        yield


def save_start(module, values, file):
    """Saves a checkpoint like that of a pretrained model without a conversation's markers, with
    weights that follow from their names; returns its path."""
    args = arguments(module, {**values, "vocab_size": values["bos_id"] + 1})
    net = module.GPT(args)
    fill(net)
    sizes = {name: getattr(args, name) for name in
             ("vocab_size", "num_layers", "num_heads", "model_dim")}
    torch.save(dict(step=1, hyperparameters=sizes, model=net.state_dict()), file)
    return str(file)


def run_watched(module, values, folder, spy, meter=False):
    """Runs main in the folder; returns the lines of its log below the script's own text."""
    args = arguments(module, {**values, "log_dir": str(folder)})
    watch(module)
    try:
        with spy.meter if meter else nullcontext(), suppress(Enough):
            module.main(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    log = Path(folder, "log.txt")
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    own = Path(module.__file__).read_text(encoding="utf-8")
    lacks = "" if text.startswith(own) else "the script's own text is missing\n"
    text = (lacks + text.removeprefix(own)).replace(str(folder), "LOG_DIR")
    text = text.replace(str(Path(values["train_files"]).parent), "SHARDS")
    return text.replace(values.get("checkpoint") or "\0", "CHECKPOINT").splitlines()
