"""Manifest, tables, pictures and commands. Run: python -m pytest tests/test_tools.py"""

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from matplotlib import pyplot
from PIL import Image

import make_figures
import test_roofline
from speedrun.figures import causes, records_plot, tables
from speedrun.figures.predictions import write_predictions
from speedrun.history.manifest import KINDS, REPOSITORY, ManifestError, load_manifest
from speedrun.history.records import load_records
from speedrun.scripts.find import code_hash
from test_ladder import invented

COMMANDS = sorted((REPOSITORY / "tools").glob("*.py"))

VALID = """
[scales.tiny]
train_steps = 10
seed = 1

[[milestone]]
id = "00"
slug = "base"
title = "Base"
idea = "Start."
kind = "optimizer"
written = true
chain = "main"
program = "train_gpt.py"
changes = []
minutes = 45
date = "2024-06-01"
curve = [[0, 10.9], [100, 3.3]]
budget = { lines = 420 }
tiny = { seed = 2 }

[[milestone]]
id = "01"
slug = "next"
title = "Next"
parent = "00"
idea = "Go on."
kind = "systems"
written = false
"""


@pytest.fixture(scope="module")
def manifest():
    return load_manifest()


@pytest.fixture(scope="module")
def records():
    return load_records()


def load_text(tmp_path: Path, text: str):
    path = tmp_path / "list.toml"
    path.write_text(text, encoding="utf-8")
    return load_manifest(path)


# ---- the reader ----


def test_valid_manifest_is_read(tmp_path):
    manifest = load_text(tmp_path, VALID)
    base, child = manifest.milestones
    assert base.parent is None and child.parent == "00"
    assert base.curve == ((0, 10.9), (100, 3.3))
    assert base.budget.lines == 420 and base.budget.diff_lines is None
    assert child.minutes is None and child.budget is None  # absent means not recorded
    assert base.script == REPOSITORY / "history" / "00_base" / "train_gpt.py"
    assert manifest.written() == (base,)
    assert manifest.children("base") == (child,)


def test_several_chains_are_allowed(tmp_path):
    chain = 'chain = "loop"\nprogram = "loop.py"\n'
    manifest = load_text(tmp_path, VALID.replace('parent = "00"\n', chain).replace('"01"', '"p0"'))
    assert [(m.id, m.chain, m.program) for m in manifest.milestones] == [
        ("00", "main", "train_gpt.py"), ("p0", "loop", "loop.py")]
    assert manifest.of_chain() == manifest.of_chain("main") == manifest.milestones[:1]
    assert manifest.learners_script() == REPOSITORY / "train" / "train_gpt.py"
    manifest = load_text(tmp_path, VALID)
    assert {(m.chain, m.program) for m in manifest.milestones} == {("main", "train_gpt.py")}
    assert [m.id for m in manifest.lineage(manifest.get("01"))] == ["01", "00"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("minutes = 45", "minuets = 45", 'milestone "00": unknown key "minuets"; did you mean "m'),
        ('idea = "Start."\n', "", 'milestone "00": missing key "idea"'),
        ('id = "01"\n', "", 'milestone "number 2": missing key "id"'),
        ("budget = { lines = 420 }\n", "", 'milestone "00": missing key "budget"'),
        ("changes = []\n", "", 'milestone "00": missing key "changes"'),
        ("lines = 420", "diff_lines = 420", 'milestone "00": budget: missing key "lines"'),
        ("lines = 420", "lines = 420, rows = 1", 'milestone "00": budget: unknown key "rows"'),
        ("minutes = 45", 'minutes = "45"', '"minutes" must be a number above 0, not \'45\''),
        ("minutes = 45", "minutes = true", '"minutes" must be a number above 0, not True'),
        ("minutes = 45", "minutes = -45", '"minutes" must be a number above 0, not -45'),
        ("minutes = 45", "train_steps = 1.5", '"train_steps" must be a whole number'),
        ("minutes = 45", 'records = ["1"]', '"records" must be a list of whole numbers'),
        ("changes = []", 'changes = "GPT"', '"changes" must be a list of strings'),
        ("written = true", 'written = "yes"', '"written" must be true or false'),
        ('slug = "base"', 'slug = ""', '"slug" must be a string'),
        ("[[0, 10.9], [100, 3.3]]", "[[0, 10.9, 1]]", '"curve" must be a list of [step, loss]'),
        ('date = "2024-06-01"', 'date = "June 2024"', '"date" must be YYYY-MM-DD'),
        ("tiny = { seed = 2 }", "tiny = { seed = [2] }", '"tiny" must be a table of plain values'),
        ('kind = "systems"', 'kind = "magic"', 'milestone "01": unknown kind "magic"; one of opt'),
        ('parent = "00"', 'parent = "07"', 'milestone "01": parent "07" does not exist'),
        ('chain = "main"\n', "", 'milestone "00": missing key "chain"'),
        ('parent = "00"', 'parent = "00"\nprogram = "x.py"', '"program" is that of its root'),
        ('parent = "00"', 'chain = "main"\nprogram = "x.py"', '"01": chain "main" has a root'),
        ('id = "01"', 'id = "00"', 'duplicate id "00"'),
        ('slug = "next"', 'slug = "base"', 'duplicate slug "base"'),
        ('slug = "base"', 'slug = "base"\nparent = "01"', "cycle: 00 -> 01 -> 00"),
        ('parent = "00"', 'parent = "01"', "cycle: 01 -> 01"),
        ("[scales.tiny]", "[scales.small]", 'scales: unknown key "small"'),
        ("[scales.tiny]", "[settings]", 'unknown key "settings"'),
        ("[[milestone]]", "[milestone.x]", "[[milestone]], with two brackets"),
        ('kind = "systems"', "kind = systems", "Invalid value"),
    ],
)
def test_fault_in_the_manifest_is_one_clear_line(tmp_path, old, new, message):
    assert old in VALID
    text = VALID.replace(old, new, 1)
    if old == "[[milestone]]":
        text = text[: text.index("[[milestone]]")]
    with pytest.raises(ManifestError) as error:
        load_text(tmp_path, text)
    line = str(error.value)
    assert message in line
    assert line.startswith("list.toml: ") and "\n" not in line


def test_missing_manifest_is_one_clear_line(tmp_path):
    with pytest.raises(ManifestError, match=r"none\.toml: No such file"):
        load_manifest(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "id"),
    [("01", "01"), ("1", "01"), ("muon", "01"), ("01_muon", "01"), ("0", "00"), ("00", "00"),
     ("5a", "05a"), ("05A", "05a"), ("10", "10"), (" muon ", "01")],
)  # fmt: skip
def test_get_takes_every_name_of_a_milestone(manifest, name, id):
    assert manifest.get(name).id == id


@pytest.mark.parametrize(
    ("name", "meant"),
    [("moun", "01_muon"), ("flexattention", "05_flex_attention"), ("05z", "05"), ("x" * 40, None)],
)
def test_get_suggests_the_nearest_name(manifest, name, meant):
    with pytest.raises(ManifestError) as error:
        manifest.get(name)
    expected = f'no milestone "{name}"' + (f"; did you mean {meant}" if meant else "")
    assert str(error.value).startswith(expected)
    assert meant or "did you mean" not in str(error.value)


def test_overrides_are_the_common_ones_then_the_milestones_own(tmp_path):
    manifest = load_text(tmp_path, VALID)
    base, child = manifest.milestones
    assert manifest.overrides(base, "tiny") == {"train_steps": 10, "seed": 2}
    assert manifest.overrides(child, "tiny") == {"train_steps": 10, "seed": 1}
    assert manifest.overrides(base, "record") == {}
    with pytest.raises(ManifestError, match='no scale "huge"; one of record, tiny'):
        manifest.overrides(base, "huge")
    apart = replace(child, tiny=dict(train_seq_len=8, val_seq_len=16))
    scales = replace(manifest, scales=dict(tiny=dict(seq_len=32, seed=2)))
    assert scales.overrides(base, "tiny") == {"seq_len": 32, "seed": 2}
    assert scales.overrides(apart, "tiny") == {"seed": 2, "train_seq_len": 8, "val_seq_len": 16}


# ---- the figures of the history ----


@pytest.fixture(scope="module")
def chain(manifest):
    """00 and its descendants, each the parent of the next."""
    found = [manifest.get("00")]
    while children := manifest.children(found[-1].id):
        (child,) = children
        found.append(child)
    return found


def test_the_history_is_whole_and_in_order(manifest, chain):
    ids = [m.id for m in chain]
    assert ids == [m.id for m in manifest.milestones if m.id in ids]
    assert ids == sorted(ids)
    assert all(m.kind in KINDS and m.besides and m.records and m.parameters for m in chain)
    assert [m.written for m in chain] == sorted((m.written for m in chain), reverse=True)


def test_minutes_fall_along_the_chain(chain):
    for one, next_one in zip(chain, chain[1:], strict=False):
        parts_of_a_record = one.records[-1:] == next_one.records[-1:]
        assert next_one.minutes < one.minutes or parts_of_a_record
    assert (chain[0].minutes, chain[-1].minutes) == (45, 1.23)


def test_milestones_quote_their_last_record(manifest, records):
    by_number = {r.number: r for r in records}
    for m in manifest.milestones:
        if not m.records:
            continue
        last = by_number[m.records[-1]]
        assert m.minutes == last.minutes, m.id
        if m.id != "00":  # a commit, dated apart from the record whose task it shares
            assert m.date == last.date, m.id
            assert {p for n in m.records for p in by_number[n].people} == set(m.authors), m.id


def test_every_record_is_told(manifest, records):
    untold = {7}  # 03's script under another PyTorch
    for record in records:
        told = [m for m in manifest.milestones if record.number in m.records]
        assert bool(told) != (record.number in untold)
        # one that holds several ideas is shared by neighbours
        assert all(b.parent == a.id for a, b in zip(told, told[1:], strict=False))


def test_curves_end_in_the_quoted_loss(manifest):
    for m in manifest.milestones:
        steps = [step for step, _ in m.curve]
        assert steps == sorted(set(steps)) and len(steps) <= 20, m.id
        assert not m.curve or m.curve[-1] == (m.train_steps, m.val_loss), m.id


def test_written_milestones_have_their_script(manifest):
    assert [m.id for m in manifest.written() if not m.script.exists()] == []
    folders = {path.parent.name for path in (REPOSITORY / "history").glob("*/train_gpt.py")}
    assert folders == {m.name for m in manifest.written()}


def test_records_are_whole_and_in_order(records):
    assert [r.number for r in records] == list(range(1, 90))
    days = [date.fromisoformat(r.date) for r in records]
    assert days == sorted(days)
    pairs = zip(records, records[1:], strict=False)
    slower = [after.number for before, after in pairs if after.minutes >= before.minutes]
    assert slower == [22]  # it beats the last re-timing of 21
    assert records[21].minutes < records[20].retimed[-1]["minutes"]


# ---- tables and pictures ----


def test_a_gain_is_fewer_tokens_times_faster_tokens(manifest):
    found = causes.gains(manifest)
    by_id = {gain.label.split()[0]: gain for gain in found}
    tokens = math.log(9536 / 6200)  # both take 524,288 tokens a step
    assert by_id["01"][1:] == pytest.approx((22.3, math.log(31.4 / 22.3), tokens,
                                             math.log(31.4 / 9536 * 6200 / 22.3)))
    assert by_id["01"].speed < 0 < by_id["01"].tokens
    tokens = math.log(1393 * 524_288 / (1770 * 393_216))  # more steps of a smaller batch
    assert by_id["05g"].tokens == pytest.approx(tokens) and tokens > 0
    assert by_id["03"].tokens == 0 and by_id["00a"].tokens is by_id["00a"].speed is None
    assert "05b value embeddings, 05b2" in [gain.label for gain in found]  # of one record
    last = manifest.written()[-1].minutes
    assert math.prod(causes.totals(found)) == pytest.approx(45 / last)
    assert sum(gain.whole for gain in found) == pytest.approx(math.log(45 / last))


def test_a_gain_without_tokens_is_not_split(manifest):
    milestones = tuple(replace(m, tokens_per_step=None if m.id == "03a" else m.tokens_per_step)
                       for m in manifest.milestones)
    found = causes.gains(replace(manifest, milestones=milestones))
    assert [gain.label[:3] for gain in found if gain.tokens is None] == ["00a", "03a", "03b"]
    axes = pyplot.subplots()[1]
    causes.panel(axes, found)
    assert len(axes.patches) == 2 * len(found) - 3  # one bar instead of two
    assert causes.data_hash(manifest) != causes.data_hash(replace(manifest, milestones=milestones))


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
    fault = "<!-- begin t --> and <!-- end t --> must stand there once each, in this order"
    with pytest.raises(ValueError, match=fault):
        tables.replace_between(text, "t", "new")


def test_milestone_table_links_only_what_is_written(manifest):
    rows = tables.milestone_table(manifest).splitlines()[2:]
    assert len(rows) == len(manifest.milestones)
    for m, row in zip(manifest.milestones, rows, strict=True):
        link = f"[{m.id}](history/{m.name})"
        assert (link in row) == m.written and ("Not yet written" in row) != m.written
        assert row.count("|") == 10
        assert (f"]({m.lesson})" in row) == m.written
        assert f"| {m.minutes:g} |" in row if m.minutes else "| — |" in row
    inside = tables.milestone_table(manifest, folder="history")
    assert "[00](00_baseline)" in inside and "](../lessons/00_baseline.ipynb)" in inside


def test_record_table_has_every_record(manifest, records):
    rows = tables.record_table(records, manifest).splitlines()[2:]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 90))
    assert rows[3].endswith("| 01 |") and rows[6].endswith("| — |")


def test_number_ranges():
    assert tables.number_ranges((22, 23, 24, 30)) == "#22–#24, #30"
    assert tables.number_ranges((5,)) == "#5" and tables.number_ranges(()) == ""


@pytest.mark.parametrize(
    ("train_steps", "tokens_per_step", "per_shard", "shards"),
    [
        (24_576, 262_144, 381, 65),
        (6_200, 524_288, 190, 33),
        (380, 524_288, 190, 2),  # a shard is used up exactly
        (381, 524_288, 190, 3),
        (10, 50_000_000, 1, 10),  # half a shard twice needs one token more than it has
        (10**6, 524_288, 190, 103),  # more than all shards: the first comes again
    ],
)
def test_shards_read(train_steps, tokens_per_step, per_shard, shards):
    assert tables.steps_per_shard(tokens_per_step) == per_shard
    assert tables.shards_read(train_steps, tokens_per_step) == shards


def test_committed_tables_and_pictures_are_fresh(capsys):
    code = make_figures.main(["--check"])
    assert code == 0, "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["records.png", "causes.png"])
def test_picture_is_small_and_wide(name):
    png = (REPOSITORY / "history" / name).read_bytes()
    assert len(png) < 200_000
    assert int.from_bytes(png[16:20], "big") == 1600


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A repository with every generated item, all fresh."""
    tmp_path = tmp_path_factory.mktemp("fresh")
    (tmp_path / "history").mkdir()
    for name in ("milestones.toml", "records.json"):
        shutil.copy(REPOSITORY / "history" / name, tmp_path / "history")
    runs = invented(*(m.id for m in load_manifest().written()))
    (tmp_path / "history" / "tiny.json").write_text(runs.to_json(), encoding="utf-8")
    predicted = test_roofline.invented(*(m.id for m in load_manifest().written()))
    write_predictions(tmp_path / "history" / "predictions.json", predicted.values())
    for table in make_figures.TABLES:
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


def test_check_names_what_is_stale_and_writes_nothing(copy, capsys):
    assert make_figures.main(["--check"], root=copy) == 0
    listing = copy / "history" / "records.json"
    listing.write_text(listing.read_text("utf-8").replace("31.4", "31.5"), encoding="utf-8")
    manifest = copy / "history" / "milestones.toml"
    manifest.write_text(manifest.read_text("utf-8").replace("3.2785", "3.2786"), encoding="utf-8")
    before = snapshot(copy)
    capsys.readouterr()
    assert make_figures.main(["--check"], root=copy) == 1
    assert capsys.readouterr().out.splitlines() == [
        "stale: README.md: table milestones",
        "stale: history/README.md: table milestones",
        "stale: history/README.md: table records",
        "stale: history/records.png",
    ]
    assert snapshot(copy) == before
    assert make_figures.main([], root=copy) == 0
    assert make_figures.main(["--check"], root=copy) == 0


def test_missing_file_is_an_error_line(copy, capsys):
    (copy / "README.md").unlink()
    (copy / "history" / "records.png").unlink()
    assert make_figures.main(["--check"], root=copy) == 1
    seen = capsys.readouterr()
    assert "error: README.md: the file is missing" in seen.err
    assert "stale: history/records.png" in seen.out


def test_unreadable_manifest_is_an_error_line(copy):
    (copy / "history" / "milestones.toml").write_text("scales = 3\n", encoding="utf-8")
    with pytest.raises(ManifestError, match='milestones.toml: the file: missing key "milestone"'):
        make_figures.main(["--check"], root=copy)


def test_stored_hash_of_something_else_is_none(tmp_path):
    file = tmp_path / "x.png"
    assert records_plot.stored_hash(file) is None
    picture = (REPOSITORY / "history" / "records.png").read_bytes()
    for content in (b"", b"not a picture", picture[:40], picture[:-4000]):
        file.write_bytes(content)
        assert records_plot.stored_hash(file) is None
    Image.new("L", (2, 2)).save(file, "JPEG")  # of a kind that has no texts
    assert records_plot.stored_hash(file) is None


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
    assert code_hash(script) == "f5d627db046022e0"  # in 3.11, 3.12 and 3.13
    for old, new, same in (("Doc", "Word", True), ("message", "other", True), ("\n\n", "\n", True),
                           ("import os", "import os  # why", True), ("= 3", "= 4", False),
                           ("[x, ", "[", False), ("y=None", "y=0", False)):
        script.write_text(text.replace(old, new), encoding="utf-8")
        assert (code_hash(script) == "f5d627db046022e0") == same, new


# ---- the commands ----


@pytest.mark.parametrize("command", COMMANDS, ids=lambda path: path.name)
def test_every_command_answers_help(command):
    run = subprocess.run(
        [sys.executable, str(command), "--help"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: ")


@pytest.mark.parametrize("module", ["make_figures", "speedrun.history.manifest"])
def test_what_help_needs_imports_nothing_heavy(module):
    code = (
        f"import sys, {module}; "
        "print(*{'matplotlib', 'numpy', 'torch', 'difflib'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY / "tools", capture_output=True, text=True
    )
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr
