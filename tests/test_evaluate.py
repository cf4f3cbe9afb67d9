"""Evaluation: scores of endings, tasks, results that outlive an interruption, losses, refusals.

Run: .venv/bin/python -m pytest tests/test_evaluate.py
"""

import hashlib
import json
import math
import sys
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import evaluate
import hellaswag
import shards as shard_files
from speedrun.base.errors import UserError
from speedrun.evaluate import (
    CHAT,
    Accuracy,
    Item,
    answer_task,
    docstring_ids,
    docstring_items,
    file_hash,
    hellaswag_ids,
    hellaswag_items,
    log_probabilities,
    picks_right,
    val_loss,
)
from speedrun.history.handles import Handles, handles_of
from speedrun.history.manifest import load_manifest
from speedrun.sample import Trained, vocabulary_of
from test_sample import fake, untrained  # noqa: F401  (fixtures)

BYTES = vocabulary_of(257, None)


class Successor(torch.nn.Module):
    """Gives the byte after the last one 1 nat more than each other id; counts what it reads."""

    def __init__(self):
        super().__init__()
        self.read = []

    def forward(self, inputs):
        self.read.append(tuple(inputs.shape))
        return torch.nn.functional.one_hot((inputs + 1) % 257, 257).float()


@pytest.fixture
def trained():
    """Makes a model of successors with this context."""
    def make(context=64, handles=Handles, **args):
        args = SimpleNamespace(**dict(vocab_size=257, seq_len=context, val_tokens=None) | args)
        return Trained(Successor(), torch.device("cpu"), args, context, step=1, handles=handles)
    return make


SURE = 1 - math.log(256 + math.e)  # log-probability of a successor
OTHER = -math.log(256 + math.e)
ENDINGS = ("bcd", "xyz", "x", "bxx")
LINE = dict(activity_label="Cooking", ctx_a="A  cook [header] stirs [title] Stir", ctx_b="he is",
            endings=[*"abc", "d [step] e"], label=2, ind=4)


def write_items(file, items):
    file.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return file


# ---- scores ----


def test_an_ending_is_scored_after_its_context_whatever_its_batch(trained):
    pairs = [([256, *b"a"], [*b"bcd"]), ([256], [*b"xy"]), ([*b"longer"], [*b"bx"])]
    expected = [3 * SURE, OTHER + SURE, OTHER * 2]
    assert log_probabilities(trained(), pairs) == pytest.approx(expected, abs=1e-5)
    assert [log_probabilities(trained(), [pair])[0] for pair in pairs] == pytest.approx(
        expected, abs=1e-5)


def test_a_context_is_cut_from_the_left(trained):
    model = trained(context=4)
    assert log_probabilities(model, [([*b"abcdefa"], [*b"bcd"])]) == pytest.approx([3 * SURE])
    assert log_probabilities(model, [([9], [*b"abcd"])]) == pytest.approx([OTHER + 3 * SURE])
    assert model.model.read == [(1, 4)] * 2  # f a b c, and 9 a b c


def test_an_ending_longer_than_the_context_is_scored_whole(trained):
    model = trained(context=4)
    pairs = [([9], [*b"abcdefgh"]), ([*b"a"], [*b"b"]), ([], [*b"abcabcx"])]
    expected = [OTHER + 7 * SURE, SURE, 4 * SURE + 2 * OTHER]
    assert log_probabilities(model, pairs) == pytest.approx(expected, abs=1e-5)
    # Parts of two tokens, 4 + 1 + 4, so that each has some before it; no batch is larger.
    assert [rows for rows, _ in model.model.read] == [3, 3, 3] and max(model.model.read) <= (3, 4)


@pytest.mark.parametrize("sums, by_sum, per_byte", [
    ([-4.0, -3.0, -9.0, -5.0], 1, 0), ([-2.0, -3.0, -9.0, -5.0], 0, 0),
    ([-9.0, -8.0, -7.0, -2.5], 3, 3), ([-9.0, -9.0, -2.5, -9.0], 2, 2),
])
def test_right_by_the_sum_or_per_byte(sums, by_sum, per_byte):
    for label in range(4):  # per byte of the first row: -1.33, -1.5, -9, -1.67
        item = Item("", ("abc", "ab", "x", "xyz"), label)
        assert picks_right(item, sums) == (label == by_sum)
        assert picks_right(item, sums, per_byte=True) == (label == per_byte)


def test_bytes_not_characters_count():
    item = Item("", (" é€", " ab", " zz", " yy"), 0)  # 5 bytes, 2 of each other
    assert picks_right(item, [-4.5, -2.0, -9.0, -9.0], per_byte=True)
    assert not picks_right(item, [-5.5, -2.0, -9.0, -9.0], per_byte=True)


def test_standard_errors():
    found = Accuracy(n=101, acc=0.3, acc_norm=0.5)
    assert (found.acc_se, found.acc_norm_se) == pytest.approx((math.sqrt(0.0021), 0.05))
    assert Accuracy(n=1, acc=1.0, acc_norm=0.0).acc_se == 0


# ---- tasks ----


def test_hellaswags_lines(tmp_path, trained):
    lines = [LINE, {**LINE, "label": "0", "ctx_b": ""}]
    first, second = hellaswag_items(write_items(tmp_path / "x.jsonl", lines))
    assert first == Item("Cooking: A cook stirs. Stir He is", (" a", " b", " c", " d e"), 2)
    assert (second.context, second.label) == ("Cooking: A cook stirs. Stir", 0)
    assert hellaswag_ids(first, trained(), BYTES) == [256, *first.context.encode()]
    assert hellaswag_ids(first, trained(), replace(BYTES, bos=None)) == [*first.context.encode()]


def talk(question, answer):
    return {"messages": [dict(role="user", content=question),
                         dict(role="assistant", content=answer)]}


def test_docstrings_of_other_functions_are_the_wrong_endings(tmp_path, trained, monkeypatch):
    pairs = [(f"def f{i}():", f"Do {i % 5}.") for i in range(40)]
    talks = [talk(*pair) for pair in pairs]
    talks[0]["messages"].insert(0, dict(role="system", content="Be brief."))
    file = write_items(tmp_path / "chat.jsonl", talks)
    items = list(docstring_items(file))
    assert items == list(docstring_items(file))  # the same for every model
    for item, (question, answer) in zip(items, pairs, strict=True):
        assert item.context == question and item.endings[item.label] == answer
        assert len(set(item.endings)) == 4
    assert {item.label for item in items} == {0, 1, 2, 3}
    with pytest.raises(UserError, match="only 3 different answers"):
        list(docstring_items(write_items(file, [talk("q", answer) for answer in "abc"])))
    monkeypatch.setattr("speedrun.evaluate.CHAT", tmp_path / "own.jsonl")  # is made if needed
    monkeypatch.setattr("speedrun.run.conversations.make_builtin", lambda: write_items(
        tmp_path / "own.jsonl", talks))
    assert list(docstring_items(tmp_path / "own.jsonl")) == items
    with pytest.raises(UserError, match="chat.jsonl:1: "):
        list(docstring_items(write_items(file, [{}])))
    # a fine-tuned model is asked as in a conversation
    text = b'def f0():\n    """'
    assert docstring_ids(items[0], trained(), BYTES) == [256, *text]
    assert docstring_ids(items[0], trained(), replace(BYTES, bos=None)) == [*text]
    tuned = trained(handles=handles_of(load_manifest().get("e0")), bos_id=256)
    assert docstring_ids(items[0], tuned, BYTES) == [256, 257, *b"def f0():", 258]


def run_task(trained, file, results, batch=2, checkpoint="abc", **more):
    return answer_task(trained, BYTES, "hellaswag", file, results, checkpoint, batch=batch, **more)


@pytest.fixture
def items(tmp_path):
    """Seven items with the same endings; ENDINGS[0] is right in three, ENDINGS[2] in two."""
    lines = [{**LINE, "ctx_b": "x y", "endings": list(ENDINGS), "label": label}
             for label in (0, 0, 1, 2, 0, 3, 2)]
    return write_items(tmp_path / "items.jsonl", lines)


def test_a_task_streams_batches_and_counts(trained, items, tmp_path):
    # " x" has the largest sum, 2 OTHER; " bcd" the largest per byte, before its equal " xyz"
    shown, file = [], tmp_path / "r"
    found = run_task(trained(), items, file, show=lambda n: shown.append(
        (n, file.read_bytes().count(b"\n") - 1)))
    assert (found.n, found.acc, found.acc_norm) == (7, pytest.approx(2 / 7), pytest.approx(3 / 7))
    assert shown == [(2, 2), (4, 4), (6, 6), (7, 7)], "each is on the disk, whatever ends it"
    for batch in (1, 3, 50):
        assert run_task(trained(), items, tmp_path / f"r{batch}", batch=batch) == found
    assert run_task(trained(), items, tmp_path / "r2", limit=3).n == 3


def test_an_interrupted_task_goes_on_where_it_was(trained, items, tmp_path):
    whole = run_task(trained(), items, tmp_path / "whole")
    results, model = tmp_path / "results", trained()

    def interrupt(count):
        if count == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_task(model, items, results, show=interrupt)
    assert len(model.model.read) == 2
    with open(results, "a") as file:
        file.write("[-1.0, -2")  # cut short, as by kill -9
    model = trained()
    assert run_task(model, items, results) == whole
    assert [rows for rows, _ in model.model.read] == [8, 4]  # items 5 and 6, then 7
    assert results.read_bytes() == (tmp_path / "whole").read_bytes()
    head, *lines = results.read_text().splitlines(keepends=True)
    for damaged in ('["a", 1, 2, 3]\n', "[1.0]\n", "x]\n"):
        results.write_text("".join([head, *lines[:3], damaged, *lines[4:]]))
        model = trained()
        assert run_task(model, items, results) == whole
        assert [rows for rows, _ in model.model.read] == [4, 8, 4], "from the damaged line on"
        assert results.read_bytes() == (tmp_path / "whole").read_bytes()
    model = trained()
    assert run_task(model, items, results) == whole and not model.model.read
    # other weights, another context, or other items, start over
    for context, more in ((64, 0), (63, 0), (63, 1)):
        items.write_text(items.read_text() + more * (json.dumps(LINE) + "\n"))
        model.model.read.clear()
        other = replace(model, context=context)
        assert run_task(other, items, results, checkpoint="def").n == 7 + more
        assert len(model.model.read) == 4


# ---- loss ----


def test_loss_in_nats_per_token_and_bits_per_byte(trained, tmp_path):
    document = [*b"abcabcab", 256]  # 8 bytes, 9 tokens; successors: a b, b c
    shard_files.write(tmp_path / "x_val_000000.bin", document * 8)
    shard_files.write(tmp_path / "x_val_000001.bin", [0] * 72)  # the first one is read
    nats = [(SURE if (a + 1) % 257 == b else OTHER) for a, b in zip(
        document * 8, (document * 8)[1:], strict=False)][:64]
    model, shown = trained(context=16), []
    loss, bits = val_loss(model, BYTES, data=tmp_path, tokens=64, batch=3, show=shown.append)
    assert shown == [0, 48, 64]
    assert loss == pytest.approx(-sum(nats) / 64, abs=1e-6)
    size = sum(id != 256 for id in (document * 8)[1:65])
    assert bits == pytest.approx(-sum(nats) / math.log(2) / size, abs=1e-6)
    assert model.model.read == [(3, 16), (1, 16)]
    assert val_loss(trained(context=16), BYTES, data=tmp_path, tokens=71, batch=9)[0] == (
        pytest.approx(loss))  # whole sequences
    staged = trained(context=48, train_seq_len=16, val_seq_len=16)  # training ends with longer rows
    assert val_loss(staged, BYTES, data=tmp_path, tokens=64, batch=3)[0] == pytest.approx(loss)
    assert staged.model.read == [(3, 16), (1, 16)]
    own = trained(context=24)  # the shard's 72 tokens are 3 rows, but the last is only a target
    val_loss(own, BYTES, data=tmp_path, batch=9)
    assert own.model.read == [(2, 24)]
    with pytest.raises(UserError, match="has 72 tokens; --val-tokens may be at most 71$"):
        val_loss(model, BYTES, data=tmp_path, tokens=72, batch=9)
    with pytest.raises(UserError, match="hold no sequence of 99"):
        val_loss(trained(context=99), BYTES, data=tmp_path, batch=1)
    own = trained(context=16, val_tokens=32)
    for tokens, rows in ((None, 2), (48, 3)):  # those that are asked for come first
        own.model.read.clear()
        val_loss(own, BYTES, data=tmp_path, tokens=tokens, batch=9)
        assert own.model.read == [(rows, 16)]
    shard_files.write(tmp_path / "x_val_000000.bin", [257] * 80)
    with pytest.raises(UserError, match="token 257, beyond the model's vocabulary of 257"):
        val_loss(model, BYTES, data=tmp_path, batch=1)
    with pytest.raises(UserError, match="no validation shard in .*; get one: python data/cached"):
        val_loss(model, BYTES, data=tmp_path / "none", batch=1)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_by_default_the_loss_is_of_the_vocabularys_own_shards(name, trained, tmp_path, monkeypatch):
    made = []
    for folder in "bytes", "gpt2":
        known = {"bytes": "BUILTIN", "gpt2": "FINEWEB"}[folder]
        monkeypatch.setattr(f"speedrun.evaluate.{known}", tmp_path / folder)
    monkeypatch.setattr("speedrun.evaluate.make_builtin", lambda: made.append(name))
    with pytest.raises(UserError, match=f"no validation shard in {tmp_path / name};"):
        val_loss(trained(), replace(BYTES, name=name), batch=1)
    assert made == ["bytes"] * (name == "bytes")


# ---- the command ----


def test_a_table_over_checkpoints(untrained, items, capsys, tmp_path):  # noqa: F811
    shard_files.write(tmp_path / "x_val_000000.bin", list(b"some text ") * 60)
    runs = [str(untrained(id, **more)) for id, more in (("02", {}), ("e2a", dict(bos_id=256)))]
    options = ["--task", "loss", "--task", "hellaswag", "--data", str(items),
               "--val-data", str(tmp_path), "--val-tokens", "96"]
    assert evaluate.main([*runs, *options]) == 0
    head, *rows, note = capsys.readouterr().out.rstrip().split("\n")
    assert "bits per byte" in head and "hellaswag acc_norm" in head and len(rows) == 2
    assert "±" in rows[0] and "standard error" in note
    assert evaluate.main([*runs, *options, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["hellaswag"]["n"] == 7 and first["loss"]["val_loss"] != second["loss"]["val_loss"]


def test_each_task_gets_its_file_and_options(untrained, items, monkeypatch, capsys):  # noqa: F811
    def noted(trained, vocabulary, *given, show, **options):
        asked.append((*given, options))
        show(1234)
        return Accuracy(101, 0.3, 0.5) if given else (1.5, 2.5)

    run, asked = untrained("02"), []
    for name in ("answer_task", "val_loss"):
        monkeypatch.setattr(f"speedrun.evaluate.{name}", noted)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tasks = [text for task in ("loss", "docstring", "hellaswag") for text in ("--task", task)]
    options = ["--val-data", str(items.parent), "--val-tokens", "96", "--batch", "3", "--json"]
    assert evaluate.main([str(run), *tasks, *options, "--data", str(items), "--limit", "7"]) == 0
    rest = file_hash(run / "checkpoint.pt"), dict(batch=1, limit=7)  # an item has four endings
    assert asked == [
        (dict(data=items.parent, tokens=96, batch=3),),
        ("docstring", CHAT, run / "evaluation_docstring.jsonl", *rest),
        ("hellaswag", items, run / "evaluation_hellaswag.jsonl", *rest)]
    out, err = capsys.readouterr()
    found = dict(n=101, acc=0.3, acc_se=math.sqrt(0.0021), acc_norm=0.5, acc_norm_se=0.05)
    assert json.loads(out) == [dict(run=str(run), step=7, docstring=found, hellaswag=found,
                                    loss=dict(val_loss=1.5, bits_per_byte=2.5))]
    assert err == "".join(f"\r\x1b[K{run}: {words}" for words in (
        "loss, 1,234 tokens", "docstring, 1,234 items", "hellaswag, 1,234 items")) + "\r\x1b[K"
    asked.clear()
    assert evaluate.main([str(run)]) == 0  # by default
    assert [options for *_, options in asked] == [
        dict(data=None, tokens=None, batch=32), dict(batch=8, limit=None)]


def test_the_table_shows_every_figure(monkeypatch, capsys):
    figures = dict(step=1234, loss=dict(val_loss=1.23456, bits_per_byte=2.34567), docstring=dict(
        n=5678, acc=0.1234, acc_se=0.0123, acc_norm=0.4567, acc_norm_se=0.0345))
    asked = []
    monkeypatch.setattr(evaluate, "evaluate", lambda _, tasks, __: asked.append(tasks) or figures)
    cells = "1,234 1.2346 2.3457 12.3% ± 1.2% 45.7% ± 3.5% 5,678"
    head = "step val loss bits per byte docstring acc docstring acc_norm docstring items"
    note = "acc: by the ending's log-probability; acc_norm: by that per byte; ± standard error"
    assert evaluate.main(["b", "a"]) == 0
    assert " ".join(capsys.readouterr().out.split()) == f"{head} b {cells} a {cells} {note}"
    assert evaluate.main(["a", "--task", "loss", "--task", "loss"]) == 0
    assert " ".join(capsys.readouterr().out.split()) == (
        "step val loss bits per byte a 1,234 1.2346 2.3457")
    assert asked == [["loss", "docstring"]] * 2 + [["loss"]]


@pytest.mark.parametrize("line, fault", [
    (b"{", "not JSON"), (b"\xff", "byte 1 is not UTF-8"), (b"[1]", "not a JSON object"),
    ({**LINE, "endings": [*"abcde"]}, '"endings" is not a list of 4 texts'),
    ({**LINE, "endings": [*"abc", 1]}, '"endings" is not a list of 4 texts'),
    ({**LINE, "ctx_a": None}, 'no text "ctx_a"'), ({"label": 1}, 'no text "activity_label"'),
    ({**LINE, "endings": ["a", "b"]}, '"endings" is not a list of 4 texts'),
    ({**LINE, "endings": ["a", "b", "c", " "]}, '"endings" is not a list of 4 texts'),
    ({**LINE, "label": ""}, "\"label\" is '', not a number from 0 to 3"),
    ({**LINE, "label": 4}, '"label" is 4, not a number'),
])
def test_wrong_lines_are_refused_before_anything_is_scored(trained, tmp_path, line, fault):
    file = tmp_path / "x.jsonl"
    line = line if type(line) is bytes else json.dumps(line).encode()
    file.write_bytes(json.dumps(LINE).encode() + b"\n\n" + line)
    model = trained()
    with pytest.raises(UserError) as caught:
        run_task(model, file, tmp_path / "results")
    assert str(caught.value).startswith(f"{file}:3: {fault}") and not model.model.read


def test_files_and_runs_that_do_not_serve(trained, fake, tmp_path):  # noqa: F811
    with pytest.raises(UserError, match="there is no file .*; fetch it: python data/hellaswag.py"):
        run_task(trained(), tmp_path / "none", tmp_path / "results")
    with pytest.raises(UserError, match=f"{tmp_path} cannot be read: Is a directory$"):
        run_task(trained(), tmp_path, tmp_path / "results")
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(UserError, match="is empty"):
        run_task(trained(), tmp_path / "empty", tmp_path / "results")
    with pytest.raises(UserError, match="no known vocabulary has 64 tokens"):
        evaluate.main([str(fake(vocab_size=64))])
    with pytest.raises(UserError, match="only --task hellaswag reads it"):
        evaluate.main(["run", "--data", "x"])
    with pytest.raises(UserError, match="nothing does not exist"):
        evaluate.main([str(tmp_path / "nothing")])
    file = write_items(tmp_path / "items", [LINE])
    model = trained()
    model.model.forward = lambda inputs: torch.full((*inputs.shape, 257), torch.nan)
    with pytest.raises(UserError, match="logits are not finite"):
        run_task(model, file, tmp_path / "results")


def test_the_data_script_takes_whole_files_only(tmp_path, monkeypatch, capsys):
    good, out = write_items(tmp_path / "good", [LINE] * 3), tmp_path / "out"
    content = good.read_bytes()
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(content).hexdigest())
    opened = urllib.request.urlopen  # a call without a limit would wait for ever
    monkeypatch.setattr("urllib.request.urlopen",
                        lambda url, *, timeout: opened(url, None, timeout))
    hellaswag.fetch(good.as_uri(), out)
    assert out.read_bytes() == content
    out.unlink()
    for damaged in (b"", b"<html>", content[: content.index(b"\n") + 1]):  # the last: an item only
        good.write_bytes(damaged)
        with pytest.raises(ValueError) as fault:
            hellaswag.fetch(good.as_uri(), out)
        assert str(fault.value) == (
            f"{good.as_uri()} is not HellaSwag's validation file of 10,042 items: its SHA-256 "
            f"begins with {hashlib.sha256(damaged).hexdigest()[:12]}, not {hellaswag.SHA256[:12]}"
            " (cut short, compressed or changed?); remove it, and fetch it again")
    with pytest.raises(ValueError, match="^cannot fetch file:.*/none [(].*No such .*[)]; check the "
                                         "network.*, or fetch it by other means and pass it with"
                                         " --file$"):
        hellaswag.fetch((tmp_path / "none").as_uri(), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]
    file, data = tmp_path / "none", tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", "--file", str(file), "--out", str(data)])
    with pytest.raises(SystemExit, match=f"^error: {file}: No such file or directory$"):
        hellaswag.main()
    (data / hellaswag.NAME).write_bytes(b"<html>")  # also what is there already
    file.write_bytes(content)
    with pytest.raises(SystemExit, match="is not HellaSwag's validation file"):
        hellaswag.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(data := data / "a" / "new folder")])
    hellaswag.main()
    assert (data / hellaswag.NAME).read_bytes() == content
    assert capsys.readouterr().out == f"10,042 items in {data / hellaswag.NAME}\n"
    monkeypatch.setattr(hellaswag, "fetch", lambda *what: fetched.append(what))
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", "--out", str(tmp_path / "empty")])
    fetched = []
    with pytest.raises(SystemExit, match="hellaswag_val.jsonl: No such file"):
        hellaswag.main()
    assert fetched == [("https://raw.githubusercontent.com/rowanz/hellaswag/master/data/"
                        "hellaswag_val.jsonl", tmp_path / "empty" / "hellaswag_val.jsonl")]
