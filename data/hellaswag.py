"""Fetches HellaSwag's validation items for tools/evaluate.py: a context and four endings a line.

    python data/hellaswag.py                  # -> data/hellaswag/hellaswag_val.jsonl, 12 MB
    python data/hellaswag.py --file FILE      # the same from a copy that you have fetched yourself

HellaSwag is by Zellers and others (arXiv 1905.07830), MIT license.
"""

import argparse
import json
import shutil
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import shards

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
NAME = "hellaswag_val.jsonl"
PATIENCE_S = 60  # without a byte


def check(path, source=None):
    """Returns the number of items in a file. Raises ValueError, naming line and source (by default
    the path), where one has no four endings and label."""
    count, source = 0, source or path
    with open(path, "rb") as file:
        for count, line in enumerate(file, 1):
            try:
                item = json.loads(line)
            except ValueError:
                raise ValueError(f"{source}, line {count}: not JSON (is it compressed?)") from None
            try:
                fits = len(item["endings"]) == 4 and item["label"] in range(4)
            except (KeyError, TypeError):
                fits = False
            if not fits:
                raise ValueError(f"{source}, line {count}: an item needs four endings and a label"
                                 " from 0 to 3")
    if not count:
        raise ValueError(f"{source} is empty")
    return count


def fetch(url, out):
    """Copies what is at the URL to the path `out`, whole and checked, or not at all.

    Raises ValueError or OSError, one line, if the network, the host or the disk fails.
    """
    with shards.atomic_file(out) as file:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            raise ValueError(f"cannot fetch {url} ({getattr(error, 'reason', error)}); fetch it by"
                             " other means and pass it with --file") from None
        file.flush()
        check(file.name, url)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a copy of the file that is here already")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "hellaswag", metavar="DIR"
    )
    args = parser.parse_args()
    with shards.filling(args.out, "the same command starts over"):
        args.out.mkdir(parents=True, exist_ok=True)
        if args.file:
            open(args.file, "rb").close()  # so that its own fault is named, not the network's
        if not (args.out / NAME).exists():
            fetch(args.file.resolve().as_uri() if args.file else URL, args.out / NAME)
        print(f"{check(args.out / NAME):,} items in {args.out / NAME}")


if __name__ == "__main__":
    main()
