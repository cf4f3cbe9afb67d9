"""What heads put out since 14d: less of the token's own value, times gates from the stream (14f),
with a mixture of all heads' attention (14g).

Run: .venv/bin/python -m pytest tests/test_composed_heads.py
"""

import math

import pytest
import torch

from snapshots import MANIFEST, by_id, declaring, handles, known_values, load_snapshot, where
from test_masks import documents
from test_streams import Attention, record_model
from test_updates import having

RETURNING = having("without_own_value", "CausalSelfAttention", "without_own_value",
                   "coefficient_layout")
returning = pytest.mark.parametrize("milestone", RETURNING, ids=by_id)
composing = where("composed_heads")


def decided_by_the_stream(module):
    """Whether networks on the stream decide, per token: since 14f."""
    return handles(module).PER_TOKEN


# ---- 14d: less of the token's own value ----


@where("without_own_value")
def test_known_outputs(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["own_value"]
    y, v = (torch.tensor(known[name]).float().view(1, 1, 3, 2) for name in "yv")  # three heads
    shares = torch.tensor(known["shares"]).float()
    found = module.without_own_value(
        y, v, shares.view(1, 1, 3) if decided_by_the_stream(module) else shares)
    torch.testing.assert_close(found[0, 0], torch.tensor(known["results"]))


@where("without_own_value")
def test_a_share_of_the_projection_on_the_value_is_subtracted(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    y, v = torch.randn(2, 3, 5, 4, 8, dtype=torch.float64)
    v[0, 0, 0] = 1e-5  # shorter than the length from which it is divided by its square
    shares = torch.rand(3, 5, 4) if decided_by_the_stream(module) else torch.rand(4)
    square = v.square().sum(-1).clamp(min=1e-8)
    expected = y - (shares * (y * v).sum(-1) / square).unsqueeze(-1) * v
    torch.testing.assert_close(module.without_own_value(y, v, shares.double()), expected)
    whole = module.without_own_value(y, v, torch.ones_like(shares).double())
    assert (whole * v).sum(-1)[1:].abs().max() < 1e-12  # nothing of the value is left


class Heads(Attention):
    """A layer's attention whose heads have random gates, and shares of their own values."""

    def __init__(self, module, **sizes):
        super().__init__(
            module, **sizes, model_dim=32, num_heads=4, own_value_pattern=12 * "V")
        self.values = torch.randn_like(self.x)  # extra ones
        self.shares, gates = torch.randn(2, 2, 16, 4, dtype=torch.float64)
        self.gates, self.more = gates, {}
        if decided_by_the_stream(module):
            self.more["c"] = dict(own_value=self.shares, head_gates=gates)
            assert gates.min() < -1  # a linear gate may be negative
        else:
            self.shares, self.gate = self.shares[0, 0], torch.randn_like(self.gate)
            self.gates = (self.x[..., : self.gate.size(1)] @ self.gate.T).sigmoid()
            self.more["c"] = dict(own_value=self.shares, gate=self.gate)

    def own_values(self):
        weight = handles(self.attn).matrices(self.attn)[2]
        return (0.5 * self.x @ weight.T + self.values).unflatten(-1, (4, -1))

    def result(self, y):
        """The output from what is left of the heads' (B, T, H, D)."""
        weight = handles(self.attn).matrices(self.attn)[3]
        return 0.7 * (y * self.gates[..., None]).flatten(2) @ weight.T


@returning
@torch.no_grad()
def test_heads_put_out_what_is_left_times_their_gates(milestone, monkeypatch):
    module = load_snapshot(milestone)
    heads = Heads(module)
    v = heads.own_values()
    y = torch.randn_like(v)
    monkeypatch.setattr(
        module.F, "scaled_dot_product_attention", lambda *_, **__: y.transpose(1, 2))
    share = heads.shares.tanh() * (y * v).sum(-1) / v.square().sum(-1)
    torch.testing.assert_close(
        heads(0.5, 0.7, heads.values, **heads.more), heads.result(y - share[..., None] * v))


@returning
@torch.no_grad()
def test_a_token_that_sees_itself_only_keeps_the_rest_of_its_value(milestone):
    heads = Heads(load_snapshot(milestone))
    v = heads.own_values()
    heads.mask = torch.eye(16, dtype=torch.bool)
    kept = 1 - heads.shares.tanh()
    torch.testing.assert_close(
        heads(0.5, 0.7, heads.values, **heads.more), heads.result(kept[..., None] * v))


@returning
@torch.no_grad()
def test_which_layers_return_their_own_values(milestone, monkeypatch):
    module, seen = load_snapshot(milestone), []
    model, without = record_model(module, random=True, num_heads=4), module.without_own_value
    monkeypatch.setattr(module, "without_own_value", lambda y, v, shares: seen.append(
        "subtracted") or without(y, v, shares))
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(lambda block, args, x, layer=layer: seen.append(layer))
    model(torch.randint(60, (2, 16)))
    found = [after for word, after in zip(seen, seen[1:], strict=False) if word == "subtracted"]
    assert found == ([1, 3, 4, 7] if decided_by_the_stream(module) else [1, 3, 4, 7, 8, 10])


@pytest.mark.parametrize("milestone", declaring("without_own_value")[:1], ids=by_id)
@torch.no_grad()
def test_shares_of_zero_are_the_parent(milestone):
    tokens, logits = torch.randint(60, (2, 16)), []
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    weights = record_model(parent, random=True).state_dict()
    for one in (parent, module):
        model = record_model(one)
        missing = model.load_state_dict(weights, strict=False).missing_keys
        logits.append(model(tokens))
    assert logits[0].equal(logits[1]) and missing == ["own_values"]
    assert list(model.own_values.shape) == [6, model.args.num_heads]
    for number in range(6):  # each row belongs to a layer
        model.own_values.zero_()[number] = 1.0
        assert not torch.allclose(model(tokens), logits[0], atol=1e-4)


# ---- 14g: a mixture of all heads' attention ----


def dense(q, k, v, numbers, mix, scale, window):
    """The mixture's outputs, token by token: all heads' probabilities over the last `window` tokens
    of the document, times the normed mix."""
    mix = mix / (mix.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    y = torch.zeros_like(v)
    for b in range(len(q)):
        for t in range(q.size(1)):
            seen = [s for s in range(max(0, t - window + 1), t + 1)
                    if numbers[b, s] == numbers[b, t]]
            scores = scale * torch.einsum("hd,shd->hs", q[b, t], k[b, seen])
            a = mix[b, t] @ scores.softmax(-1)
            y[b, t] = torch.einsum("s,shd->hd", a, v[b, seen])
    return y


def random_heads(B, T, H=3, D=4):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, D, dtype=torch.float64)
    return q, k, v, torch.randn(B, T, H, dtype=torch.float64)


@pytest.fixture
def in_float64(monkeypatch):
    """Softmax and norm of composed_heads are in float32, whatever its inputs are."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@composing
@pytest.mark.parametrize("T, window, block", [
    (24, 6, 8), (21, 6, 8), (5, 6, 8), (24, 8, 8), (19, 1, 4), (16, 4, 16),
])
def test_blocks_are_the_dense_formula(milestone, T, window, block, in_float64):
    module = load_snapshot(milestone)
    q, k, v, mix = random_heads(2, T)
    tokens = torch.randint(6, (2, T))  # of which 1 begins a document; a row may begin within one
    for numbers in ((tokens == 1).cumsum(1), torch.zeros(2, T, dtype=torch.int64)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, mix)]
        found = module.composed_heads(*inputs[:3], numbers, inputs[3], 0.7, window, block)
        expected = dense(*inputs[:3], numbers, inputs[3], 0.7, window)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        found, expected = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@composing
def test_a_mixture_is_normed(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["composed_heads"]
    v = torch.randn(1, 1, 2, 4)
    found = module.composed_heads(v, v, v, torch.zeros(1, 1, dtype=torch.int64),
                                  torch.tensor([[known["mix"]]]), 0.1, 1, 8)
    torch.testing.assert_close(found, sum(known["normed"]) * v)  # one token: the sum of the mix
    sixteen = module.composed_heads(
        *3 * (v.bfloat16(),), torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([[[1e-3, 0.0]]]).bfloat16(), 0.1, 1, 8)  # where the square needs float32
    assert sixteen.dtype == torch.bfloat16
    torch.testing.assert_close(sixteen.float(), v * 2**0.5 / math.sqrt(3), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    "milestone", having("composed_heads(", "CausalSelfAttention", "composed_heads"), ids=by_id)
@torch.no_grad()
def test_shares_of_the_mixture_are_added_before_the_own_value_is_subtracted(
        milestone, monkeypatch, in_float64):
    module, seen = load_snapshot(milestone), []
    heads = Heads(module, window_pattern=12 * "L", composed_window=5, composed_block=8)
    v, y = heads.own_values(), torch.randn(2, 16, 4, 8, dtype=torch.float64)

    def attend(q, k, v, **_):  # keys are offset and rotated
        seen.extend((q.transpose(1, 2), k.transpose(1, 2)))
        return y.transpose(1, 2)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", attend)
    mix, share = torch.randn(2, 2, 16, 4, dtype=torch.float64)
    heads.attn.composes_heads = True
    heads.more["c"] |= dict(mixture=mix, add_composed=share)
    numbers = (documents(16, 0, 3, 11) == 1).cumsum(1).expand(2, -1)
    found = heads(0.5, 0.7, heads.values, **heads.more, document_ids=numbers)
    y += share[..., None] * dense(*seen, v, numbers, mix, heads.attn.rotary.scale, 5)
    part = heads.shares.tanh() * (y * v).sum(-1) / v.square().sum(-1)
    torch.testing.assert_close(found, heads.result(y - part[..., None] * v))


@pytest.mark.parametrize("milestone", declaring("composed_heads")[:1], ids=by_id)
@torch.no_grad()
def test_without_a_share_it_is_the_parent(milestone):
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    model, plain = record_model(module, num_heads=4), record_model(parent, True, num_heads=4)
    weights, own = plain.state_dict(), model.state_dict()
    sizes, before = model.late_net.sizes, plain.late_net.sizes
    for key in ("late_net.c_proj", "late_net.bias"):  # a part of them is the parent's
        parts = dict(zip(before, weights[key].split([*before.values()]), strict=True))
        weights[key] = torch.cat([parts.get(name, part) for name, part in zip(
            sizes, own[key].split([*sizes.values()]), strict=True)])
    model.load_state_dict(weights)
    tokens = torch.randint(60, (2, 30))
    before = plain(tokens)
    assert model(tokens).equal(before)
    start = sum([*sizes.values()][: [*sizes].index(("add_composed", 10))])
    for head in range(4):
        model.late_net.bias[start : start + 4] = 0
        model.late_net.bias[start + head] = 5.0
        assert not torch.allclose(model(tokens), before, atol=1e-3)
