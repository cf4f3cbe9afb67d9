"""Two heads that share a softmax, since 12a: a token's two heads are two slots of one head.

Run: .venv/bin/python -m pytest tests/test_paired_heads.py
"""

import pytest
import torch

from snapshots import MANIFEST, by_id, handles, load_snapshot, micro_sizes, where
from speedrun.scripts.sizes import fitting
from test_masks import documents
from test_streams import Attention, record_model
from test_updates import having

PAIRING = having("pair_heads", "CausalSelfAttention", "pair_heads", "attention_masks", "GPT")
pairing = pytest.mark.parametrize("milestone", PAIRING, ids=by_id)
PAIRED = dict(window_pattern="PPPS", num_layers=4, num_heads=4)


def visible_slots(inputs, window, bos_id=1):
    """Which slots of a row of tokens (T,) see which, (2T, 2T), pair by pair: no later one, none of
    another document, and of earlier ones the last `window`."""
    tokens = inputs.tolist()
    document = [sum(token == bos_id for token in tokens[: t + 1]) for t in range(len(tokens))]
    return torch.tensor([[
        document[q // 2] == document[k // 2] and 0 <= q - k <= window
        for k in range(2 * len(tokens))] for q in range(2 * len(tokens))])


def masks_of(module, inputs, window, args):
    """The module's masks of paired heads for one window, as the arguments of a kernel or dense."""
    return module.attention_masks(inputs, dict(P=window), True, args)["P"]


def by_loops(module, attention, values, visible):
    """What attention puts out, token by token and head by head: a query sees the keys of its own
    head and of its partner. values: value embeddings (B, T, C), in front of the pairs."""
    x, H = attention.x, attention.attn.num_heads
    (B, T, C), D, half = x.shape, x.size(-1) // H, H // 2
    weights, rotary = handles(attention.attn).matrices(attention.attn), attention.attn.rotary
    q, k, v = ((x @ weight.T).view(B, T, H, D) for weight in weights[:3])
    q, k = handles(attention.attn).comparable(module, q, k, attention.given)
    v = v + values.view(B, T, H, D)
    y = torch.zeros(B, T, H, D, dtype=torch.float64)

    def turned(t, h, vector):
        slot = 2 * t + h // half
        swapped = torch.cat((vector[D // 2 :], vector[: D // 2]))
        return vector * rotary.cos[slot, 0] + swapped * rotary.sin[slot, 0]

    for b in range(B):
        for t in range(T):
            for h in range(H):
                query, keys, scores = turned(t, h, q[b, t, h]), [], []
                for t2 in range(T):
                    for h2 in (h % half, h % half + half):
                        if visible[2 * t + h // half, 2 * t2 + h2 // half]:
                            keys.append(v[b, t2, h2])
                            scores.append(rotary.scale * (query @ turned(t2, h2, k[b, t2, h2])))
                y[b, t, h] = torch.stack(scores).softmax(0) @ torch.stack(keys)
    return 0.5 * y.view(B, T, C) @ weights[3].T  # gates are half open


@pairing
@torch.no_grad()
def test_both_formulas(milestone, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "norm", lambda x: x / x.square().mean(-1, keepdim=True).sqrt())
    attention = Attention(module, **PAIRED)
    attention.attn.rotary.scale = 1.0
    values = torch.randn_like(attention.x)
    inputs = documents(16, 0, 3, 4, 11)
    for window in (0, 1, 5, 100):
        visible = visible_slots(inputs[0], window)
        attention.mask = visible
        found = attention(1.0, 1.0, values)
        torch.testing.assert_close(
            found, by_loops(module, attention, values, visible), rtol=0, atol=1e-12)


@pairing
@torch.no_grad()
def test_one_token(milestone):
    module = load_snapshot(milestone)
    attention = Attention(module, window_pattern="PPPS", num_layers=4, num_heads=4, model_dim=32)
    C = 32
    attention.x = attention.x[:, :1]
    attention.mask = masks_of(module, torch.ones(2, 1, dtype=torch.int64), 8, micro_sizes(
        module, bos_id=1, attention_kernel="dense"))
    weights = handles(attention.attn).matrices(attention.attn)
    weights[3].copy_(torch.eye(C))
    v = (attention.x @ weights[2].T).view(2, 4, 8)
    found = 2 * attention(1.0, 1.0).view(2, 4, 8)
    torch.testing.assert_close(found[:, :2], v[:, :2])  # the first half see themselves only
    for head in (2, 3):  # the others see both
        mixed, one, other = found[:, head], v[:, head], v[:, head - 2]
        share = ((mixed - one) * (other - one)).sum(-1) / (other - one).square().sum(-1)
        assert (share > 0.001).all() and (share < 0.999).all()
        torch.testing.assert_close(mixed, one + share[:, None] * (other - one))


@where("pair_heads")
def test_which_heads_are_partners(milestone):
    module = load_snapshot(milestone)
    numbers = torch.arange(2 * 5 * 6).view(2, 5, 6, 1).expand(2, 5, 6, 3)  # of (b, t, h)
    found = module.pair_heads(numbers)
    assert found.shape == (2, 10, 3, 3)
    for b in range(2):
        for t in range(5):
            assert found[b, 2 * t : 2 * t + 2, :, 0].tolist() == [
                [30 * b + 6 * t + h for h in heads] for heads in ((0, 1, 2), (3, 4, 5))]


# ---- masks ----


@pytest.mark.parametrize(
    "milestone", having("slots", "attention_masks"), ids=by_id)
def test_slots_see_their_document_and_a_window_of_slots(milestone):
    module = load_snapshot(milestone)
    args = micro_sizes(module, bos_id=1, attention_kernel="dense")
    torch.manual_seed(0)
    inputs = torch.randint(5, (3, 20))  # of which 1 begins a document
    inputs[0], inputs[1, 0], inputs[2, :3] = 0, 1, 1
    for window in (0, 1, 2, 7, 100):
        found = masks_of(module, inputs, window, args)
        assert found.shape == (3, 1, 40, 40)
        for row, mask in zip(inputs, found[:, 0], strict=True):
            assert mask.equal(visible_slots(row, window))
    # A window of 128 slots is one of 64 tokens: as many numbers as in layers without pairs.
    seen = masks_of(module, torch.zeros(1, 100, dtype=torch.int64), 128, args)[0, 0].sum(1)
    assert seen.tolist() == [min(slot, 128) + 1 for slot in range(200)]
    masks = module.attention_masks(inputs, dict(L=7, S=7, P=7), True, args)
    assert masks["P"].equal(masks_of(module, inputs, 7, args)) and masks["S"].equal(masks["L"])
    assert masks["S"].shape == (3, 1, 20, 20)


@pytest.mark.parametrize(
    "milestone", having("slots", "attention_masks"), ids=by_id)
def test_documents_are_twice_as_long_for_the_kernel(milestone):
    module = load_snapshot(milestone)
    inputs = torch.zeros(2, 600, dtype=torch.int64)
    inputs[0, [0, 7, 300]] = inputs[1, 590] = 1
    for training, longest, first in ((True, 40, False), (False, 1200, False), (True, None, True)):
        args = micro_sizes(module, bos_id=1, attention_kernel="FA2", max_document_len=20)
        if first:  # rows of the first stage, where documents may be shorter
            vars(args).update(fitting(dict(first_document_len=15, train_seq_len=600), vars(args)))
            longest = 2 * handles(module).document_len(args, 600)
        starts, found, window = module.attention_masks(inputs, dict(P=8), training, args)["P"]
        assert (found, window) == (longest, 8) and starts.dtype == torch.int32
        assert starts.tolist() == [0, 14, 600, 1200, 2380] + [2400] * (len(starts) - 5)


# ---- the model ----


@pairing
def test_each_slot_has_a_position(milestone):
    module = load_snapshot(milestone)
    args = micro_sizes(module, train_seq_len=40, val_seq_len=16)
    rotary = module.GPT(args).rotary
    assert len(rotary.cos) == 2 * 3 * 40
    record = module.Hyperparameters()
    assert max(3 * record.train_seq_len, record.val_seq_len) == 262_144  # so 524,288 rows
    expected = torch.outer(torch.arange(240.0), (1 / 1024) ** torch.linspace(0, 1, len(
        rotary.frequencies) // 4))
    rotary.set_window(args.window_start, args)
    rotated = slice(0, expected.size(1))
    torch.testing.assert_close(rotary.cos[:, 0, rotated], expected.cos(), rtol=0, atol=1e-4)


@pairing
@torch.no_grad()
def test_which_layers_have_pairs(milestone, monkeypatch):
    module, seen = load_snapshot(milestone), []
    model = record_model(module, random=True, num_heads=4, tile_size=4, window_end=19)
    attend, offset = module.F.scaled_dot_product_attention, module.offset_keys

    def noted(q, k, v, attn_mask, scale):
        seen.append((q.size(1), q.size(2), attn_mask[0, 0, -1].sum().item()))
        return attend(q, k, v, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(module, "offset_keys", lambda k: seen.append("offset") or offset(k))
    model(torch.full((2, 30), 5))
    # The short window is half of 19 in tiles of 4; pairs count as many slots.
    paired, short, long = (2, 60, 8 + 1), (4, 30, 8 + 1), (4, 30, 30)
    assert seen == [paired, short, paired, "offset", long, short, paired, short, short, paired,
                    "offset", long]


@pytest.mark.parametrize("milestone", PAIRING[:1], ids=by_id)
@torch.no_grad()
def test_without_pairs_it_is_the_parent(milestone):
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    model, plain = record_model(module, random=True), record_model(parent, random=True)
    tokens = torch.randint(64, (2, 30))
    assert all(a.equal(b) for a, b in zip(
        model.state_dict().values(), plain.state_dict().values(), strict=True))
    before = plain(tokens)
    assert not torch.allclose(model(tokens), before, atol=1e-3)
    for block in model.blocks:
        if block.attn is not None:
            block.attn.has_paired_heads = False
        block.window_kind = block.window_kind.replace("P", "S")
    assert model(tokens).equal(before)


@pairing
def test_an_odd_number_of_heads_is_refused(milestone):
    module = load_snapshot(milestone)
    with pytest.raises(AssertionError, match="pair"):
        module.GPT(micro_sizes(module, window_pattern="PPPP", num_layers=4, num_heads=1))


@pytest.mark.parametrize("milestone", having("pairs = weights", "CausalSelfAttention"), ids=by_id)
def test_muons_pairs_need_an_even_number_too(milestone):
    module = load_snapshot(milestone)
    with pytest.raises(AssertionError, match="pair"):
        module.GPT(micro_sizes(module, window_pattern="SSSS", num_layers=4, num_heads=1))
