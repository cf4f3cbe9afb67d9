"""What layers add to the stream after attention since 13g; two scalars of each sublayer (14), the
last attentions' cached input (14a), coefficients from small networks on the stream (14c, 14f).

Run: .venv/bin/python -m pytest tests/test_stream_coefficients.py
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from snapshots import MANIFEST, by_id, declaring, handles, known_values, load_snapshot
from test_streams import record_model, silent_stream
from test_updates import having

WEIGHING = having("self.injected", "Block", "GPT", "LastBlock", "coefficient_layout",
                  "CoefficientNet")
weighing = pytest.mark.parametrize("milestone", WEIGHING, ids=by_id)
MIXING = pytest.mark.parametrize("milestone", declaring("CoefficientNet", "LastBlock"), ids=by_id)
LAYING_OUT = pytest.mark.parametrize("milestone", declaring("coefficient_layout"), ids=by_id)
CACHED, SKIP = 7, (3, 6)


def decided_by_the_stream(module):
    """Whether networks decide what layers add of embedding, bigrams and the skip: since 14f."""
    return handles(module).PER_TOKEN


# ---- 13g: what joins after attention; 14: two scalars per sublayer ----


def factors(model):
    """Of each layer's stream, before attention reads it; of the stream (11, 2) and of the output
    (11, 2) where attention and MLP are added. A factor that a model does not have is 1."""
    ones, params = torch.ones(11, 2), dict(model.named_parameters())
    return (handles(model).scalars(model).get("x", ones[:, 0]),
            params.get("keep_weights", ones), params.get("add_weights", ones))


@weighing
def test_the_stream_at_the_start(milestone, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["initial_stream"]
    model = record_model(module)
    found = silent_stream(module, model, monkeypatch)
    skip = 1 / (1 + math.exp(1.5)) * (0.5 if decided_by_the_stream(module) else 1.0)
    first, keep, _ = factors(model)  # of the layer with the skip; the others keep 1.1
    cached = 1.1 * (keep[6, 1] * (first[6] * 1.1**6 + skip * 1.1**4)).item()
    expected = [cached, cached * 1.1**3, cached * 1.1**3 - cached / 2]
    assert [found[7], *found[10:]] == pytest.approx(expected, abs=4e-6)
    if not decided_by_the_stream(module):
        assert [*known.values()] == pytest.approx(expected, abs=1e-6)


def coefficients(network, x, scale):
    """What a network computes from x: scale * (W2 gelu(W1 x) + bias)."""
    hidden = x @ network.c_fc.T
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    return scale * (hidden @ network.c_proj.T + network.bias)


def by_name(network, x, scale):
    """The same, cut into {(name, layer): (B, T, count)}."""
    columns, found = coefficients(network, x, scale), {}
    for name, count in network.sizes.items():
        found[name], columns = columns[..., :count], columns[..., count:]
    assert columns.size(-1) == 0
    return found


def watch(module, model, tokens, monkeypatch):
    """What a call of the model computes: of each layer's block, attention and MLP {layer: (*inputs,
    output)}, and what else a formula of the stream needs."""
    seen, normed, norm = SimpleNamespace(block={}, attn={}, mlp={}), [], module.norm
    for layer, block in enumerate(model.blocks):
        for found, part in ((seen.block, block), (seen.attn, block.attn), (seen.mlp, block.mlp)):
            if part is not None:
                part.register_forward_hook(
                    lambda part, args, y, found=found, layer=layer: found.update(
                        {layer: (*args, y)}))
    monkeypatch.setattr(module, "norm", lambda x: normed.append(x) or norm(x))
    model(tokens)
    monkeypatch.setattr(module, "norm", norm)
    seen.last = normed[-1]  # before the head
    smear_weight = handles(model).scalars(model)["smear"]
    embedded = F.embedding(tokens, model.embed.weight)
    seen.x0 = norm(module.smear(embedded, smear_weight, model.smear_gate))
    seen.bigrams, seen.tables = model.bigram_embed(tokens), model.value_embeds(tokens)
    return seen


def layer_gates(module, model, seen):
    """The factors {(name, layer): factor} of x0, bigrams and the skip."""
    skip = model.scalars[-1].sigmoid()
    if decided_by_the_stream(module):
        early, late = model.early_net, model.late_net
        found = by_name(early, seen.x0, model.layer_net_scale)
        found |= by_name(late, seen.block[4][0], model.layer_net_scale)
        return found | {("skip", 6): skip * found["skip_factor", 6]}
    found = {("x0", i): weight for i, weight in enumerate(model.x0_weights)}
    found |= {("bigrams", i): weight for i, weight in enumerate(model.bigram_weights)}
    gate = 2 * (seen.x0[..., : model.skip_gate.size(1)] @ model.skip_gate.T).sigmoid()
    return found | {("skip", 6): skip * gate}


def by_formula(module, model, seen):
    """The stream before the head, from what attentions and MLPs have put out; compares what each of
    them has read with what it should."""
    norm, close = module.norm, torch.testing.assert_close
    gates = layer_gates(module, model, seen)
    x = start = seen.x0 + gates["bigrams", 0] * seen.bigrams
    outputs, mixes = [], handles(module).LAST_MIXES
    first, keep, add = factors(model)
    for layer in range(11 - mixes):
        (r, r2), (p, p2), x = keep[layer], add[layer], first[layer] * x
        if layer == SKIP[1]:
            x = x + gates["skip", layer] * outputs[SKIP[0]]
        else:
            read, *_, y = seen.attn[layer]
            source = handles(module).attention_source(model.args, layer)
            close(read, norm(x if source is None else outputs[source]))
            x = r * x + p * y + gates["x0", layer] * seen.x0
            if layer > 0:
                x = x + gates["bigrams", layer] * seen.bigrams
        read, y = seen.mlp[layer]
        close(read, norm(x))
        x = r2 * x + p2 * y
        outputs.append(x)
    cached = outputs[CACHED]
    if not mixes:
        return x - model.scalars[-2] * cached
    before = x
    m = coefficients(model.blocks[-1].mix_net, x, 0.1).split(1, dim=-1)
    assert len(m) == 14
    read, values, *_, y = seen.attn[10]
    close(read, norm(cached))
    H = values.size(2)
    gate = torch.cat((m[6].expand(-1, -1, H // 2), m[7].expand(-1, -1, H // 2)), dim=-1)[..., None]
    close(values, (m[0] * start + m[1] * cached + m[2] * x).unflatten(2, (H, -1))
          + gate * seen.tables[10].unflatten(2, (H, -1)))
    x = (1 + m[5]) * x + m[3] * start + m[4] * cached
    x = m[8] * x + m[9] * y + m[10] * start + m[11] * seen.bigrams
    read, y = seen.mlp[10]
    close(read, norm(x))
    x = m[12] * x + m[13] * y
    n = coefficients(model.final_mix_net, x, 0.1).split(1, dim=-1)
    assert len(n) == 5
    return (x + n[0] * start + n[1] * cached + n[2] * before + n[3] * seen.tables[1]
            + n[4] * outputs[SKIP[0]])


@weighing
def test_the_stream_follows_the_formula_and_so_do_its_gradients(milestone, monkeypatch):
    module = load_snapshot(milestone)
    model = record_model(module, random=True, num_heads=4).double()
    for param in model.parameters():
        if param.ndim < 2:
            torch.nn.init.uniform_(param, -1, 1)
    seen = watch(module, model, torch.randint(60, (2, 16)), monkeypatch)
    expected = by_formula(module, model, seen)
    torch.testing.assert_close(seen.last, expected)
    towards, params = torch.randn_like(expected), dict(model.named_parameters())
    found, expected = (torch.autograd.grad(
        (x * towards).sum(), params.values(), retain_graph=True, allow_unused=True)
        for x in (seen.last, expected))
    for name, one, other in zip(params, found, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, msg=name)
    if decided_by_the_stream(module):  # each output of both networks is used
        grads = dict(zip(params, found, strict=True))
        assert grads["early_net.bias"].all() and grads["late_net.bias"].all()


# ---- 14c: coefficients from the stream ----


@MIXING
@torch.no_grad()
def test_what_the_last_layer_and_the_head_mix_at_first(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["initial_mix"]
    model = record_model(module)
    for network, expected in ((model.blocks[-1].mix_net, known["last_layer"]),
                              (model.final_mix_net, known["final"])):
        assert not network.c_proj.any()
        limit = model.args.model_dim**-0.5
        assert 0.9 * limit < network.c_fc.abs().max() <= limit
        found = torch.cat([*network(torch.randn(2, 5, model.args.model_dim), 0.1).values()], -1)
        torch.testing.assert_close(
            found, torch.tensor(expected).float().expand_as(found), rtol=0, atol=1e-6)


@pytest.mark.parametrize("milestone", declaring("CoefficientNet")[:1], ids=by_id)
@torch.no_grad()
def test_with_a_value_gate_of_one_it_is_the_parent(milestone):
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    model, plain = record_model(module), record_model(parent, random=True)
    for name in ("keep_weights", "add_weights"):  # as the biases of the last layer have them
        getattr(plain, name)[10] = getattr(model, name)[10]
    plain.value_gates[-1] = 0  # a factor of 1
    weights = plain.state_dict()
    *kept, smear, _backout, skip = weights["scalars"].tolist()
    weights["scalars"] = torch.tensor([*kept, smear, skip])
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert {name.split(".")[-1] for name in missing} == {"c_fc", "c_proj", "bias"}
    tokens = torch.randint(60, (2, 16))
    assert not torch.allclose(model(tokens), plain(tokens), atol=1e-3)
    model.blocks[-1].mix_net.bias[6:8] = 10  # at first 20, so 2
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=2e-5)


# ---- 14f: networks in place of gates and scalars ----


@LAYING_OUT
@torch.no_grad()
def test_which_coefficients_there_are_and_what_they_are_at_first(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["stream_gates"]
    args, found = module.Hyperparameters(), {}
    for part, layers in (("early", range(4)), ("late", range(4, 11))):
        layout = module.coefficient_layout(args, layers)
        assert sum(map(len, layout.values())) == known[part]
        assert {layer for _, layer in layout} <= {*layers}
        for (name, layer), values in layout.items():
            found.setdefault(name, []).append(layer)
            heads = name in ("own_value", "head_gates", "mixture", "add_composed")
            assert values == [known["initial"][name]] * (6 if heads else 1)
    expected = dict(own_value=[1, 3, 4, 7], head_gates=[3, 10], skip_factor=[6])
    expected |= dict.fromkeys(("x0", "bigrams"), [0, 1, 2, 3, 4, 5, 7, 8, 9])
    if "add_composed" in known["initial"]:
        expected |= dict(mixture=[10], add_composed=[10])
    assert found == expected
    model = record_model(module, num_heads=6, model_dim=48)
    assert model.layer_net_scale.item() == pytest.approx(0.1)
    for network in (model.early_net, model.late_net):
        assert not network.c_proj.any() and network.sizes.keys() <= {
            (name, layer) for name, layers in expected.items() for layer in layers}
        for (name, _), values in network(torch.randn(2, 5, 48), model.layer_net_scale).items():
            torch.testing.assert_close(values, torch.full_like(values, known["initial"][name]))


@LAYING_OUT
@torch.no_grad()
def test_heads_have_gates_in_two_layers_only(milestone):
    module = load_snapshot(milestone)
    model, sizes = record_model(module, random=True, num_heads=4), {}
    for network in (model.early_net, model.late_net):
        network.c_proj.zero_()
        network.bias.zero_()  # closes what has a gate
    for layer, block in enumerate(model.blocks):
        if block.attn is not None:
            assert handles(block.attn).matrices(block.attn)[3].any()
            block.attn.register_forward_hook(
                lambda attn, args, y, layer=layer: sizes.update({layer: y.abs().max().item()}))
    model(torch.randint(60, (2, 16)))
    assert [layer for layer, size in sizes.items() if size == 0] == [3, 10] and len(sizes) == 10
