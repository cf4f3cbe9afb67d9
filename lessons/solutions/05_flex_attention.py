"""Exercises of lesson 05: their checks, hints and solutions."""

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

TILE = 128


# ---- 1: partial and full tiles of a row, for a window of 320 ----


def check_tiles(answer):
    try:
        partial, full = (float(number) for number in answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected two numbers, (partial, full), not {answer!r}") from None
    if (partial, full) == (3, 1):
        return
    why = "draw the tile row and mark the first and the last key that its queries see"
    if (partial, full) == (1, 3):
        why = "the order is (partial, full); yours may be swapped"
    elif (partial, full) == (2, 1.5):
        why = "tiles are whole: window / 128 - 1 holds only for multiples of 128"
    elif partial == 2:
        why = ("2 partial tiles are right for a multiple of 128; 320 is none, so the window's far"
               " end runs through two tiles")
    elif full == 2:
        why = ("2 full tiles would need every query of the row to see 256 keys before its tile;"
               " the last query stands 127 further on, and 127 + 256 is beyond 320")
    elif full == 0:
        why = ("one tile is full: the largest distance between a query and a key of the tile before"
               " its own is 255, and 255 < 320")
    elif partial + full == 4:
        why = "4 tiles in all is right, but not how they divide"
    raise AssertionError(f"({partial:g}, {full:g}) is not what the mask gives: {why}")


# ---- 2: a rule in which documents show their first token, however far back ----


def sink_rule(inputs, window, bos_id):
    """05's rule, but a token also sees the first token of its own document."""
    documents = (inputs == bos_id).cumsum(1)

    def visible(b, h, q, k):
        same_document = documents[b, q] == documents[b, k]
        near = q - k < window
        return (q >= k) & same_document & (near | (inputs[b, k] == bos_id))

    return visible


def check_sink(answer):
    assert callable(answer), f"expected the function sink_rule, not {answer!r}"
    T, bos_id = 256, 3
    inputs = torch.full((2, T), 7)
    inputs[0, [0, 20, 21, 60]] = bos_id
    inputs[1, 40] = bos_id
    b, t = torch.arange(2)[:, None, None, None], torch.arange(T)
    for window in (5, 1, 300):
        visible = answer(inputs, torch.tensor(window, dtype=torch.int32), bos_id)
        assert callable(visible), f"sink_rule must return the function visible, not {visible!r}"
        try:
            create_block_mask(visible, 2, None, T, T, device="cpu")
            seen = visible(b, None, t[:, None], t)
            found = torch.broadcast_to(torch.as_tensor(seen), (2, 1, T, T))[:, 0]
        except Exception as problem:
            reason = str(problem).strip().splitlines()[0][:80] if str(problem).strip() else ""
            raise AssertionError(
                "the rule must work on tensors of indices: combine conditions with & and |, without"
                f" `if`, `and`, `or` and `.item()`, and return them ({type(problem).__name__}:"
                f" {reason})") from None
        _compare_sink(found.bool(), inputs, window, bos_id)


def _compare_sink(found, inputs, window, bos_id):
    """Raises AssertionError for the first pair that is wrong, with the rule that it breaks."""
    T = inputs.size(1)
    b, q, k = torch.meshgrid(torch.arange(2), torch.arange(T), torch.arange(T), indexing="ij")
    documents = (inputs == bos_id).cumsum(1)
    same = documents[b, q] == documents[b, k]
    expected = (q >= k) & same & ((q - k < window) | (inputs[b, k] == bos_id))
    beyond = found & ~expected
    too_far = "that is beyond the window, and not a document's first token"
    if (q - k == window)[beyond].all():
        too_far = "a window of w holds w tokens, itself included, so use q - k < window"
    reasons = [
        (found & (q < k), "a token must not see later ones"),
        (found & ~same, "that is another document"),
        (beyond, too_far),
        (expected & ~found & (q - k >= window), "that is its document's first token, always to be"
                                                " seen"),
        (expected & ~found, "that is in its document and in its window"),
    ]
    for wrong, why in reasons:
        if wrong.any():
            row, query, key = wrong.nonzero()[0].tolist()
            verb = "sees" if found[row, query, key] else "does not see"
            raise AssertionError(f"with window {window}, query {query} of sequence {row} {verb} key"
                                 f" {key}: {why}")


# ---- 3: tiles counted without the T x T pairs ----


def count_by_tile(inputs, window, bos_id):
    """Tiles that hold at least one visible pair: the nearest one, first query and last key."""
    documents = (inputs[0] == bos_id).cumsum(0)
    first, last = documents[::TILE], documents[TILE - 1 :: TILE]
    tile = torch.arange(len(first))
    back = tile[:, None] - tile  # how many tiles the keys lie before the queries
    near = TILE * back - (TILE - 1) < window
    return int(((back == 0) | (back > 0) & near & (first[:, None] == last)).sum())


class _NoPairs(TorchDispatchMode):
    """Refuses tensors as large as all pairs of tokens."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs = pairs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.pairs:
            raise AssertionError(
                f"{func} made a tensor of {result.numel():,} elements, as many as there are pairs"
                " of tokens; decide about a tile from its first query and its last key alone")
        return result


def _count_pairs(inputs, window, bos_id):
    """The same from all pairs; only for short sequences."""
    documents, t = (inputs[0] == bos_id).cumsum(0), torch.arange(inputs.size(1))
    visible = (t[:, None] >= t) & (documents[:, None] == documents) & (t[:, None] - t < window)
    n = len(t) // TILE
    return int(visible.view(n, TILE, n, TILE).any(3).any(1).sum())


def check_count(answer):
    assert callable(answer), f"expected the function count_by_tile, not {answer!r}"
    T, bos_id = 1536, 3
    generator = torch.Generator().manual_seed(0)
    for name, documents in [
        ("one document", []),
        ("documents that start with a tile", [128, 512, 1024]),
        ("documents at 0, 300, 1000, 1005", [0, 300, 1000, 1005]),
        ("many documents", torch.randint(T, (12,), generator=generator).tolist()),
    ]:
        inputs = torch.zeros(1, T, dtype=torch.int64)
        inputs[0, documents] = bos_id
        for window in (1, 64, 128, 129, 130, 320, 1024, T):
            with _NoPairs(T * T):
                found = answer(inputs, window, bos_id)
            assert found is not None, "the function returns nothing; return the number of tiles"
            expected = _count_pairs(inputs, window, bos_id)
            if float(found) != expected:
                raise AssertionError(_why_count(int(found), expected, inputs, window, bos_id, name))


def _why_count(found, expected, inputs, window, bos_id, name):
    """The message for a wrong count, with the fault where it can be told."""
    why = "try it on paper with four tiles"
    no_documents = _count_pairs(torch.zeros_like(inputs), window, bos_id)
    if name != "one document" and found == no_documents:
        why = "that is the count without documents; tiles whose documents differ are empty"
    elif found > expected:
        why = ("some of your tiles are empty: the nearest pair of a tile is its first query and its"
               " last key, 127 tokens nearer than the tiles' distance, and q - k < window")
    elif found < expected:
        why = ("you miss tiles with few visible pairs: a tile counts as soon as its nearest pair,"
               " first query and last key, is visible; those on the diagonal always do")
    return f"{name}, window {window}: expected {expected} tiles, got {found}; {why}"


# ---- typical wrong answers: every check must refuse them ----


def _no_sink(inputs, window, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (
        (q >= k) & (documents[b, q] == documents[b, k]) & (q - k < window))


def _sink_of_the_sequence(inputs, window, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (
        (q >= k) & (documents[b, q] == documents[b, k]) & ((q - k < window) | (k == 0)))


def _sinks_of_all_documents(inputs, window, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (q >= k) & (
        (documents[b, q] == documents[b, k]) & (q - k < window) | (inputs[b, k] == bos_id))


def _one_too_far(inputs, window, bos_id):
    return sink_rule(inputs, window + 1, bos_id)


def _first_sequence_only(inputs, window, bos_id):
    rule = sink_rule(inputs, window, bos_id)
    return lambda b, h, q, k: rule(0 * b, h, q, k)


def _python_and(inputs, window, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (
        q >= k and documents[b, q] == documents[b, k] and q - k < window)


def _without_documents(inputs, window, bos_id):
    return count_by_tile(torch.zeros_like(inputs), window, bos_id - bos_id + 1)


def _tile_distance(inputs, window, bos_id):
    documents = (inputs[0] == bos_id).cumsum(0)
    first, last = documents[::TILE], documents[TILE - 1 :: TILE]
    tile = torch.arange(len(first))
    back = tile[:, None] - tile
    return int(((back >= 0) & (TILE * back < window) & (first[:, None] == last)).sum())


def _first_tokens_only(inputs, window, bos_id):
    documents = (inputs[0] == bos_id).cumsum(0)[::TILE]
    tile = torch.arange(len(documents))
    back = tile[:, None] - tile
    near = TILE * back - (TILE - 1) < window
    return int(((back >= 0) & near & (documents[:, None] == documents)).sum())


EXERCISES = {
    "1": dict(
        check=check_tiles,
        hints=[
            "A tile row holds 128 queries that do not all see the same keys. Look at its first and"
            " at its last query.",
            "For a tile d places before the diagonal the distances q - k run from 128 d - 127 to"
            " 128 d + 127. It holds something visible if the least is below 320 (and d >= 0), and"
            " is full if the greatest is, for d >= 1.",
            "Try d = 0, 1, 2, 3, 4 in turn: distances 0 to 127 (the rest is the future), 1 to 255,"
            " 129 to 383, 257 to 511, 385 to 639.",
            "d = 0 is the diagonal, so partial. d = 1 lies wholly within the window. d = 2 and"
            " d = 3 straddle its end. d = 4 is empty.",
        ],
        solution=(3, 1),
        wrong=[(2, 1), (1, 3), (2, 2), (1, 2), (3, 0), (2, 1.5), 4],
    ),
    "2": dict(
        check=check_sink,
        hints=[
            "Only one of the three conditions may be broken for a document's first token: the"
            " window.",
            "visible = [q >= k] and [D_q = D_k] and ([q - k < w] or [x_k = bos]).",
            "Count documents as 05 does. Inside visible, make same_document as 05 does. Make a"
            " second condition, near or first token, with |, and join it with the others by &."
            " Return visible itself.",
            "documents = (inputs == bos_id).cumsum(1); in visible: return (q >= k) &"
            " (documents[b, q] == documents[b, k]) & ((q - k < window) | (inputs[b, k] == ...)).",
        ],
        solution=sink_rule,
        wrong=[_no_sink, _sink_of_the_sequence, _sinks_of_all_documents, _one_too_far,
               _first_sequence_only, _python_and, sink_rule(torch.zeros(1, 4), 2, 1)],
    ),
    "3": dict(
        check=check_count,
        hints=[
            "In a tile below the diagonal, which query and which key are nearest to each other?"
            " If they cannot see each other, nobody in the tile can.",
            "For tile row i and column j < i the nearest pair is q = 128 i and k = 128 j + 127."
            " D never falls, so if these two lie in different documents, so does every pair. Their"
            " distance is 128 (i - j) - 127. Tiles on the diagonal always count.",
            "Count documents along the sequence. Take every 128th value from 0 (first queries) and"
            " from 127 (last keys). Make the matrix i - j of tiles with arange. Combine: diagonal,"
            " or below it and near enough and of one document. Sum.",
            "first, last = documents[::128], documents[127::128]; back = i[:, None] - i; count"
            " where (back == 0) | (back > 0) & (128 * back - 127 < window) &"
            " (first[:, None] == ...).",
        ],
        solution=count_by_tile,
        wrong=[_without_documents, _tile_distance, _first_tokens_only, _count_pairs],
    ),
}
