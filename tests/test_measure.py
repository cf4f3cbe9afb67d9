"""Measuring on GPUs, tried without one: order, losses, interruption, the file, the table.

Run: .venv/bin/python -m pytest tests/test_measure.py
"""

import io
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compare_milestones
import kernel_checks
from snapshots import MANIFEST, as_options, micro_overrides
from speedrun import compat
from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.compare import measure as measuring
from speedrun.compare import parts, plans, share
from speedrun.compare.turns import End
from speedrun.figures.measured import NOT_YET, measured_table, predicted_peak, rates
from speedrun.history.manifest import REPOSITORY
from speedrun.history.measured import (
    MEASURED,
    MOST_LETTERS,
    Machine,
    Measurement,
    Timing,
    load_measurement,
    load_measurements,
    write_measurement,
)
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.run import data, gpus, kernels
from speedrun.run.kernels import OK, TRIALS, try_kernel
from speedrun.run.plan import make_plan
from speedrun.scripts.find import code_hash, load_snapshot

H100 = "NVIDIA H100 80GB HBM3"
FIRST, SECOND, THIRD = (  # the official figures are invented, so that they never change
    replace(MANIFEST.get(id), step_avg_ms=ms) for id, ms in (("01", 20_000.0), ("05d", 40_000.0),
                                                             ("p6d", None)))
posix = pytest.mark.skipif(os.name == "nt", reason="a script stands for nvidia-smi")


# ---- the command, with a stand-in for the programs ----


@pytest.fixture
def runs(monkeypatch):
    """Stands in for take_turns: every task is prepared, in order, and comes to its end at once. A
    share is timed with 10 ms a step and then 2 ms more in each part; other runs write such a log.

    plans: those that were run; faults: {a folder's or task's name: stderr, an exit code or a signal
    to this process}, each takes effect once; gpus: the visible ones; after: tasks after which the
    time is over; room: what take_turns was given; launches: the last one of each task."""
    made, faults, here = [], {}, []
    stand_in = SimpleNamespace(plans=made, faults=faults, gpus=here, after=1000, room=None,
                               launches={})

    def noted(plan_run):
        def planned(*args, **kwargs):
            made.append(plan_run(*args, **kwargs))
            return made[-1]
        return planned

    for name in ("timed_plan", "small_plan"):
        monkeypatch.setattr(plans, name, noted(getattr(plans, name)))

    def take_turns(waiting, slots, gib, seconds, is_stopped):
        stand_in.room = slots, gib, seconds
        for _ in range(stand_in.after):
            task = next((it for it in waiting if not it.after & {i.name for i in waiting}), None)
            if task is None or is_stopped():
                return
            waiting.remove(task)
            try:
                launch = stand_in.launches[task.name] = task.prepare()
            except UserError as error:
                yield task, End(None, str(error))
                continue
            name = made[-1].out.name if made and ":" in task.name else task.name
            fault = faults.pop(task.name if task.name in faults else name, None)
            launch.stderr.write_text(fault if isinstance(fault, str) else "")
            if fault is None and "speedrun.compare.share" in launch.command:
                yield task, dict(event="timed", step_ms=[10.0, 12, 14, 16, 18, 20], compile_s=61,
                                 paths="CUDA: bf16", peak_memory_mib=1234, graphs=3)
            elif fault is None and not task.name.startswith("try:"):
                write_log(made[-1])
            if isinstance(fault, signal.Signals):  # what runs is cut off
                os.kill(os.getpid(), fault)
                waiting.insert(0, task)
                return
            yield task, End(fault if isinstance(fault, int) else int(fault is not None),
                            shared=":beside" in (fault if isinstance(fault, str) else ""))

    monkeypatch.setattr(measuring, "take_turns", take_turns)
    monkeypatch.setattr(measuring, "make_builtin", lambda: None)
    monkeypatch.setattr(measuring, "visible_gpus", lambda: list(here))
    monkeypatch.setattr(measuring, "visible_memory", lambda what="total": [
        81_559 if what == "total" else 800] * len(here))
    monkeypatch.setattr(parts, "_slots", lambda: 4)
    return stand_in


def write_log(plan):
    """The log of a run whose steps take 10 ms up to the second validation, then 2 ms more after
    each."""
    values = plan.hyperparameters
    length, every = values["train_steps"], values["val_loss_every"]
    lines = [f"environment:{json.dumps(dict(device='cpu'))}",
             f"hyperparameters:{json.dumps(values)}"]
    clock, ms = 0.0, 10
    for step in range(length + 1):
        clock += ms * (step > 0)
        loss = ""
        if step % every == 0 or step == length:
            loss, ms = f"val_loss:{5 - 0.01 * step:.4f} ", ms + 2 * (step > 0)
        lines.append(f"step:{step}/{length} {loss}train_time:{clock:.0f}ms"
                     f" step_avg:{clock / max(step, 1):.2f}ms")
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "log.txt").write_text("\n".join([*lines, "peak_memory:1234MiB", ""]))


def measured(tmp_path, milestones=(FIRST, SECOND, THIRD), **options):
    """What `measure` returns and prints, at tiny scale."""
    stream = io.StringIO()
    options = dict(scale="tiny", steps=6) | options
    file, found, stopped = measuring.measure(
        milestones, tmp_path / "results", tmp_path / "runs", stream, **options)
    return file, found, stopped, stream.getvalue()


def folders(runs):
    """The folders' names of what was run since the last call."""
    names = [plan.out.name for plan in runs.plans]
    runs.plans.clear()
    return names


def test_a_share_is_timed_and_follows_a_cpu_the_most_telling_first(runs, tmp_path):
    file, found, stopped, text = measured(tmp_path, (SECOND, THIRD, FIRST))
    assert file.name == "cpu-1-of-8.json" and stopped is None and not found.failed
    assert runs.room[:2] == (4, 0) and runs.room[2] == math.inf
    timed, cpu, again = runs.plans[:3]
    assert folders(runs)[::3] == ["01_muon-timed2", "p6d_padded_vocab-timed2",
                                  "05d_tile_mask-timed2"]
    assert [plan.out.name for plan in (cpu, again)] == ["01_muon-cpu", "01_muon-gpu"]
    values = timed.hyperparameters
    assert {name: values[name] for name in (
        "total_batch_size", "micro_batch_size", "train_steps", "kernel_warmup_steps",
        "val_tokens")} == dict(total_batch_size=512, micro_batch_size=2, train_steps=200,
                               kernel_warmup_steps=0, val_tokens=512), "an eighth of 4,096 tokens"
    assert cpu.hyperparameters["vocab_size"] == 272
    timing = found.timings["muon"]
    assert timing.step_ms == [10, 12, 14, 16, 18, 20] and timing.passes == 1
    assert (timing.code, timing.within) == (code_hash(FIRST.script), 0.0001)
    launch = runs.launches["time:muon"]
    assert launch.command == [sys.executable, "-m", "speedrun.compare.share",
                              *timed.script_command[:1], "6", *timed.script_command[1:]]
    assert launch.environment.items() >= {
        "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}.items()
    assert launch.environment["PYTHONPATH"].split(os.pathsep)[0] == str(REPOSITORY / "tools")
    assert text.splitlines()[:5] == [
        f"1 of 8 x CPU, embedded text, 6 steps; results: {file}",
        "timed steps: one rank's share of 8 of a record's step, without accumulation, in the middle"
        " of the run's schedules; up to 4 program(s) compile at once, and one is timed at a time",
        "01_muon: 15.0 ms (10.0–20.0, mean 15.0), 1,234 MiB, compiled in 61 s, 3 graphs",
        "    CUDA: bf16", "01_muon: with tiny sizes the losses are within 0.0001 of a CPU's"]
    assert text.splitlines()[-1] == ("3 of 3 milestones are timed; the losses of 3 were compared"
                                     " with a CPU's")
    assert load_measurement(file).timings.keys() == {"muon", "tile_mask", "padded_vocab"}


def test_whole_steps_are_timed_by_the_log(runs, tmp_path):
    file, found, _, text = measured(tmp_path, share=False, steps=5)
    assert file.name == "cpu-1.json"
    assert text.splitlines()[1] == ("the records' steps run on 8 GPUs; 1 here accumulate gradients"
                                    " over more forward passes") and runs.room[0] == 1
    timed = next(plan for plan in runs.plans if plan.out.name == "01_muon-timed4").hyperparameters
    assert (timed["train_steps"], timed["val_loss_every"]) == (5, 1), "at most six parts"
    assert timed["val_tokens"] == 4 * 256 and timed["cooldown_steps"] == (
        MANIFEST.overrides(FIRST, "tiny")["cooldown_steps"] * 5 // 200)
    assert found.timings["muon"].step_ms == [10, 12, 14, 16, 18]
    assert found.timings["muon"].passes == 4
    tile = [plan.hyperparameters["tile_size"] for plan in runs.plans
            if plan.script.name == SECOND.slug]
    assert tile == [32, 128, 128]  # what FlexAttention on a GPU would need, where losses compare
    assert measured(tmp_path / "as the records", [], nproc=8)[3].splitlines()[1:] == [
        "0 of 0 milestones are timed; the losses of 0 were compared with a CPU's"]


@pytest.mark.parametrize("line, kept", [
    ("ann on gpu7.lab.edu: no", "… on …: no"), ("gpu7: no, ann", "…: no, …"),
    ("bob's GPU", "…'s GPU"), ("OSError: /home/ann/x.so: no", "OSError: x.so: no"),
    ("~/runs/x.so", "x.so"), (r"C:\Users\ann\x.so", "x.so"), ("ann@gpu7: no", "………: no"),
    ("connect to 10.1.2.3", "connect to …"), ("channels and announcements", None),
    ("gpu77 of 8", None), ("x" * 400, "x" * 300),
])
def test_what_is_kept_of_an_error_names_nobody(line, kept, monkeypatch):
    monkeypatch.setattr(parts.socket, "gethostname", lambda: "gpu7.lab.edu")
    monkeypatch.setattr(parts.Path, "home", lambda: Path("/home/ann"))
    monkeypatch.setattr(parts.getpass, "getuser", lambda: "bob")
    assert parts._anonymous(line) == (line if kept is None else kept)


def test_what_succeeded_is_kept_and_the_rest_is_tried_again(runs, tmp_path):
    path = Path.home() / "secret" / "x.so"
    runs.faults |= {"01_muon-timed2": f"ERROR\nOSError: {path}: no",
                    "p6d_padded_vocab-cpu": -9, "05d_tile_mask-gpu": signal.SIGTERM}
    file, found, stopped, text = measured(tmp_path)
    assert (str(stopped), stopped.status) == ("stopped by SIGTERM", 143)
    assert found.timings.keys() == {"padded_vocab", "tile_mask"}
    assert found.failed == {"muon": "OSError: x.so: no",
                            "padded_vocab": "was killed by SIGKILL (out of memory?)"}
    assert "01_muon: failed: OSError: x.so: no" in text
    assert "01_muon-cpu" not in folders(runs), "no small run where the timed one failed"
    assert load_measurement(file).failed == found.failed
    file, found, stopped, text = measured(tmp_path)
    assert folders(runs) == [
        "01_muon-timed2", "01_muon-cpu", "01_muon-gpu", "p6d_padded_vocab-cpu",
        "p6d_padded_vocab-gpu", "05d_tile_mask-cpu", "05d_tile_mask-gpu"]
    assert "before" not in text, "no milestone was measured whole"
    assert not (found.failed or stopped) and len(load_measurement(file).timings) == 3
    stale = replace(found.timings["muon"], code="old")
    write_measurement(file, replace(found, timings=found.timings | {"muon": stale}))
    measured(tmp_path)
    assert folders(runs)[0] == "01_muon-timed2", "its script has changed since"
    text = measured(tmp_path)[3]
    assert folders(runs) == [] and "3 of 3 milestones were measured before" in text


def test_the_time_runs_out_and_the_next_goes_on(runs, tmp_path):
    runs.after = 4
    file, found, stopped, text = measured(tmp_path, minutes=3)
    assert "it ends by itself after 3 min, and keeps what has finished" in text.splitlines()
    assert 3 * 60 - 9 < runs.room[2] <= 3 * 60 - 4 and stopped is None and found.timings.keys() == {
        "muon", "padded_vocab"}
    assert text.endswith("2 of 3 milestones are timed; the losses of 1 were compared with a CPU's\n"
                         "the time is over (3 min); the same command goes on\n")
    folders(runs)
    measured(tmp_path, minutes=3)
    assert folders(runs) == ["p6d_padded_vocab-cpu", "p6d_padded_vocab-gpu",
                             "05d_tile_mask-timed2", "05d_tile_mask-cpu"]


def test_a_full_disk_ends_it_in_one_line(runs, monkeypatch, tmp_path):
    written = []

    def write(path, found):
        if len(written) == 3:
            raise UserError(f"{path} cannot be written: No space left on device")
        written.append(write_measurement(path, found))

    monkeypatch.setattr(measuring, "write_measurement", write)
    with pytest.raises(UserError, match=r"^\S+ cannot be written: No space left on device$"):
        measured(tmp_path)
    kept = load_measurement(tmp_path / "results" / "cpu-1-of-8.json")
    assert kept.timings.keys() == {"muon"}
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^cannot write in \S+/file/results: Not a directory$"):
        measured(tmp_path / "file")


@pytest.mark.parametrize("step, apart, fails", [
    (0, 0.011, True), (0, 0.009, False), (5, 0.11, True), (5, 0.09, False), (5, math.nan, True)])
def test_losses_that_leave_a_cpus_fail(runs, monkeypatch, step, apart, fails, tmp_path):
    read_log = parts.read_log

    def moved(path):
        log = read_log(path)
        if path.parent.name == "01_muon-gpu":
            log.steps = [replace(s, val_loss=s.val_loss + apart) if s.step == step else s
                         for s in log.steps]
        return log

    monkeypatch.setattr(parts, "read_log", moved)
    found = measured(tmp_path, [FIRST])[1]
    loss = 5 - 0.01 * step
    assert found.failed == ({"muon": f"with tiny sizes the loss at step {step} is"
                             f" {loss + apart:.4f}, on a CPU {loss:.4f}"} if fails else {})
    assert found.timings["muon"].within == (None if fails else apart)


def on_h100s(runs, monkeypatch, count=1, gpu=H100):
    runs.gpus[:] = [gpu] * count
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr("speedrun.run.plan.visible_gpus", lambda: (
        [] if os.environ["CUDA_VISIBLE_DEVICES"] == "" else list(runs.gpus)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


def test_a_machine_with_gpus(runs, monkeypatch, tmp_path):
    runs.gpus += [H100] * 2
    with pytest.raises(UserError, match="torch cannot use the GPUs; python tools/doctor.py"):
        measured(tmp_path, [SECOND])
    on_h100s(runs, monkeypatch, 2)
    runs.faults["try:Triton"] = "RuntimeError: /opt/x/y.py: no kernel"
    late = replace(MANIFEST.get("09"), step_avg_ms=None)
    file, found, _, text = measured(tmp_path, [late])
    assert file.name == "h100-80gb-hbm3-2.json" and found.machine.memory == 81_559
    assert found.machine.nccl == "2.27.3" and runs.room[0] == 1
    assert found.timings["backout"].passes == 2, "of each rank"
    assert found.kernels == dict.fromkeys(TRIALS, OK) | {
        "Triton": "RuntimeError: y.py: no kernel"}
    assert "Triton: RuntimeError: y.py: no kernel" in text.splitlines()
    timed, cpu, gpu = runs.plans
    assert (cpu.gpus, cpu.nproc, gpu.nproc, timed.nproc) == ([], 1, 2, 2)
    assert cpu.options["use_fp8"] is False and gpu.options["use_fp8"] == "True"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert [runs.launches[f"{part}:backout"].environment["CUDA_VISIBLE_DEVICES"]
            for part in ("time", "cpu", "gpu")] == ["0,1", "", "0,1"]
    assert runs.launches["gpu:backout"].command == gpu.command
    write_measurement(file, replace(found, machine=replace(found.machine, driver="1.2")))
    with pytest.raises(UserError, match="was measured with another driver; move it away"):
        measured(tmp_path, [late])
    with pytest.raises(UserError, match="h100-80gb-hbm3-2.json was measured on other GPUs or with"
                       " other ranks than 1 of 8 x H100 80GB HBM3; choose another --out"):
        measured(tmp_path, [late], share=True)
    with monkeypatch.context() as patch:  # the folder of all machines
        patch.setattr(measuring, "MEASURED", tmp_path / "results")
        assert measured(tmp_path, [], share=True)[0].name == "h100-80gb-hbm3-1-of-8.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="2.json: .*; move it away, then start again"):
        measured(tmp_path, [late])
    runs.gpus[1] = "NVIDIA H200"
    with pytest.raises(UserError, match=f"the GPUs differ .{H100}, NVIDIA H200"):
        measured(tmp_path, [late])
    monkeypatch.setattr(measuring, "visible_memory", lambda what="total": [
        40_960 if what == "total" else 20_480] * 2)
    with pytest.raises(UserError, match="hold 20.0 of 40.0 GiB of GPU 0, NVIDIA .*; end them$"):
        measured(tmp_path, [late], share=True)
    monkeypatch.setattr(measuring, "visible_memory", lambda what="total": [
        40_960, 24_576] if what == "total" else [800, 20_480])
    assert measuring._machine([H100], 1, "FineWeb", 60, True).memory == 40_960
    runs.gpus[1] = H100
    with pytest.raises(UserError, match=r"20.0 of 24.0 GiB of GPU 1, .*; end them, or choose"
                       " others: CUDA_VISIBLE_DEVICES=0$"):
        measured(tmp_path, [late])


def test_memory_that_is_short_is_tried_alone_and_then_with_less(runs, monkeypatch, tmp_path):
    on_h100s(runs, monkeypatch)
    text = "torch.OutOfMemoryError: CUDA out of memory"
    runs.faults |= {"01_muon-timed2": f"{text} :beside", "01_muon-cpu": "AssertionError: no"}
    found = measured(tmp_path, [FIRST])[1]
    assert folders(runs)[:2] == ["01_muon-timed2"] * 2 and found.timings["muon"].passes == 1
    runs.faults["01_muon-timed2"] = text
    found.timings.clear()
    write_measurement(tmp_path / "results" / "h100-80gb-hbm3-1-of-8.json", found)
    found = measured(tmp_path, [FIRST])[1]
    assert folders(runs)[:2] == ["01_muon-timed2", "01_muon-timed1"]
    assert (found.timings["muon"].passes, found.timings["muon"].micro_batch) == (2, 1)
    runs.faults["01_muon-timed1"] = text
    found = parts.Parts([FIRST], found, tmp_path, "tiny", None)
    assert found.slots == 4 and not found.waiting
    plan = plans.timed_plan(FIRST, found.machine, "tiny", None, tmp_path)
    plan = replace(plan, nproc=2, options=plan.options | dict(
        total_batch_size=12 * 256, micro_batch_size=6))
    assert plans.fewer_sequences(plan) == 3, "four do not divide the six of each rank"


@pytest.mark.parametrize("share, scale, gib, limit_s, slots", [
    (8, "record", plans.expected_gib(FIRST), 1200, 4), (None, "tiny", 3, 7200, 1)])
def test_each_part_has_its_memory_and_its_limit(runs, share, scale, gib, limit_s, slots, tmp_path):
    machine = Machine(H100, 1, "FineWeb", 60, "3.12", "2.11", share, 81_920)
    found = parts.Parts([FIRST], Measurement(machine), tmp_path, scale, None)
    tries = [f"try:{name}" for name in TRIALS]
    assert [(task.name, task.gib, task.limit_s, [*task.after]) for task in found.waiting] == [
        *((name, 2, kernels.PATIENCE_S, []) for name in tries), ("time:muon", gib, limit_s, []),
        ("cpu:muon", 0, 900, []), ("gpu:muon", 3, 900, [*frozenset(tries)])]
    assert (found.slots, found.gib) == (slots, 80 * plans.MARGIN)
    assert [*found.take(found.waiting[0], End(-15, "it took too long"))] == [
        f"{next(iter(TRIALS))}: it took too long"]


RECORD = ("total_batch_size", "micro_batch_size", "val_tokens", "train_steps", "prefix_file")


@pytest.mark.parametrize("id, gpu, memory, ranks, share, expected", [
    ("01", H100, 81_559, 1, True, (65_536, 64, 65_536, 6200, None)),
    ("14i", H100, 81_559, 1, True, (16_384, 1, 16_384, 1285, "none")),
    ("09", H100, 81_559, 8, False, (262_144, 1, 8 * 262_144, 60, None)),
    ("09", "NVIDIA GeForce RTX 4090", 24_564, 8, False, (262_144, 1, 8 * 32_768, 60, None)),
    ("01", "NVIDIA GeForce RTX 4090", 24_564, 1, True, (65_536, 16, 16_384, 6200, None)),
])
def test_plans_at_the_records_size(id, gpu, memory, ranks, share, expected, monkeypatch, tmp_path):
    monkeypatch.setattr("speedrun.run.plan.visible_gpus", lambda: [gpu] * ranks)
    monkeypatch.setattr("speedrun.run.plan._check_files", lambda *arguments: None)
    machine = Machine(gpu, ranks, "FineWeb", 60, "3.12", "2.11", 8 if share else None, memory)
    plan = plans.timed_plan(MANIFEST.get(id), machine, "record", None, tmp_path)
    values = plan.hyperparameters
    assert tuple(values.get(name) for name in RECORD) == expected
    assert values["val_loss_every"] == (0 if share else 10)


@pytest.mark.parametrize("cores, gib, slots", [(64, 2000, 8), (9, 2000, 4), (64, 25, 3), (1, 4, 1)])
def test_programs_that_compile_share_cores_and_memory(cores, gib, slots, monkeypatch):
    monkeypatch.setattr(parts.sys, "platform", "linux")
    monkeypatch.setattr(parts.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(parts.os, "sysconf", dict(SC_PAGE_SIZE=4096, SC_PHYS_PAGES=(
        gib * 2**30 // 4096)).get)
    assert parts._slots() == slots


def test_what_a_share_takes_of_a_gpu(monkeypatch):
    """As predicted; else as the record's whole GPU; else, in doubt, alone on most."""
    predicted = load_predictions()["muon"].alone(64 * 1024) / 2**30
    assert 1 < predicted == plans.expected_gib(FIRST) < 80
    monkeypatch.setattr(plans, "find_prediction", lambda *_: None)
    assert plans.expected_gib(replace(FIRST, peak_memory_mib=30_720)) == 30 + plans.MORE_GIB
    assert plans.expected_gib(replace(FIRST, peak_memory_mib=None)) == plans.UNKNOWN_GIB


def test_what_can_be_measured():
    chains = {m.chain for m in MANIFEST.milestones if plans.measurable(m)}
    assert chains == {m.chain for m in MANIFEST.milestones} - {"encore"}
    assert {*parts.ORDER} <= {m.id for m in MANIFEST.milestones}


def test_the_schedules_of_a_share_stand_still():
    module = load_snapshot(MANIFEST.get("14i").script)
    held = SimpleNamespace(**vars(module))
    args = module.Hyperparameters()
    module_of_share = type(module)("copy")
    vars(module_of_share).update(vars(module))
    share.hold_schedules(module_of_share, args.train_steps // 2, args)
    for step in (0, 700, args.train_steps):
        assert module_of_share.stage(step, args) == held.stages(args)[1]
        window, _ = module_of_share.window_sizes(step, args)
        assert window == args.window_start + args.window_growth
    assert module_of_share.last_tied_step(args) == held.last_tied_step(args)


def test_the_embedded_text_stands_in_for_fineweb(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "make_builtin", lambda: None)
    monkeypatch.setattr(measuring, "has_shards", lambda folder: True)
    assert measuring._tokens(None, "record") == (data.FINEWEB, "FineWeb")
    assert measuring._tokens(tmp_path, "record") == (tmp_path, "other")
    assert measuring._tokens(None, "tiny") == (None, "embedded text")
    monkeypatch.setattr(measuring, "has_shards", lambda folder: False)
    monkeypatch.setattr(measuring, "make_builtin_gpt2", lambda: None)
    assert measuring._tokens(None, "record") == (data.BUILTIN_GPT2, "embedded text")

    def fails():
        raise UserError("cannot make it: no vocabulary")

    monkeypatch.setattr(measuring, "make_builtin_gpt2", fails)
    monkeypatch.setattr(measuring, "make_builtin_ids", lambda: None)
    assert measuring._tokens(None, "record") == (data.BUILTIN_IDS, "embedded bytes")
    documents = [b"first \xc3\xa9", b"second"]
    folder = tmp_path / "builtin"
    folder.mkdir()
    tokens = b"".join(int(t).to_bytes(2, "little") for d in documents for t in (256, *d))
    (folder / "builtin_val_000000.bin").write_bytes(bytes(1024) + tokens)
    monkeypatch.setattr(data, "BUILTIN", folder)
    monkeypatch.setattr(data, "make_builtin", lambda: None)
    written = []
    monkeypatch.setattr(data, "fill", lambda out, script, *options: written.append(
        (out, script, Path(options[1]).read_text(encoding="utf-8"))))
    data.make_builtin_gpt2()
    ((out, script, text),) = written
    assert (out, script) == (data.BUILTIN_GPT2, "fineweb.py")
    assert [json.loads(line)["text"] for line in text.splitlines()] == ["first é", "second"]
    (folder / "builtin_val_000000.bin").rename(folder / "builtin_train_000001.bin")
    monkeypatch.setattr(data, "BUILTIN_IDS", tmp_path / "ids")
    data.make_builtin_ids()
    for split in ("train", "val"):
        shard = tmp_path / "ids" / f"bytes_{split}_000001.bin"
        start = (50256).to_bytes(2, "little")
        assert shard.read_bytes()[1024:] == tokens.replace(b"\0\1", start)


SCRIPT = """
import time
from argparse import ArgumentParser
from dataclasses import asdict, dataclass

@dataclass
class Hyperparameters:
    train_steps: int = 1000
    compile: bool = False

def parse_args(argv):
    parser = ArgumentParser()
    parser.add_argument("--train_steps", type=int)
    parser.add_argument("--compile", action="store_true")
    return Hyperparameters(**vars(parser.parse_args(argv)))

def window_size(step, args):
    return step

class Log:
    def step(self, step, training_time_ms, loss_text):
        raise AssertionError("share.py replaces it")

seen = []

def train(log, args):
    for step in range(args.train_steps):
        seen.append(window_size(step, args))
        time.sleep(0.002 if step < 20 else 0.001)
        log.step(step + 1, 0.0, "")

def main(args):
    train(Log(), args)
"""


@pytest.mark.parametrize("answer, status", [
    ("go\n", None), ("", "the process that gives turns has ended")])
def test_a_share_waits_for_its_turn(answer, status, tmp_path, monkeypatch, capsys):
    script = tmp_path / "train_gpt.py"
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    module = load_snapshot(script)
    if status:
        with pytest.raises(SystemExit, match=status):
            share.time_share(script, 12, ["--train_steps=500"])
        assert len(module.seen) == share.FIRST
        return
    clock = iter([100, 190, 1000, 1002, 1004.2, 1006.6, 1009.2, 1012, 1015]).__next__
    monkeypatch.setattr(share, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(compat, "compiled_graphs", lambda: (3, 1))
    share.time_share(script, 12, ["--train_steps=500", "--compile"])
    ready, timed, over = map(json.loads, capsys.readouterr().out.splitlines())
    assert (ready, over) == ({"event": "ready"}, {"event": "over"})
    assert module.seen == [250] * (share.FIRST + share.ALONE + 12), "held, and ended"
    assert timed | {"paths": ""} == {
        "event": "timed", "step_ms": [1000, 1100, 1200, 1300, 1400, 1500], "paths": "", "graphs": 3,
        "breaks": 1, "compile_s": 65}  # 90 s less 20 steps of 1.25 s


def test_a_share_of_a_script_is_timed(shards, tmp_path):
    milestone = MANIFEST.get("14i")
    overrides = micro_overrides(milestone, shards, tmp_path, kernel_warmup_steps=0,
                                val_loss_every=0, train_steps=300)
    overrides["total_batch_size"] = overrides["train_seq_len"] * overrides["micro_batch_size"]
    ended = subprocess.run(
        [sys.executable, "-m", "speedrun.compare.share", milestone.script, "6",
         *as_options(overrides)], input="go\n", capture_output=True, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tools")})
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert (ended.returncode, [line["event"] for line in lines]) == (
        0, ["ready", "timed", "over"]), ended.stderr
    assert len(lines[1]["step_ms"]) == 6 and lines[1]["paths"].startswith("CPU: float32")
    steps = (tmp_path / "log.txt").read_text(encoding="utf-8").rpartition("=" * 100)[2]
    assert "step:" not in steps, "the replaced method logs nothing"


@pytest.mark.parametrize("arguments, code, message", [
    (["--measure"], 1, "nvidia-smi shows no GPU, so there is nothing to measure; --scale tiny"),
    (["--measure", "01"], 2, "name something to compare, or measure: --measure"),
    (["01", "--only", "02"], 2, "name something to compare, or measure"),
    (["--measure", "--only", "999"], 1, 'no milestone "999"'),
    (["--measure", "--only", "e0"], 2, "--only e0: finetune.py does not train on shards"),
    (["--measure", "--minutes", "0"], 2, "--minutes: 0 is not a whole number from 1 on"),
    (["01", "--minutes", "3"], 2, "name something to compare, or measure"),
    (["01", "--no-share"], 2, "name something to compare, or measure"),
    (["--measure", "--share", "--nproc", "8"], 2, "--share is one rank's; leave --nproc 8 out"),
])
def test_wrong_input_is_one_line(arguments, code, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, SystemExit)) as error:
        compare_milestones.main()
    said = capsys.readouterr()
    text = str(error.value) if error.type is not SystemExit else said.err.strip()
    assert message in text and "\n" not in text and not said.out
    assert getattr(error.value, "status", getattr(error.value, "code", None)) == code


def test_failures_end_in_one_line(runs, monkeypatch, tmp_path, capsys):
    runs.faults["p6d_padded_vocab-timed2"] = "AssertionError: no memory"
    monkeypatch.setattr(sys, "argv", ["x", "--measure", "--scale", "tiny", "--steps", "6",
                                      "--only", "01", "p6d", "--out", str(tmp_path)])
    with pytest.raises(UserError) as error:
        compare_milestones.main()
    assert re.fullmatch(r"1 failed, all else is in \S+/cpu-1-of-8.json: p6d_padded_vocab:"
                        " AssertionError: no memory", str(error.value))
    monkeypatch.setattr(sys, "argv", [word for word in sys.argv if word != "p6d"])
    assert compare_milestones.main() == 0, "what failed was not asked for"
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-3], "01", "p6d", "--out", str(tmp_path / "more")])
    assert compare_milestones.main() == 0
    assert "2 of 2 milestones are timed" in capsys.readouterr().out
    runs.faults["01_muon-timed2"] = signal.SIGTERM
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(tmp_path / "stopped")])
    with pytest.raises(UserError, match="^stopped by SIGTERM; the same command goes on after what "
                                        r"\S+/cpu-1-of-8.json holds$") as error:
        compare_milestones.main()
    assert error.value.status == 143


def test_every_option_reaches_the_measurement(monkeypatch, capsys):
    given = []

    def measure(milestones, folder, out, stream, **options):
        given.append(([m.id for m in milestones], folder, options))
        return folder / "x.json", a_measurement(failed={}), None

    monkeypatch.setattr(measuring, "measure", measure)
    for words, said in (
            ("", f"{short(MEASURED / 'x.json')}: to contribute it, see"
                 f" {short(MEASURED / 'README.md')}\n"),
            ("--only 09 01 09 --scale tiny --steps 7 --nproc 2 --data d --no-share --minutes 3"
             " --out o", "")):
        monkeypatch.setattr(sys, "argv", ["x", "--measure", *words.split()])
        assert compare_milestones.main() == 0 and capsys.readouterr().out == said
    assert given == [
        ([m.id for m in MANIFEST.milestones], MEASURED, dict(
            scale="record", steps=60, nproc=None, data=None, share=None, minutes=math.inf)),
        (["09", "01"], Path("o"), dict(
            scale="tiny", steps=7, nproc=2, data=Path("d"), share=False, minutes=3))]


@pytest.mark.slow
def test_tiny_runs_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "FOLLOWED", 4)
    found = measured(tmp_path, [FIRST, THIRD])[1]
    assert found.failed == {} and found.timings.keys() == {"muon", "padded_vocab"}
    assert all(len(timing.step_ms) == 6 for timing in found.timings.values())


# ---- kernels and GPUs ----


def test_kernels_are_tried_apart(monkeypatch):
    assert try_kernel("FP8", "cpu") == OK
    assert try_kernel("FP9", "cpu") == "KeyError: 'FP9'"
    assert kernels.trial_command("FP8")[1:] == ["-m", "speedrun.run.kernels", "FP8", "cuda"]
    ends = [sys.executable, "-Sc", "raise SystemExit(3)"]
    monkeypatch.setattr(kernels, "trial_command", lambda *_: ends)
    assert try_kernel("FP8") == "ended with exit code 3"
    monkeypatch.setattr(kernels, "PATIENCE_S", 0.001)
    assert try_kernel("FP8") == "it did not end within 0.001 s"
    product = compat.scaled_mm
    for factor in (2, math.nan):
        monkeypatch.setattr(
            compat, "scaled_mm", lambda *args, by=factor, **kwargs: by * product(*args, **kwargs))
        with pytest.raises(AssertionError, match="off by up to"):
            TRIALS["FP8"]("cpu")


def test_attention_is_held_against_scores_written_out():
    q, k, v = kernels._leaves((1, 2, 64, 64), "cpu")
    visible = torch.ones(64, 64, dtype=torch.bool).tril()
    attention = torch.nn.functional.scaled_dot_product_attention
    attention(q, k, v, is_causal=True, scale=0.1).sum().backward()
    kernels._agree_with_attention(
        attention(q, k, v, is_causal=True, scale=0.1), q, k, v, visible)
    for wrong in (attention(q, k, v, scale=0.1), attention(q, k, v, is_causal=True)):
        with pytest.raises(AssertionError, match="off by"):
            kernels._agree_with_attention(wrong, q, k, v, visible)
    q.grad = q.grad + 1
    with pytest.raises(AssertionError, match="off by"):
        kernels._agree_with_attention(
            attention(q, k, v, is_causal=True, scale=0.1), q, k, v, visible)


def test_trials_of_attention_compute_what_they_compare_with(monkeypatch):
    """With attention written out in place of the kernels, in 32 bits."""
    given, scales = [], []

    def attend(q, k, v, visible, scale):
        assert q.dtype == torch.bfloat16
        given.append(visible)
        scores = (scale * sum(scales, 1) * q.float() @ k.float().mT).masked_fill(
            ~visible, -torch.inf)
        return scores.softmax(-1) @ v.float()

    def flex(q, k, v, block_mask, scale):
        i = torch.arange(256)
        return attend(q, k, v, block_mask.mask_mod(0, 0, i[:, None], i), scale)

    def varlen(q, k, v, starts, others, longest, other, scale, window_size):
        i = torch.arange(256)
        back, document = i[:, None] - i, torch.bucketize(i, starts[1:], right=True)
        assert longest == other == starts.diff().max() and torch.equal(starts, others)
        visible = (back >= 0) & (back <= window_size[0]) & (document[:, None] == document)
        return attend(*(x.transpose(0, 1) for x in (q, k, v)), visible, scale).transpose(0, 1)

    chosen = []
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", flex)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", chosen.append)
    for name, pairs in (("FlexAttention", 256 * 257 // 2), ("FlashAttn-2", 65 * 256 - 65 * 64),
                        ("FlashAttn-3", 65 * 256 - 65 * 64)):
        TRIALS[name]("cpu")
        assert given[-1].sum() == pairs
        scales[:] = [0.5]
        with pytest.raises(AssertionError, match="off by"):
            TRIALS[name]("cpu")
        scales.clear()
    assert chosen == ["FA3", "FA3"]


def test_a_kernel_that_is_off_is_found():
    checks = kernel_checks.Checks("cpu")
    checks.fp8()
    assert not checks.failed
    exact = checks.module.fp8_product
    checks.module = SimpleNamespace(**vars(checks.module) | dict(
        fp8_product=lambda *args: 1.02 * exact(*args)))
    checks.fp8()
    assert checks.failed == ["logits, fast=True", "logits, fast=False", "gradient of inputs",
                             "gradient of weights"]


@posix
def test_what_nvidia_smi_reports(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(r"""#!/bin/sh
case "$1" in
*clocks.sm,*) printf '1720, 50\n345, 0\n400, 49\n1700, 99\n1800, 97\n'; exec sleep 60;;
*driver_version*) echo '580.95.05, GPU-aa';;
*power.limit*) echo '700.00, GPU-aa';;
*clocks.max.sm*) printf '1979.5, GPU-aa\n1, GPU-bb\n';;
*) echo '[N/A], GPU-aa';;
esac
""", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.gpu_facts() == dict(driver="580.95.05", power_limit=700, max_clock=1980)
    assert gpus.visible_capabilities() == []
    with gpus.watched_clock() as clock:
        time.sleep(1)
    assert clock == {"clock": 1720}
    monkeypatch.setenv("PATH", "")
    with gpus.watched_clock() as clock:
        pass
    assert clock == {} == gpus.gpu_facts()


def test_tiny_tiles_fit_flex_attention_on_a_gpu(monkeypatch):
    monkeypatch.setattr("speedrun.run.plan.visible_gpus", lambda: [H100])
    plan = make_plan("05d", scale="tiny")
    assert plan.options["tile_size"] == 128
    assert "tile_size: 128 (use_flex_attention needs it on a GPU)" in plan.notes
    with pytest.raises(UserError, match="tile_size=32 is not a multiple of 128, which FlexAttention"
                       " needs; change it, or add --set use_flex_attention=False"):
        make_plan("05d", scale="tiny", settings=["tile_size=32"])
    assert make_plan("09", scale="tiny").options["tile_size"] == 16, "no FlexAttention since 06"
    monkeypatch.setattr("speedrun.run.plan.visible_gpus", lambda: [])
    assert make_plan("05d", scale="tiny").options["tile_size"] == 32


# ---- the file and the table ----


def a_measurement(**changes):
    """What eight H100s measured of 01, and that 05d failed."""
    machine = Machine(H100, 8, "FineWeb", 60, "3.11.7", "2.13.0", driver="580.1", power_limit=700)
    timing = Timing(code_hash(FIRST.script), (99.0, 101.0, 106.0), 1, 64, "CUDA: bf16",
                    30_000)
    return replace(Measurement(machine, {"FP8": OK}, {"muon": timing}, {"tile_mask": "no"}),
                   **changes)


def test_committed_files_fit_and_name_nobody():
    load_measurements(MEASURED)


def test_a_file_is_written_and_read(tmp_path):
    made = a_measurement()
    write_measurement(tmp_path / made.machine.file_name, made)
    other = replace(made, machine=replace(made.machine, share=8, gpu="NVIDIA GeForce RTX 4090"),
                    kernels={"FP8": "x" * MOST_LETTERS})
    write_measurement(tmp_path / "rtx-4090-8-of-8.json", other)
    assert load_measurements(tmp_path) == (made, other)
    assert made.machine.file_name == "h100-80gb-hbm3-8.json"
    timing = replace(made.timings["muon"], step_ms=(106.0, 99.0, 101.0), peak_memory_mib=None,
                     compile_s=61, breaks=2)
    assert timing.step_text == "101.0 ms (99.0–106.0, mean 102.0)"
    assert (timing.memory_text, timing.compiled_text) == (
        "no GPU memory", ", compiled in 61 s, 2 graph breaks")


@pytest.mark.parametrize("change, message", [
    (lambda t: t["failed"].update(muon="OSError: /home/ann/x"), "may say who measured"),
    (lambda t: t["failed"].update({"/home/ann/x": "no"}), "may say who measured"),
    (lambda t: t["failed"].update(muon=r"C:\Users\ann"), "may say who measured"),
    (lambda t: t["failed"].update(muon="ann@host: no"), "may say who measured"),
    (lambda t: t["failed"].update(muon="no route to 10.1.2.3"), "may say who measured"),
    (lambda t: t["kernels"].update(FP8="x" * 301), "may say who measured"),
    (lambda t: t["machine"].update(host="ann"), 'unknown key "host"'),
    (lambda t: t.update(user="ann"), 'unknown key "user"'),
    (lambda t: t["timings"]["muon"].update(log="x"), 'muon: unknown key "log"'),
    (lambda t: t["timings"]["muon"].update(step_ms=[]), '"step_ms" must be a list of numbers'),
    (lambda t: t["timings"]["muon"].update(passes=0), '"passes" must be a whole number above 0'),
    (lambda t: t["machine"].update(tokens="mine"), '"tokens" must be one of FineWeb, '),
    (lambda t: t["machine"].update(count=4), "its name is h100-80gb-hbm3-4.json"),
    (lambda t: t.pop("failed"), 'missing key "failed"'),
    (lambda t: t.update(failed=[]), "failed: it must be a table"),
])
def test_a_file_that_does_not_fit_is_one_line(change, message, tmp_path):
    file = tmp_path / a_measurement().machine.file_name
    write_measurement(file, a_measurement())
    table = json.loads(file.read_text(encoding="utf-8"))
    change(table)
    file.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_measurement(file)
    assert str(error.value).startswith(f"{file.name}: ") and "\n" not in str(error.value)


def test_measured_stands_beside_official_and_predicted():
    some = replace(MANIFEST, milestones=(
        replace(FIRST, peak_memory_mib=32_000), SECOND, THIRD))
    stored = {"muon": StoredPrediction("x", 33 * 2**30, 2 * 2**30, 2**19)}  # alone 34 GiB

    def rows(*found):
        table, *below = measured_table(found, stored, some).split("\n\n")
        return [line.strip("| ").split(" | ") for line in table.splitlines()], below

    (head, _, *lines), below = rows()
    assert head[-2:] == ["peak, predicted", "error"] and len(lines) == 2
    assert below == ["No GPU has been measured yet.", f"Without any figure: {THIRD.id}."]
    assert lines[0] == ["01_muon", "20,000.00 ms", "32,000 MiB", "33,792 MiB", "+6%"]
    slow = a_measurement()
    slow.machine = replace(slow.machine, gpu="NVIDIA GeForce RTX 4090", count=1, driver=None,
                           power_limit=None, cuda="13.0", nccl="2.27", max_clock=2520)
    slow.kernels |= {"Triton": "off"}
    slow.timings = {"muon": replace(slow.timings["muon"], passes=8, code="old")}
    (head, _, *lines), below = rows(a_measurement(), slow)
    assert head[-4:] == [f"{what}, {name}" for name in ("8 x H100 80GB HBM3", "1 x RTX 4090")
                         for what in ("step", "peak")]
    assert lines[0][-4:] == [
        "101.0 ms (99.0–106.0, mean 102.0)", "30,000 MiB",
        "101.0 ms (99.0–106.0, mean 102.0), 8 passes, an earlier script",
        "30,000 MiB (34,816 predicted)"]
    assert lines[1][-4:] == ["failed", "—"] * 2 and len(lines) == 2
    assert below[0] == ("**8 x H100 80GB HBM3**: PyTorch 2.13.0, driver 580.1, power limit 700 W,"
                        " 60 steps on tokens of FineWeb. Failed: tile_mask: no.")
    assert below[1] == ("**1 x RTX 4090**: PyTorch 2.13.0, NCCL 2.27, clocks up to 2520 MHz,"
                        " 60 steps on tokens of FineWeb. Failed: Triton: off; tile_mask: no.")
    slow.failed[THIRD.slug] = "no"
    assert [line[0] for line in rows(slow)[0][2:]] == [FIRST.name, SECOND.name, THIRD.name]
    assert rates([a_measurement()], "tile_mask", 1) == NOT_YET
    share = a_measurement(machine=replace(slow.machine, share=8))
    assert rates([a_measurement(), share], "muon", 524_288) == (
        "5,140,078 on 8 x H100 80GB HBM3; 642,510 on 1 of 8 x RTX 4090")
    assert "a step is one rank's share of 8, in the middle of the schedules" in rows(share)[1][0]


@pytest.mark.parametrize("id, ranks, share, micro, gib", [
    ("01", 8, None, 64, 33), ("01", 4, None, 64, 34 - 8 / 7 * 3 / 4), ("01", 1, None, 32, 18),
    ("01", 4, None, 32, 18 - 8 / 7 * 3 / 4),
    ("01", 1, 8, 64, 34), ("12c", 1, 8, 1, 2 + 8 * 2 / 3),
])
def test_a_peak_is_predicted_for_the_number_of_ranks(id, ranks, share, micro, gib):
    prediction = StoredPrediction("x", 33 * 2**30, 2 * 2**30, 2**19)
    timing = Timing("x", (1.0,), 1, micro, "CUDA")
    machine = Machine(H100, ranks, "FineWeb", 60, "3.12", "2.11", share)
    found = predicted_peak(prediction, MANIFEST.get(id), machine, timing)
    assert found == pytest.approx(gib * 2**30)
