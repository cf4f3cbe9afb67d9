"""
p6 memory map: pages of a shard are read when a batch touches them

Trains a language model on FineWeb, a corpus of web pages. These scripts make a plain training loop
fast, one cause at a time, on the same tokens.

Parent:  p5
Changed: shards are memory-mapped, so the operating system reads a page at first use, and only a
         batch is widened to int64
Record:  none; record #1 of the speedrun trains the same model on the same tokens
Run:     python data/cached_fineweb10B.py N   (from the repository root; N shards of 100M tokens)
         torchrun --standalone --nproc_per_node=8 path/to/this/train_gpt.py  (the record: 8 GPUs)
         python tools/run_milestone.py ID (any machine; --scale tiny --dry-run prints the command)
"""

import argparse
import gc
import glob
import importlib
import itertools
import json
import math
import os
import platform
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import timedelta
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
    """Every setting you may want to change; the defaults train on 10B tokens."""
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: int = 10_485_760  # the same for every milestone, so that losses are comparable
    total_batch_size: int = 524_288  # tokens per optimizer step, all ranks
    seq_len: int = 1024  # tokens per sequence
    micro_batch_size: int = 16  # sequences per forward pass per rank
    # model
    vocab_size: int = 50257  # GPT-2's byte-pair encoding
    num_layers: int = 12
    num_heads: int = 12
    model_dim: int = 768
    # optimizer and schedules
    adam_lr: float = 6e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    weight_decay: float = 0.1  # of matrices; biases and norm weights have none
    train_steps: int = 19_073
    warmup_steps: int = 700
    # run
    val_loss_every: int = 128  # steps between validations; 0 = only after the last step
    train_loss_every: int = 0  # steps between logged train losses; each waits for the GPU; 0 = none
    log_dir: str = field(default_factory=lambda: time.strftime(f"logs/%Y%m%d-%H%M%S-{os.getpid()}"))
    save_checkpoint: bool = False
    seed: int = 0
    kernel_warmup_steps: int = 3  # untimed steps that prepare the kernels, undone afterwards
    # gains, each with a flag that turns it off
    bf16: bool = torch.cuda.is_available()  # matrix products in bfloat16
    fused_attention: bool = True  # one kernel that never writes the scores to memory
    compile: bool = torch.cuda.is_available()  # one graph instead of one operation at a time
    adam_backend: str = "auto"  # auto = the first that works of apex, fused, foreach, loop
    muon: bool = True  # updates the layers' matrices instead of AdamW
    second_moment: bool = True  # divides Muon's update by each neuron's running RMS
    cautious_decay: bool = True  # decays only where Muon's update has the weight's sign
    stacked_muon: bool = True  # one update for all matrices of a shape instead of one for each
    sharded: bool = True  # splits optimizer steps and states among the ranks
    memory_map: bool = True  # reads only the pages of a shard that a batch needs


def parse_args(argv=None):
    """Hyperparameters from the command line: `--name=value` for any field of the dataclass."""
    def boolean(text):
        return ("False", "True").index(text) == 1  # argparse reports the ValueError of other texts
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in asdict(Hyperparameters()).items():
        kind = type(default)
        parser.add_argument(f"--{name}", type=boolean if kind is bool else kind, default=default,
                            metavar=kind.__name__, help=f"default: {default}")
    return Hyperparameters(**vars(parser.parse_args(argv)))


# ------------------------------------------- Schedules -------------------------------------------
def lr_multiplier(step, args):
    """Linear warm-up to 1, then half a cosine to 0 at train_steps."""
    if step < args.warmup_steps:
        return (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / (args.train_steps - args.warmup_steps)  # from 0 to 1
    return 0.5 * (1 + math.cos(math.pi * done))


# ---------------------------------------------- Data ----------------------------------------------
def open_shard(file, args):
    """A shard's tokens. The file holds 256 int32 (magic number, version, number of tokens, zeros),
    then the tokens as uint16."""
    header = np.fromfile(file, dtype="<i4", count=256)
    if args.memory_map:
        tokens = np.memmap(file, dtype="<u2", mode="r", offset=1024)
    else:
        tokens = np.fromfile(file, dtype="<u2", offset=1024).astype(np.int64)  # 8 bytes per token
    assert header[:3].tolist() == [20240520, 1, len(tokens)], f"{file} is not a whole token shard"
    return tokens


def token_batches(pattern, step_tokens, args, rank, world_size, device):
    """Yields this rank's micro-batches without end: inputs and targets, each (B, T) int64.

    Blocks of B * T tokens go to the ranks round-robin: step_tokens hold the same tokens for any
    number of ranks. A shard's tail shorter than step_tokens is skipped.
    """
    B, T = args.micro_batch_size, args.seq_len
    assert step_tokens % (B * T * world_size) == 0, (
        f"{step_tokens} tokens do not divide into {B} x {T} on each of {world_size} ranks")
    files = sorted(glob.glob(pattern))
    # In tokens of 2 bytes; the header of 1,024 bytes takes the room of 512.
    longest = max((os.path.getsize(file) // 2 - 512 for file in files), default=0)
    assert longest > step_tokens, f"no file {pattern} has more than {step_tokens} tokens"
    for file in itertools.cycle(files):
        shard = open_shard(file, args)
        end = (len(shard) - 1) // step_tokens * step_tokens  # whole steps; last target: shard[end]
        for start in range(rank * B * T, end, world_size * B * T):
            tokens = torch.from_numpy(shard[start : start + B * T + 1].astype(np.int64))
            assert tokens.max() < args.vocab_size, f"{file} has ids >= vocab_size"
            if device.type == "cuda":
                tokens = tokens.pin_memory()  # lets the copy be asynchronous
            tokens = tokens.to(device, non_blocking=True)
            yield tokens[:-1].view(B, T), tokens[1:].view(B, T)


# --------------------------------------------- Model ---------------------------------------------
class Norm(nn.Module):
    """LayerNorm over the last dimension, with a weight and a bias (arXiv 1607.06450)."""
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(args.model_dim))
        self.bias = nn.Parameter(torch.zeros(args.model_dim))

    def forward(self, x):
        return F.layer_norm(x, (x.size(-1),), self.weight, self.bias, eps=1e-5)


class CausalSelfAttention(nn.Module):
    """Causal multi-head attention: each token attends to itself and to earlier tokens."""
    def __init__(self, args):
        super().__init__()
        assert args.model_dim % args.num_heads == 0, "model_dim is not a multiple of num_heads"
        self.head_dim = args.model_dim // args.num_heads
        self.fused = args.fused_attention
        self.c_q = nn.Linear(args.model_dim, args.model_dim)
        self.c_k = nn.Linear(args.model_dim, args.model_dim)
        self.c_v = nn.Linear(args.model_dim, args.model_dim)
        self.c_proj = nn.Linear(args.model_dim, args.model_dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (project(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
                   for project in (self.c_q, self.c_k, self.c_v))
        if self.fused:  # computes tiles of scores on the chip, and again in the backward pass
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / self.head_dim**0.5  # (B, H, T, T)
            # True where a key is later than its query.
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Linear map to four times the width, GELU, linear map back."""
    def __init__(self, args):
        super().__init__()
        hidden_dim = 4 * args.model_dim
        self.c_fc = nn.Linear(args.model_dim, hidden_dim)
        self.c_proj = nn.Linear(hidden_dim, args.model_dim)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    """One transformer layer: attention and MLP, each added to the residual stream."""
    def __init__(self, args):
        super().__init__()
        self.attn_norm = Norm(args)
        self.attn = CausalSelfAttention(args)
        self.mlp_norm = Norm(args)
        self.mlp = MLP(args)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Token ids to next-token logits, or to the mean loss if targets are given."""
    def __init__(self, args):
        super().__init__()
        self.bf16 = args.bf16
        self.embed = nn.Embedding(args.vocab_size, args.model_dim)
        self.pos_embed = nn.Embedding(args.seq_len, args.model_dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.norm = Norm(args)
        self.lm_head = nn.Linear(args.model_dim, args.vocab_size, bias=False)
        self.embed.weight = self.lm_head.weight  # one tied matrix (arXiv 1608.05859)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.ndim == 2:  # 2 * num_layers outputs of c_proj add up in the residual stream
                summands = 2 * args.num_layers if name.endswith("c_proj.weight") else 1
                nn.init.normal_(param, std=0.02 / summands**0.5)

    def forward(self, inputs, targets=None):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.bf16):
            positions = torch.arange(inputs.size(1), device=inputs.device)  # (T,)
            x = self.embed(inputs) + self.pos_embed(positions)  # (B, T, C)
            for block in self.blocks:
                x = block(x)
            logits = self.lm_head(self.norm(x)).float()  # (B, T, V)
            if targets is None:
                return logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ------------------------------------------- Optimizer -------------------------------------------
ADAM_BACKENDS = ("apex", "fused", "foreach", "loop")  # in order of launches, fewest first


def adamw_of(backend, groups, args):
    """AdamW for these parameter groups with the given backend."""
    settings = dict(lr=args.adam_lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps,
                    weight_decay=args.weight_decay)
    if backend == "apex":
        return importlib.import_module("apex.optimizers").FusedAdam(groups, **settings)
    return torch.optim.AdamW(groups, **settings, foreach=backend == "foreach",
                             fused=backend == "fused")


def find_adam_backend(device, args):
    """The first backend that works on this device, or the forced one, and why others were skipped.

    Each is tried with one step, because some can be constructed on devices where they cannot run.
    """
    backends, skipped = [args.adam_backend], ""
    if args.adam_backend == "auto":
        backends = ADAM_BACKENDS
    assert set(backends) <= set(ADAM_BACKENDS), (
        f"adam_backend={args.adam_backend}: choose auto, {', '.join(ADAM_BACKENDS)}")
    working = None
    for backend in backends:
        scratch = nn.Parameter(torch.zeros(8, device=device))
        scratch.grad = torch.ones_like(scratch)
        try:
            adamw_of(backend, [dict(params=[scratch])], args).step()
            working = backend
            break
        except (ImportError, RuntimeError) as error:
            skipped += f" (not {backend}: {str(error).splitlines()[0]})"
    assert working, f"no AdamW backend works here{skipped}; leave adam_backend=auto"
    return working, skipped


def make_adamw(groups, args):
    """AdamW for these parameter groups with the first backend that works on their device."""
    backend, _ = find_adam_backend(groups[0]["params"][0].device, args)
    return adamw_of(backend, groups, args)


POLAR_EXPRESS = (  # a, b, c of each iteration, computed as in arXiv 2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(matrices, bf16):
    """Approximates the nearest matrices whose singular values are all 1 (arXiv 2505.16932).

    matrices: (..., rows, columns). Maps each U S V^T to about U V^T, in bfloat16 if `bf16`.
    """
    X = matrices.bfloat16() if bf16 else matrices
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT  # X @ X.mT is then the smaller of the two products
    X = X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)  # all singular values below 1
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    return X.mT if tall else X


def even_out(update, second_moment):
    """Divides each neuron's update by its running RMS, as NorMuon does (arXiv 2510.05491).

    update: (..., rows, columns). A neuron is a row, or a column if the matrix is wide. Returns the
    result at the update's norm; changes second_moment, (..., rows, 1) or (..., 1, columns).
    """
    dim = -2 if second_moment.size(-2) == 1 else -1
    square = update.square().mean(dim, keepdim=True)
    second_moment.lerp_(square, 0.05)  # a mean over about 20 steps
    scale = second_moment.clamp_min(1e-10).rsqrt()
    evened = update * scale
    norms = [t.norm(dim=(-2, -1), keepdim=True) for t in (update, evened)]  # of each matrix
    return evened * (norms[0] / norms[1].clamp_min(1e-10))


def muon_update(param, grad, state, lr, args):
    """Updates matrices with their orthogonalised Nesterov momentum; changes `param` and `state`.

    param, grad: stacks (n, rows, columns). lr: a tensor; a number would be a constant of the graph.
    """
    momentum = state["momentum"]
    momentum.lerp_(grad, 1 - args.muon_momentum)
    update = polar_express(grad.lerp(momentum, args.muon_momentum), args.bf16).float()
    if args.second_moment:
        update = even_out(update, state["second_moment"])
    lr = lr * max(1, param.size(-2) / param.size(-1)) ** 0.5  # updates have RMS 1 / sqrt(columns)
    decay = args.weight_decay * param
    if args.cautious_decay:
        decay = decay * (update * param >= 0)  # cautious decay (arXiv 2510.12402)
    param.sub_(lr * (update + decay))


def stacks_of(matrices, args):
    """Parameter groups: one for each shape of matrix, or for each matrix if not `stacked_muon`."""
    groups = {}
    for number, matrix in enumerate(matrices):
        groups.setdefault(matrix.shape if args.stacked_muon else number, []).append(matrix)
    return [dict(params=group, stacked=True) for group in groups.values()]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (https://kellerjordan.github.io/posts/muon), for 2-D parameters.

    A group's matrices share a shape and are updated as one stack; the first one has its state.
    """
    def __init__(self, params, args):
        super().__init__(params, dict(lr=args.muon_lr))
        self.args = args
        self.update = muon_update
        if args.compile:
            self.update = torch.compile(muon_update, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            state, stack = self.state[params[0]], torch.stack(params)
            if not state:
                state["momentum"] = torch.zeros_like(stack)
                if self.args.second_moment:
                    wide = stack.size(1) < stack.size(2)
                    square = torch.zeros_like(stack[:, :1] if wide else stack[..., :1])
                    state["second_moment"] = square
            grad = torch.stack([param.grad for param in params])
            self.update(stack, grad, state, torch.tensor(group["lr"]), self.args)
            torch._foreach_copy_(params, list(stack))


def is_sharded(args):
    """Whether the optimizer steps are split among several ranks."""
    return args.sharded and dist.get_world_size() > 1


class Sharded(torch.optim.Optimizer):
    """Optimizer steps split among the ranks; each keeps its share's state (ZeRO, arXiv 1910.02054).

    optimizers: one for each parameter group. A group is packed into one zero-padded tensor, a stack
    of matrices or a flat vector, and its optimizer updates only this rank's share.
    """
    @torch.no_grad()
    def __init__(self, optimizers):
        super().__init__([dict(optimizer.param_groups[0]) for optimizer in optimizers], {})
        self.optimizers = optimizers
        self.shares, self.share_grads = [], []
        for group, optimizer in zip(self.param_groups, optimizers, strict=True):
            packed = self.pack(group, group["params"])
            # cloned, so that the rest of the packed tensor is freed
            share = packed.chunk(dist.get_world_size())[dist.get_rank()].clone()
            grad = torch.empty_like(share)
            self.shares.append(share)
            self.share_grads.append(grad)
            own = list(share) if "stacked" in group else [share]
            for param, param_grad in zip(own, grad.view(len(own), *own[0].shape), strict=True):
                param.grad = param_grad
            optimizer.param_groups[0]["params"] = own

    def pack(self, group, tensors):
        """Packs a group's tensors into (n, rows, columns) or (n,); the world size divides n."""
        if "stacked" in group:
            packed = torch.stack(tensors)
        else:
            packed = torch.cat([tensor.flatten() for tensor in tensors])
        padding = packed.new_zeros(-len(packed) % dist.get_world_size(), *packed.shape[1:])
        return torch.cat([packed, padding])

    @torch.no_grad()
    def step(self):
        packs, scatters, gathers = [], [], []
        # First, all groups start to average their gradients.
        for group, grad in zip(self.param_groups, self.share_grads, strict=True):
            packed = self.pack(group, [param.grad for param in group["params"]])
            packs.append(packed)
            scatters.append(
                dist.reduce_scatter_tensor(grad, packed, op=dist.ReduceOp.AVG, async_op=True))
        # Then, as the gradients of a group arrive, this rank updates its share and sends it.
        for i, optimizer in enumerate(self.optimizers):
            scatters[i].wait()
            optimizer.param_groups[0]["lr"] = self.param_groups[i]["lr"]
            optimizer.step()
            # The packed gradients are no longer needed: their buffer receives the new weights.
            gathers.append(dist.all_gather_into_tensor(packs[i], self.shares[i], async_op=True))
        # Finally, the shares of all ranks are copied into the model.
        for group, packed, gather in zip(self.param_groups, packs, gathers, strict=True):
            gather.wait()
            params = group["params"]
            sizes = [1 if "stacked" in group else param.numel() for param in params]
            for param, piece in zip(params, packed[: sum(sizes)].split(sizes), strict=True):
                param.copy_(piece.view_as(param))

    def state_dict(self):  # this rank's shares of weights and states
        return dict(shares=self.shares, states=[part.state_dict() for part in self.optimizers])

    def load_state_dict(self, saved):
        torch._foreach_copy_(self.shares, saved["shares"])
        for optimizer, state in zip(self.optimizers, saved["states"], strict=True):
            optimizer.load_state_dict(state)


# -------------------------------------------- Training --------------------------------------------
class Log:
    """Rank 0's log: the script's text, then lines that also appear on the screen."""
    def __init__(self, args):
        self.train_steps = args.train_steps
        self.file = None  # for all ranks but 0
        if dist.get_rank() == 0:
            os.makedirs(args.log_dir, exist_ok=True)
            self.file = open(Path(args.log_dir, "log.txt"), "x", encoding="utf-8")  # x: must be new
            print(Path(__file__).read_text(encoding="utf-8") + "=" * 100, file=self.file)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        environment = dict(python=platform.python_version(), torch=torch.__version__,
                           cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(),
                           world_size=dist.get_world_size(), device=name)
        self.print0(f"environment:{json.dumps(environment)}")
        self.print0(f"hyperparameters:{json.dumps(asdict(args))}\n" + "=" * 100)

    def print0(self, line):
        if self.file:
            print(line, flush=True)
            print(line, file=self.file, flush=True)

    def step(self, step, training_time_ms, loss_text):
        self.print0(f"step:{step}/{self.train_steps} {loss_text}train_time:{training_time_ms:.0f}ms"
                    f" step_avg:{training_time_ms / max(step, 1):.2f}ms")


class Clock:
    """The training time: it starts after the kernels' warm-up and pauses during validations."""
    def __init__(self, device):
        self.synchronize = torch.get_device_module(device).synchronize

    def start(self, elapsed_ms=0.0):
        self.synchronize()  # waits for the device to finish all queued work
        self.start_time = time.perf_counter() - elapsed_ms / 1000

    def elapsed_ms(self):  # does not wait for the device: exact only right after synchronize()
        return 1000 * (time.perf_counter() - self.start_time)

    @contextmanager
    def paused(self):
        self.synchronize()  # steps may still be running
        elapsed_ms = self.elapsed_ms()
        yield
        self.start(elapsed_ms)


def make_optimizers(model, args):
    """Optimizers of all parameters; lr_multiplier scales each group's initial_lr."""
    hidden_matrix_params = [param for param in model.blocks.parameters() if param.ndim == 2]
    embed_params = [model.embed.weight, model.pos_embed.weight]
    scalar_params = [param for param in model.parameters() if param.ndim == 1]
    adam_groups = [dict(params=embed_params), dict(params=scalar_params, weight_decay=0.0)]
    muon_groups = stacks_of(hidden_matrix_params, args)
    if not args.muon:
        adam_groups, muon_groups = muon_groups + adam_groups, []
    optimizers = [make_adamw(adam_groups, args)]
    if muon_groups:
        optimizers.append(Muon(muon_groups, args))
    if is_sharded(args):
        optimizers = [Sharded([Muon([group], args) for group in muon_groups]
                              + [make_adamw([group], args) for group in adam_groups])]
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in param_groups:
        group["initial_lr"] = group["lr"]
    optimized = [param for group in param_groups for param in group["params"]]
    assert sorted(map(id, optimized)) == sorted(map(id, model.parameters()))  # each parameter once
    return optimizers


def set_schedules(optimizers, step, args):
    """Sets each group's learning rate for this step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_multiplier(step, args)


def warm_up(model, optimizers, batches, args):
    """Runs a few training steps to prepare the kernels, then restores all states."""
    initial_states = deepcopy([part.state_dict() for part in (model, *optimizers)])
    for inputs, targets in itertools.islice(batches, args.kernel_warmup_steps):
        model(inputs, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part, state in zip((model, *optimizers), initial_states, strict=True):
        part.load_state_dict(state)


@torch.no_grad()
def validate(model, batches, micro_steps):
    """The mean loss over micro_steps batches of every rank."""
    model.eval()
    batches = itertools.islice(batches, micro_steps)
    loss = torch.stack([model(inputs, targets) for inputs, targets in batches]).mean()
    model.train()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def train(model, optimizers, train_batches, load_val, log, clock, args):
    """Takes train_steps optimizer steps; load_val() restarts the data for each validation."""
    micro_tokens = args.micro_batch_size * args.seq_len * dist.get_world_size()  # over all ranks
    grad_accum_steps = args.total_batch_size // micro_tokens
    clock.start()
    for step in range(args.train_steps + 1):
        last_step = step == args.train_steps
        if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
            with clock.paused():
                val_loss = validate(model, load_val(), args.val_tokens // micro_tokens)
            log.step(step, clock.elapsed_ms(), f"val_loss:{val_loss:.4f} ")
        if last_step:
            break

        train_loss = 0.0
        for micro_step in range(grad_accum_steps):
            inputs, targets = next(train_batches)
            # Gradients accumulate locally; only the last micro-step averages them over the ranks.
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            loss = model(inputs, targets)
            (loss / grad_accum_steps).backward()
            train_loss += loss.detach() / grad_accum_steps
        set_schedules(optimizers, step, args)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss_due = args.train_loss_every > 0 and (step + 1) % args.train_loss_every == 0
        if loss_due:
            dist.all_reduce(train_loss, op=dist.ReduceOp.AVG)
        log.step(step + 1, clock.elapsed_ms(), f"train_loss:{train_loss:.4f} " if loss_due else "")


def init_distributed():
    """Joins the ranks that torchrun started, or a world of one; returns this rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu")
    torch.get_device_module(device).set_device(device)
    rendezvous = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None,
                            timeout=timedelta(minutes=30), **rendezvous)  # compilation is slow
    return device


def main(args):
    """Trains a model and logs its losses; one process per GPU."""
    device = init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log, clock = Log(args), Clock(device)
    torch.manual_seed(args.seed)
    model = raw_model = GPT(args).to(device)
    if args.compile:
        torch._dynamo.config.optimize_ddp = world_size > 1  # splits graphs to send gradients early
        model = torch.compile(model, dynamic=False)  # static shapes: a new length recompiles
    if is_sharded(args):  # all ranks begin with rank 0's weights
        for param in raw_model.parameters():
            dist.broadcast(param.detach(), 0)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # averages gradients
    optimizers = make_optimizers(raw_model, args)
    log.print0("adamw:" + "".join(find_adam_backend(device, args)))
    load = partial(token_batches, args=args, rank=rank, world_size=world_size, device=device)
    load_train = partial(load, args.train_files, args.total_batch_size)
    load_val = partial(load, args.val_files, args.val_tokens)
    warm_up(model, optimizers, load_train(), args)
    if args.compile:
        seen = torch._dynamo.utils.counters
        log.print0(f"graphs:{seen['stats']['unique_graphs']} breaks:{seen['graph_break'].total()}")
    gc.collect()
    gc.freeze()  # timed garbage collections skip the objects made so far
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # excludes the warm-up's copy of all states
    train(model, optimizers, load_train(), load_val, log, clock, args)
    if device.type == "cuda":
        log.print0(f"peak_memory:{torch.cuda.max_memory_allocated() // 2**20}MiB")
    if args.save_checkpoint and rank == 0:
        checkpoint = dict(step=args.train_steps, hyperparameters=asdict(args),
                          model=raw_model.state_dict())
        torch.save(checkpoint, Path(args.log_dir, "checkpoint.partial"))
        os.replace(Path(args.log_dir, "checkpoint.partial"), Path(args.log_dir, "checkpoint.pt"))
    del model
    gc.unfreeze()  # so that collect() frees DDP's reference cycle, too:
    gc.collect()  # the threads that it keeps alive could crash the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
