"""The snapshots on a CUDA device: compiled, in bfloat16, through NCCL; skipped without one.

Run: .venv/bin/python -m pytest tests/test_gpu.py
"""

import os
import subprocess
import sys

import pytest

from snapshots import WRITTEN, as_options, by_id, micro_overrides
from speedrun.device import visible_gpus
from speedrun.runlog import read_log


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


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device")
@pytest.mark.parametrize("milestone", WRITTEN, ids=by_id)
def test_gpu_losses_follow_the_cpus(milestone, shards, tmp_path):
    curves = []
    for device, options in {"cpu": {}, "cuda": dict(compile=True, bf16=True)}.items():
        overrides = micro_overrides(milestone, shards, tmp_path / device, **options)
        environment = environment_with_gpus()
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        ended = subprocess.run(
            [sys.executable, milestone.script, *as_options(overrides)], env=environment,
            capture_output=True, encoding="utf-8",
        )
        assert ended.returncode == 0, ended.stderr
        log = read_log(tmp_path / device / "log.txt")
        assert (log.environment["device"] == "cpu") == (device == "cpu")
        curves.append([loss for _, loss in log.val_curve])
    assert curves[0][0] == pytest.approx(curves[1][0], abs=1e-3)
    assert curves[0] == pytest.approx(curves[1], abs=0.05)  # bfloat16 rounds, training drifts
