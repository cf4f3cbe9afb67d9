"""Exercises of muon_at_home: checks, hints, solutions and typical wrong answers."""

import muon_at_home as home
import torch
import torch.nn.functional as F
from torch import nn

# ---- 1: views of a weight as matrices ----

SHAPES = (((96, 32), 3), ((32, 16, 3, 3), 1), ((8, 4, 3, 3), 2), ((12, 5), 1))


def copies(weight, count):
    """Yours are copies: a step would move them, and the model would stay as it is"""
    return [nn.Parameter(part.flatten(1)) for part in weight.detach().clone().chunk(count)]


def by_columns(weight, count):
    """You cut along the second dimension; fused weights lie along the first, the outputs"""
    return [nn.Parameter(part.flatten(1)) for part in weight.detach().chunk(count, 1)]


def whole(weight, count):
    """Yours is one matrix, whatever `count` says: fused weights would be orthogonalised together"""
    return [nn.Parameter(weight.detach().flatten(1))]


def not_flat(weight, count):
    """A convolution's parts still have four dimensions; flatten all but the first"""
    return [nn.Parameter(part) for part in weight.detach().chunk(count)]


def by_the_last(weight, count):
    """You keep the last dimension; keep the first, so that a filter of a convolution is a row"""
    return [nn.Parameter(part.flatten(0, -2)) for part in weight.detach().chunk(count)]


def interleaved(weight, count):
    """You take every `count`-th row; the parts lie one after the other: queries, keys, values"""
    return [nn.Parameter(weight.detach()[k::count].flatten(1)) for k in range(count)]


def with_history(weight, count):
    """An optimizer takes leaves: start from weight.detach(), and make each part an nn.Parameter"""
    return [part.flatten(1) for part in weight.chunk(count)]


WRONG_VIEWS = [copies, by_columns, whole, not_flat, by_the_last, interleaved, with_history]


def seen(function):
    """What is seen of its parts: shapes, values before and after the weight moved, leaves."""
    found = []
    for shape, count in SHAPES:
        weight = nn.Parameter(torch.arange(torch.Size(shape).numel()).float().view(shape))
        parts = function(weight, count)
        assert isinstance(parts, (list, tuple)) and all(map(torch.is_tensor, parts)), (
            f"a list of tensors is expected, not {type(parts).__name__} of"
            f" {type(parts[0]).__name__ if isinstance(parts, (list, tuple)) and parts else '...'}")
        before = [(part.detach().flatten().tolist(), part.is_leaf) for part in parts]
        weight.data += 1
        found.append([(shape, count, tuple(part.shape), values, part.data.flatten().tolist(), leaf)
                      for part, (values, leaf) in zip(parts, before, strict=True)])
    return found


def check_1(answer):
    """Linear and convolutional weights, whole and fused."""
    assert callable(answer), f"a function is expected, not {answer!r}"
    came, expected = seen(answer), seen(home.as_matrices)
    if came == expected:
        return
    for wrong in WRONG_VIEWS:
        assert came != seen(wrong), wrong.__doc__
    for got, wanted in zip(came, expected, strict=True):
        shape, count = wanted[0][:2]
        assert [part[2] for part in got] == [part[2] for part in wanted], (
            f"of a weight {shape} with count {count} yours have the shapes"
            f" {[part[2] for part in got]}, not {[part[2] for part in wanted]}")
        assert [part[4] for part in got] == [part[4] for part in wanted], (
            f"your parts of a weight {shape} do not follow when the weight moves: share its memory")
        assert got == wanted, f"your parts of a weight {shape} hold other rows, or are no leaves"


# ---- 2: the same step with torch's scale ----

OURS, OUTPUTS, INPUTS = 3.6e-4, 3072, 768
RATE = OURS * INPUTS**0.5
WRONG_RATES = {
    OURS * OUTPUTS**0.5: "torch multiplies by the root of outputs / inputs, 2, itself",
    5 * OURS: "that is the rate for match_rms_adamw, whose factor is a fifth of 01's",
    OURS: "01 multiplies by the root of 3,072, `original` only by 2",
    OURS / INPUTS**0.5: "you divided; 01's factor is the larger one, so torch's rate is larger",
}


def check_2(answer):
    """The rate within 3 %."""
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"a number is expected, not {answer!r}") from None
    for wrong, why in WRONG_RATES.items():
        assert abs(value / wrong - 1) > 0.03, f"{value:g} is not the rate: {why}"
    assert abs(value / RATE - 1) < 0.03, (
        f"{value:g} is too {'large' if value > RATE else 'small'}: set 01's rate times its factor"
        " equal to torch's rate times `original`'s factor")


# ---- 3: convert another model ----


class Patches(nn.Module):
    """Letters in 16 patches of 4 x 4 pixels: attention and an MLP on them, then a head."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(16, 32)
        self.seat = nn.Parameter(torch.zeros(16, 32))
        self.q, self.kv, self.mix = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.head = nn.Linear(32, len(home.LETTERS))

    def forward(self, x):  # (B, 1, 16, 16)
        x = self.patch(F.unfold(x, 4, stride=4).mT) + self.seat  # (B, 16, 32)
        y = F.rms_norm(x, (32,))
        x = x + self.mix(F.scaled_dot_product_attention(self.q(y), *self.kv(y).chunk(2, 2)))
        x = x + self.down(F.relu(self.up(F.rms_norm(x, (32,)))))
        return self.head(F.rms_norm(x.mean(1), (32,)))


RIGHT = {"q.weight": 1, "kv.weight": 2, "mix.weight": 1, "up.weight": 1, "down.weight": 1}
NOT_FOR_MUON = {
    "patch.weight": "`patch` reads pixels: a model's first layer stays with AdamW",
    "seat": "`seat` is a table: its rows are added one by one, so it stays with AdamW",
    "head.weight": "`head` turns features into letters: a model's last layer stays with AdamW",
}


def check_3(answer):
    """Says which entries are wrong, then trains the model both ways."""
    assert isinstance(answer, dict) and all(isinstance(name, str) for name in answer), (
        f'a dictionary such as {{"up.weight": 1}} is expected, not {answer!r}')
    known = dict(Patches().named_parameters())
    for name, count in answer.items():
        assert f"{name}.weight" not in known, (
            f"{name!r} is a module; give the parameter's full name, {name + '.weight'!r}")
        assert name not in NOT_FOR_MUON, NOT_FOR_MUON[name]
        assert name in known and name in RIGHT, (
            f"Muon has no use for {name!r}; the matrices are {', '.join(RIGHT)},"
            f" {', '.join(NOT_FOR_MUON)}")
        assert count == RIGHT[name], (
            f"`{name}` holds {RIGHT[name]} {'matrix' if RIGHT[name] == 1 else 'matrices'}, not"
            f" {count}: look at how its output is used")
    missing = ", ".join(name for name in RIGHT if name not in answer)
    assert not missing, (f"{missing}: a matrix between hidden features that you leave to AdamW;"
                         " Muon trains those")
    losses = {optimizer: home.train(optimizer, 1e-2, steps=40, net=Patches, names=answer)
              for optimizer in ("adamw", "muon")}
    print(", ".join(f"{name} ends at {loss:.3f}" for name, loss in losses.items())
          + ", after 40 steps at one rate: tune both before you conclude anything.")
    start = torch.tensor(len(home.LETTERS)).log().item()
    assert losses["muon"] < start, f"Muon ends at {losses['muon']:.3f}, above a guess's {start:.3f}"


EXERCISES = {
    "1": dict(
        check=check_1,
        hints=[
            "Which operations of a tensor return views: chunk, flatten, clone, reshape, stack?",
            "The rows of `weight` are its outputs. The first rows / count of them are part one, and"
            " so on. All other dimensions become one.",
            "weight.detach() shares memory and has no history; chunk(count) cuts the first"
            " dimension; flatten(1) joins the others; nn.Parameter makes a leaf of the result.",
            "return [torch.nn.Parameter(part....) for part in weight.detach().chunk(count)]",
        ],
        solution=home.as_matrices,
        wrong=WRONG_VIEWS,
    ),
    "2": dict(
        check=check_2,
        hints=[
            "Both steps are rate x factor x the same orthogonal matrix. What are the two factors?",
            "01's factor is the root of 3,072, `original`'s the root of 3,072 / 768, which is 2.",
            "lr x 2 = 3.6e-4 x the root of 3,072. So lr = 3.6e-4 x the root of ...",
            "The root of 3,072 divided by 2 is the root of 768: lr = 3.6e-4 * 768**0.5.",
        ],
        solution=RATE,
        wrong=list(WRONG_RATES),
    ),
    "3": dict(
        check=check_3,
        hints=[
            "Which layer reads pixels, which names letters, which is a table?",
            "Muon trains matrices between hidden features. The keys and the values of `kv` are two"
            " of them, as its output is cut in two.",
            "Eight parameters have two dimensions. The first layer, the table and the head are not"
            " Muon's. Of the other five, one holds two matrices: its output is cut in two.",
            '{"q.weight": 1, "kv.weight": ..., "mix.weight": 1, "up.weight": 1, "down.weight": 1}',
        ],
        solution=RIGHT,
        wrong=[{**RIGHT, "head.weight": 1}, {**RIGHT, "seat": 1}, {**RIGHT, "patch.weight": 1},
               {**RIGHT, "kv.weight": 1}, {"up.weight": 1, "down.weight": 1},
               {**RIGHT, "qkv.weight": 3}, {**RIGHT, "q.bias": 1}, {"q": 1}, ["q.weight"]],
    ),
}
