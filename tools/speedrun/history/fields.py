"""Reads the fields of a script's class Hyperparameters without running it (which would import torch
and take seconds)."""

import ast
import re
from functools import cache
from pathlib import Path

CLASS = re.compile(r"^class Hyperparameters\b.*\n(?:[ \t#].*\n|\n)*", re.MULTILINE)
# The syntax of a constant expression: nothing that has a name.
_ARITHMETIC = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)


def default_hyperparameters(script: Path) -> dict[str, object]:
    """The fields of a script's class `Hyperparameters`, {name: default}, in order.

    A default that is not a constant (it depends on the machine or the clock) is None. A script
    without such a class has {}. Raises ValueError, one line, if the file is not Python, and OSError
    if it cannot be read.
    """
    return {name: default for name, (_, default) in _fields(script).items()}


def hyperparameter_types(script: Path) -> dict[str, str]:
    """The names of their types, {name: type}; raises as default_hyperparameters."""
    return {name: kind for name, (kind, _) in _fields(script).items()}


def written_defaults(source: str) -> dict[str, str]:
    """The defaults as a script's text writes them, {name: text in one line}. Raises ValueError if
    the text is not Python."""
    source, found = _class_in(source), {}
    for field in _syntax_of(source):
        text = ast.get_source_segment(source, field.value) if field.value else "no default"
        found[field.target.id] = " ".join(map(str.strip, text.split("\n")))
    return found


def _fields(script):
    try:
        return _fields_of(_class_in(script.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{script} is not a Python script: {error}") from None


@cache
def _fields_of(source):
    """{name: (name of its type, default)}."""
    return {field.target.id: (ast.unparse(field.annotation), _constant(field.value))
            for field in _syntax_of(source)}


def _class_in(source):
    """The lines of the class, or the whole text: to parse all of a script takes long."""
    found = CLASS.search(source)
    return found[0] if found else source


@cache
def _syntax_of(source):
    """The syntax of each field."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
            return [field for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)]
    return []


def _constant(node):
    """The value of a constant expression such as 8 * 64 * 1024, else None."""
    if node is None or not all(isinstance(part, _ARITHMETIC) for part in ast.walk(node)):
        return None
    try:
        if any(map(_may_be_endless, ast.walk(node))):
            return None
        return eval(compile(ast.Expression(node), "", "eval"))
    except (ArithmeticError, TypeError):  # 1 / 0, "a" + 1
        return None


def _may_be_endless(node):
    """Whether this is a power other than one of two numbers with an exponent below 1,000."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow | ast.LShift):
        return False
    numbers = [getattr(side, "operand", side) for side in (node.left, node.right)]  # without signs
    return not all(isinstance(n, ast.Constant) for n in numbers) or numbers[1].value >= 1000
