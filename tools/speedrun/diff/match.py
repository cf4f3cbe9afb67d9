"""Finds for each block of one file its counterpart in another, by its name."""

import ast
from collections.abc import Sequence
from difflib import SequenceMatcher

from speedrun.diff.nature import parse
from speedrun.history.blocks import Block, merge_names


def match(
    old: Sequence[Block], new: Sequence[Block]
) -> list[tuple[Block | None, Block | None, bool]]:
    """(old, new, moved) for each block in the order of `new`, each removed one where it stood; old
    or new is None for one that was added or removed; moved: it stands elsewhere among the others.

    Names are unique in each list. The longest runs of blocks stand still, the others have moved.
    """
    before, after = {b.name: b for b in old}, {b.name: b for b in new}
    common = [[b.name for b in blocks if b.name in before and b.name in after]
              for blocks in (old, new)]
    runs = SequenceMatcher(None, *common, autojunk=False).get_matching_blocks()
    moved = set(common[0]).difference(*(common[0][run.a : run.a + run.size] for run in runs))
    merged = merge_names([name for name in before if name not in moved], list(after))
    return [(before.get(name), after.get(name), name in moved) for name in merged]


def methods(block: Block) -> list[Block]:
    """A class cut before each of its methods, the first part being all that comes before them;
    anything else, and a class without methods, in one piece.

    The first part has the name "", the others those of the methods, made unique.
    """
    tree = parse(block.text)
    is_class = tree and tree.body and isinstance(tree.body[0], ast.ClassDef)
    if not is_class or block.text[0].isspace():
        return [Block("", block.text, block.line)]
    lines = block.text.split("\n")
    starts, names, taken = [1], [""], tree.body[0].lineno
    for node in tree.body[0].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno] + [d.lineno for d in node.decorator_list])
            while first - 1 > taken and lines[first - 2].strip()[:1] in ("", "#"):
                first -= 1  # blank lines and comments go with what follows
            name = node.name
            while name in names:  # a property's setter, for one
                name += " again"
            starts.append(first)
            names.append(name)
        taken = node.end_lineno
    ends = [start - 1 for start in starts[1:]] + [len(lines)]
    return [
        Block(name, "\n".join(lines[start - 1 : end]), block.line + start - 1)
        for name, start, end in zip(names, starts, ends, strict=True)
    ]
