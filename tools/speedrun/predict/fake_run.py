"""Runs a script's own main() on fake devices, in a process that does nothing else."""

import functools
import os
import tempfile
from concurrent import futures
from concurrent.futures import Executor, Future
from pathlib import Path
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from speedrun.base.errors import UserError
from speedrun.compat import (
    FakeTensorMode,
    assemble,
    distributed_without_data,
    install_compiler,
    install_device,
    reason_against,
)
from speedrun.history.glossary import load_glossary
from speedrun.history.tokens import stages
from speedrun.predict import attention
from speedrun.predict.cards import Card
from speedrun.predict.observer import WORKSPACES, Observer
from speedrun.predict.prediction import STEPS, Kernel
from speedrun.run.data import HEADER_BYTES, MAGIC, VERSION
from speedrun.scripts.find import handles_for, load_snapshot
from speedrun.scripts.sizes import fitting, length_names


def main(script: Path, compiled: bool, assembled: bool, world_size: int, card: Card,
         *options: str) -> dict[str, object]:
    """What the script does on rank 0 of `world_size` fake cards, compiled or operator by operator,
    with its own hyperparameters and these --name=value.

    Peak bytes of the warm-up, the training steps and the validation; what is in memory after them;
    FLOPs, bytes moved and collectives of all steps; launches and bytes saved for the backward pass
    of the last micro-step, with the optimizers' launches. If compiled, graphs until the end of each
    phase, and if `assembled`, the Triton kernels. Raises UserError where that cannot be, and what
    the script raises.
    """
    if reason := reason_against(compiled):
        raise UserError(reason)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    observer, models, optimizers, seen = Observer(), [], {}, {}
    install_device(world_size, card)
    if compiled:
        install_compiler(card, observer.kernel, observer.observed)
    if not compiled:
        torch.compile = lambda model, **kwargs: model
    parallel = torch.nn.parallel
    without_data = functools.partial(distributed_without_data, parallel.DistributedDataParallel)
    with (patch.object(parallel, "DistributedDataParallel", without_data),
          patch.object(futures, "ThreadPoolExecutor", _AtOnce)):
        module, handles = load_snapshot(script), handles_for(script)
    attention.replace(module, compiled)

    def observed(phase, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if phase == "validation":
                seen["training"] = {
                    **observer.totals(), "memory": _parts(models[-1], optimizers.values())}
            if phase == "warm-up":
                args[0].register_forward_pre_hook(lambda *_: observer.begin_pass())
            observer.reset()
            result = function(*args, **kwargs)
            seen[phase] = observer.totals()
            observer.reset()
            return result
        return wrapper

    def note(optimizer, args, kwargs):
        optimizers[id(optimizer)] = optimizer
        seen.update(launches=observer.launches.copy(), saved=observer.saved)

    class GPT(module.GPT):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            models.append(self)

    module.GPT = GPT
    module.warm_up = observed("warm-up", module.warm_up)
    module.validate = observed("validation", module.validate)
    torch.Tensor.backward = _backward(torch.Tensor.backward, observer)
    register_optimizer_step_post_hook(note)
    with tempfile.TemporaryDirectory() as folder:
        short = (f"--{name}={value}" for name, value in short_run(module.Hyperparameters).items())
        args = module.parse_args([*options, *short, f"--log_dir={folder}/log"])
        seq_len, val_seq_len = (getattr(args, name) for name in length_names(vars(args)))
        args.val_tokens = args.micro_batch_size * val_seq_len * world_size
        first_token = handles.first_token(args) or 0
        args.train_files = _shard(
            folder, "train", stages(vars(args)) * STEPS * args.total_batch_size + 1,
            handles.longest_document(args) or seq_len, first_token)
        args.val_files = _shard(folder, "val", args.val_tokens + 1, val_seq_len, first_token)
        without = {} if compiled else dict(use_triton=False)  # a kernel by itself needs a device
        vars(args).update(handles.EMPTY_FILES | fitting(without, vars(args)))
        if compiled:
            observer.keys_per_query = attention.keys_per_query(module, args, STEPS - 1)
        with FakeTensorMode(allow_non_fake_inputs=True), observer:
            module.main(args)
    kernels = [Kernel(name, *assemble(name, source))
               for source, name in observer.sources.items() if assembled]
    return {"micro_batch": args.micro_batch_size, "kernels": kernels, **seen}


def short_run(hyperparameters: type) -> dict[str, int]:
    """The values that make a run of a script with these Hyperparameters as short as can be.

    Its schedules are as long, so the last step is halfway through them. The warm-up has as many
    steps too: it compiles all that training runs, beside states of optimizers and its own copies.
    Where the batch grows in stages, the first step has the smallest and the last the largest, so
    the peak is the run's, and their mean is about the mean batch.
    """
    glossary = load_glossary()
    values = dict.fromkeys(glossary.of_kind("steps", "phase"), STEPS)
    values |= dict.fromkeys(glossary.of_kind("interval"), 0)
    if stages(vars(hyperparameters)) > 1:
        values["scheduled_steps"] = STEPS - 1
    return fitting(values, vars(hyperparameters))


def _backward(function, observer):
    def wrapper(*args, **kwargs):
        observer.begin_backward()
        function(*args, **kwargs)
        observer.phase = "optimizer"
    return wrapper


class _AtOnce(Executor):
    """In place of a script's threads, in which there are no fake devices."""
    def __init__(self, **options):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


def _parts(model, optimizers) -> dict[str, int]:
    """Bytes that stay from step to step; gradients live in buckets of the parameters' sizes."""
    states = {id(value): value for optimizer in optimizers for state in optimizer.state.values()
              for value in state.values() if isinstance(value, torch.Tensor)}
    size = sum(param.nbytes for param in model.parameters())
    return {"workspaces": WORKSPACES, "parameters": size, "gradients": size,
            "optimizer state": sum(state.nbytes for state in states.values()
                                   if state.device.type == "cuda")}


def _shard(folder, name, tokens, length, first_token) -> str:
    """A shard of zeros whose documents have `length` tokens and begin with `first_token`; it takes
    next to no room on the disk. Returns its path."""
    if tokens >= 2**32:
        raise UserError(f"a run would read {tokens:,} tokens, more than the 2**32 - 1 of a shard")
    file = Path(folder, f"{name}.bin")
    header = b"".join(number.to_bytes(4, "little") for number in (MAGIC, VERSION, tokens))
    with open(file, "wb") as out:
        out.write(header)
        out.truncate(HEADER_BYTES + 2 * tokens)
        for start in range(0, tokens, length):
            out.seek(HEADER_BYTES + 2 * start)
            out.write(first_token.to_bytes(2, "little"))
    return str(file)

