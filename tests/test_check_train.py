"""The learner's path: guides, takes, progress and hints, the command; nothing is ever lost.

Run: .venv/bin/python -m pytest tests/test_check_train.py
"""

import errno
import gc
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from examinations import IDS, MANIFEST, ROOT, edited, source_of
from ranks import warm_context
from speedrun.base.errors import UserError
from speedrun.check import command as commands
from speedrun.check import hints, progress
from speedrun.check.command import open_learner
from speedrun.check.differences import Deviation
from speedrun.check.hints import find_hint, hint_of, load_guide, print_hint, slips_of
from speedrun.check.plan import left_to_write
from speedrun.check.screen import Outcome, Screen
from speedrun.history.blocks import split_blocks
from speedrun.history.guide import Hint, Slip, unexplained
from speedrun.history.manifest import REPOSITORY

COMMAND = REPOSITORY / "tools" / "check_train.py"
MILESTONES = MANIFEST.milestones
LISTED = MANIFEST.of_chain().milestones  # to a learner of the first chain
QUICK = "e4b"  # a script that generates, whose own trace takes the least

# ---- guides ----


@pytest.mark.parametrize("id", IDS)
def test_a_guide_is_about_what_its_milestone_changes(id):
    milestone, guide, text = MANIFEST.get(id), load_guide(MANIFEST.get(id)), source_of(id)
    about = {entry.block for entry in (*guide.hints, *guide.slips)}
    if milestone.parent:
        assert about <= set(milestone.changes)
    assert len({hint.block for hint in guide.hints}) == len(guide.hints)
    for slip in guide.slips:
        assert slip.apply(text), f"{slip.name}: its block has an old text not just once"
        assert slip in slips_of(slip.block, milestone)
    assert [right.name for right in guide.rights if not right.apply(text, text)] == []


def test_a_slip_is_made_at_one_place_only():
    assert Slip("x", "GPT", "self", "x", "words").apply(source_of(ROOT)) is None


def test_every_declared_block_says_why_it_changes():
    for m in MILESTONES:
        assert not m.parent or unexplained(m, MANIFEST.get(m.parent)) == [], m.name


@pytest.mark.parametrize("id, needed", [
    ("04", ["Hyperparameters"]),  # other rates
    ("14a", ["Hyperparameters"]),  # a field is renamed
    ("03c", []),  # fields are only added
])
def test_retunes_need_a_reason_and_new_fields_none(id, needed, monkeypatch):
    m = MANIFEST.get(id)
    known = dict.fromkeys(set(m.changes) - {"Hyperparameters"}, "Because.")
    monkeypatch.setattr("speedrun.history.guide.whys", lambda m: known)
    assert unexplained(m, MANIFEST.get(m.parent)) == needed


def test_blocks_that_differ_in_case_have_hints_of_their_own():
    milestone = MANIFEST.get("10d")
    assert [find_hint(name, milestone).block for name in ("Stage", "stage", "STAGES")] == [
        "Stage", "stage", "stages"]


def test_help_holds_until_a_descendant_changes_the_block(monkeypatch):
    monkeypatch.setattr("speedrun.check.hints.load_manifest", lambda: MANIFEST)  # once

    @cache
    def helped(block, id):
        return slips_of(block, MANIFEST.get(id)), find_hint(block, MANIFEST.get(id))

    for child in MILESTONES:
        for block in (b.name for b in split_blocks(source_of(child.id)) if child.parent):
            slips, hint = helped(block, child.id)
            own = [slip for slip in load_guide(child).slips if slip.block == block]
            if block in child.changes:
                assert list(slips) == own
            else:
                assert slips == helped(block, child.parent)[0]
                assert hint is helped(block, child.parent)[1]


def test_a_fault_in_a_guide_is_one_line(tmp_path, monkeypatch):
    milestone = MANIFEST.get(ROOT)
    monkeypatch.setattr(type(milestone), "folder", tmp_path)
    for text, message in (
            ("[[hints]]", 'unknown key "hints"; did you mean "hint"?'),
            ('[[hint]]\nblock = "x"\nnudges = "y"', 'hint 1: unknown key "nudges"; did you mean'),
            (f'[[hint]]\nblock = "x"\nwhy = "{"y " * 41}"', '"why" has 41 words, at most 40 fit'),
            ('[[slip]]\nname = "x"\nblock = "x"\nold = "y"\nnew = ""', '1: missing key "words"'),
            ("[[slip", "Expected"),
            ('[[right]]\nname = "x"\nedits = ["y"]', 'right 1: "edits" must be a list of pairs')):
        load_guide.cache_clear()
        (tmp_path / "guide.toml").write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as error:
            load_guide(milestone)
        assert message in str(error.value) and "guide.toml: " in str(error.value)
        assert "\n" not in str(error.value)
    load_guide.cache_clear()


# ---- scripts that do harm ----


@pytest.fixture
def start(tmp_path_factory):
    """start(*arguments, cwd=..., **environment): the command, a process of its own. It is a fork of
    the warm server, so that it need not import torch; end(process): what came of it."""
    output = tmp_path_factory.mktemp("output")

    def begin(*arguments, cwd=REPOSITORY, **environment):
        process = warm_context().Process(target=_command, args=(
            [str(COMMAND), *map(str, arguments)], output, str(cwd), environment))
        process.start()
        return process

    def end(process):
        process.join(300)
        assert process.exitcode is not None
        texts = [(output / stream).read_text(encoding="utf-8") for stream in ("stdout", "stderr")]
        return subprocess.CompletedProcess([], process.exitcode, *texts)

    begin.end = end
    return begin


def _command(words, output, cwd, environment):
    """What the fork does."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        setattr(sys, stream, open(number, "w", encoding="utf-8", closefd=False))
    os.chdir(cwd)
    os.environ |= environment
    tempfile.tempdir, sys.argv = environment.get("TMPDIR"), words
    runpy.run_path(words[0], run_name="__main__")


@pytest.fixture
def command(start):
    """command(*arguments, cwd=...): runs the command to its end."""
    return lambda *arguments, **options: start.end(start(*arguments, **options))


@pytest.fixture
def script(tmp_path):
    """A learner's script, a copy of the root."""
    file = tmp_path / "train_gpt.py"
    file.write_text(source_of(ROOT), encoding="utf-8")
    return file


def test_the_command_outlives_what_the_script_does(script, tmp_path, command):
    (tmp_path / f".{progress.FILE}.0123abcd.tmp").touch()  # of a check that was killed
    script.write_text(source_of(QUICK) + f"""
if True:
    import os, pathlib, subprocess, sys
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])
    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))
    print('x' * 1_000_000)
    sys.stderr.write('y' * 1_000_000 + '\\nlast words\\n')
    sys.stderr.flush()
    open('stray.txt', 'w').close()
    os.kill(os.getpid(), 11)
""", encoding="utf-8")
    ended = command(QUICK, "--script", script)
    assert ended.returncode == 1 and ended.stderr == ""
    told = " ".join(ended.stdout.split())
    assert "was killed by SIGSEGV; the last line that it wrote: last words" in told
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        progress.FILE, f"{progress.FILE}.lock", "pid", "train_gpt.py"]


def test_a_script_without_end_is_stopped(script, monkeypatch):
    from speedrun.check import trace
    from speedrun.check.examine import Examination

    script.write_text("while True: pass\n", encoding="utf-8")
    monkeypatch.setattr(Examination, "wanted", dict.fromkeys(trace.JOBS, {}) | {
        "contract": {"names": ["has", {}, 0]}})
    _, last = commands.check(script, MANIFEST.get(ROOT), 1.0)
    assert (last.name, last.expected) == ("time", "an answer within 1 s of computing")
    assert last.got == "none: the script was stopped"
    assert last.meaning == "--timeout gives it more time."


def test_a_job_ends_by_what_it_computes_and_not_by_the_clock(tmp_path, monkeypatch):
    from speedrun.check import worker

    monkeypatch.setattr(worker, "AT_REST_S", 1)
    tasks = []
    for number, (line, limit) in enumerate((
            ("while True: pass", 1), ("import time; time.sleep(60)", 60), ("x = 1", 0.001))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train_gpt.py").write_text(f"import sys\n{line}\n", encoding="utf-8")
        tasks.append(worker.Task(folder / "train_gpt.py", "contract", {}, limit, {}))
    spent = worker.run_tasks(tasks, 60)
    ends = [task.observations[task.job.what] for task in tasks[:2]]
    assert ends == [["error", worker.COMPUTES, 2, "while True: pass"],
                    ["error", worker.WAITS, 2, "import time; time.sleep(60)"]]
    assert [task.hung for task in tasks] == [True, True, False]
    assert 1 < tasks[0].seconds < 4 and tasks[1].seconds < 1 < spent
    task = worker.Task(folder.parent / "0" / "train_gpt.py", "contract", {}, 9, {})
    with pytest.raises(TimeoutError):
        worker.run_tasks([task], 0.5)
    assert task.ranks[0].exitcode == -signal.SIGKILL


def test_the_budget_is_for_all_tasks_together_and_those_that_run_are_stopped(monkeypatch):
    from speedrun.check import worker

    def task(name, used, *ends):
        ends, made = iter(ends), SimpleNamespace(used=[])
        made.start = lambda: (done.append(name), made.used.extend(used))
        made.ended, made.stop = lambda: next(ends), lambda: done.append(f"stop {name}")
        return made

    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda _: {1}, raising=False)
    done = []
    assert worker.run_tasks([task("a", [1.0, 2.0], False, True), task("b", [1.0], True)], 4) == 4
    with pytest.raises(TimeoutError):
        worker.run_tasks([task("c", [1.0, 2.0], True), task("d", [1.5], False)], 4)
    assert done == ["a", "b", "c", "d", "stop d"]


def _runs(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- taking a milestone ----


def test_take_keeps_every_version(script, command):
    mine = source_of(ROOT) + "# an idea of my own\n"
    script.write_text(mine, encoding="utf-8")
    script.chmod(0o640)
    for id in ("01", "02"):
        ended = command(id, "--take", "--script", script)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert script.read_text(encoding="utf-8") == source_of(id)
    first, second = (script.with_name(f"train_gpt.{n}.py") for n in (1, 2))
    assert first.read_text(encoding="utf-8") == mine
    assert second.read_text(encoding="utf-8") == source_of("01")
    assert ended.stdout.replace("\n  ", " ") == (
        f"{script} is 02_modern_arch now; yours is kept: {second}\n")
    assert script.stat().st_mode & 0o777 == 0o640
    again = command("02", "--take", "--script", script)
    assert again.stdout.replace("\n  ", " ") == (
        f"{script} is 02_modern_arch already; nothing to do\n")
    kept = open_learner(script).progress.standings
    assert [slug for slug, one in kept.items() if one.taken] == ["modern_arch", "muon"]
    assert len(list(script.parent.glob("*.py"))) == 3
    link = script.with_name("link.py")
    link.symlink_to(script.name)
    assert progress.take(link, MANIFEST.get("01")) and link.is_symlink()
    assert script.read_text(encoding="utf-8") == source_of("01")


def test_take_fills_gaps_and_never_overwrites(script):
    script.with_name("train_gpt.1.py").write_text("kept before")
    assert progress.take(script, MANIFEST.get("01")).name == "train_gpt.2.py"
    assert script.with_name("train_gpt.1.py").read_text() == "kept before"


def test_take_without_a_script_makes_one(script):
    script.unlink()
    learner, out = learner_of(script)
    commands.take_milestone(learner, MANIFEST.get("01"))
    assert out.getvalue().replace("\n  ", " ") == f"{script} is 01_muon now\n"
    assert script.read_text(encoding="utf-8") == source_of("01")


def at_call(number, act, monkeypatch):
    """Lets something happen at the first or second write of a take: the copy, then the script."""
    replace, calls = progress.replace_file, []

    def replace_and_act(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            act()
        replace(*arguments)

    monkeypatch.setattr(progress, "replace_file", replace_and_act)


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupted_take_loses_nothing(number, script, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    at_call(number, interrupted, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        progress.take(script, MANIFEST.get("01"))
    assert script.read_text(encoding="utf-8") == source_of(ROOT)


def test_a_half_written_copy_is_removed(script, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speedrun.base.files.os.fsync", full)
    with pytest.raises(UserError, match="No space left"):
        progress.take(script, MANIFEST.get("01"))
    assert [p.name for p in script.parent.iterdir()] == ["train_gpt.py"]
    assert script.read_text(encoding="utf-8") == source_of(ROOT)


def test_take_notices_an_edit_meanwhile(script, monkeypatch):
    at_call(1, lambda: script.write_text("saved by an editor just now"), monkeypatch)
    with pytest.raises(UserError, match=" changed while it was being kept as train_gpt.1.py; try"):
        progress.take(script, MANIFEST.get("01"))
    assert script.read_text() == "saved by an editor just now"


def test_kept_scripts_and_progress_are_not_committed():
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"train/**/.progress.*", "train/.traces/",
            "train/**/*.[0-9]*.py"} <= set(ignored)


# ---- progress and hints ----


@pytest.fixture
def answers(monkeypatch):
    """Outcomes that stand in for those of an examination; and how often they were asked for."""
    found = [Outcome("model"), Outcome("nesterov_update (lines 3-5)", "this", "that", "so",
                                       block="nesterov_update")]
    asked = []

    def check(script, milestone, limit):
        asked.append(milestone.id)
        yield from found

    monkeypatch.setattr(commands, "check", check)
    return found, asked


def learner_of(script):
    """The learner as the command opens it, and what it prints."""
    learner = open_learner(script)
    out = io.StringIO()
    learner.screen = Screen(out)
    return learner, out


def level_given(script, capsys, level=None, name=None):
    """The level of the hint that comes."""
    commands.give_hint(learner_of(script)[0], MANIFEST.get("01"), level, name, 1)
    return int(re.search(r"hint (\d) of 4", capsys.readouterr().out)[1])


def edit(script):
    """Changes the script, so that it is checked again."""
    script.write_text(script.read_text(encoding="utf-8") + "#\n", encoding="utf-8")


def test_hints_go_one_level_further_each_time(script, answers, capsys):
    assert [level_given(script, capsys) for _ in range(5)] == [1, 2, 3, 4, 4]
    assert answers[1] == ["01"], "an unchanged script need not be checked again"
    commands.give_hint(learner_of(script)[0], MANIFEST.get("01"), 2, None, 1)
    assert "M <- mu M + G" in capsys.readouterr().out
    edit(script)
    assert level_given(script, capsys) == 4, "one that is asked for again sets nothing back"
    assert answers[1] == ["01", "01"]
    assert [level_given(script, capsys, level, "Muon") for level in (2, None, 1, None)] == [
        2, 3, 1, 4]


def test_a_hint_is_printed_with_ids_and_numbered_steps(capsys):
    hint = Hint("Muon", "From $parent\nto $id?", "", f"Do:\n1. this\n2. {'long ' * 20}")
    for level in (1, 3):
        print_hint(hint, MANIFEST.get("01"), level)
    print_hint(Hint("[x]", "From $parent"), MANIFEST.get(ROOT), 1)
    print_hint(Hint("nowhere"), MANIFEST.get("01"), 4)
    assert capsys.readouterr().out == (
        "01, Muon: hint 1 of 4, a nudge\nFrom 00b to 01?\n"
        "--hint 3 says more (no hint 2: the mathematics).\n"
        f"01, Muon: hint 3 of 4, the steps\nDo:\n1. this\n2. {' '.join(['long'] * 19)}\n   long\n"
        "--hint 4 says more.\n"
        "00, [x]: hint 1 of 4, a nudge\nFrom 00\n"
        "--hint 4 says more (no hint 2: the mathematics) (no hint 3: the steps).\n"
        "01, nowhere: hint 4 of 4, the diff\nNo block of the milestone has the answer: it is in the"
        " line that the message names.\n")


def test_slips_that_fit_a_script_come_from_all_guides_the_milestones_own_first():
    text, name = source_of("02"), "CausalSelfAttention"
    own = list(slips_of(name, MANIFEST.get("02")))
    found = hints.applicable_slips(name, MANIFEST.get("02"), text)
    assert [slip for slip, _ in found[: len(own)]] == own and len(found) > len(own) > 1
    assert {slip.block for slip, _ in found} == {name}
    assert [slip.apply(text) for slip, _ in found] == [wrong for _, wrong in found]
    assert len({wrong for _, wrong in found} | {text}) == len(found) + 1


def test_the_last_hint_shows_what_to_write_and_what_to_remove(capsys):
    hints._print_block("MLP", MANIFEST.get("02"))
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title == "01_muon → 02_modern_arch" and "00_baseline: MLP" not in lines
    for sign, id in ("-", "01"), ("+", "02"):
        own = MANIFEST.get(id).script.read_text(encoding="utf-8").splitlines()
        assert (changed := [line[2:] for line in lines if line[:2] == f"{sign} "])
        assert set(changed) <= set(own)
    hints._print_block("newton_schulz", MANIFEST.get("02"))
    assert "\n00b_rotary → 01_muon\n" in capsys.readouterr().out
    hints._print_block("CausalSelfAttention", MANIFEST.get(ROOT))
    block = hints.blocks_of(source_of(ROOT))["CausalSelfAttention"]
    assert capsys.readouterr().out == f"\n00_baseline: CausalSelfAttention\n{block}\n"


def test_hints_begin_anew_when_the_block_shows_something_else(script, answers, capsys):
    assert [level_given(script, capsys) for _ in range(2)] == [1, 2]
    edit(script)  # the same message
    assert level_given(script, capsys) == 3
    answers[0][1] = Outcome("nesterov_update", "this", "something else", "so")
    edit(script)
    assert [level_given(script, capsys) for _ in range(2)] == [1, 2]
    failing, answers[0][1] = answers[0][1], Outcome("nesterov_update")
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    answers[0][1] = failing
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    assert level_given(script, capsys) == 1
    assert learner_of(script)[0].progress.of(MANIFEST.get("01")).given == 6


def test_a_check_that_no_hint_belongs_to_says_so(script, answers):
    answers[0][1] = Outcome("time", "an answer within 6 s", "none: the script was stopped")
    learner, out = learner_of(script)
    commands.give_hint(learner, MANIFEST.get("01"), None, None, 1)
    assert out.getvalue().startswith('No hint belongs to "time": the lines of the check')
    assert learner.progress.of(MANIFEST.get("01")).given == 0
    commands.check_once(learner, MANIFEST.get("01"), 100.0)
    assert out.getvalue().endswith(
        "The time was not enough for a verdict. With more:\n"
        f"    python tools/check_train.py 01 --timeout 300 --script {script}\n")


def test_the_latest_traces_are_kept(tmp_path):
    from speedrun.check import kept

    for number in range(kept.LATEST + 2):
        kept.save(tmp_path / f"muon-{number}", {})
        os.utime(tmp_path / f"muon-{number}", (number, number))
    assert {file.name for file in tmp_path.iterdir()} == {
        f"muon-{number}" for number in range(2, kept.LATEST + 2)}
    (tmp_path / "muon-folder").mkdir()
    kept.save(tmp_path / "muon-folder", {})  # cannot be written, as on a full disk
    assert kept.load(tmp_path / "muon-folder") is None


def test_what_is_packed_comes_back():
    import torch

    from speedrun.check import kept

    numbers = torch.arange(6.0).view(2, 3)
    tensors = [numbers.T, numbers.bfloat16()[1:], numbers > 2, torch.tensor(7), numbers[:0],
               torch.nn.Parameter(numbers), torch.ones(1).expand(3)]
    file, words = kept.unpacked(kept.packed((tensors, {"a": [1.5, None]})))
    assert words == {"a": [1.5, None]}
    for tensor, other in zip(tensors, file, strict=True):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert torch.equal(tensor, other)
    assert len(kept.packed(torch.zeros(1000)[:2])) < 500  # not what a view leaves out


OWN, LONELY, GLOO = (["error", words, 3, "x()"] for words in (
    "KeyError: 'x'", "RuntimeError: Connection closed", "RuntimeError: gloo"))
KILLED, ENDED = (["error", f"the process {how}", 0, ""] for how in (
    "was killed by SIGKILL (out of memory?)",
    "ended with exit code 1; the last line that it wrote: last words"))


def of_rank(weight, **more):
    """What a rank shows that begins with this weight."""
    return {"beginning": ["beginning", [1, weight], 0.0],
            "state": ["state", {"a 1": 5, f"b {weight}": 7 + weight}, 0.0], **more}


@pytest.mark.parametrize(("ranks", "wanted", "hung"), [
    ([{"a run": LONELY}, {"a run": OWN}], {"a run": OWN}, False),
    ([{"a run": GLOO}, (1, "last words\n")], {"a run": ENDED}, False),
    ([(1, "last words\n"), {"a run": OWN}], {"a run": OWN}, False),
    ([{"a run": LONELY}, (None, "")], {"a run": ["error", "it does not end: it waits for something "
                                                 "that does not come", 7, "y()"]}, True),
    ([(None, ""), (-9, "")], {"a run": KILLED}, True),
    ([(-9, "Thread 1 (most recent call first):")], {"a run": [
        "error", "it does not end: it computes more than ten times as long as the milestone", 7,
        "y()"]}, True),
    ([of_rank(2, x=1), of_rank(3, x=2, y=3), of_rank(2)], {
        "x": 1, "y": 3, "all ranks begin with the same weights": ["fact", "False", 0.0],
        "numbers of the optimizers' state that only one rank keeps": ["at least", 10, 0.8],
        "numbers of the optimizers' state on all ranks together": [
            "at most", 14 + 15 + 14, (1.15, 64)]}, False)])
def test_what_ranks_show_and_the_likeliest_cause_of_their_end(ranks, wanted, hung, tmp_path):
    from speedrun.check import kept, worker

    for rank, seen in enumerate(ranks):  # what it shows, or an exit code and output
        if isinstance(seen, dict):
            (tmp_path / f"rank{rank}.pkl").write_bytes(kept.packed((seen, 2.5)))
    task = SimpleNamespace(
        folder=tmp_path, used=[0.5] * len(ranks), hung=False, job=SimpleNamespace(what="a run"),
        _output=lambda rank: ranks[rank][1] if isinstance(ranks[rank], tuple) else "",
        _place=lambda output: (7, "y()"))
    codes = [seen[0] if isinstance(seen, tuple) else 0 for seen in ranks]
    assert worker.Task._collected(task, codes) == wanted and task.hung == hung
    assert task.used == [0.5 if isinstance(seen, tuple) else 2.5 for seen in ranks]


@pytest.mark.parametrize(("left_alone", "now", "used", "asleep", "waits", "moved"), [
    (False, 20, 0.1, False, False, (0, 0.0)), (False, 21, 0.1, False, True, (0, 0.0)),
    (False, 21, 0.11, False, False, (21, 0.11)), (True, 3, 0.1, False, False, (0, 0.0)),
    (True, 4, 0.1, False, True, (0, 0.0)), (False, 21, 0.0, False, False, (0, 0.0)),  # no turn yet
    (False, 21, 0.0, True, True, (0, 0.0)), (False, 90, 9.0, False, False, (90, 9.0)),
    (False, 91, 9.0, False, True, (91, 9.0)), (False, 21, None, False, False, (0, 0.0))])
def test_processes_that_compute_next_to_nothing_wait(
        left_alone, now, used, asleep, waits, moved, monkeypatch):
    from speedrun.check import worker

    monkeypatch.setattr(worker, "_computed", lambda pid: used)
    monkeypatch.setattr(worker, "_sleeps", lambda pid: asleep)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now))
    task = SimpleNamespace(ranks=[SimpleNamespace(pid=1)], used=[0.0], moved=(0, 0.0), end=90)
    assert (worker.Task._waits(task, left_alone), task.moved) == (waits, moved)


def test_what_the_system_tells_of_a_process(monkeypatch):
    from speedrun.check import worker

    monkeypatch.setattr(worker.os, "sysconf", lambda name: 100)
    fields = [*map(str, range(1, 30))]
    for status, computed, sleeps in ((["S", *fields], 0.23, True), (["R", *fields], 0.23, False),
                                     ([], None, None)):
        monkeypatch.setattr(worker, "_status", lambda pid, status=status: status)
        assert (worker._computed(1), worker._sleeps(1)) == (computed, sleeps)


@pytest.mark.parametrize("late", ["wanted", "judged"])
def test_whose_time_ran_out_is_told(late, script, monkeypatch):
    from speedrun.check.examine import Examination

    def stopped(*_):
        raise TimeoutError

    if late == "wanted":  # as on a machine that is too slow for the milestone's own script
        monkeypatch.setattr("speedrun.check.kept.load", lambda file: None)
        monkeypatch.setattr(Examination, "_run", stopped)
    else:
        monkeypatch.setattr("speedrun.check.examine._judged", stopped)
        monkeypatch.setattr(Examination, "wanted", {})
        monkeypatch.setattr(Examination, "differing", lambda self, text: {
            "model": [Deviation("a loss", "1", "2")]})
    *others, last = commands.check(script, MANIFEST.get(ROOT), 5)
    assert last.name == "time" and last.meaning == "--timeout gives it more time."
    if late == "wanted":
        assert last.got == "none: the milestone's own script was stopped"
    else:
        assert others[-1].name == "model" and last.expected == "which block is at fault"


def test_a_script_that_deletes_the_files_of_its_run_is_told(script, monkeypatch, recwarn):
    script.write_text('"""A \\d that Python warns of."""')
    def examine(source, examination):
        assert (examination.budget, gc.isenabled()) == (5, True)
        assert [os.environ[name] for name in (
            "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")] == [
                "", "1", str(examination.folder)]
        yield Outcome("model")
        raise FileNotFoundError(2, "No such file or directory", str(examination.folder / "output0"))

    monkeypatch.setattr("speedrun.check.examine.examine", examine)
    *passed, files = commands.check(script, MANIFEST.get(ROOT), 5)
    assert [outcome.name for outcome in passed] == ["syntax", "model"] and not recwarn.list
    assert files == Outcome("files", "the folder in which the script runs stays",
                            "output0 is missing", "Your script, or another program, deletes files"
                            " while it is checked.")


def test_a_verdict_outlives_a_read_only_disk(script, answers, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    learner, out = learner_of(script)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert not commands.check_once(learner, MANIFEST.get("01"), 1)
    assert "1 of 2 checks pass. Stuck?" in out.getvalue()
    assert capsys.readouterr().err.endswith("cannot be written: Read-only file system\n")


def test_a_verdict_outlives_its_folder(script, answers, monkeypatch, capsys):
    answers[0].pop()
    learner, out = learner_of(script)
    shutil.rmtree(script.parent)
    monkeypatch.setattr(commands, "hash_of", lambda _: "")
    monkeypatch.setattr(learner, "existing", lambda: script)
    assert commands.check_once(learner, MANIFEST.get("01"), 1)
    assert " ".join(out.getvalue().split()).endswith(
        " against 01_muon what the script does pass model"
        " All 1 checks pass: this is 01_muon. Next: 02, A modern architecture.")
    assert capsys.readouterr().err == (
        f"note: progress was not kept: {script.parent} cannot be written:"
        " No such file or directory\n")


def test_the_first_check_lists_what_is_left_to_write(script, answers):
    learner, out = learner_of(script)
    for times in (1, 0):
        out.truncate(out.seek(0))
        commands.check_once(learner, MANIFEST.get("02"), 1)
        assert out.getvalue().count("On the way to 02_modern_arch:\n"
                                    "  to write: Rotary, newton_schulz, nesterov_update, Muon\n"
                                    "  to change: lr_multiplier, norm, CausalSelfAttention, MLP, "
                                    "Block, GPT, make_optimizers, main\n"
                                    "  to remove: NormalizedAdamW\n"
                                    "  fields to add: muon_lr, muon_momentum, ") == times
    lines = left_to_write(MANIFEST.get("02"), edited(ROOT, (
        "    seed: int = ", "    my_own: int = 1\n    seed: int = ")) + "\n\ndef f():\n    pass\n")
    assert lines[3:] == [
        "fields to add: muon_lr, muon_momentum, embed_lr, cooldown_steps",
        "fields with another default: total_batch_size, micro_batch_size, vocab_size, num_heads, "
        "train_steps, val_loss_every",
        "fields to remove: adam_lr, weight_decay, warmup_steps, final_lr_multiplier"]
    assert [line.split(":")[0] for line in lines[:2]] == ["to write", "to change"]
    assert lines[2] == "to remove: NormalizedAdamW"
    assert left_to_write(MANIFEST.get("02"), source_of("02")) == []


@pytest.mark.parametrize("text", [b"# caf\xe9", b"def f(:", b"x = 1\n\n\nx = 2\n"])
def test_a_first_check_of_what_has_no_clear_blocks_lists_nothing(text, script, answers):
    script.write_bytes(text)
    learner, out = learner_of(script)
    assert not commands.check_once(learner, MANIFEST.get("01"), 1)
    assert "On the way" not in out.getvalue()
    script.write_text("\ufeff# as some editors save\n", encoding="utf-8")
    commands.check_once(learner, MANIFEST.get("02"), 1)
    assert "On the way to 02_modern_arch:\n  to write: " in out.getvalue()


def test_a_check_is_shown_by_its_parts(script, answers, monkeypatch):
    monkeypatch.chdir(script.parent)
    answers[0][:0] = [Outcome("two ranks", "x", "y")]
    answers[0].extend([Outcome("Muon", part="your blocks"), Outcome("time", "1 s", "2 s")])
    learner, out = learner_of(script)
    with learner.progress.changing(MANIFEST.get("01")):
        pass
    commands.check_once(learner, MANIFEST.get("01"), 1)
    assert out.getvalue() == """train_gpt.py against 01_muon
what the script does
  FAIL  two ranks
        expected x
        got      y
  pass  model
  FAIL  nesterov_update (lines 3-5)
        expected this
        got      that
        so
your blocks
  pass  Muon
what the script does
  FAIL  time
        expected 1 s
        got      2 s
2 of 5 checks pass. Stuck?
    python tools/check_train.py 01 --hint --script train_gpt.py
"""


def test_an_edit_meanwhile_is_not_what_was_checked(script, answers, monkeypatch):
    before, check = progress.hash_of(script), commands.check
    monkeypatch.setattr(commands, "check", lambda *given: (edit(script), check(*given))[1])
    for look in (commands.check_once, lambda *given: commands.give_hint(*given[:2], None, None, 1)):
        look(learner_of(script)[0], MANIFEST.get("01"), 1)
        assert learner_of(script)[0].progress.of(MANIFEST.get("01")).script == before
        before = progress.hash_of(script)


def test_what_a_check_finds_is_noted():
    standing = progress.Standing(done=True, hints=dict(model=1, Muon=2, GPT=3, card=4, time=5))
    standing.failing = {"Muon": "a b", "GPT": "a b", "card": "x"}
    standing.record([Outcome("model"), Outcome("Muon (line 3)", "a", "b", block="Muon"),
                     Outcome("Muon (line 4)", "c", "d", block="Muon"), Outcome("GPT", "a", "c"),
                     Outcome("time", "e", "f")], "the hash")
    assert standing == progress.Standing(
        passed=1, seen=5, failing={"Muon": "a b", "GPT": "a c", "time": "e f"}, script="the hash",
        done=True, hints=dict(Muon=2, card=4, time=5))
    assert standing.next == "Muon" and progress.Standing().next == ""


def test_no_hint_where_none_is_needed(script, answers):
    answers[0].pop()
    learner, out = learner_of(script)
    commands.give_hint(learner, MANIFEST.get("01"), None, None, 1)
    assert out.getvalue() == "All checks of 01_muon pass; no hint is needed.\n"
    assert learner_of(script)[0].progress.of(MANIFEST.get("01")).done


def test_a_hint_to_a_block_by_its_name(script, answers, capsys):
    assert level_given(script, capsys, name="newton_schulz") == 1
    assert level_given(script, capsys, name="Newton_Schulz") == 2
    assert answers[1] == [], "no check is needed for it"
    assert level_given(script, capsys) == 1, "the failing one has levels of its own"
    assert level_given(script, capsys, name="newton_schulz") == 3
    assert hint_of(" CARD ", MANIFEST.get("01")) == Hint("card"), "nobody wrote hints for it"
    assert level_given(script, capsys, name="card") == 4
    assert find_hint("NormalizedAdamW", MANIFEST.get("01")).nudge, "the root's: 01 removes it"
    with pytest.raises(UserError) as error:
        level_given(script, capsys, name="xyz")
    blocks = ", ".join(hints.blocks_of(source_of("01")))
    assert (error.value.status, str(error.value)) == (
        2, f'01 has no block "xyz"; it has: {blocks}')
    for name, words in ("Moun", "did you mean Muon?"), ("quantize", "05i adds it"):
        with pytest.raises(UserError, match=f'"{name}"; {re.escape(words)}'):
            level_given(script, capsys, name=name)


def test_a_level_that_a_hint_lacks_is_named(capsys):
    print_hint(hint_of("Hyperparameters", MANIFEST.get("05i")), MANIFEST.get("05i"), 1)
    assert "--hint 3 says more (no hint 2: the mathematics)." in capsys.readouterr().out


def test_a_milestone_that_was_skipped_is_named(script, answers):
    learner, out = learner_of(script)

    def is_named():
        out.truncate(out.seek(0))
        commands.check_once(learner, MANIFEST.get("01"), 1)
        return "not passed 00a, which" in out.getvalue()

    assert not is_named(), "nothing is known of the script"
    with learner.progress.changing(MANIFEST.get("00")) as standing:
        standing.done = True
    assert is_named() and out.getvalue().endswith(f"check_train.py 00a --script {script}\n")
    with learner.progress.changing(MANIFEST.get("00b")) as standing:
        standing.taken = True
    assert not is_named() and "comes first" not in out.getvalue()


@pytest.mark.parametrize("id", IDS)
def test_every_block_that_changes_has_hints_of_four_levels(id, capsys):
    milestone = MANIFEST.get(id)
    names = milestone.changes or [b.name for b in split_blocks(source_of(id))
                                  if not b.name.startswith("heading: ") and b.name != "card"]
    for name in names:
        if name not in hints.blocks_of(source_of(id)):
            continue  # this milestone removes it
        hint = hints.hint_of(name, milestone)
        assert hint.nudge and hint.steps, name
        for level in (1, hints.next_level(hint, 2), 3):
            hints.print_hint(hint, milestone, level)
    hints.print_hint(hint, milestone, 4)  # the diff, of the last: each takes long
    shown = capsys.readouterr().out
    if milestone.parent:
        assert f"{MANIFEST.get(milestone.parent).name} → {milestone.name}" in shown
    else:  # the block itself
        first = hints.blocks_of(source_of(id))[name].splitlines()[0]
        assert f"\n{milestone.name}: {name}\n{first}\n" in shown


def test_the_list_shows_progress(script, answers):
    learner, out = learner_of(script)
    assert not commands.check_once(learner, MANIFEST.get("01"), 1)
    answers[0].pop()
    assert commands.check_once(learner, MANIFEST.get(ROOT), 1)
    learner, out = learner_of(script)
    commands.show_list(learner)
    lines = out.getvalue().splitlines()
    assert len(lines) == len(LISTED)
    assert lines[0].startswith(f"x {ROOT}") and lines[0].endswith("passed")
    assert "1 of 2 checks, next: nesterov_update" in out.getvalue()


@pytest.mark.parametrize("standing, words", [
    ({}, ""), (dict(taken=True, given=2), "taken"), (dict(taken=True, done=True), "taken, passed"),
    (dict(taken=True, failing=dict(Muon="x")), "taken"),
    (dict(done=True, given=1), "passed (1 hint)"),
    (dict(passed=3, seen=5, failing=dict(Muon="x", GPT="y"), given=2),
     "3 of 5 checks, next: Muon (2 hints)"),
    (dict(done=True, failing=dict(Muon="x")), "passed; last check stopped at Muon"),
])
def test_a_line_of_the_list(standing, words, script):
    learner, out = learner_of(script)
    learner.progress.standings["modern_arch"] = progress.Standing(**standing)
    commands.show_list(learner)
    width = max(len(f"{m.id} {m.title}") for m in LISTED)
    mark = "x" if "done" in standing else " "
    assert out.getvalue().splitlines() == [
        f"{mark} {'02 A modern architecture':<{width}}  {words}".rstrip()
        if m is MANIFEST.get("02") else f"  {m.id} {m.title}" for m in LISTED]


@pytest.mark.parametrize("done, taken, follower", [
    ("", "", None), ("00", "", "00a"), ("00", "00b", "01"), ("00a", "00", "00b"), ("01", "", None),
    ("02", "", None)])
def test_the_milestone_that_comes_first_follows_the_last_that_was_reached(done, taken, follower):
    standings = {MANIFEST.get("00b").slug: progress.Standing(failing={"x": "y"})}
    standings |= {MANIFEST.get(id).slug: progress.Standing(done=id == done, taken=id == taken)
                  for id in (done, taken) if id}
    learner = SimpleNamespace(progress=SimpleNamespace(standings=standings))
    found = commands._next_after(learner, MANIFEST.get("02"))
    assert (found and found.id) == follower


def test_what_passed_once_stays_on_the_list(script, answers):
    failing = answers[0].pop()
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    answers[0].append(failing)
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    learner, out = learner_of(script)
    assert learner.progress.of(MANIFEST.get("01")).done
    commands.show_list(learner)
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("x 01")]
    assert line.endswith("  passed; last check stopped at nesterov_update")


def passes(script, number, id="01"):
    """Notes for a milestone that so many checks passed, as a command does; returns it."""
    learner, _ = learner_of(script)
    with learner.progress.changing(MANIFEST.get(id)) as standing:
        standing.passed = number
    return learner


@pytest.mark.parametrize("content", [
    "", "{", "[]", "null", '{"muon": 3}', '{"muon": {"unknown": 1}}', "\udcff", "[" * 100_000,
    '{"muon": {"passed": "3"}}', '{"muon": {"hints": {"Muon": "x"}}}', '{"05e": {"passed": 3}}',
    '{"muon": {"failing": {"Muon": 3}}}', '{"muon": {"done": 1}}', '{"muon": {"seen": true}}',
])
def test_broken_progress_is_kept_under_a_number(content, script, capsys):
    file = script.parent / progress.FILE
    broken = content.encode("utf-8", "surrogateescape")
    file.write_bytes(broken)
    learner, out = learner_of(script)
    commands.show_list(learner)
    assert len(out.getvalue().splitlines()) == len(LISTED)
    what = next((name for name in ("muon", "05e") if name in content), "everything")
    assert capsys.readouterr().err == (
        f"note: {what} in .progress.json could not be read and counts as not done; the file will be"
        " kept under a number\n")
    passes(script, 3)
    assert json.loads(file.read_text())["muon"]["passed"] == 3
    assert (script.parent / ".progress.1.json").read_bytes() == broken


def test_a_damaged_entry_costs_only_itself(script):
    """05e was the FP8 head's id once, and may mean another one now."""
    file = script.with_name(progress.FILE)
    file.write_text('\ufeff{"05e_fp8_head": {"passed": 3}, "05e": {"passed": 5},'
                    ' "muon": {"passed": 4},'
                    ' "tied_head": {"from": "a newer version"}}', encoding="utf-8")
    kept = passes(script, 1, "00").progress
    assert [kept.of(MANIFEST.get(slug)).passed for slug in ("fp8_head", "muon", "00")] == [3, 4, 1]
    assert [*json.loads(file.read_text())] == ["baseline", "fp8_head", "muon"]


def test_commands_at_once_keep_each_others_progress(script):
    """A check takes a minute; meanwhile another terminal may give a hint."""
    learner, _ = learner_of(script)
    passes(script, 7)
    with learner.progress.changing(MANIFEST.get("02")) as standing:
        other = threading.Thread(target=passes, args=(script, 5, "03"))
        other.start()
        other.join(0.2)
        assert other.is_alive()  # it waits
        standing.passed = 6
    other.join()
    kept = learner_of(script)[0].progress
    assert [kept.of(MANIFEST.get(id)).passed for id in ("01", "02", "03")] == [7, 6, 5]


def test_a_folder_for_progress_is_one_line(script, command):
    script.with_name(progress.FILE).mkdir()
    ended = command("--list", "--script", script)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: .*progress.json: Is a directory\n", ended.stderr)


def test_progress_is_written_whole_or_not_at_all(script, monkeypatch, capsys):
    passes(script, 3)
    monkeypatch.setattr("speedrun.base.files.os.fsync",
                        lambda _: (_ for _ in ()).throw(OSError("full")))
    passes(script, 4)
    assert capsys.readouterr().err.endswith("progress.json cannot be written: full\n")
    assert learner_of(script)[0].progress.of(MANIFEST.get("01")).passed == 3
    assert len(list(script.parent.iterdir())) == 3  # the lock, too


# ---- the command ----


def test_the_code_names_no_milestone():
    for file in sorted((REPOSITORY / "tools" / "speedrun" / "check").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        for id in IDS:
            assert f'"{id}"' not in text, f"{file.name} names {id}"
        for name in ("Muon", "NormalizedAdamW", "newton_schulz", "attention_mask", "Rotary"):
            assert not re.search(rf"\b{name}\b", text), f"{file.name} names {name}"


@pytest.mark.parametrize("arguments, code, message", [
    ([], 2, "give a milestone, or --list; see --help"),
    (["01", "--hint", "5"], 2, "5 is not a level from 1 to 4"),
    (["--hint", "01"], 2, "01 is not a level from 1 to 4"),
    (["01", "--timeout", "soon"], 2, "soon is not a number"),
    (["01", "--timeout", "0"], 2, "0 is no time"),
    (["01", "--block", "Muon"], 2, "--block NAME goes with --hint"),
    (["01", "--hint", "--block", "x"], 2, '01 has no block "x"; it has: card, imports,'),
    (["01", "--take", "--watch"], 2, "not allowed with argument"),
    ([""], 1, 'no milestone "": the name is empty; --help says what can be named here'),
    (["muom"], 1, 'no milestone "muom"; did you mean 01_muon?\n'),
    (["01", "--script", "/dev/null"], 1, "/dev/null is not a regular file; name another script"),
    (["01", "--script", "nowhere.py"], 1, "there is no nowhere.py; --take makes one: "
     "python tools/check_train.py 00 --take --script nowhere.py\n"),
    (["01", "--hint", "--script", "nowhere.py"], 1, "there is no nowhere.py"),
    (["01", "--take", "--script", "nowhere/x.py"], 1,
     "nowhere/x.py cannot be written: No such file or directory\n"),
    (["01", "--script", "."], 1, " is a folder, not a script; name the file in it\n"),
    (["02", "--take", "--script", MANIFEST.get("01").script], 1, "is a milestone itself"),
])
def test_a_wrong_command_line_is_one_line(arguments, code, message, tmp_path, command):
    ended = command(*arguments, cwd=tmp_path)
    assert ended.returncode == code and ended.stdout == ""
    assert ended.stderr.startswith("error: ") and message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments, does", [
    (["--list"], ("show_list",)), (["e1", "--list"], ("show_list",)),
    (["01", "--take"], ("take_milestone", "01")), (["01", "--watch"], ("watch", "01", 300)),
    (["muon", "--hint"], ("give_hint", "01", None, None, 300)),
    (["01", "--hint", "4", "--block", "GPT", "--timeout", "9"],
     ("give_hint", "01", 4, "GPT", 9)),
    (["01", "--timeout", "0.5", "--script", "x.py"], ("check_once", "01", 0.5)),
])
def test_what_a_command_line_does(arguments, does, monkeypatch, tmp_path):
    done, signals = [], {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(COMMAND), *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(signal, "signal", signals.__setitem__)
    for name in ("show_list", "take_milestone", "watch", "give_hint", "check_once"):
        monkeypatch.setattr(commands, name, lambda *given, name=name: done.append((name, *given)))
    main = runpy.run_path(str(COMMAND))["main"]
    assert main() == (does[0] == "check_once")
    ((name, learner, *given),) = done
    assert [name, *given] == [MANIFEST.get(one) if one == "01" else one for one in does]
    assert learner.root.id == ("e0" if "e1" in arguments else ROOT)
    assert learner.script == (tmp_path / "x.py" if "x.py" in arguments
                              else MANIFEST.learners_script(learner.root))
    with pytest.raises(SystemExit) as ended:
        signals[signal.SIGTERM](15, None)
    assert ended.value.code == 143


def test_a_command_names_the_script_where_it_is_another(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    assert open_learner(None).command("01 --hint") == "python tools/check_train.py 01 --hint"
    assert open_learner(Path("my own.py")).command("01").endswith("01 --script 'my own.py'")
    link = script.with_name("link.py")
    link.symlink_to(MANIFEST.get("01").script)
    assert open_learner(link).progress.file is None
    assert open_learner(script).progress.file == script.parent / progress.FILE


def test_a_milestone_itself_passes_by_the_command(command):
    script = MANIFEST.get(QUICK).script
    ended = command(QUICK, "--script", script)
    assert ended.returncode == 0, ended.stdout
    assert "FAIL" not in ended.stdout and ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert "  pass  tokens" in lines
    passed = ended.stdout.count("  pass  ")
    assert lines[-1] == f"All {passed} checks pass: this is {MANIFEST.get(QUICK).name}."
    assert not (script.parent / progress.FILE).exists()


def test_what_a_milestone_shows_is_kept_until_something_changes(tmp_path, monkeypatch):
    from speedrun.check import examine, kept

    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    ran = []
    monkeypatch.setattr(examine.Examination, "_choose_options", lambda *_: None)
    monkeypatch.setattr(examine.Examination, "_find_wanted", lambda self: ran.append(
        self.text) or vars(self).update(budget=1) or dict(
            seen={"contract": {}}, seconds={"contract": 1.5}, run={}))

    def look(number, milestone, more=""):
        (tmp_path / str(number)).mkdir()
        examination = examine.Examination(tmp_path / str(number), 9, milestone)
        examination.text += more
        assert examination.wanted == {"contract": {}} and examination.budget == 9
        assert examination.limits == {"contract": 8 + 10 * 1.5}

    root, other = MILESTONES[:2]
    look(0, root), look(1, root), look(2, root, "# more"), look(3, other), look(4, other)
    assert len(ran) == 3 and len(list(kept.FOLDER.iterdir())) == 3
    next(kept.FOLDER.glob(f"{other.slug}-*")).write_bytes(b"half a file")
    look(5, other)
    assert len(ran) == 4
    monkeypatch.setattr(kept, "REPOSITORY", tmp_path)
    names = set()
    for name in ("history/hyperparameters.toml", "tools/speedrun/check/one.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        for content in ("# one", "# two"):
            (tmp_path / name).write_text(content, encoding="utf-8")
            names.add(kept.file_of("a", "", {}))
    names |= {kept.file_of(*parts) for parts in (
        ("a", "text", {}), ("a", "", dict(x=1, y=2)), ("a", "", dict(y=2, x=1)), ("b", "", {}))}
    assert len(names) == 7 and {name.name[:2] for name in names} == {"a-", "b-"}
    for owner, name in ((kept.torch, "__version__"), *((kept.platform, name) for name in (
            "python_version", "platform", "processor"))):
        monkeypatch.setattr(owner, name, "other" if owner is kept.torch else lambda: "other")
        names.add(kept.file_of("a", "", {}))
    assert len(names) == 11


def test_a_failing_check_is_told_in_plain_lines(script, command):
    script.write_text("def f(:\n", encoding="utf-8")
    ended = command("01", "--script", script)
    assert ended.returncode == 1 and ended.stderr == ""
    lines = ended.stdout.splitlines()
    start = lines.index("  FAIL  syntax")
    assert lines[start : start + 5] == [
        "  FAIL  syntax", "        expected a Python file",
        "        got      line 1: invalid syntax",
        "0 of 1 checks pass. Stuck?",
        f"    python tools/check_train.py 01 --hint --script {script}"]


def test_watch_checks_again_when_the_file_changes_and_ends_with_ctrl_c(script):
    script.write_text("def f(:\n", encoding="utf-8")
    watcher = subprocess.Popen(
        [sys.executable, str(COMMAND), "01", "--watch", "--script", "train_gpt.py"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=script.parent)
    seen = []
    (late := threading.Timer(120, watcher.kill)).start()
    try:
        for text in ("def g(:\n", None):
            for line in watcher.stdout:
                seen.append(line)
                if line.startswith("Watching"):
                    break
            if text:
                replacement = script.with_name("new")  # as editors save
                replacement.write_text(text + text, encoding="utf-8")
                os.replace(replacement, script)
        watcher.send_signal(signal.SIGINT)
        rest, errors = watcher.communicate(timeout=60)
    finally:
        late.cancel()
        watcher.kill()
    assert (watcher.returncode, errors, rest) == (0, "", "\nstopped watching\n")
    assert "".join(seen) == "\n".join(["""train_gpt.py against 01_muon
what the script does
  FAIL  syntax
        expected a Python file
        got      line 1: invalid syntax
0 of 1 checks pass. Stuck?
    python tools/check_train.py 01 --hint --script train_gpt.py
Watching; Ctrl-C ends it.
"""] * 2)


def test_watch_waits_for_a_file_that_is_being_replaced(script, answers, monkeypatch):
    changes = iter([script.unlink, lambda: script.write_text("x"), None])

    def sleep(seconds):
        change = next(changes)
        if change is None:
            raise KeyboardInterrupt
        change()

    monkeypatch.setattr(commands.time, "sleep", sleep)
    commands.watch(learner_of(script)[0], MANIFEST.get("01"), 1)
    assert answers[1] == ["01", "01"]


def test_watch_sees_what_changes_while_it_checks(script, monkeypatch):
    checks = []

    def check_once(learner, *_):
        checks.append(learner.script.read_text())
        learner.script.write_text("x" * min(len(checks), 3))

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "check_once", check_once)
    monkeypatch.setattr(commands.time, "sleep", sleep)
    commands.watch(learner_of(script)[0], MANIFEST.get("01"), 1)
    assert checks[1:] == ["x", "xx", "xxx"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_checks_too(signum, script, tmp_path, start):
    pid, temporary = tmp_path / "pid", tmp_path / "tmp"
    script.write_text(f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text("
                      "str(os.getpid()))\ntime.sleep(300)\n", encoding="utf-8")
    temporary.mkdir()
    started = start(QUICK, "--script", script, TMPDIR=str(temporary))
    try:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(started.pid, signum)
        ended = start.end(started)
    finally:
        started.kill()
    assert ended.returncode == 128 + signum
    assert ended.stderr == ("error: interrupted\n" if signum == signal.SIGINT else "")
    time.sleep(0.2)
    assert not _runs(int(pid.read_text()))
    assert list(temporary.iterdir()) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns, stream, width", [
    (20, Terminal, 30), (40, Terminal, 40), (300, Terminal, 100), (40, io.StringIO, 100)])
def test_the_width_of_lines(columns, stream, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert Screen(stream()).width == width


def test_outcomes_on_a_terminal_have_colours_and_fold_below_their_words(monkeypatch):
    for name, value in dict(COLUMNS=40, TERM="xterm-256color", COLORTERM="truecolor").items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(Terminal())
    screen.line(f"[red] {'a-b ' * 10}", "bold")
    screen.command("one --two " * 5)
    screen.text(f"{'word ' * 9}\n1. {'step ' * 8}\n")
    screen.outcome(Outcome("[b] :smile: 3"))
    screen.outcome(Outcome("Muon", "x " * 16, "y " * 12, "z " * 17))
    assert screen.console.file.getvalue().splitlines() == [
        f"\x1b[1m[red]{' a-b' * 8}\x1b[0m", "\x1b[1m  a-b a-b\x1b[0m",
        f"    {'one --two ' * 5}", " ".join(["word"] * 8), "word",
        f"1. {' '.join(['step'] * 7)}", "   step", "\x1b[32m  pass  \x1b[0m[b] :smile: 3",
        "\x1b[1;31m  FAIL  \x1b[0m\x1b[1mMuon\x1b[0m",
        f"        expected {' '.join('x' * 12)}", f"{' ' * 17}x x x x",
        f"        got      {' '.join('y' * 12)}", f"        {' '.join('z' * 16)}", "        z"]


def test_lines_fit_a_narrow_terminal(script, answers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    answers[0].append(Outcome("Muon", "long " * 20, "\x1b[2Jgot " * 20, "so " * 30))
    learner, _ = learner_of(script)
    out = Terminal()
    learner.screen = Screen(out)
    learner.script = Path("train_gpt.py")
    learner.screen.line("a name with \x1b[2J")
    learner.screen.outcome(Outcome("passed \x1b[2J"))
    monkeypatch.chdir(script.parent)
    commands.check_once(learner, MANIFEST.get("01"), 1)
    commands.show_list(learner)
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert "\x1b" not in plain and "␛[2J" in plain
    long = [line for line in plain.splitlines() if len(line) > 40]
    assert long == ["    python tools/check_train.py 01 --hint --script train_gpt.py"]
