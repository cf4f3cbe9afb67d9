"""Prints a comparison on a terminal, in colour, or as plain text into a pipe."""

import re
from collections.abc import Sequence
from difflib import unified_diff
from itertools import groupby, zip_longest
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from speedrun.base.text import number_ranges, short, visible
from speedrun.diff.align import (
    ADDED,
    AWAY,
    CHANGED,
    FOLDED,
    HERE,
    INDENTED,
    REMOVED,
    SAME,
    counts,
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
    is_step,
    not_comparable,
    summary_line,
)
from speedrun.diff.origin import Owners, Version
from speedrun.history.blocks import RETUNED, UNCOUNTED
from speedrun.history.gains import CAVEAT
from speedrun.history.guide import whys
from speedrun.history.manifest import Milestone
from speedrun.history.why import Why

STYLES = {REMOVED: "red", ADDED: "green", INDENTED: "yellow", SAME: "", AWAY: "magenta",
          HERE: "cyan"}
FAINT = "dim"
CHANGED_WORDS = "bold underline"  # seen without colour too
BETWEEN = " │ "  # two columns
NARROWEST = 8  # characters of one of them
TAB = 4
SPILLED = 8  # columns by which the rest of a line that is too long is indented further
ON = "↪ "  # before that rest
REASON = "│ "  # before each line of a reason, which is no code
# Spaces at which no line breaks: around an operator, and between a factor and a function.
WITHIN_FORMULA = re.compile(r"(?<=\S) (?=(?:[-+*/=<>]|<=|>=|\+-) \S)|(?<= [-+*/=<>]) (?=\S)"
                            r"|(?<=\d) (?=\w+\()")
NO_BREAK = " "
WIDE = 100  # columns of a sentence at most


def make_console(stream) -> Console:
    """A console that writes to a text stream, neither cuts nor wraps lines, and takes every
    character as it is."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_top(
    console: Console, old: Side, new: Side, comparison: Difference, reasons: bool = True
) -> None:
    """The two names, what lies between them and what each idea gained, the figures and
    hyperparameters that moved, with the reason if these are to be printed, and how many blocks
    did."""
    console.print(Text(visible(f"{old.name} → {new.name}"), style="bold"))
    if new.milestone or new.name != short(new.path):
        console.print(Text(visible(short(new.path)), style=FAINT))
    details, ideas = gained(old, new), gained_briefly(old, new)
    for title, m, brief in ideas:
        records = f" Records: {number_ranges(m.records)}" if m.records else ""
        console.print()
        _print_idea(console, title, m, (records, FAINT))
        for line in brief:
            _print_wrapped(console, line, FAINT)
    if details:
        console.print("\nmeasured effect", style="bold")
    for line in details:
        _print_wrapped(console, line, indent=4 if line.startswith(CAVEAT) else 2)
    for line in not_comparable(old, new) if len(ideas) > 1 else ():
        console.print()
        _print_wrapped(console, line, indent=0)
    for title, rows in changed_values(old, new).items():
        _print_values(console, title, rows)
        if title == RETUNED.lower() and reasons and is_step(old, new):
            _print_wrapped(console, whys(new.milestone).get(RETUNED, ""), "italic", before=REASON)
    console.print(f"\n{summary_line(old, new, comparison)}")


def print_why(console: Console, milestone: Milestone, part: Why) -> None:
    """The text of a why.md, where its figure is, what that shows, and its number."""
    console.print(Text(visible(f"{milestone.id} {milestone.title}"), style="bold"))
    for paragraph in part.text.split("\n\n"):
        console.print()
        _print_wrapped(console, " ".join(paragraph.split()), indent=0)
    console.print()
    _print_wrapped(console, f"figure: {short(part.figure)}", FAINT, 0)
    for line in (part.shown, part.number):
        _print_wrapped(console, line, FAINT)


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
    for line in not_comparable(old, new):
        _print_wrapped(console, line)
    _print_values(console, "hyperparameters", changed_hyperparameters(old, new))


def print_arranged(
    console: Console, arranged: Arranged, in_columns: bool = False, reasons: bool = True,
    fold: bool = True,
) -> None:
    """The changes in their order, as print_changes prints them, each behind the reason for it.

    reasons: whether to print these. fold: on a terminal, whether to name the last changes in one
    line instead; a pipe receives every line.
    """
    last = arranged.last
    folded = last if fold and console.is_terminal and arranged.changes else ()
    print_changes(console, Difference((*arranged.changes, *(() if folded else last))), in_columns,
                  arranged.whys if reasons else None, arranged.owners)
    if folded:
        names = ", ".join(map(_briefly, folded))
        console.print(Text.assemble(("\n── ", FAINT), f"not shown: {names}"))
        asked = " ".join(c.name if c.name.isidentifier() else f'"{c.name}"' for c in folded)
        console.print(Text(f"  --blocks {asked} shows them", style=FAINT))


def print_changes(
    console: Console, comparison: Difference, in_columns: bool = False,
    reasons: dict[str, list[tuple[str, str]]] | None = None, owners: Owners | None = None,
) -> None:
    """The changed lines of each block with some lines around them; in_columns: the old ones on the
    left and the new ones on the right. reasons: why a block changes, by its name, if these are to
    be printed; owners: those of each hunk.

    On a terminal long lines go on below; in a pipe the left column is as wide as its longest line.
    """
    width = max(NARROWEST, (console.width - len(BETWEEN)) // 2)
    if not console.is_terminal:
        lines = [row.old for change in comparison.changes for row in change.rows if row.old]
        width = max((_styled(" ", line).cell_len for line in lines), default=NARROWEST)
    for change in comparison.changes:
        _print_title(console, change)
        known = (reasons or {}).get(change.name, ())
        for id, why in known:
            if id or change.name != RETUNED:  # a step's stands at the top
                why = f"{id}: {why}" if id else why
                _print_wrapped(console, why, "italic", before=REASON)
        unexplained = reasons is not None and change.name not in reasons
        if owners and unexplained and _has_reason(change.name):
            console.print(Text(f"  reasons: --steps --blocks {change.name}", style=FAINT))
        named = known and owners and len(owners.of(change.rows)) == 1  # by its reason
        for hunk in hunks(change.rows):
            if hunk[0][0] == FOLDED:
                console.print(Text(f"  {folded_line(hunk[0][1])}", style=FAINT))
                continue
            if owners and not named:
                ids = ", ".join(m.id for m in owners.of(row for _, rows in hunk for row in rows))
                console.print(Text(f"  by {ids}", style=FAINT))
            lines = [line for kind, rows in hunk
                     for line in _passage(console, kind, rows, width if in_columns else None)]
            console.print(Text("\n").join(lines))  # one by one takes long


def _passage(console, kind, rows, width):
    """The lines to print of rows of one kind, in two columns if the left one's width is given."""
    signs = (REMOVED, ADDED) if kind == CHANGED else (kind, kind)
    if width:
        return _beside(console, signs, rows, width)
    lines = [(REMOVED, row.old) for row in rows if kind == CHANGED and row.old]
    lines += [(signs[1], row.new) for row in rows if row.new]
    return [part for sign, line in lines
            for part in _parts(console, _styled(sign, line), line.text)]


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
    renamed = len({version.change.name for version in versions}) > 1
    for chain, some in groupby(versions, lambda version: version.milestone.chain):
        console.print(Text(f"{chain}\n", style=FAINT))
        for version in some:
            m = version.milestone
            _print_idea(console, f"{m.id} {m.title}.", m)
            if stat:
                name = f"{version.change.name}: " if renamed else ""
                console.print(f"  {name}{version.change.fate}")
            else:
                print_changes(console, Difference((version.change,)))
                console.print()


def _print_title(console, change):
    """A block's name, what happened to it, and its place."""
    place = f"  {change.fate}  ({change.place})"
    console.print(Text.assemble(("\n── ", FAINT), (change.name, "bold cyan"), place))


def _print_idea(console, title, milestone, *more):
    """Prints a title, the milestone's idea and more, wrapped."""
    text = Text.assemble((f"{title} ", "bold"), milestone.idea, *more)
    for line in text.wrap(console, max(NARROWEST, min(console.width, WIDE))):
        line.rstrip()
        console.print(line)


def _briefly(change):
    """A change in few words: heading Kernels (+1), card (+7 -5)."""
    name = change.name.replace("heading: ", "heading ")
    added, removed, _ = counts(change.rows)
    lines = [f"+{added}"] * bool(added) + [f"-{removed}"] * bool(removed)
    return f"{name} ({' '.join(lines) or change.fate})"


def _has_reason(name):
    """Whether changes of such a block are explained."""
    return name not in UNCOUNTED and not name.startswith("heading: ")


def _print_wrapped(console, text, style="", indent=2, before=""):
    """Prints a sentence, indented, on lines that a terminal need not break, each behind `before`;
    no formula is split."""
    text = WITHIN_FORMULA.sub(NO_BREAK, text)
    for line in wrap(text, max(NARROWEST, min(console.width, WIDE) - indent - len(before))):
        line = visible(line.replace(NO_BREAK, " "))
        console.print(Text.assemble(" " * indent, (before, FAINT), (line, style)))


def _parts(console, text, code):
    """The lines to print of a styled line of code; what a terminal has no room for goes on below,
    behind the same sign, further to the right."""
    text.expand_tabs(TAB)
    sign, indent, parts = text[:2], len(code) - len(code.lstrip()) + SPILLED, []
    indent = min(indent, console.width // 2)
    while console.is_terminal and text.cell_len > console.width:
        spaces = [i for i, c in enumerate(text.plain[: console.width + 1]) if c == " "]
        end = max((i for i in spaces if i > indent + 2), default=console.width)
        line, text = text[:end], text[end:]
        parts.append(line)
        rest = text[len(text.plain) - len(text.plain.lstrip()) :]
        text = Text.assemble(sign, " " * (indent - len(ON)), (ON, FAINT), rest)
    return [*parts, text]


def _styled(sign, line):
    """A line behind its sign, with the changed words marked; a moved one has a sign of its own."""
    if line.moved:
        sign = AWAY if sign == REMOVED else HERE
    text = Text(f"{sign} {visible(line.text)}" if line.text else sign.strip(), style=STYLES[sign])
    for start, end in line.spans:
        text.stylize(CHANGED_WORDS, start + 2, end + 2)
    return text


def _beside(console, signs, rows, width):
    """The lines to print of rows in two columns, the left one `width` wide."""
    lines = []
    for row in rows:
        sides = []
        for sign, line in zip(signs, (row.old, row.new), strict=True):
            text = _styled(sign, line) if line else Text()
            text.expand_tabs(TAB)
            sides.append(text.divide(range(width, len(text), width) if console.is_terminal else ()))
        for left, right in zip_longest(*sides, fillvalue=Text()):
            whole = Text.assemble(left, " " * (width - left.cell_len), (BETWEEN, FAINT), right)
            whole.rstrip()
            lines.append(whole)
    return lines


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
        room = max(NARROWEST, console.width - width - 4)
        start = f"  {name:<{width}}  "
        for line in Text.assemble(*sides, (behind, FAINT)).wrap(console, room):
            line.rstrip()
            console.print(Text.assemble(start, line))
            start = " " * len(start)


def _print_unified(console, texts, names, starts):
    """Prints the unified diff of two texts that begin in the lines `starts` of their files."""
    a, b = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in texts)
    styles = {"+": STYLES[ADDED], "-": STYLES[REMOVED], "@": "cyan"}
    for number, line in enumerate(unified_diff(a, b, *names)):
        if line.startswith("@@"):
            numbers = zip("-+", re.findall(r"[-+](\d+)", line), starts, strict=True)
            for sign, first, start in numbers:
                line = line.replace(sign + first, f"{sign}{int(first) + start - 1}", 1)
        end = "" if line.endswith("\n") else "\n\\ No newline at end of file\n"
        if console.is_terminal:
            style = "bold" if number < 2 else styles.get(line[0], "")
            console.print(Text(visible(line + end), style=style), end="")
        else:  # untouched: rich would replace tabs
            console.file.write(line + end)
