"""Makes of a comparison one page of HTML that needs nothing else, no network either."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from speedrun.base.errors import UserError
from speedrun.base.files import check_output
from speedrun.base.text import number_ranges, visible
from speedrun.compare.results import Comparison
from speedrun.compare.table import columns, notes
from speedrun.diff.align import CHANGED, FOLDED, INDENTED, SAME, folded_line, passages
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side, changed_values, ideas_between, summary_line

PAGE = "page.html"
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


def make_page(
    old: Side, new: Side, comparison: Difference, runs: Comparison | None = None
) -> str:
    """The text of the page; runs: of both scripts, if the page is to show them."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)))
    return pages.get_template(PAGE).render(
        title=f"{old.name} → {new.name}", ideas=ideas_between(old, new),
        values=changed_values(old, new), timing=columns(runs) if runs else {},
        notes=notes(runs) if runs else (), summary=summary_line(old, new, comparison),
        changes=comparison.changes, cells=_cells, number_ranges=number_ranges)


def _cells(change: Change) -> Iterator[tuple[str, int, str, int | None, Markup | str]]:
    """(classes, row, sign, line number, code) of each line of a block, as cells of a grid, the row
    being theirs on a wide screen; without a number, the note on lines that are not shown.

    Their order is that of a narrow screen, which has one column: old lines, then new ones.
    """
    codes = [_coloured([line for row in change.rows if (line := getattr(row, side))])
             for side in ("old", "new")]
    place = 1
    for kind, rows in passages(change.rows):
        if kind == FOLDED:
            yield "gap", place, "", None, folded_line(rows)
            place += 1
            continue
        for side, code, (look, sign) in zip("lr", codes, LOOKS[kind], strict=True):
            for i, row in enumerate(rows, start=place):
                if line := (row.old if side == "l" else row.new):
                    yield f"{side} {look}", i, sign, line.number, code[line]
        place += len(rows)


def _coloured(lines):
    """{line: its text as HTML, words in colour and the changed ones marked}; the lines are read as
    one program."""
    program = "\n".join(line.text for line in lines)
    colours = []  # of each character
    for _, kind, text in PythonLexer().get_tokens_unprocessed(program):
        colour = next((name for type, name in COLOURS if kind in type), "")
        colours += [colour] * len(text)
    coloured, start = {}, 0
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
        coloured[line] = code
        start += len(line.text) + 1
    return coloured
