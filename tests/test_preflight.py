"""What run_milestone.py refuses before it starts anything: one line, an exit code, nothing written.

Run: .venv/bin/python -m pytest tests/test_preflight.py
"""

import contextlib
import glob
import os
import shutil
import struct
import sys

import pytest

import run_milestone
import shards as shard_files
from speedrun.base.errors import UserError
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.run import execute
from speedrun.run.data import has_shards
from speedrun.run.plan import make_plan
from speedrun.run.preflight import NotHere, check_gpus, check_shards, check_values
from speedrun.run.torchrun import Nodes, check_nodes
from speedrun.scripts.find import find_script
from speedrun.scripts.sizes import micro_batches

posix = pytest.mark.skipif(os.name == "nt", reason="has no named pipes in folders")

# A script with every hyperparameter for which there is a rule, and a few for which there is none.
SCRIPT = """
from dataclasses import dataclass
from sys import argv
import torch

@dataclass
class Hyperparameters:
    train_files: str = ""
    val_files: str = ""
    prefix_file: str = "none"
    val_tokens: int = 1024
    total_batch_size: int = 1024
    seq_len: int = 32
    micro_batch_size: int = 2
    vocab_size: int = 64
    bos_id: int = 1
    num_layers: int = 2
    value_embed_pattern: str = "0."
    window_pattern: str = "LSSLSL"
    num_heads: int = 2
    model_dim: int = 32
    adam_lr: float = 1e-3
    train_steps: int = 20
    warmup_steps: int = 2
    cooldown_steps: int = 5
    cooldown_frac: float = 0.4
    final_lr_multiplier: float = 0.1
    adam_beta1: float = 0.9
    muon_momentum: float = 0.95
    momentum_warmup_steps: int = 5
    window_start: int = 4
    window_end: int = 24
    val_loss_every: int = 1
    seed: int = 0
    kernel_warmup_steps: int = 1
    compile: bool = torch.cuda.is_available()
    use_flex_attention: bool = torch.cuda.is_available()
    offset: int = -1
    ratios: tuple = (1, 2)
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A folder with shards of 7,000, 9,500 and, for validation, 3,000 tokens below 64."""
    folder = tmp_path_factory.mktemp("shards")
    for name, length in (("train_000001", 7000), ("train_000002", 9500), ("val_000000", 3000)):
        shard_files.write(folder / f"x_{name}.bin", [63] * length)
    return folder


class Launched(Exception):
    """The launcher was about to start the ranks."""


@pytest.fixture
def start(monkeypatch, tmp_path, shards):
    """Calls run_milestone.py on SCRIPT with options and settings; Launched, if nothing is wrong.
    Nothing may have been written then."""

    def launched(*_):
        raise Launched

    script = tmp_path / "script" / "train_gpt.py"
    script.parent.mkdir()
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(execute, "run_ranks", launched)
    monkeypatch.setattr("speedrun.run.plan.visible_gpus", list)

    def call(*settings, data=shards, options=()):
        command = [script, "--scale", "record", "--data", data, "--out", tmp_path / "out",
                   *options, *(f"--set={setting}" for setting in settings)]
        monkeypatch.setattr(sys, "argv", ["run_milestone.py", *map(str, command)])
        try:
            run_milestone.main()
        finally:
            assert not (tmp_path / "out").exists()

    return call


def refused(start, message, *settings, status=1, **options):
    with pytest.raises(UserError, match=message) as refusal:
        start(*settings, **options)
    assert refusal.value.status == status and "\n" not in str(refusal.value)


@pytest.mark.parametrize("settings", [
    [], ["ratios=(3,)", "offset=-1"], ["adam_lr=0", "val_loss_every=0", "seed=0", "bos_id=0"],
    ["kernel_warmup_steps=0", "warmup_steps=1", "cooldown_steps=1", "momentum_warmup_steps=1"],
    ["bos_id=63", "window_start=24", "num_heads=32", "compile=True", "use_flex_attention=False"],
    ["seq_len=16384", "total_batch_size=16384", "val_tokens=16384", "micro_batch_size=1"],
])
def test_what_fits_is_launched(start, settings, tmp_path):
    for split in ("train", "val"):
        shard_files.write(tmp_path / f"long_{split}_0.bin", [63] * 16_385)
    with pytest.raises(Launched):
        start(*settings, data=tmp_path)


@pytest.mark.parametrize("setting, message", [
    ("no_such_name=1", "has no hyperparameter no_such_name"),
    ("tran_steps=1", "did you mean train_steps?"),
    ("train_steps=abc", "train_steps takes a value of type int, not 'abc'"),
    ("train_steps=1.5", "train_steps takes a value of type int, not '1.5'"),
    ("adam_lr=tiny", "adam_lr takes a value of type float, not 'tiny'"),
    ("compile=yes", "compile takes True or False, not 'yes'"),
    ("seed", "write it as --set name=value"), ("=1", "write it as --set name=value"),
    ("log_dir=x", "the log's folder is chosen with --out"),
])
def test_names_and_types(start, setting, message):
    refused(start, message, setting, status=2)


@pytest.mark.parametrize("setting", [
    "num_heads=0", "num_layers=0", "micro_batch_size=0", "seq_len=0", "vocab_size=0",
    "total_batch_size=0", "val_tokens=-1024", "window_start=0", "train_steps=0", "train_steps=-1",
    "warmup_steps=0", "cooldown_steps=0", "momentum_warmup_steps=0", "kernel_warmup_steps=-1",
    "final_lr_multiplier=-0.1", "adam_beta1=-0.1",
    "val_loss_every=-1", "bos_id=-1", "seed=-1", "offset=-2", "adam_lr=-0.1", "adam_lr=nan",
    "adam_lr=inf",
])
def test_ranges(start, setting):
    refused(start, f"^{setting} is out of range; give a number from", setting)


@pytest.mark.parametrize("setting, words", [
    ("cooldown_frac=0", "a number above 0, at most 1"), ("cooldown_frac=1.5", "above 0, at most 1"),
    ("cooldown_frac=2", "a number above 0, at most 1"), ("final_lr_multiplier=1.1", "at most 1"),
    ("adam_beta1=1", "a number from 0 on, below 1"), ("muon_momentum=1.0", "below 1"),
])
def test_shares_and_decays_have_an_upper_end(start, setting, words):
    """A schedule divides by cooldown_frac, Adam by one minus a power of its betas."""
    refused(start, rf"^{setting}(\.0)? is out of range; give .*{words}$", setting)


def test_a_validation_on_training_text_is_refused(start, shards, tmp_path):
    copy = tmp_path / "copy.bin"
    copy.symlink_to(shards / "x_train_000001.bin")
    for train, val in ((copy.resolve(), copy), (copy, copy.resolve())):
        refused(start, "x_train_000001.bin is in both train_files and val_files; validate on text",
                f"train_files={train}", f"val_files={val}")
    refused(start, "^no shards match val_files=; get some", "val_files=")
    link = shards / "scratch"
    link.symlink_to("/not/mounted")
    refused(start, "/scratch is a broken link to /not/mounted; make that", data=link / "fineweb")
    link.unlink()


def test_a_script_that_ignores_its_options_is_refused(start, tmp_path):
    script = tmp_path / "script" / "train_gpt.py"
    without = SCRIPT.replace("from sys import argv\n", "")
    for line, reads in (("", False), ("import sys\nprint(sys.argv)\n", True),
                        ("from argparse import ArgumentParser\n", True),
                        ("import getopt\n", True), ("import optparse\n", True),
                        ("from my_options import read\n", True), ("from . import own\n", True),
                        ("import torch, numpy, triton, tiktoken, flash_attn, os\n", False)):
        script.write_text(without + line, encoding="utf-8")
        if reads:
            with pytest.raises(Launched):
                start()
        else:
            refused(start, "train_gpt.py does not read its command line, on which hyperparam")


@pytest.mark.parametrize("settings, message", [
    (["total_batch_size=1000"], r"^total_batch_size=1000 is not a multiple of .* = 2 \* 32 \* 1;"),
    (["val_tokens=1000"], r"^val_tokens=1000 is not a multiple of .* = 2 \* 32 \* 1;"),
    (["micro_batch_size=3"], r"^total_batch_size=1024 is not a multiple of .* = 3 \* 32 \* 1;"),
    (["num_heads=3"], "^model_dim=32 is not a multiple of num_heads=3;"),
    (["bos_id=64"], "^bos_id=64 is not below vocab_size=64;"),
    (["window_pattern=L"], "^window_pattern=L has fewer letters than num_layers=2; change one"),
    (["num_layers=4"], "^value_embed_pattern=0. does not have a letter for each of num_layers=4;"),
    (["window_pattern=LXSQLS"], "^window_pattern=LXSQLS holds XQ; its letters are LS$"),
    (["value_embed_pattern=0a"], "^value_embed_pattern=0a holds a; its letters are 0123456789.$"),
    (["total_batch_size=1008"], "ranks = 2 .*; each batch has to be a multiple of its sequences'"),
    (["seed=9223372036854775808"], "^seed=.* is out of range; give a number below 2\\*\\*63$"),
    (["window_end=3"], "^window_start=4 is above window_end=3"),
    (["use_flex_attention=True"], "^use_flex_attention=True: .* without CUDA"),
    (["seq_len=32768", "micro_batch_size=1", "total_batch_size=32768", "val_tokens=32768"],
     "^seq_len=32768 is too long for a dense mask"),
])
def test_what_does_not_fit_together(start, settings, message):
    refused(start, message, *settings)


def test_ranks(start):
    refused(start, r"^total_batch_size=1024 is not a multiple of .* = 2 \* 32 \* 3; the number"
            " of ranks may be 1, 2, 4, 8, 16, 32$", options=["--nproc", "3"])
    refused(start, r" = 3 \* 32 \* 4; micro_batch_size may be 1, 2, 4, 8$", "micro_batch_size=3",
            options=["--nproc", "4"])


def test_huge_sizes_are_not_tried_one_by_one():
    huge = dict(total_batch_size=2**60, val_tokens=2**60, seq_len=1, micro_batch_size=1)
    assert max(micro_batches(huge, 1)) == 2**20


def test_a_layer_needs_a_table_where_the_script_has_no_dot():
    for default in ("1.", None):  # None: not known
        check_values(dict(value_embed_pattern="0."), dict(value_embed_pattern=default), 1, False)
    with pytest.raises(UserError, match="^value_embed_pattern=0. holds .; its letters are 0123"):
        check_values(dict(value_embed_pattern="0."), dict(value_embed_pattern="10"), 1, False)


CPU, GPU = dict(on_gpu=False), dict(on_gpu=True)
STAGES = dict(window_start=128, window_growth=640, window_stages=3)  # 128, 768, 1408
LENGTHS = dict(train_seq_len=32, val_seq_len=64, micro_batch_size=2, total_batch_size=1152,
               val_tokens=1024)
DENSE, FP8 = "^seq_len=65536 is too long for a dense mask", "is not a multiple of 16, .*use_fp8"


@pytest.mark.parametrize("machine, values, message", [
    # a window is wider for the last validation than for the last step where long ones have an end
    (GPU, STAGES | dict(window_end=1408), None),
    (GPU, STAGES | dict(window_end=1407), "^window_end=1407 is too small, as the last of "
     "3 stages trains with a window of 1408; raise it"),
    (GPU, STAGES | dict(window_end=1409, long_window_end=1), None),
    (GPU, STAGES | dict(window_end=1408, long_window_end=1), "^window_end=1408 is too small"),
    # long sequences need attention without a dense mask; None: what the machine can do
    (GPU, dict(seq_len=65_536, use_flex_attention=None, compile=None), None),
    (GPU, dict(seq_len=65_536, use_flex_attention=True), None),
    (GPU, dict(seq_len=65_536, use_flex_attention=False), DENSE),
    (GPU, dict(seq_len=65_536, use_flex_attention=True, compile=False), DENSE),
    (GPU, dict(seq_len=65_536, attention_kernel=None, compile=False), None),
    (GPU, dict(seq_len=65_536, attention_kernel="FA3"), None),
    (GPU, dict(seq_len=65_536, attention_kernel="dense"), DENSE),
    (CPU, dict(seq_len=65_536, attention_kernel=None), DENSE),
    (CPU, dict(seq_len=64, attention_kernel=None), None),
    (CPU, dict(seq_len=64, attention_kernel="dense"), None),
    (CPU, dict(seq_len=64, attention_kernel="FA2"), "^attention_kernel=FA2: without CUDA"),
    (GPU, dict(seq_len=64, attention_kernel=None, bf16=None), None),
    (GPU, dict(seq_len=64, attention_kernel="dense", bf16=False), None),
    (GPU, dict(seq_len=64, attention_kernel=None, bf16=False), "^bf16=False does not fit .*=FA"),
    (GPU, dict(seq_len=64, attention_kernel="FA3", bf16=False), "^bf16=False does not fit .*=FA3"),
    # each length of sequences is checked
    (CPU, LENGTHS, None),
    (CPU, LENGTHS | dict(val_tokens=1088),
     r"^val_tokens=1088 is .* \* val_seq_len \* ranks = 2 \* 64 \* 2;"),
    (CPU, LENGTHS | dict(total_batch_size=1056),
     r"^total_batch_size=1056 is .* \* train_seq_len \* ranks = 2 \* 32 \* 2;"),
    (CPU, LENGTHS | dict(val_seq_len=32_768, val_tokens=131_072, use_flex_attention=False),
     "^val_seq_len=32768 is too long for a dense mask"),
    # a GPU's products in FP8 need multiples of 16
    (GPU, dict(vocab_size=256, model_dim=48, use_fp8=True), None),
    (GPU, dict(vocab_size=257, model_dim=48, use_fp8=None), FP8),
    (GPU, dict(vocab_size=256, model_dim=40, use_fp8=True), FP8),
    (GPU, dict(vocab_size=257, use_fp8=False), None), (GPU, dict(vocab_size=257), None),
    (CPU, dict(vocab_size=257, use_fp8=None), None),
    (CPU, dict(backout_layer=6, num_layers=6), "^backout_layer=6 is not below num_layers=6"),
    (CPU, dict(cached_layer=6, num_layers=6), "^cached_layer=6 is not below num_layers=6"),
])
def test_what_depends_on_the_machine_or_the_script(machine, values, message):
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_values(values, {}, 2, **machine)


STAGED = dict(window_start=128, window_growth=640, window_end=1408)  # without window_stages: one
THREE_STAGES = dict(second_stage_peak=1.0, third_stage_peak=1.0, attention_kernel="dense")


@pytest.mark.parametrize("fits, name, beyond", [
    # (values at the border, the name of the one that one step further is refused, its value there)
    (dict(seed=2**63 - 1), "seed", 2**63),
    (dict(seed=0), "seed", -1),
    (dict(train_steps=1), "train_steps", 0),
    (dict(adam_lr=0.0), "adam_lr", -5e-324),
    (dict(bos_id=63, vocab_size=64), "bos_id", 64),
    (dict(window_start=24, window_end=24), "window_start", 25),
    (dict(num_heads=4, model_dim=32), "num_heads", 5),
    (dict(window_pattern="LS", num_layers=2), "num_layers", 3),
    (dict(value_embed_pattern="0.", num_layers=2), "num_layers", 1),
    (STAGED | dict(window_end=128), "window_end", 127),
    (STAGED | dict(window_end=1408, window_stages=3), "window_end", 1407),
    (STAGED | dict(window_end=129, long_window_end=1), "window_end", 128),
    (dict(seq_len=16_384, use_flex_attention=False), "seq_len", 16_385),
    (dict(val_seq_len=16_384, attention_kernel="dense"), "val_seq_len", 16_385),
    (THREE_STAGES | dict(train_seq_len=5461, val_seq_len=16_384), "train_seq_len", 5462),
    (THREE_STAGES | dict(train_seq_len=5461, val_seq_len=16_384), "val_seq_len", 16_385),
    (dict(vocab_size=256, use_fp8=True), "vocab_size", 257),
    (dict(total_batch_size=128, micro_batch_size=2, seq_len=32), "total_batch_size", 127),
])
def test_borders(fits, name, beyond):
    check_values(fits, {}, 2, on_gpu=True)
    with pytest.raises(UserError, match=f"{name}="):
        check_values(fits | {name: beyond}, {}, 2, on_gpu=True)


def test_the_borders_of_gpus_and_addresses():
    check_gpus(8, ["H100"] * 8, needed=True)
    with pytest.raises(NotHere, match=r"^--nproc 9: this machine shows 8 GPU"):
        check_gpus(9, ["H100"] * 8, needed=True)
    check_gpus(9, [], needed=False)
    with pytest.raises(NotHere, match="^nvidia-smi shows no GPU"):
        check_gpus(None, [], needed=True)
    for rank, port in ((0, 1), (1, 65_535)):
        check_nodes(Nodes(2, rank, f"host:{port}"))


@pytest.mark.parametrize("name, tokens", [("total_batch_size", 9500), ("val_tokens", 3000)])
def test_a_batch_and_the_last_target_have_to_fit_into_a_shard(shards, name, tokens):
    files = dict(train_files=f"{shards}/*_train_*.bin", val_files=f"{shards}/*_val_*.bin")
    fits = dict(total_batch_size=1, val_tokens=1, train_steps=1) | files
    check_shards(fits | {name: tokens - 1})
    with pytest.raises(UserError, match=f"^{name}={tokens} and one token more do not fit"):
        check_shards(fits | {name: tokens})


def test_a_token_of_paired_heads_has_two_rows_of_a_dense_mask():
    dense = dict(val_seq_len=8193, attention_kernel="dense")
    check_values(dense, dict(window_pattern="SL"), 1, on_gpu=True)
    with pytest.raises(UserError, match="^val_seq_len=8193 is too .*; lower it to 8192 or less$"):
        check_values(dense, dict(window_pattern="PL"), 1, on_gpu=True)


# ---- shards ----


def remove(folder):
    next(folder.glob("*_val_*.bin")).unlink()


def change(name, new):
    """Replaces the bytes of a shard by new(bytes)."""
    def spoil(folder):
        file = folder / f"x_{name}.bin"
        file.write_bytes(new(file.read_bytes()))

    return spoil


def make_other(kind):
    """Puts something else, made by kind(path), in the place of the validation shard."""
    def spoil(folder):
        remove(folder)
        kind(folder / "x_val_000000.bin")

    return spoil


def make_file(folder):
    shutil.rmtree(folder)
    folder.touch()


spoil_magic = change("train_000001", lambda data: b"\0" * 4 + data[4:])


@pytest.mark.parametrize("spoil, message", [
    (remove, r"^no shards match val_files=.*\*_val_\*.bin; .*cached_fineweb10B.py 1 --out "),
    (shutil.rmtree, "^no shards match train_files=.*cached_fineweb10B.py 1 --out .*/shards$"),
    (make_file, "^train_files=.*: .*/shards cannot be read as a folder: Not a directory; change"),
    (make_other(os.mkdir), "x_val_000000.bin is not a regular file, so it is not a token shard"),
    pytest.param(make_other(getattr(os, "mkfifo", None)), "x_val_000000.bin is not a regular file",
                 marks=posix),
    (change("train_000002", lambda data: data[:-2]),
     r"train_000002.bin has 20022 bytes, not 1024 \+ 2 \* 9500 tokens; make or fetch"),
    (change("train_000002", lambda data: data + b"\0\0"), "train_000002.bin has 20026 bytes, not"),
    (spoil_magic, "train_000001.bin is not a token shard .* make or fetch it again"),
    (change("val_000000", lambda data: data[:100]), "val_000000.bin is not a token shard"),
])
def test_shards(start, spoil, message, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "shards")
    spoil(folder)
    refused(start, message, data=folder)
    if spoil not in (remove, shutil.rmtree):
        refused(start, message, data=folder, options=["--dry-run"])


def test_a_dry_run_may_be_for_another_machine(start, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    sizes = ["seq_len=32768", "micro_batch_size=1", "total_batch_size=262144", "val_tokens=262144"]
    start(*sizes, data=tmp_path / "empty", options=["--dry-run", "--nproc", "8"])
    printed = capsys.readouterr()
    assert "--nproc-per-node=8" in printed.out and printed.out.count("\n") == 1
    assert "not on this machine: nvidia-smi shows no GPU" in printed.err
    assert "not on this machine: no shards match train_files=" in printed.err
    for on_terminal, letter in ((False, "\x1b"), (True, "\N{SYMBOL FOR ESCAPE}")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda on_terminal=on_terminal: on_terminal)
        start("train_files=\x1b", options=["--dry-run"])
        assert f"'--train_files={letter}'" in capsys.readouterr().out


def test_a_damaged_embedded_corpus(start, shards, tmp_path, monkeypatch):
    folder = shutil.copytree(shards, tmp_path / "shards")
    monkeypatch.setattr("speedrun.run.data.BUILTIN", folder)
    spoil_magic(folder)
    refused(start, "train_000001.bin is not a token shard .*; make it again: python data/builtin_",
            data=folder)


def test_a_folder_whose_name_looks_like_a_pattern(start, shards, tmp_path):
    named = shutil.copytree(shards, tmp_path / "d[1]")
    other = shutil.copytree(shards, tmp_path / "d1")
    remove(other)
    assert has_shards(named) and not has_shards(other)
    with pytest.raises(Launched):
        start(data=named)
    remove(named)
    refused(start, r"get some: python .* --out '.*/d\[1\]'$", data=named)


def test_as_many_shards_are_named_as_the_run_reads(tmp_path):
    for milestone, shards in (("00b", 51), ("03e", 18), ("05l", 7), ("05q", 8), ("09", 8),
                              ("10d", 7), ("11c", 6)):
        found = load_manifest().get(milestone)
        values = find_script(milestone).hyperparameters | {"train_files": f"{tmp_path}/*.bin"}
        with pytest.raises(UserError, match=f"cached_fineweb10B.py {shards} --out "):
            check_shards(values, found.read_ratio)


def test_the_largest_step_has_to_fit_into_a_shard(tmp_path):
    shard_files.write(tmp_path / "x_train_0.bin", [1] * 3000)  # two steps of the first stage
    values = find_script("10d").hyperparameters | {"total_batch_size": 1024, "val_files": ""}
    with pytest.raises(UserError, match="1024, which grows to 3072, and one token more do not fit"):
        check_shards(values | {"train_files": f"{tmp_path}/*.bin"})


@pytest.mark.parametrize("name, steps", [("01", 17), ("10d", 27)])  # 10d: steps grow
def test_shards_that_begin_again_are_told(tmp_path, name, steps):
    for split in ("train", "val"):
        shard_files.write(tmp_path / f"x_{split}_0.bin", [1] * 70_000)
    plans = [make_plan(name, data=tmp_path, steps=n, scale="tiny") for n in (steps, steps + 1)]
    told = [[note for note in plan.notes if note.startswith("training shards")] for plan in plans]
    served = f"training shards: they serve {steps} of {steps + 1} steps, then start over"
    assert told == [[], [served]]


@pytest.mark.parametrize("setting, message", [
    ("val_files=none/*.bin", "^no shards match val_files=none/.*cached_fineweb10B.py 1 --out none"),
    ("train_files=data/builtin/x", "^no shards match .*; get some: python data/builtin_corpus.py"),
    ("val_tokens=3008", "^val_tokens=3008 and one token more do not fit .* which holds 3000;"),
    ("total_batch_size=9536", "^total_batch_size=9536 and one token more .* which holds 9500;"),
])
def test_files_that_settings_name(start, setting, message, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    refused(start, message, setting, "micro_batch_size=1")


@pytest.mark.parametrize("file, position, settings, read", [
    # a step is 1,024 tokens and the target of the last; the first shard has six, the other nine
    ("train_000001", 3 * 1024, ["train_steps=3"], True),
    ("train_000001", 3 * 1024 + 1, ["train_steps=3"], False),
    ("train_000001", 4 * 1024, ["train_steps=3", "kernel_warmup_steps=4"], True),
    ("train_000002", 0, ["train_steps=6"], False),
    ("train_000002", 1024, ["train_steps=7"], True),
    ("train_000002", 1024 + 1, ["train_steps=7"], False),
    ("train_000001", 6 * 1024 + 1, ["train_steps=20"], False),  # the tail, around which it goes
    ("val_000000", 1024, [], True),
    ("val_000000", 1024 + 1, [], False),
])
def test_a_token_beyond_the_vocabulary(start, file, position, settings, read, shards, tmp_path,
                                       monkeypatch):
    found = glob.glob  # names come in any order
    monkeypatch.setattr("glob.glob", lambda pattern: sorted(found(pattern), reverse=True))
    folder = shutil.copytree(shards, tmp_path / "shards")
    path = next(folder.glob(f"*_{file}.bin"))
    tokens = shard_files.read(path)
    tokens[position] = 64
    shard_files.write(path, tokens)
    if read:
        refused(start, f"{file}.bin holds token 64, beyond vocab_size=64", *settings, data=folder)
    else:
        with pytest.raises(Launched):
            start(*settings, data=folder)


# ---- prefixes ----


def test_a_missing_table_of_prefixes(start, tmp_path, capsys):
    setting = f"prefix_file={tmp_path / 'its table'}"
    refused(start, r"table is missing; make it: python .*prefixes.py --out '.*its table'$", setting)
    start(setting, options=["--dry-run"])
    assert "not on this machine: prefix_file=" in capsys.readouterr().err


@pytest.mark.parametrize("ids, fits", [
    ([-1, 0, 1], True), ([-1, 2, 1], True), (64 * [-1], True), ([-1, 3, 1], False),
    ([-1, -2, 1], False), ([], False), (65 * [-1], False), ([-1, 0, 1, 0.5], False), (None, False),
])
def test_a_table_of_prefixes(start, tmp_path, ids, fits):
    file = tmp_path / "table"
    if ids is None:
        file.mkdir()
    else:  # half an id: the file is cut off
        file.write_bytes(b"".join(struct.pack("<i", i) if i != 0.5 else b"00" for i in ids))
    if fits:
        with pytest.raises(Launched):
            start(f"prefix_file={file}")
    else:
        refused(start, "table is not a table of .* vocab_size=64 tokens; python .*prefixes.py "
                "makes GPT-2's, of 50,257; prefix_file=none", f"prefix_file={file}")
