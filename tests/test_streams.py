"""What the residual stream and attention's inputs consist of since 10c: one skip, scalars on
weights, keys of the previous token, gates on value embeddings.

Run: .venv/bin/python -m pytest tests/test_streams.py
"""

from functools import partial

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
    where,
)
from speedrun.scripts.sizes import fitting
from test_updates import having


def record_model(module, random=False, **sizes):
    """A narrow model with the record's layers, as at the start or with random weights."""
    torch.manual_seed(0)
    model = module.GPT(micro_sizes(module, **record_layers(module), **sizes))
    for param in model.parameters():
        if random and param.ndim >= 2:
            torch.nn.init.normal_(param, std=0.2)
    return model


def watched(model):
    """Lists that each call of the model fills: the inputs of all layers, and their outputs."""
    inputs, outputs = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
        block.register_forward_hook(lambda block, args, out: outputs.append(out))
    return inputs, outputs


# ---- 10c: one skip ----


def scalars_of(model):
    """Views of a model's scalars by name, without gradients."""
    return {name: scalar.detach() for name, scalar in handles(model).scalars(model).items()}


@torch.no_grad()
def silent_stream(module, model, monkeypatch):
    """The stream as multiples of x0, while blocks add nothing: after each layer, and before the
    last norm."""
    for block in model.blocks:
        if block.attn is not None:  # its output need not start at zero
            handles(block.attn).matrices(block.attn)[3].zero_()
    inputs, outputs = watched(model)
    normed, norm = [], module.norm
    monkeypatch.setattr(module, "norm", lambda x: normed.append(x) or norm(x))
    model(torch.randint(64, (2, 16)))
    x0, multiples = inputs[0], []
    for x in [*outputs, normed[-1]]:
        multiples.append(((x * x0).sum() / x0.square().sum()).item())
        torch.testing.assert_close(x, multiples[-1] * x0)
    return multiples


@pytest.mark.parametrize("milestone", declaring("GPT", known="silent"), ids=by_id)
def test_the_stream_at_the_start(milestone, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["silent"]
    found = silent_stream(module, record_model(module), monkeypatch)
    assert found[7] == pytest.approx(known["after_layer_7"], abs=2e-6)
    assert found[10] == pytest.approx(known["after_layer_10"], abs=2e-6)
    assert found[11] == pytest.approx(known["before_the_norm"], abs=2e-6)


@pytest.mark.parametrize(
    "milestone", declaring("GPT", "Block", known="silent"), ids=by_id)
def test_the_skip_is_added_before_the_layers_own_scalars(milestone, monkeypatch):
    module = load_snapshot(milestone)
    model = record_model(module)
    named = scalars_of(model)
    named["x"].uniform_(0.5, 1.5)
    named["x0"].uniform_(-1, 1)
    named["backout"].fill_(0.3)
    named["skip"].fill_(0.7)
    x, expected = 1.0, []
    for layer in range(11):
        if layer == 6:
            x = x + torch.tensor(0.7).sigmoid() * expected[3]
        x = named["x"][layer] * x + named["x0"][layer]
        expected.append(x)
    expected.append(x - 0.3 * expected[7])
    found = silent_stream(module, model, monkeypatch)
    assert found == pytest.approx([float(x) for x in expected], rel=1e-5)


@pytest.mark.parametrize("milestone", declaring("GPT", known="silent"), ids=by_id)
@torch.no_grad()
def test_a_closed_skip_is_no_skip(milestone):
    module = load_snapshot(milestone)
    model, tokens = record_model(module, random=True), torch.randint(64, (2, 16))
    opened = model(tokens)
    scalars_of(model)["skip"].fill_(-torch.inf)
    closed = model(tokens)
    model.args.skip_to = None  # no layer
    assert closed.equal(model(tokens)) and not torch.allclose(closed, opened, atol=1e-3)


# ---- 10e: scalars on weights ----

SCALED = having('F.linear(x, c["value"]', "CausalSelfAttention", "Block")
scalars_on_weights = pytest.mark.parametrize("milestone", SCALED, ids=by_id)


@torch.no_grad()
def given_to(model):
    """The coefficients that a model gives the first layer's attention, by name."""
    found = []
    with model.blocks[0].attn.register_forward_pre_hook(lambda attn, inputs: found.append(
            dict(zip(handles(attn).ATTENTION, inputs, strict=True))["c"])):
        model(torch.zeros(2, 16, dtype=torch.int64))
    return found[0]


class Attention:
    """A layer's attention, in float64, with random weights; its gates are half open."""

    def __init__(self, module, **sizes):
        torch.manual_seed(0)
        sizes.setdefault("window_pattern", 12 * "S")  # a layer's heads may be paired otherwise
        sizes = fitting(dict(gate_pattern=12 * "G", own_value_pattern=12 * "."),
                        vars(module.Hyperparameters)) | sizes
        model = module.GPT(args := micro_sizes(module, **sizes)).double()
        self.attn, self.given = model.blocks[0].attn, given_to(model)
        for weights in handles(self.attn).matrices(self.attn):
            torch.nn.init.normal_(weights, std=0.2)
        self.x = torch.randn(2, 16, args.model_dim, dtype=torch.float64)
        self.mask = torch.ones(16, 16, dtype=torch.bool).tril()
        self.gate = torch.zeros(args.num_heads, args.gate_channels, dtype=torch.float64)

    def __call__(self, value, output, values=None, **more):
        """Its output; values: value embeddings (B, T, C); more: other arguments."""
        if values is not None:
            values = values.unflatten(-1, (self.attn.num_heads, -1))
        gates = torch.full((*self.x.shape[:2], self.attn.num_heads), 0.5, dtype=torch.float64)
        gated = dict(head_gates=gates) if handles(self.attn).PER_TOKEN else dict(gate=self.gate)
        coefficients = self.given | dict(value=value, output=output) | gated | more.pop("c", {})
        named = dict(x=self.x, values=values, c=coefficients, mask=self.mask, document_ids=None)
        named |= more
        return self.attn(*(named[name] for name in handles(self.attn).ATTENTION))


def plain(module, attention, value, output, values):
    """The formula: scalars on values and outputs, since queries and keys have a norm or a bound."""
    attn = attention.attn
    parts, weights = handles(attn), handles(attn).matrices(attn)
    q, k, v = ((attention.x @ weight.T).unflatten(-1, (attn.num_heads, -1))
               for weight in weights[:3])
    q, k = (attn.rotary(t) for t in parts.comparable(module, q, k, attention.given))
    v = value * v + values.view_as(v)
    y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True,
                                       scale=attn.rotary.scale)
    return 0.5 * output * y.transpose(1, 2).flatten(2) @ weights[3].T  # gates are half open


@scalars_on_weights
def test_outputs_and_gradients_are_those_of_scaled_activations(milestone):
    attention, found = Attention(module := load_snapshot(milestone)), []
    towards, values = torch.randn(2, *attention.x.shape, dtype=torch.float64)
    for formula in (attention, partial(plain, module, attention)):
        u, w = (torch.tensor(value, dtype=torch.float64, requires_grad=True)
                for value in (0.5, 0.8))
        y = formula(u, w, values)
        found.append([y, *torch.autograd.grad((y * towards).sum(), (u, w))])
    # Where queries and keys have the scalar, they feel it through the norm's epsilon.
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-5, atol=0)
    assert min(map(abs, found[0][1:])) > 0.1


@scalars_on_weights
def test_a_negative_scalar_turns_values_alone(milestone):
    attention = Attention(load_snapshot(milestone))
    values = torch.randn_like(attention.x)
    torch.testing.assert_close(attention(-0.5, 1.0), -attention(0.5, 1.0))
    torch.testing.assert_close(attention(-0.5, 1.0, values), -attention(0.5, 1.0, -values))
    # So the scalar acts on the token's own values; on queries and keys only through an epsilon.
    torch.testing.assert_close(attention(1.0, 1.0) / 2, attention(0.5, 1.0), rtol=1e-4, atol=1e-6)


@scalars_on_weights
def test_scalars_of_one_are_plain_attention(milestone):
    attention = Attention(module := load_snapshot(milestone))
    expected = plain(module, attention, 1.0, 1.0, nothing := 0 * attention.x)
    torch.testing.assert_close(attention(1.0, 1.0), expected)
    torch.testing.assert_close(attention(1.0, 1.0, nothing), expected)


# ---- 10f: keys of the previous token ----


@where("offset_keys", known="offset_keys")
def test_known_keys(milestone):
    known = known_values(milestone.id)["offset_keys"]
    numbers = 10 * torch.arange(128.0)  # tell channels apart
    keys = torch.arange(4.0).view(1, 4, 1, 1).repeat(2, 1, 3, 1) + numbers
    before = keys.clone()
    found = load_snapshot(milestone).offset_keys(keys)
    assert found.shape == keys.shape
    for channels, kind in ((range(32), "rotating"), (range(32, 64), "fixed"),
                           (range(64, 96), "rotating"), (range(96, 128), "fixed")):
        for channel in channels:
            values = found[..., channel] - numbers[channel]
            assert (values == torch.tensor(known[kind]).view(1, 4, 1)).all()
    assert keys.equal(before)


@where("CausalSelfAttention", "Block", "GPT", known="offset_keys")
@torch.no_grad()
def test_keys_are_offset_in_layers_with_a_long_window(milestone, monkeypatch):
    module = load_snapshot(milestone)
    model, seen, offset = record_model(module, random=True), [], []
    monkeypatch.setattr(module, "offset_keys",
                        lambda k, found=module.offset_keys: offset.append(k) or found(k))

    def noted(q, k, v, **more):
        before, fixed = offset.pop().transpose(1, 2) if offset else k, torch.arange(k.size(-1))
        fixed = fixed // (len(fixed) // 4) % 2 == 1  # second and fourth quarter
        assert k[..., ~fixed].equal(before[..., ~fixed])
        assert k[:, :, 0].equal(before[:, :, 0])
        seen.append(k[:, :, 1:, fixed].equal(before[:, :, :-1, fixed]))
        return q

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", noted)
    model(torch.randint(64, (2, 16)))
    layers = [layer for layer in range(11) if layer != 6]
    assert [layer for layer, found in zip(layers, seen, strict=True) if found] == [3, 10]


@where("CausalSelfAttention", known="offset_keys")
@torch.no_grad()
def test_a_repeated_token_finds_what_followed_it(milestone, monkeypatch):
    module, attended = load_snapshot(milestone), []

    def noted(q, k, v, attn_mask, scale):
        scores = (scale * q @ k.mT).masked_fill(~attn_mask, -torch.inf)
        attended.append(scores.softmax(-1)[0, 0, 15])  # by the last token
        return v

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", noted)
    for pattern, expected in (("LLLL", {6}), ("SSSS", {5, 15})):  # without the offset, itself
        attention = Attention(module, num_heads=2, window_pattern=pattern)
        C = attention.x.size(-1)
        matches = torch.linalg.qr(torch.randn(C, C, dtype=torch.float64))[0]
        matches[torch.arange(C) // (C // 8) % 2 == 0] = 0  # channels that rotate match nothing
        for weights in handles(attention.attn).matrices(attention.attn)[:2]:
            weights.copy_(matches)
        attention.x[:, 15] = attention.x[:, 5]  # ... A B ... A
        attention.attn.rotary.scale = 1.0
        attention(0.5, 1.0)
        assert set((attended.pop() > 0.4).nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("milestone", declaring("offset_keys")[:1], ids=by_id)
def test_when_value_embeddings_begin_to_move(milestone, shards, tmp_path, monkeypatch):
    # Adam first moves the head, after steps 0 and 1; step 2 then moves attention's outputs.
    module, moving = load_snapshot(milestone), []
    set_schedules = module.set_schedules

    def noted(optimizers, step, args):
        adam, _ = optimizers
        tables = [param for param in adam.param_groups[0]["params"] if not param.any()]
        moving.append(any(table.grad.any() for table in tables))
        set_schedules(optimizers, step, args)

    monkeypatch.setattr(module, "set_schedules", noted)
    train(module, micro_args(milestone, shards, tmp_path / "log", train_steps=4, val_loss_every=0,
                             total_batch_size=64, val_tokens=32, kernel_warmup_steps=0))
    assert moving == [False, False, False, True]
    args = module.Hyperparameters()
    due = [len(module.optimizers_due([None, None], step, args)) for step in range(args.train_steps)]
    assert due.count(2) == 1045


# ---- 11d: gates on value embeddings and on the skip ----

GATED = having("value_gate", "Block", "GPT")
gates = pytest.mark.parametrize("milestone", GATED, ids=by_id)


@pytest.mark.parametrize("milestone", GATED[:1], ids=by_id)
@torch.no_grad()
def test_gates_change_nothing_at_the_start(milestone):
    tokens, logits = torch.randint(64, (2, 16)), []
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    weights = record_model(parent, random=True).state_dict()
    for one in (module, parent):
        model = record_model(one)
        added = model.load_state_dict(weights, strict=False).missing_keys
        logits.append(model(tokens))
        assert set(added) == ({"value_gates", "skip_gate"} if one is module else set())
    assert logits[0].equal(logits[1])


@gates
@torch.no_grad()
def test_a_gate_silences_or_doubles_one_heads_values(milestone, monkeypatch):
    module = load_snapshot(milestone)
    model, seen = record_model(module, random=True, num_heads=4), []
    gates, tables = model.value_gates, record_layers(module)["value_embed_pattern"]
    assert list(gates.shape) == [5, 4, model.args.gate_channels]
    gates.zero_()
    layers = [layer for layer, table in enumerate(tables)  # 14c's last layer mixes its values
              if table != "." and not (
                  handles(model).LAST_MIXES and layer == len(model.blocks) - 1)]
    names = sorted(set(tables) - {"."})
    for layer in layers:
        model.blocks[layer].attn.register_forward_pre_hook(
            lambda attn, args: seen.append(args[1].flatten(2).unflatten(2, (4, -1))))
    tokens = torch.randint(64, (2, 16))
    for size in (-1e6, 1e6):
        for number, layer in enumerate(layers):
            gates.zero_()[number, 2, 0] = size
            norm = module.norm
            monkeypatch.setattr(module, "norm", lambda x, norm=norm: norm(x).index_fill(
                -1, torch.tensor([0]), 1.0))  # the first channel opens or closes the gate
            model(tokens)
            monkeypatch.setattr(module, "norm", norm)
            for other, found in zip(layers, seen, strict=True):
                table = handles(model).value_tables(model)[names.index(tables[other])]
                table = table[tokens].unflatten(2, (4, -1))
                factors = torch.ones(4, 1)
                if other == layer:
                    factors[2] = 0 if size < 0 else 2
                torch.testing.assert_close(found, factors * table)
            seen.clear()


@pytest.mark.parametrize("milestone", [
    m for m in GATED if known_values(m.id)["silent"]], ids=by_id)
@torch.no_grad()
def test_the_skips_gate_reads_the_first_layers_input(milestone):
    module = load_snapshot(milestone)
    model = record_model(module, random=True)
    model.skip_gate.normal_()
    scalars_of(model)["skip"].fill_(0.7)
    inputs, outputs = watched(model)
    model(torch.randint(64, (2, 16)))
    x0 = inputs[0]
    gate = 2 * (x0[..., : model.skip_gate.size(1)] @ model.skip_gate.T).sigmoid()
    assert gate.std() > 0.2
    torch.testing.assert_close(
        inputs[6], outputs[5] + torch.tensor(0.7).sigmoid() * gate * outputs[3])
