#!/usr/bin/env python3
"""Report what this machine can run, and how to get what is missing.

    python tools/doctor.py            what it has, what to do, and a line for the milestones
    python tools/doctor.py 01         its advice is for milestone 01 (default: the race's last)
    python tools/doctor.py --all      also what is not needed here, and each milestone
    python tools/doctor.py --json     all of it for programs

ok: fine · none: absent and not needed · note: runs, but could run better · fix: repair this first.
The exit code is 1 if something has to be repaired before the milestones run at the scale
that run_milestone.py chooses here, else 0.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, run_command  # refused by an old Python


def main(argv: list[str] | None = None) -> int:
    """Parses (None: the command line), examines, prints; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", metavar="MILESTONE", help="what you want to run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="a line for each milestone")
    which.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)

    from speedrun.doctor.checks import examine
    from speedrun.doctor.report import print_report, to_json
    from speedrun.history.manifest import load_manifest

    manifest = load_manifest()
    report = examine(manifest, manifest.get(args.target) if args.target else None)
    if args.json:
        print(to_json(report))
    else:
        print_report(report, sys.stdout, args.all)
    return 1 if report.to_fix else 0


if __name__ == "__main__":
    run_command(main)
