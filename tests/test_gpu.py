"""The snapshots on a CUDA device: compiled, in bfloat16, through NCCL; skipped without one.

Run: .venv/bin/python -m pytest tests/test_gpu.py              everything, which takes long
     .venv/bin/python -m pytest tests/test_gpu.py -k fast      less than three minutes on one GPU
"""

import os
import subprocess
import sys

import pytest

import kernel_checks
from snapshots import (
    MANIFEST,
    MILESTONES,
    as_options,
    by_id,
    every_snapshot,
    handles,
    micro_of,
    micro_overrides,
)
from speedrun.compare import plans
from speedrun.compare.parts import AT_FIRST, LATER
from speedrun.history.manifest import REPOSITORY
from speedrun.run.data import make_builtin
from speedrun.run.gpus import visible_gpus
from speedrun.run.kernels import TRIALS, try_kernel
from speedrun.run.log import read_log
from speedrun.scripts.sizes import fitting


def environment_with_gpus():
    """The environment of this process before conftest.py hid the GPUs, as far as that matters."""
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}


def has_gpu():
    """Whether there is a GPU that conftest.py hid."""
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        return bool(visible_gpus())
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def run(milestone, shards, log_dir, cuda=True, **options):
    """Trains a micro model on the GPU or the CPU and returns its log."""
    options |= fitting(dict(tile_size=128), micro_of(milestone))  # FlexAttention's on a GPU
    overrides = micro_overrides(milestone, shards, log_dir, **options)
    environment = environment_with_gpus()
    if not cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    ended = subprocess.run(
        [sys.executable, milestone.script, *as_options(overrides)], env=environment,
        capture_output=True, encoding="utf-8",
    )
    assert ended.returncode == 0, ended.stderr
    log = read_log(log_dir / "log.txt")
    assert (log.environment["device"] != "cpu") == cuda
    return log


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")]
WITH_FLEX = [m for m in MILESTONES if "flex" in handles(m).PATHS]
WITH_KERNELS = [m for m in MILESTONES if "FA2" in handles(m).PATHS]
WINDOWS = dict(window=150, window_start=32, window_end=192, window_growth=64, long_window_end=224)


@pytest.mark.parametrize("name", kernel_checks.NAMES)
def test_fast_kernels_agree_with_plain_arithmetic(name):
    ended = subprocess.run(
        [sys.executable, kernel_checks.__file__, name], capture_output=True, encoding="utf-8",
        env=environment_with_gpus() | {"PYTHONPATH": str(REPOSITORY / "tools")})
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("id", ["09", "14i"])
def test_fast_compiled_steps_follow_a_cpu(id, tmp_path, monkeypatch):
    # Tiny sizes, but compiled, in bfloat16, with every kernel that this GPU has.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    kernels = {name: try_kernel(name) for name in TRIALS}
    make_builtin()
    curves = []
    for where, choice, hidden in (("cpu", None, {"CUDA_VISIBLE_DEVICES": ""}),
                                  ("gpu", kernels, {})):
        plan = plans.small_plan(MANIFEST.get(id), 1, tmp_path / where, choice)
        ended = subprocess.run([sys.executable, *plan.script_command], capture_output=True,
                               encoding="utf-8", env=environment_with_gpus() | hidden)
        assert ended.returncode == 0, ended.stderr
        curves.append([loss for _, loss in read_log(plan.out / "log.txt").val_curve])
    assert curves[0][0] == pytest.approx(curves[1][0], abs=AT_FIRST)
    assert curves[0] == pytest.approx(curves[1], abs=LATER)
    assert curves[0][0] - curves[0][-1] > LATER


@every_snapshot
def test_gpu_losses_follow_the_cpus(milestone, shards, tmp_path):
    cpu = run(milestone, shards, tmp_path / "cpu", cuda=False)
    cuda = run(milestone, shards, tmp_path / "cuda", compile=True, bf16=True)
    curves = [[loss for _, loss in log.val_curve] for log in (cpu, cuda)]
    assert curves[0][0] == pytest.approx(curves[1][0], abs=1e-3)
    assert curves[0] == pytest.approx(curves[1], abs=0.05)  # bfloat16 rounds, training drifts


@pytest.mark.parametrize("milestone", WITH_FLEX, ids=by_id)
def test_gpu_flex_attention_trains_like_a_dense_mask(milestone, shards, tmp_path):
    # FlexAttention has a backward pass only on a GPU.
    sizes = dict(seq_len=256, micro_batch_size=1, bf16=False)
    sizes |= fitting(WINDOWS, micro_of(milestone))
    curves = []
    for flex in (False, True):
        log = run(milestone, shards, tmp_path / str(flex), use_flex_attention=flex,
                  compile=True, **sizes)
        assert log.hyperparameters["use_flex_attention"] is flex
        curves.append([loss for _, loss in log.val_curve])
    assert curves[0] == pytest.approx(curves[1], abs=1e-2)  # TF32 inside the kernels
    assert curves[0][0] - curves[0][-1] > 0.5


@pytest.mark.parametrize("milestone", WITH_KERNELS, ids=by_id)
def test_gpu_attention_kernels_train_like_a_dense_mask(milestone, shards, tmp_path):
    sizes = dict(seq_len=256, micro_batch_size=2, max_document_len=100, bf16=True, compile=True)
    sizes |= fitting(WINDOWS, micro_of(milestone))
    curves = {}
    for kernel in ("dense", "FA2"):
        log = run(milestone, shards, tmp_path / kernel, attention_kernel=kernel, **sizes)
        assert log.hyperparameters["attention_kernel"] == kernel
        curves[kernel] = [loss for _, loss in log.val_curve]
    assert curves["FA2"][0] == pytest.approx(curves["dense"][0], abs=1e-3)
    assert curves["FA2"] == pytest.approx(curves["dense"], abs=0.05)  # bfloat16 rounds
    assert curves["dense"][0] - curves["dense"][-1] > 0.5
