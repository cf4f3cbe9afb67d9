"""The MLP's own backward pass since 12b, which takes the ReLU from the root of its square, and the
kernel of 12c, in FP8 since 14i: run by Triton's interpreter, assembled for three GPUs.

Run: .venv/bin/python -m pytest tests/test_fused_mlp.py
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from snapshots import MANIFEST, declaring, handles, known_values, load_snapshot, micro_sizes, where
from test_gpu import environment_with_gpus, has_gpu
from test_kernels import assembled, interpreted, needs_triton, whole

of_its_own = where("SquaredReLUMLP", "MLP", known="root")
SHRUNK = 8  # times smaller than the script's are tiles in the interpreter, which is slow
SHAPES = [(25, 18, 40), (16, 8, 16), (1, 3, 5)]  # (M, K, N)
FITTING = [(columns, stages, 64) for columns in (128, 256) for stages in (3, 4)] + [
    (128, 3, 128)]  # forms for bfloat16; the tuner leaves out those that do not fit
IN_FP8 = declaring("relu2_kernel", block="fp8_relu2_product")
INTERPRETED = [milestone.id for milestone in declaring(
    "relu2_kernel", "relu2_product", "fp8_relu2_product")]
TILES = 9 if "RUN_SLOW" in os.environ else 1  # how many sizes of tiles are tried


def apply(module, x, w_in, w_out, use_triton=False):
    """The MLP of x (N, C) as the module computes it."""
    return handles(module).mlp_function(module, x, w_in, w_out, use_triton)


def plain(x, w_in, w_out):
    """The same by its formula."""
    return (x @ w_in).relu().square() @ w_out.T


def factors(dtype, *shape, N=7, C=5):
    """x (N, C), both matrices (C, 4C), and a gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(*size, dtype=dtype, requires_grad=True)
            for size in ((N, C), (C, 4 * C), (C, 4 * C), (N, C))]


# ---- the root ----


@of_its_own
def test_gradients_are_autograds(milestone):
    module = load_snapshot(milestone)
    *inputs, grad = factors(torch.float64)
    y, expected = apply(module, *inputs), plain(*inputs)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    for found, other in zip(torch.autograd.grad(y, inputs, grad),
                            torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-13, atol=1e-13)
    x, w_in, w_out, grad = (t.detach() for t in (*inputs, grad))
    pre = torch.tensor([[-3.0, -0.0, 0.0, 2.0]]).double()  # x w_in; the slope is 0 up to 0
    x = torch.ones(1, 1, dtype=torch.float64)
    w_in = pre.clone().requires_grad_()
    (found,) = torch.autograd.grad(apply(module, x, w_in, torch.ones_like(pre)), w_in, x)
    assert found.tolist() == [[0, 0, 0, 4]]


@of_its_own
def test_one_tensor_less_is_kept(milestone):
    module, kept = load_snapshot(milestone), []
    *inputs, _ = factors(torch.float32, N=64)

    def bytes_of(function):
        found = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: found.update({t.untyped_storage().data_ptr(): t}) or t, lambda t: t):
            kept.append(function(*inputs))  # so that no place is used twice
        assert not any(map(torch.is_tensor, getattr(kept[-1].grad_fn, "__dict__", {}).values()))
        wide = [t for t in found.values() if t.numel() == 64 * 20]
        return len(wide), sum(t.nbytes for t in found.values())

    (count, size), (plain_count, plain_size) = (
        bytes_of(lambda *t: apply(module, *t)), bytes_of(plain))
    assert (count, plain_count) == (1, 2)
    assert plain_size - size == 4 * 64 * 20  # (N, 4C) in float32


@of_its_own
def test_the_root_in_bfloat16(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["root"]
    relu = torch.tensor(known["relu"]).bfloat16()
    assert relu.item() == known["relu"]
    assert relu.square().item() == pytest.approx(known["square"], abs=5e-9)
    assert relu.square().float().sqrt().item() == pytest.approx(known["root"], abs=5e-8)
    # All numbers with 8 bits from 1 to 4, whose square has an even and an odd exponent, and others.
    relu = torch.cat([torch.arange(128, 256) * 2.0**e for e in (-7, -6, -40, 20)]).bfloat16()
    assert relu.unique().numel() == 4 * 128
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    x = relu[:, None].clone().requires_grad_()
    half = torch.full_like(x, 0.5)
    (root,) = torch.autograd.grad(apply(module, x, one, one), x, half)  # 2 times 0.5 times the root
    assert root.dtype == torch.bfloat16
    errors = (root[:, 0].double() / relu.double() - 1).abs()
    assert errors.max() <= 2**-8  # 2^-9 of the square's rounding, as much of the root's own
    exact = relu.square().double().sqrt() / relu.double() - 1
    assert 0 < exact.abs().max() <= 2**-9


@of_its_own
def test_the_model_computes_so(milestone, monkeypatch):
    module, seen = load_snapshot(milestone), []
    mlp = module.MLP(args := micro_sizes(module)).double()
    for weight in mlp.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(2, 3, args.model_dim, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), plain(x, mlp.c_fc, mlp.c_proj))
    torch.testing.assert_close(mlp(x.transpose(0, 1)), mlp(x).transpose(0, 1))  # not contiguous
    backward = module.SquaredReLUMLP.backward
    monkeypatch.setattr(module.SquaredReLUMLP, "backward", staticmethod(
        lambda ctx, grad, *more: seen.append(grad.shape) or backward(ctx, grad, *more)))
    mlp(x).sum().backward()
    assert seen == [(6, args.model_dim)]


# ---- the kernel ----


def interpret(milestone):
    """How far the kernel's products are from its specification's, in each form of different
    tiles, and how far gradients through it are from exact ones. Only float32, see test_kernels."""
    module, found = load_snapshot(milestone), dict(products=[], gradients=[], fp8=[])
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    torch.manual_seed(0)
    product = module.relu2_product
    forms = {str(form.kwargs): form for form in module.relu2_kernel.configs}
    for form in [*forms.values()][:TILES]:
        form.kwargs = {name: size // SHRUNK for name, size in form.kwargs.items()}
        module.relu2_kernel.configs = [form]
        for M, K, N in SHAPES:
            a, b, post = whole(M, K), whole(K, N), whole(M, N).abs().square()
            if K == 3:  # not contiguous
                a, b = (t.T.contiguous().T for t in (a, b))
            for more in ({}, dict(post=post)):
                expected = product(a, b, **more)
                out = product(a, b, **more, use_triton=True)
                found["products"].append([(out - expected).abs().max().item(),
                                          out.shape == (M, N), expected.abs().max().item()])
            if milestone in IN_FP8:
                found["fp8"] += [compare_fp8(module, a, b.T.contiguous(), dtype)
                                 for dtype in (torch.float32, torch.float8_e4m3fn)]
    *inputs, grad = factors(torch.float32, N=19, C=12)
    expected = torch.autograd.grad(plain(*(t.double() for t in inputs)), inputs, grad.double())
    for one, other in zip(torch.autograd.grad(apply(module, *inputs, use_triton=True), inputs,
                                              grad), expected, strict=True):
        found["gradients"].append([(one - other).abs().max().item(), other.abs().max().item()])
    return found


def compare_fp8(module, a, b, dtype):
    """How far the kernel's results are from relu(a b')^2, for whole numbers a and b with scales 2
    and 0.25. What it rounds to FP8 is left out there: the interpreter's rounding loses a carry."""
    scales, product = (torch.tensor(2.0), torch.tensor(0.25)), (a @ b.T).relu().square()
    scale = (200 if product.numel() < 10 else 500) / product.max()  # a few are clamped
    a8, b8 = ((factor * t).to(dtype) for factor, t in zip(scales, (a, b), strict=True))
    out, out8, largest = module.fp8_relu2_product(
        a8.contiguous(), scales[0], b8.contiguous(), scales[1], scale, torch.float32, True)
    expected = (scale * product).clamp(max=448.0)
    assert out8.dtype == dtype and out8.shape == out.shape and out.dtype == largest.dtype
    return [(out - product).abs().max().item(), (largest - product.max()).item(),
            (out8 - expected).abs().max().item() if dtype == torch.float32 else 0, out.max().item()]


@needs_triton
@where("relu2_kernel", "fp8_relu2_product", known="fp8_mlp")
def test_the_kernels_products_in_fp8_are_their_definition(milestone):
    found = interpreted(interpret, *INTERPRETED)[milestone.id]["fp8"]
    assert len(found) >= 2 * len(SHAPES)
    for error, apart, error8, size in found:
        assert error == 0 and apart == 0 and error8 < 1e-4 and size > 1


@needs_triton
@where("relu2_kernel", "relu2_product")
def test_the_kernels_products_are_its_specifications(milestone):
    found = interpreted(interpret, *INTERPRETED)[milestone.id]
    assert len(found["products"]) >= 2 * len(SHAPES)
    for error, shaped, size in found["products"]:
        assert error == 0 and shaped and size > 1  # whole numbers: exact on every processor
    for error, size in found["gradients"]:
        assert error < 1e-5 * size


@where("relu2_kernel", "relu2_product")
def test_the_specification(milestone):
    product = load_snapshot(milestone).relu2_product
    torch.manual_seed(0)
    a, b, post = torch.randn(4, 3), torch.randn(3, 5), torch.rand(4, 5)
    torch.testing.assert_close(product(a, b), F.relu(a @ b) ** 2)
    torch.testing.assert_close(product(a, b, post), 2 * (a @ b) * post.sqrt())


FORMS = [(90, 128, 8, 3, 64, None), (90, 128, 8, 3, 64, "post"), (90, 256, 8, 4, 128, "fp8"),
         (100, 256, 8, 4, 128, "fp8")]
MORE = [(gpu, columns, warps, stages, depth, form) for gpu in (80, 90, 100)
        for columns, warps in ((128, 4), (128, 8), (256, 8)) for stages in (3, 4)
        for depth in (64, 128) for form in (None, "post", "fp8")]


@needs_triton
@where("relu2_kernel")
@pytest.mark.parametrize("gpu, columns, warps, stages, depth, form", [
    *FORMS, *(pytest.param(*form, marks=pytest.mark.slow) for form in MORE if form not in FORMS)])
def test_forms_fit(milestone, gpu, columns, warps, stages, depth, form):
    if milestone not in IN_FP8 and (form == "fp8" or depth == 128):
        pytest.skip("no FP8 yet")
    kernel = load_snapshot(milestone).relu2_kernel
    (sizes,) = [form.kwargs for form in kernel.configs if (
        form.kwargs["COLUMNS"], form.num_warps, form.num_stages, form.kwargs["DEPTH"]) == (
        columns, warps, stages, depth)]
    types = dict.fromkeys(("a", "b", "post", "out"), "*bf16") | dict.fromkeys(
        ("M", "N", "K", "k_stride", "j_stride"), "i32")
    if form == "fp8":
        types |= dict(a="*fp8e4nv", b="*fp8e4nv", out8="*fp8e4nv", factor="*fp32", scale="*fp32",
                      amax="*fp32")
        sizes = sizes | dict(post=None, k_stride=1)
    else:
        sizes = sizes | dict.fromkeys(("factor", "scale", "out8", "amax"))
        sizes |= dict(j_stride=1) | ({} if form else dict(post=None))
    sizes = {name: size for name, size in sizes.items() if name in kernel.fn.arg_names}

    def usage():
        return assembled(kernel.fn, types, sizes, warps, stages, gpu)

    if form == "fp8" and gpu == 80:  # an A100 multiplies in bfloat16
        with pytest.raises(Exception, match="fp8e4nv not supported"):
            usage()
        return
    registers, stack, shared = usage()
    assert 0 < registers <= 255 and (form != "fp8" or stack == 0)
    if gpu != 80 and (form == "fp8" or (columns, stages, depth) in FITTING):
        assert 0 < shared <= 232_448  # what an A100 has is not tuned for


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device")
@where("relu2_kernel", "relu2_product")
def test_on_a_gpu(milestone):
    environment = environment_with_gpus() | dict(PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run([sys.executable, __file__, milestone.id], env=environment,
                           capture_output=True, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr[-2000:]


def launch(milestone):
    """Compares the kernel in bfloat16 with products in float32."""
    product = load_snapshot(milestone).relu2_product
    torch.manual_seed(0)
    for M, K, N in ((2048, 768, 3072), (1000, 80, 208)):
        a, b = (torch.randn(size, device="cuda").bfloat16() for size in ((M, K), (K, N)))
        a /= K**0.5
        post = torch.rand(M, N, device="cuda").bfloat16()
        for more in ({}, dict(post=post)):
            expected = product(a.float(), b.float(), **{k: t.float() for k, t in more.items()})
            out = product(a, b, **more, use_triton=True)
            torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-3)


if __name__ == "__main__":
    for id in sys.argv[1:]:
        launch(MANIFEST.get(id))
