"""Known values of small models, schedules and optimizers, computed again in float64 by tests/oracle
from formulas and from no snapshot.

Run: .venv/bin/python -m pytest tests/test_oracle.py
By default at roots and at every milestone that brings a new feature; RUN_SLOW=1 takes all.
"""

import ast
import tomllib
from pathlib import Path

import pytest

from oracle import text, values
from oracle.__main__ import differences
from oracle.table import ELSEWHERE, FEATURES, milestones
from ranks import run_tool

ORACLE = Path(values.__file__).parent
ALL = [M for chain in ("speedrun", "prelude", "encore") for M in milestones(chain).values()]
# What e1 to e4b state are counts, walks over conversations and random numbers.
WITHOUT = {M.id for M in ALL if not values.keys(M)}
COVERED = [M if M.id in FEATURES else pytest.param(M, marks=pytest.mark.slow)
           for M in ALL if M.id not in WITHOUT]


@pytest.mark.parametrize("M", COVERED, ids=lambda M: M.id)
def test_known_values_are_what_the_formulas_make(M):
    stated = [key for key in values.keys(M) if key in M.own]
    assert not (lines := differences(M, stated)), "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("M", [M for M in ALL if M.id not in WITHOUT], ids=lambda M: M.id)
def test_values_that_known_toml_leaves_to_the_parent_hold(M):
    inherited = [key for key in values.keys(M) if key not in M.own]
    assert not (lines := differences(M, inherited)), "\n".join(lines)


def test_which_milestones_and_keys_are_not_covered():
    """Every key of every known.toml is computed, or listed with what makes it instead."""
    assert WITHOUT == {"e1", "e2", "e3", "e4", "e4a", "e4b"}
    assert not FEATURES.keys() - {M.id for M in ALL}
    named = {word.removeprefix("e.") for words in ELSEWHERE.values() for word in words.split()}
    stated = {key for M in ALL for key in M.own}
    assert stated - named - values.MAKERS.keys() == set(), "neither computed nor listed"
    assert (named | values.MAKERS.keys()) - stated <= {"init"}, "listed, but stated nowhere"


def test_the_oracle_sees_no_snapshot():
    allowed = {"argparse", "functools", "json", "math", "oracle", "pathlib", "re", "sys", "tomllib",
               "torch"}
    for file in ORACLE.glob("*.py"):
        source = file.read_text(encoding="utf-8")
        found = {alias.name for node in ast.walk(ast.parse(source))
                 if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module.split(".")[0] for node in ast.walk(ast.parse(source))
                  if isinstance(node, ast.ImportFrom)}
        assert found <= allowed, file.name
        assert "train_gpt" not in source, file.name


@pytest.mark.parametrize("key, stated, found", [
    ("small_training", [4.67477, 4.61061], [4.67477, 4.61062]),
    ("small_training", [4.67477, 4.61061], [4.67477]),
    ("small_moves", {"embed": [1e-3, 2e-5, 0]}, {"embed": [1e-3, 2e-5 + 5e-7, 0]}),
    ("small_moves", {"embed": [1e-3]}, {"lm_head": [1e-3]}),
    ("learning_rate", [[5300, 0.5]], [[5300, 0.50001]]),
    ("window", {"changes": [0, 557]}, {"changes": [0, 556]}),
])
def test_differences_are_reported(key, stated, found):
    assert not [*text.compare(key, stated, stated)]
    assert [*text.compare(key, stated, found)]


def test_the_command_makes_known_toml_again():
    run = run_tool(ORACLE, "00b", "11b")
    assert run.returncode == 0, run.stderr
    printed, chain = run.stdout.split("# 11b"), milestones("speedrun")
    for M, part in zip((chain["00b"], chain["11b"]), printed, strict=True):
        found = tomllib.loads(part)
        assert found.keys() == {key for key in values.keys(M) if key in M.own}
        for key, value in found.items():
            assert not [*text.compare(key, M.own[key], value)]
