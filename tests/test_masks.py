"""Who attends to whom from milestone 05 on: documents, windows, block masks, and what they cost.

Run: .venv/bin/python -m pytest tests/test_masks.py
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from snapshots import MANIFEST, known_values, load_snapshot, micro_args, micro_sizes, where
from speedrun.figures import attention_cost
from speedrun.figures.attention_cost import count_tiles

TILE = 128
# torch warns that FlexAttention is slow without a compiler, which is all right here
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def documents(T, *starts):
    """A sequence (1, T) of token 0 with bos_id=1 where a document starts."""
    inputs = torch.zeros(1, T, dtype=torch.int64)
    inputs[0, list(starts)] = 1
    return inputs


def mask_of(milestone, inputs, window, flex):
    """The milestone's mask: FlexAttention's, or the fallback's (B, 1, T, T) booleans."""
    module = load_snapshot(milestone)
    args = micro_sizes(module, bos_id=1, use_flex_attention=flex)
    if "window" in inspect.signature(module.attention_mask).parameters:
        return module.attention_mask(inputs, torch.tensor(window, dtype=torch.int32), args)
    args.window = window
    return module.attention_mask(inputs, args)


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


@where("attention_mask")
@pytest.mark.parametrize("window", [1, 5, 128, 129, 300, 1000])
def test_masks_follow_the_definition(milestone, window):
    torch.manual_seed(0)
    T = 384
    inputs = (torch.rand(3, T) < torch.tensor([[0.002], [0.02], [0.3]])).long()
    visible = by_definition(inputs, window)
    assert mask_of(milestone, inputs, window, flex=False)[:, 0].equal(visible)
    mask = mask_of(milestone, inputs, window, flex=True)
    b, q, k = torch.meshgrid(torch.arange(3), torch.arange(T), torch.arange(T), indexing="ij")
    assert mask.mask_mod(b, torch.tensor(0), q, k).equal(visible)
    for b in range(3):
        partial, full = tiles_of(mask, b)
        for row in range(T // TILE):
            rows = visible[b, row * TILE : (row + 1) * TILE].view(TILE, T // TILE, TILE)
            counts = rows.sum((0, 2)).tolist()
            assert full[row] == [i for i, count in enumerate(counts) if count == TILE**2]
            assert partial[row] == [i for i, count in enumerate(counts) if 0 < count < TILE**2]


@where("attention_mask")
def test_known_masks(milestone):
    for case in known_values(milestone.id)["mask"]:
        inputs = documents(case["tokens"], *case["starts"])
        dense = mask_of(milestone, inputs, case["window"], flex=False)[0, 0]
        assert [row.nonzero().flatten().tolist() for row in dense] == case["visible"]


@where("attention_mask", "CausalSelfAttention", known="uniform_attention")
def test_uniform_attention_averages_the_visible_positions(milestone):
    known = known_values(milestone.id)["uniform_attention"]
    inputs = documents(32, *known["starts"])
    q = k = torch.zeros(1, 1, 32, 16)
    v = torch.arange(32.0).view(1, 1, 32, 1).expand(1, 1, 32, 16)
    for window, expected in known["windows"]:
        dense, block = (mask_of(milestone, inputs, window, flex) for flex in (False, True))
        for means in (F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
                      flex_attention(q, k, v, block_mask=block)):
            assert means[0, 0, known["tokens"], 0].tolist() == pytest.approx(expected, abs=1e-4)


@where("attention_mask")
def test_known_tiles(milestone):
    for case in known_values(milestone.id)["tiles"]:
        inputs = documents(2048, *case["starts"])
        partial, full = tiles_of(mask_of(milestone, inputs, case["window"], flex=True))
        assert [list(map(len, rows)) for rows in (partial, full)] == [case["partial"], case["full"]]


@where("attention_mask")
def test_a_dense_mask_that_is_too_large_is_refused(milestone):
    with pytest.raises(AssertionError, match="lower seq_len"):
        mask_of(milestone, documents(16_385), 8, flex=False)


# ---- the model ----


def small_models(milestone, **overrides):
    """Models with the same random weights, with a dense mask and with a block mask."""
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    models = [module.GPT(micro_sizes(module, bos_id=1, use_flex_attention=flex, **overrides))
              for flex in (False, True)]
    for param in models[0].parameters():
        torch.nn.init.normal_(param, std=0.2)
    models[1].load_state_dict(models[0].state_dict())
    return models


def set_window(model, size):
    """Gives the model another window; before 05 it has none."""
    if torch.is_tensor(getattr(model, "window", None)):
        model.window.fill_(size)
    elif hasattr(model, "window"):
        model.window = size
    elif hasattr(getattr(model, "args", None), "window"):
        model.args.window = size


@where("attention_mask", "CausalSelfAttention", "Block", "GPT", known="mask")
@torch.no_grad()
def test_both_paths_have_the_same_loss(milestone):
    dense, flex = small_models(milestone, seq_len=300)
    inputs, targets = torch.randint(2, 64, (2, 2, 300))
    inputs[0, 100] = inputs[1, 7] = 1
    losses = []
    for size in (1, 17, 150, 300):
        for model in (dense, flex):
            set_window(model, size)
        losses.append(dense(inputs, targets).item())
        assert flex(inputs, targets).item() == pytest.approx(losses[-1], abs=1e-5)
    assert len({round(loss, 4) for loss in losses}) == 4, "the window must matter"


@where("attention_mask", "CausalSelfAttention", "Block", "GPT", known="mask")
@torch.no_grad()
def test_documents_do_not_see_each_other(milestone):
    model = small_models(milestone)[0]
    inputs = torch.randint(2, 64, (1, 32))
    inputs[0, 20] = 1
    logits = model(inputs)
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 64
    assert not torch.allclose(model(changed)[:, 6:20], logits[:, 6:20])
    torch.testing.assert_close(model(changed)[:, 20:], logits[:, 20:], rtol=0, atol=0)


@where("window_size")
@torch.no_grad()
@pytest.mark.parametrize("flex", [False, True])
def test_a_new_window_does_not_recompile(milestone, flex):
    model = small_models(milestone)[flex].eval()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, dynamic=False, fullgraph=True)
    inputs, targets = torch.randint(2, 64, (2, 1, 32))
    losses = []
    for size in (4, 8, 32):
        set_window(model, size)
        losses.append(model(inputs, targets).item())
        assert compiled(inputs, targets).item() == pytest.approx(losses[-1], abs=1e-6)
    assert len(graphs) == 1 and len(set(losses)) == 3


@where("attention_mask")
def test_one_document_in_a_long_window_is_the_parent(milestone):
    module = load_snapshot(MANIFEST.get(milestone.parent))
    model = small_models(milestone)[0]
    parent = module.GPT(micro_sizes(module))
    parent.load_state_dict(model.state_dict())
    for either in (model, parent):
        set_window(either, 100)
    inputs, targets = torch.randint(2, 64, (2, 4, 32))
    losses = [parent(inputs, targets), model(inputs, targets)]
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-6)
    for loss in losses:
        loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), parent.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-5, msg=name)
    assert model.blocks[1].attn.c_q.weight.grad.abs().max() > 1e-3


# ---- the window's schedule ----


@where("window_size", "Hyperparameters", known="window")
def test_window_table(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["window"]
    args = module.Hyperparameters()
    windows = [module.window_size(step, args) for step in range(args.train_steps + 1)]
    changes = [step for step in range(len(windows))
               if step == 0 or windows[step] != windows[step - 1]]
    assert changes == known["changes"]
    assert [windows[step] for step in changes] == list(range(known["unit"], 1793, known["unit"]))
    assert windows[::125] == known["validations"]


@where("window_size")
def test_window_is_never_empty(milestone):
    module = load_snapshot(milestone)
    for start, end, steps in [(3, 100, 7), (64, 64, 5), (64, 127, 3)]:
        args = module.Hyperparameters(window_start=start, window_end=end, train_steps=steps)
        windows = [module.window_size(step, args) for step in range(steps + 1)]
        assert windows == sorted(windows) and start <= windows[0] and windows[-1] <= end


@where("window_size", "main: train", known="window")
def test_training_and_validation_use_the_window_of_the_step(
        milestone, shards, tmp_path, monkeypatch):
    module, seen = load_snapshot(milestone), []
    attention_mask = module.attention_mask

    def spy(inputs, window, args):
        seen.append((torch.is_grad_enabled(), int(window)))
        return attention_mask(inputs, window, args)

    monkeypatch.setattr(module, "attention_mask", spy)
    module.main(micro_args(
        milestone, shards, tmp_path / "log", train_steps=4, val_loss_every=2,
        kernel_warmup_steps=0, window_start=2, window_end=10, micro_batch_size=32))
    training, validating = ([w for grad, w in seen if grad == phase] for phase in (True, False))
    assert training == [2, 4, 6, 8]  # steps 0 to 3
    assert validating == [2, 6, 10]


# ---- what it costs ----


def test_tiles_grow_with_the_square_of_the_length_or_with_the_length():
    m05 = load_snapshot(MANIFEST.get("05"))
    for n in (8, 16, 24):  # tiles in a row; a window of 1,024 tokens spans 9 of them
        assert count_tiles(m05, 128 * n, 128 * n) == n * (n + 1) // 2
        assert count_tiles(m05, 128 * n, 1024) == 36 + 9 * (n - 8)


def test_attention_table(monkeypatch):
    monkeypatch.setattr(attention_cost, "LENGTHS", (1024, 2048))
    lines = attention_cost.attention_table(MANIFEST).splitlines()
    assert lines[2:] == ["| 1,024 | 36 | 36 | 36 | 36 |", "| 2,048 | 136 | 68 | 108 | 54 |"]
