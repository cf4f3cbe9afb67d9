"""What tests need of the snapshots: which of them have a subject, and micro-sized runs of them."""

import gc
import inspect
import subprocess
import sys
import tomllib
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

import shards as shard_files
from speedrun.history.blocks import split_blocks
from speedrun.history.fields import default_hyperparameters
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.scripts import find
from speedrun.scripts.sizes import length_names

MANIFEST = load_manifest()
SCRIPTS = MANIFEST.milestones  # all there are
# Those that train on shards of tokens; the encore's start from a checkpoint of one of them.
MILESTONES = tuple(m for m in SCRIPTS if "train_files" in default_hyperparameters(m.script))

MICRO = MANIFEST.glossary.column("micro")  # of a run of 20 steps in a second or two
LAYERS = ("layer", "layers", "pattern")  # kinds of hyperparameters: which layer has what
SIZES = ("vocabulary", "count", "width", "length", "batch", "steps", "interval", "switch", *LAYERS)


def by_id(milestone):
    """Test ids: the milestone's folder name."""
    return milestone.name


every_script = pytest.mark.parametrize("milestone", SCRIPTS, ids=by_id)
every_snapshot = pytest.mark.parametrize("milestone", MILESTONES, ids=by_id)


# ---- where a subject changed ----


@cache
def _blocks(id):
    """{name: section} of the blocks of a milestone's script."""
    source = MANIFEST.get(id).script.read_text(encoding="utf-8")
    found, title = {}, None
    for block in split_blocks(source):
        title = block.name.removeprefix("heading: ") if "heading: " in block.name else title
        found[block.name] = title
    return found


def declaring(*subjects, known=None):
    """The milestones at which one of the subjects changed: the roots that have it, and those that
    declare it and still have it. A subject is a block, or a section with all its blocks.

    Everywhere else it is the parent's, byte for byte, as test_chain.py proves. known: only those
    that have this key among their known values.
    """
    def changed(milestone):
        return {name for name, title in _blocks(milestone.id).items()
                if {name, title} & set(subjects)
                and (milestone.parent is None or name in milestone.changes)}

    return [milestone for milestone in MILESTONES
            if changed(milestone) and (known is None or known_values(milestone.id).get(known))]


def where(*subjects, known=None):
    """Runs a test once for each milestone that `declaring` names."""
    found = declaring(*subjects, known=known)
    assert found, f"no milestone declares {', '.join(subjects)}"
    return pytest.mark.parametrize("milestone", found, ids=by_id)


def summing(milestones):
    """Those of the milestones whose layers weigh their input as a whole; from 14 on, sublayers do,
    in test_stream_coefficients.py."""
    return [m for m in milestones if "add_lr" not in default_hyperparameters(m.script)]


@cache
def own_values(id):
    """What a milestone's known.toml says."""
    file = MANIFEST.get(id).folder / "known.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


@cache
def known_values(id):
    """What is known of a milestone: its parent's values, with those of its own known.toml. A table
    replaces the parent's entries of the same names and keeps the others; "none" removes an entry,
    and an empty table all."""
    parent = MANIFEST.get(id).parent
    known = dict(known_values(parent)) if parent else {}
    for name, value in own_values(id).items():
        if value and isinstance(value, dict):
            merged = known.get(name, {}) | value
            value = {key: entry for key, entry in merged.items() if entry != "none"}
        known[name] = value
    return known


def tried(milestones=MILESTONES):
    """Test parameters: what trains or compiles is dear, so by default it is tried at the milestones
    whose known.toml names a new `form` of runs, and at the last of each chain; the others are
    marked as slow."""
    last = {milestone.chain: milestone for milestone in milestones}
    return [milestone
            if "form" in own_values(milestone.id) or milestone is last[milestone.chain]
            else pytest.param(milestone, marks=pytest.mark.slow) for milestone in milestones]


tried_snapshots = pytest.mark.parametrize("milestone", tried(), ids=by_id, scope="module")


# ---- micro-sized runs ----


def load_snapshot(milestone):
    """The milestone's script as a module."""
    return find.load_snapshot(milestone.script)


def value_tables(record, num_layers):
    """Which layer has which value embedding, in a model of so many layers: as in the record's
    pattern in each of both halves, or in the last layer where there are no halves."""
    if len(record) % 2:
        return "0".rjust(num_layers, ".")
    half = "0".ljust(num_layers // 2, "." if "." in record else "1")
    return half + half[::-1]


def value_tables_of(model):
    """The tables (V, C) of value embeddings, in the order of their letters; from 13a on they are
    rows of one tensor."""
    embeds = model.value_embeds
    if hasattr(embeds, "weight"):
        return [*embeds.weight.unflatten(0, (-1, model.args.vocab_size))]
    return [table.weight for table in embeds.values()]


def four_matrices(attn):
    """Views (C, C) of an attention's queries, keys, values and output, however they are stored."""
    if hasattr(attn, "c_qkvo"):
        C = len(attn.c_qkvo)
        return attn.c_qkvo.detach().view(4, C, C).unbind()
    C = attn.c_qk.size(-1)  # from 14b on Q's pairs of heads and K's, then V and the output
    return *attn.c_qk.detach().view(2, C, C), *attn.c_vo.detach()


def sized(sizes, fields):
    """The sizes, with seq_len under the names by which a script of these fields knows it, with the
    value embeddings of so many layers, and with backout_layer or cached_layer in their second
    half."""
    named = dict.fromkeys(length_names(fields), sizes["seq_len"])
    if "value_embed_pattern" in fields and "num_layers" in sizes:
        named["value_embed_pattern"] = value_tables(
            fields["value_embed_pattern"], sizes["num_layers"])
    named |= {name: value for name, value in sizes.items() if name != "seq_len"}
    for name in sizes.keys() & {"backout_layer", "cached_layer"}:
        named[name] = max(sizes[name], sizes["num_layers"] // 2)
    return named


@cache
def _micro(id):
    """The micro values of a milestone: MICRO, with those of its known values."""
    return MICRO | known_values(id).get("micro", {})


def micro_of(milestone, **more):
    """The hyperparameters of a micro run, which moves the loss by more than 0.5; in `more`, seq_len
    is the length of all sequences."""
    fields = default_hyperparameters(milestone.script)
    micro = {name: value for name, value in _micro(milestone.id).items() if name in fields}
    return sized({"seq_len": MICRO["seq_len"], **micro, **more}, fields)


def micro_overrides(milestone, folder, log_dir, **more):
    """Hyperparameters of a micro run on the shards in `folder`."""
    files = dict(train_files=f"{folder}/*_train_*.bin", val_files=f"{folder}/*_val_*.bin")
    return {**files, "log_dir": str(log_dir), **micro_of(milestone, **more)}


def micro_args(milestone, folder, log_dir, **more):
    """The same as the Hyperparameters object of the milestone's module."""
    overrides = micro_overrides(milestone, folder, log_dir, **more)
    return load_snapshot(milestone).Hyperparameters(**overrides)


def constant_momentum(milestone):
    """What lets the momentum stand still: then a sum and a mean of gradients, of which the second
    is a multiple of the first, are one direction."""
    fields = default_hyperparameters(milestone.script)
    named = "muon_momentum_start" in fields
    return {"muon_momentum_start": fields["muon_momentum"]} if named else {}


def micro_sizes(module, **more):
    """Hyperparameters of a micro model, for a test that does not train."""
    sizes = {"seq_len": MICRO["seq_len"], **_of_kind(module, *SIZES), **more}
    return module.Hyperparameters(**sized(sizes, vars(module.Hyperparameters)))


def micro_layers(module):
    """How many layers a micro model has, and which of them has what."""
    return _of_kind(module, *LAYERS)


def _of_kind(module, *kinds):
    """The micro values of these kinds of hyperparameters."""
    (milestone,) = [m for m in MILESTONES if str(m.script) == module.__file__]
    return {name: value for name, value in _micro(milestone.id).items()
            if name in MANIFEST.glossary.of_kind(*kinds) and hasattr(module.Hyperparameters, name)}


def record_layers(module):
    """The same of the record."""
    names = MANIFEST.glossary.of_kind(*LAYERS)
    return {name: getattr(module.Hyperparameters, name) for name in names
            if hasattr(module.Hyperparameters, name)}


def _without_normuon(module, update, *args):
    """The module's update by plain Muon."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "even_out", lambda updates, *_: updates)
        return update(*args)


def make_muon(module, params, lr, bf16=False):
    """The module's Muon without compiled code and kernels. params: also its groups, from 08d on;
    else those of one shape are a group."""
    asked, params = inspect.signature(module.Muon).parameters, list(params)
    if "args" in asked:
        args = module.Hyperparameters(muon_lr=lr, compile=False, bf16=bf16)
        return module.Muon(module.stacks_of(params, args) if hasattr(module, "stacks_of")
                           else params, args)
    if "groups" in asked and not isinstance(params[0], dict):
        shapes = dict.fromkeys(param.shape for param in params)
        params = [dict(params=[p for p in params if p.shape == shape]) for shape in shapes]
    switches = {name: False for name in ("compiled", "use_triton") if name in asked}
    if "neuron_beta" in asked:
        switches["neuron_beta"] = 0.95
    if "self.lr_factors" in inspect.getsource(module.Muon):
        params = [dict(lr_factors=[1.0] * len(group["params"])) | group for group in params]
    if "weight_decay" in asked:
        switches["weight_decay"] = 0.0
    muon = module.Muon(params, lr=lr, momentum=0.95, bf16=bf16, **switches)
    if "neuron_beta" in asked:
        muon.muon_update = partial(_without_normuon, module, muon.muon_update)
    return muon


def orthogonalizer(module):
    """The name of the function that orthogonalizes."""
    return "polar_express" if hasattr(module, "polar_express") else "newton_schulz"


def path(module, flex):
    """What makes a model take FlexAttention, or the dense mask that stands in for it."""
    if hasattr(module, "best_attention"):  # no FlexAttention any more
        return dict(attention_kernel="dense")
    return dict(use_flex_attention=flex)


def set_window(model, size):
    """Gives the model another window, window_end with the long window of the last validation;
    before 05 it has none."""
    forward = type(model).forward
    if hasattr(model, "set_window"):
        last = size == model.args.window_end
        longs = [model.args.long_window_end if last else size]
        model.set_window(size, *longs if "long_window" in inspect.signature(
            model.set_window).parameters else [])
    elif "window" in inspect.signature(forward).parameters:
        exact = hasattr(model.args, "window_growth")  # then it is a number
        model.forward = partial(forward, model, window=size if exact else torch.tensor(size))
    elif hasattr(getattr(model, "args", None), "window"):
        model.args.window = size


def open_shard(module, file):
    """A shard's tokens, as the milestone's loader has them by default."""
    told = dict(args=module.Hyperparameters())
    asked = inspect.signature(module.open_shard).parameters
    return module.open_shard(file, **{k: v for k, v in told.items() if k in asked})


def token_batches(module, pattern, step_tokens, args, rank=0, world_size=1, validating=False,
                  aligned=False):
    """The micro-batches of a rank, whatever the milestone's loader is told apart from `args`.
    aligned: rows begin with documents."""
    length = getattr(args, length_names(vars(args))[validating])
    parameters = inspect.signature(module.token_batches).parameters
    told = dict(seq_len=length, aligned=aligned, packed=aligned)
    return module.token_batches(
        pattern, step_tokens, args=args, rank=rank, world_size=world_size,
        device=torch.device("cpu"), **{k: v for k, v in told.items() if k in parameters})


def aligned_starts(tokens, T, bos_id):
    """Where rows of T tokens begin that begin with documents, from a walk over all of these: one is
    taken as soon as another is found that begins T tokens later or more, which is next."""
    starts, candidate = [], None
    for position in np.flatnonzero(tokens == bos_id).tolist():
        if candidate is None:
            candidate = position
        elif position - candidate >= T:
            starts.append(candidate)
            candidate = position
    return starts


def loader_args(module, **values):
    """Hyperparameters with those of these values that the milestone has."""
    fields = vars(module.Hyperparameters())
    return module.Hyperparameters(**{k: v for k, v in values.items() if k in fields})


def row_stages(module, lengths, args):
    """The stages of rows of these lengths, for packed_rows; other lengths have a stage as well."""
    first, *later = module.stages(args)
    for length in lengths:
        row = first if length == first.seq_len else later[-1]
        yield row._replace(seq_len=length)


def pack(module, tokens, lengths, args):
    """The rows of the module's packed_rows; all have the first of the lengths before 10d."""
    grows = "row_stages" in inspect.signature(module.packed_rows).parameters
    told = row_stages(module, lengths, args) if grows else next(lengths)
    return module.packed_rows(tokens, told, args)


def windows_of(module, args):
    """The windows of the stages and of what follows them, in order."""
    if hasattr(module, "stages"):
        return [row.window for row in module.stages(args)]
    return module.all_windows(args)


def packed_rows(tokens, lengths, bos_id, longest):
    """The packs of next(lengths) + 1 tokens of a shard, from a walk over its tokens: each is taken
    if its document began in this row and fewer than longest(length) of it are there."""
    rows, row, taken, T = [], [], None, next(lengths)
    for token in tokens.tolist():
        if token == bos_id:
            taken = 0
        if taken is not None and taken < longest(T):
            row.append(token)
            taken += 1
        if len(row) == T + 1:
            rows.append(row)
            row, taken, T = [], None, next(lengths)
    return rows


def training_rows(milestone, tokens, lengths, args):
    """The rows of next(lengths) + 1 tokens, which only packs may vary, on which a milestone trains,
    cut from a shard without its loader."""
    known = known_values(milestone.id)
    if known.get("packed"):
        first = getattr(args, "first_document_len", args.max_document_len)
        return packed_rows(tokens, lengths, args.bos_id, lambda T: (
            first if T == args.train_seq_len else args.max_document_len))
    T = next(lengths)
    starts = range(0, len(tokens) - T, T)
    if known.get("aligned"):
        starts = aligned_starts(tokens, T, args.bos_id)
    return [tokens[start : start + T + 1].tolist() for start in starts]


def train(module, args):
    """Trains in this process and returns the validation losses, unrounded."""
    losses, validate = [], module.validate

    def noted(*positional, **named):
        losses.append(validate(*positional, **named))
        return losses[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "validate", noted)
        gc.freeze()  # what is there is no garbage: collections need not walk through all of torch,
        patched.setattr(gc, "freeze", lambda: None)  # whatever a run asks for
        patched.setattr(gc, "unfreeze", lambda: None)
        module.main(args)
    return losses


def first_step(id, overrides):
    """Trains one step in float64 from random weights, with a head in FP8; returns the weights after
    it, {name: array}, and the codes of the logits' gradients, one array for each micro-step.

    Muon does not orthogonalize: the weights are to be a smooth function of the gradients.
    """
    module = load_snapshot(MANIFEST.get(id))
    models, codes, quantize = [], [], module.quantize

    class Float64(module.GPT):
        def __init__(self, args):
            super().__init__(args)
            for param in self.parameters():
                if param.ndim >= 2:
                    torch.nn.init.normal_(param, std=0.2)
            models.append(self.double())

    def noted(x, scale, dtype):
        quantized = quantize(x, scale, dtype)
        if dtype == torch.float8_e5m2:
            codes.append(quantized.view(torch.uint8).numpy())
        return quantized

    def fp8_product(a, a_scale, b, b_scale, dtype, fast=False):  # torch's has no float64
        return a.double() / a_scale @ (b.double() / b_scale).T

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "GPT", Float64)
        patched.setattr(module, "quantize", noted)
        patched.setattr(module, "fp8_product", fp8_product)
        patched.setattr(module, "validate", lambda *_: 0.0)
        patched.setattr(module, orthogonalizer(module), lambda matrices, *_, **__: matrices)
        module.main(module.Hyperparameters(**overrides))
    return {name: p.detach().numpy() for name, p in models[0].named_parameters()}, codes


def as_options(overrides):
    """`--name=value` for the command line."""
    return [f"--{name}={value}" for name, value in overrides.items()]


def run_script(milestone, overrides, world_size=1, cwd=REPOSITORY, timeout=300):
    """Runs the script as a user does, several ranks under torchrun; returns the ended process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command = [sys.executable, *(launcher if world_size > 1 else []), str(milestone.script)]
    return subprocess.run([*command, *as_options(overrides)], cwd=cwd, timeout=timeout,
                          capture_output=True, encoding="utf-8")


def write_random_shards(folder, train_lengths=(7_000, 9_500), val_length=3_000, seed=0):
    """Writes shards of random tokens below 64, unevenly distributed so that there is a pattern
    to learn: each token is one of a few followers of the one before."""
    rng = np.random.default_rng(seed)
    followers = rng.integers(0, 64, (64, 4))

    def stream(length):
        choices = rng.integers(0, 4, length)
        tokens = np.zeros(length, dtype=np.int64)
        for i in range(1, length):
            tokens[i] = followers[tokens[i - 1], choices[i]]
        return tokens

    for number, length in enumerate(train_lengths, start=1):
        shard_files.write(Path(folder, f"micro_train_{number:06d}.bin"), stream(length))
    shard_files.write(Path(folder, "micro_val_000000.bin"), stream(val_length))
