"""The learner's path: the checks know right from wrong, and nothing of the learner's is lost.

Run: .venv/bin/python -m pytest tests/test_check_train.py
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from learner_scripts import ALL_REDUCE, RIGHT, STACKED, WRONG, edited, other_attention, source_of
from snapshots import WRITTEN
from speedrun.blocks import split_blocks
from speedrun.checks import catalog as catalogs
from speedrun.checks import examine as examining
from speedrun.checks import path, ranks, session, standing, take
from speedrun.checks.architecture import ARCHITECTURES
from speedrun.checks.catalog import LEVELS, load_catalog
from speedrun.checks.classify import classify
from speedrun.checks.features import FEATURES
from speedrun.checks.hints import print_hint
from speedrun.checks.learner import open_path
from speedrun.checks.matrices import Mapping
from speedrun.checks.outcome import Outcome
from speedrun.checks.probe import Probe
from speedrun.checks.show import Screen
from speedrun.checks.sizes import PROBE
from speedrun.checks.subject import Subject
from speedrun.checks.survey import survey
from speedrun.launch import RunError
from speedrun.manifest import REPOSITORY, load_manifest

COMMAND = REPOSITORY / "tools" / "check_train.py"
MANIFEST = load_manifest()
IDS = [milestone.id for milestone in WRITTEN]
CHILDREN = [milestone.id for milestone in WRITTEN if milestone.parent]


def outcomes(text, id, folder):
    """The outcomes of a script's text (or bytes) against a milestone, checked in this process."""
    script = folder / "train_gpt.py"
    script.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = [o for _, o in examining.examine(script, MANIFEST.get(id), load_catalog())]
    assert all(load_catalog().applies(o.name, MANIFEST.get(id)) for o in found), "no hints"
    return found


def failures(text, id, folder):
    """The outcomes that did not pass, {name: all that they say}."""
    return {o.name: f"{o.expected} | {o.got} | {o.meaning}" for o in outcomes(text, id, folder)
            if not o.passed}


def command(*arguments, **options):
    """Runs the command to its end."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, str(COMMAND), *map(str, arguments)], env=environment,
                          capture_output=True, encoding="utf-8", timeout=300, **options)


@pytest.fixture
def script(tmp_path):
    """A learner's script, a copy of 00."""
    file = tmp_path / "train_gpt.py"
    file.write_text(source_of("00"), encoding="utf-8")
    return file


# ---- right and wrong ----


def one_rank(monkeypatch):
    """Leaves out the ranks, where their part is the same as in another test."""
    monkeypatch.setattr(examining, "BEHAVIOUR", examining.BEHAVIOUR[:1])


@pytest.mark.parametrize("id", [id for id in IDS if id != "03"])
def test_every_milestone_passes_its_own_checks(id, tmp_path, monkeypatch):
    one_rank(monkeypatch)
    torch.optim.AdamW([torch.zeros(1)])  # from now on torch watches its step, in 00 too
    found = outcomes(source_of(id), id, tmp_path)
    assert [o for o in found if not o.passed] == []
    assert len(found) > 20 and found[-1].name == "training losses"


def test_03_passes_its_own_checks_by_the_command():
    script = MANIFEST.get("03").script
    ended = command("03", "--script", script)
    assert ended.returncode == 0, ended.stdout
    assert "FAIL" not in ended.stdout and ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert "  pass  shared momentum" in lines
    assert f"All {ended.stdout.count('  pass  ')} checks pass" in lines[-1]
    assert not (script.parent / standing.FILE).exists()


MISSING = {
    "01": {"fields": ["muon_lr", "muon_momentum", "cooldown_steps"]},
    "02": {"activation": ["squared ReLU", "GELU"], "normalised queries and keys": ["no norm"],
           "attention branch": ["1 / sqrt(2 x layers)"], "parameter count": ["123,532,032"],
           "zeroed matrices": ["attention output, MLP down"], "hyperparameters": ["num_heads 6"]},
    "03": {"shared work": ["100% and 100%"], "shared momentum": ["100% and 100%"]},
    "04": {"fields": ["embed_lr", "head_lr", "scalar_lr", "momentum_warmup_steps"]},
    "05": {"names": ["window_size"], "fields": ["bos_id", "window_start"],
           "forward's window": ["third argument"]},
}


@pytest.mark.parametrize("id", CHILDREN)
def test_the_parent_fails_and_hears_what_is_missing(id, tmp_path):
    found = failures(source_of(MANIFEST.get(id).parent), id, tmp_path)
    assert MISSING[id].keys() <= found.keys(), found
    for name, words in MISSING[id].items():
        for word in words:
            assert word in found[name]


# What is still missing when the new hyperparameters and functions are there.
HALFWAY = {
    "01": (("00", [("    adam_lr: float = 1.5e-3\n",
                    "    muon_lr: float = 3.6e-4\n    muon_momentum: float = 0.95\n"
                    "    adam_lr: float = 3.6e-3\n    cooldown_steps: int = 1800\n")]),
           {"positions": "rotated by their position", "orthogonal updates": "moved by Adam",
            "learning rate": "lr_multiplier(0)", "position table": "it goes",
            "initial values": "embedding"}),
    "04": (("03", [("    adam_lr: float = 3.6e-3\n",
                    "    adam_lr: float = 3.6e-3\n    muon_momentum_start: float = 0.85\n"
                    "    embed_lr: float = 0.6\n    head_lr: float = 0.008\n"
                    "    scalar_lr: float = 0.04\n    momentum_warmup_steps: int = 500\n")]),
           {"untied head": "one table", "skip connections": "no skip", "value residual": "own only",
            "logit softcap": "without a cap", "embedding norm": "as it is",
            "parameter count": "lacks 12 single numbers, 12 vectors of 2, 1 vector of 6, 50304 x",
            "learned scalars": "none", "zeroed matrices": "head",
            "momentum schedule": "muon_momentum in every step",
            "update of a tall matrix": "milestone's is sqrt(max(1, rows / cols))"}),
}


@pytest.mark.parametrize("id", HALFWAY)
def test_a_script_on_the_way_hears_of_every_idea(id, tmp_path):
    (parent, edits), wanted = HALFWAY[id]
    found = failures(edited(parent, *edits), id, tmp_path)
    for name, words in wanted.items():
        assert words in found.get(name, "it passed"), name


@pytest.mark.parametrize("id", RIGHT)
def test_another_right_way_passes(id, tmp_path, monkeypatch):
    if id in ("04", "05"):  # their Muon is the milestone's
        one_rank(monkeypatch)
    found = outcomes(RIGHT[id](), id, tmp_path)
    assert [o for o in found if not o.passed] == []
    assert "training losses" in [o.name for o in found]


# The same mathematics in another order or with other signs.
SAME = {
    "norm after the rotation": ("02", [("self.rotary(norm(q)), self.rotary(norm(k))",
                                        "norm(self.rotary(q)), norm(self.rotary(k))")]),
    "rotation the other way": ("02", [(
        "torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)",
        "torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)")]),
    "positions from 1": ("02", [("torch.outer(torch.arange(seq_len), freq",
                                 "torch.outer(torch.arange(1, seq_len + 1), freq")]),
    "keys before queries": ("02", [
        ("        self.c_q = nn.Linear(args.model_dim, args.model_dim, bias=False)\n", ""),
        ("        self.c_v = nn.Linear(",
         "        self.c_q = nn.Linear(args.model_dim, args.model_dim, bias=False)\n"
         "        self.c_v = nn.Linear("),
    ]),
    "stacked matrices of another dtype than the embedding": ("04", STACKED),
    "numbers in tensors of one": ("04", [("torch.tensor(0.5)", "torch.tensor([0.5])")]),
    "FlexAttention by its module's name": ("05", [
        ("import BlockMask, create_block_mask, flex_attention\n",
         "import BlockMask, create_block_mask\n"
         "from torch.nn.attention import flex_attention as flex\n"),
        ("y = flex_attention(q", "y = flex.flex_attention(q")]),
    "FlexAttention compiled": ("05", [
        ("\n\nclass CausalSelfAttention(nn.Module):",
         "\n\nfast = torch.compile(flex_attention)\n\n\nclass CausalSelfAttention(nn.Module):"),
        ("y = flex_attention(q", "y = fast(q")]),
    "a fresh tensor for each window": ("05", [
        ("window.fill_(window_size(step, args))",
         "window = torch.tensor(window_size(step, args), dtype=torch.int32)")]),
}


def test_ranks_that_gather_all_updates_pass(tmp_path):
    gather = """            parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, flat)
            flat.copy_(torch.stack(parts).sum(0))
"""
    found = outcomes(edited("03", (ALL_REDUCE, gather)), "03", tmp_path)
    assert [o for o in found if not o.passed] == []
    assert found[-1].name == "shared momentum" and "five ranks" in [o.name for o in found]


def test_ranks_that_wait_for_each_other_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "START_S", 6)
    monkeypatch.setattr(ranks, "SLOWER", 0)
    some = ALL_REDUCE.replace("            dist", "            if dist.get_rank() == 0:\n"
                              "                dist")
    found = failures(edited("03", (ALL_REDUCE, some)), "03", tmp_path)
    assert found.keys() == {"two ranks"}
    assert "still waiting | Every rank must make the same calls of all_reduce" in found["two ranks"]


def test_a_rank_that_dies_is_not_said_to_wait(tmp_path):
    dies = ALL_REDUCE.replace("            dist", "            if dist.get_rank() == 1:\n"
                              "                os._exit(3)\n            dist", 1)
    found = failures(edited("03", (ALL_REDUCE, dies)), "03", tmp_path)
    assert found.keys() == {"two ranks"} and "rank " in found["two ranks"]
    assert "still waiting" not in found["two ranks"]


@pytest.mark.parametrize("name", SAME)
def test_the_same_mathematics_passes(name, tmp_path, monkeypatch):
    one_rank(monkeypatch)
    id, edits = SAME[name]
    assert failures(edited(id, *edits), id, tmp_path) == {}


@pytest.mark.parametrize("id, name, edits, check, words", WRONG,
                         ids=[f"{id} {name}" for id, name, *_ in WRONG])
def test_a_subtle_slip_is_found_and_named(id, name, edits, check, words, tmp_path, monkeypatch):
    if not check.endswith(" ranks"):
        one_rank(monkeypatch)
    found = failures(edited(id, *edits), id, tmp_path)
    assert words in found.get(check, "it passed"), found
    if check == "learned scalars" and "mixture" in words:  # the logits tell it in the same words
        assert "| the mixture starts at 0, not 0.5" in found["value residual"]


def test_a_slip_has_no_second_failure_as_its_consequence(tmp_path):
    ends_high = edited("01", ("(args.train_steps - step) / max(args.cooldown_steps, 1)",
                              "1.1 * (args.train_steps - step) / args.cooldown_steps"))
    assert failures(ends_high, "01", tmp_path).keys() == {"learning rate"}


def test_a_stack_is_not_told_as_a_matrix_that_is_too_much(tmp_path):
    fused = other_attention().replace("vocab_size: int = 50304", "vocab_size: int = 50257")
    found = failures(fused, "02", tmp_path)
    assert "your model lacks 50304 x 768, but has 50257 x 768." in found["parameter count"]


def test_what_no_check_knows_is_not_said_to_be_right(tmp_path):
    text = edited("01", ("loss.backward()", "(loss * (1 + step % 2)).backward()"))
    found = failures(text, "01", tmp_path)["training losses"]
    assert "No check of a part found this" in found and "weight_decay" in found


@pytest.mark.parametrize("id", IDS)
def test_what_the_messages_take_for_right_is_the_milestone(id, tmp_path, monkeypatch):
    subject = Subject(MANIFEST.get(id).script, MANIFEST.get(id), tmp_path)
    monkeypatch.chdir(tmp_path)
    model = subject.model
    assert model.mapping == Mapping()
    assert model.like(ARCHITECTURES[id], model.weights, Mapping())
    if id != "00":
        matrices = survey(Probe(subject.module, subject.args(**PROBE)), Mapping())
        assert len(matrices) == 6 * subject.args().num_layers
        assert {bool(m.stack) for m in matrices} == ({True, False} if id == "01" else {False})
        rules = classify(matrices, subject.args(**PROBE))
        schedule = "warm-up" if id in ("04", "05") else "constant"
        assert {(r.way, r.momentum, r.schedule) for r in rules} == {("five", "nesterov", schedule)}


def test_the_first_failing_group_is_shown_whole_and_is_the_last(tmp_path):
    text = edited("02", ("F.relu(self.c_fc(x)).square()", "F.relu(self.c_fc(x))"),
                  ("for _ in range(5)", "for _ in range(4)"))
    found = failures(text, "02", tmp_path)
    assert found.keys() == {"activation", "orthogonal updates"}


# ---- scripts that do harm ----


@pytest.mark.parametrize("text, check, words", [
    ("def f(:\n", "syntax", "line 1: invalid syntax"),
    ("x = 1\0", "syntax", "null bytes"),
    (b"x = 1\n# caf\xe9\n", "syntax", "line 2: byte 0xe9 is not UTF-8 | Save the file as UTF-8"),
    (b"# caf\xe9\nx = 1\n", "syntax", "line 1: byte 0xe9 is not UTF-8 | Save the file as UTF-8"),
    ("import sys\nsys.exit(3)\n", "import", "line 2: it ends the process: sys.exit(3)"),
    ("import no_such_thing\n", "import", "line 1: ModuleNotFoundError"),
    ("def f():\n    f()\nf()\n", "import", "line 2: RecursionError"),
    ("", "names", "no Hyperparameters, parse_args, GPT, main, lr_multiplier"),
])
def test_a_script_that_cannot_be_used(text, check, words, tmp_path):
    found = failures(text, "01", tmp_path)
    assert found.keys() == {check} and words in found[check]


@pytest.mark.parametrize("edit, check, words", [
    (("        x = x + self.mlp(norm(x))\n", "        x = x + self.mpl(norm(x))\n"), "forward",
     "AttributeError: 'Block' object has no attribute 'mpl'"),
    (("    val_losses = []\n", "    raise SystemExit(5)\n"), "main", "sys.exit(5)"),
    (("    return val_losses\n", "    return None\n"), "main", "(4, validation loss)"),
    (("        for optimizer in optimizers:\n            for group in optimizer.param_groups:\n",
      "        for optimizer in ():\n            for group in optimizer.param_groups:\n"), "main",
     "it steps none"),
])
def test_a_fault_of_the_script_is_told_with_its_line(edit, check, words, tmp_path):
    found = failures(edited("00", edit), "00", tmp_path)
    assert words in found[check]


@pytest.mark.parametrize("text, limit, words", [
    ("import time\ntime.sleep(1000)\n", 6, "an answer within 6 s"),
    ("import os, sys\nprint('x' * 10_000_000)\nsys.stderr.write('y' * 10_000_000 + '\\nlast')\n"
     "sys.stderr.flush()\nos.kill(os.getpid(), 11)\n", 120, "was killed by SIGSEGV | The last line "
     "that it wrote to stderr: last"),
    ("import os\nos._exit(0)\n", 120, "ended with exit code 0"),
])
def test_the_command_outlives_the_script(text, limit, words, tmp_path):
    file = tmp_path / "train_gpt.py"
    file.write_text(text, encoding="utf-8")
    before = time.monotonic()
    found = [o for _, o in session.check(file, MANIFEST.get("01"), limit) if not o.passed]
    assert time.monotonic() - before < 100
    assert [o.name for o in found] == ["import"]
    assert words in f"{found[0].expected} | {found[0].got} | {found[0].meaning}"


def test_nothing_that_the_script_started_stays(tmp_path):
    file = tmp_path / "train_gpt.py"
    file.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "open('stray.txt', 'w').close()\nraise ValueError\n", encoding="utf-8")
    list(session.check(file, MANIFEST.get("01"), 120))
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pid", "train_gpt.py"]


def _runs(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- taking a milestone ----


def test_take_keeps_every_version(script):
    mine = source_of("00") + "# an idea of my own\n"
    script.write_text(mine, encoding="utf-8")
    script.chmod(0o640)
    for id in ("01", "02"):
        ended = command(id, "--take", "--script", script)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert script.read_text(encoding="utf-8") == source_of(id)
    first, second = (script.with_name(f"train_gpt.{n}.py") for n in (1, 2))
    assert first.read_text(encoding="utf-8") == mine
    assert second.read_text(encoding="utf-8") == source_of("01")
    assert f"is 02_modern_arch now; yours is kept: {second}" in ended.stdout.replace("\n  ", " ")
    assert script.stat().st_mode & 0o777 == 0o640
    again = command("02", "--take", "--script", script)
    assert "nothing to do" in again.stdout
    assert len(list(script.parent.glob("*.py"))) == 3


def test_take_fills_gaps_and_never_overwrites(script):
    script.with_name("train_gpt.1.py").write_text("kept before")
    assert take.take(script, MANIFEST.get("01")).name == "train_gpt.2.py"
    assert script.with_name("train_gpt.1.py").read_text() == "kept before"


def test_take_without_a_script_makes_one(script):
    script.unlink()
    assert take.take(script, MANIFEST.get("01")) is None
    assert script.read_text(encoding="utf-8") == source_of("01")


@pytest.mark.parametrize("where", ["_keep", "replace_file"])
def test_an_interrupted_take_loses_nothing(where, script, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(take, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        take.take(script, MANIFEST.get("01"))
    assert script.read_text(encoding="utf-8") == source_of("00")


def test_a_half_written_copy_is_removed(script, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(take.os, "fsync", full)
    with pytest.raises(OSError):
        take.take(script, MANIFEST.get("01"))
    assert [p.name for p in script.parent.iterdir()] == ["train_gpt.py"]
    assert script.read_text(encoding="utf-8") == source_of("00")


def test_take_notices_an_edit_meanwhile(script, monkeypatch):
    keep = take._keep

    def edit(*arguments):
        kept = keep(*arguments)
        script.write_text("saved by an editor just now")
        return kept

    monkeypatch.setattr(take, "_keep", edit)
    with pytest.raises(RunError, match="changed while it was being kept"):
        take.take(script, MANIFEST.get("01"))
    assert script.read_text() == "saved by an editor just now"


def test_kept_scripts_and_progress_are_not_committed():
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"train/.progress.json", "train/train_gpt.[0-9]*.py"} <= set(ignored)


# ---- progress and hints ----


@pytest.fixture
def answers(monkeypatch):
    """Outcomes that stand in for those of a child process; and how often they were asked for."""
    found = [("parts", Outcome("positions")), ("parts", Outcome("momentum", "this", "that", "so"))]
    asked = []

    def check(script, milestone, limit):
        asked.append(milestone.id)
        yield from found

    monkeypatch.setattr(path, "check", check)
    return found, asked


def learner_of(script):
    """The learner as the command opens it, and what it prints."""
    learner = open_path(script)
    out = io.StringIO()
    learner.screen = Screen(out)
    return learner, out


def test_hints_go_one_level_further_each_time(script, answers, capsys):
    levels = []
    for _ in range(LEVELS + 1):
        assert path.give_hint(learner_of(script)[0], MANIFEST.get("01"), None, None, 1) == 0
        levels.append(int(re.search(r"hint (\d) of 4", capsys.readouterr().out)[1]))
    assert levels == [1, 2, 3, 4, 4]
    assert answers[1] == ["01"], "an unchanged script need not be checked again"
    path.give_hint(learner_of(script)[0], MANIFEST.get("01"), 2, None, 1)
    assert "M <- mu M + G" in capsys.readouterr().out
    script.write_text(source_of("01"), encoding="utf-8")
    path.give_hint(learner_of(script)[0], MANIFEST.get("01"), None, None, 1)
    assert answers[1] == ["01", "01"]


def test_no_hint_where_none_is_needed(script, answers):
    answers[0].pop()
    learner, out = learner_of(script)
    assert path.give_hint(learner, MANIFEST.get("01"), None, None, 1) == 0
    assert "no hint is needed" in out.getvalue()


def test_the_list_shows_progress(script, answers):
    learner, out = learner_of(script)
    assert not path.check_once(learner, MANIFEST.get("01"), 1)
    answers[0].pop()
    assert path.check_once(learner, MANIFEST.get("00"), 1)
    learner, out = learner_of(script)
    path.show_list(learner)
    lines = out.getvalue().splitlines()
    assert len(lines) == len(WRITTEN)
    assert lines[0].startswith("x 00") and lines[0].endswith("passed")
    assert lines[1].startswith("  01") and lines[1].endswith("1 of 2 checks, next: momentum")


def test_what_passed_once_stays_on_the_list(script, answers):
    failing = answers[0].pop()
    path.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    answers[0].append(failing)
    path.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    learner, out = learner_of(script)
    assert learner.progress.of("01").done
    path.show_list(learner)
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("x 01")]
    assert line.endswith("  passed; last check stopped at momentum")


def level_given(script, capsys, level=None, name=None):
    """The level of the hint that comes."""
    assert path.give_hint(learner_of(script)[0], MANIFEST.get("01"), level, name, 1) == 0
    return int(re.search(r"hint (\d) of 4", capsys.readouterr().out)[1])


def edit(script):
    """Changes the script, so that it is checked again."""
    script.write_text(script.read_text(encoding="utf-8") + "#\n", encoding="utf-8")


def test_hints_begin_anew_when_the_check_says_something_else(script, answers, capsys):
    assert [level_given(script, capsys) for _ in range(2)] == [1, 2]
    edit(script)  # the same message
    assert level_given(script, capsys) == 3
    answers[0][1] = ("parts", Outcome("momentum", "this", "something else", "so"))
    edit(script)
    assert [level_given(script, capsys) for _ in range(2)] == [1, 2]
    failing, answers[0][1] = answers[0][1], ("parts", Outcome("momentum"))
    path.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    answers[0][1] = failing
    path.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    assert level_given(script, capsys) == 1
    assert learner_of(script)[0].progress.of("01").given == 6


def test_a_hint_to_a_check_by_its_name(script, answers, capsys):
    assert level_given(script, capsys, name="orthogonal updates") == 1
    assert level_given(script, capsys, name="Orthogonal Updates") == 2
    assert answers[1] == [], "no check is needed for it"
    assert level_given(script, capsys) == 1, "the failing one has levels of its own"
    assert level_given(script, capsys, name="orthogonal updates") == 3
    assert level_given(script, capsys, name="positions") == 1
    path.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)  # in which it passes
    assert level_given(script, capsys, name="positions") == 1
    assert level_given(script, capsys, name="orthogonal updates") == 4, "it was not checked"
    with pytest.raises(RunError, match="01 has no check \"window\"; it has: .*momentum, ") as error:
        path.give_hint(learner_of(script)[0], MANIFEST.get("01"), None, "window", 1)
    assert error.value.status == 2 and "\n" not in str(error.value)


def test_a_level_without_a_text_is_left_out(script, answers, capsys):
    answers[0].insert(0, ("contract", Outcome("fields", "some", "none")))
    assert [level_given(script, capsys) for _ in range(3)] == [1, 3, 4]
    assert level_given(script, capsys, level=2) == 3
    print_hint("fields", MANIFEST.get("01"), 1, load_catalog())
    assert "--hint 3 says more." in capsys.readouterr().out


def test_the_hint_to_fields_names_a_command_that_lists_their_values(capsys):
    print_hint("fields", MANIFEST.get("04"), 3, load_catalog())
    arguments = re.search(r"`python tools/(\S+) (03 04 --stat)`", capsys.readouterr().out).groups()
    ended = subprocess.run(
        [sys.executable, COMMAND.with_name(arguments[0]), *arguments[1].split()],
        capture_output=True, encoding="utf-8", timeout=60)
    assert re.search(r"momentum_warmup_steps +500 +\(added\)", ended.stdout), ended.stderr


def test_a_line_of_a_hint_ends_where_the_terminal_does(capsys):
    print_hint("orthogonal updates", MANIFEST.get("01"), 2, load_catalog())
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert len(first) > 85 and len(second) > 50 and second[0] != " "
    print_hint("orthogonal updates", MANIFEST.get("01"), 3, load_catalog())
    assert [line[:3] for line in capsys.readouterr().out.splitlines()[1:]
            if line[0].isdigit()] == ["1. ", "2. ", "3. ", "4. "]


@pytest.mark.parametrize("content", [
    "", "{", "[]", "null", '{"01": 3}', '{"01": {"passed": "many"}}', '{"01": {"unknown": 1}}',
    '{"01": {"hints": {"momentum": "x"}}}', '{"01": {"messages": {"momentum": 1}}}', "\udcff",
])
def test_broken_progress_starts_anew(content, script, capsys):
    file = script.parent / standing.FILE
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    learner, out = learner_of(script)
    path.show_list(learner)
    assert len(out.getvalue().splitlines()) == len(WRITTEN)
    assert capsys.readouterr().err == (
        "note: .progress.json could not be read; progress starts anew\n")
    learner.progress.of("01").passed = 3
    learner.progress.save()
    assert json.loads(file.read_text())["01"]["passed"] == 3


def test_a_folder_for_progress_is_one_line(script):
    script.with_name(standing.FILE).mkdir()
    with pytest.raises(RunError, match="cannot be read: Is a directory; move it away"):
        open_path(script)


def test_progress_is_written_whole_or_not_at_all(script, monkeypatch):
    learner, _ = learner_of(script)
    learner.progress.of("01").passed = 3
    learner.progress.save()
    learner.progress.of("01").passed = 4
    monkeypatch.setattr(standing.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(RunError, match="progress.json cannot be written: full$"):
        learner.progress.save()
    assert learner_of(script)[0].progress.of("01").passed == 3
    assert len(list(script.parent.iterdir())) == 2


def test_every_check_is_in_the_catalog(tmp_path):
    catalog = load_catalog()
    known = {check.name for check in catalog.checks}
    assert {feature.name for feature in FEATURES} <= known
    functions = examining.CONTRACT + examining.PARTS + examining.BEHAVIOUR
    assert {name for name, _ in functions} <= known
    written = "".join(file.read_text(encoding="utf-8")
                      for file in Path(examining.__file__).parent.glob("*.py"))
    named = set(re.findall(r'(?:Outcome|verdict)\(\s*"([^"]+)"', written))
    named |= {f"update of a {kind} matrix" for kind in ("square", "wide", "tall")}
    assert named <= known and len(named) > 25


@cache
def blocks_of(id):
    """The names of a milestone's blocks."""
    return {block.name for block in split_blocks(source_of(id))}


@pytest.mark.parametrize("check", load_catalog().checks, ids=lambda c: f"{c.since} {c.name}")
def test_every_check_has_hints_of_four_levels(check, capsys):
    milestone = MANIFEST.get(check.since)
    shown = []
    for level in (1, check.next_level(2), 3, LEVELS):
        print_hint(check.name, milestone, level, load_catalog())
        shown.append(capsys.readouterr().out)
    assert all(len(text.splitlines()) > 1 for text in shown)
    assert " ".join(check.nudge.split()) in " ".join(shown[0].split())
    if check.blocks:
        root = milestone.parent is None
        assert root or re.search(r"^([-+] |def |class )", shown[3], re.MULTILINE), shown[3]
        assert set(check.blocks) <= set().union(*map(blocks_of, load_catalog().lineage(milestone)))


def test_the_fourth_hint_is_the_diff_of_the_block(capsys):
    print_hint("activation", MANIFEST.get("02"), 4, load_catalog())
    at_02 = capsys.readouterr().out
    assert "-         return self.c_proj(F.gelu(self.c_fc(x)))" in at_02
    assert "+         return self.c_proj(F.relu(self.c_fc(x)).square())" in at_02
    print_hint("normalised queries and keys", MANIFEST.get("03"), 4, load_catalog())
    at_03 = capsys.readouterr().out  # 03 leaves the attention alone
    assert "01_muon → 02_modern_arch" in at_03 and "self.rotary(norm(q))" in at_03
    print_hint("parse_args", MANIFEST.get("05"), 4, load_catalog())
    assert "def parse_args(argv):" in capsys.readouterr().out  # as 00 has it


def test_every_written_milestone_has_checks():
    assert path._checked() == set(IDS) == ARCHITECTURES.keys()


def test_a_hint_may_change_from_a_milestone_on():
    catalog = load_catalog()
    factors = [catalog.get("update of a tall matrix", MANIFEST.get(id)).mathematics
               for id in ("01", "03", "04", "05")]
    assert factors[0] == factors[1] != factors[2] == factors[3]
    assert not catalog.applies("momentum", MANIFEST.get("00"))
    with pytest.raises(KeyError):
        catalog.get("window", MANIFEST.get("04"))


def test_a_broken_catalog_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "checks.toml"
    file.write_text('[[check]]\nname = "x"\nsince = "00"\nnudge = "n"\n')
    monkeypatch.setattr(catalogs, "CATALOG", file)
    with pytest.raises(ValueError, match='check "x": missing key "steps"'):
        catalogs.load_catalog.__wrapped__()


# ---- the command ----


@pytest.mark.parametrize("arguments, code, message", [
    ([], 2, "give a milestone, or --list; see --help"),
    (["01", "--hint", "5"], 2, "5 is not a level from 1 to 4"),
    (["--hint", "01"], 2, "01 is not a level from 1 to 4"),
    (["01", "--timeout", "soon"], 2, "soon is not a number"),
    (["01", "--timeout", "0"], 2, "0 is no time"),
    (["01", "--check", "momentum"], 2, "--check NAME goes with --hint"),
    (["01", "--hint", "--check", "x"], 2, '01 has no check "x"; it has: syntax, import, names,'),
    (["01", "--take", "--watch"], 2, "not allowed with argument"),
    (["muom"], 1, 'no milestone "muom"; did you mean 01_muon? (--list shows all)'),
    (["06"], 1, "milestone 06_flash_attention_3 is not written yet"),
    (["01", "--script", "nowhere.py"], 1, "there is no nowhere.py; --take makes one: "
     "python tools/check_train.py 00 --take --script nowhere.py\n"),
    (["01", "--hint", "--script", "nowhere.py"], 1, "there is no nowhere.py"),
    (["01", "--take", "--script", "nowhere/x.py"], 1, "there is no folder nowhere for x.py\n"),
    (["01", "--script", "."], 1, " is a folder, not a script; name the file in it\n"),
    (["01", "--script", "x.txt"], 1, "x.txt is not the name of a script: it ends with .py\n"),
    (["02", "--take", "--script", MANIFEST.get("01").script], 1, "is a milestone itself"),
])
def test_a_wrong_command_line_is_one_line(arguments, code, message, tmp_path):
    ended = command(*arguments, cwd=tmp_path)
    assert ended.returncode == code and ended.stdout == ""
    assert ended.stderr.startswith("error: ") and message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failing_check_is_told_in_plain_lines(script):
    script.write_text("def f(:\n", encoding="utf-8")
    ended = command("01", "--script", script)
    assert ended.returncode == 1 and ended.stderr == ""
    lines = ended.stdout.splitlines()
    start = lines.index("  FAIL  syntax")
    assert lines[start : start + 4] == [
        "  FAIL  syntax", "        expected a Python file",
        "        got      line 1: invalid syntax",
        "0 of 1 checks so far pass. Stuck?",
    ]
    assert lines[start + 4] == (
        f"    python tools/check_train.py 01 --hint --script {script}")


def test_watch_checks_again_when_the_file_changes_and_ends_with_ctrl_c(script):
    script.write_text("def f(:\n", encoding="utf-8")
    watcher = subprocess.Popen(
        [sys.executable, "-u", str(COMMAND), "01", "--watch", "--script", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    seen = []
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
        watcher.kill()
    assert sum("FAIL  syntax" in line for line in seen) == 2
    assert (watcher.returncode, errors) == (0, "")
    assert rest.endswith("stopped watching\n")


def test_watch_waits_for_a_file_that_is_being_replaced(script, answers, monkeypatch):
    changes = iter([script.unlink, lambda: script.write_text("x"), None])

    def sleep(seconds):
        change = next(changes)
        if change is None:
            raise KeyboardInterrupt
        change()

    monkeypatch.setattr(path.time, "sleep", sleep)
    assert path.watch(learner_of(script)[0], MANIFEST.get("01"), 1) == 0
    assert answers[1] == ["01", "01"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_checks_too(signum, script, tmp_path):
    script.write_text("import os, pathlib, time\n"
                      f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
                      "time.sleep(300)\n", encoding="utf-8")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    started = subprocess.Popen([sys.executable, str(COMMAND), "01", "--script", str(script)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
                               env=dict(os.environ, TMPDIR=str(temporary)))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        started.send_signal(signum)
        _, errors = started.communicate(timeout=30)
    finally:
        started.kill()
    assert started.returncode == 128 + signum
    assert errors == ("error: interrupted\n" if signum == signal.SIGINT else "")
    assert not _runs(int((tmp_path / "pid").read_text()))
    assert list(temporary.iterdir()) == []


def test_lines_fit_a_narrow_terminal(script, answers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    answers[0].append(("parts", Outcome("momentum", "long " * 20, "\x1b[2Jgot " * 20, "so " * 30)))
    learner, _ = learner_of(script)
    out = Terminal()
    learner.screen = Screen(out)
    learner.script = Path("train_gpt.py")
    monkeypatch.chdir(script.parent)
    path.check_once(learner, MANIFEST.get("01"), 1)
    path.show_list(learner)
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert "\x1b" not in plain and "␛[2J" in plain
    long = [line for line in plain.splitlines() if len(line) > 40]
    assert long == ["    python tools/check_train.py 01 --hint --script train_gpt.py"]
