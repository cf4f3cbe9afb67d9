"""Writes a comparison as one page of HTML that needs nothing else, no network either."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from speedrun.base.errors import UserError
from speedrun.base.files import replace_file
from speedrun.base.text import number_ranges, visible
from speedrun.diff.align import INDENTED, Line, runs, shown
from speedrun.diff.difference import Change, Difference
from speedrun.diff.facts import Side, moved_figures, moved_hyperparameters, told_by
from speedrun.diff.time import Timing, timing_table
from speedrun.diff.words import gap_line, no_change_line, summary_line, what, where

PAGE = Path(__file__).with_name("page.html")
CONTEXT = 3
# Token types and the class of their colour in the page; the first that fits counts.
COLOURS = [
    (Comment, "c"), (String, "s"), (Number, "m"), (Keyword, "k"), (Operator.Word, "k"),
    (Name.Function, "n"), (Name.Class, "n"), (Name.Decorator, "n"),
]


def check_target(path: Path, sources: Iterable[Path]) -> None:
    """Raises UserError, one line, if a page cannot be written to `path`, which must not be one of
    the sources."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"--html {path}: there is no folder {path.absolute().parent}")
    if path.exists() and not path.is_file():
        raise UserError(f"--html {path}: it exists and is no regular file")
    if path.exists() and any(path.samefile(source) for source in sources):
        raise UserError(f"--html {path}: that is one of the files to compare")


def write_page(
    path: Path, old: Side, new: Side, comparison: Difference, timings: Sequence[Timing] = ()
) -> None:
    """Writes the page, all of it or nothing. Raises UserError if that fails."""
    text = make_page(old, new, comparison, timings)
    replace_file(path.resolve(), text.encode())  # a link stays one


def make_page(
    old: Side, new: Side, comparison: Difference, timings: Sequence[Timing] = ()
) -> str:
    """The text of the page."""
    changes = comparison.changes
    summary = no_change_line(old, new, comparison) or summary_line(comparison)
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=_text(f"{old.name} → {new.name}"),
        head=_head(old, new, timings),
        summary=_text(summary),
        index="\n".join(
            f'<li><a href="#b{i}">{_text(change.name)}</a>'
            f' <span class="faint">{_text(what(change))}</span></li>'
            for i, change in enumerate(changes, start=1)
        ),
        blocks="\n".join(_section(i, change) for i, change in enumerate(changes, start=1)),
    )


def _head(old, new, timings):
    parts = []
    for m in told_by(old, new):
        records = f' <span class="faint">{number_ranges(m.records)}</span>' if m.records else ""
        title = _text(f"{m.id} {m.title}.")
        parts.append(f"<p><strong>{title}</strong> {_text(m.idea)}{records}</p>")
    official = "Official figures" if old.milestone and new.milestone else "Figures"
    tables = [
        _moved_table(official, moved_figures(old, new)),
        _moved_table("Hyperparameters", moved_hyperparameters(old, new)),
    ]
    parts.append('<div class="facts">' + "".join(tables) + "</div>")
    if timings:
        caption, rows = timing_table(timings)
        cells = ["".join(f"<td>{_text(cell)}</td>" for cell in row)
                 for row in zip(*rows, strict=True)]
        parts.append(f'<h2>Timing</h2><div class="wide"><table><caption>{_text(caption)}</caption>'
                     + "".join(f"<tr>{row}</tr>" for row in cells) + "</table></div>")
    return "\n".join(parts)


def _moved_table(title, rows):
    if not rows:
        return ""
    lines = []
    for name, old, new in rows:
        if old is None or new is None:
            fate = "added" if old is None else "removed"
            change = f'{_text(old or new)} <span class="faint">{fate}</span>'
        else:
            change = f"{_text(old)} → {_text(new)}"
        lines.append(f'<tr><th scope="row">{_text(name)}</th><td>{change}</td></tr>')
    return f"<div><h2>{title}</h2><table>{''.join(lines)}</table></div>"


def _section(number: int, change: Change) -> str:
    colours = [highlight([side for row in change.rows if (side := getattr(row, name))])
               for name in ("old", "new")]
    cells, line = [], 0
    for kind, group in runs(shown(change.rows, CONTEXT)):
        if kind == "gap":
            line += 1
            cells.append(f'<div class="gap" style="--r:{line}">{_text(gap_line(group[0]))}</div>')
            continue
        # The order is that of a narrow screen: old lines, then new ones. --r is the row of a
        # wide one.
        style = dict(same=("same", "same", " ", " "), changed=("old", "new", "-", "+"),
                     indented=("same", "moved", " ", INDENTED))[kind]
        for side in (0, 1):
            for i, row in enumerate(group, start=line + 1):
                if text := (row.old, row.new)[side]:
                    cells.append(_cell("lr"[side], style[side], style[side + 2], i, text,
                                       colours[side][id(text)]))
        line += len(group)
    rows = f'\n<div class="rows">\n{chr(10).join(cells)}\n</div>' if cells else ""
    return (f'<section id="b{number}" tabindex="-1"><h2>{_text(change.name)}'
            f"<span>{_text(what(change))}, {_text(where(change))}</span></h2>{rows}\n</section>")


def _cell(side, kind, sign, row, line, pieces):
    """A line on one side, its words in colour and the changed ones marked."""
    code, start = [], 0
    for colour, text in pieces:
        for piece, marked in _cut(text, start, line.spans):
            inner = _text(piece)
            if colour:
                inner = f'<span class="{colour}">{inner}</span>'
            code.append(f"<mark>{inner}</mark>" if marked else inner)
        start += len(text)
    text = "".join(code).replace("</mark><mark>", "")
    return (f'<div class="{side} {kind}" style="--r:{row}"><b>{line.number or ""}</b>'
            f"<i>{_text(sign.strip())}</i><code>{text}</code></div>")


def _cut(text, start, spans):
    """(piece, whether it is in one of the spans) of a text that begins at `start` in its line."""
    bounds = sorted({0, len(text), *(min(max(bound - start, 0), len(text))
                                     for span in spans for bound in span)})
    for a, b in zip(bounds, bounds[1:], strict=False):
        yield text[a:b], any(first <= start + a < last for first, last in spans)


def _text(text):
    return escape(visible(text))


def highlight(lines: Sequence[Line]) -> dict[int, list[tuple[str, str]]]:
    """For the id() of each line its text in pieces, (class of the colour or "", text); the lines
    are read as one program."""
    pieces, i = {id(line): [] for line in lines}, 0
    program = "\n".join(line.text for line in lines)
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    for kind, text in lexer.get_tokens(program):
        colour = next((name for type, name in COLOURS if kind in type), "")
        first, *rest = text.split("\n")
        if first:
            pieces[id(lines[i])].append((colour, first))
        for part in rest:
            i += 1
            if part:
                pieces[id(lines[i])].append((colour, part))
    return pieces
