"""The head in FP8 from 05i on, which a CPU computes too: layouts, scales, training, and the summed
loss, which gives its gradients the same range for any accumulation and any number of ranks.

test_parts.py compares single numbers and a small product.

Run: .venv/bin/python -m pytest tests/test_fp8.py
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from ranks import start_ranks
from snapshots import (
    MANIFEST,
    by_id,
    declaring,
    first_step,
    known_values,
    load_snapshot,
    micro_args,
    micro_overrides,
    micro_sizes,
    train,
    tried,
    where,
)
from speedrun.history.fields import default_hyperparameters
from speedrun.run.log import read_log
from speedrun.scripts.sizes import fitting
from test_parts import train_small

SCALES = 2.0, 2.0**9, 2.0**19  # of inputs, weights and gradients

in_fp8 = where("quantize", "fp8_product", "FP8Linear", "Head", known="fp8_training",
               block="FP8Linear")  # later it belongs to the loss


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
                val_loss_every=0, fp8_x_scale=SCALES[0], fp8_weight_scale=SCALES[1],
                fp8_grad_scale=2.0**15)  # of a sum: 2^19 for the mean of 16 tokens
    losses = [loss for _, loss in read_log(tmp_path / "log" / "log.txt").train_curve]
    assert losses == pytest.approx(expected, abs=1.1e-4)  # four digits are logged


# ---- the summed loss ----


def step_of_eight(milestone, shards, log_dir, micro_batch_size=1):
    """Hyperparameters of a step on eight sequences in which all weights move about as far as their
    gradients say."""
    fields = default_hyperparameters(milestone.script)
    moves = {name: 1 for name in fields if name.endswith("_lr") or name == "adam_every"}
    moves |= fitting(dict(first_document_len=20), fields)  # of shorter ones, a batch has too many
    return micro_overrides(
        milestone, shards, log_dir, **moves, adam_eps=1.0, use_fp8=True, total_batch_size=8 * 32,
        micro_batch_size=micro_batch_size, train_steps=1, val_loss_every=0, kernel_warmup_steps=0)


def assert_same_weights(found, expected):
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-12, err_msg=name)


def summing(*subjects):
    """The milestones at which a subject changed and whose gradients are sums over sequences: from
    14i on MLPs have scales of a micro-batch."""
    return [m for m in declaring(*subjects, known="fp8_training")
            if not known_values(m.id).get("fp8_mlp")]


@pytest.mark.parametrize("milestone", summing("train"), ids=by_id)
def test_eight_micro_steps_are_one_of_eight_sequences(milestone, shards, tmp_path):
    weights, codes = first_step(milestone.id, step_of_eight(milestone, shards, tmp_path / "8"))
    others, (other_codes,) = first_step(
        milestone.id, step_of_eight(milestone, shards, tmp_path / "1", micro_batch_size=8))
    assert len(codes) == 8 and len(np.unique(codes)) > 30
    np.testing.assert_array_equal(np.concatenate(codes), other_codes)
    assert_same_weights(others, weights)


SUMMING = summing("train", "Muon")


@pytest.mark.parametrize("milestone", [SUMMING[0], *tried(SUMMING[1:])], ids=by_id)
def test_eight_ranks_are_eight_micro_steps(milestone, shards, tmp_path):
    weights, codes = first_step(milestone.id, step_of_eight(milestone, shards, tmp_path / "1"))
    ranks = start_ranks(
        8, first_step, milestone.id, step_of_eight(milestone, shards, tmp_path / "8"))
    for (others, (other_codes,)), own_codes in zip(
            (found for found, printed in ranks), codes, strict=True):
        np.testing.assert_array_equal(other_codes, own_codes)
        assert_same_weights(others, weights)


# ---- the MLP ----


SIZE = 64  # of Gaussian inputs, and their number: products in FP8 are slow on a CPU
mlps = where("fp8_relu2_product", "SquaredReLUMLP", "make_weights8", "MLP", known="fp8_mlp")


def fp8_mlp(module, **more):
    """An MLP in FP8 whose second matrix is as large as the first, and its inputs."""
    torch.manual_seed(0)
    args = module.Hyperparameters(**dict(
        model_dim=SIZE, use_fp8=True, use_triton=False, compile=False) | more)
    mlp = module.MLP(args)
    torch.nn.init.normal_(mlp.c_proj, std=0.5 * args.model_dim**-0.5)
    return mlp, torch.randn(SIZE, SIZE)


def exactly(mlp, x):
    """x W_in, post and y of an MLP, in float64."""
    pre = x.double() @ mlp.c_fc.detach().double()
    post = pre.relu().square()
    return pre, post, post @ mlp.c_proj.detach().double().T


def error(found, exact):
    """The relative RMS error."""
    return ((found.detach().double() - exact).norm() / exact.norm()).item()


@mlps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_of_the_mlp_in_fp8(milestone, dtype, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["fp8_mlp"]
    mlp, x = fp8_mlp(module)
    mlp, x, products = mlp.to(dtype), x.to(dtype), []
    pre, post, y = exactly(mlp, x)
    fp8_product = module.fp8_product
    monkeypatch.setattr(module, "fp8_product", lambda *args, **named: products.append(
        fp8_product(*args, **named)) or products[-1])
    mlp(x)  # sets the scale of post
    found = mlp(x)
    assert found.dtype == dtype and len(products) == 2 * 2
    assert error(products[2], pre) == pytest.approx(known["first_product"], abs=0.001)
    assert error(products[2].double().relu().square(), post) == pytest.approx(
        known["post"], abs=0.002)
    assert error(found, y) == pytest.approx(known["y"], abs=0.002)
    # Validation has none of them.
    expected = 0.004 if dtype == torch.bfloat16 else 0
    assert error(mlp.eval()(x), y) == pytest.approx(expected, abs=0.0015) and len(products) == 4
    assert expected <= known["y_in_bfloat16"]


@mlps
def test_the_backward_pass_is_not_in_fp8(milestone, monkeypatch):
    module = load_snapshot(milestone)
    mlp, x = fp8_mlp(module)
    x.requires_grad_()
    y, grad = mlp(x), torch.randn(SIZE, SIZE)
    assert not mlp.post_limit.requires_grad
    *_, post = y.grad_fn.next_functions[0][0].saved_tensors
    monkeypatch.setattr(module, "fp8_product", None)
    found = torch.autograd.grad(y, (x, mlp.c_fc, mlp.c_proj), grad)
    pre = 2 * post.sqrt() * (grad @ mlp.c_proj)
    for one, other in zip(found, (pre @ mlp.c_fc.T, x.T @ pre, grad.T @ post), strict=True):
        torch.testing.assert_close(one, other)


@mlps
def test_the_scale_of_activations_is_the_forward_befores(milestone, monkeypatch):
    module = load_snapshot(milestone)
    (mlp, x), seen, product = fp8_mlp(module), [], module.fp8_relu2_product

    def noted(*args):
        post, post8, largest = product(*args)
        scale = args[4]
        seen.append((scale.item(), int((scale * post > 448).sum())))
        assert post8.float().max() == min(448, (scale * largest).to(torch.float8_e4m3fn).float())
        return post, post8, largest

    monkeypatch.setattr(module, "fp8_relu2_product", noted)
    growths, errors = [1, 1.79, 1.79, 17.9, 17.9, 1e-3, 1e-3], []
    for growth in growths:
        grown = growth**0.5 * x
        errors.append(error(mlp(grown), exactly(mlp, grown)[2]))
    largest = exactly(mlp, x)[1].max().item()
    scales, clipped = zip(*seen, strict=True)
    assert scales[0] == 1  # at first
    for scale, growth in zip(scales[1:], growths, strict=False):  # 448 is 1.8 times the largest
        assert scale == pytest.approx(448 / (1.8 * growth * largest), rel=0.05)
    # Nothing is clipped below a 1.8-fold growth, much in a tenfold one; then it has recovered.
    assert [n > 0 for n in clipped] == [False, False, False, True, False, False, False]
    assert clipped[3] > 10 and errors[3] > 0.2
    for number in (1, 2, 4, 6):
        assert errors[number] == pytest.approx(0.057, abs=0.005)
    mlp.eval()(100 * x)
    assert len(seen) == len(growths)  # validation neither has it nor moves it
    assert module.fp8_scale(mlp.post_limit).item() == pytest.approx(scales[-1], rel=0.05)


@mlps
def test_zeros_and_floors(milestone):
    module = load_snapshot(milestone)
    mlp, x = fp8_mlp(module)
    torch.nn.init.zeros_(mlp.c_proj)  # as initially
    for inputs in (x, 0 * x, x):  # after zeros, the scale of activations is the largest
        assert not mlp(inputs).any()
    assert module.fp8_scale(torch.tensor(0.0)).item() == pytest.approx(1e12)
    assert module.fp8_scale(torch.tensor(3.0).bfloat16()).dtype == torch.float32


@mlps
def test_scales_of_weights(milestone):
    module = load_snapshot(milestone)
    mlp, x = fp8_mlp(module)
    for delayed, growth, factor in ((False, 1, 1), (False, 3, 1), (True, 3, 1 / (1.12 / 3)),
                                    (True, 1.11, 1.11 / 1.12), (True, 0.5, 0.5 / 1.12)):
        with torch.no_grad():
            mlp.c_fc.mul_(growth)
            mlp.c_proj.mul_(growth)
        mlp.renew_fp8_weights(delayed)
        w_in8, in_scale, w_out8, out_scale = mlp.weights8
        assert w_in8.shape == (4 * SIZE, SIZE) and w_in8.is_contiguous() and w_out8.is_contiguous()
        assert w_in8.float().abs().max() == 448
        assert error(w_in8.T.float() / in_scale, mlp.c_fc.double()) < 0.03
        # The largest weight: at 448 with its own maximum, else by the maximum before.
        assert w_out8.float().abs().max().item() == pytest.approx(min(1, factor) * 448, rel=0.07)
        assert (error(w_out8.float() / out_scale, mlp.c_proj.double()) < 0.03) == (factor < 1.01)


@mlps
def test_a_run_in_fp8(milestone, shards, tmp_path, monkeypatch):
    module, losses, seen = load_snapshot(milestone), [], []
    rounded, run = module.make_weights8, partial(
        micro_args, milestone, shards, total_batch_size=256, val_tokens=256)

    def noted(w_in, w_out, expected_amax=None):
        seen.append((expected_amax, w_out.abs().max()))
        return rounded(w_in, w_out, expected_amax)

    monkeypatch.setattr(module, "make_weights8", noted)
    for warmup in (0, 3):
        seen.clear()
        log_dir = tmp_path / str(warmup)
        losses.append(train(module, run(
            log_dir, use_fp8=True, kernel_warmup_steps=warmup, train_steps=5, fp8_settle_steps=2,
            save_checkpoint=True)))
    assert losses[0] == losses[1]  # the warm-up has moved scales, and they are restored
    layers = run(tmp_path).num_layers
    warm, steps = seen[: 3 * layers], seen[3 * layers :]
    assert len(steps) == 5 * layers
    assert [expected is None for expected, _ in warm] == layers * [True] + 2 * layers * [False]
    for number, (expected, _) in enumerate(steps):
        if number < 3 * layers:  # the initial weights and those after two steps
            assert expected is None
        else:  # those of the step before
            assert expected == 1.12 * steps[number - layers][1] > 0
    kept = torch.load(tmp_path / "3" / "checkpoint.pt", weights_only=True)["model"]
    ranges = [value.item() for name, value in kept.items() if name.endswith("post_limit")]
    assert len(ranges) == layers and all(0 < value < 180 for value in ranges)
    # Without FP8 every loss is the parent's.
    parent = MANIFEST.get(milestone.parent)
    without = [train(load_snapshot(m), micro_args(
        m, shards, tmp_path / m.id, use_fp8=False, train_steps=3, total_batch_size=256,
        val_tokens=256)) for m in (parent, milestone)]
    assert without[0] == without[1] and without[0][0] == losses[0][0]
    assert abs(without[0][-1] - losses[0][3]) < 0.05 and without[0][-1] != losses[0][3]


@mlps
def test_the_mlp_in_fp8_is_compiled_once(milestone, monkeypatch):
    module, compiled = load_snapshot(milestone), torch.compile
    monkeypatch.setattr(torch, "compile", partial(compiled, backend="aot_eager"))
    (one, x), (other, _) = (fp8_mlp(module, compile=True) for _ in range(2))
    net, counts = torch.compile(torch.nn.Sequential(one, other), dynamic=False, fullgraph=True), []
    counters.clear()
    for delayed in (False, False, True, True):
        for mlp in (one, other):
            mlp.renew_fp8_weights(delayed)
        net(x).sum().backward()
        counts.append(counters["stats"]["unique_graphs"])
    # One for both models' weights and one for the model; then one for weights with a scale given.
    assert counts == [2, 2, 3, 3]
    torch._dynamo.reset()
