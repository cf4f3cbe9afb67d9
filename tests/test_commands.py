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

import pytest

from speedrun.history.manifest import REPOSITORY

posix = pytest.mark.skipif(os.name == "nt", reason="has no fork and no shell")
COMMANDS = sorted((REPOSITORY / "tools").glob("*.py"))


@pytest.mark.skipif(os.name == "nt", reason="Windows starts files by their ending")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda path: path.name)
def test_a_command_is_executable(command):
    with open(command, encoding="utf-8") as file:
        assert next(file) == "#!/usr/bin/env python3\n"
    assert os.access(command, os.X_OK)


@pytest.mark.parametrize("command", ["sample", "check_train"])
def test_help_says_that_a_script_is_run(command):
    ended = subprocess.run([sys.executable, str(REPOSITORY / "tools" / f"{command}.py"), "--help"],
                           capture_output=True, encoding="utf-8")
    assert "with your rights" in ended.stdout and "that you trust" in ended.stdout


@pytest.mark.parametrize("arguments", [
    "diff_milestones.py 00 01", "check_train.py --list", "make_figures.py --check",
    "run_lessons.py start_here", "run_milestone.py 00", "compare_milestones.py 00", "sweep.py 00",
    "predict.py 00",
])
def test_a_missing_requirement_is_one_line(arguments):
    name, *rest = arguments.split()
    ended = subprocess.run(
        [sys.executable, "-S", str(REPOSITORY / "tools" / name), *rest],  # no site-packages
        capture_output=True, encoding="utf-8", cwd=REPOSITORY,
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


@posix
def test_a_folder_that_was_removed_is_one_line(tmp_path):
    command = f"rmdir $PWD; {sys.executable} {REPOSITORY / 'tools' / 'doctor.py'} --json"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        1, "error: the current folder was removed; change to another\n")


def test_a_full_disk_for_temporary_files_is_one_line():
    code = (f"import sys; sys.path.insert(0, {str(REPOSITORY / 'tools')!r})\n"
            "from speedrun.base.cli import run_command\n"
            "def main(): raise OSError(28, 'No space left on device')\nrun_command(main)")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        1, "error: No space left on device; make room, or set TMPDIR to a folder with more\n")


@posix
def test_closed_streams_are_no_fault():
    command = [sys.executable, str(REPOSITORY / "tools" / "run_milestone.py")]
    for arguments, status in (("00 --dry-run --scale tiny", 0), ("00 --steps 0", 2)):
        shell = f'exec "$0" "$@" {arguments} >&- <&-'
        ended = subprocess.run(["sh", "-c", shell, *command], capture_output=True, text=True)
        assert ended.returncode == status and "Traceback" not in ended.stderr


@posix
def test_control_characters_are_shown_and_not_sent():
    for arguments in (["\x1b[31m.py"], ["00", "--\x1b[31m"]):
        ended = subprocess.run([sys.executable, str(REPOSITORY / "tools" / "run_milestone.py"),
                                *arguments], capture_output=True, encoding="utf-8")
        assert ended.returncode in (1, 2)
        assert "\N{SYMBOL FOR ESCAPE}[31m" in ended.stderr and "\x1b" not in ended.stderr


PACKAGES = ["base", "compat", "history", "scripts", "run", "compare", "diff", "predict", "check",
            "sample", "doctor", "figures"]  # lowest first
LIBRARY = REPOSITORY / "tools" / "speedrun"


def test_every_package_has_its_place():
    modules = [path.stem for path in LIBRARY.glob("*.py") if path.name != "__init__.py"]
    folders = [path.parent.name for path in LIBRARY.glob("*/__init__.py")]
    assert sorted(folders + modules) == sorted(PACKAGES)


@pytest.mark.parametrize("file", [LIBRARY / "compat.py", *sorted(LIBRARY.glob("*/*.py"))],
                         ids=lambda file: f"{file.parent.name}.{file.stem}")
def test_imports_point_down(file):
    here = PACKAGES.index(file.relative_to(LIBRARY).parts[0].removesuffix(".py"))
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Import) or all(
            alias.name.partition(".")[0] != "speedrun" for alias in node.names), "import its names"
        if isinstance(node, ast.ImportFrom) and node.module.startswith("speedrun."):
            assert PACKAGES.index(node.module.split(".")[1]) <= here, node.module


def test_private_names_of_torch_stand_in_one_module():
    private = re.compile(r'(?<!["\w])torch(\.\w+)*\._[a-zA-Z]|\._(schema|cdata|opname)\b'
                         r"|^ *(from|import) triton\b", re.MULTILINE)
    files = {path.relative_to(LIBRARY).as_posix(): path.read_text(encoding="utf-8")
             for path in LIBRARY.rglob("*.py")}
    assert private.search(files.pop("compat.py"))
    assert [name for name, text in files.items() if private.search(text)] == []
