"""Finds out from a snapshot itself how it will run on this machine; needs torch."""

import ast
from dataclasses import dataclass, field
from types import ModuleType

import torch

from speedrun.history.manifest import Milestone
from speedrun.scripts.load import load_snapshot


@dataclass(frozen=True)
class Way:
    """How a milestone will run here.

    switches: its hyperparameters whose default asks the machine, name -> answer; questions: what
    each of them asks; comments: what the script says beside each; hyperparameters: all of them;
    fault: why it cannot run, in one line, or None.
    """

    switches: dict[str, bool] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    hyperparameters: dict[str, object] = field(default_factory=dict)
    fault: str | None = None


def way_of(milestone: Milestone) -> Way:
    """The Way of a written milestone, found by importing its script."""
    try:
        text = milestone.script.read_text(encoding="utf-8")
        tree = ast.parse(text)
        module = load_snapshot(milestone.script)
        hyperparameters = vars(module.Hyperparameters())
    except Exception as error:  # whatever an import comes upon
        return Way(fault=f"{type(error).__name__}: {' '.join(str(error).split())}")
    questions, comments = _switches(text, tree)
    switches = {name: hyperparameters[name] for name in questions}
    missing = missing_names(tree, module)
    fault = f"torch {torch.__version__} lacks {', '.join(missing)}" if missing else None
    return Way(switches, questions, comments, hyperparameters, fault)


def missing_names(tree: ast.AST, module: ModuleType) -> list[str]:
    """The names, like torch.nn.functional.rms_norm, that a script takes from the modules that it
    imports and that are not there, in order."""
    missing = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = _module_named(node.value, module)
        if owner is not None and not hasattr(owner, node.attr):
            missing[f"{owner.__name__}.{node.attr}"] = True
    return sorted(missing)


def _module_named(node, module):
    """The imported module that an expression such as torch.nn names in `module`, or None."""
    if isinstance(node, ast.Name):
        found = vars(module).get(node.id)
    elif isinstance(node, ast.Attribute):
        found = getattr(_module_named(node.value, module), node.attr, None)
    else:
        found = None
    return found if isinstance(found, ModuleType) else None


def _switches(text, tree):
    """The bools of class Hyperparameters with a default that is no constant: the expression of
    each, and the comment behind it."""
    lines = text.splitlines()
    questions, comments = {}, {}
    for node in tree.body:
        if not (isinstance(node, ast.ClassDef) and node.name == "Hyperparameters"):
            continue
        for line in node.body:
            if (isinstance(line, ast.AnnAssign) and ast.unparse(line.annotation) == "bool"
                    and not isinstance(line.value, ast.Constant)):
                name = line.target.id
                questions[name] = ast.unparse(line.value)
                comments[name] = lines[line.end_lineno - 1].partition("#")[2].strip()
    return questions, comments
