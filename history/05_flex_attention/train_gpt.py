"""
05 flex attention: long sequences of whole documents, seen through a growing window

Parent:  04 skip connections
Changed: one sequence of 65,536 tokens per GPU instead of 64 rows of 1,024; a token sees its own
         document, causally, up to a window back, and FlexAttention skips what is masked (#12);
         the window grows from 64 to 1,792 tokens, Adam and Muon are retuned (#13)
Record:  #12 by @KoszarskyB and #13 by @fernbear.bsky.social, 2024-11-24:
         val loss 3.2759 after 0.92B tokens in 4.66 minutes on 8xH100
Run:     torchrun --standalone --nproc_per_node=8 history/05_flex_attention/train_gpt.py
         python history/05_flex_attention/train_gpt.py
         (one GPU; if its memory is too small, --seq_len=16384 cuts documents more often)
"""

import gc
import glob
import itertools
import json
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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
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
    total_batch_size: int = 524_288  # tokens per optimizer step, all ranks
    seq_len: int = 65_536  # tokens per sequence: documents in a row
    micro_batch_size: int = 1  # sequences per forward pass per rank
    # model
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 128 for the tensor cores
    bos_id: int = 50256  # the first token of every document
    num_layers: int = 12
    num_heads: int = 6
    model_dim: int = 768
    # optimizer
    muon_lr: float = 0.05  # the largest singular value of a step, for matrices that are not tall
    muon_momentum_start: float = 0.85
    muon_momentum: float = 0.95
    embed_lr: float = 0.6
    head_lr: float = 0.008
    scalar_lr: float = 0.04
    adam_beta1: float = 0.8
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    # schedule
    train_steps: int = 1750
    cooldown_steps: int = 640
    momentum_warmup_steps: int = 300
    window_start: int = 64  # tokens that a token sees, itself included
    window_end: int = 1792
    # logging
    val_loss_every: int = 125  # steps between validations; 0 = only after the last step
    train_loss_every: int = 0  # reading the loss waits for the device; 0 = never
    log_dir: str = field(default_factory=lambda: time.strftime(f"logs/%Y%m%d-%H%M%S-{os.getpid()}"))
    save_checkpoint: bool = False
    # machine
    seed: int = 0
    kernel_warmup_steps: int = 3  # untimed steps before the clock starts, undone afterwards
    compile: bool = torch.cuda.is_available()
    bf16: bool = torch.cuda.is_available()
    flex_attention: bool = torch.cuda.is_available()  # no backward pass on a CPU: a dense mask


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


def newton_schulz(matrix, dtype=torch.float32):
    """An approximately orthogonal matrix with the singular vectors of `matrix` (m, n), in `dtype`.

    Five steps of the quintic X <- aX + b(XX')X + c(XX')^2 X (Muon write-up, kellerjordan.github.io;
    arXiv 2409.20325) push the singular values towards 1. They do not converge: the coefficients
    are as steep at 0 as keeps what starts above 0.003 within about 0.68 to 1.20. bfloat16 will do.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = matrix.to(dtype)
    X = X / (X.norm() + 1e-7)  # no singular value is above the Frobenius norm
    tall = X.size(0) > X.size(1)
    if tall:
        X = X.T  # the smaller Gram matrix
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.T if tall else X


def nesterov_update(grad, momentum_buffer, momentum):
    """Adds the gradient to the decaying sum in `momentum_buffer` and looks one step ahead."""
    momentum_buffer.mul_(momentum).add_(grad)
    return grad + momentum * momentum_buffer


class Muon(torch.optim.Optimizer):
    """Moves each matrix by its orthogonalized Nesterov momentum times lr sqrt(max(1, rows / cols)).

    Matrix i belongs to rank i mod world_size, which alone keeps its momentum and orthogonalizes.
    """

    def __init__(self, params, lr, momentum, bf16, compile):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.newton_schulz = (  # compiled once per shape
            torch.compile(newton_schulz, dynamic=False) if compile else newton_schulz)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            # The updates of all matrices in a row: this rank fills in its own, the rest stays zero.
            sizes = [param.numel() for param in params]
            flat = torch.zeros(sum(sizes), dtype=self.dtype, device=params[0].device)
            updates = [part.view_as(p) for part, p in zip(flat.split(sizes), params, strict=True)]
            for i in range(dist.get_rank(), len(params), dist.get_world_size()):
                param, state = params[i], self.state[params[i]]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                update = nesterov_update(param.grad, state["momentum_buffer"], group["momentum"])
                update = self.newton_schulz(update, self.dtype)
                # Each output of the layer then moves alike, however tall the matrix is.
                scale = max(1, update.size(0) / update.size(1)) ** 0.5
                updates[i].copy_(update * scale)
            dist.all_reduce(flat)  # a sum with one term that is not zero, so it is exact
            for param, update in zip(params, updates, strict=True):
                param.add_(update, alpha=-group["lr"])


# --------------------------------------------- Model ---------------------------------------------


def norm(x):
    """RMS norm over the last dimension, in float32 and without parameters (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)


class Linear(nn.Linear):
    """A linear map without bias whose float32 weight is cast to the activations' dtype."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Rotary(nn.Module):
    """Rotary positions (arXiv 2104.09864): a query times a key depends on their distance alone."""

    def __init__(self, head_dim, seq_len):
        super().__init__()
        # At position t the pair of dimensions (i, i + D/2) turns by t / 10000^(2i/D).
        frequencies = 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)  # (D/2,)
        angles = torch.outer(torch.arange(seq_len), frequencies)[:, None]  # (T, 1, D/2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):  # (B, T, H, D)
        cos, sin = self.cos[: x.size(1)].to(x.dtype), self.sin[: x.size(1)].to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


def attention_mask(inputs, window, args):
    """Which tokens each token of `inputs` (B, T) sees: of its document, the last `window`.

    For FlexAttention (arXiv 2412.05496) the rule becomes a BlockMask of 128 x 128 tiles: those in
    which nothing is visible are skipped. The fallback is all (B, 1, T, T) booleans, for SDPA.
    """
    B, T = inputs.shape
    documents = (inputs == args.bos_id).cumsum(1)  # (B, T), counts the documents begun so far

    def visible(b, h, q, k):
        same_document = documents[b, q] == documents[b, k]
        return (q >= k) & same_document & (q - k < window)

    if args.flex_attention:
        return create_block_mask(visible, B, None, T, T, device=inputs.device)
    b, t = torch.arange(B, device=inputs.device), torch.arange(T, device=inputs.device)
    return visible(b[:, None, None, None], None, t[:, None], t)


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each token to the tokens that its mask shows."""

    def __init__(self, args):
        super().__init__()
        self.num_heads = args.num_heads
        self.head_dim = args.model_dim // args.num_heads
        self.c_q = Linear(args.model_dim, args.model_dim)
        self.c_k = Linear(args.model_dim, args.model_dim)
        self.c_v = Linear(args.model_dim, args.model_dim)
        self.c_proj = Linear(args.model_dim, args.model_dim)
        nn.init.zeros_(self.c_proj.weight)
        self.rotary = Rotary(self.head_dim, args.seq_len)
        self.value_lambda = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, first_v, mask):
        B, T, C = x.shape
        q = self.c_q(x).view(B, T, self.num_heads, self.head_dim)
        k = self.c_k(x).view(B, T, self.num_heads, self.head_dim)
        v = self.c_v(x).view(B, T, self.num_heads, self.head_dim)
        # Value residual (arXiv 2410.17897): part of each layer's values are the first layer's.
        first_v = v if first_v is None else first_v
        v = (1 - self.value_lambda) * v + self.value_lambda * first_v
        # Unit RMS bounds every score by sqrt(head_dim), however large c_q and c_k grow.
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D), as the kernels want
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask)  # scale 1 / sqrt(head_dim)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C)), first_v


class MLP(nn.Module):
    """Two linear maps with a squared ReLU (arXiv 2109.08668) between, four times as wide inside."""

    def __init__(self, args):
        super().__init__()
        hidden_dim = 4 * args.model_dim
        self.c_fc = Linear(args.model_dim, hidden_dim)
        self.c_proj = Linear(hidden_dim, args.model_dim)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """One transformer layer, the identity at first: attention and MLP, added to the stream."""

    def __init__(self, args):
        super().__init__()
        self.attn = CausalSelfAttention(args)
        self.mlp = MLP(args)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # of the stream, of the embedding

    def forward(self, x, first_v, x0, mask):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        y, first_v = self.attn(norm(x), first_v, mask)
        x = x + y
        x = x + self.mlp(norm(x))
        return x, first_v


class GPT(nn.Module):
    """Token ids to next-token logits, or to the mean loss where the targets are given."""

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.model_dim)  # starts as N(0, 1)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        for block in self.blocks:  # tables of 65,536 positions are large: one for all layers
            block.attn.rotary = self.blocks[0].attn.rotary
        # U-net (arXiv 1505.04597): the last layers add, in mirrored order, what the first put out.
        self.skip_weights = nn.Parameter(torch.ones(args.num_layers // 2))
        self.lm_head = Linear(args.model_dim, args.vocab_size)
        nn.init.zeros_(self.lm_head.weight)
        if args.bf16:  # embedding and scalars are bfloat16, and so are all activations
            self.bfloat16()
            for module in self.modules():
                if isinstance(module, Linear):
                    module.float()

    def forward(self, inputs, targets=None, window=None):
        window = inputs.size(1) if window is None else window
        mask = attention_mask(inputs, window, self.args)  # of all layers
        x = x0 = norm(self.embed(inputs))  # (B, T, C)
        first_v, skips, num_skips = None, [], len(self.skip_weights)
        for i, block in enumerate(self.blocks):
            decoder_layer = i - (len(self.blocks) - num_skips)
            if decoder_layer >= 0:
                x = x + self.skip_weights[decoder_layer] * skips.pop()
            x, first_v = block(x, first_v, x0, mask)
            if i < num_skips:
                skips.append(x)
        softcap = 30  # logits stay within +-30 (arXiv 2408.00118)
        logits = (softcap * torch.tanh(self.lm_head(norm(x)) / softcap)).float()  # (B, T, V)
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
    """1, then a straight line to 0 over the last cooldown_steps (arXiv 2405.18392)."""
    return min(1.0, (args.train_steps - step) / max(args.cooldown_steps, 1))


def muon_momentum(step, args):
    """Linear from muon_momentum_start to muon_momentum over momentum_warmup_steps."""
    progress = min(1.0, step / max(args.momentum_warmup_steps, 1))
    return (1 - progress) * args.muon_momentum_start + progress * args.muon_momentum


def window_size(step, args):
    """Linear from window_start to window_end over the run, in multiples of window_start."""
    growth = (args.window_end - args.window_start) * step // max(args.train_steps, 1)
    return (args.window_start + growth) // args.window_start * args.window_start


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
        is_size = type(value) is int and not name.endswith(("_steps", "_every", "_id", "seed"))
        if type(value) in (int, float) and value < is_size:  # a size is at least 1, others 0
            fail(f"{name}={value} is too small")
    micro_step_tokens = args.micro_batch_size * args.seq_len * world_size
    for name in ("total_batch_size", "val_tokens"):
        if getattr(args, name) % micro_step_tokens:
            fail(f"{name}={getattr(args, name)} is not a multiple of micro_batch_size * seq_len *"
                 f" ranks = {args.micro_batch_size} * {args.seq_len} * {world_size}")
    if args.model_dim % args.num_heads:
        fail(f"model_dim={args.model_dim} is not a multiple of num_heads={args.num_heads}")
    if args.bos_id >= args.vocab_size:
        fail(f"bos_id={args.bos_id} is not below vocab_size={args.vocab_size}")
    if args.window_end < args.window_start:
        fail(f"window_end={args.window_end} is below window_start={args.window_start}")
    if args.flex_attention and not torch.cuda.is_available():
        fail("FlexAttention has no backward pass on a CPU; leave out --flex_attention=True")
    if args.seq_len > 16_384 and not (args.flex_attention and args.compile):
        fail(f"seq_len={args.seq_len} is too long for a dense mask: only a compiled FlexAttention"
             " goes beyond 16384; lower seq_len")
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
        device=device_name, world_size=world_size, compile=args.compile, bf16=args.bf16,
        attention="FlexAttention" if args.flex_attention else "dense mask: flex_attention=False")
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

    # A tensor, because compiled code is specialised to the value of a Python number.
    window = torch.tensor(window_size(0, args), dtype=torch.int32, device=device)

    hidden_matrix_params = [param for param in raw_model.blocks.parameters() if param.ndim == 2]
    embed_params, head_params = [raw_model.embed.weight], [raw_model.lm_head.weight]
    scalar_params = [param for param in raw_model.parameters() if param.ndim < 2]
    adam_groups = [
        dict(params=embed_params, lr=args.embed_lr),
        dict(params=head_params, lr=args.head_lr),
        dict(params=scalar_params, lr=args.scalar_lr),
    ]
    optimizers = [
        torch.optim.Adam(adam_groups, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps,
                         fused=True),
        Muon(hidden_matrix_params, lr=args.muon_lr, momentum=args.muon_momentum,
             bf16=args.bf16, compile=args.compile),
    ]
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
        model(inputs, targets, window).backward()
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
        window.fill_(window_size(step, args))
        if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
            synchronize()
            training_time_ms += 1000 * (time.perf_counter() - clock_start)  # the clock stops
            model.eval()
            val_batches = batches(val_shards, args.val_tokens)
            val_loss = torch.zeros((), device=device)
            with torch.no_grad():
                for inputs, targets in itertools.islice(val_batches, val_micro_steps):
                    val_loss += model(inputs, targets, window) / (val_micro_steps * world_size)
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
                loss = model(inputs, targets, window) / grad_accum_steps
                loss.backward()
            train_loss += loss.detach() / world_size
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_multiplier(step, args)
                if "momentum" in group:
                    group["momentum"] = muon_momentum(step, args)
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
