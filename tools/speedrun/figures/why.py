"""The figures why.svg, one for each why.md. A milestone's figure is drawn by the `draw(picture)` of
the why.py in its folder, which imports nothing from tools/; here is what it draws on."""

import importlib.util
import json
import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from xml.etree import ElementTree

from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.figures.charts import LETTER, NARROW
from speedrun.figures.tables import replace_between
from speedrun.history.manifest import FIGURE, Milestone
from speedrun.history.why import Why
from speedrun.scripts.find import load_snapshot

DIGIT = 16  # width of a number's character
EDGE = 6  # around the figure
LINE = 17  # height of a line of text
MARKERS = "<!-- begin why -->", "<!-- end why -->"  # in the first cell of a lesson
LEAD = "**The idea in two minutes.** "
SVG = "http://www.w3.org/2000/svg"


class Picture:
    """A figure of one milestone, `width` units wide. y grows downwards; the title is above 24.

    Classes of shapes and texts are quiet (none given: what was before, and words), ink, own (the
    milestone's idea), faint, empty and framed (an outline), bold and light (texts), broken (lines).
    """

    width = NARROW

    def __init__(self, milestone: Milestone, root: Path):
        self.milestone, self._root = milestone, root
        self._title, self._height = "", 0.0
        self._group = ElementTree.Element("g", {"class": "chart why"})

    @property
    def snapshot(self) -> ModuleType:
        """The milestone's script, imported."""
        return load_snapshot(self.milestone.script)

    @property
    def lesson(self) -> str:
        """The address of the notebook that covers the milestone, from the repository's root."""
        return self.milestone.lesson

    def printed(self, pattern: str) -> tuple[str, ...]:
        """The groups of a regular expression, in what the milestone's lesson has printed.

        Raises ValueError, one line, unless the lesson has printed it, and each time alike.
        """
        found = {each.groups() for each in re.finditer(pattern, printed(self._root / self.lesson))}
        if len(found) != 1:
            count = f"{len(found)} different texts" if found else "nothing"
            raise ValueError(f"{self.lesson} prints {count} like {pattern}")
        return found.pop()

    # ---- shapes ----

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words on one line, whose baseline is at y; anchor: start, middle or end, at x."""
        self._add("text", kind, words, x=x, y=y, **{"text-anchor": anchor})

    def box(self, x: float, y: float, width: float, height: float, kind: str = "") -> None:
        """A rectangle."""
        self._add("rect", kind, x=x, y=y, width=width, height=height)

    def line(self, points: Iterable[tuple[float, float]], kind: str = "") -> None:
        """Straight lines from point to point."""
        self._add("polyline", kind, points=" ".join(f"{_round(x)},{_round(y)}" for x, y in points))

    def arc(self, x: float, to: float, y: float, height: float, kind: str = "") -> None:
        """A half ellipse from x to `to`, both at y, with its top `height` above."""
        middle, half = (x + to) / 2, (to - x) / 2
        turns = [math.pi * k / 24 for k in range(25)]
        self.line([(middle - half * math.cos(t), y - height * math.sin(t)) for t in turns], kind)

    def arrow(self, x: float, y: float, to_x: float, to_y: float, kind: str = "") -> None:
        """A line with a head at its end."""
        turn = math.atan2(to_y - y, to_x - x)
        heads = [(to_x - 7 * math.cos(turn + side), to_y - 7 * math.sin(turn + side))
                 for side in (0.45, -0.45)]
        self.line([(x, y), (to_x, to_y)], kind)
        self.line([heads[0], (to_x, to_y), heads[1]], kind)

    def title(self, words: str) -> None:
        """What the figure shows, above it."""
        self.text(0, 14, words, "bold")

    def number(self, y: float, number: str, words: str) -> None:
        """The number that the lesson printed, what it counts, and its source: the figure's end.

        y: where this part begins; number: as in what the lesson printed, a unit aside.
        """
        left = DIGIT * len(number) + 10
        lines = wrap(words, int((self.width - left) / LETTER))
        source = f"printed in lesson {Path(self.lesson).stem.partition('_')[0]}"
        self.line([(0, y), (self.width, y)], "faint")
        self.text(0, y + 30, number, "number")
        for row, line in enumerate([*lines, source]):
            self.text(left, y + 20 + LINE * row, line, "ink" if row < len(lines) else "")
        self._title = f"{number} {words} ({source})"
        self._height = y + 20 + LINE * len(lines) + 8

    def svg(self, style: str) -> str:
        """The figure as a file of its own."""
        size = {"width": _round(self.width + 2 * EDGE), "height": _round(self._height + 2 * EDGE)}
        root = ElementTree.Element("svg", {"xmlns": SVG, "viewBox": " ".join(
            [f"-{EDGE} -{EDGE}", *size.values()]), **size, "role": "img"})
        ElementTree.SubElement(root, "title").text = self._title
        ElementTree.SubElement(root, "style").text = f"\n{style}"
        corner = {"x": f"-{EDGE}", "y": f"-{EDGE}"}
        ElementTree.SubElement(root, "rect", {**corner, **size, "style": "fill: var(--page)"})
        root.append(self._group)
        ElementTree.indent(root, "")
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def _add(self, shape, kind, words=None, **numbers):
        known = {name: value if isinstance(value, str) else _round(value)
                 for name, value in numbers.items() if value != "start"}
        ElementTree.SubElement(
            self._group, shape, ({"class": kind} if kind else {}) | known).text = words


def made_of(part: Why, milestone: Milestone, root: Path) -> dict[Path, str]:
    """{file: text} of what follows from a why.md: its figure and, if a notebook has the milestone's
    name, that notebook with the part at its top.

    root: the repository. Raises ValueError or OSError, one line, as draw, and for such a notebook
    without a title.
    """
    made = {milestone.folder / part.figure.name: draw(milestone, root)}
    notebook = root / milestone.lesson
    if notebook.stem == milestone.name:
        made[notebook] = with_part(notebook.read_text(encoding="utf-8"), part.as_markdown(
            f"../{milestone.folder.relative_to(root).as_posix()}"))
    return made


def with_part(notebook: str, part: str) -> str:
    """The text of a notebook whose first cell has `part` between its markers, which are set below
    the title if they are missing; the rest stays byte for byte. ValueError without a title."""
    content = json.loads(notebook)
    cell = content["cells"][0]
    source = "".join(cell["source"])
    if MARKERS[0] not in source:
        title, end, rest = source.partition("\n\n")
        if not (title.startswith("# ") and end):
            raise ValueError("the lesson's first cell should begin with its title")
        source = f"{title}\n\n{MARKERS[0]}\n{MARKERS[1]}\n\n{rest}"
    cell["source"] = replace_between(source, "why", LEAD + part).splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def draw(milestone: Milestone, root: Path) -> str:
    """The SVG of a milestone's figure; root: the repository, whose lessons have the numbers.

    Raises ValueError, one line, where the why.py is missing or its number was not printed.
    """
    from speedrun.diff.html import TEMPLATES  # jinja2, which --help does not need

    file = milestone.folder / FIGURE
    if not file.exists():
        raise UserError(f"{short(file)}: the file is missing, which draws the figure of why.md")
    spec = importlib.util.spec_from_file_location(f"figure of {milestone.name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    picture = Picture(milestone, root)
    module.draw(picture)
    return picture.svg("".join((TEMPLATES / name).read_text(encoding="utf-8")
                               for name in ("chart.css", "why.css")))


@cache
def printed(notebook: Path) -> str:
    """All text that a notebook's cells have printed, in order; raises OSError without it."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
                     for cell in cells for output in cell.get("outputs", ()))


def _round(number):
    """A coordinate as text, to a tenth: alike on every machine."""
    return f"{round(number, 1) + 0:g}"
