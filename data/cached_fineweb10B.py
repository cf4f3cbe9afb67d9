"""Fetches FineWeb 10B, ready-made GPT-2 tokens, from the Hugging Face hub: the validation shard
and the first N of 103 training shards. A shard is 100M tokens, 200 MB.

    python data/cached_fineweb10B.py 9        # as many as a short run reads -> data/fineweb10B/
    python data/cached_fineweb10B.py --all    # everything, 20.8 GB

Run it again after an interruption: it goes on where it stopped, and whole shards stay as they are.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import shards

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
SHA256 = re.compile("[0-9a-f]{64}")


def fetch(name, out_dir):
    """Downloads one shard over HTTP into out_dir, going on with what an earlier call left.

    The bytes are collected in a hidden folder of out_dir and get their final name once they are the
    whole shard that the hub names; if what an earlier call left cannot be a part of it, the
    download starts over. Raises ValueError if the hub's file is no such shard (it is removed), and
    HTTPError or OSError if the network, the hub or the disk fails (what has come is kept).
    """
    # hf_hub_download starts a broken-off file from zero in every new process; http_get resumes.
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(REPO, name, repo_type="dataset")
    metadata = get_hf_file_metadata(url)
    # The ETag names the file's version, so that two versions are never spliced together.
    version = hashlib.sha256(str(metadata.etag).encode()).hexdigest()[:16]
    partial = staging_folder(out_dir) / f"{name}.{version}"
    if not SHA256.fullmatch(str(metadata.etag)):
        print(f"note: the hub gives no SHA-256 of {name}, so its content is not checked",
              file=sys.stderr)
    while True:
        with open(partial, "ab") as file:
            resumed = file.tell()
            if resumed < metadata.size:
                headers = build_hf_headers()
                http_get(url, file, resume_size=resumed, headers=headers, displayed_filename=name)
        try:
            check(partial, str(metadata.etag))
            break
        except ValueError as error:
            partial.unlink()
            if not resumed:
                raise ValueError(f"refused what the hub sent as {name}: {error}") from None
    os.replace(partial, out_dir / name)
    for outdated in staging_folder(out_dir).glob(f"{name}.*"):
        outdated.unlink()


def check(path, etag):
    """Raises ValueError if a file is no whole shard, or if the ETag is a SHA-256, as the hub's of
    large files is, and not the file's."""
    shards.verify(path)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if SHA256.fullmatch(etag) and found != etag:
        raise ValueError(f"its SHA-256 begins with {found[:12]}, not {etag[:12]}; run again")


def staging_folder(out_dir):
    """Returns the hidden folder of out_dir for unfinished files, on the same disk by design."""
    folder = out_dir / ".staging"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch_all(names, out_dir):
    """Downloads the named shards into out_dir, one after the other.

    Raises ValueError if a file is no shard, if the network or the hub fails, or if another process
    is at it; OSError if the disk fails.
    """
    from huggingface_hub.errors import HTTPError

    try:
        with shards.only_writer(out_dir, []):
            for number, name in enumerate(names, 1):
                print(f"[{number}/{len(names)}] {name}", flush=True)
                fetch(name, out_dir)
    except HTTPError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"no file from the hub ({reason}); check {shards.network()}; run again") from None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("N", nargs="?", help="training shards, 1..103")
    which.add_argument("--all", action="store_true", help=f"all {TRAIN_SHARDS}, 20.8 GB")
    parser.add_argument(
        "--out", type=shards.folder, default=Path(__file__).parent / "fineweb10B", metavar="DIR"
    )
    args = parser.parse_args()
    number = str(TRAIN_SHARDS) if args.all else args.N or "nothing"
    if not (number.isdecimal() and 1 <= int(number) <= TRAIN_SHARDS):
        print(f"error: N must be a number of shards from 1 to {TRAIN_SHARDS}, 200 MB each, not"
              f" {number}; --all fetches all, 20.8 GB", file=sys.stderr)
        sys.exit(2)

    names = [shards.fineweb_name(index) for index in range(int(number) + 1)]
    missing = [name for name in names if not shards.is_valid(args.out / name)]
    with shards.filling(args.out, "the same command goes on from here"):
        if missing:
            fetch_all(missing, args.out)
    print(f"{len(names)} shards in {args.out}")


if __name__ == "__main__":
    main()
