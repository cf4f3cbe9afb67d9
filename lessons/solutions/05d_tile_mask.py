"""Exercises of lesson 05d: their checks, hints and solutions."""

import math

import torch

# ---- 1: tiles sorted by the first and last documents of their segments ----


def sort_tiles(first, last):
    """0 skipped, 1 partial, 2 full: two segments share a document if their ranges overlap."""
    key = torch.arange(len(first))
    query = key[:, None]
    some = (query >= key) & (first[:, None] <= last)
    every = (query > key) & (last[:, None] == first)
    return some.int() + every.int()


def sort_one_by_one(first, last):
    """A right answer: a tile at a time."""
    kinds = torch.zeros(len(first), len(first))
    for query in range(len(first)):
        kinds[query, query] = 1
        for key in range(query):
            kinds[query, key] = 2 * (first[key] == last[query]) or first[query] == last[key]
    return kinds


def by_tokens(documents, size=4):
    t, N = torch.arange(len(documents)), len(documents) // size
    visible = (t[:, None] >= t) & (documents[:, None] == documents)
    pairs = visible.view(N, size, N, size).sum((1, 3))
    return (pairs > 0).int() + (pairs == size * size).int()


def check_tiles(answer):
    assert callable(answer), f"expected the function sort_tiles, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    rows = [torch.tensor(row) for row in ([1] * 10 + [2] * 6, [1] * 16, [3] * 4)]
    rows += [(torch.rand(length, generator=generator) < share).cumsum(0)
             for length in (32, 48) for share in (0.05, 0.1, 0.5) for _try in range(20)]
    kinds = ("skipped", "partial", "full")
    for documents in rows:
        first, last = documents[::4], documents[3::4]
        right = by_tokens(documents)
        given = first.clone(), last.clone()
        result = answer(*given)
        assert result is not None, "the function returns nothing; return the (N, N) tensor"
        assert isinstance(result, torch.Tensor) and result.shape == right.shape, (
            f"expected a tensor of shape {tuple(right.shape)}, a row for each segment of queries"
            f" and a column for each segment of keys, got {getattr(result, 'shape', result)!r}")
        assert torch.equal(given[0], first) and torch.equal(given[1], last), (
            "your function changes first or last in place, which others still need; make new"
            " tensors")
        assert torch.equal(result.double(), result.double().round()), (
            "the kinds are 0, 1 and 2, whole numbers; yours hold"
            f" {sorted(set(result.flatten().tolist()))}")
        wrong = (result.int() != right).nonzero().tolist()
        if not wrong:
            continue
        query, key = max(wrong, key=lambda pair: pair[1] > pair[0])  # above the diagonal, if any
        got, want = int(result[query, key]), int(right[query, key])
        apart = ("these two segments share no document; compare the later segment's first document"
                 " with the earlier one's last")
        why = {
            (1, 0): apart, (2, 0): apart,
            (0, 1): "a document that begins or ends inside a segment is shared, too; first and last"
                    " need not be equal",
            (2, 1): "full needs every pair visible: one document from the keys' first token to the"
                    " queries' last, and a tile below the diagonal",
            (1, 2): "all pairs are visible here: one document fills both segments",
        }.get((got, want), "full counts as visible, too: 2, not 1")
        if key > query:
            why = "keys after all of a tile's queries are never visible: is the row the query's?"
        elif key == query and got == 0:
            why = "on the diagonal a query sees at least itself, so no tile is skipped"
        elif key == query and got == 2:
            why = "on the diagonal a token does not see the tokens after it, so no tile is full"
        name = kinds[got] if 0 <= got <= 2 else got
        raise AssertionError(
            f"with documents {first.tolist()} at the segments' first tokens and {last.tolist()} at"
            f" the last, row {query}, column {key} is {name}, but should be {kinds[want]}; {why}")


# ---- 2: keys that a query sees when the window is whole segments ----

KEYS = 769, 896


def check_keys(answer):
    try:
        first, last = (float(number) for number in answer)
        assert not isinstance(answer, set | str)
    except (TypeError, ValueError, AssertionError):
        raise AssertionError(
            f"expected two numbers, (keys of the first query, keys of the last), not {answer!r}"
        ) from None
    if (first, last) == KEYS:
        return
    why = "draw the query's own segment and the segments before it, and count the keys in each"
    if (first, last) == KEYS[::-1]:
        why = "the order is (first query, last query); yours may be swapped"
    elif (first, last) == (896, 896):
        why = ("that is a window in tokens, as 05 has it. Here the window ends at a segment's edge,"
               " so the queries of a segment all begin at the same key")
    elif (first, last) == (864, 864):
        why = "864 is rounded up to whole segments, and a segment's queries see more and more keys"
    elif (first, last) == (1665, 1792):
        why = "that is the window at the end; halfway it is 864 tokens"
    elif (first, last) == (768, 895):
        why = "each query sees itself too, so both numbers are one higher"
    elif (first, last) == (1, 128):
        why = "that counts only the query's own segment; the segments before it are visible too"
    elif last - first == 127 and last == 768:
        why = "864 / 128 is 6.75, and the rule rounds up"
    elif last - first == 127 and last == 1024:
        why = "the query's own segment is one of the seven, not an eighth"
    elif last - first == 127:
        why = ("the difference of 127 is right. The number of segments is 864 / 128, rounded up,"
               " and the query's own segment is one of them")
    elif last == 896:
        why = "the last query is right; the first one sees only itself in its own segment"
    elif first == 769:
        why = "the first query is right; the last one sees all 128 keys of its own segment"
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
    return geometric(1, 1 / 1024)(pairs)


GAIN = 0.01  # half of what 05e's eight fastest speeds gain over 05f's


def geometric(fastest, slowest):
    """Half of the pairs rotate, at speeds from the fastest to the slowest in geometric steps."""
    def frequencies(pairs):
        steps = torch.linspace(0, 1, pairs // 2)
        return torch.cat((fastest * (slowest / fastest) ** steps, torch.zeros(pairs // 2)))

    return frequencies


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
    for pairs in (8, 16, 32):
        result = answer(pairs)
        assert isinstance(result, torch.Tensor) and result.shape == (pairs,), (
            f"frequencies({pairs}) should be a tensor with one frequency for each of {pairs} pairs,"
            f" not {getattr(result, 'shape', result)!r}; compute it from `pairs`")
        result = result.detach().float()
        assert torch.equal(result, answer(pairs).detach().float()), (
            "two calls give different frequencies, so a loss would depend on the draw; choose them")
        assert result.isfinite().all(), f"every frequency must be finite, yours: {result.tolist()}"
        assert (result >= 0).all(), (
            "some frequencies are negative, so these pairs rotate the other way than 05f's; that is"
            " a second difference, so let all rotate one way")
        still = int((result == 0).sum())
        assert still == pairs // 2, (
            f"{still} of {pairs} pairs stay fixed; half of them should, as in 05f, so that the"
            " speeds are the one thing that differs")
    import lesson

    ends, parents = end_losses(lambda pairs: answer(pairs).detach()), end_losses(of_05f)
    speeds = answer(16).detach().float()
    fastest, slowest = speeds.max().item(), speeds[speeds > 0].min().item()
    turned = 64 * slowest  # over a sequence
    why = "move one of the range's ends by a factor of two"
    if fastest > math.pi:
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
    lesson.must_end_lower(ends, parents, "yours", "05f's", f"{why[0].upper()}{why[1:]}", GAIN)


# ---- typical wrong answers: every check must refuse them ----


def _version_1(first, last):
    key = torch.arange(len(first))
    query = key[:, None]
    return ((query >= key) & (first[:, None] == first)).int() + (
        (query > key) & (last[:, None] == first)).int()


def _columns_are_queries(first, last):
    return sort_tiles(first, last).T


def _full_diagonal(first, last):
    key = torch.arange(len(first))
    query = key[:, None]
    return ((query >= key) & (first[:, None] <= last)).int() + (
        (query >= key) & (last[:, None] == first)).int()


def _no_diagonal(first, last):
    return sort_tiles(first, last).tril(-1)


def _never_full(first, last):
    return sort_tiles(first, last).clamp(max=1)


def _not_causal(first, last):
    return (first[:, None] <= last).int() + (last[:, None] == first).int()


def _full_by_first_tokens(first, last):
    key = torch.arange(len(first))
    return sort_tiles(first, last).clamp(max=1) + (
        (key[:, None] > key) & (first[:, None] == first)).int()


def _four_segments_only(first, last):
    return sort_tiles(first[:4], last[:4])


def _for_one_row(first, last):
    return torch.tensor([[1, 0, 0, 0], [2, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]])


def _from_document_0(first, last):
    last -= first[0].clone()
    first -= first[0].clone()
    return sort_tiles(first, last)


def _with_fractions(first, last):
    return sort_tiles(first, last) + 0.5


def _none_rotates(pairs):
    return torch.zeros(pairs)


def _half(speed):
    """Half of the pairs stay fixed, the others rotate at one speed."""
    return geometric(speed, speed)


def _for_16_pairs(pairs):
    return geometric(1, 1 / 64)(16)


def _drawn(pairs):
    return torch.cat((10 ** (-2 * torch.rand(pairs // 2)), torch.zeros(pairs // 2)))


def _other_way(pairs):
    return -geometric(1, 1 / 64)(pairs)


def _a_quarter_rotates(pairs):
    speeds = geometric(1, 1 / 64)(pairs // 2)
    return torch.cat((speeds, torch.zeros(pairs - len(speeds))))


EXERCISES = {
    "1": dict(
        check=check_tiles,
        hints=[
            "When do the documents of two segments overlap? Each segment holds the documents from"
            " its first to its last.",
            "Segment k of keys, segment q of queries, q >= k: something is visible if"
            " first[q] <= last[k]. Everything is, below the diagonal, if last[q] == first[k].",
            "1. key = torch.arange(len(first)); query = key[:, None]. 2. some: query >= key, and"
            " the overlap. 3. every: query > key, and one document. 4. Add both as integers.",
            "some = (query >= key) & (first[:, None] <= last);"
            " every = (query > key) & (last[:, None] == ...); return some.int() + every.int()",
        ],
        solution=sort_tiles,
        wrong=[_version_1, _columns_are_queries, _full_diagonal, _no_diagonal, _never_full,
               _not_causal, _full_by_first_tokens, _four_segments_only, _for_one_row,
               _from_document_0, _with_fractions],
        right=[sort_one_by_one],
    ),
    "2": dict(
        check=check_keys,
        hints=[
            "All 128 queries of a segment see the same segments. They differ in their own only.",
            "With a window of n segments, the own one included, the query at place o of its segment"
            " (0 to 127) sees 128 (n - 1) keys in the segments before and o + 1 in its own.",
            "864 / 128 = 6.75, rounded up. Put o = 0 and o = 127 into the formula of hint 2.",
            "n = 7, so 6 whole segments before: 6 x 128 keys, and 1 or 128 more.",
        ],
        solution=KEYS,
        wrong=[(896, 896), (896, 769), (864, 864), (641, 768), (768, 896), (768, 895), (897, 1024),
               (1665, 1792), (1, 128), 896, {769, 896}, "769"],
        right=[[769, 896], torch.tensor(KEYS)],
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
        wrong=[of_05e, of_05f, _none_rotates, _half(1.0), _half(1e-4), _half(6.283185),
               geometric(1, 1 / 512), _for_16_pairs, _drawn, _other_way, _a_quarter_rotates],
    ),
}
