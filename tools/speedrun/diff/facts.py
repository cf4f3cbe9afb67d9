"""What is known of the two sides of a diff beside their text: figures and hyperparameters."""

import ast
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import UNKNOWN, short
from speedrun.history.blocks import merge_names
from speedrun.history.manifest import Milestone, load_manifest
from speedrun.scripts.find import default_hyperparameters, locate
from speedrun.scripts.sizes import training_tokens, whole


@dataclass(frozen=True)
class Side:
    """One of the two files: what to call it, where it lies, its text, the milestone that it is (or
    None), and the defaults of its hyperparameters, {name: (as written, value or None)}."""

    name: str
    path: Path
    text: str
    milestone: Milestone | None
    hyperparameters: dict[str, tuple[str, object]]

    def figures(self) -> dict[str, str]:
        """Figures as text: a milestone's official ones, else what the hyperparameters tell."""
        m = self.milestone
        if m is None:
            values = {name: value for name, (_, value) in self.hyperparameters.items()}
            known = dict(steps=whole(values.get("train_steps")),
                         tokens=training_tokens(values, None))
        else:
            by_steps = m.train_steps and m.tokens_per_step
            known = {
                "minutes": m.minutes, "steps": m.train_steps,
                "tokens": m.train_steps * m.tokens_per_step if by_steps else None,
                "val loss": m.val_loss, "parameters": m.parameters,
            }
        formats = {"minutes": "g", "val loss": ".4f"}
        return {name: format(value, formats.get(name, ",")) for name, value in known.items()
                if value is not None}


def read_side(target: str) -> Side:
    """The Side for a milestone, `train`, or the path of any Python file.

    Raises UserError, ManifestError, OSError or ValueError, one line, if there is no such file or it
    is no text.
    """
    path, milestone = locate(target, _manifest())
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except (UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"{path} is not a text that can be read: {error}") from None
    name = milestone.name if milestone else target if target == "train" else short(path)
    return Side(name, path, text, milestone, _hyperparameters(path, text))


def moved_figures(old: Side, new: Side) -> list[tuple[str, str, str]]:
    """(name, old, new) of the figures that both sides have and that differ."""
    before, after = old.figures(), new.figures()
    return [(name, before[name], value) for name, value in after.items()
            if before.get(name, value) != value]


def all_figures(old: Side, new: Side) -> list[tuple[str, str, str]]:
    """(name, old, new) of the figures that either side has."""
    before, after = old.figures(), new.figures()
    return [(name, before.get(name, UNKNOWN), after.get(name, UNKNOWN))
            for name in ("minutes", "steps", "tokens", "val loss", "parameters")
            if name in before or name in after]


def moved_hyperparameters(old: Side, new: Side) -> list[tuple[str, str | None, str | None]]:
    """(name, old default, new default) of those that differ, as the files write them; None for a
    side without it. 524_288 and 512 * 1024 do not differ. Empty if a side has none at all."""
    before, after = old.hyperparameters, new.hyperparameters
    moved = []
    if not (before and after):
        return moved
    for name in merge_names(list(before), list(after)):
        a, b = before.get(name, (None, None)), after.get(name, (None, None))
        same_value = a[1] is not None and (type(a[1]), a[1]) == (type(b[1]), b[1])
        if a[0] != b[0] and not same_value:
            moved.append((name, a[0], b[0]))
    return moved


def told_by(old: Side, new: Side) -> list[Milestone]:
    """The milestones whose ideas lie between the two: from below `old` down to `new` where one
    descends from the other, else `new` alone; none if that is no milestone."""
    line = [new.milestone] if new.milestone else []
    if old.milestone and line:
        while line[0].parent and line[0].id != old.milestone.id:
            line.insert(0, _manifest().get(line[0].parent))
        line = line[1:] if line[0].id == old.milestone.id else line[-1:]
    return line


@cache
def _manifest():
    return load_manifest()


def _hyperparameters(path, text):
    try:
        values = default_hyperparameters(path)
        tree = ast.parse(text)
    except (ValueError, RecursionError, MemoryError):  # no Python, as the comparison will tell
        return {}
    lines, written = text.split("\n"), {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    written[field.target.id] = _source(field.value, lines)
    return {name: (written[name], values[name]) for name in written if name in values}


def _source(node, lines):
    """An expression as the file writes it, in one line."""
    if node is None:
        return "no default"
    if node.lineno != node.end_lineno:
        return ast.unparse(node)
    # ast.get_source_segment splits the whole file for each call; the columns count bytes
    line = lines[node.lineno - 1].encode()
    return line[node.col_offset : node.end_col_offset].decode()
