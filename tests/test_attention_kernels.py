"""From 06 on attention has several kernels: which one a machine takes, what FlashAttention is told,
and that all agree.

Run: .venv/bin/python -m pytest tests/test_attention_kernels.py
"""

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion

import shards as shard_files
from snapshots import (
    known_values,
    load_snapshot,
    micro_sizes,
    set_window,
    token_batches,
    where,
)
from test_masks import documents, mask_of

BOS = 1
LONGEST = 20  # tokens of a document in training
# torch warns that FlexAttention is slow without a compiler, which is all right here
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def by_the_rule(q, k, v, starts, starts_k, longest, longest_k, *, scale, window_size):
    """varlen_attn on a CPU, document by document: a token sees its own and those before it, as far
    back as the window reaches. Refuses what the kernel would read wrongly."""
    left, right = window_size
    assert starts is starts_k and starts.dtype == torch.int32 and longest == longest_k
    assert type(left) is int and right == 0
    ends = starts.tolist()
    assert ends[0] == 0 and ends == sorted(ends) and ends[-1] == len(q), "no cumulative lengths"
    outputs = []
    for begin, end in itertools.pairwise(ends):
        assert end - begin <= longest, "a document is longer than said"
        t = torch.arange(end - begin)
        seen = (t[:, None] >= t) & (t[:, None] - t <= left)
        q1, k1, v1 = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(q1, k1, v1, attn_mask=seen, scale=scale))
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.fixture
def module(milestone, monkeypatch):
    """The milestone's module, with a varlen_attn for CPUs."""
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "varlen_attn", by_the_rule, raising=False)
    return module


def packs(*rows):
    """Inputs (B, T) of random tokens from 2 on, with BOS where documents of these lengths begin."""
    inputs = torch.randint(2, 64, (len(rows), sum(rows[0])))
    for row, lengths in zip(inputs, rows, strict=True):
        row[list(itertools.accumulate(lengths[:-1], initial=0))] = BOS
    return inputs


# ---- where documents begin ----


@where("document_starts", known="document_starts")
def test_how_many_numbers_tell_where_documents_begin(milestone, module):
    args = SimpleNamespace(bos_id=BOS)
    for T, size in known_values(milestone.id)["document_starts"]:
        starts = module.document_starts(torch.zeros(1, T, dtype=torch.int64), args)
        assert starts.shape == (size,) and starts.dtype == torch.int32
        assert starts.tolist() == [0] + [T] * (size - 1)


@where("document_starts", known="document_starts")
def test_document_starts_follow_the_definition(milestone, module):
    torch.manual_seed(0)
    for B, T, share in [(1, 40, 0.2), (2, 33, 0.1), (3, 20, 0), (2, 60, 1), (1, 127, 1)]:
        inputs = torch.where(torch.rand(B, T) < share, BOS, 5)
        before = inputs.clone()
        found = module.document_starts(inputs, SimpleNamespace(bos_id=BOS)).tolist()
        starts = [b * T + t for b in range(B) for t in range(T) if t == 0 or inputs[b, t] == BOS]
        assert found == starts + [B * T] * (128 - len(starts)) and inputs.equal(before)


@where("document_starts", known="packed_starts")
def test_where_the_documents_of_known_packs_begin(milestone, module):
    known = known_values(milestone.id)
    tokens = np.full(known["packed"]["tokens"], 5)
    tokens[known["packed"]["documents"]] = BOS
    args = SimpleNamespace(bos_id=BOS, max_document_len=known["packed"]["longest"])
    T = known["packed"]["row"]
    rows = [torch.from_numpy(row)[None, :-1] for row in module.packed_rows(tokens, T, args)]
    assert [[start for start in module.document_starts(row, args).tolist() if start < T]
            for row in rows] == known["packed_starts"]


@where("document_starts", "token_batches", known="document_starts")
@pytest.mark.parametrize("packed", [True, False])
def test_too_many_documents_are_refused(milestone, module, packed, tmp_path):
    def first(documents):  # in each row of 200 tokens and a target
        rows = np.full((2, 201), 5)
        rows[:, :documents] = BOS
        shard_files.write(tmp_path / "a.bin", rows.flatten())
        args = SimpleNamespace(bos_id=BOS, vocab_size=64, micro_batch_size=1, train_seq_len=200,
                               max_document_len=200)
        batches = token_batches(module, f"{tmp_path}/a.bin", 200, args, aligned=packed)
        return next(batches)[0]

    assert (first(127) == BOS).sum() == 127
    with pytest.raises(AssertionError, match="a.bin has too many documents in 1 x 200 tokens"):
        first(128)


# ---- what attention is ----


@where("attention_mask", "attention_masks", "CausalSelfAttention", known="attention")
def test_known_attention(milestone, module):
    known = known_values(milestone.id)["attention"]
    q, k = (torch.tensor(known[name], dtype=torch.float32)[None, :, None] for name in "qk")
    v = torch.tensor(known["v"], dtype=torch.float32)[None, :, None, None].expand(1, -1, 1, 2)
    inputs = documents(6, *known["starts"])
    for window, scale, expected in known["cases"]:
        if False:
            args = [micro_sizes(module, bos_id=BOS, attention_kernel=kernel, compile=True)
                    for kernel in ("dense",)]
            found = []
        else:
            mask = mask_of(milestone, inputs, window, flex=False)
            heads = (x.transpose(1, 2) for x in (q, k, v))
            found = [F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)]
        for y in found:
            assert y.flatten().tolist() == pytest.approx(np.repeat(expected, 2), abs=1.5e-6)


def models(module, *kernels):
    """Models with the same random weights, one for each kernel."""
    made = [module.GPT(micro_sizes(
        module, bos_id=BOS, attention_kernel=kernel, compile=kernel == "flex", tile_size=8,
        seq_len=48, num_layers=4, max_document_len=LONGEST)) for kernel in kernels]
    torch.manual_seed(0)
    for param in made[0].parameters():
        torch.nn.init.normal_(param, std=0.2)
    for model in made[1:]:
        model.load_state_dict(made[0].state_dict())
    return made


@where("attention", "GPT", known="document_starts")
@torch.no_grad()
def test_flash_attention_has_the_loss_of_a_dense_mask(milestone, module):
    dense, flash = models(module, "dense", "FA2")
    torch.manual_seed(1)
    # documents of one token, of the longest of training, and rows that begin within a document
    rows = packs([20, 1, 1, 7, 19], [3, 20, 20, 5]), packs([1] * 48), torch.randint(2, 64, (2, 48))
    for inputs, different in zip(rows, (3, 1, 4), strict=True):
        targets, losses = torch.randint(2, 64, inputs.shape), set()
        for window in (1, 8, 20, 100):
            set_window(dense, window)
            set_window(flash, window)
            loss = dense(inputs, targets).item()
            assert flash(inputs, targets).item() == pytest.approx(loss, abs=1e-5), window
            losses.add(round(loss, 4))
        assert len(losses) >= different, "the window must matter"


@where("attention", "GPT", known="document_starts")
def test_flash_attention_has_the_gradients_of_a_dense_mask(milestone, module):
    some = models(module, "dense", "FA2")
    torch.manual_seed(1)
    inputs, targets = packs([20, 1, 1, 7, 19], [3, 20, 20, 5]), torch.randint(2, 64, (2, 48))
    for model in some:
        set_window(model, 8)
        model(inputs, targets).backward()
    for (name, mine), other in zip(some[0].named_parameters(), some[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-5, msg=name)


@where("attention_mask", "attention", known="document_starts")
def test_documents_are_longer_in_validation(milestone, module):
    model, inputs = models(module, "FA2")[0], torch.full((1, 48), 7)
    with pytest.raises(AssertionError, match="longer than said"):
        model(inputs, inputs)  # in training only a fault makes such a row
    with torch.no_grad():
        assert model(inputs, inputs).isfinite()


# ---- which kernel ----


@where("best_attention")
@pytest.mark.parametrize("version, capability, package, kernel", [
    ("2.13.0", None, True, "dense"), ("2.11.0", None, True, "dense"),
    ("2.11.0", (9, 0), True, "flex"), ("2.13.0+cu128", (9, 0), True, "FA3"),
    ("2.13.0", (9, 0), False, "FA2"), ("2.12.1", (8, 9), False, "FA2"),
    ("2.13.0", (8, 0), True, "FA2"), ("2.13.0", (10, 0), True, "FA2"),
    ("2.13.0", (7, 5), True, "flex"),
])
def test_the_kernel_of_a_machine(milestone, module, monkeypatch, version, capability, package,
                                 kernel):
    def find_spec(name):
        assert name in ("flash_attn_interface", "triton")
        return object() if package else None

    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(module, "find_spec", find_spec)
    assert module.Hyperparameters().attention_kernel == module.best_attention() == kernel


@where("best_attention", "GPT", known="document_starts")
def test_flash_attention_3_and_4_take_the_place_of_2(milestone, module, monkeypatch):
    activated = []
    monkeypatch.setattr(module, "activate_flash_attention_impl", activated.append)
    for kernel, expected in dict(FA2=[], flex=[], dense=[], FA3=["FA3"], FA4=["FA4"]).items():
        activated.clear()
        module.GPT(micro_sizes(module, attention_kernel=kernel))
        assert activated == expected
    with pytest.raises(AssertionError, match="no such attention"):
        module.GPT(micro_sizes(module, attention_kernel="FA1"))


@where("best_attention", "GPT", known="document_starts")
def test_a_kernel_that_is_not_installed_is_named(milestone, module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"):
        module.GPT(micro_sizes(module, attention_kernel="FA3"))
