"""The jobs that observe a model with given weights; `note`: see trace.Observations."""

from collections import Counter

import torch

from speedrun.check.spy import Spy
from speedrun.check.weights import arguments, dtype_name, fill, parameters_of
from speedrun.history.glossary import load_glossary
from speedrun.scripts.sizes import length_names

LONGER = 32  # sequences, where a machine's switches are tried


def model(module, values, note, calls, **_):
    """The model with given weights: its tensors, logits, loss and gradients.

    calls: a file with calls of the milestone's model.
    """
    make = _maker(module, values)
    with note.guard("the tensors at the record's sizes"), torch.device("meta"):
        net = module.GPT(module.Hyperparameters())
        note.note("the tensors at the record's sizes", "same", {
            name: "x".join(map(str, tensor.shape)) or "a number"
            for name, tensor in net.state_dict().items()})
        note.fact("the number of parameters at the record's sizes",
                  f"{sum(p.numel() for p in net.parameters()):,}")
    record = vars(module.Hyperparameters())
    calls = torch.load(calls, weights_only=True)["calls"]
    inputs = calls[0][0][0]
    for number, (args, kwargs) in enumerate(calls, start=1):
        where = f"call {number} of the model"
        with note.guard(where):
            net = make()
            kept = _Kept(net, "mlp")
            with kept:
                loss = as_loss(net(*args, **kwargs))
            note.note(f"bytes that the MLPs keep for the backward pass of {where}", "at most",
                      kept.bytes, (1.5, 64))
            note.note(f"the loss of {where}", "numbers", {"": loss.item()}, 2e-5)
            note.fact("dtype of the loss", loss.dtype)
            loss.backward()
            note.note(f"the gradient in {where}", "tensors", gradients_of(net), 2e-3)
    with note.guard("the tables at the record's lengths"):
        net = make(None, **{name: record[name] for name in length_names(record)})
        note.note("the tables at the record's lengths, without signs", "tables", {
            name: table[-1000:].float().abs() for name, table in net.named_buffers()
            if table.ndim > 1}, 1e-2)  # signs are for forward
    with note.guard("the loss of the vocabulary's last tokens"), torch.no_grad():
        size = record["vocab_size"]
        tokens = torch.arange(size - inputs.size(1) * 8, size).view(8, -1)
        note.note("the loss of the vocabulary's last tokens", "numbers",
                  {"": make(vocab_size=size)(tokens, tokens).item()}, 1e-4)
    within = inputs.clone()
    within[:, :4][within[:, :4] == values.get("bos_id", -1)] = 2
    for what, some, scale, tolerance in (
            ("logits", inputs, 1.0, 1e-4),
            ("logits of rows that begin within a document", within, 1.0, 1e-4),
            ("logits of a short prompt", inputs[:1, :7], 1.0, 1e-4),
            ("logits of small weights", inputs, 1e-3, 3e-2),  # they show the epsilon of a norm
            ("logits of matrices of zero", inputs, 0.0, 1e-4)):  # nothing is divided by zero
        with note.guard(what), torch.no_grad():
            net = make(scale).eval()
            logits = net(some)
            note.note(what, "tensors", {"logits": logits}, tolerance)
            note.fact(f"{what}: later tokens change earlier ones", _leaks(net, some, logits))
    glossary = load_glossary()
    windows = {name: record[name] for name in glossary.of_kind("window") if name in record}
    bounds = [glossary[name].at_most for name in windows]
    windows |= {name: record[name] for name in bounds if name in record}
    longer, many, lengths = _long_rows(inputs, values)
    if windows:
        with note.guard("logits with the record's windows"), torch.no_grad():
            logits = make(**windows, **lengths).eval()(longer)
            note.note("logits with the record's windows", "tensors", {"logits": logits}, 1e-4)
    with note.guard("logits of many documents"), torch.no_grad():
        net = make(**lengths).eval()
        with Spy().meter as meter:
            logits = net(many)
        note.note("numbers that the model multiplies by single weights", "at most", meter.scaled,
                  (1.05, 0))
        note.note("logits of many documents", "tensors", {"logits": logits}, 1e-4)


def paths(module, values, note, calls, machine, choices, **_):
    """The model with each way that only a GPU takes.

    calls: a file with calls of the milestone's model. machine: switches that follow the machine;
    choices: (name, value) of choices that do.
    """
    make = _maker(module, values)
    calls = torch.load(calls, weights_only=True)["calls"]
    longer, many, lengths = _long_rows(calls[0][0][0], values)
    for field, value in [*((field, True) for field in machine), *choices]:
        _note_path(note, make, field, value, lengths, longer, many)
        changes = {field: value, "compile": True}
        for number, call in enumerate(calls, start=1):  # the last is of the last stage
            where = f"call {number} of the model with {field}={value}"
            if _note_call(note, where, make, call, changes) and number == 1:
                _note_call(note, f"{where}, out of the range of eight bits", make, call, changes,
                           30, 1e4)


def _maker(module, values):
    """A function that makes the model, with given weights unless their scale is None; tables: a
    factor of those over the vocabulary."""
    def make(scale=1.0, tables=1.0, **changes):
        net = module.GPT(arguments(module, {**values, **changes}))
        if scale is not None:
            fill(net, scale)
        for param in net.parameters():
            if values["vocab_size"] in param.shape:
                param.data *= tables
        return net

    return make


def _long_rows(inputs, values):
    """Rows of long documents, a row of many, and the lengths that fit, {hyperparameter: tokens}."""
    # Documents begin within tiles and reach over more of them than a window; one fills a half; the
    # last tile is not full. They are long, as bfloat16 is too coarse for large angles, say; the
    # longest comes first, because some scripts read no more than a number of starts.
    longer = inputs.repeat(1, LONGER).roll(3, 1)[:, :-1]
    half = longer[:, : longer.size(1) // 2]
    half[half == values.get("bos_id", -1)] = 2
    many = longer[:1].clone()  # documents, more than eight bits with a sign can count
    many[:, : many.size(1) * 2 // 3 : 2] = values.get("bos_id", 1)
    return longer, many, dict.fromkeys(length_names(values), longer.size(1))


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """What parts of a model of this name keep for the backward pass, apart from weights."""

    def __init__(self, net, name):
        weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
        self.depth, self.tensors = 0, {}  # by address

        def keep(tensor):
            place = tensor.untyped_storage().data_ptr()
            if self.depth and place not in weights:
                self.tensors[place] = tensor
            return tensor

        def move(steps):
            self.depth += steps

        super().__init__(keep, lambda tensor: tensor)
        for path, part in net.named_modules():
            if path.rpartition(".")[2] == name:
                part.register_forward_pre_hook(lambda *_: move(1))
                part.register_forward_hook(lambda *_: move(-1))

    @property
    def bytes(self):
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def _note_path(note, make, field, value, lengths, longer, many):
    """Notes tensors and logits of a model with a switch or choice that follows the machine."""
    path = f"{field}={value}"
    what = f"logits with {path}"
    switched = {field: value, "compile": True, **lengths}
    with note.guard(what), torch.no_grad():
        spy = Spy()
        net = make(None, **switched)
        note.note(f"dtypes of the parameters with {path}", "same", {
            name: precision_of(p) for name, p in parameters_of(net).items()})
        tables = {name: table for name, table in net.named_buffers() if table.ndim > 1}
        note.note(f"dtypes of the tables with {path}", "in common", {
            name: dtype_name(table.dtype) for name, table in tables.items()})
        note.note(f"the tables with {path}, without signs", "tables", {  # signs are for forward
            name: table.float().abs() for name, table in tables.items()}, 4e-2)
        note.fact(f"FlashAttention that is activated with {path}", ", ".join(spy.activated))
        logits = make(**switched).eval()(longer)
        loose = logits.dtype == torch.bfloat16 or "bf16" in field
        note.note(what, "tensors", {"logits": logits}, 4e-2 if loose else 1e-3)
        note.fact(f"{what} are rounded to bfloat16", is_rounded(logits))
        note.fact(f"flex_attention is called with {path}", bool(spy.masks))
        note.fact(f"varlen_attn is called with {path}", spy.starts > 0)
        if spy.masks:
            note.fact("rows and tiles of FlexAttention's mask", spy.masks[-1])
            note.note("tiles that FlexAttention's mask lists", "at most", spy.tiles, (1, 0))
        logits = make(**switched).eval()(many)
        note.note(f"logits of many documents with {path}", "tensors", {"logits": logits},
                  4e-2 if loose else 1e-3)
        if spy.masks:
            note.note("tiles that FlexAttention's mask lists for many documents", "at most",
                      spy.tiles, (1, 0))


def _note_call(note, where, make, call, changes, tables=1.0, gradients=1.0):
    """Notes loss and gradients of a call, with gradients and tables over the vocabulary times these
    factors (other weights times so much may overflow); returns whether any product is in eight
    bits."""
    with note.guard(where):
        spy, (args, kwargs) = Spy(), call
        net = make(tables=tables, **changes)
        loss = as_loss(net(*args, **kwargs))
        (gradients * loss).backward()
        note.note(f"the loss of {where}", "numbers", {"": loss.item()}, 1e-2)
        found = {  # of scalars round-off may be left
            name: grad.float() for name, grad in gradients_of(net).items() if grad.ndim > 1}
        within = 5e-2
        if changes.get("bf16"):  # twice a tensor's own error, as other code may round elsewhere
            exact = make(tables=tables)
            (gradients * as_loss(exact(*args, **kwargs))).backward()
            within = {name: max(within, 2 * ((grad - found[name]).norm() / grad.norm()).item())
                      for name, grad in gradients_of(exact).items() if name in found}
        note.note(f"the gradient in {where}", "tensors", found, within)
        counts = sum(spy.eight_bits.values(), Counter())
        note.fact(f"products of eight bits in {where}", counted(counts))
        return counts.total() > 0


def gradients_of(net):
    """{name: gradient} of a model's parameters, zero where a pass has not used one."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in parameters_of(net).items()}


def as_loss(output):
    """What a call of the model returns, as one number: it may be logits."""
    return output.square().mean() if output.ndim else output


def counted(counts):
    return ", ".join(f"{count} of {what}" for what, count in sorted(counts.items()))


def precision_of(weights):
    """In words: the dtype, and whether the weights are finite and were rounded; zeros do not show
    that."""
    if not weights.isfinite().all():
        return f"{dtype_name(weights.dtype)}, not all finite"
    rounded = is_rounded(weights) and bool(weights.any())
    return dtype_name(weights.dtype) + ", holding what bfloat16 can" * rounded


def is_rounded(values):
    return torch.equal(values.to(torch.bfloat16).to(values.dtype), values)


def _leaks(net, inputs, logits):
    other = inputs.clone()
    other[:, -1] = (other[:, -1] + 1) % 7 + 2
    return not torch.allclose(net(other)[:, :-1], logits[:, :-1], atol=1e-5)
