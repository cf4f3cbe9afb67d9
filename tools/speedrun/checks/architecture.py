"""A small transformer with a switch for everything that the milestones change, right or wrong.

It serves to say what a learner's model does that the milestone's does not: the setting that gives
the learner's logits names the difference. What is right is always the milestone's own snapshot.
"""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Architecture:
    """What a model does; speedrun.checks.features has the values in words."""

    positions: str = "rotary"  # table (no rotation), none
    rotated: str = "qk"  # qkv, q, k
    frequencies: str = "10000"
    activation: str = "gelu"
    norms: str = "all"  # no_attn, no_mlp, no_final
    qk_norm: str = "none"  # both, q, k, width, qkv
    attn_factor: str = "depth"  # of the attention branch: literal (1 / sqrt(24)), one
    score_scale: str = "head"  # of the scores: width, one
    mask: str = "causal"  # none, strict, both_ways (as far ahead as the window is long)
    documents: str = "ignored"  # apart, exclusive, first_row, across (counted over the rows)
    window: str = "ignored"  # below, up_to, short, half
    embed_norm: bool = False
    softcap: float | None = None
    value_residual: str = "none"  # first, previous
    skips: str = "none"  # lifo, fifo, inputs, after (added behind the block)
    shortcut: str = "stream"  # what a layer starts from: embedding


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "square": torch.square,
    "silu": F.silu,
}

_BASELINE = Architecture(positions="table", attn_factor="literal")
_MUON = Architecture()
_MODERN = replace(_MUON, activation="relu2", qk_norm="both", attn_factor="one")
_SKIPS = replace(_MODERN, embed_norm=True, softcap=30.0, value_residual="first", skips="lifo")
_FLEX = replace(_SKIPS, documents="apart", window="below")
ARCHITECTURES = {
    "00": _BASELINE, "01": _MUON, "02": _MODERN, "03": _MODERN, "04": _SKIPS, "05": _FLEX,
}


def differing(a: Architecture, b: Architecture) -> list[str]:
    """The names of the switches in which two architectures differ."""
    return [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]


@torch.no_grad()
def logits(arch: Architecture, weights: dict, inputs: torch.Tensor, args, window=None):
    """The logits (B, T, V) of an architecture for `inputs` (B, T), all scalars at their start.

    weights: {role: tensors}, as speedrun.checks.matrices reads them.
    """
    x = F.embedding(inputs, weights["embed"])
    if arch.positions == "table":
        x = x + weights["positions"][: inputs.size(1)]
    if arch.embed_norm:
        x = _norm(x)
    start, visible = x, _visible(arch, inputs, window, args)
    layers, skips, values = args.num_layers, [], None
    for layer in range(layers):
        matrix = {role: weights[role][layer] for role in ("q", "k", "v", "o", "up", "down")}
        skip = 0.0
        if layer >= layers // 2 and arch.skips != "none":
            skip = skips.pop(0 if arch.skips == "fifo" else -1)
        x = x if arch.skips == "after" else x + skip
        x = start if arch.shortcut == "embedding" else x
        before = x
        y, values = _attention(arch, x, matrix, values, visible, args)
        factor = dict(depth=(2 * layers) ** -0.5, literal=24**-0.5, one=1.0)[arch.attn_factor]
        x = x + factor * y
        hidden = (x if arch.norms == "no_mlp" else _norm(x)) @ matrix["up"].T
        x = x + ACTIVATIONS[arch.activation](hidden) @ matrix["down"].T
        x = x + skip if arch.skips == "after" else x
        if layer < layers // 2:
            skips.append(before if arch.skips == "inputs" else x)
    out = (x if arch.norms == "no_final" else _norm(x)) @ weights["head"].T
    return out if arch.softcap is None else arch.softcap * torch.tanh(out / arch.softcap)


def _norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _attention(arch, x, matrix, values, visible, args):
    """The output of the attention, and what the next layer gets as values."""
    B, T, C = x.shape
    inside = x if arch.norms == "no_attn" else _norm(x)
    q, k, v = (inside @ matrix[role].T for role in "qkv")
    if arch.qk_norm == "width":
        q, k = _norm(q), _norm(k)
    q, k, v = (y.view(B, T, args.num_heads, -1) for y in (q, k, v))
    first = v if values is None else values
    if arch.value_residual != "none":
        v = 0.5 * v + 0.5 * first
    normed = dict(both="qk").get(arch.qk_norm, arch.qk_norm)
    if normed in ("q", "k", "qk", "qkv"):
        q, k, v = (_norm(y) if role in normed else y for role, y in zip("qkv", (q, k, v),
                                                                      strict=True))
    if arch.positions == "rotary":
        q, k, v = (_rotate(y, arch.frequencies) if role in arch.rotated else y
                   for role, y in zip("qkv", (q, k, v), strict=True))
    scale = dict(head=q.size(-1) ** -0.5, width=C**-0.5, one=1.0)[arch.score_scale]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1).nan_to_num()
    y = torch.einsum("bhqk,bkhd->bqhd", scores, v).reshape(B, T, C)
    return y @ matrix["o"].T, v if arch.value_residual == "previous" else first


def _rotate(x, frequencies):
    """Turns the pair (i, i + D/2) of x (B, T, H, D) at position t by t times its frequency."""
    D = x.size(-1)
    base, spread = {"10000": (10000, 2), "1000": (1000, 2), "slow": (10000, 1),
                    "alike": (10000, 0)}[frequencies]
    angles = torch.outer(torch.arange(x.size(1)), base ** (-spread * torch.arange(D // 2) / D))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    u, w = x.chunk(2, -1)
    return torch.cat((u * cos + w * sin, w * cos - u * sin), -1)


def _visible(arch, inputs, window, args):
    """Which keys each query sees, (B, T, T)."""
    T = inputs.size(1)
    window = T if window is None else window
    q, k = torch.arange(T)[:, None], torch.arange(T)
    visible = {"causal": q >= k, "none": q >= -k, "strict": q > k,
               "both_ways": k - q < window}[arch.mask]
    visible = visible.expand(len(inputs), T, T)
    if arch.documents != "ignored":
        starts = (inputs == args.bos_id).long()
        documents = starts.cumsum(0 if arch.documents == "across" else 1)
        documents = documents - (starts if arch.documents == "exclusive" else 0)
        documents = documents[:1] if arch.documents == "first_row" else documents
        visible = visible & (documents[:, :, None] == documents[:, None])
    if arch.window != "ignored":
        sizes = {"below": window, "up_to": window + 1, "short": window - 1, "half": window // 2}
        visible = visible & (q - k < sizes[arch.window])
    return visible
