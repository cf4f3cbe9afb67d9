"""A batch that grows in three stages, since 10d: stages, windows, and rows across shards.

Run: .venv/bin/python -m pytest tests/test_growing_batch.py
"""

import itertools
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch

import shards as shard_files
from snapshots import (
    MANIFEST,
    by_id,
    declaring,
    known_values,
    load_snapshot,
    loader_args,
    micro_args,
    train,
    training_rows,
    where,
)
from speedrun.history.tokens import tokens_after

# ---- stages ----


@where("stage", "stages", "Hyperparameters", known="stages")
def test_rows_and_tokens_of_a_run(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)
    args = module.Hyperparameters()
    lengths = [module.stage(step, args).seq_len for step in range(args.train_steps)]
    first = [step for step, length in enumerate(lengths) if length not in lengths[:step]]
    assert first == known["stages"]["changes"]
    assert [lengths[step] for step in first] == known["stages"]["rows"] and lengths[-1] == 49_152
    rows = args.total_batch_size // args.train_seq_len
    assert rows == 8 and rows * sum(lengths) == known["tokens"]
    for steps in (0, 1, *first, first[1] + 1, args.train_steps - 1, args.train_steps):
        assert tokens_after(asdict(args), steps) == rows * sum(lengths[:steps])
    table = module.stages(args)
    stages = [table.index(module.stage(step, args)) for step in range(args.train_steps + 1)]
    assert stages == [3 * step // args.scheduled_steps if step < args.scheduled_steps else 3
                      for step in range(args.train_steps + 1)]


class Watched:
    """A milestone's module whose model notes each call: in `calls`, whether it trains, tokens per
    row, the long and the short window."""

    def __init__(self, milestone, monkeypatch):
        self.module, self.calls = load_snapshot(milestone), []
        masks = self.module.attention_masks

        def noted(inputs, windows, training, args):
            self.calls.append((training, inputs.size(1), windows["L"], windows["S"]))
            return masks(inputs, windows, training, args)

        monkeypatch.setattr(self.module, "attention_masks", noted)


# Three stages of two steps of two rows, and two steps more.
WINDOWS = dict(window_start=16, window_growth=16, window_end=56, long_window_end=80, tile_size=8)
STAGED = dict(**WINDOWS, scheduled_steps=6, train_steps=8, total_batch_size=64, val_tokens=32,
              val_loss_every=2)
FIRST, SECOND, THIRD = (32, 16, 8), (64, 32, 16), (96, 48, 24)  # row, long and short window
LAST = (96, 56, 24)  # after the scheduled steps: half of 56 rounded down to tiles


@where("train", "window_sizes", "GPT", known="stages")
def test_steps_have_the_rows_and_windows_of_their_stage(milestone, shards, tmp_path, monkeypatch):
    watched = Watched(milestone, monkeypatch)
    train(watched.module, micro_args(milestone, shards, tmp_path / "log", kernel_warmup_steps=0,
                                     **STAGED))
    trained = [call[1:] for call in watched.calls if call[0]]
    assert trained == 2 * [FIRST] + 2 * [SECOND] + 2 * [THIRD] + 2 * [LAST]
    validated = [call[1:] for call in watched.calls if not call[0]]
    windows = [FIRST[1:], SECOND[1:], THIRD[1:], LAST[1:], (80, 24)]  # at steps 0, 2, 4, 6 and 8
    assert validated == [(16, *window) for window in windows]


@where("warm_up", "window_sizes", "GPT", known="stages")
def test_the_warm_up_visits_every_stage(milestone, shards, tmp_path, monkeypatch):
    watched = Watched(milestone, monkeypatch)
    monkeypatch.setattr(watched.module, "train", lambda *_: None)
    steps = watched.module.Hyperparameters().kernel_warmup_steps
    watched.module.main(micro_args(milestone, shards, tmp_path / "log", **STAGED
                                   | dict(kernel_warmup_steps=steps)))
    assert {call[1:] for call in watched.calls} == {FIRST, SECOND, THIRD, LAST}


@pytest.mark.parametrize("milestone", declaring("stage")[:1], ids=by_id)
def test_equal_stages_have_the_parents_losses(milestone, shards, tmp_path, monkeypatch):
    module, parent = load_snapshot(milestone), MANIFEST.get(milestone.parent)
    stages = module.stages
    monkeypatch.setattr(module, "stages", lambda args: [
        row._replace(seq_len=args.train_seq_len) for row in stages(args)])
    sizes = dict(total_batch_size=128, val_tokens=64, cooldown_frac=0.5)
    expected = train(load_snapshot(parent), micro_args(
        parent, shards, tmp_path / "parent", **sizes))
    found = train(module, micro_args(milestone, shards, tmp_path / "log", second_stage_peak=1.0,
                                     third_stage_peak=1.0, **sizes))
    # From scheduled_steps (17) on it has another window, as its record has in the last 40 steps.
    assert found[:17] == pytest.approx(expected[:17], abs=1e-5)
    assert expected[0] - expected[16] > 0.5 and found[17:] != pytest.approx(expected[17:], abs=1e-5)


# ---- rows across shards ----

LONGEST, BOS, ROWS = 11, 1, 4  # tokens per document, their first; rows per step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with three shards of documents of 2 to 30 tokens."""
    folder, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    for number, length in enumerate((700, 450, 900)):
        tokens, position = rng.integers(2, 60, length), 3  # a shard may begin within a document
        while position < length:
            tokens[position] = BOS
            position += rng.integers(2, 30)
        shard_files.write(folder / f"a_{number}.bin", tokens)
    return folder


def length_of(step):
    """Tokens per row: three stages of three steps."""
    return 8 * min(3, 1 + step // 3)


def loader(module):
    """The hyperparameters of a loader of these rows."""
    return loader_args(module, micro_batch_size=1, first_document_len=LONGEST,
                       max_document_len=LONGEST, bos_id=BOS, vocab_size=64,
                       train_seq_len=length_of(0), scheduled_steps=9)


def expected_steps(milestone, folder, first, count):
    """The rows of so many steps from step `first` on, by a walk over all tokens."""
    module, steps = load_snapshot(milestone), []
    while len(steps) < count:
        for file in sorted(folder.glob("*.bin")):
            lengths = map(length_of, itertools.count(first + len(steps)))
            rows = training_rows(milestone, shard_files.read(file), lengths, ROWS, loader(module))
            steps += [rows[i : i + ROWS] for i in range(0, len(rows) - ROWS + 1, ROWS)]
    return steps[:count]


def found_steps(module, folder, first, count, world_size=1):
    """The same of the module's loader; ranks hold blocks of one row in turn."""
    args = loader(module)
    ranks = [module.token_batches(
        f"{folder}/*.bin", ROWS * length_of(0), length_of(0), packed=True, args=args, rank=rank,
        world_size=world_size, device=torch.device("cpu"), step=first)
        for rank in range(world_size)]
    rows = []
    for _ in range(count * ROWS // world_size):
        for rank in ranks:
            inputs, targets = next(rank)
            assert inputs[0, 1:].equal(targets[0, :-1])
            rows.append([*inputs[0].tolist(), targets[0, -1].item()])
    return [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]


@where("token_batches", "packed_rows", known="stages")
@pytest.mark.parametrize("first", [0, 2, 7, 100])
def test_rows_have_their_steps_length_in_every_shard(milestone, folder, first):
    found = found_steps(load_snapshot(milestone), folder, first, 40)
    assert found == expected_steps(milestone, folder, first, 40)  # several times around the shards
    lengths = [[len(row) - 1 for row in step] for step in found]
    assert lengths == [ROWS * [length_of(step)] for step in range(first, first + 40)]


@where("token_batches", known="stages")
def test_a_stream_depends_on_its_first_step_alone(milestone, folder):
    module = load_snapshot(milestone)
    steps = partial(found_steps, module, folder)
    assert steps(4, 9) == steps(4, 9)  # whatever was read before
    assert steps(7, 9) == steps(100, 9)  # in the last stage all are alike
    assert steps(4, 9) != steps(0, 13)[4:]  # it starts with the first shard


@where("token_batches", "packed_rows", known="stages")
def test_every_number_of_ranks_has_the_same_rows(milestone, folder):
    module = load_snapshot(milestone)
    alone = found_steps(module, folder, 0, 12)
    for world_size in (2, 4):
        assert found_steps(module, folder, 0, 12, world_size) == alone


@where("main", "train", known="stages")
def test_the_warm_up_takes_no_rows_from_the_training(
        milestone, shards, tmp_path, monkeypatch):
    module, streams = load_snapshot(milestone), []
    token_batches = module.token_batches

    def noted(*args, **named):
        batches = []
        streams.append((args[0], named.get("step", 0), batches))
        for batch in token_batches(*args, **named):
            batches.append(batch[0])
            yield batch

    monkeypatch.setattr(module, "token_batches", noted)
    train(module, micro_args(milestone, shards, tmp_path / "log", **STAGED
                             | dict(kernel_warmup_steps=3, val_loss_every=0)))
    of_training = [(first, batches) for files, first, batches in streams if "_train_" in files]
    assert [first for first, _ in of_training] == [2, 4, 6, 0]
    lengths = [batches[0].size(1) for _, batches in of_training]
    assert lengths == [64, 96, 96, 32] and all(len(b) == 1 for _, b in of_training[:3])
