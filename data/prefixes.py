"""Writes the table of GPT-2's prefixes, on which 14h trains: for each token the longest other token
that begins it.

    python data/prefixes.py                   # -> data/fineweb10B/gpt2_prefixes.bin, 0.2 MB
    python data/prefixes.py --out FILE

The file holds one little-endian int32 per token: the prefix's id, or -1 for a token without one.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import fineweb
import shards
from shards import np

OUT = Path(__file__).parent / "fineweb10B" / "gpt2_prefixes.bin"
IDS = np.dtype("<i4")


def prefix_table(byte_strings):
    """Returns for each of the byte strings, all different, the index of the longest other one that
    begins it; -1 where there is none."""
    table, ancestors = [-1] * len(byte_strings), []
    for index in sorted(range(len(byte_strings)), key=byte_strings.__getitem__):
        while ancestors and not byte_strings[index].startswith(byte_strings[ancestors[-1]]):
            ancestors.pop()  # sorted: nothing later begins with it, either
        if ancestors:
            table[index] = ancestors[-1]
        ancestors.append(index)
    return table


def gpt2_prefixes():
    """Returns the table of GPT-2's 50,257 tokens; the first token of a document has no prefix.

    Raises OSError if GPT-2's vocabulary is neither cached nor reachable.
    """
    fineweb.tokenizer("gpt2")
    import tiktoken

    gpt2 = tiktoken.get_encoding("gpt2")
    text = [gpt2.decode_single_token_bytes(token) for token in range(gpt2.eot_token)]
    return prefix_table(text) + [-1]


def main():
    """Writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    out = parser.parse_args().out
    with shards.filling(out.parent, "no table was written"):
        table = np.array(gpt2_prefixes(), IDS)
        out.parent.mkdir(parents=True, exist_ok=True)
        with shards.atomic_file(out) as file:
            file.write(table)
    print(f"{out}: {np.count_nonzero(table >= 0):,} of {len(table):,} tokens have a prefix")


if __name__ == "__main__":
    main()
