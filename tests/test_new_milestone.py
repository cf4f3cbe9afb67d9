"""A new milestone is a folder and nothing else: a throw-away one with a new form of parts is taken
by the commands, by the tests and by the checks of the chain, and no other file knows of it.

Run: .venv/bin/python -m pytest tests/test_new_milestone.py
"""

import ast
import contextlib
import io
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ranks import start_ranks
from snapshots import (
    MANIFEST,
    MILESTONES,
    SCRIPTS,
    as_options,
    known_values,
    micro_of,
    write_random_shards,
)
from speedrun.figures import readme, tables
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.history.records import load_records

CHAIN = MILESTONES[0].chain
HERE = [milestone for milestone in MILESTONES if milestone.chain == CHAIN]
LAST = HERE[-1]
NEW = SimpleNamespace(id=f"{LAST.id[:2]}z", slug="thrown_away", name=f"{LAST.id[:2]}z_thrown_away")
# A new form of parts: attention's matrices are one stack, and Muon's groups follow.
FORM = {
    "self.c_qk, self.c_vo = nn.Parameter(pairs), nn.Parameter(weights[2:])":
        "self.weights = nn.Parameter(weights)",
    "        pairs = weights[:2].view(args.num_heads, -1, args.model_dim)"
    "  # (H, 2D, C): adjacent heads\n": "",
    "self.c_qk.flatten(0, 1)": "self.weights[:2].flatten(0, 1)",
    "self.c_vo[0]": "self.weights[2]", "self.c_vo[1]": "self.weights[3]",
    "        dict(params=[attn.c_qk for attn in attentions], lr_factors=attention_factors),\n": "",
    "[attn.c_vo for attn": "[attn.weights for attn",
    "kernel_warmup_steps: int = 6 ": "kernel_warmup_steps: int = 4 ",
}
ATTENTIONS = 10  # layers that have it
ENTRY = f"""
title = "Thrown away"
idea = "One stack of four matrices."
kind = "systems"
changes = ["Hyperparameters", "CausalSelfAttention", "muon_groups"]
shows = "CausalSelfAttention"
besides = ["It never was a record."]
lesson = "{LAST.lesson}"
"""
HANDLES = '''"""How to get hold of the parts that are new here: one stack of four matrices."""


def matrices(attn):
    return tuple(attn.weights.detach())


def tensors(model):
    return {name.removesuffix(".weight").replace("attn.weights", "attn.c_qkvo"): [param]
            for name, param in model.named_parameters()}


def lr_factors(args):
    return dict(weights=args.attention_lr_factor, c_fc=args.mlp_in_lr_factor,
                c_proj=args.mlp_out_lr_factor)
'''
# Tests that such a form concerns; what a training gives, an oracle would have to say.
CONCERNED = "parameter_count or small_loss or init or contiguous"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository, committed, and in it one folder more."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("history", "tools", "tests", "train", "data", "lessons", "README.md",
                 "pyproject.toml", "requirements.txt"):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, root / name, ignore=shutil.ignore_patterns(
                "__pycache__", ".*", "builtin", "fineweb10B", "*.bin"))
        else:
            shutil.copy(path, root / name)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "as it is")
    folder = root / "history" / CHAIN / NEW.name
    folder.mkdir()
    text = LAST.script.read_text(encoding="utf-8").replace(LAST.name, NEW.name)
    words = f"{LAST.slug.replace('_', ' ')}: "
    text = text.replace(f"{LAST.id} {words}", f"{NEW.id} {NEW.slug.replace('_', ' ')}: ", 1)
    text = re.sub("(Parent: +).*", rf"\g<1>{LAST.id}", text, count=1)
    for old, new in FORM.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / LAST.program).write_text(text, encoding="utf-8")
    (folder / "milestone.toml").write_text(ENTRY, encoding="utf-8")
    (folder / "handles.py").write_text(HANDLES, encoding="utf-8")
    known = known_values(LAST.id)
    values = {name: known[name] - ATTENTIONS for name in ("tensors", "bfloat16_tensors")}
    (folder / "known.toml").write_text(
        "".join(f"{name} = {value}\n" for name, value in values.items()), encoding="utf-8")
    return root


def git(root, *arguments):
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True,
                          encoding="utf-8").stdout


def start(clone, *words):
    """What a command of the clone prints, given as one would to Python. It runs in a fork of the
    warm server, so that it need not import torch, but knows no file of this repository's."""
    (((code, errors), told),) = start_ranks(1, _in_clone, str(clone), [*map(str, words)],
                                            timeout=500)
    assert code == 0, told[-2000:] + errors[-2000:]
    return told


def _in_clone(root, words):
    """What the fork runs; returns the exit code and what was written to stderr."""
    multiprocessing.current_process().daemon = False  # it may start processes of its own
    own = tuple(str(REPOSITORY / name) for name in ("tools", "tests", "lessons", "data"))
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(own):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not path.startswith(own)
                   and path not in ("", str(REPOSITORY))]
    os.environ.pop("PYTHONPATH", None)
    os.chdir(root)
    sys.argv, code = words, 0
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            if words[0] == "-c":
                exec(words[1], {"__name__": "__main__"})
            elif words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    return code, errors.getvalue()


@pytest.fixture(scope="module")
def small(clone):
    """Options that make a run small, on shards of its own."""
    folder = clone / "runs" / "shards"
    folder.mkdir(parents=True)
    write_random_shards(folder, train_lengths=(30_000,))  # a batch may grow
    sizes = micro_of(LAST, train_steps=2, val_loss_every=0, save_checkpoint=True)
    settings = [f"--set={option[2:]}" for option in as_options(sizes)]
    return ["--data", folder, *settings]


def test_the_tests_find_it_and_its_parts(clone):
    told = start(clone, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k",
                 f"order_of_the_folders or entry or neighbours or {NEW.slug} and "
                 f"(test_chain or test_style or test_history or {CONCERNED})",
                 *(f"tests/test_{name}.py" for name in ("chain", "style", "history", "parts")))
    assert told.count(f"PASSED tests/test_chain.py::test_exactly_the_declared_blocks_changed["
                      f"{NEW.name}]") == 1
    assert f"test_style.py::test_card[{NEW.name}]" in told
    assert told.count("PASSED tests/test_parts.py") == 5


def test_its_model_is_drawn(clone):
    code = ("import sys; sys.path.insert(0, 'tools')\n"
            "from speedrun.anatomy.picture import model_svg\n"
            "from speedrun.history.manifest import load_manifest\n"
            f"print(model_svg(load_manifest(), '{NEW.id}').decode())")
    drawn = re.findall(r'data-part="attn \d+', start(clone, "-c", code))
    assert len(set(drawn)) == ATTENTIONS


def test_it_trains_and_writes(clone, small):
    assert f"history/{CHAIN}/{NEW.name}/{LAST.program}" in start(
        clone, "tools/run_milestone.py", NEW.id, "--scale", "tiny", "--dry-run", *small)
    table = start(clone, "tools/compare_milestones.py", NEW.slug, "--scale", "tiny", "--out",
                  "runs/new", "--json", "runs/new.json", *small)
    assert NEW.name in table
    (entry,) = json.loads((clone / "runs" / "new.json").read_text("utf-8"))["entries"]
    assert entry["milestone"] == NEW.slug and len(entry["runs"]) == 1
    (run,) = (clone / "runs" / "new").iterdir()
    assert json.loads((run / "summary.json").read_text("utf-8"))["milestone"] == NEW.slug
    assert start(clone, "tools/sample.py", run, "--prompt", "1 2 3", "--tokens", "4", "--no-stop")


def test_it_is_compared_and_taken(clone, tmp_path):
    told = start(clone, "tools/diff_milestones.py", LAST.id, NEW.id)
    assert f"{NEW.id} Thrown away. One stack" in told and "kernel_warmup_steps: int = 4" in told
    script = tmp_path / "train_gpt.py"
    start(clone, "tools/check_train.py", NEW.id, "--take", "--script", script)
    listed = start(clone, "tools/check_train.py", "--list", "--script", script).splitlines()
    assert listed[-1].split() == [NEW.id, "Thrown", "away", "taken"]
    hint = start(clone, "tools/check_train.py", NEW.id, "--hint", "4", "--block", "Hyperparameters",
                 "--script", script)
    assert f"{LAST.name} → {NEW.name}" in hint
    assert json.loads((tmp_path / ".progress.json").read_text("utf-8")).keys() == {NEW.slug}


def test_the_tables_list_it(clone):
    own = load_manifest(clone / "history").of_chain()
    for table in (tables.milestone_table(own), tables.shard_table(own),
                  tables.lesson_table(own.milestones, "lessons")):
        assert NEW.id in table
    claim = readme.claim(own, load_records(clone / "history" / "records.json"))
    assert f"The {len(HERE) + 1} scripts" in claim


def test_a_repair_is_carried_to_it(clone):
    script = clone / LAST.script.relative_to(REPOSITORY)
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace('help=f"default: {default}")', "help=str(default))"), "utf-8")
    told = start(clone, "tools/propagate.py", LAST.id)
    assert told.split() == ["carried", f"history/{CHAIN}/{NEW.name}/{LAST.program}", "parse_args"]
    git(clone, "checkout", "--", "history")


@pytest.mark.slow
def test_it_is_predicted_checked_and_swept(clone, small):
    told = json.loads(start(clone, "tools/predict.py", NEW.id, "--json"))
    assert told["script"] == NEW.slug and told["peaks"]
    script = clone / "history" / CHAIN / NEW.name / LAST.program
    assert f"this is {NEW.name}." in start(
        clone, "tools/check_train.py", NEW.id, "--script", script)
    files = [f"--set={split}_files={small[1]}/*_{split}_*.bin" for split in ("train", "val")]
    assert "than the manifest" in start(
        clone, "tools/sweep.py", NEW.id, "--only", "muon_lr", "--factors", "1e-9", *files,
        *small[2:])


def test_no_other_file_knows_of_it(clone):
    changed = git(clone, "status", "--porcelain", "--untracked-files=normal").split("\n")
    assert [line for line in changed if line and not line.endswith((" runs/", "__pycache__/"))] == [
        f"?? history/{CHAIN}/{NEW.name}/"]


# ---- no line asks which generation a script is of ----

# Uses of what could ask so, {file: (their number, what they ask)}.
SYSTEM, FOREIGN = "what the system or a library offers", "objects of any class, such as errors"
LEARNER, SYNTAX = "what a learner's script has so far, which is compared", "nodes of a syntax tree"
KIND = "which files a run reads: shards, conversations, a checkpoint"
DTYPE = "whether a script computes in bfloat16"
COMPILED = "whether a script is compiled"
VALUES = "values that were given, of which a refusal speaks"
LAWFUL = {
    "lessons/lesson.py": (3, "the source of an exercise, and of a milestone's function"),
    "tests/examinations.py": (1, KIND), "tests/snapshots.py": (1, KIND),
    "tests/test_fused_mlp.py": (1, FOREIGN), "tests/test_measure.py": (2, FOREIGN),
    "tests/test_new_milestone.py": (1, SYSTEM),
    "tests/test_notebooks.py": (2, SYNTAX), "tests/test_style.py": (2, SYNTAX),
    "tests/test_preflight.py": (1, SYSTEM), "tests/test_site.py": (1, SYSTEM),
    "tools/predict.py": (1, COMPILED),
    "tools/speedrun/anatomy/trace.py": (1, FOREIGN), "tools/speedrun/base/cli.py": (3, FOREIGN),
    "tools/speedrun/check/examine.py": (1, KIND),
    "tools/speedrun/check/kernels.py": (1, LEARNER),
    "tools/speedrun/check/watched.py": (1, LEARNER), "tools/speedrun/check/meter.py": (2, FOREIGN),
    "tools/speedrun/check/spy.py": (1, FOREIGN), "tools/speedrun/check/syntax.py": (2, FOREIGN),
    "tools/speedrun/check/trace.py": (3, LEARNER), "tools/speedrun/check/worker.py": (3, LEARNER),
    "tools/speedrun/check/trace_generation.py": (1, FOREIGN),
    "tools/speedrun/check/trace_runs.py": (1, KIND),
    "tools/speedrun/compat.py": (2, SYSTEM),
    "tools/speedrun/doctor/checks.py": (3, f"{SYSTEM}; {KIND}"),
    "tools/speedrun/history/blocks.py": (2, SYNTAX),
    "tools/speedrun/history/fields.py": (1, SYNTAX),
    "tools/speedrun/history/manifest.py": (1, "a figure of the script, where it has it"),
    "tools/speedrun/predict/runs.py": (2, f"{KIND}; {DTYPE}"),
    "tools/speedrun/run/conversations.py": (2, FOREIGN),
    "tools/speedrun/run/execute.py": (2, KIND),
    "tools/speedrun/run/plan.py": (6, f"{KIND}; {DTYPE}"),
    "tools/speedrun/run/preflight.py": (3, VALUES),
    "tools/speedrun/run/torchrun.py": (2, SYSTEM), "tools/speedrun/scripts/find.py": (1, KIND),
}


OF_A_SCRIPT = re.compile(
    r"hyperparameters|\b(fields|values|args|settings|files|record|known)\b|vars\(")
NAMED = re.compile(r"\.(id|slug|name)\b|\b(id|slug)\b")
GENERATIONS = {name for m in SCRIPTS for name in (m.id, m.slug, m.name, *m.formerly)}


def probes(file):
    """What in a file could tell generations apart, as text: attributes that may be missing,
    signatures and sources, hyperparameters that a script may have, and conditions on ids."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    decided = {id(part) for node in ast.walk(tree)
               for test in ([node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else
                            node.ifs if isinstance(node, ast.comprehension) else [])
               for part in ast.walk(test)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call | ast.Compare):
            continue
        match node:
            case ast.Call(func=ast.Name(id="hasattr")) | ast.Call(
                    func=ast.Name(id="getattr"), args=[_, _, _]):
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="signature" | "getsource") | ast.Attribute(
                    attr="signature" | "getsource")):
                yield ast.unparse(node)
            case ast.Compare(left=ast.Constant(value), ops=[ast.In() | ast.NotIn()]) if (
                    value in MANIFEST.glossary and OF_A_SCRIPT.search(ast.unparse(node))):
                yield ast.unparse(node)
            case ast.Compare() if id(node) in decided and GENERATIONS & {
                    part.value for part in ast.walk(node)
                    if isinstance(part, ast.Constant)} and NAMED.search(ast.unparse(node)):
                yield ast.unparse(node)


def test_no_line_asks_which_generation_a_script_is_of():
    files = [*(REPOSITORY / "tools").rglob("*.py"), *(REPOSITORY / "tests").glob("*.py"),
             REPOSITORY / "lessons" / "lesson.py"]
    found = {path.relative_to(REPOSITORY).as_posix(): [*probes(path)] for path in files}
    counts = {name: len(some) for name, some in found.items() if some}
    assert {name: found[name] for name, count in counts.items()
            if count != LAWFUL.get(name, (0,))[0]} == {}
    assert LAWFUL.keys() <= counts.keys()
