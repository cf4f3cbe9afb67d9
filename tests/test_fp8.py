"""The head in FP8 from 05i on, which a CPU computes too: layouts, scales, training, and the summed
loss, which gives its gradients the same range for any accumulation and any number of ranks.

test_parts.py compares single numbers and a small product.

Run: .venv/bin/python -m pytest tests/test_fp8.py
"""

import numpy as np
import pytest
import torch

from ranks import start_ranks
from snapshots import (
    by_id,
    declaring,
    first_step,
    known_values,
    load_snapshot,
    micro_overrides,
    micro_sizes,
    tried,
    where,
)
from speedrun.history.fields import default_hyperparameters
from speedrun.run.log import read_log
from test_parts import train_small

SCALES = 2.0, 2.0**9, 2.0**19  # of inputs, weights and gradients

in_fp8 = pytest.mark.parametrize("milestone", [
    m for m in declaring("quantize", "fp8_product", "FP8Linear", "Head", known="fp8_training")
    if hasattr(load_snapshot(m), "FP8Linear")], ids=by_id)  # later it belongs to the loss


def forward_and_backward(milestone, x, weight, grad, scales=SCALES):
    """Logits, and the gradients of x and weight, through FP8Linear."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = load_snapshot(milestone).FP8Linear.apply(x, weight, *scales)
    return logits, *torch.autograd.grad(logits, (x, weight), grad)


def gaussian(T=256, C=64, V=512):
    """Inputs and gradients in bfloat16, weights in float32, of the sizes that a model has."""
    torch.manual_seed(0)
    return (torch.randn(T, C).bfloat16(), torch.randn(V, C) / C**0.5,
            (torch.randn(T, V) / T).bfloat16())


@in_fp8
def test_products_are_those_of_the_rounded_factors(milestone):
    x, weight, grad = gaussian()
    found = forward_and_backward(milestone, x, weight, grad)
    x8, weight8 = ((scale * t).to(torch.float8_e4m3fn).float() / scale
                   for t, scale in zip((x, weight), SCALES, strict=False))
    grad8 = (SCALES[2] * grad).to(torch.float8_e5m2).float() / SCALES[2]
    expected = (x8 @ weight8.T).bfloat16(), (grad8 @ weight8).bfloat16(), grad8.T @ x8
    for a, b in zip(found, expected, strict=True):  # sums may be in another order
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=0)
    exact = x.float() @ weight.T, grad.float() @ weight, grad.float().T @ x.float()
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert errors == pytest.approx([0.039, 0.057, 0.059], abs=0.003)  # 3 bits, and 2 of gradients


@in_fp8
def test_the_gradient_of_the_weights_comes_transposed(milestone):
    # A compiler that expects another layout than it gets fails.
    *_, grad_weight = forward_and_backward(milestone, *gaussian(T=32, C=16, V=48))
    assert grad_weight.shape == (48, 16) and grad_weight.stride() == (1, 48)


def head(milestone, **more):
    """A head in FP8 of the micro sizes with random weights."""
    module = load_snapshot(milestone)
    layer = module.Head(micro_sizes(module, use_fp8=True, **more))
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    return layer


@in_fp8
def test_each_factor_is_a_hyperparameter(milestone):
    def results(x_scale, weight_scale, grad_scale):
        layer = head(milestone, fp8_x_scale=x_scale, fp8_weight_scale=weight_scale,
                     fp8_grad_scale=grad_scale)
        x = torch.linspace(1, 2, 512).view(2, 8, 32).requires_grad_()
        with torch.no_grad():
            layer.weight.sign_()
        logits = layer(x)
        logits.sum().backward()
        return logits, x.grad, layer.weight.grad

    # Twice or half a factor is the same, unless it leads out of the range.
    usual = results(2, 32, 64)
    assert all(a.equal(b) for a, b in zip(usual, results(4, 16, 128), strict=True))
    for scales, alike in (((2.0**10, 32, 64), (False, True, False)),
                          ((2, 2.0**13, 64), (False, False, True)),
                          ((2, 32, 2.0**17), (True, False, False))):
        assert tuple(a.equal(b) for a, b in zip(usual, results(*scales), strict=True)) == alike


@where("FP8Linear", "Head", "GPT", known="fp8_training")
def test_small_training_in_fp8(milestone, tmp_path):
    expected = known_values(milestone.id)["fp8_training"]
    train_small(milestone, len(expected), tmp_path / "log", use_fp8=True, train_loss_every=1,
                fp8_x_scale=SCALES[0], fp8_weight_scale=SCALES[1],
                fp8_grad_scale=2.0**15)  # of a sum: 2^19 for the mean of 16 tokens
    losses = [loss for _, loss in read_log(tmp_path / "log" / "log.txt").train_curve]
    assert losses == pytest.approx(expected, abs=1.1e-4)  # four digits are logged


# ---- the summed loss ----


def step_of_eight(milestone, shards, log_dir, micro_batch_size=1):
    """Hyperparameters of a step on eight sequences in which all weights move about as far as their
    gradients say."""
    fields = default_hyperparameters(milestone.script)
    moves = {name: 1 for name in fields if name.endswith("_lr") or name == "adam_every"}
    return micro_overrides(
        milestone, shards, log_dir, **moves, adam_eps=1.0, use_fp8=True, total_batch_size=8 * 32,
        micro_batch_size=micro_batch_size, train_steps=1, val_loss_every=0, kernel_warmup_steps=0)


def assert_same_weights(found, expected):
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-12, err_msg=name)


@where("train", known="fp8_training")
def test_eight_micro_steps_are_one_of_eight_sequences(milestone, shards, tmp_path):
    weights, codes = first_step(milestone.id, step_of_eight(milestone, shards, tmp_path / "8"))
    others, (other_codes,) = first_step(
        milestone.id, step_of_eight(milestone, shards, tmp_path / "1", micro_batch_size=8))
    assert len(codes) == 8 and len(np.unique(codes)) > 30
    np.testing.assert_array_equal(np.concatenate(codes), other_codes)
    assert_same_weights(others, weights)


SUMMING = declaring("train", "Muon", known="fp8_training")


@pytest.mark.parametrize("milestone", [SUMMING[0], *tried(SUMMING[1:])], ids=by_id)
def test_eight_ranks_are_eight_micro_steps(milestone, shards, tmp_path):
    weights, codes = first_step(milestone.id, step_of_eight(milestone, shards, tmp_path / "1"))
    ranks = start_ranks(
        8, first_step, milestone.id, step_of_eight(milestone, shards, tmp_path / "8"))
    for (others, (other_codes,)), own_codes in zip(
            (found for found, printed in ranks), codes, strict=True):
        np.testing.assert_array_equal(other_codes, own_codes)
        assert_same_weights(others, weights)
