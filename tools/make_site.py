#!/usr/bin/env python3
"""Build the static site: the record curve, each milestone with its diff, each line with its origin.

    python tools/make_site.py              into build/site/, which opens from the disk
    python tools/make_site.py --out FOLDER
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, folder, run_command
from speedrun.base.files import REPOSITORY
from speedrun.base.text import short


def main() -> int:
    """Builds, says where; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=folder, default=REPOSITORY / "build" / "site",
                        metavar="FOLDER", help="the folder to build in (default: build/site)")
    out = parser.parse_args().out
    from speedrun.site.build import build

    start = time.perf_counter()
    files = build(out)
    pages = sum(name.endswith(".html") for name in files)
    print(f"{pages} pages in {time.perf_counter() - start:.0f} s: open {short(out)}/index.html")
    return 0


if __name__ == "__main__":
    run_command(main, ValueError)
