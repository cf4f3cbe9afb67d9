"""The jobs that observe runs as on a GPU, in bfloat16 and with kernels; `note`: see
trace.Observations."""

import re
import sys

import torch

from speedrun.check.spy import Spy
from speedrun.check.trace_model import counted, precision_of
from speedrun.check.trace_runs import (
    SIZE,
    losses_of,
    moves_of,
    note_exercised,
    one_pass,
    weights_of,
)
from speedrun.check.watched import run_watched, triton
from speedrun.check.weights import dtype_name, parameters_of
from speedrun.history.glossary import load_glossary
from speedrun.scripts.find import load_snapshot

SMALL, MANY = 1 / 64, 12  # of rates, and how many steps they add up in
DECAYS = 4  # steps without gradients, in which only the decay moves weights
WIDE = 64  # channels at least: kernels in Triton are for large matrices
SCALED = 3  # steps in which scales depend on passes before; in more of them rounding adds up


def precision(module, values, note, folder, **_):
    """Short runs in bfloat16 with the stand-in for the compiler: what has which dtype."""
    spy = Spy(inside=True)
    lines = run_watched(module, {**values, "bf16": True, "compile": True, "train_steps": 2,
                         "adam_every": 2, "val_loss_every": 1, "train_loss_every": 0},
                        folder, spy, meter=True)
    note_exercised(note, spy, "with bf16=True")
    note.note("the log of a run in bfloat16", "log",
              [re.sub(r"loss:\S+", "loss", line) for line in lines])
    note.note("the validation losses (in bfloat16)", "numbers", losses_of(spy), 5e-2)
    note.note("weights after steps with bf16=True", "same", {
        name: precision_of(p) for name, p in weights_of(spy).items()})
    note.note("dtypes of what the model's parts return with bf16=True", "in common",
              _joined(spy.dtypes))
    note.note("arithmetic of the model's parts with bf16=True", "as precise", {
        part: "float32" if precise else "less than float32"
        for part, precise in spy.meter.precise.items()})
    note.note("exponentials and the like in the model's parts with bf16=True", "as precise", {
        what: "float32" if precise else "less than float32"
        for what, precise in spy.meter.curved.items()})
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
    compiling = {name for optimizer in spy.compiling for name, _ in spy.weights(optimizer)}
    note.note("weights whose optimizer calls compiled code", "at least", len(compiling), 0.9)
    states = {}
    for name, value in spy.states():
        states.setdefault(name, set()).add(dtype_name(value.dtype))
    note.note("dtypes of the optimizers' state with bf16=True", "in common",  # some stack it
              _joined(states))
    note.fact("dtypes that the optimizers send with bf16=True", ", ".join(sorted(
        {dtype for what, dtype in spy.sent if what == "optimizers"})))
    if spy.with_bits():
        _note_small_steps(module, values, note, folder)
        _note_decay(module, values, note, folder)


def _note_small_steps(module, values, note, folder):
    """Steps too small for bfloat16, whose sum is not: it needs the bits that optimizers keep."""
    spy = Spy(gradients=SIZE)
    rates = {name: values[name] * SMALL for name in load_glossary().of_kind("rate")
             if name in values}
    with note.guard("small steps in bfloat16"):
        small = {**rates, "bf16": True, "train_steps": MANY, "val_loss_every": 0}
        run_watched(module, {**one_pass(values), **small}, f"{folder}_small", spy)
        # Where two sums differ a little, some weights are one bit apart.
        moved, bits = moves_of(spy), spy.with_bits()
        note_exercised(note, spy, "of small steps")
        note.note(f"the sum of {MANY} small moves with bf16=True", "tensors",
                  {name: moved[name] for name in bits}, 0.3)


def _note_decay(module, values, note, folder):
    """Decay alone, which should take one share of every weight, its lower bits included."""
    spy = Spy(gradients=0.0)
    with note.guard("decay of all bits of weights"):
        run_watched(module, {**one_pass(values), "bf16": True, "train_steps": DECAYS,
                             "val_loss_every": 0}, f"{folder}_decay", spy)
        names = {id(p): name for name, p in parameters_of(spy.models[-1]).items()}
        uneven = []
        for optimizer in spy.steps:
            for group in optimizer.param_groups:
                params = [p for p in group["params"] if p.dtype == torch.bfloat16]
                bits = [value.flatten() for p in params for value in optimizer.state[p].values()
                        if isinstance(value, torch.Tensor) and value.dtype == torch.int16]
                if bits:  # of one parameter each, or of all in one, padded
                    sizes = [p.numel() for p in params]
                    own = torch.cat(bits)[: sum(sizes)].split(sizes)
                    uneven += [unevenness(spy.initial[names[id(p)]].flatten(), p.detach().flatten(),
                                          some) for p, some in zip(params, own, strict=True)]
        note.note("how uneven the decay of all bits of weights is", "at most",
                  max(uneven, default=0.0), (3, 1e-4))


def unevenness(start: torch.Tensor, end: torch.Tensor, bits: torch.Tensor) -> float:
    """The spread of what weights (N,) in bfloat16 have lost, as a share of the mean loss; bits (N,)
    are the lower 16 of the end's, as int16, or what is missing to a rounded weight."""
    upper, found = end.view(torch.int16).int() << 16, []
    for whole in (upper | bits.int() & 0xFFFF, upper + bits.int()):
        lost = 1 - whole.view(torch.float32).double() / start.double()
        lost = lost[(start.abs() > 1e-2) & lost.isfinite() & (lost != 0)]
        found.append((lost.std() / lost.mean().abs()).item() if len(lost) > 1 else 0.0)
    return min(found)


def kernels(module, values, note, folder, machine, **_):
    """With each of the switches `machine`, as on a GPU: how often a step launches kernels in
    Triton, and multiplies in eight bits."""
    if not machine:
        return
    with triton():
        del sys.modules[module.__name__]
        module = load_snapshot(module.__file__)
    together = {field: True for field in machine if field != "bf16"}
    values = {**values, "model_dim": max(WIDE, values["model_dim"])}
    for field in machine:
        spy = Spy(inside=True)
        with note.guard(f"a run with {field}=True"):
            lines = run_watched(module, {
                **one_pass(values), field: True, "compile": True, "train_steps": 1,
                "val_loss_every": 0, "train_loss_every": 1, "adam_every": 1},
                f"{folder}_{field}", spy)
        for phase in spy.kinds:
            note.fact(f"products of eight bits in the {phase} with {field}=True",
                      counted(spy.eight_bits[phase]))
        if spy.kept and spy.scales:
            _note_scales(module, values, note, folder, field)
        for phase, count in spy.launches.items():
            note.note(f"launches of Triton's kernels by the {phase} with {field}=True", "at least",
                      count, 1.0)
            note.note(f"tensors that they address in 64 bits in the {phase} with {field}=True",
                      "at least", spy.wide[phase], 1.0)
            if None not in spy.forms[phase]:
                _note_forms(note, spy, phase, f"{field}=True")
                note.note(f"the gradients with {field}=True", "tables", spy.received, 1e-2)
                note.note(f"the weights after a step with {field}=True", "tables",
                          weights_of(spy), 2e-2)
                note.note(f"the log of a run with {field}=True", "log", lines)
        if spy.launches["training pass"] and len(together) > 1:  # kernels of the model
            _note_together(module, values, note, folder, together)


def _note_scales(module, values, note, folder, field):
    """The scales of products of eight bits, where numbers are kept from one pass to the next."""
    what = f"the scales of products of eight bits with {field}=True"
    spy = Spy(gradients=SIZE, inside=True)  # else round-off grows from step to step
    with note.guard(what):
        run_watched(module, {**values, field: True, "compile": True, "train_steps": SCALED,
                     "val_loss_every": 0, "kernel_warmup_steps": 2}, f"{folder}_scales", spy)
        note.note(what, "numbers", spy.scales, 0.15)


def _note_forms(note, spy, phase, what):
    given = "the same result" if all(spy.forms[phase]) else "different results"
    note.note(f"results of Triton's kernels by the {phase} with {what}", "in common",
              {"tiles of all sizes give": given})


def _note_together(module, values, note, folder, switches):
    """The gradients where all these switches are on: a kernel may compute in eight bits."""
    which, spy = f"all of {', '.join(switches)}", Spy(inside=True)
    what = f"the gradients with {which}"
    with note.guard(what):
        one_step = {"compile": True, "train_steps": 1, "val_loss_every": 0, "adam_every": 1}
        run_watched(module, {**one_pass(values), **switches, **one_step}, f"{folder}_together", spy)
        note.note(what, "tables", spy.received, 5e-2)
        for phase, forms in spy.forms.items():
            if None not in forms:
                _note_forms(note, spy, phase, which)


def _joined(names):
    return {key: ", ".join(sorted(some)) for key, some in names.items()}
