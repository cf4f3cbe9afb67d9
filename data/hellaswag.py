"""Fetches HellaSwag's validation items for tools/evaluate.py: a context and four endings a line.

    python data/hellaswag.py                  # -> data/hellaswag/hellaswag_val.jsonl, 12 MB
    python data/hellaswag.py --file FILE      # the same from a copy that you have fetched yourself

HellaSwag is by Zellers and others (arXiv 1905.07830), MIT license.
"""

import argparse
import hashlib
import shutil
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import shards

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
NAME = "hellaswag_val.jsonl"
ITEMS = 10_042
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
PATIENCE_S = 60  # without a byte


def check(path, source):
    """Raises ValueError, naming the source, if a file is not HellaSwag's, byte for byte."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{source} is not HellaSwag's validation file of {ITEMS:,} items: its"
                         f" SHA-256 begins with {found[:12]}, not {SHA256[:12]} (cut short,"
                         " compressed or changed?); remove it, and fetch it again")


def fetch(url, out):
    """Copies what is at the URL to the path `out`, whole and checked, or not at all.

    Raises ValueError or OSError, one line, if the network, the host or the disk fails.
    """
    with shards.atomic_file(out) as file:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            raise ValueError(f"cannot fetch {url} ({getattr(error, 'reason', error)}); check"
                             f" {shards.network()}, or fetch it by other means and pass it with"
                             " --file") from None
        file.flush()
        check(file.name, url)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a copy of the file that is here already")
    parser.add_argument(
        "--out", type=shards.folder, default=Path(__file__).parent / "hellaswag", metavar="DIR"
    )
    args = parser.parse_args()
    with shards.filling(args.out, "the same command starts over"):
        args.out.mkdir(parents=True, exist_ok=True)
        if args.file:
            open(args.file, "rb").close()  # so that its own fault is named, not the network's
        if not (args.out / NAME).exists():
            fetch(args.file.resolve().as_uri() if args.file else URL, args.out / NAME)
        check(args.out / NAME, args.out / NAME)
        print(f"{ITEMS:,} items in {args.out / NAME}")


if __name__ == "__main__":
    main()
