"""Observes what one script does: each job is run in a process of its own by speedrun.check.worker.

A job gets the imported script and writes observations, {what: [kind, value, tolerance]}; the
kinds are those of speedrun.check.differences. Nothing here knows a milestone: what to look at
follows from the script.
"""

import dataclasses
import importlib.util
import inspect
import math
import os
import re
import runpy
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from speedrun.check.spy import LATE, Spy, arguments, dtype_name, fill, run, triton
from speedrun.history.glossary import load_glossary
from speedrun.scripts.find import load_snapshot
from speedrun.scripts.sizes import length_names

SHARES = torch.linspace(0, 1, 501)  # at which a distribution's quantiles are noted
SEEDS = 16  # from which weights are drawn, so that small tensors have a distribution, too
RUN = "run.pt"  # the file with the model's calls and the sizes of the optimizers' groups
LONGER = 32  # sequences, where a machine's switches are tried
UNMASKED = 16_640  # tokens: a dense mask for so many takes gigabytes
# What tools call by name in any milestone; schedules, functions of (step, args), come on top.
CONTRACT = ("Hyperparameters", "parse_args", "GPT", "validate", "main")


class Observations(dict):
    """What a job has seen so far, {what: [kind, value, tolerance]}."""

    def note(self, what, kind, value, tolerance=0.0):
        """Keeps a value under a description that messages show."""
        self[what] = [kind, value, tolerance]

    def fact(self, what, value):
        """Keeps what has to be just so."""
        self.note(what, "fact", str(value))

    @contextmanager
    def guard(self, what):
        """Whatever the script raises inside becomes an observation; the job goes on."""
        try:
            yield
        except BaseException as error:
            self[what] = ["error", *explain(error)]


def explain(error):
    """An exception as (text, line number or 0, text of the line): the last line of the script."""
    what = " ".join(str(error).split())
    text = f"{type(error).__name__}: {what}" if what else type(error).__name__
    if isinstance(error, SystemExit):
        text = f"it ends the process: sys.exit({error.code!r})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == os.environ.get("CHECKED_SCRIPT"):
            return text[:300], frame.lineno, (frame.line or "").strip()[:100]
    return text[:300], 0, ""


def _schedules(module):
    """{name: function} of the script's functions of (step, args)."""
    return {name: value for name, value in vars(module).items() if inspect.isfunction(value)
            and list(inspect.signature(value).parameters) == ["step", "args"]}


# ---- the jobs ----


def contract(module, values, note, **_):
    """Names, fields, defaults here and on a GPU, and the command line."""
    names = dict.fromkeys(_schedules(module), "(step, args)")
    note.note("names", "has", names | {n: "" for n in CONTRACT if hasattr(module, n)})
    with note.guard("the fields of Hyperparameters"):
        note.note("the fields of Hyperparameters", "has", _fields(module.Hyperparameters))
    gpu = mock.patch.multiple(torch.cuda, is_available=lambda: True,
                              get_device_capability=lambda *_: (9, 0))  # an H100's
    with note.guard("the defaults on a machine with a GPU"), gpu, triton():
        other = runpy.run_path(module.__file__)["Hyperparameters"]
        note.note("the defaults on a machine with a GPU", "has", _fields(other))
    if "flash_attn" in Path(module.__file__).read_text(encoding="utf-8"):
        _other_machines(module, note)
    with note.guard("parse_args"):
        parsed = {}
        for field in dataclasses.fields(module.Hyperparameters):
            default = getattr(module.Hyperparameters(), field.name)
            other = {int: 12345, float: 0.375, str: "other_text"}.get(type(default), not default)
            value = getattr(module.parse_args([f"--{field.name}={other}"]), field.name)
            parsed[field.name] = f"{type(value).__name__} {value!r} from --{field.name}={other}"
        note.note("parse_args", "has", parsed)
    with note.guard("parse_args of a wrong option"):
        note.note("parse_args of a wrong option", "has", {
            option: _exit_code(module.parse_args, [option])
            for option in ("--no_such_field=1", "--save_checkpoint=maybe", "--seed=many", "5")})
    with note.guard("a start with --help"):
        sys.argv = [module.__file__, "--help"]
        how = _exit_code(runpy.run_path, module.__file__, None, "__main__")
        note.fact("a start with --help", how)


def _other_machines(module, note):
    """The defaults on GPUs of several generations, with packages for attention that are not here,
    and with an older torch."""
    find_spec, this = importlib.util.find_spec, torch.__version__
    for machine, capability, version in (
            ("a T4", (7, 5), this), ("an A100", (8, 0), this), ("an H100", (9, 0), this),
            ("a B200", (10, 0), this), ("an H100 with torch 2.11", (9, 0), type(this)("2.11.0"))):
        what = f"the defaults on {machine} with FlashAttention's packages"
        with note.guard(what), mock.patch.multiple(
                torch.cuda, is_available=lambda: True,
                get_device_capability=lambda *_, capability=capability: capability
        ), mock.patch.object(torch, "__version__", version), mock.patch.object(
                importlib.util, "find_spec",
                lambda name, *more: find_spec("torch" if "flash_attn" in name else name, *more)):
            there = runpy.run_path(module.__file__)["Hyperparameters"]
            note.note(what, "has", _fields(there))


def _exit_code(function, *arguments):
    try:
        function(*arguments)
    except SystemExit as error:
        return f"ends with exit code {error.code}"
    return "comes to its end without a word"


def _fields(kind):
    found = {}
    for field in dataclasses.fields(kind):
        value = getattr(kind(), field.name)
        if field.default_factory is not dataclasses.MISSING:  # it depends on time and process
            value = f"{str(value).split('/')[0]}/..."
        found[field.name] = f"{value!r} ({type(value).__name__})"
    return found


def schedules(module, values, note, **_):
    """Every function of (step, args), over all steps of runs of three lengths."""
    steps = load_glossary().of_kind("steps", "phase")
    longer = {k: v * 13 if k in steps else v for k, v in values.items()}
    settings = {"a short run": arguments(module, values),
                "the record's hyperparameters": module.Hyperparameters(),
                "longer runs' hyperparameters": arguments(module, longer)}
    for name, function in _schedules(module).items():
        for whose, args in settings.items():
            with note.guard(f"{name} over {whose}"):
                steps = range(args.train_steps + 1)
                some = [*steps[:: max(1, len(steps) // 997)], args.train_steps]
                note.note(f"{name} over {whose}", "numbers", {
                    f"{name}({step}) of {args.train_steps} steps": float(function(step, args))
                    for step in some}, 1e-6)
                whole = all(type(function(step, args)) is int for step in steps[:3])
                note.fact(f"type of {name}", f"whole number: {whole}")


def model(module, values, note, calls, machine, paths, **_):
    """The model with given weights: its tensors, logits, loss and gradients.

    calls: a file with calls of the milestone's model. machine: switches that follow the machine;
    paths: (name, value) of choices that do.
    """
    def make(scale=1.0, **changes):
        net = module.GPT(arguments(module, {**values, **changes}))
        fill(net, scale)
        return net

    with note.guard("the tensors at the record's sizes"), torch.device("meta"):
        net = module.GPT(module.Hyperparameters())
        note.note("the tensors at the record's sizes", "same", {
            name: "x".join(map(str, tensor.shape)) or "a number"
            for name, tensor in net.state_dict().items()})
        note.fact("the number of parameters at the record's sizes",
                  f"{sum(p.numel() for p in net.parameters()):,}")
    calls = torch.load(calls, weights_only=True)["calls"]
    inputs = calls[0][0][0]
    for number, (args, kwargs) in enumerate(calls, start=1):
        where = f"call {number} of the model"
        with note.guard(where):
            net = make()
            loss = net(*args, **kwargs)
            note.note(f"the loss of {where}", "numbers", {"": loss.item()}, 2e-5)
            note.fact("dtype of the loss", loss.dtype)
            loss.backward()
            note.note(f"the gradient in {where}", "tensors", {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in net.named_parameters()}, 2e-3)
    with note.guard("the tables at the record's lengths"):
        record = vars(module.Hyperparameters())
        net = module.GPT(arguments(module, {
            **values, **{name: record[name] for name in length_names(record)}}))
        note.note("the tables at the record's lengths, without signs", "tables", {
            name: table[-1000:].float().abs() for name, table in net.named_buffers()
            if table.ndim > 1}, 1e-2)  # signs are for forward
    with note.guard("the loss of the vocabulary's last tokens"), torch.no_grad():
        size = module.Hyperparameters().vocab_size
        tokens = torch.arange(size - inputs.size(1) * 8, size).view(8, -1)
        note.note("the loss of the vocabulary's last tokens", "numbers",
                  {"": make(vocab_size=size)(tokens, tokens).item()}, 1e-4)
    for what, some, scale, tolerance in (
            ("logits", inputs, 1.0, 1e-4),
            ("logits of a short prompt", inputs[:1, :7], 1.0, 1e-4),
            ("logits of small weights", inputs, 1e-3, 3e-2)):  # they show the epsilon of a norm
        with note.guard(what), torch.no_grad():
            net = make(scale).eval()
            logits = net(some)
            note.note(what, "tensors", {"logits": logits}, tolerance)
            note.fact(f"{what}: later tokens change earlier ones", _leaks(net, some, logits))
    record = vars(module.Hyperparameters())
    windows = {name: record[name] for name in load_glossary().of_kind("window") if name in record}
    # Documents begin within tiles and reach over more of them than a window; one fills a half; the
    # last tile is not full. They are long, as bfloat16 is too coarse for large angles, say.
    longer = inputs.repeat(1, LONGER).roll(3, 1)[:, :-1]
    half = longer[:, longer.size(1) // 2 :]
    half[half == values.get("bos_id", -1)] = 2
    lengths = dict.fromkeys(length_names(values), longer.size(1))
    if windows:
        with note.guard("logits with the record's windows"), torch.no_grad():
            logits = make(**windows, **lengths).eval()(longer)
            note.note("logits with the record's windows", "tensors", {"logits": logits}, 1e-4)
    many = longer[:1].clone()  # documents, more than eight bits with a sign can count
    many[:, : many.size(1) * 2 // 3 : 2] = values.get("bos_id", 1)
    with note.guard("logits of many documents"), torch.no_grad():
        logits = make(**lengths).eval()(many)
        note.note("logits of many documents", "tensors", {"logits": logits}, 1e-4)
    for field, value in [*((field, True) for field in machine), *paths]:
        path = f"{field}={value}"
        what = f"logits with {path}"
        switched = {field: value, "compile": True, **lengths}
        with note.guard(what), torch.no_grad():
            spy = Spy()
            net = module.GPT(arguments(module, {**values, **switched}))
            note.note(f"dtypes of the parameters with {path}", "same", {
                name: dtype_name(p.dtype) + ", holding what bfloat16 can" * _is_rounded(p)
                for name, p in net.named_parameters()})
            tables = {name: table for name, table in net.named_buffers() if table.ndim > 1}
            note.note(f"dtypes of the tables with {path}", "in common", {
                name: dtype_name(table.dtype) for name, table in tables.items()})
            note.note(f"the tables with {path}, without signs", "tables", {  # signs are for forward
                name: table.float().abs() for name, table in tables.items()}, 4e-2)
            note.fact(f"FlashAttention that is activated with {path}", ", ".join(spy.activated))
            logits = make(**switched).eval()(longer)
            loose = logits.dtype == torch.bfloat16 or "bf16" in field
            note.note(what, "tensors", {"logits": logits}, 4e-2 if loose else 1e-3)
            note.fact(f"{what} are rounded to bfloat16", _is_rounded(logits))
            note.fact(f"flex_attention is called with {path}", bool(spy.masks))
            note.fact(f"varlen_attn is called with {path}", spy.packs)
            if spy.masks:
                note.fact("rows and tiles of FlexAttention's mask", spy.masks[-1])
                note.note("tiles that FlexAttention's mask lists", "at most", spy.tiles, (1, 0))
            logits = make(**switched).eval()(many)
            note.note(f"logits of many documents with {path}", "tensors", {"logits": logits},
                      4e-2 if loose else 1e-3)
            if spy.masks:
                note.note("tiles that FlexAttention's mask lists for many documents", "at most",
                          spy.tiles, (1, 0))
        where = f"call 1 of the model with {path}"
        if _note_call(note, where, make, calls[0], {field: value, "compile": True}):
            where += ", out of the range of eight bits"
            _note_call(note, where, make, calls[0], {field: value, "compile": True}, 30, 1e4)


def _note_call(note, where, make, call, changes, weights=1.0, gradients=1.0):
    """Notes loss and gradients of a call, with weights and gradients times these factors; returns
    whether any product is in eight bits."""
    with note.guard(where), Spy().meter as meter:
        args, kwargs = call
        net = make(weights, **changes)
        loss = net(*args, **kwargs)
        (gradients * loss).backward()
        note.note(f"the loss of {where}", "numbers", {"": loss.item()}, 1e-2)
        note.note(f"the gradient in {where}", "tensors", {  # of scalars round-off may be left
            name: p.grad.float() for name, p in net.named_parameters() if p.ndim > 1}, 5e-2)
        counts = sum(meter.eight_bits.values(), Counter())
        note.fact(f"products of eight bits in {where}", _counted(counts))
        return counts.total() > 0


def _counted(counts):
    return ", ".join(f"{count} of {what}" for what, count in sorted(counts.items()))


def _is_rounded(values):
    return torch.equal(values.to(torch.bfloat16).to(values.dtype), values)


def _leaks(net, inputs, logits):
    other = inputs.clone()
    other[:, -1] = (other[:, -1] + 1) % 7 + 2
    return not torch.allclose(net(other)[:, :-1], logits[:, :-1], atol=1e-5)


def updates(module, values, note, folder, **_):
    """A run from given weights whose optimizers get gradients from outside."""
    spy, lines = Spy(gradients=True), []
    try:
        lines = run(module, values, folder, spy)
    finally:
        for number, moves in spy.moves.items():
            note.note(f"the move in step {number}", "tensors", moves, 4e-3)
        _note_run(note, spy, "with gradients from outside", lines)
    for what, kinds in spy.kinds.items():
        note.fact(f"how the model is called in the {what}", "; ".join(sorted(kinds)))
    for what, modes in spy.modes.items():
        note.fact(f"model.training in the {what}", ", ".join(map(str, sorted(modes))))
    for what, settings in spy.settings.items():
        note.fact(f"sets of numbers in the model's calls, for each of which the {what} is compiled",
                  len(set(settings)))
    note.fact("tables of the model that move between calls",
              ", ".join(sorted(name for name, some in spy.places.items() if len(some) > 1)))
    note.note("threads besides the main one that run the script's code", "at least",
              len(spy.threads), 0.01)
    early, late = spy.ready[0] if spy.ready else 0, spy.ready[-1] if spy.ready else 0
    note.note("batches that are ready when the model takes the third", "at least", early, 1.0)
    note.note("batches that wait when the model takes the third", "at most", early, (2, 0))
    note.note(f"batches that wait, or are kept, after {LATE}", "at most", late, (2, 0))
    note.fact("a thread starts after the first training pass", spy.started_late > 0)
    groups = [len(group["params"]) for optimizer in spy.steps for group in optimizer.param_groups]
    torch.save(dict(calls=[spy.calls[i] for i in sorted({0, len(spy.calls) - 1})], groups=groups),
               Path(folder).with_name(RUN))


def _note_run(note, spy, which, lines):
    note.note(f"the log of a run {which}", "log", lines)
    losses = _losses(spy)
    note.fact(f"validate returns ({which})",
              ", ".join(sorted({type(loss).__name__ for loss in spy.losses})))
    note.fact(f"validate rounds ({which})",
              bool(losses) and all(loss == round(loss, 4) for loss in losses.values()))
    if len(losses) > 1:  # a single one is the last
        note.note(f"the first validation loss ({which})", "numbers", {"": losses["loss 1"]}, 1e-5)
    if losses:
        note.note(f"the validation losses ({which})", "numbers", losses, 4e-4)


def _losses(spy):
    """What validate returned; what is no number as such."""
    return {f"loss {number}": float(loss) if isinstance(loss, int | float) else math.nan
            for number, loss in enumerate(spy.losses, start=1)}


def training(module, values, note, folder, shards, **_):
    """The weights from the script's own seeds; a run after a kernel warm-up, with a checkpoint."""
    weights = []
    for number, seed in enumerate((*range(SEEDS), 0)):
        spy = Spy(filled=False, stop=True)
        run(module, {**values, "seed": seed}, f"{folder}_{number}", spy)
        weights.append(spy.initial or {})
    drawn = {name: torch.stack([some[name].float() for some in weights[:-1]])
             for name in weights[0]}
    fixed = {name: (some == some[0]).all(0) for name, some in drawn.items()}
    note.note("the initial weights that no seed changes", "tensors",
              {name: some[0].where(fixed[name], 0) for name, some in drawn.items()}, 1e-3)
    note.note("the initial weights", "spread",
              {name: some.flatten().quantile(SHARES) for name, some in drawn.items()},
              {name: some.numel() for name, some in drawn.items()})
    note.fact("another seed gives other weights", _apart(weights[0], weights[1]))
    note.fact("the same seed gives the same weights", not _apart(weights[0], weights[-1]))
    spy = Spy()
    warm_up = values.get("window_stages", 2)  # steps
    lines = run(module, {**values, "kernel_warmup_steps": warm_up, "val_loss_every": 3,
                         "scheduled_steps": values["train_steps"],  # a warm-up sees all before it
                         "train_loss_every": 2, "save_checkpoint": True}, folder, spy)
    settings = spy.settings["training pass"]
    note.fact("sets of numbers in the model's calls that training has and the warm-up has not",
              len(set(settings) - set(settings[:warm_up])))
    note.fact("calls of the model, those of the kernel warm-up included", len(spy.calls))
    _note_run(note, spy, "after a kernel warm-up", lines)
    _note_checkpoint(note, spy, folder, "the checkpoint")
    note.fact("the files in log_dir", ", ".join(sorted(os.listdir(folder))))
    spy, record = Spy(), vars(module.Hyperparameters())
    tokens = load_glossary().of_kind("vocabulary", "token")
    with note.guard("a run with the record's token ids"):
        lines = run(module, {
            **values, **{name: record[name] for name in tokens if name in record},
            "train_files": f"{shards}/high*.bin", "val_files": f"{shards}/high*.bin",
            "train_steps": 2, "train_loss_every": 1, "val_loss_every": 0}, f"{folder}_tokens", spy)
        note.note("the log of a run with the record's token ids", "log", lines)


def _note_checkpoint(note, spy, folder, what):
    """What is in the checkpoint, and whether its weights are those that the run ended with."""
    with note.guard(what):
        kept = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
        note.note(what, "has", {key: "dict" if isinstance(value, dict) else type(value).__name__
                                for key, value in kept.items()})
        note.note(f"the weights in {what}", "tensors", kept["model"], 2e-2)
        note.fact(f"the weights in {what} are those of the run's end, bit for bit", all(
            name in kept["model"] and torch.equal(kept["model"][name], param)
            for name, param in spy.models[-1].named_parameters()))


def _apart(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


def ranks(module, values, note, folder, rank, **_):
    """Runs on several ranks, one up to the first call of the model, one from given weights: losses,
    and each rank's share of the work."""
    spy = Spy(filled=False, stop=True)
    run(module, values, f"{folder}_begin", spy)
    note.note("beginning", "beginning", [
        zlib.crc32(param.float().numpy().tobytes()) for param in (spy.initial or {}).values()])
    spy = Spy()
    lines = run(module, {
        **values, "val_loss_every": 0, "train_loss_every": 1, "kernel_warmup_steps": 1,
        "compile": True, "save_checkpoint": True}, folder, spy, meter=True)
    _note_run(note, spy, f"on two ranks, rank {rank}", [] if rank else lines)
    sys.stdout.flush()
    printed = Path(folder).with_name(f"output{rank}").read_bytes().count(b"\nstep:")
    note.fact(f"lines of steps that rank {rank} prints", printed)
    note.note(f"the weights at the end, rank {rank}", "tensors", _weights(spy), 2e-2)
    if rank:
        note.fact(f"files that rank {rank} writes", ", ".join(sorted(
            Path(file).name for file in spy.written if Path(folder) in Path(file).parents)))
    else:
        _note_checkpoint(note, spy, folder, "the checkpoint of two ranks")
    note.fact(f"buffers that DistributedDataParallel sends from rank {rank} before a pass",
              sum(len(net.modules_buffers) for net in spy.parallel if net.broadcast_buffers))
    note.note("sets of Python numbers that compiled functions are called with", "at most",
              sum(map(len, spy.given.values())), (1, 0))
    steps = max(spy.steps.values(), default=1)
    note.note(f"matrix products of the optimizers on rank {rank} of 2, per step", "at most",
              spy.meter.work["optimizers"] // steps, (1.8, 64))
    beside = spy.meter.beside["optimizers"] / max(spy.meter.work["optimizers"], 1)
    note.note(f"share of them while updates travel, rank {rank}", "at least", round(beside, 2), 0.5)
    note.note(f"share of messages beside which something is computed, rank {rank}", "at least",
              round(spy.accompanied / max(spy.messages, 1), 2), 0.85)
    note.fact(f"messages for which no optimizer waits, rank {rank}", spy.forgotten)
    # A warm-up may average gradients or not, one step of eight; a second average of some shows.
    for what, tolerance in (("optimizers", (2.6, 64)), ("gradients and losses", (1.16, 64))):
        sent = sum(n for (cause, _), n in spy.sent.items() if cause == what)
        note.note(f"bytes that rank {rank} sends for the {what}, per step", "at most",
                  sent // steps, tolerance)
    note.note(f"bytes that rank {rank} sends while gradients are computed, per step", "at most",
              spy.sent_in_backward // steps, (1.6, 64))
    note.note("state", "state", {
        f"{name} {zlib.crc32(value.float().numpy().tobytes())}": value.numel()
        for name, value in spy.states()})


def more_ranks(module, values, note, folder, rank, world, **_):
    """Two steps with given gradients on ranks among which weights do not divide."""
    seq_len, val_seq_len = (values[name] for name in length_names(values))
    spy = Spy(gradients=True)
    run(module, {
        **values, **dict.fromkeys(load_glossary().of_kind("vocabulary"), 16 * world),
        "micro_batch_size": 1, "total_batch_size": world * seq_len,
        "val_tokens": world * val_seq_len, "train_steps": 2, "val_loss_every": 0}, folder, spy)
    note.note(f"the weights after two steps on {world} ranks, rank {rank}", "tensors",
              _weights(spy), 4e-3)


def _weights(spy):
    return {name: p.detach() for net in spy.models for name, p in net.named_parameters()}


def precision(module, values, note, folder, machine, **_):
    """Short runs as on a GPU: in bfloat16 with the stand-in for the compiler, what has which dtype;
    with each of the switches `machine`, the kernels in Triton that are launched."""
    spy = Spy()
    lines = run(module, {**values, "bf16": True, "compile": True, "train_steps": 2,
                         "val_loss_every": 1, "train_loss_every": 0}, folder, spy, meter=True)
    note.note("the log of a run in bfloat16", "log",
              [re.sub(r"loss:\S+", "loss", line) for line in lines])
    note.note("the validation losses (in bfloat16)", "numbers", _losses(spy), 5e-2)
    note.note("weights after steps with bf16=True", "same", {
        name: dtype_name(p.dtype) + ", holding what bfloat16 can" * _is_rounded(p)
        for name, p in _weights(spy).items()})
    note.note("dtypes of what the model's parts return with bf16=True", "in common",
              _joined(spy.dtypes))
    note.note("arithmetic of the model's parts with bf16=True", "as precise", {
        part: "float32" if precise else "less than float32"
        for part, precise in spy.meter.precise.items()})
    note.note("epsilons of F.rms_norm with bf16=True", "in common",
              {f"for {dtype}": text for dtype, text in _joined(spy.epsilons).items()})
    meter = spy.meter
    for phase, work in meter.work.items():
        note.note(f"share of bfloat16 in the matrix products of the {phase}", "numbers",
                  {"": meter.low[phase] / work}, 0.1)
        if phase != "backward pass":  # it is compiled with the training pass
            note.note(f"share of compiled code in the matrix products of the {phase}", "at least",
                      round(meter.compiled[phase] / work, 2), 0.7)
    note.note("share of calls of the model that are compiled", "numbers",
              {"": spy.compiled_calls / max(spy.all_calls, 1)}, 0.01)
    note.fact("numbers that the model reads from tensors",
              sum(meter.readings[phase] for phase in spy.kinds))
    note.note("numbers read from tensors between the model's calls", "at most",
              meter.readings["backward pass"], (1, 4))  # each waits for the device
    note.note("weights whose optimizer calls compiled code", "at least", len(spy.compiling), 0.9)
    states = {}
    for name, value in spy.states():
        states.setdefault(name, set()).add(dtype_name(value.dtype))
    note.note("dtypes of the optimizers' state with bf16=True", "has", _joined(states))
    note.fact("dtypes that the optimizers send with bf16=True", ", ".join(sorted(
        {dtype for what, dtype in spy.sent if what == "optimizers"})))
    if machine:
        _switched(module, values, note, folder, machine)


def _switched(module, values, note, folder, machine):
    """With each of the switches: how often a step launches kernels in Triton, and multiplies in
    eight bits."""
    with triton():
        del sys.modules[module.__name__]
        module = load_snapshot(module.__file__)
    for field in machine:
        spy = Spy()
        with note.guard(f"a run with {field}=True"):
            run(module, {**values, field: True, "compile": True, "train_steps": 1,
                         "val_loss_every": 0}, f"{folder}_{field}", spy, meter=True)
        for phase in spy.kinds:
            note.fact(f"products of eight bits in the {phase} with {field}=True",
                      _counted(spy.meter.eight_bits[phase]))
        for phase, count in spy.launches.items():
            note.note(f"launches of Triton's kernels by the {phase} with {field}=True", "at least",
                      count, 1.0)
            if None not in spy.forms[phase]:
                given = "one" if all(spy.forms[phase]) else "several"
                note.note(f"results of Triton's kernels by the {phase} with {field}=True",
                          "in common", {"tiles of all sizes give": given})
                note.note(f"the weights after a step with {field}=True", "tables",
                          _weights(spy), 2e-2)


def _joined(names):
    return {key: ", ".join(sorted(some)) for key, some in names.items()}


def refusals(module, values, note, folder, shards, machine, paths, trials, **_):
    """What a run refuses to start with. trials: {what is wrong: {hyperparameter: value}}; a value
    of train_files or val_files is how the names of the shards begin."""
    seen = {}
    switches = [(field, True) for field in machine] + paths
    for switch, on in [("", True), ("compile", True), *switches]:
        # No data, no memory. What cannot be run in this way is not compared.
        with FakeTensorMode(), torch.no_grad(), suppress(Exception):
            lengths = dict.fromkeys(length_names(values), UNMASKED)
            net = module.GPT(arguments(module, {**values, **lengths, switch: on}))
            what = f"{UNMASKED:,} tokens{switch and f' with {switch}={on}'}"
            try:
                net(*torch.ones(2, 1, UNMASKED, dtype=torch.int64))
                seen[what] = "taken"
            except AssertionError:
                seen[what] = "refused"
    for switch, on in switches:
        with torch.no_grad(), suppress(Exception):
            net = module.GPT(arguments(module, {**values, switch: on}))
            what = f"{switch}={on} without compilation"
            try:
                net(*torch.ones(2, 1, 16, dtype=torch.int64))
                seen[what] = "taken"
            except AssertionError:
                seen[what] = "refused"
    note.note("what a model refuses", "in common", seen)
    used = Path(folder, "used")
    used.mkdir(parents=True)
    used.joinpath("log.txt").write_text("a log of another run\n")
    seen = {}
    for what, change in {**trials, "the folder of another run": {}}.items():
        files = {key: f"{shards}/{start}*.bin" for key, start in change.items()
                 if key.endswith("_files")}
        here = Path(folder, what) if change else used
        try:
            run(module, {**values, "train_steps": 1, **change, **files}, here, Spy())
            seen[what] = "taken"
        except Exception as error:
            own = traceback.extract_tb(error.__traceback__)[-1].filename == module.__file__
            seen[what] = "refused" if own else f"not refused: later {type(error).__name__}"
    kept = used.joinpath("log.txt").read_text() == "a log of another run\n"
    seen["the folder of another run"] = "log kept" if kept else "log written over"
    note.note("what is refused", "has", seen)


@dataclasses.dataclass(frozen=True)
class Job:
    """A function that observes, what it is called in messages, and on how many ranks it runs where
    its options do not say."""

    function: Callable
    what: str
    world: int = 1


JOBS = {  # in the order in which they are shown
    "contract": Job(contract, "an import of the script"),
    "schedules": Job(schedules, "the schedules"),
    "model": Job(model, "the model by itself"),
    "updates": Job(updates, "a run with gradients from outside"),
    "training": Job(training, "a run after a kernel warm-up"),
    "two ranks": Job(ranks, "a run on two ranks", world=2),
    "more ranks": Job(more_ranks, "a run on more ranks"),
    "precision": Job(precision, "runs as on a GPU"),
    "refusals": Job(refusals, "runs that must be refused"),
}
