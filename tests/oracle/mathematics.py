"""The formulas of models, losses and optimizers, each with its source, in float64."""

import math

import torch


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# ---- layers ----


def norm(x, eps):
    """x / sqrt(mean x^2 + eps), over the last dimension. RMSNorm, arXiv 1910.07467."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_norm(x, weight, bias):
    """(x - mean) / sqrt(variance + 1e-5) * weight + bias. arXiv 1607.06450."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def gelu(x):
    """x times the normal distribution function at x. arXiv 1606.08415."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


class EightBitProduct(torch.autograd.Function):
    """x W' of numbers in E4M3; their gradients are products with those of x W' in E5M2. FP8
    formats, arXiv 2209.05433; the scales are those of the small model's tests."""

    @staticmethod
    def forward(ctx, x, W):
        x, W = in_eight_bits(x, 2, "e4m3fn"), in_eight_bits(W, 2**9, "e4m3fn")
        ctx.save_for_backward(x, W)
        return x @ W.T

    @staticmethod
    def backward(ctx, gradient):
        (x, W), g = ctx.saved_tensors, in_eight_bits(gradient, 2**15, "e5m2")
        return g @ W, g.flatten(0, -2).T @ x.flatten(0, -2)


class EightBitMLP(torch.autograd.Function):
    """relu(x W1)^2 W2' of numbers in E4M3, whose gradients are those of x, W1 and W2 as they are,
    and the largest relu(x W1)^2. A tensor's scale takes its largest number to 448, but that of
    relu(x W1)^2 is given. Records #84 and #89."""

    @staticmethod
    def forward(ctx, x, W1, W2, scale):
        x8, U1, U2 = (in_eight_bits(t, 448 / t.abs().max().clamp(min=4.48e-10), "e4m3fn")
                      for t in (x, W1, W2))
        post = (x8 @ U1).clamp(min=0).square()
        ctx.save_for_backward(x, W1, W2, post)
        ctx.mark_non_differentiable(largest := post.max())
        return in_eight_bits(post, scale, "e4m3fn") @ U2.T, largest

    @staticmethod
    def backward(ctx, g, _):
        x, W1, W2, post = (t.flatten(0, -2) for t in ctx.saved_tensors)
        slope = 2 * (g.flatten(0, -2) @ W2) * post.sqrt()
        return (slope @ W1.T).view_as(g), x.T @ slope, g.flatten(0, -2).T @ post, None


def in_eight_bits(x, scale, form):
    """x rounded to numbers of this form, scaled; beyond its range, the end of the range."""
    form = getattr(torch, f"float8_{form}")
    most = torch.finfo(form).max
    return (scale * x).clamp(-most, most).to(form).double() / scale


def frequencies(head_dim, half):
    """Radians per position of a head's pairs (i, i + D / 2): 10000^(-2 i / D) (RoPE, arXiv
    2104.09864), or from 1 to 1 / 1024 for half of them, 0 for the others (record #17)."""
    i, turning = torch.arange(head_dim // 2).double(), head_dim // 4
    if not half:
        return 10_000 ** (-2 * i / head_dim)
    return torch.where(i < turning, 1024 ** (-i / max(1, turning - 1)), 0.0)


def yarn(turns, windows):
    """Frequencies and scale of scores after the windows, from 0.1 in the first one. YaRN, arXiv
    2309.00071, with the constants of record #31: at every growth pairs that make less than one turn
    in a window slow down by its growth, those that make 32 keep their speed."""
    scale = 0.1
    for old, new in zip(windows, windows[1:], strict=False):
        kept = ((turns * old / (2 * math.pi) - 1) / (32 - 1)).clamp(0, 1)
        turns = turns * (old / new + kept * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return turns, scale


def rotate(x, turns, positions, rounded=False):
    """x (B, T, H, D), every pair (i, i + D / 2) turned by its angle at each position (T)."""
    angles = positions[:, None].double() * turns
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # (T, 1, D / 2)
    if rounded:  # tables stored in bfloat16
        cos, sin = cos.float().bfloat16().double(), sin.float().bfloat16().double()
    u, w = x.chunk(2, -1)
    return torch.cat([u * cos + w * sin, w * cos - u * sin], -1)


def weights_of_attention(q, k, scale, visible):
    """softmax(scale q k) (B, H, T, T) over the visible keys (B, T, T). arXiv 1706.03762."""
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    return scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)


def attend(q, k, v, scale, visible):
    """Attention's outputs (B, T, H, D)."""
    return torch.einsum("bhqk,bkhd->bqhd", weights_of_attention(q, k, scale, visible), v)


def visible_keys(documents, window):
    """Which keys a query sees (B, T, T): those of its document (B, T), from `window` tokens back to
    its own. Record #29."""
    T = documents.size(1)
    back = torch.arange(T)[:, None] - torch.arange(T)
    return (documents[:, :, None] == documents[:, None]) & (back >= 0) & (back <= window)


def paired(x):
    """(B, T, H, D) as (B, 2 T, H / 2, D): slot 2 t + s has the heads of half s. Record #58."""
    B, T, H, D = x.shape
    return x.view(B, T, 2, H // 2, D).reshape(B, 2 * T, H // 2, D)


def unpaired(x):
    """The inverse of `paired`."""
    B, T, H, D = x.shape
    return x.reshape(B, T // 2, 2 * H, D)


def offset(k):
    """Keys whose channels that never turn, [D/4, D/2) and [3D/4, D), are those of the token before;
    the first token keeps its own. Record #49."""
    quarter = k.size(-1) // 4
    before = torch.cat([k[:, :1], k[:, :-1]], 1)
    still = torch.arange(k.size(-1)) // quarter % 2 == 1
    return torch.where(still, before, k)


def without_own(y, v, share):
    """y minus a share of its projection on the token's own value. arXiv 2603.09078, record #82."""
    along = (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp(min=1e-8)
    return y - share[..., None] * along * v


def composed(y, v, P, mix, share):
    """y plus, for each head, a share of its values under a mixture of all heads' attention P
    (B, H, T, T), whose weights have a root mean square of 1. Record #85."""
    both = torch.einsum("bqh,bhqk->bqk", norm(mix, 1e-6), P)
    return y + share[..., None] * torch.einsum("bqk,bkhd->bqhd", both, v)


def bigram_rows(tokens, rows):
    """Row of each token and the one before: a hash, and the last row for a first token. Record
    #62."""
    hashed = (36_313 * tokens[:, 1:] ^ 27_191 * tokens[:, :-1]) % (rows - 1)
    return torch.cat([torch.full_like(tokens[:, :1], rows - 1), hashed], 1)


def sign_rows(tokens, rows):
    """Row of signs of each token and the one before; 0 for a first token. Record #83."""
    hashed = (tokens[:, 1:] ^ tokens[:, :-1]) % rows
    return torch.cat([torch.zeros_like(tokens[:, :1]), hashed], 1)


# ---- losses ----


def cap(logits, height, shift, width):
    """height * sigmoid((logits + shift) / width), record #54. With (4 w, 0, w) it is 2 w more than
    2 w tanh(logits / 2 w), the soft cap of Gemma 2, arXiv 2408.00118."""
    return height / (1 + torch.exp(-(logits + shift) / width))


def token_losses(z, targets, weights=(1.0,), prefixes=None):
    """sum_k w_k (log sum e^z - z[y_{t + k}]) of logits (B, T, V), for each token: the next ones
    within the row (record #53), then, with the last weight, the next one's prefix (record #88)."""
    nothing, total, T = torch.full_like(targets, -1), 0, targets.size(1)
    wanted_ids = [torch.cat([targets, nothing], 1)[:, k : k + T] for k in range(len(weights))]
    if prefixes is not None:
        wanted_ids[-1] = prefixes[targets]
    for weight, wanted in zip(weights, wanted_ids, strict=True):
        right = z.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        total = total + weight * torch.where(wanted >= 0, z.logsumexp(-1) - right, 0.0)
    return total


# ---- optimizers ----

NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]  # https://kellerjordan.github.io/posts/muon
POLAR_EXPRESS = [  # arXiv 2505.16932, with the constants of record #38
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonalize(G, polar):
    """Five odd polynomials aX + bXX'X + cXX'XX'X of X = G / norm, which take its singular values
    near 1."""
    size = G.norm()
    X = G / (1.02 * size + 1e-6) if polar else G / (size + 1e-7)
    X = X.T if G.size(0) > G.size(1) else X
    for a, b, c in POLAR_EXPRESS if polar else NEWTON_SCHULZ:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


def even_out(V, means, beta, dim=0):
    """The update V, whose neurons a running mean of their squares over `dim` evens out, as long as
    before; then the new means. NorMuon, arXiv 2510.05491."""
    e = V.square().mean(dim, keepdim=True)
    means = beta * means + (1 - beta) * e
    s = 1 / means.clamp(min=1e-10).sqrt()
    return V * s * (e.sum() / (e * s * s).sum().clamp(min=1e-20)).sqrt(), means


def cautious(p, V, rate, decay):
    """p - rate V, less rate * decay * p where V p >= 0. arXiv 2510.12402, record #43."""
    return p - rate * V - rate * decay * p * (V * p >= 0)


def adam(p, g, state, rate, betas, eps, decay=0.0, early=False):
    """Adam, arXiv 1412.6980. early: eps is added before the bias correction (record #24). decay:
    the share by which p shrinks where its update shrinks it, too (record #50)."""
    b1, b2 = betas
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = m = b1 * state.get("m", torch.zeros_like(g)) + (1 - b1) * g
    state["v"] = v = b2 * state.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
    m_bias, v_bias = 1 - b1**t, math.sqrt(1 - b2**t)
    if early:
        u = rate * v_bias / m_bias * m / (v.sqrt() + eps)
    else:
        u = rate * (m / m_bias) / (v.sqrt() / v_bias + eps)
    return p - u - decay * p * (u * p > 0)
