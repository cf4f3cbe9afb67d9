"""Which tokens each rank is dealt, step by step, against what is known of the stream, and the
batches of a thread that reads ahead.

Run: .venv/bin/python -m pytest tests/test_loader.py
"""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shards as shard_files
from snapshots import (
    MANIFEST,
    handles,
    known_values,
    load_snapshot,
    micro_args,
    open_shard,
    sized,
    token_batches,
    where,
    write_random_shards,
)

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A folder with two shards of consecutive numbers: 65 tokens hold two steps of 32 and the last
    target, 64 hold one (the second has no target)."""
    shard_files.write(tmp_path / "a_1.bin", np.arange(65))
    shard_files.write(tmp_path / "a_2.bin", np.arange(65, 65 + 64))
    return tmp_path


def stream(module, folder, world_size, count):
    """The first `count` micro-batches of every rank."""
    sizes = dict(micro_batch_size=2, seq_len=4, vocab_size=1000)
    fields = vars(module.Hyperparameters)
    args = module.Hyperparameters(**sized(sizes, fields, handles(module)))
    ranks = [token_batches(module, f"{folder}/*.bin", 32, args, rank, world_size)
             for rank in range(world_size)]
    return [[next(rank) for rank in ranks] for _ in range(count)]


@where("token_batches")
def test_steps_are_cut_before_they_are_dealt(milestone, folder):
    module = load_snapshot(milestone)
    alone = [batches[0] for batches in stream(module, folder, world_size=1, count=14)]
    starts = [inputs[0, 0].item() for inputs, _ in alone]
    assert starts == [0, 8, 16, 24, 32, 40, 48, 56, 65, 73, 81, 89, 0, 8]
    for inputs, targets in alone:
        assert inputs.shape == targets.shape == (2, 4) and inputs.dtype == torch.int64
        assert inputs.flatten().tolist() == list(range(inputs[0, 0], inputs[0, 0] + 8))
        assert (targets - inputs).unique().tolist() == [1]
    dealt = [b for batches in stream(module, folder, world_size=2, count=7) for b in batches]
    assert [inputs[0, 0].item() for inputs, _ in dealt] == starts


@where("open_shard")
def test_shards_are_mapped_not_read(milestone, folder):
    opened = open_shard(load_snapshot(milestone), folder / "a_1.bin")
    assert opened.tolist() == list(range(65))
    assert isinstance(opened, np.memmap) != bool(known_values(milestone.id).get("shards_in_memory"))


# ---- from 08 on: a thread reads ahead ----


@where("prefetched")
@pytest.mark.parametrize("slow", ["no one", "the thread", "the training"])
def test_a_thread_passes_the_parents_batches(milestone, slow, tmp_path, monkeypatch):
    write_random_shards(tmp_path, (1_900, 2_800), 300)
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    packed_rows, moments = module.packed_rows, itertools.count()

    def wait(who):
        if who == slow:
            time.sleep(0.004 * (next(moments) % 3))

    def rows(*args):
        for row in packed_rows(*args):
            wait("the thread")
            yield row

    monkeypatch.setattr(module, "packed_rows", rows)
    for ahead in (1, 4):
        args = micro_args(milestone, tmp_path, None, prefetched_batches=ahead)
        mine, theirs = (token_batches(m, args.train_files, 256, args, rank=1, world_size=2,
                                      aligned=True) for m in (module, parent))
        for found, expected in zip(
                module.prefetched(mine, args, CPU), itertools.islice(theirs, 60), strict=False):
            wait("the training")
            for batch, other in zip(found, expected, strict=True):
                assert batch.equal(other) and batch.dtype == other.dtype


def numbers(end, made):
    """Counts up to a fault at `end`; notes in `made` each number's thread."""
    for number in itertools.count():
        if number == end:
            raise ValueError(f"no number {end}")
        made.append(threading.current_thread())
        yield number


@where("prefetched")
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_so_many_batches_are_ready_and_no_more(milestone, ahead):
    module, threads, made = load_snapshot(milestone), threading.active_count(), []
    batches = module.prefetched(
        numbers(100, made), SimpleNamespace(prefetched_batches=ahead), CPU)
    for taken in range(1, 10):
        assert next(batches) == taken - 1
        wait_until(lambda ready=taken + ahead: len(made) == ready)
        time.sleep(0.01)
        assert len(made) == taken + ahead
    assert len(set(made)) == 1 and threading.current_thread() not in made
    del batches  # ends the thread
    wait_until(lambda: threading.active_count() == threads)


def wait_until(holds):
    """Waits up to 20 seconds; fails if the condition does not hold by then."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@where("prefetched")
def test_a_fault_in_the_thread_is_raised_where_its_batch_is_taken(milestone):
    batches = load_snapshot(milestone).prefetched(
        numbers(7, []), SimpleNamespace(prefetched_batches=4), CPU)
    assert [next(batches) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="no number 7"):
        next(batches)
