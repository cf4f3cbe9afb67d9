"""What the residual stream consists of since 10c: one skip, and scalars in their order.

Run: .venv/bin/python -m pytest tests/test_streams.py
"""

import pytest
import torch

from snapshots import known_values, load_snapshot, micro_sizes, record_layers, where


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
    """Views of a model's scalars by name: a vector for each of those that layers have."""
    width, L = len(model.initial_scalars), len(model.blocks)
    rows = model.scalars.detach()[: width * L].view(L, width)
    named = dict(zip(model.initial_scalars, rows.unbind(1), strict=True))
    if hasattr(model, "x0_weights"):
        named["x0"] = model.x0_weights.detach()
    _smear, named["backout"], named["skip"] = model.scalars.detach()[width * L :][:3]
    return named


@torch.no_grad()
def silent_stream(module, model, monkeypatch):
    """The stream as multiples of x0, while blocks add nothing: after each layer, and before the
    last norm."""
    inputs, outputs = watched(model)
    normed, norm = [], module.norm
    monkeypatch.setattr(module, "norm", lambda x: normed.append(x) or norm(x))
    model(torch.randint(64, (2, 16)))
    x0, multiples = inputs[0], []
    for x in [*outputs, normed[-1]]:
        multiples.append(((x * x0).sum() / x0.square().sum()).item())
        torch.testing.assert_close(x, multiples[-1] * x0)
    return multiples


@where("GPT", known="silent")
def test_the_stream_at_the_start(milestone, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["silent"]
    found = silent_stream(module, record_model(module), monkeypatch)
    assert found[7] == pytest.approx(known["after_layer_7"], abs=2e-6)
    assert found[10] == pytest.approx(known["after_layer_10"], abs=2e-6)
    assert found[11] == pytest.approx(known["before_the_norm"], abs=2e-6)


@where("GPT", "Block", known="silent")
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


@where("GPT", known="silent")
@torch.no_grad()
def test_a_closed_skip_is_no_skip(milestone):
    module = load_snapshot(milestone)
    model, tokens = record_model(module, random=True), torch.randint(64, (2, 16))
    opened = model(tokens)
    scalars_of(model)["skip"].fill_(-torch.inf)
    closed = model(tokens)
    model.args.skip_to = None  # no layer
    assert closed.equal(model(tokens)) and not torch.allclose(closed, opened, atol=1e-3)
