#!/usr/bin/env python3
"""Write a chain as a git branch: each milestone is one commit of one script.

    python tools/history_branch.py                      the branch history, of the first chain
    python tools/history_branch.py --chain prelude      the branch history-prelude

Then git walks through it:

    git log -p history --                               every diff, with its idea and reasons
    git blame history -- train_gpt.py                   the milestone that brought each line
    git bisect start history history~80 --              which milestone broke something

The branch is made anew each time, the same from the same history, and is never pushed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, run_command
from speedrun.base.errors import UserError
from speedrun.base.files import REPOSITORY


def main() -> int:
    """Writes the branch and says how long it is; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chain", metavar="CHAIN", help="a folder of history/ (default: the first"
                        " chain)")
    parser.add_argument("--branch", metavar="NAME", help="the branch (default: history, for another"
                        " chain history-CHAIN)")
    args = parser.parse_args()
    from speedrun.history.branch import write_branch
    from speedrun.history.manifest import load_manifest

    manifest = load_manifest()
    chains = dict.fromkeys(m.chain for m in manifest.milestones)
    first = next(iter(chains))
    chain = args.chain or first
    if chain not in chains:
        raise UserError(f"there is no chain {chain}; one of {', '.join(chains)}", 2)
    branch = args.branch or ("history" if chain == first else f"history-{chain}")
    commits = write_branch(manifest, chain, branch, REPOSITORY)
    print(f"{branch}: {commits} commits; git log -p {branch} --")
    return 0


if __name__ == "__main__":
    run_command(main)
