"""
05j one qkv matrix: queries, keys and values come from one product

Trains a language model on FineWeb, a corpus of web pages, to a validation loss of 3.28. The NanoGPT
speedrun asks how fast that can be done; these scripts retell it step by step.

Parent:  05i fp8 head
Changed: queries, keys and values are stored as one (3, C, C) parameter and come from one product;
         Muon takes it as a batch of three matrices
Record:  part of #20 by @leloykun, @fernbear.bsky.social, @YouJiacheng, @brendanh0gan, @scottjmaddox
         and @Grad62304977, 2025-01-16
Run:     python data/cached_fineweb10B.py N   (from the repository root; N shards of 100M tokens)
         torchrun --standalone --nproc_per_node=8 path/to/this/train_gpt.py  (the record: 8 GPUs)
         python tools/run_milestone.py ID (any machine; --scale tiny --dry-run prints the command)
"""

import argparse
import gc
import glob
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
from torch.nn.attention.flex_attention import BlockMask, flex_attention


# ---------------------------------------- Hyperparameters ----------------------------------------
@dataclass
class Hyperparameters:
    """Every setting you may want to change; the defaults follow the record."""
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: int = 10_485_760  # the same for every milestone, so that losses are comparable
    total_batch_size: int = 524_288  # tokens per optimizer step, all ranks
    seq_len: int = 65_536  # tokens per sequence: documents end to end
    micro_batch_size: int = 1  # sequences per forward pass per rank
    # model
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 128 for the tensor cores
    bos_id: int = 50256  # <|endoftext|>, with which every document begins
    num_layers: int = 12
    layer_without_attention: int = 7  # counted from 0; attention would help little in this layer
    value_embed_pattern: str = "012......012"  # each layer's table of value embeddings; . = none
    fp8_x_scale: float = 2.0  # scales the head's inputs into FP8's range
    fp8_weight_scale: float = 2.0**5  # scales the head's weights
    fp8_grad_scale: float = 2.0**13  # scales the gradients of the logits
    num_heads: int = 6  # 128 dimensions each; wide heads spend less time outside matrix products
    model_dim: int = 768
    attention_scale: float = 128**-0.5  # softmax scale: 1 / sqrt(head_dim)
    # optimizer and schedules
    muon_lr: float = 0.05  # roughly an update's singular values; twice that for c_fc, which is tall
    muon_momentum_start: float = 0.85
    muon_momentum: float = 0.95
    embed_lr: float = 0.6
    head_lr: float = 0.008
    scalar_lr: float = 0.04
    adam_beta1: float = 0.8
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8 * 524_288  # times a step's tokens, because gradients are sums over them
    train_steps: int = 1395
    scheduled_steps: int = 1395  # the step at which the cooldown ends
    cooldown_frac: float = 0.4  # share of scheduled_steps, so the cooldown scales with the run
    final_lr_multiplier: float = 0.1
    momentum_warmup_steps: int = 300
    window_end: int = 1728  # tokens that a token sees at the end, rounded up to whole tiles
    tile_size: int = 128  # mask tiles are tile_size queries by tile_size keys
    # run
    val_loss_every: int = 125  # steps between validations; 0 = only after the last step
    train_loss_every: int = 0  # steps between logged train losses; each waits for the GPU; 0 = none
    log_dir: str = field(default_factory=lambda: time.strftime(f"logs/%Y%m%d-%H%M%S-{os.getpid()}"))
    save_checkpoint: bool = False
    seed: int = 0
    kernel_warmup_steps: int = 3  # untimed steps that compile the kernels, undone afterwards
    compile: bool = torch.cuda.is_available()
    bf16: bool = torch.cuda.is_available()
    use_flex_attention: bool = torch.cuda.is_available()  # on a CPU it has no backward pass
    use_fp8: bool = field(default_factory=lambda: (  # Ada, Hopper and later GPUs multiply in FP8
        torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)))


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
    """1, then linear decay to final_lr_multiplier at scheduled_steps (arXiv 2405.18392)."""
    remaining = min(1.0, max(0.0, 1 - step / args.scheduled_steps) / args.cooldown_frac)
    return remaining + (1 - remaining) * args.final_lr_multiplier


def muon_momentum(step, args):
    """Linear from muon_momentum_start to muon_momentum over momentum_warmup_steps."""
    progress = min(1.0, step / args.momentum_warmup_steps)
    return (1 - progress) * args.muon_momentum_start + progress * args.muon_momentum


def window_size(step, args):
    """Linear from 0 to window_end, rounded up to whole tiles, at least one."""
    tiles = math.ceil(args.window_end * step / args.train_steps / args.tile_size)
    return max(1, tiles) * args.tile_size


# ---------------------------------------------- Data ----------------------------------------------
def open_shard(file):
    """A shard's uint16 tokens; its header is 256 int32: magic number, version, count, zeros."""
    header = np.fromfile(file, dtype="<i4", count=256)
    tokens = np.memmap(file, dtype="<u2", mode="r", offset=1024)
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
    shards = [open_shard(file) for file in sorted(glob.glob(pattern))]
    assert max(map(len, shards), default=0) > step_tokens, (
        f"no file {pattern} has more than {step_tokens} tokens")
    for shard in itertools.cycle(shards):
        end = (len(shard) - 1) // step_tokens * step_tokens  # whole steps; last target: shard[end]
        for start in range(rank * B * T, end, world_size * B * T):
            tokens = torch.from_numpy(shard[start : start + B * T + 1].astype(np.int64))
            assert tokens.max() < args.vocab_size, f"{shard.filename} has ids >= vocab_size"
            if device.type == "cuda":
                tokens = tokens.pin_memory()  # lets the copy be asynchronous
            tokens = tokens.to(device, non_blocking=True)
            yield tokens[:-1].view(B, T), tokens[1:].view(B, T)


# -------------------------------------------- Kernels --------------------------------------------
def quantize(x, scale, dtype):
    """scale * x, clamped to the range of `dtype` and rounded to it."""
    return (scale * x).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def fp8_product(a, a_scale, b, b_scale, dtype, fast=False):
    """a (M, K) times b (N, K) transposed, as `dtype`, divided by the scales of both."""
    # Tensor cores need both operands contiguous along K; fast accumulation keeps fewer bits.
    inverses = [torch.full((), 1 / scale, device=a.device) for scale in (a_scale, b_scale)]
    return torch._scaled_mm(a, b.T, *inverses, out_dtype=dtype, use_fast_accum=fast)


# --------------------------------------------- Model ---------------------------------------------
def norm(x):
    """RMS norm over the last dimension, without parameters (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)  # for bfloat16 x, too


def init_uniform(weight):
    """Fills a weight (..., out, in) uniformly, with standard deviation 0.5 / sqrt(in)."""
    bound = 0.5 * (3 / weight.size(-1)) ** 0.5
    return nn.init.uniform_(weight, -bound, bound)


class Linear(nn.Linear):
    """nn.Linear that casts its float32 weight to the dtype of its input."""
    def reset_parameters(self):
        init_uniform(self.weight)  # nn.Linear's standard deviation is 0.58 / sqrt(in)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class FP8Linear(torch.autograd.Function):
    """x (N, C) times weight (V, C) transposed, with FP8 (arXiv 2209.05433) forward and backward."""
    @staticmethod
    def forward(ctx, x, weight, x_scale, weight_scale, grad_scale):
        x8 = quantize(x, x_scale, torch.float8_e4m3fn)  # 3 mantissa bits, at most 448
        weight8 = quantize(weight, weight_scale, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, weight8)
        ctx.scales = x_scale, weight_scale, grad_scale
        return fp8_product(x8, x_scale, weight8, weight_scale, x.dtype, fast=True)  # (N, V)

    @staticmethod
    def backward(ctx, grad):
        x8, weight8 = ctx.saved_tensors
        x_scale, weight_scale, grad_scale = ctx.scales
        # 2 mantissa bits, but up to 57,344, because gradients span more orders of magnitude.
        grad8 = quantize(grad, grad_scale, torch.float8_e5m2)
        grad_x = fp8_product(grad8, grad_scale, weight8.T.contiguous(), weight_scale, grad.dtype)
        grad_weight = fp8_product(  # computed as (C, V), which is faster; autograd casts it
            x8.T.contiguous(), x_scale, grad8.T.contiguous(), grad_scale, torch.float32).T
        return grad_x, grad_weight, None, None, None


class Head(nn.Module):
    """Linear map to the logits, initially zero; computed in FP8 in training if use_fp8."""
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(args.vocab_size, args.model_dim))
        self.use_fp8 = args.use_fp8
        self.scales = args.fp8_x_scale, args.fp8_weight_scale, args.fp8_grad_scale

    def forward(self, x):  # (B, T, C)
        if not (self.use_fp8 and self.training):
            return F.linear(x, self.weight.to(x.dtype))
        return FP8Linear.apply(x.flatten(0, 1), self.weight, *self.scales).view(*x.shape[:2], -1)


class Rotary(nn.Module):
    """Rotary positions (arXiv 2104.09864): scores depend on positions only through distances."""
    def __init__(self, head_dim, seq_len):
        super().__init__()
        # At position t, dimensions (i, i + D/2) rotate by t * frequencies[i]. Half the frequencies
        # fall geometrically from 1 to 1 / 1024, half are 0. The last D/2 negate sines, not cosines.
        rotating = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
        fixed = torch.zeros(head_dim // 4)
        frequencies = torch.cat((rotating, fixed, -rotating, fixed))  # (D,)
        angles = torch.outer(torch.arange(seq_len), frequencies)[:, None]  # (T, 1, D)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):  # (B, T, H, D); computed in float32, like the tables
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # halves (x1, x2) become (x2, x1)
        return (x * self.cos[: x.size(1)] + swapped * self.sin[: x.size(1)]).type_as(x)


def attention_mask(inputs, window, args):
    """The mask of `inputs` (B, T): a token sees its document, as far back as `window` reaches.

    The window is rounded up to whole tiles, the token's own included. FlexAttention
    (arXiv 2412.05496) skips tiles in which nothing is visible and applies the rule in partly
    visible ones; fully visible ones need none. The fallback is a dense (B, 1, T, T) mask for SDPA.
    """
    B, T = inputs.shape
    tile = args.tile_size
    assert args.compile or not args.use_flex_attention, (
        "uncompiled FlexAttention ignores the tiles, so the window: add --use_flex_attention=False")
    assert args.use_flex_attention or T <= 16_384, (
        f"a dense mask of {T} x {T} tokens is too large; lower seq_len")
    inputs = F.pad(inputs, (0, -T % tile))  # (B, N * tile), N whole tiles
    document_ids = (inputs == args.bos_id).cumsum(1, dtype=torch.int32)  # (B, T)

    def visible(b, h, q_idx, k_idx):
        q_idx, k_idx = q_idx.int(), k_idx.int()  # 64-bit comparisons are slower
        return (q_idx >= k_idx) & (document_ids[b, q_idx] == document_ids[b, k_idx])

    # Testing all T x T pairs is slow. Document numbers never decrease, so those at the ends of two
    # tiles show whether any of their pairs of tokens, or all pairs, share a document.
    first, last = document_ids[:, ::tile], document_ids[:, tile - 1 :: tile]  # (B, N)
    k_tile = torch.arange(first.size(1), dtype=torch.int32, device=inputs.device)
    q_tile = k_tile[:, None]
    any_pair = (q_tile >= k_tile) & (first[:, :, None] <= last[:, None])  # (B, N, N)
    all_pairs = (q_tile > k_tile) & (last[:, :, None] == first[:, None])
    near = (q_tile - k_tile) * tile < window

    def listed(tiles):
        """Each row's count of near tiles (B, 1, N) and its tiles (B, 1, N, N), near ones first."""
        nearest_first = torch.where(tiles, k_tile, -1).sort(descending=True).values.clamp(min=0)
        return (tiles & near).sum(-1, dtype=torch.int32)[:, None], nearest_first[:, None]

    if args.use_flex_attention:
        return BlockMask.from_kv_blocks(*listed(any_pair & ~all_pairs), *listed(all_pairs),
                                        BLOCK_SIZE=tile, mask_mod=visible, seq_lengths=(T, T))
    b, t = torch.arange(B, device=inputs.device), torch.arange(T, device=inputs.device)
    tiles = (any_pair & near).repeat_interleave(tile, 1).repeat_interleave(tile, 2)
    return (tiles[:, :T, :T] & visible(b[:, None, None], None, t[:, None], t))[:, None]


class CausalSelfAttention(nn.Module):
    """Multi-head attention: each token attends to the tokens that the mask lets it see."""
    def __init__(self, args, rotary):
        super().__init__()
        assert args.model_dim % args.num_heads == 0, "model_dim is not a multiple of num_heads"
        self.num_heads = args.num_heads
        # Muon orthogonalises the three matrices separately; forward multiplies by all at once.
        self.c_qkv = nn.Parameter(init_uniform(torch.empty(3, args.model_dim, args.model_dim)))
        self.c_proj = Linear(args.model_dim, args.model_dim, bias=False)
        nn.init.zeros_(self.c_proj.weight)
        self.rotary = rotary
        self.value_lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))  # weights of v, value embedding
        self.scale, self.use_flex_attention = args.attention_scale, args.use_flex_attention

    def forward(self, x, value_embed, mask):
        B, T, C = x.shape
        qkv = F.linear(x, self.c_qkv.flatten(0, 1).to(x.dtype))  # (B, T, 3 C)
        q, k, v = qkv.view(B, T, 3, self.num_heads, -1).unbind(2)  # (B, T, H, D)
        v = self.value_lambdas[0] * v
        if value_embed is not None:
            v = v + self.value_lambdas[1] * value_embed.view_as(v)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))  # unit RMS: |q @ k| <= head_dim
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D), as the kernels need
        if self.use_flex_attention:
            y = flex_attention(q, k, v, block_mask=mask, scale=self.scale)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Linear map to four times the width, squared ReLU (arXiv 2109.08668), linear map back."""
    def __init__(self, args):
        super().__init__()
        hidden_dim = 4 * args.model_dim
        self.c_fc = Linear(args.model_dim, hidden_dim, bias=False)
        self.c_proj = Linear(hidden_dim, args.model_dim, bias=False)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """One transformer layer; its branches add nothing initially: both output maps start at zero."""
    def __init__(self, args, rotary, layer):
        super().__init__()
        has_attention = layer != args.layer_without_attention
        self.attn = CausalSelfAttention(args, rotary) if has_attention else None
        self.value_table = args.value_embed_pattern[layer]
        self.mlp = MLP(args)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # weights of x and the embedding x0

    def forward(self, x, value_embeds, x0, mask):
        x_weight, embed_weight = self.lambdas
        x = x_weight * x + embed_weight * x0  # a learned shortcut from the embedding
        if self.attn is not None:
            x = x + self.attn(norm(x), value_embeds.get(self.value_table), mask)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Token ids to next-token logits, or to the mean loss if targets are given."""
    def __init__(self, args):
        super().__init__()
        assert args.num_layers % 2 == 0, "num_layers must be even: skips pair up its two halves"
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.model_dim)  # starts as N(0, 1)
        # Value embeddings: a value residual (arXiv 2410.17897) from learned tables.
        pattern = args.value_embed_pattern
        assert len(pattern) == args.num_layers, "value_embed_pattern needs num_layers symbols"
        self.value_embeds = nn.ModuleDict({name: nn.Embedding(args.vocab_size, args.model_dim)
                                           for name in sorted(set(pattern) - {"."})})
        rotary = Rotary(args.model_dim // args.num_heads, args.seq_len)  # one for all layers
        self.blocks = nn.ModuleList(Block(args, rotary, i) for i in range(args.num_layers))
        self.skip_weights = nn.Parameter(torch.ones(args.num_layers // 2))
        self.lm_head = Head(args)
        if args.bf16:
            self.embed.bfloat16()  # the residual stream takes its dtype
            self.value_embeds.bfloat16()

    def forward(self, inputs, targets=None, window=None):
        if window is None:  # the last one, with which the trained model is sampled
            window = torch.tensor(window_size(self.args.train_steps, self.args)).to(inputs.device)
        mask = attention_mask(inputs, window, self.args)  # for all layers
        x = x0 = norm(self.embed(inputs))  # (B, T, C)
        value_embeds = {name: embed(inputs) for name, embed in self.value_embeds.items()}
        skips = []
        # A U-net (arXiv 1505.04597): the first half pushes its outputs, the second half pops them.
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x, value_embeds, x0, mask)
            skips.append(x)
        for block, weight in zip(self.blocks[half:], self.skip_weights, strict=True):
            x = x + weight * skips.pop()  # the first pop returns x itself, as in the record
            x = block(x, value_embeds, x0, mask)
        logits = self.lm_head(norm(x)).float()  # (B, T, V)
        # Softcap (arXiv 2408.00118): 15 tanh(z / 15) of logits z, written as a faster sigmoid.
        logits = 30 * torch.sigmoid(logits / 7.5) - 15
        if targets is None:
            return logits
        # Cross-entropy. The cap keeps exp finite; unlike gather, a masked sum fuses with exp's sum.
        is_target = torch.arange(logits.size(-1), device=logits.device) == targets[..., None]
        target_logits = torch.where(is_target, logits, 0).sum(-1)  # (B, T)
        return (logits.exp().sum(-1).log() - target_logits).mean()


# ------------------------------------------- Optimizer -------------------------------------------
def newton_schulz(matrices, dtype):
    """Orthogonalises matrices (..., m, n), m <= n, computing in `dtype`; bfloat16 is enough.

    Five steps of X <- aX + b(XX')X + c(XX')^2 X (kellerjordan.github.io/posts/muon) keep singular
    vectors. Singular values in [0.0015, 1] end in [0.68, 1.20], not at 1: the price of speed.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0, so that small singular values grow fast
    X = matrices.to(dtype).flatten(0, -3)  # (N, m, n)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value is above 1
    for _ in range(5):
        A = X @ X.mT  # (N, m, m)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # bA + cAA
        X = torch.baddbmm(X, B, X, beta=a)  # aX + BX
    return X.view_as(matrices)


def wide(matrix):
    """The matrix, transposed (a view) if it is tall, so that c_fc and c_proj share a batch."""
    return matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix


def muon_update(grads, momentum_buffer, momentum, dtype):
    """The orthogonalised Nesterov momentum of matrices (..., m, n); changes momentum_buffer."""
    momentum_buffer.lerp_(grads, 1 - momentum)  # a mean, not a sum; newton_schulz drops the scale
    return newton_schulz(grads.lerp(momentum_buffer, momentum), dtype)


class Muon(torch.optim.Optimizer):
    """Subtracts lr sqrt(max(1, rows / cols)) times the orthogonalised Nesterov momentum."""
    def __init__(self, params, lr, momentum, bf16, compiled):
        sizes = dict.fromkeys(param.numel() for param in params)  # one batch per size
        groups = [dict(params=[p for p in params if p.numel() == size]) for size in sizes]
        super().__init__(groups, dict(lr=lr, momentum=momentum))
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.muon_update = torch.compile(muon_update, dynamic=False, disable=not compiled)

    @torch.no_grad()
    def step(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        gathers = []  # in flight: updates of one size are sent while the next are computed
        for group in self.param_groups:
            params = group["params"]
            share = math.ceil(len(params) / world_size)  # parameters per rank, at most
            matrices = params[rank * share : (rank + 1) * share]
            # All ranks send the same size, so shares are zero-padded.
            updates = params[0].new_zeros(share, *wide(params[0]).shape, dtype=self.dtype)
            if matrices:
                grads = torch.stack([wide(matrix.grad) for matrix in matrices])  # (N, m, n)
                state = self.state[matrices[0]]  # it holds the momentum of the whole batch
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(grads)
                # A tensor: a new Python float would recompile.
                momentum = torch.tensor(group["momentum"], dtype=torch.float64)
                updates[: len(matrices)] = self.muon_update(
                    grads, state["momentum_buffer"], momentum, self.dtype)
            gathered = updates.new_empty(world_size * share, *updates.shape[1:])
            gather = dist.all_gather_into_tensor(gathered, updates, async_op=True)
            gathers.append((group, gathered, gather))
        for group, gathered, gather in gathers:
            gather.wait()
            params = group["params"]
            for param, update in zip(params, gathered[: len(params)], strict=True):
                rows, cols = param.shape[-2:]
                # Rows of a tall orthogonal matrix have mean squared length cols / rows: make it 1.
                scale = max(1, rows / cols) ** 0.5
                wide(param).add_(update, alpha=-group["lr"] * scale)


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
    """Muon for hidden matrices, Adam for the rest; lr_multiplier scales each group's initial_lr."""
    hidden_matrix_params = [param for param in model.blocks.parameters() if param.ndim >= 2]
    scalar_params = [param for param in model.parameters() if param.ndim < 2]
    adam_groups = [
        dict(params=[model.embed.weight, *model.value_embeds.parameters()], lr=args.embed_lr),
        dict(params=[model.lm_head.weight], lr=args.head_lr),
        dict(params=scalar_params, lr=args.scalar_lr),
    ]
    adam = torch.optim.Adam(adam_groups, betas=(args.adam_beta1, args.adam_beta2),
                            eps=args.adam_eps, fused=True)
    muon = Muon(hidden_matrix_params, lr=args.muon_lr, momentum=args.muon_momentum, bf16=args.bf16,
                compiled=args.compile)
    param_groups = adam.param_groups + muon.param_groups
    for group in param_groups:
        group["initial_lr"] = group["lr"]
    optimized = [param for group in param_groups for param in group["params"]]
    assert sorted(map(id, optimized)) == sorted(map(id, model.parameters()))  # each parameter once
    return [adam, muon]


def set_schedules(optimizers, step, args):
    """Sets each group's learning rate, and Muon's momentum, for this step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_multiplier(step, args)
            if "momentum" in group:
                group["momentum"] = muon_momentum(step, args)


def warm_up(model, optimizers, batches, args):
    """Runs a few training steps to compile the kernels, then restores all states."""
    initial_states = deepcopy([part.state_dict() for part in (model, *optimizers)])
    for inputs, targets in itertools.islice(batches, args.kernel_warmup_steps):
        window = inputs.new_full((), window_size(args.train_steps, args), dtype=torch.int32)
        model(inputs, targets, window).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part, state in zip((model, *optimizers), initial_states, strict=True):
        part.load_state_dict(state)


@torch.no_grad()
def validate(model, batches, micro_steps, window):
    """The mean loss over micro_steps batches of every rank."""
    model.eval()
    batches = itertools.islice(batches, micro_steps)
    loss = torch.stack([model(inputs, targets, window) for inputs, targets in batches]).mean()
    model.train()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def train(model, optimizers, train_batches, load_val, log, clock, args):
    """Takes train_steps optimizer steps; load_val() restarts the data for each validation."""
    device = next(model.parameters()).device
    micro_tokens = args.micro_batch_size * args.seq_len * dist.get_world_size()  # over all ranks
    grad_accum_steps = args.total_batch_size // micro_tokens
    clock.start()
    for step in range(args.train_steps + 1):
        last_step = step == args.train_steps
        # A number would recompile the model; a copy would wait for the device; a fill does neither.
        window = torch.full((), window_size(step, args), dtype=torch.int32, device=device)
        if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
            with clock.paused():
                val_loss = validate(model, load_val(), args.val_tokens // micro_tokens, window)
            log.step(step, clock.elapsed_ms(), f"val_loss:{val_loss:.4f} ")
        if last_step:
            break

        train_loss = 0.0
        for inputs, targets in itertools.islice(train_batches, grad_accum_steps):
            loss = model(inputs, targets, window)
            # The summed loss has logit gradients up to 1: the cap's steepest slope, 30 / 7.5 / 4.
            (loss * targets.numel()).backward()  # a sum over tokens: adam_eps is set for it
            train_loss += loss.detach() / grad_accum_steps
        for param in model.parameters():  # by hand: DDP's buckets would split the compiled graph
            dist.all_reduce(param.grad)
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
    model = raw_model = GPT(args).to(device)  # one seed, so all ranks start equal
    if args.compile:
        model = torch.compile(model, dynamic=False)
    optimizers = make_optimizers(raw_model, args)
    load = partial(token_batches, args=args, rank=rank, world_size=world_size, device=device)
    load_train = partial(load, args.train_files, args.total_batch_size)
    load_val = partial(load, args.val_files, args.val_tokens)
    warm_up(model, optimizers, load_train(), args)
    gc.collect()
    gc.freeze()  # garbage collections in the timed run skip the compiler's objects
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
