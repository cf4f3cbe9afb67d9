"""What others found elsewhere: every row has setting, date and address; pages and diffs show it.

Run: .venv/bin/python -m pytest tests/test_outside.py
"""

import re

import pytest

from speedrun.diff.difference import find_difference
from speedrun.diff.facts import read_side
from speedrun.diff.html import make_page
from speedrun.figures.outside import anchor_of, finding_sections, idea_table
from speedrun.history.carries_over import ADDRESS, CARRIES_OVER, DATE, VERDICTS, load_outside
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.site.text import anchor

OUTSIDE, MANIFEST = load_outside(), load_manifest()
FINDINGS = [(idea, f) for idea in OUTSIDE.ideas for f in idea.finding]


def test_every_row_has_its_setting_date_verdict_and_address():
    assert len(OUTSIDE.ideas) >= 49 and len(FINDINGS) > 100
    for idea, f in FINDINGS:
        where = f"{idea.name}: {f.who}"
        assert ADDRESS.fullmatch(f.url) and DATE.fullmatch(f.date), where
        assert f.date <= OUTSIDE.as_of and f.verdict in VERDICTS and f.what and f.size, where
        assert not f.effect.endswith(".") and "|" not in f.effect + f.size + f.what, where
    for idea in OUTSIDE.ideas:
        assert idea.milestones and all(map(MANIFEST.get, idea.milestones)), idea.name
    assert {f.setting for _, f in FINDINGS} >= set(OUTSIDE.settings)  # none is left over


def test_every_arxiv_paper_says_how_much_of_it_was_read():
    papers = {f.url: f.read for _, f in FINDINGS if "arxiv.org" in f.url}
    assert [url for url, read in papers.items() if read is None] == [
        "https://arxiv.org/abs/2502.16982"]


def test_anchors_are_those_of_the_headings():
    text = finding_sections(OUTSIDE, MANIFEST)
    headings = [anchor(h) for h in re.findall(r"^### (.+)$", text, re.M)]
    assert headings == [anchor_of(idea) for idea in OUTSIDE.ideas]
    assert len(set(headings)) == len(headings)


def test_the_table_names_no_average():
    rows = idea_table(OUTSIDE, MANIFEST).splitlines()[2:]
    assert len(rows) == len(OUTSIDE.ideas)
    muon = next(row for row in rows if row.startswith("| [Muon](#muon) |"))
    assert "**helps**: Moonshot" in muon and "**hurts**: Moonshot" in muon


GOOD = """
as_of = "2026-01-01"
[setting.s]
who = "S"
what = "small"
url = "https://arxiv.org/abs/2502.16982"
[[idea]]
name = "A"
milestones = ["01"]
[[idea.finding]]
setting = "s"
size = "1B"
effect = "less loss"
verdict = "helps"
date = "2025-02"
"""


@pytest.mark.parametrize("old, new, said", [
    ('"helps"', '"maybe"', '"verdict" must be one of helps, none, hurts'),
    ('date = "2025-02"', 'date = "2025-13"', '"date" has not the form that is needed: 2025-13'),
    ('date = "2025-02"', "", 'missing key "date"'),
    ('size = "1B"', "", 'missing key "size"'),
    ('size = "1B"', 'size = "1B"\nurl = "https://x.com/a"', '"url" has not the form that is'),
    ('size = "1B"', 'size = "1B"\nurl = "https://github.com/a/b/blob/main/R.md"', '"url" has not'),
    ('setting = "s"', 'setting = "t"', 'there is no setting "t"'),
    ('setting = "s"', 'setting = "s"\nwho = "me"', 'either "setting" or "who" and "what"'),
    ("[[idea.finding]]", '[[idea]]\nname = "B"\nmilestones = ["01"]\n[[idea.finding]]',
     'A: give a finding, or say in "unknown" what was not found'),
    ("[[idea]]", '[[idea]]\nname = "A"\nmilestones = ["01"]\nunknown = "x"\n[[idea]]',
     "A: there are two ideas of this name"),
    ('size = "1B"', 'size = "1B"\nsise = "1B"', 'unknown key "sise"; did you mean "size"?'),
    ("as_of =", "as_of", "history/carries_over.toml: "),
])
def test_a_fault_is_one_line(tmp_path, old, new, said):
    file = tmp_path / "history" / CARRIES_OVER.name
    file.parent.mkdir()
    file.write_text(GOOD, encoding="utf-8")
    assert load_outside(file).of("01")[0].by_verdict().keys() == {"helps"}
    own = "https://arxiv.org/abs/2501.00001"  # not the setting's
    file.write_text(GOOD.replace("size =", f'url = "{own}"\nsize ='), encoding="utf-8")
    ((found,),) = load_outside(file).of("01")[0].by_verdict().values()
    assert (found.who, found.url) == ("S", own)
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(said)) as fault:
        load_outside(file)
    assert "\n" not in str(fault.value)


def test_a_page_of_a_diff_mentions_it():
    old, new = read_side("14c"), read_side("14d")
    page = make_page(old, new, find_difference(old.text, new.text))
    assert "Outside the speedrun" in page and "https://arxiv.org/abs/2603.09078" in page
    old, new = read_side("08"), read_side("08a")  # of which nobody wrote
    assert "Outside the speedrun" not in make_page(old, new, find_difference(old.text, new.text))


def test_each_station_whose_idea_was_tried_elsewhere_links_to_it():
    for m in MANIFEST.milestones:
        if m.lesson and OUTSIDE.of(m.id):
            text = (REPOSITORY / m.lesson).read_text(encoding="utf-8")
            for idea in OUTSIDE.of(m.id):
                assert f"(../lessons/carries_over.md#{anchor_of(idea)})" in text, (m.id, idea.name)


def test_the_assistants_page_is_short_and_names_what_exists():
    text = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
    assert text.count("\n") < 60
    named = re.findall(r"\b(?:tools|tests|lessons|history)/[\w./]*", text)
    assert named and [path for path in named if not (REPOSITORY / path).exists()] == []
