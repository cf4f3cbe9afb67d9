#!/usr/bin/env python3
"""Run a milestone, the learner's script or any train_gpt.py, and sum the run up.

    python tools/run_milestone.py 01                   tiny on a CPU: about four minutes
    python tools/run_milestone.py 04 --nproc 8         eight GPUs, the record's numbers
    python tools/run_milestone.py train --steps 50     your own train/train_gpt.py
    python tools/run_milestone.py DIR/train_gpt.py --set adam_lr=1e-3
    python tools/run_milestone.py e2 --from runs/x     fine-tune the model that a run has trained
    python tools/run_milestone.py e3 --from runs/y --prompt "def f(x): return x"    answers it
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, folder, natural, positive, run_command
from speedrun.base.errors import UserError
from speedrun.base.text import short, visible
from speedrun.history.glossary import load_glossary
from speedrun.run.execute import run
from speedrun.run.fit_batch import fit_micro_batch
from speedrun.run.generation import generate
from speedrun.run.plan import AUTO, Nodes, make_plan
from speedrun.run.summary import print_summary, to_json
from speedrun.scripts.find import Script, find_script


def main() -> int:
    """Parses, runs, prints; returns the exit code."""
    args = parse_args()
    if args.help_settings:
        print_settings(find_script(args.target))
        return 0
    stream = sys.stderr if args.json or args.dry_run else sys.stdout
    settings = [*([] if args.prompt is None else [f"prompt={args.prompt}"]), *args.set]
    plan = make_plan(
        args.target, scale=args.scale, data=args.data, steps=args.steps,
        device_batch=args.device_batch, settings=settings, nproc=args.nproc,
        nodes=Nodes(args.nnodes, args.node_rank, args.rdzv_endpoint), out=args.out,
        save_checkpoint=args.save_checkpoint, start=args.start, for_elsewhere=args.dry_run,
    )
    for note in plan.notes:
        print(visible(note), file=stream, flush=True)
    plan = fit_micro_batch(plan, stream, search=not args.dry_run, use_cache=not args.no_cache)
    if args.dry_run:
        command = shlex.join(plan.command)
        print(visible(command) if sys.stdout.isatty() else command)
        return 0

    if plan.script.generates:
        answers = generate(plan, None if args.json else write)
        if args.json:
            print(json.dumps(dict(asdict(answers), text=answers.text.decode())))
        return 0

    try:
        summary = run(plan, stream)
    except UserError as error:
        if args.json:
            print(json.dumps({"error": str(error)}))
        raise
    if summary is None:
        print("done; the log and the summary are on node 0, with rank 0", file=stream)
        return 0
    if args.json:
        print(to_json(summary))
    else:
        print_summary(summary, stream)
    log = Path(summary.log)
    for file in sorted(log.parent.glob("stderr_rank*.txt")):
        print("stderr:", visible(short(file)), file=stream)
    print(visible(short(log)), file=stream)
    return 0


def write(text: bytes) -> None:
    """Writes text to stdout at once."""
    sys.stdout.buffer.write(text)
    sys.stdout.flush()


def parse_args() -> argparse.Namespace:
    """The command line; a wrong one ends the process with one line and exit code 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", help="a milestone (01, muon), train, or the path of a train_gpt.py")
    add("--scale", choices=["record", "tiny"],
        help="the record's sizes or a laptop's (default: record with data and"
        " GPUs of compute capability 8.0 or more, else tiny)")
    add("--steps", type=positive, metavar="N",
        help="optimizer steps; the schedule shrinks in proportion")
    add("--data", type=folder, metavar="DIR", help="folder with *_train_*.bin and *_val_*.bin;"
        " for fine-tuning with *_train.jsonl and *_val.jsonl")
    add("--device-batch", type=positive_or_auto, metavar="N|auto",
        help="sequences per forward pass on a device (the batch of a step stays the same); auto: "
        "the most that fit a GPU's memory, found by short trials and remembered")
    add("--no-cache", action="store_true", help="let --device-batch auto search again")
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="any hyperparameter of the script (see --help-settings); may be repeated; has the last"
        " word")
    add("--out", type=folder, metavar="DIR", help="folder of the run (default: runs/<slug>-<time>)")
    add("--from", dest="start", type=Path, metavar="RUN",
        help="run or checkpoint to start from, where a script fine-tunes or generates")
    add("--prompt", metavar="TEXT", help="what a generating script answers: --set prompt=TEXT")
    add("--save-checkpoint", action="store_true", help="keep the weights: checkpoint.pt")
    add("--nproc", type=positive, metavar="N",
        help="ranks on this machine (default: one per visible GPU, 1 without)")
    add("--nnodes", type=positive, default=1, metavar="N", help="machines of the run")
    add("--node-rank", type=natural, default=0, metavar="N", help="which of them this is, from 0")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="machine 0's address and a free port there")
    add("--dry-run", action="store_true", help="print the command and run nothing, "
        "not even trials: --device-batch auto answers only if it remembers")
    add("--help-settings", action="store_true", help="list the hyperparameters that --set takes:"
        " default, tiny value, unit, meaning")
    add("--json", action="store_true", help="print the summary as JSON, all else on stderr")
    return parser.parse_args()


def print_settings(script: Script) -> None:
    """Prints name, default, tiny value, unit and meaning of each hyperparameter as a table; a
    default that depends on the machine is empty."""
    from rich.console import Console
    from rich.table import Table

    def written(value):
        return "" if value is None else f"{value:_}" if type(value) is int else str(value)

    glossary, table = load_glossary(), Table(box=None, pad_edge=False)
    for title in ("--set", "default", "tiny", "unit", "meaning"):
        table.add_column(title, overflow="fold")
    for name, default in script.hyperparameters.items():
        if name != "log_dir":  # it is chosen with --out
            entry = glossary.get(name)
            words = (entry.unit, entry.meaning) if entry else ()
            table.add_row(name, written(default), written(script.tiny.get(name)), *words)
    Console(highlight=False, markup=False).print(table)


def positive_or_auto(text: str) -> int | str:
    """The value of --device-batch."""
    return text if text == AUTO else positive(text)


if __name__ == "__main__":
    run_command(main)
