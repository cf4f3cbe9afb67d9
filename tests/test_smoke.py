"""Every snapshot trains on two ranks, keeps its log format and saves what it validated; what it
refuses by itself, an assertion says.

Run: .venv/bin/python -m pytest tests/test_smoke.py
"""

import itertools
import json
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch

import shards as shard_files
from ranks import run_tool, start_ranks
from snapshots import (
    MANIFEST,
    MICRO,
    as_options,
    every_snapshot,
    known_values,
    load_snapshot,
    micro_args,
    micro_of,
    micro_overrides,
    micro_sizes,
    open_shard,
    run_script,
    token_batches,
    train,
    training_rows,
    tried_snapshots,
    where,
)
from speedrun.scripts.sizes import length_names

STEP = MICRO["total_batch_size"]  # tokens
FLOAT = r"\d+\.\d+"
VAL_LINE = rf"step:\d/4 val_loss:\d+\.\d{{4}} train_time:\d+ms step_avg:{FLOAT}ms"
TRAIN_LINE = rf"step:\d/4 train_loss:\d+\.\d{{4}} train_time:\d+ms step_avg:{FLOAT}ms"
QUIET_LINE = rf"step:\d/4 train_time:\d+ms step_avg:{FLOAT}ms"


def run(milestone_id, overrides):
    """What each rank runs."""
    module = load_snapshot(MANIFEST.get(milestone_id))
    module.main(module.Hyperparameters(**overrides))


@every_snapshot
def test_a_run(milestone, shards, tmp_path):
    log_dir = tmp_path / "log"
    schedule = dict.fromkeys({"scheduled_steps"} & micro_of(milestone).keys(), 3)
    overrides = micro_overrides(
        milestone, shards, log_dir, total_batch_size=256, val_tokens=128, train_steps=4,
        val_loss_every=2, train_loss_every=2, save_checkpoint=True, **schedule)
    (_, printed), silent = start_ranks(2, run, milestone.id, overrides)
    assert silent == (None, "")

    # The log: script, rule, environment, hyperparameters, rule, step lines.
    script, log = (log_dir / "log.txt").read_text(encoding="utf-8").split("=" * 100 + "\n", 1)
    assert script == milestone.script.read_text(encoding="utf-8")
    assert log == printed
    facts, steps = log.split("=" * 100 + "\n")
    environment, hyperparameters = facts.splitlines()
    environment = json.loads(environment.removeprefix("environment:"))
    assert (environment["device"], environment["world_size"]) == ("cpu", 2)
    hyperparameters = json.loads(hyperparameters.removeprefix("hyperparameters:"))
    assert overrides.items() <= hyperparameters.items()
    lines = [line for line in steps.splitlines() if line.startswith("step:")]
    notes = steps.splitlines()[: -len(lines)]  # before the steps
    expected = known_values(milestone.id).get("notes", [])
    assert all(map(str.startswith, notes, expected)) and len(notes) == len(expected)
    kinds = [VAL_LINE, TRAIN_LINE, QUIET_LINE]
    counts = [sum(bool(re.fullmatch(kind, line)) for line in lines) for kind in kinds]
    assert counts == [3, 2, 2] and len(lines) == 7  # validated at 0, 2, 4; train losses at 2, 4
    assert lines[0].startswith("step:0/4 val_loss:")
    assert lines[-1].startswith("step:4/4 val_loss:")

    # The checkpoint loads without unpickling code and holds the weights that were validated.
    checkpoint = torch.load(log_dir / "checkpoint.pt", weights_only=True)
    assert checkpoint["hyperparameters"] == hyperparameters and checkpoint["step"] == 4
    module = load_snapshot(milestone)
    args = module.Hyperparameters(**checkpoint["hyperparameters"])
    model = module.GPT(args)
    model.load_state_dict(checkpoint["model"])
    batches = token_batches(module, args.val_files, args.val_tokens, args, validating=True)
    length = getattr(args, length_names(vars(args))[1])
    count = args.val_tokens // (args.micro_batch_size * length)
    loss = np.mean([model(*next(batches)).item() for _ in range(count)])
    assert abs(loss - float(lines[-1].split("val_loss:")[1].split()[0])) < 1e-4
    assert sorted(file.name for file in log_dir.iterdir()) == ["checkpoint.pt", "log.txt"]


@where("parse_args", "init_distributed")
def test_by_hand(milestone, shards, tmp_path):
    overrides = micro_overrides(milestone, shards, tmp_path / "log", val_loss_every=0,
                                micro_batch_size=STEP // MICRO["seq_len"])
    ended = run_tool(milestone.script, *as_options(overrides))
    assert not ended.returncode, ended.stderr
    steps = [line for line in ended.stdout.splitlines() if line.startswith("step:")]
    assert len(steps) == 21  # one line a step and the final validation

    overrides |= dict(log_dir=str(tmp_path / "refused"), micro_batch_size=STEP)
    with pytest.raises(AssertionError, match=(
            f"{STEP} tokens do not divide into {STEP} x {MICRO['seq_len']} on each of 2 ranks")):
        start_ranks(2, run, milestone.id, overrides)


@pytest.mark.slow
@where("train")
def test_thirty_runs_with_four_ranks_end_thirty_times(milestone, shards, tmp_path):
    # Threads of a process group that outlive the interpreter can abort a rank at its very end.
    for number in range(30):
        overrides = micro_overrides(
            milestone, shards, tmp_path / str(number), train_steps=2, val_loss_every=0,
            total_batch_size=256, val_tokens=256, save_checkpoint=True)
        ended = run_script(milestone, overrides, world_size=4)
        assert ended.returncode == 0, f"run {number}: {ended.stderr[-2000:]}"


@where("Model")
def test_logits_without_targets(milestone):
    module = load_snapshot(milestone)
    args = micro_sizes(module)
    model = module.GPT(args)
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


@tried_snapshots
def test_seed(milestone, shards, tmp_path):
    module = load_snapshot(milestone)
    runs = [
        train(module, micro_args(milestone, shards, tmp_path / str(i), train_steps=3, seed=seed,
                                 total_batch_size=64, val_tokens=64))
        for i, seed in enumerate((0, 0, 1))
    ]
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0]) == 4 and np.isfinite(runs[0]).all()


# ---- what a script refuses by itself ----


def spoiled(shards, tmp_path, name, spoil):
    """A copy of the shards in which `spoil` has changed the tokens of one."""
    folder = shutil.copytree(shards, tmp_path / "shards")
    file = next(folder.glob(name))
    shard_files.write(file, spoil(shard_files.read(file)))
    return folder


@where("open_shard")
@pytest.mark.parametrize("content", [b"", b"\0" * 5000, "truncated"])
def test_a_file_that_is_no_whole_shard(milestone, content, shards, tmp_path):
    file = tmp_path / "x.bin"
    whole = next(shards.glob("*_val_*")).read_bytes()
    file.write_bytes(whole[:-2] if content == "truncated" else content)
    with pytest.raises((AssertionError, ValueError)) as refusal:
        open_shard(load_snapshot(milestone), file)
    assert content == b"" or "x.bin is not a whole token shard" in str(refusal.value)


@where("token_batches")
@pytest.mark.parametrize("overrides, words", [
    (dict(train_files="none/*.bin"),
     rf"no (file )?none/\*\.bin ((of >|has more than ){STEP} tokens|"
     rf"fills the {STEP // 32} rows of a step)"),
    (dict(val_tokens=STEP * 64, total_batch_size=STEP // 4),  # the warm-up's rows are there
     rf"no .*_val_\*\.bin ((of >|has more than ){STEP * 64} tokens|"
     rf"fills the {STEP * 64 // 16} rows of a step)"),
])
def test_no_shard_for_a_step(milestone, overrides, words, shards, tmp_path):
    args = micro_args(milestone, shards, tmp_path / "log", **overrides)
    with pytest.raises(AssertionError, match=words):
        load_snapshot(milestone).main(args)


@where("token_batches", "prefetched")
def test_a_token_beyond_the_vocabulary(milestone, shards, tmp_path):
    T = MICRO["seq_len"]

    def spoil(tokens):
        places = np.where(tokens == 1, 1, 2 + np.arange(len(tokens)))  # but for documents' starts
        rows = training_rows(milestone, places, itertools.repeat(T), 8, args)
        tokens[max(rows[20]) - 2] = 64  # in the third step of eight rows
        return tokens

    args = micro_args(milestone, shards, tmp_path / "log", total_batch_size=8 * T)
    folder = spoiled(shards, tmp_path, "*_train_000001.bin", spoil)
    args.train_files = f"{folder}/*_train_*.bin"
    with pytest.raises(AssertionError, match="train_000001.bin has ids >= vocab_size"):
        load_snapshot(milestone).main(args)
    assert "step:2/20 train_loss" in (tmp_path / "log" / "log.txt").read_text(encoding="utf-8")


@where("CausalSelfAttention")
def test_heads_of_a_broken_width(milestone):
    module = load_snapshot(milestone)
    with pytest.raises(AssertionError, match="model_dim is not a multiple of num_heads"):
        module.GPT(micro_sizes(module, num_heads=3))


@where("Log")
def test_a_log_is_never_overwritten(milestone, shards, tmp_path):
    (tmp_path / "log.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError):
        load_snapshot(milestone).main(micro_args(milestone, shards, tmp_path))
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "mine"


@where("Log")
def test_a_torch_for_gpus_trains_without_one(milestone, shards, tmp_path, monkeypatch):
    """PyTorch's default accelerator is what it was built for, also where there is none."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    load_snapshot(milestone).main(micro_args(milestone, shards, tmp_path, train_steps=1))
    assert "step:1/1 val_loss" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@where("parse_args")
@pytest.mark.parametrize("option, message", [
    ("--no_such_name=1", "unrecognized arguments: --no_such_name=1"),
    ("--train_step=1", "unrecognized arguments: --train_step=1"),
    ("--train_steps=1.5", "argument --train_steps: invalid int value: '1.5'"),
    ("--adam_eps=tiny", "argument --adam_eps: invalid float value: 'tiny'"),
    ("--save_checkpoint=yes", "argument --save_checkpoint: invalid boolean value: 'yes'"),
    ("train_steps=1", "unrecognized arguments: train_steps=1"),
])
def test_bad_option(milestone, option, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        load_snapshot(milestone).parse_args([option])
    assert refusal.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")


@where("parse_args")
def test_options_keep_the_type_of_the_default(milestone):
    module = load_snapshot(milestone)
    args = module.parse_args(
        ["--train_steps=7", "--adam_eps=1e-2", "--save_checkpoint=True", "--log_dir=a=b"]
    )
    expected = dict(train_steps=7, adam_eps=0.01, save_checkpoint=True, log_dir="a=b")
    assert asdict(args) == asdict(module.Hyperparameters()) | expected
