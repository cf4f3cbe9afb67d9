"""How tests, checker, pictures, sampler, predictions and lessons get hold of a snapshot's parts.

`Handles` is the fixed list of names, with what holds of the plainest script: linear layers, every
token sees all earlier ones, rows are cut from the stream, one optimizer. A milestone that brings a
new form of parts has a `handles.py` in its folder, with functions and constants of these names:
only those that differ from its parent's. All later milestones inherit them, and a root that borrows
blocks inherits its lender's. A `handles.py` imports nothing of tools/, and its functions work on
what they are given: a loaded script (`module`), a model or a part of one, hyperparameters (`args`).
So they serve a learner's script as well that is on its way to a milestone.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from speedrun.history.manifest import HANDLES, Manifest, ManifestError, Milestone, load_manifest
from speedrun.history.schema import nearest


class Handles:
    """The names; constants are in capitals. Functions are called by way of the class: there is no
    object."""

    # ---- the model ----

    def matrices(attn):
        """An attention's weights: views (C, C) of queries, keys, values and output, in order."""
        layers = attn.c_q, attn.c_k, attn.c_v, attn.c_proj
        return tuple(layer.weight.detach() for layer in layers)

    def tensors(model):
        """{name in known.toml: parameters} of a model, in order; several where a tensor of known
        values has been cut."""
        return {name.removesuffix(".weight"): [param] for name, param in model.named_parameters()}

    def stack(name, tensor):
        """The matrices (N, m, n), one after the other, of a tensor like Muon's parameter of this
        last name."""
        return tensor.view(-1, *tensor.shape[-2:])

    def mlp_matrices(mlp):
        """An MLP's weights: views (4C, C) of the first and (C, 4C) of the second matrix."""
        return mlp.c_fc.weight.detach(), mlp.c_proj.weight.detach()

    def value_tables(model):
        """The tables (V, C) of value embeddings, in the order of their letters."""
        return []

    def for_layers(defaults, num_layers):
        """The hyperparameters, {name: value}, that a model of another number of layers needs;
        defaults: the script's own."""
        return {}

    SECOND_HALF = ()  # hyperparameters that name a layer of the model's second half

    # Names of the tables that feed the residual stream, and what pictures call them; every other
    # table gives values.
    STREAMS = {"embed": "embed", "lm_head": "embed", "pos_embed": "positions"}

    def mix_values(attn, own, other):
        """Sets the factors of a token's own values and of the others that they are mixed with."""
        raise NotImplementedError("values are not mixed")

    def scalars(model):
        """{name: view, with gradients} of the scalars of layers, a vector each, and the model's."""
        return {}

    def set_skips(model, factors):
        """Gives each skip the factor of the layer that it leads to; factors: one for each layer."""
        raise NotImplementedError("there are no skips")

    def rotaries(model):
        """The modules that rotate queries and keys."""
        return set()

    def make_rotary(module, head_dim, seq_len):
        """The script's Rotary, as it is at the start of a run."""
        return module.Rotary(head_dim, seq_len)

    READS_DOCUMENTS = False  # whether the model keeps the documents of a row apart
    HEAD_IN_FP8 = False  # whether the head's products are in FP8 on a GPU that has it

    # ---- attention ----

    # The inputs of an attention's forward, in order; of: x, first_v, values (of a table), c
    # (coefficients by name), mask, documents.
    ATTENTION = ("x",)
    # Whether coefficients of own values, heads' gates, x0, bigrams and the skip are a token's own.
    PER_TOKEN = False
    LAST_MIXES = False  # whether the last layer mixes earlier outputs into its stream and values
    SLOTS = 1  # places in a row that a token takes at most
    # {name: hyperparameters that select it}: "dense" masks, "flex" attention, kernels ("FA2")
    PATHS = {}
    # How windows are counted: "tokens", "tiles" (whole ones, so the window is rounded up), or
    # "exact": tokens before a token's own, of a few windows that are Python numbers.
    WINDOW = ""
    KINDS = ("L",)  # the kinds of windows that layers have, the longest first

    def comparable(module, q, k, c):
        """Queries and keys (B, T, H, D) as attention compares them, but for positions; c: its
        coefficients by name."""
        return module.norm(q), module.norm(k)

    def attention_source(args, layer):
        """The layer whose output this layer's attention reads; None: the stream's."""
        return None

    def mask(module, inputs, window, args):
        """What attention of a layer with this window reads besides its inputs, for tokens (B, T):
        a dense mask (B, 1, T, T), a block mask, or the starts of documents."""
        raise NotImplementedError("there are no masks")

    def replace_masks(module, replace, mask):
        """Lets models take their masks from mask(inputs, window); replace(module, name, function)
        puts the function in its place, as monkeypatch.setattr does."""
        raise NotImplementedError("there are no masks")

    def window_at(module, step, args):
        """The windows of a step, as set_window takes them after the model."""
        return ()

    def set_window(model, *window):
        """Gives a model other windows: what window_at returns, or the first of these alone, as
        validations have it. Without windows it does nothing."""

    def last_windows(args):
        """(window, long window) of the validation after the last step, where they differ."""

    def windows(module, args):
        """The windows of the schedule's stages and of what follows them, in order."""
        raise NotImplementedError("windows have no stages")

    def reach(window, args):
        """How many keys a query sees at most, by layer with attention, if this is the first of
        window_at; None: all before it."""
        return [None] * args.num_layers

    def reach_tile(args):
        """Tokens to whose multiples the first key that a query sees is rounded down."""
        return 1

    def countable(args):
        """The hyperparameters of a model with the same products, which can be counted from two
        lengths of a row."""
        return args

    # ---- the data ----

    ROW_FACTORS = (1,)  # lengths of the training rows by stage, in those of the first

    def first_token(args):
        """The token with which documents begin; None if the script knows of none."""
        return None

    def row_len(module, step, args):
        """Tokens of a training row in this step."""
        return args.seq_len

    def document_len(args, length):
        """How many tokens of a document a training row of this length holds at most; None: all."""
        return None

    def longest_document(args):
        """How many tokens of a document any training row holds at most; None: all."""
        return None

    def open_shard(module, file, args):
        """A shard's tokens, as the script reads them."""
        return module.open_shard(file)

    def token_batches(module, pattern, step_tokens, seq_len, aligned, **common):
        """The micro-batches (inputs, targets) of a rank; common: args, rank, world_size, device.
        aligned: whether rows begin with documents, as in training, where the script does that."""
        return module.token_batches(pattern, step_tokens, **common)

    def pack(module, tokens, lengths, num_rows, args):
        """The rows that a shard's tokens are packed into, num_rows of each step; lengths: an
        iterator over the steps' lengths of a row."""
        raise NotImplementedError("rows are not packed")

    EMPTY_FILES = {}  # hyperparameters of files that a run can do without, where it has no data

    def val_tokens(args):
        """Tokens of the run's own validations; None where they are not counted in tokens."""
        return args.val_tokens

    def markers(args):
        """The ids of start, user, assistant and end; None where a run knows no conversations."""
        return None

    # ---- optimizers and schedules ----

    ORTHOGONALIZER = "newton_schulz"  # the function that orthogonalises matrices

    def orthogonalize(module, matrices, dtype):
        """Matrices (N, m, n), m <= n, orthogonalised with products in dtype."""
        return module.newton_schulz(matrices, dtype)

    def make_muon(module, params, lr, bf16=False):
        """Plain Muon of these parameters or groups, without compiled code, kernels and decay."""
        raise NotImplementedError("there is no Muon")

    def parts_of(optimizer):
        """The optimizers that this one of make_optimizers consists of."""
        return [optimizer]

    def lr_factors(args):
        """{last name of a matrix: factor of Muon's rate}."""
        return {}

    def constant_momentum(defaults):
        """The hyperparameters under which the momentum stays where it is; defaults: the script's,
        {name: value}."""
        return {}

    def momentum(module, step, args):
        """The momentum of the optimizers' groups that have one; None if none has."""
        return None

    def target_weights(module, step, args):
        """The weights of a token's targets in the loss, the next token's first."""
        return [1]

    def adam_due(step, args):
        """Whether all optimizers take this step, not only Muon."""
        return True

    # ---- training ----

    def compiled_for(module, step, args):
        """What of a step a model is compiled for, each time that it differs."""
        return ()

    def warm_up(module, model, optimizers, batches, args):
        """Calls the script's warm_up; batches(step=0): the batches from this step on."""
        module.warm_up(model, optimizers, batches(), args)

    def mlp_function(module, x, w_in, w_out, use_triton=False):
        """The MLP of x (N, C) with matrices (C, 4C) by the script's own derivative."""
        return module.SquaredReLUMLP.apply(x, w_in, w_out)

    def loss(module, x, weight, targets, weights, cap, scales=None, use_triton=False):
        """The summed loss of x (N, C) and the head's weight (V, C) by the script's own derivative;
        targets (N, K) with weights (K,); scales: of FP8's factors, None without FP8."""
        raise NotImplementedError("the loss has no derivative of its own")

    def random_source(generators):
        """What draws the tokens of several samples, from a generator for each."""
        return generators[0]

    # What has to occur at every scale so that it is tried: {what: whether it does, a function of
    # (module, args)}. A milestone adds to its parent's, or takes one out with None.
    FEATURES = {}


NAMES = tuple(name for name in vars(Handles) if not name.startswith("_"))


@cache
def handles_of(milestone: Milestone, manifest: Manifest | None = None) -> type[Handles]:
    """The handles of a milestone: each name is its own, or that of its nearest ancestor (then of
    the lender of its root) whose handles.py has it, or the list's.

    manifest: that which the milestone is of, if it is not this repository's. Raises ManifestError,
    one line, for a name that is not in the list, and whatever a handles.py raises.
    """
    manifest = manifest or load_manifest()
    before = milestone.parent or milestone.borrows and milestone.borrows.lender
    inherited = handles_of(manifest.get(before), manifest) if before else Handles
    file = milestone.folder / HANDLES
    if not file.exists():
        return inherited
    own = _own_names(file)
    if "FEATURES" in own:
        features = inherited.FEATURES | own["FEATURES"]
        own["FEATURES"] = {what: holds for what, holds in features.items() if holds}
    return type(Handles)(f"handles of {milestone.name}", (inherited,), own)


def _own_names(file: Path) -> dict[str, object]:
    """What a handles.py defines, {name: value}, without what it imports."""
    spec = importlib.util.spec_from_file_location(f"handles {file.resolve()}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = {name: value for name, value in vars(module).items()
           if not name.startswith("_") and not isinstance(value, ModuleType)
           and (not callable(value) or value.__module__ == module.__name__)}
    for name in own.keys() - set(NAMES):
        hint = nearest(name, NAMES)
        raise ManifestError(f"{file}: {name} is no handle" + (
            f"; did you mean {hint}?" if hint else "; begin the names of helpers with _"))
    return own

