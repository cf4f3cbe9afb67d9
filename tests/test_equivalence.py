"""Any number of ranks trains on the same tokens to the same losses; so do systems milestones.

Run: .venv/bin/python -m pytest tests/test_equivalence.py
"""

import itertools
import sys
from functools import cache

import numpy as np
import pytest

import shards as shard_files
from ranks import start_ranks
from record_run import batch_hash, record, threads_of_the_server
from snapshots import (
    MANIFEST,
    MICRO,
    MILESTONES,
    by_id,
    constant_momentum,
    handles,
    known_values,
    load_snapshot,
    micro_args,
    micro_overrides,
    train,
    training_rows,
    tried_snapshots,
    where,
    write_random_shards,
)
from speedrun.history.fields import default_hyperparameters
from speedrun.run.log import read_log

# Four micro-steps in a world of one, one in a world of four; 20 steps go twice around the shards.
SIZES = dict(total_batch_size=256, val_tokens=256)
WHOLE = SIZES | dict(micro_batch_size=8)  # a step is one micro-step: twice as fast
EVERY = 4  # steps between two validations


def few_documents(milestone, **sizes):
    """The sizes, with a quarter of the rows and with longer documents where a micro-batch has room
    for few of them."""
    if not known_values(milestone.id).get("few_documents"):
        return sizes
    return sizes | dict(micro_batch_size=sizes["micro_batch_size"] // 4, max_document_len=96)


@pytest.fixture(scope="module")
def short_shards(tmp_path_factory):
    """A folder with shards of 7 and of 10 steps."""
    folder = tmp_path_factory.mktemp("short_shards")
    write_random_shards(folder, (1_900, 2_800), 300)
    return folder


@pytest.fixture(scope="module")
def recorded(milestone, short_shards, tmp_path_factory):
    """The milestone's records, one per rank, by world size."""
    runs = {}
    for world_size in (1, 4):
        log_dir = tmp_path_factory.mktemp("runs") / "log"
        overrides = micro_overrides(milestone, short_shards, log_dir, val_loss_every=EVERY, **SIZES)
        ended = start_ranks(world_size, record, milestone.id, overrides)
        runs[world_size] = [run for run, printed in ended]
        runs[world_size][0]["train_losses"] = read_log(log_dir / "log.txt").train_curve
    return runs


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_ranks_are_forks_of_a_process_without_threads():
    assert start_ranks(2, threads_of_the_server) == [(1, ""), (1, "")]


def test_a_rank_that_fails_or_waits_for_ever_ends_the_test():
    with pytest.raises(AssertionError, match="(?s)rank 1 of 2: .*no luck"):
        start_ranks(2, fail_or_wait)
    with pytest.raises(AssertionError, match=r"ranks \[0\] did not end in 2 s"):
        start_ranks(1, fail_or_wait, timeout=2)


def fail_or_wait():
    import os
    import time
    if os.environ.get("RANK") == "1":
        raise ValueError("no luck")
    time.sleep(60)


def blocks_of(records, kind, number, most=None):
    """The hashes of a stream's blocks, in the order micro_step * world_size + rank; of each rank
    `most` at most."""
    by_rank = [run["streams"][kind][number][:most] for run in records]
    return list(itertools.chain.from_iterable(zip(*by_rank, strict=True)))


def expected_blocks(folder, steps, milestone):
    """The stream as data/README.md rules it, cut from the tokens without their loader."""
    B, T = MICRO["micro_batch_size"], MICRO["seq_len"]
    step_rows = SIZES["total_batch_size"] // T
    args = micro_args(milestone, folder, None)
    factors = handles(milestone).ROW_FACTORS  # in equal parts of the schedule
    last = len(factors) - 1
    lengths = [T * factors[min(last, len(factors) * step // args.scheduled_steps) if last else 0]
               for step in range(2 * steps)]
    cuts, rounds = [], 0  # the rows of each step, with the last targets
    while len(cuts) < steps:
        rounds += 1
        for file in sorted(folder.glob("*_train_*")):
            rows = training_rows(milestone, shard_files.read(file), iter(lengths[len(cuts) :]),
                                 step_rows, args)
            cuts += [rows[i : i + step_rows]
                     for i in range(0, len(rows) - step_rows + 1, step_rows)]
    assert rounds > 1, "the test must go past the last shard's end"
    for some in cuts[:steps]:
        rows = np.array(some, dtype=np.int64)
        for i in range(0, step_rows, B):
            yield batch_hash(rows[i : i + B, :-1], rows[i : i + B, 1:])


@tried_snapshots
def test_every_world_size_sees_the_same_tokens(recorded, short_shards, milestone):
    expected = list(expected_blocks(short_shards, MICRO["train_steps"], milestone))
    ahead = default_hyperparameters(milestone.script).get("prefetched_batches", 0)  # not trained on
    for world_size, records in recorded.items():
        each = len(expected) // world_size
        found = blocks_of(records, "train", 1, each)  # stream 0 is the kernel warm-up's
        assert found == expected, f"world size {world_size}"
        for run in records:  # the thread that reads ahead may not be done when the run is
            assert each <= len(run["streams"]["train"][1]) <= each + ahead


@tried_snapshots
def test_every_validation_reads_the_same_tokens(recorded):
    validations = {
        tuple(blocks_of(records, "val", number))
        for records in recorded.values()
        for number in range(len(records[0]["streams"]["val"]))
    }
    assert len(validations) == 1


@tried_snapshots
def test_every_world_size_has_the_same_losses(recorded):
    (reference,) = [run["losses"] for run in recorded[1]]
    assert len(reference) == MICRO["train_steps"] / EVERY + 1
    assert reference[0] - reference[-1] > 0.5, "the learning rates must move the loss"
    for records in recorded.values():
        for run in records:
            np.testing.assert_allclose(run["losses"], reference, rtol=0, atol=1e-4)


@tried_snapshots
def test_every_world_size_logs_the_same_train_losses(recorded):
    reference = recorded[1][0]["train_losses"]
    assert len(reference) == MICRO["train_steps"]
    for records in recorded.values():  # they are logged with four digits
        np.testing.assert_allclose(records[0]["train_losses"], reference, rtol=0, atol=2.1e-4)


SYSTEMS = [milestone for milestone in MILESTONES if milestone.kind == "systems"]


@pytest.fixture(scope="module")
def losses_of(shards, tmp_path_factory):
    """The losses of a milestone's run in this process, which is made once."""
    @cache
    def losses(id):
        milestone = MANIFEST.get(id)
        return train(load_snapshot(milestone), micro_args(
            milestone, shards, tmp_path_factory.mktemp(id) / "log", train_steps=10,
            val_loss_every=5, **few_documents(milestone, **WHOLE), **constant_momentum(milestone)))

    return losses


@pytest.mark.parametrize("milestone", SYSTEMS, ids=by_id)
def test_a_systems_milestone_has_its_parents_losses(milestone, losses_of):
    parents, losses = losses_of(milestone.parent), losses_of(milestone.id)
    np.testing.assert_allclose(parents, losses, rtol=0, atol=1e-4)
    assert losses[0] - losses[-1] > 0.3


@pytest.mark.slow
@where("Muon", "prefetched", known="filler")
def test_eight_ranks_have_the_losses_of_one(milestone, shards, tmp_path):
    losses = []
    for world_size in (1, 8):
        overrides = micro_overrides(
            milestone, shards, tmp_path / str(world_size), total_batch_size=512)
        losses += [run["losses"] for run, _ in start_ranks(
            world_size, record, milestone.id, overrides)]
    assert losses[0][0] - losses[0][-1] > 0.5 and len(losses) == 9
    for found in losses[1:]:
        np.testing.assert_allclose(found, losses[0], rtol=0, atol=1e-4)


@where("train", "attention_mask")
def test_micro_batch_size_does_not_matter(milestone, shards, tmp_path):
    module = load_snapshot(milestone)
    losses, logged = [], []
    for size in (4, 16):
        args = micro_args(
            milestone, shards, tmp_path / str(size),
            **few_documents(milestone, micro_batch_size=size), train_steps=3, val_loss_every=3,
            total_batch_size=512, val_tokens=512)
        losses.append(train(module, args))
        logged.append(read_log(tmp_path / str(size) / "log.txt").train_curve)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logged[0], logged[1], rtol=0, atol=2.1e-4)


@tried_snapshots
def test_kernel_warmup_leaves_no_trace(milestone, shards, tmp_path):
    losses = [
        train(load_snapshot(milestone), micro_args(
            milestone, shards, tmp_path / str(n), kernel_warmup_steps=n, train_steps=3,
            **few_documents(milestone, **WHOLE)))
        for n in (0, 3)
    ]
    assert losses[0] == losses[1]
