"""Finds for each block of one file its counterpart in another, by name and by likeness."""

import ast
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

from speedrun.diff.nature import code_words, parse
from speedrun.history.blocks import Block, merge_names

ALIKE = 0.6  # share of common tokens from which on two blocks are one, renamed
FEW_TOKENS, ALIKE_IF_FEW = 20, 0.9  # short ones are soon alike by chance
FEWEST_TOKENS = 6  # `A = 3` is no renamed `B = 3`
ANCHOR_WEIGHT = 10_000  # lines: a section's heading stands still, the blocks move past it


@dataclass(frozen=True)
class Pair:
    """A block and its counterpart, None for one that was added or removed; `moved`: it stands
    elsewhere among the others."""

    old: Block | None
    new: Block | None
    moved: bool = False


def match(old: list[Block], new: list[Block]) -> list[Pair]:
    """The pairs in the order of `new`, each removed block where it stood.

    Names are unique in each list. Of blocks that changed places, the fewest lines have moved.
    """
    before, after = {b.name: b for b in old}, {b.name: b for b in new}
    renamed = _renamed([b for b in old if b.name not in after],
                       [b for b in new if b.name not in before])
    old_of = {name: before[name] for name in after if name in before} | renamed
    new_names = {block.name: name for name, block in old_of.items()}
    places = {name: i for i, name in enumerate(after)}
    common = [new_names[b.name] for b in old if b.name in new_names]
    still = _heaviest_rise([places[name] for name in common],
                           [_weight(after[name]) for name in common])
    moved = {name for i, name in enumerate(common) if i not in still}
    order = [new_names.get(b.name, b.name) for b in old]
    merged = merge_names([name for name in order if name not in moved], list(after))
    return [Pair(old_of.get(name) or before.get(name), after.get(name), name in moved)
            for name in merged]


def methods(block: Block) -> list[Block]:
    """A class cut before each of its methods, the first part being all that comes before them;
    anything else, and a class without methods, in one piece.

    The parts are named for the methods, a number behind the name where it comes again.
    """
    tree = parse(block.text)
    is_class = tree and len(tree.body) == 1 and isinstance(tree.body[0], ast.ClassDef)
    if not is_class or block.text[0].isspace():
        return [block]
    lines = block.text.split("\n")
    starts, names, seen, taken = [1], [""], Counter(), tree.body[0].lineno
    for node in tree.body[0].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno] + [d.lineno for d in node.decorator_list])
            while first - 1 > taken and lines[first - 2].strip()[:1] in ("", "#"):
                first -= 1  # blank lines and comments go with what follows
            seen[node.name] += 1
            again = f" ({seen[node.name]})" if seen[node.name] > 1 else ""
            starts.append(first)
            names.append(node.name + again)
        taken = node.end_lineno
    ends = [start - 1 for start in starts[1:]] + [len(lines)]
    return [
        Block(name, "\n".join(lines[start - 1 : end]), block.line + start - 1)
        for name, start, end in zip(names, starts, ends, strict=True)
    ]


def _renamed(old, new):
    """{new name: old block} of the blocks without namesake that are alike, the likest first."""
    scores = []
    tokens = {block: _tokens(block) for block in (*old, *new)}
    for a in old:
        for b in new:
            if (score := _likeness(tokens[a], tokens[b])) is not None:
                scores.append((score, a, b))
    found, taken = {}, set()
    for _, a, b in sorted(scores, key=lambda entry: -entry[0]):
        if b.name not in found and a not in taken:
            found[b.name] = a
            taken.add(a)
    return found


def _tokens(block):
    """(kind, tokens without the block's own name, how often each comes)."""
    tree = parse(block.text)
    kind = type(tree.body[0]).__name__ if tree and tree.body else ""
    if ": " in block.name:  # a heading, a comment or a part of main
        kind = block.name.partition(": ")[0]
    words = ["" if word == block.name else word for word in code_words(block.text)]
    return kind, words, Counter(words)


def _likeness(a, b):
    """The share of common tokens, from 0 to 1; None if it is too small, or the kinds differ."""
    (kind, a, a_counts), (other_kind, b, b_counts) = a, b
    least = ALIKE if min(len(a), len(b)) >= FEW_TOKENS else ALIKE_IF_FEW
    both = len(a) + len(b)
    if kind != other_kind or min(len(a), len(b)) < max(FEWEST_TOKENS, least * both / 2):
        return None
    if 2 * (a_counts & b_counts).total() < least * both:
        return None
    score = SequenceMatcher(None, a, b, autojunk=False).ratio()
    return score if score >= least else None


def _weight(block):
    is_anchor = ": " in block.name
    return ANCHOR_WEIGHT if is_anchor else block.text.count("\n") + 1


def _heaviest_rise(places, weights):
    """Indices of the rising subsequence of `places` with the largest sum of weights."""
    if places == sorted(places):
        return set(range(len(places)))
    best, before = [], []
    for i, place in enumerate(places):
        below = [j for j in range(i) if places[j] < place]
        previous = max(below, key=best.__getitem__, default=None)
        before.append(previous)
        best.append(weights[i] + (best[previous] if below else 0))
    index = max(range(len(best)), key=best.__getitem__, default=None)
    chosen = set()
    while index is not None:
        chosen.add(index)
        index = before[index]
    return chosen
