"""Writes a chain as a git branch, on which each milestone is one commit of one script, so that
`git log -p`, `git blame` and `git bisect` walk through the history."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.base.git import git
from speedrun.base.text import number_ranges
from speedrun.history.gains import gain_lines
from speedrun.history.guide import whys
from speedrun.history.manifest import Manifest, Milestone

PROJECT = "Fast training, step by step <noreply@invalid>"  # author and committer of all commits
MADE = "refs/made/"  # where a branch is made before it takes its name
BEFORE_RECORDS = "2024-05-28"  # record #1's day, for a chain that has no records


def write_branch(manifest: Manifest, chain: str, branch: str, repository: Path) -> int:
    """Makes or replaces a branch of a git repository with one commit for each milestone of a chain,
    in its order; the same history gives the same commits. Returns their number.

    The author's date is that of the milestone's record, else the date before it; the committer's
    rises by at least a second from commit to commit. Raises UserError, one line, if there is no
    git, no repository, or a branch of this name that holds something else or is checked out.
    """
    git(repository, "rev-parse", "--git-dir")
    git(repository, "check-ref-format", "--branch", branch)
    name = f"refs/heads/{branch}"
    form = "--format=%(refname) %(committername) <%(committeremail:trim)>"
    for taken in git(repository, "for-each-ref", form, name).decode().splitlines():
        if taken.split()[0] != name:
            raise UserError(f"the branch {taken.split()[0].removeprefix('refs/heads/')} does not"
                            f" leave room for one called {branch}; name another with --branch")
        if taken != f"{name} {PROJECT}":
            raise UserError(f"the branch {branch} holds commits that this command did not make;"
                            " name another with --branch")
    milestones = manifest.of_chain(chain).milestones
    made = f"{MADE}{branch}"
    stream = b"".join(_commits(milestones, made, manifest))
    try:
        git(repository, "fast-import", "--quiet", "--force", stdin=stream)
        git(repository, "branch", "--force", "--no-track", branch, made)
    finally:
        git(repository, "update-ref", "-d", made)
    return len(milestones)


def message(manifest: Manifest, m: Milestone) -> str:
    """The message of a milestone's commit: title, idea, record, what it gained, and why each block
    changes."""
    parts = [f"{m.id} {m.title}", m.idea]
    if m.covered:
        part = "Part of record" if not m.records else "Record"
        numbers = number_ranges(record.number for record in m.covered)
        parts.append(f"{part} {numbers} by {', '.join(m.authors)}")
    if lines := gain_lines(manifest, m):
        parts.append("\n".join(f"- {line}" for line in lines))
    parts += [f"{block}: {why}" for block, why in whys(m).items()]
    return "\n\n".join(parts) + "\n"


def _commits(milestones, ref, manifest) -> Iterator[bytes]:
    """The commits in the language of git fast-import."""
    clock = 0
    for number, m in enumerate(milestones):
        day = datetime.fromisoformat(m.date or BEFORE_RECORDS)
        authored = int(day.replace(tzinfo=UTC).timestamp())
        clock = max(clock + 1, authored)
        yield f"commit {ref}\nauthor {PROJECT} {authored} +0000\n".encode()
        yield f"committer {PROJECT} {clock} +0000\n".encode()
        yield _data(message(manifest, m).encode())
        if number == 0:
            yield b"deleteall\n"
        yield f"M 100644 inline {m.program}\n".encode() + _data(m.script.read_bytes())


def _data(content):
    return b"data %d\n%b\n" % (len(content), content)
