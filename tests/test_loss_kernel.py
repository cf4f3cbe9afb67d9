"""A token's loss and its logits' gradients in one visit, since 13d, and in FP8 since 13e: formulas,
what is kept, and the kernel in Triton's interpreter and assembled.

Run: .venv/bin/python -m pytest tests/test_loss_kernel.py
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from snapshots import (
    MANIFEST,
    by_id,
    declaring,
    handles,
    known_values,
    load_snapshot,
    micro_sizes,
    where,
)
from test_gpu import environment_with_gpus, has_gpu
from test_kernels import assembled, interpreted, needs_triton
from test_updates import having

CAP = 23.0, 5.0, 7.5
SCALES = 448 / 100, 448 / 1.6, 448 / 0.75  # of inputs, weights and gradients: the card's
SHRUNK = 64  # times fewer columns has a block in the interpreter

visiting = where("loss_and_grads")
LOSING = having("", "CappedLoss", "loss_and_grads", "next_targets", "GPT")
losing = pytest.mark.parametrize("milestone", LOSING, ids=by_id)
IN_FP8 = declaring("CappedLoss", "loss_and_grads", known="head_in_loss")
in_fp8 = pytest.mark.parametrize("milestone", IN_FP8, ids=by_id)


def capped(logits):
    """Logits as the loss sees them."""
    height, shift, width = CAP
    return height * torch.sigmoid((logits + shift) / width)


def by_definition(logits, targets, weights):
    """Losses (N,) of logits (N, V), from PyTorch's cross-entropy of one target after the other."""
    losses = 0
    for target, weight in zip(targets.unbind(1), weights, strict=True):
        losses = losses + weight * F.cross_entropy(
            capped(logits), target, ignore_index=-1, reduction="none")
    return losses


def some(K, N=9, V=13, dtype=torch.float64):
    """Logits (N, V), targets (N, K) of which some are equal and some missing, weights (K,). The
    first row has no target, the second only its last, all of the third are the same."""
    generator = torch.Generator().manual_seed(K)
    logits = 10 * torch.randn(N, V, generator=generator, dtype=dtype)
    targets = torch.randint(V, (N, K), generator=generator)
    targets[0], targets[1, : K - 1], targets[2] = -1, -1, 4
    return logits, targets, torch.tensor([1.0, 0.4375, 0.25])[:K]  # exact in every dtype


# ---- formulas ----


@visiting
def test_known_losses_and_gradients(milestone):
    module, toy = load_snapshot(milestone), known_values(milestone.id)["toy"]
    logits, weights = torch.tensor(toy["logits"]).float(), torch.tensor(toy["weights"])
    targets = module.next_targets(torch.tensor([toy["targets"]]), 3)
    assert targets.tolist() == [[1, 3, 0], [3, 0, -1], [0, -1, -1]]
    losses, grads = module.loss_and_grads(logits, targets, weights, CAP, torch.float32)
    assert losses.tolist() == pytest.approx(toy["losses"], abs=2e-6)
    torch.testing.assert_close(grads, torch.tensor(toy["gradients"]), rtol=0, atol=2e-6)
    losses, none = module.loss_and_grads(logits, targets, weights, CAP)
    assert losses.tolist() == pytest.approx(toy["losses"], abs=2e-6) and none is None


@where("next_targets")
def test_the_targets_of_each_token(milestone):
    module, targets = load_snapshot(milestone), torch.randint(50, (3, 7))
    for count in (1, 2, 3):
        found = module.next_targets(targets, count)
        assert found.shape == (21, count) and found.is_contiguous()
        for b in range(3):  # a row's targets are its own
            for t in range(7):
                expected = [*targets[b, t : t + count].tolist(), -1, -1][:count]
                assert found[7 * b + t].tolist() == expected


@visiting
@pytest.mark.parametrize("K", [1, 2, 3])
def test_gradients_are_autograds(milestone, K):
    module = load_snapshot(milestone)
    logits, targets, weights = some(K)
    logits.requires_grad_()
    expected = by_definition(logits, targets, weights)
    (gradients,) = torch.autograd.grad(expected.sum(), logits)
    losses, grads = module.loss_and_grads(logits.detach(), targets, weights, CAP, torch.float64)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, gradients, rtol=1e-12, atol=1e-12)
    assert losses[0] == 0 and not grads[0].any() and (losses[1:] > 0).all()
    # Equal targets add up: as one whose weight is the sum.
    one, other = module.loss_and_grads(
        logits.detach()[2:3], targets[2:3, :1], weights.sum(0, keepdim=True), CAP, torch.float64)
    torch.testing.assert_close((one, other), (losses[2:3], grads[2:3]), rtol=1e-12, atol=1e-12)


@visiting
def test_no_logit_overflows(milestone):
    module = load_snapshot(milestone)
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, -1e30, -1e30], [1e30, 1e30, 1e30]])
    losses, grads = module.loss_and_grads(
        logits, torch.tensor([[1], [0], [2]]), torch.ones(1), CAP, torch.float32)
    assert losses.tolist() == pytest.approx([23.0004, 1.0986, 1.0986], abs=1e-3)
    assert grads.isfinite().all()


# ---- the function ----


def loss_of(module, x, weight, targets, weights, scales=None, use_triton=False):
    """CappedLoss, with the head inside or in front of it."""
    return handles(module).loss(module, x, weight, targets, weights, CAP, scales, use_triton)


def head(dtype, N=32, C=16, V=48):
    """x (N, C), weight (V, C), targets (N, 3) and their weights."""
    torch.manual_seed(0)
    x, weight = torch.randn(N, C, dtype=dtype), 0.3 * torch.randn(V, C, dtype=dtype)
    targets = torch.randint(V, (N, 3))
    targets[0], targets[1, 1:], targets[2] = -1, -1, 4
    return x.requires_grad_(), weight.requires_grad_(), targets, torch.tensor([1.0, 0.5, 0.25])


@where("CappedLoss")
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_what_arrives_multiplies_the_gradients(milestone, factor):
    module = load_snapshot(milestone)
    x, weight, targets, weights = head(torch.float64)
    loss = loss_of(module, x, weight, targets, weights)
    expected = by_definition(x @ weight.T, targets, weights).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for found, other in zip(torch.autograd.grad(factor * loss, (x, weight)),
                            torch.autograd.grad(factor * expected, (x, weight)), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-11, atol=1e-12)


@where("CappedLoss")
def test_one_tensor_of_the_logits_size_is_kept(milestone):
    module, scales = load_snapshot(milestone), [None]
    if milestone in IN_FP8:
        scales.append(SCALES)
    for scale in scales:
        x, weight, targets, weights = head(torch.bfloat16)
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.update({t.data_ptr(): t}) or t, lambda t: t):
            loss = loss_of(module, x, weight, targets, weights, scale)
        wide = [t for t in kept.values() if t.numel() == 32 * 48]
        bytes_each = 1 if scale else 2
        assert [t.nbytes for t in wide] == [bytes_each * 32 * 48]
        if scale:
            dtypes = sorted(str(t.dtype).removeprefix("torch.") for t in kept.values())
            assert dtypes == ["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"]
        assert loss.dtype == torch.float32


@losing
def test_the_model_trains_on_the_weighted_and_validates_on_the_usual_loss(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    model = module.GPT(micro_sizes(module, use_fp8=False)).double()
    for param in model.parameters():
        if param.ndim >= 2:
            torch.nn.init.normal_(param, std=0.2)
    tokens = torch.randint(2, 60, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    for training in (True, False):
        model.train(training)
        logits = model(inputs).flatten(0, 1).double()
        usual = F.cross_entropy(logits, targets.flatten())
        torch.testing.assert_close(model(inputs, targets).double(), usual, rtol=1e-5, atol=1e-5)
    model.train()
    weights = torch.tensor([1.0, 0.5, 0.25])
    logits = model(inputs).double()
    expected = sum(weight * F.cross_entropy(
        logits[:, : 16 - k].flatten(0, 1), targets[:, k:].flatten(), reduction="sum") / 32
        for k, weight in enumerate(weights))
    params = [param for param in model.parameters() if param.ndim >= 2]
    loss = model(inputs, targets, target_weights=weights)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(loss, params, allow_unused=True),
                          torch.autograd.grad(expected, params, allow_unused=True), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# ---- FP8 ----


@in_fp8
def test_known_numbers_in_fp8(milestone):
    quantize = load_snapshot(milestone).quantize
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for scale, dtype, numbers, expected in (
            (SCALES[0], e4m3, (1, -0.37, 3.3), (1.004464, -0.362723, 3.348214)),
            (SCALES[1], e4m3, (0.005, -0.31, 1.7), (0.0049107, -0.3142857, 1.6)),  # saturated
            (SCALES[2], e5m2, (0.01, -0.3, 0.7), (0.0100446, -0.3214286, 0.75))):
        found = quantize(torch.tensor(numbers), scale, dtype)
        assert found.dtype == dtype
        assert (found.float() / scale).tolist() == pytest.approx(expected, rel=2e-5)
    args = load_snapshot(milestone).Hyperparameters()
    assert (args.fp8_x_scale, args.fp8_weight_scale, args.fp8_grad_scale) == SCALES


@in_fp8
def test_gradients_are_rounded_once(milestone):
    module = load_snapshot(milestone)
    logits, targets, weights = some(3, N=200, V=64, dtype=torch.float32)
    logits = logits.bfloat16()
    exact, found, twice = (
        module.loss_and_grads(logits, targets, weights, CAP, dtype, scale)[1] for dtype, scale in (
            (torch.float32, 1.0), (torch.float8_e5m2, SCALES[2]), (torch.bfloat16, 1.0)))
    assert found.dtype == torch.float8_e5m2
    once = (SCALES[2] * exact).to(torch.float8_e5m2)
    twice = (SCALES[2] * twice.float()).to(torch.float8_e5m2)
    assert found.float().equal(once.float()) and not once.float().equal(twice.float())
    large = module.loss_and_grads(logits, targets, weights, CAP, torch.float8_e5m2, 1e7)[1].float()
    assert large.isfinite().all() and large.abs().max() == 57_344  # saturated


@in_fp8
def test_products_are_those_of_the_rounded_factors(milestone):
    module = load_snapshot(milestone)
    x, weight, targets, weights = head(torch.float32)
    x = x.detach().bfloat16().requires_grad_()
    loss = loss_of(module, x, weight, targets, weights, SCALES)
    found = torch.autograd.grad(-2 * loss, (x, weight))
    x8, weight8 = (module.quantize(t.detach(), scale, torch.float8_e4m3fn)
                   for t, scale in zip((x, weight), SCALES, strict=False))
    logits = module.fp8_product(x8, SCALES[0], weight8, SCALES[1], torch.bfloat16, fast=True)
    losses, grads = module.loss_and_grads(logits, targets, weights, CAP, torch.float32)
    torch.testing.assert_close(loss, losses.sum())
    grads = (SCALES[2] * grads).to(torch.float8_e5m2).double() / SCALES[2]
    x8, weight8 = (t.double() / scale for t, scale in zip((x8, weight8), SCALES, strict=False))
    torch.testing.assert_close(logits, (x8 @ weight8.T).bfloat16(), rtol=2**-7, atol=1e-6)
    expected = -2 * grads @ weight8, -2 * grads.T @ x8
    for one, other, dtype in zip(found, expected, (torch.bfloat16, torch.float32), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other.to(dtype), rtol=2**-7 if one is found[0] else 1e-4,
                                   atol=1e-5)


# ---- the kernel ----


def compare(module, device, dtypes):
    """How far the kernel's losses and gradients are from its specification's, [[losses, gradients],
    ...], relative to the largest."""
    found = []
    for V, K in ((32, 1), (5, 2), (37, 3)):
        logits, targets, weights = (t.to(device) for t in some(K, 4, V, torch.float32))
        for dtype, grad_dtype, scale in dtypes:
            scaled = dict(grad_scale=scale) if scale != 1 else {}  # 1: before there was one, too
            one, other = (module.loss_and_grads(
                logits.to(dtype), targets, weights, CAP, grad_dtype, use_triton=use, **scaled)
                for use in (True, False))
            errors = [(one[0] - other[0]).abs().max().item() / other[0].abs().max().item()]
            assert (one[1] is None) == (other[1] is None) == (grad_dtype is None)
            if grad_dtype:
                assert one[1].dtype == grad_dtype and one[1].shape == (4, V)
                first, second = one[1].float(), other[1].float()
                assert not first[0].any()
                errors.append((first - second).abs().max().item() / second.abs().max().item())
            found.append(errors)
    return found


def interpret(milestone):
    """What `compare` finds."""
    module = load_snapshot(milestone)
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    module.loss_kernel.configs = module.loss_kernel.configs[:1]
    (form,) = module.loss_kernel.configs
    form.kwargs = {name: size // SHRUNK for name, size in form.kwargs.items()}
    assert form.kwargs == dict(COLUMNS=16)
    return compare(module, "cpu", [
        (torch.float32, torch.float32, 7.0 if milestone in IN_FP8 else 1.0),
        (torch.float32, None, 1.0)])


INTERPRETED = declaring("loss_kernel", "loss_and_grads")


@needs_triton
@pytest.mark.parametrize("milestone", INTERPRETED, ids=by_id)
def test_the_kernel_is_its_specification(milestone):
    found = interpreted(interpret, *(m.id for m in INTERPRETED))[milestone.id]
    assert len(found) == 3 * 2
    for errors in found:
        assert max(errors) < 1e-5


FORMS = [(90, 1024, 8, "*bf16"), (90, 4096, 16, "*fp8e5"), (89, 1024, 8, "*fp8e5")]
MORE = [(gpu, columns, warps, grads) for gpu in (80, 89, 90, 100) for columns in (1024, 2048, 4096)
        for warps in (8, 16, 32) for grads in ("*bf16", "*fp8e5", None)]


@needs_triton
@where("loss_kernel")
@pytest.mark.parametrize("gpu, columns, warps, grads", [
    *FORMS, *(pytest.param(*form, marks=pytest.mark.slow) for form in MORE if form not in FORMS)])
def test_forms_fit(milestone, gpu, columns, warps, grads):
    if grads == "*fp8e5" and (gpu == 80 or milestone not in IN_FP8):
        pytest.skip("no FP8 there")
    kernel = load_snapshot(milestone).loss_kernel
    (form,) = [form for form in kernel.configs if (
        form.kwargs["COLUMNS"], form.num_warps) == (columns, warps)]
    types = dict(logits="*bf16", targets="*i32", weights="*fp32", losses="*fp32", grads=grads,
                 V="i32")
    constants = form.kwargs | dict(K=3, height=23.0, shift=5.0, width=7.5)
    constants |= {} if grads else dict(grads=None)
    if milestone in IN_FP8:
        constants |= dict(grad_scale=597.0)
    registers, stack, _ = assembled(kernel.fn, types, constants, warps, gpu=gpu)
    assert 0 < registers <= 255 and stack == 0


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device")
@where("loss_kernel", "loss_and_grads")
def test_on_a_gpu(milestone):
    environment = environment_with_gpus() | dict(PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run([sys.executable, __file__, milestone.id], env=environment,
                           capture_output=True, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr[-2000:]


def launch(milestone):
    """The same on a GPU, also from and to the dtypes of a run: within a unit of the last digit."""
    dtypes = [(torch.float32, torch.float32, 1.0), (torch.bfloat16, torch.bfloat16, 1.0),
              *[(torch.bfloat16, torch.float8_e5m2, SCALES[2])] * (milestone in IN_FP8)]
    for number, errors in enumerate(compare(load_snapshot(milestone), "cuda", dtypes)):
        within = (1e-5, 2**-8, 2**-2)[number % len(dtypes)]
        assert errors[0] < 1e-5 and errors[1] < within, errors


if __name__ == "__main__":
    for id in sys.argv[1:]:
        launch(MANIFEST.get(id))
