#!/usr/bin/env python3
"""Try each learning rate of a milestone at half and at twice its value of the tiny scale.

    python tools/sweep.py 02
    python tools/sweep.py 04 --factors 0.7,1.4 --only muon_lr
    python tools/sweep.py p4a --try weight_decay=0,0.3 --try muon_momentum=0.9   (other settings)

All other hyperparameters, the tokens and the seed stay the same. Exits 0 if no change is better
than the values of the tiny scale in history/ (and those of --set).
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, folder, natural, positive, run_command
from speedrun.base.errors import UserError
from speedrun.compare.collect import collect
from speedrun.compare.table import print_comparison
from speedrun.history.glossary import load_glossary
from speedrun.scripts.find import find_script


def main() -> int:
    """Parses, trains, prints; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a milestone (01, muon), train, or the path of a script")
    parser.add_argument("--factors", type=factors, metavar="X,Y",
                        help="what each learning rate is multiplied by (default: 0.5,2)")
    parser.add_argument("--only", metavar="NAME", help="one learning rate instead of all")
    parser.add_argument("--try", dest="tries", type=values_of, action="append", default=[],
                        metavar="NAME=X,Y", help="values of any hyperparameter, a run each, instead"
                        " of the learning rates' factors; may be repeated")
    parser.add_argument("--steps", type=positive, metavar="N", help="shorter runs than the scale's")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="a hyperparameter of all runs; may be repeated")
    parser.add_argument("--seed", type=natural, default=0, metavar="N")
    parser.add_argument("--from", dest="start", type=Path, metavar="RUN",
                        help="run or checkpoint to start from, where the script fine-tunes")
    parser.add_argument("--out", type=folder, metavar="DIR", help="folder of the runs")
    args = parser.parse_args()

    if args.tries and (args.only or args.factors):
        raise UserError("--try names all values itself; leave out --only and --factors", 2)
    rates = {} if args.tries else learning_rates(args.target, args.only)
    for setting in args.set:
        if setting.removeprefix("--").partition("=")[0] in rates:
            raise UserError(f"--set {setting}: this sweep tries other values of it; choose another"
                            " rate with --only", 2)
    tried = {**dict(args.tries), **{name: [f"{rate * factor:.4g}" for factor in
                                           args.factors or (0.5, 2.0)]
                                    for name, rate in rates.items()}}
    changes = [f"{args.target}:{name}={value}" for name, some in tried.items() for value in some]
    comparison, stopped = collect(
        [args.target, *changes], [args.seed], args.out or "sweep", sys.stdout,
        scale="tiny", steps=args.steps, settings=args.set, start=args.start,
    )
    print_comparison(comparison, sys.stdout)
    if stopped:
        raise UserError(str(stopped), stopped.status)
    losses = [min(entry.final_losses, default=math.nan) for entry in comparison.entries]
    if not math.isfinite(losses[0]):
        raise UserError("the run with the tiny scale's own values has no loss to compare with")
    best = min((loss, number) for number, loss in enumerate(losses) if math.isfinite(loss))[1]
    if best:
        print(f"better than the tiny scale's values: {comparison.entries[best].label}")
        return 1
    print("no change is better than the tiny scale's values")
    return 0


def learning_rates(target: str, only: str | None) -> dict[str, float]:
    """The learning rates of a target's tiny run, or the one called `only`.

    Raises UserError if there is none or no such rate, and what find_script raises.
    """
    script = find_script(target)
    values = {**script.hyperparameters, **script.tiny}
    known = load_glossary().of_kind("rate")
    rates = {name: value for name, value in values.items() if name in known}
    if not rates:
        raise UserError(f"{target} has no learning rate to sweep: it does not train")
    if only is not None and only not in rates:
        raise UserError(f"--only {only}: {target} has the learning rates {', '.join(rates)}")
    return rates if only is None else {only: rates[only]}


def factors(text: str) -> list[float]:
    """Comma-separated numbers above 0, for argparse."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if not all(0 < number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: not numbers above 0, separated by commas")
    return list(dict.fromkeys(numbers))  # each trains once


def values_of(text: str) -> tuple[str, list[str]]:
    """(name, values) of "name=X,Y", for argparse; the values as they were typed."""
    name, _, values = text.partition("=")
    found = list(dict.fromkeys(values.split(",")))
    if not name.isidentifier() or "" in found:
        raise argparse.ArgumentTypeError(f"{text}: not a name and its values, as in muon_lr=0.1,1")
    return name, found


if __name__ == "__main__":
    run_command(main)
