"""Attention as its fused kernels leave it in memory, for scripts that run on fake devices."""

import dataclasses
from unittest.mock import patch

import torch
import torch.nn.functional as F

ROWS = 16  # a rule's tiles are alike from row to row


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
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return FusedAttention.apply(q, k, v)


def block_mask(rule, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE=128):
    """In place of create_block_mask: a mask with room for all tiles, as compiled code keeps it.

    The rule is tried on one pair, so that a fault in it shows.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rule(*(torch.zeros(1, dtype=torch.int64, device=device) for _index in range(4)))
    rows, columns = -(-Q_LEN // BLOCK_SIZE), -(-KV_LEN // BLOCK_SIZE)
    counts = torch.zeros((1, 1, rows), dtype=torch.int32, device=device)
    tiles = torch.zeros((1, 1, rows, columns), dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(counts, tiles, BLOCK_SIZE=BLOCK_SIZE, mask_mod=rule)


def keys_per_query(module, args, step: int) -> float | None:
    """Keys for each query in the tiles that a script's mask lists in `step`, counted with its own
    rule in every ROWS-th row of tiles; None for a script without such a mask.

    The sequence is one document, so this is an upper bound: borders leave fewer tiles.
    """
    if not hasattr(module, "create_block_mask"):
        return None

    class Counted(Exception):
        pass

    def count(rule, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE=128):
        keys, zero = torch.arange(KV_LEN), torch.tensor(0)
        rows = torch.arange(Q_LEN).view(-1, BLOCK_SIZE, 1)[::ROWS]
        tiles = [rule(zero, zero, row, keys).view(BLOCK_SIZE, -1, BLOCK_SIZE).any(0).any(1).sum()
                 for row in rows]
        raise Counted(BLOCK_SIZE * sum(tiles).item() / len(rows))

    narrow = dataclasses.replace(args, model_dim=2 * args.num_heads, vocab_size=2)
    model = module.GPT(narrow)
    if hasattr(model, "window"):
        model.window.fill_(module.window_size(step, args))
    with patch.object(module, "create_block_mask", count):
        try:
            model(torch.zeros((1, args.seq_len), dtype=torch.int64))
        except Counted as found:
            return found.args[0]


def replace(module, compiled: bool) -> None:
    """Puts fused attention in place of what a script's module uses; FlexAttention is fused by
    itself where it is compiled."""
    F.scaled_dot_product_attention = fused
    if compiled:
        return
    for name, function in (("flex_attention", fused), ("create_block_mask", block_mask)):
        if hasattr(module, name):
            setattr(module, name, function)
