"""Repairs are carried down the chain, and only where the old block stands.

Run: .venv/bin/python -m pytest tests/test_propagate.py
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from propagate import main
from speedrun.base.errors import UserError
from speedrun.history.blocks import (
    ALREADY,
    CARRIED,
    DIFFERS,
    Repair,
    carry,
    repairs,
    split_blocks,
)
from speedrun.history.manifest import REPOSITORY

OLD = '"""Card."""\n\nimport os\n\n\n# Adds.\ndef f(x):\n    return x\n\n\ndef g():\n    return 2\n'
NEW = OLD.replace("return x", "y = x\n    return y").replace("Card", "Other card")


def test_a_repair_is_found_and_carried():
    (repair,) = repairs(OLD, NEW, [])
    assert repair == Repair(
        "f", "# Adds.\ndef f(x):\n    return x", "# Adds.\ndef f(x):\n    y = x\n    return y"
    )
    child = OLD.replace("return 2", "return 3")
    fate, text = carry(repair, child)
    assert (fate, text) == (CARRIED, NEW.replace("return 2", "return 3").replace("Other c", "C"))
    assert carry(repair, text) == (ALREADY, text)
    for other in (OLD.replace("return x", "return -x"), OLD.replace("def f", "def h")):
        assert carry(repair, other) == (DIFFERS, other)
    longer = OLD.replace("return x", "return x\n    print()")
    (shorter,) = repairs(longer, OLD, [])  # what is new is a part of what was there
    assert carry(shorter, longer) == (CARRIED, OLD)


@pytest.mark.parametrize("before, after, wanted, message", [
    (OLD, NEW, ["card"], "card is every file's own"),
    (OLD, NEW, ["g"], "block g did not change"),
    (OLD, NEW, ["k"], "block k does not exist"),
    (OLD, OLD.replace("def g", "def k"), [], "block g was removed"),
    (OLD, OLD + "\n\ndef k():\n    pass\n", [], "block k was added"),
])
def test_what_cannot_be_carried(before, after, wanted, message):
    with pytest.raises(ValueError, match=message):
        repairs(before, after, wanted)


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A repository of its own with the files that the command needs, and their bytecode."""
    clone = tmp_path_factory.mktemp("committed")
    for folder, ignored in ("history", "__pycache__"), ("train", "*.bin"), ("tools", "*.bin"):
        shutil.copytree(REPOSITORY / folder, clone / folder,
                        ignore=shutil.ignore_patterns(ignored))
    shutil.copy(REPOSITORY / ".gitignore", clone)
    subprocess.run(["git", "init", "-q", str(clone)], check=True)
    commit(clone)
    return clone


@pytest.fixture
def clone(committed, tmp_path):
    """A copy of it."""
    return shutil.copytree(committed, tmp_path / "clone")


def commit(clone):
    for command in (["add", "-A"],
                    ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "as it is"]):
        subprocess.run(["git", "-C", str(clone), *command], check=True)


def propagate(clone, *arguments):
    return subprocess.run(
        [sys.executable, "tools/propagate.py", *arguments], cwd=clone, capture_output=True,
        encoding="utf-8",
    )


def blocks_of(script):
    """{name: text} of a file's blocks."""
    return {block.name: block.text for block in split_blocks(script.read_text(encoding="utf-8"))}


def test_the_command(clone):
    first = clone / "history" / "speedrun" / "00_baseline" / "train_gpt.py"
    others = {path: blocks_of(path) for path in clone.glob("history/speedrun/*/train_gpt.py")}
    old = others.pop(first)
    new = {name: old[name].replace('"""', '"""Repaired. ', 1) for name in ("parse_args", "MLP")}
    text = first.read_text(encoding="utf-8")
    for name in new:
        text = text.replace(old[name], new[name])
    first.write_text(text, encoding="utf-8")
    ended = propagate(clone, "00")
    assert ended.returncode == 0, ended.stderr
    assert (clone / "train" / "train_gpt.py").read_text(encoding="utf-8") == text
    status = ["git", "-C", str(clone), "status", "--short", "--", "history/prelude"]
    assert not subprocess.check_output(status)  # it does not descend from 00
    for path, before in others.items():
        assert blocks_of(path) == {name: new[name] if name in new and block == old[name] else block
                                   for name, block in before.items()}
        assert before["parse_args"] == old["parse_args"]
    said = [line for line in ended.stdout.splitlines() if "speedrun/" in line]
    assert said == [
        f"{CARRIED if before.get(name) == old[name] else DIFFERS:<13}"
        f"  {path.relative_to(clone)}  {name}"
        for path, before in sorted(others.items()) for name in ("parse_args", "MLP")]
    assert "differs        history/speedrun/02_modern_arch/train_gpt.py  MLP" in said
    assert ended.stderr == f"{ended.stdout.count(DIFFERS)} to look at by hand\n"
    again = propagate(clone, "00", "--block", "parse_args")
    assert {line.split("  ")[0] for line in again.stdout.splitlines()} == {ALREADY}


def test_a_repair_reaches_the_chains_that_borrow_the_block(clone):
    lender = clone / "history" / "speedrun" / "04_skip_connections" / "train_gpt.py"
    text = lender.read_text(encoding="utf-8")
    for old, new in (("dtype of its input", "dtype of the input"),
                     ("Takes train_steps optimizer steps", "Takes train_steps steps")):
        assert old in text
        text = text.replace(old, new)
    lender.write_text(text, encoding="utf-8")
    learners = clone / "train" / "train_gpt.py"
    before = learners.read_bytes()
    ended = propagate(clone, "04")
    assert ended.returncode == 0, ended.stderr
    assert learners.read_bytes() == before, "it comes from the root, not from 04"
    assert "train/train_gpt.py" not in ended.stdout
    borrowers = [path for path in (*clone.glob("history/encore/*/*.py"),
                                   *clone.glob("train/encore/*.py"))
                 if path.name not in ("handles.py", "why.py")]
    assert len(borrowers) > 4
    for script in borrowers:
        assert "dtype of the input" in blocks_of(script)["Linear"], script
        assert "Takes train_steps steps" not in script.read_text(encoding="utf-8")
    lines = [line for line in ended.stdout.splitlines() if "encore" in line]
    assert sorted(line.split()[1:] for line in lines) == sorted(
        [script.relative_to(clone).as_posix(), "Linear"] for script in borrowers)


def test_a_script_that_is_none_stops_it_before_anything_is_written(clone):
    first = clone / "history" / "speedrun" / "00_baseline" / "train_gpt.py"
    first.write_text(first.read_text(encoding="utf-8").replace(
        'help=f"default: {default}")', 'help=str(default))'), encoding="utf-8")
    (clone / "train" / "train_gpt.py").write_text("def broken(:\n", encoding="utf-8")
    ended = propagate(clone, "00")
    assert ended.returncode == 1 and re.fullmatch(
        "error: train/train_gpt.py: .*; nothing is written\n", ended.stderr), ended.stderr
    diff = ["git", "-C", str(clone), "diff", "--name-only", "--", "history"]
    assert subprocess.check_output(diff, encoding="utf-8").split() == [
        "history/speedrun/00_baseline/train_gpt.py"]
    first.write_text("def broken(:\n", encoding="utf-8")
    ended = propagate(clone, "00")
    assert ended.returncode == 1 and re.fullmatch(
        "error: history/speedrun/00_baseline/train_gpt.py: .*line 1.*\n", ended.stderr)


@pytest.mark.skipif(os.name == "nt", reason="has no ulimit")
def test_what_could_not_be_written_is_not_called_carried(clone):
    scripts = {path: path.read_text(encoding="utf-8") for path in clone.glob("*/**/train_gpt.py")}
    first = clone / "history" / "speedrun" / "00_baseline" / "train_gpt.py"
    repaired = scripts[first].replace('help=f"default: {default}")', 'help=str(default))')
    first.write_text(repaired, encoding="utf-8")
    ended = subprocess.run(["bash", "-c", f"ulimit -f 24; {sys.executable} tools/propagate.py 00"],
                           cwd=clone, capture_output=True, encoding="utf-8")
    changed = {path for path, text in scripts.items() if path.read_text(encoding="utf-8") != text}
    said = {clone / line.split()[1] for line in ended.stdout.splitlines()}
    assert ended.returncode == 1 and len(scripts) > len(changed) and said == changed - {first}
    assert re.fullmatch("error: .*train_gpt.py cannot be written: File too large\n", ended.stderr)
    assert all(path.read_text(encoding="utf-8").endswith(text[-40:])
               for path, text in scripts.items())  # none is cut short


def test_another_chain_needs_no_more_than_its_folders(clone):
    """Two more scripts under another name, which every command then takes."""
    entry = 'title = "A loop"\nidea = "Another chain."\nkind = "systems"\n'
    source = clone / "history" / "speedrun" / "00_baseline" / "train_gpt.py"
    text = source.read_text(encoding="utf-8")
    for name, changes, script in (
            ("q0_vanilla_loop", "", text),
            ("q1_relu_loop", 'changes = ["MLP"]\n', text.replace("F.gelu(", "F.relu("))):
        folder = clone / "history" / "loop" / name
        folder.mkdir(parents=True)
        (folder / "loop.py").write_text(script, encoding="utf-8")
        (folder / "milestone.toml").write_text(
            f"{entry}{changes}[tiny]\nwarmup_steps = {2 + len(changes)}\n", encoding="utf-8")
    commit(clone)

    def said(command, *arguments):
        ended = subprocess.run([sys.executable, str(clone / "tools" / command), *arguments],
                               capture_output=True, encoding="utf-8", cwd=clone)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "history/loop/q0_vanilla_loop/loop.py" in said(
        "run_milestone.py", "q0", "--scale", "tiny", "--dry-run")
    assert "F.relu" in said("diff_milestones.py", "q0", "q1")
    assert "train/loop/loop.py is q0_vanilla_loop now" in said("check_train.py", "q0", "--take")
    assert [line.split()[0] for line in said("check_train.py", "q0", "--list").splitlines()] == [
        "q0", "q1"]
    root = clone / "history" / "loop" / "q0_vanilla_loop" / "loop.py"
    root.write_text(text.replace("range(args.train_steps + 1)", "range(1 + args.train_steps)"),
                    encoding="utf-8")
    assert [line.split()[:3] for line in said("propagate.py", "q0").splitlines()] == [
        ["carried", "history/loop/q1_relu_loop/loop.py", "train"],
        ["carried", "train/loop/loop.py", "train"]]


def test_wrong_input_is_one_line(clone, monkeypatch, capsys):
    for arguments, message in (
            (["0O"], 'no milestone "0O"'),
            (["00", "--since", ""], "--since '' is not a commit; name one, such as HEAD~3"),
            (["00", "--since=--output=x"], "--since '--output=x' is not a commit"),
            (["00", "--block"], "expected one argument")):
        monkeypatch.setattr(sys, "argv", ["propagate.py", *arguments])
        with pytest.raises((ValueError, SystemExit, UserError)) as refusal:
            main()
        said = capsys.readouterr().err or f"error: {refusal.value}\n"
        assert message in said and said.startswith("error: ") and said.count("\n") == 1
    for arguments, message in (
            (["00"], "has no changed block since HEAD"),
            (["00", "--since", "nowhere"],
             "no old text of history/speedrun/00_baseline/train_gpt")):
        ended = propagate(clone, *arguments)
        assert ended.returncode != 0 and message in ended.stderr
        assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    head = subprocess.check_output(["git", "-C", str(clone), "rev-parse", "HEAD"])
    (clone / ".git" / "shallow").write_bytes(head)  # as git clone --depth 1 writes it
    assert propagate(clone, "00", "--since", "HEAD~3").stderr.endswith(
        "; older commits are missing in this clone: git fetch --unshallow\n")


def test_without_git(clone, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        said = propagate(clone, "00").stderr
    assert "git config --global --add safe.directory" in said and said.count("\n") == 1
    monkeypatch.setenv("PATH", str(clone))
    assert propagate(clone, "00").stderr.endswith("train_gpt.py: git is not installed\n")
