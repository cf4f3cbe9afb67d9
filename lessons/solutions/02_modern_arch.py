"""Exercises of lesson 02: checks, hints, solutions and typical wrong answers."""

import math

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


def check_1(answer):
    """Bounds on samples, then a training run against version 2."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 3, 16, generator=generator)
    x[0, 4, 1] *= 50  # one long vector among short ones
    came = answer(x.clone())
    assert torch.is_tensor(came) and came.shape == x.shape, (
        f"{tuple(x.shape)} went in, {tuple(getattr(came, 'shape', ()))} came out; every vector"
        " of width D becomes another of width D")
    alone = torch.cat([answer(x[:, t : t + 1].clone()) for t in range(x.size(1))], dim=1)
    assert torch.allclose(came, alone, atol=1e-4), (
        "a vector changes when other positions are left out; a query may not depend on other"
        " positions, least of all on later ones: use only the last dimension")
    apart = torch.cat([answer(x[:, :, h : h + 1].clone()) for h in range(x.size(2))], dim=2)
    assert torch.allclose(came, apart, atol=1e-4), (
        "a vector changes when other heads are left out; each head's vector is treated for"
        " itself: use only the last dimension")
    bound = x.size(-1) ** 0.5
    for factor in (1, 1000):
        largest = (answer(factor * x).square().sum(-1).amax() / bound).item()
        assert largest <= 1.01 * bound, (
            f"vectors {factor} times the sample's give a score of {largest:.3g}; the bound is"
            f" the square root of the width, here {bound:g}")
    likeness = F.cosine_similarity(answer(1000 * x), x, dim=-1).min().item()
    assert likeness > 0.999, (
        f"a vector 1000 times the sample's comes out in another direction (cosine {likeness:.2f});"
        " multiply the whole vector by one number: no function of single entries (such as tanh), no"
        " subtracted mean (as in a layer norm)")
    reach = answer(1000 * x).square().sum(-1) / bound
    assert reach.amin() > 0.9 * bound, (
        f"bounded, but a query and an equal key get the score {reach.amin():.3g}, not {bound:g}, so"
        " no query can choose well; which length must every vector have?")
    import lesson

    losses, beaten = ([trained_loss(prepare, seed) for seed in range(3)]
                      for prepare in (answer, by_length))
    lesson.must_end_lower(losses, beaten, "your version, bounded,", "version 2",
                          "Is `prepare` the same for every width? The model's heads are 32 wide",
                          0.1)


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
}


def check_2(answer):
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
        " which (whose row is the stream?), and how large it is at width 256")


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


def those_that_moved(names):
    """The opposite set."""
    return set(MATRICES) - stuck(names)


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
            assert names or came != set(MATRICES), (
                "stuck({}) names all six matrices, though all of them move; compare with copies"
                " (.clone()), not with the weights themselves, and name those that did not move")
            names_more = f"{asked} names {', '.join(sorted(more))}"
            assert more <= set(MATRICES), f"{names_more}; names are among {', '.join(MATRICES)}"
            raise AssertionError(
                f"{names_more}, which {'moves' if len(more) == 1 else 'move'}: behind a zero matrix"
                " one waits for an update or two: train three steps or more")
        less = sorted(expected - came)
        assert not less, (
            f"{asked} leaves out {', '.join(less)}, which never {'move' if less[1:] else 'moves'};"
            f" zero {', '.join(sorted(names))} in every block, before the copy that you compare"
            " with, and compare the weights exactly")


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
               _over_positions, _too_large, torch.tanh],
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
        wrong=[math.log(257), 16.0, INITIAL_LOSS - OWN, 10.99, 5.7, 8.5],
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
        wrong=[one_step, two_steps, those_that_moved, only_the_zeroed, never],
    ),
}
