"""Who attends to whom from milestone 05 on: documents, windows, block masks, and what they cost.

Run: .venv/bin/python -m pytest tests/test_masks.py
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from snapshots import MICRO, load_snapshot, micro_args
from speedrun import attention_cost
from speedrun.attention_cost import count_tiles
from speedrun.manifest import load_manifest

M05 = load_manifest().get("05")
TILE = 128
# torch warns that FlexAttention is slow without a compiler, which is all right here
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def m05():
    return load_snapshot(M05)


def sizes(**overrides):
    """Hyperparameters of a small model."""
    return {**MICRO, "bos_id": 1, **overrides}


def documents(T, *starts):
    """A sequence (1, T) of token 0 with bos_id=1 where a document starts."""
    inputs = torch.zeros(1, T, dtype=torch.int64)
    inputs[0, list(starts)] = 1
    return inputs


def dense_mask(module, inputs, window):
    """The fallback's mask, (B, T, T) booleans."""
    args = module.Hyperparameters(**sizes(flex_attention=False))
    return module.attention_mask(inputs, window, args)[:, 0]


def block_mask(module, inputs, window):
    """FlexAttention's mask."""
    args = module.Hyperparameters(**sizes(flex_attention=True))
    return module.attention_mask(inputs, torch.tensor(window, dtype=torch.int32), args)


def by_definition(inputs, window):
    """The rule token by token: no later one, none of another document, the last `window`."""
    B, T = inputs.shape
    visible = torch.zeros(B, T, T, dtype=torch.bool)
    for b in range(B):
        for q in range(T):
            for k in range(q, max(q - window, -1), -1):
                visible[b, q, k] = True
                if inputs[b, k] == 1:  # the first token of q's document
                    break
    return visible


def tiles_of(mask, b=0):
    """Per row of tiles of a block mask the columns of its partial and of its full tiles."""
    def rows(counts, columns):
        return [sorted(columns[b, 0, i, :n].tolist()) for i, n in enumerate(counts[b, 0].tolist())]

    return (rows(mask.kv_num_blocks, mask.kv_indices),
            rows(mask.full_kv_num_blocks, mask.full_kv_indices))


@pytest.mark.parametrize("window", [1, 5, 100, 128, 129, 300, 1000])
@pytest.mark.parametrize("density", [0.002, 0.02, 0.3])
def test_masks_follow_the_definition(m05, window, density):
    torch.manual_seed(0)
    T = 384
    inputs = (torch.rand(2, T) < density).long()
    visible = by_definition(inputs, window)
    assert dense_mask(m05, inputs, window).equal(visible)
    mask = block_mask(m05, inputs, window)
    b, q, k = torch.meshgrid(torch.arange(2), torch.arange(T), torch.arange(T), indexing="ij")
    assert mask.mask_mod(b, torch.tensor(0), q, k).equal(visible)
    for b in range(2):
        partial, full = tiles_of(mask, b)
        for row in range(T // TILE):
            rows = visible[b, row * TILE : (row + 1) * TILE].view(TILE, T // TILE, TILE)
            counts = rows.sum((0, 2)).tolist()
            assert full[row] == [i for i, count in enumerate(counts) if count == TILE**2]
            assert partial[row] == [i for i, count in enumerate(counts) if 0 < count < TILE**2]


def test_a_known_mask(m05):
    inputs = documents(12, 2, 8)
    expected = [[0], [0, 1], [2], [2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7], [8], [8, 9],
                [8, 9, 10], [9, 10, 11]]
    visible = [row.nonzero().flatten().tolist() for row in dense_mask(m05, inputs, 3)[0]]
    assert visible == expected
    wide = dense_mask(m05, inputs, 1024)[0]
    assert wide[7].nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7]
    assert wide[11].nonzero().flatten().tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("window, expected", [
    (2, [2.5, 6.5, 12.5, 14.5, 25.5, 30.5]),
    (4, [1.5, 6, 11.5, 14.5, 24.5, 29.5]),
    (8, [1.5, 6, 9.5, 14.5, 22.5, 29]),
])
def test_uniform_attention_averages_the_visible_positions(m05, window, expected):
    inputs = documents(32, 0, 5, 14, 16, 27)
    q = k = torch.zeros(1, 1, 32, 16)
    v = torch.arange(32.0).view(1, 1, 32, 1).expand(1, 1, 32, 16)
    dense = dense_mask(m05, inputs, window)[:, None]
    for means in (F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
                  flex_attention(q, k, v, block_mask=block_mask(m05, inputs, window))):
        found = means[0, 0, [3, 7, 13, 15, 26, 31], 0].tolist()
        assert found == pytest.approx(expected, abs=1e-4)


def test_known_tiles(m05):
    partial, full = tiles_of(block_mask(m05, documents(2048, 0, 300, 1000, 1005), 1024))
    assert list(map(len, partial)) == [1, 1, 3, 2, 2, 2, 2, 6, 2, 2, 2, 2, 2, 2, 2, 2]
    assert list(map(len, full)) == [0, 1, 0, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert (partial[2], partial[7], partial[15]) == ([0, 1, 2], [2, 3, 4, 5, 6, 7], [7, 15])
    assert full[6] == [3, 4, 5]


@pytest.mark.parametrize("window, partial, full", [
    (1024, [1] * 8 + [2] * 8, [*range(8)] + [7] * 8),
    (64, [1] + [2] * 15, [0] * 16),
    (128, [1] + [2] * 15, [0] * 16),
    (192, [1, 2] + [3] * 14, [0] * 16),
])
def test_tiles_of_one_document(m05, window, partial, full):
    mask = block_mask(m05, documents(2048), window)
    assert [list(map(len, rows)) for rows in tiles_of(mask)] == [partial, full]


# ---- the model ----


def small_models(m05, **overrides):
    """Models with the same random weights, with a dense mask and with a block mask."""
    torch.manual_seed(0)
    models = [m05.GPT(m05.Hyperparameters(**sizes(flex_attention=flex, **overrides)))
              for flex in (False, True)]
    for param in models[0].parameters():
        torch.nn.init.normal_(param, std=0.2)
    models[1].load_state_dict(models[0].state_dict())
    return models


@torch.no_grad()
def test_both_paths_have_the_same_loss(m05):
    dense, flex = small_models(m05, seq_len=400)
    inputs, targets = torch.randint(2, 64, (2, 2, 300))
    inputs[0, 100] = inputs[1, 7] = 1
    losses = []
    for size in (1, 17, 150, 300, None):
        window = None if size is None else torch.tensor(size, dtype=torch.int32)
        losses.append(dense(inputs, targets, window).item())
        assert flex(inputs, targets, window).item() == pytest.approx(losses[-1], abs=1e-5)
    assert losses[-1] == losses[-2], "without a window all of the document is visible"
    assert len({round(loss, 4) for loss in losses}) == 4, "the window must matter"


@torch.no_grad()
def test_documents_do_not_see_each_other(m05):
    model = small_models(m05)[0]
    inputs = torch.randint(2, 64, (1, 32))
    inputs[0, 20] = 1
    logits = model(inputs)
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 64
    assert not torch.allclose(model(changed)[:, 6:20], logits[:, 6:20])
    torch.testing.assert_close(model(changed)[:, 20:], logits[:, 20:], rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("flex", [False, True])
def test_a_new_window_does_not_recompile(m05, flex):
    model = small_models(m05)[flex].eval()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, dynamic=False, fullgraph=True)
    inputs, targets = torch.randint(64, (2, 1, 32))
    window = torch.tensor(0, dtype=torch.int32)
    for size in (4, 8, 32):
        window.fill_(size)
        expected = model(inputs, targets, window)
        torch.testing.assert_close(compiled(inputs, targets, window), expected)
    assert len(graphs) == 1


def test_one_document_in_a_long_window_is_the_parent(m05):
    m04 = load_snapshot(load_manifest().get(M05.parent))
    model = small_models(m05)[0]
    parent = m04.GPT(m04.Hyperparameters(**MICRO))
    parent.load_state_dict(model.state_dict())
    inputs, targets = torch.randint(2, 64, (2, 4, 32))
    losses = [parent(inputs, targets), model(inputs, targets, torch.tensor(100))]
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-6)
    for loss in losses:
        loss.backward()
    for (name, mine), theirs in zip(
        model.named_parameters(), parent.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-5, msg=name)
    assert model.blocks[1].attn.c_q.weight.grad.abs().max() > 1e-3


def test_rotary_at_position_1(m05):
    x = (torch.arange(128) / 128).expand(1, 2, 1, 128)
    y = m05.Rotary(head_dim=128, seq_len=2)(x)[0, 1, 0]
    known = {0: 0.420735, 1: 0.391873, 63: 0.492302, 64: 0.270151, 65: 0.323064, 127: 0.992131}
    assert y[list(known)].tolist() == pytest.approx(list(known.values()), abs=2e-6)


def test_all_layers_share_one_rotary_table(m05):
    model = m05.GPT(m05.Hyperparameters(**sizes(num_layers=4)))
    assert [tuple(buffer.shape) for buffer in model.buffers()] == 2 * [(32, 1, 8)]  # cos and sin


# ---- schedule and data ----


def test_window_table(m05):
    args = m05.Hyperparameters()
    windows = [m05.window_size(step, args) for step in range(args.train_steps + 1)]
    changes = [0, 65, 130, 195, 260, 325, 389, 454, 519, 584, 649, 713, 778, 843, 908, 973, 1038,
               1102, 1167, 1232, 1297, 1362, 1426, 1491, 1556, 1621, 1686, 1750]
    found = [step for step in range(1751) if step == 0 or windows[step] != windows[step - 1]]
    assert found == changes
    assert [windows[step] for step in changes] == list(range(64, 1793, 64))
    assert windows[125::125] == [128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536,
                                 1664, 1792]
    assert [windows[step] for step in (0, 1749)] == [64, 1728]


def test_window_is_never_empty(m05):
    for start, end, steps in [(1, 1, 0), (3, 100, 7), (64, 64, 5), (64, 127, 3)]:
        args = m05.Hyperparameters(window_start=start, window_end=end, train_steps=steps)
        windows = [m05.window_size(step, args) for step in range(steps + 1)]
        assert windows == sorted(windows) and start <= windows[0] and windows[-1] <= end


def test_training_and_validation_use_the_window_of_the_step(m05, shards, tmp_path, monkeypatch):
    seen = []
    forward = m05.GPT.forward

    def spy(self, inputs, targets=None, window=None):
        seen.append((self.training, window.item()))
        return forward(self, inputs, targets, window)

    monkeypatch.setattr(m05.GPT, "forward", spy)
    args = micro_args(M05, shards, tmp_path / "log", train_steps=4, val_loss_every=2,
                      kernel_warmup_steps=1, window_start=2, window_end=10, micro_batch_size=32)
    m05.main(args)
    training, validating = ([w for mode, w in seen if mode == phase] for phase in (True, False))
    assert training == [2, 2, 4, 6, 8]  # the kernel warm-up, then steps 0 to 3
    assert validating == [2, 6, 10]


def test_every_rank_starts_at_its_own_sequence(m05):
    args = m05.Hyperparameters()
    shard = (np.arange(5_000_000) % 50257).astype(np.uint16)
    for rank in (0, 3, 7):
        batches = m05.token_batches([shard], args.total_batch_size, args, rank, 8, "cpu")
        for batch in range(3):
            inputs, targets = next(batches)
            assert inputs.shape == targets.shape == (1, 65_536)
            start = 65_536 * (8 * batch + rank)
            assert inputs[0, 0] == start % 50257 and targets[0, -1] == (start + 65_536) % 50257


# ---- what it refuses ----


@pytest.mark.parametrize("overrides, message", [
    (dict(bos_id=64), "bos_id=64 is not below vocab_size=64"),
    (dict(bos_id=-1), "bos_id=-1 is too small"),
    (dict(window_start=9, window_end=8), "window_end=8 is below window_start=9"),
    (dict(window_start=0), "window_start=0 is too small"),
    (dict(flex_attention=True), "FlexAttention has no backward pass on a CPU"),
    (dict(seq_len=32_768, micro_batch_size=1, total_batch_size=32_768, val_tokens=32_768),
     "seq_len=32768 is too long for a dense mask"),
    (dict(seq_len=32_768, micro_batch_size=1, total_batch_size=32_768, val_tokens=32_768,
          compile=True), "seq_len=32768 is too long for a dense mask"),
])
def test_refusals(m05, overrides, message, shards, tmp_path):
    with pytest.raises(SystemExit) as refusal:
        m05.main(micro_args(M05, shards, tmp_path / "log", **overrides))
    assert refusal.value.code.startswith(f"error: {message}") and "\n" not in refusal.value.code
    assert not (tmp_path / "log").exists()


def test_a_document_may_begin_with_token_0(m05, shards, tmp_path):
    args = micro_args(M05, shards, tmp_path / "log", bos_id=0, train_steps=0, kernel_warmup_steps=0)
    assert len(m05.main(args)) == 1


# ---- what it costs ----


def test_tiles_grow_with_the_square_of_the_length_or_with_the_length(m05):
    for n in (8, 16, 24):  # tiles in a row; a window of 1,024 tokens spans 9 of them
        assert count_tiles(m05, 128 * n, 128 * n) == n * (n + 1) // 2
        assert count_tiles(m05, 128 * n, 1024) == 36 + 9 * (n - 8)


def test_attention_table(monkeypatch):
    monkeypatch.setattr(attention_cost, "LENGTHS", (1024, 2048))
    lines = attention_cost.attention_table(load_manifest()).splitlines()
    assert lines[2:] == ["| 1,024 | 36 | 36 | 36 | 36 |", "| 2,048 | 136 | 68 | 108 | 54 |"]
