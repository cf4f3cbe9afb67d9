"""The report on a machine: this one as it is, and others simulated through what the probes find.

Run: .venv/bin/python -m pytest tests/test_doctor.py
"""

import ast
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import doctor
import shards as shard_files
from snapshots import MILESTONES, handles
from speedrun.doctor import checks
from speedrun.doctor.checks import NEEDED, REQUIREMENTS, pins
from speedrun.doctor.report import Finding, Report
from speedrun.history import manifest
from speedrun.history.blocks import statements
from speedrun.history.manifest import REPOSITORY, load_manifest

H100 = "NVIDIA H100 80GB HBM3"
# On invented machines the report is only about these milestones, so that it is short.
LAST = load_manifest().of_chain().milestones[-1]
TRIED = [*map(load_manifest().get, ("00", "01", "02", "05")), LAST]
SHORT = SimpleNamespace(milestones=TRIED, overrides=load_manifest().overrides,
                        get=load_manifest().get)
NAMES = [milestone.name for milestone in TRIED]
WITH_FLEX = [milestone for milestone in TRIED
             if "flex" in handles(milestone).PATHS]


class Machine:
    """A machine to report on; a CPU with everything that it needs until told otherwise."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch.setattr
        self.monkeypatch = monkeypatch
        self.has_torch()
        self.has_packages()
        self.patch(checks, "try_kernel", lambda name: "ok")
        self.patch(checks, "find_fault", lambda: None)
        self.has(gpus=[], modules=(), compilers=True, disk=200 * 10**9, shards=(0, 0, True))

    def has(self, gpus=None, gib=80, modules=None, compilers=None, disk=None, shards=None):
        """gpus: names; gib: memory of each; compilers: whether there are any; disk: bytes
        that are free; shards: training, validation, the embedded corpus."""
        if gpus is not None:
            mib = int(1024 * gib) - 441  # the driver keeps a little
            self.patch(checks, "visible_gpus", lambda: list(gpus))
            self.patch(checks, "visible_memory", lambda: [mib] * len(gpus))
            self.patch(checks, "cuda_fault", lambda: None)
        if modules is not None:
            kernels = ("triton", "flash_attn_interface")
            self.patch(checks, "find_spec", lambda name: (
                name in modules or None if name in kernels else find_spec(name)))
        if compilers is not None:
            self.patch(shutil, "which", lambda program: "/bin/cc" if compilers else None)
        if disk is not None:
            self.patch(shutil, "disk_usage", lambda path: SimpleNamespace(free=disk))
        if shards is not None:
            self.patch(checks, "count_shards", lambda: shards[:2])
            self.patch(checks, "has_shards", lambda folder: shards[2])
            self.patch("speedrun.run.plan.has_shards", lambda folder: min(shards[:2]) > 0)

    def has_torch(self, version="2.13.0+cpu", cuda=None, capabilities=(), backends=("gloo",),
                  warning=None):
        """cuda: the version that it is built for; capabilities: of the GPUs that it can use;
        warning: what it says where it can use none."""

        def is_available():
            if warning:
                warnings.warn(warning, stacklevel=1)
            return bool(capabilities)

        forget_snapshots()
        self.patch(torch, "__version__", torch.torch_version.TorchVersion(version))
        self.patch(torch.version, "cuda", cuda)
        self.patch(torch.cuda, "is_available", is_available)
        self.patch(torch.cuda, "device_count", lambda: len(capabilities))
        self.patch(torch.cuda, "get_device_capability",
                   lambda device=0: capabilities[device])
        self.patch(torch.distributed, "is_nccl_available", lambda: "nccl" in backends)
        self.patch(torch.distributed, "is_gloo_available", lambda: "gloo" in backends)

    def has_gpus(self, *names, capability=(9, 0), **more):
        """A machine with these GPUs, a torch that uses them, and shards."""
        self.has_torch("2.13.0", "13.0", [capability] * len(names), ("nccl", "gloo"))
        self.has(**dict(dict(gpus=names, shards=(65, 1, True), modules=("triton",)), **more))

    def has_packages(self, **versions):
        """Packages as pinned, but for these versions (None: not installed)."""

        def version(name):
            if (found := versions.get(name, pins()[name])) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        self.patch(importlib.metadata, "version", version)

    def lacks(self, module):
        """Makes it impossible to import a module."""
        self.monkeypatch.setitem(sys.modules, module, None)


def forget_snapshots():
    """Lets the next report import them again."""
    for name in [name for name in sys.modules if name.startswith("snapshot ")]:
        del sys.modules[name]


@pytest.fixture
def computer(monkeypatch):
    """The Machine; snapshots are imported afresh, so that they ask it for their defaults."""
    monkeypatch.chdir(REPOSITORY)  # commands name files as seen from here
    loaded = [name for name in sys.modules if name.startswith("snapshot ")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("speedrun.history.manifest.load_manifest", lambda: SHORT)
    yield Machine(monkeypatch)
    forget_snapshots()


@pytest.fixture
def report(capsys):
    """Runs the command; returns its exit code and its lines by name, the JSON object as `all`."""

    def run():
        code = doctor.main(["--json"])
        content = json.loads(capsys.readouterr().out)
        lines = {line["name"]: line for line in content["checks"] + content["milestones"]}
        about = [m.name for m in manifest.load_manifest().milestones]  # all, or NAMES
        assert [line["name"] for line in content["milestones"]] == about
        assert content["ok"] == (code == 0) == (not with_status(lines, "fix"))
        assert all(line["do"] for line in lines.values() if line["status"] in ("fix", "note"))
        return code, lines | {"all": content}

    return run


def with_status(lines, status):
    return [name for name, line in lines.items() if line.get("status") == status]


# ---- machines that are fine ----


def test_this_machine(report):
    lines = report()[1]
    assert lines["torch"]["text"].startswith(torch.__version__)
    assert {line["text"].split(":")[0] for line in lines["all"]["milestones"]} == {"CPU"}


def test_a_cpu(computer, report, monkeypatch):
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == "tiny"
    assert with_status(lines, "note") == []
    assert lines["FineWeb"]["do"] is None
    assert (lines["Triton"]["status"], lines["Triton"]["text"]) == (
        "none", f"not installed, only compiling for GPUs needs it; used by {len(NAMES)} milestones")
    assert re.fullmatch(r"\d+ cores?, \d+\.\d GiB of memory", lines["CPU"]["text"])
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}
    monkeypatch.setattr(os, "sysconf", pages.get, raising=False)
    assert checks.computer_check().text.endswith(", 16.0 GiB of memory")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # other systems
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert checks.computer_check().text == "1 core"
    computer.patch(checks, "find_fault", lambda: "nvidia-smi failed")
    lines = report()[1]
    assert lines["GPU"]["status"] == "note"
    assert "none visible: nvidia-smi failed; a CPU" in lines["GPU"]["text"]
    assert lines["scale"]["text"] == "tiny (nvidia-smi failed; --scale record overrides this)"


def test_eight_h100(computer, report):
    computer.has_gpus(*[H100] * 8, modules=("triton", "flash_attn_interface"))
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == "record"
    assert with_status(lines, "note") == with_status(lines, "none") == []
    assert lines["GPU"]["text"] == f"8 x {H100}, 80 GiB, 989 TFLOP/s in bf16"
    assert lines["ranks"]["text"] == "nccl on GPUs"
    assert lines["FlashAttn-3"]["text"] == "works; used by 1 milestone"
    assert lines["00_baseline"]["text"] == "CUDA: bf16, compiled"
    assert lines["FlexAttention"]["text"] == f"works; used by {len(WITH_FLEX)} milestone"
    assert lines["Triton"]["text"] == f"works; used by {len(NAMES)} milestones"
    computer.has_gpus(H100, modules=("triton",))
    line = report()[1]["FlashAttn-3"]
    assert line["status"] == "none" and "no flash_attn_interface" in line["text"]


def test_an_rtx_4090(computer, report, capsys):
    computer.has_gpus("NVIDIA GeForce RTX 4090", gib=24, capability=(8, 9), shards=(5, 1, True))
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == "record"
    assert lines["GPU"]["status"] == "note" and "--device-batch" in lines["GPU"]["do"]
    assert lines["FP8"]["status"] == "ok" and lines["CUDA"]["text"] == "torch is built for 13.0"
    assert lines["FlashAttn-3"]["status"] == "none" and "Hopper" in lines["FlashAttn-3"]["text"]
    assert lines["FineWeb"]["text"] == f"5 training shards, 1 of validation; {LAST.id} reads 5"
    assert lines["FineWeb"]["status"] == "ok"
    # advice is for the milestone that is asked for
    doctor.main(["01", "--json"])
    checks_of = {line["name"]: line for line in json.loads(capsys.readouterr().out)["checks"]}
    assert checks_of["FineWeb"]["status"] == "note"
    assert checks_of["FineWeb"]["text"].endswith("; 01 reads 33, at record scale only")
    assert checks_of["FineWeb"]["do"] == "python data/cached_fineweb10B.py 33"
    assert "run_milestone.py 01 --nproc 1" in checks_of["GPU"]["do"]


@pytest.mark.parametrize("shards", [(0, 0), (5, 0), (4, 1)])
def test_a_gpu_without_shards_is_told_to_fetch_them(computer, report, shards):
    computer.has_gpus(H100, shards=(*shards, False))
    code, lines = report()
    assert code == 0 and lines["all"]["scale"] == ("record" if all(shards) else "tiny")
    assert lines["FineWeb"]["status"] == "note"
    assert lines["FineWeb"]["do"] == "python data/cached_fineweb10B.py 5"


def test_kernels_are_tried_where_there_are_gpus(computer, report):
    tried = []

    def fails(name):
        tried.append(name)
        return "RuntimeError: no kernel image" if name in ("FP8", "FlashAttn-2") else "ok"

    computer.patch(checks, "try_kernel", fails)
    assert report()[0] == 0 and tried == []
    computer.has_gpus(H100)
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == ["FP8", "FlashAttn-3"]
    assert tried == ["Triton", "FlexAttention", "FP8", "FlashAttn-2"]
    assert lines["Triton"]["text"].startswith("works; ")
    assert lines["FP8"]["text"].startswith("FP8 fails, RuntimeError: no kernel image; used by ")
    assert lines["FP8"]["do"].endswith(": --set use_fp8=False")
    assert lines["FlashAttn-3"]["do"].endswith(": --set attention_kernel=dense")


def test_different_gpus_have_lines_of_their_own(computer, capsys):
    computer.has_gpus(H100, H100, "NVIDIA Something")
    assert doctor.main(["--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["checks"]
    first, second, both = (line["text"] for line in lines if line["name"] == "GPU")
    assert first.startswith(f"2 x {H100}, 80 GiB") and second.startswith("1 x NVIDIA Something, ")
    assert both.startswith(f"2 x {H100}, 1 x NVIDIA Something: all take the same share")
    computer.patch(checks, "visible_capabilities", lambda: [(9, 0), (9, 0), (7, 5)])
    doctor.main(["--all"])
    assert "no bfloat16 tensor cores, without which" in capsys.readouterr().out, "the least decides"


# ---- what is to be repaired, or could be better ----


def test_no_torch(computer, report):
    computer.lacks("torch")
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == ["torch"]
    assert lines["torch"]["do"].endswith("-B .venv/installed")
    assert {lines[name]["text"] for name in NAMES} == {"not known without torch"}
    assert not {"CUDA", "ranks", "Triton", "FP8"} & lines.keys()


def test_a_torch_that_cannot_be_imported(computer, report):
    computer.lacks("torch.distributed")
    computer.has_packages(torch="2.13.0")
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == ["torch"]
    assert lines["torch"]["text"].startswith("cannot be imported: import of torch.distributed")
    assert lines["torch"]["do"] == f"pip install --force-reinstall torch=={pins()['torch']}"


def test_a_bare_python():
    command = [sys.executable, "-S", str(REPOSITORY / "tools" / "doctor.py")]  # no site-packages
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["fix", "torch", "not", "installed"] in lines
    assert ended.stdout.splitlines()[-1].startswith("to repair first: torch, packages")


def test_an_old_torch(computer, report, monkeypatch):
    for version, status in (("2.11.0", "ok"), ("2.16.0", "note"), ("2.15.0+cu130", "ok")):
        computer.has_torch(version)
        line = checks.find_torch()[1]
        assert line.status == status and "tried with 2.11 to 2.15 on a CPU" in line.text
    computer.has_torch("2.9.1+cpu")
    code, lines = report()
    assert code == 0 and lines["torch"]["status"] == "note"
    assert lines["torch"]["do"] == "pip install torch==2.13.0"
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)
    forget_snapshots()
    code, lines = report()
    concerned = [m.name for m in TRIED if "flex_attention import" in m.script.read_text("utf-8")]
    assert code == 1 and with_status(lines, "fix") == concerned != []
    assert lines["05_flex_attention"]["text"].startswith("ModuleNotFoundError: ")


@pytest.mark.filterwarnings("ignore:driver too old")
@pytest.mark.parametrize("shards, status", [((65, 1, True), "fix"), ((0, 0, True), "note")])
def test_gpus_that_torch_does_not_use(computer, report, shards, status):
    computer.has(gpus=[H100] * 8, shards=shards, compilers=False)
    code, lines = report()
    assert lines["GPU"]["status"] == status and code == (status == "fix")
    assert lines["compiler"]["status"] == "none"
    assert lines["GPU"]["do"] == "pip install --force-reinstall torch==2.13.0"
    computer.has_torch("2.13.0", "13.0", backends=("nccl", "gloo"), warning="driver too old")
    line = report()[1]["GPU"]
    assert line["text"].endswith("torch cannot use CUDA: driver too old")
    assert line["do"] == "update the NVIDIA driver to one for CUDA 13.0"
    computer.patch(checks, "cuda_fault", lambda: "driver 5: too old: update it")
    lines = report()[1]
    assert (lines["GPU"]["text"], lines["GPU"]["do"]) == (
        f"8 x {H100}, but driver 5: too old", "update it")
    assert lines["scale"]["text"].startswith("tiny (driver 5: too old: update it; ")


@pytest.mark.parametrize("findings, name, on_a_cpu", [
    (dict(modules=()), "Triton", "none"), (dict(compilers=False), "compiler", "none"),
    (dict(disk=5 * 10**7), "disk", "fix"),
])
def test_what_a_gpu_needs_and_a_cpu_may_lack(computer, report, findings, name, on_a_cpu):
    computer.has(**findings)
    assert report()[1][name]["status"] == on_a_cpu
    computer.has_gpus(H100)
    computer.has(**findings)
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == [name]


def test_ranks_need_their_backend(computer, report):
    computer.has_torch(backends=("nccl",))
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == ["ranks"]
    computer.has_gpus(H100)
    computer.has_torch("2.13.0", "13.0", [(9, 0)], backends=("gloo",))
    code, lines = report()
    assert code == 1 and with_status(lines, "fix") == ["ranks"]
    assert "lacks nccl" in lines["ranks"]["text"]


@pytest.mark.parametrize("installed, status", [
    (dict(jupyter=None, numpy=None), "fix"), (dict(jupyter=None), "note"),
    (dict(numpy="1.26.0"), "note"), (dict(torch=None), "ok"),
])
def test_packages(computer, installed, status):
    computer.has_packages(**installed)
    line = checks.package_check()
    assert line.status == status
    assert all(name in line.text for name in installed if status != "ok")


def test_the_needed_packages_are_those_that_snapshots_import():
    imported = set()
    scripts = (milestone.script.read_text(encoding="utf-8") for milestone in MILESTONES)
    for statement in {node for script in scripts for node, _ in statements(script)}:
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    # torch brings triton along, or a snapshot does without
    assert imported - sys.stdlib_module_names - {"triton"} == {"torch", *NEEDED} - {"rich"}


# ---- what is looked up ----


def test_requirements_are_read(monkeypatch, tmp_path):
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    assert len(pins()) == sum("==" in line for line in lines)
    file = tmp_path / "requirements.txt"
    text = "# a==1\ntorch==1\npytest==0.1  # why\nno.such_thing==2.0;x\n"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(checks, "REQUIREMENTS", file)
    assert pins() == {"torch": "1", "pytest": "0.1", "no.such_thing": "2.0"}
    line = checks.package_check()
    assert line.text == f"not installed: no.such_thing; pytest {pytest.__version__} instead of 0.1"


def test_compilers_and_shards_are_looked_for(monkeypatch, tmp_path):
    for name in ("x_train_1.bin", "x_train_2.bin", "x_val_0.bin"):
        shard_files.write(tmp_path / name, [1])
    monkeypatch.setattr(checks, "FINEWEB", tmp_path)
    assert checks.count_shards() == (2, 1)
    compiler = tmp_path / "my-cc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.delenv("CXX", raising=False)
    assert checks.compiler_check(on_gpus=True).text == "none for C++; Triton needs one for C"
    for name in ("c++", "gcc"):
        (tmp_path / name).symlink_to(compiler)
    assert checks.compiler_check(on_gpus=True).text == f"{compiler}, {tmp_path / 'c++'}"
    for program in ("clang", "cc", "cl"):
        monkeypatch.setattr(shutil, "which", lambda name, it=program: (
            {it: "/c", "g++": "/d"}.get(name)))
        assert checks.compiler_check(on_gpus=True).text == "/c, /d"


# ---- how it is shown ----

ON_A_CPU = f"""
ok Python 3.12.1 (tried: 3.11 to 3.13)
ok torch {pins()["torch"]}+cpu, as pinned
ok packages {len(pins()) - 1} more as pinned
none GPU none visible; a CPU runs the tiny scale
none CUDA torch is a build without it
ok ranks gloo on a CPU
ok Triton there; used by 2 milestones
none FlexAttention trains on GPUs only, since torch 2.5; used by 1 milestone
none FP8 needs compute capability 8.9 (Ada, Hopper and later); used by 0 milestones
none FlashAttn-3 needs Hopper (H100, H200); used by 0 milestones
none compiler none for C and C++; only --set compile=True needs one
  -> sudo apt-get install build-essential
ok CPU 2 cores
ok disk 0.1 GB free; a shard of FineWeb takes 0.2
none FineWeb 1 training shard, 1 of validation; 05 reads 10, at record scale only
ok corpus the first run at tiny scale makes it
ok scale tiny (nvidia-smi shows no GPU here; --scale record overrides this)
ok 00_baseline CPU: float32, not compiled
ok 05_flex_attention CPU: float32, not compiled, no flex_attention (on a CPU it has no backward
  pass)
ok p0_vanilla CPU: no switches
fine: every milestone runs here at tiny scale"""
ON_GPUS = f"""
ok Python 3.12.1 (tried: 3.11 to 3.13)
ok torch {pins()["torch"]}, as pinned
fix packages not installed: rich, jupyter; scipy 1.0 instead of {pins()["scipy"]}
  -> make -B .venv/installed
note GPU 2 x NVIDIA GeForce RTX 4090, 24 GiB, 165 TFLOP/s in bf16; the records' have 80 GB
  -> python tools/run_milestone.py 05 --nproc 1 --device-batch auto
note GPU GPU 1: 9.0 of 24.0 GiB -> choose with CUDA_VISIBLE_DEVICES=N
ok CUDA torch is built for 13.0
ok ranks nccl on GPUs
ok Triton works; used by 2 milestones
fix FlexAttention FlexAttention fails, no; used by 1 milestone
  -> run without it, as far as a script has these: --set use_flex_attention=False
ok FP8 works; used by 0 milestones
fix FlashAttn-3 FlashAttn-2 fails, no; used by 0 milestones
  -> run without it, as far as a script has these: --set attention_kernel=dense
fix compiler none for C and C++; Triton needs one for C -> sudo apt-get install build-essential
ok CPU 2 cores
ok disk 0.3 GB free; a shard of FineWeb takes 0.2
note FineWeb 4 training shards, 1 of validation; 05 reads 10, at record scale only
  -> python data/cached_fineweb10B.py 10
ok corpus made, for the tiny scale
ok scale record (2 x NVIDIA GeForce RTX 4090, shards in data/fineweb10B)
ok 00_baseline CUDA: bf16, compiled
ok 05_flex_attention CUDA: bf16, compiled, flex_attention
ok p0_vanilla CUDA: no switches
to repair first: packages, FlexAttention, FlashAttn-3, compiler"""


@pytest.mark.parametrize("report", [ON_A_CPU, ON_GPUS], ids=["a CPU", "GPUs"])
def test_a_whole_report(computer, monkeypatch, capsys, report):
    short = SimpleNamespace(milestones=[TRIED[0], TRIED[3], load_manifest().get("p0")])
    computer.patch("speedrun.history.manifest.load_manifest", lambda: short)
    computer.has(modules=("triton",), compilers=False, disk=10**8, shards=(1, 1, False))
    if report == ON_GPUS:
        computer.has_gpus(*["NVIDIA GeForce RTX 4090"] * 2, gib=24, capability=(8, 9),
                          shards=(4, 1, True), disk=3 * 10**8)
        computer.has_packages(scipy="1.0", jupyter=None, rich=None)
        computer.patch(checks, "try_kernel", lambda name: "no" if "Fl" in name else "ok")
        computer.patch(checks, "taken_by_others", lambda: "GPU 1: 9.0 of 24.0 GiB")
    computer.patch(checks, "find_prediction", lambda *_: None)
    computer.patch(platform, "python_version", lambda: "3.12.1")
    computer.patch(checks, "computer_check", lambda: Finding("CPU", "ok", "2 cores"))
    assert doctor.main(["--all"]) == (report == ON_GPUS)
    assert capsys.readouterr().out.split() == report.split()


def test_a_brief_report_has_a_line_for_each_status():
    lines = [Finding(str(at), status, f"is {at}", status and f"do {at}")
             for at, status in enumerate(["fix", "note", "none", "ok", "fix", "none"])]
    brief = Report("tiny", lines, lines).brief
    assert brief == [*lines[:2], *lines[3:5], *(
        replace(lines[at], name="milestones",
                text=f"{count} in all chains; the first, {at}: is {at}")
        for count, at in ((1, 3), (2, 2), (1, 1), (2, 0)))]


def test_the_report_is_one_screen(computer, monkeypatch, capsys):
    computer.has(disk=0)
    assert doctor.main([]) == 1
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "to repair first: disk; --all shows each milestone"
    column = lines[0].index("3.")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("fix   disk"))
    assert lines[at + 1].strip() == "-> free some space"

    computer.has_gpus("NVIDIA GeForce RTX 4090", gib=24, capability=(8, 9), shards=(5, 0, False),
                      disk=0, compilers=False)
    computer.has_packages(torch=None, scipy=None)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    doctor.main([])
    brief = capsys.readouterr().out.splitlines()
    doctor.main(["--all"])
    whole = capsys.readouterr().out.splitlines()
    assert len(brief) <= 24 and len(whole) > len(brief)
    assert all(any(name in line for line in whole) for name in NAMES)
