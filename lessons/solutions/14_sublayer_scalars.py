"""Exercises of lesson 14: their checks, hints and solutions."""

import torch
import torch.nn.functional as F

# ---- 1: the stream's length with silent sublayers ----

ROOT, SHARE = 1.1**0.5, torch.sigmoid(torch.tensor(-1.5)).item()


def stream(empty=ROOT, share=SHARE, source=1.1**4):
    """What leaves layer 10: layer 6 multiplies by `empty` and adds `share` of `source` before."""
    return (1.1**6 + share * source) * empty * 1.1**4


def check_stream(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected the factor before x0, not {answer!r}") from None
    meanings = {
        1.1**11: "that is 1.1 for each of eleven layers; layer 6 has no attention, so only one of"
                 " its two factors is used, and it adds the skip",
        1.1**10.5: "the skip into layer 6 is missing",
        1.1**10: "layer 6 still multiplies by its MLP's factor, and it adds the skip",
        stream(empty=1.1): "layer 6 has no attention, so it keeps the stream with one factor,"
                           " sqrt(1.1), not two",
        stream(empty=1.0): "layer 6 has an MLP, whose factor sqrt(1.1) applies",
        stream(share=2 * SHARE): "the gate at its start is 2 sigmoid(0) = 1, not 2",
        stream(share=SHARE / 2): "the gate at its start is 2 sigmoid(0) = 1, not 0.5",
        stream(share=-1.5): "the skip's number, -1.5, first goes through a sigmoid",
        stream(share=1.0): "the skip adds sigmoid(-1.5) of layer 3's output, not all of it",
        stream(source=1.0): "the skip adds a share of layer 3's output, which is 1.1^4 x0 by then,"
                            " not of x0",
        stream(source=1.1**3): "layer 3 is the fourth layer, counted from 0, so its output is"
                               " 1.1^4 x0",
        stream(share=SHARE / ROOT): "the skip is added before the MLP's factor, which then applies"
                                    " to it, too",
        ROOT**11: "that is one factor per layer; a layer with attention has two",
        1.1**22: "that is 1.1 per sublayer; a sublayer's factor is sqrt(1.1), so that a layer has"
                 " 1.1",
    }
    if abs(value - stream()) > 0.004:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.006 else (
            "multiply by 1.1 for each layer with attention; layer 6 adds a share of what layer 3"
            " put out, then multiplies by sqrt(1.1)")
        raise AssertionError(f"{value:g} is not the factor before x0 after layer 10: {why}")


# ---- 2: a mixture whose shares the token decides ----


def mix(x, others, w_in, w_out, initial, scale):
    shares = initial + scale * F.linear(F.gelu(F.linear(x, w_in)), w_out)  # (B, T, N)
    return x + sum(share[..., None] * other
                   for share, other in zip(shares.unbind(-1), others, strict=True))


def _one_for_all(x, others, w_in, w_out, initial, scale):
    mean = x.mean((0, 1), keepdim=True).expand_as(x)
    return x + mix(mean, others, w_in, w_out, initial, scale) - mean


def _mean_hidden(x, others, w_in, w_out, initial, scale):
    shares = initial + scale * F.linear(F.gelu(F.linear(x, w_in)).mean((0, 1)), w_out)
    return x + sum(share * other for share, other in zip(shares, others, strict=True))


def _fixed(x, others, w_in, w_out, initial, scale):
    return mix(x, others, w_in, 0 * w_out, initial, scale)


def _scaled_initial(x, others, w_in, w_out, initial, scale):
    return mix(x, others, w_in, w_out, scale * initial, scale)


def _unscaled(x, others, w_in, w_out, initial, scale):
    return mix(x, others, w_in, w_out, initial, 1.0)


def _without_x(x, others, w_in, w_out, initial, scale):
    return mix(x, others, w_in, w_out, initial, scale) - x


def _linear(x, others, w_in, w_out, initial, scale):
    shares = initial + scale * F.linear(F.linear(x, w_in), w_out)
    return x + sum(shares[..., i : i + 1] * other for i, other in enumerate(others))


def _relu(x, others, w_in, w_out, initial, scale):
    shares = initial + scale * F.linear(F.relu(F.linear(x, w_in)), w_out)
    return x + sum(shares[..., i : i + 1] * other for i, other in enumerate(others))


def _tanh_gelu(x, others, w_in, w_out, initial, scale):
    hidden = F.gelu(F.linear(x, w_in), approximate="tanh")
    shares = initial + scale * F.linear(hidden, w_out)
    return x + sum(shares[..., i : i + 1] * other for i, other in enumerate(others))


def _sigmoid(x, others, w_in, w_out, initial, scale):
    shares = (initial + scale * F.linear(F.gelu(F.linear(x, w_in)), w_out)).sigmoid()
    return x + sum(shares[..., i : i + 1] * other for i, other in enumerate(others))


def _softmax(x, others, w_in, w_out, initial, scale):
    shares = (initial + scale * F.linear(F.gelu(F.linear(x, w_in)), w_out)).softmax(-1)
    return x + sum(shares[..., i : i + 1] * other for i, other in enumerate(others))


def _reads_the_other(x, others, w_in, w_out, initial, scale):
    return x + mix(others[0], others, w_in, w_out, initial, scale) - others[0]


def _reads_the_norm(x, others, w_in, w_out, initial, scale):
    normed = F.rms_norm(x, (x.size(-1),))
    return x + mix(normed, others, w_in, w_out, initial, scale) - normed


def _previous(x, others, w_in, w_out, initial, scale):
    rolled = x.roll(1, 1)
    return x + mix(rolled, others, w_in, w_out, initial, scale) - rolled


def _first_share(x, others, w_in, w_out, initial, scale):
    shares = initial + scale * F.linear(F.gelu(F.linear(x, w_in)), w_out)
    return x + shares[..., :1] * sum(others)


def _gelu_twice(x, others, w_in, w_out, initial, scale):
    shares = initial + scale * F.gelu(F.linear(F.gelu(F.linear(x, w_in)), w_out))
    return x + sum(shares[..., i : i + 1] * other for i, other in enumerate(others))


def _times_initial(x, others, w_in, w_out, initial, scale):
    shares = initial * (1 + scale * F.linear(F.gelu(F.linear(x, w_in)), w_out))
    return x + sum(shares[..., i : i + 1] * other for i, other in enumerate(others))


def _from_zero(x, others, w_in, w_out, initial, scale):
    return mix(x, others, w_in, w_out, 0 * initial, scale)


def _without_dimension(x, others, w_in, w_out, initial, scale):
    shares = initial + scale * F.linear(F.gelu(F.linear(x, w_in)), w_out)
    return x + sum(shares[..., i] * other for i, other in enumerate(others))


def _detached(x, others, w_in, w_out, initial, scale):
    return mix(x, others, w_in.detach(), w_out.detach(), initial, scale)


SLIPS = {
    "your shares are the same for every token; each token's own vector x[b, t] should decide its"
    " shares": _one_for_all,
    "your shares never depend on the token: w_out and the hidden values do not reach them": _fixed,
    "your initial shares are multiplied by scale; only what the network adds is": _scaled_initial,
    "scale is missing before what the network adds to the initial shares": _unscaled,
    "x itself is missing; the mixture is added to it": _without_x,
    "the gelu between the two matrices is missing: without it they are one linear map": _linear,
    "a relu is in the place of the gelu": _relu,
    "your gelu is the approximation by tanh; F.gelu without options is exact": _tanh_gelu,
    "a share is any number; yours goes through a sigmoid": _sigmoid,
    "a share is any number; yours go through a softmax, so they sum to 1": _softmax,
    "the network reads others[0]; it should read x": _reads_the_other,
    "the network reads a normed x; it should read x as it is": _reads_the_norm,
    "a token's shares follow from the previous token's vector; use its own": _previous,
    "your gelu also follows the second matrix; only hidden values should go through it":
        _gelu_twice,
    "your initial share multiplies the network's output; it should be added to it": _times_initial,
    "your shares start at 0; add the network's output to the initial shares": _from_zero,
    "all tensors get the first share; each should get its own": _first_share,
}


def train_mix(function, steps=80):
    """The last losses of a mixture that learns a sum: of the two tensors, each token needs one."""
    draw = torch.Generator().manual_seed(0)
    right = torch.randn(8, generator=draw)
    w_in = torch.randn(32, 8, generator=draw).requires_grad_()
    w_out, initial = torch.zeros(2, 32, requires_grad=True), torch.full((2,), 0.5)
    initial.requires_grad_()
    adam = torch.optim.Adam([w_in, w_out, initial], lr=0.05, betas=(0.9, 0.95))
    losses = []
    for _step in range(steps):
        x, *others = torch.randn(3, 8, 32, 8, generator=draw)
        first = (x @ right > 0)[..., None]
        target = x + torch.where(first, *others)
        loss = (function(x, others, w_in, w_out, initial, 0.5) - target).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def check_mix(answer):
    assert callable(answer), f"expected the function mix, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    x, *others = torch.randn(4, 2, 5, 8, generator=draw)
    w_in, w_out = torch.randn(6, 8, generator=draw), torch.randn(3, 6, generator=draw)
    initial, scale = torch.tensor([0.0, -0.5, 2.0]), 0.1
    inputs = x, others, w_in, w_out, initial, scale
    try:
        result = answer(x.clone(), [other.clone() for other in others], w_in, w_out, initial, scale)
    except RuntimeError as problem:
        raise AssertionError(
            f"{problem}: here x is (2, 5, 8), w_in (6, 8) and w_out (3, 6). F.linear(x, w_in) is"
            " (2, 5, 6), all shares (2, 5, 3), and one share needs a last dimension of 1 to"
            " multiply a tensor of x's shape") from None
    assert isinstance(result, torch.Tensor) and result.shape == x.shape, (
        f"return a tensor of x's shape, {tuple(x.shape)}, not"
        f" {getattr(result, 'shape', result)!r}: x plus the mixture")
    right = mix(*inputs)
    if not torch.allclose(result, right, atol=1e-5):
        for why, slip in SLIPS.items():
            assert not torch.allclose(result, slip(*inputs), atol=1e-5), why
        alone = answer(x[:1, :1], [other[:1, :1] for other in others], *inputs[2:])
        assert torch.allclose(alone, result[:1, :1], atol=1e-5), (
            "a token's shares change when the other tokens are left out; they should follow from"
            " its own vector x[b, t] only")
        still = answer(x, others, w_in, 0 * w_out, initial, scale)
        assert torch.allclose(still, _fixed(*inputs), atol=1e-5), (
            "with w_out = 0 each share should be its initial number, whatever w_in is; yours"
            " is not, so a model would not start as its parent")
        raise AssertionError(
            f"the first token's first number should be {right[0, 0, 0]:.4f}, not"
            f" {result[0, 0, 0]:.4f}: shares = initial + scale * (w_out gelu(w_in x))")
    mine, fixed = train_mix(answer), train_mix(_fixed)
    assert mine < fixed / 2, (
        f"single cases agree, but in training your loss ends at {mine:.3f}, and with fixed shares"
        f" at {fixed:.3f}: do w_in and w_out get a gradient?")
    print(f"a task in which half of the tokens need each tensor: loss {mine:.3f} with your shares,"
          f" {fixed:.3f} with the same shares for all tokens")


# ---- 3: the longest prefix that is a token ----


def prefix_table(tokens):
    ids = {token: i for i, token in enumerate(tokens)}
    return [next((ids[token[:n]] for n in range(len(token) - 1, 0, -1) if token[:n] in ids), -1)
            for token in tokens]


def _itself(tokens):
    return list(range(len(tokens)))


def _shortest(tokens):
    ids = {token: i for i, token in enumerate(tokens)}
    return [next((ids[token[:n]] for n in range(1, len(token)) if token[:n] in ids), -1)
            for token in tokens]


def _lengths(tokens):
    return [len(tokens[i]) if i >= 0 else -1 for i in prefix_table(tokens)]


def _strings(tokens):
    return [tokens[i] if i >= 0 else -1 for i in prefix_table(tokens)]


def _neighbour(tokens):
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    table = [-1] * len(tokens)
    for before, i in zip(order, order[1:], strict=False):
        if tokens[i].startswith(tokens[before]):
            table[i] = before
    return table


def _one_shorter(tokens):
    ids = {token: i for i, token in enumerate(tokens)}
    return [ids.get(token[:-1], -1) for token in tokens]


def _zero(tokens):
    return [max(0, i) for i in prefix_table(tokens)]


def _suffix(tokens):
    return prefix_table([token[::-1] for token in tokens])


def _only_before(tokens):
    return [max((j for j in range(i) if token.startswith(tokens[j])),
                key=lambda j: len(tokens[j]), default=-1) for i, token in enumerate(tokens)]


def _sorted_places(tokens):
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    place = {i: place for place, i in enumerate(order)}
    return [place[i] if i >= 0 else -1 for i in prefix_table(tokens)]


def _anywhere(tokens):
    return [max((j for j, other in enumerate(tokens) if other in token and other != token),
                key=lambda j: len(tokens[j]), default=-1) for token in tokens]


def _highest_id(tokens):
    return [max((j for j, other in enumerate(tokens) if token.startswith(other) and other != token),
                default=-1) for token in tokens]


def _dictionary(tokens):
    return dict(zip(tokens, prefix_table(tokens), strict=True))


def _extension(tokens):
    return [max((j for j, other in enumerate(tokens) if other.startswith(token) and other != token),
                key=lambda j: len(tokens[j]), default=-1) for token in tokens]


TABLE_SLIPS = {
    "a token counts as its own prefix; only a shorter one should": _itself,
    "you take the shortest prefix; the longest is the better part of an answer": _shortest,
    "you take the prefix with the highest id; the longest counts, whatever its id": _highest_id,
    "you return the prefix's length; return its id, its place in the list": _lengths,
    "you return the prefix's bytes; return its id, its place in the list": _strings,
    "you compare a token only with the one before it in alphabetic order; abc lies between abd and"
    " ab. Keep all prefixes that are still open": _neighbour,
    "you try only the token without its last byte; the longest prefix may be shorter": _one_shorter,
    "a token without a prefix has 0, which is another token's id; it should have -1": _zero,
    "you compare how tokens end; a prefix is how a token begins": _suffix,
    "you search only among tokens with lower ids; a prefix may come later in the list":
        _only_before,
    "you return places in the sorted list; ids are places in the list that you were given":
        _sorted_places,
    "you accept a token anywhere inside another; a prefix stands at the beginning": _anywhere,
    "you found the tokens that begin with this one; the table holds the one that this token begins"
    " with": _extension,
}


def check_table(answer):
    assert callable(answer), f"expected the function prefix_table, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    many = {bytes(torch.randint(97, 100, (length,), generator=draw).tolist())
            for length in torch.randint(1, 9, (600,), generator=draw).tolist()}
    many = [sorted(many)[i] for i in torch.randperm(len(many), generator=draw).tolist()]
    for tokens in ([b"a", b"ab", b"abc", b"abd", b"b"], [b"abd", b"b", b"abcde", b"ab", b"xab"],
                   [b"\xc3\xa9", b"e", b"\xc3", b" the", b" t", b"the"], many):
        found = answer(list(tokens))
        assert found is not None, "the function returns nothing; return a list of ids"
        assert not isinstance(found, dict), (
            "the function returns a dict; return a list of ids, in the order of the tokens")
        assert len(found) == len(tokens), (
            f"expected one id for each of the {len(tokens)} tokens, got {len(found)}")
        found, right = list(found), prefix_table(tokens)
        if found == right:
            continue
        for why, slip in TABLE_SLIPS.items():
            assert found != slip(tokens), f"with tokens {tokens[:6]}: {why}"
        wrong = next(i for i, (a, b) in enumerate(zip(found, right, strict=True)) if a != b)
        said = f"{tokens[right[wrong]]!r}, id {right[wrong]}" if right[wrong] >= 0 else "none, -1"
        raise AssertionError(
            f"with tokens {tokens[:6]} the longest prefix of {tokens[wrong]!r} is {said}, and you"
            f" give {found[wrong]!r}")


EXERCISES = {
    "1": dict(
        check=check_stream,
        hints=[
            "How often is the stream multiplied in a layer with attention, and how often in"
            " layer 6?",
            "Two factors of sqrt(1.1) make 1.1. Before layer 6 the stream is 1.1^6 x0, and layer"
            " 3's output was 1.1^4 x0.",
            "Layer 6: (1.1^6 + sigmoid(-1.5) 1.1^4) sqrt(1.1). Then four layers with attention.",
            "(1.7716 + 0.1824 * 1.4641) * 1.0488 * 1.1^4 = ...",
        ],
        solution=3.1305,
        wrong=[1.1**11, 1.1**10.5, 1.1**10, stream(empty=1.1), stream(empty=1.0),
               stream(share=2 * SHARE), stream(share=SHARE / 2), stream(share=-1.5),
               stream(share=1.0), stream(source=1.0), stream(source=1.1**3),
               stream(share=SHARE / ROOT), ROOT**11, 1.1**22, 3.0, "three"],
    ),
    "2": dict(
        check=check_mix,
        hints=[
            "Which shape have the shares of N tensors, if every token has its own?",
            "shares = initial + scale * (w_out gelu(w_in x)), (B, T, N); then x + sum of share i"
            " times tensor i.",
            "F.linear(x, w_in) applies w_in to each token's vector; after F.gelu, F.linear(...,"
            " w_out). A share (B, T) needs a last dimension of 1 to multiply a vector.",
            "shares = initial + scale * F.linear(F.gelu(F.linear(x, w_in)), w_out); return x +"
            " sum(shares[..., i : i + 1] * other for i, other in ...",
        ],
        solution=mix,
        wrong=[_one_for_all, _fixed, _scaled_initial, _unscaled, _without_x, _linear, _relu,
               _tanh_gelu, _sigmoid, _softmax, _reads_the_other, _reads_the_norm, _previous,
               _first_share, _detached, _gelu_twice, _times_initial, _from_zero, _without_dimension,
               _mean_hidden, lambda *inputs: None,
               lambda x, others, w_in, w_out, initial, scale: F.linear(x, w_in)],
    ),
    "3": dict(
        check=check_table,
        hints=[
            "How many prefixes can a token of n bytes have, and how do you look one up quickly?",
            "Try the token without its last byte, then without its last two, down to one byte; the"
            " first that is in the vocabulary is the longest.",
            "Make a dictionary from byte strings to ids first. For each token count n down from"
            " len(token) - 1 to 1 and look up token[:n]; if none is there, -1.",
            "ids = {token: i for i, token in enumerate(tokens)}; for each token"
            " next((ids[token[:n]] for n in range(len(token) - 1, 0, -1) if ...), -1)",
        ],
        solution=prefix_table,
        wrong=[_itself, _shortest, _lengths, _strings, _neighbour, _one_shorter, _zero, _suffix,
               _only_before, _sorted_places, _anywhere, _extension, _highest_id, _dictionary,
               lambda tokens: None, lambda tokens: [-1]],
    ),
}
