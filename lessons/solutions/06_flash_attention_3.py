"""Checks, hints and solutions of the exercises in lessons/06_flash_attention_3.ipynb."""

import math
from itertools import islice

import torch

# ---- 1: softmax and its product with values, block by block ----


def in_one_pass(blocks):
    largest, above, below = torch.tensor(-1e30), 0, 0  # finite: -inf minus -inf would be nan
    for scores, values in blocks:
        before, largest = largest, scores.amax(1, keepdim=True).maximum(largest)
        weights, shrink = (scores - largest).exp(), (before - largest).exp()
        above = shrink * above + weights @ values
        below = shrink * below + weights.sum(1, keepdim=True)
    return above / below


def read_once(scores, values, size, kept=False):
    """Yields blocks of `size` keys; unless `kept`, a block becomes nan with the next, as if
    overwritten."""
    for start in range(0, scores.size(1), size):
        block = scores[:, start : start + size].clone(), values[start : start + size].clone()
        yield block
        for tensor in () if kept else block:
            tensor.fill_(torch.nan)


def check_one_pass(answer):
    assert callable(answer), f"expected the function in_one_pass, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(size, generator=generator) for size in ((5, 24), (24, 3)))
    hidden = scores.masked_fill(torch.arange(24) < 10 * (torch.arange(5) % 2)[:, None], -torch.inf)
    cases = {
        "a single block": (scores, 24, ""),
        "scores that fall": (scores - torch.arange(24), 7,
                             "; sum above and below over all keys, divide once"),
        "scores that rise": (scores + torch.arange(24), 7,
                             "; when a larger score comes, both sums shrink by one factor"),
        "large scores": (100 * (scores - scores.amax(1, keepdim=True)) + 250, 7,
                         "; subtract the largest score before exp"),
        "a different level for each query": (
            scores + 200 * torch.arange(5)[:, None], 7,
            "; each query needs a largest score of its own: amax(1, keepdim=True)"),
        "scores far below 0": (scores - 200, 7, "; the first largest score must be below any score"
                                                " that may come, and 0 is not"),
        "scores of -inf": (hidden, 7, "; -inf minus -inf is nan: let the first largest score be"
                                      " finite, below any score that may come"),
    }
    for name, (case, size, why) in cases.items():
        result = answer(read_once(case, values, size))
        assert result is not None, "the function returns nothing; return above / below, (Q, D)"
        exact = case.softmax(1) @ values
        assert tuple(result.shape) == tuple(exact.shape), (
            f"expected a result of shape (Q, D) = {tuple(exact.shape)}, got {tuple(result.shape)};"
            " sums over the keys of a block keep a row for each query")
        if name == "a single block" and result.isnan().any():
            again = answer(read_once(case, values, size, kept=True))
            why = ("; what is summed already shrinks by exp(old - new largest), which is never"
                   " above 1" if again.isnan().any() else
                   "; a block is overwritten as soon as you take the next: use it before")
        worst = (result - exact).abs().nan_to_num(torch.inf).amax(1).argmax()
        got, right = ([round(x, 3) for x in row[worst].tolist()] for row in (result, exact))
        assert torch.allclose(result, exact, atol=1e-4), (
            f"with {name}, a query gets {got} instead of {right}{why}")


# ---- 2: pairs that lengths and a window leave ----


def check_pairs(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of pairs, not {answer!r}") from None
    meanings = {
        28: "that lets a token see two tokens in all; it is itself and two before it",
        45: "that lets the window reach into the document before",
        43: "that is without the window, each document in full",
        20: "a token also sees itself",
        136: "that is one document of 16 tokens without a window",
        48: "the first two tokens of a document have fewer than two before them",
    }
    if value != 36:
        raise AssertionError(
            f"{value:g} is not the number of pairs;"
            f" {meanings.get(value, 'add up 1, 2, 3, 3 ... for each document')}")


# ---- 3: YaRN's frequencies ----

OLD, NEW = 24, 56  # the windows of the micro model's first growth


def slowed(frequencies, old, new):
    turns = old * frequencies / (2 * math.pi)
    kept = ((turns - 1) / 31).clamp(0, 1)
    return frequencies * (kept + (1 - kept) * old / new)


def jumps_at_growth(*ways):
    """Trains a micro 06b up to its first growth; by how much the loss in the new window, with the
    frequencies of each way, is above that in the old window."""
    import lesson

    module = lesson.snapshot("06b")
    validate, jumps = module.validate, []

    def measure(model, batches, micro_steps):
        if model.window != NEW:
            return 0.0
        batches, rotary = list(islice(batches, micro_steps)), model.rotary
        model.set_window(OLD)
        angles = torch.atan2(rotary.sin, rotary.cos)[1, 0]  # per token, with its sign
        for way in (None, *ways):
            model.set_window(NEW if way else OLD)  # also sets the scale of the scores
            step = angles if way is None else angles.sign() * way(angles.abs(), OLD, NEW)
            table = torch.arange(len(rotary.cos))[:, None, None] * step
            rotary.cos.copy_(table.cos())
            rotary.sin.copy_(table.sin())
            jumps.append(validate(model, batches, micro_steps))
        model.set_window(NEW)
        return 0.0

    module.validate = measure
    lesson.train_here(module, **lesson.MANIFEST.overrides(
        lesson.MANIFEST.get("06b"), "tiny") | dict(
        model_dim=32, num_layers=2, num_heads=1, train_seq_len=256, val_seq_len=256,
        micro_batch_size=4, total_batch_size=1024, max_document_len=256, train_steps=41,
        scheduled_steps=119, momentum_warmup_steps=8, val_tokens=8192, val_loss_every=40,
        value_embed_pattern="00", window_pattern="LL", layer_without_attention=9,
        layer_without_mlp=9, kernel_warmup_steps=0, window_start=OLD, window_growth=32,
        window_end=104))
    old, *others = jumps[: 1 + len(ways)]
    return [loss - old for loss in others]


def unchanged(frequencies, old, new):
    return frequencies


def check_slowed(answer):
    assert callable(answer), f"expected the function slowed, not {answer!r}"
    turns = torch.tensor([100.0, 32.0, 16.5, 1.0, 0.25, 0.0])
    frequencies = 2 * math.pi * turns / 400
    given = frequencies.clone()
    result = answer(given, 400, 800)
    assert isinstance(result, torch.Tensor) and result.shape == frequencies.shape, (
        "expected a tensor with a frequency for each pair, got"
        f" {getattr(result, 'shape', result)!r}")
    assert given.equal(frequencies), "the function changes its argument; return a new tensor"
    assert not result.isnan().any(), (
        "a pair that never rotates gets nan; compute with turns, and do not divide by a frequency")
    why = {
        0: "it should keep its frequency; gamma, here 99 / 31, should be clamped to 1",
        1: "with 32 turns gamma is 31 / 31: the pair keeps its frequency",
        2: "with 16.5 turns gamma is 15.5 / 31 = 0.5: the pair keeps 0.5 + 0.5 x 400/800 of it",
        3: "with one turn gamma is 0: the pair slows down fully, by old / new",
        4: "below one turn gamma should be clamped to 0: the pair slows by old / new, not by more",
    }
    causes = {
        "you count radians, not turns: divide by 2 pi": 2 * math.pi * frequencies,
        "you count the turns within the new window": 2 * frequencies}
    causes = {cause: slowed(each, 400, 800) * frequencies / each.clamp(min=1e-9)
              for cause, each in causes.items()}
    kept = ((turns - 1) / 31).clamp(0, 1)
    causes["you exchange gamma and 1 - gamma: gamma is the share that keeps its frequency"] = (
        frequencies * (1 - kept + kept / 2))
    causes["all pairs slow down alike, the fast ones too"] = frequencies / 2
    causes["the slow pairs get faster: they slow down by old / new"] = frequencies * (2 - kept)
    named = [cause for cause, each in causes.items() if torch.allclose(result, each)]
    for pair, text in why.items():
        text = named[0] if named else text
        share, right = ((each[pair] / frequencies[pair]).item()
                        for each in (result, slowed(frequencies, 400, 800)))
        assert abs(share - right) < 1e-4, (
            f"window 400 to 800: the pair that makes {turns[pair]:g} turns within 400 tokens goes"
            f" on with {share:.4g} of its frequency, not {right:.4g}; {text}")
    ours, before = jumps_at_growth(answer, unchanged)
    assert ours < before / 2, (
        f"the loss jumps by {ours:.4f} with your frequencies and by {before:.4f} with the old ones;"
        " less than half is expected")
    print(f"jump of the loss: {ours:+.4f} with your frequencies, {before:+.4f} with the old ones")


# ---- typical wrong answers: every check must refuse them ----


def _no_largest(blocks):
    above = below = 0
    for scores, values in blocks:
        weights = scores.exp()
        above, below = above + weights @ values, below + weights.sum(1, keepdim=True)
    return above / below


def _never_shrinks(blocks):
    largest, above, below = torch.tensor(-1e30), 0, 0
    for scores, values in blocks:
        largest = scores.amax(1, keepdim=True).maximum(largest)
        weights = (scores - largest).exp()
        above, below = above + weights @ values, below + weights.sum(1, keepdim=True)
    return above / below


def _shrinks_one(blocks):
    largest, above, below = torch.tensor(-1e30), 0, 0
    for scores, values in blocks:
        before, largest = largest, scores.amax(1, keepdim=True).maximum(largest)
        weights = (scores - largest).exp()
        above = above + weights @ values
        below = (before - largest).exp() * below + weights.sum(1, keepdim=True)
    return above / below


def _mean_of_blocks(blocks):
    results = [scores.softmax(1) @ values for scores, values in blocks]
    return sum(results) / len(results)


def _collects(blocks):
    scores, values = zip(*blocks, strict=True)
    return torch.cat(scores, 1).softmax(1) @ torch.cat(values)


def _minus_infinity(blocks):
    largest, above, below = torch.tensor(-torch.inf), 0, 0
    for scores, values in blocks:
        before, largest = largest, scores.amax(1, keepdim=True).maximum(largest)
        weights, shrink = (scores - largest).exp(), (before - largest).exp()
        above = shrink * above + weights @ values
        below = shrink * below + weights.sum(1, keepdim=True)
    return above / below


def _from_zero(blocks):
    largest, above, below = torch.tensor(0.0), 0, 0
    for scores, values in blocks:
        before, largest = largest, scores.amax(1, keepdim=True).maximum(largest)
        weights, shrink = (scores - largest).exp(), (before - largest).exp()
        above = shrink * above + weights @ values
        below = shrink * below + weights.sum(1, keepdim=True)
    return above / below


def _one_largest_for_all(blocks):
    largest, above, below = torch.tensor(-1e30), 0, 0
    for scores, values in blocks:
        before, largest = largest, scores.amax().maximum(largest)
        weights, shrink = (scores - largest).exp(), (before - largest).exp()
        above = shrink * above + weights @ values
        below = shrink * below + weights.sum(1, keepdim=True)
    return above / below


def _grows(blocks):
    largest, above, below = torch.tensor(-1e30), 0, 0
    for scores, values in blocks:
        before, largest = largest, scores.amax(1, keepdim=True).maximum(largest)
        weights, shrink = (scores - largest).exp(), (largest - before).exp()
        above = shrink * above + weights @ values
        below = shrink * below + weights.sum(1, keepdim=True)
    return above / below


def _all_slower(frequencies, old, new):
    return frequencies * old / new


def _not_clamped(frequencies, old, new):
    kept = (old * frequencies / (2 * math.pi) - 1) / 31
    return frequencies * (kept + (1 - kept) * old / new)


def _radians_for_turns(frequencies, old, new):
    kept = ((old * frequencies - 1) / 31).clamp(0, 1)
    return frequencies * (kept + (1 - kept) * old / new)


def _new_window(frequencies, old, new):
    kept = ((new * frequencies / (2 * math.pi) - 1) / 31).clamp(0, 1)
    return frequencies * (kept + (1 - kept) * old / new)


def _upside_down(frequencies, old, new):
    kept = ((old * frequencies / (2 * math.pi) - 1) / 31).clamp(0, 1)
    return frequencies * (1 - kept + kept * old / new)


EXERCISES = {
    "1": dict(
        check=check_one_pass,
        hints=[
            "With which factor do exp(s - old) and exp(s - new) differ? It is the same for all s.",
            "With m the largest score before the block and M after it: above <- exp(m - M) above +"
            " sum of exp(s - M) v, and below likewise with 1 in the place of v.",
            "Start with a largest score that is low but finite. For each block: the new largest"
            " score per query (amax with keepdim), the weights, the factor for what is summed, both"
            " sums. Divide after the last block.",
            "before, largest = largest, scores.amax(1, keepdim=True).maximum(largest);"
            " above = (before - largest).exp() * above + (scores - largest).exp() @ values; ...",
        ],
        solution=in_one_pass,
        wrong=[_no_largest, _never_shrinks, _shrinks_one, _mean_of_blocks, _collects,
               _minus_infinity, _from_zero, _one_largest_for_all, _grows],
    ),
    "2": dict(
        check=check_pairs,
        hints=[
            "How long are the four documents, and how many tokens does the first of each see?",
            "A token at place i of its document (from 0) sees min(i, 2) + 1 tokens.",
            "The lengths are 3, 6, 3 and 4. A document of n tokens has 1 + 2 + 3 + 3 ... pairs,"
            " which is 3 n - 3.",
            "6 + 15 + 6 + ...",
        ],
        solution=36,
        wrong=[28, 45, 43, 20, 136, 48, "many"],
    ),
    "3": dict(
        check=check_slowed,
        hints=[
            "How many turns does a pair make within the old window, and what does that decide?",
            "r = old x frequency / (2 pi); gamma = (r - 1) / 31, clamped to 0 ... 1; the new"
            " frequency is frequency x (gamma + (1 - gamma) x old / new).",
            "1. The turns, a tensor. 2. gamma, with .clamp(0, 1). 3. The factor, between old / new"
            " and 1. 4. Multiply.",
            "kept = ((old * frequencies / (2 * math.pi) - 1) / 31).clamp(0, 1);"
            " return frequencies * (kept + ...)",
        ],
        solution=slowed,
        wrong=[_all_slower, _not_clamped, _radians_for_turns, _new_window, _upside_down, unchanged],
    ),
}
