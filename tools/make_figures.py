#!/usr/bin/env python3
"""Rewrite every generated table and picture of the repository, or check that none is stale.

    python tools/make_figures.py              rewrite what is stale
    python tools/make_figures.py --check      change nothing; exit 1 with a line per stale item
    python tools/make_figures.py --predict    first predict again what is stale, minutes for each
    python tools/make_figures.py --tiny       first run again what is stale at tiny scale, likewise
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, run_command
from speedrun.base.files import REPOSITORY
from speedrun.figures import ladder, predictions
from speedrun.figures.generated import PREDICTIONS, RESULTS, TINY, update
from speedrun.history.manifest import load_manifest


def main(argv: list[str] | None = None, root: Path = REPOSITORY) -> int:
    """Run the command with the arguments `argv`; return its exit code."""
    parser = Parser(description="Rewrite every generated table and picture of the repository.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 with a line per stale item"
    )
    way.add_argument(
        "--predict", action="store_true", help="first predict the milestones whose scripts have "
        f"changed, for {RESULTS}/{PREDICTIONS}: minutes for each"
    )
    way.add_argument(
        "--tiny", action="store_true", help="first run the milestones whose scripts or tiny values "
        f"have changed, for {RESULTS}/{TINY}: three runs of one to twenty minutes each (one of a "
        "systems step with its parent's losses)"
    )
    args = parser.parse_args(argv)
    if args.predict:
        predictions.predict_stale(root / RESULTS / PREDICTIONS)
    if args.tiny:
        ladder.run_stale(
            root / RESULTS / TINY, load_manifest(root / "history"), sys.stdout)
    stale, errors = update(root, args.check)
    for item in stale:
        print(f"stale: {item}" if args.check else f"wrote: {item}")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if args.check and stale:
        print("run: python tools/make_figures.py", file=sys.stderr)
    return 1 if errors or (args.check and stale) else 0


if __name__ == "__main__":
    run_command(main, ValueError)
