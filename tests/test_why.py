"""Each station has its idea in two minutes, short, sourced, with a figure that can be read.

Run: .venv/bin/python -m pytest tests/test_why.py
"""

import json
import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import diff_milestones
from speedrun.base.errors import UserError
from speedrun.figures import why
from speedrun.figures.charts import LETTER
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.history.records import load_records
from speedrun.history.why import LONGEST, load_why

MANIFEST = load_manifest()
RACE = MANIFEST.of_chain()
FIRSTS = {m.chain: m for m in reversed(MANIFEST.milestones)}.values()
TOLD = [m for m in MANIFEST.milestones if load_why(m)]
LETTERS = 13  # units: 11 pixels on a screen of 390, of which a page leaves 335 or more
each = pytest.mark.parametrize("milestone", TOLD, ids=lambda m: m.id)


def test_stations_of_the_race_and_each_chain_s_first_have_a_why():
    stations = [m.name for m in RACE.milestones if m.is_station]
    assert {*stations, *(m.name for m in FIRSTS)} <= {m.name for m in TOLD}
    assert len(stations) > 10 and len(FIRSTS) == 3


@each
def test_a_why_is_short_and_its_minutes_are_records(milestone):
    part = load_why(milestone)
    assert 60 < part.words <= LONGEST and 5 < len(part.shown.split()) < 40
    assert not re.search(r"[*`#<\[]", part.text), "plain words: a terminal shows them too"
    minutes = {record.minutes for record in load_records(REPOSITORY / "history" / "records.json")}
    stated = re.findall(r"(?:from ([\d.]+) to )?([\d.]+) minutes", part.text)
    assert {float(one) for pair in stated for one in pair if one} <= minutes


@each
def test_the_figure_s_number_was_printed_by_the_lesson(milestone):
    root = ElementTree.fromstring((milestone.folder / "why.svg").read_text(encoding="utf-8"))
    texts = {text.get("class"): text.text for text in root.iter(f"{{{why.SVG}}}text")}
    cells = json.loads((REPOSITORY / milestone.lesson).read_text(encoding="utf-8"))["cells"]
    shown = json.dumps([cell.get("outputs") for cell in cells])
    amount = texts["number"].removesuffix(" ms")
    assert re.search(rf"(?<![\d.,]){re.escape(amount)}", shown)
    assert load_why(milestone).number.startswith(f"{texts['number']} ")


@each
def test_the_figure_fits_and_follows_light_and_dark(milestone):
    drawn = (milestone.folder / "why.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(drawn)
    x, y, width, height = map(float, root.get("viewBox").split())
    for text in root.iter(f"{{{why.SVG}}}text"):
        wide = (why.DIGIT if text.get("class") == "number" else LETTER) * len(text.text)
        left = float(text.get("x")) - wide * {None: 0, "middle": 0.5, "end": 1}[
            text.get("text-anchor")]
        assert x <= left and left + wide <= x + width, text.text
        assert y < float(text.get("y")) < y + height
    style = root.find(f"{{{why.SVG}}}style").text
    assert "prefers-color-scheme: dark" in style and len(drawn) < 20_000
    assert f".chart {{ display: block; width: 100%; height: auto; font: {LETTERS}px" in style
    body = drawn.partition("</style>")[2]
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb|font-size", body)
    sizes = [int(size) for size in re.findall(r"font(?:-size)?: (\d+)px", style)]
    assert min(sizes) * 335 / width >= 11


def test_a_why_that_has_not_its_form_is_refused(tmp_path):
    milestone = SimpleNamespace(folder=tmp_path)
    assert load_why(milestone) is None
    for text in ("A text.\n", "![shown](why.svg)\n", "A text.\n![shown](why.svg)\n",
                 "A text.\n\n![shown](other.svg)\n", "A text.\n\n![shown](why.svg)\nMore.\n"):
        (tmp_path / "why.md").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"why.md: it should be a text, an empty line and"):
            load_why(milestone)


def test_a_number_that_the_lesson_does_not_print_is_refused(tmp_path):
    picture = why.Picture(RACE.get("01"), REPOSITORY)
    with pytest.raises(ValueError, match="01_muon.ipynb prints nothing like sixty-four"):
        picture.printed("sixty-four (of)")
    with pytest.raises(ValueError, match=r"01_muon.ipynb prints \d+ different texts like"):
        picture.printed(r"(\d)")
    notebook = tmp_path / "x.ipynb"
    outputs = [{"text": ["a 1\n", "b"]}, {"data": {"text/plain": ["c 2"]}}, {"data": {}}]
    notebook.write_text(json.dumps({"cells": [{}, {"outputs": outputs}]}), encoding="utf-8")
    assert why.printed(notebook) == "a 1\nb\nc 2\n"
    nobody = SimpleNamespace(folder=REPOSITORY / "history", name="00_nobody")
    with pytest.raises(UserError, match="history/why.py: the file is missing"):
        why.draw(nobody, REPOSITORY)


def test_the_lesson_shows_it_below_its_title_and_nothing_else_moves():
    first = "# 01 · Title\n\n| a | table |\n"
    cells = [dict(cell_type="markdown", metadata={}, source=first.splitlines(True)),
             dict(cell_type="markdown", metadata={}, source=["Größe\n", "x"])]
    notebook = json.dumps({"cells": cells, "nbformat": 4}, indent=1, ensure_ascii=False) + "\n"
    shown = why.with_part(notebook, "Words.\n\n![it](../why.svg)")
    source = "".join(json.loads(shown)["cells"][0]["source"])
    assert source == (f"# 01 · Title\n\n{why.MARKERS[0]}\n{why.LEAD}Words.\n\n![it](../why.svg)\n"
                      f"{why.MARKERS[1]}\n\n| a | table |\n")
    assert json.loads(shown)["cells"][1:] == cells[1:] and "Größe" in shown
    assert why.with_part(shown, "Words.\n\n![it](../why.svg)") == shown
    assert "Words" not in why.with_part(shown, "Others.")
    with pytest.raises(ValueError, match="should begin with its title"):
        why.with_part(notebook.replace("# 01", "01"), "Words.")


def test_a_terminal_shows_it(monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["diff_milestones.py", *arguments])
        assert diff_milestones.main() == 0
        return " ".join(capsys.readouterr().out.split())

    shown, part = command("04", "--why-long"), load_why(RACE.get("04"))
    title, figure = RACE.get("04").title, "history/speedrun/04_skip_connections/why.svg"
    told = f"04 {title} {part.text} figure: {figure} {part.shown} {part.number}"
    assert shown == " ".join(told.split())
    with pytest.raises(UserError, match="03a_untied_head has no why.md; --why-long knows 00, 01"):
        command("03a", "--why-long")
    for more in (["03"], ["--steps"], ["--html", "page.html"], ["--time"], ["--blocks", "GPT"]):
        with pytest.raises(SystemExit):
            command("04", *more, "--why-long")
        assert "--why-long takes one milestone" in capsys.readouterr().err
