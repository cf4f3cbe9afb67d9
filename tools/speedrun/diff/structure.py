"""Pairs the blocks of two files by name, a class's methods too, and classifies a change of code:
does it run differently, or only read differently?"""

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache

from speedrun.history.blocks import Block, merge_names, statements

CODE, COMMENTS, DOCSTRING, FORMATTING = "code", "comments", "docstring", "formatting"

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.STRING)
_BLOCK = "if 1:\n"  # makes a program of indented lines


def match(
    old: Sequence[Block], new: Sequence[Block]
) -> list[tuple[Block | None, Block | None, bool]]:
    """(old, new, moved) for each block in the order of `new`, each removed one at its old place;
    old or new is None for an added or removed block; moved: its place among the others changed.

    Names are unique in each list. The longest runs of blocks keep their place, the others moved.
    """
    before, after = {b.name: b for b in old}, {b.name: b for b in new}
    common = [[b.name for b in blocks if b.name in before and b.name in after]
              for blocks in (old, new)]
    runs = SequenceMatcher(None, *common, autojunk=False).get_matching_blocks()
    moved = set(common[0]).difference(*(common[0][run.a : run.a + run.size] for run in runs))
    merged = merge_names([name for name in before if name not in moved], list(after))
    return [(before.get(name), after.get(name), name in moved) for name in merged]


def methods(block: Block) -> tuple[Block, ...]:
    """A class cut before each of its methods, the first part being all that comes before them;
    anything else, and a class without methods, in one piece.

    The first part has the name "", the others those of the methods, made unique.
    """
    lines, starts = block.text.split("\n"), _method_starts(block.text)
    ends = [*starts.values(), len(lines) + 1][1:]
    return tuple(Block(name, "\n".join(lines[start - 1 : end - 1]), block.line + start - 1)
                 for (name, start), end in zip(starts.items(), ends, strict=True))


@cache
def _method_starts(text):
    """{part of a class, "" for the first: its first line, from 1}; {"": 1} for anything else."""
    starts = {"": 1}
    if text[:1].isspace() or not re.search("^class ", text, re.MULTILINE):  # to parse takes long
        return starts
    (whole, above), *_ = statements(text)  # most are parsed already
    if not isinstance(whole, ast.ClassDef):
        return starts
    lines, taken = text.split("\n"), above + whole.lineno
    for node in whole.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = above + min([node.lineno] + [d.lineno for d in node.decorator_list])
            while first - 1 > taken and lines[first - 2].strip()[:1] in ("", "#"):
                first -= 1  # blank lines and comments belong to the method below them
            name = node.name
            while name in starts:  # a property's setter, for example
                name += " again"
            starts[name] = first
        taken = above + node.end_lineno
    return starts


def classify(old: str, new: str) -> set[str]:
    """What differs between two pieces of code, both whole statements (possibly indented).

    Empty for equal texts, {CODE} if they run differently, else COMMENTS and DOCSTRING as it
    applies, {FORMATTING} if neither does.
    """
    if old == new:
        return set()
    (old_code, old_docs), (new_code, new_docs) = _meaning(old), _meaning(new)
    if old_code != new_code:
        return {CODE}
    found = {DOCSTRING} if old_docs != new_docs else set()
    if _comments(old) != _comments(new):
        found.add(COMMENTS)
    return found or {FORMATTING}


def _parse(text):
    """The tree of whole statements, possibly indented; None if the text is something else."""
    try:
        tree = ast.parse(_program(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if _program(text) == text else ast.Module(tree.body[0].body, [])


def _program(text):
    return _BLOCK * text.lstrip("\n")[:1].isspace() + text


def _meaning(text):
    """(what the code does, its docstrings), comparable."""
    tree, docstrings = _parse(text), []
    if tree is None:
        return text.split(), docstrings
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)) is not None:
            docstrings.append(docstring)
            del node.body[0]
    return ast.dump(tree), docstrings


def _comments(text):
    """(number of the statement, comment) in order, up to where the text stops being Python. A
    docstring does not count as a statement."""
    found, statement, has_code = [], 0, False
    try:
        for token in tokenize.generate_tokens(io.StringIO(_program(text)).readline):
            if token.type == tokenize.COMMENT:
                found.append((statement, token.string))
            elif token.type == tokenize.NEWLINE:
                statement, has_code = statement + has_code, False
            else:
                has_code |= token.type not in _NO_CODE
    except (tokenize.TokenError, SyntaxError):
        pass
    return found
