"""Finds the blocks at fault: puts the learner's blocks into the milestone's script, and looks."""

import ast
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from speedrun.history.blocks import Block, merge_names, split_blocks

NOT_JUDGED = ("card", "main guard")  # not looked at, or by a look of its own
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Verdict:
    """What a look at blocks found: their names (several that fit only together), and what differs
    first when they alone are the learner's, or None if nothing does. `seen` is the trace."""

    names: tuple[str, ...]
    difference: object = None
    job: str = ""
    seen: object = None


class Mixture:
    """The milestone's script and the learner's as blocks, and scripts made of both.

    Raises SyntaxError or ValueError, as split_blocks, if the learner's script has no clear blocks.
    """

    def __init__(self, milestone: str, learner: str):
        self.milestone = {block.name: block for block in _whole_main(split_blocks(milestone))}
        self.learner = {block.name: block for block in _whole_main(split_blocks(learner))}
        mains = [[name for name in blocks if name.startswith("main: ")]
                 for blocks in (self.milestone, self.learner)]
        if mains[0] != mains[1]:  # other markers: main is one block
            self.milestone, self.learner = (
                {block.name: block for block in _whole_main(split_blocks(text), one=True)}
                for text in (milestone, learner))
        self.added = {name: block for name, block in self.learner.items()
                      if name not in self.milestone}

        self.fields = _more_fields(*(blocks.get("Hyperparameters", Block("", "", 0)).text
                                     for blocks in (self.milestone, self.learner)))

    def candidates(self) -> list[str]:
        """The blocks that may be at fault, in the learner's order: those that differ, and new
        statements that are no definitions. New definitions go with the blocks that use them."""
        return [name for name, block in self.learner.items() if name not in NOT_JUDGED
                and not name.startswith(("heading: ", "comment: "))
                and (not _is_definition(block) if name in self.added
                     else block.text != self.milestone[name].text)]

    def lacking(self) -> list[str]:
        """The milestone's blocks that the learner's script does not have."""
        return [name for name in self.milestone if name not in self.learner
                and name not in NOT_JUDGED and not name.startswith(("heading: ", "comment: "))]

    def span(self, name: str) -> str:
        """The learner's lines of a block, as in `lines 120-160`."""
        block = self.learner.get(name)
        if block is None:
            return ""
        last = block.line + block.text.count("\n")
        return f"line {block.line}" if last == block.line else f"lines {block.line}-{last}"

    def helpers(self, names) -> list[str]:
        """The new definitions that these blocks of the learner use, directly or not."""
        wanted, todo = [], [name for name in names if name in self.learner]
        while todo:
            words = set(WORD.findall(self.learner[todo.pop()].text))
            for name, block in self.added.items():
                if name in words and name not in wanted and _is_definition(block):
                    wanted.append(name)
                    todo.append(name)
        return wanted

    def neighbours(self, a: str, b: str) -> bool:
        """Whether two blocks may have to fit: one uses the other, or both are parts of main."""
        if a.startswith("main: ") and b.startswith("main: "):
            return True
        blocks = [self.learner[name].text + self.milestone.get(name, Block("", "", 0)).text
                  for name in (a, b)]
        return b in WORD.findall(blocks[0]) or a in WORD.findall(blocks[1])

    def script(self, names) -> tuple[str, list[tuple[str, int]]]:
        """The milestone's script with these blocks of the learner's, and for each line whose it is
        and its number there: ("learner", 12)."""
        chosen = {name for name in names if name in self.learner}
        chosen.update(self.helpers(chosen))
        order = merge_names([n for n in self.learner if n in chosen or n in self.milestone],
                            list(self.milestone))
        lines, origin = [], []

        def put(block, owner):
            numbered = [(owner, block.line + i) for i in range(block.text.count("\n") + 1)]
            lines.extend(block.text.split("\n") + ["", ""])
            origin.extend(numbered + [(owner, 0)] * 2)

        for name in order:
            mine = name in chosen
            if name not in self.milestone and not mine:
                continue
            if name == "imports" and "imports" in self.learner:  # always both
                put(self.milestone[name], "milestone")
                block = self.learner[name]
                put(block if mine else Block(name, _guarded(block), 0), "learner")
            else:
                put(self.learner[name] if mine else self.milestone[name],
                    "learner" if mine else "milestone")
                if name == "Hyperparameters" and not mine and self.fields:  # its methods have none
                    del lines[-2:], origin[-2:]
                    put(Block(name, self.fields, 0), "learner")
        return "\n".join(lines) + "\n", origin


def _more_fields(milestone, learner):
    """The lines of a class's fields that only the learner has: other blocks may use them."""
    fields = []
    for text in (milestone, learner):
        body = next((n.body for n in ast.parse(text).body if isinstance(n, ast.ClassDef)), [])
        fields.append({n.target.id: "    " + ast.unparse(n) for n in body
                       if isinstance(n, ast.AnnAssign) and n.value is not None})
    return "\n".join(line for name, line in fields[1].items() if name not in fields[0])


def _guarded(block):
    """The learner's imports, each tried for itself: one that fails is a fault of its own."""
    text = "\n".join(line for line in block.text.split("\n") if "__future__" not in line)
    return "try:\n" + "\n".join(f"    {line}" for line in text.split("\n")) + (
        "\n    pass\nexcept Exception:\n    pass")


def _is_definition(block):
    first = next((line for line in block.text.split("\n") if not line.startswith(("#", "@"))), "")
    return first.startswith(("def ", "class ", "async def ")) or re.match(r"[\w, ]+(:[^=]+)?= ",
                                                                          first) is not None


def _whole_main(blocks, one=False):
    """Blocks as they are, or with all parts of main as one block."""
    if not one:
        return blocks
    parts = [block for block in blocks if block.name.startswith("main: ")]
    found = []
    for block in blocks:
        if not parts or block not in parts:
            found.append(block)
        elif block is parts[0]:
            found.append(Block("main", "\n".join(part.text for part in parts), block.line))
    return found


def judge(mixture: Mixture, names: list[str], test: Callable[[tuple], Generator],
          ) -> Generator:
    """A generator for Worker.drive that returns the verdicts on the candidates `names`.

    test(names) is a generator that returns None, if the milestone's script with these blocks shows
    what the milestone shows, or what it shows otherwise, as (difference, job, trace).
    """
    alone = {}
    for name in names:
        alone[name] = yield from test((name,))
    wrong = [name for name in names if alone[name]]
    verdicts = {name: Verdict((name,), *(alone[name] or ())) for name in names}
    for group in _groups(mixture, wrong):
        found = yield from test(tuple(group))
        if found is None:  # they fit together
            for name in group:
                verdicts[name] = Verdict((name,))
            continue
        if all(alone[name][0].line or alone[name][0].got.startswith("it stops") for name in group) \
                and not found[0].got.startswith("it stops"):
            together = Verdict(tuple(group), *found)
            for name in group:
                verdicts[name] = together
            continue
        for name in group:  # the others may fit without this one
            rest = tuple(other for other in group if other != name)
            if len(rest) > 1 and (yield from test(rest)) is None:
                for other in rest:
                    verdicts[other] = Verdict((other,))
                break
    right = [name for name in names if verdicts[name].difference is None]
    if len(right) > 1 and (found := (yield from test(tuple(right)))):
        group = list(right)  # each right by itself, but not all together
        for name in right:
            rest = tuple(other for other in group if other != name)
            if len(rest) > 1 and (less := (yield from test(rest))):
                group, found = list(rest), less
        together = Verdict(tuple(group), *found)
        for name in group:
            verdicts[name] = together
    return list({verdicts[name].names: verdicts[name] for name in names}.values())


def _groups(mixture, names):
    """Those of the blocks that may have to fit, in groups of two and more."""
    groups = []
    for name in names:
        touched = [group for group in groups if any(mixture.neighbours(name, n) for n in group)]
        joined = [name for group in touched for name in group] + [name]
        groups = [group for group in groups if group not in touched] + [joined]
    return [sorted(group, key=names.index) for group in groups if len(group) > 1]
