"""The sweep over learning rates. Run: .venv/bin/python -m pytest tests/test_sweep.py"""

import argparse
import subprocess
import sys

import pytest

import sweep
from speedrun.base.errors import UserError
from speedrun.compare.results import Comparison, Entry, Run
from speedrun.history.manifest import REPOSITORY, load_manifest

COMMAND = [sys.executable, str(REPOSITORY / "tools" / "sweep.py")]


def test_learning_rates_are_those_of_the_tiny_scale():
    tiny = load_manifest().get("04").tiny  # its own, which replace those of the ancestors
    rates = sweep.learning_rates("04", None)
    assert rates.keys() == {"muon_lr", "embed_lr", "head_lr", "scalar_lr"}
    assert rates["muon_lr"] == tiny["muon_lr"]
    assert sweep.learning_rates("04", "embed_lr") == {"embed_lr": rates["embed_lr"]}
    with pytest.raises(UserError, match="has the learning rates muon_lr, "):
        sweep.learning_rates("04", "adam_lr")
    with pytest.raises(UserError, match="^e0a has no learning rate to sweep: it does not train$"):
        sweep.learning_rates("e0a", None)


def test_factors():
    assert sweep.factors("0.5,2") == [0.5, 2.0] == sweep.factors("0.5,2,2.0")
    for text in ("0,1", "-1", "x", "", "inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            sweep.factors(text)


def test_any_hyperparameter_can_be_tried(monkeypatch):
    assert sweep.values_of("muon_lr=0.1,1,0.1") == ("muon_lr", ["0.1", "1"])
    for text in ("muon_lr", "muon_lr=", "muon_lr=1,", "=1", "a-b=1"):
        with pytest.raises(argparse.ArgumentTypeError):
            sweep.values_of(text)
    tries = ["--try", "adam_beta1=0.8,0.95", "--try", "weight_decay=0"]
    code, compared = sweep_with(monkeypatch, [2.0, 2.1, 1.9, 2.2], tries)
    assert code == 1
    assert compared == ["01", "01:adam_beta1=0.8", "01:adam_beta1=0.95", "01:weight_decay=0"]


def sweep_with(monkeypatch, losses, arguments=("--factors", "0.5,4")):
    """The exit code of a sweep whose runs end at these losses (None: failed), the manifest's
    first, and the targets that were compared."""
    compared = []

    def collect(targets, *args, **options):
        compared.extend(targets)
        entries = []
        for target, loss in zip(targets, losses, strict=True):
            curve = [(0, 5.0), (9, loss)]
            runs = [] if loss is None else [Run(log="", steps=9, val_curve=curve, seconds=[])]
            entries.append(Entry(target, runs=runs))
        return Comparison(entries, None, ""), None

    monkeypatch.setattr(sweep, "collect", collect)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "01", *arguments])
    return sweep.main(), compared


def test_verdict(monkeypatch, capsys):
    code, compared = sweep_with(monkeypatch, [2.0, 2.1, 2.2, 2.0, 2.3])
    assert code == 0 and "no change is better" in capsys.readouterr().out
    assert compared == ["01", "01:muon_lr=0.001", "01:muon_lr=0.008", "01:embed_lr=0.0018",
                        "01:embed_lr=0.0144"]
    code, _ = sweep_with(monkeypatch, [2.0, 2.1, 1.9, 1.95, None])
    assert code == 1
    assert "better than the tiny scale's values: 01:muon_lr=0.008" in capsys.readouterr().out
    code, _ = sweep_with(monkeypatch, [2.0, float("nan"), 1.9, float("inf"), 1.8])
    assert code == 1 and "scale's values: 01:embed_lr" in capsys.readouterr().out
    for without in (None, float("nan")):  # nothing can be said of the others
        with pytest.raises(UserError, match="own values has no loss to compare"):
            sweep_with(monkeypatch, [without, 1.9, 1.9, 1.9, 1.9])


@pytest.mark.slow
def test_it_trains(tmp_path):
    ended = subprocess.run(
        [*COMMAND, "01", "--only", "embed_lr", "--steps", "2", "--factors", "2",
         "--set", "val_tokens=4096", "--set", "num_layers=1", "--out", str(tmp_path)],
        capture_output=True, encoding="utf-8",
    )
    assert ended.returncode == 1, ended.stderr  # of two steps, longer ones learn more
    assert "better than the tiny scale's values: 01_muon embed_lr=0.0072" in ended.stdout


@pytest.mark.parametrize("arguments, code", [
    (["01", "--only", "no_lr"], 1), (["01", "--factors", "0"], 2),
    (["01", "--set", "muon_lr=1"], 2), (["01", "--try", "muon_lr"], 2),
    (["01", "--try", "muon_lr=1", "--only", "muon_lr"], 2),
])
def test_wrong_input_is_one_line(arguments, code):
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, encoding="utf-8")
    assert ended.returncode == code
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
