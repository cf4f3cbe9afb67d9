#!/usr/bin/env python3
"""Evaluate trained models: loss, bits per byte, and how often they find the right ending.

    python tools/evaluate.py runs/muon-20250101-120000              loss, and the embedded task
    python tools/evaluate.py runs/a runs/b --task docstring         a table of several runs
    python tools/evaluate.py runs/a --task hellaswag --data FILE    HellaSwag's own JSONL

Tasks: loss, on the validation text of the run's vocabulary; docstring, which of four first lines
of a docstring belongs to this function (needs no download); hellaswag, which of four endings
follows (python data/hellaswag.py fetches it). Guessing finds one of four. The scores are kept
beside the checkpoint, so an interrupted evaluation goes on where it was. The script beside a
checkpoint is run, with your rights: evaluate only runs that you trust.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from speedrun.base.cli import Parser, folder, positive, run_command
from speedrun.base.errors import UserError
from speedrun.base.text import json_text, print_table, short, visible

LOSS, TASKS = "loss", ("docstring", "hellaswag")


def main(argv: list[str] | None = None) -> int:
    """Parses (None: the command line), evaluates, prints; returns the exit code."""
    args = parse_args(argv)
    tasks = list(dict.fromkeys(args.task or (LOSS, "docstring")))
    if args.data and "hellaswag" not in tasks:
        raise UserError(f"--data {args.data}: only --task hellaswag reads it", 2)
    found = [evaluate(run, tasks, args) for run in args.runs]
    if args.json:
        print(json_text(found, indent=2))
        return 0
    columns = {
        "": [visible(short(run)) for run in args.runs],
        "step": [f"{one['step']:,}" for one in found],
    }
    for task in tasks:
        figures = [one[task] for one in found]
        if task == LOSS:
            columns["val loss"] = [f"{x['val_loss']:.4f}" for x in figures]
            columns["bits per byte"] = [f"{x['bits_per_byte']:.4f}" for x in figures]
        else:
            for key in ("acc", "acc_norm"):
                columns[f"{task} {key}"] = [f"{x[key]:.1%} ± {x[key + '_se']:.1%}" for x in figures]
            columns[f"{task} items"] = [f"{x['n']:,}" for x in figures]
    print_table(columns, sys.stdout)
    if set(tasks) & set(TASKS):
        print("acc: by the ending's log-probability; acc_norm: by that per byte; ± standard error")
    return 0


def evaluate(run: Path, tasks: list[str], args: argparse.Namespace) -> dict[str, object]:
    """The figures of one run, {"run", "step", and each task: its figures}."""
    # torch takes seconds to import
    from speedrun.evaluate import TASKS, answer_task, file_hash, val_loss
    from speedrun.run.checkpoint import find_checkpoint
    from speedrun.sample import load_run, vocabulary_of

    trained, file = load_run(run), find_checkpoint(run)
    vocabulary = vocabulary_of(trained.args.vocab_size, trained.first_token)
    if vocabulary.note:
        raise UserError(f"{short(run)}: {vocabulary.note}; text cannot be scored without it")
    found: dict[str, object] = dict(run=str(run), step=trained.step)
    for task in tasks:
        show = progress(f"{visible(short(run))}: {task}", "tokens" if task == LOSS else "items")
        if task == LOSS:
            loss, bits = val_loss(trained, vocabulary, data=args.val_data, tokens=args.val_tokens,
                                  batch=args.batch, show=show)
            found[task] = dict(val_loss=loss, bits_per_byte=bits)
            continue
        data = args.data if task == "hellaswag" and args.data else TASKS[task].file
        result = answer_task(
            trained, vocabulary, task, data, file.with_name(f"evaluation_{task}.jsonl"),
            file_hash(file), batch=max(1, args.batch // 4), limit=args.limit, show=show)
        found[task] = dict(n=result.n, acc=result.acc, acc_se=result.acc_se,
                           acc_norm=result.acc_norm, acc_norm_se=result.acc_norm_se)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clears the line of the progress
    return found


def progress(head: str, unit: str):
    """A function that shows a number on stderr, in one line, if that is a terminal."""
    def show(count):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{head}, {count:,} {unit}", end="", file=sys.stderr, flush=True)
    return show


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with one line and exit code 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN",
        help="folder of a run, or the path of its checkpoint.pt")
    add("--task", action="append", choices=[LOSS, *TASKS],
        help="may be repeated (default: loss and docstring)")
    add("--data", type=Path, metavar="FILE", help="HellaSwag's JSONL (default: where"
        " data/hellaswag.py leaves it)")
    add("--limit", type=positive, metavar="N", help="only the first N items of a task")
    add("--val-data", type=folder, metavar="DIR", help="folder with *_val_*.bin for the loss"
        " (default: the embedded corpus for bytes, FineWeb for GPT-2's tokens)")
    add("--val-tokens", type=positive, metavar="N",
        help="tokens of the loss (default: as many as the run's own validations)")
    add("--batch", type=positive, default=32, metavar="N",
        help="sequences per forward pass (default: 32)")
    add("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
