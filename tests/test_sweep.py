"""The sweep over learning rates. Run: .venv/bin/python -m pytest tests/test_sweep.py"""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import sweep
from speedrun.base.errors import Stopped, UserError
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


def sweep_with(monkeypatch, losses, arguments=("--factors", "0.5,4"), given=None, stopped=None):
    """The exit code of a sweep whose runs end at these losses (None: failed), the manifest's
    first, and the targets that were compared; given: gets how they were to be run."""
    compared = []

    def collect(targets, *args, **options):
        compared.extend(targets)
        if given is not None:
            given.append((args, options))
        entries = []
        for target, loss in zip(targets, losses, strict=True):
            curve = [(0, 5.0), (9, loss)]
            runs = [] if loss is None else [Run(log="", steps=9, val_curve=curve, seconds=[])]
            entries.append(Entry(target, runs=runs))
        return Comparison(entries, None, ""), stopped

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


def test_options_reach_the_runs(monkeypatch):
    given = []
    options = ["--only", "muon_lr", "--steps", "7", "--set", "seq_len=64", "--seed", "5",
               "--from", "run", "--out", "folder"]
    _, compared = sweep_with(monkeypatch, [2.0, 2.1, 2.2], options, given)
    assert compared == ["01", "01:muon_lr=0.001", "01:muon_lr=0.004"]
    sweep_with(monkeypatch, [2.0, 2.1, 2.2], ["--only", "muon_lr"], given)
    assert given == [
        (([5], Path("folder"), sys.stdout),
         dict(scale="tiny", steps=7, settings=["seq_len=64"], start=Path("run"))),
        (([0], "sweep", sys.stdout), dict(scale="tiny", steps=None, settings=[], start=None))]
    with pytest.raises(UserError, match="^interrupted$") as error:
        sweep_with(monkeypatch, [2.0, 1.0], ["--try", "a=1"], stopped=Stopped("interrupted", 130))
    assert error.value.status == 130


@pytest.mark.slow
def test_it_trains(tmp_path):
    ended = subprocess.run(
        [*COMMAND, "01", "--only", "embed_lr", "--steps", "2", "--factors", "2",
         "--set", "val_tokens=4096", "--set", "num_layers=1", "--out", str(tmp_path)],
        capture_output=True, encoding="utf-8",
    )
    assert ended.returncode == 1, ended.stderr  # of two steps, longer ones learn more
    assert "better than the tiny scale's values: 01_muon embed_lr=0.0072" in ended.stdout


@pytest.mark.parametrize("arguments, code, message", [
    (["--only", "no_lr"], 1, "--only no_lr: 01 has the learning rates muon_lr, embed_lr"),
    (["--factors", "0"], 2, "argument --factors: 0: not numbers above 0, separated by commas;"
     " see --help"),
    (["--set", "muon_lr=1"], 2, "--set muon_lr=1: this sweep tries other values of it; choose"
     " another rate with --only"),
    (["--set=--embed_lr=1"], 2, "--set --embed_lr=1: this sweep tries other values of it; choose"
     " another rate with --only"),
    (["--try", "muon_lr"], 2, "argument --try: muon_lr: not a name and its values, as in"
     " muon_lr=0.1,1; see --help"),
    *((["--try", "muon_lr=1", *more], 2, "--try names all values itself; leave out --only and"
       " --factors") for more in (["--only", "muon_lr"], ["--factors", "2"])),
])
def test_wrong_input_is_one_line(arguments, code, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep.py", "01", *arguments])
    monkeypatch.setattr(sweep, "collect", None)  # nothing is trained
    with pytest.raises((UserError, SystemExit)) as ended:
        sweep.main()
    said = capsys.readouterr().err or f"error: {ended.value}\n"
    assert said == f"error: {message}\n"
    error = ended.value
    assert code == (error.status if ended.type is UserError else error.code)
