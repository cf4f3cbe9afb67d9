#!/usr/bin/env python3
"""Measure what a milestone's script costs beside its arithmetic, on the CPU.

    python tools/benchmark.py 01                     both parts, on the embedded corpus
    python tools/benchmark.py 01 --data DIR          the loader on the shards in DIR

The steps are those of the tiny scale; the loader reads the record's micro-batches.
"""

import argparse
import tempfile
from pathlib import Path

from speedrun.base.cli import Parser, positive, run_command
from speedrun.run.data import BUILTIN, make_builtin, patterns
from speedrun.run.preflight import check_shards
from speedrun.scripts.find import find_script


def main() -> int:
    """Parses, measures, prints; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a milestone (01, muon), train, or the path of a script")
    parser.add_argument("--data", type=Path, default=BUILTIN, metavar="DIR",
                        help="folder of the shards that the loader reads (default: data/builtin)")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="steps to time")
    parser.add_argument("--tokens", type=positive, default=100_000_000, metavar="N",
                        help="tokens to load; the shards are read again when they end")
    args = parser.parse_args()
    script = find_script(args.target)
    make_builtin()
    check_shards(patterns(args.data))

    from speedrun.run.overhead import time_loader, time_steps  # torch, which takes seconds
    from speedrun.scripts.load import load_snapshot

    module = load_snapshot(script.path)
    with tempfile.TemporaryDirectory() as folder:
        tiny = script.tiny | patterns(BUILTIN) | dict(
            train_steps=args.steps, val_loss_every=0, train_loss_every=10, kernel_warmup_steps=0,
            compile=False, bf16=False, log_dir=folder,
        )
        steps = time_steps(module, module.Hyperparameters(**tiny))
    loader = time_loader(module, module.Hyperparameters(**patterns(args.data)), args.tokens)

    per_step = {name: 1000 * getattr(steps, name) / steps.steps
                for name in ("total", "forward", "backward", "optimizer")}
    print("  ".join(f"{name} {ms:.1f} ms" for name, ms in per_step.items())
          + f"  outside {100 * steps.outside:.2f} %  ({steps.steps} steps at tiny scale)")
    grown = ""
    if loader.grown_bytes is not None:
        grown = f"  anonymous memory {loader.grown_bytes / 2**20:+.1f} MiB"
    print(f"loader {loader.tokens / loader.seconds / 1e6:.0f}M tokens/s"
          f"  ({loader.tokens:,} tokens in {1000 * loader.seconds:.0f} ms){grown}")
    return 0


if __name__ == "__main__":
    run_command(main, ValueError)
