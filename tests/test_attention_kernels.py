"""From 06 on attention has several kernels: which one a machine takes, what FlashAttention gets,
and that all agree.

Run: .venv/bin/python -m pytest tests/test_attention_kernels.py
"""

import itertools
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import shards as shard_files
from snapshots import (
    handles,
    known_values,
    load_snapshot,
    loader_args,
    micro_sizes,
    token_batches,
    where,
)
from speedrun.scripts.sizes import fitting
from test_masks import attend, documents, mask_of, masks_of
from test_parts import is_scalar

BOS = 1
LONGEST = 20  # tokens of a document in training
# torch warns that FlexAttention is slow without a compiler, which is all right here
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def by_the_rule(q, k, v, starts, starts_k, longest, longest_k, *, scale, window_size):
    """varlen_attn on a CPU, document by document: a token sees itself and the tokens before it, as
    far back as the window reaches. Refuses what the kernel would read wrongly."""
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
    monkeypatch.setattr(module, "varlen_attn", by_the_rule)
    return module


def packs(*rows):
    """Inputs (B, T) of random tokens from 2 on, with BOS where documents of these lengths begin."""
    inputs = torch.randint(2, 64, (len(rows), sum(rows[0])))
    for row, lengths in zip(inputs, rows, strict=True):
        row[list(itertools.accumulate(lengths[:-1], initial=0))] = BOS
    return inputs


# ---- where documents begin ----


@where("document_starts")
def test_how_many_numbers_tell_where_documents_begin(milestone, module):
    args = SimpleNamespace(bos_id=BOS)
    for T, size in known_values(milestone.id)["document_starts"]:
        starts = module.document_starts(torch.zeros(1, T, dtype=torch.int64), args)
        assert starts.shape == (size,) and starts.dtype == torch.int32
        assert starts.tolist() == [0] + [T] * (size - 1)


@where("document_starts")
def test_document_starts_follow_the_definition(milestone, module):
    torch.manual_seed(0)
    for B, T, share in [(1, 40, 0.2), (2, 33, 0.1), (3, 20, 0), (2, 60, 1), (1, 127, 1)]:
        inputs = torch.where(torch.rand(B, T) < share, BOS, 5)
        before = inputs.clone()
        found = module.document_starts(inputs, SimpleNamespace(bos_id=BOS)).tolist()
        starts = [b * T + t for b in range(B) for t in range(T) if t == 0 or inputs[b, t] == BOS]
        assert found == (starts + 128 * [B * T])[: len(found)] and inputs.equal(before)


@where("document_starts", known="packed_starts")
def test_where_the_documents_of_known_packs_begin(milestone, module):
    known = known_values(milestone.id)
    tokens = np.full(known["packed"]["tokens"], 5)
    tokens[known["packed"]["documents"]] = BOS
    T, longest = known["packed"]["row"], known["packed"]["longest"]
    args = loader_args(module, bos_id=BOS, max_document_len=longest, first_document_len=longest,
                       train_seq_len=T)
    rows = [torch.from_numpy(row)[None, :-1]
            for row in handles(module).pack(module, tokens, itertools.repeat(T), 2, args)]
    assert [[start for start in module.document_starts(row, args).tolist() if start < T]
            for row in rows] == known["packed_starts"]


@where("document_starts", "token_batches", known="document_starts")
@pytest.mark.parametrize("packed", [True, False])
def test_too_many_documents_are_refused(milestone, module, packed, tmp_path):
    def first(documents):  # in each row of 200 tokens and a target
        length = 201 // documents  # the last one is longer
        assert length > 1, "a document that is only a target would not count"
        rows = np.full((2, 201), 5)
        rows[:, : documents * length : length] = BOS
        shard_files.write(tmp_path / "a.bin", rows.flatten())
        args = loader_args(module, bos_id=BOS, vocab_size=64, micro_batch_size=1,
                           train_seq_len=200, first_document_len=200, max_document_len=200)
        batches = token_batches(module, f"{tmp_path}/a.bin", 200, args, aligned=packed)
        return next(batches)[0]

    row = torch.zeros(1, 200, dtype=torch.int64)
    most = len(module.document_starts(row, SimpleNamespace(bos_id=BOS))) - 1  # then an end
    assert (first(most) == BOS).sum() == most > 30
    with pytest.raises(AssertionError, match="1 rows of .*a.bin hold too many documents"):
        first(most + 1)


# ---- what attention is ----


@where("attention_mask", "attention_masks", known="attention")
def test_known_attention(milestone):
    module = load_snapshot(milestone)
    known = known_values(milestone.id)["attention"]
    q, k = (torch.tensor(known[name], dtype=torch.float32)[None, None] for name in "qk")
    v = torch.tensor(known["v"], dtype=torch.float32)[None, None, :, None].expand(1, 1, -1, 2)
    inputs = documents(6, *known["starts"])
    for window, scale, expected in known["cases"]:
        found = [attend(milestone, mask_of(milestone, inputs, window, flex), flex, q, k, v, scale)
                 for flex in masks_of(module)]
        if "FA2" in handles(module).PATHS:
            args = micro_sizes(module, bos_id=BOS, attention_kernel="FA2", max_document_len=4)
            masks = module.attention_masks(inputs, dict(L=window), True, args)
            starts, longest, reach = masks["L"]
            rows = (x[0].transpose(0, 1) for x in (q, k, v))  # (T, H, D)
            found.append(by_the_rule(*rows, starts, starts, longest, longest, scale=scale,
                                     window_size=(reach, 0)))
        for y in found:
            assert y.flatten().tolist() == pytest.approx(np.repeat(expected, 2), abs=1.5e-6)


def models(module, *kernels):
    """Models with the same random weights, one for each kernel."""
    longest = fitting(dict(first_document_len=LONGEST, max_document_len=LONGEST),
                      vars(module.Hyperparameters))
    made = [module.GPT(micro_sizes(
        module, bos_id=BOS, attention_kernel=kernel, tile_size=8, seq_len=48, num_layers=4,
        **longest)) for kernel in kernels]
    torch.manual_seed(0)
    for name, param in made[0].named_parameters():
        if not is_scalar(name, param):  # small ones would silence layers
            torch.nn.init.normal_(param, std=0.2)
    for model in made[1:]:
        model.load_state_dict(made[0].state_dict())
    return made


def with_window(model, window):
    """The model, in another window."""
    handles(model).set_window(model, window)
    return model


changed = where("attention_masks", "CausalSelfAttention", "GPT", known="document_starts")


@changed
@torch.no_grad()
def test_flash_attention_has_the_loss_of_a_dense_mask(milestone, module):
    dense, flash = models(module, "dense", "FA2")
    torch.manual_seed(1)
    # documents of one token, of the longest of training, and rows that begin within a document
    rows = packs([20, 1, 1, 7, 19], [3, 20, 20, 5]), packs([1] * 28 + [20]), torch.randint(
        2, 64, (2, 48))
    for inputs, different, training in zip(rows, (3, 1, 4), (True, True, False), strict=True):
        targets, losses = torch.randint(2, 64, inputs.shape), set()
        for window in (1, 8, 20, 100):
            dense_loss, flash_loss = (
                with_window(model.train(training), window)(inputs, targets).item()
                for model in (dense, flash))
            assert flash_loss == pytest.approx(dense_loss, abs=1e-5), window
            losses.add(round(dense_loss, 5))
        assert len(losses) >= different, "the window must matter"


@changed
def test_flash_attention_has_the_gradients_of_a_dense_mask(milestone, module):
    some = models(module, "dense", "FA2")
    torch.manual_seed(1)
    inputs, targets = packs([20, 1, 1, 7, 19], [3, 20, 20, 5]), torch.randint(2, 64, (2, 48))
    for model in some:
        with_window(model, 8)(inputs, targets).backward()
    for (name, mine), other in zip(some[0].named_parameters(), some[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-5, msg=name)


@where("attention_masks", "GPT", known="document_starts")
@torch.no_grad()
def test_documents_are_longer_in_validation(milestone, module):
    model, inputs = models(module, "FA2")[0], torch.full((1, 48), 7)
    with pytest.raises(AssertionError, match="longer than said"):
        model(inputs, inputs)  # in training only a fault makes such a row
    assert model.eval()(inputs, inputs).isfinite()


# ---- which kernel ----


@where("best_attention")
@pytest.mark.parametrize("capability, package, kernel", [
    (None, "installed", "dense"), ((7, 5), "installed", "dense"), ((8, 0), "installed", "FA2"),
    ((8, 9), "missing", "FA2"), ((10, 0), "installed", "FA2"), ((9, 0), "installed", "FA3"),
    ((9, 0), "missing", "FA2"), ((9, 0), "broken", "FA2"),
])
def test_the_kernel_of_a_machine(milestone, module, monkeypatch, capability, package, kernel):
    def import_module(name):
        assert name == "flash_attn_interface"
        if package == "missing":
            raise ModuleNotFoundError(name)
        if package == "broken":  # built for another PyTorch
            raise OSError("undefined symbol")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(module, "import_module", import_module)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert module.Hyperparameters().attention_kernel == kernel
    slower = capability == (9, 0) and kernel == "FA2"  # on Hopper only
    assert [str(w.message).split(" (")[0] for w in warned] == slower * [
        "FA2 is used: FA3 does not import"]


@where("best_attention", "GPT", known="document_starts")
def test_flash_attention_3_takes_the_place_of_2(milestone, module, monkeypatch):
    activated = []
    monkeypatch.setattr(module, "activate_flash_attention_impl", activated.append)
    for kernel, expected in dict(FA2=[], dense=[], FA3=["FA3"]).items():
        activated.clear()
        module.GPT(micro_sizes(module, attention_kernel=kernel))
        assert activated == expected
    with pytest.raises(AssertionError, match="unknown attention kernel"):
        module.GPT(micro_sizes(module, attention_kernel="FA1"))


@where("best_attention", "GPT", known="document_starts")
def test_a_kernel_that_is_not_installed_is_named(milestone, module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"):
        module.GPT(micro_sizes(module, attention_kernel="FA3"))
