"""Exercises of lesson 05j: their checks, hints and solutions."""


import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# ---- 1: how far a stack of windows reaches ----


def check_reach(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of tokens, not {answer!r}") from None
    meanings = {
        1792: "that is the last layer alone; what it reads has itself read others before",
        896: "that is one short window; the layers come one after the other",
        14336: "layer 7 has no attention, so it carries nothing further",
        12545: "that counts the token itself, too; how many tokens *back* is the earliest?",
        12555: "that counts each window's own token; 896 reaches 896 tokens back, not 897",
        19712: "that is eleven windows of 1,792; eight of them are 896",
        21504: "that is twelve windows of 1,792; eight are 896, and one layer has no attention",
        9856: "that is eleven windows of 896; three of them are 1,792",
        10752: "one long window is missing; every layer carries on, the first one too",
        11648: "one short window is missing; every layer carries on, the first one too",
        2688: "that is one long and one short layer; count all eleven",
    }
    if value != 12_544:
        raise AssertionError(
            f"{value:g} tokens is not right;"
            f" {meanings.get(value, 'follow the earliest token from the last layer to the first')}")


# ---- 2: one product for queries, keys and values ----


def one_product(x, weight, num_heads):
    B, T, C = x.shape
    return F.linear(x, weight.flatten(0, 1)).view(B, T, 3, num_heads, -1).unbind(2)


class _Products(TorchDispatchMode):
    """Counts matrix products; a batched one counts once per matrix."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, result = torch.ops.aten, func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.mm, aten.addmm):
            self.calls += 1
        elif func.overloadpacket in (aten.bmm, aten.baddbmm):
            self.calls += len(result)
        return result


def check_product(answer):
    assert callable(answer), f"expected the function one_product, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator) for size in ((2, 5, 12), (3, 12, 12)))
    with _Products() as products:
        result = answer(x, weight, 3)
    assert result is not None, "the function returns nothing; return q, k and v"
    result = tuple(result)
    assert len(result) == 3, f"expected three tensors, q, k and v, got {len(result)}"
    expected = [(x @ each.T).view(2, 5, 3, 4) for each in weight]
    for name, got, right in zip("qkv", result, expected, strict=True):
        assert got.shape == right.shape, (
            f"{name} has the shape {tuple(got.shape)}, not (B, T, H, D) = {tuple(right.shape)}; the"
            " product's last dimension holds 3 C numbers: first q's, then k's, then v's")
        if not torch.allclose(got, right, atol=1e-5):
            causes = {
                "the weights have to be transposed, as in nn.Linear: x @ w.T": weight[0].T,
                "weight.reshape(C, 3 C) tears the matrices apart: put them below each other with"
                " flatten(0, 1), and transpose": weight.reshape(12, 36)[:, :12].T}
            why = ("of the product's 3 C columns, the first C are all heads of q; view them as"
                   " (3, H, D), in this order, and take the first dimension apart")
            for cause, other in causes.items():
                if name == "q" and torch.allclose(got, (x @ other.T).view(2, 5, 3, 4), atol=1e-5):
                    why = cause
            raise AssertionError(f"{name} has the right shape but other numbers; {why}")
    assert products.calls == 1, (
        f"the numbers are right, but you use {products.calls} matrix products (a batched one counts"
        " once per matrix); flatten the three matrices into one of 3 C rows, and split the result")


# ---- 3: a rule for the rates ----

TOTAL, SIZES, COMMON, MARGIN = 24_576, (128, 4096), 2, 0.03


def factor(size):
    """In the plot the best factor doubles with the batch: 1 for 512, 2 for 1,024."""
    return size / 512


def end_losses(size, factor):
    """A micro 05l's losses after TOTAL bytes, three seeds; its rates are times `factor`."""
    import lesson

    sizes = {**lesson.MANIFEST.overrides(lesson.MANIFEST.get("05l"), "tiny"), **dict(
        model_dim=32, num_heads=1, train_seq_len=128, val_seq_len=128, window_end=128,
        val_tokens=9216, micro_batch_size=min(8, size // 128), total_batch_size=size,
        train_steps=TOTAL // size, scheduled_steps=TOTAL // size, momentum_warmup_steps=8,
        val_loss_every=0, kernel_warmup_steps=0, adam_eps=1e-10 * size, num_layers=2,
        value_embed_pattern="00", layer_without_attention=9, window_pattern="LL")}
    for name in ("embed_lr", "head_lr", "scalar_lr", "muon_lr"):
        sizes[name] *= factor
    logs = [lesson.train_here(lesson.snapshot("05l"), **sizes, seed=seed) for seed in range(3)]
    return [log.val_curve[-1][1] for log in logs]


def check_factor(answer):
    assert callable(answer), f"expected the function factor, not {answer!r}"
    factors = []
    for size in SIZES:
        given = answer(size)
        try:
            factors.append(float(given))
        except (TypeError, ValueError):
            raise AssertionError(
                f"for batches of {size} expected a factor, one number, not {given!r}") from None
        assert 0 < factors[-1] < 100, (
            f"for batches of {size} your factor is {factors[-1]:g}; expected one between 0 and 100")
    small, large = factors
    assert small != large, (
        f"both sizes get the factor {small:g}, but in the first plot the lowest point moves with"
        " the batch; let the factor depend on size")
    assert small < large, (
        f"batches of {SIZES[0]} get the factor {small:g}, of {SIZES[1]} only {large:g}; a large"
        " batch has fewer and less noisy steps: in the first plot it works best at higher rates")
    for size, ours in zip(reversed(SIZES), reversed(factors), strict=True):  # the quick one first
        import lesson

        place = "half of 256" if size == SIZES[0] else "twice 2,048"
        why = "too high" if ours > factor(size) else "too low"
        lesson.must_end_lower(
            end_losses(size, ours), end_losses(size, COMMON),
            f"batches of {size:,} with factor {ours:g}", f"factor {COMMON}",
            f"Your factor is {why}: {size:,} is {place}; how does the plot's best factor move when"
            " the batch doubles?", MARGIN)


# ---- typical wrong answers: every check must refuse them ----


def _three_products(x, weight, num_heads):
    return [(x @ each.T).view(*x.shape[:2], num_heads, -1) for each in weight]


def _batched(x, weight, num_heads):
    B, T, C = x.shape
    return (x[:, None] @ weight.mT).view(B, 3, T, num_heads, -1).unbind(1)


def _torn_apart(x, weight, num_heads):
    B, T, C = x.shape
    return (x @ weight.reshape(C, 3 * C)).view(B, T, 3, num_heads, -1).unbind(2)


def _heads_first(x, weight, num_heads):
    B, T, C = x.shape
    return F.linear(x, weight.flatten(0, 1)).view(B, T, num_heads, 3, -1).unbind(3)


def _not_transposed(x, weight, num_heads):
    result = x @ torch.cat(tuple(weight), 1)
    return [each.view(*x.shape[:2], num_heads, -1) for each in result.chunk(3, -1)]


def _not_split(x, weight, num_heads):
    return F.linear(x, weight.flatten(0, 1)).chunk(3, -1)


EXERCISES = {
    "1": dict(
        check=check_reach,
        hints=[
            "The last layer reads tokens up to 1,792 back. What have those tokens read, one layer"
            " earlier?",
            "Each layer carries information as far as its window. What do you do with eleven such"
            " distances?",
            "From the last layer to the first: 1,792 back, then 896 more, then 896 more, and so on."
            " Layer 7, an L, has no attention.",
            "3 * 1792 + 8 * ...",
        ],
        solution=12_544,
        wrong=[1792, 896, 14336, 12545, 12555, 19712, 21504, 9856, 10752, 11648, 2688, "far"],
    ),
    "2": dict(
        check=check_product,
        hints=[
            "Three matrices of C rows, below each other, are one matrix of how many rows?",
            "x W' with W (3 C, C) gives 3 C numbers for each token: q's C, then k's, then v's; each"
            " C are H heads of D.",
            "1. weight.flatten(0, 1). 2. F.linear. 3. .view(B, T, 3, num_heads, -1). 4. Take the"
            " third dimension apart with .unbind(2).",
            "F.linear(x, weight.flatten(0, 1)).view(...).unbind(2)",
        ],
        solution=one_product,
        wrong=[_three_products, _batched, _torn_apart, _heads_first, _not_transposed, _not_split],
    ),
    "3": dict(
        check=check_factor,
        hints=[
            "In the first plot, where is the lowest point of each line? Go from 256 to 2,048.",
            "When the batch doubles, the best factor about doubles, too. Which formula does that?",
            "For 512 the best factor is 1, so count batches in units of 512.",
            "return size / ...",
        ],
        solution=factor,
        wrong=[lambda size: 1, lambda size: 2, lambda size: 512 / size, lambda size: size / 128,
               lambda size: size / 4096, lambda size: (size / 256) ** 2, lambda size: (size, 1)],
    ),
}
