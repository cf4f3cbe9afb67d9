"""The longest prefix of the next token as a further target, since 14h: the table, the file, the
loss, the run.

Run: .venv/bin/python -m pytest tests/test_prefixes.py
"""

import os
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prefixes
from snapshots import by_id, known_values, load_snapshot, micro_args, train, where
from test_streams import record_model
from test_updates import having

LOADING = having("load_prefixes", "main", "load_prefixes", "train", "warm_up", "GPT")
loading = pytest.mark.parametrize("milestone", LOADING, ids=by_id)


# ---- the table ----


def test_the_longest_token_that_begins_a_token():
    def prefixes_of(*tokens):
        table = prefixes.prefix_table([token.encode() for token in tokens])
        return {token: "" if i < 0 else tokens[i] for token, i in zip(tokens, table, strict=True)}

    known = dict(a="", ab="a", abc="ab", abd="ab", b="")
    for tokens in (known, [*known][::-1], ("abd", "b", "a", "abc", "ab")):
        assert prefixes_of(*tokens) == known
    # A sibling between them in order ends nothing, and a prefix need not be one byte shorter.
    assert prefixes_of("x", "xaaaa", "xab", "xabzz", "xb") == dict(
        x="", xaaaa="x", xab="x", xabzz="xab", xb="x")


@where("load_prefixes")
def test_the_table_of_gpt2(milestone, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tiktoken")
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("GPT-2's vocabulary is not here; set TIKTOKEN_CACHE_DIR")
    module, known = load_snapshot(milestone), known_values(milestone.id)["prefixes"]
    file = tmp_path / "table.bin"
    monkeypatch.setattr(sys, "argv", ["prefixes.py", "--out", str(file)])
    prefixes.main()
    assert f"{file}: 50,000 of 50,257 tokens have a prefix" in capsys.readouterr().out
    table = module.load_prefixes(module.Hyperparameters(prefix_file=str(file)))
    assert len(table) == 50_304 and (table[50_256:] == -1).all()
    assert (table >= 0).sum() == known["entries"] and table[table >= 0].sum() == known["sum"]
    assert (table[:50_257] < 0).sum() == known["without"]
    for token, prefix in known["examples"]:
        assert table[token] == prefix


def test_the_table_of_a_small_vocabulary(tmp_path, monkeypatch, capsys):
    ranks = {bytes([i]): i for i in range(256)} | {b"\0a": 256, b"\0ab": 257}
    small = pytest.importorskip("tiktoken").Encoding(
        "small", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": small}.get)
    monkeypatch.setattr(sys, "argv", ["prefixes.py", "--out", str(tmp_path / "table")])
    prefixes.fineweb.tokenizer.cache_clear()
    prefixes.main()
    prefixes.fineweb.tokenizer.cache_clear()
    assert np.fromfile(tmp_path / "table", "<i4").tolist() == [-1] * 256 + [0, 256, -1]
    assert capsys.readouterr().out == f"{tmp_path}/table: 2 of 259 tokens have a prefix\n"


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    def unreachable():
        raise OSError("no vocabulary")

    (tmp_path / "file").touch()
    for table, out, message in ((list, tmp_path, tmp_path), (unreachable, "x", "no vocabulary"),
                                (list, tmp_path / "file" / "x", tmp_path / "file")):
        monkeypatch.setattr(prefixes, "gpt2_prefixes", table)
        monkeypatch.setattr(sys, "argv", ["prefixes.py", "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            prefixes.main()
        line = ended.value.code
        assert line.startswith("error: ") and str(message) in line and "\n" not in line
        assert not capsys.readouterr().out


def test_a_table_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefixes, "gpt2_prefixes", lambda: [-1, 0])
    monkeypatch.setattr(prefixes.shards.os, "replace", full)
    monkeypatch.setattr(sys, "argv", ["prefixes.py", "--out", str(tmp_path / "table.bin")])
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}: No space left on device$"):
        prefixes.main()
    assert list(tmp_path.iterdir()) == []


# ---- the file ----


@where("load_prefixes")
def test_a_file_of_prefixes(milestone, tmp_path, monkeypatch):
    module, file = load_snapshot(milestone), tmp_path / "a new folder" / "table.bin"
    monkeypatch.setattr(prefixes, "gpt2_prefixes", lambda: [-1, 0, 1])
    monkeypatch.setattr(sys, "argv", ["prefixes.py", "--out", str(file)])
    prefixes.main()
    assert np.fromfile(file, "<i4").tolist() == [-1, 0, 1]
    for name, expected in ((file, [-1, 0, 1, -1, -1]), ("none", 5 * [-1])):
        found = module.load_prefixes(module.Hyperparameters(prefix_file=str(name), vocab_size=5))
        assert found.tolist() == expected and found.dtype == torch.int64
    with pytest.raises(FileNotFoundError, match="nowhere"):
        module.load_prefixes(module.Hyperparameters(prefix_file="nowhere"))


# ---- the loss ----


@where("GPT", known="prefix_toy")
def test_known_loss_and_gradient(milestone):
    module, toy = load_snapshot(milestone), known_values(milestone.id)["prefix_toy"]
    model = record_model(module)
    logits = torch.tensor([toy["logits"]]).float().requires_grad_()
    loss = module.CappedLoss.apply(
        logits, torch.eye(4), torch.tensor([toy["targets"]]), torch.tensor(toy["weights"]),
        partial(module.loss_and_grads, cap=model.cap), None)
    loss.backward()
    assert loss.item() == pytest.approx(toy["loss"], abs=2e-6)
    torch.testing.assert_close(logits.grad, torch.tensor([toy["gradient"]]), rtol=0, atol=2e-6)


@where("GPT", known="prefix_toy")
def test_only_the_next_token_has_a_prefix_and_not_every_one(milestone):
    module = load_snapshot(milestone)
    model = record_model(module, random=True)
    tokens = torch.randint(60, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    table = torch.randint(-1, 60, (64,))
    table[targets[0, :9]], table[targets[1, -1]] = -1, 7  # also at the end of a row
    found, further = table[targets], torch.full_like(targets, -100)
    assert 6 < (found < 0).sum() < 26
    further[:, :-1] = targets[:, 1:]
    for weights in ([1.0, 0.5, 0.25], [1.0, 0.25], [1.0, 0.0]):
        columns = [targets, further][: len(weights) - 1] + [found.masked_fill(found < 0, -100)]
        logits = model.eval()(inputs).flatten(0, 1)
        expected = sum(weight * F.cross_entropy(logits, ids.flatten(), reduction="sum")
                       for weight, ids in zip(weights, columns, strict=True)) / 32
        loss = model.train()(inputs, targets, False, torch.tensor(weights), found)
        torch.testing.assert_close(loss, expected)
    plain = model(inputs, targets, False, torch.tensor([1.0, 0.5]))
    alone = model(inputs, targets, False, torch.tensor([1.0, 0.5, 0.25]), found.fill_(-1))
    torch.testing.assert_close(plain, alone)


# ---- the run ----


@loading
def test_a_run_trains_on_prefixes_and_validates_without(milestone, shards, tmp_path, monkeypatch):
    module, given = load_snapshot(milestone), []
    table = np.random.default_rng(0).integers(-1, 64, 60)
    table.astype("<i4").tofile(tmp_path / "table.bin")

    class Noted(module.GPT):
        def forward(self, inputs, targets, tied, weights=None, prefixes=None):
            given.append((self.training, weights, prefixes))
            if prefixes is not None:
                expected = np.append(table, 4 * [-1])[targets.numpy()]
                assert prefixes.tolist() == expected.tolist()
            return super().forward(inputs, targets, tied, weights, prefixes)

    monkeypatch.setattr(module, "GPT", Noted)
    args = micro_args(
        milestone, shards, tmp_path / "log", total_batch_size=64, val_tokens=32, train_steps=7,
        scheduled_steps=6, val_loss_every=3, kernel_warmup_steps=3,
        prefix_file=str(tmp_path / "table.bin"))
    train(module, args)
    trained = [(len(weights), weights[-1].item()) for training, weights, _ in given if training]
    assert trained == [(3, 0.25), (2, 0.0), (2, 0.0)] + 2 * [(4, 0.25)] + [
        (3, 0.25), (3, 0.125)] + 3 * [(2, 0.0)]
    assert all((prefixes is not None) == training for training, _, prefixes in given)
    assert len(given) - len(trained) == 4  # before steps 0, 3 and 6, and at the end
