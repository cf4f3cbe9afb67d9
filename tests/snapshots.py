"""What tests need of the snapshots: which of them have a subject, and micro-sized runs of them."""

import subprocess
import sys
import tomllib
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import shards as shard_files
from oracle.rows import rows_of
from speedrun.history.blocks import split_blocks
from speedrun.history.fields import default_hyperparameters
from speedrun.history.manifest import REPOSITORY, Milestone, load_manifest
from speedrun.scripts import find
from speedrun.scripts.sizes import fitting, length_names

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


def declaring(*subjects, known=None, block=None):
    """The milestones at which one of the subjects changed: the roots that have it, and those that
    declare it and still have it. A subject is a block, or a section with all its blocks.

    Everywhere else it is the parent's, byte for byte, as test_chain.py proves. known: only those
    that have this key among their known values; block: only those that have this block.
    """
    return [milestone for milestone in MILESTONES
            if _changed(milestone.id) & set(subjects)
            and (known is None or known_values(milestone.id).get(known))
            and (block is None or block in _blocks(milestone.id))]


@cache
def _changed(id):
    """The names and the sections of the blocks that a milestone declares and still has; of a root,
    of all it has."""
    milestone = MANIFEST.get(id)
    return {found for name, title in _blocks(id).items()
            if milestone.parent is None or name in milestone.changes for found in (name, title)}


def where(*subjects, known=None, block=None):
    """Runs a test once for each milestone that `declaring` names."""
    found = declaring(*subjects, known=known, block=block)
    assert found, f"no milestone declares {', '.join(subjects)}"
    return pytest.mark.parametrize("milestone", found, ids=by_id)


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


def shapes_of(module, args):
    """A milestone's model, whose tensors have shapes and dtypes and no numbers."""
    with pytest.MonkeyPatch.context() as patched, torch.device("meta"):
        for name in ("normal_", "uniform_"):  # which take their time there, too
            patched.setattr(torch.Tensor, name, lambda tensor, *_, **__: tensor)
        return module.GPT(args)


def handles(subject):
    """How to get hold of the parts of a milestone: given as such, as its module, or as an object of
    one of its classes."""
    if isinstance(subject, Milestone):
        return find.handles_for(subject.script)
    if not isinstance(subject, ModuleType):
        subject = next(sys.modules[kind.__module__] for kind in type(subject).__mro__
                       if kind.__module__.startswith("snapshot "))
    return find.handles_for(subject.__file__)


def sized(sizes, fields, parts):
    """The sizes, with seq_len under the names by which a script of these fields knows it, with the
    value embeddings of so many layers, and with layers that belong there in the second half. parts:
    the script's handles."""
    named = dict.fromkeys(length_names(fields), sizes["seq_len"])
    if "num_layers" in sizes:
        named |= parts.for_layers(fields, sizes["num_layers"])
    named |= {name: value for name, value in sizes.items() if name != "seq_len"}
    for name in sizes.keys() & set(parts.SECOND_HALF):
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
    micro = fitting(_micro(milestone.id), fields)
    return sized({"seq_len": MICRO["seq_len"], **micro, **more}, fields, handles(milestone))


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
    return handles(milestone).constant_momentum(default_hyperparameters(milestone.script))


def micro_sizes(module, **more):
    """Hyperparameters of a micro model, for a test that does not train."""
    sizes = {"seq_len": MICRO["seq_len"], **_of_kind(module, *SIZES), **more}
    fields = vars(module.Hyperparameters)
    return module.Hyperparameters(**sized(sizes, fields, handles(module)))


def micro_layers(module):
    """How many layers a micro model has, and which of them has what."""
    return _of_kind(module, *LAYERS)


def _of_kind(module, *kinds):
    """The micro values of these kinds of hyperparameters."""
    (milestone,) = [m for m in MILESTONES if str(m.script) == module.__file__]
    named = MANIFEST.glossary.of_kind(*kinds)
    return fitting(fitting(_micro(milestone.id), named), vars(module.Hyperparameters))


def record_layers(module):
    """The same of the record."""
    return fitting(vars(module.Hyperparameters), MANIFEST.glossary.of_kind(*LAYERS))


def open_shard(module, file):
    """A shard's tokens, as the milestone's loader has them by default."""
    return handles(module).open_shard(module, file, module.Hyperparameters())


def token_batches(module, pattern, step_tokens, args, rank=0, world_size=1, validating=False,
                  aligned=False):
    """The micro-batches of a rank. aligned: rows begin with documents, if the milestone's do."""
    length = getattr(args, length_names(vars(args))[validating])
    return handles(module).token_batches(
        module, pattern, step_tokens, length, aligned, args=args, rank=rank, world_size=world_size,
        device=torch.device("cpu"))


def loader_args(module, **values):
    """Hyperparameters with those of these values that the milestone has."""
    return module.Hyperparameters(**fitting(values, vars(module.Hyperparameters())))


def training_rows(milestone, tokens, lengths, num_rows, args):
    """The rows on which a milestone trains, num_rows per step, cut from a shard without its loader;
    lengths: an iterator over the steps' T. See `oracle.rows.rows_of`."""
    return rows_of(milestone.id, np.asarray(tokens).tolist(), lengths, num_rows,
                   handles(milestone).first_token(args),
                   partial(handles(milestone).document_len, args))


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
        patched.setattr(module, handles(module).ORTHOGONALIZER, lambda matrices, *_, **__: matrices)
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
