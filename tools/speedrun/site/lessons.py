"""Makes pages of notebooks, with the outputs that they hold; nothing is run."""

import re
from base64 import b64decode
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import nbformat
from markupsafe import Markup
from nbconvert import HTMLExporter, TemplateExporter
from nbconvert.preprocessors import ExtractOutputPreprocessor

from speedrun.figures.themed import PAPER_GROUP
from speedrun.site.models import in_page
from speedrun.site.text import code_html, make_html

WORDS, LINES = 100, 20  # of text and of code that a reader takes in per minute
SHOWN = ("text/plain", "text/markdown", "image/png", "image/jpeg", "image/svg+xml")
LINKS = ("data:image/png", "https:")  # of a picture's elements, apart from relative ones
SIZE = re.compile(rb"IHDR(.{4})(.{4})", re.S)
HEADING = re.compile(r'<h2 id="([^"]+)">(.+?)</h2>')
CONTENTS = re.compile(r"<p><strong>Contents</strong>.*?</p>", re.S)
LINK = re.compile(r'<a href="([^"]+)">(.*?)</a>', re.S)
ID, AT = re.compile(' id="([^"]+)"'), re.compile(r' id="|href="#|url\(#')
SETUP = re.compile(r'(celltag_setup[^>]*>\s*)(<div class="input">.*?</pre>(?:\s*</div>){3})', re.S)


@dataclass(frozen=True)
class Lesson:
    """A notebook: its text as HTML, its pictures {name: PNG}."""

    html: Markup
    pictures: dict[str, bytes]


@cache
def lesson_title(path: Path) -> str:
    """The first heading of a notebook, its file's name without one."""
    for cell in _read(path).cells:
        if found := re.search(r"^# (.+)$", cell.source, re.M):
            return found[1].strip()
    return path.stem


@cache
def lesson_minutes(path: Path) -> int:
    """The minutes that a notebook takes to read, to five, by its words and its lines of code."""
    words = sum(len(c.source.split()) for c in _read(path).cells if c.cell_type == "markdown")
    lines = sum(len(c.source.split("\n")) for c in _read(path).cells if c.cell_type == "code")
    return max(5, 5 * round((words / WORDS + lines / LINES) / 5))


@cache
def lesson_headings(path: Path) -> list[str]:
    """The headings of a notebook below its title."""
    text = "\n\n".join(c.source for c in _read(path).cells if c.cell_type == "markdown")
    return re.findall(r"^##+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)


@dataclass(frozen=True)
class Claim:
    """What a lesson's claim cell prints, and its pictures: SVG, and addresses of PNG files, whose
    data are in files."""

    text: str
    drawn: list[Markup]
    images: list[str]
    files: dict[str, bytes]


def claims_of(path: Path, id: str, is_own: bool) -> list[Claim]:
    """The Claims of the cells that a notebook tags `claim:<id>`, and, for the milestone that the
    notebook is named after, `claim`."""
    wanted = {f"claim:{id}"} | ({"claim"} if is_own else set())
    found = []
    for number, cell in enumerate(_read(path).cells):
        if not wanted & set(cell.metadata.get("tags", ())):
            continue
        text, drawn, files = "", [], {}
        for index, output in enumerate(cell.get("outputs", ())):
            data = output.get("data", {})
            if svg := data.get("image/svg+xml"):
                drawn.append(in_page(svg))
            elif png := data.get("image/png"):
                files[f"lessons/{path.stem}_files/{number}_{index}.png"] = b64decode(png)
            elif output.output_type == "stream" and output.name == "stdout":
                text += output.text
            elif plain := data.get("text/plain"):
                text += plain
        found.append(Claim(text.strip(), drawn, list(files), files))
    return [claim for claim in found if claim.text or claim.drawn or claim.images]


def make_lesson(path: Path, target: Callable[[str], str | None]) -> Lesson:
    """The Lesson of a notebook; target: as for make_html."""
    notebook, taken = deepcopy(_read(path)), set()
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    for number, output in enumerate(outputs):
        if svg := output.get("data", {}).get("image/svg+xml"):
            svg, ids = _with_pages(svg, target), set(ID.findall(svg))
            if ids & taken:  # of a picture that is shown twice, or of its like
                svg = AT.sub(rf"\g<0>o{number}-", svg)
            taken |= ids
            kind = "drawn" if f'class="{PAPER_GROUP}"' in svg else "model"
            output.data = {"text/html": Markup('<div class="{}" tabindex="0">{}</div>').format(
                kind, in_page(svg))}
    # HTMLExporter's own method would parse the page again, for the texts that `picture` writes.
    body, resources = TemplateExporter.from_notebook_node(
        _exporter(target), notebook,
        resources={"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"})
    pictures = {Path(name).name: data for name, data in resources["outputs"].items()}
    sections = {}  # {picture: the heading above it}
    heading = lesson_title(path)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown" and (found := re.findall(r"^#+ (.+)$", cell.source, re.M)):
            heading = found[-1]
        sections[str(number)] = heading

    def picture(found):
        name = Path(found[1]).name
        size = SIZE.search(pictures.get(name, b""))
        width, height = (int.from_bytes(part) for part in size.groups()) if size else (0, 0)
        known = Markup(' width="{}" height="{}"').format(width, height) if size else ""
        words = f"A picture of: {sections.get(name.partition('_')[0], heading)}"
        return Markup('<img src="{}_files/{}" alt="{}"{} loading="lazy">').format(
            path.stem, name, words, known)

    body = re.sub(r' id="cell-id=[^"]*"', "", body)
    body = body.replace("<pre>", '<pre tabindex="0">')  # it scrolls, so a keyboard must reach it
    body = SETUP.sub(r'\1<details class="setup"><summary>Set-up code</summary>\2</details>', body)
    body = re.sub(r'<img\s[^>]*?src="([^"]+)"[^>]*>', picture, body)
    return Lesson(Markup(_with_links(body)), pictures)


def _with_pages(svg, target):
    """A picture whose links to scripts, relative to history/, lead to their milestones' pages; one
    without a page is no link."""
    def led(link):
        page = target(f"../history/{re.sub('/[^/]+[.]py$', '', link[1])}")
        return f'<a href="{page}">{link[2]}</a>' if page else link[2]

    return LINK.sub(led, svg)


def _with_links(body):
    """A lesson whose list of contents leads to its headings."""
    def linked(contents):
        text = contents[0]
        for at, heading in HEADING.findall(body):
            words = r"\s+".join(map(re.escape, heading.split()))
            text = re.sub(rf"(?<=[:·]\s){words}(?=\s\d)", rf'<a href="#{at}">\g<0></a>', text)
        return text

    return CONTENTS.sub(linked, body, count=1)


@cache
def _exporter(target):
    exporter = HTMLExporter(template_name="basic", embed_images=False, filters={
        "markdown2html": lambda source, **_: make_html(source, target),
        "markdown2html_mistune": lambda source, **_: make_html(source, target),
        "highlight_code": lambda source, **_: code_html(source)})
    exporter.register_preprocessor(
        ExtractOutputPreprocessor(output_filename_template="{cell_index}_{index}{extension}"),
        enabled=True)
    return exporter


@cache
def _read(path):
    """A notebook whose outputs are text and pictures, with nothing that a browser would run."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type != "raw"]
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        if data := output.get("data"):
            svg = data.get("image/svg+xml", "")
            kept = {kind: content for kind, content in data.items()
                    if kind in SHOWN and (kind != "image/svg+xml" or _is_still(svg))}
            output.data = kept or {"text/plain": svg or data.get("text/html", "(not shown)")}
    return notebook


def _is_still(svg):
    """Whether a picture draws and does nothing else."""
    try:
        elements = [*ElementTree.fromstring(svg).iter()]
    except ElementTree.ParseError:
        return False
    local = re.compile(r"\{.*\}")
    for element in elements:
        if local.sub("", element.tag).lower() in ("script", "foreignobject", "iframe"):
            return False
        for name, value in ((local.sub("", k).lower(), v) for k, v in element.items()):
            is_link = name == "href" and ":" in re.split("[/?#]", value)[0]
            if name.startswith("on") or is_link and not value.startswith(LINKS):
                return False
    return True
