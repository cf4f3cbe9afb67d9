"""Tries what only GPUs compute, each by itself and against plain arithmetic. A process tries one
of them, because a fault may leave the GPU unusable for the process that met it."""

import os
import subprocess
import sys
from collections.abc import Callable

from speedrun.base.files import REPOSITORY
from speedrun.run.failure import describe_exit, error_line

OK = "ok"
PATIENCE_S = 300  # FlexAttention compiles for a minute on a slow CPU


def try_kernel(name: str, device: str = "cuda") -> str:
    """OK, or the first line of the error, from one of TRIALS on a device; takes seconds."""
    tools = os.pathsep.join(filter(None, (str(REPOSITORY / "tools"), os.environ.get("PYTHONPATH"))))
    try:
        ended = subprocess.run(
            trial_command(name, device), timeout=PATIENCE_S,
            env={**os.environ, "PYTHONPATH": tools}, capture_output=True, encoding="utf-8",
            errors="replace")
    except subprocess.TimeoutExpired:
        return f"it did not end within {PATIENCE_S} s"
    if ended.returncode == 0:
        return OK
    return error_line(ended.stderr) or describe_exit(ended.returncode)


def trial_command(name: str, device: str = "cuda") -> list[str]:
    """The command that tries one of TRIALS on a device, where PYTHONPATH has tools/; it fails with
    the error on stderr."""
    return [sys.executable, "-m", "speedrun.run.kernels", name, device]


def triton_kernel(device: str) -> None:
    """One kernel, which the compiler writes in Triton for a GPU."""
    import torch

    x = torch.randn(128, device=device)
    _agree(torch.compile(lambda x: 2 * x + 1, dynamic=False)(x), 2 * x + 1, 1e-6)


def flex_attention(device: str) -> None:
    """One compiled graph with FlexAttention, forward and backward."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(q, k, v):
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 256, 256, device=device)
        return flex_attention(q, k, v, block_mask=mask, scale=0.1)

    q, k, v = _leaves((1, 2, 256, 64), device)
    out = torch.compile(attend, dynamic=False)(q, k, v)
    out.sum().backward()
    visible = torch.ones(256, 256, dtype=torch.bool, device=device).tril()
    _agree_with_attention(out, q, k, v, visible)


def fp8_product(device: str) -> None:
    """One product of matrices in FP8."""
    import torch

    from speedrun.compat import scaled_mm

    # Small whole numbers are exact in eight bits, and so are their sums in float32.
    a, b = (torch.randint(-4, 5, (64, 128), device=device).float() for _ in range(2))
    one = torch.ones((), device=device)
    out = scaled_mm(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T, one, one,
                    out_dtype=torch.bfloat16)
    _agree(out, a @ b.T, 2)  # a bfloat16 near 512 is a multiple of 4


def flash_attention(device: str, kernel: str) -> None:
    """FlashAttention on two documents end to end, forward and backward."""
    import torch
    from torch.nn.attention import activate_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    if kernel == "FA3":
        activate_flash_attention_impl("FA3")
    q, k, v = _leaves((256, 2, 128), device)
    starts = torch.tensor([0, 100, 256], dtype=torch.int32, device=device)
    out = varlen_attn(q, k, v, starts, starts, 156, 156, scale=0.1, window_size=(64, 0))
    out.sum().backward()
    t = torch.arange(256, device=device)
    back = t[:, None] - t
    visible = (back >= 0) & (back <= 64) & ((t[:, None] < 100) == (t < 100))
    _agree_with_attention(*(x.transpose(0, 1) for x in (out, q, k, v)), visible,
                          leaves=(q, k, v))


# By the names in hyperparameters.toml's `needs`; FlashAttention-2 where there is no other.
TRIALS: dict[str, Callable[[str], None]] = {
    "Triton": triton_kernel, "FlexAttention": flex_attention, "FP8": fp8_product,
    "FlashAttn-3": lambda device: flash_attention(device, "FA3"),
    "FlashAttn-2": lambda device: flash_attention(device, "FA2"),
}


def _leaves(shape, device):
    """Queries, keys and values of a shape, in bfloat16."""
    import torch

    return [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)]


def _agree_with_attention(out, q, k, v, visible, leaves=None):
    """Compares an attention of scale 0.1 and its gradients with float32's, scores written out."""
    import torch

    grads = [x.grad for x in leaves or (q, k, v)]
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    scores = (0.1 * wide[0] @ wide[1].mT).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1) @ wide[2]
    expected.sum().backward()
    _agree(out, expected, 0.05)
    for grad, exact in zip(grads, wide, strict=True):
        _agree(grad if leaves is None else grad.transpose(0, 1), exact.grad, 0.1)


def _agree(found, expected, tolerance):
    """Raises AssertionError where two results are further apart than rounding explains."""
    apart = (found.float() - expected.float()).abs().max().item()
    if not apart <= tolerance:
        raise AssertionError(f"its results are off by up to {apart:.3g}")


if __name__ == "__main__":
    trial = TRIALS[sys.argv[1]]
    import torch

    torch.manual_seed(0)
    trial(sys.argv[2])
