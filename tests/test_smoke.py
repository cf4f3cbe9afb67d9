"""Every snapshot trains on a CPU, keeps its log format and refuses bad input with one line.

Run: .venv/bin/python -m pytest tests/test_smoke.py
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

import shards as shard_files
from snapshots import (
    MICRO,
    WRITTEN,
    as_options,
    by_id,
    load_snapshot,
    micro_args,
    micro_overrides,
    run_ranks,
)

snapshots = pytest.mark.parametrize("milestone", WRITTEN, ids=by_id)
FLOAT = r"\d+\.\d+"
VAL_LINE = rf"step:\d+/20 val_loss:\d+\.\d{{4}} train_time:\d+ms step_avg:{FLOAT}ms"
TRAIN_LINE = rf"step:\d+/20 train_loss:\d+\.\d{{4}} train_time:\d+ms step_avg:{FLOAT}ms"
QUIET_LINE = rf"step:\d+/20 train_time:\d+ms step_avg:{FLOAT}ms"


def run_plainly(milestone, options, cwd):
    """Runs the script as a user does; returns the finished process."""
    return subprocess.run(
        [sys.executable, milestone.script, *options], cwd=cwd, capture_output=True, encoding="utf-8"
    )


@snapshots
def test_plain_run(milestone, shards, tmp_path):
    log_dir = tmp_path / "log"
    overrides = micro_overrides(
        milestone, shards, log_dir, val_loss_every=10, train_loss_every=5, save_checkpoint=True
    )
    ended = run_plainly(milestone, as_options(overrides), tmp_path)
    assert ended.returncode == 0, ended.stderr

    # The log: script, rule, environment, hyperparameters, rule, step lines.
    script, run = (log_dir / "log.txt").read_text(encoding="utf-8").split("=" * 100 + "\n", 1)
    assert script == milestone.script.read_text(encoding="utf-8")
    facts, steps = run.split("=" * 100 + "\n")
    environment, hyperparameters = facts.splitlines()
    environment = json.loads(environment.removeprefix("environment:"))
    assert environment["world_size"] == 1
    if not torch.cuda.is_available():
        assert (environment["device"], environment["bf16"]) == ("cpu", False)
    hyperparameters = json.loads(hyperparameters.removeprefix("hyperparameters:"))
    assert overrides.items() <= hyperparameters.items()
    lines = [line for line in steps.splitlines() if line.startswith("step:")]
    assert lines == [line for line in ended.stdout.splitlines() if line.startswith("step:")]
    kinds = [VAL_LINE, TRAIN_LINE, QUIET_LINE]
    counts = [sum(bool(re.fullmatch(kind, line)) for line in lines) for kind in kinds]
    assert counts == [3, 4, 16]  # validations at 0, 10, 20; train losses at 5, 10, 15, 20
    assert lines[0].startswith("step:0/20 val_loss:")
    assert lines[-1].startswith("step:20/20 val_loss:")

    # The checkpoint loads without unpickling code and holds the weights that were validated.
    checkpoint = torch.load(log_dir / "checkpoint.pt", weights_only=True)
    assert checkpoint["hyperparameters"] == hyperparameters and checkpoint["step"] == 20
    module = load_snapshot(milestone)
    args = module.Hyperparameters(**checkpoint["hyperparameters"])
    model = module.GPT(args)
    model.load_state_dict(checkpoint["model"])
    batches = module.token_batches(
        module.open_shards(args.val_files, args.val_tokens), args.val_tokens, args,
        rank=0, world_size=1, device="cpu",
    )
    count = args.val_tokens // (args.micro_batch_size * args.seq_len)
    window = [module.window_size(20, args)] if hasattr(module, "window_size") else []
    loss = np.mean([model.eval()(*next(batches), *window).item() for _ in range(count)])
    assert abs(loss - float(lines[-1].split("val_loss:")[1].split()[0])) < 1e-4

    # Nothing else was written, and the log is never overwritten.
    assert sorted(file.name for file in log_dir.iterdir()) == ["checkpoint.pt", "log.txt"]
    with pytest.raises(SystemExit, match="^error: no new log in .*File exists"):
        module.main(args)


@snapshots
def test_two_ranks_speak_once(milestone, shards, tmp_path):
    overrides = micro_overrides(milestone, shards, tmp_path / "log", val_loss_every=0)
    ended = run_ranks(2, milestone.script, *as_options(overrides))
    assert ended.returncode == 0, ended.stderr
    steps = [line for line in ended.stdout.splitlines() if line.startswith("step:")]
    assert len(steps) == 21  # one line a step and the final validation
    refused = run_ranks(2, milestone.script, *as_options(overrides | {"micro_batch_size": 32}))
    assert refused.returncode != 0
    assert refused.stderr.count("error: total_batch_size=1024 is not a multiple") == 1


@snapshots
def test_logits_without_targets(milestone):
    module = load_snapshot(milestone)
    args = module.Hyperparameters(**MICRO)
    model = module.GPT(args).eval()
    for param in model.parameters():  # at init some milestones' tokens do not see each other
        torch.nn.init.normal_(param, std=0.2)
    inputs = torch.randint(args.vocab_size, (2, 7))  # shorter than seq_len, as sampling wants
    logits = model(inputs)
    assert logits.shape == (2, 7, args.vocab_size) and logits.dtype == torch.float32
    targets = torch.randint(args.vocab_size, (2, 7))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(inputs, targets), loss)
    changed = inputs.clone()
    changed[:, 4] = (changed[:, 4] + 1) % args.vocab_size
    torch.testing.assert_close(model(changed)[:, :4], logits[:, :4])  # no look into the future
    assert not torch.allclose(model(changed)[:, 5:], logits[:, 5:])


@snapshots
def test_seed(milestone, shards, tmp_path):
    module = load_snapshot(milestone)
    runs = [
        module.main(micro_args(milestone, shards, tmp_path / str(i), train_steps=3, seed=seed))
        for i, seed in enumerate((0, 0, 1))
    ]
    assert runs[0] == runs[1] != runs[2]
    assert [step for step, _ in runs[0]] == [0, 1, 2, 3]
    assert all(math.isfinite(loss) for _, loss in runs[0])


@snapshots
def test_bf16_rounds_and_nothing_else_does(milestone):
    module = load_snapshot(milestone)
    models = [module.GPT(module.Hyperparameters(**MICRO | {"bf16": bf16}))
              for bf16 in (False, True)]
    for params in zip(*(model.parameters() for model in models), strict=True):
        torch.nn.init.normal_(params[0], std=0.2)
        params[1].data.copy_(params[0])
    inputs = torch.randint(64, (2, 32))
    exact, rounded = (model.train()(inputs, inputs) for model in models)
    assert 0 < abs(exact - rounded) < 0.05
    exact, rounded = (model.eval()(inputs, inputs) for model in models)
    validates_in_float32 = milestone.id in ("00", "01")
    assert torch.equal(exact, rounded) == validates_in_float32


# ---- bad input: one line, exit code not 0, nothing written ----


def truncate(folder):
    file = next(folder.glob("*_train_000002.bin"))
    os.truncate(file, file.stat().st_size - 2)


def spoil_magic(folder):
    file = next(folder.glob("*_train_000001.bin"))
    file.write_bytes(b"\0" * 4 + file.read_bytes()[4:])


def shorten_header(folder):
    next(folder.glob("*_val_*.bin")).write_bytes(b"\0" * 100)


def empty(folder):
    shutil.rmtree(folder)


def leave(folder):
    pass


BAD_INPUT = {
    "no shards": (empty, {}, "no shards match .*python data/cached_fineweb10B.py"),
    "wrong magic": (spoil_magic, {}, "train_000001.bin is not a token shard"),
    "short header": (shorten_header, {}, "val_000000.bin is not a token shard"),
    "truncated": (truncate, {}, r"train_000002.bin has 20022 bytes, not 1024 \+ 2 \* 9500 tokens"),
    "val_tokens": (leave, dict(val_tokens=4096), "4096 tokens and one more do not fit .* 3000"),
    "batch": (leave, dict(total_batch_size=1000), "total_batch_size=1000 is not a multiple"),
    "micro batch": (leave, dict(micro_batch_size=0), "micro_batch_size=0 is too small"),
    "no heads": (leave, dict(num_heads=0), "num_heads=0 is too small"),
    "no layers": (leave, dict(num_layers=0), "num_layers=0 is too small"),
    "negative steps": (leave, dict(train_steps=-1), "train_steps=-1 is too small"),
    "negative rate": (leave, dict(adam_eps=-1e-3), "adam_eps=-0.001 is too small"),
    "heads": (leave, dict(num_heads=3), "model_dim=32 is not a multiple of num_heads=3"),
}


@snapshots
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(milestone, case, shards, tmp_path):
    spoil, overrides, message = BAD_INPUT[case]
    folder = shutil.copytree(shards, tmp_path / "shards")
    spoil(folder)
    args = micro_args(milestone, folder, tmp_path / "log", **overrides)
    with pytest.raises(SystemExit) as refusal:
        load_snapshot(milestone).main(args)
    assert re.fullmatch(f"error: .*{message}.*", refusal.value.code)
    assert not (tmp_path / "log").exists()


@snapshots
def test_log_dir_below_a_file(milestone, shards, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(SystemExit, match="error: no new log in .*: Not a directory"):
        load_snapshot(milestone).main(micro_args(milestone, shards, tmp_path / "file" / "log"))


@snapshots
def test_read_only_output(milestone, shards, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):  # root, as in many containers, may write anywhere
        raise PermissionError(13, "Permission denied")

    module = load_snapshot(milestone)
    monkeypatch.setattr(module.os, "makedirs", refuse)
    with pytest.raises(SystemExit, match="error: no new log in .*: Permission denied"):
        module.main(micro_args(milestone, shards, tmp_path / "log"))


@snapshots
def test_world_size_that_does_not_divide(milestone, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match=r"error: total_batch_size=1024 .* ranks = 2 \* 32 \* 3"):
        load_snapshot(milestone).main(micro_args(milestone, shards, tmp_path / "log"))


@snapshots
def test_token_beyond_the_vocabulary(milestone, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "shards")
    file = next(folder.glob("*_train_000001.bin"))
    tokens = shard_files.read(file)
    tokens[2500] = 64  # in the third step
    shard_files.write(file, tokens)
    with pytest.raises(SystemExit, match="train_000001.bin holds token 64 between 2496 and 2560"):
        load_snapshot(milestone).main(micro_args(milestone, folder, tmp_path / "log"))
    assert "step:2/20 train_loss" in (tmp_path / "log" / "log.txt").read_text(encoding="utf-8")


@snapshots
@pytest.mark.parametrize("option, message", [
    ("--no_such_name=1", "--no_such_name=1 is not --name=value with a name of: train_files, "),
    ("--train_steps=abc", "--train_steps takes a value of type int, not 'abc'"),
    ("--train_steps=1.5", "--train_steps takes a value of type int, not '1.5'"),
    ("--adam_eps=tiny", "--adam_eps takes a value of type float, not 'tiny'"),
    ("--compile=yes", "--compile takes a value of type bool, not 'yes'"),
    ("--train_steps", "--train_steps is not --name=value"),
    ("train_steps=1", "train_steps=1 is not --name=value"),
])
def test_bad_option(milestone, option, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        load_snapshot(milestone).parse_args([option])
    printed = capsys.readouterr().err
    assert refusal.value.code == 2 and printed.count("\n") == 1
    assert printed.startswith(f"error: {message}")


@snapshots
def test_options_keep_the_type_of_the_default(milestone):
    module = load_snapshot(milestone)
    args = module.parse_args(
        ["--train_steps=7", "--adam_eps=1e-2", "--save_checkpoint=True", "--log_dir=a=b"]
    )
    expected = dict(train_steps=7, adam_eps=0.01, save_checkpoint=True, log_dir="a=b")
    assert asdict(args) == asdict(module.Hyperparameters()) | expected


@pytest.mark.skipif(os.name == "nt", reason="SIGINT is sent the POSIX way")
@snapshots
def test_ctrl_c_keeps_the_log(milestone, shards, tmp_path):
    log = tmp_path / "log" / "log.txt"
    overrides = micro_overrides(milestone, shards, log.parent, train_steps=10**6, val_loss_every=0)
    process = subprocess.Popen(
        [sys.executable, milestone.script, *as_options(overrides)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
    )
    deadline = time.monotonic() + 300
    while not (log.exists() and "step:3/" in log.read_text("utf-8")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[1].startswith("error: interrupted")
    assert process.returncode == 130
    assert log.read_text("utf-8").endswith("ms\n")
