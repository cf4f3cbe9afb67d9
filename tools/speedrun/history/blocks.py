"""Split a script into named blocks, the unit in which milestones are compared and repaired.

A block is the card (docstring), the import statements together, a section heading, or any other
top-level statement with the comments directly above it. What a top-level `if` defines last names
the block.
"""

import ast
import re
from dataclasses import dataclass, replace
from functools import cache

# Free to differ between any two milestones.
FREE = ("card", "imports")
# Not counted in the size of a diff.
RETUNED = "Hyperparameters"
UNCOUNTED = (*FREE, RETUNED)

CARRIED, ALREADY, DIFFERS = "carried", "already there", "differs"  # a repair in a descendant

MOST_ATTEMPTS = 40  # lines at the margin that a statement may go on with and still be parsed alone

HEADING = re.compile(r"# -{10,} (?P<title>.+?) -{10,}")


@dataclass(frozen=True)
class Block:
    """A named run of whole lines; `line` is the number of its first line in the file, from 1."""

    name: str
    text: str
    line: int


@dataclass(frozen=True)
class Repair:
    """A block's name, its text before the repair and after it."""

    block: str
    old: str
    new: str


@cache
def split_blocks(source: str) -> tuple[Block, ...]:
    """Splits the text of a script into its blocks, in reading order.

    Every line that is not blank belongs to exactly one block. Raises SyntaxError if the text is
    not Python, and ValueError if two blocks have the same name.
    """
    lines = source.split("\n")  # as the parser counts them; splitlines() also cuts at form feeds
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

    taken, block = 0, None  # lines that belong to a block already, and the last one's name
    for number, (node, skipped) in enumerate(statements(source)):
        first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        first, last = first + skipped, node.end_lineno + skipped
        if first <= taken:  # it follows a semicolon and belongs to its line's block
            text = "\n".join([blocks[block].text, *lines[taken:last]])
            blocks[block], taken = replace(blocks[block], text=text), last
            continue
        while first - 1 > taken and _is_own_comment(lines[first - 2]):
            first -= 1
        add_comments(taken + 1, first - 1)
        taken, block = last, _name(node, lines[skipped + node.lineno - 1])
        if number == 0 and ast.get_docstring(ast.Module([node], [])) is not None:
            block = "card"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            block = "imports"
        add(block, first, taken)
    add_comments(taken + 1, len(lines))
    return tuple(blocks.values())


def section(source: str, title: str) -> dict[str, str]:
    """The blocks under one heading of a script, {name: text}."""
    found, heading = {}, ""
    for block in split_blocks(source):
        heading = block.name if block.name.startswith("heading: ") else heading
        if heading == f"heading: {title}" != block.name:
            found[block.name] = block.text
    return found


def changed_blocks(parent: str, child: str) -> dict[str, tuple[str, str]]:
    """The blocks that differ between two scripts, in reading order: name -> (old, new) text, empty
    where a script has no such block. Raises what `split_blocks` raises."""
    old = {block.name: block.text for block in split_blocks(parent)}
    new = {block.name: block.text for block in split_blocks(child)}
    names = merge_names(list(old), list(new))
    pairs = {name: (old.get(name, ""), new.get(name, "")) for name in names}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def merge_names(old: list[str], new: list[str]) -> list[str]:
    """The names of both lists, in the order of `new`, each removed name where it stood."""
    from difflib import SequenceMatcher  # slow to import, and --help does not need it

    merged = []
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        merged += new[j1:j2] if tag == "equal" else old[i1:i2] + new[j1:j2]
    return list(dict.fromkeys(merged))


def repairs(before: str, after: str, wanted: list[str]) -> list[Repair]:
    """The blocks that differ between two texts of one script; only the wanted ones, if any are.

    Card and imports are every file's own and left out. Raises ValueError, one line, for a wanted
    block that is unknown, did not change or is free to differ, and for a block that is
    missing in one text: where it belongs in a descendant is for a person to decide.
    """
    changed = {
        name: pair for name, pair in changed_blocks(before, after).items() if name not in FREE
    }
    for name in wanted:
        if name in FREE:
            raise ValueError(f"{name} is every file's own; edit it by hand")
        if name not in changed:
            known = name in {block.name for block in split_blocks(after)}
            raise ValueError(f"block {name} {'did not change' if known else 'does not exist'}")
    found = [Repair(name, *pair) for name, pair in changed.items() if name in (wanted or changed)]
    for repair in found:
        if not (repair.old and repair.new):
            fate = "added" if repair.new else "removed"
            raise ValueError(f"block {repair.block} was {fate}; do so by hand in the descendants")
    return found


def carry(repair: Repair, source: str) -> tuple[str, str]:
    """Puts the repaired block into the text of a script that holds the old one byte for byte;
    returns CARRIED, ALREADY (it holds the new one) or DIFFERS (another or none), and the text."""
    block = next((b for b in split_blocks(source) if b.name == repair.block), None)
    if block is not None and block.text == repair.new:
        return ALREADY, source
    if block is None or block.text != repair.old:
        return DIFFERS, source
    lines, first = source.split("\n"), block.line - 1
    lines[first : first + block.text.count("\n") + 1] = repair.new.split("\n")
    return CARRIED, "\n".join(lines)


def statements(source: str) -> list[tuple[ast.stmt, int]]:
    """(statement, the number of lines that come before those that its own numbers count) of a
    program, in order. Raises SyntaxError.

    Each is parsed alone, once for all scripts that hold it, because a chain's scripts have most in
    common: a statement is shared, so it must not be changed.
    """
    lines, found, attempts = source.split("\n"), [], 0
    ends = [i for i, line in enumerate(lines) if line[:1] not in ("", " ", "\t", "\f", "#", ")")]
    start = ends[0] if ends else 0
    for end in [*ends[1:], len(lines)]:
        text = "\n".join(lines[start:end])
        if text.count('"""') % 2:
            continue  # within a text, as the lines of a card are
        last = end
        while lines[last - 1].strip()[:1] in ("", "#") and last > start + 1:
            last -= 1  # what is above the next statement
        try:
            body = _parsed("\n".join(lines[start:last]))
        except SyntaxError:  # the statement goes on, as a text in several lines does
            attempts += 1
        else:
            found += [(node, start) for node in body]
            start, attempts = end, 0
        if attempts > MOST_ATTEMPTS:
            break
    return found if start == len(lines) else [(node, 0) for node in parse(source).body]


@cache
def _parsed(text):
    return parse(text).body


def parse(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """The syntax tree of a file of this name. Raises SyntaxError, also for a null byte, for which
    Python does so from 3.11.4 on."""
    try:
        return ast.parse(source, name)
    except ValueError as error:
        raise SyntaxError(str(error)) from None


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
