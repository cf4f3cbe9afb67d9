"""The jobs that observe runs of a script's main; `note`: see trace.Observations."""

import math
import os
import re
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import torch

from speedrun.check.spy import LATE, Spy
from speedrun.check.watched import run_watched
from speedrun.check.weights import parameters_of
from speedrun.history.glossary import load_glossary
from speedrun.scripts.sizes import length_names

SHARES = torch.linspace(0, 1, 501)  # at which a distribution's quantiles are noted
SEEDS = 16  # from which weights are drawn, so that small tensors have a distribution, too
SIZE = 0.02  # of gradients from outside
STAGED = 7  # steps of a kernel warm-up: in all stages, and the last ones without an Adam step
RUN = "run.pt"  # the file with the model's calls and the sizes of the optimizers' groups


def updates(module, values, note, folder, **_):
    """A run from given weights whose optimizers get gradients from outside."""
    spy, lines = Spy(gradients=SIZE), []
    try:
        lines = run_watched(module, values, folder, spy)
    finally:
        for number, moves in spy.moves.items():
            note.note(f"the move in step {number}", "tensors", moves, 4e-3)
        for args, _ in spy.calls[:1]:
            for what, tokens in zip(("inputs", "targets"), args, strict=False):
                if isinstance(tokens, torch.Tensor) and not tokens.is_floating_point():
                    note.note(f"the {what} of the first training pass", "clue",
                              tokens.flatten()[:4096].tolist())
        _note_run(note, spy, "with gradients from outside", lines)
        note_exercised(note, spy, "with gradients from outside")
    for what, kinds in spy.kinds.items():
        note.fact(f"how the model is called in the {what}", "; ".join(sorted(kinds)))
    for what, modes in spy.modes.items():
        note.fact(f"model.training in the {what}", ", ".join(map(str, sorted(modes))))
    for what, settings in spy.settings.items():
        note.fact(f"sets of numbers in the model's calls; the {what} is compiled for each",
                  len(set(settings)))
    note.fact("tables of the model that move between calls",
              ", ".join(sorted(name for name, some in spy.places.items() if len(some) > 1)))
    note.note("threads other than the main one that run the script's code", "at least",
              len(spy.threads), 0.01)
    early, late = spy.ready[0] if spy.ready else 0, spy.ready[-1] if spy.ready else 0
    note.note("batches that are ready when the model takes the third", "at least", early, 1.0)
    note.note("batches that wait when the model takes the third", "at most", early, (2, 0))
    note.note(f"batches that wait, or are kept, after {LATE}", "at most", late, (2, 0))
    note.fact("a thread starts after the first validation", spy.started_late > 0)
    note.note("weights that are views into a tensor with others", "at least",
              len(spy.sharing()), 1.0)
    groups = [len(group["params"]) for optimizer in spy.steps for group in optimizer.param_groups]
    torch.save(dict(calls=[spy.calls[i] for i in sorted({0, len(spy.calls) - 1})], groups=groups),
               Path(folder).with_name(RUN))
    with note.guard("a run with gradients of zero"):
        spy = Spy(gradients=0.0)
        run_watched(module, {
            **one_pass(values), "val_loss_every": 0,
            "train_steps": values.get("adam_every", 1)}, f"{folder}_zero", spy)  # one of each
        note.note("the first move with gradients of zero", "tensors", spy.moves[1], 4e-3)


def one_pass(values: dict, world: int = 1, **more) -> dict:
    """The hyperparameters `values` and `more`, with one pass for each rank in a step and in a
    validation."""
    values = {**values, **more}
    rows = world * values["micro_batch_size"]
    seq_len, val_seq_len = (values[name] for name in length_names(values))
    return {**values, "total_batch_size": rows * seq_len, "val_tokens": rows * val_seq_len}


def _note_run(note, spy, which, lines):
    note.note(f"the log of a run {which}", "log", lines)
    losses = losses_of(spy)
    note.fact(f"validate returns ({which})",
              ", ".join(sorted({type(loss).__name__ for loss in spy.losses})))
    note.fact(f"validate rounds ({which})",
              bool(losses) and all(loss == round(loss, 4) for loss in losses.values()))
    if len(losses) > 1:  # a single one is the last
        note.note(f"the first validation loss ({which})", "numbers", {"": losses["loss 1"]}, 1e-5)
    if losses:
        note.note(f"the validation losses ({which})", "numbers", losses, 4e-4)


def note_exercised(note, spy: Spy, which: str) -> None:
    """Notes which of the model's weights no optimizer has moved: nothing is known of these."""
    moved = {name for optimizer in spy.steps for name, _ in spy.weights(optimizer)}
    note.note(f"weights that no optimizer moves in the run {which}", "unexercised",
              sorted({name for net in spy.models for name in parameters_of(net)} - moved))


def losses_of(spy: Spy) -> dict[str, float]:
    """What validate returned; what is no number as such."""
    return {f"loss {number}": float(loss) if isinstance(loss, int | float) else math.nan
            for number, loss in enumerate(spy.losses, start=1)}


def beginnings(module, values, note, folder, **_):
    """The weights from the script's own seeds."""
    weights = []
    for number, seed in enumerate((*range(SEEDS), 0)):
        spy = Spy(filled=False, stop=True)
        run_watched(module, {**values, "seed": seed}, f"{folder}_{number}", spy)
        weights.append(spy.initial or {})
    drawn = {name: torch.stack([some[name].float() for some in weights[:-1]])
             for name in weights[0]}
    fixed = {name: (some == some[0]).all(0) for name, some in drawn.items()}
    note.note("where initial weights come from", "same", {
        name: "drawn from the seed" if not same.any() else "the same for every seed" if same.all()
        else "partly drawn from the seed" for name, same in fixed.items()})
    note.note("the initial weights that are not drawn", "tensors",
              {name: some[0].where(fixed[name], 0) for name, some in drawn.items()}, 1e-3)
    note.note("the initial weights", "spread",
              {name: some.flatten().quantile(SHARES) for name, some in drawn.items()},
              {name: some.numel() for name, some in drawn.items()})
    note.fact("another seed gives other weights", _apart(weights[0], weights[1]))
    note.fact("the same seed gives the same weights", not _apart(weights[0], weights[-1]))
    free = torch.cat([some[0][~fixed[name]] for name, some in drawn.items()])
    note.note("numbers that the initial weights have, each counted once", "at least",
              len(free.unique()), 0.95)  # a matrix may be another's copy


def training(module, values, note, folder, **_):
    """A run after a kernel warm-up, with a checkpoint."""
    spy = Spy()
    warm_up, scheduled = values.get("window_stages", 2), values["train_steps"]  # steps
    if values.keys() & load_glossary().of_kind("stage rate"):  # it reaches beyond those scheduled
        warm_up, scheduled = STAGED, values["scheduled_steps"]
    changed = {**values, "kernel_warmup_steps": warm_up, "val_loss_every": 3,
               "scheduled_steps": scheduled,  # else a warm-up sees all before it
               "train_loss_every": 2, "save_checkpoint": True, "compile": True}
    lines = run_watched(module, changed, folder, spy)
    settings = spy.settings["training pass"]
    note.fact("sets of numbers in the model's calls that training has and the warm-up has not",
              len(set(settings) - set(settings[:warm_up])))
    note.fact("calls of the model, those of the kernel warm-up included", len(spy.calls))
    note.note("sets of Python numbers in calls of compiled functions, each compiled by itself",
              "at most", sum(map(len, spy.given.values())), (1, 0))
    _note_run(note, spy, "after a kernel warm-up", lines)
    _note_checkpoint(note, spy, folder, "the checkpoint")
    note.fact("the files in log_dir", ", ".join(sorted(os.listdir(folder))))
    with note.guard("a run without a kernel warm-up"):
        cold = Spy()
        run_watched(module, {**changed, "kernel_warmup_steps": 0}, f"{folder}_cold", cold)
        note.fact("a kernel warm-up changes the weights at the end",
                  _apart(weights_of(spy), weights_of(cold)))


def record_tokens(module, values, note, folder, shards, **_):
    """A run with the record's token ids."""
    spy, record = Spy(), vars(module.Hyperparameters())
    if "train_files" not in record:  # the ids are of texts
        return
    tokens, before = load_glossary().of_kind("vocabulary", "token"), _used()
    lines = run_watched(module, {  # with more ids a pass costs more
        **one_pass(values), **{name: record[name] for name in tokens if name in record},
        "train_files": f"{shards}/high*.bin", "val_files": f"{shards}/high*.bin",
        "train_steps": values.get("scheduled_steps", 2),  # all stages, within one shard
        "train_loss_every": 1, "val_loss_every": 0}, folder, spy)
    note.note("the log of a run with the record's token ids", "log", lines)
    if before:
        read, memory = (now - then for now, then in zip(_used(), before, strict=True))
        note.note("bytes that are read from files in a run with a large shard", "at most",
                  read, (1.3, 8 << 20))
        note.note("bytes of memory that a run with a large shard takes", "at most",
                  memory, (1.2, 48 << 20))


def _used():
    """Bytes that this process has read so far, those of memory maps left out, and the most memory
    that it has had; None where the system does not count them."""
    with suppress(OSError, TypeError):  # no such file, or no such line in it
        counts = Path("/proc/self/io").read_text() + Path("/proc/self/status").read_text()
        read, most = (int(re.search(rf"{name}:\s+(\d+)", counts)[1])
                      for name in ("rchar", "VmHWM"))
        return read, 1024 * most


def _note_checkpoint(note, spy, folder, what):
    """What is in the checkpoint, and whether its weights are those that the run ended with."""
    with note.guard(what):
        kept = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
        note.note(what, "has", {key: "dict" if isinstance(value, dict) else type(value).__name__
                                for key, value in kept.items()})
        note.note(f"the weights in {what}", "tensors", kept["model"], 2e-2)
        note.fact(f"the weights in {what} are those of the run's end, bit for bit", all(
            name in kept["model"] and torch.equal(kept["model"][name], param)
            for name, param in parameters_of(spy.models[-1]).items()))


def _apart(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


def ranks(module, values, note, folder, rank, **_):
    """Runs on several ranks, one up to the first call of the model, one from given weights: losses,
    and each rank's share of the work."""
    spy = Spy(filled=False, stop=True)
    run_watched(module, values, f"{folder}_begin", spy)
    note.note("beginning", "beginning", [
        zlib.crc32(param.float().numpy().tobytes()) for param in (spy.initial or {}).values()])
    spy = Spy(metered=True)
    lines = run_watched(module, {
        **values, "val_loss_every": 0, "train_loss_every": 1, "kernel_warmup_steps": 1,
        "compile": True, "save_checkpoint": True}, folder, spy)
    note.fact(f"messages for which no optimizer waits, rank {rank}", spy.forgotten)
    if spy.forgotten:
        return  # what else there is to see depends on which message came when
    _note_run(note, spy, f"on two ranks, rank {rank}", [] if rank else lines)
    sys.stdout.flush()
    printed = Path(folder).with_name(f"output{rank}").read_bytes().count(b"\nstep:")
    note.fact(f"lines of steps that rank {rank} prints", printed)
    note.note(f"the weights at the end, rank {rank}", "tensors", weights_of(spy), 2e-2)
    if rank:
        note.fact(f"files that rank {rank} writes", ", ".join(sorted(
            Path(file).name for file in spy.written if Path(folder) in Path(file).parents)))
    else:
        _note_checkpoint(note, spy, folder, "the checkpoint of two ranks")
    note.fact(f"buffers that DistributedDataParallel sends from rank {rank} before a pass",
              sum(len(net.modules_buffers) for net in spy.parallel if net.broadcast_buffers))
    steps = max(spy.steps.values(), default=1)
    note.note(f"matrix products of the optimizers on rank {rank} of 2, per step", "at most",
              spy.meter.work["optimizers"] // steps, (1.8, 64))
    beside = spy.meter.beside["optimizers"] / max(spy.meter.work["optimizers"], 1)
    note.note(f"share of the optimizers' products while updates are sent, rank {rank}",
              "at least", round(beside, 2), 0.35)  # the batches may have another order
    kinds = [spy.accompanied[kind] / number for kind, number in spy.messages.items()]
    note.note(f"share of messages beside which something is computed, rank {rank}", "at least",
              round(sum(kinds) / max(len(kinds), 1), 2), 0.8)  # without copies the last has none
    note.note(f"share of received updates that arrive in the model's own tensors, rank {rank}",
              "at least", round(spy.in_place / max(spy.received_bytes, 1), 2), 0.9)
    note.note(f"bytes for which the optimizers stand still on rank {rank}, per step", "at most",
              spy.blocking // steps, (1.5, 4096))
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
    glossary = load_glossary()
    tables = [name for name in glossary.of_kind("vocabulary") if name in values]
    tables += [name for name, entry in glossary.items() if entry.unit == "rows" and name in values]
    rows = {name: 16 * world * -(-values[name] // (16 * world))
            for name in tables}  # that divide among the ranks
    spy = Spy(gradients=SIZE)
    run_watched(module, {
        **one_pass(values, world, micro_batch_size=1), **rows, "train_steps": 2,
        "val_loss_every": 0, "adam_every": 2}, folder, spy)  # so that Adam steps, too
    note_exercised(note, spy, f"on {world} ranks")
    # Not the weights: beside them a small rate's moves are within the tolerance.
    note.note(f"the sum of two moves on {world} ranks, rank {rank}", "tensors", moves_of(spy), 4e-3)


def moves_of(spy: Spy) -> dict[str, torch.Tensor]:
    """{weight: the sum of its moves in all steps}."""
    names = {name: None for moves in spy.moves.values() for name in moves}
    return {name: sum(moves[name].float() for moves in spy.moves.values() if name in moves)
            for name in names}


def weights_of(spy: Spy) -> dict[str, torch.Tensor]:
    """{name: weight} of the models as they are now."""
    return {name: p.detach() for net in spy.models for name, p in parameters_of(net).items()}
