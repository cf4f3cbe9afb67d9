"""Tells what sort of change turns one piece of code into another: code, or only how it is told."""

import ast
import io
import tokenize

CODE, COMMENTS, DOCSTRING, FORMATTING = "code", "comments", "docstring", "formatting"

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCK = "if 1:\n"  # makes a program of indented lines


def nature(old: str, new: str) -> set[str]:
    """What differs between two pieces of code, whole statements both (possibly indented).

    Empty for equal texts, {CODE} if they do something else, else COMMENTS and DOCSTRING as it
    applies, {FORMATTING} if it is none of these.
    """
    if old == new:
        return set()
    (old_code, old_docs), (new_code, new_docs) = _meaning(old), _meaning(new)
    if old_code != new_code:
        return {CODE}
    a, b = _comments(old), _comments(new)
    found = set()
    if old_docs != new_docs:
        found.add(DOCSTRING)
    # A docstring more or less shifts all statements, so their numbers tell nothing then.
    if [text for _, text in a] != [text for _, text in b] or (not found and a != b):
        found.add(COMMENTS)
    return found or {FORMATTING}


def parse(text: str) -> ast.Module | None:
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
    tree, docstrings = parse(text), []
    if tree is None:
        return text.split(), docstrings
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)) is not None:
            docstrings.append(docstring)
            del node.body[0]
    return ast.dump(tree), docstrings


def _comments(text):
    """(number of the statement, comment) in order, up to where the text stops being Python."""
    found, statement = [], 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(_program(text)).readline):
            statement += token.type == tokenize.NEWLINE
            if token.type == tokenize.COMMENT:
                found.append((statement, token.string))
    except (tokenize.TokenError, SyntaxError):
        pass
    return found
