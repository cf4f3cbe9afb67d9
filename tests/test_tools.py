"""Tables, pictures and commands. Run: .venv/bin/python -m pytest tests/test_tools.py"""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import make_figures
import test_predictions
from speedrun.base.errors import UserError
from speedrun.figures import causes, charts, generated, readme, tables
from speedrun.figures.predictions import write_predictions
from speedrun.history.manifest import REPOSITORY, ManifestError, load_manifest
from speedrun.history.predictions import load_predictions
from speedrun.history.records import load_records
from speedrun.run.data import FINEWEB_SHARD_TOKENS, shards_read, steps_by_shard
from speedrun.scripts import find
from speedrun.scripts.find import code_hash
from test_ladder import line_of

# Tables that count FLOPs or tiles, which takes long: they are made once, in the repository itself.
COUNTED = {"claims", "one-gpu", "memory", "attention"}
OTHERS = [table for table in generated.TABLES if table.name not in COUNTED]
WHY = Path("history/speedrun/00_baseline/why.svg")
COMMANDS = sorted((REPOSITORY / "tools").glob("*.py"))


@pytest.fixture(scope="module")
def manifest():
    return load_manifest().of_chain()


@pytest.fixture(scope="module")
def records():
    return load_records()


# ---- tables and pictures ----


def test_a_cause_is_fewer_tokens_times_faster_tokens(manifest):
    by_id = {cause.label.split()[0]: cause for cause in causes.causes(manifest)}
    tokens = math.log(9536 / 6200)  # 01's records, both with 524,288 tokens a step
    assert by_id["01"][1:] == pytest.approx((60 * (31.4 - 22.3), math.log(31.4 / 22.3), tokens,
                                             math.log(31.4 / 9536 * 6200 / 22.3)))
    assert by_id["01"].speed < 0 < by_id["01"].tokens
    tokens = 393_216_000 / 372_113_408  # of 1,480 and of 1,415 steps; the last steps take most
    assert by_id["14c"][1:] == pytest.approx(  # by the runs of its own folder
        (2.7893, math.log(84.7039 / 81.9146), math.log(tokens),
         math.log(84.7039 / 81.9146 / tokens)))
    assert by_id["03"].tokens == 0 and by_id["05i"].tokens is by_id["05i"].speed is None
    assert not by_id.keys() & {"00b", "03b", "03d", "05f", "06", "14a", "14g"}  # none is isolated


def test_all_minutes_are_tokens_times_the_rest(manifest):
    for last, minutes in (("09", 2.358), ("14i", 1.23)):
        tokens, speed, first = causes.totals(manifest, last)
        assert tokens * speed * first == pytest.approx(45 / minutes)
        assert first == pytest.approx(45 / 31.4) and tokens > speed > 1
    tokens = 9536 * 524_288 / manifest.get("14i").tokens
    assert causes.totals(manifest, "14i")[0] == pytest.approx(tokens)


def test_a_cause_without_tokens_is_not_split(manifest):
    found = causes.causes(manifest)
    split = sum(cause.tokens is not None for cause in found)
    drawn = charts.causes_chart(found, charts.FILE).bars
    kinds = [sum(bar.part == part for bar in drawn) for part in ("tokens", "speed", "whole")]
    assert kinds == [split + 1, split + 1, len(found) - split + 1]  # and the legend's
    longest = max(found, key=lambda cause: cause.tokens or 0)
    (bar,) = [bar for bar in drawn if bar.width == max(b.width for b in drawn)]
    assert bar.part == "tokens" and bar.y == 20 + charts.ROW * found.index(longest) + 2


def test_text_between_markers_is_replaced():
    text = "a\n<!-- begin t -->\nold\n<!-- end t -->\nb\n"
    new = tables.replace_between(text, "t", "new")
    assert new == "a\n<!-- begin t -->\nnew\n<!-- end t -->\nb\n"
    assert tables.replace_between(new, "t", "new") == new


@pytest.mark.parametrize("text", [
    "<!-- end t -->", "<!-- begin t -->", "<!-- begin t --><!-- begin t --><!-- end t -->",
    "<!-- end t --><!-- begin t -->", "<!-- begin t --><!-- end t --><!-- end t -->", "",
])
def test_broken_markers_are_refused(text):
    fault = "<!-- begin t --> and <!-- end t --> must occur once each, in this order"
    with pytest.raises(ValueError, match=fault):
        tables.replace_between(text, "t", "new")


def test_milestone_table_lists_what_is_written(manifest):
    rows = tables.milestone_table(manifest).splitlines()[2:]
    for m, row in zip(manifest.milestones, rows, strict=True):
        assert f"[{m.id}]({m.chain}/{m.name})" in row and row.count("|") == 10
        assert f"](../{m.lesson})" in row
        assert f"| {m.minutes:g} |" in row if m.minutes else "| — |" in row
        assert f"part of #{m.part_of}" in row or not m.part_of


def test_the_readme_shows_the_stations(manifest, records):
    table = readme.station_table(manifest)
    assert re.findall(r"^\| \[(\w+)\]", table, re.M) == [
        m.id for m in manifest.milestones if not m.id[-1].isalpha()]
    assert "| 22.3 | 3.25B | 123,532,032 | [read](lessons/01_muon.ipynb) |" in table
    told = readme.claim(manifest, records).replace("\n", " ")
    assert "took 45 minutes" in told and f"record #89 took {records[-1].minutes:g}. The" in told
    assert "[3 more records](history/after.md) were accepted; the last, #92, is 0.665" in told
    assert f"The {len(manifest.milestones)} scripts" in told
    assert "step by step: read" in told  # down to the last record
    told = readme.claim(manifest, [records[0], replace(records[-1], minutes=1.0)])
    assert "step down to 1.23: read" in told.replace("\n", " ")


def test_the_readmes_excerpt_is_of_the_two_scripts(manifest):
    old, new = (manifest.get(id).script.read_text("utf-8").splitlines() for id in ("00b", "01"))
    lines = readme.excerpt(manifest).splitlines()
    assert lines[0] == "```diff" and lines[-1] == "```"
    shown = [line[2:] for line in lines if line[:1] == "+"]
    assert len(shown) > 5 and set(shown) <= {*new, ""} and shown[0] not in old


def test_links_in_readmes_lead_to_files_and_headings():
    def anchors(path):
        headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M)
        return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}

    links = {(file, link) for folder in ("", "history", "data", "train", "lessons")
             for file in (REPOSITORY / folder).glob("*.md")
             for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8"))}
    assert len(links) > 100
    for file, link in sorted(links):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if not link.startswith("https://"):
            assert target.exists() and (not anchor or anchor in anchors(target)), (file, link)


def test_the_readme_is_short():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120


def test_the_readme_says_how_large_09_is(manifest):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f" 09 has {manifest.get('09').parameters:,} parameters," in text


def test_record_table_has_every_record(manifest, records):
    rows = tables.record_table(records, manifest).splitlines()[2:]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 90))
    assert rows[3].endswith("| 01 |") and rows[6].endswith("| — |")


def test_half_years_begin_in_january_and_july():
    days = "2024-06-30", "2024-07-01", "2024-12-31", "2025-01-01", "2025-06-30", "2025-08-02"
    records = [SimpleNamespace(date=day) for day in days]
    ticks = [(0, "Jun 2024"), (1, "Jul 2024"), (3, "Jan 2025"), (5, "Aug 2025")]
    assert charts._first_of_halves(records, 9999) == ticks
    assert charts._first_of_halves(records, 6 * 11 * charts.LETTER) == [  # names do not touch
        ticks[0], (2, "Dec 2024"), (4, "Jun 2025")]


def test_number_ranges():
    assert tables.number_ranges((22, 23, 24, 30)) == "#22–#24, #30"
    assert tables.number_ranges((5,)) == "#5" and tables.number_ranges(()) == ""


@pytest.mark.parametrize(
    ("steps", "per_shard", "shards"),
    [
        ([262_144] * 24_576, 381, 65),
        ([524_288] * 6_200, 190, 33),
        ([524_288] * 380, 190, 2),  # a shard is used up exactly
        ([524_288] * 381, 190, 3),
        ([50_000_000] * 10, 1, 10),  # half a shard twice needs one token more than it has
        ([524_288] * 20_000, 190, 103),  # more than all shards: the first comes again
        ([30_000_000, 60_000_000, 60_000_000, 90_000_000], 2, 3),  # the batch grows
    ],
)
def test_shards_read(steps, per_shard, shards):
    assert shards_read(steps) == shards
    assert len(next(steps_by_shard(steps, [FINEWEB_SHARD_TOKENS]))) == per_shard


def test_steps_take_a_shard_to_its_end():
    assert list(steps_by_shard([3, 3, 4, 9], [7, 5, 9, 10])) == [[3, 3], [4], [], [9]]


def test_a_run_reads_what_its_script_takes():
    assert len(load_manifest().get("13d").step_tokens_read) == 1547  # its record took 1,775 steps


def test_committed_tables_and_pictures_are_fresh(capsys):
    code = make_figures.main(["--check"])
    assert code == 0, "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["records.svg", "causes.svg", "tiny.svg"])
def test_a_picture_is_whole_small_and_leads_to_scripts(name):
    file = REPOSITORY / "history" / name
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    width, height = float(root.get("width")), float(root.get("height"))
    assert file.stat().st_size < 40_000 and width == charts.FILE
    assert all(0 <= float(text.get("x")) <= width and 0 <= float(text.get("y")) <= height
               for text in root.iter("{http://www.w3.org/2000/svg}text"))
    links = [link.get("href") for link in root.iter("{http://www.w3.org/2000/svg}a")]
    assert all((file.parent / link).is_file() for link in links)
    assert bool(links) == (name != "causes.svg")
    used = set(re.findall(r"var\((--[\w-]+)\)", file.read_text(encoding="utf-8")))
    assert used and used <= set(re.findall(r"(--[\w-]+):", file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A repository with every generated item but COUNTED and the figures of other whys than 00's,
    all fresh."""
    tmp_path = tmp_path_factory.mktemp("fresh")
    shutil.copytree(REPOSITORY / "history", tmp_path / "history", ignore=shutil.ignore_patterns(
        "__pycache__", "*.md", "*.svg"))
    lines = [line_of(m, seed) for m in load_manifest().of_chain().milestones for seed in range(3)]
    (tmp_path / "history" / "results" / "tiny.jsonl").write_text("\n".join(lines), "utf-8")
    predicted = test_predictions.invented(*(m.id for m in load_manifest().of_chain().milestones))
    write_predictions(tmp_path / "history" / "results" / "predictions.json", predicted)
    shutil.copy(REPOSITORY / WHY.with_suffix(".md"), (tmp_path / WHY).parent)
    (tmp_path / "lessons").mkdir()
    shutil.copy(REPOSITORY / "lessons" / "00_baseline.ipynb", tmp_path / "lessons")
    for table in OTHERS:
        path = tmp_path / table.file
        path.parent.mkdir(exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"<!-- begin {table.name} -->\n<!-- end {table.name} -->\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generated, "TABLES", OTHERS)
        assert make_figures.main([], root=tmp_path) == 0
    return tmp_path


@pytest.fixture
def copy(fresh, tmp_path, monkeypatch):
    """A copy of it."""
    monkeypatch.setattr(generated, "TABLES", OTHERS)
    return shutil.copytree(fresh, tmp_path / "copy")


def snapshot(root: Path) -> dict:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_results_are_made_again_only_where_that_is_asked_for(monkeypatch):
    again, results = [], REPOSITORY / "history" / "results"
    monkeypatch.setattr("speedrun.figures.predictions.predict_stale", again.append)
    monkeypatch.setattr("speedrun.figures.ladder.run_stale", lambda path, *_: again.append(path))
    monkeypatch.setattr(make_figures, "update", lambda *_: ([], []))
    for options in ([], ["--check"], ["--predict"], ["--tiny"]):
        assert make_figures.main(options) == 0
    assert again == [results / "predictions.json", results / "tiny.jsonl"]
    for found, options, code in (((["a"], []), ["--check"], 1), ((["a"], []), [], 0),
                                 (([], ["b"]), ["--check"], 1)):
        monkeypatch.setattr(make_figures, "update", lambda *_, found=found: found)
        assert make_figures.main(options) == code


def test_check_names_what_is_stale_or_missing_and_writes_nothing(
    copy, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # drawing a why imports its script
    assert make_figures.main(["--check"], root=copy) == 0
    assert (copy / WHY).read_bytes() == (REPOSITORY / WHY).read_bytes()
    copy = shutil.copytree(copy, tmp_path / "edited")  # a folder's manifest is read once
    listing = copy / "history" / "records.json"
    listing.write_text(listing.read_text("utf-8").replace("31.4", "31.5"), encoding="utf-8")
    entry = copy / "history" / "speedrun" / "01_muon" / "milestone.toml"
    entry.write_text(entry.read_text("utf-8").replace("3.2785", "3.2786"), encoding="utf-8")
    (copy / "README.md").unlink()
    (copy / "history" / "records.svg").unlink()
    (copy / WHY).write_text("old", encoding="utf-8")
    outside = copy / "lessons" / "carries_over.md"
    outside.write_text(outside.read_text("utf-8").replace("<!-- end", "<!-- End"), "utf-8")
    (copy / "history" / "results" / "optimizers.json").write_text("{", encoding="utf-8")
    (copy / "history" / "results" / "encore_finetune.json").unlink()
    shutil.copy(REPOSITORY / WHY.parent.parent / "01_muon" / "why.md", entry.parent)  # no lesson
    (copy / "history" / "results" / "tiny.jsonl").write_text("{", encoding="utf-8")
    predicted = copy / "history" / "results" / "predictions.json"
    old = replace(load_predictions(predicted)["baseline"], code="old")
    write_predictions(predicted, load_predictions(predicted) | {"one_shape": old})  # e1's
    before = snapshot(copy)
    capsys.readouterr()
    assert make_figures.main(["--check"], root=copy) == 1
    seen = capsys.readouterr()
    assert seen.out.splitlines() == [
        "stale: history/README.md: table milestones",
        "stale: history/README.md: table saved",
        "stale: history/measured/README.md: table measured",  # with e1's predicted memory
        "stale: history/README.md: table records",
        "stale: history/records.svg",
        "stale: history/causes.svg",
        f"stale: {WHY}",
    ]
    assert "error: README.md: the file is missing" in seen.err
    for line in ("lessons/carries_over.md: <!-- begin ", "history/results/optimizers.json: Expect",
                 "history/results/encore_finetune.json: [Errno 2]", "01_muon: [Errno 2]"):
        assert f"error: {line}" in seen.err
    assert "predictions.json: e1: the script has changed since it was predicted; make" in seen.err
    assert "(char 1); git restore history/results/tiny.jsonl\n" in seen.err
    assert "error: history/results/tiny.jsonl: line 1: Expecting" in seen.err
    assert seen.err.endswith("\nrun: python tools/make_figures.py\n")
    monkeypatch.setattr("os.fsync", lambda _: os.truncate("", -1))  # any OSError
    with pytest.raises(UserError, match="history/README.md cannot be written"):
        make_figures.main([], root=copy)
    assert snapshot(copy) == before


def test_what_cannot_be_read_is_named_and_the_rest_is_written(copy, capsys, monkeypatch):
    monkeypatch.setattr(generated, "TABLES", ())
    monkeypatch.setattr(generated, "PICTURES", ())
    results, timed = (copy / "history" / "results" / name for name in ("", "prelude_added.json"))
    for file in (results / "tiny.jsonl", results / "predictions.json", copy / WHY):
        file.unlink()
    found = json.loads(timed.read_text(encoding="utf-8"))
    found["entries"][0]["code"] = "old"
    timed.write_text(json.dumps(found), encoding="utf-8")
    for file in "measured/x.json", "results/prelude_taken_out.json":
        (copy / "history" / file).write_text("{", encoding="utf-8")
    assert make_figures.main([], root=copy) == 1
    seen, again = capsys.readouterr(), "make it again: python tools/make_figures.py"
    assert seen.out == f"wrote: {WHY}\n" and (copy / WHY).exists()
    assert seen.err.splitlines() == [f"error: history/{line}" for line in (
        f"results/tiny.jsonl: the file is missing; {again} --tiny",
        f"results/predictions.json: the file is missing; {again} --predict",
        "results/prelude_added.json: p0: the script has changed since it was timed; make it again: "
        + found["command"],
        *(f"{name}.json: Expecting property name enclosed in double quotes: line 1 column 2"
          " (char 1)" for name in ("results/prelude_taken_out", "measured/x")))]
    assert generated._read_sources(copy)[0].timings is None, "both files, or neither"


def test_unreadable_history_is_an_error_line(copy):
    (copy / "history" / "speedrun" / "01_muon" / "milestone.toml").write_text("x = 3\n", "utf-8")
    with pytest.raises(ManifestError, match='01_muon/milestone.toml: unknown key "x"'):
        make_figures.main(["--check"], root=copy)


def test_what_milestone_a_script_is(manifest, tmp_path):
    """One is known by its file, whatever the path; others by their hyperparameters, then by what
    they define."""
    milestone = manifest.get("09")
    script, link = milestone.script, tmp_path / "link.py"
    link.symlink_to(script)
    for path in (link, script.parent / ".." / script.parent.name / script.name):
        assert find.find_script(str(path)).milestone == milestone
    text = script.read_text("utf-8")
    (other := tmp_path / "other.py").write_text(text.replace("def main(", "def my_main("), "utf-8")
    found = find.find_script(str(other))
    assert (found.milestone, found.tiny_of) == (None, milestone)
    fields = re.search(r"^@dataclass.*?^class Hyperparameters:.*?(?=^\S)", text, re.M | re.S)[0]
    other.write_text(f"from dataclasses import dataclass\n\n{fields}", "utf-8")
    same = find.nearest_milestone(other, manifest)
    assert find.default_hyperparameters(same.script) == find.default_hyperparameters(script)


def test_a_hash_of_code_that_every_python_makes(tmp_path):
    script = tmp_path / "train_gpt.py"
    text = '''"""Card."""
import os


class A:
    """Doc."""
    def f(self, x: int = 3, *, y=None) -> None:
        assert x, "message"
        return [x, "a", 1.5e-10, b"c", lambda: y]
'''
    script.write_text(text, encoding="utf-8")
    assert code_hash(script) == "ff35a51d74ff1bed"  # in 3.11, 3.12 and 3.13
    for old, new, same in (("Doc", "Word", True), ("message", "other", True),
                           ('        assert x, "message"\n', "", True), ("\n\n", "\n", True),
                           ("import os", "import os  # why", True), ("= 3", "= 4", False),
                           ("[x, ", "[", False), ("y=None", "y=0", False)):
        script.write_text(text.replace(old, new), encoding="utf-8")
        assert (code_hash(script) == "ff35a51d74ff1bed") == same, new
    script.write_text(text.replace("import os\n", "") + "import os\n", encoding="utf-8")  # moved
    assert code_hash(script) == "ff35a51d74ff1bed"
    script.write_text(text + 'if find_spec("triton"):\n    f = 1\n', encoding="utf-8")  # kernels
    assert code_hash(script) != "ff35a51d74ff1bed" == code_hash(script, kernels=False)
