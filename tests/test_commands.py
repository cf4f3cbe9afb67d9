"""Every command can be started by its name, and says in one line which requirement is missing; the
library behind them has an order.

Run: .venv/bin/python -m pytest tests/test_commands.py
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from speedrun import install_command
from speedrun.base import cli
from speedrun.history.manifest import REPOSITORY

posix = pytest.mark.skipif(os.name == "nt", reason="has no fork and no shell")
COMMANDS = sorted((REPOSITORY / "tools").glob("*.py"))
LOWEST = {  # numbers that options take
    "compare_milestones": "--steps=1 --repeat=1 --seed=0 --nproc=1 --target=0 --minutes=1",
    "diff_milestones": "--nproc=1 --train-steps=1",
    "evaluate": "--limit=1 --val-tokens=1 --batch=4",
    "predict": "--nproc=1 --device-batch=1",
    "run_milestone": "--steps=1 --device-batch=1 --nproc=1 --nnodes=1 --node-rank=0",
    "sample": "--tokens=1 --temperature=0 --top-k=0 --seed=0 --num-samples=1",
    "sweep": "--steps=1 --seed=0",
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda path: path.name)
def test_help_needs_no_package(command):
    """A module-level import of a package would be slow, and a traceback where it is missing."""
    ended = subprocess.run([sys.executable, "-SP", str(command),  # no site-packages, and no folder
                            # of the command on the path, as under PYTHONSAFEPATH
                            *LOWEST.get(command.stem, "").split(), "--help"],
                           capture_output=True, encoding="utf-8")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: ")
    if command.stem in ("sample", "evaluate", "check_train"):
        assert "with your rights" in ended.stdout and "that you trust" in ended.stdout
    assert os.name == "nt" or os.access(command, os.X_OK)
    assert command.read_text(encoding="utf-8").startswith("#!/usr/bin/env python3\n")


def test_ctrl_c_during_the_imports_is_one_line():
    ended = subprocess.run([sys.executable, "-c", "import speedrun; raise KeyboardInterrupt"],
                           cwd=REPOSITORY / "tools", capture_output=True, encoding="utf-8")
    assert ended.returncode != 0 and ended.stderr == "error: interrupted\n"


@pytest.mark.parametrize("arguments", ["run_milestone.py 00", "sample.py .", "predict.py 00"])
def test_a_missing_requirement_is_one_line(arguments):
    name, *rest = arguments.split()
    ended = subprocess.run(
        [sys.executable, "-S", str(REPOSITORY / "tools" / name), *rest],
        capture_output=True, encoding="utf-8", cwd=REPOSITORY, stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.count("\n") == 1 and ended.stderr.startswith("error: ")
    assert ended.stderr.endswith(" is not installed here: make -B .venv/installed\n")


@pytest.fixture
def clone(tmp_path):
    """A copy of the commands with a .venv whose python only says with what it was started."""
    shutil.copytree(REPOSITORY / "tools", tmp_path / "tools",
                    ignore=shutil.ignore_patterns("__pycache__"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


@posix
@pytest.mark.parametrize("version", ["", "sys.version_info = (3, 10)"])
def test_a_python_without_requirements_gives_way_to_the_venv(clone, version):
    command = str(clone / "tools" / "doctor.py")
    bare = f"""if True:
        import runpy, sys
        sys.path[:] = [folder for folder in sys.path if "site-packages" not in folder]
        sys.path.insert(0, {os.path.dirname(command)!r})
        sys.argv = ["", "--json"]
        {version}
        runpy.run_path({command!r}, run_name="__main__")"""
    ended = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{command} --json\n", "")
    whole = subprocess.run([sys.executable, command, "--help"], capture_output=True, text=True)
    assert whole.stdout.startswith("usage: doctor.py "), "this Python has all that is needed"


@pytest.mark.parametrize("error, message", [
    ("OSError(28, 'No space left on device')",
     "No space left on device; make room where it writes, or in TMPDIR's folder"),
    ("OSError(24, 'Too many open files', 'a.py')",
     "a.py: Too many open files; first type: ulimit -n 1024"),
    ("ModuleNotFoundError(name='resource')",
     f"{sys.platform} has no Python module resource; use Linux, macOS or WSL"),
    ("ImportError('libcudart.so.12: cannot open')",
     f"libcudart.so.12: cannot open; install again: {install_command()}"),
])
def test_errors_of_the_machine_are_one_line(error, message):
    code = (f"import sys; sys.path.insert(0, {str(REPOSITORY / 'tools')!r})\n"
            "from speedrun.base.cli import run_command\n"
            f"def main(): raise {error}\nrun_command(main)")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, f"error: {message}\n")


@posix
def test_an_environment_without_its_configuration_is_named(tmp_path):
    """Its Python is the system's, which restarted itself in it for ever."""
    code = """if True:
        import os, sys; sys.path.insert(0, sys.argv[1])
        import speedrun
        speedrun.VENV, speedrun.NEEDED = sys.argv[2], ["no_such_package"]
        speedrun.enter_venv()"""
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys._base_executable)
    again = tmp_path / "again.py"
    again.write_text(code, encoding="utf-8")
    ended = subprocess.run([sys._base_executable, again, REPOSITORY / "tools", venv],
                           capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {venv} is damaged: its Python does not run in it; make")


def test_folders_and_the_order_of_a_command_line():
    parser = cli.Parser()
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=cli.folder)
    args = parser.parse_args(["a", "--json", "--out=~/x", "b"])
    assert (args.runs, args.out) == (["a", "b"], Path.home() / "x")


def test_numbers_of_a_command_line():
    found = cli.positive("1"), cli.natural("0"), cli.not_negative("0"), cli.not_negative("2.5")
    assert found == (1, 0, 0, 2.5)
    for kind, texts in ((cli.positive, ("0", "-1", "1.0", "x", "")), (cli.natural, ("-1", "1e3")),
                        (cli.not_negative, ("-0.1", "x", "nan", "inf"))):
        for text in texts:
            with pytest.raises(ArgumentTypeError, match=f"^{text} is not a (whole )?number from "):
                kind(text)


@posix
def test_closed_streams_and_control_characters():
    command = [sys.executable, str(REPOSITORY / "tools" / "run_milestone.py")]
    for arguments, status in (
            ("00 --dry-run --scale tiny", 0), ("00 --json", 1), ("00 --\x1b[31m", 2)):
        shell = f'exec "$0" "$@" {arguments} >&- <&-'
        ended = subprocess.run(["sh", "-c", shell, *command], capture_output=True, text=True)
        assert ended.returncode == status and "Traceback" not in ended.stderr
    ended = subprocess.run([*command, "\x1b[31m.py"], capture_output=True, encoding="utf-8")
    assert ended.returncode == 1
    assert "\N{SYMBOL FOR ESCAPE}[31m" in ended.stderr and "\x1b" not in ended.stderr


LAYERS = ["base", "compat", "history", "scripts", "run", "compare", "diff", "predict", "check",
          "sample", "evaluate", "doctor", "anatomy", "figures", "site"]  # lowest first
PACKAGE = "enter_venv", "install_command"  # names of speedrun itself
LIBRARY = REPOSITORY / "tools" / "speedrun"


def test_imports_point_down():
    modules = {path.stem for path in LIBRARY.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in LIBRARY.glob("*/__init__.py")}
    assert sorted([*modules, *packages]) == sorted(LAYERS)
    upward = []
    for file in LIBRARY.rglob("*.py"):
        here = [file.stem, file.parent.name][file.parent != LIBRARY]
        below = 0 if here == "__init__" else LAYERS.index(here) + 1
        allowed = {*LAYERS[:below], *PACKAGE}
        upward += [f"{file.relative_to(LIBRARY)}: {name}"
                   for name in imported(file.read_text(encoding="utf-8"))
                   if name.split(".")[0] == "speedrun" and name.split(".")[1] not in allowed]
    assert not upward


def imported(source):
    """The dotted names of all that a source imports, "speedrun.*" for the whole package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"{it.name}.*" for it in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"write its whole name: {ast.unparse(node)}"
            yield from (f"{node.module}.{it.name}" for it in node.names)


def test_private_names_of_torch_stand_in_one_module():
    private = re.compile(r'(?<!["\w])torch(\.\w+)*\._[a-zA-Z]|\._(schema|cdata|opname)\b'
                         r"|^ *(from|import) triton\b", re.MULTILINE)
    files = {path.relative_to(LIBRARY).as_posix(): path.read_text(encoding="utf-8")
             for path in LIBRARY.rglob("*.py")}
    assert private.search(files.pop("compat.py"))
    assert [name for name, text in files.items() if private.search(text)] == []
