"""Makes HTML of the repository's Markdown: links lead to pages of the site, formulas are MathML."""

import posixpath
import re
from collections.abc import Callable

import latex2mathml.converter
import mistune
from markupsafe import Markup, escape
from mistune.plugins.math import math
from mistune.plugins.table import table

from speedrun.base.errors import UserError
from speedrun.diff.align import Line
from speedrun.diff.html import coloured

# A formula's words, characters that stand for &, < and > in them, and what MathML consists of.
IN_TEXT = re.compile(r"\\(?:text\w*|[mhf]box)\s*\{[^{}]*\}")
HIDE = dict(zip(map(ord, "&<>"), "\ue000\ue001\ue002", strict=True))
MATHML = re.compile(r'</?m[a-z]+(?: (?!on|href|style)[A-Za-z-]+="[^"<>]*")* ?/?>')
HEADING = re.compile(r"^(#+) (.+)$", re.M)
FORMULA = r"^ {0,3}\$\$(?P<formula>[^$]+?)\$\$[ \t]*(?:\n|$)"  # of one line or several
UNMEASURED = {"not measured", "—", ""}


def code_html(source: str, language: str = "python") -> Markup:
    """A program as HTML; other languages stay without colours."""
    if language not in ("python", "py", "ipython3", "ipython"):
        return Markup('<pre tabindex="0"><code>{}</code></pre>').format(source)
    lines = [Line(number, text) for number, text in enumerate(source.split("\n"), start=1)]
    return Markup('<pre tabindex="0"><code>{}</code></pre>').format(
        Markup("\n").join(coloured(lines)))


class Renderer(mistune.HTMLRenderer):
    """Links go through `target`, which returns an address or None for what the site lacks."""

    def __init__(self, target: Callable[[str], str | None]):
        super().__init__(escape=True)
        self.target = target

    def link(self, text, url, title=None):
        found = self.target(url)
        return text if found is None else f'<a href="{escape(self.safe_url(found))}">{text}</a>'

    def image(self, text, url, title=None):
        return ""  # pages draw their own

    def heading(self, text, level, **attrs):
        at = f' id="{anchor(re.sub("<[^>]+>", "", text))}"' if level > 1 else ""
        return f"<h{level}{at}>{text}</h{level}>\n"

    def block_code(self, code, info=None):
        return str(code_html(code.rstrip("\n"), (info or "").strip() or "text")) + "\n"


def anchor(heading: str) -> str:
    """The id of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def make_html(text: str, target: Callable[[str], str | None]) -> Markup:
    """The HTML of a Markdown text; HTML in it is shown as text."""
    markdown = mistune.create_markdown(renderer=Renderer(target), plugins=[table, math])
    # The plugin's own rule ends at a line's end: a later line that begins with + would be a list.
    markdown.block.register("block_math", FORMULA, _block_formula, before="list")
    markdown.renderer.register("inline_math", lambda _, text: _formula(text, "inline"))
    markdown.renderer.register("block_math", lambda _, text: _formula(text, "block"))
    found = markdown(re.sub(r"<!-- (begin|end) [\w-]+ -->\n?", "", text))
    found = re.sub(r"<thead>\s*<tr>\s*(<th[^>]*></th>\s*)+</tr>\s*</thead>\n", "", found)
    found = re.sub(r"<td>(\d{4}(?:-\d\d)+)</td>", r'<td class="value">\1</td>', found)  # a date
    found = re.sub(r"(<table>.*?</table>)", r'<div class="scroll" tabindex="0">\1</div>', found,
                   flags=re.S)
    return Markup(found)


def make_inline(text: str, target: Callable[[str], str | None]) -> Markup:
    """The HTML of a Markdown paragraph, without the paragraph."""
    return make_html(text, target).strip().removeprefix("<p>").removesuffix("</p>")


def _block_formula(block, match, state):
    state.append_token({"type": "block_math", "raw": match["formula"]})
    return match.end()


def convert(formula: str, display: str) -> str:
    """A formula as MathML, without what a browser would run: the converter copies text such as
    \\text{<b>} as it is. Raises ValueError for a formula with an active part, and what the
    converter raises for one that it cannot read."""
    hidden = IN_TEXT.sub(lambda found: found[0].translate(HIDE), formula)
    found = latex2mathml.converter.convert(hidden, display=display)
    for place, entity in zip(HIDE.values(), ("&amp;", "&lt;", "&gt;"), strict=True):
        found = found.replace(place, entity)
    if set("<>") & set(MATHML.sub("", found)):
        raise ValueError("it holds a link, a style or HTML")
    return found


def _formula(text, display):
    try:
        found = convert(text, display=display)
    except Exception as error:  # it has a class of its own for each of its complaints
        raise UserError(f"the formula ${text}$ cannot be read: {type(error).__name__}") from None
    if display == "inline":
        return found
    return f'<span class="formula" tabindex="0">{found}</span>\n'  # a wide one scrolls


def section(text: str, name: str, whole: bool = True) -> tuple[str, str]:
    """(heading, text) of the section of a Markdown file that holds the table called `name`; not
    whole: only the table and the paragraph before it."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    start = text.index(begin)
    heading = list(HEADING.finditer(text, 0, start))[-1]
    if not whole:
        before = text[heading.end() : start].strip().rsplit("\n\n", 1)[-1]
        return heading[2], before + "\n\n" + text[start : text.index(end)]
    after = next((found.start() for found in HEADING.finditer(text, start)
                  if len(found[1]) <= len(heading[1])), len(text))
    return heading[2], text[heading.end() : after]


def section_at(text: str, at: str) -> str:
    """The text below the heading of a Markdown file whose anchor is `at`; "" without one."""
    for found in HEADING.finditer(text):
        if anchor(found[2]) == at:
            end = next((h.start() for h in HEADING.finditer(text, found.end())
                        if len(h[1]) <= len(found[1])), len(text))
            return text[found.end() : end]
    return ""


def without_unmeasured(text: str) -> str:
    """A Markdown text whose tables have no columns in which nothing was measured."""
    return re.sub(r"(?:^\|.*\n?)+", lambda table: _measured(table[0]), text, flags=re.M)


def _measured(table):
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in table.strip().split("\n")]
    columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=False)]
    empty = {place for place, (_, _, *cells) in enumerate(columns)
             if "not measured" in cells and set(cells) <= UNMEASURED}
    if not empty or len({len(row) for row in rows}) > 1:
        return table
    return "".join("|" + "|".join(cell for place, cell in enumerate(row) if place not in empty)
                   + "|\n" for row in rows)


def svg_size(svg: str) -> str:
    """The attributes width and height of a picture, from its viewBox; "" without one."""
    found = re.search(r'viewBox="[\d.-]+ [\d.-]+ ([\d.]+) ([\d.]+)"', svg)
    return Markup(f'width="{round(float(found[1]))}" height="{round(float(found[2]))}"'
                  if found else "")


def resolve(folder: str, link: str) -> tuple[str, str]:
    """(path in the repository, anchor) of a link in a file of a folder; "" for one elsewhere."""
    path, _, at = link.partition("#")
    if re.match(r"[a-z][a-z0-9+.-]*:|//", link):
        return "", at
    return posixpath.normpath(posixpath.join(folder, path)).rstrip("/"), at
