"""Checks, hints and solutions of the exercises in lessons/06_flash_attention_3.ipynb."""

import numpy as np
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


def read_once(scores, values, size):
    """Yields blocks of `size` keys; what was yielded before becomes nan, as if overwritten."""
    for start in range(0, scores.size(1), size):
        block = scores[:, start : start + size].clone(), values[start : start + size].clone()
        yield block
        for tensor in block:
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
        "large scores": (100 * scores, 7, "; subtract the largest score before exp"),
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
            why = "; a block is overwritten as soon as you take the next: use it before"
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


# ---- 3: packs of documents ----

MARGIN = 0.04


def pack(documents, T, longest):
    row, lacking = [], T + 1
    for document in documents:
        piece = document[: min(longest, lacking)]
        row.append(piece)
        lacking -= len(piece)
        if lacking == 0:
            yield np.concatenate(row)
            row, lacking = [], T + 1


def end_loss(pack, longest):
    """Trains a micro 05r on such packs, each document cut to `longest` tokens."""
    import lesson

    module = lesson.snapshot("05r")
    packed_rows = module.packed_rows

    def rows(shard, T, args):
        tokens = np.array(shard)
        documents = np.split(tokens, np.flatnonzero(tokens == args.bos_id))[1:]
        return pack(documents, T, longest)

    module.packed_rows = rows
    try:
        log = lesson.train_here(module, **lesson.MANIFEST.overrides(
            lesson.MANIFEST.get("05r"), "tiny") | dict(
            model_dim=32, num_layers=2, num_heads=1, train_seq_len=512, val_seq_len=512,
            micro_batch_size=2, total_batch_size=1024, train_steps=40, scheduled_steps=40,
            momentum_warmup_steps=8, val_tokens=8192, val_loss_every=0, value_embed_pattern="00",
            window_pattern="LL", layer_without_attention=9, window_start=512, window_growth=0,
            kernel_warmup_steps=0))
    finally:
        module.packed_rows = packed_rows
    return log.val_curve[-1][1]


def check_pack(answer):
    assert callable(answer), f"expected the function pack, not {answer!r}"
    documents = np.split(np.arange(60), [3, 9, 12, 20, 22, 31, 40, 47, 55])
    result = answer(documents, 16, 6)
    assert result is not None, "the function returns nothing; yield the rows"
    rows = [np.asarray(row).tolist() for row in result]
    right = [[*range(17)], [*range(20, 28), *range(31, 37), *range(40, 43)]]
    told = "Documents begin at tokens 0, 3, 9, 12, 20, 22, 31, 40, 47, 55; T is 16, longest 6"
    for number, row in enumerate(rows):
        assert len(row) == 17, (
            f"row {number} has {len(row)} tokens, not T + 1 = 17: a row's last document is cut to"
            " what the row lacks, and a row that stays incomplete is dropped")
        pieces = np.split(row, np.flatnonzero(np.diff(row) != 1) + 1)
        has = ", ".join(f"{piece[0]} to {piece[-1]}" for piece in pieces)
        assert number < 2 and row == right[number], (
            f"row {number} has the tokens {has}. {told}. Each document is used"
            " once, from its beginning, and never goes on in another row")
    assert len(rows) == 2, f"expected 2 whole rows, got {len(rows)}. {told}"
    ours, theirs = end_loss(answer, 128), end_loss(pack, 10_000)
    assert ours < theirs - MARGIN, (
        f"expected a loss below {theirs - MARGIN:.3f} with a cut at 128, {MARGIN} less than with"
        f" whole documents, got {ours:.3f}; do your rows hold more documents?")
    print(f"loss {ours:.3f} with your rows, cut at 128; {theirs:.3f} with whole documents")


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


def _without_target(documents, T, longest):
    return pack(documents, T - 1, longest)


def _not_cut(documents, T, longest):
    return pack(documents, T, T + 1)


def _goes_on(documents, T, longest):
    """What a document has beyond the cut comes as another document."""
    pieces = (document[i : i + longest] for document in documents
              for i in range(0, len(document), longest))
    return pack(pieces, T, longest)


def _keeps_the_last(documents, T, longest):
    documents = list(documents)
    yield from pack(documents, T, longest)
    yield documents[-1][:longest]


def _row_by_row(documents, T, longest):
    """Throws away the document that does not fit whole."""
    row = []
    for document in documents:
        if sum(map(len, row)) + min(longest, len(document)) > T + 1:
            yield np.concatenate(row)
            row = []
        row.append(document[:longest])


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
               _minus_infinity],
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
        check=check_pack,
        hints=[
            "What must you remember from one document to the next? Two things.",
            "A row that lacks n tokens takes min(longest, n) of the next document, or all of it.",
            "Keep the pieces of the row and how many tokens it lacks, at first T + 1. Append a"
            " piece and count down; at 0 yield the row and begin anew.",
            "piece = document[: min(longest, lacking)]; row.append(piece); lacking -= len(piece);"
            " if lacking == 0: yield np.concatenate(row); ...",
        ],
        solution=pack,
        wrong=[_without_target, _not_cut, _goes_on, _keeps_the_last, _row_by_row],
    ),
}
