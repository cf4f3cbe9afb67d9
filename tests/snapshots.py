"""Load and run the snapshots from tests: micro-sized runs on synthetic tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import shards as shard_files
from speedrun import snapshot
from speedrun.manifest import REPOSITORY, load_manifest

WRITTEN = load_manifest().written()
TESTS = Path(__file__).parent

# A model and a stream that train for 20 steps in a second or two.
MICRO = dict(
    vocab_size=64, num_layers=2, num_heads=2, model_dim=32, seq_len=32, micro_batch_size=2,
    total_batch_size=1024, val_tokens=1024, train_steps=20, val_loss_every=1, train_loss_every=1,
    kernel_warmup_steps=1, compile=False, bf16=False,
)
# What each milestone needs besides, so that 20 steps move the loss by more than 0.5.
MICRO_OF = {
    "00": dict(warmup_steps=2, adam_lr=6e-3),
    **{id: dict(muon_lr=1e-2, adam_lr=3e-3, cooldown_steps=5) for id in ("01", "02", "03")},
    # The scalars stand still: test_equivalence.py shows what Adam makes of their round-off.
    "04": dict(muon_lr=0.05, embed_lr=0.1, head_lr=0.02, scalar_lr=0.0, cooldown_steps=5,
               momentum_warmup_steps=5),
    "05": dict(bos_id=1, window_start=4, window_end=24, muon_lr=0.05, embed_lr=0.1, head_lr=0.02,
               scalar_lr=0.0, cooldown_steps=5, momentum_warmup_steps=5),
}


def by_id(milestone):
    """Test ids: the milestone's folder name."""
    return milestone.name


def load_snapshot(milestone):
    """The milestone's script as a module."""
    return snapshot.load_snapshot(milestone.script)


def micro_overrides(milestone, folder, log_dir, **more):
    """Hyperparameters of a micro run on the shards in `folder`."""
    files = dict(train_files=f"{folder}/*_train_*.bin", val_files=f"{folder}/*_val_*.bin")
    return {**files, "log_dir": str(log_dir), **MICRO, **MICRO_OF.get(milestone.id, {}), **more}


def micro_args(milestone, folder, log_dir, **more):
    """The same as the Hyperparameters object of the milestone's module."""
    overrides = micro_overrides(milestone, folder, log_dir, **more)
    return load_snapshot(milestone).Hyperparameters(**overrides)


def as_options(overrides):
    """`--name=value` for the command line."""
    return [f"--{name}={value}" for name, value in overrides.items()]


def run_ranks(world_size, program, *arguments, timeout=300):
    """Runs a Python program on this machine, several ranks under torchrun and one plainly; returns
    the finished process."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command = [
        sys.executable, *(launcher if world_size > 1 else []), str(program), *map(str, arguments)
    ]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, timeout=timeout, capture_output=True,
        encoding="utf-8",
    )


def run_recorded(milestone, overrides, world_size, folder):
    """Trains and returns what tests/record_run.py wrote, one dict per rank."""
    folder.mkdir(parents=True)
    (folder / "overrides.json").write_text(json.dumps(overrides), encoding="utf-8")
    ended = run_ranks(world_size, TESTS / "record_run.py", milestone.id, folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    files = [folder / f"rank{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def write_random_shards(folder, train_lengths=(7_000, 9_500), val_length=3_000, seed=0):
    """Writes shards of random tokens below 64, unevenly distributed so that there is a pattern
    to learn: each token is one of a few followers of the one before."""
    rng = np.random.default_rng(seed)
    followers = rng.integers(0, 64, (64, 4))

    def stream(length):
        choices = rng.integers(0, 4, length)
        tokens = np.zeros(length, dtype=np.int64)
        for i in range(1, length):
            tokens[i] = followers[tokens[i - 1], choices[i]]
        return tokens

    for number, length in enumerate(train_lengths, start=1):
        shard_files.write(Path(folder, f"micro_train_{number:06d}.bin"), stream(length))
    shard_files.write(Path(folder, "micro_val_000000.bin"), stream(val_length))
