#!/usr/bin/env python3
"""Predict what a run at record scale would need of a GPU, on a machine that has none.

    python tools/predict.py 04                                  eight H100s, as the record
    python tools/predict.py 04 --gpu 4090 --nproc 1             one card at home
    python tools/predict.py p0 p1 p2                            a table
    python tools/predict.py 02 --device-batch 16 --json
    python tools/predict.py 05 --compiled                       what torch.compile makes of it

The script's own main() runs on tensors without data, operator by operator or compiled for the GPU.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, positive, run_command
from speedrun.base.text import print_table, visible
from speedrun.predict.cards import CARDS


def main(argv: list[str] | None = None) -> int:
    """Parses (None: the command line), predicts, prints; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET",
                        help="a milestone (01, muon), train, or a train_gpt.py")
    parser.add_argument("--gpu", default="h100", choices=CARDS, help="default: h100")
    parser.add_argument("--nproc", type=positive, default=8, metavar="N", help="GPUs (default: 8)")
    parser.add_argument("--device-batch", type=positive, metavar="N",
                        help="sequences per forward pass on a GPU (default: the script's)")
    parser.add_argument("--compiled", action="store_true",
                        help="as torch.compile makes it (takes minutes, needs triton)")
    parser.add_argument("--json", action="store_true",
                        help="print a JSON object for each target, a line each")
    args = parser.parse_args(argv)

    from speedrun.predict.report import LEGEND, to_columns, to_json, to_text
    from speedrun.predict.runs import largest_micro_batch, predict
    from speedrun.scripts.find import find_script

    scripts = {visible(script.name): script for script in map(find_script, args.targets)}
    settings = {"micro_batch_size": args.device_batch} if args.device_batch else {}
    how = CARDS[args.gpu], args.nproc, settings, args.compiled
    found = {title: predict(script, *how) for title, script in scripts.items()}
    if len(found) > 1 and not args.json:
        print_table(to_columns(found), sys.stdout)
        print(f"{args.nproc} x {CARDS[args.gpu].name}\n{LEGEND}")
        return 0
    show = to_json if args.json else to_text
    for title, script in scripts.items():
        largest = largest_micro_batch(script, *how)
        print(show(title, CARDS[args.gpu], args.nproc, found[title], largest))
    return 0


if __name__ == "__main__":
    run_command(main)
