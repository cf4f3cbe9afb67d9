"""Finds the script that a command names, and looks into it without running it (which would import
torch and take seconds)."""

import ast
import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.history.fields import default_hyperparameters, hyperparameter_types
from speedrun.history.manifest import Manifest, Milestone, load_manifest

# How a script reads a value of each type that a hyperparameter may have.
_READERS = {
    "int": int, "float": float, "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
}


@dataclass(frozen=True)
class Script:
    """A train_gpt.py: name for its runs, file, the milestone it is (or None), the defaults of its
    hyperparameters and the names of their types, the overrides {name: value} that make it tiny, and
    whose overrides they are."""

    name: str
    path: Path
    milestone: Milestone | None
    hyperparameters: dict[str, object]
    types: dict[str, str]
    tiny: dict[str, object]
    tiny_of: Milestone

    def typed(self, name: str, value: object) -> object:
        """A value of hyperparameter `name`, as a text or not, in the type that the script gives it.

        It stays as it is where that type is none of int, float, bool and str, and None (not known)
        stays None. Raises UserError, exit code 2, for a value that is none of its type.
        """
        kind = self.types.get(name)
        if value is None or kind not in _READERS:
            return value
        try:
            return _READERS[kind](str(value))
        except (KeyError, ValueError):
            wanted = "True or False" if kind == "bool" else f"a value of type {kind}"
            raise UserError(f"{name} takes {wanted}, not {str(value)!r}", 2) from None


def find_script(target: str) -> Script:
    """The Script for a milestone's id, for `train` (the learner's script), or for the path of a
    train_gpt.py or of its folder.

    A script that is no milestone gets the tiny overrides of the milestone whose hyperparameters
    have the most names in common with its own, as far as it has their names. Raises UserError or
    ManifestError, both with one line, where there is no such script.
    """
    manifest = load_manifest()
    path, milestone = locate(target, manifest)
    defaults, types = _hyperparameters(path)
    if milestone is not None:
        tiny = manifest.overrides(milestone, "tiny")
        return Script(milestone.slug, path, milestone, defaults, types, tiny, milestone)
    name = target if target == "train" else path.resolve().parent.name
    nearest = min(manifest.milestones,
                  key=lambda m: len(default_hyperparameters(m.script).keys() ^ defaults.keys()))
    tiny = {k: v for k, v in manifest.inherited(nearest, "tiny").items() if k in defaults}
    return Script(name or "run", path, None, defaults, types, tiny, nearest)


def locate(target: str, manifest: Manifest) -> tuple[Path, Milestone | None]:
    """The file that `target` names, as for `find_script`, and the milestone that it is, if any.

    The file is not looked into. Raises UserError or ManifestError, one line, if there is none.
    """
    if target != "train" and not (target.endswith(".py") or "/" in target or os.sep in target):
        milestone = manifest.get(target)
        return milestone.script, milestone

    path = manifest.learners_script() if target == "train" else Path(target)
    programs = dict.fromkeys(m.program for m in manifest.milestones)
    if path.is_dir():
        path = next(filter(Path.is_file, (path / name for name in programs)), path)
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a milestone's id, train or a "
                        f"{' or '.join(programs)}")
    for milestone in manifest.milestones:
        if milestone.script.samefile(path):
            return milestone.script, milestone
    return path, None


def code_hash(script: Path) -> str:
    """A hash of a script that comments, docstrings, messages of asserts and layout do not change.

    Raises SyntaxError if the file is not Python, and OSError if it cannot be read.
    """
    return _code_hash(script.read_text(encoding="utf-8"))


@cache
def _code_hash(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Assert():
                node.msg = None
            case ast.AST(body=[ast.Expr(ast.Constant()), *_]):
                del node.body[0]
    return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest()[:16]


def _shape(syntax):
    """Syntax as nested lists, without what is empty or absent: Python's versions differ in that."""
    if isinstance(syntax, ast.AST):
        return [type(syntax).__name__, *(
            (name, _shape(value)) for name, value in ast.iter_fields(syntax)
            if value not in (None, []))]
    return [*map(_shape, syntax)] if isinstance(syntax, list) else repr(syntax)


def _hyperparameters(path):
    """The defaults and the types of a script's hyperparameters; UserError if it has none."""
    try:
        defaults, types = default_hyperparameters(path), hyperparameter_types(path)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    if not defaults:
        raise UserError(f"{path} has no class Hyperparameters, so it is no training script")
    return defaults, types
