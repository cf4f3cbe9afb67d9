#!/usr/bin/env python3
"""Carry a repair to a milestone's descendants: you edit the earliest milestone that has the fault,
this command edits the rest.

    python tools/propagate.py 00                      every block that differs from the last commit
    python tools/propagate.py 00 --block parse_args   this one; may be repeated
    python tools/propagate.py 00 --since HEAD~3       ... from an older commit

A descendant that holds the old block byte for byte gets the new one; the others are listed. A root
of another chain that borrows the block, and what comes from it, counts as a descendant; so does the
learner's script, which starts as a copy of a root.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, run_command
from speedrun.base.errors import UserError
from speedrun.base.files import replace_file
from speedrun.base.git import git
from speedrun.base.text import short
from speedrun.history.blocks import DIFFERS, carry, repairs
from speedrun.history.manifest import REPOSITORY, Manifest, Milestone, load_manifest


def main() -> int:
    """Parses, carries, prints; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("id", help="the milestone that was edited")
    parser.add_argument("--block", action="append", default=[], metavar="NAME",
                        help="the block to carry (default: all that changed)")
    parser.add_argument("--since", default="HEAD", metavar="REVISION",
                        help="the commit that still has the old text (default: HEAD)")
    args = parser.parse_args()
    manifest = load_manifest()
    milestone = manifest.get(args.id)
    scripts = heirs(manifest, milestone)
    before = committed(milestone.script.relative_to(REPOSITORY).as_posix(), args.since)
    try:
        found = repairs(before, milestone.script.read_text(encoding="utf-8"), args.block)
    except SyntaxError as error:
        raise ValueError(f"{short(milestone.script)}: {error}") from None
    if not found:
        raise ValueError(f"{short(milestone.script)} has no changed block since {args.since}")
    missed, texts = 0, {}  # all of them before the first is written
    for script, blocks in scripts.items():
        text, lines = script.read_text(encoding="utf-8"), []
        for repair in found:
            if blocks is not None and repair.block not in blocks:
                continue
            try:
                fate, text = carry(repair, text)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"{short(script)}: {error}; nothing is written") from None
            lines.append(f"{fate:<13}  {short(script)}  {repair.block}")
            missed += fate == DIFFERS
        texts[script] = text, lines
    for script, (text, lines) in texts.items():
        if lines:
            replace_file(script, text.encode(), script.stat().st_mode)
            print(*lines, sep="\n")
    if missed:
        print(f"{missed} to look at by hand", file=sys.stderr)
    return 0


def heirs(manifest: Manifest, milestone: Milestone) -> dict[Path, tuple[str, ...] | None]:
    """The scripts to which repairs of a milestone are carried, each with the names of the blocks
    that it has from this milestone; None: all."""
    def of(root, blocks):
        scripts = [m.script for m in manifest.descendants(root)]
        learners = manifest.learners_script(root)
        if root.parent is None and learners.exists():
            scripts.append(learners)
        return dict.fromkeys(scripts, blocks)

    found = of(milestone, None)
    for root in manifest.borrowers(milestone):
        found |= {root.script: root.borrows.blocks} | of(root, root.borrows.blocks)
    return found


def committed(path: str, revision: str) -> str:
    """The text of a file of the repository in a commit; ValueError, one line, if git has none."""
    if not revision or revision.startswith("-"):  # the index, or an option
        raise ValueError(f"--since {revision!r} is not a commit; name one, such as HEAD~3")
    try:
        shown = git(REPOSITORY, "show", f"{revision}:{path}")
    except UserError as error:
        shallow = (REPOSITORY / ".git" / "shallow").exists()
        raise ValueError(f"no old text of {path}: {error}" + (
            "; older commits are missing in this clone: git fetch --unshallow" if shallow else "")
        ) from None
    return shown.decode("utf-8").replace("\r\n", "\n")


if __name__ == "__main__":
    run_command(main, ValueError)
