"""Exercises of lesson 06c: their checks, hints and solutions."""

import math

import torch

# ---- 1: a bank of scalars ----


class Bank:
    """Scalars of all layers in one vector, a row per layer, padded to a multiple of 8."""

    def make(initial, num_layers):
        scalars = torch.tensor([*initial.values()] * num_layers)
        return torch.nn.functional.pad(scalars, (0, -len(scalars) % 8))

    def read(bank, initial, num_layers):
        rows = bank[: len(initial) * num_layers].view(num_layers, len(initial))
        return [dict(zip(initial, row, strict=True)) for row in rows]


def check_bank(answer):
    assert isinstance(answer, type) and hasattr(answer, "make") and hasattr(answer, "read"), (
        f"expected the class Bank with make and read, not {answer!r}")
    for initial, layers in ((dict(x=1.0, x0=0.0, value=0.5), 2), (dict(x=1.0, skip=-1.5), 4),
                            (dict(skip=-1.5, x=1.0, x0=0.0, value=0.5, table=0.25), 12)):
        bank = answer.make(dict(initial), layers)
        told = f"{layers} layers of {len(initial)} scalars"
        assert isinstance(bank, torch.Tensor) and bank.ndim == 1, (
            f"{told}: make returns {type(bank).__name__}; return one vector, a tensor (n,)")
        used = layers * len(initial)
        assert len(bank) % 8 == 0, (
            f"{told}: your bank has {len(bank)} entries, which 8 ranks cannot share; round the"
            " length up to a multiple of 8")
        assert len(bank) == used + -used % 8, (
            f"{told}: your bank has {len(bank)} entries, {used + -used % 8} are enough; pad only"
            " what is missing, nothing if the length fits already")
        bank = torch.arange(len(bank), dtype=torch.float32).requires_grad_()
        layers_read = answer.read(bank, dict(initial), layers)
        assert layers_read is not None, "read returns nothing; return a list of dictionaries"
        layers_read = list(layers_read)
        assert len(layers_read) == layers, (
            f"{told}: read returns {len(layers_read)} entries; return a dictionary per layer, and"
            " nothing for the padding")
        assert all(isinstance(each, dict) and [*each] == [*initial] for each in layers_read), (
            f"{told}: each layer needs a dictionary with the names {list(initial)}")
        entries = [value for row in layers_read for value in row.values()]
        for entry in entries:
            assert isinstance(entry, torch.Tensor), (
                f"{told}: read returns {type(entry).__name__}s, which get no gradient; use the"
                " bank's own entries, without .item() or .tolist()")
            assert entry.ndim == 0, (
                f"{told}: a scalar has the shape {tuple(entry.shape)}; take a single entry,"
                " bank[i], which has no dimension, not a slice of one entry")
        made = answer.make(dict(initial), layers)
        for number, row in enumerate(answer.read(made, dict(initial), layers)):
            for name, value in initial.items():
                seen = row[name].detach().item()
                assert abs(seen - value) < 1e-6, (
                    f"{told}: layer {number} reads {name} = {seen:g}, but make was told"
                    f" {value:g}; does the bank hold a row per layer, or a row per name?")
        total = sum(entries)
        slope = torch.autograd.grad(total, bank, allow_unused=True)[0] if (
            total.requires_grad) else None
        assert slope is not None and slope.tolist() == [1.0] * used + [0.0] * (-used % 8), (
            f"{told}: no gradient reaches the bank's entries from the values that read returns;"
            " return the bank's own entries, not copies such as torch.tensor or a Parameter")


# ---- 2: stochastic rounding ----


def round_stochastically(x):
    """Adds 16 random bits below bfloat16's last one, then cuts them off."""
    bits = x.view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return ((bits + noise) & -65_536).view(torch.float32).bfloat16()


def trained_error(rounding, steps=400):
    """The error of a regression whose bfloat16 weights, about 1, move by at most 0.002 a step."""
    generator = torch.Generator().manual_seed(0)
    truth = 1 + 0.4 * torch.rand(64, generator=generator)
    weight = torch.ones(64).bfloat16()
    for step in range(steps):
        grad = (weight.float() - truth).sign()
        rate = 0.002 * (1 - step / steps)
        weight = rounding(weight.float() - rate * grad)
    return (weight.float() - truth).abs().mean().item()


def nearest(x):
    return x.bfloat16()


def check_rounding(answer):
    assert callable(answer), f"expected the function round_stochastically, not {answer!r}"
    x = torch.tensor([1.001, 1.0, -1.001, 0.3, -2.7, 1e-3, 300.5])
    sample = answer(x.repeat(20_000, 1))
    assert isinstance(sample, torch.Tensor) and sample.dtype == torch.bfloat16, (
        f"expected a bfloat16 tensor, got {getattr(sample, 'dtype', sample)!r}")
    sample = sample.float()
    for column, value in enumerate(x.tolist()):
        low = torch.tensor(value).view(torch.int32) & -65_536
        ends = {low.view(torch.float32).item(), (low + 65_536).view(torch.float32).item()}
        seen = {round(one, 9) for one in sample[:, column].unique().tolist()}
        known = {round(one, 9) for one in ends} | {round(torch.tensor(value).bfloat16().item(), 9)}
        assert seen <= known, (
            f"{value:g} becomes {sorted(seen)[:4]}, but its neighbours in bfloat16 are"
            f" {sorted(ends)}; the noise must be below the distance of two neighbours, which"
            " doubles with each power of two")
        assert len(seen) > 1 or value in ends, (
            f"each of 20,000 copies of {value:g} becomes {sample[0, column].item():.6g}; some"
            " should become the other neighbour: draw for each entry, over the whole distance")
        gap = abs(max(ends) - min(ends))
        mean = sample[:, column].mean().item()
        assert abs(mean - value) < 0.05 * gap, (
            f"{value:g} becomes {mean:.6g} on average; the nearer neighbour should come more often,"
            " in proportion to the distances (and a number that bfloat16 has should stay itself)")
    ours, theirs = trained_error(answer), trained_error(nearest)
    assert ours < theirs / 4, (
        f"the regression ends {ours:.4f} off with your rounding, {theirs:.4f} with the nearest"
        " number; less than a quarter is expected")
    print(f"mean error of the weights: {ours:.4f} with your rounding, {theirs:.4f} with PyTorch's")


# ---- 3: the stream at its end ----

SKIP = 1 / (1 + math.exp(1.5))


def check_stream(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number, not {answer!r}") from None
    meanings = {
        7: "that is with w = 1",
        (1 + SKIP) ** 6: "each skip adds w times the *start*, as silent blocks pass it on, not w"
                         " times what the stream has become",
        6 * SKIP: "that is what the skips add; the stream itself is there, too",
        1 + SKIP: "that is after one skip; there are six",
        1 - 6 * 1.5: "the weight is the sigmoid of -1.5, not -1.5",
    }
    for wrong, why in meanings.items():
        assert abs(value - wrong) > 0.011, f"{value:g} is not right; {why}"
    assert abs(value - (1 + 6 * SKIP)) < 0.02, (
        f"{value:g} is not right; start with 1, add w times the start at each of the six skips")


# ---- typical wrong answers: every check must refuse them ----


class _NotPadded(Bank):
    def make(initial, num_layers):
        return torch.tensor([*initial.values()] * num_layers)


class _ByName(Bank):
    def make(initial, num_layers):
        scalars = torch.tensor([*initial.values()]).repeat_interleave(num_layers)
        return torch.nn.functional.pad(scalars, (0, -len(scalars) % 8))


class _Detached(Bank):
    def read(bank, initial, num_layers):
        return [{name: torch.tensor(value.item()) for name, value in row.items()}
                for row in Bank.read(bank, initial, num_layers)]


class _OwnParameters(Bank):
    def read(bank, initial, num_layers):
        return [{name: torch.nn.Parameter(value.detach()) for name, value in row.items()}
                for row in Bank.read(bank, initial, num_layers)]


class _FirstLayerOnly(Bank):
    def read(bank, initial, num_layers):
        first, *others = Bank.read(bank, initial, num_layers)
        return [first, *({name: value.detach() for name, value in row.items()} for row in others)]


class _OwnTensors(Bank):
    def read(bank, initial, num_layers):
        return [{name: torch.tensor(value.item(), requires_grad=True)
                 for name, value in row.items()} for row in Bank.read(bank, initial, num_layers)]


class _Slices(Bank):
    def read(bank, initial, num_layers):
        rows = Bank.read(bank, initial, num_layers)
        return [{name: value[None] for name, value in row.items()} for row in rows]


class _AlwaysPads(Bank):
    def make(initial, num_layers):
        scalars = torch.tensor([*initial.values()] * num_layers)
        return torch.nn.functional.pad(scalars, (0, 8 - len(scalars) % 8))


def _up_or_down_evenly(x):
    bits = x.view(torch.int32)
    up = torch.randint(0, 2, x.shape, dtype=torch.int32) * 65_536
    return ((bits & -65_536) + up).view(torch.float32).bfloat16()


def _noise_too_small(x):
    noise = torch.randint(0, 1 << 10, x.shape, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -65_536).view(torch.float32).bfloat16()


def _one_draw(x):
    noise = torch.randint(0, 1 << 16, (1,), dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -65_536).view(torch.float32).bfloat16()


def _one_grid(x):
    return ((x * 128 + torch.rand_like(x)).floor() / 128).bfloat16()


def _gaussian(x):
    return (x + 0.01 * torch.randn_like(x)).bfloat16()


EXERCISES = {
    "1": dict(
        check=check_bank,
        hints=[
            "Which order of the numbers keeps one layer's together?",
            "A row of len(initial) numbers for each layer; then -n % 8 more entries, where n is the"
            " length so far.",
            "make: a tensor of [*initial.values()] * num_layers, padded. read: take the used part,"
            " view it as (num_layers, len(initial)), and zip the names with each row.",
            "F.pad(scalars, (0, -len(scalars) % 8)); rows = bank[: len(initial) * num_layers]"
            ".view(num_layers, -1); [dict(zip(initial, row)) ...]",
        ],
        solution=Bank,
        wrong=[_NotPadded, _ByName, _Detached, _OwnParameters, _OwnTensors, _FirstLayerOnly,
               _Slices, _AlwaysPads, 3],
    ),
    "2": dict(
        check=check_rounding,
        hints=[
            "Cutting off the lower 16 bits always rounds towards zero. What could you add before?",
            "Add a whole number from 0 to 2^16 - 1, each as likely, to the bits, then set the lower"
            " 16 bits to zero: it carries over in proportion to how far x is on the way up.",
            "1. bits = x.view(torch.int32). 2. Add torch.randint(0, 1 << 16, ...) of int32."
            " 3. & -65_536. 4. view as float32 again, .bfloat16().",
            "((x.view(torch.int32) + noise) & -65_536).view(...).bfloat16()",
        ],
        solution=round_stochastically,
        wrong=[nearest, _one_draw, _one_grid, _up_or_down_evenly, _noise_too_small, _gaussian],
    ),
    "3": dict(
        check=check_stream,
        hints=[
            "What does a silent block do to the stream, and so what is every h?",
            "The first half passes the start on unchanged, so every h is the start. Each skip adds"
            " w times it.",
            "1 + w + w + ... with six terms, w = 0.1824.",
            "1 + 6 x ...",
        ],
        solution=1 + 6 * SKIP,
        wrong=[7, (1 + SKIP) ** 6, 6 * SKIP, 1 + SKIP, -8, "more"],
    ),
}
