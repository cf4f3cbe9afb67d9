"""Prints a comparison on a terminal, in colour, or as plain text into a pipe."""

import re
from collections.abc import Sequence
from difflib import unified_diff
from itertools import groupby, zip_longest
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from speedrun.base.text import number_ranges, visible
from speedrun.diff.align import (
    ADDED,
    AWAY,
    CHANGED,
    FOLDED,
    HERE,
    INDENTED,
    REMOVED,
    SAME,
    folded_line,
    hunks,
)
from speedrun.diff.arrange import Arranged
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import (
    Side,
    all_figures,
    changed_hyperparameters,
    changed_values,
    gained,
    gained_briefly,
    ideas_between,
    summary_line,
)
from speedrun.diff.origin import Owners, Version
from speedrun.history.manifest import Milestone

STYLES = {REMOVED: "red", ADDED: "green", INDENTED: "yellow", SAME: "", AWAY: "magenta",
          HERE: "cyan"}
FAINT = "dim"
CHANGED_WORDS = "bold underline"  # seen without colour too
BETWEEN = " │ "  # two columns
NARROWEST = 8  # characters of one of them
TAB = 4
WIDE = 100  # columns from which on the reasons for changes are shown, if nothing else is asked for


def make_console(stream) -> Console:
    """A console that writes to a text stream, neither cuts nor wraps lines, and takes every
    character as it is."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_top(console: Console, old: Side, new: Side, comparison: Difference) -> None:
    """The two names, what lies between them and what each idea gained, the figures and
    hyperparameters that moved, and how many blocks did."""
    console.print(Text(visible(f"{old.name} → {new.name}"), style="bold"))
    details = gained(old, new)
    for title, m in ideas_between(old, new):
        records = f" Records: {number_ranges(m.records)}" if m.records else ""
        brief = "" if details else gained_briefly(m)
        console.print(Text.assemble((f"\n{title} ", "bold"), m.idea, (records, FAINT)))
        if brief:
            console.print(Text(f"  {brief}", style=FAINT))
    if details:
        console.print("\nwhat it gained", style="bold")
        for line in details:
            _print_wrapped(console, line)
    for title, rows in changed_values(old, new).items():
        _print_values(console, title, rows)
    console.print(f"\n{summary_line(old, new, comparison)}")


def print_stat(console: Console, old: Side, new: Side, comparison: Difference) -> None:
    """The size of the change by block, all figures, and the hyperparameters that moved."""
    console.print(Text(visible(f"{old.name} → {new.name}"), style="bold"))
    sizes = ["lines: +{} -{}".format(*comparison.lines)]
    if not comparison.refused:
        sizes[0] += "; without card, imports and Hyperparameters: +{} -{}".format(*comparison.size)
        width = max((len(change.name) for change in comparison.changes), default=0)
        sizes += [f"  {c.name:<{width}}  {c.fate}" for c in comparison.changes]
    console.print(Text("\n" + "\n".join([summary_line(old, new, comparison), *sizes])))
    _print_values(console, "figures", all_figures(old, new))
    _print_values(console, "hyperparameters", changed_hyperparameters(old, new))


def print_arranged(
    console: Console, arranged: Arranged, in_columns: bool = False, reasons: bool | None = None,
    fold: bool = True,
) -> None:
    """The changes in their order, as print_changes prints them, each behind the reason for it.

    reasons: whether to print these; None: if there are WIDE columns. fold: on a terminal, whether
    to name the last changes in one line instead; a pipe receives every line.
    """
    last = arranged.last
    folded = last if fold and console.is_terminal and arranged.changes else ()
    whys = arranged.whys if reasons or (reasons is None and console.width >= WIDE) else {}
    print_changes(console, Difference((*arranged.changes, *(() if folded else last))), in_columns,
                  whys, arranged.owners)
    if folded:
        names = ", ".join(f"{c.name} {c.fate}" for c in folded)
        console.print(Text.assemble(("\n── ", FAINT), f"and retunes: {names}"))
        asked = " ".join(c.name if c.name.isidentifier() else f'"{c.name}"' for c in folded)
        console.print(Text(f"  --blocks {asked} shows them", style=FAINT))


def print_changes(
    console: Console, comparison: Difference, in_columns: bool = False,
    whys: dict[str, list[tuple[str, str]]] | None = None, owners: Owners | None = None,
) -> None:
    """The changed lines of each block with some lines around them; in_columns: the old ones on the
    left and the new ones on the right. whys: the reasons, by block; owners: those of each hunk.

    On a terminal long lines go on below; in a pipe the left column is as wide as its longest line.
    """
    width = max(NARROWEST, (console.width - len(BETWEEN)) // 2)
    if not console.is_terminal:
        lines = [row.old for change in comparison.changes for row in change.rows if row.old]
        width = max((_styled(" ", line).cell_len for line in lines), default=NARROWEST)
    for change in comparison.changes:
        _print_title(console, change)
        for id, why in (whys or {}).get(change.name, ()):
            _print_wrapped(console, f"{id + ': ' if id else ''}{why}", "italic")
        for hunk in hunks(change.rows):
            if hunk[0][0] == FOLDED:
                console.print(Text(f"  {folded_line(hunk[0][1])}", style=FAINT))
                continue
            if owners:
                ids = ", ".join(m.id for m in owners.of(row for _, rows in hunk for row in rows))
                console.print(Text(f"  by {ids}", style=FAINT))
            for kind, rows in hunk:
                _print_passage(console, kind, rows, width if in_columns else None)


def _print_passage(console, kind, rows, width):
    """Prints rows of one kind, in two columns if the left one's width is given."""
    signs = (REMOVED, ADDED) if kind == CHANGED else (kind, kind)
    if width:
        _print_beside(console, signs, rows, width)
        return
    lines = [(REMOVED, row.old) for row in rows if kind == CHANGED and row.old]
    lines += [(signs[1], row.new) for row in rows if row.new]
    for sign, line in lines:
        console.print(_styled(sign, line))


def print_unified(
    console: Console, old: Side, new: Side, changes: Sequence[Change] | None = None
) -> None:
    """The unified diff of two files, or of each of these blocks with the line numbers of the files.

    Into a pipe, that of two files is byte for byte what `patch` takes.
    """
    names = [side.name.replace("\n", "?") for side in (old, new)]
    if changes is None:
        _print_unified(console, (old.text, new.text), names, (1, 1))
    for change in changes or ():
        _print_title(console, change)
        blocks = change.old, change.new
        texts = [block.text + "\n" if block else "" for block in blocks]
        _print_unified(console, texts, names, [block.line if block else 1 for block in blocks])


def print_origins(console: Console, origins: Sequence[tuple[str, Milestone]]) -> None:
    """A script, with the milestone of each line and the line's number before it."""
    width = max(len(m.id) for _, m in origins)
    before = None
    for number, (line, m) in enumerate(origins, start=1):
        style = FAINT if m is before else "bold cyan"
        console.print(Text.assemble(
            (f"{m.id:>{width}}", style), (f" {number:4} ", FAINT), visible(line)))
        before = m


def print_origin_counts(console: Console, counts: Sequence[tuple[Milestone, int]]) -> None:
    """How many lines each milestone brought, and all of them."""
    width = max(len(m.id) for m, _ in counts)
    for m, lines in counts:
        console.print(Text.assemble((f"{m.id:>{width}}", "bold cyan"), f" {lines:5}  {m.title}"))
    total = sum(lines for _, lines in counts)
    console.print(f"{'':{width}} {total:5}  lines of {len(counts)} milestones")


def print_life(console: Console, versions: Sequence[Version], stat: bool = False) -> None:
    """Each version of a block: its milestone and idea, and what it changed; stat: no lines."""
    for chain, some in groupby(versions, lambda version: version.milestone.chain):
        console.print(Text(f"{chain}\n", style=FAINT))
        for version in some:
            m = version.milestone
            console.print(Text.assemble((f"{m.id} {m.title}. ", "bold"), m.idea))
            if stat:
                console.print(f"  {version.change.fate}")
            else:
                print_changes(console, Difference((version.change,)))
                console.print()


def _print_title(console, change):
    """A block's name, what happened to it, and its place."""
    place = f"  {change.fate}  ({change.place})"
    console.print(Text.assemble(("\n── ", FAINT), (change.name, "bold cyan"), place))


def _print_wrapped(console, text, style=""):
    """Prints a sentence, indented, on lines that a terminal need not break."""
    for line in wrap(text, max(NARROWEST, min(console.width, WIDE) - 2)):
        console.print(Text(f"  {visible(line)}", style=style))


def _styled(sign, line):
    """A line behind its sign, with the changed words marked; a moved one has a sign of its own."""
    if line.moved:
        sign = AWAY if sign == REMOVED else HERE
    text = Text(f"{sign} {visible(line.text)}" if line.text else sign.strip(), style=STYLES[sign])
    for start, end in line.spans:
        text.stylize(CHANGED_WORDS, start + 2, end + 2)
    return text


def _print_beside(console, signs, rows, width):
    """Prints rows in two columns, the left one `width` wide."""
    for row in rows:
        sides = []
        for sign, line in zip(signs, (row.old, row.new), strict=True):
            text = _styled(sign, line) if line else Text()
            text.expand_tabs(TAB)
            sides.append(text.divide(range(width, len(text), width) if console.is_terminal else ()))
        for left, right in zip_longest(*sides, fillvalue=Text()):
            whole = Text.assemble(left, " " * (width - left.cell_len), (BETWEEN, FAINT), right)
            whole.rstrip()
            console.print(whole)


def _print_values(console, title, rows):
    """A small table: name, old → new."""
    if not rows:
        return
    console.print(f"\n{title}", style="bold")
    width = max(len(name) for name, _, _ in rows)
    for name, old, new in rows:
        between = "" if None in (old, new) else " → "
        behind = "  (added)" if old is None else "  (removed)" if new is None else ""
        sides = (visible(old or ""), "red"), (between, FAINT), (visible(new or ""), "green")
        console.print(Text.assemble(f"  {name:<{width}}  ", *sides, (behind, FAINT)))


def _print_unified(console, texts, names, starts):
    """Prints the unified diff of two texts that begin in the lines `starts` of their files."""
    a, b = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in texts)
    styles = {"+": STYLES[ADDED], "-": STYLES[REMOVED], "@": "cyan"}
    for number, line in enumerate(unified_diff(a, b, *names)):
        if line.startswith("@@"):
            numbers = zip("-+", re.findall(r"[-+](\d+)", line), starts, strict=True)
            for sign, number, start in numbers:
                line = line.replace(sign + number, f"{sign}{int(number) + start - 1}", 1)
        end = "" if line.endswith("\n") else "\n\\ No newline at end of file\n"
        if console.is_terminal:
            style = "bold" if number < 2 else styles.get(line[0], "")
            console.print(Text(visible(line + end), style=style), end="")
        else:  # untouched: rich would replace tabs
            console.file.write(line + end)
