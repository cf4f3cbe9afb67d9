"""Every snapshot keeps the house style: order, names, widths, card.

Run: .venv/bin/python -m pytest tests/test_style.py
"""

import ast
import io
import re
import subprocess
import sys
import tokenize

import pytest

from snapshots import WRITTEN, by_id
from speedrun.blocks import HEADING, MARKER, split_blocks

SECTIONS = ["Hyperparameters", "Optimizer", "Model", "Data", "Schedules", "Training"]
PARTS_OF_MAIN = ["setup", "model and optimizers", "kernel warm-up", "train and validate"]
FOREIGN_NAMES = re.compile(
    r"n_embd|n_head|n_layer|block_size|batch_size|get_lr|ddp_\w+|B_seq|iteration|num_iterations"
)
ALLOWED_IMPORTS = {*sys.stdlib_module_names, "numpy", "torch"}

snapshots = pytest.mark.parametrize("milestone", WRITTEN, ids=by_id)


def source_of(milestone):
    return milestone.script.read_text(encoding="utf-8")


def tokens_of(milestone):
    return list(tokenize.generate_tokens(io.StringIO(source_of(milestone)).readline))


@snapshots
def test_card(milestone):
    card = ast.get_docstring(ast.parse(source_of(milestone)))
    lines = card.splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith(f"{milestone.id} {milestone.slug.replace('_', ' ')}: ")
    keys = [line.split(":")[0] for line in lines if re.match(r"\w+: ", line)]
    assert keys == ["Parent", "Changed", "Record", "Run"]
    parent = next(line for line in lines if line.startswith("Parent: "))
    assert (milestone.parent or "none") in parent


@snapshots
def test_sections_stand_in_order(milestone):
    headings = [m["title"] for line in source_of(milestone).splitlines()
                if (m := HEADING.fullmatch(line))]
    assert headings == [section for section in SECTIONS if section in headings]
    assert {"Hyperparameters", "Model", "Data", "Training"} <= set(headings)
    markers = [m["title"] for line in source_of(milestone).splitlines()
               if (m := MARKER.fullmatch(line))]
    assert markers == PARTS_OF_MAIN


@snapshots
def test_size(milestone):
    lines = source_of(milestone).splitlines()
    assert len(lines) <= milestone.budget.lines
    assert max(map(len, lines)) <= 100
    main = next(n for n in ast.parse(source_of(milestone)).body if getattr(n, "name", "") == "main")
    (loop,) = [
        node for node in ast.walk(main)
        if isinstance(node, ast.For) and ast.unparse(node.target) == "step"
    ]
    assert loop.end_lineno - loop.lineno + 1 <= 75


@snapshots
def test_names(milestone):
    names = {token.string for token in tokens_of(milestone) if token.type == tokenize.NAME}
    assert not [name for name in names if FOREIGN_NAMES.fullmatch(name)]


@snapshots
def test_comments(milestone):
    tree = ast.parse(source_of(milestone))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    comments, code = [], set()
    for token in tokens_of(milestone):
        if token.type == tokenize.COMMENT:
            comments.append(token.string)
        elif token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    assert 15 <= 100 * len(comments) / len(code - docstrings) <= 30
    unwanted = re.compile(r"TODO|FIXME|XXX|\b(I|[Ww]e|[Oo]ur|[Mm]y)\b|\b20\d\d-\d\d|[Nn]ew in")
    assert not [comment for comment in comments if unwanted.search(comment)]


@snapshots
def test_classes_and_functions_have_docstrings(milestone):
    for node in ast.parse(source_of(milestone)).body:
        if isinstance(node, ast.ClassDef) or getattr(node, "name", "") == "main":
            assert ast.get_docstring(node), node.name


@snapshots
def test_stands_alone(milestone):
    modules = set()
    for node in ast.walk(ast.parse(source_of(milestone))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    assert {module.split(".")[0] for module in modules} <= ALLOWED_IMPORTS


@snapshots
def test_import_has_no_side_effects(milestone, tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(milestone.script.parent)!r})\n"
        "import torch, torch.distributed as dist\n"
        "state = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "import train_gpt\n"
        "after = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "assert state[0].equal(after[0]) and state[1:] == after[1:]\n"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-B", "-c", program], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert not list(tmp_path.iterdir())


def test_every_file_parses_its_options_alike():
    for name in ("fail", "parse_args"):
        texts = {b.text for m in WRITTEN for b in split_blocks(source_of(m)) if b.name == name}
        assert len(texts) == 1, name
