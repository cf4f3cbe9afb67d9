"""Prints a comparison on a terminal, in colour, or as plain text into a pipe."""

from rich.console import Console
from rich.text import Text

from speedrun.base.text import number_ranges, visible
from speedrun.diff.align import ADDED, INDENTED, REMOVED, SAME, Line, runs, shown
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side, all_figures, moved_figures, moved_hyperparameters, told_by
from speedrun.diff.words import gap_line, no_change_line, summary_line, what, where

STYLES = {REMOVED: "red", ADDED: "green", INDENTED: "yellow", SAME: ""}
FAINT = "dim"
CHANGED_WORDS = "bold underline"  # seen without colour too


def make_console(stream) -> Console:
    """A console that writes to a text stream, neither cuts nor wraps lines, and takes every
    character as it is."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_top(console: Console, old: Side, new: Side) -> None:
    """The two names, what lies between them, the figures and hyperparameters that moved."""
    _print_names(console, old, new)
    for m in told_by(old, new):
        head = Text(f"\n{m.id} {m.title}. ", style="bold").append(m.idea, style="not bold")
        if m.records:
            head.append(f" Records: {number_ranges(m.records)}", style="not bold dim")
        console.print(head)
    official = "official figures" if old.milestone and new.milestone else "figures"
    _print_moved(console, official, moved_figures(old, new))
    _print_moved(console, "hyperparameters", moved_hyperparameters(old, new))


def print_stat(console: Console, old: Side, new: Side, comparison: Difference) -> None:
    """The size of the change by block, all figures, and the hyperparameters that moved."""
    _print_names(console, old, new)
    added, removed = comparison.lines()
    lines = [
        no_change_line(old, new, comparison) or summary_line(comparison),
        f"lines: +{added} -{removed}",
    ]
    if not comparison.refused:
        added, removed = comparison.lines(counted_only=True)
        lines[1] += f"; without card, imports and Hyperparameters: +{added} -{removed}"
        width = max((len(change.name) for change in comparison.changes), default=0)
        lines += [f"  {c.name:<{width}}  {what(c)}" for c in comparison.changes]
    console.print(Text("\n" + "\n".join(lines)))
    _print_moved(console, "figures", all_figures(old, new))
    _print_moved(console, "hyperparameters", moved_hyperparameters(old, new))


def print_changes(console: Console, comparison: Difference, context: int = 3) -> None:
    """The changed lines of each block with `context` lines around them."""
    for change in comparison.changes:
        print_title(console, change)
        text = Text()
        for kind, group in runs(shown(change.rows, context)):
            if kind == "gap":
                text.append(f"  {gap_line(group[0])}\n", style=FAINT)
            elif kind == "changed":
                text.append_text(_lines(REMOVED, [row.old for row in group if row.old]))
                text.append_text(_lines(ADDED, [row.new for row in group if row.new]))
            else:
                text.append_text(_lines(group[0].mark, [row.new for row in group]))
        if text:
            console.print(text, end="")


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


def _lines(sign, lines):
    text = Text()
    for line in lines:
        text.append_text(styled(sign, line)).append("\n")
    return text


def _print_names(console, old, new):
    console.print(Text(visible(f"{old.name} → {new.name}"), style="bold"))


def _print_moved(console, title, rows):
    """A small table: name, old → new."""
    if not rows:
        return
    text = Text(f"\n{title}", style="bold")
    width = max(len(name) for name, _, _ in rows)
    for name, old, new in rows:
        text.append(f"\n  {name:<{width}}  ", style="not bold")
        if old is not None:
            text.append(visible(old), style="not bold red")
        text.append(" → " if None not in (old, new) else "", style="not bold dim")
        if new is not None:
            text.append(visible(new), style="not bold green")
        if None in (old, new):
            text.append("  (added)" if old is None else "  (removed)", style="not bold dim")
    console.print(text)
