"""Finds the blocks at fault: puts the learner's blocks into the milestone's script, and looks."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from textwrap import indent

from speedrun.history.blocks import Block, merge_names, split_blocks

NOT_JUDGED = ("card", "main guard")  # not looked at, or by a look of its own
NOTHING = Block("", "", 0)
PAIRED = 5  # blocks at fault of which each two are tried together
LACKING = ("AttributeError", "TypeError", "KeyError")  # a name, an argument or a key is missing


@dataclass(frozen=True)
class Verdict:
    """What a look at blocks found: their names (several that fit only together), and what differs
    first when they alone are the learner's, or None if nothing does. `seen` is the trace. replaced:
    the milestone's block that stops on them for a name or argument that they lack, where the
    learner's script has one of its own; they are not judged then."""

    names: tuple[str, ...]
    difference: object = None
    job: str = ""
    seen: object = None
    replaced: str = ""


class Mixture:
    """The milestone's script and the learner's as blocks, and scripts made of both. parent: the
    script that the learner starts from, "" if there is none.

    Raises SyntaxError or ValueError, as split_blocks, if the learner's script has no clear blocks.
    """

    def __init__(self, milestone: str, learner: str, parent: str = ""):
        both = [split_blocks(text) for text in (milestone, learner)]
        self.milestone, self.learner = ({block.name: block for block in blocks} for blocks in both)
        self.added = {name: block for name, block in self.learner.items()
                      if name not in self.milestone}
        self.parent = {block.name: block.text for block in split_blocks(parent)}
        known, mine = (fields_of(blocks.get("Hyperparameters", NOTHING).text)
                       for blocks in (self.milestone, self.learner))
        self.more_fields = [line for name, line in mine.items() if name not in known]

    def candidates(self) -> list[str]:
        """The blocks that may be at fault, in the learner's order: those that differ, and new
        statements that are no definitions. New definitions go with the blocks that use them."""
        return [name for name, block in self.learner.items() if _is_judged(name)
                and (not _is_definition(block) if name in self.added
                     else block.text != self.milestone[name].text)]

    def lacking(self) -> list[str]:
        """The milestone's blocks that the learner's script does not have."""
        return [name for name in self.milestone if name not in self.learner and _is_judged(name)]

    def span(self, name: str) -> str:
        """The learner's lines of a block, as in `lines 120-160`."""
        first, last = _lines(self.learner[name])
        return f"line {first}" if last == first else f"lines {first}-{last}"

    def block_at(self, line: int) -> str:
        """The name of the learner's block that holds a line, or ""."""
        return _block_at(self.learner, line)

    def caller(self, name: str, difference) -> str:
        """The milestone's block that stops because this block of the learner's lacks a name or an
        argument, or "". Both blocks must be the learner's own work, not still the parent's."""
        caller = _block_at(self.milestone, difference.milestone_line)
        lacking = difference.got.startswith(tuple(f"it stops: {error}" for error in LACKING))
        written = all(block in self.learner and self.learner[block].text != self.parent.get(block)
                      for block in (name, caller))
        return caller if lacking and written and caller in self.candidates() else ""

    def helpers(self, names) -> list[str]:
        """The new definitions that these blocks of the learner use, directly or not."""
        wanted, todo = [], list(names)
        while todo:
            words = _names(self.learner[todo.pop()].text)
            found = [name for name, block in self.added.items()
                     if name in words and name not in wanted and _is_definition(block)]
            wanted += found
            todo += found
        return wanted

    def neighbours(self, a: str, b: str) -> bool:
        """Whether two blocks may have to fit: one uses the other."""
        words = [_names(self.learner[name].text) | _names(self.milestone.get(name, NOTHING).text)
                 for name in (a, b)]
        return b in words[0] or a in words[1]

    def script(self, names) -> tuple[str, list[tuple[str, int]]]:
        """The milestone's script with these blocks of the learner's, and for each line whose it is
        and its number there: ("learner", 12)."""
        chosen = {*names, *self.helpers([*names, *["Hyperparameters"] * bool(self.more_fields)])}
        lines, origin = [], []

        def put(block, owner):
            at = [(owner, block.line and block.line + i) for i in range(block.text.count("\n") + 1)]
            lines.extend(block.text.split("\n") + ["", ""])
            origin.extend(at + [(owner, 0)] * 2)

        for name in merge_names([n for n in self.learner if n in chosen or n in self.milestone],
                                list(self.milestone)):
            if name == "imports" and name in self.learner:  # always both
                put(self.milestone[name], "milestone")
                mine = self.learner[name]  # a __future__ would have to stand above all others
                mine = replace(mine, text=re.sub("(?m)^from __future__ .*", "", mine.text))
                put(mine if name in chosen else Block(name, _guarded(mine), 0), "learner")
            elif name in chosen:
                put(self.learner[name], "learner")
            else:
                put(self.milestone[name], "milestone")
                if name == "Hyperparameters" and self.more_fields:  # other blocks may use them
                    del lines[-2:], origin[-2:]  # the class goes on
                    put(Block(name, "\n".join(self.more_fields), 0), "learner")
        return "\n".join(lines) + "\n", origin


def judge(mixture: Mixture, test: Callable[[list], list]) -> list[Verdict]:
    """The verdicts on a mixture's candidates, in their order.

    test([names, ...]) says for each of several tuples of names what the milestone's script with
    these blocks shows otherwise than the milestone, (difference, job, trace), or None.
    """
    names = mixture.candidates()
    alone = dict(zip(names, test([(name,) for name in names]), strict=True))
    verdicts = {name: Verdict((name,), *(seen or ())) for name, seen in alone.items()}

    def right(some):
        verdicts.update({name: Verdict((name,)) for name in some})

    def together(group, seen):
        verdicts.update(dict.fromkeys(group, Verdict(tuple(group), *seen)))

    wrong = [name for name in names if alone[name]]
    if len(wrong) > 1 and (fit := _fitting(wrong, test)):
        right(fit)
    else:
        for group in _groups(mixture, wrong):
            (seen,) = test([group])
            if seen is None:
                right(group)
            elif all(_stops(alone[name]) for name in group) and not _stops(seen):
                together(group, seen)
            elif len(group) > 2:
                right(_fitting(group, test, whole=False))
        for pair in combinations(wrong[:PAIRED], 2):  # neither calls the other: dtypes, say
            alike = all(verdicts[name].names == (name,) and verdicts[name].difference
                        for name in pair) and len({alone[name][0].what for name in pair}) == 1
            if alike and not mixture.neighbours(*pair) and test([pair])[0] is None:
                right(pair)
    for name in wrong:
        verdict = verdicts[name]
        if verdict.names == (name,) and verdict.difference and (
                caller := mixture.caller(name, verdict.difference)):
            if verdicts[caller].difference:
                verdicts[name] = Verdict((name,), replaced=caller)
            else:  # with the learner's caller, which is right
                verdicts[name] = Verdict((name,), *(test([(name, caller)])[0] or ()))
    group = [name for name in names if verdicts[name].difference is None
             and not verdicts[name].replaced]
    if len(group) > 1 and (seen := test([group])[0]):  # each by itself is right, but not all
        for name in list(group):
            rest = [other for other in group if other != name]
            if len(rest) > 1 and (less := test([rest])[0]):
                group, seen = rest, less
        together(group, seen)
    return list({verdicts[name].names: verdicts[name] for name in names}.values())


def _fitting(names, test, whole=True):
    """Blocks that are wrong one by one, as far as they are right together: all of them if `whole`,
    or all but one, or []."""
    groups = [names] * whole + [[n for n in names if n != one] for one in names]
    found = zip(groups, test(groups), strict=True)
    return next((group for group, seen in found if len(group) > 1 and seen is None), [])


def _stops(seen):
    return seen[0].got.startswith("it stops")


def _groups(mixture, names):
    """Those of the blocks that may have to fit, in groups of two and more."""
    groups = []
    for name in names:
        touched = [group for group in groups if any(mixture.neighbours(name, n) for n in group)]
        joined = [name for group in touched for name in group] + [name]
        groups = [group for group in groups if group not in touched] + [joined]
    return [sorted(group, key=names.index) for group in groups if len(group) > 1]


def _block_at(blocks, line):
    return next((name for name, block in blocks.items()
                 if _lines(block)[0] <= line <= _lines(block)[1]), "")


def _is_judged(name):
    return name not in NOT_JUDGED and not name.startswith(("heading: ", "comment: "))


def _lines(block):
    """Numbers of the first and the last line of a block."""
    return block.line, block.line + block.text.count("\n")


@cache
def _names(text):
    """The names that a block's code uses; comments and texts use none."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def fields_of(text: str) -> dict[str, str]:
    """{name: line} of the fields of a class, given as text."""
    body = next((n.body for n in ast.parse(text).body if isinstance(n, ast.ClassDef)), [])
    return {n.target.id: f"    {ast.unparse(n)}" for n in body
            if isinstance(n, ast.AnnAssign) and n.value is not None}


def _guarded(block):
    """The learner's imports, each tried for itself: one that fails is a fault of its own."""
    return f"try:\n{indent(block.text, '    ')}\n    pass\nexcept Exception:\n    pass"


def _is_definition(block):
    first = next((line for line in block.text.split("\n") if not line.startswith(("#", "@"))), "")
    return first.startswith(("def ", "class ", "async def ")) or re.match(r"[\w, ]+(:[^=]+)?= ",
                                                                          first) is not None
