"""Prints a comparison on a terminal, in colour, or as plain text into a pipe."""

from rich.console import Console
from rich.text import Text

from speedrun.base.text import number_ranges, visible
from speedrun.diff.align import ADDED, CHANGED, FOLDED, INDENTED, REMOVED, SAME, Line, passages
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side, all_figures, moved_figures, moved_hyperparameters, told_by
from speedrun.diff.words import folded_line, summary_line, what, where

STYLES = {REMOVED: "red", ADDED: "green", INDENTED: "yellow", SAME: ""}
FAINT = "dim"
CHANGED_WORDS = "bold underline"  # seen without colour too


def make_console(stream) -> Console:
    """A console that writes to a text stream, neither cuts nor wraps lines, and takes every
    character as it is."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_top(console: Console, old: Side, new: Side, comparison: Difference) -> None:
    """The two names, what lies between them, the figures and hyperparameters that moved, and how
    many blocks did."""
    _print_names(console, old, new)
    for m in told_by(old, new):
        head = Text(f"\n{m.id} {m.title}. ", style="bold").append(m.idea, style="not bold")
        if m.records:
            head.append(f" Records: {number_ranges(m.records)}", style="not bold dim")
        console.print(head)
    official = "official figures" if old.milestone and new.milestone else "figures"
    _print_moved(console, official, moved_figures(old, new))
    _print_moved(console, "hyperparameters", moved_hyperparameters(old, new))
    console.print(f"\n{summary_line(old, new, comparison)}")


def print_stat(console: Console, old: Side, new: Side, comparison: Difference) -> None:
    """The size of the change by block, all figures, and the hyperparameters that moved."""
    _print_names(console, old, new)
    sizes = ["lines: +{} -{}".format(*comparison.lines())]
    if not comparison.refused:
        sizes[0] += "; without card, imports and Hyperparameters: +{} -{}".format(
            *comparison.lines(counted_only=True))
        width = max((len(change.name) for change in comparison.changes), default=0)
        sizes += [f"  {c.name:<{width}}  {what(c)}" for c in comparison.changes]
    console.print(Text("\n" + "\n".join([summary_line(old, new, comparison), *sizes])))
    _print_moved(console, "figures", all_figures(old, new))
    _print_moved(console, "hyperparameters", moved_hyperparameters(old, new))


def print_changes(console: Console, comparison: Difference) -> None:
    """The changed lines of each block with some lines around them."""
    for change in comparison.changes:
        print_title(console, change)
        for kind, rows in passages(change.rows):
            if kind == FOLDED:
                console.print(Text(f"  {folded_line(rows)}", style=FAINT))
            elif kind == CHANGED:
                _print_lines(console, REMOVED, [row.old for row in rows if row.old])
                _print_lines(console, ADDED, [row.new for row in rows if row.new])
            else:
                _print_lines(console, kind, [row.new for row in rows])


def print_title(console: Console, change: Change) -> None:
    """A block's name, what happened to it, and where it stands."""
    title = Text("\n── ", style=FAINT).append(change.name, style="not dim bold cyan")
    console.print(title.append(f"  {what(change)}  ({where(change)})", style="not bold not dim"))


def styled(sign: str, line: Line) -> Text:
    """A line behind its sign, with the changed words marked."""
    text = Text(f"{sign} {visible(line.text)}" if line.text else sign.strip(), style=STYLES[sign])
    for start, end in line.spans:
        text.stylize(CHANGED_WORDS, start + 2, end + 2)
    return text


def _print_lines(console, sign, lines):
    for line in lines:
        console.print(styled(sign, line))


def _print_names(console, old, new):
    console.print(Text(visible(f"{old.name} → {new.name}"), style="bold"))


def _print_moved(console, title, rows):
    """A small table: name, old → new."""
    if not rows:
        return
    console.print(f"\n{title}", style="bold")
    width = max(len(name) for name, _, _ in rows)
    for name, old, new in rows:
        sides = [(visible(old or ""), "red"), (visible(new or ""), "green")]
        if None in (old, new):
            sides.append(("  (added)" if old is None else "  (removed)", "dim"))
        else:
            sides.insert(1, (" → ", "dim"))
        console.print(Text.assemble(f"  {name:<{width}}  ", *sides))
