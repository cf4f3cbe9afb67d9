"""Finds the script that a command names, reads it without running it (which would import torch and
take seconds), and imports it."""

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from speedrun.base.errors import UserError
from speedrun.history.blocks import parse, statements
from speedrun.history.fields import default_hyperparameters, hyperparameter_types
from speedrun.history.glossary import load_glossary
from speedrun.history.handles import Handles, handles_of
from speedrun.history.manifest import Manifest, Milestone, load_manifest

# How a script reads a value of each type that a hyperparameter may have.
_READERS = {
    "int": int, "float": float, "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
}
PARSERS = {"argparse", "optparse", "getopt"}
WITHOUT_OPTIONS = {"torch", "numpy", "triton", "flash_attn_interface", "flash_attn", "tiktoken"}
# A hyperparameter whose default depends on the machine, and the script's comment on it.
_SWITCH = re.compile(
    r"^    (\w+): (?:bool = (?!True|False)|str = field\(default_factory=(?!lambda: time\.))"
    r"[^#\n]+(?:# (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """A train_gpt.py: name for its runs, file, the milestone it is (or None), the defaults of its
    hyperparameters and the names of their types, the overrides {name: value} that make it tiny, and
    the milestone that they are from."""

    name: str
    path: Path
    milestone: Milestone | None
    hyperparameters: dict[str, object]
    types: dict[str, str]
    tiny: dict[str, object]
    tiny_of: Milestone

    @property
    def generates(self) -> bool:
        """Whether it draws text from a trained model and trains nothing."""
        return "max_new_tokens" in self.hyperparameters

    def typed(self, name: str, value: object) -> object:
        """A value of hyperparameter `name`, as a text or not, in the type that the script gives it.

        Values of other types than int, float, bool and str stay as they are, and so does None (not
        known). Raises UserError, exit code 2, for a value that is not of its type.
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

    A script that is no milestone gets the tiny overrides of the nearest milestone, except those
    that it does not have. Raises UserError or ManifestError,
    both with one line, if there is no such script.
    """
    manifest = load_manifest()
    path, milestone = locate(target, manifest)
    defaults, types = _hyperparameters(path)
    if milestone is not None:
        tiny = manifest.overrides(milestone, "tiny")
        return Script(milestone.slug, path, milestone, defaults, types, tiny, milestone)
    name = target if target == "train" else path.resolve().parent.name
    nearest = nearest_milestone(path, manifest)
    tiny = {k: v for k, v in manifest.inherited(nearest, "tiny").items() if k in defaults}
    return Script(name or "run", path, None, defaults, types, tiny, nearest)


def nearest_milestone(script: Path, manifest: Manifest) -> Milestone:
    """The milestone whose hyperparameters, then whose functions and classes, have the most similar
    set of names to those of a script; raises as default_hyperparameters."""
    def apart(milestone):
        one, other = (default_hyperparameters(file).keys() for file in (script, milestone.script))
        names, others = (_definitions(file.read_text(encoding="utf-8"))
                         for file in (script, milestone.script))
        return len(one ^ other), len(names ^ others)

    return min(manifest.milestones, key=apart)


@cache
def _definitions(source):
    return set(re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE))


def handles_for(script: Path | str) -> type[Handles]:
    """How to get hold of the parts of a script: the handles of the milestone that it is, or of the
    nearest. Raises as default_hyperparameters."""
    manifest, script = load_manifest(), Path(script).resolve()
    for milestone in manifest.milestones:
        if milestone.script == script:
            return handles_of(milestone)
    return handles_of(nearest_milestone(script, manifest))


def locate(target: str, manifest: Manifest) -> tuple[Path, Milestone | None]:
    """The file that `target` names, as for `find_script`, and the milestone that it is, if any.

    The file is not opened. Raises UserError or ManifestError, one line, if there is none.
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


def code_hash(script: Path, kernels: bool = True) -> str:
    """A hash of a script that comments, docstrings, asserts, layout and the order of definitions do
    not change; without `kernels` neither do Triton kernels, which no CPU runs.

    Raises SyntaxError if the file is not Python, and OSError if it cannot be read.
    """
    return _code_hash(script.read_text(encoding="utf-8"), kernels)


@cache
def _code_hash(source, kernels):
    body = _without_docstring([node for node, _ in statements(source) if kernels or not (
        isinstance(node, ast.If) and ast.unparse(node.test) == "find_spec('triton')")])
    shapes = sorted(_statement_shape(node) for node in body if not isinstance(node, ast.Assert))
    return hashlib.sha256(f"['Module', ('body', [{', '.join(shapes)}])]".encode()).hexdigest()[:16]


@cache
def _statement_shape(node):
    return _shape(node)  # once for all scripts that hold the statement


def _without_docstring(value):
    """A statement's body without the text that it begins with; any other value as it is."""
    match value:
        case [ast.Expr(ast.Constant()), *rest]:
            return rest
    return value


def _shape(syntax):
    """Syntax as nested lists in text, without empty fields: Python's versions differ in them.

    Asserts are left out: one that holds does nothing, and one that fails leaves no result.
    """
    if isinstance(syntax, ast.AST):
        values = ((name, _without_docstring(value) if name == "body" else value)
                  for name, value in ast.iter_fields(syntax))
        fields = [f"('{name}', {_shape(value)})" for name, value in values
                  if value is not None and value != []]
        return f"[{', '.join([repr(type(syntax).__name__), *fields])}]"
    if isinstance(syntax, list):
        parts = [_shape(part) for part in syntax if not isinstance(part, ast.Assert)]
        return f"[{', '.join(parts)}]"
    return repr(repr(syntax))


def _hyperparameters(path):
    """The defaults and the types of a script's hyperparameters; UserError if it has none."""
    try:
        source = path.read_bytes()
        try:
            statements(source.decode("utf-8"))  # fast: each is parsed once for all scripts
        except (SyntaxError, ValueError):
            parse(source, path.name)  # its error names the file
        defaults, types = default_hyperparameters(path), hyperparameter_types(path)
    except (SyntaxError, RecursionError) as error:
        raise UserError(f"{path} is not a Python script: {error}") from None
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    if not defaults:
        raise UserError(f"{path} has no class Hyperparameters, so it is not a training script")
    return defaults, types


def reads_options(source: str | bytes) -> bool:
    """Whether a script may read its command line: it names `argv`, or imports a parser of options
    or a module that is unknown here and may do so."""
    roots, names = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add("" if node.level else node.module.partition(".")[0])
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return "argv" in names or bool(
        roots & PARSERS or roots - sys.stdlib_module_names - WITHOUT_OPTIONS)


def switches(source: str) -> dict[str, str]:
    """The hyperparameters of a script whose defaults depend on the machine, {name: the script's
    comment, or ""}."""
    return dict(_SWITCH.findall(source))


def paths_taken(
    source: str, values: dict[str, object], on_gpu: bool, chosen: Container[str] = ()
) -> str:
    """The paths that a script's switches select, as in `CPU: float32, no fp8 (as set)`.

    values: hyperparameters, {name: value}; chosen: names of those that were set by hand. A path
    that is not taken is followed by the reason: it was set by hand, or the script's comment.
    """
    words, reasons, plain = [], switches(source), load_glossary().column("words")
    for name in dict.fromkeys([*(name for name in plain if name in reasons), *reasons]):
        part = name.removeprefix("use_")
        on, off = plain.get(name, (part, f"no {part}"))
        taken, by_hand = values.get(name), " (as set)" if name in chosen else ""
        if isinstance(taken, str):  # one of several paths, which the script's comment lists
            words.append(f"{taken} {part.replace('_', ' ')}{by_hand}")
        else:
            reason = by_hand or (reasons[name] and f" ({reasons[name]})")
            words.append(on if taken else f"{off}{reason}")
    return f"{'CUDA' if on_gpu else 'CPU'}: {', '.join(words) or 'no switches'}"


def load_snapshot(script: Path) -> ModuleType:
    """The train_gpt.py at `script` as a module, imported once per path; needs torch.

    Importing a snapshot has no side effects. Raises OSError if there is no such file, and whatever
    the script raises while it is imported.
    """
    name = f"snapshot {Path(script).resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, script)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
