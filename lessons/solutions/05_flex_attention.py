"""Exercises of lesson 05: their checks, hints and solutions."""

from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

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
        why = ("2 partial tiles are right for a multiple of 128, which 320 is not, so the window's"
               " far end runs through two tiles")
    elif full == 2:
        why = ("2 full tiles would need every query of the row to see 256 keys before its tile;"
               " the last query stands 127 further on, and 127 + 256 is beyond 320")
    elif full == 0:
        why = ("one tile is full: the largest distance between a query and a key of the tile before"
               " its own is 255, and 255 < 320")
    elif partial + full == 4:
        why = "4 tiles in all is right, but not how they divide"
    raise AssertionError(f"({partial:g}, {full:g}) is not what the mask gives: {why}")


# ---- 2: tiles counted without the T x T pairs ----


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
                " of tokens; decide about a tile only from its first query and its last key")
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
            size = len(found) if isinstance(found, list | tuple) else torch.as_tensor(found).numel()
            assert size == 1, f"the function returns {size} numbers; return one, the tiles' sum"
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
               " last key; check their distance, 128 (i - j) - 127, and their documents, and that"
               " j is not above i: such keys come later")
    elif found < expected:
        why = ("you miss tiles with few visible pairs: a tile counts as soon as its nearest pair,"
               " first query and last key, is visible; those on the diagonal always do")
    return f"{name}, window {window}: expected {expected} tiles, got {found}; {why}"


# ---- 3: four keys for each token, one of them the title ----

BOS, QUESTION, TITLES = 31, 30, 8  # titles are the tokens 0 to 7, counting uses 8 to 18
STEPS, BATCH, LENGTH = 80, 4, 128


def four_keys(inputs, bos_id):
    """The last three tokens of the own document, and its title: the token after bos."""
    documents = (inputs == bos_id).cumsum(1)
    titles = (inputs == bos_id).roll(1, 1)

    def visible(b, h, q, k):
        same_document = documents[b, q] == documents[b, k]
        return (q >= k) & same_document & ((q - k < 3) | titles[b, k])

    return visible


def last_four(inputs, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]) & (q - k < 4)


def titled_documents(count, seed):
    """`count` tokens of documents: bos and a title, then, 2 to 5 times, 8 ... 18 ? title."""
    random = torch.Generator().manual_seed(seed)
    tokens = []
    while len(tokens) < count:
        title = int(torch.randint(TITLES, (), generator=random))
        times = int(torch.randint(2, 6, (), generator=random))
        tokens += [BOS, title, *times * [*range(8, 19), QUESTION, title]]
    return torch.tensor(tokens[:count])


def dense(rule, inputs):
    """The mask (B, T, T) of a rule, or an error that says why it cannot be traced."""
    B, T = inputs.shape
    visible = rule(inputs, BOS)
    assert callable(visible), (
        f"four_keys must return the function visible(b, h, q, k), not a {type(visible).__name__}")
    b, t = torch.arange(B)[:, None, None, None], torch.arange(T)
    try:
        create_block_mask(visible, B, None, T, T, device="cpu")
        seen = torch.as_tensor(visible(b, None, t[:, None], t))
    except Exception as problem:
        reason = str(problem).strip().splitlines()[0][:80] if str(problem).strip() else ""
        raise AssertionError(
            "the rule must work on tensors of indices: combine conditions with & and |, without"
            f" `if`, `and`, `or` and `.item()`, and return them ({type(problem).__name__}:"
            f" {reason})") from None
    return torch.broadcast_to(seen, (B, 1, T, T))[:, 0].bool()


def loss_after_questions(rule):
    """Trains 05's model with the rule as its mask; the mean loss where a title must follow."""
    module = load_snapshot(load_manifest().get("05").script)
    torch.manual_seed(1)
    model = module.GPT(module.Hyperparameters(
        vocab_size=32, num_layers=2, num_heads=1, model_dim=32, seq_len=LENGTH,
        attention_scale=32**-0.5, bf16=False))
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    stream = titled_documents(STEPS * BATCH * LENGTH + 1, seed=1)
    batches = zip(stream[:-1].view(STEPS, BATCH, LENGTH), stream[1:].view(STEPS, BATCH, LENGTH),
                  strict=True)
    with patch.object(module, "attention_mask", lambda inputs, args: dense(rule, inputs)[:, None]):
        for step, (inputs, targets) in enumerate(batches):
            adam.param_groups[0]["lr"] = 0.02 * min(1, (STEPS - step) / (0.4 * STEPS))
            model(inputs, targets).backward()
            adam.step()
            adam.zero_grad()
        tokens = titled_documents(32 * LENGTH + 1, seed=2)
        inputs, targets = tokens[:-1].view(32, LENGTH), tokens[1:].view(32, LENGTH)
        with torch.no_grad():
            logits = model(inputs).flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses[inputs.flatten() == QUESTION].mean().item()


def check_four_keys(answer):
    assert callable(answer), f"expected the function four_keys, not {answer!r}"
    inputs = torch.stack([titled_documents(LENGTH, seed) for seed in (3, 4)])
    inputs[1] = inputs[1].roll(40)  # so that a sequence begins in the middle of a document
    seen = dense(answer, inputs)
    documents, t = (inputs == BOS).cumsum(1), torch.arange(LENGTH)
    faults = [
        (seen & (t[:, None] < t), "a token must not see later ones"),
        (seen & (documents[:, :, None] != documents[:, None]), "that is another document"),
    ]
    for wrong, why in faults:
        if wrong.any():
            row, query, key = wrong.nonzero()[0].tolist()
            raise AssertionError(f"query {query} of sequence {row} sees key {key}: {why}")
    keys = seen.sum(2)
    row, query = divmod(int(keys.argmax()), LENGTH)
    assert keys.max() <= 4, (f"query {query} of sequence {row} sees {keys.max()} keys, more than"
                             " four; to show one key elsewhere, make the window narrower")
    assert keys.min() > 0, (f"query {int(keys.argmin()) % LENGTH} sees no key at all, and the"
                            " softmax of an empty row is nan; let a token see itself")
    ours, theirs = loss_after_questions(answer), loss_after_questions(last_four)
    assert ours < theirs / 2, (
        f"expected less than half of {theirs:.3f}, the loss with a window of four, got {ours:.3f};"
        " which token of the document tells what follows a question mark?")
    print(f"loss after a question mark: {ours:.3f} with your rule, {theirs:.3f} with a window of 4")


# ---- typical wrong answers: every check must refuse them ----


def _bos_instead_of_title(inputs, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (
        (q >= k) & (documents[b, q] == documents[b, k])
        & ((q - k < 3) | (inputs[b, k] == bos_id)))


def _five_keys(inputs, bos_id):
    documents, titles = (inputs == bos_id).cumsum(1), (inputs == bos_id).roll(1, 1)
    return lambda b, h, q, k: (
        (q >= k) & (documents[b, q] == documents[b, k]) & ((q - k < 4) | titles[b, k]))


def _titles_of_all_documents(inputs, bos_id):
    documents, titles = (inputs == bos_id).cumsum(1), (inputs == bos_id).roll(1, 1)
    return lambda b, h, q, k: (q >= k) & (
        (documents[b, q] == documents[b, k]) & (q - k < 3) | titles[b, k])


def _looks_ahead(inputs, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (
        (documents[b, q] == documents[b, k]) & (k - q < 2) & (q - k < 3))


def _title_alone(inputs, bos_id):
    documents, titles = (inputs == bos_id).cumsum(1), (inputs == bos_id).roll(1, 1)
    return lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]) & titles[b, k]


def _python_and(inputs, bos_id):
    documents = (inputs == bos_id).cumsum(1)
    return lambda b, h, q, k: (
        q >= k and documents[b, q] == documents[b, k] and q - k < 4)


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
        check=check_count,
        hints=[
            "In a tile below the diagonal, which query and which key are nearest to each other?"
            " If they cannot see each other, no pair in the tile is visible.",
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
    "3": dict(
        check=check_four_keys,
        hints=[
            "Which single token tells what must follow every question mark of a document?",
            "visible = [q >= k] and [D_q = D_k] and ([q - k < w] or [x_(k-1) = bos]).",
            "The title is the token after bos. Count documents as 05 does, mark the titles with a"
            " shifted comparison, and make room for them: the window and one title are four.",
            "documents = (inputs == bos_id).cumsum(1); titles = (inputs == bos_id).roll(1, 1); in"
            " visible: (q >= k) & (documents[b, q] == documents[b, k]) & ((q - k < 3) | ...).",
        ],
        solution=four_keys,
        wrong=[last_four, _bos_instead_of_title, _five_keys, _titles_of_all_documents,
               _looks_ahead, _title_alone, _python_and, four_keys(torch.zeros(1, 4), 2)],
    ),
}
