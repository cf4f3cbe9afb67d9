"""What a diff shows beside the changed lines: ideas, figures, hyperparameters, a summary."""

import tokenize
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.text import UNKNOWN, short, visible
from speedrun.diff.difference import Difference
from speedrun.history.blocks import FREE, merge_names
from speedrun.history.effects import TIME, TOKENS
from speedrun.history.fields import Field, read_fields
from speedrun.history.gains import (
    CAVEAT,
    comparable_base,
    gain_lines,
    gain_words,
    incomparable_lines,
    own_gain,
    timed_parts,
)
from speedrun.history.manifest import Milestone, load_manifest
from speedrun.scripts.find import locate
from speedrun.scripts.sizes import training_tokens, whole

# The figures that a diff shows, and their formats.
UNDOES = "Undoes "  # begins the title of an idea that the way leads back from
FIGURES = {"minutes": "g", "steps": ",", "tokens": ",", "val loss": ".4f", "parameters": ","}


@dataclass(frozen=True)
class Side:
    """One of the two files: its name, path and text, the milestone that it is (or None), and the
    hyperparameters, {name: Field}."""

    name: str
    path: Path
    text: str
    milestone: Milestone | None
    hyperparameters: dict[str, Field]

    def figures(self) -> dict[str, str]:
        """Figures as text: a milestone's official ones, else what follows from hyperparameters."""
        m, values = self.milestone, {n: f.default for n, f in self.hyperparameters.items()}
        known = {
            "minutes": m and m.minutes,
            "steps": m.train_steps if m else whole(values.get("train_steps")),
            "tokens": m.tokens if m else training_tokens(values, None),
            "val loss": m and m.val_loss, "parameters": m and m.parameters,
        }
        return {name: format(value, FIGURES[name]) for name, value in known.items()
                if value is not None}


def read_side(target: str) -> Side:
    """The Side for a milestone, `train`, or the path of any Python file.

    Raises UserError, ManifestError, OSError or ValueError, one line, if there is no such file or it
    is not a text.
    """
    path, milestone = locate(target, load_manifest())
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except (UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"{path} is not a text that can be read: {error}") from None
    name = milestone.name if milestone else target if target == "train" else short(path)
    return Side(name, path, text, milestone, _hyperparameters(path))


def side_of(m: Milestone) -> Side:
    """The Side for a milestone, of whichever history/."""
    text = m.script.read_text(encoding="utf-8")
    return Side(m.name, m.script, text, m, _hyperparameters(m.script))


def parent_of(target: str) -> str:
    """The id of a milestone's parent.

    Raises UserError for what has no parent, and as `locate` where there is no such file.
    """
    _, milestone = locate(target, load_manifest())
    if milestone is None or milestone.parent is None:
        raise UserError(f"{target} has no parent; name two to compare, A and B")
    return milestone.parent


def is_step(old: Side, new: Side) -> bool:
    """Whether one side is the parent of the other."""
    return bool(new.milestone and old.milestone and new.milestone.parent == old.milestone.id)


def gained(old: Side, new: Side) -> list[str]:
    """What the step from a parent to its child gained by itself, line by line, with the evidence;
    nothing for other pairs of sides."""
    return gain_lines(load_manifest(), new.milestone) if is_step(old, new) else []


def gained_briefly(old: Side, new: Side) -> list[tuple[str, Milestone, list[str]]]:
    """`ideas_between` with what each idea gained, in a few lines: its time, else its first own
    effect, the caveats, and why its own official figures, if it has any, do not compare. No lines
    for a parent and its child, of which `gained` says more."""
    found = []
    for title, m in ideas_between(old, new):
        lines = []
        if not is_step(old, new):
            gain, parts = own_gain(load_manifest(), m), timed_parts(m)
            if not gain:
                parts = [e for e in m.effect if not e.whole][:1]
            brief = gain_words(gain) if gain else "".join(f"{e.measured}, {e.how}" for e in parts)
            if brief:
                lines.append(f"{m.id} had gained: {brief}" if is_undone(title) else brief)
            caveats = "; ".join(e.caveat for e in parts if e.caveat)
            lines += [f"{CAVEAT}{caveats}"] * bool(caveats)
            lines += incomparable_lines(m) if m.minutes else []
        found.append((title, m, lines))
    return found


def not_comparable(old: Side, new: Side) -> list[str]:
    """Which official figures do not compare between two sides, and why; if there are several
    milestones between them, only which of these say more. Nothing if there is no way."""
    ideas, ends = [m for _, m in ideas_between(old, new)], (old.milestone, new.milestone)
    if None in ends or not any(a in load_manifest().lineage(b) for a, b in (ends, ends[::-1])):
        return []
    if len(ideas) == 1:
        return incomparable_lines(ideas[0])
    ids = ", ".join(m.id for m in ideas if m.minutes and m.incomparable)
    return [f"official figures do not compare throughout: see {ids}"] if ids else []


def all_figures(old: Side, new: Side) -> list[tuple[str, str, str]]:
    """(name, old, new) of the figures that either side has."""
    before, after = old.figures(), new.figures()
    return [(name, before.get(name, UNKNOWN), after.get(name, UNKNOWN))
            for name in FIGURES if name in before or name in after]


def changed_values(old: Side, new: Side) -> dict[str, list[tuple[str, str | None, str | None]]]:
    """(name, old, new) of what differs, by its title: figures and hyperparameters. Left out are
    figures that both a parent and its child have and that are not comparable, figures of a
    milestone that another file does not have, and empty titles."""
    hidden = set()
    if is_step(old, new):
        for names, what in ((("minutes",), TIME), (("steps", "tokens"), TOKENS)):
            if not comparable_base(load_manifest(), new.milestone, what):
                hidden.update(names)
    both = old.milestone and new.milestone
    figures = [row for row in all_figures(old, new) if row[1] != row[2]
               and (both if UNKNOWN in row else row[0] not in hidden)]
    official = both and all(side.milestone.covered for side in (old, new))
    title = "official figures" if official else "figures"
    found = {title: figures, "hyperparameters": changed_hyperparameters(old, new)}
    return {title: rows for title, rows in found.items() if rows}


def changed_hyperparameters(old: Side, new: Side) -> list[tuple[str, str | None, str | None]]:
    """(name, old default, new default) of those that differ, as the files write them; None for a
    side without it. 524_288 and 512 * 1024 do not differ. Empty if a side has none at all."""
    before, after = old.hyperparameters, new.hyperparameters
    found = []
    for name in merge_names(list(before), list(after)) if before and after else []:
        a, b = before.get(name), after.get(name)
        if a is None or b is None or not a.same_default(b):
            found.append((name, a and a.written, b and b.written))
    return found


def ideas_between(old: Side, new: Side) -> list[tuple[str, Milestone]]:
    """The milestones whose ideas lead from one side to the other, in reading order, each behind its
    title. If one side descends from the other: all between them, undone where `old` is the
    descendant. Else only `new`; none if that is not a milestone."""
    older, younger = ([] if side.milestone is None else load_manifest().lineage(side.milestone)
                      for side in (old, new))  # the youngest first
    if younger and younger[0] in older:
        undone = older[: older.index(younger[0])]
        return [(f"{UNDOES}{m.id} {m.title}.", m) for m in undone]
    if older and older[0] in younger:
        younger = younger[: younger.index(older[0])]
    else:
        younger = younger[:1]
    return [(f"{m.id} {m.title}.", m) for m in reversed(younger)]


def is_undone(title: str) -> bool:
    """Whether a title of `ideas_between` is that of a milestone that the way leads back from."""
    return title.startswith(UNDOES)


def summary_line(old: Side, new: Side, comparison: Difference) -> str:
    """How many blocks changed, were added, were removed and stayed, or why there are none; card
    and headings are not counted."""
    changes = comparison.changes
    if not changes and old.text != new.text:
        return "the blocks are the same; --full also shows blank lines between blocks"
    if not changes and old.path.read_bytes() != new.path.read_bytes():
        return "the same text, in another encoding or with other line endings"
    if not changes:
        return "no difference"
    if comparison.refused:
        return f"compared line by line: {visible(comparison.refused)}"
    changes = [change for change in changes if _counts(change.name)]
    added = sum(change.old is None for change in changes)
    removed = sum(change.new is None for change in changes)
    parts = {"changed": len(changes) - added - removed, "added": added, "removed": removed,
             "unchanged": len([*filter(_counts, comparison.unchanged)])}
    counted = ", ".join(f"{count} {word}" for word, count in parts.items() if count)
    return f"blocks: {counted or 'none but card and headings'}"


def _counts(name):
    return name != FREE[0] and not name.startswith("heading: ")


def _hyperparameters(path):
    try:
        return read_fields(path)
    except (ValueError, RecursionError, MemoryError):  # not Python, as the comparison will report
        return {}
