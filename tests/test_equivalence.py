"""Any number of ranks trains on the same tokens to the same losses.

Run: .venv/bin/python -m pytest tests/test_equivalence.py
"""

import itertools

import numpy as np
import pytest

import shards as shard_files
from record_run import batch_hash
from snapshots import (
    MICRO,
    WRITTEN,
    by_id,
    load_snapshot,
    micro_args,
    micro_overrides,
    run_recorded,
)
from speedrun.manifest import load_manifest
from speedrun.runlog import read_log

WORLD_SIZES = (1, 2, 4)


@pytest.fixture(scope="module", params=WRITTEN, ids=by_id)
def recorded(request, shards, tmp_path_factory):
    """The milestone's records by world size."""
    milestone, runs = request.param, {}
    for world_size in WORLD_SIZES:
        folder = tmp_path_factory.mktemp("runs") / str(world_size)
        overrides = micro_overrides(milestone, shards, folder / "log")
        runs[world_size] = run_recorded(milestone, overrides, world_size, folder)
        runs[world_size][0]["train_losses"] = train_losses(folder / "log")
    return runs


def train_losses(log_dir):
    """The logged mean train losses, [(step, loss), ...]."""
    return read_log(log_dir / "log.txt").train_curve


def blocks_of(records, kind, number):
    """The hashes of a stream's blocks, in the order micro_step * world_size + rank."""
    by_rank = [record["streams"][kind][number] for record in records]
    return list(itertools.chain.from_iterable(zip(*by_rank, strict=True)))


def expected_blocks(folder, steps):
    """The stream as data/README.md rules it, cut from the tokens without their loader."""
    T, B, step_tokens = MICRO["seq_len"], MICRO["micro_batch_size"], MICRO["total_batch_size"]
    files = sorted(folder.glob("*_train_*"))
    streams = [shard_files.read(file).astype(np.int64) for file in files]
    cuts = [
        tokens[start : start + step_tokens + 1]
        for tokens in streams
        for start in range(0, len(tokens), step_tokens)
        if start + step_tokens + 1 <= len(tokens)
    ]
    assert len(cuts) < steps, "the test must go past the last shard's end"
    for step in range(steps):
        tokens = cuts[step % len(cuts)]
        for start in range(0, step_tokens, B * T):
            inputs, targets = tokens[start : start + B * T], tokens[start + 1 : start + B * T + 1]
            yield batch_hash(inputs.reshape(B, T), targets.reshape(B, T))


def test_every_world_size_sees_the_same_tokens(recorded, shards):
    steps = MICRO["train_steps"]
    expected = list(expected_blocks(shards, steps))
    for world_size, records in recorded.items():
        # stream 0 is the kernel warm-up's
        assert blocks_of(records, "train", 1) == expected, f"world size {world_size}"


def test_every_validation_reads_the_same_tokens(recorded):
    validations = {
        tuple(blocks_of(records, "val", number))
        for records in recorded.values()
        for number in range(len(records[0]["streams"]["val"]))
    }
    assert len(validations) == 1


def test_every_world_size_has_the_same_losses(recorded):
    (reference,) = [record["losses"] for record in recorded[1]]
    assert len(reference) == MICRO["train_steps"] + 1
    assert reference[0][1] - reference[-1][1] > 0.5, "the learning rates must move the loss"
    for records in recorded.values():
        for record in records:
            np.testing.assert_allclose(record["losses"], reference, rtol=0, atol=1e-4)


def test_every_world_size_logs_the_same_train_losses(recorded):
    reference = recorded[1][0]["train_losses"]
    assert len(reference) == MICRO["train_steps"]
    for records in recorded.values():  # they are logged with four digits
        np.testing.assert_allclose(records[0]["train_losses"], reference, rtol=0, atol=2.1e-4)


def test_each_rank_orthogonalizes_its_share(recorded, request):
    # The micro model has 12 matrices from 02 on; 01 has 8, of which Q, K and V count as three.
    milestone = request.node.callspec.params["recorded"]
    buffers = {"00": 0, "01": 8}.get(milestone.id, 12)
    calls = 0 if milestone.id == "00" else 12
    steps = MICRO["train_steps"] + MICRO["kernel_warmup_steps"]
    for world_size, records in recorded.items():
        share = 1 if milestone.id in ("00", "01", "02") else world_size
        for record in records:
            assert record["buffers"] == buffers / share
            assert record["orthogonalized"] == steps * calls / share


SYSTEMS = [milestone for milestone in WRITTEN if milestone.kind == "systems"]


@pytest.mark.parametrize("milestone", SYSTEMS, ids=by_id)
def test_a_systems_milestone_has_its_parents_losses(milestone, shards, tmp_path):
    parent = load_manifest().get(milestone.parent)
    losses = [
        load_snapshot(m).main(micro_args(m, shards, tmp_path / m.id)) for m in (parent, milestone)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-4)
    assert losses[0][0][1] - losses[0][-1][1] > 0.5


@pytest.mark.parametrize("milestone", WRITTEN, ids=by_id)
def test_micro_batch_size_does_not_matter(milestone, shards, tmp_path):
    module = load_snapshot(milestone)
    losses = [
        module.main(micro_args(
            milestone, shards, tmp_path / str(size), micro_batch_size=size, train_steps=10
        ))
        for size in (4, 16)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-4)
    logged = [train_losses(tmp_path / str(size)) for size in (4, 16)]
    np.testing.assert_allclose(logged[0], logged[1], rtol=0, atol=2.1e-4)


def test_why_the_scalars_stand_still_in_these_tests(shards, tmp_path):
    # In the first steps of 04 the exact gradient of its scalars is zero. What comes out is
    # round-off, which depends on the order of the sums, so on ranks and micro-batches; Adam divides
    # by its size and takes a whole step.
    milestone = load_manifest().get("04")
    apart = {}
    for scalar_lr in (0.0, 0.04):
        losses = [
            load_snapshot(milestone).main(micro_args(
                milestone, shards, tmp_path / f"{scalar_lr}-{size}", micro_batch_size=size,
                scalar_lr=scalar_lr,
            ))
            for size in (4, 32)
        ]
        apart[scalar_lr] = np.abs(np.subtract(*losses)).max()
    assert apart[0.0] < 1e-5
    assert apart[0.04] > 1e-4


@pytest.mark.parametrize("milestone", WRITTEN, ids=by_id)
def test_kernel_warmup_leaves_no_trace(milestone, shards, tmp_path):
    module = load_snapshot(milestone)
    losses = [
        module.main(micro_args(
            milestone, shards, tmp_path / str(n), kernel_warmup_steps=n, train_steps=5
        ))
        for n in (0, 3)
    ]
    assert losses[0] == losses[1]
