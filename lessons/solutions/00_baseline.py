"""Lesson 00's exercises: a checker, four hints, a solution and typical wrong answers for each."""

import math

import torch

# ---- 00.1: FLOPs per token of the larger model "d24" ----

LAYERS, WIDTH, VOCAB, LENGTH = 24, 1024, 50257, 1024
BLOCKS, HEAD, POSITIONS = 12 * LAYERS * WIDTH**2, VOCAB * WIDTH, LENGTH * WIDTH
PAIRS = 6 * LAYERS * WIDTH * (LENGTH + 1)  # each query meets (T + 1) / 2 keys in the mean
FLOPS = 6 * (BLOCKS + HEAD) + PAIRS

SLIPS = {
    "the forward pass alone; the backward pass costs twice as much again": FLOPS / 3,
    "GFLOPs; the answer is wanted in FLOPs": FLOPS / 1e9,
    "the matrices without attention's pairs of tokens": 6 * (BLOCKS + HEAD),
    "attention to all pairs; a causal query meets (T + 1) / 2 keys in the mean": FLOPS + PAIRS,
    "the position table among the matrices; a look-up multiplies nothing": FLOPS + 6 * POSITIONS,
    "the tied table twice; it multiplies only as the head": FLOPS + 6 * HEAD,
    "the blocks without the head, which is a matrix product too": 6 * BLOCKS + PAIRS,
    "12 layers of width 768, the model of the record": 797_870_592,
}


def check_flops(answer):
    """Raises AssertionError unless the answer is d24's FLOPs per token, to a thousandth."""
    try:
        value = float(torch.as_tensor(answer, dtype=torch.float64).squeeze())
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"one number of FLOPs per token is expected, not {answer!r}") from None
    for slip, flops in SLIPS.items():
        assert not math.isclose(value, flops, rel_tol=1e-3), f"{value:,g} counts {slip}"
    assert math.isclose(value, FLOPS, rel_tol=1e-3), (
        f"{value:,.0f} FLOPs per token is {value / FLOPS:.3g} times what is expected; count the"
        f" weights that multiply ({LAYERS} layers and the head) and attention's pairs apart")


# ---- 00.2: record #1's learning rate ----

PEAK, WARMUP, STEPS = 6e-4, 700, 19_560
PROBES = (0, 1, 349, 699, 700, 2000, 5000, 10_000, 15_000, STEPS - 1)


def llmc_lr_multiplier(step):
    """Linear warm-up to 1, then half a cosine down to 0 at the last step."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return 0.5 * (1 + math.cos(math.pi * progress))


def check_schedule(answer):
    """Raises AssertionError unless the answer multiplies the peak rate as record #1 did."""
    assert callable(answer), f"the function itself is expected, not {answer!r}"
    values = {}
    for step in PROBES:
        value = answer(step)
        assert value is not None and value is not ..., (
            f"the function returns {value!r} for step {step}; return the multiplier, a number")
        values[step] = float(value)
    assert values[0] > 0, (
        "step 0 gets a rate of 0, so the first update is lost; warm-up counts step + 1, not step")
    assert values[WARMUP - 1] < 2, (
        f"the multiplier is {values[WARMUP - 1]:g} at the end of warm-up, where 1 is expected;"
        " leave the peak rate out, or mind which number you divide by")
    for step, value in values.items():
        expected = llmc_lr_multiplier(step)
        assert math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-6), _schedule_slip(
            step, value, expected)


def _schedule_slip(step, value, expected):
    text = (f"step {step} gets {value:.6g}, expected is {expected:.6g}"
            f" (a rate of {PEAK * expected:.3g})")
    if step < WARMUP:
        return text + f"; warm-up is a line that reaches 1 at step {WARMUP - 1}"
    after = (step - WARMUP) / (STEPS - WARMUP)
    if math.isclose(value, 1 - after, rel_tol=1e-3):
        return text + "; yours falls on a straight line, record #1's on half a cosine"
    if math.isclose(value, 0.5 * (1 + math.cos(math.pi * step / STEPS)), rel_tol=1e-3):
        return text + "; the cosine begins where warm-up ends, so its progress is 0 there"
    if math.isclose(value, math.cos(math.pi / 2 * after), rel_tol=1e-3, abs_tol=1e-6):
        return text + "; that is a quarter of a cosine, from 1 to 0; half of one is (1 + cos) / 2"
    return text + f"; the cosine falls from 1 at step {WARMUP} to 0 at step {STEPS}"


# ---- 00.3: one clip for all gradients ----


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
        f"the class itself is expected, a subclass of torch.optim.AdamW, not {answer!r}")
    gentle = [torch.full((4,), 0.15), torch.full((2, 2), 0.2)]  # norms 0.3 and 0.4: 0.5 together
    steep = [10 * grad for grad in gentle]  # 5 together
    (small, large), moves = _train(answer, [gentle, steep])
    for grad, before in zip(small, gentle, strict=True):
        assert torch.allclose(grad, before), (
            f"a gradient of norm {before.norm():.3g}, which is 0.5 with the others, comes out with"
            f" norm {grad.norm():.3g}; a clip leaves alone what is within the limit")
    norms = [grad.norm().item() for grad in large]
    together = math.hypot(*norms)
    assert abs(together - 1) < 1e-3, _clip_slip(norms, together)
    assert abs(norms[0] / norms[1] - 3 / 4) < 1e-3, (
        f"norms 3 and 4 become {norms[0]:.3g} and {norms[1]:.3g}; one factor for all tensors"
        " keeps their ratio, 3 : 4")
    expected = _train(torch.optim.AdamW, [gentle, [grad / 5 for grad in steep]])[1]
    for move, right in zip(moves, expected, strict=True):
        assert torch.allclose(move, right, atol=1e-4), (
            f"two steps move the weights by {move.flatten()[0]:.4f}, expected is"
            f" {right.flatten()[0]:.4f}; first the clip, then AdamW's own step, once:"
            " super().step()")


def _clip_slip(norms, together):
    text = f"norms 3 and 4 become {norms[0]:.3g} and {norms[1]:.3g}, together {together:.3g}, not 1"
    if all(abs(norm - 1) < 1e-3 for norm in norms):
        return text + "; yours limits each tensor (or group) alone, the norm of all is wanted"
    if abs(together - 5) < 1e-3:
        return text + "; yours leaves them as they are, so look whether param.grad itself changes"
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


# ---- typical wrong answers ----


def _starts_at_zero(step):
    return step / WARMUP if step < WARMUP else llmc_lr_multiplier(step)


def _straight_line(step):
    return llmc_lr_multiplier(step) if step < WARMUP else 1 - (step - WARMUP) / (STEPS - WARMUP)


def _cosine_from_step_0(step):
    return llmc_lr_multiplier(step) if step < WARMUP else (
        0.5 * (1 + math.cos(math.pi * step / STEPS)))


def _quarter_cosine(step):
    return llmc_lr_multiplier(step) if step < WARMUP else (
        math.cos(math.pi / 2 * (step - WARMUP) / (STEPS - WARMUP)))


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


EXERCISES = {
    "1": dict(
        check=check_flops,
        hints=[
            "Only weights that multiply cost arithmetic. Which tensors of the model do, and which"
            " are only looked up?",
            "A weight of a matrix costs 2 FLOPs a token forward and 4 backward. A layer has"
            " 12 C^2 weights, the head V C. Attention adds 6 C (T + 1) a layer.",
            "1. C = 1024, L = 24, V = 50257, T = 1024. 2. Count the weights of L layers and the"
            " head. 3. Take 6 FLOPs for each. 4. Add L times attention's share.",
            "answer_1 = 6 * (12 * L * C**2 + V * C) + 6 * L * C * (T + 1), with your numbers for"
            " L, C, V and T",
        ],
        solution=FLOPS,
        wrong=list(SLIPS.values()),
    ),
    "2": dict(
        check=check_schedule,
        hints=[
            "There are two phases. 00's lr_multiplier has the first one; what replaces its last"
            " line?",
            "With W = 700 and N = 19,560: (s + 1) / W before step W; from there on"
            " (1 + cos(pi p)) / 2 with p = (s - W) / (N - W).",
            "1. Before step 700 return the line. 2. Else compute the progress p, 0 at step 700"
            " and 1 at step 19,560. 3. Return half of 1 + math.cos(math.pi * p).",
            "if step < 700: return (step + 1) / 700\n"
            "progress = (step - 700) / (19_560 - 700)\n"
            "return 0.5 * (1 + math.cos(...))  # of what?",
        ],
        solution=llmc_lr_multiplier,
        wrong=[_starts_at_zero, _straight_line, _cosine_from_step_0, _quarter_cosine],
    ),
    "3": dict(
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
        wrong=[_UnitNorms, _ClipsEachTensor, _AlwaysScales, _ClipsTooLate, _ForgetsToMove],
    ),
}
