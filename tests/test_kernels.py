"""Triton kernels on a machine without a GPU: run by Triton's interpreter, assembled for GPUs.

Run: .venv/bin/python -m pytest tests/test_kernels.py
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ranks import start_ranks
from snapshots import MANIFEST, known_values, load_snapshot, where
from test_gpu import environment_with_gpus, has_gpu

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SHRUNK = 2  # times smaller than the record's are tiles in the interpreter, which is slow
COUNTED = [[64, 64], [128, 128]]  # the tiles of which programs are counted
if "RUN_SLOW" in os.environ:
    COUNTED += [[64, 128], [128, 64]]
SHAPES = [(2, 73, 18), (1, 64, 12), (1, 100, 40)]  # (N, M, K): no tile fits; the fewest rows; more
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes of a block


# ---- values ----


@cache
def interpreted(interpret, *ids):
    """What a function returns of the kernels of milestones, {id: values}, where Triton's
    interpreter runs them."""
    ((found, _),) = start_ranks(1, of_each, interpret, ids)
    return found


def of_each(interpret, ids):
    """It replaces the compiler only before the import, which is made again."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [*sys.modules]:
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    return {id: interpret(MANIFEST.get(id)) for id in ids}


def whole(*shape):
    """Random whole numbers: their products and sums are exact on every processor."""
    return torch.randint(-8, 9, shape).float()


def interpret(milestone):
    """How far products are from the dense ones, without and with addend, and how far from
    symmetric; and of 768 rows which programs store something, of how many, for some tiles.

    Only float32: the interpreter of 3.7.1 multiplies bfloat16 wrongly.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    module, ran, found = load_snapshot(milestone), set(), dict(errors=[], programs=[])
    store, product = InterpreterBuilder.create_masked_store, module.symmetric_product

    def spy(builder, *args):
        ran.add(builder.grid_idx)
        return store(builder, *args)

    InterpreterBuilder.create_masked_store = spy
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    forms = {(form.kwargs["ROWS"], form.kwargs["COLUMNS"]): form
             for form in module.symmetric_kernel.configs}
    torch.manual_seed(0)
    for tile, form in forms.items():
        form.kwargs = {name: size // SHRUNK for name, size in form.kwargs.items()}
        module.symmetric_kernel.configs = [form]
        for N, M, K in SHAPES:
            x, addend = whole(N, M, K), whole(N, M, M)
            for more in ({}, dict(addend=addend + addend.mT, alpha=2.5, beta=-0.75)):
                out = product(x, **more, use_triton=True)
                found["errors"].append([(out - product(x, **more)).abs().max().item(),
                                        (out - out.mT).abs().max().item()])
        if [*tile] in COUNTED:
            ran.clear()
            x = whole(1, 768 // SHRUNK, 16)
            out = product(x, use_triton=True)
            found["programs"].append([*tile, len(ran), math.prod(
                -(-x.size(1) // form.kwargs[name]) for name in ("ROWS", "COLUMNS"))])
            found["errors"].append([(out - x @ x.mT).abs().max().item(), 0])
    return found


@needs_triton
@where("symmetric_kernel")
def test_products_are_the_dense_ones_and_symmetric(milestone):
    errors = interpreted(interpret, milestone.id)[milestone.id]["errors"]
    assert len(errors) == 4 * 2 * len(SHAPES) + len(COUNTED)
    for error, asymmetry in errors:
        assert error == 0 and asymmetry == 0  # what was not stored is NaN, also in both


@needs_triton
@where("symmetric_kernel")
def test_tiles_above_the_diagonal_are_not_computed(milestone):
    known = known_values(milestone.id)["kernel_tiles"]
    found = interpreted(interpret, milestone.id)[milestone.id]["programs"]
    assert found == [case for case in known if case[:2] in COUNTED] and len(found) >= 2


# ---- forms ----


CHOSEN = [(90, 0, True), (90, 7, False)]
OTHERS = [(gpu, number, with_addend) for gpu in SHARED for number in range(8)
          for with_addend in (False, True) if (gpu, number, with_addend) not in CHOSEN]


@needs_triton
@where("symmetric_kernel")
@pytest.mark.parametrize("gpu, number, with_addend", [
    *CHOSEN, *(pytest.param(*form, marks=pytest.mark.slow) for form in OTHERS)])
def test_forms_fit(milestone, gpu, number, with_addend):
    kernel = load_snapshot(milestone).symmetric_kernel
    assert len(kernel.configs) == 8
    form = kernel.configs[number]
    types = dict.fromkeys(("x", "addend", "out"), "*bf16") | dict(factors="*fp32", M="i32", K="i32")
    sizes = form.kwargs | ({} if with_addend else dict(addend=None, factors=None))
    registers, stack, shared = assembled(
        kernel.fn, types, sizes, form.num_warps, form.num_stages, gpu)
    assert 0 < registers <= 255 and stack == 0  # nothing is spilled
    assert 0 < shared <= SHARED[gpu]


def assembled(kernel, types, constants, warps, stages=3, gpu=90):
    """Registers of a thread, bytes it spills and bytes of shared memory of a kernel's form,
    assembled for sm_90, or another, by the ptxas that comes with Triton. types: of all arguments
    but the constants, whose place is the kernel's own."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    for param in kernel.params:  # other floats would be float64 under torch 2.13's compiler
        assert param.is_constexpr or not isinstance(constants.get(param.name), float), param.name
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values())
               if kind.startswith("*") or kind == "i32"}
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as folder:
        patched.setenv("TRITON_CACHE_DIR", folder)
        compiled = triton.compile(
            ASTSource(kernel, types, constants, aligned), target=GPUTarget("cuda", gpu, 32),
            options=dict(num_warps=warps, num_stages=stages))
        ptx = compiled.asm["ptx"]  # a NaN is passed on, as by PyTorch's relu and clamp
        assert ".NaN." in ptx or not re.search(r"(min|max)\.(xorsign\.abs\.)?f32", ptx)
        casts = re.findall(r"cvt\.\S*\.e[45]m[23]x2\.\S+", ptx)
        assert all(".satfinite." in cast for cast in casts)  # they clamp
        assert casts or not {"*fp8e5", "*fp8e4nv"} & {types[name] for name in kernel.arg_names[3:]}
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file], capture_output=True, encoding="utf-8",
                               check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack), compiled.metadata.shared


# ---- on a GPU ----


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device")
@where("symmetric_kernel")
def test_gpu_products_are_the_dense_ones(milestone):
    environment = environment_with_gpus() | dict(PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run([sys.executable, __file__, milestone.id], env=environment,
                           capture_output=True, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr[-2000:]


def launch(milestone):
    """Compares products in bfloat16 with cuBLAS's: within a unit of the last digit."""
    product = load_snapshot(milestone).symmetric_product
    torch.manual_seed(0)
    for shape in ((4, 768, 768), (2, 768, 3072), (1, 6, 12)):
        x = torch.randn(shape, device="cuda").div(shape[-1] ** 0.5).bfloat16()
        A = product(x, use_triton=True)
        for out, dense in ((A, product(x)), (
                product(A, A, alpha=2.0315, beta=-4.775, use_triton=True),
                product(A, A, alpha=2.0315, beta=-4.775))):
            assert out.equal(out.mT)
            torch.testing.assert_close(out, dense, rtol=2**-7, atol=1e-3)


# ---- without Triton ----


@where("symmetric_product")
def test_products_without_triton(milestone):
    torch.manual_seed(0)
    product = load_snapshot(milestone).symmetric_product
    x, addend = torch.randn(2, 4, 6), torch.randn(2, 4, 4)
    torch.testing.assert_close(product(x), x @ x.mT)
    for use_triton in (False, True):  # a tile has more than four rows: no kernel is launched
        torch.testing.assert_close(
            product(x, addend, alpha=2.5, beta=-0.75, use_triton=use_triton),
            2.5 * x @ x.mT - 0.75 * addend)


if __name__ == "__main__":
    launch(MANIFEST.get(sys.argv[1]))
