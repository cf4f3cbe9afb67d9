"""What the checker observes of a script, compares and tells, piece by piece.

Run: .venv/bin/python -m pytest tests/test_check_observers.py
"""

import json
import os
import re
import runpy
import threading
import time
import zlib
from collections import Counter
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from examinations import IDS, MANIFEST, source_of
from speedrun.check import spy as spies
from speedrun.check import trace, trace_generation, trace_model, trace_precision, trace_runs
from speedrun.check import values as odd
from speedrun.check.differences import Deviation, alike, differences, further_signs
from speedrun.check.kernels import Pointer, _close, as_compiled, modules, shrunk, varlen_attn
from speedrun.check.meter import Message, eight_bits
from speedrun.check.spy import Enough, Spy
from speedrun.check.trace import Observations, explain
from speedrun.check.trace_model import LONGER, _long_rows, precision_of
from speedrun.check.trace_precision import unevenness
from speedrun.check.values import odd_values
from speedrun.check.watched import _compile, run_watched, stand_ins
from speedrun.check.weights import arguments, draw, fill
from speedrun.check.worker import BROKEN_INPUT, FORK, write_shards
from speedrun.scripts.find import load_snapshot

# ---- what the spy sees ----


def test_messages_that_no_step_waits_for_are_counted_over_optimizers():
    (spy := Spy()).weights = lambda optimizer: ()
    for optimizer, sent in (("adam", {"message 1", "message 2"}), ("muon", set())):
        spy.before_step(optimizer)
        spy.under_way |= sent
        spy.after_step(optimizer)
    assert spy.forgotten == 2


def test_a_call_of_the_model_is_seen_whole(monkeypatch):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.cap, self.name = torch.nn.Parameter(torch.ones(2)), 3.5, "net"
            (part := torch.nn.Identity()).scale = 7
            self.part, self.earlier = part, []
            for name, shape, saved in (
                    ("changed", (), True), ("replaced", (), False), ("fixed", (), True),
                    ("row", (2,), True), ("table", (2, 2), True), ("still", (2, 2), False)):
                self.register_buffer(name, torch.ones(shape), persistent=saved)

        def forward(self, tokens, *more, **named):
            for some in self.changed, self.row, self.weight.data, tokens:
                some += 1
            self.earlier.append(self.table)  # its address stays taken
            self.replaced, self.table = self.replaced + 1, self.table + 1
            return spy.phase, spy.compiled

    spy, net, tokens = Spy(), Net(), torch.zeros(2, 3, dtype=torch.int32)
    spy.batches_ready = lambda *given: (len(spy.calls), len(given))
    threads = iter([2, 1])
    monkeypatch.setattr("speedrun.check.spy.threading.active_count", lambda: next(threads))
    given = Net.forward, net, tokens, 2.5, torch.ones(3)
    assert spy.call(*given, flag=True) == ("training pass", 0)
    assert spy.call_compiled(spy.call, *given) == ("training pass", 1)
    with torch.no_grad():
        assert spy.call(*given[:2], tokens.long(), torch.tensor(True)) == (
            "validation", 0)
    assert {name: value.flatten()[0] for name, value in spy.initial.items()} == dict.fromkeys(
        ("weight", "changed", "fixed", "row", "table"), 1), "not as they are now"
    words = "whole-number tensor of 2 dimensions, float, float32 tensor of 1 dimensions"
    assert spy.kinds == {"training pass": {words, f"{words}, bool"}, "validation": {
        "whole-number tensor of 2 dimensions, bool tensor of 0 dimensions"}}
    assert spy.modes == {"training pass": {True}, "validation": {True}}, "no gradients, no eval()"
    own, shapes = (3.5, True, 7), ((2, 3), (3,))
    assert spy.settings == {
        "training pass": [(2.5, True, True, *own, *shapes), (2.5, True, *own, *shapes)],
        "validation": [(True, *own, (2, 3), ())]}
    assert {name: len(some) for name, some in spy.places.items()} == {"table": 3, "still": 1}
    assert spy.kept == {"changed", "replaced"} and [*spy.given.values()] == [{(2.5,)}]
    assert [(args[0].max(), kwargs) for args, kwargs in spy.calls] == [(0, {"flag": True}), (1, {})]
    assert (spy.all_calls, spy.compiled_calls, spy.compiled, spy.phase, round(spy.now, 2)) == (
        3, 1, 0, "backward pass", 1001.02)
    for _ in range(12):
        spy.call(*given)
    assert spy.ready == [(2, 3)] and next(threads, "none is left") == "none is left"
    with pytest.raises(Enough):
        Spy(stop=True).call(*given)


def test_batches_that_wait_are_counted_when_threads_have_made_them_all(monkeypatch):
    def batch(*shape, dtype=torch.int16):
        return torch.zeros(shape, dtype=dtype)

    inputs, *made = batch(3, 11), batch(3, 11), batch(3, 12)  # a shape that nothing else here has
    used = [batch(3, 11), batch(3, 12)]
    rest = [made[0][:], used[1][:, 1:], batch(3, 10), batch(3, 13), batch(11), batch(2, 11),
            batch(3, 11, dtype=torch.int32), torch.nn.Parameter(batch(3, 11), requires_grad=False)]
    (spy := spies.Spy()).calls = [((used[0],), {"targets": used[1]})]
    monkeypatch.setattr(spies.time, "sleep", lambda seconds: len(made) < 4 and made.append(
        batch(3, 11)))
    assert (spy.batches_ready(inputs, 1), len(made), len(rest)) == (4, 4, 8)


def test_what_a_script_calls_in_its_model_is_told_in_words():
    class Part(torch.nn.Module):
        def forward(self, x):
            seen.append([*spy.parts])
            return x

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict(
                {"mlp": torch.nn.Sequential(Part())})])
            self.head = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.blocks[0]["mlp"](x)), "more"

    spy, net, other, x, seen = Spy(inside=True), Net(), Net(), torch.ones(1, 2), []
    spy.make(lambda net, *given: net.head.weight.data.zero_(), net, 1)
    fill(other)
    assert spy.models == [net] and net.head.weight.equal(other.head.weight)
    net(x)
    names = ["GPT", "blocks.0.mlp", "blocks.0.mlp.0", "head"]
    assert spy.dtypes == dict.fromkeys(names, {"float32"})
    spy.dtypes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        net(x)
        assert spy.norm(lambda x, *given: (x.dtype, *given), x.bfloat16(), (2,)) == (
            torch.float32, (2,), None, None)
    assert seen == [names[:3], [*names[:2], "blocks.0.mlp"]] and spy.parts == []
    assert spy.dtypes == {"head": {"bfloat16"}, "GPT": {"bfloat16"}, "blocks.0.mlp": {"float32"}}
    for some, eps in (x.bfloat16(), None), (x, 3):
        spy.norm(lambda *given: given, some, (2,), None, eps)
    assert dict(spy.epsilons) == {"float32": {"1.19e-07", "3"}, "bfloat16": {"1.19e-07"}}
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu", (64, 128))
    spy.attend(lambda **given: given, block_mask=mask), spy.attend(lambda **given: given)
    assert spy.masks == ["1, tiles of 64 by 128", "no block mask"]
    assert spy.tiles == 6
    e4 = torch.ones(16, 32).to(torch.float8_e4m3fn)
    for spy.parts in [], ["head"]:
        spy.multiply(lambda *_: None, e4, e4.T, torch.tensor(0.5), torch.tensor(0.25))
    words = "float8_e4m3fn and float8_e4m3fn"
    assert spy.eight_bits == {"backward pass": {words: 2}} and spy.scales == {
        f"the {factor} factor's scale in product {number} of the backward pass ({part})": scale
        for number, part in ((1, "backward pass"), (2, "head"))
        for factor, scale in (("first", 2.0), ("second", 4.0))}
    for spy.phase, same, wide in ("a", True, 2), ("a", False, 1), ("b", None, 0):
        spy.saw_kernel(same, wide)
    assert (spy.launches, spy.wide, spy.forms) == (
        {"a": 2, "b": 1}, {"a": 3, "b": 0}, {"a": {True, False}, "b": {None}})


def test_bytes_of_messages_are_counted_by_cause_dtype_and_collective():
    def send(name, *args, gives=None, **kwargs):
        (collective := mock.Mock(return_value=gives)).__name__ = name
        found = spy.send(collective, *args, **kwargs)
        collective.assert_called_once_with(*args, **kwargs)
        return found

    (spy := Spy()).models = [torch.nn.Linear(2, 3, bias=False)]
    own, half, long = spy.models[0].weight.data, torch.ones(8).bfloat16(), torch.ones(3).long()
    handle = SimpleNamespace(wait=lambda: "waited")
    assert send("all_reduce", half, 4, gives=handle) is handle and send("barrier", gives=7) == 7
    (x := torch.ones(1, requires_grad=True)).register_hook(
        lambda _: send("all_gather", [long, own[1:]], half[:1]))
    x.sum().backward()
    assert (spy.messages, spy.received_bytes, spy.blocking) == (Counter(), 0, 0)
    spy.depth = 1  # in an optimizer's step
    message = send("all_gather", [own[1:], half, long], half[:1], gives=handle)
    assert type(message) is Message and spy.under_way == {message} and message.wait() == "waited"
    assert send("broadcast", tensor=long) is send("reduce_scatter_tensor", half[:2], own) is None
    send("all_reduce", half[:2])
    assert spy.sent == {("gradients and losses", "bfloat16"): 16, ("optimizers", "float32"): 24,
                        ("gradients and losses", "float32"): 16, ("optimizers", "bfloat16"): 20,
                        ("optimizers", "int64"): 24}
    assert spy.messages == {("all_gather", 16): 1, ("broadcast", 24): 1, ("all_reduce", 4): 1,
                            ("reduce_scatter_tensor", 24): 1}
    assert (spy.sent_in_backward, spy.blocking) == (16, 24 + 24 + 4)
    assert (spy.received_bytes, spy.in_place) == (16 + 16 + 24 + 24, 16)


def test_files_that_are_written_and_threads_are_seen(monkeypatch):
    spy, started = Spy(), []
    for number, flags in enumerate((None, os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT)):
        spy.saw_event("open", (number, "r", flags))
    spy.saw_event("import", ("module", "w", os.O_WRONLY))
    assert spy.save(lambda *given: given, 1, Path("x"), 5) == (1, Path("x"), 5)
    assert spy.written == {"2", "3", "x"}
    monkeypatch.setenv("CHECKED_SCRIPT", "own")
    for file, threads in ("other", set()), ("own", {threading.get_ident()}):
        spy.saw_thread(SimpleNamespace(f_code=SimpleNamespace(co_filename=file)), "call", None)
        assert spy.threads == threads
    for calls, losses, late in ([], [], 0), ([], [1], 1), ([1], [], 2):
        spy.calls, spy.losses = calls, losses
        spy.start(started.append, 1)
        assert spy.started_late == late == len(started) - 1


def test_what_optimizers_get_do_and_keep_is_seen(monkeypatch):
    net = torch.nn.ModuleDict({n: torch.nn.Linear(4, 4, bias=False) for n in "abc"})
    both, (a, b, c) = torch.ones(2, 4, 4), net.parameters()
    a.data, b.data = both
    (spy := Spy(gradients=0.5, metered=True)).models = [torch.nn.Linear(1, 1), net]
    optimizer, stray = torch.optim.SGD([dict(params=[a, b]), dict(params=[c])]), torch.ones(3)
    optimizer.add_param_group(dict(params=[stray]))
    for number in 1, 2:
        spy.before_step(optimizer), spy.before_step(optimizer)  # a step within a step
        spy.after_step(optimizer)
        assert (spy.depth, spy.phase, spy.optimizer) == (1, "optimizers", optimizer)
        assert a.grad.equal(0.5 * number * draw("a.weight", a, number))
        a.data -= number
        _ = a.detach() @ b.detach()
        spy.after_step(optimizer)
        assert (spy.depth, spy.phase, spy.meter.work["optimizers"]) == (
            0, "backward pass", number * 128)
        names = [*net.state_dict(), "a tensor that is not a parameter of the model"]
        assert {name: {*move.flatten().tolist()} for name, move in spy.moves[number].items()} == {
            name: {-number * (name == names[0])} for name in names}
    assert spy.received["a.weight"].equal(0.5 * draw("a.weight", a, 1)) and [*spy.received] == names
    assert spy.sharing() == names[:2]
    for size, grad in (0.0, 0.0), (None, 7.0):  # gradients of zero are gradients from outside, too
        (other := Spy(gradients=size)).models = [net]
        a.grad.fill_(7.0)
        other.before_step(optimizer), other.after_step(optimizer)
        assert {*a.grad.flatten().tolist()} == {grad}
    kept = dict(mean=(4, 4), share=(8,), less=(7,), bits=(16,))
    optimizer.state[b] = {name: torch.zeros(shape) for name, shape in kept.items()} | dict(step=3)
    optimizer.state[c] = dict(mean=torch.zeros(4, 4).half(), step=torch.tensor(1))
    assert spy.with_bits() == []
    optimizer.state[b]["bits"] = torch.zeros(16).short()
    assert spy.with_bits() == names[:2]
    for ranks, sizes in (None, (16, 16)), ("2", (16, 8, 16)):
        monkeypatch.setenv("WORLD_SIZE", ranks) if ranks else monkeypatch.delenv(
            "WORLD_SIZE", raising=False)
        assert [(name, value.numel()) for name, value in spy.states()] == [
            *(("a.weight", size) for size in sizes), ("c.weight", 16)]
    optimizer.state[a], optimizer.state[stray] = dict(mean=both[0]), dict(mean=stray)
    assert [name for name, _ in spy.states()] == ["a.weight", *["b.weight"] * 3, "c.weight"]


def test_an_exponential_in_16_bits_shows_though_its_part_goes_on_in_32():
    def precise(function):
        spy = Spy()
        spy.parts = ["lm_head"]
        with spy.meter:
            function(torch.ones(2, 3, 4, dtype=torch.bfloat16))
        return spy.meter.curved, spy.meter.precise

    in_32, shown = {"exp in lm_head": True}, {"lm_head": True}
    assert precise(lambda x: x.float().exp() + x.square()) == (in_32, shown)
    assert precise(lambda x: x.exp().float() + 1) == ({"exp in lm_head": False}, shown)
    both = precise(lambda x: (x.float().exp() + x.sigmoid()))  # one in 16 bits hides no other
    assert both == (in_32 | {"sigmoid in lm_head": False}, shown)


def test_operations_are_counted_beside_messages_and_in_compiled_code():
    (spy := Spy()).phase = "optimizers"
    handle = SimpleNamespace(wait=lambda *args, **kwargs: (args, kwargs), name="handle")
    a, b, many = torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 2, 3)
    with spy.meter:
        _ = a @ b
        spy.compiled = 1
        _ = a.bfloat16() @ b.bfloat16()
        spy.compiled = 0
        first, second = (Message(spy, handle, (f"all_{kind}", 8)) for kind in ("gather", "reduce"))
        torch.baddbmm(torch.ones(2, 2, 5), many, b.expand(2, 3, 5))
        assert first.wait(1, timeout=2) == ((1,), dict(timeout=2)) and first.name == "handle"
        first.wait(), second.wait()
        second = Message(spy, handle, ("all_reduce", 8))
        _ = a.T, a.view(3, 2), torch.empty(3)
        second.wait()
        assert a.sum().item() == 6
        _ = a * torch.tensor(2.0) + a * 2.0
        e8 = torch.ones(16, 32).to(torch.float8_e4m3fn)
        torch._scaled_mm(e8, e8.T, scale_a=torch.ones(()), scale_b=torch.ones(()))
    meter = spy.meter
    assert [dict(some) for some in (meter.work, meter.low, meter.compiled, meter.beside)] == [
        {"optimizers": 60 + 60 + 120 + 2 * 16 * 32 * 16}, {"optimizers": 60}, {"optimizers": 60},
        {"optimizers": 120}]
    assert (dict(meter.readings), meter.scaled) == ({"optimizers": 1}, 6)
    assert dict(spy.accompanied) == {("all_gather", 8): 1, ("all_reduce", 8): 1}


def test_products_of_eight_bits_are_told_with_their_scales():
    a, half, quarter = torch.zeros(16, 32), torch.tensor(0.5), torch.tensor(0.25)
    a4, a5 = a.to(torch.float8_e4m3fn), a.to(torch.float8_e5m2)
    both = "float8_e4m3fn and float8_e5m2"
    untaken = ", in an order of numbers that GPUs do not take"
    for one, other, options, words in (
            (a5, a4.T, {}, ""), (a4, a5.T, dict(use_fast_accum=True), ", summed fast"),
            (a5, a4.T.contiguous(), {}, untaken), (a5.T.contiguous().T, a4.T, {}, untaken)):
        named = dict(mat2=other, scale_a=quarter, scale_b=half, **options)
        assert eight_bits((one, other, half, quarter), options) == (both + words, [2, 4])
        assert eight_bits((), dict(input=one, **named)) == (both + words, [4, 2])
    assert eight_bits((a, a.T, half, quarter), {}) is None


# ---- what jobs note ----


def test_the_longest_document_of_the_long_rows_comes_first():
    inputs = torch.tensor([[9, 1, 2, 9, 1, 2, 3, 4]]).repeat(2, 1)  # 9 begins a document
    longer, *_ = _long_rows(inputs, {"bos_id": 9, "seq_len": 8})
    begins = (longer == 9).nonzero()[:, 1]
    assert begins.min() >= 4 * LONGER - 1, "after half a row, or a number of starts is used up"


def test_the_model_is_called_with_all_that_it_should_show(tmp_path):
    called, record = [], dict(vocab_size=100, seq_len=1500, bos_id=9, window_end=60)

    class GPT(torch.nn.Module):
        def __init__(self, args):
            super().__init__()
            self.args, self.embed = [*vars(args).values()], torch.nn.Embedding(args.vocab_size, 2)
            self.mlp, self.gain = torch.nn.Linear(2, 2, bias=False), torch.nn.Parameter(
                torch.ones(()))
            self.register_buffer("cos", -torch.arange(args.seq_len * 2.0).view(-1, 2), False)

        def forward(self, inputs, targets=None):
            called.append([*self.args, self.mlp.weight.norm().item(), inputs])
            x = self.mlp(self.embed(inputs)) * self.gain
            return x + (inputs[:, -1:, None] > 7) if targets is None else x.square().mean()

    module = SimpleNamespace(GPT=GPT, Hyperparameters=make_dataclass("Hyperparameters", [
        (name, int, value) for name, value in record.items()]))
    inputs = torch.tensor([[9, 1, 2, 9, 1, 9, 3, 7], [1, 9, 5, 6, 9, 2, 2, 8]])
    torch.save({"calls": [((inputs, inputs), {})]}, tmp_path / "run.pt")
    trace_model.model(module, dict(vocab_size=20, seq_len=8, bos_id=9, window_end=4),
                      note := trace.Observations(), tmp_path / "run.pt")
    within, longer = inputs.clone(), inputs.repeat(1, 32).roll(3, 1)[:, :-1]
    within[:, :4][within[:, :4] == 9] = longer[:, :127][longer[:, :127] == 9] = 2
    (many := longer[:1].clone())[:, :170:2] = 9
    for some, other in zip(called[2:12:2], called[3:12:2], strict=True):
        assert ((some[-1] != other[-1]).nonzero()[:, 1] == some[-1].size(1) - 1).all()
    size, small = called[0][4], [20, 8, 9, 4]
    assert [[*args, round(norm / size, 6), tokens.tolist()] for *args, norm, tokens in (
            *called[:2], *called[2:12:2], *called[12:])] == [
        [*args, scale, tokens.tolist()] for args, scale, tokens in (
            (small, 1, inputs), ([100, *small[1:]], 1, torch.arange(36, 100).view(8, 8)),
            (small, 1, inputs), (small, 1, within), (small, 1, inputs[:1, :7]),
            (small, 0.001, inputs), (small, 0, inputs), ([20, 255, 9, 60], 1, longer),
            ([20, 255, 9, 4], 1, many))]
    leaks = ": later tokens change earlier ones"
    assert [seen for what, (_, seen, _) in note.items() if what.endswith(leaks)] == [
        "True", "True", "False", "True", "True"]
    assert {what: note[what][1] for what in (*[*note][:3], [*note][-2])} == {
        "the tensors at the record's sizes": {
            "gain": "a number", "embed.weight": "100x2", "mlp.weight": "2x2"},
        "the number of parameters at the record's sizes": "205",
        "bytes that the MLPs keep for the backward pass of call 1 of the model": 2 * 8 * 2 * 4,
        "numbers that the model multiplies by single weights": 255 * 2}
    table = note["the tables at the record's lengths, without signs"][1]["cos"]
    assert table.equal(torch.arange(1000.0, 3000).view(-1, 2))


@pytest.mark.parametrize("left, told", [
    ("{}", "log kept"), ("{}more", "log written over"), ("", "log written over")])
def test_what_a_run_refuses_is_told(left, told, tmp_path, monkeypatch):
    ran, values = {}, dict(train_steps=1, seq_len=8)

    def run(module, values, folder, spy):
        ran[folder.name] = values
        if folder.name == "used":
            (folder / "log.txt").write_text(left.format((folder / "log.txt").read_text()))
        assert folder.name != "one"
        json.loads("1" * (folder.name != "two"))

    monkeypatch.setattr(trace, "run_watched", run)
    module = SimpleNamespace(__file__=__file__, Hyperparameters=make_dataclass("H", []))
    trace.refusals(module, dict(values, train_steps=9), note := trace.Observations(), tmp_path,
                   "/shards", [], [], dict(one=dict(train_files="cut", seq_len=16), two=dict(
                       checkpoint="no.pt"), three=dict(seq_len=0)))
    assert note["what is refused"][1] == {
        "one": "refused", "two": "not refused: later JSONDecodeError", "three": "taken",
        "the folder of another run": told}
    assert ran == {"one": dict(values, seq_len=16, train_files="/shards/cut*.bin"), "used": values,
                   "two": dict(values, checkpoint="/shards/no.pt"),
                   "three": dict(values, seq_len=0)}


def test_what_a_model_reads_and_is_given_while_it_draws_is_counted(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, *_, **__):
            pass

    def generate(model, prompt, config, args):
        long = torch.zeros(9, 1000)
        cache = SimpleNamespace(layers=[(long, long[1:]), {"v": torch.zeros(500)}], at=3)
        model(prompt[None], cache=cache)
        model(kept=cache, tokens=torch.zeros(args.num_samples, 2))
        return [[args.max_new_tokens, args.seed, args.top_k, int(args.temperature * 10)],
                torch.tensor([5])]

    (tmp_path / "checkpoint.pt").touch()
    module = SimpleNamespace(generate=generate, load_model=lambda args, device: (Net(), {}),
                             encode_prompt=lambda text, config: torch.arange(len(text) + 1),
                             Hyperparameters=make_dataclass("Hyperparameters", [
                                 (name, object, None) for name in ("max_new_tokens", "seed",
                                 "top_k", "temperature", "num_samples")]))
    trace_generation.tokens(module, {}, note := trace.Observations(), tmp_path)
    expected = {}
    for temperature, top_k, samples, seed in trace_generation.DRAWS:
        how = f"temperature {temperature}, top_k {top_k}, {samples} samples, seed {seed}"
        expected[f"tokens at {how}"] = ["has", {
            "sample 0": f"41 {seed} {top_k} {int(temperature * 10)}", "sample 1": "5"}, 0]
        expected[f"tokens that the model reads at {how}"] = ["fact", str(7 + 2 * samples), 0]
    assert note == expected | {"bytes of the tensors that the model is given": [
        "at most", 4 * (9000 + 500) + 7 * 8, (1.15, 4096)]}


def test_a_ranks_share_of_the_work_is_told_per_step(tmp_path, monkeypatch):
    net = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net.weight]["mean"] = torch.zeros(16)

    def run(module, values, folder, spy):
        ran.append((values, spy.filled, spy.stop, spy.metered))
        spy.initial, spy.models, spy.forgotten = {"w": torch.ones(3)}, [net], forgotten
        spy.steps, spy.losses = {optimizer: 4, torch.optim.SGD([torch.ones(1)]): 2}, [1.25, 2.00001]
        spy.meter.work += Counter(optimizers=4003, validation=7)
        spy.meter.beside += Counter(optimizers=1000, validation=900)
        spy.messages, spy.accompanied = Counter(a=8, b=2), Counter(a=2, b=2)
        spy.received_bytes, spy.in_place, spy.blocking, spy.sent_in_backward = 40, 30, 403, 77
        spy.sent = Counter({("optimizers", "float32"): 80, ("optimizers", "bfloat16"): 43,
                            ("gradients and losses", "float32"): 202})
        spy.written = {f"{folder}/b", f"{folder}/c/a", "/elsewhere"}
        spy.parallel = [SimpleNamespace(modules_buffers=[1] * 3, broadcast_buffers=sends)
                        for sends in (False, True)]
        return ["a line"]

    monkeypatch.setattr(trace_runs, "run_watched", run)
    (tmp_path / "output1").write_bytes(b"step:0\nstep:1\nx step:2\nstep:3\n")
    for forgotten in 3, 0:
        ran = []
        trace_runs.ranks(None, {"seed": 5}, note := trace.Observations(), tmp_path / "log", 1)
        assert len(note) == 2 or not forgotten
    assert ran == [({"seed": 5}, False, True, False), (dict(
        seed=5, val_loss_every=0, train_loss_every=1, kernel_warmup_steps=1, compile=True,
        save_checkpoint=True), True, False, True)]
    run, rank = "on two ranks, rank 1", "rank 1"
    assert {what: value for what, (kind, value, _) in note.items() if kind != "tensors"} == {
        "beginning": [zlib.crc32(torch.ones(3).numpy().tobytes())],
        f"messages for which no optimizer waits, {rank}": "0", f"the log of a run {run}": [],
        f"validate returns ({run})": "float", f"validate rounds ({run})": "False",
        f"the first validation loss ({run})": {"": 1.25},
        f"the validation losses ({run})": {"loss 1": 1.25, "loss 2": 2.00001},
        f"lines of steps that {rank} prints": "2", f"files that {rank} writes": "a, b",
        f"buffers that DistributedDataParallel sends from {rank} before a pass": "3",
        f"matrix products of the optimizers on {rank} of 2, per step": 1000,
        f"share of the optimizers' products while updates are sent, {rank}": 0.25,
        f"share of messages beside which something is computed, {rank}": 0.62,
        f"share of received updates that arrive in the model's own tensors, {rank}": 0.75,
        f"bytes for which the optimizers stand still on {rank}, per step": 100,
        f"bytes that {rank} sends for the optimizers, per step": 30,
        f"bytes that {rank} sends for the gradients and losses, per step": 50,
        f"bytes that {rank} sends while gradients are computed, per step": 19,
        "state": {f"weight {zlib.crc32(torch.zeros(16).numpy().tobytes())}": 16}}
    assert note[f"the weights at the end, {rank}"][1]["weight"].equal(net.weight)


def test_a_call_with_large_tables_is_held_to_twice_what_16_bits_are_off():
    made = []

    def make(tables, **changes):
        made.append((tables, changes))
        net = torch.nn.Linear(2, 2)
        for param in net.parameters():
            param.data.fill_(tables * (1.25 if "bf16" in changes else 1.0))
        net.register_forward_hook(lambda *_: Spy.current.eight_bits["x"].update(
            both=2 * bool(changes)))
        return net

    call = (torch.ones(1, 2),), {}
    for changes, within in ({"bf16": True}, 0.5), ({"fast": True}, 5e-2):
        note = trace.Observations()
        assert trace_model._note_call(note, "it", make, call, changes, 30, 1e4)
        scale = 1.25 if "bf16" in changes else 1.0
        kind, seen, tolerance = note["the gradient in it"]
        assert (tolerance if "fast" in changes else tolerance["weight"]) == pytest.approx(within)
        assert seen["weight"].flatten().tolist() == pytest.approx([1e4 * 90 * scale] * 4)
        assert note["products of eight bits in it"][1] == "2 of both"
    assert made == [(30, {"bf16": True}), (30, {}), (30, {"fast": True})]
    for forms, told in ({True}, "the same result"), ({True, False}, "different results"):
        trace_precision._note_forms(note, SimpleNamespace(forms={"x": forms}), "x", "y")
        assert note["results of Triton's kernels by the x with y"][1] == {
            "tiles of all sizes give": told}


def test_what_runs_show_is_told_of_all_their_steps(tmp_path, monkeypatch):
    net, note, ran = torch.nn.Linear(4, 4, bias=False), trace.Observations(), []

    def run(module, values, folder, spy, meter=False):
        ran.append((values, spy.gradients, meter, Path(folder).name))
        spy.models, spy.steps = [net], {torch.optim.SGD(net.parameters()): 2}
        spy.compiling, spy.moves[1], spy.ready = {*spy.steps}, {"weight": net.weight}, [3, 2, 1]
        tokens = [torch.arange(6).view(2, 3) + number for number in (0, 1, 2)]
        spy.calls = [((some, some + 1), {}) for some in tokens]
        spy.settings["training pass"] = [(1,), (2,), (1,), (3,), (4,), (3,), (1,), (5,)]
        spy.places |= {"still": {1}, "moved": {1, 2}, "also": {3, 4}}
        spy.given |= {"f": {(1.0,), (2.0,)}, "g": {(3.0,)}}
        spy.dtypes["GPT"] |= {"float32", "bfloat16"}
        spy.threads, spy.started_late, spy.all_calls, spy.compiled_calls = {1, 2}, 1, 8, 6
        spy.meter.readings += Counter({"training pass": 2, "validation": 3, "backward pass": 4,
                                       "optimizers": 5})
        spy.meter.work += Counter({"training pass": 40, "backward pass": 80})
        spy.meter.low["training pass"], spy.meter.compiled["training pass"] = 10, 30
        return []

    for module in trace_runs, trace_precision:
        monkeypatch.setattr(module, "run_watched", run)
    (tmp_path / "log").mkdir()
    torch.save(dict(step=2, model=net.state_dict()), tmp_path / "log" / "checkpoint.pt")
    values = dict(train_steps=5, seq_len=8, micro_batch_size=2, adam_every=3)
    for job in trace_runs.updates, trace_runs.training, trace_precision.precision:
        job(None, values, note, folder=tmp_path / "log")
    changed = dict(values, kernel_warmup_steps=2, val_loss_every=3, scheduled_steps=5,
                   train_loss_every=2, save_checkpoint=True, compile=True)
    zero = dict(values, total_batch_size=16, val_tokens=16, val_loss_every=0, train_steps=3)
    low = dict(values, bf16=True, compile=True, train_steps=2, adam_every=2, val_loss_every=1,
               train_loss_every=0)
    assert ran == [(values, 0.02, False, "log"), (zero, 0.0, False, "log_zero"),
                   (changed, None, False, "log"),
                   (dict(changed, kernel_warmup_steps=0), None, False, "log_cold"),
                   (low, None, True, "log")]
    kept = torch.load(tmp_path / "run.pt")
    assert [args[0][0, 0] for args, _ in kept["calls"]] == [0, 2] and kept["groups"] == [1]
    numbers = "sets of numbers in the model's calls"
    told = ("batches", "share of", "sets", "table", "thread", "the inputs", "weights whose",
            "numbers", "the weights in the checkpoint are")
    assert {what: note[what][1] for what in note if what.startswith(told)} == {
        "the inputs of the first training pass": [*range(6)],
        f"{numbers}; the training pass is compiled for each": "5",
        f"{numbers}; the validation is compiled for each": "0",
        "tables of the model that move between calls": "also, moved",
        "threads other than the main one that run the script's code": 2,
        "batches that are ready when the model takes the third": 3,
        "batches that wait when the model takes the third": 3,
        "batches that wait, or are kept, after 12": 1,
        f"{numbers} that training has and the warm-up has not": "3",
        "sets of Python numbers in calls of compiled functions, each compiled by itself": 3,
        "the weights in the checkpoint are those of the run's end, bit for bit": "True",
        "share of bfloat16 in the matrix products of the training pass": {"": 0.25},
        "share of compiled code in the matrix products of the training pass": 0.75,
        "share of bfloat16 in the matrix products of the backward pass": {"": 0.0},
        "share of calls of the model that are compiled": {"": 0.75},
        "numbers that the model reads from tensors": "5",
        "numbers read from tensors between the model's calls": 4,
        "weights whose optimizer calls compiled code": 1}


def test_bytes_are_counted_where_the_system_counts_them(monkeypatch):
    files = {"/proc/self/io": "rchar: 12\nwchar: 3\n",
             "/proc/self/status": "Name: x\nVmHWM:\t  7 kB\n"}
    monkeypatch.setattr(trace_runs, "Path", lambda file: SimpleNamespace(
        read_text=lambda: files[file]))
    assert trace_runs._used() == (12, 7 * 1024)
    files["/proc/self/status"] = ""
    assert trace_runs._used() is None


def test_of_an_error_the_last_line_of_the_script_is_told(tmp_path, monkeypatch):
    script = tmp_path / "train_gpt.py"
    script.write_text("import math\n\ndef f():\n    math.sqrt('4')\n\nf()\n")
    monkeypatch.setenv("CHECKED_SCRIPT", str(script))
    with pytest.raises(TypeError) as error:
        runpy.run_path(str(script))
    assert explain(error.value)[1:] == (4, "math.sqrt('4')")
    for end, said in (
            (ValueError(), "ValueError"), (ValueError("x" * 400), f"ValueError: {'x' * 288}"),
            (RuntimeError("[rank1]:[E1 10:00] a\n b"), "RuntimeError: a b"),
            (SystemExit("x"), "it ends the process: sys.exit('x')")):
        assert explain(end) == (said, 0, "")


def test_small_steps_are_too_small_for_bfloat16(monkeypatch):
    given, note = [], Observations()
    monkeypatch.setattr(trace_precision, "run_watched",
                        lambda _, values, *rest: given.append(values))
    values = dict(muon_lr=0.64, micro_batch_size=2, seq_len=16, model_dim=24)
    trace_precision._note_small_steps(None, values, note, "folder")
    assert given == [dict(values, muon_lr=0.01, bf16=True, train_steps=12, val_loss_every=0,
                          total_batch_size=32, val_tokens=32)]


@pytest.mark.parametrize("seeded", [True, False])
def test_the_same_seed_is_tried_twice(seeded, monkeypatch):
    def run(module, values, folder, spy):
        torch.manual_seed(values["seed"]) if seeded else torch.seed()
        spy.initial = {"weight": torch.randn(8)}

    monkeypatch.setattr(trace_runs, "run_watched", run)
    trace_runs.beginnings(None, {}, note := Observations(), "run")
    assert note["the same seed gives the same weights"][1] == str(seeded)
    assert note["another seed gives other weights"][1] == "True"


def test_every_step_of_a_schedule_is_looked_at_and_lengths_that_adam_does_not_divide():
    def looks(id):
        """The milestone's module, and what shows of it with other functions."""
        module, values = load_snapshot(MANIFEST.get(id).script), odd_values(MANIFEST.get(id))

        def seen(**functions):
            other = ModuleType("other")
            vars(other).update({**vars(module), **functions})
            note = trace.Observations()
            trace.schedules(other, values, note)
            return dict(note)

        return module, seen

    module, seen = looks("08g")

    def late(step, args):  # from one step of the record on, and only in runs of an odd length
        return module.lr_multiplier(step, args) + 1e-3 * (step == 1001)

    def odd(step, args):
        return module.lr_multiplier(step, args) + 1e-3 * (step == 3 and args.train_steps == 8)

    wanted = seen()
    assert {found.what for found in differences(wanted, seen(lr_multiplier=late))} == {
        f"lr_multiplier over the record's hyperparameters{more}" for more in ("", ", 1 more steps")}
    assert [found.what for found in differences(wanted, seen(lr_multiplier=odd))] == [
        "lr_multiplier over a short run, 1 more steps"]
    tied, seen = looks("11")  # one of its functions has no step
    found = differences(seen(), seen(last_tied_step=lambda args: tied.last_tied_step(args) + 1))
    assert found and {f.what.startswith("numbers of ") for f in found} == {True}


def test_a_decay_that_rounds_weights_is_uneven_in_any_form_of_the_lower_bits():
    def cut(exact):
        bits = exact.view(torch.int32)
        return (bits >> 16).short().view(torch.bfloat16), bits.short()

    def nearest(exact):
        weights = exact.bfloat16()
        return weights, (exact.view(torch.int32) - (weights.view(torch.int16).int() << 16)).short()

    def decayed(parts, rounds):
        start = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = start.float()
        for _ in range(4):
            exact = exact - 0.02 * (parts(exact)[0].float() if rounds else exact)
        return unevenness(start, *parts(exact))

    assert max(decayed(cut, False), decayed(nearest, False)) < 1e-5
    assert min(decayed(cut, True), decayed(nearest, True)) > 2e-4


def test_zeros_and_nan_do_not_show_whether_they_were_rounded():
    assert precision_of(torch.zeros(2)) == precision_of(torch.tensor([0.1])) == "float32"
    assert precision_of(torch.tensor([0.5])) == "float32, holding what bfloat16 can"
    assert precision_of(torch.tensor([0.5, torch.nan])) == "float32, not all finite"


# ---- stand-ins and inputs ----


@pytest.mark.parametrize("window, longest, read", [
    ((-1, -1), (4, 4), [0.5, 0.5, 3.5, 3.5, 3.5, 3.5, 0]),
    ((1, 0), (4, 4), [0, 0.5, 2, 2.5, 3.5, 4.5, 0]),
    ((0, 1), (4, 4), [0.5, 1, 2.5, 3.5, 4.5, 5, 0]),
    ((2, 0), (3, 4), [0, 0.5, 2, 2.5, 3, 0, 0]), ((2, 0), (4, 3), [0, 0.5, 2, 2.5, 3, 0, 0])])
def test_attention_in_packs_reads_a_window_of_a_document(window, longest, read):
    starts, v = torch.tensor([0, 2, 6], dtype=torch.int32), torch.arange(7.0).view(7, 1, 1)
    found = varlen_attn(0 * v, 0 * v, v, starts, starts, *longest, window_size=window)
    assert found.flatten().tolist() == read, "nothing follows the last start or the longest"
    first = slice(None, 2)  # document; its second key weighs three times as much as its first
    k = torch.tensor([0, 0.5493061]).view(2, 1, 1)  # log(3) / 2
    found = varlen_attn(v[first] ** 0, k, v[first], starts[first], starts[first], 2, 2,
                        scale=2.0)
    assert found.flatten().tolist() == pytest.approx([0.75, 0.75])
    with pytest.raises(RuntimeError, match="cumulative sequence lengths must be int32"):
        varlen_attn(v, v, v, starts.long(), starts, 4, 4)


@pytest.mark.parametrize("whole, count, twice", [(None, 2, False), (0, 3, False), (1, 2, True)])
def test_a_block_mask_shows_the_tiles_that_it_lists(whole, count, twice):
    def tiles(counts, columns):
        return [torch.tensor([[some]], dtype=torch.int32) for some in (counts, columns)]

    full = [None, None] if whole is None else tiles([0, 1], [[0, 1], [whole, 1 - whole]])
    seen, *told = as_compiled(BlockMask.from_kv_blocks(
        *tiles([1, 1], [[0, 1], [1, 0]]), *full, BLOCK_SIZE=(2, 3),
        mask_mod=lambda b, h, q, k: q >= k))
    wanted = torch.block_diag(*[torch.ones(2, 3)] * 2).tril().bool()
    if whole is not None:
        wanted[2:, 3 * whole : 3 * whole + 3] = True
    q, k, head = torch.arange(4), torch.arange(6), torch.tensor(5)  # one mask is for all heads
    assert told == [count, twice]
    assert seen.mask_mod(head, head, q[:, None], k).equal(wanted)


def test_each_broken_shard_is_broken_in_its_own_way(tmp_path):
    write_shards(tmp_path)
    for what, change in BROKEN_INPUT.items():
        if (file := tmp_path / f"{[*change.values()][0]}.bin").exists():
            header, tokens = np.fromfile(file, "<i4", 256), np.fromfile(file, "<u2", offset=1024)
            assert [what] == [name for name, is_so in {
                "a file that is not a shard": header[0] != 20240520,
                "a shard that is cut short": header[2] > len(tokens),
                "a token beyond the vocabulary": tokens.max() > 60,
                "a shard with no target for a step's end": len(tokens) == 128,
                "a shard with too few tokens": len(tokens) == 100,
                "a shard of very short documents": (tokens == 1).mean() > 0.9}.items() if is_so]


def test_stand_ins_for_the_compiler_and_for_clocks():
    def f():
        pass

    assert _compile(f, disable=True) is _compile(disable=True)(f) is f
    assert f not in (_compile(f), _compile()(f))

    def child():
        stand_ins()
        Spy.current.now = 2.5
        assert (time.perf_counter(), time.time_ns()) == (2.5, 2_500_000_000)

    (process := FORK.Process(target=child)).start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("text, lines", [
    (None, ["the script's own text is missing"]),
    ("step:1\n", ["the script's own text is missing", "step:1"]),
    ("{own}step:1 {folder}/a /shards/x /c.pt\n", ["step:1 LOG_DIR/a SHARDS/x CHECKPOINT"])])
def test_a_log_is_read_without_what_differs_from_run_to_run(text, lines, tmp_path):
    script, log = tmp_path / "train_gpt.py", tmp_path / "log"
    script.write_text("from dataclasses import dataclass\n\n@dataclass\nclass Hyperparameters:\n"
                      "    log_dir: str = ''\n\nclass GPT:\n    def forward(self):\n        pass\n")
    module = load_snapshot(script)
    module.main = lambda args: text and (log.mkdir(), (log / "log.txt").write_text(
        text.format(own=script.read_text(), folder=args.log_dir)))
    values = {"train_files": "/shards/*.bin", "checkpoint": "/c.pt"}
    assert run_watched(module, values, log, Spy()) == lines


def test_the_conversations_tell_best_fit_from_first_fit(tmp_path):
    milestone = MANIFEST.get("e2a")
    module = load_snapshot(milestone.script)
    args = arguments(module, odd_values(milestone))
    write_shards(tmp_path)
    found, _ = module.read_conversations(tmp_path / "train.jsonl", args)
    first_fit = []
    for size in sorted((len(inputs) for inputs, _ in found), reverse=True):
        row = next((row for row in first_fit if sum(row) + size <= args.seq_len), None)
        if row is None:
            first_fit.append(row := [])
        row.append(size)
    packed = [[len(inputs) for inputs, _ in row] for row in module.pack(found, args.seq_len)]
    assert len(found) > 30 and sorted(map(sorted, packed)) != sorted(map(sorted, first_fit))
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").split("\n\n")
    assert ["".join(m["role"][0] for m in json.loads(line)["messages"]) for line in lines] == [
        *("s" * (n % 4 == 1) + "ua" * (1 + (n % 5 == 3)) for n in range(37)), "ua"]


def test_the_stand_in_for_triton_has_what_the_kernels_use():
    used = {name for id in IDS for name in re.findall(r"\btl\.(\w+)", source_of(id))}
    assert len(used) > 20 and used <= vars(modules(print)["triton.language"]).keys()


def test_the_stand_in_for_triton_runs_all_programs_and_compares_smaller_tiles():
    told, ran = [], []
    triton, tl = modules(lambda *seen: told.append(seen)).values()

    def kernel(x, out, N, KIND, SIZE):
        ran.append(SIZE)
        i, row = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.program_id(1) * N
        at = x + row + (i.to(tl.int64) if KIND == "wide" else i)
        found = tl.load(at, mask=i < N, other=1.0) * 2 * tl.num_programs(2)
        value = tl.no_such_function(x) if KIND == "unknown" else found
        tl.store(out + row + i, SIZE if KIND == "uneven" else value, mask=i < N)

    x, out = torch.randn(3, 40), torch.zeros(3, 40)
    forms = [triton.Config(dict(SIZE=size), num_warps=4) for size in (32, 64, 32)]
    for kind in ("", "wide", "uneven", "unknown"):
        made = triton.autotune(forms, key=["N"])(triton.jit(kernel))
        for more in ({6: 14, 12: 8}, {}):
            ran.clear()
            made[lambda sizes: (triton.cdiv(sizes["N"], sizes["SIZE"]), 3)](
                x, out, 40, KIND=kind, num_warps=8)
            assert kind or Counter(ran) == {32: 6, **more} and out.equal(2 * x)
    triton.jit(kernel)[2, 3](x, out, 40, "", SIZE=32)
    assert told == [(True, 0)] * 2 + [(True, 1)] * 2 + [
        (False, 0), (True, 0), (None, 0), (None, 0), (True, 0)] and out.equal(2 * x)


def test_the_stand_in_for_triton_computes_as_triton_does():
    triton, tl = modules(print).values()
    e4, i, x = torch.float8_e4m3fn, tl.arange(0, 8), torch.tensor([[1.0, 4.0], [-2.0, 3.0]])
    for values in (torch.ones(4).to(e4), torch.ones(4)):
        at = 0 + Pointer(values, set())
        tl.store(at + i, 2 * i, mask=(i > 1) & (i < 4))
        assert tl.load(at + i, mask=i < 4, other=7.0).tolist() == [1, 1, 4, 6, 7, 7, 7, 7]
        for bad in -1, 4:
            with pytest.raises(IndexError, match=f"a kernel's address {bad} in a tensor of 4 elem"):
                tl.load(at + bad)
        assert at.dtype.element_ty == values.dtype
    for value in 3.0, 5.0:
        tl.atomic_max(at + 2, torch.tensor(value))
        assert values[2] == max(4, value)
    tl.store(at + 2 * i[:2, None] + i[:2], 9.0, mask=i[:2] < 1)
    assert values.tolist() == [9, 1, 9, 6]
    assert [tl.swizzle2d(n // 2, n % 2, 3, 2, 2) for n in range(6)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert [(tl.cdiv(n, 2), triton.next_power_of_2(n)) for n in (7, 8)] == [(4, 8), (4, 8)]
    assert [shrunk(size) for size in (16, 128, 256, 346, 347)] == [3, 24, 48, 64, 12]
    for code, wanted in {
            "dot(x, x)": [[-7, 16], [-8, 1]], "dot(x, x, x)": [[-6, 20], [-10, 4]], "sum(x)": 6,
            "sum(x, axis=0)": [-1, 7], "max(x)": 4, "max(x, 1)": [4, 3], "trans(x)": x.T.tolist(),
            "clamp(x, -1.0, 3.0)": [[1, 3], [-1, 3]], "maximum(x, 2.0)": [[2, 4], [2, 3]],
            "minimum(2.0, x)": [[1, 2], [-2, 2]], "where(x > 2, x, 0)": [[0, 4], [0, 3]],
            "full((2,), 7, int32)": [7, 7], "zeros((2,), bfloat16)": [0, 0],
            "exp(x)[0]": [2.718282, 54.59815], "log(x)[0]": [0, 1.386294], "sqrt(x)[0]": [1, 2],
            "rsqrt(x)[0]": [1, 0.5], "sigmoid(x)[0]": [0.731059, 0.982014], "abs(x)[1]": [2, 3],
            "maximum(x * float('nan'), 0.0)[0]": [torch.nan] * 2}.items():
        torch.testing.assert_close(eval(code, vars(tl), dict(x=x)), torch.tensor(wanted),
                                   check_dtype=False, equal_nan=True)
    assert (tl.full((2,), 7, tl.int32).dtype, i.dtype) == (torch.int32, torch.int32)
    assert tl.dot(x.half(), x.half()).dtype == torch.float32
    eight = [torch.ones(100).index_fill(0, torch.arange(n), 1.125).to(e4) for n in (0, 2, 3)]
    assert [_close(some, eight[0]) for some in eight] == [True, True, False]
    assert [_close(x * by, x) for by in (1.0005, 1.002, torch.nan)] == [True, False, False]
    assert _close(x * torch.nan, x * torch.nan)


def test_values_are_the_checkers_then_odd_ones_of_the_tiny_scale(monkeypatch):
    monkeypatch.setattr(odd, "default_hyperparameters", lambda script: dict(
        lr=2.0, scale=5.0, cap=3.0, steps=9, seed=7, flag=True, log_dir="x", path="y", pattern=
        "abcdef", file=None))
    tiny = dict(lr=4.0, steps=5, num_layers=4)
    for fixed, layers in (dict(cap=7.0, seed=8, path="z"), 4), (dict(num_layers=3), 3):
        manifest = SimpleNamespace(inherited=lambda m, kind, found=fixed: dict(check=found)[kind],
                                   overrides=lambda m, kind: dict(tiny=tiny)[kind])
        monkeypatch.setattr(odd, "load_manifest", lambda found=manifest: found)
        monkeypatch.setattr(odd, "load_glossary", lambda: SimpleNamespace(
            of_kind=lambda kind: {kind}))
        assert odd_values(SimpleNamespace(script=None)) == dict(
            lr=4.0 * 0.93, scale=5.0 * 0.93, cap=3.0 * 0.93, steps=5, seed=7, flag=True, pattern=
            "abcdef"[:layers]) | {name: v for name, v in fixed.items() if name != "num_layers"}


# ---- how two scripts differ ----


def test_few_numbers_that_differ_are_told_as_such():
    wanted, seen = torch.ones(1000), torch.ones(1000)
    seen[7] = 1.2
    (found,) = differences({"gate": ["tensors", {"weight": wanted}, 1e-3]},
                           {"gate": ["tensors", {"weight": seen}, 1e-3]})
    assert found.got == "RMS 1.00022, and differs by 0.63%"
    (found,) = differences({"gate": ["tensors", {"weight": wanted}, 1e-3]},
                           {"gate": ["tensors", {"weight": wanted * 1.2}, 1e-3]})
    assert found.got == "RMS 1.2, 1.2 times the milestone's"
    zeros = {"weight": wanted, "bias": torch.zeros(1000)}  # round-off may be left of them
    assert not differences({"gate": ["tensors", zeros, 1e-3]}, {
        "gate": ["tensors", zeros | {"bias": torch.full((1000,), 1e-8)}, 0]})
    assert not differences({"gate": ["tensors", {"weight": wanted}, {"weight": 0.3}]},
                           {"gate": ["tensors", {"weight": wanted * 1.2}, 0]})  # its own tolerance


@pytest.mark.parametrize("line, fault", [
    ("step:1/1 train_loss:5.1234 step_avg:3.50ms", None), ("step:1/1 train_loss:nan", None),
    ("step:1/1 train_loss:5.1235 step_avg:3.50ms", None),  # another machine's last digit
    ("step:1/1 train_loss:5.12345 step_avg:3.50ms", "5.12345"),  # another number of decimals
    ("step:1/1 train_loss:5.2234 step_avg:3.50ms", "5.2234"), ("step:1/1 loss:5.1234", "loss"),
])
def test_lines_of_a_log(line, fault):
    wanted = "step:1/1 train_loss:nan" if "nan" in line else (
        "step:1/1 train_loss:5.1234 step_avg:3.50ms")
    found = differences(*({"the log": ["log", [text], 0]} for text in (wanted, line)))
    assert bool(found) == bool(fault) and all(fault in deviation.got for deviation in found)


NAN, LONG = float("nan"), "y" * 89

@pytest.mark.parametrize(("kind", "wanted", "seen", "tolerance", "told"), [
    ("fact", "a", "", 0, ("a", "none")), ("fact", "", "b", 0, ("none", "b")),
    ("numbers", {"a": 1.0}, {"a": 1.0, "b": 2.0}, 1e-3, ("1 of them", "2")),
    ("numbers", {"": 1000.0}, {"": 1000.9}, 1e-3, None),
    ("numbers", {"": 1.0}, {"": 1.0011}, 1e-3, ("1", "1.001")),
    ("numbers", {"": 0.0}, {"": 0.0009}, 1e-3, None),
    ("numbers", {"": 0.0}, {"": 0.0011}, 1e-3, ("0", "0.0011")),
    ("numbers", {"a": 1.0, "b": 2.0}, {"a": 1.0}, 0, ("b = 2", "no value (1 of 2 values differ)")),
    ("numbers", {"a": 1.0, "b": 2.0}, {"a": 1.00001, "b": 3.0}, 0,
     ("a = 1", "1.00001 (2 of 2 values differ)")),
    ("numbers", {"": 1.0}, {"": 1.0000001}, 0, ("1", "1.0000001")),
    ("numbers", {"": NAN}, {"": 1.0}, 0, ("nan", "1")), ("numbers", {"": NAN}, {"": NAN}, 0, None),
    ("at most", 1000, 2004, (2, 4), None),
    ("at most", 1000, 2005, (2, 4), ("1,000, or not much more", "2,005")),
    ("at least", 10000, 8000, 0.8, None),
    ("at least", 10000, 7999, 0.8, ("10,000, or not much less", "7,999")),
    ("has", {"a": "x"}, {"a": "x", "b": "y"}, 0, None),
    ("has", {"f": "(step)", "a": "", "b": "y"}, {"a": "x", "b": "z"}, 0,
     ("f(step), a, b: y", "no f, a: x, b: z")),
    ("same", {"a": "x"}, {"a": "x", "b": "y"}, 0, ("nothing else", "also b: y")),
    ("same", {"a": "x", "b": "y"}, {"a": "x", "c": "z"}, 0, ("b: y", "no b; also c: z")),
    ("in common", {"a": "x", "b": "y"}, {"a": "z", "c": "w"}, 0, ("a: x", "a: z")),
    ("as precise", dict(a="half", b="float32"), dict(a="float32", b="half"), 0,
     ("b: float32", "b: half")),
    ("log", ["step:1"], ["step:1", "note:2"], 0, None),
    ("log", ["step:1"], ["step:1", "step:2"], 0, ("no more lines", "the line `step:2`")),
    ("log", ["step:1", "step:2"], ["step:1"], 0, ("the line `step:2`", "no more lines")),
    ("log", ["x:0.00100 y:5000.0"], ["x:0.00148 y:5001.9"], 0, None),
    ("log", ["x:0.00100"], ["x:0.00152"], 0, ("the line `x:0.00100`", "`x:0.00152`")),
    ("log", ["y:5000.0"], ["y:5002.1"], 0, ("the line `y:5000.0`", "`y:5002.1`")),
    ("log", ["a:" + "x" * 88], [f"a:{LONG}"], 0,
     (f"the line `a:{'x' * 88}`", f"`a:{LONG[1:]} …`")),
    ("log", ['h:{"a": 1, "b": "x"}'], ['h:{"a": 2, "b": "x", "c": 3}'], 0,
     ("in the line `h:` a: 1", "a: 2")),
    ("log", ['h:{"a": 4}'], ['h:{"a": "4"}'], 0, ("in the line `h:` a: 4", "a: '4'")),
    ("clue", [*range(9)], [0, 1, 2, 4, 4, 5, 6, 7, 8], 0, None),
])
def test_more_than_is_wanted_is_a_fault_or_not(kind, wanted, seen, tolerance, told):
    found = differences({"it": [kind, wanted, tolerance]}, {"it": [kind, seen, 0]})
    assert [(deviation.expected, deviation.got) for deviation in found] == [told] * bool(told)


def test_how_tensors_differ_is_told_in_numbers():
    one = torch.ones(4)
    for kind, wanted, seen, told in (
            ("tensors", {"a": one, "b": one}, {"a": one, "c": one}, ("a, b", "none of b; also c")),
            ("tensors", {"a": one}, {"a": one, "c": one}, ("a", "also c")),
            ("tensors", {"a": one}, {"a": torch.ones(2, 2)},
             ("a: (4,), torch.float32", "(2, 2), torch.float32")),
            ("tensors", {"a": one}, {"a": one.half()},
             ("a: (4,), torch.float32", "(4,), torch.float16")),
            ("tensors", {"a": one}, {"a": 1.001 * one}, None),
            ("tensors", {"a": one}, {"a": 1.0012 * one},
             ("a: RMS 1", "RMS 1.001, and differs by 0.12%")),
            ("tensors", {"a": one}, {"a": -2 * one},
             ("a: RMS 1", "RMS 2, -2 times the milestone's")),
            ("tensors", {"a": one}, {"a": one.cumsum(0).clamp(max=3) / 3},
             ("a: RMS 1", "RMS 0.7993, and differs by 37.27%")),
            ("tensors", dict(a=1e3 * one, b=one), dict(a=1e3 * one, b=1.01 * one),
             ("b: RMS 1", "RMS 1.01, 1.01 times the milestone's (1 of 2 tensors differ)")),
            ("tensors", {"a": 0 * one}, {"a": one}, ("a: RMS 0", "RMS 1")),
            ("tensors", {"a": one}, {"a": one / 0}, ("a: RMS 1", "RMS inf")),
            ("tensors", dict(a=one, b=one), dict(a=1.496 * one, b=1.5 * one),
             ("a: RMS 1", "RMS 1.496, 1.5 times the milestone's (2 of 2 tensors differ)")),
            ("tensors", dict(a=one, b=one, c=one), dict(a=1.48 * one, b=1.5 * one, c=one),
             ("b: RMS 1", "RMS 1.5, 1.5 times the milestone's (2 of 3 tensors differ)")),
            ("tables", dict(a=one, b=one, c=one), dict(a=torch.ones(5), b=3 * one),
             ("b: RMS 1", "RMS 3, 3 times the milestone's"))):
        found = differences({"it": [kind, wanted, 1e-3]}, {"it": [kind, seen, 0]})
        assert [(deviation.expected, deviation.got) for deviation in found] == [told] * bool(told)


def test_what_stops_a_script_comes_first_and_what_may_follow_from_it_is_left_out():
    stops, dtype = ["error", "ValueError: x", 3, "f(x)"], Deviation("dtype", "float32", "half")
    wanted = {"a GPU": ["error", "none", 1, ""], "dtype": ["fact", "float32", 0],
              "run": ["fact", "2", 0], "later": ["has", {"x": "y", "z": ""}, 0]}
    seen = {"dtype": ["fact", "half", 0], "run": stops, "a GPU": ["error", "another", 1, ""]}
    assert (dtype.line, dtype.source, dtype.milestone_line) == (0, "", 0)
    assert differences(wanted, seen) == [
        Deviation("run", "it runs to its end", "it stops: ValueError: x", 3, "f(x)"), dtype]
    later = Deviation("later", "x, z", "nothing of the kind")
    ran = differences(wanted | {"in": ["clue", [1], 0]}, seen | {"in": ["clue", [2], 0]})
    assert [deviation.what for deviation in ran] == ["run", "in", "dtype"]
    wanted |= {"lines": ["log", ["x" * 91], 0], "bytes": ["at most", 7, (1, 0)]}
    assert differences(wanted, {**seen, "run": wanted["run"]}) == [
        dtype, later, Deviation("lines", f"{'x' * 90} …", "nothing of the kind"),
        Deviation("bytes", "7", "nothing of the kind")]
    assert alike({"run": stops}, {"run": [*stops[:2], 4, ""]})
    assert not alike({"run": stops}, {"run": ["error", "ValueError: y", 3, "f(x)"]})
    found = [dtype, Deviation("run", "2", "3"), later, Deviation("other", "4", "5")]
    assert further_signs(found, wanted) == (
        "later: nothing of the kind, not x, z; other: 5, not 4")
    assert further_signs([*found[:3], later], wanted) == "later: nothing of the kind, not x, z"


def test_numbers_of_a_log_follow_other_differences_and_its_words_do_not():
    wanted = {"log": ["log", ["loss:1.5"], 0], "dtype": ["fact", "float32", 0]}
    for line, order in ("loss:2.5", ["dtype", "log"]), ("loss:1.5 s", ["log", "dtype"]):
        found = differences(wanted, {"log": ["log", [line], 0], "dtype": ["fact", "half", 0]})
        assert [deviation.what for deviation in found] == order


def test_data_come_before_losses_and_losses_before_the_gradients_that_follow():
    def shown(token, loss, gradient, dtype="float32"):
        return {"the inputs": ["clue", [7, token, *range(8)], 0], "the gradient in call 1": [
                    "tensors", {"a": torch.ones(4) * gradient, "b": torch.ones(4)}, 1e-3],
                "the loss of call 1": ["numbers", {"": loss}, 1e-5], "dtype": ["fact", dtype, 0]}

    def order(*others):
        return [found.what for found in differences(shown(5, 1.0, 1.0), shown(*others))]

    assert order(6, 2.0, 3.0, "float16") == [
        "the inputs", "dtype", "the loss of call 1", "the gradient in call 1"]
    assert order(5, 1.0, 3.0) == ["the gradient in call 1"]
    assert order(6, 1.0, 1.0) == [], "the same losses of other tokens: a clue is no fault"
    wanted = shown(5, 1.0, 1.0)
    found = differences(wanted, shown(6, 2.0, 3.0, "float16"))
    assert (found[0].expected, found[0].got) == (
        "token 1 and those after it are 5, 0, 1, 2, 3, 4 ...", "6, 0, 1, 2, 3, 4 ...")
    assert further_signs(found, wanted) == (
        "dtype: float16, not float32; the loss of call 1: 2, not 1")


def test_tokens_are_a_clue_where_as_many_are_others():
    def clue(seen):
        return [found.got for found in differences(
            {"in": ["clue", [1, 2, 3], 0], "loss": ["fact", "1", 0]},
            {"in": ["clue", seen, 0], "loss": ["fact", "2", 0]})]

    assert clue([1, 5, 3]) == ["5, 3 ...", "2"]
    assert clue([1, 2, 3]) == clue([1, 5]) == clue([1, 5, 3, 4]) == ["2"]


def test_two_scripts_that_end_in_nan_show_the_same():
    def seen(loss, weight):
        return {"the loss": ["numbers", {"": loss}, 1e-5],
                "the move": ["tensors", {"w": torch.tensor([1.0, weight, torch.inf])}, 1e-3]}

    assert alike(seen(torch.nan, torch.nan), seen(torch.nan, torch.nan))
    assert not alike(seen(torch.nan, torch.nan), seen(2.0, torch.nan))
    assert not alike(seen(torch.nan, torch.nan), seen(torch.nan, torch.inf))


@pytest.mark.parametrize(("scale", "shift", "is_told"), [
    (1, 0, False), (2, 0, True), (0.5, 0, True), (1, 0.5, True), (1, -0.5, True)])
def test_random_weights_are_held_to_their_distribution(scale, shift, is_told):
    torch.manual_seed(0)
    steps = torch.linspace(0, 1, 101)
    wanted, seen = (torch.randn(4096).quantile(steps) for _ in range(2))
    found = differences({"init": ["spread", {"w": wanted}, {"w": 4096}]},
                        {"init": ["spread", {"w": scale * seen + shift}, {"w": 4096}]})
    assert bool(found) == is_told


@pytest.mark.parametrize("level, error", [(0.02, 0.018), (0.1, 0.0374), (0.25, 0.0536),
                                          (0.5, 0.0618), (0.75, 0.0536), (0.9, 0.0374),
                                          (0.98, 0.018)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_share_of_random_weights_may_be_off_by_its_sampling_error(level, error, sign):
    even, zero = torch.linspace(0, 1, 10_001), torch.zeros(10_001)
    for share, is_told in (0.97, False), (1.03, True):
        there = level + sign * share * error  # this share is below what `level` should be below
        seen = torch.where(even < there, even * level / there,
                           1 - (1 - even) * (1 - level) / (1 - there))
        found = differences({"init": ["spread", {"w": even, "0": zero}, {"w": 4096, "0": 4096}]},
                            {"init": ["spread", {"w": seen, "0": zero}, 0]})
        assert bool(found) == is_told
    assert found[0].expected == "w from 0 to 1, half of them from 0.25 to 0.75"
    half = f"half of them from {seen[2500]:.3g} to {seen[7500]:.3g}"
    assert found[0].got == f"from 0 to 1, {half}"


def test_of_many_names_that_differ_in_one_way_the_first_is_told():
    def told(count):
        wanted = {"dtypes": ["has", {f"w{i}": "float32" for i in range(count)} | {"x": "new"}, 0]}
        (found,) = differences(wanted, {"dtypes": ["has", {f"w{i}": "half" for i in range(count)},
                                                   0]})
        return found.expected, found.got

    assert told(23) == ("w0 and 22 others: float32, x: new", "w0 and 22 others: half, no x")
    assert told(7) == ("w0 and 6 others: float32, x: new", "w0 and 6 others: half, no x")
    for count in 6, 2:
        each = [f"w{i}: " for i in range(count)]
        assert told(count) == (", ".join([f"{name}float32" for name in each] + ["x: new"]),
                               ", ".join([f"{name}half" for name in each] + ["no x"]))


@pytest.mark.parametrize("count, more", [(12, ""), (13, " and 1 more")])
def test_of_many_names_twelve_are_listed(count, more):
    names = {f"w{i}": str(i) for i in range(count)}
    (found,) = differences({"it": ["has", names, 0]}, {"it": ["has", {}, 0]})
    assert found.got == ", ".join(f"no w{i}" for i in range(12)) + more
