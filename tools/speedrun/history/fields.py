"""Reads the fields of a script's class Hyperparameters without running it (which would import torch
and take seconds)."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CLASS = re.compile(r"^class Hyperparameters\b.*\n(?:[ \t#].*\n|\n)*", re.MULTILINE)
# The syntax of a constant expression: nothing that has a name.
_ARITHMETIC = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)


@dataclass(frozen=True)
class Field:
    """A hyperparameter: the name of its type, its default (None if that is not a constant: it
    depends on the machine or the clock), and the default's text in one line."""

    type: str
    default: object
    written: str

    def same_default(self, other: "Field") -> bool:
        """Whether both have one default: 524_288 and 512 * 1024 are one, 1 and 1.0 are two."""
        values = [(type(field.default), field.default) for field in (self, other)]
        return self.written == other.written or (
            self.default is not None and values[0] == values[1])


def default_hyperparameters(script: Path) -> dict[str, object]:
    """The fields of a script's class `Hyperparameters`, {name: default}, in order.

    A script without such a class has {}. Raises ValueError, one line, if the file is not Python,
    and OSError if it cannot be read.
    """
    return {name: field.default for name, field in read_fields(script).items()}


def hyperparameter_types(script: Path) -> dict[str, str]:
    """The names of their types, {name: type}; raises as default_hyperparameters."""
    return {name: field.type for name, field in read_fields(script).items()}


def read_fields(script: Path) -> dict[str, Field]:
    """The same, {name: Field}; raises as default_hyperparameters."""
    try:
        return _fields_of(script.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{script} is not a Python script: {error}") from None


def retuned(old: Path, new: Path) -> list[str]:
    """The hyperparameters of the old script that have another default in the new one, or that it
    no longer has; raises as default_hyperparameters."""
    before, after = read_fields(old), read_fields(new)
    return [name for name, field in before.items()
            if name not in after or not field.same_default(after[name])]


@cache
def _fields_of(source):
    if found := CLASS.search(source):  # to parse all of a script takes long
        source = found[0]
    lines, fields = source.encode().split(b"\n"), {}  # the syntax tree counts bytes
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    kind = field.annotation
                    fields[field.target.id] = Field(
                        kind.id if isinstance(kind, ast.Name) else ast.unparse(kind),
                        _constant(field.value),
                        _text(field.value, lines) if field.value else "no default")
    return fields


def _text(node, lines):
    """What the source says of a node, in one line; without comments, where it has several lines.
    Of a field that is computed: how."""
    match node:
        case ast.Call(func=ast.Name("field"), keywords=[ast.keyword(
                "default_factory", ast.Lambda(body=computed))]):
            return _text(computed, lines)
    part = lines[node.lineno - 1 : node.end_lineno]
    if any(b"#" in line for line in part[:-1]):
        return ast.unparse(node)
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    return b" ".join(map(bytes.strip, part)).decode()


def _constant(node):
    """The value of a constant expression such as 8 * 64 * 1024, else None."""
    if isinstance(node, ast.Constant):  # most are: to compile each takes long
        return node.value
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
