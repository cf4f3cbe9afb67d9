#!/usr/bin/env python3
"""Compare milestones, scripts and logs in one table: loss, tokens, time, speed.

    python tools/compare_milestones.py 00 01 02 04 --scale tiny --repeat 3
    python tools/compare_milestones.py 03 04 --nproc 8 --steps 200
    python tools/compare_milestones.py 02 02:muon_lr=1e-3 02:muon_lr=4e-3     settings of its own
    python tools/compare_milestones.py p6d --ablate        without each of its gains in turn
    python tools/compare_milestones.py e0a e3 --from RUN --repeat 5     tokens/s of generation
    python tools/compare_milestones.py runs/a path/to/a_public_record_log.txt  reads, trains nothing
    python tools/compare_milestones.py --measure           every milestone on your GPUs, timed
    python tools/compare_milestones.py --measure --only 07 09
    python tools/compare_milestones.py --measure --minutes 13      what tells most, in this time

Scripts are trained in turn (A B A B), once per seed. Logs of one script that differ only in the
seed are runs of one entry. --measure writes what it finds into history/measured/ at once and,
started again after an interruption or --minutes, goes on where it stopped.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, folder, natural, not_negative, positive, run_command
from speedrun.base.errors import Stopped, UserError
from speedrun.base.files import REPOSITORY, check_output, replace_file
from speedrun.base.text import short
from speedrun.compare.collect import add_mfu, collect, leave_one_out, parse_target
from speedrun.compare.generation import compare_generation, only_generate
from speedrun.compare.results import Comparison
from speedrun.compare.table import print_comparison, to_csv, to_markdown
from speedrun.history.manifest import load_manifest
from speedrun.history.measured import MEASURED
from speedrun.run.plan import fresh_out

WRITERS = {"markdown": to_markdown, "csv": to_csv, "json": Comparison.to_json}
MOST_REPEATS = 1000


def main() -> int:
    """Parses, trains or reads, prints; returns the exit code."""
    args = parse_args()
    if args.measure:
        return measure_milestones(args)
    taken = {one.log.resolve() for one in map(parse_target, args.targets) if one.log}
    for name in (*WRITERS, "png"):
        if path := getattr(args, name):
            check_output(f"--{name}", path, ".md" if name == "markdown" else f".{name}")
            if path.resolve() in taken:
                raise UserError(f"--{name} {path}: this file is read", 2)
    options = dict(settings=args.set, scale=args.scale, data=args.data, steps=args.steps,
                   nproc=args.nproc, start=args.start)
    targets, anyway = args.targets, []
    seeds = range(args.seed, args.seed + args.repeat)
    if args.ablate:
        if len(targets) > 1:
            raise UserError("--ablate takes one milestone", 2)
        targets, anyway = leave_one_out(targets[0], **options)
    if only_generate(targets):
        for name in (*WRITERS, "png", "out", "target", "official"):
            if getattr(args, name):
                raise UserError(f"--{name} is for scripts that train", 2)
        compare_generation(targets, seeds, sys.stdout, **options)
        return 0
    comparison, stopped = collect(
        targets, seeds,
        args.out or "compare", sys.stdout, target=args.target, **options,
        command=shlex.join(["python", "tools/compare_milestones.py", *sys.argv[1:]]),
    )
    add_mfu(comparison.entries)
    print_comparison(comparison, sys.stdout)
    for setting in anyway:
        print(f"off here: {setting} is what this machine runs anyway")

    for name, write in WRITERS.items():
        if path := getattr(args, name):
            replace_file(path, write(comparison).encode())
    if args.png and any(entry.runs for entry in comparison.entries):
        from speedrun.compare.plot import draw_comparison, save

        curves = official_curves(comparison, args.official)
        save(draw_comparison(comparison, curves), args.png)
    if stopped:
        raise UserError(f"{stopped}\nthe table holds what had finished", stopped.status)
    return 1 if any(entry.failures for entry in comparison.entries) else 0


def measure_milestones(args: argparse.Namespace) -> int:
    """Measures on this machine's GPUs; returns the exit code."""
    from speedrun.compare.measure import STEPS, measure  # torch, which takes seconds
    from speedrun.compare.plans import measurable

    manifest, scale = load_manifest(), args.scale or "record"
    wanted = [manifest.get(id) for id in dict.fromkeys(args.only)]
    for m in wanted:
        if not measurable(m):
            raise UserError(f"--only {m.id}: {m.script.name} does not train on shards, so it has no"
                            " step to time", 2)
    wanted = wanted or manifest.milestones
    folder = MEASURED if scale == "record" else args.out or REPOSITORY / "runs" / "measure-tiny"
    file, found, stopped = measure(
        wanted, folder, args.out or fresh_out("measure"), sys.stdout, scale=scale,
        steps=args.steps or STEPS, nproc=args.nproc, data=args.data, share=args.share,
        minutes=args.minutes or math.inf)
    failed = [f"{m.name}: {found.failed[m.slug]}" for m in wanted if m.slug in found.failed]
    if stopped:
        raise Stopped(f"{stopped}; the same command goes on after what {short(file)} holds",
                      stopped.status)
    if failed:
        raise UserError(f"{len(failed)} failed, all else is in {short(file)}: "
                        + "; ".join(failed))
    if scale == "record":
        print(f"{short(file)}: to contribute it, see {short(MEASURED / 'README.md')}")
    return 0


def official_curves(comparison: Comparison, wanted: bool) -> dict[str, dict[str, list]]:
    """label -> {axis: official curve} of the entries that are milestones, if they are wanted; over
    steps, and over the millions of tokens that the record took for them."""
    found = {}
    for entry in comparison.entries if wanted else ():
        m = load_manifest().get(entry.milestone) if entry.milestone else None
        if m and m.curve:
            found[entry.label] = {"steps": list(m.curve), "tokens": [
                (m.tokens_after(step) / 1e6 if step else 0.0, loss) for step, loss in m.curve]}
    return found


def parse_args() -> argparse.Namespace:
    """The command line; a wrong one ends the process with one line and exit code 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("targets", nargs="*", metavar="TARGET",
        help="to train: a milestone (01, muon), train or a script, possibly with :NAME=VALUE,... of"
        " its own; to read: a log.txt or the folder of a run")
    add("--scale", choices=["record", "tiny"],
        help="the record's sizes or a laptop's (default: record with GPUs and data, else tiny)")
    add("--steps", type=positive, metavar="N",
        help="optimizer steps; the schedule shrinks in proportion")
    add("--repeat", type=repeats, default=1, metavar="N", help="runs of each script, by seed")
    add("--seed", type=natural, default=0, metavar="N", help="seed of the first of them")
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="a hyperparameter of all scripts; may be repeated")
    add("--nproc", type=positive, metavar="N", help="ranks (default: one per GPU, 1 without)")
    add("--data", type=folder, metavar="DIR", help="folder with *_train_*.bin and *_val_*.bin")
    add("--from", dest="start", type=Path, metavar="RUN",
        help="run or checkpoint that all scripts start from, where they fine-tune or generate")
    add("--out", type=folder, metavar="DIR",
        help="folder of the runs (default: runs/compare-<time>)")
    add("--target", type=not_negative, metavar="LOSS",
        help="the loss to reach (default: 3.28; on the embedded corpus the first one's final loss)")
    add("--ablate", action="store_true",
        help="compare one milestone with itself without each of its gains, by its flags")
    add("--measure", action="store_true",
        help="measure milestones on this machine's GPUs: steps at the record's batch (60, or"
        " --steps), memory, kernels, and losses against a CPU's")
    add("--only", nargs="+", default=[], metavar="ID",
        help="the milestones to measure (default: all, those that tell most first)")
    add("--minutes", type=positive, metavar="N",
        help="measure for N minutes; the same command goes on")
    add("--share", action=argparse.BooleanOptionalAction,
        help="measure one rank's share of a step of eight, without gradient accumulation (default:"
        " on one GPU)")
    add("--official", action="store_true", help="draw the records' curves, dashed (with --png)")
    for name in (*WRITERS, "png"):
        add(f"--{name}", type=Path, metavar="FILE", help=f"also write the result as {name}")
    args = parser.parse_args()
    of_measuring = args.only or args.minutes or args.share is not None
    if args.measure == bool(args.targets) or (of_measuring and not args.measure):
        parser.error("name something to compare, or measure: --measure, possibly --only ID")
    return args


def repeats(text: str) -> int:
    """The value of --repeat; every run is planned before the first one starts."""
    if positive(text) > MOST_REPEATS:
        raise argparse.ArgumentTypeError(f"{text} runs of each script; at most {MOST_REPEATS:,}")
    return int(text)


if __name__ == "__main__":
    # an environment with torch and numpy suffices to measure
    run_command(main, needed=("torch", "numpy") if "--measure" in sys.argv else ())
