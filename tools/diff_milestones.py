#!/usr/bin/env python3
"""Show what a milestone changes: the blocks that differ from another's, and nothing else.

    python tools/diff_milestones.py 04                          what it changes in its parent
    python tools/diff_milestones.py 03 04                       all that changes between the two
    python tools/diff_milestones.py 03 04 --steps               the same, one milestone at a time
    python tools/diff_milestones.py 03 04 --stat                its size, figures and numbers
    python tools/diff_milestones.py 03 04 --blocks Muon GPT     only these blocks
    python tools/diff_milestones.py train 01 --html diff.html   your script beside 01, on a page
    python tools/diff_milestones.py 03 04 --time --nproc 8      and how fast each trains here
    python tools/diff_milestones.py 09 --origin                 the milestone that brought each line
    python tools/diff_milestones.py --life CausalSelfAttention  every version of one block
    python tools/diff_milestones.py 04 --why-long               its idea in two minutes

Signs of lines: - removed, + added, > re-indented, « moved from here, » moved to here;
⋯ stands for lines that are not shown, ↪ begins the rest of a line that is too long. A chain is a
series of milestones, each made from the one before it. The card is the docstring at the top of a
script: what it is and what it changes.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, positive, run_command
from speedrun.base.files import check_output, replace_file
from speedrun.base.text import visible

ROUNDS, STEPS = 2, 40  # of each script for --time: runs, and steps of a run


def main() -> int:
    """Parses, compares, prints; returns the exit code."""
    args = parse_args()
    if args.origin or args.life:
        return follow(args)
    if args.view == "why-long":
        return explain(args)
    from speedrun.diff.difference import find_difference
    from speedrun.diff.facts import parent_of, read_side

    if args.b is None:
        args.a, args.b = parent_of(args.a), args.a
    old, new = read_side(args.a), read_side(args.b)
    comparison = find_difference(old.text, new.text, (old.name, new.name))
    if not args.steps:  # a block that comes and goes in between is at neither side
        comparison = comparison.only(args.blocks)
    if args.html:
        from speedrun.diff.html import make_page

        check_output("--html", args.html, ".html")
    runs = train_in_turn(args) if args.time else None
    if args.view or not args.html:
        pairs = [(old, new, comparison)]
        for pair in pairs_between(old, new, args.blocks) if args.steps else pairs:
            show(args, *pair)
    if runs:
        from speedrun.compare.table import print_comparison

        print(flush=True)
        print_comparison(runs, sys.stdout)
    if args.html:
        page = make_page(old, new, comparison, runs)
        replace_file(args.html, page.encode())
        print("wrote", visible(str(args.html)))
    return 1 if runs and any(entry.failures for entry in runs.entries) else 0


def pairs_between(old, new, blocks):
    """Yields (parent, child, comparison) for each milestone from one side to the other; with the
    names of blocks, only for those that change one of them, and only these blocks.

    Raises UserError where neither side is an ancestor of the other, and for an unknown name.
    """
    from speedrun.base.errors import UserError
    from speedrun.diff.difference import find_difference
    from speedrun.diff.facts import ideas_between, is_undone, side_of
    from speedrun.history.manifest import load_manifest

    ideas = ideas_between(old, new)
    steps = [m for title, m in ideas if not is_undone(title)]
    if not (steps and old.milestone and steps[0].parent == old.milestone.id):
        swap = "; swap them" if ideas and not steps else ""
        raise UserError(f"--steps: {old.name} is not an ancestor of {new.name}{swap}", 2)

    sides = ((side_of(load_manifest().get(m.parent)), side_of(m)) for m in steps)
    pairs = ((both, find_difference(*(side.text for side in both))) for both in sides)
    if blocks:
        pairs = [*pairs]
        changed = {change.name for _, comparison in pairs for change in comparison.changes}
        find_difference(old.text, new.text).only([name for name in blocks if name not in changed])
    for both, comparison in pairs:
        names = [change.name for change in comparison.changes if change.name in blocks]
        if names or not blocks:
            yield *both, comparison.only(names)


def follow(args: argparse.Namespace) -> int:
    """Shows where the lines of a script come from, or the life of a block; returns 0."""
    from speedrun.diff import terminal
    from speedrun.diff.origin import block_life, count_lines, line_origins
    from speedrun.history.manifest import load_manifest

    manifest, console = load_manifest(), terminal.make_console(sys.stdout)
    milestone = None if args.life else manifest.get(args.a)
    found = block_life(manifest, args.life) if args.life else line_origins(manifest, milestone)
    if args.html:
        from speedrun.diff.html import life_page, origin_page

        check_output("--html", args.html, ".html")
        page = life_page(args.life, found) if args.life else origin_page(milestone, found)
        replace_file(args.html, page.encode())
        print("wrote", visible(str(args.html)))
    elif args.life:
        terminal.print_life(console, found, args.view == "stat")
    elif args.view == "stat":
        terminal.print_origin_counts(console, count_lines(found))
    else:
        terminal.print_origins(console, found)
    return 0


def explain(args: argparse.Namespace) -> int:
    """Prints a milestone's why.md; returns 0. Raises UserError for a milestone without one."""
    from speedrun.base.errors import UserError
    from speedrun.diff import terminal
    from speedrun.history.manifest import load_manifest
    from speedrun.history.why import load_why

    manifest = load_manifest()
    milestone = manifest.get(args.a)
    if not (part := load_why(milestone)):
        known = ", ".join(m.id for m in manifest.milestones if load_why(m))
        raise UserError(f"{milestone.name} has no why.md; --why-long knows {known}")
    terminal.print_why(terminal.make_console(sys.stdout), milestone, part)
    return 0


def train_in_turn(args: argparse.Namespace):
    """The Comparison of short runs of both scripts, in turn, as compare_milestones.py makes them.

    Raises UserError for what cannot run, before anything runs, and Stopped for a signal.
    """
    from speedrun.compare.collect import collect

    runs, stopped = collect((args.a, args.b), range(ROUNDS), "diff", sys.stderr, scale=args.scale,
                            nproc=args.nproc, steps=args.train_steps or STEPS)
    if stopped:
        raise stopped
    return runs


def show(args: argparse.Namespace, old, new, comparison) -> None:
    """Prints the comparison in the view that was asked for."""
    from speedrun.diff import terminal
    from speedrun.diff.arrange import arrange
    from speedrun.diff.facts import summary_line

    console = terminal.make_console(sys.stdout)
    if args.steps:
        console.rule(style=terminal.FAINT)
    if args.view == "full":
        changes = comparison.changes if args.blocks else None
        if comparison.changes or (old.text != new.text and not args.blocks):
            terminal.print_unified(console, old, new, changes)
        else:
            console.print(summary_line(old, new, comparison))
    elif args.view == "stat":
        terminal.print_stat(console, old, new, comparison)
    else:
        terminal.print_top(console, old, new, comparison, args.why)
        terminal.print_arranged(console, arrange(old, new, comparison),
                                in_columns=args.view == "side-by-side", reasons=args.why,
                                fold=not args.blocks)


def parse_args() -> argparse.Namespace:
    """The command line; a wrong one ends the process with one line and exit code 2."""
    parser = Parser(usage="%(prog)s A [B] [options]\n       %(prog)s A --origin [--stat]"
                    " [--html FILE]\n       %(prog)s --life BLOCK [--stat] [--html FILE]",
                    description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", nargs="?",
                        help="a milestone (03, muon), train, or the path of a Python file")
    parser.add_argument("b", metavar="B", nargs="?",
                        help="the same; without it, the parent of A is compared with A")
    view = parser.add_argument_group("views").add_mutually_exclusive_group()
    for name, text in (
        ("full", "a unified diff of the whole files"),
        ("side-by-side", "two columns"),
        ("stat", "blocks, lines, figures and hyperparameters"),
        ("why-long", "the idea in two minutes, of a station (A), and nothing else"),
    ):
        view.add_argument(f"--{name}", dest="view", action="store_const", const=name, help=text)
    chain = parser.add_argument_group("through the chain").add_mutually_exclusive_group()
    chain.add_argument("--origin", action="store_true",
                       help="the script of A, each line behind the milestone that brought it")
    chain.add_argument("--life", metavar="BLOCK", help="every version of one block, chain by chain")
    add = parser.add_argument
    add("--blocks", nargs="+", action="extend", default=[], metavar="NAME",
        help="only these blocks; give it after A and B")
    add("--steps", action="store_true", help="milestone by milestone; A is an ancestor of B")
    add("--no-why", dest="why", action="store_false", help="leave out why each block changes")
    add("--html", type=Path, metavar="FILE", help="write one self-contained page; prints nothing"
        " unless a view is named")
    add("--time", action="store_true", help="also train both in turn, A B A B, and compare the"
        " runs")
    add("--scale", choices=["record", "tiny"], help="with --time: sizes (default: record with GPUs"
        " and data, else tiny)")
    add("--nproc", type=positive, metavar="N", help="with --time: ranks (default: one per GPU)")
    add("--train-steps", type=positive, metavar="N",
        help=f"with --time: steps of a run (default: {STEPS})")
    args = parser.parse_args()
    if args.life == "":
        parser.error("--life: the block's name is empty")
    if args.a is None and not args.life:
        parser.error("name a milestone (03, muon), train or a Python file")
    if args.origin or args.life:
        needless = [*filter(None, (args.life and args.a, args.b)), *args.blocks,
                    *["--time"] * args.time, *["--steps"] * args.steps]
        if needless or args.view not in (None, "stat"):
            way = ("--origin takes one milestone" if args.origin else
                   "--life takes no milestone" if args.a else "--life takes one block")
            parser.error(f"{way}, and only the options --stat and --html")
    if args.view == "why-long":
        needless = filter(None, (args.b, *args.blocks, args.html, args.time, args.steps))
        if any(needless):
            parser.error("--why-long takes one milestone and no other option")
    for name in ("scale", "nproc", "train-steps"):
        if getattr(args, name.replace("-", "_")) is not None and not args.time:
            parser.error(f"--{name} goes with --time")
    if args.steps and (args.html or args.time):
        parser.error("--steps prints; it goes with neither --html nor --time")
    return args


if __name__ == "__main__":
    run_command(main)
