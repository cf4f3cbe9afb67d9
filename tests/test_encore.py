"""The encore's fine-tuning: its data, the loss over answers, packing and isolation.

Run: .venv/bin/python -m pytest tests/test_encore.py
"""

import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

import builtin_chat
from ranks import run_tool, start_ranks
from snapshots import MANIFEST, REPOSITORY, by_id, known_values, load_snapshot, train
from speedrun.base.errors import UserError
from speedrun.base.text import short
from speedrun.run import conversations
from speedrun.run.checkpoint import check_start, made_by, scale_of, sign
from speedrun.run.data import BUILTIN
from speedrun.run.log import read_log
from speedrun.run.plan import make_plan
from speedrun.run.summary import corpus_of
from speedrun.scripts.find import find_script
from test_parts import INPUTS, TARGETS, small_model

RUNGS = [m for m in MANIFEST.of_chain("encore").milestones if m.program == "finetune.py"]
E0, E1, E2, E2A = (MANIFEST.get(id) for id in ("e0", "e1", "e2", "e2a"))
MODULES = {milestone.id: load_snapshot(milestone) for milestone in RUNGS}
every_rung = pytest.mark.parametrize("milestone", RUNGS, ids=by_id)

IGNORED = -100
SIZES = dict(vocab_size=260, bos_id=256, num_layers=2, num_heads=2, model_dim=32, seq_len=48,
             micro_batch_size=2, total_batch_size=8 * 48, bf16=False, compile=False)
RUN = dict(SIZES, train_steps=4, cooldown_steps=4, adam_lr=6e-3, val_loss_every=2,
           train_loss_every=1, kernel_warmup_steps=1)

def where_changed(*blocks):
    """Runs a test at the root that has one of the blocks, and where one of them changes."""
    return pytest.mark.parametrize("milestone", [
        m for m in RUNGS if {*blocks} & {*m.changes}
        or m is E0 and vars(MODULES["e0"]).keys() & set(blocks)], ids=by_id)


def hyperparameters(milestone, **changes):
    return MODULES[milestone.id].Hyperparameters(**{**SIZES, **changes})


def turns(*texts, system=None):
    """Messages of a conversation."""
    roles = ("user", "assistant") * len(texts)
    found = [dict(role=role, content=text) for role, text in zip(roles, texts, strict=False)]
    return [dict(role="system", content=system)] * (system is not None) + found


def write_conversations(file, some):
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in some), "utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with conversations to train on and to validate on, and a checkpoint."""
    folder, rng = tmp_path_factory.mktemp("encore"), random.Random(0)

    def text():
        return "".join(rng.choices("abcdefgh ", k=rng.randint(1, 15)))

    for name, count in (("chat_train", 37), ("chat_val", 9)):
        some = [turns(text(), text()) for _ in range(count)]
        write_conversations(folder / f"{name}.jsonl", some)
    save_start(folder / "checkpoint.pt")
    return folder


def save_start(file, **changes):
    """Saves a checkpoint like that of milestone 04, with weights that matter."""
    args = hyperparameters(E0, **{"vocab_size": 257, **changes})
    torch.manual_seed(5)
    model = MODULES["e0"].GPT(args)
    for param in model.parameters():
        if param.ndim > 1:
            torch.nn.init.normal_(param, std=0.3)
    known = {k: v for k, v in asdict(args).items() if k not in ("checkpoint", "bos_id")}
    torch.save(dict(step=1, hyperparameters=known, model=model.state_dict()), file)


def run_options(folder, log_dir, **changes):
    return {**RUN, "log_dir": str(log_dir), "checkpoint": f"{folder}/checkpoint.pt",
            "train_file": f"{folder}/chat_train.jsonl", "val_file": f"{folder}/chat_val.jsonl",
            **changes}


def losses_of(id, options):
    """The validation losses of a run in this process; for ranks, too."""
    module = load_snapshot(MANIFEST.get(id))
    return train(module, module.Hyperparameters(**options))


def some_rows(milestone, folder, **changes):
    """Rows of an epoch of the training conversations, and their hyperparameters."""
    module, args = MODULES[milestone.id], hyperparameters(milestone, **changes)
    found, _ = module.read_conversations(folder / "chat_train.jsonl", args)
    return module.epoch_rows(found, args), args


# ---- the conversations without a download ----


TOY = b'''import os

@decorated
def whole(a):
    """Adds nothing.  """
    return a

class C:
    async def method(self):
        r"""Waits for \\d,

        and more.
        """
        def nested():
            \'\'\'
            Begins below.
            \'\'\'
            return [
                1]
        return nested

def one_line(): """Shares its line."""

def shares(): 
    """Shares its last line."""; return 1

def no_answer():
    """_private words"""

def one_word():
    """Word"""

def plain():
    return 0

def long():
    """Has a long body."""
    return "''' + b"x" * 160 + b'''"

def fits():
    """Has 160 bytes."""
    return '\\d\xc3\xa9''' + b"x" * 131 + b''''

def does_not():
    """Has 161."""
    return '\xc3\xa9''' + b"x" * 130 + b''''
'''


def test_pairs_of_a_file():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the odd escape is the file's business
        found = builtin_chat.pairs(TOY)
    assert found == [
        ("def whole(a):\n    return a", "Adds nothing."),
        ("async def method(self):\n    def nested():\n        '''\n        Begins below.\n"
         "        '''\n        return [\n            1]\n    return nested", "Waits for \\d,"),
        ("def nested():\n    return [\n        1]", "Begins below."),
        ("def long():", "Has a long body."),
        (f"def fits():\n    return '\\dé{'x' * 131}'", "Has 160 bytes."),
        ("def does_not():", "Has 161."),
    ]
    for other in (b"def broken(:\n", b"\xff", b"# coding: latin-1\n" + TOY + b"# \xe9"):
        assert builtin_chat.pairs(other) == []


def test_no_pair_is_on_both_sides():
    function = b'def f%d():\n    """Does thing %d."""\n'
    texts = {f"{n}.py": function % (n % 30, n % 30) for n in range(40)}
    sides = builtin_chat.conversations(texts)
    assert sides[1] and not set(sides[0]) & set(sides[1])
    assert sorted(set(sides[0]) | set(sides[1])) == sorted(sides[0] + sides[1])  # each once
    line = builtin_chat.to_line(("def é():", "Is."))
    assert json.loads(line) == {"messages": turns("def é():", "Is.")}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A folder with the embedded conversations of this Python."""
    out = tmp_path_factory.mktemp("chat")
    builtin_chat.build(out)
    return out


def test_the_embedded_conversations(chat):
    known, files = known_values("e0"), [chat / name for name in builtin_chat.FILES]
    counts = [conversations.check(file) for file in files]
    assert min(counts) > 100
    if platform.python_version() == known["python"]:
        assert counts == [known["read"], known["read_val"]]
        assert [file.stat().st_size for file in files] == known["bytes"]
        assert [builtin_chat.sha256(file.read_bytes())[:16] for file in files] == known["sha256"]
    assert builtin_chat.existing(chat) == conversations.fingerprint(*files)
    with (chat / builtin_chat.VAL).open("ab") as file:
        file.write(b"\n")
    assert builtin_chat.existing(chat) is None  # not what chat.json says


def test_what_an_epoch_of_them_holds(chat):
    found, counts = MODULES["e0"].read_conversations(
        chat / builtin_chat.TRAIN, hyperparameters(E0, seq_len=256))
    assert counts == dict(read=len(found), cut=0, dropped=0)
    waste = {}
    for milestone in RUNGS:
        module, known = MODULES[milestone.id], known_values(milestone.id)
        args = hyperparameters(milestone, seq_len=256, micro_batch_size=4)
        rows = module.epoch_rows(found, args)
        use = module.count_slots(rows, args)
        waste[milestone.id] = use["waste"]
        if platform.python_version() == known["python"]:
            assert max(map(len, rows)) == known["most_conversations"]
            for name in ("tokens", "answer_tokens", "rows", "slots"):
                assert use[name] == known[name], (milestone.id, name)
    assert waste["e2"] == waste["e2a"] < 0.02 < waste["e0"] < waste["e1"] == use["waste_alone"]


# ---- from a conversation to inputs and targets ----


@every_rung
def test_a_conversation_becomes_tokens(milestone):
    module, args = MODULES[milestone.id], hyperparameters(milestone)

    def tokens(messages):
        return tuple(ids.tolist() for ids in module.tokenize(messages, args))

    assert tokens(turns("hi", "yo")) == (
        [256, 257, 104, 105, 258, 121, 111], [IGNORED] * 4 + [121, 111, 259])
    assert tokens(turns("", "")) == ([256, 257, 258], [IGNORED, IGNORED, 259])
    several = tokens(turns("a", "b", "é", "d", system="S"))
    assert several[0] == [256, 257, *b"S\n\na", 258, *b"b", 259, 257, *"é".encode(), 258, *b"d"]
    assert several[1] == [*[IGNORED] * 6, *b"b", 259, *[IGNORED] * 4, *b"d", 259]


def test_text_of_gpt2_never_becomes_a_marker(monkeypatch):
    class Encoding:
        def encode_ordinary(self, text):
            return [len(text)]

    monkeypatch.setattr("tiktoken.get_encoding", lambda name: {"gpt2": Encoding()}[name])
    ids = MODULES["e0"].tokenize(
        turns("abc", "<|endoftext|>"), hyperparameters(E0, vocab_size=50304, bos_id=50256))
    assert ids[0].tolist() == [50256, 50257, 3, 50258, 13] and ids[1].tolist()[-2:] == [13, 50259]


@every_rung
def test_long_conversations_are_cut_and_counted(milestone, tmp_path):
    module, args = MODULES[milestone.id], hyperparameters(milestone, seq_len=8)
    file = tmp_path / "long.jsonl"
    write_conversations(file, [
        turns("ab", "cde"), turns("a", "bcdefgh"), turns("far too long", "x"), turns("a", "b")])
    file.write_text(file.read_text("utf-8").replace("\n", "\n\n"), "utf-8")  # blank lines
    found, counts = module.read_conversations(file, args)
    assert counts == dict(read=4, cut=2, dropped=1)
    assert [len(inputs) for inputs, _ in found] == [8, 8, 5]
    assert found[1][1].tolist() == [*[IGNORED] * 3, *b"bcdef"]  # without its end
    write_conversations(file, [turns("a", "b", "c")])
    with pytest.raises(AssertionError, match="long.jsonl:1: the roles must alternate"):
        module.read_conversations(file, args)


# ---- the loss ----


@where_changed("summed_loss", "validate")
def test_every_target_that_counts_weighs_the_same(milestone):
    module, known = MODULES[milestone.id], known_values(milestone.id)
    model, targets = small_model(milestone, 0.5), TARGETS.clone()  # rows of 8
    targets[0, :5], targets[1, :3] = IGNORED, IGNORED
    batches = [(INPUTS[i : i + 1], targets[i : i + 1]) for i in range(2)]
    sums = [module.summed_loss(model, *batch).item() for batch in batches]
    assert [sums[0] / 3, sums[1] / 5] == pytest.approx(known["row_losses"], abs=2e-6)
    whole = module.summed_loss(model, INPUTS, targets).item()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for loss in (sum(sums) / 8, whole / 8, module.validate(model, batches)):
        assert loss == pytest.approx(known["counted_loss"], abs=2e-6)


@where_changed("GPT")
def test_documents_that_see_each_other_or_do_not(milestone):
    module, known = MODULES[milestone.id], known_values(milestone.id)
    stream, targets = INPUTS.flatten().clone(), TARGETS.flatten().clone()
    stream[[0, 7]], targets[6] = 1, IGNORED
    model = small_model(milestone, 0.5, bos_id=1, seq_len=16)

    def mean(*parts):
        return sum(module.summed_loss(model, stream[None, part], targets[None, part]).item()
                   for part in parts) / 15

    assert mean(slice(16)) == pytest.approx(known["document_loss"], abs=2e-6)
    # Alone, at positions from 0: as isolated, for positions have no effect by themselves.
    alone = mean(slice(0, 7), slice(7, 16))
    assert alone == pytest.approx(known_values("e2a")["document_loss"], abs=2e-6)


def test_a_neighbour_changes_nothing(folder):
    """Isolation by perturbation and by gradient: exactly nothing moves, and without a mask it
    does."""
    for milestone, apart in ((E2, False), (E2A, True)):
        rows, args = some_rows(milestone, folder)
        module, row = MODULES[milestone.id], max(rows, key=len)
        first = len(row[0][0])
        model = start_of(module, folder, args)
        inputs, targets = module.pad([row], args)
        inputs, targets = inputs[:1], targets[:1]
        other = inputs.clone()
        content = (other[0, :first] < 256).nonzero()[:, 0]
        other[0, content] = (other[0, content] + 1) % 256
        moved = (model(inputs) - model(other))[0, first:].abs().max().item()
        embedded = []
        model.embed.register_forward_hook(lambda *call, kept=embedded: kept.append(call[2]))
        targets[0, :first] = IGNORED
        loss = module.summed_loss(model, inputs, targets)
        (gradient,) = torch.autograd.grad(loss, embedded)
        leaked = gradient[0, :first].abs().max().item()
        assert (moved == 0, leaked == 0) == (apart, apart), (moved, leaked)
        assert apart or min(moved, leaked) > 1e-5


def start_of(module, folder, args):
    """The model with the weights of the checkpoint."""
    args.checkpoint = str(folder / "checkpoint.pt")
    torch.manual_seed(args.seed)
    model = module.GPT(args)
    module.load_start(model, args)
    return model


def test_only_leaking_changes_the_loss_of_one_checkpoint(folder):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    losses, gradients = {}, {}
    for milestone in RUNGS:
        module = MODULES[milestone.id]
        rows, args = some_rows(milestone, folder)
        model = start_of(module, folder, args)
        batches = list(module.row_batches(rows, args, torch.device("cpu")))
        losses[milestone.id] = module.validate(model, batches)
        for inputs, targets in batches:
            (module.summed_loss(model, inputs, targets) / module.count_targets(rows)).backward()
        gradients[milestone.id] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert losses["e0"] == pytest.approx(losses["e1"], abs=1e-6)
    assert losses["e2a"] == pytest.approx(losses["e1"], abs=1e-5)
    assert abs(losses["e2"] - losses["e1"]) > 1e-4
    size = gradients["e1"].norm()
    apart = {id: ((found - gradients["e1"]).norm() / size).item()
             for id, found in gradients.items()}
    assert max(apart["e0"], apart["e2a"]) < 1e-5 and apart["e2"] > 0.02


# ---- packing ----


def sized(*lengths):
    """Conversations of these numbers of tokens."""
    return [(torch.arange(length), torch.arange(length)) for length in lengths]


def lengths_of(rows):
    return [[len(inputs) for inputs, _ in row] for row in rows]


@where_changed("pack")
def test_best_fit_decreasing(milestone):
    pack = MODULES[milestone.id].pack
    for capacity, cases in known_values(milestone.id)["packed"].items():
        for lengths, rows in cases:
            assert lengths_of(pack(sized(*lengths), int(capacity))) == rows
    twins = sized(4, 4, 4)
    assert [[id(one) for one in row] for row in pack(twins, 8)] == [
        [id(twins[0]), id(twins[1])], [id(twins[2])]]
    rng = np.random.default_rng(0)
    some = sized(*rng.integers(1, 60, 200))
    rows = pack(some, 64)
    assert sorted(id(one) for row in rows for one in row) == sorted(map(id, some))
    assert max(map(sum, lengths_of(rows))) <= 64


@every_rung
def test_an_epoch_has_every_conversation_once_in_another_order(milestone, folder):
    module, args = MODULES[milestone.id], hyperparameters(milestone)
    found, _ = module.read_conversations(folder / "chat_train.jsonl", args)

    def epoch(number, **changes):
        rows = module.epoch_rows(found, hyperparameters(milestone, **changes), number)
        return [[next(i for i, one in enumerate(found) if one is c) for c in row] for row in rows]

    assert sorted(sum(epoch(0), [])) == list(range(37))
    assert epoch(0) == epoch(0) != epoch(1) and epoch(0, seed=1) not in (epoch(0), epoch(1))


@every_rung
def test_ranks_share_the_rows_of_a_step(milestone, folder, monkeypatch):
    module, args = MODULES[milestone.id], hyperparameters(milestone)
    rows, _ = some_rows(milestone, folder)

    def batches(rank, world_size):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        return [inputs.tolist() for inputs, _ in module.row_batches(
            rows[:8], args, torch.device("cpu"))]

    alone = batches(0, 1)
    for world_size in (2, 4):
        dealt = [batches(rank, world_size) for rank in range(world_size)]
        assert [one for step in zip(*dealt, strict=True) for one in step] == alone
    steps = module.step_rows(*reversed((args, [one for row in rows for one in row])))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    taken = [next(steps) for _ in range(12)]  # more than an epoch
    assert {len(step) for step in taken} == {8}
    assert all(MODULES[milestone.id].count_targets([row]) for step in taken for row in step)


@every_rung
def test_too_few_rows_are_refused(milestone, monkeypatch):
    module = MODULES[milestone.id]
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(AssertionError, match="3 rows are too few for a step of 8"):
        next(module.step_rows(sized(40, 40, 40), hyperparameters(milestone)))
    with pytest.raises(AssertionError, match="not a multiple of 96, a micro-batch on each rank"):
        next(module.step_rows(sized(40), hyperparameters(milestone, total_batch_size=48)))


def test_fixed_shapes_are_one_graph(folder):
    """Batches of several lengths need one graph if it is compiled for any length, and several if
    not; of one shape they need one that knows it."""
    graphs = {}
    for milestone, dynamic in ((E0, True), (E0, False), (E1, False)):
        module, counter = MODULES[milestone.id], CompileCounter()
        rows, args = some_rows(milestone, folder)
        torch._dynamo.reset()
        model = torch.compile(start_of(module, folder, args), backend=counter, dynamic=dynamic)
        for start in range(0, 6, 2):
            model(module.pad(rows[start : start + 2], args)[0])
        graphs[milestone.id, dynamic] = counter.frame_count
    assert graphs["e0", True] == graphs["e1", False] == 1 < graphs["e0", False]
    for milestone in RUNGS:
        assert f"dynamic={milestone is E0}" in milestone.script.read_text("utf-8"), milestone.name


# ---- the start ----


@every_rung
def test_markers_are_added_to_the_start(milestone, folder):
    args = hyperparameters(milestone)
    model = start_of(MODULES[milestone.id], folder, args)
    start = torch.load(args.checkpoint)["model"]
    assert torch.equal(model.embed.weight[:257], start["embed.weight"])
    assert torch.equal(model.lm_head.weight[:257], start["lm_head.weight"])
    assert not model.lm_head.weight[257:].any() and 0.6 < model.embed.weight[257:].std() < 1.4
    for name, value in model.state_dict().items():
        assert len(start[name].shape) == 2 and "e" in name or torch.equal(value, start[name])


def test_a_table_that_has_the_markers_gets_new_heads_once(tmp_path):
    """A pretrained model has pushed their logits down; a fine-tuned one has learned them."""
    module, args = MODULES["e0"], hyperparameters(E0, vocab_size=300)
    for kind in ("pretrained", "fine-tuned"):
        save_start(tmp_path / "checkpoint.pt", vocab_size=300)
        checkpoint = torch.load(tmp_path / "checkpoint.pt")
        if kind == "fine-tuned":
            checkpoint["hyperparameters"]["checkpoint"] = "x"
            torch.save(checkpoint, tmp_path / "checkpoint.pt")
        model = start_of(module, tmp_path, args)
        expected = checkpoint["model"]["lm_head.weight"].clone()
        if kind == "pretrained":
            expected[257:260] = 0
        assert torch.equal(model.lm_head.weight, expected)
        assert torch.equal(model.embed.weight, checkpoint["model"]["embed.weight"])


class Code:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):  # an unpickler that runs code makes the file
        return Path.touch, (self.trace,)


def test_a_start_that_does_not_fit_is_refused(folder, tmp_path):
    module, file = MODULES["e0"], tmp_path / "checkpoint.pt"

    def refused(words, **changes):
        args = hyperparameters(E0, **changes)
        with pytest.raises(AssertionError, match=words):
            start_of(module, tmp_path, args)
        return vars(args)

    refused("no checkpoint '.*'; make one: run_milestone.py 04 --save-checkpoint")
    for name, value in (("num_heads", 1), ("num_layers", 4), ("model_dim", 16)):
        save_start(file)
        values = refused(f"the checkpoint needs --{name}={SIZES[name]}", **{name: value})
        with pytest.raises(UserError, match=f"has {name}={SIZES[name]}, and the run {value}; add"
                                            f" --set {name}={SIZES[name]}, or"):
            check_start(values)
    save_start(file, vocab_size=300)
    values = refused("vocab_size is below the checkpoint's 300; raise it")
    with pytest.raises(UserError, match="has vocab_size=300, more than the run's 260"):
        check_start(values)
    other = torch.load(folder / "checkpoint.pt")
    del other["model"]["skip_weights"]
    torch.save(other, file)
    refused("is not of 04's model; start from 04")
    trace = tmp_path / "trace"
    torch.save(dict(step=1, hyperparameters={}, model=Code(trace)), file)
    with pytest.raises(Exception, match="Weights only load failed"):
        start_of(module, tmp_path, hyperparameters(E0))
    with pytest.raises(UserError, match="holds pickled code, which is not run"):
        check_start(values)
    assert not trace.exists()
    file.write_bytes(b"PK")
    with pytest.raises(UserError, match="is damaged, or no checkpoint"):
        check_start(values)


def test_a_start_of_another_model_is_refused(folder, tmp_path):
    """05's weights have 04's names and shapes. The hash inside counts, then the script beside."""
    file = tmp_path / "checkpoint.pt"
    save_start(file)
    values = dict(SIZES, checkpoint=str(file))
    script = tmp_path / "train_gpt.py"
    for id, fits in (("04", True), ("05", False), ("e2a", True)):
        shutil.copyfile(MANIFEST.get(id).script, script)
        assert made_by(file) == MANIFEST.get(id)
        if fits:
            check_start(values, E0)
        else:
            with pytest.raises(UserError, match=r"is of 05_\w+, which has another model than 04_.*"
                                                r"; make one: python tools/run_milestone.py 04 "):
                check_start(values, E0)
    sign(file, MANIFEST.get("05").script)
    with pytest.raises(UserError, match="is of 05_"):
        check_start(values, E0)
    script.unlink()
    save_start(file)
    (tmp_path / "summary.json").write_text('{"milestone": "flex_attention"}')
    assert made_by(file) == MANIFEST.get("05")
    for damaged in ('[]', '{"milestone": 5, "scale": 5}', '{"milestone": "none", "scale": "big"}'):
        (tmp_path / "summary.json").write_text(damaged)
        assert made_by(file) is scale_of(file) is corpus_of(tmp_path) is None
    check_start(values, E0)  # a learner's own


@pytest.mark.parametrize("long", ["train", "val"])
def test_conversations_of_which_none_would_be_left_are_refused(folder, tmp_path, long, monkeypatch):
    for name in ("train", "val"):
        question = ["hi", "x" * 700][name == long]
        write_conversations(tmp_path / f"chat_{name}.jsonl", [turns(question, "yo")] * 3)
    values = dict(bos_id=256, seq_len=256)
    with pytest.raises(UserError, match=rf"chat_{long}.jsonl: all 3 conversations would be dropped:"
                                        " no answer begins within seq_len=256 tokens"):
        make_plan("e2", start=folder, data=tmp_path, out=tmp_path / "run", scale="tiny")
    file = tmp_path / f"chat_{long}.jsonl"
    conversations.check_answers(file, dict(values, seq_len=703))  # 700, and three markers
    with pytest.raises(UserError, match="all 3"):
        conversations.check_answers(file, dict(values, seq_len=702))
    write_conversations(tmp_path / "some", [turns("x" * 30, "yo", system="s" * 8)])
    conversations.check_answers(tmp_path / "some", dict(values, seq_len=43))  # and a blank line
    with pytest.raises(UserError, match="some: all 1 conversations"):
        conversations.check_answers(tmp_path / "some", dict(values, seq_len=42))
    write_conversations(tmp_path / "some", [turns("x" * 30, "yo"), turns("x", "yo")])
    conversations.check_answers(tmp_path / "some", dict(values, seq_len=4))  # one is left
    words = SimpleNamespace(encode_ordinary=str.split)  # in place of GPT-2's: a question has one
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=lambda _: words))
    conversations.check_answers(file, dict(bos_id=50256, seq_len=4))
    with pytest.raises(UserError, match="all 3"):
        conversations.check_answers(file, dict(bos_id=50256, seq_len=3))
    conversations.check_answers(file, dict(seq_len=3))  # whose tokens are not known


# ---- runs ----


@every_rung
def test_any_number_of_ranks_gives_the_same_losses(milestone, folder, tmp_path):
    found, world_sizes = [], (1, 2, 4) if milestone is RUNGS[-1] else (1, 2)
    for world_size in world_sizes:
        options = run_options(folder, tmp_path / f"log{world_size}")
        results = start_ranks(world_size, losses_of, milestone.id, options)
        found.append(results[0][0])
        assert all(losses == found[-1] for losses, _ in results)
    assert found[0][0] - found[0][-1] > 0.3 and len(found[0]) == 3  # it learns
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-4)
    last = tmp_path / f"log{world_size}"
    lines = (last / "log.txt").read_text("utf-8").splitlines()
    assert sum(line.startswith("rows:") for line in lines) == 1
    log = read_log(last / "log.txt")
    assert log.rows["read"] == 37 and log.rows["waste"] <= log.rows["waste_alone"]
    trained = [step.train_loss for step in log.steps if step.train_loss]
    one = read_log(tmp_path / "log1" / "log.txt")
    assert trained == pytest.approx([step.train_loss for step in one.steps if step.train_loss],
                                    abs=2e-4)
    kept = torch.load(last / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 4 and kept["hyperparameters"]["vocab_size"] == 260


def test_a_run_starts_from_another(folder, tmp_path, monkeypatch):
    """The launcher's refusals, and a whole run with its summary."""
    monkeypatch.chdir(tmp_path)

    def refused(words, target="e2", **options):
        with pytest.raises(UserError, match=words) as error:
            make_plan(target, **options)
        assert "\n" not in str(error.value)

    refused("e2 starts from a trained model: add --from RUN, a run's folder; this makes one: "
            "python tools/run_milestone.py 04 --scale tiny --save-checkpoint")
    refused("nowhere does not exist; name a run's folder", start=Path("nowhere"))
    refused(f"{tmp_path} holds no checkpoint.pt", start=tmp_path)
    refused("train_gpt.py starts from nothing; leave it out", target="04", start=folder)
    data = tmp_path / "d[1]"
    data.mkdir()
    refused(r"^d\[1\] must hold one file \*_train.jsonl, not none; or name it: --set train_file=",
            start=folder, data=data)
    for name in ("a_train", "strain", "a_val", "b_val"):
        (data / f"{name}.jsonl").touch()
    refused(r"^d\[1\] must hold one file \*_val.jsonl, not a_val.jsonl, b_val.jsonl; or name it: "
            "--set val_file=FILE$", start=folder, data=data)
    refused(r"^d\[1\] cannot be read: Is a directory$", start=folder,
            settings=["train_file=d[1]", f"val_file={folder}/chat_val.jsonl"])
    assert conversations.files_in(BUILTIN) == {
        f"{split}_file": short(BUILTIN / f"chat_{split}.jsonl") for split in ("train", "val")}
    refused("there is no file none.jsonl; make one: python .*data/builtin_chat.py", start=folder,
            settings=["train_file=none.jsonl", f"val_file={folder}/chat_val.jsonl"])
    (folder / "summary.json").write_text('{"scale": "record"}')
    assert scale_of(folder / "checkpoint.pt") == "record"
    (folder / "summary.json").write_text('{"scale": "tiny"}')
    plan = make_plan("e2", start=folder, data=folder)
    assert plan.scale == "tiny" and "from which it starts" in plan.notes[0]
    assert plan.options["checkpoint"] == str(folder / "checkpoint.pt")
    assert plan.options["train_file"] == str(folder / "chat_train.jsonl")
    assert find_script("e2").tiny["total_batch_size"] == 4096

    sizes = [f"--set={name}={value}" for name, value in RUN.items() if name != "compile"]
    ended = run_tool(REPOSITORY / "tools" / "run_milestone.py", "e2", "--from", folder, "--data",
                     folder, "--scale", "tiny", "--out", tmp_path / "run", "--json", *sizes)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = summary["rows"]
    assert rows["rows"] < 37 == rows["read"] and rows["waste"] < rows["waste_alone"]
    assert summary["tokens"] == 4 * round(8 * rows["tokens"] / rows["rows"])
    assert summary["data_fingerprint"] == conversations.fingerprint(
        *(folder / f"chat_{split}.jsonl" for split in ("train", "val")))
    check_start(dict(SIZES, checkpoint=str(tmp_path / "run" / "checkpoint.pt")))
    ended = run_tool(REPOSITORY / "tools" / "run_milestone.py", "e2", "--from", folder, "--data",
                     folder, "--scale", "tiny", "--out", tmp_path / "other")
    assert ended.returncode == 1 and re.fullmatch(
        "error: .*has num_layers=2, and the run 4; add --set num_layers=2, .*\n",
        ended.stderr), ended.stderr


def killed_while_saving(options, last_call):
    """A run in a process that dies by SIGKILL in its last call: within or right after torch.save,
    or right after the renaming."""
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    save, replace = torch.save, os.replace

    def half(checkpoint, file):
        save(checkpoint, file)
        os.truncate(file, os.path.getsize(file) // 2)
        die()

    def then_die(*files):
        replace(*files)
        die()

    changes = {"half": (torch, "save", half), "saved": (os, "replace", die),
               "renamed": (os, "replace", then_die)}
    setattr(*changes[last_call])
    losses_of("e0", options)


@pytest.mark.parametrize("last_call", ["half", "saved", "renamed"])
def test_a_checkpoint_is_whole_or_missing(last_call, folder, tmp_path):
    options = run_options(folder, tmp_path / "log", train_steps=1)
    with pytest.raises(AssertionError, match="ended without a word"):
        start_ranks(1, killed_while_saving, options, last_call)
    left = {file.name for file in (tmp_path / "log").iterdir()}
    if last_call == "renamed":
        assert left == {"log.txt", "checkpoint.pt"}
        kept = torch.load(tmp_path / "log" / "checkpoint.pt", weights_only=True)
        assert kept["step"] == 1 and kept["model"]
    else:
        assert left == {"log.txt", "checkpoint.partial"}


GOOD = json.dumps({"messages": turns("a", "b")}).encode()
MALFORMED = {
    "not JSON: Expecting ',' delimiter (column 19)": b'{"messages": ["a" "b"]}',
    "not JSON: Expecting value (column 15)": b'{"messages": [',
    "byte 3 is not UTF-8": b'{"\xff"}',
    'each line must be an object whose "messages" are a list': b'{"text": "a"}',
    '"messages" are a list of at least one': b'{"messages": []}',
    "each line must be an object": b'["messages"]',
    "message 1 has the role 'human'; it must be": GOOD.replace(b"user", b"human"),
    "message 1 is of the assistant; here it is the user's turn": GOOD.replace(
        b"user", b"assistant"),
    "the last message is of the user, not of the assistant": json.dumps(
        {"messages": turns("a", "b", "c")}).encode(),
    'message 2 has no text as its "content"': GOOD.replace(b'"b"', b"7"),
    "message 2 is of the system; here it is the assistant's turn": json.dumps(
        {"messages": [*turns("a"), dict(role="system", content="s")]}).encode(),
    "message 3 is of the user; here it is the assistant's turn": json.dumps({"messages": [
        *turns("a", system="S"), *turns("b")]}).encode(),
    "message 2 holds half of a surrogate pair, which is no text": GOOD.replace(
        b'"b"', b'"\\ud800"'),
    "not JSON: nested too deeply": b"[" * 100_000,
}


@pytest.mark.parametrize("words", MALFORMED)
def test_a_malformed_line_is_refused_with_its_number(words, folder, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(GOOD + b"\n\n" + MALFORMED[words] + b"\n" + GOOD)
    with pytest.raises(UserError) as error:
        make_plan("e0", start=folder, settings=[f"train_file={file}", f"val_file={file}"])
    assert str(error.value).startswith(f"{file}:3: ") and words in str(error.value)
    assert "\n" not in str(error.value)
    file.write_bytes(b"\n")
    with pytest.raises(UserError, match="holds no conversation"):
        conversations.check(file)


@pytest.mark.slow
def test_fine_tuning_reaches_its_target(tmp_path):
    """The whole way at the tiny scale: ten minutes on two cores."""
    tool = REPOSITORY / "tools" / "run_milestone.py"
    for words in (["04", "--save-checkpoint"], ["e2a", "--from", tmp_path / "04"]):
        ended = run_tool(tool, *words, "--scale", "tiny", "--nproc", 1, "--out",
                         tmp_path / words[0], timeout=1800)
        assert ended.returncode == 0, ended.stderr
    log = read_log(tmp_path / "e2a" / "log.txt")
    assert log.val_curve[0][1] > 1.8 and log.val_curve[-1][1] <= 1.35
