"""The parts of a snapshot's model and what feeds what, found by running it at a small width.

Nothing is read from the source: modules are seen as they run, tensors carry the names of what they
were computed from, and a mask shows its window. So the picture cannot differ from the script.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from speedrun.history.handles import Handles
from speedrun.history.manifest import Milestone
from speedrun.scripts.find import handles_for, load_snapshot
from speedrun.scripts.sizes import length_names

TOKENS = 3072  # one document, longer than any window of a record
HEAD_DIM, VOCABULARY = 16, 64  # of the model that runs; sizes are counted at full width
BEYOND = 1e6  # a logit that any cap changes


@dataclass(frozen=True)
class Layer:
    """One layer. window: how many tokens back its attention sees, or None for all; tables: the
    value embeddings that it reads; gates: the parameters that gate its attention; paired: two heads
    share a softmax; composed: how many tokens a mixture of the heads' attention sees, 0 without."""

    attention: bool = False
    mlp: bool = False
    window: int | None = None
    tables: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    first_values: bool = False  # mixes in the values of the first layer
    x0: bool = False  # mixes in the embedding
    bigrams: bool = False  # mixes in the vectors of pairs of tokens
    paired: bool = False
    composed: int = 0


@dataclass(frozen=True)
class Anatomy:
    """A model at the size of the record.

    parameters: their number; rotating: the share of a head's dimensions that rotate; skips: pairs
    (from, to) of layers, to = number of layers for the head; subtracted: those that are subtracted;
    cap: the least and largest logit, if there are such; tables: number of value embeddings;
    documents: whether the model reads where documents start.
    """

    name: str
    parameters: int
    model_dim: int
    num_heads: int
    hidden_dim: int
    vocab_size: int
    layers: tuple[Layer, ...]
    skips: frozenset[tuple[int, int]]
    subtracted: frozenset[tuple[int, int]]
    tables: tuple[str, ...]
    learned_positions: bool
    tied: bool
    smear: bool
    rotating: float
    qk_norm: bool
    norm: str
    activation: str
    cap: tuple[float, float] | None
    fp8: bool
    documents: bool


@cache
def anatomy(milestone: Milestone) -> Anatomy:
    """The Anatomy of a milestone's model. Raises AttributeError for a script without a GPT."""
    return trace(load_snapshot(milestone.script), milestone.name)


def trace(module: ModuleType, name: str = "") -> Anatomy:
    """The Anatomy of the model of an imported snapshot."""
    args, handles = module.Hyperparameters(), handles_for(module.__file__)
    with torch.device("meta"):
        full = module.GPT(args)
    small = replace(args, model_dim=args.num_heads * HEAD_DIM, vocab_size=VOCABULARY)
    T = min(TOKENS, getattr(args, length_names(vars(args))[0]))
    with torch.random.fork_rng(devices=[]):
        model = module.GPT(small).eval()
    tracer = Tracer(model, T, handles)
    with torch.no_grad(), tracer:
        logits = model(torch.ones(1, T, dtype=torch.int64))
    tracer.kept.clear()  # hooks hold the tracer in a cycle, so its tensors would stay for long
    low, high = logits.min().item(), logits.max().item()
    mlp = next(block.mlp for block in full.blocks if block.mlp is not None)
    largest = max(parameter.numel() for parameter in mlp.parameters())
    return Anatomy(
        name=name,
        parameters=sum(parameter.numel() for parameter in full.parameters()),
        model_dim=args.model_dim, num_heads=args.num_heads,
        hidden_dim=largest // args.model_dim, vocab_size=args.vocab_size,
        layers=tuple(tracer.layer(i) for i in range(len(model.blocks))),
        skips=tracer.skips(), subtracted=tracer.subtracted(),
        tables=tuple(sorted(tracer.tables - handles.STREAMS.keys())),
        learned_positions="pos_embed" in tracer.tables,
        tied=model.embed.weight is model.lm_head.weight,
        smear=any("smear" in source for source in tracer.used["block 0"]),
        rotating=tracer.rotating, qk_norm=tracer.qk_norm, norm=tracer.norm,
        activation=tracer.activation,
        cap=None if high >= BEYOND / 2 else (low, high),
        fp8=handles.HEAD_IN_FP8, documents=handles.READS_DOCUMENTS,
    )


@dataclass(eq=False)
class Tracer(TorchFunctionMode):
    """Runs a model and notes, for each of its modules, which of the named tensors it reads.

    A tensor's sources are the names of what it was computed from: tables ("embed"), "block 3", the
    "values 0" of a layer, weights ("w:smear_gate"). A block's output has only its own name.
    """

    model: torch.nn.Module
    tokens: int
    handles: type[Handles]
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    tables: set[str] = field(default_factory=set)
    windows: dict[int, int | None] = field(default_factory=dict)
    paired: set[int] = field(default_factory=set)
    softmaxes: dict[int, int] = field(default_factory=dict)  # apart from attention's own
    rotating: float = 0.0
    qk_norm: bool = False
    norm: str = ""
    activation: str = ""

    def __post_init__(self):
        super().__init__()
        self.sources, self.kept = {}, []  # kept: an id is of one tensor as long as that is alive
        self.minus, self.inside = set(), []
        for name, parameter in self.model.named_parameters():
            self._name(parameter, f"w:{name}")
        for i, block in enumerate(self.model.blocks):
            self._watch(block, f"block {i}")
            self._watch(block.attn, f"attn {i}")
            self._watch(block.mlp, f"mlp {i}")
        self._watch(self.model.lm_head, "head")
        self.model.lm_head.register_forward_hook(self._beyond)
        rotaries = self.handles.rotaries(self.model)
        for module in self.model.modules():
            module.register_forward_hook(
                self._rotates if module in rotaries else self._coefficients)

    def layer(self, i: int) -> Layer:
        """What the run showed of layer i."""
        used, attention = self.used[f"block {i}"], self.used.get(f"attn {i}", set())
        tables = {name.removeprefix("table ") for name in attention if name.startswith("table ")}
        return Layer(
            attention=bool(attention), mlp=f"mlp {i}" in self.used, window=self.windows.get(i),
            tables=tuple(sorted(tables)),
            gates=tuple(sorted(name.removeprefix("w:") for name in used
                               if "gate" in name and "smear" not in name and "skip" not in name)),
            first_values=i > 0 and "values 0" in attention, x0=i > 0 and "embed" in used,
            bigrams="bigrams" in used, paired=i in self.paired,
            composed=self.softmaxes.get(i, 0) if i in self.windows else 0)

    def skips(self) -> frozenset[tuple[int, int]]:
        """Pairs (from, to) of layers that are not neighbours; to = number of layers: the head."""
        L = len(self.model.blocks)
        readers = {i: self.used[f"block {i}"] for i in range(L)} | {L: self.used["head"]}
        return frozenset((int(name.split()[1]), to) for to, names in readers.items()
                         for name in names if name.startswith("block ")
                         and int(name.split()[1]) < to - 1)

    def subtracted(self) -> frozenset[tuple[int, int]]:
        """Those of `skips` to the head that are subtracted before it."""
        L = len(self.model.blocks)
        return frozenset((start, end) for start, end in self.skips()
                         if end == L and f"block {start}" in self.minus)

    def _name(self, tensor, *names):
        if names:  # masks, which are large, have none
            self.sources[id(tensor)] = frozenset(names)
            self.kept.append(tensor)

    def _of(self, values):
        found = (self.sources.get(id(tensor), frozenset()) for tensor in tensors(values))
        return frozenset().union(*found)

    def _watch(self, module, name):
        if module is None:
            return

        def enter(_module, inputs):
            self.inside.append((name, {id(tensor) for tensor in tensors(inputs)}))

        def leave(_module, _inputs, output):
            _name, given = self.inside.pop()
            self.used[name]  # noqa: B018 (it ran, even if it read nothing that has a name)
            first, *others = tensors(output)
            if not name.startswith("head"):
                self._name(first, name)
            for other in others:
                if id(other) not in given:
                    self._name(other, f"values {name.split()[1]}")

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def _beyond(self, _module, _inputs, output):
        """Logits that any cap changes."""
        alternating = torch.full_like(output, BEYOND)
        alternating[..., ::2] = -BEYOND
        return alternating

    def _coefficients(self, _module, _inputs, output):
        """Numbers by name that were computed from a stream: what they weigh does not read it."""
        if isinstance(output, dict) and not all(isinstance(key, int) for key in output):
            self.sources |= {id(tensor): frozenset({f"w:{key}"}) for key, tensor in output.items()}

    def _rotates(self, rotary, _inputs, _output):
        if not self.rotating:  # the table is large, and every layer's
            table = rotary.cos.flatten(0, -2)
            self.rotating = (table != table[0]).any(0).float().mean().item()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = self._of((args, kwargs))
        layers = [name for name, _given in self.inside]
        for name in layers:
            self.used[name] |= names
        part = layers[-1].split()[0] if layers else ""
        called = getattr(function, "__name__", "")
        if function is F.scaled_dot_product_attention:
            output = self._attention(int(layers[-1].split()[1]), *args, **kwargs)
        else:
            output = function(*args, **kwargs)
        by_number = called == "__getitem__" and any(
            tensor.dtype == torch.int64 for tensor in tensors(args[1:]))
        if function is F.embedding or by_number and names:
            (name,) = names
            table = name.removeprefix("w:").removesuffix(".weight")
            self.tables.add(table)
            names = frozenset({self.handles.STREAMS.get(table, f"table {table}")})
        if called == "unbind" and names and names <= {f"table {table}" for table in self.tables}:
            return self._several(names, output)
        if not layers and (called in ("sub", "__sub__", "sub_") or called in ("mul", "__mul__")
                           and (args[0] < 0).all()):  # added with a negative factor
            self.minus |= self._of(args[1:]) & {f"block {i}" for i in range(len(self.model.blocks))}
        if called in ("rms_norm", "layer_norm"):
            self.norm = {"rms_norm": "RMS norm", "layer_norm": "layer norm"}[called]
            self.qk_norm |= part == "attn"
        if part == "attn" and called == "softmax":
            visible = (args[0] > -torch.inf).sum(-1)
            self.softmaxes[int(layers[-1].split()[1])] = visible.max().item()
        if part == "mlp" and called in ("gelu", "relu", "square"):
            self.activation = {"gelu": "GELU", "relu": "ReLU", "square": "ReLU²"}[called]
        for tensor in tensors(output):
            self._name(tensor, *(self._of(tensor) | names))  # some are changed in place
        return output

    def _several(self, names, vectors):
        """What was looked up in several tables of one tensor at once: each is a table by itself."""
        for name in names:
            self.tables.remove(name.removeprefix("table "))
            for i, tensor in enumerate(vectors):
                self.tables.add(f"{name.removeprefix('table ')}.{i}")
                self._name(tensor, f"{name}.{i}")
        return vectors

    def _attention(self, layer, q, k, v, attn_mask=None, **options):
        """The values themselves, as scores cost time and the picture needs only their sources."""
        self.windows[layer] = None
        if attn_mask is not None:
            T = attn_mask.size(-1)
            slots = T // self.tokens  # of paired heads a token has two
            if slots > 1:
                self.paired.add(layer)
            seen = attn_mask[..., -1, :].flatten()[-T:].sum().item() // slots  # by the last token
            T = self.tokens
            # Some scripts count the token itself, some do not; windows are multiples of 64.
            self.windows[layer] = None if seen == T else seen // 64 * 64
        return v + 0 * q


def tensors(values: object) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors(value)]
    return [values] if isinstance(values, torch.Tensor) else []
