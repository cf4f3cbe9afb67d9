"""Makes pages of HTML that need nothing else, no network either: a comparison, the origins of a
script's lines, the life of a block. The templates in site/ are those of the whole site."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, groupby, pairwise
from operator import itemgetter

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from speedrun.base.files import REPOSITORY
from speedrun.base.text import number_ranges, visible
from speedrun.compare.results import Comparison
from speedrun.compare.table import columns, notes
from speedrun.diff.align import (
    AWAY,
    CHANGED,
    CONTEXT,
    FOLDED,
    HERE,
    INDENTED,
    SAME,
    Line,
    folded_line,
    hunks,
)
from speedrun.diff.arrange import arrange
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import (
    Side,
    changed_values,
    gained,
    gained_briefly,
    not_comparable,
    summary_line,
)
from speedrun.diff.origin import Owners, Version, count_lines
from speedrun.history.blocks import RETUNED, split_blocks
from speedrun.history.carries_over import load_outside
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


def templates() -> Environment:
    """The templates of all pages; they escape what they are given, control characters too."""
    pages = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)))
    pages.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    pages.globals.update(passages=passages_of, runs=runs_of, number_ranges=number_ranges,
                         count_lines=count_lines, retuned=RETUNED)
    return pages


def make_page(
    old: Side, new: Side, comparison: Difference, runs: Comparison | None = None
) -> str:
    """The text of a comparison's page; runs: of both scripts, if the page is to show them."""
    details, outside, ideas = gained(old, new), load_outside(), gained_briefly(old, new)
    return templates().get_template("diff.html").render(
        title=f"{old.name} → {new.name}", ideas=ideas, gained=details,
        apart=not_comparable(old, new) if len(ideas) > 1 else (),
        outside=[idea for _, m, _ in ideas for idea in outside.of(m.id)],
        values=changed_values(old, new), timing=columns(runs) if runs else {},
        notes=notes(runs) if runs else (), summary=summary_line(old, new, comparison),
        arranged=arrange(old, new, comparison))


def origin_page(milestone: Milestone, origins: Sequence[tuple[str, Milestone]]) -> str:
    """The text of the page of a script, from its line_origins."""
    return templates().get_template("script.html").render(
        layout="alone.html", milestone=milestone, origins=origins)


def life_page(name: str, versions: Sequence[Version]) -> str:
    """The text of the page of a block, from its block_life."""
    return templates().get_template("block.html").render(
        layout="alone.html", name=name, count=len(versions), versions=versions)


def passages_of(
    change: Change, context: int = CONTEXT, owners: Owners | None = None
) -> Iterator[tuple[str, list, list[Milestone]]]:
    """(note, cells, who changed it) of each passage of a block; with a note, its lines need not be
    shown: they are further than `context` lines from a change. Of the passages of a hunk the first
    names the owners.

    Cells are (classes, row, sign, line number, code), the row being theirs on a wide screen. Their
    order is that of a narrow screen, which has one column: old lines, then new ones.
    """
    codes = []
    for side in ("old", "new"):
        lines = [line for row in change.rows if (line := getattr(row, side))]
        codes.append({line.number: c for line, c in zip(lines, coloured(lines), strict=True)})
    for hunk in hunks(change.rows, context):
        by = owners.of(row for _, rows in hunk for row in rows) if owners else []
        for kind, rows in hunk:
            note = folded_line(rows) if kind == FOLDED else ""
            cells = []
            for side, code, (look, sign) in zip(
                    "lr", codes, LOOKS[rows[0].mark if note else kind], strict=True):
                for i, row in enumerate(rows, start=1):
                    line = row.old if side == "l" else row.new
                    if line:
                        went = AWAY if side == "l" else HERE
                        cells.append((f"{side} {look}" + " went" * line.moved, i,
                                      went if line.moved else sign, line.number,
                                      code[line.number]))
            yield note, cells, by
            by = []


def runs_of(
    origins: Sequence[tuple[str, Milestone]]
) -> Iterator[tuple[Milestone, list[tuple[int, Markup]]]]:
    """(milestone, its lines in a row as (number, code)) through a script, from its line_origins.
    Blank lines belong to the lines before them."""
    lines = [Line(number, text) for number, (text, _) in enumerate(origins, start=1)]
    blocks = split_blocks("\n".join(line.text for line in lines))  # most are other scripts' too
    starts = sorted({0, *(block.line - 1 for block in blocks)})
    codes = [code for start, end in pairwise([*starts, len(lines)])
             for code in coloured(lines[start:end])]
    owners = [origins[0][1]] if origins else []
    for text, m in origins[1:]:
        owners.append(m if text.strip() else owners[-1])
    numbered = zip(count(1), codes, owners, strict=False)
    for m, some in groupby(numbered, itemgetter(2)):
        yield m, [(number, code) for number, code, _ in some]


def coloured(lines: Sequence[Line]) -> list[Markup]:
    """The lines as HTML, words in colour and the changed ones marked; they are read as one
    program."""
    colours, start, found = _colours("\n".join(line.text for line in lines)), 0, []
    for line in lines:
        end = start + len(line.text)
        found.append(_coloured(line.text, colours[start:end], line.spans))
        start = end + 1
    return found


@cache
def _colours(program):
    """The class of each character's colour; a space for none."""
    return "".join(_colour(kind) * len(text)
                   for _, kind, text in PythonLexer().get_tokens_unprocessed(program))


@cache
def _colour(kind):
    return next((name for type, name in COLOURS if kind in type), " ")


@cache
def _coloured(text, colours, spans):
    marks = [any(a <= i < b for a, b in spans) for i in range(len(text))]
    code = Markup()
    for marked, words in groupby(zip(text, marks, colours, strict=True), itemgetter(1)):
        inner = Markup()
        for colour, word in groupby(words, itemgetter(2)):
            shown = escape(visible("".join(letter for letter, *_ in word)))
            inner += shown if colour == " " else Markup(f'<span class="{colour}">{shown}</span>')
        code += Markup("<mark>{}</mark>").format(inner) if marked else inner
    return code
