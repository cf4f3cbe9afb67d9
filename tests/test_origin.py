"""Lines and blocks keep their origins. Run: .venv/bin/python -m pytest tests/test_origin.py"""

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from snapshots import SCRIPTS
from speedrun.base.errors import UserError
from speedrun.diff.align import INDENTED, SAME
from speedrun.diff.difference import find_difference
from speedrun.diff.origin import block_life, line_origins, owners_between
from speedrun.history.blocks import changed_blocks
from speedrun.history.manifest import load_manifest
from test_diff_milestones import FILE, FIRST, LEFT, SECOND, diff, replaced

LAST = [m for m in SCRIPTS if not load_manifest().children(m.id)]  # of each chain


def text_of(milestone):
    return milestone.script.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def replayed():
    """{id: {line's number: (line, the id that it is from)}} without blank lines, made
    by applying each diff to the parent's lines: a line that the diff shows as changed or added is
    from its milestone, all others stay whose they were."""
    files = {}
    for m in SCRIPTS:
        lines = text_of(m).split("\n")
        numbers = [n for n, line in enumerate(lines, start=1) if line.strip()]
        before = files[m.parent] if m.parent else {}
        old = text_of(load_manifest().get(m.parent)) if m.parent else ""
        rows = [row for c in find_difference(old, "\n".join(lines)).changes for row in c.rows]
        gone = {row.old.number for row in rows if row.old}
        made = {row.new.number: (row.new.text, before[row.old.number][1]
                                 if row.mark in (SAME, INDENTED) else m.id)
                for row in rows if row.new and row.new.text.strip()}
        rest = [n for n in numbers if n not in made]
        stayed = [owned for n, owned in before.items() if n not in gone]
        files[m.id] = dict(sorted({**made, **dict(zip(rest, stayed, strict=True))}.items()))
        assert [files[m.id][n][0] for n in numbers] == [lines[n - 1] for n in numbers], m.id
    return files


@pytest.mark.parametrize("milestone", [*SCRIPTS[::9], *LAST], ids=lambda m: m.id)
def test_origins_are_those_of_a_replay(milestone, replayed):
    origins = line_origins(load_manifest(), milestone)
    assert [line for line, _ in origins] == text_of(milestone).splitlines()
    found = {n: (line, owner.id)
             for n, (line, owner) in enumerate(origins, start=1) if line.strip()}
    assert found == replayed[milestone.id]


@pytest.fixture
def owners(tmp_path):
    """A function that makes a chain of scripts and returns (line, the number of the script that it
    is from) of the last."""
    def origins(*scripts):
        made, folder = [], Path(tempfile.mkdtemp(dir=tmp_path))
        for number, text in enumerate(scripts):
            parent = str(number - 1) if number else None
            made.append(Script(folder / f"{number}.py", str(number), parent))
            made[-1].script.write_text(text, encoding="utf-8")
        chain = Chain(tuple(made))
        found = [(text, int(m.name)) for text, m in line_origins(chain, made[-1])]
        assert [text for text, _ in found] == scripts[-1].splitlines()
        return found
    return origins


class Chain(NamedTuple):
    made: tuple

    def get(self, name):
        return self.made[int(name)]


class Script(NamedTuple):
    script: Path
    name: str
    parent: str | None


def of_last(found):
    """The lines that are not from the first script."""
    return [text for text, number in found if number > 0]


def test_a_moved_function_keeps_its_origin(owners):
    assert of_last(owners(FILE, FILE.replace(SECOND, "").replace(FIRST, SECOND + FIRST))) == []
    assert of_last(owners(FILE, replaced(LEFT, "") + "\n" + LEFT.rstrip("\n") + "\n")) == []


def test_a_re_indented_line_keeps_its_origin(owners):
    loop = "    for value in values:\n        total += value\n"
    inner = "    if values:\n        for value in values:\n            total += value\n"
    assert of_last(owners(FILE, replaced(loop, inner))) == ["    if values:"]


def test_a_line_changed_and_changed_back_is_from_its_last_change(owners):
    found = owners(FILE, replaced("LIMIT = 3", "LIMIT = 4"), FILE)
    assert of_last(found) == ["LIMIT = 3"] and ("LIMIT = 3", 2) in found


def test_layout_counts_as_a_change_of_its_lines(owners):
    last = "    return max(y, LIMIT) + os.getpid() + sum(range(x))"
    wrapped = last.replace("(y, ", "(\n        y, ", 1)
    assert of_last(owners(FILE, replaced(last, wrapped))) == wrapped.split("\n")


def test_blank_lines_between_blocks_go_with_the_block_below(owners):
    added = "\n\ndef third():\n    pass\n"
    assert of_last(owners(FILE, FILE + added)) == added.splitlines()
    assert of_last(owners(FILE, FILE.replace("LIMIT = 3", "LIMIT = 3\n\n\nMORE = 4"))) == [
        "", "", "MORE = 4"]


@pytest.mark.parametrize("a, b", [("02", "03e"), ("07", "08c"), ("p4", "p6d"), ("e3", "e4b")])
def test_owners_between_are_those_of_the_steps(a, b):
    manifest = load_manifest()
    old, new = manifest.get(a), manifest.get(b)
    owners, between = owners_between(manifest, old, new), []
    for m in manifest.lineage(new)[:-1]:
        if m is old:
            break
        between.append(m)
    origins = line_origins(manifest, new)
    assert {n: m for n, m in owners.added.items() if origins[n - 1][0].strip()} == {
        n: m for n, (line, m) in enumerate(origins, start=1) if line.strip() and m in between}
    lines = text_of(old).split("\n")
    for n, m in owners.removed.items():  # the owner's parent still has it
        parent = text_of(manifest.get(m.parent)).split("\n")
        assert m in between and [line.strip() for line in parent].count(lines[n - 1].strip()) > 0
    gone = {n for n, line in enumerate(lines, start=1) if line.strip()} - owners.removed.keys()
    assert {lines[n - 1].strip() for n in gone} <= {line.strip() for line, _ in origins}
    rows = [row for c in find_difference(text_of(old), text_of(new)).changes for row in c.rows]
    named = owners.of(rows)
    assert named == sorted(named, key=lambda m: m.name) and set(named) <= set(between)
    assert {m.id for m in between} - {m.id for m in named} <= {"p6a"}  # only its numbers moved on


def test_a_parents_child_and_strangers_have_no_owners():
    manifest = load_manifest()
    for a, b in (("03e", "04"), ("04", "03"), ("p0", "04")):
        assert owners_between(manifest, manifest.get(a), manifest.get(b)) is None


def test_each_hunk_names_its_owners():
    shown = diff("03", "04").stdout
    at = shown.index("── muon_momentum")
    assert shown[at:].split("\n")[1].startswith("  │ 03c: ")  # who has a reason is named there
    assert "\n  by 03a, 03b, 03d, 03e, 04\n" in shown[shown.index("── GPT") :]
    assert "\n  by " not in diff("04").stdout


def test_a_life_is_every_version_of_a_block():
    name = "CausalSelfAttention"
    expected = {
        m.id for m in SCRIPTS if name in changed_blocks(
            text_of(load_manifest().get(m.parent)) if m.parent else "", text_of(m))}
    life = block_life(load_manifest(), name)
    assert [version.milestone.id for version in life] == [
        m.id for m in SCRIPTS if m.id in expected]
    assert life[0].change.words == ("added",)


def test_a_life_goes_on_in_the_block_that_follows():
    life = block_life(load_manifest(), "newton_schulz")
    found = [(v.milestone.id, v.change.name, v.change.words) for v in life]
    assert found[0] == ("01", "newton_schulz", ("added",))
    at = found.index(("08f", "newton_schulz", ("removed",)))
    assert found[at + 1] == ("08f", "polar_express", ("added",))
    assert {name for _, name, _ in found[at + 1 :]} == {"polar_express"}
    assert {v.milestone.chain for v in life} == {"speedrun"}  # the prelude's replaces nothing
    for block, by in (("newton_schulz", "polar_express"), ("nesterov_update", "muon_update")):
        life, own = (block_life(load_manifest(), name) for name in (block, by))
        assert [v.milestone.id for v in own if v.milestone.chain == "speedrun"] == [
            v.milestone.id for v in life if v.change.name == by]
    assert len(own) > 1  # it goes on after the first version, too
    renamed = diff("--life", "newton_schulz", "--stat").stdout
    assert "\n  newton_schulz: added, " in renamed and "\n  polar_express: added, " in renamed
    shown = diff("--life", "polar_express", "--stat").stdout
    assert shown.index("prelude\n") < shown.index("\np4a ") and "speedrun\n" in shown


def test_an_unknown_block_has_no_life():
    for name, hint in (("Muno", r"; did you mean Muon\?"), ("qqqq", "")):
        with pytest.raises(UserError, match=f'^no block is called "{name}"{hint}$'):
            block_life(load_manifest(), name)


def test_origin_in_a_pipe_has_a_line_for_each_of_the_script():
    milestone = LAST[0]
    origins = line_origins(load_manifest(), milestone)
    width = max(len(m.id) for _, m in origins)
    assert diff(milestone.id, "--origin").stdout.splitlines() == [
        f"{m.id:>{width}} {number:4} {line}" for number, (line, m) in enumerate(origins, start=1)]


def test_counts_add_up_to_the_files_length():
    manifest, milestone = load_manifest(), LAST[0]
    *counts, total = diff(milestone.id, "--origin", "--stat").stdout.splitlines()
    ids = [m.id for _, m in line_origins(manifest, milestone)]
    brought = [m for m in reversed(manifest.lineage(milestone)) if m.id in ids]
    assert counts == [f"{m.id:>3} {ids.count(m.id):5}  {m.title}" for m in brought]
    assert total == f"    {text_of(milestone).count(chr(10)):5}  lines of {len(brought)} milestones"


def test_life_shows_each_version_and_its_idea():
    shown = diff("--life", "norm").stdout
    assert "\n+ def norm(x):\n" in shown and "\n-     return F.rms_norm" in shown
    words, chain = [], None
    for m, change in ((v.milestone, v.change) for v in block_life(load_manifest(), "norm")):
        words += [m.chain] * (m.chain != chain) + [f"{m.id} {m.title}. {m.idea}"]
        assert words[-1] in " ".join(shown.split())
        words.append(change.fate)
        chain = m.chain
    stat = diff("--life", "norm", "--stat").stdout
    assert " ".join(stat.split()) == " ".join(words) and f"\n  {words[-1]}\n" in stat


@pytest.mark.parametrize("arguments, message", [
    (["09", "--origin", "08"], "--origin takes one milestone, and only the options --stat"),
    (["09", "--life", "GPT"], "--life takes no milestone, and only the options --stat"),
    (["--life", "GPT", "--time"], "--life takes one block, and only the options --stat"),
    (["04", "--origin", "--steps"], "--origin takes one milestone, and only the options --stat"),
    (["04", "--origin", "--blocks", "GPT"], "--origin takes one milestone, and only the options"),
    (["04", "--origin", "--full"], "--origin takes one milestone, and only the options --stat"),
    (["--life", ""], "--life: the block's name is empty"),
    (["--origin"], "name a milestone"),
    (["--origin", "--life", "GPT"], "not allowed with argument"),
    (["train", "--origin"], 'no milestone "train"'),
])
def test_wrong_input_is_one_line(arguments, message):
    ended = diff(*arguments)
    assert ended.returncode != 0 and ended.stdout == ""
    assert message in ended.stderr and ended.stderr.count("\n") == 1


def test_following_a_chain_takes_less_than_a_second():
    for follow in (lambda: line_origins(load_manifest(), LAST[0]),
                   lambda: block_life(load_manifest(), "card")):
        start = time.process_time()  # of this process: others may be busy
        follow()
        assert time.process_time() - start < 1
