"""The report on a machine: this one as it is, and others simulated through what the probes find.

Run: .venv/bin/python -m pytest tests/test_doctor.py
"""

import ast
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import doctor
from snapshots import WRITTEN
from speedrun.doctor import machine
from speedrun.doctor.judge import NEEDED
from speedrun.doctor.machine import COMPILERS, REQUIREMENTS, Gpus, Packages, Torch
from speedrun.doctor.report import print_report
from speedrun.doctor.switches import missing_names, way_of
from speedrun.history.manifest import REPOSITORY
from speedrun.scripts.find import default_hyperparameters

H100 = "NVIDIA H100 80GB HBM3"
GIB = 2**30
REAL_PACKAGES = machine.probe_packages()
NAMES = [milestone.name for milestone in WRITTEN]
WITH_FLEX = [milestone for milestone in WRITTEN
             if "use_flex_attention" in default_hyperparameters(milestone.script)]
CPU = Torch("2.13.0+cpu", None, False, None, (), ("gloo",), True)


class Machine:
    """A machine to report on; a CPU with everything that it needs until told otherwise."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        pins = {**REAL_PACKAGES.pins, "torch": "2.13.0"}
        self.has(
            torch=(CPU, None), gpus=Gpus((), (), None), packages=Packages(pins, dict(pins), False),
            modules=(), compilers=dict.fromkeys(COMPILERS, "/bin/cc"), cores=4,
            memory=(32 * GIB, 30 * GIB), disk=200 * 10**9, shards=(0, 0, True),
        )

    def has(self, **findings):
        """Replaces what the probes find, {name of the probe: its answer}."""
        for name, finding in findings.items():
            self.monkeypatch.setattr(machine, f"probe_{name}", lambda finding=finding: finding)
            if name == "shards":
                self.monkeypatch.setattr("speedrun.run.plan.has_shards",
                                         lambda folder, finding=finding: min(finding[:2]) > 0)

    def has_gpus(self, *names, gib=80, capability=(9, 0), shards=(65, 1, True), **more):
        """A machine with these GPUs, a torch that uses them, and shards."""
        seen = Torch("2.13.0", "13.0", True, None, (capability,) * len(names), ("nccl", "gloo"),
                     True)
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        mib = (int(1024 * gib) - 441,) * len(names)  # the driver keeps a little
        self.has(**{**dict(torch=(seen, None), gpus=Gpus(names, mib, "580.65"), shards=shards,
                           modules=("triton",)), **more})
        return seen

    def has_packages(self, **installed):
        pins = REAL_PACKAGES.pins
        self.has(packages=Packages(pins, {**pins, **installed}, False))


@pytest.fixture
def computer(monkeypatch):
    """The Machine; snapshots are imported afresh, so that they ask it for their defaults."""
    monkeypatch.chdir(REPOSITORY)  # commands name files as seen from here
    loaded = [name for name in sys.modules if name.startswith("snapshot ")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    yield Machine(monkeypatch)
    for name in [name for name in sys.modules if name.startswith("snapshot ")]:
        del sys.modules[name]


@pytest.fixture
def report(capsys):
    """Runs the command; returns its exit code and its lines by name, the JSON object as `all`."""

    def run():
        code = doctor.main(["--json"])
        content = json.loads(capsys.readouterr().out)
        lines = {line["name"]: line for line in content["checks"] + content["milestones"]}
        assert [line["name"] for line in content["milestones"]] == NAMES
        assert content["ok"] == (code == 0) == (not with_status(lines, "fix"))
        assert all(line["do"] for line in lines.values() if line["status"] in ("fix", "note"))
        return code, lines | {"all": content}

    return run


def with_status(lines, status):
    return [name for name, line in lines.items() if line.get("status") == status]


# ---- machines that are fine ----


def test_this_machine(report):
    code, lines = report()
    assert code in (0, 1)
    assert lines["torch"]["text"].startswith(torch.__version__)
    assert {line["text"].split(",")[0] for line in lines["all"]["milestones"]} == {"CPU"}


def test_a_cpu(computer, report):
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == "tiny"
    assert with_status(lines, "note") == []
    assert lines["05_flex_attention"]["switches"] == dict(
        compile=False, bf16=False, use_flex_attention=False)
    assert lines["05_flex_attention"]["text"].startswith(
        "CPU, float32, no flex_attention (on a CPU it has no backward pass)")
    assert lines["01_muon"]["text"] == "CPU, float32; 0 of 33 shards"
    assert lines["01_muon"]["why"] == "compile, bf16 off: torch.cuda.is_available() is False"
    assert lines["FineWeb"]["status"] == "none" and lines["FineWeb"]["do"] is None


def test_eight_h100(computer, report):
    computer.has_gpus(*[H100] * 8, modules=("triton", "flash_attn_interface"))
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == "record"
    assert with_status(lines, "note") == with_status(lines, "none") == []
    assert lines["GPU"]["text"] == f"8 x {H100}, 80 GiB, 989 TFLOP/s in bf16"
    assert lines["CUDA"]["text"] == "torch is built for 13.0; driver 580.65"
    assert lines["ranks"]["text"].startswith("nccl on GPUs")
    assert lines["FP8"]["status"] == "ok"
    assert lines["FlashAttn-3"]["text"].startswith("through flash_attn_interface")
    assert all(all(lines[name]["switches"].values()) for name in NAMES)
    assert lines["00_baseline"]["text"] == "CUDA, bf16, compiled; 65 of 65 shards"
    assert lines["05_flex_attention"]["text"].startswith("CUDA, bf16, compiled, flex_attention;")
    assert lines["FlexAttention"]["text"] == f"there; for {', '.join(m.id for m in WITH_FLEX)}"
    assert lines["Triton"]["text"] == "there; all milestones use it"


def test_an_rtx_4090(computer, report):
    computer.has_gpus("NVIDIA GeForce RTX 4090", gib=24, capability=(8, 9), shards=(10, 1, True))
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == "record"
    assert lines["GPU"]["status"] == "note" and "--device-batch auto" in lines["GPU"]["do"]
    assert "24 GiB, 165 TFLOP/s" in lines["GPU"]["text"]
    assert lines["FP8"]["status"] == "ok"
    assert lines["FlashAttn-3"]["status"] == "none" and "Hopper" in lines["FlashAttn-3"]["text"]
    assert lines["FineWeb"]["do"] == "python data/cached_fineweb10B.py 65"
    assert lines["01_muon"]["status"] == "note" and "10 of 33 shards" in lines["01_muon"]["text"]
    assert lines["01_muon"]["do"] == "python data/cached_fineweb10B.py 33"
    assert lines["05_flex_attention"]["status"] == "ok"


def test_a_gpu_without_shards_is_told_to_fetch_them(computer, report):
    computer.has_gpus(H100, shards=(0, 0, False))
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == "tiny"
    assert lines["FineWeb"]["status"] == "note"
    assert lines["FineWeb"]["do"] == "python data/cached_fineweb10B.py 65"
    assert lines["disk"]["text"].endswith("the 66 FineWeb shards that are missing take 13.2")
    assert lines["corpus"]["text"] == "the first run at tiny scale makes it"


@pytest.mark.parametrize("modules, status", [(("kernels",), "ok"), ((), "none")])
def test_flash_attention_3_on_hopper(computer, report, modules, status):
    computer.has_gpus(H100, modules=("triton", *modules))
    line = report()[1]["FlashAttn-3"]
    assert line["status"] == status
    assert modules or line["do"] == "pip install kernels"


def test_different_gpus_have_lines_of_their_own(computer, capsys):
    computer.has_gpus(H100, H100, "NVIDIA Something")
    assert doctor.main(["--json"]) in (0, 1)
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [c["text"] for c in checks if c["name"] == "GPU"] == [
        f"2 x {H100}, 80 GiB, 989 TFLOP/s in bf16",
        "1 x NVIDIA Something, 80 GiB, peak not known, so no MFU is shown",
    ]


# ---- what is to be repaired, or could be better ----


def test_no_torch(computer, report):
    computer.has(torch=(None, "not installed"))
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == ["torch"]
    assert lines["torch"]["do"] == "pip install -r requirements.txt"
    assert {lines[name]["text"] for name in NAMES} == {"not known without torch"}
    pins = REAL_PACKAGES.pins
    computer.has(packages=Packages(pins, pins, unused_venv=True))
    assert report()[1]["torch"]["do"].startswith(". .venv/bin/activate")
    computer.has(torch=(None, "cannot be imported: libcudart.so.13"))
    assert report()[1]["torch"]["do"] == "pip install --force-reinstall torch==2.13.0"


def test_a_bare_python():
    command = [sys.executable, "-S", str(REPOSITORY / "tools" / "doctor.py")]  # no site-packages
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["fix", "torch", "not", "installed"] in lines
    assert ended.stdout.splitlines()[-1].startswith("to repair first: torch, packages")


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 9, "final", 0))
    with pytest.raises(SystemExit, match="error: this is Python 3.10.9; Python 3.11 or newer is"):
        doctor.main([])


def test_another_torch_is_noted(computer, report):
    computer.has(torch=(Torch("2.9.1+cpu", None, False, None, (), ("gloo",), True), None))
    code, lines = report()
    assert code == 0 and lines["torch"]["status"] == "note"
    assert lines["torch"]["do"] == "pip install torch==2.13.0"


def test_an_old_torch_that_lacks_a_function(computer, report, monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "rms_norm")
    code, lines = report()
    concerned = [m.name for m in WRITTEN if "F.rms_norm" in m.script.read_text(encoding="utf-8")]
    assert code == 1 and with_status(lines, "fix") == concerned != []
    assert "lacks torch.nn.functional.rms_norm" in lines[concerned[0]]["text"]


def test_an_old_torch_that_lacks_a_module(computer, report, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == [m.name for m in WITH_FLEX]
    assert lines["05_flex_attention"]["text"].startswith("ModuleNotFoundError: ")


@pytest.mark.parametrize("shards, status", [((65, 1, True), "fix"), ((0, 0, True), "note")])
def test_gpus_that_torch_does_not_use(computer, report, shards, status):
    computer.has_gpus(*[H100] * 8, shards=shards, torch=(CPU, None))
    code, lines = report()
    assert lines["GPU"]["status"] == status and code == (status == "fix")
    assert lines["GPU"]["text"] == f"8 x {H100}, but this torch is a build without CUDA"
    assert lines["GPU"]["do"] == "pip install --force-reinstall torch==2.13.0"
    old_driver = Torch("2.13.0", "13.0", False, "driver too old", (), ("nccl", "gloo"), True)
    computer.has(torch=(old_driver, None))
    line = report()[1]["GPU"]
    assert line["text"].endswith("torch cannot use CUDA: driver too old")
    assert line["do"] == "update the NVIDIA driver to one for CUDA 13.0"


def test_a_gpu_without_bfloat16(computer, report):
    computer.has_gpus("Tesla T4", gib=15, capability=(7, 5))
    line = report()[1]["GPU"]
    assert line["status"] == "note" and "--set bf16=False" in line["do"]


@pytest.mark.parametrize("findings, name", [
    (dict(modules=()), "Triton"),
    (dict(compilers={"C": None, "C++": None}), "compiler"),
    (dict(torch=(Torch("2.13.0", "13.0", True, None, ((9, 0),), ("gloo",), True), None)), "ranks"),
    (dict(memory=(GIB, GIB // 4)), "memory"),
    (dict(disk=5 * 10**7), "disk"),
])
def test_what_a_gpu_needs(computer, report, findings, name):
    computer.has_gpus(H100)
    computer.has(**findings)
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == [name]


@pytest.mark.parametrize("findings, name", [
    (dict(modules=()), "Triton"),
    (dict(compilers={"C": None, "C++": None}), "compiler"),
    (dict(memory=(None, None)), "memory"),
    (dict(memory=(32 * GIB, None)), "memory"),
])
def test_what_a_cpu_does_not_need(computer, report, findings, name):
    computer.has(**findings)
    code, lines = report()
    assert code == 0 and lines[name]["status"] in ("ok", "none")


def test_a_cpu_needs_gloo(computer, report):
    computer.has(torch=(Torch("2.13.0", None, False, None, (), (), True), None))
    assert with_status(report()[1], "fix") == ["ranks"]


def test_little_disk(computer, report):
    computer.has_gpus(H100, shards=(5, 0, True), disk=3 * 10**9)
    code, lines = report()
    assert code == 0 and lines["disk"]["status"] == "note"
    assert lines["disk"]["do"] == "python data/cached_fineweb10B.py 18"  # 5, and room for 13
    computer.has(disk=3 * 10**8)
    assert report()[1]["disk"]["do"] == "free some space"
    computer.has(shards=(65, 1, True))
    assert report()[1]["disk"]["status"] == "ok"


def test_gpus_among_which_a_step_does_not_divide(computer, report):
    computer.has_gpus(*[H100] * 3)
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == NAMES
    assert "does not divide among 3 ranks" in lines["01_muon"]["text"]
    assert lines["01_muon"]["do"] == "python tools/run_milestone.py 01 --nproc 2"


@pytest.mark.parametrize("installed, status", [
    (dict(numpy=None), "fix"), (dict(jupyter=None, numpy=None), "fix"),
    (dict(jupyter=None), "note"), (dict(numpy="1.26.0"), "note"), (dict(torch=None), "ok"),
    ({}, "ok"),
])
def test_packages(computer, report, installed, status):
    computer.has_packages(**installed)
    line = report()[1]["packages"]
    assert line["status"] == status
    assert all(name in line["text"] for name in installed if status != "ok")


def test_the_needed_packages_are_those_that_snapshots_import():
    imported = set()
    for milestone in WRITTEN:
        for node in ast.walk(ast.parse(milestone.script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", *NEEDED} - {"rich"}


# ---- ways ----


def test_the_ways_are_those_of_the_scripts(computer, tmp_path):
    script = tmp_path / "train_gpt.py"
    script.write_text(
        "from dataclasses import dataclass\nimport os\nimport torch.nn as nn\n\n@dataclass\n"
        "class Hyperparameters:\n    bf16: bool = nn.Module is None  # because\n"
        "    fp8_head: bool = bool(os.sep)\n    save: bool = False\n"
        "    log_dir: str = os.getcwd()\n\ndef f(nn2):\n    os.path.nothing, nn.functional.none\n"
        "    nn2.none, nn.Module.none, nn.none.more\n", encoding="utf-8")

    class Milestone:
        pass

    milestone = Milestone()
    milestone.script = script
    way = way_of(milestone)
    assert way.switches == dict(bf16=False, fp8_head=True)
    assert way.questions == dict(bf16="nn.Module is None", fp8_head="bool(os.sep)")
    assert way.comments == dict(bf16="because", fp8_head="")
    assert way.fault == (f"torch {torch.__version__} lacks posixpath.nothing,"
                         " torch.nn.functional.none, torch.nn.none").replace("posixpath",
                                                                             os.path.__name__)
    tree = ast.parse("torch.nn.functional.rms_norm\ntorch.nothing")
    assert missing_names(tree, sys.modules[__name__]) == ["torch.nothing"]


# ---- probes ----


def test_requirements_are_read(tmp_path):
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    assert len(REAL_PACKAGES.pins) == sum("==" in line for line in lines)
    assert REAL_PACKAGES.installed["torch"] == torch.__version__
    file = tmp_path / "requirements.txt"
    file.write_text("# a==1\npytest==0.1  # why\nno.such_thing==2.0;x\n", encoding="utf-8")
    found = machine.probe_packages(file)
    assert found.pins == {"pytest": "0.1", "no.such_thing": "2.0"}
    assert found.installed == {"pytest": pytest.__version__, "no.such_thing": None}


def test_this_machine_is_probed(monkeypatch, tmp_path):
    found, error = machine.probe_torch()
    assert error is None and found.version == torch.__version__
    assert found.sees_cuda == torch.cuda.is_available() and found.flex_attention
    assert machine.probe_cores() >= 1 and machine.probe_disk() > 0
    memory, available = machine.probe_memory()
    assert memory is None or memory > 2**27 and (available is None or available <= memory)
    compiler = tmp_path / "my-cc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", str(compiler))
    assert machine.probe_compilers() == {"C": str(compiler), "C++": None}


def test_a_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.probe_torch() == (None, "not installed")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    found, error = machine.probe_torch()
    assert found is None and error.startswith("cannot be imported: ") and "\n" not in error


def test_modules_are_looked_for(monkeypatch):
    names = ("json.decoder", "json.no_such", "no_such", "no_such.module")
    monkeypatch.setattr(machine, "MODULES", names)
    assert machine.probe_modules() == ("json.decoder",)


def test_shards_are_counted(monkeypatch, tmp_path):
    for name in ("x_train_1.bin", "x_train_2.bin", "x_val_0.bin"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "FINEWEB", tmp_path)
    monkeypatch.setattr(machine, "BUILTIN", tmp_path / "none")
    assert machine.probe_shards() == (2, 1, False)


# ---- how it is shown ----


def test_plain_lines_are_aligned(computer, capsys):
    computer.has(disk=0)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "to repair first: disk"
    column = lines[0].index("3.")
    for line in lines[:-1]:
        assert line[column - 2 : column] == "  " and line[column] != " "
    at = next(i for i, line in enumerate(lines) if line.startswith("fix   disk"))
    assert lines[at + 1].strip() == "-> free some space"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_terminal_of_any_width(computer, columns, monkeypatch):
    from speedrun.doctor.report import Finding, Report

    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    stream.isatty = lambda: True
    checks = [Finding("GPU", "note", "a long [text] " * 12, "run " * 12), Finding("CPU", "ok", "2")]
    print_report(Report("tiny", checks, []), stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())  # without colours
    assert max(map(len, text.splitlines())) <= columns
    assert (["note", "GPU"] in [line.split() for line in text.splitlines()]) == (columns == 40)
    assert text.split().count("[text]") == 12 and text.count("→") == 1  # markup is not read
    assert "fine: every written milestone" in " ".join(text.split())
