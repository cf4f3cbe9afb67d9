"""The notebooks run, are clean, and let the reader guess before they tell.

Run: .venv/bin/python -m pytest tests/test_notebooks.py
"""

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache, partial

import matplotlib
import nbformat
import pytest

from speedrun.history.manifest import REPOSITORY, load_manifest

LESSONS = REPOSITORY / "lessons"
NOTEBOOKS = sorted(LESSONS.glob("*.ipynb"))
TOLD = [path for path in NOTEBOOKS if path.stem != "start_here"]  # which is the map of all
ELSEWHERE = [path for path in TOLD if path.stem == "muon_at_home"]  # covers no milestone
SOLUTIONS = sorted((LESSONS / "solutions").glob("*.py"))
TAUGHT = {milestone.chain for milestone in load_manifest().milestones if milestone.lesson}
MILESTONES = [milestone for milestone in load_manifest().milestones if milestone.chain in TAUGHT]
SLOW = [pytest.mark.slow, pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason=(
    "a minute each; RUN_SLOW=1 runs all notebooks, and so does tools/run_lessons.py"))]


read = cache(partial(nbformat.read, as_version=4))


def name_of(path):
    return path.stem


notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)


def test_every_written_milestone_has_its_lesson():
    assert sorted({*(REPOSITORY / m.lesson for m in MILESTONES), *ELSEWHERE}) == TOLD
    assert [path.stem for path in TOLD] == [path.stem for path in SOLUTIONS]
    assert (LESSONS / "start_here.ipynb").exists()


@pytest.mark.parametrize("milestone", MILESTONES, ids=[m.id for m in MILESTONES])
def test_lesson_walks_the_diff_of_each_of_its_milestones(milestone):
    notebook = read(REPOSITORY / milestone.lesson)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    if milestone.parent:
        assert f'lesson.show_diff("{milestone.parent}", "{milestone.id}", ' in code


def test_a_diff_before_its_exercise_keeps_the_reason_back():
    early = []
    for m in load_manifest().milestones:
        for block, number in m.exercises.items():
            cells = [cell.source for cell in read(REPOSITORY / m.lesson).cells
                     if cell.cell_type == "code"]
            asked = [i for i, cell in enumerate(cells) if f'check("{number}"' in cell]
            assert len(asked) == 1, (m.id, block, number)
            early += [(m.id, block) for cell in cells[: asked[0]] for call in re.findall(
                r"show_diff\(([^)]*)\)", cell) if f'"{m.id}"' in call and f'"{block}"' in call
                and "why=False" not in call]
    assert not early


def test_the_map_shows_every_written_milestone():
    # The first notebook's table is generated; run_lessons.py start_here makes it again.
    text = (LESSONS / "start_here.ipynb").read_text(encoding="utf-8")
    assert [m.id for m in MILESTONES if f"| [{m.id}](" not in text] == []


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=SLOW) for path in NOTEBOOKS])
def test_notebook_runs(path, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", str(path),
         "--output-dir", str(tmp_path)],
        capture_output=True, encoding="utf-8", cwd=LESSONS,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    ran = read(tmp_path / path.name)
    committed = read(path)
    for new, old in zip(ran.cells, committed.cells, strict=True):
        assert new.source == old.source
        assert kinds(new) == kinds(old), f"the committed outputs are stale: {old.source[:80]}"


def kinds(cell):
    """The kinds of a cell's outputs: text, pictures."""
    outputs = cell.get("outputs", [])
    return {kind for output in outputs for kind in (output.get("data") or {"text/plain": ""})}


@notebooks
def test_notebook_is_clean(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert "stderr" != output.get("name"), output.get("text")
            data = output.get("data", {})
            assert "text/html" not in data or set(data) > {"text/html"}
    text = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert not re.search(r"/home/|/tmp/|/root/|/Users/|site-packages", text)


@notebooks
def test_links_hold_in_the_readers_copies_too(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)]
    assert [link for link in links if not (LESSONS / link).exists()] == []
    assert [link for link in links if not link.startswith("../") and "/" in link] == []


@pytest.mark.parametrize("folder", [".", "data", "lessons"])
def test_a_notebook_finds_its_helper_from_another_folder(folder):
    cells = [next(cell for cell in read(path).cells
                  if cell.cell_type == "code").source for path in NOTEBOOKS]
    (before,) = {cell[cell.index("sys.path") : cell.index("import lesson")] for cell in cells}
    assert all("import sys\n" in cell.partition("sys.path")[0] for cell in cells)
    code = f"import sys\n{before}import importlib.util as u\nprint(u.find_spec('lesson').origin)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY / folder,
                           capture_output=True, encoding="utf-8")
    assert os.path.samefile(ended.stdout.strip(), LESSONS / "lesson.py")


@pytest.mark.parametrize("path", TOLD, ids=name_of)
def test_notebook_keeps_its_budget(path):
    notebook = read(path)
    source = {kind: [cell.source for cell in notebook.cells if cell.cell_type == kind]
              for kind in ("code", "markdown")}
    claims = [cell for cell in notebook.cells if tags_of(cell, "claim")]
    assert 20 <= len(notebook.cells) - len(claims) <= 44
    lines = [line for text in source["code"] for line in text.splitlines()]
    assert sum(not line.startswith("lesson.show_diff(") for line in lines) <= 250  # one a milestone
    source["markdown"][0] = source["markdown"][0].partition("**Contents**")[0]
    words = re.sub(r"<!-- begin why -->.*?<!-- end why -->", "", " ".join(source["markdown"]),
                   flags=re.DOTALL)  # a milestone's why.md has its own limit
    assert 800 <= len(words.split()) <= 2050
    assert 3 <= sum(map(has_figure, notebook.cells)) <= 8
    opening = next(cell for cell in notebook.cells if cell.cell_type == "code")  # shows the model
    assert tags_of(opening, "setup")
    if path not in ELSEWHERE:
        assert "\nlesson.draw_model(" in opening.source
        assert any("image/svg+xml" in output.get("data", {}) for output in opening.outputs)
    assert all(len(line) <= 100 for text in source["code"] for line in text.splitlines())
    lesson = path.stem.split("_")[0]
    for number in "123":
        assert f'check("{lesson}.{number}"' in "\n".join(source["code"])


def tags_of(cell, beginning):
    """The cell's tags that begin so."""
    return [tag for tag in cell.metadata.get("tags", []) if tag.startswith(beginning)]


def has_figure(cell):
    """Whether a cell's outputs hold a picture other than a model's."""
    return any('class="paper"' in output.get("data", {}).get("image/svg+xml", "")
               for output in cell.get("outputs", []))


@notebooks
def test_a_claim_is_one_line_and_at_most_one_picture(path):
    ids = {m.id for m in MILESTONES if REPOSITORY / m.lesson == path}
    for cell in read(path).cells:
        if claimed := tags_of(cell, "claim"):
            assert {tag.removeprefix("claim:") for tag in claimed} <= ids
            printed = [output.text for output in cell.outputs if "text" in output]
            pictures = [output for output in cell.outputs if "data" in output]
            assert len(printed) == 1 and printed[0].count("\n") == 1, printed
            assert len(pictures) <= 1 and len(cell.outputs) == len(printed) + len(pictures)


OWN_RULE = re.compile(r"standard error \{|in all seeds|more than chance|\bunclear\b")


@pytest.mark.parametrize("path", [*TOLD, *SOLUTIONS], ids=lambda path: path.name)
def test_seeds_are_compared_by_the_one_rule(path):
    # A cell, or a function of a solution, that trains several seeds leaves the judgement to
    # lesson.verdict, in its own or a later cell, and nobody has a rule of his own.
    if path.suffix == ".py":
        text = path.read_text(encoding="utf-8")
        trains = re.search(r"seed=seed|range\(3\)", text)
        assert not trains or "must_end_lower" in text or path.name in JUDGED_OTHERWISE
        assert not OWN_RULE.search(text)
        return
    code = [cell.source for cell in read(path).cells if cell.cell_type == "code"]
    assert not any(OWN_RULE.search(text) for text in code)
    trains = [number for number, text in enumerate(code) if re.search(r"seed=seed\b", text)]
    if trains and path.stem not in JUDGED_OTHERWISE:
        assert any("lesson.verdict(" in text for text in code[trains[0] :])


# What trains several seeds without comparing means: equalities and counts.
JUDGED_OTHERWISE = {"07_gradient_communication", "08_async_data", "e0a_recompute",
                    "08_async_data.py"}


@pytest.mark.parametrize("path", TOLD, ids=name_of)
def test_the_contents_are_the_headings_and_their_minutes_add_up(path):
    cells = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    opening, contents = cells[0].split("**Contents** (minutes to read): ")
    listed = [re.fullmatch(r"(.+) (\d+)", part) for part in " ".join(contents.split()).split(" · ")]
    headings = re.findall(r"^## (.+?)\s*$", "\n".join(cells[1:]), re.MULTILINE)
    assert [one[1] for one in listed] == headings
    assert sum(int(one[2]) for one in listed) == int(
        re.search(r"^\| Time \| (\d+) minutes to read", opening, re.MULTILINE)[1])
    assert "\n| You should know |" in opening


@notebooks
def test_a_notebook_is_small(path):
    assert path.stat().st_size < 500_000


DRAWING = re.compile(r"\bplt\.|\b(axes|left|right|figure)\.|lesson\."
                     r"(draw|curves|bars|cells|timeline|tiny_curves|official_curves)\(")


@notebooks
def test_few_lines_draw(path):
    lines = drawing = 0
    for cell in read(path).cells:
        if cell.cell_type == "code":
            lines += len(cell.source.splitlines())
            drawing += sum(count_drawing(node, cell.source) for node in ast.parse(cell.source).body)
    assert drawing <= lines / 6


def count_drawing(node, source):
    """How many lines of a statement draw; of a compound one, those of its parts."""
    text = ast.get_source_segment(source, node)
    if not DRAWING.search(text):
        return 0
    parts = getattr(node, "body", None)
    return sum(count_drawing(part, source) for part in parts) if parts else len(text.splitlines())


@pytest.mark.parametrize("path", TOLD, ids=name_of)
def test_the_reader_guesses_before_the_answer_shows(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    asked = {}
    for number, cell in enumerate(cells):
        for name in re.findall(r"^(guess\w*) = \.\.\.", cell.source, re.MULTILINE):
            assert not cell.outputs, f"{name} has an answer below it"
            asked[name] = number
        for name in re.findall(r"lesson\.reveal\w*\((guess\w*),", cell.source):
            assert asked.pop(name) < number
    assert not asked
    assert sum(cell.source.count("lesson.reveal") for cell in cells) >= 3
    assert not any(re.search(r"^answer\w* = \.\.\.  # \w+_?\w*$", cell.source, re.MULTILINE)
                   and "def " in cell.source for cell in cells), "decorate the definition instead"


@notebooks
def test_what_a_notebook_names_exists(path, monkeypatch):
    # Of all notebooks, also those that are not run: names of lesson.py, of snapshots, of the tools.
    monkeypatch.syspath_prepend(LESSONS)
    matplotlib.use("agg")
    import lesson

    cells = read(path).cells
    tree = ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    modules = {"lesson": lesson}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("speedrun."):
            exec(ast.unparse(node), {})
        if isinstance(node, ast.Assign):
            modules |= snapshots_of(node, lesson)
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name) and node.value.id in modules]
    assert [ast.unparse(node) for node in used if not hasattr(modules[node.value.id], node.attr)
            and not isinstance(node.ctx, ast.Store)] == []


def snapshots_of(assignment, lesson):
    """{name: module} of what an assignment takes from lesson.snapshot."""
    found = {}
    for target in assignment.targets:
        targets, values = [target], [assignment.value]
        if isinstance(target, ast.Tuple) and isinstance(assignment.value, ast.Tuple):
            targets, values = target.elts, assignment.value.elts
        for name, value in zip(targets, values, strict=True):
            match value:
                case ast.Call(ast.Attribute(ast.Name("lesson"), "snapshot"), [ast.Constant(id)]):
                    found[name.id] = lesson.snapshot(id)
    return found
