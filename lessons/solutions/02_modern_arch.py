"""Exercises of lesson 02: checks, hints, solutions and typical wrong answers."""

import math
from functools import cache

import torch
import torch.nn.functional as F

from speedrun.history.manifest import load_manifest
from speedrun.run.data import BUILTIN, make_builtin
from speedrun.scripts.find import load_snapshot

m01 = load_snapshot(load_manifest().get("01").script)
m02 = load_snapshot(load_manifest().get("02").script)

# ---- 1: scores that are bounded, and still can choose ----


class Prepared(torch.nn.Module):
    """Rotary after another function of q or k."""

    def __init__(self, prepare, rotary):
        super().__init__()
        self.prepare, self.rotary = prepare, rotary

    def forward(self, x):
        return self.rotary(self.prepare(x))


def trained_loss(prepare, seed, steps=40, muon_lr=4e-2):
    """The validation loss of the notebook's micro model, trained as there."""
    make_builtin()
    torch.manual_seed(seed)
    args = m02.Hyperparameters(vocab_size=257, num_layers=2, num_heads=2, model_dim=64, seq_len=64,
                               micro_batch_size=8, compile=False, bf16=False)
    model = m02.GPT(args)
    for block in model.blocks:
        block.attn.__class__ = m01.CausalSelfAttention
        block.attn.rotary = Prepared(prepare, block.attn.rotary)
    adam = torch.optim.AdamW([model.embed.weight], betas=(0.9, 0.95), weight_decay=0.0)
    muon = m02.Muon(list(model.blocks.parameters()), 0.0, 0.95, bf16=False, compiled=False)
    train, val = (m02.token_batches(f"{BUILTIN}/*_{split}_*.bin", tokens, args, 0, 1,
                                    torch.device("cpu"))
                  for split, tokens in (("train", 512), ("val", 8192)))
    for step in range(steps):
        model.zero_grad()
        model(*next(train)).backward()
        for optimizer, lr in ((adam, 7.2e-3), (muon, muon_lr)):
            optimizer.param_groups[0]["lr"] = lr * min(1, (steps - step) / (0.3 * steps))
            optimizer.step()
    with torch.no_grad():
        return sum(model(*next(val)).item() for _ in range(16)) / 16


def by_length(x):
    """Version 2."""
    return F.normalize(x, dim=-1)


@cache
def losses_by_length():
    return [trained_loss(by_length, seed) for seed in range(3)]


def prepare(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def _as_it_is(x):
    return x


def _over_heads(x):
    return x / x.square().mean((-2, -1), keepdim=True).sqrt()


def _over_positions(x):
    return x / x.square().mean((1, 3), keepdim=True).sqrt()


def _half_way(x):
    return x.size(-1) ** 0.25 * by_length(x)


def _by_largest_entry(x):
    return x / x.abs().amax(-1, keepdim=True)


def _layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


def _too_large(x):
    return x.size(-1) ** 0.5 * prepare(x)


def _fits_one_width(x):
    return 4 * by_length(x)


def _only_shortens(x):
    return x * (x.size(-1) ** 0.5 / x.norm(dim=-1, keepdim=True)).clamp(max=1)


def _length_plus_one(x):
    return x.size(-1) ** 0.5 * x / (1 + x.norm(dim=-1, keepdim=True))


def _over_the_batch(x):
    return x / x.square().mean((0, 3), keepdim=True).sqrt()


def _reversed(x):
    return -prepare(x)


def _detached_length(x):
    return x / x.square().mean(-1, keepdim=True).sqrt().detach()


def _without_gradient(x):
    return prepare(x).detach()


def _in_place(x):
    x /= x.square().mean(-1, keepdim=True).sqrt()
    return x


def _in_double_precision(x):
    return prepare(x.double())


def check_1(answer):
    """Lengths, directions and gradients at two widths, then a training run against version 2."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    for width in (16, 48):
        check_vectors(answer, width)
    import lesson

    losses = [trained_loss(answer, seed) for seed in range(3)]
    lesson.must_end_lower(losses, losses_by_length(), "your version, bounded,", "version 2",
                          "Is `prepare` the same for every width? The model's heads are 32 wide",
                          0.1)


def check_vectors(answer, width):
    """Vectors of this width keep their direction, and all get the length sqrt(width)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 3, width, generator=generator)
    x[0, 4, 1] *= 50  # one long vector among short ones
    given = x.clone()
    came = answer(given)
    assert torch.is_tensor(came) and came.shape == x.shape, (
        f"{tuple(x.shape)} went in, {tuple(getattr(came, 'shape', ()))} came out; every vector"
        " of width D becomes another of width D")
    assert torch.equal(given, x), (
        "your function overwrites the tensor that it gets, which the backward pass still needs;"
        " make a new one (x / ..., not x /= ...)")
    assert came.dtype == x.dtype, f"{x.dtype} went in, {came.dtype} came out; keep the dtype"
    for axis, (name, meant) in enumerate((
            ("sequences", "each sequence is treated for itself"),
            ("positions", "a query may not depend on other positions, least of all on later ones"),
            ("heads", "each head's vector is treated for itself"))):
        parts = [answer(part.clone()) for part in x.split(1, dim=axis)]
        assert torch.allclose(came, torch.cat(parts, dim=axis), atol=1e-4), (
            f"a vector changes when other {name} are left out; {meant}: use only the last"
            " dimension")
    for factor in (0.1, 1, 1000):
        came = answer(factor * x)
        likeness = F.cosine_similarity(came, x, dim=-1).min().item()
        assert likeness > 0.999, (
            f"a vector {factor} times the sample's comes out in another direction (cosine"
            f" {likeness:.2f}); multiply the whole vector by one positive number: no function of"
            " single entries (such as tanh), no subtracted mean (as in a layer norm)")
        check_lengths(came.norm(dim=-1), factor, width)
    x.requires_grad_()
    came = answer(1 * x)
    assert came.requires_grad, (
        "no gradient passes through your vectors, so queries and keys would never learn; leave out"
        " detach() and no_grad()")
    (gradient,) = torch.autograd.grad((came * torch.randn(x.shape, generator=generator)).sum(), x)
    along = F.cosine_similarity(gradient, x, dim=-1).abs().max().item()
    assert along < 0.01, (
        "your values are right, their gradient is not: a longer x gives the same result, so the"
        " gradient has no part along x, but yours does; do not detach the length")


def check_lengths(lengths, factor, width):
    """All are sqrt(width); if they are not, says which rule would give these."""
    shortest, longest, wanted = lengths.min().item(), lengths.max().item(), width**0.5
    if longest <= 1.005 * wanted and shortest >= 0.95 * wanted:
        return
    if longest > 1.01 * shortest:
        why = ("a vector's length still depends on its length before, so a score can still be any"
               " size, or can never reach the bound; divide by the length, or by the RMS")
    elif width != 16:
        why = "at width 16 your length is right, so it is a constant; compute it from x.size(-1)"
    else:
        why = ("two vectors of length L have a score of at most L² / sqrt(D), and that should be"
               " sqrt(D); which length must every vector have?")
    raise AssertionError(
        f"vectors of width {width}, {factor} times the sample's, come out {shortest:.3g} to"
        f" {longest:.3g} long, so equal ones have scores of {shortest**2 / wanted:.3g} to"
        f" {longest**2 / wanted:.3g}; the bound is the square root of the width, here"
        f" {wanted:.3g}: {why}")


# ---- 2: the loss of an untrained model ----

OWN = math.sqrt(256 / 3)  # the logit of the input token, sqrt(256) times a row of length sqrt(1/3)
INITIAL_LOSS = math.log(math.exp(OWN) + 256 * math.exp(1 / 6)) - OWN / 257
WRONG_LOSSES = {
    math.log(257): "that is ln 257, an even guess; this model is sure of something",
    16.0: "that takes a row's length as 1, but entries uniform within 1/16 give sqrt(1/3) (or it is"
          " record #5's loss, 768 wide)",
    INITIAL_LOSS - OWN: "that takes the input token as the target; targets are random, and their"
                        " logits are 0 on average",
    10.99: "that is near 01's at record scale, whose blocks are not the identity",
    math.log(257) + 1 / 6: "that leaves out the input token's own logit",
    OWN + math.log(257): "the loss is not the sum of the large logit and an even guess's loss; put"
                         " the logit into the softmax's sum",
    math.log(math.exp(OWN / 2) + 256 * math.exp(1 / 24)): "that takes the entries' variance as"
        " 1 / (12 · 256), as if they were spread over 1/16; they are spread over 2/16",
    INITIAL_LOSS / math.log(2): "that is in bits; this loss is in nats",
    8.0: "that is sqrt(64), the width of the micro models; here the width is 256",
}


def check_2(answer):
    """The loss to 0.1, as the exercise says."""
    try:
        value = float(answer)
        assert not isinstance(answer, bool)
    except (TypeError, ValueError, AssertionError):
        raise AssertionError(f"a number is expected, not {answer!r}") from None
    for wrong, why in WRONG_LOSSES.items():
        assert abs(value - wrong) > 0.05, f"{value:g} is not it: {why}"
    side = "high" if value > INITIAL_LOSS else "low"
    assert abs(value - INITIAL_LOSS) < 0.105, (
        f"{value:g} is too {side}; the blocks are the identity, so one logit stands out: find"
        " which (whose row is the stream?), and how large it is at width 256")


# ---- 3: one zero too many ----

MATRICES = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CASES = {
    (): set(),
    ("attn.c_q",): set(),
    ("attn.c_v",): {"attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj"},
    ("mlp.c_fc",): {"mlp.c_fc", "mlp.c_proj"},
    ("attn.c_q", "attn.c_k"): {"attn.c_q", "attn.c_k"},
    ("attn.c_proj", "mlp.c_proj"): set(),
    ("attn.c_v", "mlp.c_fc"): set(MATRICES),
    ("attn.c_k", "attn.c_q", "mlp.c_fc"): {"attn.c_q", "attn.c_k", "mlp.c_fc", "mlp.c_proj"},
}


def micro_model():
    torch.manual_seed(0)
    return m02.GPT(m02.Hyperparameters(vocab_size=64, num_layers=2, num_heads=2, model_dim=32,
                                       seq_len=16, compile=False, bf16=False))


def weights_of(model):
    """{name: its weight in each block}."""
    return {name: [block.get_submodule(name).weight for block in model.blocks]
            for name in MATRICES}


def zero(weights, names):
    for name in names:
        for weight in weights[name]:
            torch.nn.init.zeros_(weight)


def copies(weights):
    return {name: [weight.detach().clone() for weight in those] for name, those in weights.items()}


def train(model, steps):
    optimizers = [torch.optim.AdamW([model.embed.weight], lr=3e-3),
                  m02.Muon(list(model.blocks.parameters()), lr=1e-2, momentum=0.95, bf16=False,
                           compiled=False)]
    for _ in range(steps):
        tokens = torch.randint(64, (4, 17))
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()


def unmoved(weights, before):
    return {name for name in MATRICES if all(map(torch.equal, weights[name], before[name]))}


def stuck(names, steps=3):
    """The block matrices that do not move in some steps, with `names` zeroed."""
    model = micro_model()
    weights = weights_of(model)
    zero(weights, names)
    before = copies(weights)
    train(model, steps)
    return unmoved(weights, before)


def by_gradients(names):
    """Looks at the last step's gradients: Muon moves whatever has one."""
    model = micro_model()
    weights = weights_of(model)
    zero(weights, names)
    train(model, 4)
    return sorted(name for name in MATRICES if not any(w.grad.any() for w in weights[name]))


def one_step(names):
    """The first step alone, where four matrices wait for c_proj as they should."""
    return stuck(names, steps=1)


def two_steps(names):
    """Too early for c_k, which waits for c_q."""
    return stuck(names, steps=2)


def those_that_moved(names):
    """The opposite set."""
    return set(MATRICES) - stuck(names)


def only_the_zeroed(names):
    """What is zero stays zero: not so."""
    return set(names)


def never(names):
    """Gradients always find a way: not so."""
    return set()


def from_memory(names):
    """The sets for single names, without a model: those of several are not their union."""
    known = {names[0]: found for names, found in CASES.items() if len(names) == 1}
    return set().union(*(known.get(name, set()) for name in names))


def single_names_only(names):
    """The answers to the three examples and to no other set."""
    return CASES[tuple(names)] if len(names) < 2 else {"attn.c_q", "attn.c_k"}


def one_block(names):
    """Zeroes the first block only."""
    model = micro_model()
    weights = weights_of(model)
    zero({name: those[:1] for name, those in weights.items()}, names)
    before = copies(weights)
    train(model, 3)
    return unmoved(weights, before)


def zeroed_too_late(names):
    """After the copy: the zeroing itself then counts as a move."""
    model = micro_model()
    weights = weights_of(model)
    before = copies(weights)
    zero(weights, names)
    train(model, 3)
    return unmoved(weights, before)


def without_a_copy(names):
    """Compares the weights with themselves."""
    model = micro_model()
    weights = weights_of(model)
    zero(weights, names)
    train(model, 3)
    return unmoved(weights, weights)


def the_same_model():
    """Trains one model on and on: the later calls' matrices are zero behind one that is not."""
    model = micro_model()

    def stuck_again(names):
        weights = weights_of(model)
        zero(weights, names)
        before = copies(weights)
        train(model, 3)
        return unmoved(weights, before)

    return stuck_again


def empties_its_argument(names):
    """Takes the names out of the caller's set."""
    return stuck([names.pop() for _ in range(len(names))])


def check_3(answer):
    """Sets of names: single ones, pairs that wait for each other, and pairs that do not."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    for names, expected in CASES.items():
        given = set(names)
        came = answer(given)
        assert given == set(names), (
            f"your function changes the set that it gets: {set(names)} became {given or '{}'}")
        assert isinstance(came, set | frozenset | list | tuple), (
            f"a set of names is expected, not {came!r}")
        came = {str(name).removesuffix(".weight") for name in came}
        asked = f"stuck({set(names) or '{}'})"
        if more := came - expected:
            assert names or came != set(MATRICES), (
                "stuck({}) names all six matrices, though all of them move; compare with copies"
                " (.clone()), not with the weights themselves, and name those that did not move")
            names_more = f"{asked} names {', '.join(sorted(more))}"
            assert more <= set(MATRICES), f"{names_more}; names are among {', '.join(MATRICES)}"
            raise AssertionError(
                f"{names_more}, which {'moves' if len(more) == 1 else 'move'}: behind a zero matrix"
                " one waits for an update or two: train three steps or more, and compare the"
                " weights exactly, by torch.equal")
        less = sorted(expected - came)
        assert not less, (
            f"{asked} leaves out {', '.join(less)}, which never {'move' if less[1:] else 'moves'};"
            f" zero {', '.join(sorted(names))} in every block of a new model, before the copy that"
            " you compare with" + (
                ", and train: what several zeros do is not the union of what each does"
                if len(names) > 1 else ", and compare the weights exactly"))


EXERCISES = {
    "1": dict(
        check=check_1,
        hints=[
            "Version 2 has the right direction and the wrong length. Which length makes q · k /"
            " sqrt(D) reach sqrt(D)?",
            "If |q| = |k| = sqrt(D), then q · k / sqrt(D) is at most D / sqrt(D) = sqrt(D).",
            "Divide each vector by its length and multiply by sqrt(D); or divide it by the root of"
            " its mean square. Over the last dimension, with keepdim=True.",
            "return x / x.square().mean(-1, keepdim=True).sqrt()",
        ],
        solution=prepare,
        wrong=[_as_it_is, by_length, _half_way, _by_largest_entry, _layer_norm, _over_heads,
               _over_positions, _over_the_batch, _too_large, torch.tanh, _fits_one_width,
               _only_shortens, _length_plus_one, _reversed, _detached_length, _without_gradient,
               _in_place, _in_double_precision],
    ),
    "2": dict(
        check=check_2,
        hints=[
            "With blocks that are the identity, the last state is the normalised embedding of the "
            "input token. Multiply it with the tied table.",
            "With the width C = 256, entries are uniform within 1/sqrt(C), so a row has length"
            " sqrt(1/3), and sqrt(C) when normalised. The normalised row times the row itself is"
            " sqrt(C) sqrt(1/3); times another row, it is drawn from N(0, 1/3).",
            "loss = ln(e^own + 256 e^(1/6)) - (the target's logit, about 0 on average).",
            "own = sqrt(256/3) = 9.24, and ln(e^9.24 + 302) is a little more.",
        ],
        solution=INITIAL_LOSS,
        wrong=[*WRONG_LOSSES, 5.7, 8.5, 9.36, -OWN, True],
        right=[9.2, 9.3, "9.23"],
    ),
    "3": dict(
        check=check_3,
        hints=[
            "Copy the weights after zeroing, compare after training. block.get_submodule(name).",
            "A product of two zero factors has gradient zero in both. ReLU² is flat at zero.",
            "build(); zero the weights of every block; clone; train for three steps; torch.equal"
            " for each name and each block.",
            "model = build()\n"
            "weights = {name: [b.get_submodule(name).weight for b in model.blocks]\n"
            "           for name in MATRICES}\n"
            "for name in names:\n"
            "    for weight in weights[name]:\n"
            "        torch.nn.init.zeros_(weight)\n"
            "before = ...  # clones\n"
            "train(model, 1e-2, steps=3)\n"
            "return {name for name in MATRICES if ...}",
        ],
        solution=stuck,
        wrong=[one_step, two_steps, those_that_moved, only_the_zeroed, never, from_memory,
               single_names_only, one_block, zeroed_too_late, without_a_copy, the_same_model(),
               empties_its_argument],
        right=[by_gradients],
    ),
}
