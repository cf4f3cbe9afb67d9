"""Rows of training that begin where a document begins, packs among them: which they are, and who
gets which.

Run: .venv/bin/python -m pytest tests/test_aligned_rows.py
"""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shards as shard_files
from oracle import rows as rules
from snapshots import (
    by_id,
    declaring,
    handles,
    known_values,
    load_snapshot,
    loader_args,
    token_batches,
    training_rows,
    where,
)

BOS = 1
ARGS = SimpleNamespace(bos_id=BOS, vocab_size=64, micro_batch_size=1, train_seq_len=8,
                       first_document_len=5, max_document_len=5)


def shard(length, documents):
    """Tokens from 2 to 63 in a known order, with BOS where documents begin."""
    tokens = (2 + np.arange(length) % 62).astype(np.uint16)
    tokens[list(documents)] = BOS
    return tokens


@where("aligned_rows")
def test_rows_follow_the_definition(milestone):
    module, rng = load_snapshot(milestone), np.random.default_rng(0)
    for length, documents in [
            (300, [5, 205, 220, 299]),  # one longer than many rows
            (70, [0, 64]), (70, [0, 63]), (70, [6, 69]), (70, [7]), (70, []),
            (200_000, [3, 65_535, 65_536, 65_600, 140_000, 199_999]),  # at the pieces' edges
            *((3_000, np.flatnonzero(rng.random(3_000) < share)) for share in (0.3, 0.03, 0.004))]:
        tokens = shard(length, documents)
        for T in (1, 8, 63, 64, 100):
            found = [row.tolist() for row in module.aligned_rows(tokens, T, ARGS)]
            assert found == rules.aligned(tokens.tolist(), iter([T]), None, BOS, None), (length, T)
            assert all(len(row) == T + 1 for row in found)  # the last target is there


def rows_of(module, folder, world_size, rows, micro_batch_size=1, aligned=True):
    """The first `rows` rows of 8 tokens, inputs and targets, in the order micro_step * world_size +
    rank, of steps of 8 rows."""
    args = loader_args(module, **vars(ARGS) | dict(micro_batch_size=micro_batch_size))
    ranks = [token_batches(module, f"{folder}/*.bin", 64, args, rank, world_size, aligned=aligned)
             for rank in range(world_size)]
    rounds = rows // world_size // micro_batch_size
    micro_batches = [next(rank) for _ in range(rounds) for rank in ranks]
    return [torch.cat(some) for some in zip(*micro_batches, strict=True)]


def rows_by_rule(milestone, tokens):
    """The rows of 8 tokens and a target, eight per step."""
    return training_rows(milestone, tokens, itertools.repeat(8), 8, ARGS)


LOADERS = [milestone for known in ("aligned", "packed")
           for milestone in declaring("token_batches", known=known)]


@pytest.mark.parametrize("milestone", LOADERS, ids=by_id)
def test_rows_are_dealt_in_order_and_no_step_spans_two_shards(milestone, tmp_path):
    module, rng = load_snapshot(milestone), np.random.default_rng(1)
    expected = []
    for name, steps in (("a_1", 2), ("a_2", 1)):  # and a few rows more, which are no step
        tokens = shard(600, np.flatnonzero(rng.random(600) < 0.3))
        full = next(n for n in range(600) if len(rows_by_rule(milestone, tokens[:n])) >= 8 * steps)
        tokens = tokens[: full + 30]
        shard_files.write(tmp_path / f"{name}.bin", tokens)
        expected += rows_by_rule(milestone, tokens)[: 8 * steps]
    expected += expected[:8]  # then round again
    for world_size in (1, 2, 4):
        for micro_batch_size in (1, 2):
            inputs, targets = rows_of(module, tmp_path, world_size, 32, micro_batch_size)
            assert inputs.tolist() == [row[:-1] for row in expected]
            assert targets.tolist() == [row[1:] for row in expected]
            assert (inputs[:, 0] == BOS).all() and inputs.dtype == targets.dtype == torch.int64


@where("token_batches", known="aligned")
def test_a_shard_with_too_few_rows_is_passed_over_and_none_with_enough_is_refused(
        milestone, tmp_path):
    module = load_snapshot(milestone)
    for name, documents in (("a_1", []), ("a_2", [4]), ("a_3", range(0, 64, 8))):
        shard_files.write(tmp_path / f"{name}.bin", shard(200, documents))
        with pytest.raises(AssertionError, match="fills the 8 rows of a step"):
            rows_of(module, tmp_path, 1, 8)
    inputs, _ = rows_of(module, tmp_path, 1, 16, aligned=False)  # there the rows are enough
    assert inputs.flatten().tolist() == shard(200, [])[:128].tolist()
    shard_files.write(tmp_path / "a_4.bin", shard(200, range(1, 74, 8)))
    inputs, _ = rows_of(module, tmp_path, 1, 16)
    assert inputs[:, 1].tolist() == 2 * list(range(4, 61, 8))


# ---- packs, from 05q on ----


@where("packed_rows")
def test_packs_follow_the_definition(milestone):
    module, rng = load_snapshot(milestone), np.random.default_rng(0)
    factors = handles(module).ROW_FACTORS[:2]  # rows may differ
    for length, documents in [
            (60, [0, 20, 40]), (60, [3, 4, 5, 59]),  # documents of one token, the last one too
            (60, [0]), (60, []), (8, range(8)),
            *((2_000, np.flatnonzero(rng.random(2_000) < share)) for share in (0.5, 0.1, 0.01))]:
        tokens = shard(length, documents)
        for T in (1, 8, 30):
            for longest in (1, 5, T, T + 1, T + 2, 100):
                args = loader_args(module, bos_id=BOS, max_document_len=longest, train_seq_len=T,
                                   first_document_len=3)  # in rows of T tokens
                lengths = [factor * T for factor in factors]
                for num_rows in (1, 3):
                    rows, expected = (make(tokens, itertools.cycle(lengths), num_rows, args)
                                      for make in (partial(handles(module).pack, module),
                                                   partial(training_rows, milestone)))
                    assert [row.tolist() for row in rows] == expected, (length, T, longest)


@where("packed_rows", known="packed")
def test_known_packs(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["packed"]
    tokens = shard(known["tokens"], known["documents"])
    T, longest = known["row"], known["longest"]
    args = loader_args(module, bos_id=BOS, max_document_len=longest, first_document_len=longest,
                       train_seq_len=T)
    found = handles(module).pack(
        module, tokens, itertools.repeat(T), len(known["rows"]), args)
    assert [row.tolist() for row in found] == [
        [token for start, end in row for token in tokens[start:end].tolist()]
        for row in known["rows"]]


@where("token_batches", known="packed")
def test_a_shard_without_enough_packs_is_refused(milestone, tmp_path):
    module = load_snapshot(milestone)
    shard_files.write(tmp_path / "a_1.bin", shard(200, range(1, 113, 8)))  # 14 of 5 tokens
    with pytest.raises(AssertionError, match="fills the 8 rows of a step"):
        rows_of(module, tmp_path, 1, 8)
    inputs, _ = rows_of(module, tmp_path, 1, 16, aligned=False)  # there the rows are enough
    assert inputs.flatten().tolist() == shard(200, range(1, 113, 8))[:128].tolist()
    shard_files.write(tmp_path / "a_2.bin", shard(200, range(1, 122, 8)))  # 16: 5 + 4 each
    inputs, _ = rows_of(module, tmp_path, 1, 16)
    rows = rows_by_rule(milestone, shard(200, range(1, 122, 8)))
    assert inputs.tolist() == 2 * [row[:-1] for row in rows] and len(rows) == 8
