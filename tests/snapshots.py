"""What tests need of the snapshots: which of them have a subject, and micro-sized runs of them."""

import inspect
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import shards as shard_files
from speedrun.history.blocks import split_blocks
from speedrun.history.manifest import REPOSITORY, load_manifest
from speedrun.scripts import load
from speedrun.scripts.find import default_hyperparameters
from speedrun.scripts.sizes import length_names

MANIFEST = load_manifest()
WRITTEN = MANIFEST.written()
KNOWN = Path(__file__).parent / "known"

# A model and a stream that train for 20 steps in a second or two.
MICRO = dict(
    vocab_size=64, num_layers=2, num_heads=2, model_dim=32, seq_len=32, micro_batch_size=2,
    total_batch_size=1024, val_tokens=1024, train_steps=20, val_loss_every=1, train_loss_every=1,
    kernel_warmup_steps=1, compile=False, bf16=False,
)
# What moves the loss by more than 0.5 in those steps; a milestone takes the fields that it has.
# The scalars stand still: test_equivalence.py shows what Adam makes of their round-off.
MICRO_RATES = dict(
    adam_lr=6e-3, warmup_steps=2, cooldown_steps=5, muon_lr=1e-2, embed_lr=3e-3, scalar_lr=0.0,
    momentum_warmup_steps=5, bos_id=1, window=24, window_start=4, window_end=24,
    window_growth=9, tile_size=4, val_seq_len=16, max_document_len=20, scheduled_steps=17,
    long_window_end=30, momentum_cooldown_steps=3,
)
MICRO_LAYERS = dict(  # of the few
    num_value_embeds=1, layer_without_attention=1, window_pattern="SL" * 6, backout_layer=1)
MICRO_ODD = dict(num_layers=3, window_pattern="SSL" * 4)  # from 08a on: skips leave one over
MICRO_RATES_UNTIED = dict(muon_lr=0.05, embed_lr=0.1, head_lr=0.02)  # where the head has a rate


def _micro_layers(fields):
    layers = MICRO_LAYERS | (MICRO_ODD if "long_window_end" in fields else {})
    return {name: value for name, value in layers.items() if name in fields}


def micro_of(milestone):
    """The hyperparameters beside MICRO that a micro run of this milestone has."""
    fields = default_hyperparameters(milestone.script)
    rates = MICRO_RATES | _micro_layers(fields) | (
        MICRO_RATES_UNTIED if "head_lr" in fields else {})
    return {name: value for name, value in rates.items() if name in fields}


def by_id(milestone):
    """Test ids: the milestone's folder name."""
    return milestone.name


every_snapshot = pytest.mark.parametrize("milestone", WRITTEN, ids=by_id)

# What trains or compiles is dear: by default it is tried where the form of runs is new and at the
# last of the milestones, at the others with the slow tests.
FORMS = {
    "00": "DistributedDataParallel", "03": "a share of the updates for each rank",
    "05k": "packs of documents", "07": "a share of the gradients for each rank",
    "08": "batches of a thread",
}


def tried(milestones=WRITTEN):
    """Test parameters: the milestones, those that are not tried by default marked as slow."""
    return [milestone if milestone.id in FORMS or milestone is milestones[-1]
            else pytest.param(milestone, marks=pytest.mark.slow) for milestone in milestones]


tried_snapshots = pytest.mark.parametrize("milestone", tried(), ids=by_id, scope="module")


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

    return [milestone for milestone in WRITTEN
            if changed(milestone) and (known is None or known_values(milestone.id).get(known))]


def where(*subjects, known=None):
    """Runs a test once for each milestone that `declaring` names."""
    found = declaring(*subjects, known=known)
    assert found, f"no milestone declares {', '.join(subjects)}"
    return pytest.mark.parametrize("milestone", found, ids=by_id)


@cache
def known_values(id):
    """What tests/known/<id>.toml says of a milestone; what it leaves out is the parent's."""
    parent = MANIFEST.get(id).parent
    file = KNOWN / f"{id}.toml"
    own = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return (known_values(parent) if parent else {}) | own


# ---- micro-sized runs ----


def load_snapshot(milestone):
    """The milestone's script as a module."""
    return load.load_snapshot(milestone.script)


def sized(sizes, fields):
    """The sizes, with seq_len under the names by which a script of these fields knows it."""
    named = dict.fromkeys(length_names(fields), sizes["seq_len"])
    return named | {name: value for name, value in sizes.items() if name != "seq_len"}


def micro_overrides(milestone, folder, log_dir, **more):
    """Hyperparameters of a micro run on the shards in `folder`."""
    files = dict(train_files=f"{folder}/*_train_*.bin", val_files=f"{folder}/*_val_*.bin")
    sizes = MICRO | micro_of(milestone) | more
    return {**files, "log_dir": str(log_dir),
            **sized(sizes, default_hyperparameters(milestone.script))}


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
    sizes = MICRO | micro_layers(module) | more
    return module.Hyperparameters(**sized(sizes, vars(module.Hyperparameters)))


def micro_layers(module):
    """Which of a few layers has what, where that is a hyperparameter."""
    return _micro_layers(vars(module.Hyperparameters))


def record_layers(module):
    """The same of the record."""
    names = ("num_layers", *MICRO_LAYERS)
    return {name: getattr(module.Hyperparameters, name) for name in names
            if hasattr(module.Hyperparameters, name)}


def make_muon(module, params, lr, bf16=False):
    """The module's Muon without compiled code and kernels. params: also its groups, from 08b on;
    else those of one shape are a group."""
    asked, params = inspect.signature(module.Muon).parameters, list(params)
    if "groups" in asked and not isinstance(params[0], dict):
        shapes = dict.fromkeys(param.shape for param in params)
        params = [dict(params=[p for p in params if p.shape == shape]) for shape in shapes]
    switches = {name: False for name in ("compiled", "use_triton") if name in asked}
    return module.Muon(params, lr=lr, momentum=0.95, bf16=bf16, **switches)


def orthogonalizer(module):
    """The name of the function that orthogonalizes."""
    return "polar_express" if hasattr(module, "polar_express") else "newton_schulz"


def path(module, flex):
    """What makes a model take FlexAttention, or the dense mask that stands in for it."""
    if hasattr(module, "best_attention"):  # a choice among several
        return dict(attention_kernel="flex" if flex else "dense")
    return dict(use_flex_attention=flex)


def set_window(model, size):
    """Gives the model another window; before 05 it has none."""
    if hasattr(model, "set_window"):
        model.set_window(size)
    elif torch.is_tensor(getattr(model, "window", None)):
        model.window.fill_(size)
    elif hasattr(model, "window"):
        model.window = size
    elif hasattr(getattr(model, "args", None), "window"):
        model.args.window = size


def token_batches(module, pattern, step_tokens, args, rank=0, world_size=1, validating=False,
                  aligned=False):
    """The micro-batches of a rank, whatever the milestone's loader is told apart from `args`.
    aligned: rows begin with documents."""
    told = dict(seq_len=getattr(args, length_names(vars(args))[validating]), aligned=aligned,
                packed=aligned)
    parameters = inspect.signature(module.token_batches).parameters
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


def packed_rows(tokens, T, bos_id, longest):
    """The packs of T + 1 tokens of a shard, from a walk over its tokens: each is taken if its
    document began in this row and fewer than `longest` of it are there."""
    rows, row, taken = [], [], None
    for token in tokens.tolist():
        if token == bos_id:
            taken = 0
        if taken is not None and taken < longest:
            row.append(token)
            taken += 1
        if len(row) == T + 1:
            rows.append(row)
            row, taken = [], None
    return rows


def training_rows(milestone, tokens, T, args):
    """The rows of T + 1 tokens on which a milestone trains, cut from a shard without its loader."""
    known = known_values(milestone.id)
    if known.get("packed"):
        return packed_rows(tokens, T, args.bos_id, args.max_document_len)
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
        module.main(args)
    return losses


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
