"""Every command can be started by its name, and says in one line which requirement is missing; the
library behind them has an order.

Run: .venv/bin/python -m pytest tests/test_commands.py
"""

import ast
import io
import math
import os
import re
import runpy
import shutil
import signal
import stat
import subprocess
import sys
from argparse import ArgumentTypeError
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import speedrun
from speedrun.base import cli
from speedrun.base.errors import UserError
from speedrun.base.files import locked, read_texts, replace_file
from speedrun.base.text import json_text, print_table
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


@pytest.mark.parametrize("missing, needed, restarts", [
    ("torch", (), True), ("numpy", (), True), ("rich", (), True), (None, (), False),
    ("numpy", ("torch", "numpy"), True), ("rich", ("torch", "numpy"), False),
])
def test_a_command_restarts_where_what_it_needs_is_missing(
        missing, needed, restarts, tmp_path, monkeypatch):
    python, started = tmp_path / "bin" / "python", []
    python.parent.mkdir()
    python.touch(mode=0o755)
    monkeypatch.setattr(speedrun, "VENV", str(tmp_path))
    monkeypatch.setattr(speedrun, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--json"])
    monkeypatch.setenv(speedrun.RESTARTED, "")
    speedrun.enter_venv(needed=needed)
    assert started == [(str(python), [str(python), "doctor.py", "--json"])] * restarts
    assert (speedrun.RESTARTED in os.environ) is restarts, "what it starts was not restarted"


@pytest.mark.parametrize("version, message", [
    ((3, 11, 0), "None"), ((3, 10, 14), "error: this is Python 3.10; 3.11 or newer is needed:"
                                        " make -C a -B .venv/installed"),
])
def test_a_python_that_is_too_old_is_named(version, message, tmp_path, monkeypatch):
    file = tmp_path / "a" / "tools" / "speedrun" / "__init__.py"
    file.parent.mkdir(parents=True)
    shutil.copy(LIBRARY / "__init__.py", file)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which it sets
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.chdir(tmp_path)
    ended = None
    try:
        runpy.run_path(str(file))
    except SystemExit as error:
        ended = error
    assert str(ended) == message


@pytest.mark.parametrize("error, status, message", [
    (None, 3, ""), (UserError("no \x1b[1m", 7), 7, "no ␛[1m"), (LookupError("odd"), 1, "odd"),
    (KeyboardInterrupt(), 130, "interrupted"), (BrokenPipeError(32, "closed"), 1, ""),
    (OSError("odd"), 1, "odd"), (OSError(28, "full", "a.py"), 1, "a.py: full; make room"),
    (OSError(28, "full"), 1, "full; make room where it writes, or in TMPDIR's folder"),
    (OSError(24, "too many", "a.py"), 1, "a.py: too many; first type: ulimit -n 1024"),
    (ModuleNotFoundError(name="odd"), 1, "odd is not installed here: make -B .venv/installed"),
    (ModuleNotFoundError(name="resource"), 1,
     f"{sys.platform} has no Python module resource; use Linux, macOS or WSL"),
    (ImportError("x.so: cannot open\nit"), 1,
     "x.so: cannot open; install again: make -B .venv/installed"),
])
def test_how_a_command_ends(error, status, message, tmp_path, monkeypatch, capsys):
    def main():
        print("→")
        if error:
            raise error
        return 3

    called, broken = [], isinstance(error, BrokenPipeError)
    monkeypatch.setattr(cli, "enter_venv", lambda **options: called.append(options))
    monkeypatch.setattr(cli.signal, "signal", lambda *options: called.append(options))
    monkeypatch.chdir(REPOSITORY)
    with open(tmp_path / "out", "w", encoding="ascii") as out, redirect_stdout(out):
        with pytest.raises(SystemExit) as ended:
            cli.run_command(main, LookupError, needed=("torch",))
    said = f"error: {message}\n" if message else ""
    assert (ended.value.code, capsys.readouterr().err) == (status, said)
    assert (tmp_path / "out").read_text("utf-8") == ("" if broken else "?\n")  # no closed pipe
    assert called == [{"needed": ("torch",)}, (signal.SIGINT, signal.SIG_IGN)]


@pytest.mark.parametrize("command, library", [
    ("make_figures", "speedrun.figures.generated.update"),
    ("make_site", "speedrun.site.build.build")])
def test_a_fault_in_the_history_is_one_line(command, library, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("x.toml: there is no milestone 0O")

    monkeypatch.setattr(library, fail)
    monkeypatch.setattr(sys, "argv", [command])
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)  # Ctrl-C goes on ending the tests
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / "tools" / f"{command}.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert (ended.value.code, said) == (1, "error: x.toml: there is no milestone 0O\n")


def test_an_error_of_the_program_has_its_traceback(capsys):
    speedrun._end(ValueError, ValueError("a fault"), None)
    assert capsys.readouterr().err == "ValueError: a fault\n"


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    file, link, synced = tmp_path / "a.txt", tmp_path / "link", []
    file.write_text("before", encoding="utf-8")
    link.symlink_to(file)
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    with open(file, encoding="utf-8") as reader:
        replace_file(link, b"after", mode=0o640)
        assert reader.read() == "before"
    assert link.is_symlink() and file.read_bytes() == b"after"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    replace_file(file, b"x", to_disk=False)
    assert synced == [len("after")]
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder cannot be written: Is a directory$"):
        replace_file(tmp_path / "folder", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "folder", "link"]


def test_what_a_killed_writer_left_goes_with_the_next_lock(tmp_path):
    left = [tmp_path / f".{name}.12345678.tmp" for name in ("a.json", "b.json")]
    for file in left:
        file.touch()
    with locked(tmp_path / "a.json"):
        assert [file.exists() for file in left] == [False, True]
    with pytest.raises(UserError, match="none cannot be written: No such file"):
        with locked(tmp_path / "none" / "a.json"):
            raise AssertionError("there is no such folder")


@pytest.mark.parametrize("content, texts", [
    (b'{"a": "b", "c": 1, "d": null}', {"a": "b"}), (b"[1]", {}), (b"{", {}), (b"\xff", {}),
    (b"[" * 100_000, {}), (None, {}),
])
def test_texts_of_a_file_that_may_be_anything(content, texts, tmp_path):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    assert read_texts(tmp_path / "x.json") == texts


def test_json_has_no_nan():
    assert json_text({"a": (math.nan, [-math.inf, 0.5])}) == '{"a": [null, [null, 0.5]]}'
    assert json_text([1], indent=2) == "[\n  1\n]"


@pytest.mark.parametrize("is_terminal, width, shown", [
    (False, 5, "     loss   ms\none     1    —\ntwo  22.5  [3]\n"),
    (True, 22, "\n       loss    ms\n ────────────────\n one      1     —\n two   22.5   [3]\n\n"),
    (True, 21, "one\nloss  1\nms    —\n\ntwo\nloss  22.5\nms    [3]\n\n"),
])
def test_a_table_that_a_terminal_has_no_room_for_is_told_entry_by_entry(
        is_terminal, width, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    print_table({"": ["one", "two"], "loss": ["1", "22.5"], "ms": ["—", "[3]"]}, stream)
    text = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
    assert [line.rstrip() for line in text.split("\n")] == shown.split("\n")


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
    assert ended.stderr == (
        f"error: {venv} is damaged: its Python does not run in it; make it again: rm -r"
        f" {os.path.relpath(venv)}, then {speedrun.install_command()}\n")


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
    for kind, number, texts in ((cli.positive, "whole number from 1", ("0", "-1", "1.0", "x", "")),
                                (cli.natural, "whole number from 0", ("-1", "1e3")),
                                (cli.not_negative, "number from 0", ("-0.1", "x", "nan", "inf"))):
        for text in texts:
            with pytest.raises(ArgumentTypeError, match=f"^{text} is not a {number} on$"):
                kind(text)
    with pytest.raises(ArgumentTypeError, match="^the folder's name is empty$"):
        cli.folder("")


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
