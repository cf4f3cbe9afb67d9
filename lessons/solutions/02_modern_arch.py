"""Exercises of lesson 02: checks, hints, solutions and typical wrong answers."""

import math

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.load import load_snapshot

m02 = load_snapshot(load_manifest().get("02").script)

# ---- 1: the loss of an untrained model ----

OWN = math.sqrt(256 / 3)  # the logit of the input token, sqrt(256) times a row of length sqrt(1/3)
INITIAL_LOSS = math.log(math.exp(OWN) + 256 * math.exp(1 / 6)) - OWN / 257
WRONG_LOSSES = {
    math.log(257): "that is ln 257, an even guess; this model is sure of something",
    16.0: "that is record #5's, 768 wide",
    10.99: "that is near 01's at record scale, whose blocks are not the identity",
    math.log(257) + 1 / 6: "that leaves out the input token's own logit",
}


def check_1(answer):
    """The loss within 0.12, which covers the draws of the init too."""
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"a number is expected, not {answer!r}") from None
    for wrong, why in WRONG_LOSSES.items():
        assert abs(value - wrong) > 0.05, f"{value:g} is not it: {why}"
    side = "high" if value > INITIAL_LOSS else "low"
    assert abs(value - INITIAL_LOSS) < 0.12, (
        f"{value:g} is too {side}; the blocks are the identity, so one logit stands out: find"
        " which, and how large it is at width 256")


# ---- 2: rotary with complex numbers ----


def turn(x, exponent=2.0, sign=-1, interleaved=False, first=0, axis=1):
    """The complex product; the defaults are right."""
    half = x.size(-1) // 2
    frequencies = 10000 ** (-exponent * torch.arange(half) / x.size(-1))
    angles = sign * torch.outer(torch.arange(first, first + x.size(axis)), frequencies)
    if axis == 1:
        angles = angles[:, None]
    turned = torch.polar(torch.ones_like(angles), angles)
    if interleaved:
        turned = torch.view_as_complex(x.unflatten(-1, (half, 2))) * turned
        return torch.view_as_real(turned).flatten(-2)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turned
    return torch.cat((turned.real, turned.imag), dim=-1)


def rotate(x):
    """The right one."""
    return turn(x)


def other_way(x):
    """Your pairs turn the other way; scores would be the same, but the snapshot turns by -angle"""
    return turn(x, sign=1)


def interleaved(x):
    """You pair neighbours; dimension i belongs to i + D/2: chunk(2, dim=-1)"""
    return turn(x, interleaved=True)


def slow(x):
    """Your frequencies fall half as fast as they should: 10000^(-2i/D), with i below D/2"""
    return turn(x, exponent=1.0)


def from_one(x):
    """Your first position is 1; it is 0, where nothing turns"""
    return turn(x, first=1)


def by_head(x):
    """Your angle grows with the head; it grows with the position, dimension 1 of x"""
    return turn(x, axis=2)


def unchanged(x):
    """Your x comes back as it went in"""
    return x


WRONG_TURNS = [other_way, interleaved, slow, from_one, by_head, unchanged]


def check_2(answer):
    """Three shapes, against the snapshot's Rotary."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 5, 2, 8), (2, 16, 3, 6), (1, 9, 1, 2))
    samples = [torch.randn(shape, generator=generator) for shape in shapes]
    expected = [m02.Rotary(x.size(-1), x.size(1))(x) for x in samples]
    came = [answer(x) for x in samples]
    for y, x in zip(came, samples, strict=True):
        assert torch.is_tensor(y), f"a tensor is expected, not {y!r}"
        assert not y.is_complex(), "the result is complex; cat its real and its imaginary part"
        assert y.shape == x.shape, f"{tuple(x.shape)} went in, {tuple(y.shape)} came out"
    if agree(came, expected):
        return
    for wrong in WRONG_TURNS:
        assert not agree(came, [wrong(x) for x in samples]), wrong.__doc__
    worst = max((a - b).abs().max().item() for a, b in zip(came, expected, strict=True))
    lengths = max((a.norm(dim=-1) - b.norm(dim=-1)).abs().max().item()
                  for a, b in zip(came, samples, strict=True))
    raise AssertionError(
        f"an entry is {worst:.2g} away from Rotary's; lengths "
        + ("are kept, so look at the angles" if lengths < 1e-4 else "change, so it is no rotation"))


def agree(some, others):
    """Whether the tensors agree to rounding."""
    return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(some, others, strict=True))


# ---- 3: one zero too many ----

MATRICES = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CASES = {
    (): set(),
    ("attn.c_q",): set(),
    ("attn.c_v",): {"attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj"},
    ("mlp.c_fc",): {"mlp.c_fc", "mlp.c_proj"},
    ("attn.c_q", "attn.c_k"): {"attn.c_q", "attn.c_k"},
}


def stuck(names, steps=3):
    """The block matrices that do not move in some steps, with `names` zeroed."""
    torch.manual_seed(0)
    model = m02.GPT(m02.Hyperparameters(vocab_size=64, num_layers=2, num_heads=2, model_dim=32,
                                        seq_len=16, compile=False, bf16=False))
    weights = {name: [block.get_submodule(name).weight for block in model.blocks]
               for name in MATRICES}
    for name in names:
        for weight in weights[name]:
            torch.nn.init.zeros_(weight)
    before = {name: [weight.detach().clone() for weight in weights[name]] for name in MATRICES}
    optimizers = [torch.optim.AdamW([model.embed.weight], lr=3e-3),
                  m02.Muon(list(model.blocks.parameters()), lr=1e-2, momentum=0.95, bf16=False,
                           compiled=False)]
    for _ in range(steps):
        tokens = torch.randint(64, (4, 17))
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name for name in MATRICES
            if all(map(torch.equal, weights[name], before[name]))}


def one_step(names):
    """The first step alone, where four matrices wait for c_proj as they should."""
    return stuck(names, steps=1)


def two_steps(names):
    """Too early for c_k, which waits for c_q."""
    return stuck(names, steps=2)


def only_the_zeroed(names):
    """What is zero stays zero: not so."""
    return set(names)


def never(names):
    """Gradients always find a way: not so."""
    return set()


def check_3(answer):
    """Five sets of names."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    for names, expected in CASES.items():
        came = answer(set(names))
        assert isinstance(came, set | frozenset | list | tuple), (
            f"a set of names is expected, not {came!r}")
        came = {str(name).removesuffix(".weight") for name in came}
        asked = f"stuck({set(names) or '{}'})"
        if more := came - expected:
            why = ("behind a zero matrix one waits for an update or two: train three steps or more"
                   if more <= set(MATRICES) else f"names are among {', '.join(MATRICES)}")
            raise AssertionError(f"{asked} names {', '.join(sorted(more))}, which moves: {why}")
        less = ", ".join(sorted(expected - came))
        assert not less, (
            f"{asked} leaves out {less}, which never moves; zero it in every block, before the "
            "copy that you compare with, and compare the weights exactly")


EXERCISES = {
    "1": dict(
        check=check_1,
        hints=[
            "With blocks that are the identity, the last state is the normalised embedding of the "
            "input token. Multiply it with the tied table.",
            "Entries are uniform within 1/sqrt(C), so a row has length sqrt(1/3), and sqrt(C) when"
            " normalised. Its product with itself is sqrt(C) sqrt(1/3); with another row, N(0,"
            " 1/3).",
            "loss = ln(e^own + 256 e^(1/6)) - (the target's logit, about 0 on average).",
            "own = sqrt(256/3) = 9.24, and ln(e^9.24 + 302) is a little more.",
        ],
        solution=INITIAL_LOSS,
        wrong=[math.log(257), 16.0, 10.99, 5.7, 8.5],
    ),
    "2": dict(
        check=check_2,
        hints=[
            "Which dimension is the partner of dimension i? Look at chunk in Rotary.",
            "(u + iw) e^(-i angle) = (u cos + w sin) + i (w cos - u sin), angle = t 10000^(-2i/D).",
            "Make angles (T, 1, D/2) from an outer product; polar(1, -angles); complex(u, w) from "
            "the two halves; multiply; cat the real and the imaginary part.",
            "z = torch.complex(*x.chunk(2, dim=-1))\n"
            "z = z * torch.polar(torch.ones_like(angles), -angles)\n"
            "return torch.cat(...)",
        ],
        solution=rotate,
        wrong=WRONG_TURNS,
    ),
    "3": dict(
        check=check_3,
        hints=[
            "Copy the weights after zeroing, compare after training. block.get_submodule(name).",
            "A product of two zero factors has gradient zero in both. ReLU² is flat at zero.",
            "micro; zero the weights of every block; clone; three times train_step; torch.equal for"
            " each name and each block.",
            "model, optimizers, batches = micro(m02, 1e-2)\n"
            "weights = {name: [b.get_submodule(name).weight for b in model.blocks]\n"
            "           for name in MATRICES}\n"
            "for name in names:\n"
            "    for weight in weights[name]:\n"
            "        torch.nn.init.zeros_(weight)\n"
            "before = ...  # clones\n"
            "for _ in range(3):\n"
            "    train_step(model, optimizers, batches)\n"
            "return {name for name in MATRICES if ...}",
        ],
        solution=stuck,
        wrong=[one_step, two_steps, only_the_zeroed, never],
    ),
}
