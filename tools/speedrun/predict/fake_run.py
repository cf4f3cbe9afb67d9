"""Runs a script's own main() on fake devices and writes what it saw as one JSON object.

A program of its own, because the fake device changes the process for good:
python -m speedrun.predict.fake_run SCRIPT WORLD_SIZE DEVICE_NAME COMPILED OUT --NAME=VALUE ...
"""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook

from speedrun.base.files import replace_file
from speedrun.predict import attention
from speedrun.predict.fake_cuda import install, reason_against
from speedrun.predict.observer import Observer
from speedrun.predict.prediction import STEPS
from speedrun.run.data import HEADER_BYTES, MAGIC, VERSION
from speedrun.scripts.load import load_snapshot


def main(script: str, world_size: int, device_name: str, compiled: bool,
         *options: str) -> dict[str, object]:
    """What the script does on rank 0 of `world_size` fake devices, eagerly, with its own
    hyperparameters and these --name=value: peak bytes of the warm-up, the training steps and the
    validation; what is in memory after them; per step FLOPs, bytes moved and collectives."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    if compiled:
        sys.exit("compiled runs are not predicted yet")
    install(world_size, device_name)
    module = load_snapshot(Path(script))
    module.DistributedDataParallel = functools.partial(_distributed, module.DistributedDataParallel)
    attention.replace(module)
    torch.compile = lambda function, **kwargs: function
    observer, seen, models, optimizers = Observer(), {}, [], {}

    def observed(phase, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if phase == "validation":
                seen["training"] = observer.totals()
                seen["training"]["memory"] = _parts(models[0], optimizers.values())
            observer.reset()
            result = function(*args, **kwargs)
            seen[phase] = observer.totals()
            observer.reset()
            return result
        return wrapper

    class GPT(module.GPT):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            models.append(self)

    module.GPT = GPT
    module.warm_up = observed("warm-up", module.warm_up)
    module.validate = observed("validation", module.validate)
    register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: optimizers.setdefault(id(optimizer), optimizer))
    with tempfile.TemporaryDirectory() as folder:
        args = module.parse_args([
            *options, f"--train_steps={STEPS}", "--val_loss_every=0",
            "--train_loss_every=0", "--kernel_warmup_steps=1", f"--log_dir={folder}/log"])
        args.val_tokens = args.micro_batch_size * args.seq_len * world_size
        args.train_files = _shard(folder, "train", STEPS * args.total_batch_size + 1)
        args.val_files = _shard(folder, "val", args.val_tokens + 1)
        with FakeTensorMode(allow_non_fake_inputs=True), observer:
            module.main(args)
    return {"micro_batch": args.micro_batch_size, **seen, "launches": [], "graphs": 0}


def _distributed(parallel, model, **kwargs):
    """The script's DistributedDataParallel, without what needs data: the exchange of first values,
    its log, and buckets that are built again in the order in which gradients came."""
    parallel = parallel(model, init_sync=False, **kwargs)
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


def _parts(model, optimizers) -> dict[str, int]:
    """Bytes that stay from step to step; gradients live in buckets of the parameters' sizes."""
    states = {id(value): value for optimizer in optimizers for state in optimizer.state.values()
              for value in state.values() if isinstance(value, torch.Tensor)}
    size = sum(param.nbytes for param in model.parameters())
    return {"parameters": size, "gradients": size,
            "optimizer state": sum(state.nbytes for state in states.values()
                                   if state.device.type == "cuda")}


def _shard(folder, name, tokens) -> str:
    """A shard of zeros that takes no room on the disk; returns its path."""
    file = Path(folder, f"{name}.bin")
    header = b"".join(number.to_bytes(4, "little") for number in (MAGIC, VERSION, tokens))
    with open(file, "wb") as out:
        out.write(header)
        out.truncate(HEADER_BYTES + 2 * tokens)
    return str(file)


if __name__ == "__main__":
    if reason := reason_against():
        sys.exit(reason)
    script, world_size, device_name, compiled, out, *options = sys.argv[1:]
    found = main(script, int(world_size), device_name, compiled == "True", *options)
    replace_file(Path(out), json.dumps(found).encode())
    sys.stdout.flush()
    os._exit(0)  # at a normal end torch would ask the devices that are not there to finish
