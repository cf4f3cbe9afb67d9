"""Every snapshot keeps the house style: order, names, widths, card; it trains, and nothing else.

Run: .venv/bin/python -m pytest tests/test_style.py
"""

import ast
import io
import os
import re
import sys
import tokenize
from collections import defaultdict
from functools import cache

import torch
import torch.distributed as dist

from ranks import start_ranks
from snapshots import MANIFEST, SCRIPTS, every_script, load_snapshot
from speedrun.history.blocks import HEADING, split_blocks

SECTIONS = ["Hyperparameters", "Schedules", "Data", "Kernels", "Model", "Optimizer", "Training",
            "Generation"]  # the way of a run
LONGEST_FUNCTION = 45  # lines
# The most lines of a file, by chain: up to the milestone with this id, and so on.
LONGEST = {
    "speedrun": {"00": 385, "03": 455, "04": 515, "05b": 565, "06": 720, "06e": 760, "09": 870,
                 "10f": 962, "11d": 1055, "13c": 1200, "14a": 1285, "14f": 1400, "14i": 1540},
    "prelude": {"p9": 700},
    "encore": {"e9": 525},
}
LONGEST_GROWTH = 100  # lines more than the parent has, of a milestone after these
FOREIGN_NAMES = re.compile(
    r"n_embd|n_head|n_layer|block_size|batch_size|get_lr|ddp_\w+|B_seq|iteration|num_iterations"
)
ALLOWED_IMPORTS = {*sys.stdlib_module_names, "numpy", "torch"}
FURTHER_IMPORTS = {"encore": {"tiktoken"}}  # text in and out


@cache
def source_of(milestone):
    return milestone.script.read_text(encoding="utf-8")


@cache
def tree_of(text):
    return ast.parse(text)


def card_of(milestone):
    return ast.get_docstring(tree_of(split_blocks(source_of(milestone))[0].text))


def tokens_of(text):
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


# {text: the first milestone that has it, and its name} of every block of every snapshot. Most are
# their parent's byte for byte, so a property of blocks is tested once for each text.
BLOCKS = {block.text: f"{milestone.id}: {block.name}" for milestone in reversed(SCRIPTS)
          for block in split_blocks(source_of(milestone))}


def where_found(fault):
    """The places of the blocks whose syntax has a fault."""
    return [place for text, place in BLOCKS.items() if fault(tree_of(text))]


@every_script
def test_card(milestone):
    card = card_of(milestone)
    lines = card.splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith(f"{milestone.id} {milestone.slug.replace('_', ' ')}: ")
    keys = [line.split(":")[0] for line in lines if re.match(r"\w+: ", line)]
    assert keys == ["Parent", "Changed", "Record", "Run"]
    parent = next(line for line in lines if line.startswith("Parent: "))
    assert (milestone.parent or "none") in parent
    assert milestone.name not in card


def test_what_is_the_same_in_every_file():
    runs = defaultdict(set)  # {program: how its cards say that it is run}
    for milestone in SCRIPTS:
        card = card_of(milestone)
        runs[milestone.program].add(card[card.index("\nRun: "):])
    for program, (run,) in runs.items():
        assert f"path/to/this/{program}" in run and "python tools/run_milestone.py ID" in run
    assert sum(place.endswith(": parse_args") for place in BLOCKS.values()) == 1


@every_script
def test_size_and_sections(milestone):
    lines = source_of(milestone).splitlines()
    allowed = [most for last, most in LONGEST[milestone.chain].items() if milestone.id <= last]
    if not allowed:
        parent = source_of(MANIFEST.get(milestone.parent)).splitlines()
        allowed = [len(parent) + LONGEST_GROWTH]
    assert len(lines) <= min(allowed)
    headings = [m["title"] for line in lines if (m := HEADING.fullmatch(line))]
    assert headings == [section for section in SECTIONS if section in headings]
    assert {"Hyperparameters", "Model", "Data"} <= set(headings)
    assert len({"Training", "Generation"} & set(headings)) == 1


@every_script
def test_names_are_used_below_their_section(milestone):
    # Not in Training and Generation, annotations, and what fills a field when a run starts.
    title, sections, uses = None, {}, []  # {name: its section}, [(section, name)]
    for block in split_blocks(source_of(milestone)):
        if heading := HEADING.fullmatch(block.text):
            title = heading["title"]
        elif title is not None:
            defined, used = names_of(block.text)
            sections |= dict.fromkeys(defined, title)
            uses += [(title, name) for name in used]
    assert not [(section, name) for section, name in uses
                if section not in ("Training", "Generation") and name in sections
                and SECTIONS.index(sections[name]) > SECTIONS.index(section)]


@cache
def names_of(text):
    """The names that a block defines, and those that it reads."""
    return [*defined_names(tree_of(text))], {*used_names(tree_of(text))}


def defined_names(tree):
    """The module-level names that a block defines, also under an `if`."""
    for node in tree.body:
        if isinstance(node, ast.If):
            yield from defined_names(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def used_names(node):
    """The names that a block reads, without annotations and factories of defaults."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    if isinstance(node, ast.keyword) and node.arg == "default_factory":
        return
    annotations = getattr(node, "annotation", None), getattr(node, "returns", None)
    for child in ast.iter_child_nodes(node):
        if child not in annotations:
            yield from used_names(child)


def test_lines_and_functions_are_short():
    assert not [place for text, place in BLOCKS.items() if max(map(len, text.split("\n"))) > 100]
    assert not where_found(lambda tree: any(
        isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONGEST_FUNCTION
        for node in ast.walk(tree)))


def test_it_trains_and_nothing_else():
    # Refusals are assertions with words; interrupts, exit codes and waiting are the launcher's.
    manners = re.compile("fail|_?exit|SystemExit|KeyboardInterrupt|signal|sleep|except|try|raise|"
                         "stderr")
    for text, place in BLOCKS.items():
        names = {token.string for token in tokens_of(text) if token.type == tokenize.NAME}
        # argparse reports a ValueError; only a step shows whether an AdamW works on a device.
        allowed = {"raise"} if place.endswith(": parse_args") else set()
        allowed |= {"try", "except"} if place.endswith(": find_adam_backend") else set()
        assert not [name for name in names - allowed if manners.fullmatch(name)], place
        assert not [name for name in names if FOREIGN_NAMES.fullmatch(name)], place
    assert not where_found(lambda tree: any(
        isinstance(node, ast.Assert) and node.msg is None
        and "sorted(map(id" not in ast.unparse(node) for node in ast.walk(tree)))


def test_numbers_go_to_the_device_without_waiting():
    # A copy from memory that is not pinned waits for all queued work, whatever its non_blocking.
    def waits(node):
        if not isinstance(node, ast.Call):
            return False
        names = {keyword.arg for keyword in node.keywords}
        made = ast.unparse(node.func)
        return (made in ("torch.tensor", "torch.as_tensor") and "device" in names
                or "non_blocking" in names and not made.startswith("tokens."))  # these are pinned
    assert not where_found(lambda tree: any(map(waits, ast.walk(tree))))


def test_main_returns_nothing():
    mains = [tree_of(text).body[0] for text, place in BLOCKS.items() if place.endswith(": main")]
    for main in mains:
        assert [arg.arg for arg in main.args.args] == ["args"]
        assert not [node for node in ast.walk(main) if isinstance(node, ast.Return)]
    assert mains


def test_classes_and_functions_have_docstrings():
    assert not where_found(lambda tree: any(
        isinstance(node, ast.ClassDef | ast.FunctionDef) and not ast.get_docstring(node)
        for node in tree.body))


@every_script
def test_comments(milestone):
    counted = [comments_of(block.text) for block in split_blocks(source_of(milestone))]
    comments = [comment for some, _ in counted for comment in some]
    assert 15 <= 100 * len(comments) / sum(code for _, code in counted) <= 30
    unwanted = re.compile(r"TODO|FIXME|XXX|\b(I|[Ww]e|[Oo]ur|[Mm]y)\b|\b20\d\d-\d\d|[Nn]ew in")
    assert not [comment for comment in comments if unwanted.search(comment)]


@cache
def comments_of(text):
    """The comments of a block, and how many lines of code it has, without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        line
        for node in ast.walk(tree_of(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    comments, code = [], set()
    for token in tokens_of(text):
        if token.type == tokenize.COMMENT:
            comments.append(token.string)
        elif token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return comments, len(code - docstrings)


@every_script
def test_stands_alone(milestone):
    source = source_of(milestone)
    modules = set().union(*(imports_of(block.text) for block in split_blocks(source)))
    allowed = ALLOWED_IMPORTS | FURTHER_IMPORTS.get(milestone.chain, set())
    allowed |= {"triton"} if "@triton.jit" in source else set()
    assert {module.split(".")[0] for module in modules} <= allowed


@cache
def imports_of(text):
    """The modules that a block imports; "" for its own folder."""
    found = set()
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("" if node.level else node.module)
    return found


def test_imports_have_no_side_effects(tmp_path):
    (result,) = start_ranks(1, import_all, str(tmp_path))
    assert result == ([], "")
    assert not list(tmp_path.iterdir())


def import_all(folder):
    """Imports all snapshots in a fresh process that works in `folder`: those that change torch's
    state, or start a process group or CUDA."""
    def state():
        return (torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
                dist.is_initialized(), torch.cuda.is_initialized())

    os.chdir(folder)
    changing = []
    for milestone in SCRIPTS:
        before = state()
        load_snapshot(milestone)
        if state() != before:
            changing.append(milestone.id)
    return changing
