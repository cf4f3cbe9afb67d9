"""Rows of training that begin where a document begins: which they are, and who gets which.

Run: .venv/bin/python -m pytest tests/test_aligned_rows.py
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shards as shard_files
from snapshots import aligned_starts, known_values, load_snapshot, token_batches, where

BOS = 1
ARGS = SimpleNamespace(bos_id=BOS, vocab_size=64, micro_batch_size=1, train_seq_len=8)


def shard(length, documents):
    """Tokens from 2 to 63 in a known order, with BOS where documents begin."""
    tokens = (2 + np.arange(length) % 62).astype(np.uint16)
    tokens[list(documents)] = BOS
    return tokens


@where("document_starts")
def test_known_rows(milestone):
    known = known_values(milestone.id)["aligned"]
    tokens = shard(known["tokens"], known["documents"])
    for position, expected in known["starts"]:
        found = load_snapshot(milestone).document_starts(tokens[position:], known["row"], ARGS)
        assert [position + start for start in found] == expected


@where("document_starts")
def test_rows_follow_the_definition(milestone):
    document_starts, rng = load_snapshot(milestone).document_starts, np.random.default_rng(0)
    for length, documents in [
            (300, [5, 205, 220, 299]),  # one longer than many rows
            (70, [0, 64]), (70, [0, 63]), (70, [6, 69]), (70, [7]), (70, []),
            (200_000, [3, 65_535, 65_536, 65_600, 140_000, 199_999]),  # at the pieces' edges
            *((3_000, np.flatnonzero(rng.random(3_000) < share)) for share in (0.3, 0.03, 0.004))]:
        tokens = shard(length, documents)
        for T in (1, 8, 63, 64, 100):
            found = list(document_starts(tokens, T, ARGS))
            assert found == aligned_starts(tokens, T, BOS), (length, T)
            assert all(start + T < length for start in found)  # the last target is there


def rows_of(module, folder, world_size, rows, micro_batch_size=1, aligned=True):
    """The first `rows` rows of 8 tokens, inputs and targets, in the order micro_step * world_size +
    rank, of steps of 8 rows."""
    args = SimpleNamespace(**vars(ARGS) | dict(micro_batch_size=micro_batch_size))
    ranks = [token_batches(module, f"{folder}/*.bin", 64, args, rank, world_size, aligned=aligned)
             for rank in range(world_size)]
    rounds = rows // world_size // micro_batch_size
    micro_batches = [next(rank) for _ in range(rounds) for rank in ranks]
    return [torch.cat(some) for some in zip(*micro_batches, strict=True)]


@pytest.fixture
def folder(tmp_path):
    """A folder with shards of two steps of 8 rows and five rows more, and of one step."""
    documents = np.flatnonzero(np.random.default_rng(1).random(600) < 0.3)
    starts = aligned_starts(shard(600, documents), 8, BOS)
    for name, rows in (("a_1", 21), ("a_2", 8)):
        tokens = shard(600, documents)[: starts[rows] + 1]
        assert aligned_starts(tokens, 8, BOS) == starts[:rows]
        shard_files.write(tmp_path / f"{name}.bin", tokens)
    return tmp_path


@where("token_batches", known="aligned")
def test_rows_are_dealt_in_order_and_no_step_spans_two_shards(milestone, folder):
    module = load_snapshot(milestone)
    first, second = (shard_files.read(file) for file in sorted(folder.iterdir()))
    expected = [tokens[start : start + 9].astype(np.int64)
                for tokens, steps in ((first, 2), (second, 1), (first, 1))  # then round again
                for start in aligned_starts(tokens, 8, BOS)[: 8 * steps]]
    for world_size in (1, 2, 4):
        for micro_batch_size in (1, 2):
            inputs, targets = rows_of(module, folder, world_size, 32, micro_batch_size)
            assert inputs.numpy().tolist() == [row[:-1].tolist() for row in expected]
            assert targets.numpy().tolist() == [row[1:].tolist() for row in expected]
            assert (inputs[:, 0] == BOS).all() and inputs.dtype == targets.dtype == torch.int64


@where("token_batches", known="aligned")
def test_a_shard_with_too_few_rows_is_passed_over_and_none_with_enough_is_refused(
        milestone, tmp_path):
    module = load_snapshot(milestone)
    words = "with 8 rows that begin with a document, 8 tokens each"
    for name, documents in (("a_1", []), ("a_2", [4]), ("a_3", range(0, 64, 8))):
        shard_files.write(tmp_path / f"{name}.bin", shard(200, documents))
        with pytest.raises(AssertionError, match=words):
            rows_of(module, tmp_path, 1, 8)
    inputs, _ = rows_of(module, tmp_path, 1, 16, aligned=False)  # there the rows are enough
    assert inputs.flatten().tolist() == shard(200, [])[:128].tolist()
    shard_files.write(tmp_path / "a_4.bin", shard(200, range(1, 74, 8)))
    inputs, _ = rows_of(module, tmp_path, 1, 16)
    assert inputs[:, 1].tolist() == 2 * list(range(4, 61, 8))
