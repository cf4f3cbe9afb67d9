"""The benchmark command and what it measures.

Run: .venv/bin/python -m pytest tests/test_benchmark.py
"""

import subprocess
import sys
import time

import pytest
import torch

from snapshots import MANIFEST, load_snapshot, micro_args
from speedrun.history.manifest import REPOSITORY
from speedrun.run.overhead import time_loader, time_steps


@pytest.fixture
def micro(shards, tmp_path):
    """Milestone 01's module and the hyperparameters of a short run."""
    milestone = MANIFEST.get("01")
    return load_snapshot(milestone), micro_args(
        milestone, shards, tmp_path / "log", kernel_warmup_steps=0, train_steps=5
    )


def slowed(call):
    def slow_call(*positional, **named):
        time.sleep(0.05)
        return call(*positional, **named)

    return slow_call


@pytest.mark.parametrize("part", ["forward", "backward", "optimizer"])
def test_a_slow_part_is_seen(part, micro, monkeypatch):
    module, args = micro
    owner, name = {
        "forward": (module.GPT, "forward"), "backward": (torch.Tensor, "backward"),
        "optimizer": (torch.optim.Adam, "step"),
    }[part]
    monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
    times = time_steps(module, args)
    assert times.steps == 5
    seconds = {part: getattr(times, part) for part in ("forward", "backward", "optimizer")}
    assert seconds.pop(part) >= 5 * 0.05
    assert min(seconds.values()) > 0
    assert times.outside > 0


def test_what_is_slow_outside_is_seen(micro, monkeypatch):
    module, args = micro
    monkeypatch.setattr(module, "lr_multiplier", slowed(module.lr_multiplier))  # in the loop
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
