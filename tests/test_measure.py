"""Measuring on GPUs, tried without one: order, losses, interruption, the file, the table.

Run: .venv/bin/python -m pytest tests/test_measure.py
"""

import io
import json
import os
import re
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compare_milestones
from snapshots import MANIFEST
from speedrun import compat
from speedrun.base.errors import Stopped, UserError
from speedrun.compare import measure as measuring
from speedrun.figures.measured import NOT_YET, measured_table, rates
from speedrun.history.measured import (
    MEASURED,
    Machine,
    Measurement,
    Timing,
    load_measurement,
    load_measurements,
    write_measurement,
)
from speedrun.history.predictions import StoredPrediction
from speedrun.run import data, gpus, kernels
from speedrun.run.kernels import OK, TRIALS, try_kernel
from speedrun.run.plan import make_plan
from speedrun.scripts.find import code_hash

H100 = "NVIDIA H100 80GB HBM3"
FIRST, SECOND, THIRD = (  # the official figures are invented, so that they never change
    replace(MANIFEST.get(id), step_avg_ms=ms) for id, ms in (("01", 20_000.0), ("05d", 40_000.0),
                                                             ("p6d", None)))
posix = pytest.mark.skipif(os.name == "nt", reason="a script stands for nvidia-smi")


# ---- the command, with a stand-in for the runs ----


@pytest.fixture
def runs(monkeypatch):
    """Stands in for runs: each writes a log with 10 ms per step up to the second validation, then 2
    ms more after each. `plans` are those that were run, in order; `faults` maps a folder's name to
    an error; `gpus` are those that are there."""
    made, faults, here = [], {}, []

    def run(plan, stream):
        made.append(plan)
        if plan.out.name in faults:
            raise faults[plan.out.name]
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
        plan.out.mkdir(parents=True)
        (plan.out / "log.txt").write_text("\n".join([*lines, "peak_memory:1234MiB", ""]))

    monkeypatch.setattr(measuring, "run", run)
    monkeypatch.setattr(measuring, "visible_gpus", lambda: list(here))
    monkeypatch.setattr(measuring, "visible_memory", lambda: [81_559] * len(here))
    monkeypatch.setattr(measuring, "try_kernel", lambda name: OK)
    return SimpleNamespace(plans=made, faults=faults, gpus=here)


def measured(tmp_path, milestones=(FIRST, SECOND, THIRD), **options):
    """What `measure` returns and prints, at tiny scale."""
    stream = io.StringIO()
    options = dict(scale="tiny", steps=6) | options
    file, found, stopped = measuring.measure(
        milestones, tmp_path, tmp_path / "runs", stream, **options)
    return file, found, stopped, stream.getvalue()


def test_each_milestone_follows_a_cpu_and_is_timed(runs, tmp_path):
    file, found, stopped, text = measured(tmp_path)
    assert file.name == "cpu-1.json" and stopped is None and not found.failed
    assert [plan.out.name for plan in runs.plans[:3]] == [
        "01_muon-cpu", "01_muon-again", "01_muon-timed"]
    tile = [plan.hyperparameters["tile_size"] for plan in runs.plans[3:6]]
    assert tile == [128, 128, 32]  # what FlexAttention on a GPU would need, where losses compare
    assert runs.plans[0].hyperparameters["vocab_size"] == 272
    timed = runs.plans[2].hyperparameters
    assert (timed["train_steps"], timed["val_loss_every"]) == (6, 1)
    assert timed["val_tokens"] == 4 * 256 and timed["cooldown_steps"] == (
        MANIFEST.overrides(FIRST, "tiny")["cooldown_steps"] * 6 // 200)
    assert found.timings["muon"].step_ms == [10, 12, 14, 16, 18, 20]
    assert found.timings["muon"].passes == 4 and found.timings["muon"].code == code_hash(
        FIRST.script)
    first, more, times, *lines = text.splitlines()
    assert first.startswith("1 x CPU, embedded text, 6 steps; results: ")
    assert "1 here accumulate gradients" in more
    # 30 s a step, six steps, three milestones: 540 s, and eight times that on one rank
    assert "took the records' GPUs 9 min; with the same speed, 1 h 12 min here" in times
    assert lines[0].startswith(
        "[1/3] 01_muon: 15.0 ms (10.0–20.0, mean 15.0), 1,234 MiB; about 1 min left")
    assert lines[1] == "    CPU: float32, not compiled"
    assert lines[4] == "[3/3] p6d_padded_vocab: 15.0 ms (10.0–20.0, mean 15.0), 1,234 MiB"
    assert load_measurement(file).timings.keys() == {"muon", "tile_mask", "padded_vocab"}


@pytest.mark.parametrize("line, kept", [
    ("ann on gpu7.lab.edu: no", "… on …: no"), ("gpu7: no, ann", "…: no, …"),
    ("bob's GPU", "…'s GPU"), ("OSError: /home/ann/x.so: no", "OSError: x.so: no"),
    ("~/runs/x.so", "x.so"), (r"C:\Users\ann\x.so", "x.so"), ("ann@gpu7: no", "………: no"),
    ("connect to 10.1.2.3", "connect to …"), ("channels and announcements", None),
    ("gpu77 of 8", None), ("x" * 400, "x" * 300),
])
def test_what_is_kept_of_an_error_names_nobody(line, kept, monkeypatch):
    monkeypatch.setattr(measuring.socket, "gethostname", lambda: "gpu7.lab.edu")
    monkeypatch.setattr(measuring.Path, "home", lambda: Path("/home/ann"))
    monkeypatch.setattr(measuring.getpass, "getuser", lambda: "bob")
    assert measuring._anonymous(line) == (line if kept is None else kept)


def test_what_succeeded_is_kept_and_the_rest_is_tried_again(runs, tmp_path):
    path = Path.home() / "secret" / "x.so"
    runs.faults |= {"01_muon-timed": UserError(f"rank 0: OSError: {path}: no\nthe log so far"),
                    "p6d_padded_vocab-cpu": Stopped("interrupted", 130)}
    file, found, stopped, text = measured(tmp_path)
    assert stopped.status == 130 and found.timings.keys() == {"tile_mask"}
    assert found.failed == {"muon": "rank 0: OSError: x.so: no"}
    assert "[1/3] 01_muon: failed: rank 0: OSError: x.so: no" in text
    assert load_measurement(file).failed == found.failed
    runs.faults.clear()
    runs.plans.clear()
    file, found, stopped, text = measured(tmp_path)
    assert {plan.script.name for plan in runs.plans} == {"muon", "padded_vocab"}
    assert "1 of 3 milestones were measured before" in text and "the rest takes about" in text
    assert not (found.failed or stopped) and len(load_measurement(file).timings) == 3
    stale = replace(found.timings["muon"], code="old")
    write_measurement(file, replace(found, timings=found.timings | {"muon": stale}))
    runs.plans.clear()
    measured(tmp_path)
    assert {plan.script.name for plan in runs.plans} == {"muon"}, "its script has changed since"


@pytest.mark.parametrize("step, apart, fails", [
    (0, 0.011, True), (0, 0.009, False), (5, 0.11, True), (5, 0.09, False)])
def test_losses_that_leave_a_cpus_fail(runs, monkeypatch, step, apart, fails, tmp_path):
    read_log = measuring.read_log

    def moved(path):
        log = read_log(path)
        if path.parent.name == "01_muon-again":
            log.steps = [replace(s, val_loss=s.val_loss + apart * (s.step == step))
                         if s.val_loss else s for s in log.steps]
        return log

    monkeypatch.setattr(measuring, "read_log", moved)
    found = measured(tmp_path, [FIRST])[1]
    loss = 5 - 0.01 * step
    assert found.failed == ({"muon": f"with tiny sizes the loss at step {step} is"
                             f" {loss + apart:.4f}, on a CPU {loss:.4f}"} if fails else {})
    assert bool(found.timings) != fails


def test_a_machine_with_gpus(runs, monkeypatch, tmp_path):
    runs.gpus += [H100] * 2
    with pytest.raises(UserError, match="torch cannot use the GPUs; python tools/doctor.py"):
        measured(tmp_path, [SECOND])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr("speedrun.run.plan.visible_gpus", lambda: (
        [] if os.environ["CUDA_VISIBLE_DEVICES"] == "" else runs.gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(measuring, "try_kernel", lambda name: (
        OK if name != "Triton" else "RuntimeError: /opt/x/y.py: no kernel"))
    late = replace(MANIFEST.get("09"), step_avg_ms=None)
    file, found, _, text = measured(tmp_path, [late])
    assert file.name == "h100-80gb-hbm3-2.json" and found.machine.memory == 81_559
    assert found.machine.nccl == "2.27.3"
    assert found.kernels == dict.fromkeys(TRIALS, OK) | {
        "Triton": "RuntimeError: y.py: no kernel"}
    assert "Triton: RuntimeError: y.py: no kernel" in text.splitlines()
    cpu, gpu, timed = runs.plans
    assert (cpu.gpus, cpu.nproc, gpu.nproc, timed.nproc) == ([], 1, 2, 2)
    assert cpu.options["use_fp8"] is False and gpu.options["use_fp8"] == "True"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    write_measurement(file, replace(found, machine=replace(found.machine, driver="1.2")))
    with pytest.raises(UserError, match="was measured with another driver; move it away"):
        measured(tmp_path, [late])
    runs.gpus[1] = "NVIDIA H200"
    with pytest.raises(UserError, match=f"the GPUs differ .{H100}, NVIDIA H200"):
        measured(tmp_path, [late])


def test_a_program_without_steps_says_so(runs, tmp_path, monkeypatch):
    script = tmp_path / "generate.py"
    script.write_text("class Hyperparameters:\n    seed: int = 0\n", encoding="utf-8")
    found = measuring.find_script(str(script))
    monkeypatch.setattr(measuring, "find_script", lambda id: found)
    assert measured(tmp_path, [FIRST])[1].failed == {
        "muon": "generate.py has no train_steps, so it has no step to time"}


def test_the_embedded_text_stands_in_for_fineweb(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "has_shards", lambda folder: False)
    monkeypatch.setattr(measuring, "make_builtin_gpt2", lambda: None)
    assert measuring._tokens(None, "record") == (data.BUILTIN_GPT2, "embedded text")

    def fails():
        raise UserError("cannot make it: no vocabulary")

    monkeypatch.setattr(measuring, "make_builtin_gpt2", fails)
    with pytest.raises(UserError, match="no vocabulary; fetch some: python data/cached_fineweb10B"):
        measuring._tokens(None, "record")
    documents = [b"first \xc3\xa9", b"second"]
    folder = tmp_path / "builtin"
    folder.mkdir()
    tokens = b"".join(int(t).to_bytes(2, "little") for d in documents for t in (256, *d))
    (folder / "builtin_val_000000.bin").write_bytes(bytes(1024) + tokens)
    monkeypatch.setattr(data, "BUILTIN", folder)
    monkeypatch.setattr(data, "make_builtin", lambda: None)
    written = []
    monkeypatch.setattr(data, "_fill", lambda out, script, *options: written.append(
        (out, script, Path(options[1]).read_text(encoding="utf-8"))))
    data.make_builtin_gpt2()
    ((out, script, text),) = written
    assert (out, script) == (data.BUILTIN_GPT2, "fineweb.py")
    assert [json.loads(line)["text"] for line in text.splitlines()] == ["first é", "second"]


@pytest.mark.parametrize("arguments, code, message", [
    (["--measure"], 1, "nvidia-smi shows no GPU, so there is nothing to measure; --scale tiny"),
    (["--measure", "01"], 2, "name something to compare, or measure: --measure"),
    (["01", "--only", "02"], 2, "name something to compare, or measure"),
    (["--measure", "--only", "999"], 1, 'no milestone "999"'),
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
    runs.faults["p6d_padded_vocab-timed"] = UserError("out of memory\nthe log so far")
    monkeypatch.setattr(sys, "argv", ["x", "--measure", "--scale", "tiny", "--steps", "6",
                                      "--only", "01", "p6d", "--out", str(tmp_path)])
    with pytest.raises(UserError) as error:
        compare_milestones.main()
    assert re.fullmatch(r"1 of 2 failed, all else is in \S+/cpu-1.json: p6d_padded_vocab: out of"
                        " memory", str(error.value))
    runs.faults.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(tmp_path / "more")])
    assert compare_milestones.main() == 0
    assert capsys.readouterr().out.endswith("cpu-1.json: to contribute it, see"
                                            " history/measured/README.md\n")


@pytest.mark.slow
def test_tiny_runs_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "FOLLOWED", 4)
    found = measured(tmp_path, [FIRST, THIRD])[1]
    assert found.failed == {} and found.timings.keys() == {"muon", "padded_vocab"}
    assert all(len(timing.step_ms) == 6 for timing in found.timings.values())


# ---- kernels and GPUs ----


def test_kernels_are_tried_apart(monkeypatch):
    assert try_kernel("FP8", "cpu") == OK
    assert try_kernel("FP9", "cpu") == "KeyError: 'FP9'"
    product = compat.scaled_mm
    monkeypatch.setattr(compat, "scaled_mm", lambda *args, **kwargs: 2 * product(*args, **kwargs))
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


@posix
def test_what_nvidia_smi_reports(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(r"""#!/bin/sh
case "$1" in
*clocks.sm,*) printf '345, 0\n1700, 99\n1720, 98\n1740, 97\n'; exec sleep 60;;
*driver_version*) echo '580.95.05, GPU-aa';;
*power.limit*) echo '700.00, GPU-aa';;
*clocks.max.sm*) echo '1980, GPU-aa';;
*) echo '[N/A], GPU-aa';;
esac
""", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.gpu_facts() == dict(driver="580.95.05", power_limit=700, max_clock=1980)
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
    timing = Timing(code_hash(FIRST.script), (99.0, 101.0, 106.0), 1, 64, "CUDA: bf16", 120,
                    30_000)
    return replace(Measurement(machine, {"FP8": OK}, {"muon": timing}, {"tile_mask": "no"}),
                   **changes)


def test_committed_files_fit_and_name_nobody():
    load_measurements(MEASURED)


def test_a_file_is_written_and_read(tmp_path):
    made = a_measurement()
    write_measurement(tmp_path / made.machine.file_name, made)
    assert load_measurements(tmp_path) == (made,)
    assert made.machine.file_name == "h100-80gb-hbm3-8.json"


@pytest.mark.parametrize("change, message", [
    (lambda t: t["failed"].update(muon="OSError: /home/ann/x"), "may say who measured"),
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
    stored = {"muon": StoredPrediction("x", 34 * 2**30, 0, 0)}

    def rows(*found):
        table, *below = measured_table(found, stored, some).split("\n\n")
        return [line.strip("| ").split(" | ") for line in table.splitlines()], below

    (head, _, *lines), below = rows()
    assert head[-2:] == ["step, measured", "peak, measured"] and not below
    assert lines[0] == [
        "01_muon", "20,000.00 ms", "32,000 MiB", "34,816 MiB", "+9%", NOT_YET, NOT_YET]
    assert lines[2][1:] == ["—", "—", "not predicted", "—", NOT_YET, NOT_YET]
    slow = a_measurement()
    slow.machine = replace(slow.machine, gpu="NVIDIA GeForce RTX 4090", count=1)
    slow.timings = {"muon": replace(slow.timings["muon"], passes=8, code="old")}
    (head, _, *lines), below = rows(a_measurement(), slow)
    assert head[-4:] == [f"{what}, {name}" for name in ("8 x H100 80GB HBM3", "1 x RTX 4090")
                         for what in ("step", "peak")]
    assert lines[0][-4:] == [
        "101.0 ms (99.0–106.0, mean 102.0)", "30,000 MiB",
        "101.0 ms (99.0–106.0, mean 102.0), 8 passes, an earlier script", "30,000 MiB"]
    assert lines[1][-4:] == ["failed", "—"] * 2 and lines[2][-4:] == [NOT_YET, "—"] * 2
    assert below[0] == ("**8 x H100 80GB HBM3**: PyTorch 2.13.0, driver 580.1, power limit 700 W,"
                        " 60 steps on tokens of FineWeb. Failed: tile_mask: no.")
    assert rates([a_measurement()], "muon", 524_288) == "5,140,078 on 8 x H100 80GB HBM3"
    assert rates([a_measurement()], "tile_mask", 1) == NOT_YET
