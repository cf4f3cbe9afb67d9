"""The sweep over learning rates. Run: .venv/bin/python -m pytest tests/test_sweep.py"""

import argparse
import subprocess
import sys

import pytest

import sweep
from speedrun.launch import RunError
from speedrun.manifest import REPOSITORY, load_manifest

COMMAND = [sys.executable, str(REPOSITORY / "tools" / "sweep.py")]


def test_learning_rates_are_those_of_the_tiny_scale():
    tiny = load_manifest().get("04").tiny
    rates = sweep.learning_rates("04", None)
    assert rates.keys() == {"muon_lr", "embed_lr", "head_lr", "scalar_lr"}
    assert rates["muon_lr"] == tiny["muon_lr"]
    assert sweep.learning_rates("04", "embed_lr") == {"embed_lr": rates["embed_lr"]}
    with pytest.raises(RunError, match="has the learning rates muon_lr, "):
        sweep.learning_rates("04", "adam_lr")


def test_factors():
    assert sweep.factors("0.5,2") == [0.5, 2.0]
    for text in ("0,1", "-1", "x", "", "inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            sweep.factors(text)


def test_a_better_rate_is_named(tmp_path):
    # Of two steps, longer ones learn more.
    def run(name, factor):
        return subprocess.run(
            [*COMMAND, "01", "--only", "adam_lr", "--steps", "2", "--factors", factor,
             "--set", "val_tokens=4096", "--out", str(tmp_path / name)],
            capture_output=True, encoding="utf-8",
        )

    worse = run("worse", "0.01")
    assert worse.returncode == 0, worse.stderr
    assert "no change is better than the manifest" in worse.stdout
    assert "01_muon adam_lr=3.6e-05" in worse.stdout
    better = run("better", "2")
    assert better.returncode == 1
    assert "better than the manifest: 01_muon adam_lr=0.0072" in better.stdout


@pytest.mark.parametrize("arguments, code", [
    (["0O"], 1), (["01", "--only", "no_lr"], 1), (["01", "--factors", "0"], 2), ([], 2),
])
def test_wrong_input_is_one_line(arguments, code):
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, encoding="utf-8")
    assert ended.returncode == code
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
