"""
06b yarn: rotary frequencies and the scale of scores follow the window

Trains a language model on FineWeb, a corpus of web pages, to a validation loss of 3.28. The NanoGPT
speedrun asks how fast that can be done; these scripts retell it step by step.

Parent:  06a first layer without mlp
Changed: when the window grows, slow rotary frequencies slow down and scores are scaled up, so the
         last validation can use a still longer window; scores start with a smaller scale; a longer
         cooldown; fewer steps
Record:  #31 by @classiclarryd, 2025-09-10: val loss 3.2785 after 0.66B tokens in 2.66 minutes on
         8xH100
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
import warnings
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn


# ---------------------------------------- Hyperparameters ----------------------------------------
@dataclass
class Hyperparameters:
    """Every setting you may want to change; the defaults follow the record."""
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: int = 10_485_760  # the same for every milestone, so that losses are comparable
    total_batch_size: int = 393_216  # tokens per optimizer step, all ranks
    train_seq_len: int = 49_152  # tokens per sequence: documents end to end, an eighth of a step
    val_seq_len: int = 262_144  # longer, so that fewer documents are cut
    micro_batch_size: int = 1  # sequences per forward pass per rank
    max_document_len: int = 2048  # longer training documents are cut, so that more fit in a batch
    # model
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 128 for the tensor cores
    bos_id: int = 50256  # <|endoftext|>, with which every document begins
    num_layers: int = 12
    layer_without_attention: int = 7  # counted from 0; attention would help little in this layer
    layer_without_mlp: int = 0  # counted from 0; without this MLP a step is cheaper
    value_embed_pattern: str = "012......012"  # each layer's table of value embeddings; . = none
    window_pattern: str = "LSSSLSSLSSSL"  # windows of layers with attention: L = long, S = short
    gate_channels: int = 12  # gates are computed from this many leading channels
    fp8_x_scale: float = 448 / 768**0.5  # maps head inputs, at most sqrt(768), to FP8's 448
    fp8_weight_scale: float = 2.0**9  # as in the record; clamps the head's weights beyond 448 / 2^9
    fp8_grad_scale: float = 448.0  # logit gradients, see train, are at most 1; e5m2 holds 57,344
    num_heads: int = 6  # 128 dimensions each; wide heads spend less time outside matrix products
    model_dim: int = 768
    attention_scale: float = 0.1  # softmax scale at window_start; YaRN raises it
    # optimizer and schedules
    muon_lr: float = 0.05  # an update's singular values are about this, as no matrix is tall
    muon_momentum_start: float = 0.85
    muon_momentum: float = 0.95
    embed_lr: float = 0.6
    head_lr: float = 0.008
    scalar_lr: float = 0.04
    adam_beta1: float = 0.8
    adam_beta2: float = 0.95
    adam_eps: float = 8e-10  # 8 times the record's: here gradients are sums over ranks, not means
    train_steps: int = 1670
    scheduled_steps: int = 1670  # the cooldown ends here; the window's stages divide these steps
    cooldown_frac: float = 0.5  # share of scheduled_steps, so the cooldown scales with the run
    final_lr_multiplier: float = 0.1
    momentum_warmup_steps: int = 300
    window_start: int = 384  # previous tokens that L layers see in the first stage
    window_growth: int = 512  # tokens added in each further stage
    window_stages: int = 3  # stages of about equal length; the model is compiled for each window
    window_end: int = 1664  # window of the last validation; YaRN lets it exceed training windows
    tile_size: int = 128  # the record's unit of windows; S = half a window, rounded down to tiles
    # run
    val_loss_every: int = 125  # steps between validations; 0 = only after the last step
    train_loss_every: int = 0  # steps between logged train losses; each waits for the GPU; 0 = none
    log_dir: str = field(default_factory=lambda: time.strftime(f"logs/%Y%m%d-%H%M%S-{os.getpid()}"))
    save_checkpoint: bool = False
    seed: int = 0
    kernel_warmup_steps: int = 6  # untimed steps that compile the kernels, undone afterwards
    compile: bool = torch.cuda.is_available()
    bf16: bool = torch.cuda.is_available()
    attention_kernel: str = field(default_factory=lambda: best_attention())  # FA3, FA2 or dense
    use_triton: bool = torch.cuda.is_available() and bool(find_spec("triton"))  # Muon's kernel
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


def all_windows(args):
    """The window of each stage, then window_end for the last validation."""
    stages = range(args.window_stages)
    return [args.window_start + i * args.window_growth for i in stages] + [args.window_end]


def window_size(step, args):
    """The window of this step's stage; window_end in the validation after the last step."""
    stage = args.window_stages * step // (args.scheduled_steps + 1)  # + 1 as in the record
    return all_windows(args)[-1 if step == args.train_steps else min(stage, args.window_stages - 1)]


# ---------------------------------------------- Data ----------------------------------------------
def open_shard(file):
    """A shard's uint16 tokens; its header is 256 int32: magic number, version, count, zeros."""
    header = np.fromfile(file, dtype="<i4", count=256)
    tokens = np.memmap(file, dtype="<u2", mode="r", offset=1024)
    assert header[:3].tolist() == [20240520, 1, len(tokens)], f"{file} is not a whole token shard"
    return tokens


def packed_rows(shard, T, args):
    """Yields rows of T + 1 tokens: documents end to end, each cut to max_document_len tokens."""
    # A row's last document is cut where the row is full; the rest of a cut document is skipped.
    starts = np.flatnonzero(shard == args.bos_id)
    row, missing = [], T + 1
    for start, end in itertools.pairwise([*starts, len(shard)]):
        document = shard[start : min(end, start + args.max_document_len, start + missing)]
        row.append(document)
        missing -= len(document)
        if missing == 0:
            yield np.concatenate(row)
            row, missing = [], T + 1


def token_batches(pattern, step_tokens, seq_len, packed, args, rank, world_size, device):
    """Yields this rank's micro-batches without end: inputs and targets, each (B, T) int64.

    If packed, rows come from `packed_rows`; else each starts where the previous row ends. Blocks
    of B rows go to the ranks round-robin. A shard's tail that is too short for a step is skipped.
    """
    B, T = args.micro_batch_size, seq_len
    assert step_tokens % (B * T * world_size) == 0, (
        f"{step_tokens} tokens do not divide into {B} x {T} on each of {world_size} ranks")
    num_rows = step_tokens // T  # per step
    shards = [open_shard(file) for file in sorted(glob.glob(pattern))]
    while True:
        steps = 0
        for shard in shards:
            rows = packed_rows(shard, T, args) if packed else (
                shard[start : start + T + 1] for start in range(0, len(shard) - T, T))
            while len(step_rows := list(itertools.islice(rows, num_rows))) == num_rows:
                steps += 1
                for i in range(rank * B, num_rows, world_size * B):
                    tokens = torch.from_numpy(np.stack(step_rows[i : i + B]).astype(np.int64))
                    assert tokens.max() < args.vocab_size, f"{shard.filename} has ids >= vocab_size"
                    # At least one start must be padding, B * T: it ends the last document.
                    assert document_starts(tokens[:, :-1], args)[-1] == tokens[:, :-1].numel(), (
                        f"{B} rows of {shard.filename} hold too many documents")
                    if device.type == "cuda":
                        tokens = tokens.pin_memory()  # lets the copy be asynchronous
                    tokens = tokens.to(device, non_blocking=True)
                    yield tokens[:, :-1], tokens[:, 1:]
        assert steps, f"no file {pattern} fills the {num_rows} rows of a step"


def document_starts(inputs, args):
    """Starts of documents and rows (cu_seqlens) in flat inputs (B, T): int32, padded with B * T."""
    begins = (inputs == args.bos_id) | (torch.arange(inputs.size(1), device=inputs.device) == 0)
    size = 32 * math.ceil(max(1, inputs.numel() // 410) / 32)  # static; room for 1 per 410 tokens
    return torch.nonzero_static(begins.flatten(), size=size, fill_value=inputs.numel())[:, 0].int()


# -------------------------------------------- Kernels --------------------------------------------
def best_attention():
    """The fastest kernel: FA3 on Hopper if installed, FA2 from Ampere on, else a dense mask."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability[0] == 9:
        with suppress(ImportError, OSError):  # it is missing, or built for another PyTorch
            import_module("flash_attn_interface")
            return "FA3"
        warnings.warn("FA2 is used: FA3 does not import (see requirements.txt)", stacklevel=2)
    return "FA2" if capability >= (8, 0) else "dense"


def quantize(x, scale, dtype):
    """scale * x, clamped to the range of `dtype` and rounded to it."""
    return (scale * x).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def fp8_product(a, a_scale, b, b_scale, dtype, fast=False):
    """a (M, K) times b (N, K) transposed, as `dtype`, divided by the scales of both."""
    # Tensor cores need both operands contiguous along K; fast accumulation keeps fewer bits.
    inverses = [torch.full((), 1 / scale, device=a.device) for scale in (a_scale, b_scale)]
    return torch._scaled_mm(a, b.T, *inverses, out_dtype=dtype, use_fast_accum=fast)


if find_spec("triton"):  # CPU builds of PyTorch come without it
    import triton
    import triton.language as tl

    @triton.autotune(key=["M", "K"], configs=[  # larger tiles would be too few to fill a GPU
        triton.Config(dict(ROWS=rows, COLUMNS=columns, DEPTH=64), num_warps, num_stages)
        for rows, columns, num_warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8))
        for num_stages in (3, 4)])
    @triton.jit
    def symmetric_kernel(x, addend, factors, out, M, K,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
        """Stores a (ROWS, COLUMNS) tile of x's symmetric_product, and its mirror image, in out."""
        # x (N, M, K), addend and out (N, M, M) are contiguous; factors are alpha and beta.
        tile_rows, tile_columns = tl.cdiv(M, ROWS), tl.cdiv(M, COLUMNS)
        tile, matrix = tl.program_id(0), tl.program_id(1)
        tile_row, tile_column = tl.swizzle2d(  # groups of 8 tile rows keep x in the cache
            tile // tile_columns, tile % tile_columns, tile_rows, tile_columns, 8)
        row, column = tile_row * ROWS, tile_column * COLUMNS
        if row + ROWS <= column:
            return  # wholly above the diagonal: tiles below store its mirror image
        i, j = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
        x += matrix * M * K
        out += matrix * M * M
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, K, DEPTH):  # rows beyond M wrap around; they are not stored
            k = start + tl.arange(0, DEPTH)
            a = tl.load(x + i % M * K + k[None, :], mask=k[None, :] < K, other=0.0)
            b = tl.load(x + j % M * K + k[:, None], mask=k[:, None] < K, other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")  # float32 is not cut to TF32
        inside = (i < M) & (j < M)
        if addend is not None:
            summand = tl.load(addend + matrix * M * M + i * M + j, mask=inside, other=0.0)
            total = tl.load(factors) * total + tl.load(factors + 1) * summand
        total = total.to(out.dtype.element_ty)
        tl.store(out + i * M + j, total, mask=inside)
        tl.store(out + j.T * M + i.T, total.T, mask=inside.T)


def symmetric_product(x, addend=None, alpha=1.0, beta=1.0, use_triton=False):
    """x x' for x (N, M, K) or, given a symmetric addend (N, M, M), alpha x x' + beta addend."""
    N, M, K = x.shape
    if not use_triton or M < 64:  # the kernel would waste much of its 64-row tiles
        return x @ x.mT if addend is None else torch.baddbmm(
            addend, x, x.mT, beta=beta, alpha=alpha)
    out = x.new_empty(N, M, M)
    # A tensor, because torch.compile would build and tune another kernel for each pair of numbers.
    factors = None if addend is None else torch.tensor([alpha, beta]).to(x.device)  # (2,)
    def grid(config):
        return triton.cdiv(M, config["ROWS"]) * triton.cdiv(M, config["COLUMNS"]), N
    symmetric_kernel[grid](x.contiguous(), addend, factors, out, M, K)
    return out


# --------------------------------------------- Model ---------------------------------------------
def norm(x):
    """RMS norm over the last dimension, without parameters (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)  # for bfloat16 x, too


def init_uniform(weight):
    """Fills a weight (..., out, in) uniformly, with standard deviation 0.5 / sqrt(in)."""
    bound = 0.5 * (3 / weight.size(-1)) ** 0.5
    return nn.init.uniform_(weight, -bound, bound)


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
        self.frequencies = torch.cat((rotating, fixed, -rotating, fixed))  # (D,), for window_start
        self.register_buffer("cos", torch.empty(seq_len, 1, head_dim), persistent=False)
        self.register_buffer("sin", torch.empty_like(self.cos), persistent=False)

    def set_window(self, window, args):
        """Sets cos, sin, scale: a YaRN step (arXiv 2309.00071) per growth of the window so far."""
        frequencies, self.scale = self.frequencies, args.attention_scale
        windows = [size for size in all_windows(args) if size <= window]
        for old, new in itertools.pairwise(windows):
            turns = old * frequencies.abs() / (2 * math.pi)  # full turns within the old window
            kept = ((turns - 1) / (32 - 1)).clamp(0, 1)  # 1 from 32 turns on, 0 up to one turn
            frequencies = frequencies * (kept + (1 - kept) * old / new)
            self.scale *= 1 + 0.2 * math.log(new / old)  # about the paper's (1 + 0.1 log)^2
        positions = torch.arange(len(self.cos), device=self.cos.device)
        angles = torch.outer(positions, frequencies.to(positions.device))[:, None]  # (T, 1, D)
        self.cos.copy_(angles.cos())  # in place, which keeps dtype and device
        self.sin.copy_(angles.sin())

    def forward(self, x):  # (B, T, H, D); computed in float32, like the tables
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # halves (x1, x2) become (x2, x1)
        return (x * self.cos[: x.size(1)] + swapped * self.sin[: x.size(1)]).type_as(x)


def attention_masks(inputs, windows, training, args):
    """{kind: mask (B, 1, T, T) if dense, else (starts, longest, window)}; window in tokens."""
    T = inputs.size(1)
    if args.attention_kernel != "dense":  # kernels take document starts (cu_seqlens), not a mask
        starts = document_starts(inputs, args)
        longest = args.max_document_len if training else T  # packed_rows cuts training documents
        return {kind: (starts, longest, window) for kind, window in windows.items()}
    assert T <= 16_384, f"a dense {T} x {T} mask is too large; lower train_seq_len or val_seq_len"
    document_ids = (inputs == args.bos_id).cumsum(1)  # (B, T)
    t = torch.arange(T, device=inputs.device)
    distance = t[:, None] - t
    visible = (document_ids[:, None, :, None] == document_ids[:, None, None]) & (distance >= 0)
    return {kind: visible & (distance <= window) for kind, window in windows.items()}


def gates(x, weight):
    """Sigmoids (B, T, H) of weight (H, channels) times the leading channels of x (B, T, C)."""
    return F.linear(x[..., : weight.size(1)], weight.to(x.dtype)).sigmoid()


class CausalSelfAttention(nn.Module):
    """Multi-head attention: each token attends to the tokens that the mask lets it see."""
    def __init__(self, args, rotary):
        super().__init__()
        assert args.model_dim % args.num_heads == 0, "model_dim is not a multiple of num_heads"
        self.num_heads = args.num_heads
        weights = init_uniform(torch.empty(4, args.model_dim, args.model_dim))  # Q, K, V, output
        weights[3] = 0
        self.c_qkvo = nn.Parameter(weights)  # four matrices in one Muon batch
        self.gate = nn.Parameter(torch.zeros(args.num_heads, args.gate_channels))
        self.rotary = rotary
        self.value_lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))  # weights of v, value embedding
        self.attention_kernel = args.attention_kernel

    def forward(self, x, value_embed, mask):
        B, T, C = x.shape
        weights = self.c_qkvo.to(x.dtype)
        qkv = F.linear(x, weights[:3].flatten(0, 1))  # (B, T, 3 C)
        q, k, v = qkv.view(B, T, 3, self.num_heads, -1).unbind(2)  # (B, T, H, D)
        v = self.value_lambdas[0] * v
        if value_embed is not None:
            v = v + self.value_lambdas[1] * value_embed.view_as(v)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))  # unit RMS: |q @ k| <= head_dim
        if self.attention_kernel == "dense":
            heads = [t.transpose(1, 2) for t in (q, k, v)]  # (B, H, T, D) each
            y = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=self.rotary.scale)
            y = y.transpose(1, 2)
        else:  # FlashAttention, on all rows end to end (FA3: arXiv 2407.08608)
            starts, longest, window = mask
            y = varlen_attn(*(t.flatten(0, 1) for t in (q, k, v)), starts, starts, longest, longest,
                            scale=self.rotary.scale, window_size=(window, 0)).view_as(v)
        y = y * gates(x, self.gate)[..., None]  # a gate can switch a head off for a token
        return F.linear(y.reshape(B, T, C), weights[3])


class MLP(nn.Module):
    """Linear map to four times the width, squared ReLU (arXiv 2109.08668), linear map back."""
    def __init__(self, args):
        super().__init__()
        hidden_dim = 4 * args.model_dim
        weight = init_uniform(torch.empty(hidden_dim, args.model_dim))
        self.c_fc = nn.Parameter(weight.T.contiguous())  # transposed: one Muon batch with c_proj
        self.c_proj = nn.Parameter(torch.zeros(args.model_dim, hidden_dim))

    def forward(self, x):
        return F.relu(x @ self.c_fc.to(x.dtype)).square() @ self.c_proj.to(x.dtype).T


class Block(nn.Module):
    """One transformer layer; its branches add nothing initially: both output maps start at zero."""
    def __init__(self, args, rotary, layer):
        super().__init__()
        has_attention = layer != args.layer_without_attention
        self.attn = CausalSelfAttention(args, rotary) if has_attention else None
        self.value_table = args.value_embed_pattern[layer]
        self.window_kind = args.window_pattern[layer]
        self.mlp = MLP(args) if layer != args.layer_without_mlp else None
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # weights of x and the embedding x0

    def forward(self, x, value_embeds, x0, masks):
        x_weight, embed_weight = self.lambdas
        x = x_weight * x + embed_weight * x0  # a learned shortcut from the embedding
        if self.attn is not None:
            x = x + self.attn(norm(x), value_embeds.get(self.value_table), masks[self.window_kind])
        if self.mlp is not None:
            x = x + self.mlp(norm(x))
        return x


class GPT(nn.Module):
    """Token ids to next-token logits, or to the mean loss if targets are given."""
    def __init__(self, args):
        super().__init__()
        assert args.num_layers % 2 == 0, "num_layers must be even: skips pair up its two halves"
        self.args = args
        assert args.attention_kernel in ("FA2", "FA3", "dense"), "unknown attention kernel"
        if args.attention_kernel == "FA3":
            activate_flash_attention_impl("FA3")  # replaces PyTorch's own FA2
        self.embed = nn.Embedding(args.vocab_size, args.model_dim)  # starts as N(0, 1)
        # Value embeddings: a value residual (arXiv 2410.17897) from learned tables.
        pattern = args.value_embed_pattern
        assert len(pattern) == args.num_layers, "value_embed_pattern needs num_layers symbols"
        self.value_embeds = nn.ModuleDict({name: nn.Embedding(args.vocab_size, args.model_dim)
                                           for name in sorted(set(pattern) - {"."})})
        longest = max(args.train_seq_len, args.val_seq_len)
        self.rotary = Rotary(args.model_dim // args.num_heads, longest)  # one for all layers
        self.blocks = nn.ModuleList(Block(args, self.rotary, i) for i in range(args.num_layers))
        self.skip_weights = nn.Parameter(torch.ones(args.num_layers // 2))
        self.lm_head = Head(args)
        if args.bf16:
            self.embed.bfloat16()  # the residual stream takes its dtype
            self.value_embeds.bfloat16()
        self.set_window(window_size(args.train_steps, args))

    def set_window(self, window):
        # The compiler treats a Python number as a constant and compiles once per stage.
        self.window = window
        self.rotary.set_window(window, self.args)

    def forward(self, inputs, targets=None):
        short = max(1, self.window // self.args.tile_size // 2) * self.args.tile_size  # whole tiles
        windows = dict(L=self.window, S=short)
        masks = attention_masks(inputs, windows, self.training, self.args)
        x = x0 = norm(self.embed(inputs))  # (B, T, C)
        value_embeds = {name: embed(inputs) for name, embed in self.value_embeds.items()}
        skips = []
        # A U-net (arXiv 1505.04597): the first half pushes its outputs, the second half pops them.
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x, value_embeds, x0, masks)
            skips.append(x)
        for block, weight in zip(self.blocks[half:], self.skip_weights, strict=True):
            x = x + weight * skips.pop()  # the first pop returns x itself, as in the record
            x = block(x, value_embeds, x0, masks)
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
def newton_schulz(matrices, dtype, use_triton=False):
    """Orthogonalises matrices (..., m, n), m <= n, computing in `dtype`; bfloat16 is enough.

    Five steps of X <- aX + b(XX')X + c(XX')^2 X (kellerjordan.github.io/posts/muon) keep singular
    vectors. Singular values in [0.0015, 1] end in [0.68, 1.20], not at 1: the price of speed.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0, so that small singular values grow fast
    X = matrices.to(dtype).flatten(0, -3)  # (N, m, n)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value is above 1
    for _ in range(5):
        A = symmetric_product(X, use_triton=use_triton)  # XX'
        B = symmetric_product(A, A, alpha=c, beta=b, use_triton=use_triton)  # bA + cAA'
        X = torch.baddbmm(X, B, X, beta=a)  # aX + BX
    return X.view_as(matrices)


def muon_update(grads, momentum_buffer, momentum, dtype, use_triton):
    """The orthogonalised Nesterov momentum of matrices (..., m, n); changes momentum_buffer."""
    momentum_buffer.lerp_(grads, 1 - momentum)  # a mean, not a sum; newton_schulz drops the scale
    return newton_schulz(grads.lerp(momentum_buffer, momentum), dtype, use_triton)


class Muon(torch.optim.Optimizer):
    """Subtracts lr times the orthogonalised Nesterov momentum, for matrices (..., m, n), m <= n."""
    def __init__(self, params, lr, momentum, bf16, compiled, use_triton):
        shapes = dict.fromkeys(param.shape for param in params)  # one batch per shape
        groups = [dict(params=[p for p in params if p.shape == shape]) for shape in shapes]
        super().__init__(groups, dict(lr=lr, momentum=momentum))
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.muon_update = torch.compile(
            partial(muon_update, use_triton=use_triton), dynamic=False, disable=not compiled)

    @torch.no_grad()
    def step(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        gathers = []  # in flight: updates of one shape are sent while the next are computed
        for group in self.param_groups:
            params = group["params"]
            share = math.ceil(len(params) / world_size)  # parameters per rank, at most
            matrices = params[rank * share : (rank + 1) * share]
            # All ranks send the same size, so shares are zero-padded.
            updates = params[0].new_zeros(share, *params[0].shape, dtype=self.dtype)
            if matrices:
                grads = torch.stack([matrix.grad for matrix in matrices])  # (N, ..., m, n)
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
                param.add_(update, alpha=-group["lr"])


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
                compiled=args.compile, use_triton=args.use_triton)
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
    for i in range(1, args.kernel_warmup_steps + 1):
        inputs, targets = next(batches)
        step = (args.scheduled_steps - 1) * i // args.kernel_warmup_steps  # with 6, two per stage
        model.set_window(window_size(step, args))
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
    micro_tokens = args.micro_batch_size * args.train_seq_len * dist.get_world_size()  # all ranks
    val_micro_tokens = args.micro_batch_size * args.val_seq_len * dist.get_world_size()
    grad_accum_steps = args.total_batch_size // micro_tokens  # micro-batches per rank in every step
    clock.start()
    for step in range(args.train_steps + 1):
        last_step = step == args.train_steps
        if (window := window_size(step, args)) != model.window:  # before validations, which use it
            model.set_window(window)
        if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
            with clock.paused():
                val_loss = validate(model, load_val(), args.val_tokens // val_micro_tokens)
            log.step(step, clock.elapsed_ms(), f"val_loss:{val_loss:.4f} ")
        if last_step:
            break

        train_loss = 0.0
        for inputs, targets in itertools.islice(train_batches, grad_accum_steps):
            loss = model(inputs, targets)
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
        torch._dynamo.config.recompile_limit = 64  # there are several graphs for each window
        model = torch.compile(model, dynamic=False)
    optimizers = make_optimizers(raw_model, args)
    load = partial(token_batches, args=args, rank=rank, world_size=world_size, device=device)
    load_train = partial(load, args.train_files, args.total_batch_size, args.train_seq_len,
                         packed=True)
    load_val = partial(load, args.val_files, args.val_tokens, args.val_seq_len, packed=False)
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
