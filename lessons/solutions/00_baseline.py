"""Lesson 00's exercises: a checker, four hints, a solution and typical wrong answers for each."""

import itertools
import math
from functools import cache

import torch

from speedrun.history.manifest import load_manifest
from speedrun.run.data import BUILTIN, make_builtin, patterns
from speedrun.scripts.find import load_snapshot

# ---- 00.1: FLOPs per token of the larger model "d24" ----

LAYERS, WIDTH, VOCAB, LENGTH = 24, 1024, 50257, 1024
BLOCKS, HEAD, POSITIONS = 12 * LAYERS * WIDTH**2, VOCAB * WIDTH, LENGTH * WIDTH
PAIRS = 6 * LAYERS * WIDTH * (LENGTH + 1)  # each query meets (T + 1) / 2 keys on average
FLOPS = 6 * (BLOCKS + HEAD) + PAIRS

SLIPS = {
    "only the forward pass; the backward pass costs twice as much on top": FLOPS / 3,
    "only the backward pass; the forward pass comes before it": FLOPS * 2 / 3,
    "GFLOPs; answer in FLOPs": FLOPS / 1e9,
    "the matrices without attention's pairs of tokens": 6 * (BLOCKS + HEAD),
    "attention to all pairs; a causal query meets (T + 1) / 2 keys on average": FLOPS + PAIRS,
    "the position table among the matrices; a look-up multiplies nothing": FLOPS + 6 * POSITIONS,
    "the tied table twice; it multiplies only as the head": FLOPS + 6 * HEAD,
    "the blocks without the head, which is a matrix product too": 6 * BLOCKS + PAIRS,
    "only the blocks' matrices; add the head and attention's pairs": 6 * BLOCKS,
    "every parameter; the position table multiplies nothing, and attention's pairs are missing":
        6 * (BLOCKS + HEAD + POSITIONS),
    "12 layers of width 768, the model of the record": 797_870_592,
}


def check_flops(answer):
    """Raises AssertionError unless the answer is d24's FLOPs per token, to a thousandth."""
    try:
        value = float(torch.as_tensor(answer, dtype=torch.float64).squeeze())
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"expected one number of FLOPs per token, not {answer!r}") from None
    for slip, flops in SLIPS.items():
        assert not math.isclose(value, flops, rel_tol=1e-3), f"{value:,g} counts {slip}"
    assert math.isclose(value, FLOPS, rel_tol=1e-3), (
        f"{value:,.0f} FLOPs per token is {value / FLOPS:.3g} times what is expected; add"
        f" up the weights that multiply ({LAYERS} layers and the head), then attention's pairs")


# ---- 00.2: one clip for all gradients ----


class ClippedAdamW(torch.optim.AdamW):
    """AdamW on gradients whose common norm, over all tensors, is at most 1."""

    @torch.no_grad()
    def step(self):
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_((1 / (total + 1e-6)).clamp(max=1))
        super().step()


def check_clip(answer):
    """Raises AssertionError unless the answer is an AdamW that clips the common norm at 1."""
    assert isinstance(answer, type) and issubclass(answer, torch.optim.Optimizer), (
        f"expected the class itself, a subclass of torch.optim.AdamW, not {answer!r}")
    gentle = [torch.full((4,), 0.15), torch.full((2, 2), 0.2)]  # norms 0.3 and 0.4: 0.5 together
    steep = [10 * grad for grad in gentle]  # 5 together
    (small, large), moves = _train(answer, [gentle, steep])
    for grad, before in zip(small, gentle, strict=True):
        assert torch.allclose(grad, before), (
            f"a gradient of norm {before.norm():.3g}, which is 0.5 with the others, comes out with"
            f" norm {grad.norm():.3g}; a clip changes nothing within the limit")
    norms = [grad.norm().item() for grad in large]
    together = math.hypot(*norms)
    assert abs(together - 1) < 1e-3, _clip_slip(norms, together)
    assert abs(norms[0] / norms[1] - 3 / 4) < 1e-3, (
        f"norms 3 and 4 become {norms[0]:.3g} and {norms[1]:.3g}; one factor for all tensors"
        " keeps their ratio, 3 : 4")
    expected = _train(torch.optim.AdamW, [gentle, [grad / 5 for grad in steep]])[1]
    for move, right in zip(moves, expected, strict=True):
        assert torch.allclose(move, right, atol=1e-4), (
            f"two steps move the weights by {move.flatten()[0]:.4f}, not by"
            f" {right.flatten()[0]:.4f}; first the clip, then AdamW's own step, once:"
            " super().step()")


def _clip_slip(norms, together):
    text = f"norms 3 and 4 become {norms[0]:.3g} and {norms[1]:.3g}, together {together:.3g}, not 1"
    if all(abs(norm - 1) < 1e-3 for norm in norms):
        return text + "; yours limits each tensor (or group) separately; limit the common norm"
    if all(abs(norm - 2) < 1e-3 for norm in norms):
        return text + "; yours limits each entry to 1; limit the common norm"
    if abs(together - 5) < 1e-3:
        return text + "; yours leaves them as they are; does param.grad itself change?"
    return text + "; the factor is 1 / total, and total is the root of the sum of all squares"


def _train(optimizer_class, steps):
    """The gradients after each step and how far the weights came, each weight in a group of its
    own; `steps` holds the gradients of every step."""
    params = [torch.nn.Parameter(torch.ones_like(grad)) for grad in steps[0]]
    optimizer = optimizer_class([dict(params=[param]) for param in params], lr=0.1)
    after = []
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        after.append([param.grad for param in params])
    return after, [param.detach() - 1 for param in params]


# ---- 00.3: a learning rate that beats every constant one on 51,200 tokens ----

STEPS, SEEDS, MARGIN, CONSTANTS = 100, (0, 1, 2), 0.04, (6e-3, 9e-3)
SIZES = dict(model_dim=32, num_layers=2, num_heads=4, vocab_size=257, seq_len=64, train_steps=STEPS,
             micro_batch_size=8, compile=False, bf16=False)  # the notebook's micro model


def learning_rate(step):
    """A peak above the best constant rate, then a line to zero."""
    return 1.2e-2 * min(1.0, (STEPS - step) / 60)


def check_rate(answer):
    """Raises AssertionError unless it is shown that the rates end lower than each constant."""
    import lesson

    assert callable(answer), f"expected the function itself, not {answer!r}"
    rates = []
    for step in range(STEPS):
        rate = answer(step)
        try:
            rates.append(float(rate))
        except (TypeError, ValueError, RuntimeError):  # a tensor of many numbers, for one
            rates.append(math.nan)
        assert math.isfinite(rates[-1]) and rates[-1] >= 0, (
            f"learning_rate({step}) returns {rate!r}; a rate is a finite number, zero or more")
    assert max(rates) > 0, "every rate is 0, so the weights never move; return a rate for each step"
    assert max(rates) < 0.5, (
        f"the largest rate is {max(rates):g}; that looks like a multiplier of the peak rate. AdamW"
        " moves each weight by about the rate itself, and the weights are about 0.1")
    mine = [_train_micro(tuple(rates), seed) for seed in SEEDS]
    constant = {rate: [_train_micro((rate,) * STEPS, seed) for seed in SEEDS]
                for rate in CONSTANTS}
    best = min(constant, key=lambda rate: sum(constant[rate]))
    gain = (sum(constant[best]) - sum(mine)) / len(SEEDS)
    lesson.must_end_lower(mine, constant[best], "yours", f"a constant {best:g}",
                          _rate_slip(rates, gain), MARGIN)


def _rate_slip(rates, gain):
    """What to change about rates that gain too little."""
    if not gain > -1:
        return "It diverges: lower the peak"
    if max(rates) - min(rates) < 0.1 * max(rates):
        return "Your rate is constant, and no constant rate beats another by so much: let it fall"
    if max(rates) > 3e-2:
        return f"The peak, {max(rates):g}, is far above the best constant: the weights overshoot"
    if max(rates) < 6e-3:
        return f"The peak, {max(rates):g}, is low: in 100 steps each of them has to move far"
    if rates[-1] > max(rates) / 3:
        return "The rate ends high: the weights still oscillate; let it fall to zero"
    return "Try another peak first, by factors of 1.5, then how many steps the fall takes"


@cache
def _train_micro(rates, seed):
    """The validation loss of 00b's micro model after one step at each of the rates."""
    baseline, rotary = (load_snapshot(load_manifest().get(id).script) for id in ("00", "00b"))
    make_builtin()
    args, files = rotary.Hyperparameters(**SIZES), patterns(BUILTIN)
    train, val = (baseline.token_batches(files[name], 512, args, 0, 1, torch.device("cpu"))
                  for name in ("train_files", "val_files"))
    torch.manual_seed(seed)
    model = rotary.GPT(args)
    optimizer = baseline.NormalizedAdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for rate, (inputs, targets) in zip(rates, train, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return sum(model(*pair).item() for pair in itertools.islice(val, 16)) / 16


# ---- typical wrong answers ----


class _UnitNorms(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.div_(param.grad.norm() + 1e-6)
        super().step()


class _ClipsEachTensor(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        super().step()


class _ClipsEachEntry(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.clamp_(-1, 1)
        super().step()


class _AlwaysScales(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(total)
        super().step()


class _ClipsTooLate(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        super().step()
        params = [param for group in self.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)


class _ForgetsToMove(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        params = [param for group in self.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)


def _multiplier(step):
    return 100 * learning_rate(step)


def _line_of_00(step):
    """00's schedule: six steps up to 6e-3, then a line to 1/11 of it, here from too low a peak."""
    return 2e-3 * ((step + 1) / 6 if step < 6 else 1 - 10 / 11 * (step - 6) / (STEPS - 6))


def _constant(step):
    return 9e-3


def _high_constant(step):
    return 1.2e-2


def _rises(step):
    return 1.2e-2 * (step + 1) / STEPS


def _too_hot(step):
    return 0.3


EXERCISES = {
    "1": dict(
        check=check_flops,
        hints=[
            "Only weights that multiply cost arithmetic. Which tensors of the model do, and which"
            " are only looked up?",
            "A weight of a matrix costs 2 FLOPs per token forward and 4 backward. A layer has"
            " 12 C^2 weights, the head V C. Attention adds 6 C (T + 1) per layer.",
            "1. C = 1024, L = 24, V = 50257, T = 1024. 2. Count the weights of L layers and the"
            " head. 3. Take 6 FLOPs for each. 4. Add L times attention's share.",
            "6 * (12 * L * C**2 + V * C) + 6 * L * C * (T + 1), with your numbers for"
            " L, C, V and T",
        ],
        solution=FLOPS,
        wrong=list(SLIPS.values()),
    ),
    "2": dict(
        check=check_clip,
        hints=[
            "NormalizedAdamW has the right frame: change the gradients in place, then call AdamW's"
            " step. Which norm decides now, and when does nothing happen?",
            "Let n be the root of the sum of all squares of all gradients. Every gradient is"
            " multiplied by min(1, 1 / (n + 1e-6)).",
            "1. Collect the parameters of all groups. 2. Compute their gradients' common norm."
            " 3. Scale all of them by one factor, never above 1. 4. Call super().step()."
            " PyTorch has steps 2 and 3 in one function, torch.nn.utils.clip_grad_norm_.",
            "params = [p for group in self.param_groups for p in group['params']]\n"
            "torch.nn.utils.clip_grad_norm_(...)  # these, at most 1\n"
            "super().step()",
        ],
        solution=ClippedAdamW,
        wrong=[_UnitNorms, _ClipsEachTensor, _ClipsEachEntry, _AlwaysScales, _ClipsTooLate,
               _ForgetsToMove],
    ),
    "3": dict(
        check=check_rate,
        hints=[
            "There are two things to choose: how high the rate goes, and its shape over the 100"
            " steps. Look at the end of #2's official curve: what does its rate do there?",
            "A rate r(s) = p * m(s) with a peak p and a shape m between 0 and 1. A high p moves the"
            " weights far; a small m at the end lets them settle.",
            "1. Take a flat rate and let it fall on a line to zero over the last 60 steps. 2. Try"
            " the peaks 9e-3, 1.2e-2 and 1.6e-2. 3. With the best, try other lengths of the fall.",
            "peak = ...  # between 9e-3 and 1.6e-2\nreturn peak * min(1.0, (100 - step) / 60)",
        ],
        solution=learning_rate,
        wrong=[_constant, _high_constant, _line_of_00, _rises, _multiplier, _too_hot],
    ),
}
