"""Observes what one script does: each job is run in a process of its own by speedrun.check.worker.

A job gets the imported script and writes observations, {what: [kind, value, tolerance]}; the
kinds are those of speedrun.check.differences. Nothing here knows a milestone: what to look at
follows from the script.
"""

import dataclasses
import inspect
import io
import math
import os
import re
import sys
import traceback
import zlib
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from speedrun.check.spy import EPSILONS, FLEX, Enough, Spy, arguments, fill, load, run

# What tools call by name in any milestone; schedules, functions of (step, args), come on top.
LONGER = 32  # sequences, where a machine's switches are tried
UNMASKED = 16_640  # tokens: a dense mask for so many takes gigabytes
CONTRACT = ("Hyperparameters", "parse_args", "GPT", "validate", "main")


class Observations(dict):
    """What a job has seen so far, {what: [kind, value, tolerance]}, and in which step it is."""

    doing = "importing it"

    def note(self, what, kind, value, tolerance=0.0):
        """Keeps a value under a description that messages show."""
        self[what] = [kind, value, tolerance]

    @contextmanager
    def guard(self, what):
        """Whatever the script raises inside becomes an observation; the job goes on."""
        self.doing = what
        try:
            yield
        except Enough:
            raise
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


# ---- the jobs ----


def contract(module, values, note, **_):
    """Names, fields, defaults here and on a GPU, and the command line."""
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["step",
                                                                                     "args"]:
            found[name] = "(step, args)"
    found |= {name: "" for name in CONTRACT if hasattr(module, name)}
    note.note("names", "has", found)
    with note.guard("the fields of Hyperparameters"):
        note.note("the fields of Hyperparameters", "has", _fields(module.Hyperparameters))
    with note.guard("the defaults on a machine with a GPU"):
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            other = load(module.__file__, "train_gpt_on_gpu")
        finally:
            torch.cuda.is_available = available
        note.note("the defaults on a machine with a GPU", "has", _fields(other.Hyperparameters))
    with note.guard("parse_args"):
        parsed = {}
        for field in dataclasses.fields(module.Hyperparameters):
            text = str(_other(getattr(module.Hyperparameters(), field.name)))
            value = getattr(module.parse_args([f"--{field.name}={text}"]), field.name)
            parsed[field.name] = f"{type(value).__name__} {value!r} from --{field.name}={text}"
        note.note("parse_args", "has", parsed)
    with note.guard("a start with --help"):
        here, sys.argv = sys.argv, [module.__file__, "--help"]
        try:
            load(module.__file__, "__main__")
            how = "comes to its end without a word"
        except SystemExit as error:
            how = f"ends with exit code {error.code}"
        finally:
            sys.argv = here
        note.note("a start with --help", "fact", how)
    with note.guard("parse_args of a wrong option"):
        refused = {}
        for option in ("--no_such_field=1", "--save_checkpoint=maybe", "--seed=many", "5"):
            try:
                with redirect_stderr(io.StringIO()):
                    module.parse_args([option])
                refused[option] = "taken"
            except SystemExit as error:
                refused[option] = f"refused with exit code {error.code}"
        note.note("parse_args of a wrong option", "has", refused)


def _fields(kind):
    found = {}
    for field in dataclasses.fields(kind):
        value = getattr(kind(), field.name)
        if field.default_factory is not dataclasses.MISSING:  # it depends on time and process
            value = f"{str(value).split('/')[0]}/..."
        found[field.name] = f"{value!r} ({type(value).__name__})"
    return found


def _other(value):
    return (not value if isinstance(value, bool) else value + 3 if isinstance(value, int)
            else value * 0.5 + 0.125 if isinstance(value, float) else "other_text")


def schedules(module, values, note, **_):
    """Every function of (step, args), over all steps of runs of three lengths."""
    settings = {"": arguments(module, values), "the record's": module.Hyperparameters()}
    long = {k: v * 13 if k.endswith("_steps") else v for k, v in values.items()}
    settings["longer runs'"] = arguments(module, long)
    for name, function in list(vars(module).items()):
        if not inspect.isfunction(function) or list(inspect.signature(function).parameters) != [
                "step", "args"]:
            continue
        for whose, args in settings.items():
            what = f"{name} over {whose or 'a short run'}{' hyperparameters' if whose else ''}"
            with note.guard(what):
                steps = range(args.train_steps + 1)
                stride = max(1, len(steps) // 997)
                note.note(what, "schedule", {
                    f"{name}({step}) of {args.train_steps} steps": float(function(step, args))
                    for step in (*steps[::stride], args.train_steps)}, 1e-6)
                kinds = {type(function(step, args)) in (int,) for step in steps[:3]}
                note.note(f"type of {name}", "fact", f"whole number: {kinds == {True}}")


def model(module, values, note, folder, calls=None, machine=(), **_):
    """The model with given weights: its tensors, logits, loss and gradients."""
    with note.guard("the tensors at the record's sizes"), torch.device("meta"):
        net = module.GPT(module.Hyperparameters())
        shapes = {name: "x".join(map(str, t.shape)) or "a number"
                  for name, t in net.state_dict().items()}
        note.note("the tensors at the record's sizes", "same", shapes)
        count = sum(p.numel() for p in net.parameters())
        note.note("the number of parameters at the record's sizes", "fact", f"{count:,}")
    calls = torch.load(calls, weights_only=True) if calls else []
    for number, (args, kwargs) in enumerate(calls):
        where = f"call {number + 1} of the model"
        with note.guard(f"{where}"):
            net = module.GPT(arguments(module, values))
            fill(net)
            loss = net(*args, **kwargs)
            note.note(f"the loss of {where}", "numbers", [loss.item()], 2e-5)
            note.note("dtype of the loss", "fact", str(loss.dtype))
            loss.backward()
            gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p)
                         for n, p in net.named_parameters()}
            note.note(f"the gradient in {where}", "tensors", gradients, 2e-3)
    with note.guard("the loss of the vocabulary's last tokens"), torch.no_grad():
        size = module.Hyperparameters().vocab_size
        net = module.GPT(arguments(module, {**values, "vocab_size": size}))
        fill(net)
        tokens = torch.arange(size - values["seq_len"] * 8, size).view(8, -1)
        note.note("the loss of the vocabulary's last tokens", "numbers",
                  [net(tokens, tokens).item()], 1e-4)
    if calls:
        inputs = calls[0][0][0]
        for what, some, scale in (("logits", inputs, 1.0),
                                  ("logits of a short prompt", inputs[:1, :7], 1.0),
                                  ("logits of small weights", inputs, 1e-3)):
            with note.guard(what), torch.no_grad():
                net = module.GPT(arguments(module, values))
                fill(net, scale)  # small ones show the epsilon of a norm
                logits = net(some)
                note.note(what, "tensors", {"logits": logits.float()}, 1e-3 / scale**0.5)
                note.note(f"dtype of the {what}", "fact", str(logits.dtype))
                note.note(f"{what}: later tokens change earlier ones", "fact",
                          str(_leaks(net, some, logits)))
        longer = inputs.repeat(1, LONGER)  # bfloat16 is too coarse for large angles, say
        for field in machine:
            what = f"logits with {field}=True"
            with note.guard(what), torch.no_grad():
                net = module.GPT(arguments(module, {
                    **values, field: True, "seq_len": longer.size(1)}))
                note.note(f"dtypes of the parameters with {field}=True", "same", {
                    name: str(p.dtype).removeprefix("torch.") + ", holding what bfloat16 can" *
                    _is_rounded(p) for name, p in net.named_parameters()})
                fill(net)
                before = FLEX[0]
                logits = net(longer)
                loose = 4e-2 if logits.dtype == torch.bfloat16 or "bf16" in field else 1e-3
                note.note(what, "tensors", {"logits": logits.float()}, loose)
                note.note(f"dtype of the {what}", "fact", str(logits.dtype))
                note.note(f"{what} are rounded to bfloat16", "fact", str(_is_rounded(logits)))
                note.note(f"flex_attention is called with {field}=True", "fact",
                          str(FLEX[0] > before))
                if FLEX[0] > before:
                    note.note("rows that FlexAttention's mask is made for", "fact", FLEX[1])


def _is_rounded(values):
    return torch.equal(values.to(torch.bfloat16).to(values.dtype), values)


def _leaks(net, inputs, logits):
    other = inputs.clone()
    other[:, -1] = (other[:, -1] + 1) % 7 + 2
    other = net(other)
    return not torch.allclose(other[:, :-1], logits[:, :-1], atol=1e-5)


def updates(module, values, note, folder, **_):
    """A run from given weights whose optimizers get gradients from outside."""
    spy = Spy(module, gradients=True)
    lines = []
    try:
        lines = run(module, values, folder, spy)
    finally:
        for number, moves in enumerate(spy.moves, start=1):
            note.note(f"the move in step {number}", "tensors", moves, 4e-3)
        _losses(note, spy, "with gradients from outside")
    note.note("the log of a run with gradients from outside", "log", lines)
    note.note("how the model is called in training", "fact",
              "; ".join(sorted(spy.kinds.get("training", ()))))
    note.note("how the model is called in validation", "fact",
              "; ".join(sorted(spy.kinds.get("validation", ()))))
    note.note("Python numbers of the model that change between calls", "fact",
              ", ".join(sorted(spy.changing)))
    last = len(spy.calls) - 1
    chosen = [spy.calls[i] for i in sorted({0, last})]
    torch.save(chosen, Path(folder).parent / "calls.pt")


def _losses(note, spy, which):
    values = [float(loss) if isinstance(loss, (int, float)) else math.nan for loss in spy.losses]
    note.note(f"validate returns ({which})", "fact",
              ", ".join(sorted({type(loss).__name__ for loss in spy.losses})))
    rounded = bool(values) and all(value == round(value, 4) for value in values)
    note.note(f"validate rounds ({which})", "fact", str(rounded))
    if values:
        note.note(f"the first validation loss ({which})", "numbers", values[:1], 1e-5)
        note.note(f"the validation losses ({which})", "numbers", values, 4e-4)


def training(module, values, note, folder, **_):
    """The weights from the script's own seed; a run after a kernel warm-up, with a checkpoint."""
    first, second, again = (_initial(module, values, folder, seed) for seed in (5, 6, 5))
    note.note("the initial weights", "spread", first, 0.25)
    note.note("another seed gives other weights", "fact", str(_apart(first, second)))
    note.note("the same seed gives the same weights", "fact", str(not _apart(first, again)))
    values = {**values, "kernel_warmup_steps": 2, "val_loss_every": 3, "train_loss_every": 2,
              "save_checkpoint": True}
    spy = Spy(module)
    lines = run(module, values, folder, spy)
    note.note("calls of the model, those of the kernel warm-up included", "fact",
              str(len(spy.calls)))
    _losses(note, spy, "after a kernel warm-up")
    note.note("the log of a run after a kernel warm-up", "log", lines)
    with note.guard("the checkpoint"):
        kept = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
        note.note("the checkpoint", "has", {key: type(value).__name__
                                            for key, value in kept.items()})
        note.note("the weights at the end", "tensors",
                  {k: v.float() for k, v in kept["model"].items()}, 2e-2)
    note.note("the files in log_dir", "fact", ", ".join(sorted(os.listdir(folder))))


def _initial(module, values, folder, seed):
    """The weights at the model's first call in main."""
    spy = Spy(module, filled=False, stop=True)
    run(module, {**values, "seed": seed}, Path(f"{folder}_{len(os.listdir('.'))}"), spy)
    return spy.initial or {}


def _apart(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


def ranks(module, values, note, folder, rank, **_):
    """A run on several ranks from given weights: losses, and each rank's share of the work."""
    values = {**values, "val_loss_every": 0, "train_loss_every": 1, "kernel_warmup_steps": 1}
    spy = Spy(module)
    lines = run(module, values, Path(folder), spy, meter=True)
    if rank == 0:
        note.note("the log of a run on two ranks", "log", lines)
    _losses(note, spy, f"two ranks, rank {rank}")
    sys.stdout.flush()
    printed = Path(folder).with_name(f"output{rank}").read_bytes()[:1 << 22].count(b"\nstep:")
    note.note(f"lines of steps that rank {rank} prints", "fact", str(printed))
    note.note(f"the weights at the end, rank {rank}", "tensors",
              {n: p.detach().float() for net in spy.models for n, p in net.named_parameters()},
              2e-2)
    steps = max(spy.steps.values(), default=1)
    work = sum(n for (phase, _, _), n in spy.meter.work.items() if phase == "step")
    note.note(f"matrix products of the optimizers on rank {rank} of 2, per step", "at most",
              work / steps, 1.8)
    for what, phase, factor in (("optimizers", "step", 2.6),
                                ("gradients and losses", "other", 1.6)):
        sent = sum(n for (place, *_), n in spy.sent.items() if place == phase)
        note.note(f"bytes that rank {rank} sends for the {what}, per step", "at most",
                  sent / steps, factor)
    states = {}
    names = spy.names()
    for optimizer in spy.optimizers:
        for p, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() >= p.numel() > 8:
                    digest = zlib.crc32(value.float().numpy().tobytes())
                    states[f"{names.get(id(p))} {digest}"] = value.numel()
    note.note("state", "state", states)


def precision(module, values, note, folder, **_):
    """A short run in bfloat16 with the stand-in for the compiler: what has which dtype."""
    values = {**values, "bf16": True, "compile": True, "train_steps": 2, "val_loss_every": 1,
              "train_loss_every": 0}
    spy = Spy(module)
    lines = run(module, values, folder, spy, meter=True)
    note.note("the log of a run in bfloat16", "log", [re.sub(r"loss:\S+", "loss", line)
                                                      for line in lines])
    _losses_low(note, spy)
    note.note("dtypes of what the model's parts return with bf16=True", "in common", {
        name: ", ".join(sorted(dtypes)) for name, dtypes in spy.dtypes.items()})
    note.note("epsilons of F.rms_norm with bf16=True", "in common", {
        f"for {dtype}": ", ".join(sorted(values)) for dtype, values in EPSILONS.items()})
    for phase, what in (("training", "the model's training pass"), ("validation", "validation"),
                        ("step", "the optimizers"), ("other", "the backward pass")):
        work = {key[1:]: n for key, n in spy.meter.work.items() if key[0] == phase}
        total = sum(work.values())
        if total:
            low = sum(n for (dtype, _), n in work.items() if dtype == "bfloat16")
            note.note(f"share of bfloat16 in the matrix products of {what}", "share", low / total,
                      0.1)
        if total and phase != "other":
            inside = sum(n for (_, compiled), n in work.items() if compiled)
            note.note(f"share of compiled code in the matrix products of {what}", "at least",
                      inside / total, 0.3)
    note.note("calls of the compiled model, of all", "share",
              spy.wrapped_calls / max(spy.all_calls, 1), 0.01)
    note.note("numbers that the model reads from tensors", "fact", str(spy.meter.readings))
    states, names = {}, spy.names()
    for optimizer in spy.optimizers:
        for p, state in optimizer.state.items():
            kinds = {str(v.dtype).removeprefix("torch.") for v in state.values()
                     if isinstance(v, torch.Tensor) and v.numel() >= p.numel() > 8}
            if kinds:
                states[names.get(id(p), "?")] = ", ".join(sorted(kinds))
    note.note("dtypes of the optimizers' state with bf16=True", "has", states)
    note.note("dtypes that the optimizers send with bf16=True", "fact", ", ".join(sorted(
        {dtype for place, _, dtype in spy.sent if place == "step"})))


def _losses_low(note, spy):
    values = [float(loss) for loss in spy.losses if isinstance(loss, (int, float))]
    note.note("the validation losses (in bfloat16)", "numbers", values, 5e-2)


def refusals(module, values, note, folder, shards=None, machine=(), **_):
    """What a run refuses to start with."""
    values = {**values, "train_steps": 1}
    Path(folder, "used").mkdir(parents=True)
    Path(folder, "used", "log.txt").write_text("a log of another run\n")
    trials = {
        "a total_batch_size that does not divide": dict(total_batch_size=40),
        "val_tokens that do not divide": dict(val_tokens=40),
        "a shard that is cut short": dict(train_files=f"{shards}/cut*.bin"),
        "a file that is no shard": dict(train_files=f"{shards}/magic*.bin"),
        "a token beyond the vocabulary": dict(train_files=f"{shards}/beyond*.bin"),
        "a shard with too few tokens": dict(val_files=f"{shards}/short*.bin"),
        "a shard with no target for a step's end": dict(train_files=f"{shards}/exact*.bin"),
        "no shard": dict(train_files=f"{shards}/none*.bin"),
        "heads that do not divide the width": dict(num_heads=5),
    }
    seen = {}
    for switch in ("", "compile", *machine):
        # No data, no memory. What cannot be run in this way is not compared.
        with FakeTensorMode(), torch.no_grad(), suppress(Exception):
            net = module.GPT(arguments(module, {**values, "seq_len": UNMASKED, switch: True}))
            what = f"{UNMASKED:,} tokens{switch and f' with {switch}=True'}"
            try:
                net(*torch.ones(2, 1, UNMASKED, dtype=torch.int64))
                seen[what] = "taken"
            except AssertionError:
                seen[what] = "refused"
    note.note("what a model refuses", "in common", seen)
    seen = {}
    for number, (what, change) in enumerate(trials.items()):
        try:
            run(module, {**values, **change}, Path(folder, f"log{number}"), Spy(module))
            seen[what] = "taken"
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            own = frame.filename == module.__file__
            seen[what] = "refused" if own else f"not refused: later {type(error).__name__}"
    try:
        run(module, values, Path(folder, "used"), Spy(module))
    except Exception:
        pass
    kept = Path(folder, "used", "log.txt").read_text() == "a log of another run\n"
    seen["an existing log"] = "kept" if kept else "written over"
    note.note("what is refused", "has", seen)


# In the order in which they are shown: the function, how many ranks, and what it is called.
JOBS = {
    "contract": (contract, 1, "an import of the script"),
    "schedules": (schedules, 1, "the schedules"),
    "model": (model, 1, "the model by itself"),
    "updates": (updates, 1, "a run with gradients from outside"),
    "training": (training, 1, "a run after a kernel warm-up"),
    "two ranks": (ranks, 2, "a run on two ranks"),
    "precision": (precision, 1, "a run in bfloat16"),
    "refusals": (refusals, 1, "runs that must be refused"),
}
