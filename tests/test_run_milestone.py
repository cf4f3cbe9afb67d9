"""Planning, launching, stopping and summing up runs, with a fake script instead of a training.

Run: python -m pytest tests/test_run_milestone.py
"""

import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich.progress

import run_milestone
from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.history.fields import default_hyperparameters
from speedrun.history.manifest import REPOSITORY, ManifestError, load_manifest
from speedrun.run import execute, gpus, progress
from speedrun.run.checkpoint import hash_of, signed_hash
from speedrun.run.data import BUILTIN
from speedrun.run.failure import FAILURES, REPORT, Failure, describe_exit, error_line, explain
from speedrun.run.log import RULE, RunLog, Step, read_log
from speedrun.run.plan import TINY_RUNS, Nodes, fresh_out, make_plan
from speedrun.run.progress import follow
from speedrun.run.summary import _last, print_summary, summarize, to_json
from speedrun.run.torchrun import (
    ALLOCATOR,
    LAUNCHER,
    MARK,
    Stop,
    announce_nodes,
    rank_environment,
    run_ranks,
    stop_signals,
)
from speedrun.scripts.find import find_script, paths_taken

COMMAND = [sys.executable, str(REPOSITORY / "tools" / "run_milestone.py")]
posix = pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")

FAKE = '''
import json, os, signal, socket, sys, time
from dataclasses import asdict, dataclass
from pathlib import Path

@dataclass
class Hyperparameters:
    train_files: str = ""
    val_files: str = ""
    total_batch_size: int = 2 * 512
    train_steps: int = 100
    warmup_steps: int = 10
    cooldown_steps: int = 40
    micro_batch_size: int = 1
    save_checkpoint: bool = False
    log_dir: str = ""
    ending: str = "well"
    seed: int = -1
    compile: bool = bool(os.environ.get("NO_CONSTANT"))

args = Hyperparameters()
for arg in sys.argv[1:]:
    name, _, text = arg.removeprefix("--").partition("=")
    setattr(args, name, type(getattr(args, name))(text))
rank = int(os.environ["RANK"])
if rank == 1 and args.ending == "well":
    print("a warning", file=sys.stderr)
dying = Path(args.log_dir, "dying")
if rank == 2 and args.ending == "killed":
    time.sleep(0.5)
    dying.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and args.ending == "killed":
    while not dying.exists():
        time.sleep(0.01)
    raise RuntimeError("connection closed by peer")
if rank == 0 and args.ending == "killed":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so the launcher has to kill it, too
if args.ending == "hang":
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, interrupt)  # however it is stopped, it dies noisily
if rank == 0:
    log = open(Path(args.log_dir, "log.txt"), "x")
    def print0(line):
        print(line, file=log, flush=True)
        print(line)
    print("=" * 100, file=log)
    environment = dict(device="cpu", world_size=int(os.environ["WORLD_SIZE"]))
    with socket.socket() as other:  # 127.0.0.2 is an address as good as the network card's
        address = ("127.0.0.2", int(os.environ["MASTER_PORT"]))
        environment["from_outside"] = other.connect_ex(address) == 0
    print0("environment:" + json.dumps(environment))
    print("hyperparameters:" + json.dumps(asdict(args)), file=log)
    print("=" * 100, file=log)
    for step in range(args.train_steps + 1):
        ms = 10 * step
        loss = f"val_loss:{5 - step / 100:.4f} " if step % 5 == 0 else ""
        print0(f"step:{step}/{args.train_steps} {loss}train_time:{ms}ms step_avg:10.00ms")
if args.ending == "full disk":
    import torch
    torch.save(torch.zeros(10**5), Path(args.log_dir, "checkpoint.partial"))
if args.ending != "well":
    time.sleep(40)
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "fake" / "train_gpt.py"
    path.parent.mkdir()
    path.write_text(FAKE, encoding="utf-8")
    return path


@pytest.fixture
def shards(tmp_path):
    """A folder with byte-level shards, all zeros, that are long enough for the record's sizes."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in ("train", "val"):
        write_zeros(folder / f"x_{split}_000000.bin")
    return folder


def write_zeros(path, first=0, tokens=10_485_761):
    """A shard of zeros but for the first token; sparse, so that it takes no space."""
    with open(path, "wb") as file:
        file.write(struct.pack("<256iH", 20240520, 1, tokens, *[0] * 253, first))
        file.truncate(1024 + 2 * tokens)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def with_gpus(monkeypatch, count, name="NVIDIA H100 80GB HBM3"):
    monkeypatch.setattr("speedrun.run.plan.visible_gpus", lambda: [name] * count)


def option(plan, name):
    return plan.options.get(name)


# ---- what a run will be ----


def test_command_of_a_milestone(tmp_path):
    plan = make_plan("00", nproc=2, out=tmp_path / "run", steps=20, settings=["seed=3"])
    ranks = tmp_path / "run" / "ranks"
    assert plan.command[:8] == [
        sys.executable, short(LAUNCHER), "--standalone", "--local-addr=127.0.0.1",
        "--nproc-per-node=2", "--redirects=2", f"--log-dir={ranks}", plan.command[7],
    ]
    assert Path(plan.command[7]).resolve() == load_manifest().get("00").script
    assert "--train_steps=20" in plan.command and "--seed=3" in plan.command
    assert plan.command[-1] == f"--log_dir={tmp_path / 'run'}"
    assert not (tmp_path / "run").exists()
    assert make_plan(str(plan.script.path), out=tmp_path / "run").script.milestone.id == "00"


def test_several_nodes_are_passed_to_the_launcher(script, shards, tmp_path):
    nodes = Nodes(2, 1, "host:29500")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").touch()  # node 0 has begun
    plan = make_plan(str(script), data=shards, nodes=nodes, out=tmp_path / "run")
    assert plan.command[1:7] == [
        short(LAUNCHER), "--nnodes=2", "--node-rank=1", "--rdzv-endpoint=host:29500",
        "--rdzv-conf=timeout=600", "--nproc-per-node=1"]
    assert plan.ranks_dir.name == "ranks_node1", "nodes may share the run's folder"


def test_order_of_options(script, shards, tmp_path):
    files = tmp_path / "a=b.bin"
    write_zeros(files)
    plan = make_plan(
        str(script), data=shards, steps=50, device_batch=7, out=tmp_path / "run",
        settings=["micro_batch_size=9", f"train_files={files}"], save_checkpoint=True,
    )
    assert option(plan, "micro_batch_size") == "9"
    assert option(plan, "train_files") == str(files)
    assert option(plan, "val_files") == str(shards / "*_val_*.bin")
    assert option(plan, "train_steps") == 50
    assert option(plan, "save_checkpoint") is True


@pytest.mark.parametrize("nproc, nodes, fitting", [(4, 1, 4), (8, 1, 2), (8, 2, 1)])
def test_micro_batches_shrink_to_serve_all_ranks(nproc, nodes, fitting, tmp_path):
    nodes = Nodes(nodes, 0, "host:29500" if nodes > 1 else None)
    plan = make_plan("01", scale="tiny", nproc=nproc, nodes=nodes, out=tmp_path / "run")
    assert option(plan, "micro_batch_size") == fitting
    assert [note for note in plan.notes if note.startswith("micro")] == [
        f"micro_batch_size: {fitting} (so that a step divides among all ranks)"][: fitting != 4]
    plan = make_plan("01", scale="tiny", nproc=4, device_batch=2, out=tmp_path / "run")
    assert option(plan, "micro_batch_size") == 2  # as the user chose
    plan = make_plan("01", scale="tiny", nproc=4, settings=["total_batch_size=2048"],
                     out=tmp_path / "run")
    assert option(plan, "micro_batch_size") == 2
    plan = make_plan("01", scale="tiny", nproc=8, device_batch="auto", out=tmp_path / "run")
    assert (option(plan, "micro_batch_size"), plan.auto_batch) == (2, True)
    assert not [note for note in plan.notes if note.startswith("micro")], "trials decide"
    with pytest.raises(UserError, match=r" = 4 \* 256 \* 32; the number of ranks may be 1, 2,"):
        make_plan("01", scale="tiny", nproc=8, nodes=Nodes(4, 0, "host:1"), out=tmp_path / "run")
    with pytest.raises(UserError, match="total_batch_size=4096 is not a multiple"):
        make_plan("01", scale="tiny", nproc=8, device_batch=4, out=tmp_path / "run")
    too_long = dict(settings=["seq_len=8192"], out=tmp_path / "run")
    with pytest.raises(UserError, match=r"; the scale is tiny \(.* overrides this\)$"):
        make_plan("01", **too_long)  # nobody asked for it
    with pytest.raises(UserError, match="a multiple of its sequences' tokens$"):
        make_plan("01", scale="tiny", **too_long)


def test_a_script_that_is_no_milestone_gets_the_nearest_ones_overrides(tmp_path, monkeypatch):
    copy = tmp_path / "train_gpt.py"
    shutil.copyfile(load_manifest().get("01").script, copy)
    plan = make_plan(str(tmp_path), scale="tiny", out=tmp_path / "run")  # its folder will do
    own = make_plan("01", scale="tiny", out=tmp_path / "run")
    assert plan.options == own.options and plan.script.milestone is None
    path = os.path.relpath(own.script.path)  # by which it is the milestone itself
    assert make_plan(path, scale="tiny", out=tmp_path / "run").script == own.script
    assert plan.notes[1] == "tiny sizes and rates: those of 01_muon, the nearest milestone"
    assert plan.notes[-1] == f"run: {tmp_path.name}, 200 steps on data/builtin"
    monkeypatch.chdir(tmp_path)
    for target in "./", copy.name:  # called by its folder's name, also from within
        assert make_plan(target, scale="tiny", out=tmp_path / "run").script.name == tmp_path.name
    copy.write_text("print('no training script')", encoding="utf-8")
    with pytest.raises(UserError, match="no class Hyperparameters"):
        make_plan(str(copy))


def test_schedule_keeps_its_shape(script, shards, tmp_path):
    plan = make_plan(str(script), data=shards, steps=20, scale="record", out=tmp_path / "run")
    assert (option(plan, "warmup_steps"), option(plan, "cooldown_steps")) == (2, 8)
    assert plan.notes[1] == ("schedule: warmup_steps 10 -> 2, cooldown_steps 40 -> 8 (in proportion"
                             " to the steps)")
    short = make_plan(str(script), data=shards, steps=2, scale="record", out=tmp_path / "run")
    assert option(short, "warmup_steps") == option(short, "cooldown_steps") == 1
    settings = ["train_steps=20", "cooldown_steps=20"]  # a setting has the last word on steps, too
    plan = make_plan("04", scale="tiny", steps=99, out=tmp_path / "run", settings=settings)
    assert option(plan, "momentum_warmup_steps") == 3 and option(plan, "cooldown_steps") == "20"


@pytest.mark.parametrize("count, with_shards, note", [
    (0, True, "tiny (nvidia-smi shows no GPU here; --scale record overrides this)"),
    (2, False, "tiny (no shards in {0}; fetch them: python data/cached_fineweb10B.py N --out {0})"),
    (2, True, "record (2 x NVIDIA H100 80GB HBM3, shards in {0})"),
])
def test_default_scale_and_its_reason(monkeypatch, script, shards, tmp_path, count, with_shards,
                                      note):
    monkeypatch.chdir(REPOSITORY)
    with_gpus(monkeypatch, count)
    folder = shards if with_shards else tmp_path / "none"
    monkeypatch.setattr("speedrun.run.plan.FINEWEB", folder)
    plan = make_plan(str(script), out=tmp_path / "run")
    assert plan.scale == note.split()[0] and plan.nproc == max(count, 1)
    assert plan.notes[0] == f"scale: {note.format(folder)}"


def test_a_note_says_what_is_run_and_what_to_expect(tmp_path, shards, monkeypatch):
    out = tmp_path / "run"
    before = "run: 01_muon, 200 steps on data/builtin"
    kept = next(run for line in Path(REPOSITORY, TINY_RUNS).read_text("utf-8").splitlines()
                if (run := json.loads(line))["milestone"] == "muon")
    ended = (f"{kept['seconds'][-1][1]:.0f} s, it ended at val_loss {kept['val_curve'][-1][1]:.4f}")
    for text, close in ((kept["corpus"], "and this one should, but for rounding"),
                        ("other", "but this Python's text is another: expect +-0.07"),
                        (None, "but another Python's text is another: expect +-0.07")):
        monkeypatch.setattr("speedrun.run.plan.fingerprint", lambda folder, text=text: text)
        *_, note = make_plan("01", scale="tiny", out=out).notes
        assert note == f"{before}; history/results/tiny.jsonl has this run: {ended}, {close}"
    assert make_plan("01", scale="tiny", out=out, settings=["seed=1"]).notes[-1] == before
    assert make_plan("01", scale="tiny", out=out, steps=9).notes[-1] == before.replace("200", "9")
    assert make_plan("01", scale="tiny", data=shards, out=out).notes[-1].endswith(short(shards))
    files = [f"{split}_files={shards}/*_{split}_*.bin" for split in ("train", "val")]
    assert make_plan("01", scale="tiny", out=out, settings=files).notes[-1] == (
        before.replace("data/builtin", "your files"))


def test_tiny_uses_the_scripts_vocabulary_on_other_tokens(shards, tmp_path):
    assert option(make_plan("00", data=shards, out=tmp_path / "run"), "vocab_size") == 257
    for first, size in (256, 257), (257, None):  # a document's start is the last of the bytes' ids
        write_zeros(shards / "x_val_000000.bin", first=first)
        assert option(make_plan("00", data=shards, out=tmp_path / "run"), "vocab_size") == size
    notes = make_plan("00", data=shards, scale="record", for_elsewhere=True).notes
    assert not [note for note in notes if "vocabulary" in note]


def test_refusals_are_one_line(monkeypatch, script, shards, tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "log.txt").touch()

    wrong = []

    def refused(pattern, target=script, error=UserError, **options):
        options.setdefault("out", tmp_path / "run")
        try:
            said = make_plan(str(target), **{"data": shards, **options})
        except error as caught:
            said = str(caught)
        if not isinstance(said, str) or not re.search(pattern, said) or "\n" in said:
            wrong.append(f"{pattern}: {said}")

    refused("did you mean", target="mun", error=ManifestError)
    refused("is not a file", target=tmp_path / "train_gpt.py")
    refused("holds a run already", out=used)
    (used / "log.txt").rename(used / "checkpoint.pt")
    refused(r"holds a run already \(checkpoint.pt\)", out=used)
    (used / "checkpoint.pt").rename(used / "log.txt")
    refused("log.txt is not a folder; choose", out=used / "log.txt" / "run")
    refused("log.txt is not a folder; choose", out=used / "log.txt")
    (tmp_path / "link").symlink_to("nowhere")
    refused("link is a broken link; choose another name", out=tmp_path / "link")
    refused("the nodes are 0 to 1", nodes=Nodes(2, 2, "host:1"))
    refused("^--rdzv-endpoint is for a run on several machines", nodes=Nodes(1, 0, "host:1"))
    for endpoint in (None, "host", "host:", ":1", "host:0", "host:65536", "host:x"):
        refused(f"^--rdzv-endpoint {endpoint}: .* HOST:PORT", nodes=Nodes(2, 0, endpoint))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda folder, mode: mode != os.W_OK | os.X_OK)
        refused(f"^--out {tmp_path}/a/b: cannot write in {tmp_path}$", out=tmp_path / "a" / "b")
    with_gpus(monkeypatch, 8)
    refused(r"--nproc 9: .* 8 GPU", nproc=9)
    text = script.read_text(encoding="utf-8")
    script.write_text(text, encoding="utf-8-sig")  # a BOM is no fault
    make_plan(str(script), data=shards, out=tmp_path / "run")
    for fault, place in (("def", r"invalid syntax \(train_gpt.py, line "), ("# \udcff", "0xff"),
                         ("a = 1" + " + 1" * 10_000, "maximum recursion depth exceeded")):
        script.write_bytes(f"{text}\n{fault}\n".encode("utf-8", "surrogateescape"))
        refused(f"^{script} is not a Python script: .*{place}")
    assert not wrong
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="permissions do not bind root")
def test_a_read_only_folder(script, shards, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    with pytest.raises(UserError, match="cannot write in"):
        make_plan(str(script), data=shards, out=folder / "run")


def test_an_endless_default_is_not_computed(script):
    assert default_hyperparameters(script)["compile"] is None  # the machine decides
    text = "class Hyperparameters:\n    a: int = {}\n"
    for default, value in (("9**9**9**9", None), ("1 << 9**9", None), ("2**20", 2**20),
                           ("3 * 10**-2", 0.03), ("(9**9)**99", None), ("1 << 'a'", None),
                           ("1 / 0", None)):
        script.write_text(text.format(default), encoding="utf-8")
        assert default_hyperparameters(script) == {"a": value}


# ---- GPUs without torch ----


@pytest.mark.parametrize(
    "visible, names",
    [(None, ["A", "B", "C"]), ("", []), ("-1", []), ("2,0", ["C", "A"]), ("0,7,1", ["A"]),
     ("GPU-bb", ["B"]), ("GPU-x", []), (" 1 , 2 ", ["B", "C"])],
)
def test_cuda_visible_devices(monkeypatch, visible, names):
    answer = "A, GPU-aa\nB, GPU-bb\nC, GPU-cc\n"
    monkeypatch.setattr(gpus.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(
        gpus.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, answer)
    )
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.visible_gpus() == names


@posix
@pytest.mark.parametrize("command, fault", [
    ("printf '\\377\\n'", None), ("exec /bin/sleep 60", "nvidia-smi did not answer within 0.5 s"),
    ("echo No driver; echo now >&2; exit 18", "nvidia-smi failed with exit code 18: No driver now"),
    ("exit 9", "nvidia-smi failed with exit code 9: it printed nothing")])
def test_a_broken_nvidia_smi_names_no_gpu(monkeypatch, tmp_path, command, fault):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.5)
    assert (gpus.visible_gpus(), gpus.find_fault()) == ([], fault)
    scale = make_plan("00", for_elsewhere=True).notes[0]
    assert scale.startswith(f"scale: tiny ({fault or 'nvidia-smi shows no GPU here'}; --scale")
    (tmp_path / "nvidia-smi").write_text("#!/none\n", encoding="utf-8")
    assert gpus.find_fault() == "nvidia-smi cannot be run: No such file or directory"


@pytest.mark.parametrize(
    "name, peak",
    [("NVIDIA H100 80GB HBM3", 989.4e12), ("cuda NVIDIA H100 PCIe", 756e12),
     ("NVIDIA H200", 989.4e12), ("NVIDIA A100-SXM4-80GB", 312e12),
     ("NVIDIA H200 NVL", 835.5e12), ("NVIDIA GH200 480GB", 989.4e12), ("NVIDIA H100 NVL", 835.5e12),
     ("NVIDIA B200", 2.25e15), ("NVIDIA L40S", 362.05e12), ("NVIDIA L4", 121e12),
     ("NVIDIA RTX 6000 Ada Generation", 364.2e12), ("NVIDIA A40", 149.7e12),
     ("NVIDIA A10", 125e12), ("NVIDIA GeForce RTX 5090", 209.5e12),
     ("NVIDIA GeForce RTX 5090 D", None), ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
     ("NVIDIA GeForce RTX 3090", 71e12), ("NVIDIA GeForce RTX 3090 Ti", None),
     ("NVIDIA GeForce RTX 4090", 165.2e12),
     ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
     ("NVIDIA H20", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("cpu x86_64", None)],
)
def test_peak_flops(name, peak):
    assert gpus.peak_flops(name) == peak


# ---- why a run failed ----


def failure_of(tmp_path, *failures, stderr=None, report="", exit_code=1):
    """The Failure of these (rank, exit code) pairs in a fresh folder. stderr: {rank: text}, each
    written later than the previous."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    (folder / REPORT).write_text(report, encoding="utf-8")
    if failures:
        (folder / FAILURES).write_text(json.dumps([(rank, rank, code) for rank, code in failures]))
    for second, (rank, text) in enumerate((stderr or {}).items()):
        file = folder / "id" / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
        os.utime(file, (second, second))
    return explain(folder, exit_code)


def traceback(words):
    """A traceback through a script, 50 frames deep."""
    frame = '  File "train_gpt.py", line 1, in <module>\n    main(args)\n'
    return f"Traceback (most recent call last):\n{frame * 50}{words}\n"


@pytest.mark.parametrize("stderr, words", [
    (traceback("ValueError: x\nand more"), "ValueError: x"),
    (traceback("AssertionError: bad, mend it"), "AssertionError: bad, mend it"),
    (traceback("KeyError: 1") + "\nDuring handling:\n\n" + traceback("b.Error: x"), "b.Error: x"),
    (traceback("BackendFailed: backend raised:\nRuntimeError: x\n"),
     "BackendFailed: backend raised: RuntimeError: x"),
    ("".join(f"[rank1]: {line}\n" for line in traceback("ValueError: x").splitlines())
     + "[rank1]:[W1] a process group was left\n", "ValueError: x"),
    (traceback("ValueError: x") + "Exception ignored in: <file>\n" + traceback("OSError: y"),
     "ValueError: x"),
    ("usage: train_gpt.py [-h]\ntrain_gpt.py: error: no such name\n",
     "train_gpt.py: error: no such name"),
    ("a warning\nerror: no shards match x\nbye\n", "error: no shards match x"),
    ("error: a\nerror: b\n", "error: b"),
    ("a warning\nkilled\n\n", "killed"),
    ("", ""),
])
def test_the_reason_in_a_stderr(stderr, words):
    assert error_line(stderr) == words


@pytest.mark.parametrize("stderr", [
    traceback("AssertionError: bad, mend it"), "a warning\nerror: bad, mend it\nbye\n",
    "usage: x\ntrain_gpt.py: error: bad, mend it\n",
])
def test_a_reason_that_the_script_gives_stands_alone(tmp_path, stderr):
    failure = failure_of(tmp_path, (0, 1), stderr={0: stderr})
    assert (failure.text, failure.exit_code, failure.explained) == ("bad, mend it", 1, True)
    texts = {0: traceback("OSError: lost peer"), 1: stderr}
    assert failure_of(tmp_path, (0, 1), (1, 1), stderr=texts).text == "rank 1: bad, mend it"
    texts = {1: traceback("OSError: lost peer"), 0: stderr}
    assert failure_of(tmp_path, (0, 1), (1, 1), stderr=texts).text == "rank 0: bad, mend it"
    alone = failure_of(tmp_path, (0, 1), stderr={0: stderr, 1: ""})  # 1 was ended by the launcher
    assert alone.text == "rank 0: bad, mend it"
    alone = failure_of(tmp_path, (1, 1), stderr={1: stderr})  # on a second machine
    assert alone.text == "rank 1: bad, mend it"


def test_the_first_cause_counts_not_its_consequences(tmp_path):
    texts = {2: "", 1: traceback("ValueError: x"), 0: traceback("OSError: lost peer")}
    failure = failure_of(tmp_path, (0, 1), (1, 1), stderr=texts)
    assert (failure.text, failure.exit_code) == ("rank 1: ValueError: x", 1)
    assert failure.rank == 1 and not failure.explained
    failure = failure_of(tmp_path, (0, 1), (1, -9), stderr={
        0: traceback("AssertionError: lost peer"), 1: "a warning\n"})
    assert failure.text == "rank 1 was killed by SIGKILL (out of memory?)"
    for code, words in ((-40, "was killed by signal 40"),  # which has no name
                        (-7, "was killed by SIGBUS (was a shard cut short?)"),
                        (-15, "was killed by SIGTERM"), (0, "ended with exit code 0")):
        assert describe_exit(code) == words
    assert failure.exit_code == 128 + 9
    gloo = traceback("RuntimeError: [enforce fail at x.cc:9] . Unable to find address for: eth7")
    failure = failure_of(tmp_path, (0, 1), stderr={0: gloo})
    assert failure.text == ("GLOO_SOCKET_IFNAME: this machine has no network interface eth7; unset"
                            " the variable, or name one")
    assert (failure.exit_code, failure.rank, failure.explained) == (1, 0, True)
    failure = failure_of(tmp_path, (1, 3), stderr={0: "", 1: ""})
    assert (failure.text, failure.exit_code) == ("rank 1 ended with exit code 3", 3)
    for code, status in ((3221225786, 1), (256, 1), (255, 255)):  # the first as on Windows
        assert failure_of(tmp_path, (0, code), stderr={0: ""}).exit_code == status


NOT_MET = ("not all nodes met at --rdzv-endpoint within 10 minutes; start the same command on each,"
           " with its own --node-rank")


@pytest.mark.parametrize("words, text, explained", [
    ("RendezvousError: no endpoint",
     "the launcher ended with exit code 1: RendezvousError: no endpoint", False),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 "
     "joined.", NOT_MET, True),
    ("torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while",
     NOT_MET, True),
])
def test_a_failure_of_the_launcher_itself(tmp_path, words, text, explained):
    failure = failure_of(tmp_path, report=traceback(words))
    assert (failure.text, failure.exit_code, failure.explained) == (text, 1, explained)
    killed = failure_of(tmp_path, report=traceback(words), exit_code=-9)
    assert killed.text == "the launcher was killed by SIGKILL (out of memory?)"


# ---- a run, with a stand-in for the launcher ----


def stand_in(monkeypatch, log="", stderr="", failures=(), report="", exit_code=0, signum=None):
    def fake_launch(command, folder, on_line, stop):
        rank = folder / "id" / "attempt_0" / "0"
        rank.mkdir(parents=True)
        (rank / "stderr.log").write_text(stderr, encoding="utf-8")
        (folder / FAILURES).write_text(json.dumps(failures))
        (folder / REPORT).write_text(report, encoding="utf-8")
        if log:
            (folder.parent / "log.txt").write_text(log, encoding="utf-8")
        for line in log.splitlines():
            on_line(line)
        stop.signum = signum
        return exit_code

    monkeypatch.setattr(execute, "run_ranks", fake_launch)


# The second step has twice the tokens of the first.
GROWS = dict(scheduled_steps=2, second_stage_peak=1, third_stage_peak=1)
LOG = "step:0/2 val_loss:5.0 train_time:0ms step_avg:0.00ms\nstep:1/2 train_time:9ms step_avg:9ms\n"


def test_too_few_open_files_are_refused(monkeypatch, script, shards, tmp_path):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (63, 1024))
    stand_in(monkeypatch, log=LOG)
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    with pytest.raises(UserError, match="^a process may open only 63 files here; .*ulimit -n 1024"):
        execute.run(plan, io.StringIO())
    assert not plan.out.exists()
    for limit in 64, resource.RLIM_INFINITY:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, 1))
        execute.check_open_files()


@pytest.mark.parametrize("log, message", [
    (LOG, "the script ended after step 1 of 2; the log so far: {}"),
    ('hyperparameters:{"seed": 1}\n', "no step was logged in {}"),
    ("", "the script ended, and {} cannot be read: No such file or directory; either it wrote no"
     " log, or the folder was changed meanwhile"),
])
def test_a_script_that_leaves_early_has_not_finished(monkeypatch, script, shards, tmp_path, log,
                                                     message):
    stand_in(monkeypatch, log=log)
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    with pytest.raises(UserError) as error:
        execute.run(plan, io.StringIO())
    assert str(error.value) == message.format(plan.out / "log.txt")
    assert sorted(file.name for file in plan.out.iterdir()) == [
        *["log.txt"][: len(log)], "train_gpt.py"]


def test_the_embedded_data_are_made_for_their_scripts(monkeypatch, tmp_path):
    filled = []

    def fill(*what):
        filled.append(what)
        raise UserError("enough")

    monkeypatch.setattr("speedrun.run.data.fill", fill)
    monkeypatch.setattr("speedrun.run.conversations.fill", fill)
    plan = make_plan("00", scale="tiny", out=tmp_path / "run")
    for id, maker in ("00", "builtin_corpus.py"), ("e0", "builtin_chat.py"):
        with pytest.raises(UserError, match="^enough$"):
            execute.execute(replace(plan, script=find_script(id), options={}), io.StringIO())
        assert filled.pop() == (BUILTIN, maker)


def test_a_folder_that_can_no_longer_be_written_is_blamed(tmp_path):
    for text, more in (("the launcher ended", ""), ("rank 1: x", " (rank 1: x)")):
        blamed = execute._blame_disk(tmp_path / "none", Failure(text, 3, 1, explained=True))
        assert blamed == Failure(
            f"cannot write in {tmp_path / 'none'}: No such file or directory{more}", 3, 1)


@pytest.mark.parametrize("existed, log, failures, message", [
    (True, "", [(0, 0, 1)], "^bad$"), (False, "hyperparameters:{}\n", [(0, 0, 1)], "^bad$"),
    (False, "", [], "^the launcher ended with exit code 1: Rend"),
])
def test_a_bad_start_leaves_nothing(monkeypatch, script, shards, tmp_path, existed, log, failures,
                                    message):
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    if existed:
        plan.out.mkdir()
    words = traceback("AssertionError: bad") if failures else ""
    stand_in(monkeypatch, log, words, failures, "RendezvousError: no endpoint\n", exit_code=1)
    with pytest.raises(UserError, match=message) as error:
        execute.run(plan, io.StringIO())
    assert error.value.status == 1
    assert plan.out.exists() == existed and not list(tmp_path.glob("run/*"))


def run_within(monkeypatch, first, second):
    """Carries out two plans, the second while the first one trains."""
    stand_in(monkeypatch, log=LOG.replace("/2", "/1"))
    trains, outcomes = execute.run_ranks, []

    def trains_twice(*arguments):
        monkeypatch.setattr(execute, "run_ranks", trains)
        try:
            outcomes.append(execute.run(second, io.StringIO()))
        except UserError as error:
            outcomes.append(error)
        return trains(*arguments)

    monkeypatch.setattr(execute, "run_ranks", trains_twice)
    return execute.run(first, io.StringIO()), outcomes[0]


def test_runs_of_one_second_take_folders_of_their_own(monkeypatch, script, shards, tmp_path):
    monkeypatch.setattr("speedrun.run.plan.REPOSITORY", tmp_path)
    assert re.fullmatch(r"a-\d{8}-\d{6}", fresh_out("a").name)
    monkeypatch.setattr("speedrun.run.plan.time.strftime", lambda format: "now")
    plans = [make_plan(str(script), data=shards) for _ in range(2)]
    logs = [Path(summary.log) for summary in run_within(monkeypatch, *plans)]
    assert [log.parent.name for log in logs] == ["fake-now", "fake-now-2"]
    for log in logs:
        assert sorted(file.name for file in log.parent.iterdir()) == [
            "log.txt", "summary.json", "train_gpt.py"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_was_asked_for_is_taken_once(monkeypatch, script, shards, tmp_path, rank):
    nodes = Nodes(1 + rank, rank, "localhost:1" if rank else None)
    plans = [make_plan(str(script), data=shards, out=tmp_path / "run", nodes=nodes)
             for _ in range(2)]
    summary, error = run_within(monkeypatch, *plans)
    assert re.match(rf"--out .*run holds a run already \({nodes.ranks}\); choose", str(error))
    assert rank or sorted(file.name for file in plans[0].out.iterdir()) == [
        "log.txt", "summary.json", "train_gpt.py"]
    (tmp_path / "other" / nodes.ranks).mkdir(parents=True)
    with pytest.raises(UserError, match="holds a run already"):
        make_plan(str(script), data=shards, out=tmp_path / "other", nodes=nodes)
    with pytest.raises(UserError, match="holds a run already"):
        execute.run(replace(plans[0], out=tmp_path / "other"), io.StringIO())
    assert [file.name for file in (tmp_path / "other").iterdir()] == [nodes.ranks]


@pytest.mark.parametrize("loss", ["val_loss:nan", "train_loss:inf"])
def test_a_loss_that_is_not_finite_ends_the_run(monkeypatch, shards, tmp_path, loss, capsys):
    log = f"{LOG}step:2/9 {loss} train_time:9ms step_avg:9ms\nnever reached\n"
    stand_in(monkeypatch, log=log)
    monkeypatch.setattr(sys, "argv", [
        "run_milestone.py", "01", "--scale", "record", "--json", "--data", str(shards), "--out",
        str(tmp_path / "run")])
    name, value = loss.split(":")
    with pytest.raises(UserError) as error:
        run_milestone.main()
    assert error.value.status == 1
    assert str(error.value).startswith(
        f"{name} is {value} at step 2, so the run was stopped; lower a learning rate:"
        " muon_lr=0.00036, embed_lr=0.0036\nthe log so far: ")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": str(error.value)}
    assert "never reached" not in printed.err and not (tmp_path / "run" / "summary.json").exists()


def test_nodes_that_cannot_meet(monkeypatch):
    stream = io.StringIO()
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f": port {port} cannot be opened here .A.* in use."):
            announce_nodes(Nodes(2, 0, f"localhost:{port}"), stream)
        announce_nodes(Nodes(2, 1, f"localhost:{port}"), stream)
    assert stream.getvalue() == f"waiting for all 2 nodes at localhost:{port}, at most 10 minutes\n"
    announce_nodes(Nodes(2, 1, "[::1]:29500"), stream)

    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match="^--rdzv-endpoint x:1: x has no address .Name or service"):
        announce_nodes(Nodes(2, 1, "x:1"), stream)


@pytest.mark.parametrize("log", [LOG, "hyperparameters:{}\n"])  # also before the first step
def test_a_failed_run_names_its_files(monkeypatch, script, shards, tmp_path, log):
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    stand_in(monkeypatch, log, traceback("ValueError: x"), [(0, 0, 1)], exit_code=1)
    with pytest.raises(UserError) as error:
        execute.run(plan, io.StringIO())
    log, stderr = plan.out / "log.txt", plan.out / "stderr_rank0.txt"
    assert str(error.value) == f"ValueError: x\nthe log so far: {log}; stderr: {stderr}"
    assert stderr.read_text(encoding="utf-8") == traceback("ValueError: x")
    assert sorted(file.name for file in plan.out.iterdir()) == [
        "log.txt", "stderr_rank0.txt", "train_gpt.py"]
    plan = make_plan(str(script), data=shards, out=tmp_path / "explained")
    stand_in(monkeypatch, LOG, traceback("AssertionError: bad"), [(0, 0, 1)], exit_code=1)
    with pytest.raises(UserError) as error:
        execute.run(plan, io.StringIO())
    assert str(error.value) == f"bad\nthe log so far: {plan.out / 'log.txt'}"


def test_a_run_whose_folder_is_moved_says_so(monkeypatch, script, shards, tmp_path):
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")

    def move(command, folder, on_line, stop):
        plan.out.rename(tmp_path / "moved")
        return 1

    monkeypatch.setattr(execute, "run_ranks", move)
    with pytest.raises(UserError, match=f"^{plan.out} was moved or removed during the run$"):
        execute.run(plan, io.StringIO())
    assert not plan.out.exists()


@posix
def test_ctrl_c_before_the_ranks_start(monkeypatch, script, shards, tmp_path):
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    copyfile = shutil.copyfile

    def interrupted(*files):
        os.kill(os.getpid(), signal.SIGINT)
        copyfile(*files)

    monkeypatch.setattr(execute.shutil, "copyfile", interrupted)
    with pytest.raises(UserError, match="^interrupted$") as error:
        execute.run(plan, io.StringIO())
    assert error.value.status == 130 and not plan.out.exists()


def test_a_stopped_run_keeps_its_log(monkeypatch, script, shards, tmp_path):
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    stand_in(monkeypatch, log=LOG, exit_code=-15, signum=signal.SIGTERM)
    with pytest.raises(UserError, match=r"stopped by SIGTERM\nthe log so far: .*log.txt") as error:
        execute.run(plan, io.StringIO())
    assert error.value.status == 128 + 15
    assert sorted(file.name for file in plan.out.iterdir()) == ["log.txt", "train_gpt.py"]
    plan = replace(plan, out=tmp_path / "early")
    stand_in(monkeypatch, log="no step yet\n", exit_code=-15, signum=signal.SIGTERM)
    with pytest.raises(UserError, match="stopped by SIGTERM$"):
        execute.run(plan, io.StringIO())
    assert not plan.out.exists()
    plan = replace(plan, out=tmp_path / "late")
    monkeypatch.setattr(execute, "run_ranks", lambda *arguments: arguments[-1].give_up("too late"))
    with pytest.raises(UserError, match="^too late$") as error:
        execute.run(plan, io.StringIO())
    assert error.value.status == 1


def test_a_node_without_rank_0(monkeypatch, script, shards, tmp_path):
    nodes = Nodes(2, 1, "localhost:1")
    plan = make_plan(str(script), data=shards, out=tmp_path / "run", nproc=4, nodes=nodes)
    stand_in(monkeypatch, stderr="a warning\n")
    assert execute.run(plan, io.StringIO()) is None  # it has no summary
    assert [file.name for file in plan.out.iterdir()] == ["stderr_rank4.txt"]
    for name in ("train_gpt.py", "stderr_rank3.txt"):
        (plan.out / name).write_text("", encoding="utf-8")
    execute._discard(plan)  # only its own files
    assert {file.name for file in plan.out.iterdir()} == {"train_gpt.py", "stderr_rank3.txt"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [40, 120])
def test_live_line_and_summary_fit_the_terminal(monkeypatch, script, shards, tmp_path, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    screen, updates, update = Terminal(), [], rich.progress.Progress.update
    monkeypatch.setattr("rich.progress.Progress.update", lambda bar, task, **given: (
        updates.append(given), update(bar, task, **given)))
    with follow(plan, screen) as show:
        show("a message")
        for line in (f"hyperparameters:{json.dumps(GROWS | dict(total_batch_size=600))}",
                     *LOG.splitlines()):
            show(line)
        for line in (RULE, "  ", "step:2/4 val_loss:4.5 train_time:1234567ms step_avg:9.00ms",
                     "cut in mid-li"):
            show(line)
    shown = screen.getvalue()
    assert "step 0      val_loss 5.0000" in shown and "a message" in shown
    assert updates[-1] == dict(completed=2, total=4, speed="100,000 tokens/s",  # 900 in 9 ms
                               description="step 2/4 val_loss 4.5000")
    assert "step 2      val_loss 4.5000  1,234.6 s" in shown and "====" not in shown
    assert "step_avg" not in shown  # a step is told in other words
    assert ("100,000 tokens/s" in shown) == (columns == 120)
    log = RunLog()
    for line in LOG.splitlines():
        log.feed(line)
    table = Terminal()
    print_summary(replace(summarize(plan, log), data="/a/" + "long" * 20), table)
    assert summarize(replace(plan, gpus=["B", "A", "B"]), log).device == "A, B"
    assert summarize(replace(plan, nproc=4, nodes=Nodes(2, 0, "host:1")), log).world_size == 8
    log.feed('hyperparameters:{"train_file": "x.jsonl"}')
    assert summarize(replace(plan, data=None), log).data == "x.jsonl"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table.getvalue())  # without colours
    assert "val_loss" in plain and max(map(len, plain.splitlines())) <= columns


def test_plain_lines_pass_unchanged(script, shards, tmp_path):
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    stream = io.StringIO()
    with follow(plan, stream) as show:
        show("step:1/2 [bold] train_time:9ms step_avg:9ms")
        show("a title: \x1b]0;x\x07")
    assert stream.getvalue() == ("step:1/2 [bold] train_time:9ms step_avg:9ms\n"
                                 "a title: \N{SYMBOL FOR ESCAPE}]0;x\N{SYMBOL FOR BELL}\n")


def test_a_run_that_does_not_end_after_its_last_step_is_told(
        script, shards, tmp_path, monkeypatch):
    plan = make_plan(str(script), data=shards, out=tmp_path / "run")
    for patience, told in ((0.01, True), (0.5, False)):
        monkeypatch.setattr(progress, "END_PATIENCE_S", patience)
        monkeypatch.setattr(progress, "GIVE_UP_S", 2 * patience)
        stream, stop = io.StringIO(), Stop()
        with follow(plan, stream, stop.give_up) as show:
            show("step:2/2 train_loss:5.0000 train_time:9ms step_avg:9ms")
            time.sleep(0.2 * told)
            assert "was the last" not in stream.getvalue()  # a validation may take long
            show("step:2/2 val_loss:5.0000 train_time:9ms step_avg:9ms")
            show("its last words")
            time.sleep(0.2 * told)
        time.sleep(0.6 * (not told))
        assert (f"step 2 was the last, but the script has not ended {patience} s later; Ctrl-C "
                "stops it and keeps the log\n" in stream.getvalue()) == told
        assert (stop.signum == signal.SIGTERM) == told
        assert stop.reason == told * (
            f"step 2 was the last, but the script did not end in {2 * patience} s, so it was"
            " stopped; does one of its threads never end?")
    stop = Stop()
    stop(signal.SIGINT, None)
    stop(signal.SIGTERM, None)
    stop.give_up("too late")
    assert (stop.signum, stop.reason) == (signal.SIGINT, ""), "Ctrl-C was first"


@pytest.mark.parametrize("device, setting, paths", [
    ("cpu", [], "CPU: float32, not compiled, no flex_attention (on a CPU it has no backward pass)"),
    ("NVIDIA H100", [], "CUDA: bf16, compiled, flex_attention"),
    ("NVIDIA H100", ["use_flex_attention=False"],
     "CUDA: bf16, compiled, no flex_attention (as set)"),
])
def test_the_paths_of_a_run_are_told(monkeypatch, tmp_path, device, setting, paths):
    monkeypatch.setenv("COLUMNS", "120")
    plan = make_plan("05", settings=setting, out=tmp_path / "run")
    values = dict(bf16=device != "cpu", compile=device != "cpu",
                  use_flex_attention=device != "cpu" and not setting)
    for stream in (io.StringIO(), Terminal()):
        with follow(plan, stream) as show:
            show(f"environment:{json.dumps(dict(device=device))}")
            show(f"hyperparameters:{json.dumps(values)}")
        assert paths in stream.getvalue()


def test_one_of_several_paths_is_shown_by_its_name():
    source = load_manifest().get("06").script.read_text(encoding="utf-8")
    values = dict(bf16=True, compile=True, attention_kernel="FA2", use_fp8=True)
    for chosen, why in ((), ""), (["attention_kernel"], " (as set)"):
        assert paths_taken(source, values, True, chosen).startswith(
            f"CUDA: bf16, compiled, FA2 attention kernel{why}, ")
    source = ("    odd_path: bool = gpu()  # not here\n    bf16: bool = gpu()\n    seed: int = 3\n"
              "    use_kernel: str = field(default_factory=best)  # A or B\n")
    values = dict(odd_path=False, use_kernel="A", bf16=True)
    assert paths_taken(source, values, True) == "CUDA: bf16, no odd_path (not here), A kernel"
    values = dict(odd_path=True, use_kernel="B", bf16=False)
    assert paths_taken(source, values, False, ["odd_path", "use_kernel", "bf16"]) == (
        "CPU: float32 (as set), odd_path, B kernel (as set)")
    assert paths_taken("", {}, True) == "CUDA: no switches"


# ---- the summary ----


def record_run(monkeypatch, tmp_path, shards, **changes):
    """The summary of an invented run of 00 at record scale on eight H100."""
    with_gpus(monkeypatch, 8)
    plan = make_plan("00", scale="record", data=shards, out=tmp_path / "run")
    plan.out.mkdir()
    shutil.copyfile(plan.script.path, plan.out / "train_gpt.py")
    record = replace(plan.script.milestone, step_avg_ms=250.0)
    plan = replace(plan, script=replace(plan.script, milestone=record))
    hyperparameters = {**plan.script.hyperparameters, **changes}
    steps = hyperparameters["train_steps"]
    log = RunLog()
    log.feed(f"hyperparameters:{json.dumps(hyperparameters)}")
    log.feed('environment:{"device": "cuda NVIDIA H100 80GB HBM3", "world_size": 8}')
    log.feed(f"step:{steps}/{steps} train_time:3ms step_avg:999.00ms")
    log.feed(f"step:{steps}/{steps} val_loss:3.2811 train_time:2000000ms step_avg:100.00ms")
    return summarize(plan, log), record


OFFICIAL = """\
baseline                          this run       official
val_loss                            3.2811         3.2798
steps                               24,576         24,576
tokens                       6,442,450,944  6,442,450,944
train_time                       2,000.0 s      2,700.0 s
step_avg                         100.00 ms      250.00 ms
tokens/s                         2,621,440      1,048,576
MFU                                  26.4%               .
scale                               record               .
data                                shards               .
device      8 x cuda NVIDIA H100 80GB HBM3       8 x H100
"""


def test_summary_and_official_figures(monkeypatch, tmp_path, shards):
    summary, record = record_run(monkeypatch, tmp_path, shards)
    assert summary.tokens == record.train_steps * record.tokens_per_step
    assert summary.step_avg_ms == 100 and summary.tokens_per_s == 10 * record.tokens_per_step
    # 12 layers of 12 * 768^2 weights and a head of 50257 * 768; attention to 1025 / 2 tokens
    flops = 6 * (12 * 12 * 768**2 + 50257 * 768) + 6 * 12 * 768 * 1025
    assert summary.mfu == pytest.approx(flops * summary.tokens_per_s / (8 * 989.4e12))
    assert summary.official == pytest.approx(dict(
        val_loss=record.val_loss, steps=record.train_steps, tokens=summary.tokens,
        train_time_s=45 * 60, step_avg_ms=250, tokens_per_s=4 * record.tokens_per_step))
    at_last = _last([Step(0, 9, 5.0, step_avg_ms=0.0), Step(9, 9, step_avg_ms=4.0)], "step_avg_ms")
    assert at_last.step == 9, "no run ends at step 0"
    stream = io.StringIO()
    print_summary(summary, stream)
    assert stream.getvalue() == OFFICIAL.replace(" .\n", " \n")
    rows = dict(read=1200, cut=3, dropped=4, waste=0.125, waste_alone=0.5)
    print_summary(replace(summary, rows=rows), stream)
    for words in ("1,200, cut 3, dropped 4", "12.5% of an epoch's slots, 50.0% with a row for"):
        assert words in " ".join(stream.getvalue().split())
    diverged = to_json(replace(summary, val_loss=float("nan"), rows={"waste": float("inf")}))
    assert json.loads(diverged, parse_constant=pytest.fail)["val_loss"] is None


def test_what_changes_under_a_run_is_said(shards, tmp_path, monkeypatch):
    """An editor saves the script while the ranks start; a build replaces the corpus."""
    plan = make_plan("00", scale="tiny", data=shards, out=tmp_path / "run")
    plan.out.mkdir()
    (plan.out / "train_gpt.py").write_text("class Hyperparameters: 1\n", encoding="utf-8")
    ran = "class Hyperparameters: 2\n"
    (plan.out / "log.txt").write_text(
        f"{ran}\n{RULE}\nstep:1/1 val_loss:3.0000 train_time:1ms step_avg:1.00ms\n", "utf-8")
    checkpoint = plan.out / "checkpoint.pt"
    with zipfile.ZipFile(checkpoint, "w") as archive:
        archive.writestr("archive/data", "")
    fingerprints = iter(["b" * 16, *["a" * 16] * 3])
    monkeypatch.setattr(type(plan), "fingerprint", property(lambda plan: next(fingerprints)))
    summary = execute._sum_up(plan, "a" * 16, io.StringIO())
    assert summary.data_fingerprint is None and summary.changed == (
        f"the data, during the run (fingerprint {'a' * 16} before, {'b' * 16} after); the script,"
        " while the run started (the copy is what ran)")
    assert (plan.out / "train_gpt.py").read_text("utf-8").strip() == ran.strip()
    assert signed_hash(checkpoint) == hash_of(plan.out / "train_gpt.py")
    summary = execute._sum_up(plan, "a" * 16, io.StringIO())
    assert (summary.data_fingerprint, summary.changed) == ("a" * 16, "")
    (plan.out / "train_gpt.py").write_text("class Hyperparameters: 1\n", encoding="utf-8")
    summary = execute._sum_up(plan, "a" * 16, io.StringIO())
    assert (summary.data_fingerprint, summary.changed) == (
        "a" * 16, "the script, while the run started (the copy is what ran)")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(execute, "sign", full)
    monkeypatch.setattr("os.fsync", full)
    stream = io.StringIO()
    with pytest.raises(UserError) as error:
        execute._sum_up(plan, "a" * 16, stream)
    assert stream.getvalue() == (
        f"note: {checkpoint} does not name its script: No space left on device\n")
    assert str(error.value) == (
        f"{plan.out / 'summary.json'} cannot be written: No space left on device; the run is"
        f" complete, its log: {plan.out / 'log.txt'}")


@pytest.mark.parametrize("change", [{"train_steps": 100}, {"total_batch_size": 1024}])
def test_other_runs_do_not_compare(monkeypatch, tmp_path, shards, change):
    monkeypatch.setattr("speedrun.run.summary.peak_flops", lambda device: None)  # no FLOPs
    assert record_run(monkeypatch, tmp_path, shards, **change)[0].official == {}


FULL_LOG = """environment:{"device": "Tesla T4", "world_size": 3}
hyperparameters:GIVEN
step:0/2 val_loss:5.0 train_time:0ms step_avg:0.00ms
step:2/2 val_loss:4.25 train_time:61234ms step_avg:8000.00ms
peak_memory:12345MiB
""".replace("GIVEN", json.dumps(GROWS | dict(total_batch_size=300, bf16=True, compile=False)))
PRINTED = f"""scale: tiny (as asked)
run: 01_muon, 200 steps on shards
{FULL_LOG.replace("step:0", "CUDA: bf16, not compiled" + chr(10) + "step:0")}\
muon             this run
val_loss           4.2500
steps                   2
tokens                900
train_time         61.2 s
step_avg       8000.00 ms
tokens/s               56
peak_memory    12,345 MiB
scale                tiny
data               shards
device       3 x Tesla T4
stderr: run/stderr_rank0.txt
run/log.txt
"""


def test_what_a_command_prints_of_a_run(monkeypatch, shards, tmp_path, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch, FULL_LOG, stderr="a warning\n")
    monkeypatch.setattr(execute, "make_builtin", None)  # other data need no corpus
    command = ["run_milestone.py", "01", "--scale", "tiny", "--data", "shards"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", "run"])
    assert run_milestone.main() == 0
    printed = capsys.readouterr()
    assert printed.out == PRINTED and not printed.err
    monkeypatch.setattr(sys, "argv", [*command, "--out", "other", "--nnodes", "2", "--node-rank",
                                      "1", "--rdzv-endpoint", "localhost:1"])
    assert run_milestone.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "done; the log and the summary are on node 0, with rank 0")


# ---- processes ----

# Stands for a launcher that was killed before it could end its ranks: leaves a child behind.
CHILD_S = 60  # until the child ends by itself
LEAVES_A_CHILD = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({CHILD_S})"],
                         start_new_session=True)
print(child.pid, flush=True)
if sys.argv[1:] == ["wait"]:
    time.sleep({CHILD_S})
"""


def gone(pid):
    """Whether a process that was killed has ended, which takes a moment (a zombie has)."""
    for _ in range(40):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


PROBE = f"""
import os, sys
from warnings import warn
print(*(os.environ.get(name) for name in {ALLOCATOR}), sep="\\n")
assert not any(name.startswith("PET_") for name in os.environ)
for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "another"):
    warn(f"`torch.distributed.{{name}}` is deprecated. Please", FutureWarning)
try:
    assert False, "checked"
except AssertionError:
    print("checks are on")
try:
    warn("x", DeprecationWarning)
except DeprecationWarning as error:
    print(error)
sys.exit(3)
"""


@pytest.mark.parametrize("own, expected", [
    ({}, ["expandable_segments:True", "None"]),
    ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, ["None", "backend:native"]),
])
def test_what_a_launched_process_is_given(tmp_path, monkeypatch, own, expected):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("PET_NNODES", "2")  # for which torch's launcher would wait
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning")
    lines = []
    with stop_signals() as stop:
        assert run_ranks([sys.executable, "-c", PROBE], tmp_path, lines.append, stop) == 3
    assert lines == [*expected, "checks are on", "x"] and stop.signum is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    environment = rank_environment(tmp_path)
    assert [environment[name] for name in (
        "GOMP_SPINCOUNT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PYTHONUNBUFFERED", MARK)] == [
            "1000", "5", "1", str(tmp_path / FAILURES)]
    report = (tmp_path / REPORT).read_text(encoding="utf-8")
    assert "_tensor` is" not in report and ".another` is" in report
    assert make_plan("00", out=tmp_path / "run").notes[-1].startswith("PYTHONOPTIMIZE: the ranks")


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stop_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_nothing_outlives_the_launcher(tmp_path):
    pids = []
    command, before = [sys.executable, "-c", LEAVES_A_CHILD], time.monotonic()
    run_ranks(command, tmp_path, lambda line: pids.append(int(line)), Stop())
    assert len(pids) == 1 and gone(pids[0])
    assert time.monotonic() - before < CHILD_S - 10, "the child ended by itself"

    def broken(line):
        pids.append(int(line))
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_ranks([*command, "wait"], tmp_path, broken, Stop())
    assert len(pids) == 2 and gone(pids[1])
    assert time.monotonic() - before < CHILD_S - 10, "the launcher ended by itself"


@posix
def test_a_killed_command_ends_its_ranks(tmp_path):
    script, pid = tmp_path / "silent.py", tmp_path / "pid"
    script.write_text("import os, pathlib, time\n"
                      f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(99)")
    launcher = [sys.executable, str(LAUNCHER), "--standalone", "--local-addr=127.0.0.1", script]
    code = f"import subprocess; subprocess.run({[*map(str, launcher)]}, start_new_session=True)"
    killed = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not (pid.exists() and pid.read_text()):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    assert any(gone(int(pid.read_text())) for _ in range(5))


def start(*arguments, **options):
    """Starts the command in a process group of its own."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], encoding="utf-8", stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, **options,
    )


@posix
def test_ctrl_c(script, shards, tmp_path):
    out = tmp_path / "run"
    process = start(script, "--data", shards, "--nproc", 2, "--out", out, "--set", "ending=hang")
    lines = iter(process.stdout.readline, "")
    assert next(lines).startswith("scale: tiny (")
    assert any(line.startswith("step:200/200") for line in lines)
    for _ in range(3):  # impatience changes nothing
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert stderr == f"error: interrupted\nthe log so far: {out / 'log.txt'}\n"
    noise = sorted(out.glob("stderr_rank*.txt"))  # of ranks that died with a traceback
    assert noise and all(file.read_text("utf-8").endswith("KeyboardInterrupt\n") for file in noise)
    others = {file.name for file in out.iterdir()} - {file.name for file in noise}
    assert others == {"log.txt", "train_gpt.py"}
    assert no_process_of(out)


@posix
def test_a_killed_rank(script, shards, tmp_path):
    out = tmp_path / "run"
    process = start(script, "--data", shards, "--nproc", 3, "--out", out, "--set", "ending=killed",
                    env=os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"})
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + 9
    assert stderr == ("error: rank 2 was killed by SIGKILL (out of memory?)\n"
                      f"the log so far: {out / 'log.txt'}\n")
    assert (out / "log.txt").exists() and not (out / "ranks").exists()
    assert no_process_of(out)


@posix
@pytest.mark.parametrize("what, options", [
    ("the script's copy", []),
    ("checkpoint", ["--set", "ending=full disk", "--steps", "20"]),
])
def test_a_full_disk(script, shards, tmp_path, what, options):
    import resource  # only POSIX has it

    out, largest = tmp_path / "run", 1000 if what == "the script's copy" else 32 * 1024
    process = start(  # a limit on the size of a file is like a disk that is full
        script, "--data", shards, "--out", out, *options,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
    )
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    error, *more = stderr.splitlines()
    assert error.startswith(f"error: cannot write in {out}: File too large")
    if what == "the script's copy":
        assert not more and not out.exists()
    else:
        assert more[0].startswith(f"the log so far: {out / 'log.txt'}") and len(more) == 1
        assert read_log(out / "log.txt").last.step == 20
        assert not (out / "checkpoint.partial").exists() and not (out / "summary.json").exists()


def no_process_of(out):
    """Whether no process has the run's folder on its command line (seen where there is /proc)."""
    for _ in range(20):
        if not any(str(out).encode() in command for command in command_lines()):
            return True
        time.sleep(0.1)
    return False


def command_lines():
    """The command lines of the processes that run now."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            yield file.read_bytes()


def test_a_whole_run_as_json(script, shards, tmp_path):
    out = tmp_path / "run"
    process = start(script, "--data", shards, "--nproc", 2, "--out", out, "--steps", 10, "--json")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    assert summary == json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary == dict(
        milestone=None, script=str(script), scale="tiny", data=str(shards), data_fingerprint=None,
        device="cpu", world_size=2, val_loss=4.9, steps=10,
        tokens=40960,  # the tiny scale's batch of 4,096 tokens, ten times
        train_time_s=0.1, step_avg_ms=10.0, tokens_per_s=pytest.approx(409600), mfu=None,
        peak_memory_mib=None, rows={}, log=str(out / "log.txt"), official={}, changed="")
    assert stderr.startswith("scale: tiny (") and stderr.rstrip().endswith("log.txt")
    assert "step:10/10" in stderr
    assert sorted(file.name for file in out.iterdir()) == [
        "log.txt", "stderr_rank1.txt", "summary.json", "train_gpt.py"]
    assert (out / "train_gpt.py").read_text(encoding="utf-8") == FAKE
    assert read_log(out / "log.txt").environment["from_outside"] is False


# ---- the command itself ----


def test_a_dry_run_prints_the_command_and_imports_nothing_heavy(tmp_path):
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], "00", "--dry-run", "--out",
         str(tmp_path / "run")], capture_output=True, encoding="utf-8",
    )
    assert process.returncode == 0
    imported = {line.split("|")[-1].strip() for line in process.stderr.splitlines()}
    assert "speedrun.run.plan" in imported and not imported & {"torch", "numpy", "rich"}
    assert not (tmp_path / "run").exists()
    assert shlex.split(process.stdout) == make_plan("00", out=tmp_path / "run").command


@pytest.mark.parametrize("words, expected", [
    ("--prompt ''", dict(scale=None, data=None, steps=None, device_batch=None,
                         settings=["prompt="], nproc=None, nodes=Nodes(1, 0, None), out=None,
                         save_checkpoint=False, start=None, for_elsewhere=False, search=True,
                         use_cache=True)),
    ("--scale tiny --data d --steps 7 --device-batch auto --set a=1 --set b=2 --prompt hi --nproc 3"
     " --nnodes 5 --node-rank 4 --rdzv-endpoint x:1 --out o --save-checkpoint --from f --dry-run"
     " --no-cache",
     dict(scale="tiny", data=Path("d"), steps=7, device_batch="auto",
          settings=["prompt=hi", "a=1", "b=2"], nproc=3, nodes=Nodes(5, 4, "x:1"), out=Path("o"),
          save_checkpoint=True, start=Path("f"), for_elsewhere=True, search=False,
          use_cache=False)),
])
def test_every_option_has_its_effect(words, expected, monkeypatch):
    given = {}

    def plan(target, **options):
        given.update(options)
        return SimpleNamespace(notes=[])

    def fit(plan, stream, **options):
        raise LookupError(given.update(options))

    monkeypatch.setattr(run_milestone, "make_plan", plan)
    monkeypatch.setattr(run_milestone, "fit_micro_batch", fit)
    monkeypatch.setattr(sys, "argv", ["run_milestone.py", "01", *shlex.split(words)])
    with pytest.raises(LookupError):
        run_milestone.main()
    assert given == expected


def test_a_wrong_command_line_is_one_line_on_stderr(monkeypatch, capsys):
    process = subprocess.run([*COMMAND, "99x"], capture_output=True, encoding="utf-8")
    assert process.returncode == 1 and process.stdout == ""
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1
    assert [run_milestone.positive_or_auto(text) for text in ("auto", "3")] == ["auto", 3]
    for wrong in (["--nproc", "0"], ["--steps", "x"], ["--out", ""], ["--data="],
                  ["--device-batch", "atuo"]):
        monkeypatch.setattr(sys, "argv", ["run_milestone.py", "00", *wrong])
        with pytest.raises(SystemExit) as ended:
            run_milestone.main()
        stdout, stderr = capsys.readouterr()
        assert ended.value.code == 2 and stdout == ""
        assert stderr.startswith("error: ") and stderr.count("\n") == 1


def test_the_settings_are_listed_with_their_meaning(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_milestone.py", "05k", "--help-settings"])
    monkeypatch.setenv("COLUMNS", "200")
    assert run_milestone.main() == 0
    rows = {line.split()[0]: " ".join(line.split()[1:])
            for line in capsys.readouterr().out.splitlines()}
    plan = make_plan("05k", scale="tiny", out=Path("none"))
    assert rows.keys() - {"--set"} == plan.script.hyperparameters.keys() - {"log_dir"}
    assert rows["vocab_size"].startswith("50_304 257 tokens Rows of the embedding table")
    assert rows["window_pattern"].startswith("LSSSLSSLSSSL LSLL A letter per layer")
    assert rows["save_checkpoint"].startswith("False Whether") and rows["adam_eps"].startswith(
        "5.24288e-05 4.1e-07 Summand") and rows["use_fp8"].startswith("False Whether")
