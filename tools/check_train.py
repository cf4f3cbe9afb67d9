#!/usr/bin/env python3
"""Check your own train/train_gpt.py, which starts as milestone 00, against the next milestone.

    python tools/check_train.py --list        the milestones, and how far you are
    python tools/check_train.py 01            what is still missing for 01
    python tools/check_train.py 01 --hint     a hint to the first block at fault; again: more
    python tools/check_train.py 01 --hint --block Muon     a hint to the block of this name
    python tools/check_train.py 01 --watch    checks again whenever the file is saved
    python tools/check_train.py 01 --take     01 becomes your script; yours is kept beside it

The script is run with your rights, in no sandbox: check only a script that you trust.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, not_negative, run_command


def main() -> int:
    """Parses, does one of the things above, returns the exit code."""
    args = parse_args()
    from speedrun.check import command
    from speedrun.history.manifest import load_manifest

    signal.signal(signal.SIGTERM, end)
    milestone = None if args.milestone is None else load_manifest().get(args.milestone)
    learner = command.open_learner(args.script, milestone)
    if args.list:
        command.show_list(learner)
    elif args.take:
        command.take_milestone(learner, milestone)
    elif args.hint is not None:
        command.give_hint(learner, milestone, args.hint or None, args.block, args.timeout)
    elif args.watch:
        command.watch(learner, milestone, args.timeout)
    elif not command.check_once(learner, milestone, args.timeout):
        return 1
    return 0


def parse_args() -> argparse.Namespace:
    """The command line; a wrong one ends the process with one line and exit code 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("milestone", nargs="?", help="a milestone (01, muon) to check against")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--list", action="store_true", help="show the milestones and your progress")
    does.add_argument("--hint", nargs="?", const=0, type=level, metavar="1-4",
                      help="a hint to the first block at fault: a nudge, the mathematics, the "
                      "steps, the diff (default: one level further)")
    add("--block", metavar="NAME",
        help="with --hint: the block (a function, a class), instead of the first at fault")
    does.add_argument("--watch", action="store_true", help="check at every change, until Ctrl-C")
    does.add_argument("--take", action="store_true",
                      help="make the milestone your script; the old one is kept with a number")
    add("--script", type=Path, metavar="PATH",
        help="another script instead of train/train_gpt.py; its progress is kept beside it")
    add("--timeout", type=seconds, default=300, metavar="S",
        help="seconds of computing after which the script is stopped (default: 300)")
    args = parser.parse_args()
    if args.milestone is None and not args.list:
        parser.error("give a milestone, or --list")
    if args.block is not None and args.hint is None:
        parser.error("--block NAME goes with --hint")
    return args


def end(signum, frame) -> None:
    """Ends the command in a way that takes the running checks and their files along."""
    sys.exit(128 + signum)


def level(text: str) -> int:
    """The value of --hint."""
    if text not in ("1", "2", "3", "4"):
        raise argparse.ArgumentTypeError(f"{text} is not a level from 1 to 4")
    return int(text)


def seconds(text: str) -> float:
    """The value of --timeout."""
    if not_negative(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no time to check anything")
    return float(text)


if __name__ == "__main__":
    run_command(main)
