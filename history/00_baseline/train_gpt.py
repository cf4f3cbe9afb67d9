"""
00 baseline: GPT-2 (124M) with everything unneeded removed, trained by AdamW

Parent:  none; it descends from the PyTorch trainer of llm.c (@karpathy), record #1
Changed: no biases, RMSNorm without parameters, exact GELU, a constant factor on the attention
         branch, 2.5x the learning rate on a straight line, every gradient tensor at unit norm
Record:  commit 4a452a2 by @kellerjordan0, 2024-06-01: val loss 3.2798 after 6.44B tokens
         (untimed; record #1 took 45 minutes on 8xH100 for the same task)
Run:     torchrun --standalone --nproc_per_node=8 history/00_baseline/train_gpt.py
         python history/00_baseline/train_gpt.py --micro_batch_size=16     (one GPU)
"""

import gc
import glob
import itertools
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

# ---------------------------------------- Hyperparameters ----------------------------------------


@dataclass
class Hyperparameters:
    """Every number of the run; the defaults are the record's."""

    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: int = 10_485_760  # the same for every milestone, so that losses compare
    # batch
    total_batch_size: int = 262_144  # tokens per optimizer step, all ranks
    seq_len: int = 1024  # tokens per sequence
    micro_batch_size: int = 32  # sequences per forward pass per rank
    # model
    vocab_size: int = 50257  # GPT-2's byte-pair encoding
    num_layers: int = 12
    num_heads: int = 12
    model_dim: int = 768
    # optimizer
    adam_lr: float = 1.5e-3
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1  # on every tensor: all of them are matrices
    # schedule
    train_steps: int = 24_576
    warmup_steps: int = 256
    # logging
    val_loss_every: int = 128  # steps between validations; 0 = only after the last step
    train_loss_every: int = 0  # reading the loss waits for the device; 0 = never
    log_dir: str = field(default_factory=lambda: time.strftime(f"logs/%Y%m%d-%H%M%S-{os.getpid()}"))
    save_checkpoint: bool = False
    # machine
    seed: int = 0
    kernel_warmup_steps: int = 3  # untimed steps before the clock starts, undone afterwards
    compile: bool = torch.cuda.is_available()
    bf16: bool = torch.cuda.is_available()


def fail(message, status=1):
    """Ends the run with one line on stderr."""
    # All ranks meet a bad input at once: rank 0 speaks, and its launcher ends the others. A rank
    # that is still alive ten seconds later met a fault of its own.
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(10)
    if status == 1:
        raise SystemExit(f"error: {message}")
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def parse_args(argv):
    """Hyperparameters with each `--name=value` of argv applied, in the type of the default."""
    args = Hyperparameters()
    for arg in argv:
        name, equals, text = arg.removeprefix("--").partition("=")
        if not (arg.startswith("--") and equals and name in asdict(args)):
            fail(f"{arg} is not --name=value with a name of: {', '.join(asdict(args))}", status=2)
        kind = type(getattr(args, name))
        try:
            value = {"True": True, "False": False}[text] if kind is bool else kind(text)
        except (KeyError, ValueError):
            fail(f"--{name} takes a value of type {kind.__name__}, not {text!r}", status=2)
        setattr(args, name, value)
    return args


# ------------------------------------------- Optimizer -------------------------------------------


class NormalizedAdamW(torch.optim.AdamW):
    """AdamW on gradients of unit norm: each tensor's g is replaced by g / (|g| + 1e-6)."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.div_(param.grad.norm() + 1e-6)
        super().step()


# --------------------------------------------- Model ---------------------------------------------


def norm(x):
    """RMS norm over the last dimension, in float32 and without parameters (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each token to itself and the tokens before it."""

    def __init__(self, args):
        super().__init__()
        self.num_heads = args.num_heads
        self.head_dim = args.model_dim // args.num_heads
        self.c_qkv = nn.Linear(args.model_dim, 3 * args.model_dim, bias=False)
        self.c_proj = nn.Linear(args.model_dim, args.model_dim, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_qkv(x).view(B, T, 3, self.num_heads, self.head_dim).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D), as the kernels want
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale 1 / sqrt(head_dim)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear maps with a GELU between them, four times as wide inside."""

    def __init__(self, args):
        super().__init__()
        hidden_dim = 4 * args.model_dim
        self.c_fc = nn.Linear(args.model_dim, hidden_dim, bias=False)
        self.c_proj = nn.Linear(hidden_dim, args.model_dim, bias=False)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    """One transformer layer: attention and MLP, each added to the residual stream."""

    def __init__(self, args):
        super().__init__()
        self.attn = CausalSelfAttention(args)
        self.mlp = MLP(args)
        # Keeps the early stream small, as GPT-2's smaller init of c_proj did. The record has the
        # literal 1 / sqrt(2 * 12 layers), whatever the depth.
        self.attn_scale = 1 / math.sqrt(24)

    def forward(self, x):
        x = x + self.attn_scale * self.attn(norm(x))
        x = x + self.mlp(norm(x))
        return x


class GPT(nn.Module):
    """Token ids to next-token logits, or to the mean loss where the targets are given."""

    def __init__(self, args):
        super().__init__()
        self.bf16 = args.bf16
        self.embed = nn.Embedding(args.vocab_size, args.model_dim)
        self.pos_embed = nn.Embedding(args.seq_len, args.model_dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.lm_head = nn.Linear(args.model_dim, args.vocab_size, bias=False)
        # The block matrices keep nn.Linear's init, uniform within 1 / sqrt(fan_in).
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed.weight, std=0.02)
        self.lm_head.weight = self.embed.weight  # one tied matrix (arXiv 1608.05859)

    def forward(self, inputs, targets=None):
        # Training multiplies in bfloat16 (the residual stream stays float32), validation not.
        autocast = self.bf16 and self.training
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=autocast):
            positions = torch.arange(inputs.size(1), device=inputs.device)  # (T,)
            x = self.embed(inputs) + self.pos_embed(positions)  # (B, T, C)
            for block in self.blocks:
                x = block(x)
            logits = self.lm_head(norm(x)).float()  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------- Data ----------------------------------------------


def open_shards(pattern, step_tokens):
    """The shards that match a glob pattern, sorted: a list of memory-mapped uint16 arrays.

    A shard is 256 int32 (magic number, version, token count, zeros), then its tokens.
    """
    files = sorted(glob.glob(pattern))
    if not files:
        fail(f"no shards match {pattern}; fetch some with: python data/cached_fineweb10B.py")
    shards = []
    for file in files:
        header = np.fromfile(file, dtype="<i4", count=256)
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            fail(f"{file} is not a token shard (magic 20240520, version 1); fetch it again")
        count, size = int(header[2]), os.path.getsize(file)
        if size != 1024 + 2 * count:
            fail(f"{file} has {size} bytes, not 1024 + 2 * {count} tokens; fetch it again")
        shards.append(np.memmap(file, dtype="<u2", mode="r", offset=1024, shape=(count,)))
    longest = max(map(len, shards))
    if longest <= step_tokens:
        fail(f"{step_tokens} tokens and one more do not fit into the longest shard of {pattern},"
             f" which holds {longest}; lower total_batch_size or val_tokens")
    return shards


def token_batches(shards, step_tokens, args, rank, world_size, device):
    """Yields this rank's micro-batches without end: inputs and targets, each (B, T) int64.

    The stream is cut into steps first, then a step is dealt: block micro_step * world_size + rank
    is this rank's, so that any number of ranks sees the same tokens in the same order. No step
    spans two shards (a shorter tail is skipped); after the last shard comes the first.
    """
    B, T = args.micro_batch_size, args.seq_len
    for shard in itertools.cycle(shards):
        for step_start in range(0, len(shard) - step_tokens, step_tokens):
            step_end = step_start + step_tokens
            for start in range(step_start + rank * B * T, step_end, world_size * B * T):
                tokens = shard[start : start + B * T + 1].astype(np.int64)
                if tokens.max() >= args.vocab_size:
                    fail(f"{shard.filename} holds token {tokens.max()} between {start} and"
                         f" {start + B * T}, beyond vocab_size={args.vocab_size}")
                tokens = torch.from_numpy(tokens).to(device)
                yield tokens[:-1].view(B, T), tokens[1:].view(B, T)


# ------------------------------------------- Schedules -------------------------------------------


def lr_multiplier(step, args):
    """Linear warm-up to 1, then a straight line to 1/11 at train_steps."""
    if step < args.warmup_steps:
        return (step + 1) / args.warmup_steps
    progress = (step - args.warmup_steps) / (args.train_steps - args.warmup_steps)
    return 1 - progress * 10 / 11


# -------------------------------------------- Training --------------------------------------------


def main(args):
    """Trains, validates and logs; returns the unrounded losses [(step, val_loss), ...]."""
    # ---- setup ----
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    master_process = rank == 0

    # Every input is checked before the first process group, tensor or file is made.
    for name, value in asdict(args).items():
        is_size = type(value) is int and not name.endswith(("_steps", "_every", "seed"))
        if type(value) in (int, float) and value < is_size:  # a size is at least 1, others 0
            fail(f"{name}={value} is too small")
    micro_step_tokens = args.micro_batch_size * args.seq_len * world_size
    for name in ("total_batch_size", "val_tokens"):
        if getattr(args, name) % micro_step_tokens:
            fail(f"{name}={getattr(args, name)} is not a multiple of micro_batch_size * seq_len *"
                 f" ranks = {args.micro_batch_size} * {args.seq_len} * {world_size}")
    if args.model_dim % args.num_heads:
        fail(f"model_dim={args.model_dim} is not a multiple of num_heads={args.num_heads}")
    if torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
        fail(f"local rank {local_rank} has no GPU; this machine has {torch.cuda.device_count()}")
    train_shards = open_shards(args.train_files, args.total_batch_size)
    val_shards = open_shards(args.val_files, args.val_tokens)

    if master_process:
        try:
            os.makedirs(args.log_dir, exist_ok=True)
            log_file = open(Path(args.log_dir, "log.txt"), "x", encoding="utf-8")
        except OSError as error:
            fail(f"no new log in {args.log_dir}: {error.strerror}; choose another --log_dir")

    def print0(line, console=True):
        if master_process:
            print(line, file=log_file, flush=True)
            if console:
                print(line, flush=True)

    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
        device_name, synchronize = torch.cuda.get_device_name(), torch.cuda.synchronize
    else:
        device, backend = torch.device("cpu"), "gloo"
        device_name, synchronize = "cpu", lambda: None
    # A plain `python train_gpt.py` is a world of one, kept in memory: it needs no address.
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    batches = partial(token_batches, args=args, rank=rank, world_size=world_size, device=device)
    environment = dict(
        python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda,
        device=device_name, world_size=world_size, compile=args.compile, bf16=args.bf16)
    print0(Path(__file__).read_text(encoding="utf-8") + "=" * 100, console=False)
    print0(f"environment:{json.dumps(environment)}")
    print0(f"hyperparameters:{json.dumps(asdict(args))}\n" + "=" * 100, console=False)

    # ---- model and optimizers ----
    torch.manual_seed(args.seed)
    raw_model = GPT(args).to(device)
    model = raw_model
    if args.compile:
        model = torch.compile(model, dynamic=False, options=dict(coordinate_descent_tuning=True))
    model = DistributedDataParallel(model)  # averages the gradients over the ranks

    optimizers = [NormalizedAdamW(raw_model.parameters(), lr=args.adam_lr, eps=args.adam_eps,
                                  betas=(args.adam_beta1, args.adam_beta2),
                                  weight_decay=args.weight_decay)]
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in param_groups:
        group["initial_lr"] = group["lr"]
    optimized = [param for group in param_groups for param in group["params"]]
    assert sorted(map(id, optimized)) == sorted(map(id, raw_model.parameters()))  # each just once

    # ---- kernel warm-up ----
    # Compiles training outside the clock (validation stops it), then puts all states back.
    initial_states = deepcopy([part.state_dict() for part in (raw_model, *optimizers)])
    warmup_batches = batches(train_shards, args.total_batch_size)
    for inputs, targets in itertools.islice(warmup_batches, args.kernel_warmup_steps):
        model(inputs, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    for part in (raw_model, *optimizers):
        part.load_state_dict(initial_states.pop(0))

    # ---- train and validate ----
    grad_accum_steps = args.total_batch_size // micro_step_tokens
    val_micro_steps = args.val_tokens // micro_step_tokens
    train_batches = batches(train_shards, args.total_batch_size)
    val_losses = []
    training_time_ms = 0.0
    synchronize()
    clock_start = time.perf_counter()
    for step in range(args.train_steps + 1):
        last_step = step == args.train_steps
        if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
            synchronize()
            training_time_ms += 1000 * (time.perf_counter() - clock_start)  # the clock stops
            model.eval()
            val_batches = batches(val_shards, args.val_tokens)
            val_loss = torch.zeros((), device=device)
            with torch.no_grad():
                for inputs, targets in itertools.islice(val_batches, val_micro_steps):
                    val_loss += model(inputs, targets) / (val_micro_steps * world_size)
            dist.all_reduce(val_loss)
            val_losses.append((step, val_loss.item()))
            print0(f"step:{step}/{args.train_steps} val_loss:{val_loss:.4f}"
                   f" train_time:{training_time_ms:.0f}ms"
                   f" step_avg:{training_time_ms / max(step, 1):.2f}ms")
            model.train()
            synchronize()
            clock_start = time.perf_counter()
        if last_step:
            break

        train_loss = torch.zeros((), device=device)
        for micro_step in range(grad_accum_steps):
            inputs, targets = next(train_batches)
            # Gradients add up locally; only the last micro-step averages them over the ranks.
            with nullcontext() if micro_step == grad_accum_steps - 1 else model.no_sync():
                loss = model(inputs, targets) / grad_accum_steps
                loss.backward()
            train_loss += loss.detach() / world_size
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_multiplier(step, args)
            optimizer.step()
        model.zero_grad(set_to_none=True)

        train_loss_text = ""
        if args.train_loss_every > 0 and (step + 1) % args.train_loss_every == 0:
            dist.all_reduce(train_loss)
            train_loss_text = f"train_loss:{train_loss:.4f} "
        elapsed_ms = training_time_ms + 1000 * (time.perf_counter() - clock_start)
        print0(f"step:{step + 1}/{args.train_steps} {train_loss_text}"
               f"train_time:{elapsed_ms:.0f}ms step_avg:{elapsed_ms / (step + 1):.2f}ms")

    if device.type == "cuda":
        print0(f"peak_memory:{torch.cuda.max_memory_allocated() // 2**20}MiB")
    if args.save_checkpoint and master_process:
        checkpoint = dict(step=step, hyperparameters=asdict(args), model=raw_model.state_dict())
        torch.save(checkpoint, Path(args.log_dir, "checkpoint.partial"))
        os.replace(Path(args.log_dir, "checkpoint.partial"), Path(args.log_dir, "checkpoint.pt"))
    # DDP lives in a reference cycle and holds the process group. Left to the interpreter's exit,
    # the group's threads can outlive the interpreter and abort the process.
    del model
    gc.collect()
    dist.destroy_process_group()
    return val_losses


if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("error: interrupted; the log holds every line so far", file=sys.stderr)
        os._exit(130)  # no teardown that a second Ctrl-C could disturb
