"""What ends a run of two ranks before its time ends it within seconds and in one line.

Run: .venv/bin/python -m pytest tests/test_faults.py
"""

import os
import signal
import sys
import time

import numpy as np
import pytest

from snapshots import MANIFEST, micro_overrides, write_random_shards
from test_run_milestone import no_process_of, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sends signals, looks into /proc")
SECONDS = 60  # in which a run must end; an idle machine takes a few


@pytest.fixture
def run(tmp_path):
    """Starts a micro run of many steps with two ranks, of a milestone's script with another line
    below one of its lines; returns the process once it trains, its folder and its train shards."""
    processes = []

    def start_run(id, above="", line=""):
        milestone, data, out = MANIFEST.get(id), tmp_path / "shards", tmp_path / "run"
        data.mkdir()
        write_random_shards(data, (40_000, 40_000), 3_000)
        script, text = tmp_path / "train_gpt.py", milestone.script.read_text(encoding="utf-8")
        assert text.count(above) == 1 or not above
        script.write_text(text.replace(above, above + line) if above else text, encoding="utf-8")
        sizes = micro_overrides(milestone, data, out, total_batch_size=128, train_steps=100_000,
                                val_loss_every=0)
        settings = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")
                    if name not in ("log_dir", "train_files", "val_files")]
        processes.append(process := start(
            script, "--data", data, "--nproc", 2, "--out", out, *settings))
        for printed in iter(process.stdout.readline, ""):
            if printed.startswith("step:5/"):
                break
        return process, out, sorted(data.glob("*_train_*"))

    yield start_run
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def end_of(process, out):
    """The exit code and the error of a run that ends within seconds, and its ranks with it."""
    before = time.monotonic()
    _, errors = process.communicate(timeout=2 * SECONDS)
    assert time.monotonic() - before < SECONDS and no_process_of(out)
    error, log = errors.splitlines()
    assert log.startswith(f"the log so far: {out / 'log.txt'}")
    return process.returncode, error


@pytest.mark.slow
def test_a_rank_is_killed_while_gradients_are_under_way(run, tmp_path):
    now = tmp_path / "now"
    process, out, _ = run(
        "07", "            scatters.append((group, grads, scatter))\n",
        f"            rank == 1 and os.path.exists({str(now)!r}) and os.kill(os.getpid(), 9)\n")
    now.touch()
    assert end_of(process, out) == (
        128 + 9, "error: rank 1 was killed by SIGKILL (out of memory?)")


@pytest.mark.slow
def test_ids_beyond_the_vocabulary_in_the_next_shard(run):
    process, out, (_, second) = run("08")
    tokens = np.memmap(second, dtype="<u2", mode="r+", offset=1024)
    tokens[np.flatnonzero(tokens[:-1] == 1) + 1] = 64  # in each document the second
    code, error = end_of(process, out)
    assert code == 1 and error.endswith(f"{second.name} has ids >= vocab_size")


@pytest.mark.slow
def test_a_shard_that_loses_its_end(run):
    process, out, (_, second) = run("08")
    os.truncate(second, 20_000)
    code, error = end_of(process, out)
    assert code == 128 + signal.SIGBUS
    assert error.endswith("was killed by SIGBUS (was a shard cut short?)")


@pytest.mark.slow
def test_ctrl_c_while_a_thread_reads(run):
    process, out, _ = run("08")
    os.killpg(process.pid, signal.SIGINT)
    assert end_of(process, out) == (130, "error: interrupted")
