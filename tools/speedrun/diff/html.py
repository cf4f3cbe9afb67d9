"""Makes pages of HTML that need nothing else, no network either: a comparison, the origins of a
script's lines, the life of a block. The templates in site/ are those of the whole site."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from speedrun.base.errors import UserError
from speedrun.base.files import REPOSITORY, check_output
from speedrun.base.text import number_ranges, visible
from speedrun.compare.results import Comparison
from speedrun.compare.table import columns, notes
from speedrun.diff.align import (
    CHANGED,
    CONTEXT,
    FOLDED,
    INDENTED,
    SAME,
    Line,
    folded_line,
    passages,
)
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side, changed_values, ideas_between, summary_line
from speedrun.diff.origin import Version, count_lines
from speedrun.history.manifest import Milestone

TEMPLATES = REPOSITORY / "site"
# Token types and the class of their colour in the page; the first that fits counts.
COLOURS = [
    (Comment, "c"), (String, "s"), (Number, "m"), (Keyword, "k"), (Operator.Word, "k"),
    (Name.Function, "n"), (Name.Class, "n"), (Name.Decorator, "n"),
]
# How a group of lines looks: (class, sign) on the left and on the right.
LOOKS = {
    SAME: (("same", ""), ("same", "")), CHANGED: (("old", "-"), ("new", "+")),
    INDENTED: (("same", ""), ("moved", INDENTED)),
}


def check_target(path: Path, sources: Iterable[Path]) -> None:
    """Raises UserError, one line, if a page cannot be written to `path`, which must not be one of
    the sources."""
    check_output("--html", path)
    if path.exists() and any(path.samefile(source) for source in sources):
        raise UserError(f"--html {path}: that is one of the files to compare")


def templates() -> Environment:
    """The templates of all pages; they escape what they are given, control characters too."""
    pages = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)))
    pages.globals.update(passages=passages_of, runs=runs_of, number_ranges=number_ranges,
                         count_lines=count_lines)
    return pages


def make_page(
    old: Side, new: Side, comparison: Difference, runs: Comparison | None = None
) -> str:
    """The text of a comparison's page; runs: of both scripts, if the page is to show them."""
    return templates().get_template("diff.html").render(
        title=f"{old.name} → {new.name}", ideas=ideas_between(old, new),
        values=changed_values(old, new), timing=columns(runs) if runs else {},
        notes=notes(runs) if runs else (), summary=summary_line(old, new, comparison),
        changes=comparison.changes)


def origin_page(milestone: Milestone, origins: Sequence[tuple[str, Milestone]]) -> str:
    """The text of the page of a script, from its line_origins."""
    return templates().get_template("script.html").render(
        layout="alone.html", milestone=milestone, origins=origins)


def life_page(name: str, versions: Sequence[Version]) -> str:
    """The text of the page of a block, from its block_life."""
    return templates().get_template("block.html").render(
        layout="alone.html", name=name, versions=versions)


def passages_of(change: Change, context: int = CONTEXT) -> Iterator[tuple[str, list]]:
    """(note, cells) of each passage of a block; with a note, its lines need not be shown: they are
    further than `context` lines from a change.

    Cells are (classes, row, sign, line number, code), the row being theirs on a wide screen. Their
    order is that of a narrow screen, which has one column: old lines, then new ones.
    """
    codes = [coloured(tuple(line for row in change.rows if (line := getattr(row, side))))
             for side in ("old", "new")]
    for kind, rows in passages(change.rows, context):
        note = folded_line(rows) if kind == FOLDED else ""
        cells = []
        for side, code, (look, sign) in zip("lr", codes, LOOKS[rows[0].mark if note else kind],
                                            strict=True):
            cells += [(f"{side} {look}", i, sign, line.number, code[line])
                      for i, row in enumerate(rows, start=1)
                      if (line := row.old if side == "l" else row.new)]
        yield note, cells


def runs_of(
    origins: Sequence[tuple[str, Milestone]]
) -> Iterator[tuple[Milestone, list[tuple[int, Markup]]]]:
    """(milestone, its lines in a row as (number, code)) through a script, from its line_origins."""
    lines = tuple(Line(number, text) for number, (text, _) in enumerate(origins, start=1))
    code = coloured(lines)
    numbered = zip(lines, (m for _, m in origins), strict=True)
    for m, some in groupby(numbered, itemgetter(1)):
        yield m, [(line.number, code[line]) for line, _ in some]


@cache
def coloured(lines: tuple[Line, ...]) -> dict[Line, Markup]:
    """{line: its text as HTML, words in colour and the changed ones marked}; the lines are read as
    one program."""
    program = "\n".join(line.text for line in lines)
    colours = []  # of each character
    for _, kind, text in PythonLexer().get_tokens_unprocessed(program):
        colour = next((name for type, name in COLOURS if kind in type), "")
        colours += [colour] * len(text)
    found, start = {}, 0
    for line in lines:
        marks = [any(a <= i < b for a, b in line.spans) for i in range(len(line.text))]
        letters = zip(line.text, marks, colours[start : start + len(line.text)], strict=True)
        code = Markup()
        for marked, words in groupby(letters, itemgetter(1)):
            inner = Markup()
            for colour, word in groupby(words, itemgetter(2)):
                text = escape(visible("".join(letter for letter, *_ in word)))
                span = Markup('<span class="{}">{}</span>') if colour else Markup("{1}")
                inner += span.format(colour, text)
            code += Markup("<mark>{}</mark>").format(inner) if marked else inner
        found[line] = code
        start += len(line.text) + 1
    return found
