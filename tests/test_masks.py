"""Who attends to whom from milestone 05 on: documents, windows, block masks, and what they cost.

Run: .venv/bin/python -m pytest tests/test_masks.py
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snapshots import (
    MANIFEST,
    by_id,
    declaring,
    handles,
    known_values,
    load_snapshot,
    micro_args,
    micro_sizes,
    record_layers,
    train,
    tried,
    where,
)
from speedrun.figures import attention_cost
from speedrun.scripts.sizes import fitting

TILE = 128
# torch warns that FlexAttention is slow without a compiler, which is all right here
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def documents(T, *starts):
    """A sequence (1, T) of token 0 with bos_id=1 where a document starts."""
    inputs = torch.zeros(1, T, dtype=torch.int64)
    inputs[0, list(starts)] = 1
    return inputs


def rounds(milestone):
    """Whether the window is rounded up to whole tiles. Uncompiled FlexAttention ignores which tiles
    are listed: it applies the rule to every pair."""
    return handles(milestone).WINDOW == "tiles"


def is_staged(milestone):
    """Whether the window has a few values in stages, each a Python number. Then it counts the
    tokens before a token's own, exactly."""
    return handles(milestone).WINDOW == "exact"


def masks_of(module):
    """The values of `flex` in mask_of: there are only dense masks from 06 on."""
    return (False, True) if "flex" in handles(module).PATHS else (False,)


def path(module, flex):
    """The hyperparameters that choose FlexAttention, or the dense mask that stands in for it."""
    return handles(module).PATHS["flex" if flex else "dense"]


def mask_of(milestone, inputs, window, flex, tile_size=None):
    """The milestone's mask: FlexAttention's, or the dense one of (B, 1, T, T) booleans."""
    module = load_snapshot(milestone)
    tiles = fitting(dict(tile_size=tile_size or TILE), vars(module.Hyperparameters))
    args = micro_sizes(module, bos_id=1, **path(module, flex), **tiles | dict(compile=flex))
    return handles(module).mask(module, inputs, window, args)


def attend(milestone, mask, flex, q, k, v, scale=None):
    """Attention of q, k and v, each (B, H, T, D), by a mask from mask_of."""
    if flex:
        return load_snapshot(milestone).flex_attention(q, k, v, block_mask=mask, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def by_definition(inputs, window, tile_size=1):
    """The rule token by token: no later one, none of another document, the last `window`, which
    begins where a tile does."""
    B, T = inputs.shape
    tokens, visible = inputs.tolist(), np.zeros((B, T, T), dtype=bool)  # faster than tensors
    for b in range(B):
        for q in range(T):
            first = q - window + 1
            if tile_size > 1:
                first = (q // tile_size + 1 - math.ceil(window / tile_size)) * tile_size
            for k in range(q, max(first, 0) - 1, -1):
                visible[b, q, k] = True
                if tokens[b][k] == 1:  # the first token of q's document
                    break
    return torch.from_numpy(visible)


def tiles_of(mask, b=0):
    """Per row of tiles of a block mask the columns of its partial and of its full tiles."""
    def rows(counts, columns):
        return [sorted(columns[b, 0, i, :n].tolist()) for i, n in enumerate(counts[b, 0].tolist())]

    return (rows(mask.kv_num_blocks, mask.kv_indices),
            rows(mask.full_kv_num_blocks, mask.full_kv_indices))


def applied(mask, T):
    """Which pairs a compiled FlexAttention sees by a block mask, (B, 1, T, T): it applies the rule
    in partial tiles. All in tensors, so that it can be compiled."""
    def shown(counts, columns):
        N, tile = columns.size(-1), mask.BLOCK_SIZE[0]
        listed = torch.where(torch.arange(N) < counts[..., None], columns, N).long()
        tiles = torch.zeros(*columns.shape[:-1], N + 1, dtype=torch.bool).scatter(-1, listed, True)
        tiles = tiles[..., :N].repeat_interleave(tile, -1).repeat_interleave(tile, -2)
        return tiles[..., :T, :T]

    b, q = torch.arange(mask.shape[0])[:, None, None, None], torch.arange(T)[:, None]
    rule = mask.mask_mod(b, torch.tensor(0), q, torch.arange(T))
    return (shown(mask.kv_num_blocks, mask.kv_indices) & rule
            | shown(mask.full_kv_num_blocks, mask.full_kv_indices))


@pytest.fixture(autouse=True)
def flex_attention_by_tiles(request, monkeypatch):
    """Where a mask is made of tiles, FlexAttention computes as if it were compiled."""
    def flex_attention(q, k, v, block_mask, scale=None):
        assert block_mask.shape[-2:] == (q.size(2), k.size(2))  # as torch requires
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=applied(block_mask, q.size(2)), scale=scale)

    if "milestone" in request.fixturenames:
        module = load_snapshot(request.getfixturevalue("milestone"))
        if handles(module).WINDOW in ("tiles", "exact") and True in masks_of(module):
            monkeypatch.setattr(module, "flex_attention", flex_attention)


def some_documents(milestone, window):
    """Inputs (3, 384) with two, some and many documents, and which tokens see which."""
    torch.manual_seed(0)
    inputs = (torch.rand(3, 384) < torch.tensor([[0.0], [0.02], [0.3]])).long()
    inputs[0, 200] = 1  # within a tile, while the tile before has one document
    module = load_snapshot(milestone)
    tile_size = TILE if rounds(module) else 1
    return inputs, by_definition(inputs, window + is_staged(module), tile_size)


windows = pytest.mark.parametrize("window", [1, 5, 128, 129, 300, 1000])


@where("attention_mask", "attention_masks")
@windows
def test_dense_masks_follow_the_definition(milestone, window):
    inputs, visible = some_documents(milestone, window)
    assert mask_of(milestone, inputs, window, flex=False)[:, 0].equal(visible)


@where("attention_mask")
@windows
def test_block_masks_follow_the_definition(milestone, window):
    inputs, visible = some_documents(milestone, window)
    B, T = inputs.shape
    mask = mask_of(milestone, inputs, window, flex=True)
    assert applied(mask, T)[:, 0].equal(visible)
    b, q, k = torch.meshgrid(torch.arange(B), torch.arange(T), torch.arange(T), indexing="ij")
    rule = mask.mask_mod(b, torch.tensor(0), q, k)
    assert rounds(milestone) or rule.equal(visible)  # also uncompiled
    for b in range(B):
        partial, full = tiles_of(mask, b)
        for row in range(T // TILE):
            rows = visible[b, row * TILE : (row + 1) * TILE].view(TILE, T // TILE, TILE)
            counts = rows.sum((0, 2)).tolist()
            assert full[row] == [i for i, count in enumerate(counts) if count == TILE**2]
            assert partial[row] == [i for i, count in enumerate(counts) if 0 < count < TILE**2]


ROUNDING = [m for m in declaring("attention_mask") if rounds(m)]


@pytest.mark.parametrize("milestone", ROUNDING, ids=by_id)
def test_flex_attention_that_would_see_all_tiles_is_refused(milestone):
    module = load_snapshot(milestone)
    args = micro_sizes(module, **path(module, flex=True), compile=False)
    with pytest.raises(AssertionError, match="uncompiled FlexAttention ignores the tiles"):
        module.attention_mask(documents(32), torch.tensor(8), args)


@where("attention_mask", "attention_masks", known="small_windows")
def test_exact_windows_in_tiles_that_do_and_do_not_divide_the_row(milestone):
    torch.manual_seed(0)
    for T, tile_size in [(40, 8), (33, 8), (33, 16), (30, 4)]:
        inputs = torch.randint(12, (2, T))  # of which 1 begins a document
        for window in (1, 5, 7, tile_size, tile_size + 1, 2 * tile_size - 1, 2 * tile_size, 100):
            visible = by_definition(inputs, window + 1)
            for flex in masks_of(load_snapshot(milestone)):
                mask = mask_of(milestone, inputs, window, flex, tile_size)
                found = applied(mask, T) if flex else mask
                assert found[:, 0].equal(visible), (T, tile_size, window, flex)


@where("attention_mask", "attention_masks")
def test_a_dense_mask_that_is_too_large_is_refused(milestone):
    with pytest.raises(AssertionError, match="lower .*seq_len"):
        mask_of(milestone, documents(16_385), 8, flex=False)


# ---- the model ----


def small_models(milestone, **overrides):
    """Models with the same random weights, one for each of masks_of."""
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    overrides |= fitting(dict(tile_size=8), vars(module.Hyperparameters))
    models = [module.GPT(micro_sizes(
        module, bos_id=1, **path(module, flex), **overrides | dict(compile=flex)))
        for flex in masks_of(module)]
    for param in models[0].parameters():
        if param.ndim >= 2:  # scalars as small would leave little of attention
            torch.nn.init.normal_(param, std=0.2)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return models


FLEX = [m for m in declaring("attention_mask", "CausalSelfAttention", "GPT")
        if "flex" in handles(m).PATHS]


@pytest.mark.parametrize("milestone", FLEX, ids=by_id)
@torch.no_grad()
def test_both_masks_have_the_same_loss(milestone):
    dense, flex = small_models(milestone, seq_len=300)
    inputs, targets = torch.randint(2, 64, (2, 2, 300))
    inputs[0, 100] = inputs[1, 7] = 1
    losses = []
    for size in (1, 40, 150, 300):  # of which half may be seen
        for model in (dense, flex):
            handles(model).set_window(model, size)
        losses.append(dense(inputs, targets).item())
        assert flex(inputs, targets).item() == pytest.approx(losses[-1], abs=1e-5)
    assert len({round(loss, 5) for loss in losses}) == 4, "the window must matter"


@pytest.mark.parametrize(
    "milestone", tried(declaring("window_size", "window_sizes", "attention_masks")), ids=by_id)
@torch.no_grad()
def test_windows_need_one_graph_or_one_for_each_stage(milestone):
    module, graphs = load_snapshot(milestone), []
    # Rotary tables change with them.
    stages = fitting(dict(window_start=16, window_growth=16, window_end=64, window_stages=2),
                     vars(module.Hyperparameters))

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    for model in small_models(milestone, seq_len=64, **stages):
        model.eval()
        graphs.clear()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=count, dynamic=False, fullgraph=True)
        inputs, targets = torch.randint(2, 64, (2, 1, 64))
        losses = []
        for size in (16, 32, 64, 16, 32, 64):  # of which half may be seen
            handles(model).set_window(model, size)
            losses.append(model(inputs, targets).item())
            assert compiled(inputs, targets).item() == pytest.approx(losses[-1], abs=1e-6)
        assert len(graphs) == (3 if is_staged(milestone) else 1) and len(set(losses)) == 3


STAGED = [m for m in declaring("window_size", "window_sizes") if is_staged(m)]


@pytest.mark.parametrize("milestone", tried(STAGED), ids=by_id)
def test_more_stages_than_torch_recompiles_by_itself(milestone, shards, tmp_path, monkeypatch):
    module, graphs = load_snapshot(milestone), []

    def count(graph, example_inputs):  # the capped logits are a sigmoid's
        graphs.append("sigmoid" in graph.code and torch.is_grad_enabled())
        return graph.forward

    stages, steps = 3, 6  # one stage more than torch would compile; there may not be others
    staged = fitting(dict(window_stages=stages), vars(module.Hyperparameters))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    args = micro_args(
        milestone, shards, tmp_path / "log", compile=True, kernel_warmup_steps=0, val_loss_every=0,
        total_batch_size=256,
        window_start=2, window_growth=2, train_steps=steps, scheduled_steps=steps, **staged)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=stages - 1):
        train(module, args)
    assert sum(graphs) == stages


@where("Block", "GPT", known="layers")
@torch.no_grad()
def test_how_far_each_layer_sees(milestone, monkeypatch):
    module, args = load_snapshot(milestone), load_snapshot(milestone).Hyperparameters()
    model = module.GPT(micro_sizes(module, **record_layers(module), tile_size=4))
    for table in model.value_embeds.parameters():
        torch.nn.init.normal_(table)
    seen, factors = [], known_values(milestone.id).get("table_factors", [1])

    def attend(self, *what):
        named = dict(zip(handles(module).ATTENTION, what, strict=True))
        x, value_embed = named["x"], named["values"]
        tables = [table[inputs] for table in handles(model).value_tables(model)]
        found = [j for j, table in enumerate(tables) if value_embed is not None
                 and any(value_embed.flatten(2).equal(factor * table) for factor in factors)]
        seen.append([named["mask"], *found])
        return torch.zeros_like(x)

    handles(module).replace_masks(module, monkeypatch.setattr, lambda inputs, window: window)
    monkeypatch.setattr(module.CausalSelfAttention, "forward", attend)
    inputs = torch.arange(8)[None]
    cases = [(4 * tiles, 4 * tiles, 4 * half)
             for tiles, half in ((1, 1), (2, 1), (3, 1), (4, 2), (14, 7))]
    if last := handles(module).last_windows(args):
        cases.append((*last, last[0] // 2))
    for window, *reach in cases:
        handles(model).set_window(model, window)
        seen.clear()
        model(inputs)
        reach = dict(zip(("long", "short"), reach, strict=True))
        expected = [[reach[kind], *table] for kind, *table in known_values(milestone.id)["layers"]]
        assert seen == expected


# ---- the window's schedule ----


@where("window_size", "window_sizes", "Hyperparameters", known="window")
def test_window_table(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["window"]
    args = module.Hyperparameters()
    windows = [handles(milestone).window_at(module, step, args)[0]
               for step in range(args.train_steps + 1)]
    changes = [step for step in range(len(windows))
               if step == 0 or windows[step] != windows[step - 1]]
    assert changes == known["changes"]
    sizes = known.get("sizes") or list(range(known["unit"], 1793, known["unit"]))
    assert [windows[step] for step in changes] == sizes
    assert windows[:: args.val_loss_every] == known["validations"]


GROWING = [m for m in declaring("window_size") if not is_staged(m)]


@pytest.mark.parametrize("milestone", GROWING, ids=by_id)
def test_window_is_never_empty(milestone):
    module = load_snapshot(milestone)
    for start, end, steps in [(3, 100, 7), (64, 64, 5), (64, 127, 3)]:
        sizes = dict(window_end=end, train_steps=steps)
        if rounds(milestone):
            sizes["tile_size"], end = start, math.ceil(end / start) * start
        else:
            sizes["window_start"] = start
        args = module.Hyperparameters(**sizes)
        windows = [module.window_size(step, args) for step in range(steps + 1)]
        assert windows == sorted(windows) and start <= windows[0] and windows[-1] <= end


@where("window_size", "window_sizes", "warm_up", known="small_windows")
def test_the_warm_up_meets_all_that_the_run_needs(milestone):
    module, seen, settlings = load_snapshot(milestone), [], []
    parts = handles(module)

    class Model(torch.nn.Linear):
        def set_window(self, window, long_window=None):
            self.windows = [window]
            assert long_window in (None, window)  # it differs in the last validation only

        def renew_fp8_weights(self, delayed):
            settlings.append(delayed)

        def forward(self, inputs, targets, *how, **named):
            how = *vars(self).get("windows", ()), *how, *named.values()
            # of the targets' weights only their number is compiled in
            seen.append((*(len(x) if torch.is_tensor(x) and x.ndim else x for x in how),
                         inputs.size(1)))
            return self.weight.sum()

    def batches(args, step=0):
        return itertools.repeat((torch.empty(1, parts.row_len(module, step, args)), None))

    model = Model(1, 1)
    optimizers = [torch.optim.SGD(model.parameters()) for _ in range(2)]
    fewest = 12 if len(parts.ROW_FACTORS) > 1 else 5  # fewer steps do not have all of it
    for scheduled_steps in (*range(fewest, 40), 1670):
        args = module.Hyperparameters(
            scheduled_steps=scheduled_steps, train_steps=scheduled_steps + 40)
        seen.clear()
        parts.warm_up(module, torch.compile(model, disable=True), optimizers,
                      partial(batches, args), args)
        windows = [window for window, *_ in seen]
        assert sorted(windows) == windows and len(seen) == args.kernel_warmup_steps == 6
        assert set(seen) == {
            (*parts.compiled_for(module, step, args), parts.row_len(module, step, args))
            for step in range(args.train_steps)}
    if settlings:  # FP8 weights with their own maximum first, which later ones need
        assert settlings[:2] == [False, True]


@where("window_size", "train", known="window")
def test_training_and_validation_use_the_window_of_the_step(
        milestone, shards, tmp_path, monkeypatch):
    module, seen = load_snapshot(milestone), []

    def causal(inputs, window):
        seen.append((torch.is_grad_enabled(), window))
        return torch.ones(2 * inputs.shape[-1:], dtype=torch.bool).tril()

    parts, fields = handles(module), vars(module.Hyperparameters)
    parts.replace_masks(module, monkeypatch.setattr, causal)
    sizes, expected = dict(window_start=2, window_end=10), ([2, 4, 6, 8], [2, 6, 10])
    if is_staged(milestone):  # of five steps the third and the fifth are later stages
        sizes = dict(window_start=2, window_growth=4, scheduled_steps=4)
        expected = [2, 2, 6, 6], [2, 6, 10]
        if len(parts.ROW_FACTORS) > 1:  # each of three, and a step after them
            sizes["scheduled_steps"], expected = 3, ([2, 6, 10, 12], [2, 10, 10])
        last = expected[1][-1]  # of the last validation; the long one differs, if it may
        ends = fitting(dict(window_end=last + 2, long_window_end=last + 4), fields)
        sizes |= ends
        expected[1][-1] = max(ends.values(), default=last)
        # Of shorter documents there are too many.
        sizes |= fitting(dict(first_document_len=96, max_document_len=96), fields)
    elif rounds(milestone):  # tiles of two: 1, 1.125, 2.25, 3.375 and 4.5 of them, rounded up
        sizes = dict(tile_size=2, window_end=9)
    module.main(micro_args(
        milestone, shards, tmp_path / "log", train_steps=4, val_loss_every=2,
        kernel_warmup_steps=0, micro_batch_size=8, total_batch_size=256, **sizes))
    each = len(parts.KINDS)  # the long one first
    training, validating = (
        [w for grad, w in seen if grad == phase][::each] for phase in (True, False))
    assert training == expected[0]  # steps 0 to 3
    assert list(dict.fromkeys(validating)) == expected[1]  # of one or two sequences each


# ---- what it costs ----


def test_attention_table(monkeypatch):
    monkeypatch.setattr(attention_cost, "LENGTHS", (1024, 2048))
    lines = attention_cost.attention_table(MANIFEST).splitlines()
    assert lines[2:] == ["| 1,024 | 36 | 36 | 36 | 36 |", "| 2,048 | 136 | 68 | 108 | 54 |"]
