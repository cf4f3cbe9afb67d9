"""Every snapshot equals its parent outside the blocks that its milestone.toml declares.

Run: .venv/bin/python -m pytest tests/test_chain.py
"""

import subprocess

import pytest

from snapshots import MILESTONES, SCRIPTS, by_id
from speedrun.diff.difference import find_difference
from speedrun.history.blocks import FREE, changed_blocks, section, split_blocks
from speedrun.history.manifest import REPOSITORY, load_manifest

CHILDREN = [milestone for milestone in SCRIPTS if milestone.parent]
links = pytest.mark.parametrize("milestone", CHILDREN, ids=by_id)


def sources_of(milestone):
    """The texts of the parent and of the milestone."""
    parent = load_manifest().get(milestone.parent)
    return [m.script.read_text(encoding="utf-8") for m in (parent, milestone)]


@links
def test_exactly_the_declared_blocks_changed(milestone):
    sources = sources_of(milestone)
    changed = [name for name in changed_blocks(*sources) if name not in FREE]
    assert sorted(changed) == sorted(milestone.changes)
    # In their order, and in few lines.
    old, new = ([block.name for block in split_blocks(text)] for text in sources)
    assert [name for name in old if name in new] == [name for name in new if name in old]
    lines = sum(find_difference(*sources).size)
    assert (lines > 80) == bool(milestone.exceeds), lines


def test_borrowed_blocks_are_the_lenders():
    for milestone in SCRIPTS:
        if milestone.borrows:
            lender = load_manifest().get(milestone.borrows.lender)
            own, lent = ({block.name: block.text for block in split_blocks(m.script.read_text())}
                         for m in (milestone, lender))
            for name in milestone.borrows.blocks:
                assert own[name] == lent[name], f"{milestone.id}: {name}"
            # Whatever else is the same is borrowed too, so that a repair reaches it.
            same = {name for name in own.keys() & lent.keys() if own[name] == lent[name]}
            same = {name for name in same if name not in FREE and "heading: " not in name}
            assert sorted(same) == sorted(milestone.borrows.blocks)


def committed(path):
    """A file's text in the last commit; the test skips where there is none to ask."""
    shown = subprocess.run(["git", "-C", str(REPOSITORY), "show", f"HEAD:{path}"],
                           capture_output=True, encoding="utf-8")
    if shown.returncode:
        pytest.skip("not in a git checkout")
    return shown.stdout


def test_the_learners_scripts_start_as_the_roots():
    # As committed: your own copy may be further.
    for milestone in SCRIPTS:
        if milestone.parent is None:
            learners = load_manifest().learners_script(milestone)
            own, root = (committed(path.relative_to(REPOSITORY).as_posix())
                         for path in (learners, milestone.script))
            assert own == root, milestone.name


EXAMPLE = '''"""Card."""

import os
import sys  # why
from pathlib import Path

# ---------- Optimizer ----------

# Above the function,
# two lines.
@decorated
@twice
def step():
    return 1


LIMIT: int = 3


def main(args):
    """Trains."""
    # within a block
    return LIMIT


if __name__ == "__main__":
    main(None)
'''


def test_blocks_of_a_script():
    blocks = {block.name: block for block in split_blocks(EXAMPLE)}
    assert list(blocks) == [
        "card", "imports", "heading: Optimizer", "step", "LIMIT", "main", "main guard",
    ]
    assert blocks["imports"].text.splitlines()[1] == "import sys  # why"
    assert blocks["step"].text.startswith("# Above the function,\n# two lines.\n@decorated")
    assert blocks["main"].text.splitlines()[2] == "    # within a block"
    assert blocks["LIMIT"].line == 17
    below = split_blocks("x = 1\n# What y is.\ny = 2\n")
    assert [block.text for block in below] == ["x = 1", "# What y is.\ny = 2"]
    text = EXAMPLE.replace("LIMIT: int", "# ---------- Training ----------\n\nLIMIT: int")
    assert section(text, "Optimizer") == {"step": blocks["step"].text}


def test_every_line_belongs_to_one_block():
    for source in (EXAMPLE, MILESTONES[-1].script.read_text(encoding="utf-8")):
        taken = [line for block in split_blocks(source) for line in block.text.splitlines()]
        assert sorted(filter(str.strip, taken)) == sorted(filter(str.strip, source.splitlines()))


def test_changes_are_told_by_block():
    changed = changed_blocks(
        EXAMPLE, EXAMPLE.replace("return LIMIT", "return 3").replace("LIMIT: int = 3", "")
    )
    assert list(changed) == ["LIMIT", "main"]
    assert changed["LIMIT"] == ("LIMIT: int = 3", "")


def test_size_leaves_card_imports_and_hyperparameters_out():
    edited = EXAMPLE.replace("Card.", "Other.").replace("import sys  # why", "import re")
    assert find_difference(EXAMPLE, edited).size == (0, 0)
    edited = EXAMPLE.replace("return 1", "return 2\n    # more")
    assert find_difference(EXAMPLE, edited).size == (2, 1)
    edited = EXAMPLE.replace("    return 1", "    if True:\n        return 1")  # re-indented
    assert find_difference(EXAMPLE, edited).size == (1, 0)


def test_two_blocks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two blocks are called step"):
        split_blocks("def step(): pass\ndef step(): pass\n")


@pytest.mark.parametrize("statement", [
    "if x:\n    a = 1\nelse:\n    a = 2", "try:\n    a = 1\nfinally:\n    b = 2", 'a = \'"""\'',
    '@wraps(f)\n# why\ndef a(\n    x,\n):\n    return x', 'a = """\nb = 1\n"""', "a = [\n1,\n]",
    "a = (" + "\n+ ".join("x" * 60) + "\n)", "f(1); f(2)", "import a; b = [\n1]; b = 2",
])
def test_a_statement_of_any_form_is_one_block(statement):
    blocks = split_blocks(f'"""Card\n\nx = 1\n"""\n\n{statement}\nlast = 3\n')
    assert [block.text for block in blocks][1:] == [statement, "last = 3"]
    assert [block.line for block in blocks] == [1, 6, 7 + statement.count("\n")]
