#!/usr/bin/env python3
"""Predict what a run at record scale would need of a GPU, without using one.

    python tools/predict.py 04                                  eight H100s, as the record
    python tools/predict.py 14i --gpu 4090 --nproc 1 \\
        --set train_seq_len=8192 --set val_seq_len=65536        one card at home
    python tools/predict.py p0 p1 p2                            a table
    python tools/predict.py 02 --device-batch 16 --json
    python tools/predict.py 05 --compiled                       what torch.compile makes of it

The script's own main() runs on tensors without data, operator by operator or compiled for the GPU.
Time is arithmetic divided by a share of the GPU's peak; the share, --mfu, is an assumption.
"""

import argparse
import sys
from functools import partial
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
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="a hyperparameter of the script; may be repeated")
    parser.add_argument("--mfu", type=share, default=0.4, metavar="SHARE",
                        help="of the peak in bf16 that each GPU is assumed to reach (default: 0.4)")
    parser.add_argument("--compiled", action="store_true",
                        help="as torch.compile makes it (takes minutes; made for "
                             "torch 2.13.0 with triton 3.7, which it needs)")
    parser.add_argument("--json", action="store_true",
                        help="print a JSON object for each target, a line each")
    args = parser.parse_args(argv)

    from speedrun.predict.report import LEGEND, to_columns, to_json, to_text
    from speedrun.predict.runs import largest_micro_batch, predict, predict_time
    from speedrun.run.plan import name_and_value
    from speedrun.scripts.find import find_script

    scripts = {visible(script.name): script for script in map(find_script, args.targets)}
    batch = {"micro_batch_size": args.device_batch} if args.device_batch else {}

    def how(script):
        chosen = (name_and_value(setting, script) for setting in args.set)
        return CARDS[args.gpu], args.nproc, {
            **batch, **{name: script.typed(name, value) for name, value in chosen}}

    found = {title: predict(script, *how(script), args.compiled)
             for title, script in scripts.items()}
    times = {title: predict_time(script, *how(script), args.mfu)
             for title, script in scripts.items()}
    if len(found) > 1 and not args.json:
        print_table(to_columns(found, times), sys.stdout)
        print(f"{args.nproc} x {CARDS[args.gpu].name}\n{LEGEND.format(mfu=args.mfu)}")
        return 0
    for title, script in scripts.items():
        show = to_json if args.json else partial(
            to_text, compiles="compile" in script.hyperparameters)
        largest = largest_micro_batch(script, *how(script), args.compiled)
        print(show(title, CARDS[args.gpu], args.nproc, found[title], largest,
                   times[title]))
    return 0


def share(text: str) -> float:
    """The value of --mfu."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share above 0 and up to 1")
    return value


if __name__ == "__main__":
    run_command(main)
