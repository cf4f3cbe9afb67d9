"""Kernels of the scripts against plain arithmetic, at sizes near the record's: test_gpu.py tries
each in a process of its own.

    PYTHONPATH=tools python tests/kernel_checks.py NAME [cpu]

Prints a line per comparison; fails where a result is further from plain arithmetic in float64 than
the rounding of its numbers explains. On a CPU the plain functions stand in for kernels.
"""

import sys
from functools import partial

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

ROUNDED = {torch.float32: 5e-3, torch.bfloat16: 0.01, torch.float8_e4m3fn: 0.04,
           torch.float8_e5m2: 0.05}  # relative errors that rounding to these numbers explains


class Checks:
    """Each method tries a kernel of 14i, which has them all."""

    def __init__(self, device):
        self.device, self.on_gpu = torch.device(device), device != "cpu"
        self.module = load_snapshot(load_manifest().get("14i").script)
        self.failed = []

    def randn(self, *shape):
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def size(self, n):
        return n if self.on_gpu else max(128, n // 64)

    def agree(self, what, found, exact, dtype=None):
        """Notes whether a result is as close to the exact one as its numbers can be."""
        exact = exact.double()
        apart = ((found.double() - exact).norm() / exact.norm()).item()
        most = ROUNDED[dtype or found.dtype]
        print(f"{what}: {apart:.2g}, at most {most}")
        if not apart <= most:  # also not a number
            self.failed.append(what)

    def fp8(self):
        e4, e5, bf16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
        T, C, V = self.size(16384), 768, self.size(50304)
        x_scale, w_scale, g_scale = 16.0, 2.0**9, 2.0**10
        quantize, product = self.module.quantize, self.module.fp8_product
        x = quantize(self.randn(T, C), x_scale, e4)
        w = quantize(0.02 * self.randn(V, C), w_scale, e4)
        g = quantize(1e-3 * self.randn(T, V), g_scale, e5)
        plain_x, plain_w, plain_g = (t.float() / s for t, s in (
            (x, x_scale), (w, w_scale), (g, g_scale)))
        for fast in (True, False):
            self.agree(f"logits, fast={fast}", product(x, x_scale, w, w_scale, bf16, fast),
                       plain_x @ plain_w.T)
        self.agree("gradient of inputs", product(
            g, g_scale, w.T.contiguous(), w_scale, bf16), plain_g @ plain_w)
        self.agree("gradient of weights", product(
            x.T.contiguous(), x_scale, g.T.contiguous(), g_scale, torch.float32),
            plain_x.T @ plain_g)

    def symmetric(self):
        for N, M, K in ((4, 768, 3072), (8, 768, 768), (8, 256, 768), (3, 100, 70)):
            x = self.randn(N, M, K) / K**0.5
            for addend in (None, self.module.symmetric_product(x)):
                found = self.module.symmetric_product(x, addend, 2.0, 3.0, use_triton=self.on_gpu)
                exact = x.double() @ x.double().mT
                if addend is not None:
                    exact = 2 * exact + 3 * addend.double()
                self.agree(f"{N} x {M} x {K}, {'no' if addend is None else 'with an'} addend",
                           found, exact)

    def relu2(self):
        T, e4, module = self.size(16384), torch.float8_e4m3fn, self.module
        a, b, g, w = (self.randn(T, 768), 0.03 * self.randn(768, 3072), self.randn(T, 768),
                      0.03 * self.randn(768, 3072))
        post = (a.float() @ b.float()).relu().square()
        self.agree("forward", module.relu2_product(a, b, use_triton=self.on_gpu), post)
        rounded = post.bfloat16()
        self.agree("backward", module.relu2_product(g, w, rounded, use_triton=self.on_gpu),
                   2 * (g.float() @ w.float()) * rounded.float().sqrt())
        a8 = module.quantize(a, 64.0, e4)
        b8 = module.quantize(b, 512.0, e4).T.contiguous()
        a_scale, b_scale, scale = (torch.tensor(s, device=self.device) for s in (64.0, 512.0, 8.0))
        found = module.fp8_relu2_product(a8, a_scale, b8, b_scale, scale, torch.bfloat16,
                                         use_triton=self.on_gpu)
        exact = ((a8.float() @ b8.float().T) / (64 * 512)).relu().square()
        self.agree("FP8, forward", found[0], exact)
        self.agree("FP8, output in FP8", found[1], (8 * exact).clamp(max=448))
        self.agree("FP8, maximum", found[2], exact.amax(), torch.bfloat16)

    def loss(self):
        N, V = self.size(4096), self.size(50304)
        logits = 5 * self.randn(N, V)
        weights = torch.tensor([1.0, 0.5, 0.25, 0.25], device=self.device)
        targets = torch.randint(-1, V, (N, 4), device=self.device)
        call = partial(self.module.loss_and_grads, cap=(23.0, 5.0, 7.5), weights=weights)
        for dtype, scale in ((torch.bfloat16, 1.0), (torch.float8_e5m2, 448 / 0.75)):
            losses, grads = call(logits, targets, grad_dtype=dtype, grad_scale=scale,
                                 use_triton=self.on_gpu)
            exact, slopes = call(logits.double(), targets, grad_dtype=torch.float64,
                                 grad_scale=scale)
            self.agree(f"losses beside gradients in {dtype}", losses, exact, torch.bfloat16)
            self.agree(f"gradients in {dtype}", grads, slopes)

    def varlen(self):
        """FlashAttention-2 against a dense mask; it needs a GPU."""
        T, window, document, scale = 2048, 384, 700, 0.1
        leaves = [self.randn(T, 6, 128).requires_grad_() for _ in range(3)]
        wide = [x.detach().float().transpose(0, 1).requires_grad_() for x in leaves]
        t = torch.arange(T, device=self.device)
        starts = torch.full((32,), T, device=self.device, dtype=torch.int32)  # padded
        starts[: -(-T // document)] = t[::document].int()
        back = t[:, None] - t
        seen = (back >= 0) & (back <= window) & (t[:, None] // document == t // document)
        scores = (scale * wide[0] @ wide[1].mT).masked_fill(~seen, -torch.inf)
        exact = scores.softmax(-1) @ wide[2]
        found = self.module.varlen_attn(*leaves, starts, starts, 896, 896, scale=scale,
                                        window_size=(window, 0))
        grad = self.randn(T, 6, 128)
        found.backward(grad)
        exact.backward(grad.float().transpose(0, 1))
        self.agree("output", found.detach(), exact.detach().transpose(0, 1))
        for what, x, y in zip(("queries", "keys", "values"), leaves, wide, strict=True):
            self.agree(f"gradient of {what}", x.grad, y.grad.transpose(0, 1))


NAMES = ("fp8", "symmetric", "relu2", "loss", "varlen")
if __name__ == "__main__":
    torch.manual_seed(0)
    name, device = [*sys.argv[1:], "cuda"][:2]
    checks = Checks(device)
    getattr(checks, name)()
    sys.exit(f"too far from plain arithmetic: {', '.join(checks.failed)}" if checks.failed else 0)
