"""Prints the known values of a milestone that formulas make, as known.toml states them.

    python tests/oracle 14h            # those that it does not share with its parent
    python tests/oracle --all 14i      # also those that it shares
    python tests/oracle --check 14i    # compares them with known.toml; without ids, all milestones
"""

import argparse
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from oracle import text, values  # noqa: E402
from oracle.table import milestones  # noqa: E402


def differences(M, keys=None):
    """Lines that say which of a milestone's known values are not what is computed."""
    return [f"{M.id}: {line}" for key in keys or values.keys(M)
            for line in text.compare(key, M.known[key], values.MAKERS[key](M, M.known[key]))]


def computed(M, all=False):
    """{key: value} of a milestone; unless all, without what its known.toml leaves to the parent."""
    found = {key: values.MAKERS[key](M, M.known[key]) for key in values.keys(M)}
    return {key: value for key, value in found.items() if all or key in M.own
            or any(text.compare(key, M.inherited[key], value))}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--all", action="store_true", help="print also what the parent has")
    parser.add_argument("--check", action="store_true", help="compare with known.toml")
    args, found, wrong = parser.parse_args(), {}, []
    for chain in ("speedrun", "prelude", "encore"):
        found |= milestones(chain)
    if unknown := set(args.ids) - found.keys():
        parser.error(f"no milestone is called {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    for id in args.ids or found:
        if args.check:
            wrong += (lines := differences(found[id]))
            print("\n".join(lines) or f"{id}: as stated", flush=True)
        else:
            toml = text.written(computed(found[id], args.all)) or "# All is as in its parent."
            print(f"# {id}\n{toml}\n", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
