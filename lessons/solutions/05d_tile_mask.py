"""Exercises of lesson 05d: their checks, hints and solutions."""

import math

import torch

# ---- 1: tiles sorted by their first and last documents ----


def sort_tiles(first, last):
    """0 skipped, 1 partial, 2 full: two tiles share a document if their ranges overlap."""
    tile = torch.arange(len(first))
    query = tile[:, None]
    some = (query >= tile) & (first[:, None] <= last)
    every = (query > tile) & (last[:, None] == first)
    return some.int() + every.int()


def by_tokens(documents, size=4):
    t, N = torch.arange(len(documents)), len(documents) // size
    visible = (t[:, None] >= t) & (documents[:, None] == documents)
    pairs = visible.view(N, size, N, size).sum((1, 3))
    return (pairs > 0).int() + (pairs == size * size).int()


def check_tiles(answer):
    assert callable(answer), f"expected the function sort_tiles, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    rows = [torch.tensor([1] * 10 + [2] * 6), torch.ones(16, dtype=torch.int64)]
    rows += [(torch.rand(32, generator=generator) < share).cumsum(0) for share in (0.05, 0.1, 0.5)
             for _try in range(20)]
    kinds = ("skipped", "partial", "full")
    for documents in rows:
        first, last = documents[::4], documents[3::4]
        right = by_tokens(documents)
        result = answer(first.clone(), last.clone())
        assert result is not None, "the function returns nothing; return the (N, N) tensor"
        assert isinstance(result, torch.Tensor) and result.shape == right.shape, (
            f"expected a tensor of shape {tuple(right.shape)}, a row for each tile of queries and"
            f" a column for each tile of keys, got {getattr(result, 'shape', result)!r}")
        wrong = (result.int() != right).nonzero().tolist()
        if not wrong:
            continue
        query, key = max(wrong, key=lambda pair: pair[1] > pair[0])  # above the diagonal, if any
        got, want = int(result[query, key]), int(right[query, key])
        why = {
            (1, 0): "these two tiles share no document; compare the later tile's first document"
                    " with the earlier one's last",
            (0, 1): "a document that begins or ends inside a tile is shared, too; first and last"
                    " need not be equal",
            (2, 1): "full needs every pair visible: one document from the keys' first token to the"
                    " queries' last, and a tile below the diagonal",
            (1, 2): "all pairs are visible here: one document fills both tiles",
        }.get((got, want), "full counts as visible, too: 2, not 1")
        if key > query:
            why = "keys after all of the tile's queries are never visible: is row the query's tile?"
        elif key == query and got == 0:
            why = "on the diagonal a query sees at least itself, so no tile is skipped"
        elif key == query and got == 2:
            why = "on the diagonal a token does not see the tokens after it, so no tile is full"
        name = kinds[got] if 0 <= got <= 2 else got
        raise AssertionError(
            f"with documents {first.tolist()} at the tiles' first tokens and {last.tolist()} at the"
            f" last, row {query}, column {key} is {name}, but should be {kinds[want]}; {why}")


# ---- 2: keys that a query sees when the window is whole tiles ----


def check_keys(answer):
    try:
        first, last = (float(number) for number in answer)
    except (TypeError, ValueError):
        raise AssertionError(
            f"expected two numbers, (keys of the first query, keys of the last), not {answer!r}"
        ) from None
    if (first, last) == (1665, 1792):
        return
    why = "draw the query's own tile and the tiles before it, and count the keys in each"
    if (first, last) == (1792, 1665):
        why = "the order is (first query, last query); yours may be swapped"
    elif (first, last) == (1792, 1792):
        why = ("that is a window in tokens, as 05 has it. Here the window ends at a tile's edge, so"
               " the queries of a tile all begin at the same key")
    elif (first, last) == (1728, 1728):
        why = "1,728 is rounded up to whole tiles, and a tile's queries see more and more keys"
    elif last - first == 127 and last == 1728:
        why = "1,728 / 128 is 13.5, and the rule rounds up"
    elif last - first == 127:
        why = ("the difference of 127 is right. The number of tiles is 1,728 / 128, rounded up, and"
               " the query's own tile is one of them")
    elif last == 1792:
        why = "the last query is right; the first one sees only itself in its own tile"
    elif first == 1665:
        why = "the first query is right; the last one sees all 128 keys of its own tile"
    raise AssertionError(f"({first:g}, {last:g}) is not what the mask gives: {why}")


# ---- 3: other frequencies ----


def frequencies(pairs):
    """05e's fastest half; the other half stays fixed."""
    return of_05e(pairs) * (torch.arange(pairs) < pairs // 2)


def of_05e(pairs):
    """All pairs rotate, from 1 radian per token down to about 1/10,000."""
    return 10_000.0 ** (-torch.arange(pairs) / pairs)


def of_05f(pairs):
    """Half of the pairs rotate, from 1 radian per token down to 1/1024."""
    return torch.cat(((1 / 1024) ** torch.linspace(0, 1, pairs // 2), torch.zeros(pairs // 2)))


def end_losses(choose):
    """The final losses of a micro 05f whose pairs rotate at choose(pairs), three seeds."""
    import lesson

    module = lesson.snapshot("05f")
    parent = module.Rotary

    class Chosen(parent):
        def __init__(self, head_dim, seq_len):
            super().__init__(head_dim, seq_len)
            speeds = choose(head_dim // 2)
            angles = torch.outer(torch.arange(seq_len), torch.cat((speeds, -speeds)))[:, None]
            self.cos.copy_(angles.cos())
            self.sin.copy_(angles.sin())

    module.Rotary = Chosen
    sizes = {**lesson.MANIFEST.overrides(lesson.MANIFEST.get("05f"), "tiny"), **dict(
        model_dim=32, num_heads=1, seq_len=64, window_end=64, micro_batch_size=8,
        total_batch_size=512, train_steps=40, cooldown_steps=16, momentum_warmup_steps=10,
        val_tokens=8192, val_loss_every=0, kernel_warmup_steps=0, use_flex_attention=False,
        attention_scale=32**-0.5, tile_size=32, value_embed_pattern="0..0",
        layer_without_attention=2)}
    return torch.tensor([lesson.train_here(module, **sizes, seed=seed).val_curve[-1][1]
                         for seed in range(3)])


def check_frequencies(answer):
    assert callable(answer), f"expected the function frequencies, not {answer!r}"
    result = answer(16)
    assert isinstance(result, torch.Tensor) and result.shape == (16,), (
        "expected a tensor with one frequency for each of 16 pairs, got"
        f" {getattr(result, 'shape', result)!r}")
    result = result.float()
    assert result.isfinite().all(), f"every frequency must be finite, yours are {result.tolist()}"
    assert (result != 0).any(), (
        "no pair rotates, so scores do not depend on positions at all; which distances within 64"
        " tokens should a head tell apart?")
    still = int((result == 0).sum())
    assert still >= 8, (
        f"only {still} of your 16 pairs stay fixed; half of them should, so that the speeds are the"
        " one thing that differs from 05f")
    import lesson

    ends, parents = end_losses(answer), end_losses(of_05f)
    speeds = result.abs()
    fastest, slowest = speeds.max().item(), speeds[speeds > 0].min().item()
    turned = 64 * slowest  # over a sequence
    why = "the range is a good one: move one of its ends by a factor of two"
    if still > 12:
        why = f"{still} of your 16 pairs stay fixed; let eight of them rotate"
    elif fastest > math.pi:
        why = (f"your fastest pair turns by {fastest:.3g} radians per token: beyond pi, faster"
               " looks like slower")
    elif fastest < 0.1:
        why = (f"your fastest pair turns by {fastest:.3g} radians per token: to it, neighbours are"
               " nearly at one position")
    elif slowest > 0.9 * fastest:
        why = (f"all your pairs turn by {fastest:.3g} radians per token, so every score returns"
               f" after {2 * math.pi / fastest:.0f} tokens; spread the speeds")
    elif turned < 0.5:
        why = (f"your slowest pair turns by {turned:.2g} radians over a whole sequence of 64"
               " tokens, so to it all positions are nearly one")
    elif turned > 3:
        why = (f"even your slowest pair turns by {turned:.2g} radians over a sequence of 64"
               " tokens; slower ones separate near from far")
    lesson.must_end_lower(ends, parents, "yours", "05f's", f"{why[0].upper()}{why[1:]}")


# ---- typical wrong answers: every check must refuse them ----


def _version_1(first, last):
    tile = torch.arange(len(first))
    query = tile[:, None]
    return ((query >= tile) & (first[:, None] == first)).int() + (
        (query > tile) & (last[:, None] == first)).int()


def _columns_are_queries(first, last):
    return sort_tiles(first, last).T


def _full_diagonal(first, last):
    tile = torch.arange(len(first))
    query = tile[:, None]
    return ((query >= tile) & (first[:, None] <= last)).int() + (
        (query >= tile) & (last[:, None] == first)).int()


def _no_diagonal(first, last):
    return sort_tiles(first, last).tril(-1)


def _never_full(first, last):
    return sort_tiles(first, last).clamp(max=1)


def _not_causal(first, last):
    return (first[:, None] <= last).int() + (last[:, None] == first).int()


def _none_rotates(pairs):
    return torch.zeros(pairs)


def _half(speed):
    """Half of the pairs stay fixed, the others rotate at one speed."""
    def frequencies(pairs):
        return speed * (torch.arange(pairs) < pairs // 2)

    return frequencies


EXERCISES = {
    "1": dict(
        check=check_tiles,
        hints=[
            "When do the documents of two tiles overlap? Each tile holds the documents from its"
            " first to its last.",
            "Keys' tile k, queries' tile q, q >= k: something is visible if first[q] <= last[k]."
            " Everything is, below the diagonal, if last[q] == first[k].",
            "1. tile = torch.arange(len(first)); query = tile[:, None]. 2. some: query >= tile, and"
            " the overlap. 3. every: query > tile, and one document. 4. Add both as integers.",
            "some = (query >= tile) & (first[:, None] <= last);"
            " every = (query > tile) & (last[:, None] == ...); return some.int() + every.int()",
        ],
        solution=sort_tiles,
        wrong=[_version_1, _columns_are_queries, _full_diagonal, _no_diagonal, _never_full,
               _not_causal],
    ),
    "2": dict(
        check=check_keys,
        hints=[
            "All 128 queries of a tile see the same tiles. They differ in their own tile only.",
            "With a window of n tiles, the own one included, the query at place o of its tile (0 to"
            " 127) sees 128 (n - 1) keys in the tiles before and o + 1 in its own.",
            "1,728 / 128 = 13.5, rounded up. Put o = 0 and o = 127 into the formula of hint 2.",
            "n = 14, so 13 whole tiles before: 13 x 128 keys, and 1 or 128 more.",
        ],
        solution=(1665, 1792),
        wrong=[(1792, 1792), (1792, 1665), (1728, 1728), (1601, 1728), (1664, 1792), 1792],
    ),
    "3": dict(
        check=check_frequencies,
        hints=[
            "By how much does each of 05f's eight rotating pairs turn from the first token of a"
            " sequence to the last, the 64th? Which of them tell positions apart?",
            "Pair i of the eight turns by 64 * 1024^(-i / 7) radians over a sequence, the slowest"
            " by 0.06. A pair that turns by far less than 1 is nearly fixed.",
            "Take geometric steps for half of the pairs: fastest * ratio ** torch.arange(pairs //"
            " 2). Let the slowest turn by about 1 radian in 64 tokens. Append as many zeros.",
            "rotating = 10_000.0 ** (-torch.arange(pairs // 2) / ...);"
            " return torch.cat((rotating, torch.zeros(pairs // 2)))",
        ],
        solution=frequencies,
        wrong=[of_05e, of_05f, _none_rotates, _half(1.0), _half(1e-4), _half(6.283185)],
    ),
}
