"""The benchmark command and what it measures.

Run: .venv/bin/python -m pytest tests/test_benchmark.py
"""

import subprocess
import sys
import time

import pytest

from snapshots import WRITTEN, load_snapshot, micro_args
from speedrun.benchmark import time_loader, time_steps
from speedrun.manifest import REPOSITORY


@pytest.fixture
def micro(shards, tmp_path):
    """The last milestone's module and the hyperparameters of a short run."""
    milestone = WRITTEN[-1]
    return load_snapshot(milestone), micro_args(
        milestone, shards, tmp_path / "log", kernel_warmup_steps=0, train_steps=5
    )


def test_the_parts_make_up_the_steps(micro):
    module, args = micro
    times = time_steps(module, args)
    assert times.steps == 5
    parts = (times.forward, times.backward, times.optimizer)
    assert min(parts) > 0
    assert sum(parts) == pytest.approx((1 - times.outside) * times.total)
    assert 0 < times.outside < 1


def test_what_is_slow_is_seen(micro, monkeypatch):
    module, args = micro
    lr_multiplier = module.lr_multiplier

    def slow(step, args):  # runs in the loop, outside the three parts
        time.sleep(0.05)
        return lr_multiplier(step, args)

    monkeypatch.setattr(module, "lr_multiplier", slow)
    times = time_steps(module, args)
    assert times.outside * times.total > 5 * 0.05


def test_a_warmed_up_run_is_refused(micro):
    module, args = micro
    args.kernel_warmup_steps = 1
    with pytest.raises(ValueError, match="kernel_warmup_steps=0"):
        time_steps(module, args)


def test_loader_reads_what_is_asked(micro):
    module, args = micro
    times = time_loader(module, args, tokens=100_000)  # several times around the shards
    assert 100_000 <= times.tokens < 100_000 + args.micro_batch_size * args.seq_len
    assert times.seconds > 0


def test_unknown_milestone_is_one_line():
    ended = subprocess.run([sys.executable, REPOSITORY / "tools" / "benchmark.py", "0l"],
                           capture_output=True, encoding="utf-8")
    assert ended.returncode != 0
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
