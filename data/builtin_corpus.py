"""Makes a small byte-level corpus without a download: the source of Python's standard library.

    python data/builtin_corpus.py             # -> data/builtin/
    python data/builtin_corpus.py --out DIR

The text depends on the Python version: compare losses only between runs with one fingerprint.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import shards
from shards import np

DOCUMENT_START = 256  # the token before each document; tokens 0..255 are the bytes themselves
VAL, *TRAIN = SHARDS = (
    "builtin_val_000000.bin",
    "builtin_train_000001.bin",
    "builtin_train_000002.bin",
)
VAL_SHARE = 0.05  # of the source bytes
MIN_VAL_TOKENS = 200_000
DOCUMENT_BYTES = 1000, 2000

# Tests, vendored packages and files written by the build, which differ between machines.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


def source_files(root):
    """Reads a standard library.

    Argument: its folder. Returns {relative path with slashes: content with \\n line ends}, without
    symbolic links and unreadable files. Raises ValueError if there is too little source in it.
    """
    files = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)
        ]
        for name in names:
            path = Path(folder, name)
            if path.suffix != ".py" or name.startswith(SKIPPED_PREFIXES) or path.is_symlink():
                continue
            try:
                files[path.relative_to(root).as_posix()] = path.read_bytes().replace(b"\r\n", b"\n")
            except OSError:
                continue
    if VAL_SHARE * sum(map(len, files.values())) < MIN_VAL_TOKENS:
        raise ValueError(
            f"{root} does not hold the standard library's source (zipped or stripped?); "
            "use a regular installation of Python"
        )
    return files


def documents(text):
    """Cuts a file (bytes) into documents, a list of bytes: at blank lines where 1-2 kB allow it."""
    shortest, longest = DOCUMENT_BYTES
    pieces = [b""]
    for line in text.splitlines(keepends=True):
        is_break = not line.strip() and len(pieces[-1]) >= shortest
        if is_break or len(pieces[-1]) + len(line) > longest:
            pieces.append(b"")
        pieces[-1] += line
    if len(pieces) > 1 and len(pieces[-2]) + len(pieces[-1]) <= longest:
        pieces[-2:] = [pieces[-2] + pieces[-1]]
    return [piece.strip(b"\n") + b"\n" for piece in pieces if piece.strip()]


def val_paths(files):
    """Returns the paths that are validation's as whole files: in the order of their hashes, those
    that its share still has room for."""
    room, paths = VAL_SHARE * sum(map(len, files.values())), set()
    for path in sorted(files, key=lambda path: sha256(path.encode())):
        if len(files[path]) <= room:
            paths.add(path)
            room -= len(files[path])
    return paths


def split(files):
    """Returns the documents (train, val) of the files, each {content hash: bytes}, disjoint."""
    of_val, train, val = val_paths(files), {}, {}
    for path, content in files.items():
        side = val if path in of_val else train
        side.update((sha256(document), document) for document in documents(content))
    return {key: train[key] for key in train.keys() - val.keys()}, val


def tokenize(texts):
    """Returns the tokens of documents (a list of bytes), each after DOCUMENT_START."""
    starts = np.cumsum([0, *map(len, texts[:-1])])
    text = np.frombuffer(b"".join(texts), np.uint8)
    return np.insert(text.astype(np.uint16), starts, DOCUMENT_START)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def fingerprint(out_dir):
    """Returns the first 16 hex digits of the shards' sha256; raises OSError if one is missing."""
    return sha256(b"".join((out_dir / name).read_bytes() for name in SHARDS))[:16]


def existing(out_dir):
    """Returns the fingerprint of the whole corpus in out_dir made by this Python, else None."""
    try:
        corpus = json.loads((out_dir / "corpus.json").read_text(encoding="utf-8"))
        found = {"python": platform.python_version(), "fingerprint": fingerprint(out_dir)}
    except (OSError, ValueError):
        return None
    whole = all(shards.is_valid(out_dir / name) for name in SHARDS)
    return found["fingerprint"] if whole and corpus == found else None


def build(out_dir):
    """Writes the corpus: a val shard, two train shards, then corpus.json, which marks it complete.

    Argument: the folder (made if missing). Returns the fingerprint. Raises ValueError if this
    Python has no source of its standard library, OSError if the folder cannot be written.
    """
    train, val = split(source_files(Path(sysconfig.get_path("stdlib")).resolve()))
    # By content hash: whole files in a row would make neighbouring training steps too alike.
    train = [train[key] for key in sorted(train)]
    val = [val[key] for key in sorted(val)]
    sizes = np.cumsum([len(text) for text in train])
    half = int(np.searchsorted(sizes, sizes[-1] / 2))

    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "corpus.json").unlink(missing_ok=True)
    for name, texts in zip(SHARDS, (val, train[:half], train[half:]), strict=True):
        tokens = tokenize(texts)
        shards.write(out_dir / name, tokens)
        print(f"{name:<25}{len(texts):>7,} documents {len(tokens):>10,} tokens")
    corpus = {"python": platform.python_version(), "fingerprint": fingerprint(out_dir)}
    with shards.atomic_file(out_dir / "corpus.json") as file:
        file.write(json.dumps(corpus).encode())
    return corpus["fingerprint"]


def main(description, existing, build):
    """Makes data in a folder unless all of it is there; takes the module's own functions."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=shards.folder, default=Path(__file__).parent / "builtin", metavar="DIR"
    )
    args = parser.parse_args()
    with (shards.filling(args.out, "the same command starts over"),
          shards.only_writer(args.out, ["*.bin", "*.json*"], wait=True)):
        if found := existing(args.out):
            print(f"already there: {args.out}")
        found = found or build(args.out)
    print(f"python {platform.python_version()}, fingerprint {found}")


if __name__ == "__main__":
    main(__doc__, existing, build)
