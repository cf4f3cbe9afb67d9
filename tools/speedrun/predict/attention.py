"""Attention as its fused kernels leave it in memory, for scripts that run on fake devices."""

import dataclasses
from unittest.mock import patch

import torch
import torch.nn.functional as F

from speedrun.compat import flash_attention
from speedrun.scripts.find import handles_for
from speedrun.scripts.sizes import fitting, length_names

ROWS = 32  # of tiles, of which one is asked: most are alike


class FusedAttention(torch.autograd.Function):
    """Keeps queries, keys, values, output and a float32 for each query, and no scores."""

    @staticmethod
    def forward(ctx, q, k, v):  # (B, H, T, D)
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_rest = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def fused(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, block_mask=None):
    """In place of torch's functions, which keep all scores on a device that they do not know.

    Raises TypeError if queries, keys and values differ in their dtype.
    """
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"attention of {q.dtype}, {k.dtype} and {v.dtype}")
    if torch.compiler.is_compiling():
        return flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return FusedAttention.apply(q, k, v)


def block_mask(rule, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE=128):
    """In place of create_block_mask: a mask with room for all tiles, as compiled code keeps it.

    The rule is tried on one pair, so that a fault in it shows.
    """
    rule(*(torch.zeros(1, dtype=torch.int64, device=device) for _index in range(4)))
    counts = torch.zeros(-(-Q_LEN // BLOCK_SIZE), dtype=torch.int32, device=device)
    return _listing(counts, rule, KV_LEN, BLOCK_SIZE)


def _listing(counts, rule, KV_LEN, BLOCK_SIZE):
    """A BlockMask that lists so many tiles in each of its rows, whichever they are."""
    from torch.nn.attention.flex_attention import BlockMask

    room = counts.new_zeros((1, 1, len(counts), -(-KV_LEN // BLOCK_SIZE)))
    return BlockMask.from_kv_blocks(counts[None, None], room, BLOCK_SIZE=BLOCK_SIZE, mask_mod=rule)


def keys_per_query(module, args, step: int) -> float | None:
    """Keys per query in the window of `step`, the mean over the layers: those in the tiles that the
    masks of FlexAttention list, or those that FlashAttention sees; None without masks.

    The script's model runs, made narrow, on one sequence. The sequence is one document, so this is
    an upper bound: shorter documents leave fewer keys. A mask's rule is applied to one of ROWS rows
    of tiles.
    """
    handles = handles_for(module.__file__)
    if not handles.WINDOW:
        return None
    keys = []

    def sampled_mask(rule, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE=128):
        zero, every = torch.tensor(0), torch.arange(KV_LEN)
        rows, tiles = torch.arange(Q_LEN).split(BLOCK_SIZE), []
        for row in rows[min(ROWS, len(rows)) // 2 :: ROWS]:
            visible = F.pad(rule(zero, zero, row[:, None], every), (0, -KV_LEN % BLOCK_SIZE))
            tiles.append(visible.view(len(row), -1, BLOCK_SIZE).any(0).any(1).sum())
        return _listing(torch.stack(tiles).int(), rule, KV_LEN, BLOCK_SIZE)

    def noted(q, k, v, block_mask, scale=None):
        counts = (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks)
        tiles = sum(count.float().mean().item() for count in counts if count is not None)
        keys.append(tiles * block_mask.BLOCK_SIZE[1])
        return v

    def counted(q, k, v, starts, *lengths, window_size, scale):
        t = torch.arange(len(q))
        positions = t - starts[torch.searchsorted(starts, t, right=True) - 1]  # in a document
        keys.append((positions.clamp(max=window_size[0]) + 1).float().mean().item())
        return v

    on_a_cpu = fitting(dict(bf16=False, use_triton=False), vars(args))
    narrow = dataclasses.replace(args, model_dim=4 * args.num_heads, vocab_size=16, **on_a_cpu)
    with (patch.object(module, "create_block_mask", sampled_mask, create=True),
          patch.object(module, "varlen_attn", counted, create=True),
          patch.object(module, "flex_attention", noted, create=True), torch.no_grad()):
        seq_len = getattr(args, length_names(vars(args))[0])
        model = module.GPT(narrow).eval()
        handles.set_window(model, *handles.window_at(module, step, args))
        model(torch.zeros((1, seq_len), dtype=torch.int64))
    return sum(keys) / len(keys) if keys else None


def replace(module, compiled: bool) -> None:
    """Puts fused attention in place of what a script's module uses; FlexAttention is fused by
    itself where it is compiled."""
    F.scaled_dot_product_attention = fused
    if compiled:
        return
    for name, function in (("flex_attention", fused), ("create_block_mask", block_mask)):
        if name in vars(module):  # imported
            setattr(module, name, function)
