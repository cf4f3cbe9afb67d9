"""Tables, pictures and commands. Run: .venv/bin/python -m pytest tests/test_tools.py"""

import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot
from PIL import Image

import make_figures
import test_predictions
from speedrun.base.errors import UserError
from speedrun.compare.plot import stored_hash
from speedrun.figures import attention_cost, causes, readme, tables
from speedrun.figures.generated import TABLES
from speedrun.figures.predictions import write_predictions
from speedrun.history.manifest import REPOSITORY, ManifestError, Milestone, load_manifest
from speedrun.history.records import load_records
from speedrun.run.data import FINEWEB_SHARD_TOKENS, shards_read, steps_by_shard
from speedrun.scripts import flops
from speedrun.scripts.find import code_hash
from test_ladder import line_of

COMMANDS = sorted((REPOSITORY / "tools").glob("*.py"))


@pytest.fixture(scope="module")
def manifest():
    return load_manifest().of_chain()


@pytest.fixture(scope="module")
def records():
    return load_records()


# ---- tables and pictures ----


def test_a_gain_is_fewer_tokens_times_faster_tokens(manifest):
    found = causes.gains(manifest)
    by_slug = {manifest.get(gain.label.split()[0]).slug: gain for gain in found}
    tokens = math.log(9536 / 6200)  # both take 524,288 tokens a step
    assert by_slug["muon"][1:] == pytest.approx((22.3, math.log(31.4 / 22.3), tokens,
                                                 math.log(31.4 / 9536 * 6200 / 22.3)))
    assert by_slug["muon"].speed < 0 < by_slug["muon"].tokens
    tokens = math.log(1393 * 524_288 / (1770 * 393_216))  # more steps of a smaller batch
    assert by_slug["smaller_batch"].tokens == pytest.approx(tokens) and tokens > 0
    assert by_slug["distributed_muon"].tokens == 0
    assert by_slug["rotary"].tokens is by_slug["rotary"].speed is None
    last = manifest.milestones[-1].minutes
    assert math.prod(causes.totals(found)) == pytest.approx(45 / last)
    assert sum(gain.whole for gain in found) == pytest.approx(math.log(45 / last))


def test_milestones_of_one_record_share_a_gain(manifest):
    labels = [gain.label for gain in causes.gains(manifest)]
    records = dict.fromkeys(m.record.number for m in manifest.milestones if m.record)
    assert len(labels) == len(records) - 1  # the first is measured from
    for m in manifest.milestones:
        named = [label for label in labels if m.id in re.split("[ ,]+", label)]
        assert len(named) == (m.record is not None and m.record != manifest.milestones[0].record)


def test_a_gain_without_tokens_is_not_split(manifest, monkeypatch):
    split = sum(gain.tokens is not None for gain in causes.gains(manifest))
    before, known = causes.shown_in(manifest), Milestone.tokens
    unknown = manifest.get("untied_head")
    monkeypatch.setattr(Milestone, "tokens", property(
        lambda m: None if m is unknown else known.fget(m)))
    found = causes.gains(manifest)
    assert sum(gain.tokens is not None for gain in found) == split - 2  # to it, and from it
    axes = pyplot.subplots()[1]
    causes.panel(axes, found)
    assert len(axes.patches) == len(found) + split - 2  # one bar instead of two
    assert causes.shown_in(manifest) != before


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
    assert "took 45 minutes" in told and f"now {records[-1].minutes:g} minutes." in told
    assert f"The {len(manifest.milestones)} scripts" in told
    assert "step by step: read" in told  # down to the last record
    told = readme.claim(manifest, [records[0], replace(records[-1], minutes=1.0)])
    assert "step down to 1.23: read" in told.replace("\n", " ")


def test_the_readmes_excerpt_is_of_the_two_scripts(manifest):
    old, new = (manifest.get(id).script.read_text("utf-8").splitlines() for id in ("00b", "01"))
    lines = readme.excerpt(manifest).splitlines()
    assert lines[0] == "```diff" and lines[-1] == "```"
    shown = {mark: [line[2:] for line in lines if line[:1] == mark] for mark in "-+"}
    for mark, inside, outside in (("-", old, new), ("+", new, old)):
        assert len(shown[mark]) > 5 and set(shown[mark]) <= {*inside, ""}
        assert shown[mark][0] not in outside


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


def test_a_run_reads_what_its_script_takes():
    assert len(load_manifest().get("13d").step_tokens_read) == 1547  # its record took 1,775 steps


def test_committed_tables_and_pictures_are_fresh(capsys):
    code = make_figures.main(["--check"])
    assert code == 0, "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["records.png", "causes.png"])
def test_picture_is_small_and_wide(name):
    png = (REPOSITORY / "history" / name).read_bytes()
    assert len(png) < 200_000
    assert int.from_bytes(png[16:20], "big") == 1600


@pytest.fixture(scope="module", autouse=True)
def counted_once():
    """What is counted of a milestone, FLOPs and tiles, is counted once, for copies of it, too."""
    known = {}

    def once(count, key):
        def counted(what, *more):
            name = count.__name__, key(what).parent.name, *map(repr, more)
            if name not in known:
                known[name] = count(what, *more)
            return known[name]

        return counted

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flops, "training_flops_per_token", once(
            flops.training_flops_per_token, Path))
        patched.setattr(attention_cost, "count_tiles", once(
            attention_cost.count_tiles, lambda module: Path(module.__file__)))
        yield


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A repository with every generated item, all fresh."""
    tmp_path = tmp_path_factory.mktemp("fresh")
    shutil.copytree(REPOSITORY / "history", tmp_path / "history", ignore=shutil.ignore_patterns(
        "__pycache__", "*.md", "*.png"))
    lines = [line_of(m, seed) for m in load_manifest().of_chain().milestones for seed in range(3)]
    (tmp_path / "history" / "results" / "tiny.jsonl").write_text("\n".join(lines), "utf-8")
    predicted = test_predictions.invented(*(m.id for m in load_manifest().of_chain().milestones))
    write_predictions(tmp_path / "history" / "results" / "predictions.json", predicted)
    for table in TABLES:
        path = tmp_path / table.file
        path.parent.mkdir(exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"<!-- begin {table.name} -->\n<!-- end {table.name} -->\n")
    assert make_figures.main([], root=tmp_path) == 0
    return tmp_path


@pytest.fixture
def copy(fresh, tmp_path):
    """A copy of it."""
    return shutil.copytree(fresh, tmp_path / "copy")


def snapshot(root: Path) -> dict:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_check_names_what_is_stale_or_missing_and_writes_nothing(
    copy, tmp_path, capsys, monkeypatch
):
    assert make_figures.main(["--check"], root=copy) == 0
    copy = shutil.copytree(copy, tmp_path / "edited")  # a folder's manifest is read once
    listing = copy / "history" / "records.json"
    listing.write_text(listing.read_text("utf-8").replace("31.4", "31.5"), encoding="utf-8")
    entry = copy / "history" / "speedrun" / "01_muon" / "milestone.toml"
    entry.write_text(entry.read_text("utf-8").replace("3.2785", "3.2786"), encoding="utf-8")
    (copy / "README.md").unlink()
    (copy / "history" / "records.png").unlink()
    (copy / "history" / "results" / "tiny.jsonl").write_text("{", encoding="utf-8")
    before = snapshot(copy)
    capsys.readouterr()
    assert make_figures.main(["--check"], root=copy) == 1
    seen = capsys.readouterr()
    assert seen.out.splitlines() == [
        "stale: history/README.md: table milestones",
        "stale: history/README.md: table records",
        "stale: history/records.png",
        "stale: history/causes.png",
    ]
    assert "error: README.md: the file is missing" in seen.err
    assert "line 1 column 2 (char 1); git restore history/results/tiny.jsonl\n" in seen.err
    monkeypatch.setattr("os.fsync", lambda _: os.truncate("", -1))  # any OSError
    with pytest.raises(UserError, match="history/README.md cannot be written"):
        make_figures.main([], root=copy)
    assert snapshot(copy) == before


def test_unreadable_history_is_an_error_line(copy):
    (copy / "history" / "speedrun" / "01_muon" / "milestone.toml").write_text("x = 3\n", "utf-8")
    with pytest.raises(ManifestError, match='01_muon/milestone.toml: unknown key "x"'):
        make_figures.main(["--check"], root=copy)


def test_stored_hash_of_something_else_is_none(tmp_path):
    file = tmp_path / "x.png"
    assert stored_hash(file) is None
    picture = (REPOSITORY / "history" / "records.png").read_bytes()
    for content in (b"", b"not a picture", picture[:40], picture[:-4000]):
        file.write_bytes(content)
        assert stored_hash(file) is None
    Image.new("L", (2, 2)).save(file, "JPEG")  # of a kind that has no texts
    assert stored_hash(file) is None


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
