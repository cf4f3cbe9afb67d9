"""
13 bigrams: a table of vectors for pairs of tokens is added to every layer's input

Trains a language model on FineWeb, a corpus of web pages, to a validation loss of 3.28. The NanoGPT
speedrun asks how fast that can be done; these scripts retell it step by step.

Parent:  12c fused mlp
Changed: a hash of each token and the previous one selects a row of a large table, which every layer
         adds to its input; half of attention's learning rate; fewer steps, and a longer cooldown
Record:  #62 by @classiclarryd, 2026-01-19: mean val loss of 6 runs 3.2776 after 0.42B tokens in
         1.66 minutes on 8xH100 (the rate: #61 by @ChrisJMcCormick)
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
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

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
    total_batch_size: int = 131_072  # tokens per optimizer step, all ranks, in the first stage
    train_seq_len: int = 16_384  # tokens per sequence in the first stage: documents end to end
    val_seq_len: int = 262_144  # longer, so that fewer documents are cut
    micro_batch_size: int = 1  # sequences per forward pass per rank
    max_document_len: int = 2048  # longer training documents are cut, so that more fit in a batch
    prefetched_batches: int = 32  # micro-batches prepared in advance
    # model
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 128 for the tensor cores
    bos_id: int = 50256  # <|endoftext|>, with which every document begins
    num_layers: int = 11  # GPT-2's 12 without the first, which was not worth its time
    layer_without_attention: int = 6  # counted from 0; attention would help little in this layer
    value_embed_pattern: str = "12......012"  # each layer's table of value embeddings; . = none
    bigram_rows: int = 251_520  # rows of the bigram table: 5 times the vocabulary's
    bigram_scale: float = 0.1  # initial factor of a bigram's row in each layer's input
    skip_from: int = 3  # counted from 0; the skip is a learned share of this layer's output
    skip_to: int = 6  # the layer at which the skip joins the stream
    backout_layer: int = 7  # a share of its output is subtracted before the head
    window_pattern: str = "PSPLSPLSSPL"  # L = long, S = short, P = paired heads and half of short
    gate_channels: int = 12  # gates are computed from this many leading channels
    fp8_x_scale: float = 448 / 100  # as in the record: 100 becomes 448; inputs reach sqrt(768) = 28
    fp8_weight_scale: float = 448 / 1.6  # as in the record; clamps the head's weights beyond 1.6
    fp8_grad_scale: float = 448 / 0.75  # e5m2 covers 96; logit gradients, see train, are below 2
    num_heads: int = 6  # 128 dimensions each; wide heads spend less time outside matrix products
    model_dim: int = 768
    qkv_init: float = 1.0  # initial standard deviation is this / sqrt(model_dim); c_fc has 0.5
    cap_height: float = 23.0  # the cap: cap_height * sigmoid((logits + cap_shift) / cap_width)
    cap_shift: float = 5.0  # a logit of 0 becomes 23 sigmoid(5 / 7.5) = 15.2: 7.8 below the cap
    cap_width: float = 7.5
    attention_scale: float = 0.1  # softmax scale at window_start; YaRN raises it
    # optimizer and schedules
    muon_lr: float = 0.023  # this x a factor below = RMS of an update's singular values
    attention_lr_factor: float = 1.0  # multiplies muon_lr for attention's matrices
    mlp_in_lr_factor: float = 2.0  # multiplies muon_lr for the first matrix of each MLP
    mlp_out_lr_factor: float = 4.0  # multiplies muon_lr for the second matrix of each MLP
    neuron_beta: float = 0.95  # decay of the running mean square of each column of an update
    muon_weight_decay: float = 1.2  # a step removes this x lr^2 x lr factor x weight, or nothing
    muon_momentum_start: float = 0.85
    muon_momentum: float = 0.95
    value_embed_lr: float = 0.6  # rate of both the value embeddings and the bigram table
    head_lr: float = 0.008  # rate of both the head and the embedding
    tied_frac: float = 2 / 3  # share of scheduled_steps in which head and embedding are one table
    scalar_lr: float = 0.04
    gate_lr: float = 0.008
    smear_gate_lr: float = 8e-5  # small: else this gate turns unstable when the batch grows
    skip_gate_lr: float = 4e-4
    value_embed_beta1: float = 0.75  # shared with the bigram table
    head_beta1: float = 0.5  # shared with the embedding; low, so rare tokens' rows soon stop moving
    adam_beta1: float = 0.65  # for x0_weights
    adam_beta2: float = 0.95  # for the tables and x0_weights
    small_beta1: float = 0.9  # for gates and scalars; x0_weights change smoothly anyway
    small_beta2: float = 0.99
    adam_eps: float = 8e-10  # 8 times the record's: here gradients are sums over ranks, not means
    adam_weight_decay: float = 0.005  # a step removes this x lr^2 x decay factor x weight, or 0
    value_embed_decay_factor: float = 5.0  # shared with the bigram table
    head_decay_factor: float = 150.0  # shared with the embedding; large, because the rate is small
    adam_every: int = 2  # steps per Adam step: embeddings and head benefit from larger batches
    second_target_weight: float = 0.5  # weight of the second token ahead: 0 after the second stage
    third_target_weight: float = 0.25  # weight of the third token ahead: 0 after the first stage
    train_steps: int = 1600
    scheduled_steps: int = 1560  # three equal stages and the cooldown end here
    second_stage_peak: float = 1.52  # peak of lr_multiplier: about 2^0.6, for twice the tokens
    third_stage_peak: float = 1.73  # about 3^0.5, as in the record; not reached: cooldown has begun
    cooldown_frac: float = 0.55  # share of scheduled_steps, so the cooldown scales with the run
    final_lr_multiplier: float = 0.1
    momentum_warmup_steps: int = 300
    momentum_cooldown_steps: int = 50  # last steps, in which momentum returns to its start
    window_start: int = 384  # previous tokens that L layers see in the first stage
    window_growth: int = 512  # tokens added in each further stage
    window_end: int = 1664  # after scheduled_steps; in the last validation L uses long_window_end
    long_window_end: int = 2560  # window of L layers in the last validation
    tile_size: int = 128  # the record's unit of windows; S = half a window, rounded down to tiles
    # run
    val_loss_every: int = 250  # steps between validations; 0 = only after the last step
    train_loss_every: int = 0  # steps between logged train losses; each waits for the GPU; 0 = none
    log_dir: str = field(default_factory=lambda: time.strftime(f"logs/%Y%m%d-%H%M%S-{os.getpid()}"))
    save_checkpoint: bool = False
    seed: int = 0
    kernel_warmup_steps: int = 6  # untimed steps that compile the kernels, undone afterwards
    compile: bool = torch.cuda.is_available()
    bf16: bool = torch.cuda.is_available()
    attention_kernel: str = field(default_factory=lambda: best_attention())  # FA3, FA2 or dense
    use_triton: bool = torch.cuda.is_available() and bool(find_spec("triton"))  # Triton kernels
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
class Stage(NamedTuple):
    """A row of the table of schedules; batches grow by longer sequences, not by more of them."""
    seq_len: int  # tokens per training sequence
    peak: float  # lr_multiplier without the cooldown
    window: int  # previous tokens that L layers see
    target_weights_start: list  # at the start: the next token's weight, then other targets'
    target_weights_end: list  # at the end


def stages(args):
    """Three equal parts of scheduled_steps, then the steps after, where `peak` has no effect."""
    T, start, growth = args.train_seq_len, args.window_start, args.window_growth
    second, third = args.second_target_weight, args.third_target_weight
    return [
        Stage(1 * T, 1.0, start, [1, second, third], [1, second, 0]),
        Stage(2 * T, args.second_stage_peak, start + growth, [1, second], [1, 0]),
        Stage(3 * T, args.third_stage_peak, start + 2 * growth, [1], [1]),
        Stage(3 * T, args.final_lr_multiplier, args.window_end, [1], [1]),
    ]


def stage(step, args):
    """The stage of this step."""
    *scheduled, last = stages(args)
    number = len(scheduled) * step // args.scheduled_steps
    return scheduled[number] if number < len(scheduled) else last


def lr_multiplier(step, args):
    """The stage's peak; a linear cooldown blends in final_lr_multiplier (arXiv 2405.18392)."""
    remaining = min(1.0, max(0.0, 1 - step / args.scheduled_steps) / args.cooldown_frac)
    return stage(step, args).peak * remaining + (1 - remaining) * args.final_lr_multiplier


def target_weights(step, args):
    """The targets' weights in the loss: linear from the stage's start to its end."""
    *scheduled, _ = stages(args)
    progress = len(scheduled) * step / args.scheduled_steps % 1  # share of the stage that is over
    row = stage(step, args)
    return [start + (end - start) * progress
            for start, end in zip(row.target_weights_start, row.target_weights_end, strict=True)]


def last_tied_step(args):
    """The last step with one table: Adam's first step at or after tied_frac of the schedule."""
    step = math.ceil(args.tied_frac * args.scheduled_steps)
    while (step + 1) % args.adam_every:  # Adam skips this step
        step += 1
    return step


def muon_momentum(step, args):
    """Linear to muon_momentum over momentum_warmup_steps, back over momentum_cooldown_steps."""
    remaining = (args.train_steps - step) / args.momentum_cooldown_steps
    progress = min(1.0, step / args.momentum_warmup_steps, remaining)
    return (1 - progress) * args.muon_momentum_start + progress * args.muon_momentum


def window_sizes(step, args):
    """(window, long_window): equal, except in the last validation, where L layers see further."""
    window = stage(step, args).window
    return window, (args.long_window_end if step == args.train_steps else window)


# ---------------------------------------------- Data ----------------------------------------------
def open_shard(file):
    """A shard's uint16 tokens; its header is 256 int32: magic number, version, count, zeros."""
    header = np.fromfile(file, dtype="<i4", count=256)
    tokens = np.memmap(file, dtype="<u2", mode="r", offset=1024)
    assert header[:3].tolist() == [20240520, 1, len(tokens)], f"{file} is not a whole token shard"
    return tokens


def packed_rows(shard, row_stages, args):
    """Yields seq_len + 1 tokens per entry of row_stages: documents cut to max_document_len."""
    # A row's last document is cut where the row is full; the rest of a cut document is skipped.
    starts = np.flatnonzero(shard == args.bos_id)
    row, missing = [], next(row_stages).seq_len + 1
    for start, end in itertools.pairwise([*starts, len(shard)]):
        document = shard[start : min(end, start + args.max_document_len, start + missing)]
        row.append(document)
        missing -= len(document)
        if missing == 0:
            yield np.concatenate(row)
            row, missing = [], next(row_stages).seq_len + 1


def token_batches(pattern, step_tokens, seq_len, packed, args, rank, world_size, device, step=0):
    """Yields this rank's micro-batches without end: inputs and targets, each (B, T) int64.

    If packed, `step` is the number of the first step, rows are as long as their stage requires, and
    step_tokens and seq_len are the first stage's. If not, a row starts where the previous one ends.
    Blocks of B rows go to the ranks round-robin. A shard's tail too short for a step is skipped.
    """
    B, T = args.micro_batch_size, seq_len
    assert step_tokens % (B * T * world_size) == 0, (
        f"{step_tokens} tokens do not divide into {B} x {T} on each of {world_size} ranks")
    num_rows = step_tokens // T  # per step
    shards = [open_shard(file) for file in sorted(glob.glob(pattern))]
    while True:
        first_step = step  # this pass over the shards starts here
        for shard in shards:
            row_stages = (stage(i, args) for i in itertools.count(step) for _ in range(num_rows))
            rows = packed_rows(shard, row_stages, args) if packed else (
                shard[start : start + T + 1] for start in range(0, len(shard) - T, T))
            while len(step_rows := list(itertools.islice(rows, num_rows))) == num_rows:
                step += 1
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
        assert step > first_step, f"no file {pattern} fills the {num_rows} rows of a step"


def prefetched(batches, args, device):
    """Iterates over `batches`; a thread prepares prefetched_batches of them in advance."""
    executor = ThreadPoolExecutor(  # one thread keeps the order; by default its device is cuda:0
        max_workers=1, initializer=torch.get_device_module(device).set_device, initargs=(device,))
    ready = deque(executor.submit(next, batches) for _ in range(args.prefetched_batches))
    def next_batch():
        ready.append(executor.submit(next, batches))
        return ready.popleft().result()  # an exception of the thread is raised here
    return iter(next_batch, None)  # endless; a generator would prefetch nothing until first read


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


if find_spec("triton"):
    @triton.autotune(key=["N", "K"], configs=[
        triton.Config(dict(ROWS=128, COLUMNS=columns, DEPTH=64), num_warps, num_stages)
        for columns, num_warps in ((128, 4), (128, 8), (256, 8)) for num_stages in (3, 4)])
    @triton.jit
    def relu2_kernel(a, b, post, out, M, N, K,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
        """Stores a tile of relu(a b)^2 or, backward, 2 a b sqrt(post); post = the stored square."""
        # a (M, K), b (K, N), post and out (M, N) are contiguous; sums are in float32.
        tile, tile_rows, tile_columns = tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
        tile_row, tile_column = tl.swizzle2d(  # groups of 8 tile rows share loaded tiles of b
            tile // tile_columns, tile % tile_columns, tile_rows, tile_columns, 8)
        i = tile_row * ROWS + tl.arange(0, ROWS)[:, None]
        j = tile_column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, K, DEPTH):
            k = start + tl.arange(0, DEPTH)
            a_tile = tl.load(a + i % M * K + k[None, :], mask=k[None, :] < K, other=0.0)
            b_tile = tl.load(b + k[:, None] * N + j % N, mask=k[:, None] < K, other=0.0)
            total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        inside = (i < M) & (j < N)
        offset = i.to(tl.int64) * N + j  # M N may exceed 2^31
        if post is None:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total *= total
        else:
            total *= 2 * tl.sqrt(tl.load(post + offset, mask=inside, other=0.0).to(tl.float32))
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


def relu2_product(a, b, post=None, use_triton=False):
    """relu(a b)^2 for a (M, K), b (K, N) or, backward, 2 a b sqrt(post) for post (M, N)."""
    if not use_triton:
        product = a @ b
        return F.relu(product).square() if post is None else 2 * product * post.sqrt()
    (M, K), N = a.shape, b.size(1)
    out = a.new_empty(M, N)
    def grid(config):
        return (triton.cdiv(M, config["ROWS"]) * triton.cdiv(N, config["COLUMNS"]),)
    relu2_kernel[grid](a.contiguous(), b.contiguous(), post, out, M, N, K)
    return out


# --------------------------------------------- Model ---------------------------------------------
def norm(x):
    """RMS norm over the last dimension, without parameters (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)  # for bfloat16 x, too


def init_uniform(weight, scale=0.5):
    """Fills a weight (..., out, in) uniformly, with standard deviation scale / sqrt(in)."""
    bound = scale * (3 / weight.size(-1)) ** 0.5
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
    """Linear map to the logits, initially small as in the record; in FP8 in training if use_fp8."""
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(0.005 * torch.randn(args.vocab_size, args.model_dim))
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
        windows = [row.window for row in stages(args) if row.window <= window]
        for old, new in itertools.pairwise(windows):
            turns = old * frequencies.abs() / (2 * math.pi)  # full turns within the old window
            kept = ((turns - 1) / (32 - 1)).clamp(0, 1)  # 1 from 32 turns on, 0 up to one turn
            frequencies = frequencies * (kept + (1 - kept) * old / new)
            self.scale *= 1 + 0.2 * math.log(new / old)  # about the paper's (1 + 0.1 log)^2
        positions = torch.arange(len(self.cos), device=self.cos.device)
        angles = torch.outer(positions, frequencies.to(positions.device))[:, None]  # (T, 1, D)
        self.cos.copy_(angles.cos())  # in place, which keeps dtype and device
        self.sin.copy_(angles.sin())

    def forward(self, x):  # (B, T, H, D)
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # halves (x1, x2) become (x2, x1)
        return x * self.cos[: x.size(1)] + swapped * self.sin[: x.size(1)]


def attention_masks(inputs, windows, training, args):
    """{kind: mask (B, 1, U, U) or (starts, longest, window)}; P has U = 2T slots, others T."""
    slots_per_token = {kind: 2 if kind == "P" else 1 for kind in windows}  # see pair_heads
    T = inputs.size(1)
    if args.attention_kernel != "dense":  # kernels take document starts (cu_seqlens), not a mask
        starts = document_starts(inputs, args)
        longest = args.max_document_len if training else T  # packed_rows cuts training documents
        return {kind: (slots_per_token[kind] * starts, slots_per_token[kind] * longest, window)
                for kind, window in windows.items()}
    assert max(slots_per_token.values()) * T <= 16_384, (
        f"a dense mask of {2 * T} x {2 * T} slots is too large; lower train_seq_len or val_seq_len")
    document_ids = (inputs == args.bos_id).cumsum(1)  # (B, T)
    def mask(slots, window):
        ids = document_ids.repeat_interleave(slots, dim=1)
        t = torch.arange(ids.size(1), device=inputs.device)
        distance = t[:, None] - t
        visible = (ids[:, None, :, None] == ids[:, None, None]) & (distance >= 0)
        return visible & (distance <= window)
    return {kind: mask(slots_per_token[kind], window) for kind, window in windows.items()}


def offset_keys(k):
    """Keys k (B, T, H, D); the channels that do not rotate are taken from the previous token's key.

    So a query can match the token before a key's token: one layer can be an induction head, which
    finds an earlier copy of its own token and copies what followed. Document starts are no barrier.
    """
    rotating, fixed = k.unflatten(-1, (2, 2, -1)).unbind(-2)  # (B, T, H, 2, D / 4) each
    fixed = torch.cat((fixed[:, :1], fixed[:, :-1]), dim=1)  # the first token keeps its own
    return torch.stack((rotating, fixed), dim=-2).flatten(-3)


def pair_heads(x):
    """x (B, T, H, D) as (B, 2T, H / 2, D): heads j and j + H / 2 are slots 2t and 2t + 1 of head j.

    Both heads' queries see the keys of both in one softmax; slot 2t does not see slot 2t + 1.
    """
    return x.reshape(len(x), 2 * x.size(1), -1, x.size(-1))


def gates(x, weight):
    """Sigmoids (B, T, H) of weight (H, channels) times the leading channels of x (B, T, C)."""
    return F.linear(x[..., : weight.size(1)], weight.to(x.dtype)).sigmoid()


class CausalSelfAttention(nn.Module):
    """Multi-head attention: each token attends to the tokens that the mask lets it see."""
    def __init__(self, args, rotary, layer):
        super().__init__()
        assert args.model_dim % args.num_heads == 0, "model_dim is not a multiple of num_heads"
        self.num_heads = args.num_heads
        weights = torch.empty(4, args.model_dim, args.model_dim)  # Q, K, V, output
        init_uniform(weights, args.qkv_init)[3] = 0
        self.c_qkvo = nn.Parameter(weights.view(args.model_dim, -1))  # (C, 4C), only for Muon
        self.rotary = rotary
        self.has_key_offset = args.window_pattern[layer] == "L"
        self.has_paired_heads = args.window_pattern[layer] == "P"
        assert not self.has_paired_heads or args.num_heads % 2 == 0, "a pair needs two heads"
        self.attention_kernel = args.attention_kernel

    def forward(self, x, extra_values, c, mask):  # c: coefficients by name
        B, T, C = x.shape
        weights = self.c_qkvo.view(4, C, C)
        qkv = F.linear(x, c["value"] * weights[:3].flatten(0, 1))  # norm undoes the factor in q, k
        q, k, v = qkv.view(B, T, 3, self.num_heads, -1).unbind(2)  # (B, T, H, D)
        if extra_values is not None:
            v = v + extra_values
        q, k = norm(q), norm(k)  # unit RMS, which bounds scores
        if self.has_paired_heads:
            q, k, v = pair_heads(q), pair_heads(k), pair_heads(v)
        q, k = self.rotary(q), self.rotary(k)
        if self.has_key_offset:
            k = offset_keys(k)
        if self.attention_kernel == "dense":
            heads = [t.transpose(1, 2) for t in (q, k, v)]  # (B, H, T, D); paired: (B, H/2, 2T, D)
            y = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=self.rotary.scale)
            y = y.transpose(1, 2)
        else:  # FlashAttention, on all rows end to end (FA3: arXiv 2407.08608)
            starts, longest, window = mask
            y = varlen_attn(*(t.flatten(0, 1) for t in (q, k, v)), starts, starts, longest, longest,
                            scale=self.rotary.scale, window_size=(window, 0)).view_as(v)
        # A gate can switch a head off for a token.
        y = y.reshape(B, T, self.num_heads, -1) * gates(x, c["gate"])[..., None]
        return F.linear(y.reshape(B, T, C), c["output"] * weights[3])  # cheaper than scaling y


class SquaredReLUMLP(torch.autograd.Function):
    """relu(x w_in)^2 w_out' for x (N, C), weights (C, 4C); saves post, the square, not its root."""
    @staticmethod
    def forward(ctx, x, w_in, w_out, use_triton):
        post = relu2_product(x, w_in, use_triton=use_triton)  # (N, 4C)
        ctx.save_for_backward(x, w_in, w_out, post)
        ctx.use_triton = use_triton
        return post @ w_out.T

    @staticmethod
    def backward(ctx, grad):
        x, w_in, w_out, post = ctx.saved_tensors
        # The slope of the square is 2 relu(x w_in), and the ReLU is the root of the stored `post`.
        grad_pre = relu2_product(grad, w_out, post, ctx.use_triton)  # (N, 4C)
        return grad_pre @ w_in.T, x.T @ grad_pre, grad.T @ post, None


class MLP(nn.Module):
    """Linear map to four times the width, squared ReLU (arXiv 2109.08668), linear map back."""
    def __init__(self, args):
        super().__init__()
        hidden_dim = 4 * args.model_dim
        weight = init_uniform(torch.empty(hidden_dim, args.model_dim))
        self.c_fc = nn.Parameter(weight.T.contiguous())  # transposed: one Muon batch with c_proj
        self.c_proj = nn.Parameter(torch.zeros(args.model_dim, hidden_dim))
        self.use_triton = args.use_triton

    def forward(self, x):
        y = SquaredReLUMLP.apply(x.flatten(0, -2), self.c_fc, self.c_proj, self.use_triton)
        return y.view_as(x)


def smear(x, scale, gate_weight):
    """x (B, T, C) plus scale * x's gate * the previous token's x, even across documents."""
    return torch.cat((x[:, :1], x[:, 1:] + scale * gates(x[:, 1:], gate_weight) * x[:, :-1]), dim=1)


def bigram_hashes(inputs, rows):
    """Row numbers (B, T) of bigrams (previous token, token), across documents too; many collide."""
    hashes = (36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1]) % (rows - 1)  # the record's factors
    return F.pad(hashes, (1, 0), value=rows - 1)  # the last row: no previous token


class BigramEmbed(nn.Module):
    """A learned vector per bigram (previous token, token), initially zero."""
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(args.bigram_rows, args.model_dim))

    def forward(self, inputs):  # (B, T) to (B, T, C)
        return F.embedding(bigram_hashes(inputs, len(self.weight)), self.weight)


class Block(nn.Module):
    """One transformer layer; its branches add nothing initially: both output maps start at zero."""
    def __init__(self, args, rotary, layer):
        super().__init__()
        has_attention = layer != args.layer_without_attention
        self.attn = CausalSelfAttention(args, rotary, layer) if has_attention else None
        self.value_table = args.value_embed_pattern[layer]
        self.window_kind = args.window_pattern[layer]
        self.mlp = MLP(args)

    def forward(self, x, value_embeds, sources, c, masks):  # sources, c: dicts by name
        x = c["x"] * x + c["x0"] * sources["x0"] + c["bigrams"] * sources["bigrams"]
        if self.attn is not None:
            normed = norm(x)
            extra_values = None
            if self.value_table != ".":
                value_embed = value_embeds[self.value_table]
                factors = 2 * gates(normed, c["value_gate"])[..., None]  # initially 1
                extra_values = factors * value_embed.unflatten(2, (self.attn.num_heads, -1))
            x = x + self.attn(normed, extra_values, c, masks[self.window_kind])
        return x + self.mlp(norm(x))


def cross_entropy(logits, targets, weights):
    """Mean over tokens of the weighted cross-entropies with the next len(weights) tokens.

    Multi-token prediction (arXiv 2404.19737), from one head. logits (B, T, V) are capped, so
    exponentials cannot overflow. targets (B, T): the loss is 0 for targets beyond the end of a row.
    """
    count = len(weights)
    targets = F.pad(targets, (0, count - 1), value=-1).unfold(1, count, 1)  # (B, T, count)
    log_sums = logits.float().exp().sum(-1).log()  # (B, T)
    ids = torch.arange(logits.size(-1), device=logits.device)
    loss = 0.0
    for target, weight in zip(targets.unbind(-1), weights, strict=True):
        is_target = ids == target[..., None]
        target_logits = torch.where(is_target, logits, 0).sum(-1, dtype=torch.float32)  # (B, T)
        loss = loss + weight * torch.where(target >= 0, log_sums - target_logits, 0)
    return loss.mean()


class GPT(nn.Module):
    """Token ids to next-token logits or, given targets, to the tokens' mean weighted loss."""
    def __init__(self, args):
        super().__init__()
        self.args = args
        assert args.skip_from < args.skip_to < args.num_layers, "skip_to should be after skip_from"
        assert args.attention_kernel in ("FA2", "FA3", "dense"), "unknown attention kernel"
        if args.attention_kernel == "FA3":
            activate_flash_attention_impl("FA3")  # replaces PyTorch's own FA2
        self.lm_head = Head(args)  # while tied also the embedding; embed's first values are unused
        self.embed = nn.Embedding.from_pretrained(self.lm_head.weight.data.clone(), freeze=False)
        self.smear_gate = nn.Parameter(torch.zeros(1, args.gate_channels))
        # Value embeddings: a value residual (arXiv 2410.17897) from learned tables.
        pattern = args.value_embed_pattern
        assert len(pattern) == args.num_layers, "value_embed_pattern needs num_layers symbols"
        self.value_embeds = nn.ModuleDict({name: nn.Embedding(args.vocab_size, args.model_dim)
                                           for name in sorted(set(pattern) - {"."})})
        for embed in self.value_embeds.values():
            nn.init.zeros_(embed.weight)  # adds nothing initially
        self.bigram_embed = BigramEmbed(args)
        longest = max(args.val_seq_len, *(row.seq_len for row in stages(args)))
        # One for all layers; each slot of paired heads has a position.
        self.rotary = Rotary(args.model_dim // args.num_heads, 2 * longest)
        self.blocks = nn.ModuleList(Block(args, self.rotary, i) for i in range(args.num_layers))
        self.attention_layers = [i for i, block in enumerate(self.blocks) if block.attn is not None]
        self.attention_gates = nn.Parameter(torch.zeros(
            len(self.attention_layers), args.num_heads, args.gate_channels))
        self.value_layers = [i for i in self.attention_layers if pattern[i] != "."]
        self.value_gates = nn.Parameter(torch.zeros(
            len(self.value_layers), args.num_heads, args.gate_channels))
        self.skip_gate = nn.Parameter(torch.zeros(1, args.gate_channels))
        self.layer_init = dict(x=1.1, value=0.5, output=1.0, bigrams=args.bigram_scale)
        self.model_init = dict(smear=0.0, backout=0.5, skip=-1.5)  # all values as in the record
        scalars = [*self.layer_init.values()] * args.num_layers + [*self.model_init.values()]
        self.scalars = nn.Parameter(torch.tensor(scalars))
        self.x0_weights = nn.Parameter(torch.zeros(args.num_layers))
        if args.bf16:
            for module in self.children():  # embedding and head give the stream its dtype
                module.bfloat16()  # gates and scalars, parameters of the model itself, stay float32
        self.set_window(args.window_end, args.long_window_end)  # as in the last validation

    def set_window(self, window, long_window):
        # The compiler treats Python numbers as constants and compiles once per stage.
        self.window, self.long_window = window, long_window
        self.rotary.set_window(window, self.args)  # YaRN follows window, not long_window

    def named_coefficients(self):
        """Coefficients by name: a dict for each layer, then one for the model."""
        L, width = len(self.blocks), len(self.layer_init)
        rows = self.scalars[: width * L].view(L, width)
        layers = [dict(zip(self.layer_init, row, strict=True), x0=x0_weight)
                  for row, x0_weight in zip(rows, self.x0_weights, strict=True)]
        for i, gate in zip(self.attention_layers, self.attention_gates, strict=True):
            layers[i]["gate"] = gate
        for i, gate in zip(self.value_layers, self.value_gates, strict=True):
            layers[i]["value_gate"] = gate
        return layers, dict(zip(self.model_init, self.scalars[width * L :], strict=True))

    def forward(self, inputs, targets=None, tied=False, target_weights=(1.0,)):
        short = max(1, self.window // self.args.tile_size // 2) * self.args.tile_size  # whole tiles
        windows = dict(L=self.long_window, S=short, P=short)  # P: in slots, so half as many tokens
        masks = attention_masks(inputs, windows, self.training, self.args)
        per_layer, per_model = self.named_coefficients()
        x = F.embedding(inputs, self.lm_head.weight if tied else self.embed.weight)  # (B, T, C)
        x = x0 = norm(smear(x, per_model["smear"], self.smear_gate))
        value_embeds = {name: embed(inputs) for name, embed in self.value_embeds.items()}
        sources = dict(x0=x0, bigrams=self.bigram_embed(inputs))  # the tensors that layers mix in
        outputs = []  # one per layer
        for i, (block, c) in enumerate(zip(self.blocks, per_layer, strict=True)):
            if i == self.args.skip_to:
                skip = 2 * gates(x0, self.skip_gate) * outputs[self.args.skip_from]
                x = x + per_model["skip"].sigmoid() * skip
            x = block(x, value_embeds, sources, c, masks)
            outputs.append(x)
        # The output of backout_layer helps later layers more than the head.
        x = x - per_model["backout"] * outputs[self.args.backout_layer]
        logits = self.lm_head(norm(x))  # (B, T, V)
        logits = logits if self.training else logits.float()  # bfloat16 in training: fewer bytes
        # A softcap (arXiv 2408.00118), shifted: logits lie between 0 and cap_height.
        logits = (logits + self.args.cap_shift) / self.args.cap_width
        logits = self.args.cap_height * torch.sigmoid(logits)
        return logits if targets is None else cross_entropy(logits, targets, target_weights)


# ------------------------------------------- Optimizer -------------------------------------------
# Polar Express (arXiv 2505.16932): a, b, c of each step, optimal for the singular values it meets.
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def polar_express(matrices, dtype, use_triton=False):
    """Orthogonalises matrices (..., m, n), m <= n, computing in `dtype`; bfloat16 is enough.

    Five steps of X <- aX + b(XX')X + c(XX')^2 X keep singular vectors and map singular values in
    [0.001, 1] to about [0.86, 1.14].
    """
    X = matrices.to(dtype).flatten(0, -3)  # (N, m, n)
    X = X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)  # singular values < 1, with a margin
    for a, b, c in POLAR_EXPRESS:
        A = symmetric_product(X, use_triton=use_triton)  # XX'
        B = symmetric_product(A, A, alpha=c, beta=b, use_triton=use_triton)  # bA + cAA'
        X = torch.baddbmm(X, B, X, beta=a)  # aX + BX
    return X.view_as(matrices)


def even_out(updates, mean_square, beta):
    """Divides each column of updates (N, m, n) by its running RMS; a matrix keeps its norm.

    NorMuon (arXiv 2510.05491): `mean_square` (N, 1, n) is each column's running mean square,
    updated in place. Orthogonal updates have equally long rows; where m < n, columns differ.
    """
    current = updates.to(mean_square.dtype).square().mean(dim=1, keepdim=True)  # (N, 1, n)
    mean_square.lerp_(current, 1 - beta)
    scale = mean_square.clamp(min=1e-10).rsqrt()
    before, after = current.sum(2, keepdim=True), (current * scale.square()).sum(2, keepdim=True)
    norm_ratio = (before / after.clamp(min=1e-20)).sqrt()  # (N, 1, 1); a norm of 0 stays 0
    return updates * (scale * norm_ratio).to(updates.dtype)


def join_bits(weights, remainders):
    """float32 numbers from their upper 16 bits, as bfloat16, and their lower 16 bits, as int16."""
    upper = weights.view(torch.int16).int() << 16
    return (upper | (remainders.int() & 0xFFFF)).view(torch.float32)


def split_bits(numbers):
    """Inverse of `join_bits`: weights are truncated, not rounded; remainders are the lost bits."""
    bits = numbers.view(torch.int32)
    return (bits >> 16).short().view(torch.bfloat16), bits.short()


def cautious_update(weights, updates, rates, decay, remainders=None):
    """Subtracts rates * (updates + decay * weights), in place; decays only where signs agree.

    Where they agree, the update moves the weight towards zero anyway (arXiv 2510.12402).
    bfloat16 weights have remainders: the update is that of float32 weights, see `join_bits`.
    """
    exact = weights if remainders is None else join_bits(weights, remainders)
    agree = updates * exact >= 0  # >= here and > in Adam: as in the record
    exact.sub_(rates * (updates + decay * exact * agree))
    if remainders is not None:
        upper, lower = split_bits(exact)
        weights.copy_(upper)
        remainders.copy_(lower)


def adam_update(param, grad, mean, mean_square, rate, decay, beta1, beta2, eps):
    """Adam (arXiv 1412.6980), in place; `rate` is the bias-corrected lr, `decay` has lr squared."""
    grad = grad.to(mean.dtype)  # means are float32: bfloat16 rounds their small steps away
    mean.lerp_(grad, 1 - beta1)
    mean_square.lerp_(grad.square(), 1 - beta2)
    update = rate * mean / (mean_square.sqrt() + eps)  # eps is added to the uncorrected root
    param.sub_(update + decay * param * (update * param > 0))  # decays where signs agree


class ShardedAdam(torch.optim.Optimizer):
    """Adam: each rank updates its share of a parameter's rows, or all of a `replicated` one."""
    def __init__(self, groups, betas, eps, compiled):
        super().__init__(groups, dict(betas=betas, eps=eps, weight_decay=0.0, replicated=False))
        self.adam_update = torch.compile(adam_update, dynamic=False, disable=not compiled)

    @torch.no_grad()
    def step(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        reductions = []  # in flight; unless replicated, each rank gets only its rows' gradient
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue  # a tied embedding has none
                if group["replicated"]:
                    grad = param.grad
                    reduction = dist.all_reduce(grad, async_op=True)
                else:
                    assert len(param) % world_size == 0, (
                        f"{world_size} ranks cannot share {len(param)} rows: alter one of them")
                    grad = torch.empty_like(param.grad[: len(param) // world_size])
                    reduction = dist.reduce_scatter_tensor(grad, param.grad, async_op=True)
                reductions.append((group, param, grad, reduction))
        gathers = []  # in flight, like reductions, while other parameters are updated
        for group, param, grad, reduction in reductions:
            reduction.wait()
            rows = param if group["replicated"] else param.chunk(world_size)[rank]
            state = self.state[param]
            if not state:
                zeros = torch.zeros_like(rows, dtype=torch.float32)
                state.update(mean=zeros, mean_square=zeros.clone(), step=0)
            state["step"] += 1
            beta1, beta2 = group["betas"]
            correction = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
            rate = torch.tensor(group["lr"] * correction)  # a new Python float would recompile
            decay = torch.tensor(group["lr"] ** 2 * group["weight_decay"])
            self.adam_update(rows, grad, state["mean"], state["mean_square"], rate, decay, beta1,
                             beta2, group["eps"])
            if not group["replicated"]:
                gathers.append(dist.all_gather_into_tensor(param, rows, async_op=True))
        for gather in gathers:
            gather.wait()

    @torch.no_grad()
    def duplicate(self, source, target):
        """Copies the values of the parameter `source`, and its state, to `target`."""
        target.copy_(source)
        self.state[target] = deepcopy(self.state[source])


def padded(stacks, world_size):
    """The stacks (k, m, n), then one of zeros that makes the ranks' shares equally large."""
    padding = -sum(map(len, stacks)) % world_size
    return [*stacks, stacks[0].new_zeros(padding, *stacks[0].shape[1:])]


def muon_update(grads, momentum_buffer, mean_square, momentum, beta, dtype, use_triton):
    """The evened-out orthogonal Nesterov momentum of matrices (..., m, n); changes the state."""
    grads = grads.to(momentum_buffer.dtype)  # float32: bfloat16 would round small changes away
    momentum_buffer.lerp_(grads, 1 - momentum)  # a mean, not a sum; polar_express drops the scale
    updates = polar_express(grads.lerp(momentum_buffer, momentum), dtype, use_triton)
    return even_out(updates, mean_square, beta)


class Muon(torch.optim.Optimizer):
    """NorMuon with cautious weight decay, sharded by matrix: (..., m, n) with m <= n."""
    def __init__(self, groups, lr, momentum, neuron_beta, weight_decay, bf16, compiled, use_triton):
        # A group's matrices share a shape; the first num_attentions hold four (m, m) matrices each.
        super().__init__(groups, dict(
            num_attentions=0, neuron_beta=neuron_beta, lr=lr, momentum=momentum,
            weight_decay=weight_decay))
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.muon_update = torch.compile(
            partial(muon_update, use_triton=use_triton), dynamic=False, disable=not compiled)
        self.cautious_update = torch.compile(cautious_update, dynamic=False, disable=not compiled)
        self.weights = []  # per group: its matrices, padded; the parameters are views of these
        self.lr_factors = []  # per group: a number for each of its matrices
        for group in self.param_groups:
            stacks = [param.detach().view(-1, *param.shape[-2:]) for param in group["params"]]
            stacks = padded(stacks, dist.get_world_size())
            weights = torch.cat(stacks)
            views = weights.split([len(stack) for stack in stacks])
            for param, view in zip(group["params"], views, strict=False):  # all but the padding
                param.data = view.view_as(param)
            self.weights.append(weights)
            factors = [*group["lr_factors"], 1.0]  # the last is the padding's
            self.lr_factors.append(torch.cat([
                torch.full((len(view), 1, 1), factor, device=view.device)
                for view, factor in zip(views, factors, strict=True)]))

    @torch.no_grad()
    def step(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        scatters = []  # in flight; each rank receives only its share of the gradients
        for group, weights in zip(self.param_groups, self.weights, strict=True):
            stacks = [param.grad.view(-1, *weights.shape[1:]) for param in group["params"]]
            stack = torch.cat(padded(stacks, world_size))  # (N, m, n)
            grads = torch.empty_like(stack[: len(stack) // world_size])
            scatters.append((grads, dist.reduce_scatter_tensor(grads, stack, async_op=True)))
        gathers = []  # in flight, like scatters, while other groups are updated
        for group, weights, lr_factors, (grads, scatter) in zip(
                self.param_groups, self.weights, self.lr_factors, scatters, strict=True):
            scatter.wait()
            state = self.state[group["params"][0]]  # the group's only state: for this rank's share
            if not state:
                # load_state_dict would cast these to bfloat16, but warm_up loads only empty states
                state["momentum_buffer"] = torch.zeros_like(grads, dtype=torch.float32)
                state["mean_square"] = torch.zeros_like(state["momentum_buffer"][:, :1])
                if weights.dtype == torch.bfloat16:  # they start as bfloat16: no remainder yet
                    state["remainders"] = torch.zeros_like(grads, dtype=torch.int16)
            momentum = torch.tensor(group["momentum"], dtype=torch.float64)  # a float recompiles
            share = slice(rank * len(grads), (rank + 1) * len(grads))
            num_attentions = min(max(group["num_attentions"] - share.start, 0), len(grads))
            m = grads.size(1)  # an attention is four (m, m) matrices, orthogonalised separately
            tensors = grads, state["momentum_buffer"], state["mean_square"]
            parts = [[tensor[:num_attentions].view(-1, tensor.size(1), m) for tensor in tensors],
                     [tensor[num_attentions:] for tensor in tensors]]
            updates = [self.muon_update(*part, momentum, group["neuron_beta"], self.dtype)
                       .view(-1, *grads.shape[1:]) for part in parts if len(part[0])]
            rates = group["lr"] * lr_factors[share]
            decay = torch.tensor(group["lr"] * group["weight_decay"])  # times rates, so lr squared
            self.cautious_update(
                weights[share], torch.cat(updates), rates, decay, state.get("remainders"))
            gathers.append(dist.all_gather_into_tensor(weights, weights[share], async_op=True))
        for gather in gathers:
            gather.wait()


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


def muon_groups(model, args):
    """Muon's groups; the matrices of one group have one shape."""
    attentions = [block.attn for block in model.blocks if block.attn is not None]
    matrices = [attn.c_qkvo for attn in attentions]
    matrices += [param for block in model.blocks for param in block.mlp.parameters()]
    lr_factors = [args.attention_lr_factor] * len(attentions)
    lr_factors += [args.mlp_in_lr_factor, args.mlp_out_lr_factor] * len(model.blocks)
    # 10 attention and 22 MLP matrices make two groups of 16: no padding, 2 per rank on 8 ranks.
    # In the first one, ranks 0 to 4 get two attentions each and ranks 5 to 7 two MLP matrices.
    half = len(matrices) // 2
    return [
        dict(params=matrices[:half], lr_factors=lr_factors[:half], num_attentions=len(attentions)),
        dict(params=matrices[half:], lr_factors=lr_factors[half:]),
    ]


def make_optimizers(model, args):
    """Muon for muon_groups, Adam for the rest; lr_multiplier scales each group's initial_lr."""
    small = dict(betas=(args.small_beta1, args.small_beta2), replicated=True)  # too small to shard
    lookup_params = [*model.value_embeds.parameters(), model.bigram_embed.weight]
    head_and_embed = [model.lm_head.weight, model.embed.weight]
    adam_groups = [
        dict(params=lookup_params, lr=args.value_embed_lr,
             betas=(args.value_embed_beta1, args.adam_beta2),
             weight_decay=args.adam_weight_decay * args.value_embed_decay_factor),
        dict(params=head_and_embed, lr=args.head_lr, betas=(args.head_beta1, args.adam_beta2),
             weight_decay=args.adam_weight_decay * args.head_decay_factor),
        dict(params=[model.x0_weights], lr=args.scalar_lr, replicated=True),
        dict(params=[model.scalars], lr=args.scalar_lr, **small),
        dict(params=[model.smear_gate], lr=args.smear_gate_lr, **small),
        dict(params=[model.skip_gate], lr=args.skip_gate_lr, **small),
        dict(params=[model.attention_gates, model.value_gates], lr=args.gate_lr, **small,
             weight_decay=args.adam_weight_decay),
    ]
    adam = ShardedAdam(adam_groups, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps,
                       compiled=args.compile)
    muon = Muon(muon_groups(model, args), lr=args.muon_lr, momentum=args.muon_momentum,
                neuron_beta=args.neuron_beta, weight_decay=args.muon_weight_decay, bf16=args.bf16,
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


def optimizers_due(optimizers, step, args):
    """The optimizers due: Muon always; Adam every adam_every steps, on their summed gradients."""
    adam, muon = optimizers
    return [adam, muon] if (step + 1) % args.adam_every == 0 else [muon]


def warm_up(model, optimizers, load_train, args):
    """Runs a few training steps to compile the kernels, then restores all states."""
    initial_states = deepcopy([part.state_dict() for part in (model, *optimizers)])
    for i in range(1, args.kernel_warmup_steps + 1):
        step = math.ceil(args.scheduled_steps * i / args.kernel_warmup_steps)  # 6 visit all stages
        inputs, targets = next(load_train(step=step))
        model.set_window(*window_sizes(step, args))
        weights = torch.tensor(target_weights(step, args)).to(inputs.device)
        model(inputs, targets, step <= last_tied_step(args), weights).backward()
        for optimizer in optimizers_due(optimizers, i - 1, args):
            optimizer.step()
            optimizer.zero_grad()
    model.zero_grad()  # drops gradients that Adam has not used yet
    for part, state in zip((model, *optimizers), initial_states, strict=True):
        part.load_state_dict(state)


@torch.no_grad()
def validate(model, batches, micro_steps, tied):
    """The mean loss over micro_steps batches of every rank."""
    model.eval()
    batches = itertools.islice(batches, micro_steps)
    loss = torch.stack([model(inputs, targets, tied) for inputs, targets in batches]).mean()
    model.train()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def train(model, optimizers, train_batches, load_val, log, clock, args):
    """Takes train_steps optimizer steps; load_val() restarts the data for each validation."""
    micro_tokens = args.micro_batch_size * args.train_seq_len * dist.get_world_size()  # all ranks
    val_micro_tokens = args.micro_batch_size * args.val_seq_len * dist.get_world_size()
    grad_accum_steps = args.total_batch_size // micro_tokens  # micro-batches per rank in every step
    device = next(model.parameters()).device
    weights_by_step = [torch.tensor(target_weights(step, args)).to(device)
                       for step in range(args.train_steps)]  # before the clock starts
    clock.start()
    for step in range(args.train_steps + 1):
        last_step = step == args.train_steps
        tied = step <= last_tied_step(args)
        windows = window_sizes(step, args)
        if windows != (model.window, model.long_window):  # before the validation, which uses them
            model.set_window(*windows)
        if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
            with clock.paused():
                val_loss = validate(model, load_val(), args.val_tokens // val_micro_tokens, tied)
            log.step(step, clock.elapsed_ms(), f"val_loss:{val_loss:.4f} ")
        if last_step:
            break

        train_loss = 0.0
        for inputs, targets in itertools.islice(train_batches, grad_accum_steps):
            loss = model(inputs, targets, tied, weights_by_step[step])
            # Logit gradients are at most 1.75 (target weights) x 23 / 7.5 / 4 (cap's slope) = 1.34.
            (loss * targets.numel()).backward()  # a sum over tokens: adam_eps is set for it
            train_loss += loss.detach() / grad_accum_steps
        set_schedules(optimizers, step, args)
        for optimizer in optimizers_due(optimizers, step, args):
            optimizer.step()
            optimizer.zero_grad()
        if step == last_tied_step(args):
            adam, _ = optimizers
            adam.duplicate(model.lm_head.weight, model.embed.weight)
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
    warm_up(model, optimizers, load_train, args)
    gc.collect()
    gc.freeze()  # garbage collections in the timed run skip the compiler's objects
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # excludes the warm-up's copy of all states
    train(model, optimizers, prefetched(load_train(), args, device), load_val, log, clock, args)
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
