"""Makes of a comparison one page of HTML that needs nothing else, no network either."""

from collections.abc import Iterable
from html import escape
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from string import Template

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from speedrun.base.errors import UserError
from speedrun.base.files import check_output
from speedrun.base.text import number_ranges, visible
from speedrun.compare.results import Comparison
from speedrun.compare.table import columns, notes
from speedrun.diff.align import CHANGED, FOLDED, INDENTED, SAME, passages
from speedrun.diff.difference import Difference
from speedrun.diff.facts import Side, moved, told_by
from speedrun.diff.words import folded_line, summary_line, what, where

PAGE = Path(__file__).with_name("page.html")
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
    """The text of the page; runs: of both scripts, if they are to stand in it."""
    ideas, index, blocks = [], [], []
    for title, m in told_by(old, new):
        records = f' <span class="faint">{number_ranges(m.records)}</span>' if m.records else ""
        ideas.append(f"<p><strong>{_text(title)}</strong> {_text(m.idea)}{records}</p>")
    for i, change in enumerate(comparison.changes, start=1):
        name, fate = _text(change.name), _text(what(change))
        index.append(f'<li><a href="#b{i}">{name}</a> <span class="faint">{fate}</span></li>')
        blocks.append(f'<section id="b{i}" tabindex="-1"><h2>{name}<span>{fate},'
                      f" {_text(where(change))}</span></h2>{_rows(change)}\n</section>")
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=_text(f"{old.name} → {new.name}"),
        ideas="\n".join(ideas),
        moved="".join(_moved_table(title, rows) for title, rows in moved(old, new).items()),
        timing=_timing(runs) if runs else "",
        summary=_text(summary_line(old, new, comparison)),
        index="\n".join(index),
        blocks="\n".join(blocks),
    )


def _moved_table(title, rows):
    lines = []
    for name, old, new in rows:
        fate = "added" if old is None else "removed" if new is None else ""
        sides = " → ".join(_text(side) for side in (old, new) if side is not None)
        lines.append(f'<tr><th scope="row">{_text(name)}</th>'
                     f'<td>{sides} <span class="faint">{fate}</span></td></tr>')
    return f"<div><h2>{title.capitalize()}</h2><table>{''.join(lines)}</table></div>"


def _timing(runs):
    lines = []
    for head, cells in columns(runs).items():
        figures = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{_text(head)}</th>{figures}</tr>')
    remarks = "".join(f'<p class="faint">{_text(note)}</p>' for note in notes(runs))
    return f'<h2>Timing</h2><div class="wide"><table>{"".join(lines)}</table></div>{remarks}'


def _rows(change):
    """The lines of a block as cells of a grid, --r being their row on a wide screen.

    Their order is that of a narrow one, which has one column: old lines, then new ones.
    """
    codes = [_coloured([line for row in change.rows if (line := getattr(row, side))])
             for side in ("old", "new")]
    cells, place = [], 1
    for kind, rows in passages(change.rows):
        if kind == FOLDED:
            text = _text(folded_line(rows))
            cells.append(f'<div class="gap" style="--r:{place}">{text}</div>')
            place += 1
            continue
        for side, code, (look, sign) in zip("lr", codes, LOOKS[kind], strict=True):
            for i, row in enumerate(rows, start=place):
                if line := (row.old if side == "l" else row.new):
                    cells.append(f'<div class="{side} {look}" style="--r:{i}"><b>{line.number}</b>'
                                 f"<i>{_text(sign)}</i><code>{code[line]}</code></div>")
        place += len(rows)
    return f'\n<div class="rows">\n{chr(10).join(cells)}\n</div>' if cells else ""


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
        code = ""
        for (marked, colour), group in groupby(letters, itemgetter(1, 2)):
            inner = _text("".join(letter for letter, *_ in group))
            if colour:
                inner = f'<span class="{colour}">{inner}</span>'
            code += f"<mark>{inner}</mark>" if marked else inner
        coloured[line] = code.replace("</mark><mark>", "")
        start += len(line.text) + 1
    return coloured


def _text(text):
    return escape(visible(text))
