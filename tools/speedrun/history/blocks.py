"""Split a script into named blocks, the unit in which milestones are compared.

A block is the card (docstring), the import statements together, a section heading, or any other
top-level statement with the comments directly above it. What a top-level `if` defines last names
the block.
"""

import ast
import difflib
import re
from dataclasses import dataclass
from functools import cache

# Free to differ between any two milestones.
FREE = ("card", "imports")
# Not counted in the size of a diff.
UNCOUNTED = (*FREE, "Hyperparameters")

HEADING = re.compile(r"# -{10,} (?P<title>.+?) -{10,}")


@dataclass(frozen=True)
class Block:
    """A named run of whole lines; `line` is the number of its first line in the file, from 1."""

    name: str
    text: str
    line: int


@dataclass(frozen=True)
class DiffSize:
    """Added and removed lines, and the blocks that hold them, without those of UNCOUNTED."""

    lines: int
    blocks: int


@cache
def split_blocks(source: str) -> tuple[Block, ...]:
    """Splits the text of a script into its blocks, in reading order.

    Every line that is not blank belongs to exactly one block. Raises SyntaxError if the text is
    not Python, and ValueError if two blocks have the same name.
    """
    lines = source.split("\n")  # as the parser counts them; splitlines() also cuts at form feeds
    tree = ast.parse(source)
    blocks = {}

    def add(name, first, last):  # lines first..last, from 1
        text = "\n".join(lines[first - 1 : last])
        if name == "imports" and name in blocks:
            text, first = f"{blocks[name].text}\n{text}", blocks[name].line
        elif name in blocks:
            raise ValueError(f"two blocks are called {name}")
        blocks[name] = Block(name, text, first)

    def add_comments(first, last):  # those that belong to no statement
        for number in range(first, last + 1):
            if heading := HEADING.fullmatch(lines[number - 1]):
                add(f"heading: {heading['title']}", number, number)
            elif lines[number - 1].strip():
                add(f"comment: {lines[number - 1]}", number, number)

    taken = 0  # lines that belong to a block already
    for node in tree.body:
        first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        while first - 1 > taken and _is_own_comment(lines[first - 2]):
            first -= 1
        add_comments(taken + 1, first - 1)
        taken = node.end_lineno
        if node is tree.body[0] and ast.get_docstring(tree) is not None:
            add("card", first, taken)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            add("imports", first, taken)
        else:
            add(_name(node, lines[node.lineno - 1]), first, taken)
    add_comments(taken + 1, len(lines))
    return tuple(blocks.values())


def changed_blocks(parent: str, child: str) -> dict[str, tuple[str, str]]:
    """The blocks that differ between two scripts, in reading order: name -> (old, new) text, empty
    where a script has no such block. Raises what `split_blocks` raises."""
    old = {block.name: block.text for block in split_blocks(parent)}
    new = {block.name: block.text for block in split_blocks(child)}
    names = merge_names(list(old), list(new))
    pairs = {name: (old.get(name, ""), new.get(name, "")) for name in names}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def diff_size(parent: str, child: str) -> DiffSize:
    """The size of the diff from parent to child, see `DiffSize`."""
    changed = changed_blocks(parent, child)
    counted = [pair for name, pair in changed.items() if name not in UNCOUNTED]
    lines = 0
    for old, new in counted:
        delta = difflib.ndiff(old.splitlines(), new.splitlines())
        lines += sum(line.startswith(("+ ", "- ")) for line in delta)
    return DiffSize(lines, len(counted))


def merge_names(old: list[str], new: list[str]) -> list[str]:
    """The names of both lists, in the order of `new`, each removed name where it stood."""
    merged = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        merged += new[j1:j2] if tag == "equal" else old[i1:i2] + new[j1:j2]
    return list(dict.fromkeys(merged))


def _is_own_comment(line):
    """Whether a line above a statement is its comment, and no section's heading."""
    return line.startswith("#") and not HEADING.fullmatch(line)


def _name(node, line):
    if isinstance(node, ast.If) and "__main__" in line:
        return "main guard"
    if isinstance(node, ast.If):  # a definition that some machines cannot make
        return _name(node.body[-1], line)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return ", ".join(ast.unparse(target) for target in targets)
    return getattr(node, "name", line.strip())
