"""The site: links resolve, two builds are equal, hostile words stay text, a browser walks through.

Run: .venv/bin/python -m pytest tests/test_site.py; RUN_SLOW=1 builds it whole, and doubled.
"""

import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise, product
from math import hypot
from pathlib import Path
from posixpath import dirname, join, normpath
from subprocess import PIPE, Popen
from threading import Thread
from types import SimpleNamespace

import nbformat
import pytest

import make_site
import test_ladder
from ranks import warm_context
from speedrun.base.errors import UserError
from speedrun.base.files import replace_file
from speedrun.base.text import short
from speedrun.diff import html
from speedrun.diff.align import REMOVED, SAME, Line, Row
from speedrun.diff.difference import find_difference
from speedrun.diff.origin import line_origins
from speedrun.figures.charts import (
    LETTER,
    Chart,
    Point,
    both,
    curve_chart,
    ladder_chart,
    record_chart,
)
from speedrun.figures.generated import RESULTS, TINY
from speedrun.figures.ladder import load_ladder
from speedrun.history.blocks import FREE, split_blocks
from speedrun.history.gains import own_gain
from speedrun.history.guide import whys
from speedrun.history.manifest import REPOSITORY, Figures, load_manifest
from speedrun.history.records import load_records
from speedrun.history.threads import load_threads, number_of
from speedrun.site.build import _replace_site, build
from speedrun.site.interactive import PLACES, figures_of
from speedrun.site.lessons import (
    Claim,
    _with_pages,
    claims_of,
    lesson_headings,
    lesson_minutes,
    lesson_title,
    make_lesson,
)
from speedrun.site.models import compared_with, drawn, has_picture, in_page
from speedrun.site.pages import MOST, TEXTS, Site, clone_address, span_of
from speedrun.site.search import BEST, _plain, load_terms, search_index
from speedrun.site.text import make_html, section, section_at, without_unmeasured
from speedrun.site.threads import passages_with, shown_steps

EVIL = "<script>alert('&')</script>"
FIVE = ("index.html", "speedrun/rotary.html", "speedrun/muon.html", "speedrun/muon-script.html",
        "lessons/01_muon.html")
KB = 1000
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Checks that tags are closed in order; keeps ids, links, what a browser loads, the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.loads, self.tags, self.text = [], [], [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        if "href" in attrs:
            loaded = tag == "link" and attrs["rel"] in ("stylesheet", "icon")
            (self.loads if loaded else self.links).append(attrs["href"])
        self.loads += [attrs["src"]] if "src" in attrs else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data


def check_pages(out: Path, known: set[str]):
    """Checks all pages in a folder: their links lead to `known` paths, and to anchors in those that
    are there; nothing is loaded from elsewhere."""
    pages = {path.relative_to(out).as_posix(): Reader(path.read_text(encoding="utf-8"))
             for path in out.rglob("*.html")}
    for path, page in pages.items():
        assert len(set(page.ids)) == len(page.ids), path
        tags = [tag for tag, _ in page.tags]
        assert tags.count("h1") == tags.count("main") == 1, path
        assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img"), path
        for link in page.links:
            if re.match("https://", link):
                continue
            target, _, at = link.partition("#")
            target = normpath(join(dirname(path), target)) if target else path
            assert target in known, (path, link)
            if at and target in pages:
                assert at in pages[target].ids, (path, link)
        for load in page.loads:
            if not load.startswith("data:image/"):
                assert (out / dirname(path) / load).is_file(), (path, load)
        if path.startswith("lessons/"):  # formulas are drawn
            assert "$$" not in page.text and "\\begin{" not in page.text, path
        limit = 800 * KB if path.endswith("-script.html") else 300 * KB
        assert (out / path).stat().st_size < limit, path
    assert "url(" not in (out / "style.css").read_text(encoding="utf-8")
    return pages


def contents(out):
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    out = tmp_path_factory.mktemp("five")
    build(out, only=FIVE)
    return out


def known_paths(site):
    return {page.path for page in site.pages()} | {
        site.raw_of(m) for m in site.manifest.milestones}


def test_links_of_five_pages_lead_to_pages(five):
    pages = check_pages(five, known_paths(Site(REPOSITORY)))
    assert sorted(pages) == sorted(FIVE)
    lesson = (five / "lessons/01_muon.html").read_text(encoding="utf-8")
    assert lesson.count('<div class="drawn"') >= 3  # it has its pictures
    assert {"#build-it", "#does-it-work"} <= set(pages["lessons/01_muon.html"].links)
    for name, parts in (("style.css", ("chart.css", "style.css", "figures/style.css")),
                        ("site.js", ("site.js", "figures/touch.js"))):
        assert (five / name).read_text("utf-8") == "".join(
            (REPOSITORY / "site" / part).read_text("utf-8") for part in parts)
    assert (five / ".built.lock").exists(), "so that two builds do not mix"
    assert "<summary>Set-up code</summary>" in lesson and 'id="cell-id' not in lesson
    assert "<pre>" not in lesson and '<div class="model"' in lesson
    figures = {path for path, page in pages.items() if "../figures/newton_schulz.js" in page.loads}
    assert figures == {"speedrun/muon.html", "lessons/01_muon.html"}


def test_a_milestones_page_says_what_its_folder_says(five):
    m = load_manifest().get("muon")
    page = Reader((five / "speedrun/muon.html").read_text(encoding="utf-8"))
    for words in (m.title, m.idea, *m.besides, f"{m.val_loss:.4f}", f"{m.minutes:g}",
                  f"{m.parameters:,}"):
        assert words in page.text
    for name in ("newton_schulz", "Muon"):  # its blocks, and the way to their lives
        assert f"../blocks/{name}.html#v01" in page.links
    assert {"rotary.html", "modern_arch.html", "muon-script.html"} <= set(page.links)
    for tag in (("link", {"rel": "prev", "href": "rotary.html"}),
                ("link", {"rel": "next", "href": "modern_arch.html"}),
                ("meta", {"name": "description", "content": m.idea})):
        assert tag in page.tags
    assert "../lessons/01_muon.html" in page.links and "; dashed: 00b." in page.text


def test_a_model_is_drawn_where_it_changes(five):
    pages = [(five / f"speedrun/{slug}.html").read_text("utf-8") for slug in ("rotary", "muon")]
    assert ["heads of 64; all of a head" in page for page in pages] == [True, False]
    assert "var(--accent)" in pages[0] and 'href="baseline.html">00</a>' in pages[0]
    assert compared_with(load_manifest(), load_manifest().get("03b")).id == "03a"


def test_each_picture_is_its_milestone_s(monkeypatch):
    """Processes draw several each; here they are threads, and their pictures are texts."""
    def model_svg(_, id, base):
        return f"{id} {base}".encode()

    monkeypatch.setattr("speedrun.anatomy.picture.model_svg", model_svg)
    monkeypatch.setattr("speedrun.anatomy.picture.removed", lambda _, id, base: [f"{base}-{id}"])
    monkeypatch.setattr("speedrun.site.models.ProcessPoolExecutor",
                        lambda workers, *_: ThreadPoolExecutor(workers))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    manifest = load_manifest()
    for count in 2, 13:
        some = [m for m in manifest.milestones if has_picture(m)][:count]
        bases = [compared_with(manifest, m) for m in some]
        end = manifest.milestones.index(some[-1]) + 1
        with drawn(manifest, manifest.milestones[:end]) as found:
            assert {m.id: picture() for m, picture in found.items()} == {
                m.id: (f"{m.id} {a.id if a else ()}", [f"{a and a.id}-{m.id}"] * bool(a))
                for m, a in zip(some, bases, strict=True)}
    assert in_page('<rect height="100%" fill="white"/><path d="M1.239  2.5" fill="#d55e00"/>'
                   '<text x="1.239" transform="rotate(-0 1 2)">1.239</text>') == (
        '<rect height="100%" fill="none"/><path d="M1.23 2.5" fill="var(--accent)"/>'
        '<text x="1.23">1.239</text>')


def test_every_line_of_a_script_can_be_linked_to(five):
    script = load_manifest().get("muon").script.read_text(encoding="utf-8")
    page = Reader((five / "speedrun/muon-script.html").read_text(encoding="utf-8"))
    lines = {f"L{number}" for number in range(1, script.count("\n") + 1)}
    assert {at for at in page.ids if re.fullmatch(r"L\d+", at)} == lines
    assert (five / "speedrun/muon/train_gpt.py").read_text(encoding="utf-8") == script
    origins = line_origins(load_manifest(), load_manifest().get("muon"))
    runs = list(html.runs_of(origins))
    assert all(any(code for _, code in lines) for _, lines in runs)  # none has only blank lines
    assert [number for _, lines in runs for number, _ in lines] == [*range(1, len(lines) + 1)]


def test_the_curve_leads_to_each_milestone_of_a_record(five):
    page = Reader((five / "index.html").read_text(encoding="utf-8"))
    told = {m.record.number: m for m in load_manifest().of_chain().milestones if m.record}
    for number, last in told.items():
        alike = [m for m in load_manifest().of_chain().milestones
                 if m.record and m.record.number == number]
        stations = [m for m in alike if m.is_station] or [last]
        assert f"speedrun/{stations[-1].slug}.html" in page.links
    assert page.links[:7] == ["#main", "index.html", "speedrun/index.html", "lessons/index.html",
                              "run.html", "reference.html", "reference.html"]
    text, records = " ".join(page.text.split()), load_records()
    for words in ("Speedrun Lessons Run Reference Search",
                  f"In May 2024 it took 45 minutes on eight H100 GPUs. In July 2026 record"
                  f" #{records[-1].number} took {records[-1].minutes:g}.",
                  f"{len(load_manifest().of_chain().milestones)} scripts retell its first"):
        assert words in text


# ---- a small repository, with all that is unusual


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A repository of four milestones: with hostile words, a line of 3,000 letters, a small diff, a
    chain with another program and two roots, and without results, READMEs and lessons."""
    root = tmp_path_factory.mktemp("repository")
    history = root / "history"
    history.mkdir()
    for name in ("records.json", "hyperparameters.toml"):
        shutil.copy(REPOSITORY / "history" / name, history)
    first = load_manifest().milestones[0]
    script = first.script.read_text(encoding="utf-8")
    changed = script.replace("# fixed seed", "#").replace(
        "\nif __name__", f"\n# {'long ' * 600}\n# {EVIL}\nif __name__")
    for name, text, keys in (
        ("race/00_start", script, "parameters = 3"),
        ("race/01_evil", changed, 'changes = ["main guard"]\nrecords = [3]\nlesson = "none"\n'
         f'besides = ["{EVIL}"]\ncurve = [[0, 4.0], [10, 3.5], [20, 3.3]]\n'
         '[claimed]\ntokens_per_s = 50_000\nmemory = "45 GB"\nmfu = "~8%"'),
        ("more/z0_one", "x = 1\n", f'stated = [["`fast`, ~2x", "{EVIL}"]]'),
        ("more/z1_two", "x = 1\ny = 2\n", 'parent = "none"'),
    ):
        folder = history / name
        folder.mkdir(parents=True)
        (folder / ("tune.py" if "more" in name else "train_gpt.py")).write_text(text, "utf-8")
        (folder / "milestone.toml").write_text(
            f'title = "Title {EVIL}"\nidea = "Idea {EVIL}"\nkind = "data"\n{keys}\n', "utf-8")
    (history / "race/01_evil/why.md").write_text(
        f"Because {EVIL}.\n\n![Two bars {EVIL}](why.svg)\n", "utf-8")
    (history / "race/01_evil/why.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-5 0.5 300.4 119.6"/>', "utf-8")
    (history / "threads.toml").write_text(
        f'[[thread]]\nname = "t"\ntitle = "Thread {EVIL}"\nabout = "{EVIL}"\n'
        'number = "parameters"\n'
        '[[thread.step]]\nmilestone = "start"\nblocks = []\nsays = "first"\n'
        '[[thread.step]]\nmilestone = "evil"\nblocks = ["main guard"]\nsays = "then"\n', "utf-8")
    (history / "README.md").write_text(
        "# History\n\n## One GPU\n\nNine minutes.\n\nMore.\n\n## Run a milestone\n\n"
        "| a | b |\n| --- | --- |\n| 1 | not measured |\n", "utf-8")
    return root


def test_a_small_repository_has_a_whole_site(small, tmp_path, monkeypatch):
    monkeypatch.setattr("speedrun.site.models.get_context", lambda _: warm_context())  # faster
    files = build(tmp_path / "a", small)
    pages = check_pages(tmp_path / "a", set(files))
    assert {"race/start.html", "race/evil-script.html", "more/one.html", "more/two.html",
            "more/one/tune.py", "index.html", "records.html"} <= set(files)
    assert "laptop.html" not in files and "predicted.html" not in files
    for path, page in pages.items():
        assert ("script", {}) not in page.tags, path
        (policy,) = (attrs["content"] for tag, attrs in page.tags
                     if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy")
        assert "default-src 'none'; script-src 'self';" in policy, path
    for path in ("race/index.html", "race/evil.html", "race/evil-script.html", "more/one.html"):
        assert EVIL in pages[path].text, path
    for path, words in (("race/evil.html", ("50,000", "45 GB", "~8%")),
                        ("more/one.html", ("fast, ~2x", EVIL))):  # what others have stated
        assert all(word in pages[path].text for word in words), path
    assert "stated" not in pages["race/start.html"].ids
    for path, words in (
            ("race/evil.html", ("Why, in two minutes", f"Because {EVIL}.", f"Thread {EVIL}")),
            ("threads/t.html", (f"Thread {EVIL}", "then")),
            ("index.html", ("Nine minutes.", "No script has run on a GPU yet")),
            ("run.html", ("More.", "python tools/run_milestone.py 01 --nproc 8"))):
        assert all(word in pages[path].text for word in words), path
    assert "More." not in pages["index.html"].text and "not measured" not in pages["run.html"].text
    assert ("img", {"src": "evil/why.svg", "alt": f"Two bars {EVIL}", "width": "300",
                    "height": "120"}) in pages["race/evil.html"].tags
    assert {"race/evil/train_gpt.py", "race/start/train_gpt.py"} <= {
        normpath(link) for link in pages["run.html"].links}
    assert "long " * 600 in pages["race/evil-script.html"].text
    assert "next" not in [attrs.get("rel") for tag, attrs in pages["race/evil.html"].tags]
    build(tmp_path / "b", small)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    mine = tmp_path / "b" / "race" / "mine.txt"
    mine.write_text("mine", encoding="utf-8")
    other = tmp_path / "other.txt"
    other.write_text("other", encoding="utf-8")
    with open(tmp_path / "b" / ".built", "a", encoding="utf-8") as mark:
        mark.write(f"../other.txt\n{other}\n")
    build(tmp_path / "b", small, only=["index.html"])  # what it had made is gone
    assert not (tmp_path / "b" / "records.html").exists() and mine.exists()
    assert other.exists()
    assert not (tmp_path / "b" / "blocks").exists()


def test_pages_have_titles_descriptions_and_neighbours(small):
    made = [*Site(small).pages()]
    names = {"race": ("00_start", "01_evil"), "more": ("z0_one", "z1_two")}
    assert [(page.path, page.title, page.about) for page in made] == [
        ("index.html", "Fast training, step by step",
         "The NanoGPT speedrun retold as scripts that differ by one idea each"),
        *(row for chain, some in names.items() for row in (
            (f"{chain}/index.html", chain.capitalize(), f"All milestones of the {chain}"),
            *(row for name in some for id, _, slug in [name.partition("_")] for row in (
                (f"{chain}/{slug}.html", f"{id} Title {EVIL}", f"Idea {EVIL}"),
                (f"{chain}/{slug}-script.html", f"{id} Title {EVIL}: every line",
                 f"Each line of {name} and the milestone that it is from"))))),
        ("blocks/main-guard.html", "The life of main guard", "2 versions of main guard"),
        ("blocks/x.html", "The life of x", "2 versions of x"),
        ("blocks/index.html", "Blocks", "All blocks that have more than one version"),
        ("threads/t.html", f"Thread {EVIL}", f"A thread: Thread {EVIL}, step by step"),
        ("run.html", "Run", "GPUs, memory, data, and the command of each milestone"),
        ("reference.html", "Reference",
         "Tables of everything, ideas that run through many milestones, commands"),
        ("records.html", "All records", f"The {len(load_records())} records of the speedrun"),
        ("hyperparameters.html", "Hyperparameters",
         "Every hyperparameter and its values through the chain"),
        ("lessons/index.html", "Lessons", "Notebooks that take the milestones apart")]
    around = {page.path: [it and it.path for it in (page.previous, page.next)] for page in made}
    assert {path: both for path, both in around.items() if any(both)} == {
        "race/start.html": [None, "race/evil.html"], "race/evil.html": ["race/start.html", None],
        "more/one.html": [None, "more/two.html"], "more/two.html": ["more/one.html", None]}


def test_pages_of_before_a_killed_build_are_not_forgotten(tmp_path, monkeypatch):
    def killed(path, content, **options):
        if path.suffix == ".html":
            raise KeyboardInterrupt
        replace_file(path, content, **options)

    _replace_site(tmp_path, {"a.html": b""})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("speedrun.site.build.replace_file", killed)
        _replace_site(tmp_path, {"b.html": b""})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".b.html.12345678.tmp").touch()
    _replace_site(tmp_path, {"c.html": b"", "d/e.html": b""})
    assert {path.name for path in tmp_path.rglob("*")} - {".built"} == {"c.html", "d", "e.html"}
    with pytest.raises(UserError, match=r"c.html.d.html cannot be written: [A-Z][\w ]+$"):
        _replace_site(tmp_path, {"c.html/d.html": b""})


@pytest.mark.skipif(os.name == "nt", reason="has no SIGKILL")
def test_a_killed_build_ends_its_processes(tmp_path):
    code = f"""if True:
        import sys; sys.path.insert(0, {str(REPOSITORY / 'tools')!r})
        from speedrun.site.models import drawn, load_manifest
        with drawn(load_manifest(), load_manifest().milestones):
            print("drawing", flush=True)
            sys.stdin.read()"""
    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as build:
        build.stdout.readline()
        build.kill()
        build.communicate(timeout=100)  # until the last process that may print has ended


def test_a_folder_with_something_else_is_left_alone(small, tmp_path):
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="there is something else in it; name an empty folder"):
        build(tmp_path, small)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command_counts_pages(tmp_path, monkeypatch, capsys):
    built = []
    monkeypatch.setattr("speedrun.site.build.build", lambda out: built.append(out) or [
        "a.html", "b/c.html", "html.js", "html"])
    for more, out in (["--out", str(tmp_path)], tmp_path), ([], REPOSITORY / "build" / "site"):
        monkeypatch.setattr(sys, "argv", ["make_site.py", *more])
        assert make_site.main() == 0 and built.pop() == out
        assert capsys.readouterr().out == f"2 pages in 0 s: open {short(out)}/index.html\n"


def test_a_build_that_fails_leaves_the_site_that_was_there(small, tmp_path, monkeypatch):
    (tmp_path / ".built.lock").touch()  # of a build that was killed before its first file
    build(tmp_path, small, only=["index.html", "records.html"])
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("speedrun.site.build.ASSETS", {"a.css": ("none.css",)})  # made last
        with pytest.raises(OSError, match="none.css"):
            build(tmp_path, small, only=["index.html", "run.html"])
    assert contents(tmp_path) == before
    (tmp_path / "mine").mkdir()
    build(tmp_path, small, only=["index.html"])
    assert not (tmp_path / "records.html").exists() and (tmp_path / "mine").exists()


def test_blocks_that_differ_in_case_alone_have_two_pages(small):
    site = Site(small)
    names = "AdamW", "Adamw", "A, b", "A b", "heading: Model", "é", "y" * 70
    site.lives = dict.fromkeys(names, [])
    assert [*site.block_paths.values()] == [f"blocks/{name}.html" for name in (
        "AdamW", "Adamw-1", "A-b", "A-b-3", "heading-Model", "block", "y" * 60)]
    site.lives |= {"Adamw": [*range(MOST)], "A b": [*range(2 * MOST + 1)]}
    assert [len(versions) for _, versions in site.parts("Adamw")] == [MOST]
    assert [(path.partition(".")[2], len(versions)) for path, versions in site.parts("A b")] == [
        ("html", 11), ("2.html", 11), ("3.html", 11)]  # evenly
    ids = dict(c="a2", d="b1", e="b3", f="b7")
    assert span_of([SimpleNamespace(milestone=SimpleNamespace(chain=id[0], id=id))
                    for id in ids.values()]) == "a2, b1 to b7"


def test_a_hyperparameter_is_listed_where_its_value_changes():
    _, values = Site(REPOSITORY)._hyperparameters()["entries"]["adam_lr"]
    assert [(m.id, value) for m, value in values] == [
        ("00", "1.5e-3"), ("00b", "1.8e-3"), ("01", None), ("e0", "3e-4"), ("p0", "6e-4")]


def test_pages_are_given_what_they_show(monkeypatch):
    site, get = Site(REPOSITORY), load_manifest().get
    assert [(chain, some[0].stem, some[-1].stem) for chain, some in site.lesson_groups] == [
        ("", "start_here", "start_here"), ("prelude", "p0_vanilla", "p4_fused_adamw"),
        ("speedrun", "00_baseline", "14_sublayer_scalars"),
        ("encore", "e0_answers_only", "e0a_recompute"), ("", "muon_at_home", "muon_at_home")]
    _, intro, [_, (*lesson, covered, minutes)] = site._lessons()["groups"][1]
    assert intro == "The speedrun starts where a good training loop already stands."
    assert (*lesson, [m.id for m in covered][::10], minutes) == (
        "p4 · The step after the backward pass", "lessons/p4_fused_adamw.html", ["p4", "p6d"], 35)
    assert [(r.number, [m.id for m in some]) for r, some in site._covering()[:7]] == [
        (1, ["00"]), (2, ["00a", "00b"]), (3, ["01"]), (4, ["01"]), (5, ["02"]), (6, ["03"]),
        (7, [])]
    found = site._chain("encore")
    assert (found["others"], found["raced"]) == (["speedrun", "prelude"], False)
    assert site._chain("speedrun")["raced"] and found["intro"].startswith("The speedrun ends with")
    found = site._reference()
    assert [title for title, *_ in found["tables"]] == [
        "Blocks", "All records", "What saved most", "On your laptop", "Predicted and measured",
        *(title for _, title, _ in TEXTS.values()), "Hyperparameters"]
    assert found["tables"][1][1:] == ("records.html", "The 89 records of the speedrun")
    assert ("sweep", "Try each learning rate of a milestone at half and at twice its value of the"
            " tiny scale.") == found["commands"][-1]
    thread, path, milestones = found["threads"][0]
    assert (path, [m.id for m in milestones]) == ("threads/cap.html", ["03d", "05g", "11c", "13d"])
    rows = {m.id: (chain, shards, stored and f"{stored.peak / 1e9:.0f}")
            for chain, some in site._run()["rows"] for m, shards, stored in some}
    assert [rows.get(id) for id in ("01", "00a", "p0", "e0")] == [
        ("speedrun", 33, "43"), ("speedrun", 65, None), ("prelude", 101, "32"), None]
    assert [(chain, len(both)) for chain, both in site._laptop()["charts"]] == [
        ("speedrun", 2), ("prelude", 2)]
    found = site._start()
    assert found["intros"]["prelude"] == f"{intro} The prelude builds that loop."
    assert found["one_gpu"].startswith("Public logs of August 2026, of")
    assert len(re.findall(r"\.(?:\s|$)", found["one_gpu"])) == 2
    assert [m.id for m in found["stations"]] == [f"{i:02}" for i in range(len(found["stations"]))]
    m = get("04")
    found, script = site._milestone(m, 3), m.script.read_text("utf-8")
    assert {name: found[name] for name in (
        "number", "count", "laptop", "laptop_before", "lines", "in_model")} == {
        "number": 3, "count": len(site.chains["speedrun"]), "lines": script.count("\n"),
        "laptop": site.laptop_losses[m.slug], "in_model": ["GPT"],
        "laptop_before": site.laptop_losses[get(m.parent).slug]}
    assert (found["parent"].id, found["drawn"].id) == ("03e", "03e")
    assert ("skips", "threads/skips.html") in [(t.name, path) for t, path in found["threads"]]
    assert len(site._milestone(get("03b"), 1)["outside"]) == len(site.outside.of("03b"))
    lives = site.lives
    assert [*lives] == sorted(lives, key=str.lower) and "Muon" in lives and "card" not in lives
    assert not [name for name in lives if name in FREE or name.startswith("heading: ")]
    assert not [v for some in lives.values() for v in some if "moved" in v.change.words or (
        v.change.old and v.change.new and v.change.old.text == v.change.new.text)]
    pages = {page.path: page.what for page in site.pages()}
    assert pages[site.script_of(m)]()["blocks"] == [*split_blocks(script)[1:]]
    heirs = {s.block: [(m.id, s.by)] for m in site.manifest.milestones for s in m.succession
             if s.block in lives and s.by in lives}
    assert heirs and heirs == {
        name: [(m.id, by) for m, by in pages[path]()["successors"]]
        for name, path in site.block_paths.items() if pages[path]()["successors"]}
    monkeypatch.setattr("speedrun.site.pages.claims_of", lambda path, id, is_own: [
        Claim(f"{path.stem} {id} {is_own}", [], [], {"a.png": b"x"})])
    assert [site._claims(get(id))[0].text for id in ("01", "03b")] == [
        "01_muon 01 True", "04_skip_connections 03b False"]
    assert [*site.files] == ["speedrun/skip_connections/why.svg", "a.png"]
    assert [figure.name for figure in site._figures(get("10"), get("09"))] == [
        "steps", "tokens", "parameters"]  # nobody has timed it, so that no minutes are missing
    assert site._shards(SimpleNamespace(train_steps=9, tokens_read=None)) is None
    for name, value, address in (("SERVER_URL", "", None), ("REPOSITORY", "c/d", None),
                                 ("SERVER_URL", "https://a.b", "https://a.b/c/d")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
        assert clone_address() == address
    monkeypatch.setattr("speedrun.site.pages.code_hash", lambda script: "another")
    assert Site(REPOSITORY).predictions == {}


@pytest.mark.parametrize("id, base, figures", [
    ("04", "03e", [
        ("minutes", "7.8", "7.2", -0.077, "−0.6"), ("steps", "3,242", "3,000", -0.075, "−242"),
        ("tokens", "1,699,741,696", "1,572,864,000", -0.075, "−126,877,696"),
        ("milliseconds per step", "144.7", "145.0", 0.002, "+0.3"),
        ("validation loss", "3.2781", "3.2753", -0.001, "−0.0028"),
        ("parameters", "162,201,636", "162,201,642", 0.0, "+6")]),
    ("05a", "05", [("peak memory, MiB, predicted", "32,237", "—", None, "")]),
    ("05b", "05a", [("minutes", "4.66", "3.95", None, "−0.71"),
                    ("steps", "1,750", "1,480", -0.154, "−270"),
                    ("tokens", "917,504,000", "775,946,240", -0.154, "−141,557,760"),
                    ("validation loss", "3.2759", "3.2785", None, "+0.0026")]),
    ("10", "09", [("parameters", "268,665,628", "268,665,628", 0.0, "±0")]),
    ("10f", "10e", [("milliseconds per step", "60.8", "60.8", 0.0, "±0"),
                    ("peak memory, MiB", "29,816", "29,862", 0.002, "+46")]),
    ("12c", "12a", [("minutes", "1.82", "1.781", -0.021, "−0.039")]),
    ("13d", "13c", [("peak memory, MiB", "30,704", "29,148", None, "−1,556")])])
def test_figures_are_compared_where_they_can_be(id, base, figures):
    site = Site(REPOSITORY)
    found = site._milestone(site.manifest.get(id), 1)
    assert found["base"].id == base
    assert [(f.name, f.before, f.now, f.change and round(f.change, 3), f.difference)
            for f in found["figures"] if f.name in [figure[0] for figure in figures]] == figures


def test_a_long_life_is_several_pages(tmp_path):
    site = Site(REPOSITORY)
    parts = site.parts("Muon")
    assert [v for _, versions in parts for v in versions] == site.lives["Muon"]
    assert len(parts) > 1 and all(len(versions) <= MOST for _, versions in parts)
    last = next(m for m in reversed(site.chains["speedrun"])
                if any(v.milestone == m for v in parts[-1][1]))
    build(tmp_path, only=[path for path, _ in parts] + [site.path_of(last)])
    pages = check_pages(tmp_path, known_paths(site))
    assert f"../{parts[-1][0]}#v{last.id}" in pages[site.path_of(last)].links
    for path, versions in parts:  # each has its own, and leads to all others
        assert {f"v{v.milestone.id}" for v in versions} == {
            at for at in pages[path].ids if re.fullmatch(r"v[pe]?\d+[a-z]?", at)}
        assert {dirname(path) + "/" + link for link in pages[path].links} >= {
            other for other, _ in parts if other != path}


def test_a_section_of_two_tables_comes_once():
    site = Site(REPOSITORY)
    titles, anchors, _ = zip(*site._predicted()["sections"], strict=True)
    assert titles[0] == "Compared with the public script"
    assert {"Encore: Fine-tuning", "Official, predicted, measured"} < {*titles}
    assert len(set(titles)) == len(titles)
    quoted = [site._quoted(m) for m in site.manifest.milestones if m.stated or m.claimed]
    assert len(set(quoted)) == 2 and set(quoted) <= set(anchors)


@pytest.mark.parametrize("folder, link, address", [
    ("history", "#all-records", "../records.html"), ("history", "#here", "#here"),
    ("lessons", "../history/README.md#what-saved-most", "../saved.html"),
    ("lessons", "../history/README.md#elsewhere", "../speedrun/index.html"),
    ("history", "speedrun/01_muon/train_gpt.py", "../speedrun/muon-script.html"),
    ("history", "speedrun/01_muon/why.py", None), ("lessons", "02_gone.ipynb", None),
    ("history/speedrun", "01_muon/", "../speedrun/muon.html"),
    ("history", "../lessons/01_muon.ipynb#why", "../lessons/01_muon.html"),
    ("lessons", "README.md", "../lessons/index.html"), ("", "README.md", "../index.html"),
    ("", "history#on-your-laptop", "../laptop.html"),
    ("history", "prelude", "../prelude/index.html"),
    ("history", "encore/README.md#here", "../encore/index.html"),
    ("lessons", "carries_over.md#muon", "../outside.html#muon"),
    ("history", "after.md", "../after.html"), ("history", "https://a.b/c", "https://a.b/c"),
    ("history", "//a.b", "//a.b"), ("lessons", "#all-records", "#all-records"),
])
def test_a_link_between_files_is_one_between_pages(folder, link, address):
    assert Site(REPOSITORY).target(folder, "a/page.html")(link) == address


def test_the_root_of_the_site_is_a_folder():
    assert [Site.relative("", page) for page in ("index.html", "a/b.html")] == ["./", "../"]


def test_ids_below_the_ladder_do_not_touch():
    own = load_manifest().of_chain("speedrun")
    for chart in both(ladder_chart, load_ladder(REPOSITORY / RESULTS / TINY, own), own):
        ends = [(x - len(label) * LETTER / 2, x + len(label) * LETTER / 2)
                for x, label in chart.x_ticks]  # a label's middle stands below its point
        assert len(ends) > 2
        assert all(right < left for (_, right), (left, _) in pairwise(ends))


def test_equal_losses_are_drawn():
    own = load_manifest().of_chain("speedrun")
    ladder = load_ladder(REPOSITORY / RESULTS / TINY, own)
    assert ladder_chart(replace(ladder, entries=[]), own, 700) is None
    one = replace(ladder, entries=[replace(ladder.entries[0], runs=ladder.entries[0].runs[:1])])
    assert [len(chart.points) for chart in both(ladder_chart, one, own)] == [2, 2]  # run and mean


def test_a_curve_ends_at_all_tokens_of_a_batch_that_grows():
    chart = curve_chart(load_manifest().get("10d"), None, 700)
    assert chart.points[-1].text == "10d: 3.2781 at 0.57B tokens"
    assert "10d: 3.6889 at 0.17B tokens" in [p.text for p in chart.points]  # at step 1,000


def test_a_curve_beside_its_parents(tmp_path):
    parent, own = (replace(load_manifest().get(id), own=Figures(tokens_per_step=size), curve=curve)
                   for id, size, curve in (("00b", 10**9, ((0, 10.0), (2, 3.9), (4, 3.5))),
                                           ("01", 5 * 10**8, ((0, 11.0), (1, 4.0), (4, 3.3)))))
    assert curve_chart(own, parent, 700) == Chart(
        700, 320, 44, 290,
        "Official validation loss of 00b Rotary positions and 01 Muon over tokens",
        [(44.0, "0"), (204.0, "1B"), (364.0, "2B"), (524.0, "3B"), (684.0, "4B")],
        [(237.2, "3.40"), (166.2, "3.60"), (95.2, "3.80"), (24.2, "4.00")],
        [("goal", "44,279.8 684,279.8"), ("line before", "364,59.7 684,201.7"),
         ("line", "124,24.2 364,272.7")],
        [Point(364.0, 59.7, "00b: 3.9000 at 2.00B tokens"),
         Point(684.0, 201.7, "00b: 3.5000 at 4.00B tokens"),
         Point(124.0, 24.2, "01: 4.0000 at 0.50B tokens", own),
         Point(364.0, 272.7, "01: 3.3000 at 2.00B tokens", own)],
        texts=[(44, 11, "validation loss over tokens"), (48, 275.8, "3.28")])
    narrow = curve_chart(own, parent, 380)
    assert (narrow.height, narrow.x_ticks) == (260, [(44.0, "0"), (204.0, "2B"), (364.0, "4B")])
    script = tmp_path / "00b_rotary" / "train_gpt.py"  # its tokens are not known
    script.parent.mkdir()
    script.write_text("class Hyperparameters:\n    train_steps: int = 4000\n", encoding="utf-8")
    parent = replace(parent, own=Figures(), script=script, curve=((2000, 3.9), (4000, 3.5)))
    chart = curve_chart(own, parent, 700)
    assert chart.title.endswith(" and 01 Muon over steps")
    assert [label for _, label in chart.x_ticks] == ["0", "1000", "2000", "3000", "4000"]
    assert [point.text for point in chart.points] == [
        "00b: 3.9000 at step 2,000", "00b: 3.5000 at step 4,000", "01: 3.3000 at step 4"]


def test_records_in_their_order_on_a_narrow_screen():
    records = [r for r in load_records() if r.number in (1, 2, 4, 15, 17)]
    wide, chart = (record_chart(records, load_manifest().of_chain(), width, by_date=False)
                   for width in (700, 380))
    assert (wide.height, wide.points[2].label, chart.height) == (460, "01 Muon", 380)
    assert chart.title == ("Record time in minutes, on a logarithmic scale, in their order: 45 in"
                           " 2024, 3.57 in 2024")
    assert chart.x_ticks == [(34.0, "May 2024"), (199.0, "Oct 2024")]
    assert [label for _, label in chart.y_ticks] == ["5", "10", "20", "45"]
    assert [(p.x, p.text.partition(" minutes")[0], p.label, p.place) for p in chart.points] == [
        (34.0, "00 The baseline · #1, 2024-05-28: 45", "00", (46.0, 32.3, "start")),
        (116.5, "00b · #2, 2024-06-06: 31.4", "", None),
        (199.0, "01 Muon · #4, 2024-10-11: 22.3", "01", (211.0, 117.7, "start")),
        (281.5, "05b, 05c · #15, 2024-12-08: 3.95", "", None),
        (364.0, "05f · #17, 2024-12-17: 3.57", "", None)]


def test_a_short_ladder_names_all_its_milestones():
    own = load_manifest().of_chain()
    for number, names in ((3, ["00", "00a", "00b"]), (18, ["00", "01", "03", "04"])):
        ladder = test_ladder.invented(*(m.id for m in own.milestones[:number]))
        assert [label for _, label in ladder_chart(ladder, own, 380).x_ticks] == names


def test_a_curve_and_the_goal_are_inside_the_picture():
    early = replace(load_manifest().get("10d"), curve=((0, 10.0), (100, 5.0), (1000, 4.0)))
    chart = curve_chart(early, None, 700)
    heights = {kind: [float(point.partition(",")[2]) for point in path.split()]
               for kind, path in chart.lines}
    assert max(heights["goal"]) <= chart.bottom and min(heights["line"]) > 0


def test_outputs_of_notebooks_are_text_and_pictures(tmp_path):
    """What somebody else's notebook holds must not run in a reader's browser."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    still = (f'{head}><a href="b/a.py"><rect id="r"/></a><use xlink:href="#r"/>'
             '<a href="c/d:e"><image href="data:image/png;base64,"/></a></svg>')
    active = [f'{head} onload="EVIL"/>', f"{head}><script>EVIL</script></svg>",
              f"{head}><EVIL</svg>",
              f'{head}><a xlink:href="javascript:EVIL"/></svg>',
              f"{head}><IFRAME>EVIL</IFRAME></svg>",
              f'{head}><a href="data:text/html,EVIL"/></svg>', f'{head} ONLOAD="EVIL"/>',
              f"{head}><foreignObject>EVIL</foreignObject></svg>"]
    outputs = [{"image/svg+xml": svg} for svg in (still, still, *active)]
    outputs += [{"image/png": "SUhEUgAAAAMAAAAC"}]  # the part that has its size, 3 x 2
    outputs += [{"text/html": "<script>EVIL</script>"}, {"application/javascript": "EVIL"},
                {"text/html": "<b>EVIL</b>", "text/plain": "plain"},
                {"text/markdown": "<script>EVIL</script>"}]
    notebook = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_raw_cell("<script>EVIL</script>", metadata={"raw_mimetype": "text/html"}),
        nbformat.v4.new_markdown_cell("# Title\n\n## Below"),
        nbformat.v4.new_code_cell("1", outputs=[
            nbformat.v4.new_output("display_data", data=data) for data in outputs])])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    lesson = make_lesson(tmp_path / "a.ipynb", str)
    page, (name, data), = lesson.html, *lesson.pictures.items()
    assert data == b"IHDR\0\0\0\3\0\0\0\2"
    assert (f'<img src="a_files/{name}" alt="A picture of: Below" width="3" height="2"') in page
    assert '<rect id="r"/></a><use xlink:href="#r"/>' in page and "plain" in page
    assert 'href="../history/b"' in page  # a picture of the history leads to its milestones
    assert '<rect id="o1-r"/></a><use xlink:href="#o1-r"/>' in page  # ids are a page's own
    assert not re.search(r"<(script|foreignobject|iframe|b>|EVIL)|"
                         r"<[^>]*(onload|javascript:|data:text)", page, re.I)
    assert _with_pages('<a href="b/a.py"><rect/></a>', lambda link: None) == "<rect/>"
    assert page.count("EVIL") == len(active) + 2  # as text


def test_markdown_becomes_html():
    def target(link):
        return {"a.md": "a.html"}.get(link)

    for text, found in (
            ("[x](a.md)", '<p><a href="a.html">x</a></p>\n'), ("[x](gone.md)", "<p>x</p>\n"),
            ("<b>", "<p>&lt;b&gt;</p>\n"), ("![x](a.png)", "<p></p>\n"),
            ("# A\n\n## The `x-y` *Z*?\n",
             '<h1>A</h1>\n<h2 id="the-x-y-z">The <code>x-y</code> <em>Z</em>?</h2>\n'),
            ("```\nif\n```", '<pre tabindex="0"><code>if</code></pre>\n'),
            ("```python\nif\n```",
             '<pre tabindex="0"><code><span class="k">if</span></code></pre>\n'),
            ("<!-- begin a-b -->\n| | |\n| --- | ---: |\n| 2025-01 | 3 |\n<!-- end a-b -->\n",
             '<div class="scroll" tabindex="0"><table>\n<tbody>\n<tr>\n'
             '  <td class="value">2025-01</td>\n  <td style="text-align:right">3</td>\n'
             "</tr>\n</tbody>\n</table></div>\n")):
        assert make_html(text, target) == found
    assert make_html("[x](javascript:a)", str) == '<p><a href="#harmful-link">x</a></p>\n'
    inline, formula = (make_html(text, target) for text in (
        "Take $x^2$.", "so\n$$a = b\n+ c\n= d$$\n\nthen"))
    assert inline.startswith("<p>Take <math") and 'display="inline"' in inline
    assert formula.count('<span class="formula" tabindex="0"><math') == 1
    assert "$" not in formula and "<ul>" not in formula and 'display="block"' in formula
    table = ("| a | b | c |\n| --- | ---: | --- |\n| 1 | not measured | — |\n| 2 | — | 3 |\n"
             "| 3 | | 5 |\n")
    assert without_unmeasured(f"x\n\n{table}") == (
        "x\n\n| a | c |\n| --- | --- |\n| 1 | — |\n| 2 | 3 |\n| 3 | 5 |\n")
    assert without_unmeasured(table.replace("| — | 3", "| 4 | 3")).count("| 4 |") == 1
    uneven = "| a \\| b | c |\n| --- | --- |\n| not measured | 1 |\n"
    assert without_unmeasured(uneven) == "| c |\n| --- |\n| 1 |\n"
    uneven += "| — |\n"
    assert without_unmeasured(uneven) == uneven
    dashes = "| a | b |\n| --- | --- |\n| 1 | — |\n"  # nothing in it was to be measured
    assert without_unmeasured(dashes) == dashes
    assert section_at("# A\n\nx\n", "b") == ""
    assert section_at("# A\n\n## One GPU\n\nx\n\n### B\n\ny\n\n## C\n", "one-gpu") == (
        "\n\nx\n\n### B\n\ny\n\n")
    for formula in (r"x^", r"\href{javascript:alert(1)}{x}", r"\style{a:b}{x}"):
        with pytest.raises(UserError, match=re.escape(f"the formula ${formula}$ cannot be read")):
            make_html(f"${formula}$", target)
    for command in ("text", "mbox", "textbf"):
        assert "&lt;script&gt;a&amp;b</mtext>" in make_html(rf"$\{command}{{<script>a&b}}$", target)
    text = ("# A\n\nfirst\n\n## B\n\nwhy\n\n<!-- begin t -->\n| x |\n<!-- end t -->\n\n"
            "### D\n\nend\n\n## C\n")
    assert section(text, "t")[0] == "B" and section(text, "t")[1].strip().startswith("why")
    assert section(text, "t")[1].endswith("end\n\n")
    assert section(text, "t", False)[1].split("\n\n") == ["why", "<!-- begin t -->\n| x |\n"]


# ---- threads, claims and search


@pytest.mark.parametrize("old, new, fault", [
    ('"soft_cap"', '"soft_hat"', 'there is no milestone "soft_hat"'),
    ('["GPT"]', '["GTP"]', "changes no GTP"),
    ("(30)", "(31)", "the script does not hold"),
    ("largest", "largest", "should be in their chain's order"),
    ("twice", "twice", "should be in their chain's order"),
    ("says =", "says", "/threads.toml: "),
])
def test_a_thread_fits_its_milestones(tmp_path, old, new, fault):
    manifest = load_manifest()
    text = (REPOSITORY / "history" / "threads.toml").read_text(encoding="utf-8")
    names = [thread.name for thread in load_threads(manifest)]
    assert {"cap", "muon", "tables", "batch"} <= set(names)
    cap = next(t for t in load_threads(manifest) if t.name == "cap")
    assert [number_of(cap, s, manifest.get(s.milestone)) for s in cap.step] == [
        "30", "15", "23.0", "23.0"]
    assert number_of(cap, replace(cap.step[0], reads=None), manifest.get("03d")) == ""
    parts = text.split("[[thread]]")
    steps = parts[1].split("[[thread.step]]")
    if old == new:
        steps[1:] = {"largest": steps[:0:-1], "twice": [steps[1], *steps[1:]]}[old]
    (tmp_path / "threads.toml").write_text(
        "[[thread]]" + "[[thread.step]]".join(steps).replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{tmp_path.name}/threads.toml: .*") as error:
        load_threads(manifest, tmp_path / "threads.toml")
    assert fault in str(error.value)


def test_a_thread_shows_its_own_passages():
    manifest = load_manifest()
    cap = next(t for t in load_threads(manifest) if t.name == "cap")
    second = shown_steps(manifest, cap)[1]
    assert [(s.number, round(s.share, 3), s.gain) for s in shown_steps(manifest, cap)] == [
        (number, share, own_gain(manifest, manifest.get(step.milestone))) for number, share, step in
        zip(("30", "15", "23.0", "23.0"), (1, 0.5, 0.767, 0.767), cap.step, strict=True)]
    for thread in load_threads(manifest):
        shown = shown_steps(manifest, thread)
        assert [[(c.name, why) for c, why in s.changes] for s in shown] == [
            [(name, whys(s.milestone).get(name)) for name in step.blocks]
            for s, step in zip(shown, thread.step, strict=True)]
        if thread.number == "tokens_per_step":
            sizes = [s.milestone.tokens_per_step or 0 for s in shown]
            assert [s.share for s in shown] == pytest.approx([n / max(sizes) for n in sizes])
    rows = [Row(SAME, line, line) for line in [Line(1, "y")] * 9]
    rows[4:4] = [Row(REMOVED, Line(1, "x = 1"), None)]
    assert passages_with(rows, replace(cap.step[0], only=("x =",))) == tuple(rows[2:7])
    (change, why), = second.changes
    assert second.share == 0.5 and why.startswith("The tanh bends logits")
    text = "\n".join(row.new.text for row in change.rows if row.new)
    assert "torch.sigmoid(logits / 7.5) - 15" in text and "class GPT" not in text
    marks = [row.mark for row in change.rows]  # with two unchanged lines on both sides
    assert marks[:2] == marks[-2:] == [SAME] * 2 and SAME not in (marks[2], marks[-3])
    with pytest.raises(ValueError, match="no passage of GPT has"):
        shown_steps(manifest, replace(cap, step=(replace(cap.step[0], only=("nowhere",)),)))


def test_a_claim_is_what_its_cell_printed(tmp_path):
    nb = nbformat.v4
    outputs = [nb.new_output("stream", name="stdout", text="Muon: 1.2\n"),
               nb.new_output("stream", name="stderr", text="warning"),
               nb.new_output("execute_result", data={"text/plain": "1.3\n"}),
               *(nb.new_output("display_data", data=data | {"text/plain": "<Picture object>"})
                 for data in ({"image/svg+xml": "<svg/>"}, {"image/png": "AAAA"}))]
    cells = [nb.new_code_cell("x", outputs=some, metadata={"tags": [tag]}) for tag, some in (
        ("claim", outputs), ("claim:05b", outputs), ("claim", []), ("other", outputs),
        ("claim:05d", outputs[-1:]))]
    path = tmp_path / "05_flex.ipynb"
    nbformat.write(nb.new_notebook(cells=cells), path)
    own, = claims_of(path, "05", True)
    assert (own.text, own.drawn, own.files) == (
        "Muon: 1.2\n1.3", ["<svg/>"], {"lessons/05_flex_files/0_4.png": b"\0\0\0"})
    assert lesson_title(path) == "05_flex"  # it has no heading
    assert [len(claims_of(path, id, False)) for id in ("05", "05b", "05c")] == [0, 1, 0]
    picture, = claims_of(path, "05d", False)
    assert (picture.text, picture.images) == ("", ["lessons/05_flex_files/4_0.png"])


def test_a_notebook_has_a_title_headings_and_minutes(tmp_path):
    nb = nbformat.v4
    cells = [nb.new_code_cell("x x x x x\n" * 149),
             nb.new_markdown_cell("# A `b` \n\n" + "word " * 700), nb.new_raw_cell("word " * 900),
             nb.new_markdown_cell("## C\n\n```\n## no\n```\n\n### D")]
    nbformat.write(nb.new_notebook(cells=cells), tmp_path / "a.ipynb")
    nbformat.write(nb.new_notebook(cells=cells[:1]), tmp_path / "b.ipynb")
    assert lesson_title(tmp_path / "a.ipynb") == "A `b`"
    assert lesson_headings(tmp_path / "a.ipynb") == ["C", "D"]
    nbformat.write(nb.new_notebook(cells=cells[2:]), tmp_path / "c.ipynb")
    assert [lesson_minutes(tmp_path / f"{x}.ipynb") for x in "abc"] == [15, 10, 5]  # 14.6, 7.5, 0.1


def test_the_index_finds_what_people_type(five):
    text = (five / "search-index.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("window.searchIndex = ").rstrip(";\n"))
    kinds = {kind for _, kind, *_ in index}
    assert kinds == {"milestone", "page", "thread", "command", "script", "block", "hyperparameter",
                     "lesson", "record", "person", "section"}
    assert index[0][1] == "milestone" and {len(entry) for entry in index} == {5}
    site = Site(REPOSITORY)
    firsts = {kind: entry for *entry, kind in ((name, *rest, kind) for name, kind, *rest in
                                               reversed(index))}
    first, cap = site.manifest.milestones[0], site.threads[0]
    *thread, words = firsts.pop("thread")
    assert thread == [cap.title, "03d → 05g → 11c → 13d", "threads/cap.html"]
    assert BEST not in words and words.startswith(f"evolution history idea {cap.about} softcap")
    assert words.endswith(" ".join(site.manifest.get(step.milestone).title for step in cap.step))
    second = [entry[-1] for entry in index if "flat then linear" in entry[-1]]
    assert second[0].startswith("flat then linear changed change diff script @kellerjordan0")
    assert second[1:] == ["h100 shards vram flat then linear"]
    assert firsts == {
        "milestone": [f"00 {first.title}", first.idea, "speedrun/baseline.html",
                      "baseline changed change diff script @karpathy @kellerjordan0"],
        "page": ["Blocks", "All blocks that have more than one version", "blocks/index.html",
                 "functions classes versions"],
        "command": ["Run 00: GPUs, data, download", first.title, "run.html#run-00",
                    "h100 shards vram baseline"],
        "script": ["Lines of 00", first.title, "speedrun/baseline-script.html",
                   "line origin every"],
        "block": ["adam_update", f"{len(site.lives['adam_update'])} versions",
                  "blocks/adam_update.html", ""],
        "hyperparameter": ["train_files", "Pattern of the training shards.",
                           "hyperparameters.html#train_files", ""],
        "lesson": ["Start here", "", "lessons/start_here.html", ""],
        "record": ["Record #1", "45 minutes, 2024-05-28: llm.c's GPT-2 small, the run to beat",
                   "records.html#r1", "@karpathy"],
        "person": ["@karpathy", "record #1", "records.html#r1", ""],
        "section": ["Guess: did one idea do it?", "Start here",
                    "lessons/start_here.html#guess-did-one-idea-do-it", ""]}
    for entry in (["@leloykun", "person", "records #15, #20–#21", "records.html#r15", ""],
                  ["tools/sweep.py", "command", "Try each learning rate of a milestone at half and"
                   " at twice its value of the tiny scale.", "reference.html#sweep", ""],
                  ["One GPU", "section", "Run", "run.html#one-gpu", ""],
                  ["Where to look for the newest", "section", "After record #89: the race goes on",
                   "after.html#where-to-look-for-the-newest", ""]):
        assert entry in index
    assert not any(path.endswith("#") for *_, path, _ in index)
    titles = [(REPOSITORY / file).read_text("utf-8").split("\n")[0][2:] for file in TEXTS]
    assert not [entry for entry in index if entry[0] in titles and entry[1] == "section"]
    assert _plain("A [b](c) `d` *e*") == "A b d e"
    known = known_paths(site)
    assert all(path.partition("#")[0] in known for *_, path, _ in index)
    for word, path in (("RoPE", "speedrun/rotary.html"),
                       ("U-net", "speedrun/skip_connections.html"),
                       ("ZeRO", "speedrun/sharded_adam.html"),
                       ("GQA", "speedrun/paired_heads.html"),
                       ("cu_seqlens", "speedrun/flash_attention_3.html"),
                       ("softcap", "speedrun/soft_cap.html"), ("softcap", "threads/cap.html")):
        assert any(found == path and word in more for *_, found, more in index), word
    assert {key for key in load_terms(Site(REPOSITORY)) if isinstance(key, str)} <= known


def test_a_term_means_its_first_milestone_before_the_others():
    terms = load_terms(site := Site(REPOSITORY))
    first, second = (terms[m] for slug in ("rotary", "half_rotation")
                     for m in site.manifest.milestones if m.slug == slug)
    (words,) = (word for word in first if word.startswith("RoPE"))
    assert first.index(BEST) < first.index(words) and BEST not in second and words in second


def test_a_term_names_a_milestone(small):
    terms = small / "history" / "search_terms.toml"
    terms.write_text('[milestones]\na = ["start", "evil"]\nb = ["evil", "start"]\n'
                     'c = ["evil"]\nd = ["one", "evil"]\n[pages]\n"run.html" = ["e"]\n', "utf-8")
    terms_of = load_terms(Site(small))
    assert terms_of.pop("run.html") == ["e"]
    assert {milestone.slug: words for milestone, words in terms_of.items()} == {
        "start": ["b", BEST, "a"], "evil": ["a", "d", BEST, "b", "c"], "one": [BEST, "d"]}
    assert search_index(Site(small), {"threads/t.html"}) == [
        (f"Thread {EVIL}", "thread", "00 → 01", "threads/t.html",
         f"evolution history idea {EVIL} b a a d b c Title {EVIL} Title {EVIL}")]
    terms.write_text('[milestones]\nx = ["nothing"]\n[pages]\n', encoding="utf-8")
    with pytest.raises(ValueError, match='x: there is no milestone "nothing"'):
        load_terms(Site(small))
    terms.unlink()


def test_no_record_covers_another():
    in_order = partial(record_chart, by_date=False)
    for chart in both(in_order, load_records(), load_manifest().of_chain()):
        radius = 3.5 if chart.width > 600 else 1.8
        assert all(hypot(b.x - a.x, b.y - a.y) > 2 * radius
                   for a, b in pairwise(chart.points)), chart.width


# ---- colours


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(x * y for x, y in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(scheme):
    style = (REPOSITORY / "site" / "chart.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in re.findall(
        r":root \{(.*?)\n *\}", style, re.S)[:2])
    colours = light if scheme == "light" else light | dark
    assert set(light) == set(dark)
    for text, paper in [
        *product(("text", "quiet", "accent"), ("page", "box", "accent-box")),
        *product(("text", "accent", "quiet"), ("old", "new", "moved")),
        *product(("text",), ("old-word", "new-word")),
    ]:
        a, b = sorted(luminance(colours[name]) + 0.05 for name in (text, paper))
        assert b / a >= 4.5, (text, paper, round(b / a, 2))


# ---- a browser


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium; tests that need it say so where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="not run: playwright is not installed (pyproject.toml, dev)")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip(f"not run: there is no browser ({', '.join(names)})")
    with sync_api.sync_playwright() as playwright:
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        launched = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox"] * is_root)
        yield launched
        launched.close()


@contextmanager
def address(folder: Path, is_served: bool):
    """Where a browser finds a folder: on the disk, or below a path of a static server."""
    if not is_served:
        yield f"{folder.as_uri()}/"
        return
    handler = partial(Quiet, directory=str(folder.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{folder.name}/"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.parametrize("is_served, width, scheme", [(False, 1280, "light"), (True, 390, "dark")])
def test_a_reader_walks_through(browser, five, is_served, width, scheme):
    with address(five, is_served) as start:
        walk(browser, start, width, scheme, five)


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """(folder, page): a page with all interactive figures, and the files that it loads."""
    out = tmp_path_factory.mktemp("figures")
    build(out, only=["no page"])
    found = figures_of(load_manifest(), load_manifest().milestones)
    assert set(found) == set(PLACES)
    page = html.templates().from_string(
        '{% extends "layout.html" %}{% block main %}{% include "figures/place.html" %}'
        '{% endblock %}')
    text = page.render(path="page.html", title="Figures", navigation=[], interactive=found,
                       url=lambda path: path or "./")
    (out / "page.html").write_text(text, encoding="utf-8")
    return out, text


def test_a_figure_begins_as_its_still_picture(browser, figures):
    """Its script, which has its own arithmetic, draws what Python has drawn; keys change it."""
    folder, text = figures
    page = browser.new_page()
    page.goto((folder / "page.html").as_uri())
    shown = "(root) => [...root.querySelectorAll('figure')].map((figure) => figure.outerHTML)"
    now = page.evaluate(f"({shown})(document)")
    drawn = page.evaluate(f"(text) => ({shown})(new DOMParser().parseFromString("
                          "text, 'text/html'))", text.replace(' disabled>', '>'))
    assert len(now) == len(PLACES)
    for after, before in zip(now, drawn, strict=True):
        assert after == before
    for figure in page.locator("figure").all():
        says = figure.locator(".says")
        for control in figure.locator("input, select").all():
            before = says.inner_text()
            control.focus()
            page.keyboard.press("ArrowRight")
            if says.inner_text() == before:  # it was at its end
                page.keyboard.press("ArrowLeft")
            assert says.inner_text() != before, control.get_attribute("name")
    page.close()


def walk(browser, address, width, scheme, five):
    """Goes from the start to a milestone, its neighbours, its diff, its script and its lesson."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    faults = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: request.url.startswith((address, "data:image/svg")) or
            faults.append(request.url))

    def is_at(path):
        page.wait_for_url(f"{address}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path

    page.goto(f"{address}index.html")
    is_at("index.html")
    page.locator(".chart:visible a").first.focus()
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.localName") == "pre"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator(".chart:visible a:focus title").text_content().startswith("00b")
    page.keyboard.press("Tab")  # the dots are one stop of many
    assert page.evaluate("document.activeElement.closest('.chart')") is None
    page.click('table a[href="speedrun/muon.html"]')
    is_at("speedrun/muon.html")
    page.keyboard.press("ArrowLeft")
    is_at("speedrun/rotary.html")
    page.keyboard.press("ArrowRight")
    is_at("speedrun/muon.html")
    page.locator(".touch input[name=count]").focus()
    page.keyboard.press("ArrowLeft")
    is_at("speedrun/muon.html")  # the figure has taken the key
    assert page.locator(".touch .says").inner_text().startswith("After 4 rounds")
    page.click("text=Diff")
    is_at("speedrun/muon.html#diff")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.className") == "block here"
    page.locator(".fold summary").first.click()
    page.click('a[href="muon-script.html"] >> nth=0')
    is_at("speedrun/muon-script.html")
    page.locator("#L100").hover()
    assert page.locator(".telling a").get_attribute("href").endswith(".html")
    assert page.locator(".telling").inner_text()[:2] in ("00", "01")  # its milestone
    code = page.evaluate("[...document.querySelectorAll('.script code')]"
                         ".map((line) => line.textContent + '\\n').join('')")
    script = (five / "speedrun/muon/train_gpt.py").read_text(encoding="utf-8")
    assert code == script  # what the button copies
    page.goto(f"{address}speedrun/muon-script.html#L200")
    assert 0 <= page.locator("#L200").bounding_box()["y"] < 800
    page.keyboard.press("/")
    page.keyboard.type("01 muon")
    page.wait_for_selector("dialog li")
    page.keyboard.press("Escape")  # closes at once, although a word is typed
    assert not page.locator("dialog").is_visible()
    page.keyboard.press("/")
    page.keyboard.press("ArrowDown")
    found = "document.activeElement"
    assert page.evaluate(f"[{found}.localName, getComputedStyle({found}).outlineStyle]") == [
        "a", "solid"]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    is_at("speedrun/muon.html")
    page.click("text=Lesson >> nth=1")
    is_at("lessons/01_muon.html")
    for picture in page.locator(".lesson img").all():
        picture.scroll_into_view_if_needed()
        page.wait_for_function("(picture) => picture.complete", arg=picture.element_handle())
        assert picture.evaluate("(picture) => picture.naturalWidth") > 100
    assert faults == []
    page.close()


@pytest.mark.parametrize("question, path", [
    ("what changed in 05o", "speedrun/symmetric_muon.html"),
    ("the soft cap and its evolution", "threads/cap.html"),
    ("line 300 of 14i", "speedrun/fp8_mlp-script.html#L300"),
    ("how many GPUs for 07", "run.html#run-07"),
    ("which idea saved most", "saved.html"),
    ("download 09", "run.html#run-09"),
    ("RoPE", "speedrun/rotary.html"), ("muon", "speedrun/muon.html"),
    ("U-Net", "speedrun/skip_connections.html"), ("ZeRO", "speedrun/sharded_adam.html"),
    ("GQA", "speedrun/paired_heads.html"), ("cu_seqlens", "speedrun/flash_attention_3.html"),
    ("softcap", "speedrun/soft_cap.html"), ("Keller Jordan", "records.html#r2"),
    ("record 21", "records.html#r21"), ("sliding window", "speedrun/flex_attention.html"),
    ("bf16", "speedrun/bfloat16.html"), ("LR schedule", "speedrun/flat_then_linear.html"),
    ("one GPU", "run.html#one-gpu")])
def test_a_question_has_its_answer_first(asked, question, path):
    asked.locator("dialog input").fill(question)
    assert asked.locator("dialog li a").first.get_attribute("href").endswith(f"/{path}")


@pytest.fixture(scope="module")
def asked(browser, five):
    """A page whose search is open."""
    page = browser.new_page()
    page.goto(f"{five.as_uri()}/index.html")
    page.keyboard.press("/")
    page.wait_for_function("window.searchIndex")
    yield page
    page.close()


# ---- the whole site


def seconds():
    """Processor time until now, that of the processes which draw the models too."""
    return sum(os.times()[:4])


@pytest.mark.slow
def test_the_whole_site_and_twice_as_many_milestones(tmp_path):
    start = seconds()
    files = build(tmp_path / "whole")
    once = seconds() - start
    check_pages(tmp_path / "whole", set(files))
    build(tmp_path / "again")
    assert contents(tmp_path / "whole") == contents(tmp_path / "again")
    root = tmp_path / "doubled"
    for part in ("history", "lessons"):
        shutil.copytree(REPOSITORY / part, root / part,
                        ignore=shutil.ignore_patterns("__pycache__", ".cache"))
    for letter, other in zip("zyx", sorted({m.chain for m in load_manifest().milestones}),
                             strict=True):
        for folder in sorted((root / "history" / other).iterdir()):
            if folder.is_dir():
                id, _, slug = folder.name.partition("_")
                again = re.sub(r"^[a-z]?", letter, id)
                new = root / "history" / f"z_{other}" / f"{again}_{slug}_again"
                shutil.copytree(folder, new)
                toml = (new / "milestone.toml").read_text(encoding="utf-8")
                toml = re.sub(r'^parent = "[a-z]?(\d)', rf'parent = "{letter}\1', toml, flags=re.M)
                (new / "milestone.toml").write_text(toml, encoding="utf-8")
                for script in new.glob("*.py"):  # other texts, so that nothing is known of them
                    text = script.read_text(encoding="utf-8")
                    script.write_text(text.replace("self", "this"), encoding="utf-8")
    for known in (html._colours, html._coloured, find_difference, line_origins, split_blocks):
        known.cache_clear()
    start = seconds()
    twice = build(tmp_path / "out", root)
    twofold = seconds() - start
    check_pages(tmp_path / "out", set(twice))
    assert len(load_manifest(root / "history").milestones) == 2 * len(load_manifest().milestones)
    print(f"{len(files)} files in {once:.1f} s, {len(twice)} files in {twofold:.1f} s")
    assert once < 2 * 60 and twofold < 3 * once  # a minute on two cores
