"""Makes token shards from text: FineWeb's sample-10BT from the Hugging Face hub, or local files.

    python data/fineweb.py                                  # -> data/fineweb10B_own/
    python data/fineweb.py --input a.jsonl b.txt --shard-size 1000000 --out DIR

A .jsonl file holds one {"text": ...} a line, a .txt file is one document. Shard 0 is validation.
Run it again after an interruption: it goes on after the last whole shard.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import shards
from shards import np

DATASET, SAMPLE = "HuggingFaceFW/fineweb", "sample-10BT"
BATCH = 64  # documents handed to a process at a time
LONGEST_SPACE = 500_000  # white-space characters in a row that are encoded at once


# Documents


def hub_documents(start):
    """Returns an iterator over FineWeb's texts from document `start` on, downloading it first.

    Raises OSError if the hub cannot be reached.
    """
    from datasets import load_dataset

    try:
        dataset = load_dataset(DATASET, name=SAMPLE, split="train").select_columns("text")
    except Exception as error:  # the hub's, the network's and the cache's have no common base
        reason = str(error).partition("\n")[0]
        raise OSError(f"cannot get {DATASET} from the Hugging Face hub ({reason}); check"
                      f" {shards.network()}") from error
    return (row["text"] for row in dataset.select(range(start, len(dataset))))


def local_documents(paths):
    """Yields the texts of .jsonl and .txt files, in order.

    Raises ValueError, naming file and line, where one cannot be understood.
    """
    for path in paths:
        if path.suffix == ".txt":
            try:
                yield path.read_bytes().decode("utf-8-sig")
            except UnicodeDecodeError:
                raise ValueError(f"{path}: not UTF-8 text") from None
            continue
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise ValueError(f"{path}, line {number}: not JSON") from None
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise ValueError(f'{path}, line {number}: no "text" in this record')
                yield record["text"]


# Tokens


@cache
def tokenizer(name):
    """Returns (first token of a document, function from text to token ids) of "gpt2" or "bytes".

    Raises OSError if GPT-2's vocabulary is neither cached nor reachable.
    """
    if name == "bytes":
        return 256, lambda text: text.encode("utf-8", "replace")
    import tiktoken

    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except OSError as error:
        raise OSError(
            f"cannot fetch GPT-2's vocabulary; check {shards.network()}, or set TIKTOKEN_CACHE_DIR"
            " to a folder that tiktoken has used as its cache"
        ) from error
    return gpt2.eot_token, lambda text: [
        id for piece in without_long_space(text) for id in gpt2.encode_ordinary(piece)]


def without_long_space(text):
    """Yields a text in pieces with at most LONGEST_SPACE white-space characters in a row: tiktoken
    panics at 999,999. Nearly every text is one piece."""
    start = 0
    for space in re.finditer(r"\s+", text) if len(text) > LONGEST_SPACE else ():
        for end in range(space.start() + LONGEST_SPACE, space.end(), LONGEST_SPACE):
            yield text[start:end]
            start = end
    yield text[start:]


def encode_batch(name, texts):
    """Returns each text's tokens as a uint16 array: the first token of a document, then the text.

    An empty text has none. Raises ValueError if an id does not fit uint16.
    """
    first, encode = tokenizer(name)
    return [shards.as_tokens([first, *encode(text)] if text else []) for text in texts]


def encode_all(name, texts, workers):
    """Yields what `encode_batch` returns for every text, in order, from parallel processes."""
    texts = iter(texts)
    batches = iter(lambda: list(islice(texts, BATCH)), [])
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker) as pool:
        # A few batches in flight, so that memory stays bounded whatever the input's size.
        pending = deque()
        while True:
            for batch in islice(batches, 4 * workers - len(pending)):
                pending.append(pool.submit(encode_batch, name, batch))
            if not pending:
                return
            yield from pending.popleft().result()


def start_worker():
    """Leaves Ctrl-C to the parent, and ends this process with it even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


# Shards


def load_progress(out_dir, settings):
    """Returns where out_dir's whole shards end in the input, as [document, tokens of it used].

    The list stops before the first shard that is missing or broken. Raises ValueError if the folder
    holds shards of other settings or of unknown origin.
    """
    try:
        progress = json.loads((out_dir / "progress.json").read_text(encoding="utf-8"))
        ends = progress["ends"] if progress["settings"] == settings else None
        for document, used in ends or ():
            range(document, used)  # TypeError if one is no number
        fault = "is of another or a changed input, tokenizer or shard size"
    except (FileNotFoundError, LookupError, TypeError, ValueError, RecursionError):
        ends, fault = None, "is missing or damaged"
    if ends is None:
        if any(out_dir.glob("fineweb_*.bin")):
            raise ValueError(
                f"{out_dir} holds shards, but its progress.json {fault}; "
                "remove the folder or choose another --out"
            )
        return []
    whole = [shards.is_valid(out_dir / shards.fineweb_name(index)) for index in range(len(ends))]
    return ends[: [*whole, False].index(False)]


def make_shards(out_dir, inputs, name, shard_size, workers):
    """Fills out_dir with shards, going on after those an earlier call finished.

    Arguments: the folder; the local files, or None for FineWeb; the tokenizer's name; tokens a
    shard; processes. Returns (shards, tokens), the tokens those of this call. Raises ValueError if
    the input is faulty or fills no training shard, OSError if something cannot be read or written.
    """
    source = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in inputs or ()]
    source = source or [DATASET, SAMPLE]
    settings = {"source": source, "tokenizer": name, "shard_size": shard_size}
    ends = load_progress(out_dir, settings)
    if ends and shards.verify(out_dir / shards.fineweb_name(len(ends) - 1)) < shard_size:
        return len(ends), 0  # only the last shard of an input is shorter
    document, used = ends[-1] if ends else (0, 0)
    tokenizer(name)  # here first: one clear error, and the vocabulary is cached for the workers
    texts = islice(local_documents(inputs), document, None) if inputs else hub_documents(document)

    out_dir.mkdir(parents=True, exist_ok=True)
    shard = np.empty(shard_size, shards.TOKEN)
    filled = total = 0

    def finish_shard():
        nonlocal filled
        path = out_dir / shards.fineweb_name(len(ends))
        # Noted before it is written: a shard noted and not there is made again.
        ends.append([document, used])
        with shards.atomic_file(out_dir / "progress.json") as file:
            file.write(json.dumps({"settings": settings, "ends": ends}).encode())
        shards.write(path, shard[:filled])
        print(f"{path.name:<24} {filled:>11,} tokens", flush=True)
        filled = 0

    for tokens in encode_all(name, texts, workers):
        while used < len(tokens):
            part = tokens[used : used + shard_size - filled]
            shard[filled : filled + len(part)] = part
            filled += len(part)
            used += len(part)
            total += len(part)
            if filled == shard_size:
                finish_shard()
        document, used = document + 1, 0
    size = len(ends) * shard_size + filled
    if not size:
        raise ValueError("the input holds no text")
    if size <= shard_size:
        raise ValueError(
            f"the input's {size:,} tokens leave nothing to train on after a validation shard of "
            f"{shard_size:,}; pass a smaller --shard-size"
        )
    if filled:
        finish_shard()
    return len(ends), total


# Command


def check_arguments(args):
    """Raises ValueError in one sentence for whatever can be seen before any work is done."""
    if not 1 <= args.shard_size < 2**31:
        raise ValueError(f"--shard-size must lie in 1..2147483647, not {args.shard_size}")
    if args.workers < 1:
        raise ValueError(f"--workers must be at least 1, not {args.workers}")
    for number, path in enumerate(args.input or ()):
        if any(os.path.realpath(path) == os.path.realpath(other) for other in args.input[:number]):
            raise ValueError(f"{path} is named twice; a model would be validated on what it learns")
        if path.suffix not in (".jsonl", ".txt"):
            raise ValueError(f"{path}: --input takes .jsonl and .txt files")
        if not path.is_file():
            raise ValueError(f"{path}: no such file" if not os.path.lexists(path)
                             else f"{path} is not a regular file")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, nargs="+", metavar="FILE", help="instead of FineWeb")
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2")
    parser.add_argument("--shard-size", type=int, default=100_000_000, metavar="TOKENS")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="PROCESSES")
    parser.add_argument(
        "--out", type=shards.folder, default=Path(__file__).parent / "fineweb10B_own", metavar="DIR"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        with shards.filling(args.out, "the same command goes on after the last whole shard"):
            check_arguments(args)
            with shards.only_writer(args.out, ["fineweb_*.bin", "progress.json"]):
                count, total = make_shards(
                    args.out, args.input, args.tokenizer, args.shard_size, args.workers
                )
    except BrokenProcessPool:
        sys.exit("error: a worker process died, perhaps for lack of memory; try fewer --workers")
    seconds = time.perf_counter() - start
    print(f"{count} shards in {args.out}; this call: {total:,} tokens in {seconds:.0f} s")


if __name__ == "__main__":
    main()
