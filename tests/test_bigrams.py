"""Tables of what is near a token: bigrams since 13, a value table per layer since 13a, attention
that writes from the start since 13b, gates that read the tables since 13c, signs since 14e.

Run: .venv/bin/python -m pytest tests/test_bigrams.py
"""

import math
from itertools import accumulate
from operator import xor

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
    train,
    where,
)
from test_optimizers import World
from test_streams import record_model, scalars_of, watched
from test_updates import having

HASHING = having("", "bigram_hashes", "BigramEmbed", "GPT")
hashing = pytest.mark.parametrize("milestone", HASHING, ids=by_id)


# ---- 13: hashes of two tokens ----


@where("bigram_hashes", known="bigrams")
def test_known_rows(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["bigrams"]
    for dtype in (torch.int64, torch.int32):
        tokens = torch.tensor([known["tokens"], known["tokens"][::-1]], dtype=dtype)
        found = module.bigram_hashes(tokens, 251_520)
        assert found[0].tolist() == known["rows"]
        assert found[1, 0] == 251_519 and found.shape == tokens.shape


@where("bigram_hashes")
def test_rows_are_those_of_the_formula(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    tokens = torch.cat((torch.randint(50_304, (3, 400)), torch.full((3, 3), 50_303)), dim=1)
    for rows in (2, 5, 64, 4000, 251_520):
        found = module.bigram_hashes(tokens, rows)
        expected = [[rows - 1] + [
            (36_313 * token ^ 27_191 * before) % (rows - 1) for before, token in zip(
                row, row[1:], strict=False)] for row in tokens.tolist()]
        assert found.tolist() == expected  # so none lies outside, and others never have the last
        assert module.bigram_hashes(tokens.int(), rows).tolist() == expected
    one = module.bigram_hashes(tokens[:, :1], 64)
    assert one.tolist() == [[63]] * 3


@where("bigram_hashes")
def test_rows_are_shared_as_often_as_by_chance(milestone):
    module, rows = load_snapshot(milestone), 5000
    torch.manual_seed(0)
    for lookups in (2500, 5000, 10_000):
        found = module.bigram_hashes(torch.randint(50_257, (1, lookups + 1)), rows)
        without = 1 - found[:, 1:].unique().numel() / (rows - 1)
        assert without == pytest.approx(math.exp(-lookups / (rows - 1)), abs=0.015)


@pytest.mark.parametrize("milestone", declaring("bigram_hashes")[:1], ids=by_id)
def test_a_table_of_zeros_is_the_parent(milestone):
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    models, tokens = [record_model(one, random=True) for one in (module, parent)], torch.randint(
        60, (2, 17))
    weights = models[1].state_dict()
    del weights["scalars"]
    assert models[0].load_state_dict(weights, strict=False).missing_keys == [
        "scalars", "bigram_embed.weight"]
    model = models[0]
    model.bigram_embed.weight.data.zero_()
    losses = [one(tokens[:, :-1], tokens[:, 1:]) for one in models]
    assert losses[0].equal(losses[1])
    losses[0].backward()
    width = len(model.layer_init)
    gradients = model.scalars.grad[: 11 * width].view(11, width)
    assert not gradients[:, [*model.layer_init].index("bigrams")].any() and gradients.any()
    assert model.bigram_embed.weight.grad.any()
    assert scalars_of(model)["bigrams"].tolist() == pytest.approx([0.1] * 11)
    fresh = module.GPT(micro_sizes(module))
    assert not fresh.bigram_embed.weight.any()


@hashing
def test_rows_have_gradients_of_their_own_bigrams_alone(milestone):
    module = load_snapshot(milestone)
    model = record_model(module, random=True, bigram_rows=400, seq_len=16)
    tokens = torch.randint(60, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model(inputs, targets).backward()
    grad = model.bigram_embed.weight.grad
    touched = grad.abs().sum(1).nonzero().flatten()
    assert touched.tolist() == module.bigram_hashes(inputs, 400).unique().tolist()
    assert 399 in touched and 20 < len(touched) < 33
    with torch.no_grad():  # other rows are not read
        before = model(inputs, targets)
        others = torch.ones(400, dtype=torch.bool).index_fill(0, touched, False)
        model.bigram_embed.weight[others] = 7.0
        assert model(inputs, targets).equal(before)
        model.bigram_embed.weight[399] += 1.0  # the row of a first token
        assert not model(inputs, targets).equal(before)


@pytest.mark.parametrize("milestone", having('c["bigrams"] * sources', "Block", "GPT"), ids=by_id)
@torch.no_grad()
def test_bigrams_enter_before_every_layer(milestone):
    module = load_snapshot(milestone)
    model = record_model(module)
    for block in model.blocks:  # blocks add nothing
        block.mlp.c_proj.zero_()
        if block.attn is not None:
            handles(block.attn).matrices(block.attn)[3].zero_()
    model.bigram_embed.weight.normal_()
    named = scalars_of(model)
    for name in ("x", "x0", "bigrams"):
        named[name].uniform_(-1, 1)
    tokens = torch.randint(60, (2, 16))
    inputs, outputs = watched(model)
    model(tokens)
    x = x0 = inputs[0]
    bigrams = F.embedding(module.bigram_hashes(tokens, len(model.bigram_embed.weight)),
                          model.bigram_embed.weight)
    for layer in range(11):
        if layer == 6:  # the skip comes first
            x = x + named["skip"].sigmoid() * outputs[3]
        x = named["x"][layer] * x + named["x0"][layer] * x0 + named["bigrams"][layer] * bigrams
        torch.testing.assert_close(outputs[layer], x)


@pytest.mark.parametrize("milestone", having("model.bigram_embed", "make_optimizers"), ids=by_id)
def test_how_bigrams_are_trained(milestone, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "dist", World().dist)
    model, record = module.GPT(micro_sizes(module)), module.Hyperparameters()
    args = micro_sizes(module, **{name: getattr(record, name) for name in vars(record) if any(
        part in name for part in ("_lr", "_beta", "_decay", "adam_"))})
    adam = module.make_optimizers(model, args)[0]
    (group,) = [group for group in adam.param_groups if any(
        param is model.bigram_embed.weight for param in group["params"])]
    assert (group["lr"], group["betas"], group["replicated"]) == (0.6, (0.75, 0.95), False)
    assert group["weight_decay"] == pytest.approx(5 * 0.005)
    for world_size in (2, 4, 8):
        assert record.bigram_rows % world_size == 0


# ---- 13a: a value table per layer ----


@where("ValueEmbeds")
def test_one_tensor_is_five_tables(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    model = record_model(module, random=True)
    weight, V = model.value_embeds.weight, model.args.vocab_size
    tables = torch.nn.ModuleList(torch.nn.Embedding.from_pretrained(
        weight.detach()[i * V : (i + 1) * V].clone(), freeze=False) for i in range(5))
    assert len(weight) == 5 * V
    tokens = torch.randint(V, (2, 16))
    found = model.value_embeds(tokens)
    pattern = module.Hyperparameters.value_embed_pattern
    assert list(found) == [i for i, table in enumerate(pattern) if table != "."]
    towards = torch.randn(5, *found[min(found)].shape)
    for table, one in zip(tables, found.values(), strict=True):
        assert one.equal(table(tokens))
    sum((one * to).sum() for one, to in zip(found.values(), towards, strict=True)).backward()
    sum((table(tokens) * to).sum() for table, to in zip(tables, towards, strict=True)).backward()
    torch.testing.assert_close(weight.grad, torch.cat([table.weight.grad for table in tables]))


@pytest.mark.parametrize("milestone", declaring("ValueEmbeds")[:1], ids=by_id)
def test_it_trains_as_tables_of_their_own(milestone, shards, tmp_path, monkeypatch):
    def matrices(self, args):  # the tables' initial values are drawn, or not, before these
        make[type(self)](self, args)
        generator = torch.Generator().manual_seed(0)
        for param in self.blocks.parameters():
            param.data.uniform_(-0.2, 0.2, generator=generator)

    make = {}
    for one in (milestone, MANIFEST.get(milestone.parent)):
        GPT = load_snapshot(one).GPT
        make[GPT] = GPT.__init__
        monkeypatch.setattr(GPT, "__init__", matrices)
    parent, sizes = MANIFEST.get(milestone.parent), dict(
        total_batch_size=128, val_tokens=64, val_loss_every=5, num_layers=4,
        value_embed_pattern="0.12", value_embed_lr=0.2)
    expected, found = (train(load_snapshot(m), micro_args(m, shards, tmp_path / m.id, **sizes))
                       for m in (parent, milestone))
    assert found == pytest.approx(expected, abs=2e-5) and expected[0] - expected[-1] > 0.5


# ---- 13b: attention writes from the start ----


@pytest.mark.parametrize(
    "milestone", having("output_init", "CausalSelfAttention", "MLP", "Block"), ids=by_id)
@torch.no_grad()
def test_attention_writes_and_mlps_are_silent_at_the_start(milestone):
    module = load_snapshot(milestone)
    model, sizes = record_model(module, num_heads=4), dict(attn=[], mlp=[])
    for block in model.blocks:
        for kind, found in sizes.items():
            if getattr(block, kind) is not None:
                getattr(block, kind).register_forward_hook(
                    lambda part, args, y, found=found: found.append(y.abs().max().item()))
    model(torch.randint(60, (2, 16)))
    assert len(sizes["attn"]) == 10 and min(sizes["attn"]) > 1e-3
    assert len(sizes["mlp"]) == 11 and max(sizes["mlp"]) == 0
    for block in model.blocks:
        if block.attn is not None:
            C = model.args.model_dim
            for weights in handles(block.attn).matrices(block.attn):  # alike: Q, K, V and output
                assert weights.abs().max().item() == pytest.approx(0.5 * (3 / C) ** 0.5, rel=0.05)
                assert weights.std().item() == pytest.approx(0.5 / C**0.5, rel=0.1)


# ---- 13c: gates read the tables ----


READING = [m for m in having("value_gate", "Block", "GPT")
           if known_values(m.id).get("gates_read_tables")]


@pytest.mark.parametrize("milestone", READING, ids=by_id)
@torch.no_grad()
def test_gates_read_the_stream_and_the_table(milestone):
    module, seen = load_snapshot(milestone), {}
    model = record_model(module, random=True, num_heads=4)
    for layer, block in enumerate(model.blocks):
        if block.attn is not None and type(block) is module.Block:
            block.attn.register_forward_pre_hook(
                lambda attn, args, layer=layer: seen.update({layer: args[:2]}))
    tokens = torch.randint(60, (2, 16))
    tables, (_, _, channels) = model.value_embeds(tokens), model.value_gates.shape
    assert channels == 12 and list(tables) == [1, 2, 8, 9, 10]
    for size in (0.0, 1.0):
        model.value_gates.normal_().mul_(size)
        seen.clear()
        model(tokens)
        layers = [layer for layer, (_, extra) in seen.items() if extra is not None]
        assert [layer for layer in tables if layer in seen] == layers and len(layers) >= 4
        for gate, (layer, table) in zip(model.value_gates, tables.items(), strict=True):
            if layer in seen:
                normed, extra = seen[layer]
                inputs = torch.cat((normed[..., :6], table[..., :6]), dim=-1)
                factors = 2 * (inputs @ gate.T).sigmoid()  # (B, T, H)
                assert size == 0 or factors.std() > 0.2
                expected = factors[..., None] * table.unflatten(2, (4, -1))
                torch.testing.assert_close(extra.flatten(2), expected.flatten(2))


# ---- 14e: bigrams that share a row have signs of their own ----

signed = where("sign_hashes", "BigramEmbed", block="sign_hashes")


@signed
def test_known_rows_of_signs(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["bigrams"]
    args = module.Hyperparameters()
    for dtype in (torch.int64, torch.int32):
        tokens = torch.tensor([known["tokens"], known["tokens"][::-1]], dtype=dtype)
        assert module.bigram_hashes(tokens, args.bigram_rows)[0].tolist() == known["rows"]
        found = module.sign_hashes(tokens, args.sign_rows)
        assert found[0].tolist() == known["sign_rows"]
        assert found[1].tolist() == [0, *known["sign_rows"][:0:-1]]  # either order has the same
    assert module.sign_hashes(tokens, 64)[0].tolist() == [row % 64 for row in known["sign_rows"]]


@signed
def test_signs_are_drawn_once_and_saved(milestone):
    module = load_snapshot(milestone)
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(module.GPT(micro_sizes(module)))
    signs = [model.bigram_embed.signs for model in models]
    assert signs[0].equal(signs[1]) and not signs[0].equal(signs[2])
    assert set(signs[0].unique().tolist()) == {-1, 1} and signs[0].mean().abs() < 0.2
    assert list(signs[0].shape) == [models[0].args.sign_rows, models[0].args.model_dim]
    models[2].load_state_dict(models[0].state_dict())
    assert models[2].bigram_embed.signs.equal(signs[0])


@signed
def test_a_shared_row_reads_back_every_code_with_signs_and_one_without(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    embed = module.BigramEmbed(micro_sizes(
        module, model_dim=768, num_heads=6, bigram_rows=2, sign_rows=8192))  # one row for all
    codes, own = torch.randn(500, 768), embed.signs
    for count in (2, 5, 16):
        inputs = torch.tensor([[*accumulate(range(count + 1), xor)]])  # so row t has signs t
        for signs in (own, torch.ones_like(own)):
            embed.signs = signs
            embed.weight.data.zero_()
            (gradient,) = torch.autograd.grad(  # a step of which every bigram adds its code
                (embed(inputs)[0, 1:] * codes[:count]).sum(), embed.weight)
            torch.testing.assert_close(
                gradient[0], (signs[1 : count + 1] * codes[:count]).sum(0))
            assert not gradient[1].any()
            embed.weight.data += gradient
            read = (embed(inputs)[0, 1:] @ codes.T).argmax(1)
            right = (read == torch.arange(count)).sum()
            assert right == (count if signs is own else 1)
