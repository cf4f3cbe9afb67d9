"""A chain as a git branch: one commit for each milestone, the same each time.

Run: .venv/bin/python -m pytest tests/test_history_branch.py
"""

import shutil
import subprocess
import sys

import pytest

import history_branch
from snapshots import MILESTONES
from speedrun.base.errors import UserError
from speedrun.diff.origin import line_origins
from speedrun.history.branch import PROJECT, message, write_branch
from speedrun.history.gains import gain_lines
from speedrun.history.manifest import REPOSITORY, load_manifest

MANIFEST = load_manifest()
CHAIN = MANIFEST.of_chain().milestones


def git(where, *arguments):
    ended = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True,
                           encoding="utf-8")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def new_repository(where):
    where.mkdir(exist_ok=True)
    git(where, "init", "-q", "-b", "main")
    git(where, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "x", "--allow-empty")
    return where


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A repository with the tools and the history, and in it the branch."""
    root = tmp_path_factory.mktemp("clone")
    for folder in ("history", "tools"):
        shutil.copytree(REPOSITORY / folder, root / folder,
                        ignore=shutil.ignore_patterns("__pycache__"))
    new_repository(root)
    ended = subprocess.run([sys.executable, "tools/history_branch.py"], cwd=root,
                           capture_output=True, encoding="utf-8")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"history: {len(CHAIN)} commits; git log -p history --\n"
    return root


def test_each_commit_is_a_milestone(clone):
    titles = git(clone, "log", "--reverse", "--format=%s", "history", "--").splitlines()
    assert titles == [f"{m.id} {m.title}" for m in CHAIN]
    commits = git(clone, "rev-list", "--reverse", "history", "--").split()
    for commit, m in list(zip(commits, CHAIN, strict=True))[::7]:
        assert git(clone, "show", f"{commit}:{m.program}") == m.script.read_text(encoding="utf-8")
    assert git(clone, "ls-tree", "--name-only", "-r", "history").split() == [CHAIN[0].program]
    assert "history" not in git(clone, "status", "--short", "--branch").splitlines()[0]
    assert git(clone, "for-each-ref", "refs/made") == ""


def test_dates_are_the_records_and_rise_for_the_committer(clone):
    form = "--format=%as|%ct|%at|%an <%ae>|%cn <%ce>"
    rows = [line.split("|")
            for line in git(clone, "log", "--reverse", form, "history", "--").splitlines()]
    for (day, _, _, author, committer), m in zip(rows, CHAIN, strict=True):
        assert day == m.date and author == committer == PROJECT, m.id
    clocks = [int(clock) for _, clock, *_ in rows]
    assert clocks == sorted(set(clocks)) and clocks[0] == int(rows[0][2])
    assert all(int(clock) >= int(authored) for _, clock, authored, *_ in rows)


def test_a_message_has_the_idea_the_gain_and_the_reasons(clone, monkeypatch):
    m = MANIFEST.get("13d")
    monkeypatch.setattr("speedrun.history.branch.whys", lambda m: {"GPT": "Because."})
    text = message(MANIFEST, m)
    gained = "\n- ".join(gain_lines(MANIFEST, m))
    assert text == (f"13d {m.title}\n\n{m.idea}\n\nRecord #60 by @soren_dunn_\n\n- {gained}\n\n"
                    "GPT: Because.\n") and len(gain_lines(MANIFEST, m)) > 1
    assert m.idea in git(clone, "log", "--format=%B", "--grep", "^13d ", "history", "--")
    assert "Part of record #9 by" in message(MANIFEST, MANIFEST.get("03b"))
    assert "\n\nRecord #24, #32 by" in message(MANIFEST, MANIFEST.get("06f"))  # all of the first


def test_blame_names_the_milestone_of_a_line(clone):
    blamed = git(clone, "blame", "--line-porcelain", "history", "--", CHAIN[0].program)
    titles = [line.removeprefix("summary ").split()[0] for line in blamed.splitlines()
              if line.startswith("summary ")]
    origins = line_origins(MANIFEST, CHAIN[-1])
    assert len(titles) == len(origins)
    agree = sum(title == m.id for title, (_, m) in zip(titles, origins, strict=True))
    assert agree > 0.9 * len(titles)  # git knows no blocks, and sees re-indented lines as new


def test_the_same_history_gives_the_same_commits(clone, tmp_path, monkeypatch):
    other = new_repository(tmp_path / "other")
    hook = new_repository(tmp_path / "hook")
    monkeypatch.setenv("GIT_DIR", str(hook / ".git"))  # as in a hook of another repository
    monkeypatch.setenv("GIT_INDEX_FILE", str(hook / ".git" / "index"))
    for _ in range(2):  # the second replaces the first
        assert write_branch(MANIFEST, CHAIN[0].chain, "history", other) == len(CHAIN)
    monkeypatch.undo()
    assert git(hook, "branch") == "* main\n"
    assert git(other, "rev-parse", "history") == git(clone, "rev-parse", "history")


def test_other_chains_have_branches_of_their_own(clone, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["history_branch.py", "--chain", "none"])
    with pytest.raises(UserError, match="^there is no chain none; one of speedrun, "):
        history_branch.main()
    made = []
    monkeypatch.setattr("speedrun.history.branch.write_branch",
                        lambda _, chain, branch, root: made.append((chain, branch)) or 1)
    monkeypatch.setattr(sys, "argv", ["history_branch.py", "--chain", CHAIN[0].chain])
    assert history_branch.main() == 0 and made == [(CHAIN[0].chain, "history")]
    for chain in {m.chain for m in MILESTONES} - {CHAIN[0].chain}:
        ended = subprocess.run(
            [sys.executable, "tools/history_branch.py", "--chain", chain], cwd=clone,
            capture_output=True, encoding="utf-8")
        assert ended.stdout.startswith(f"history-{chain}: "), ended.stderr
        own = MANIFEST.of_chain(chain).milestones
        files = git(clone, "ls-tree", "--name-only", f"history-{chain}").split()
        assert files == sorted({m.program for m in own})


def test_a_branch_of_somebody_else_is_left_alone(tmp_path):
    other = new_repository(tmp_path / "other")
    git(other, "branch", "mine")
    before = git(other, "rev-parse", "mine")
    with pytest.raises(UserError, match="the branch mine holds commits that this command did not"):
        write_branch(MANIFEST, CHAIN[0].chain, "mine", other)
    assert git(other, "rev-parse", "mine") == before
    git(other, "branch", "my/own")
    with pytest.raises(UserError, match="my/own does not leave room for one called my; name"):
        write_branch(MANIFEST, CHAIN[0].chain, "my", other)
    with pytest.raises(UserError, match="'a b' is not a valid branch name"):
        write_branch(MANIFEST, CHAIN[0].chain, "a b", other)
    write_branch(MANIFEST, CHAIN[0].chain, "history", other)
    git(other, "checkout", "-q", "history")
    with pytest.raises(UserError, match="^git branch: cannot force update the branch 'history'"):
        write_branch(MANIFEST, CHAIN[0].chain, "history", other)
    with pytest.raises(UserError, match="^git rev-parse: not a git repository"):
        write_branch(MANIFEST, CHAIN[0].chain, "history", tmp_path)
