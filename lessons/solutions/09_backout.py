"""Exercises of lesson 09: their checks, hints and solutions."""

import torch
import torch.nn.functional as F

# ---- 1: empty places with one layer more ----


def check_places(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of places, not {answer!r}") from None
    meanings = {
        5: "that is for one batch of all 35; the snapshot cuts them into two, of 17 and 18",
        7: "that is the group of 17 alone; the other one has empty places, too",
        6: "that is the group of 18 alone; the other one has empty places, too",
        0: "neither 17 nor 18 is a multiple of 8",
        14: "35 matrices make groups of 17 and 18, not twice 17",
        3: "that is 35 less the 32 of the record; count the places that stay empty",
        48: "that is all places, also the taken ones",
    }
    if value != 13:
        raise AssertionError(
            f"expected the empty places of both large groups, got {value:g};"
            f" {meanings.get(value, 'all GPUs have the same number of places in a group')}")


# ---- 2: the best cubic ----


def best_cubic(low, high):
    total = low**2 + low * high + high**2
    turn = (total / 3) ** 0.5
    scale = 2 / (low * (total - low**2) + turn * (total - turn**2))
    return scale * total, -scale


def _taylor(low, high):
    return 1.5, -0.5


def _below_one(low, high):
    total = low**2 + low * high + high**2
    scale = 1.5 / (total * (total / 3) ** 0.5)
    return scale * total, -scale


def _through_both_ends(low, high):
    total = low**2 + low * high + high**2
    scale = 1 / (low * high * (low + high))
    return scale * total, -scale


def _least_squares(low, high):
    x = torch.linspace(low, high, 1000, dtype=torch.float64)
    powers = torch.stack((x, x**3), 1)
    return torch.linalg.lstsq(powers, torch.ones(1000, 1, dtype=torch.float64)).solution.flatten()


def check_cubic(answer):
    assert callable(answer), f"expected the function best_cubic, not {answer!r}"
    for low, high in ((0.5, 1.0), (0.01, 1.0), (0.2, 1.8), (1.0, 2.0)):
        found = answer(low, high)
        assert found is not None, "the function returns nothing; return (a, b)"
        assert len(found) == 2, f"expected two numbers, (a, b), got {len(found)}"
        a, b = (float(number) for number in found)

        def p(x, a=a, b=b):
            return a * x + b * x**3

        grid = torch.linspace(low, high, 10_001, dtype=torch.float64)
        off, where = (p(grid) - 1).abs().max(0)
        x, y = best_cubic(low, high)
        least = (x * grid + y * grid**3 - 1).abs().max().item()
        top = p(grid).max()
        why = "the highest point must lie as far above 1 as the ends lie below"
        if abs(p(low) - p(high)) > 1e-6:
            why = (f"p({low:g}) is {p(low):.3f} but p({high:g}) is {p(high):.3f}; at the best"
                   " polynomial they are equal")
        elif top < 1 + 1e-6:
            why = f"p never gets above {top:.3f}; stretch a and b by one factor"
        elif p(low) > 1 - 1e-6:
            why = f"p({low:g}) is {p(low):.3f}; let the ends be too low, and the middle gains"
        assert off < least + 1e-6, (
            f"between {low:g} and {high:g} p is {off:.3f} away from 1 at x = {grid[where]:.3f}, and"
            f" {least:.3f} is possible: {why}")
    low = 1e-3
    high = 1.0
    for step in range(1, 9):
        a, b = answer(low, high)
        low = a * low + b * low**3
        high = 2 - low
        print(f"after {step} cubic steps, each the best: {low:.3f} to {high:.3f}")


# ---- 3: two tokens back ----

VOCABULARY, CHANNELS, LENGTH, STEPS = 16, 12, 12, 150


def smear_two(x, weights, gates):
    amount = weights * (x[..., : gates.size(1)] @ gates.T).sigmoid()  # (B, T, 2)
    before = F.pad(x, (0, 0, 2, 0))
    return x + amount[..., :1] * before[:, 1:-1] + amount[..., 1:] * before[:, :-2]


def _one_back(x, weights, gates):
    return smear_two(x, weights * torch.tensor([1.0, 0.0]), gates)


def _round_about(x, weights, gates):
    amount = weights * (x[..., : gates.size(1)] @ gates.T).sigmoid()
    return x + amount[..., :1] * x.roll(1, 1) + amount[..., 1:] * x.roll(2, 1)


def _ahead(x, weights, gates):
    return smear_two(x.flip(1), weights, gates).flip(1)


def _in_turn(x, weights, gates):
    """Smears twice by one: the second time from what is smeared already."""
    once = smear_two(x, weights * torch.tensor([1.0, 0.0]), gates)
    return smear_two(once, weights.flip(0) * torch.tensor([1.0, 0.0]), gates.flip(0))


def _gate_of_the_source(x, weights, gates):
    amount = weights * (x[..., : gates.size(1)] @ gates.T).sigmoid()
    before = F.pad(amount[..., None, :] * x[..., None], (0, 0, 0, 0, 2, 0))
    return x + before[:, 1:-1, :, 0] + before[:, :-2, :, 1]


def _without_gates(x, weights, gates):
    return smear_two(x, weights, 0 * gates)


def _one_gate(x, weights, gates):
    return smear_two(x, weights, gates[:1].expand(2, -1))


def _cut_from_the_gradient(x, weights, gates):
    return smear_two(x, weights, gates.detach())


def loss_with(smear):
    """Trains embedding, smear and head; the token to predict is the one before if the last is
    one of the first half of the vocabulary, else that before it. Returns the loss at the end."""
    torch.manual_seed(0)
    table, head = torch.randn(VOCABULARY, 32), torch.zeros(VOCABULARY, 32)
    weights, gates = torch.zeros(2), torch.zeros(2, CHANNELS)
    params = [param.requires_grad_() for param in (table, head, weights, gates)]
    adam = torch.optim.Adam(params, betas=(0.9, 0.95))
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (64, LENGTH))
        targets = torch.where(tokens < VOCABULARY // 2, tokens.roll(1, 1), tokens.roll(2, 1))
        x = smear(table[tokens], weights, gates)
        logits = F.rms_norm(x, (32,)) @ head.T
        loss = F.cross_entropy(logits[:, 2:].flatten(0, 1), targets[:, 2:].flatten())
        adam.param_groups[0]["lr"] = 0.1 * min(1, 2 * (STEPS - step) / STEPS)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return loss.item()


def check_smear(answer):
    assert callable(answer), f"expected the function smear_two, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    x, gates = (torch.randn(size, generator=generator) for size in ((2, 6, 16), (2, CHANNELS)))
    result = answer(x, torch.zeros(2), gates)
    assert result is not None, "the function returns nothing; return the smeared x, (B, T, C)"
    assert result.shape == x.shape, (
        f"expected the shape of x, {tuple(x.shape)}, got {tuple(result.shape)}: each token keeps"
        " its place")
    assert torch.allclose(result, x), "with weights of 0 x must stay what it is, yours changes it"
    weights, other = torch.tensor([0.5, -0.3]), x.clone()
    other[:, 3:] = 1
    assert torch.allclose(answer(x, weights, gates)[:, :3], answer(other, weights, gates)[:, :3]), (
        "a token's vector changes if a later token does: the future leaks in. Where do the first"
        " tokens get their neighbours from?")
    cases = {
        "weights (1, 0), gates of 0 (half of the token one back is added, of x as it was)":
            ((1, 0), 0),
        "weights (0, 1), gates of 0 (half of the token two back is added, of x as it was)":
            ((0, 1), 0),
        "weights (1, 0) and random gates (row 0 is the first weight's, and the token that looks"
        " back is the one that is read)": ((1, 0), 1),
        "weights (0, 1) and random gates (row 1 is the second weight's)": ((0, 1), 1),
        "both weights (both read x as it was)": ((0.5, -0.3), 1),
    }
    for name, (pair, factor) in cases.items():
        inputs = x, torch.tensor(pair, dtype=torch.float32), factor * gates
        off = (answer(*inputs) - smear_two(*inputs)).abs().amax((0, 2))
        wrong = (off > 1e-5).nonzero().flatten().tolist()
        assert not wrong, f"with {name} the tokens at places {wrong} are not what they should be"
    ours, theirs = loss_with(answer), loss_with(_one_back)
    assert ours < theirs / 3, (
        f"expected less than a third of the loss with one look back, {theirs:.3f}, got {ours:.3f};"
        " do weights and gates get a gradient?")
    print(f"loss after training: {ours:.3f} with your smear, {theirs:.3f} with one look back")


EXERCISES = {
    "1": dict(
        check=check_places,
        hints=[
            "How many matrices are there now, and how does the snapshot cut them into two groups?",
            "Count up: n matrices on 8 GPUs take 8 ceil(n / 8) places.",
            "11 attentions and 24 MLP matrices make 35: groups of 17 and 18.",
            "24 places for 17, and 24 places for 18: what stays empty?",
        ],
        solution=13,
        wrong=[5, 7, 6, 0, 14, 3, 48, "many"],
    ),
    "2": dict(
        check=check_cubic,
        hints=[
            "Draw p for a > 0 > b: it rises to one highest point and falls. Where is it lowest"
            " between low and high?",
            "p(low) = p(high) fixes the ratio: a = -b (low^2 + low high + high^2). The highest"
            " point is where p' is 0: x^2 = -a / (3 b).",
            "Take b = -1 and a = low^2 + low high + high^2 first. Compute p(low) and p at the"
            " highest point. Then multiply a and b by one factor, so that the two add up to 2.",
            "scale = 2 / (p(low) + p(turn)), with turn = (a / 3) ** 0.5; return scale * a, -scale",
        ],
        solution=best_cubic,
        wrong=[_taylor, _below_one, _through_both_ends, _least_squares,
               lambda low, high: best_cubic(low, high)[::-1]],
    ),
    "3": dict(
        check=check_smear,
        hints=[
            "What does a token before the first look like? Something that changes nothing.",
            "e'_t = e_t + w_0 sigmoid(g_0 . e_t[:n]) e_(t-1) + w_1 sigmoid(g_1 . e_t[:n]) e_(t-2),"
            " with e_(-1) = e_(-2) = 0.",
            "Compute both amounts for all tokens at once, (B, T, 2). Put two rows of zeros before x"
            " along T; the tokens one back and two back are slices of that.",
            "amount = weights * (x[..., : gates.size(1)] @ gates.T).sigmoid();"
            " before = F.pad(x, (0, 0, 2, 0)); return x + amount[..., :1] * before[:, 1:-1] + ...",
        ],
        solution=smear_two,
        wrong=[_one_back, _round_about, _ahead, _in_turn, _gate_of_the_source, _without_gates,
               _one_gate, _cut_from_the_gradient],
    ),
}
