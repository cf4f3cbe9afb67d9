"""Checks of the model as a whole: its logits with given weights."""

from collections.abc import Iterator
from functools import partial

import torch

from speedrun.checks import architecture
from speedrun.checks.architecture import ARCHITECTURES
from speedrun.checks.features import ATTENTION as ATTENTION_PART
from speedrun.checks.features import FEATURES, STREAM
from speedrun.checks.identify import identify
from speedrun.checks.matrices import ATTENTION, Mapping, Matrices, find_matrices, mappings
from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.scalars import mixture_start

CLOSE = 1e-3  # of logits, relative to their spread; float32 leaves some 1e-6


class Model:
    """The learner's model and the milestone's with equal weights. `mapping` is how the learner's
    matrices stand for the milestone's, or None if no Mapping gives equal logits."""

    def __init__(self, subject):
        self.subject = subject
        self.args = subject.args()
        self.model = subject.module.GPT(self.args).eval()
        self.matrices = find_matrices(self.model, self.args)
        self.theirs = subject.reference.GPT(subject.reference_args()).eval()
        self.their_matrices = find_matrices(self.theirs, subject.reference_args())
        self.weights = random_weights(self.matrices)
        self.their_matrices.write(self.weights, Mapping())
        self.expected = self.outputs(self.theirs)
        self.mapping = next(filter(self._fits, mappings(self.matrices)), None)

    def outputs(self, model) -> torch.Tensor:
        """The logits, for some windows one after the other where the milestone has windows."""
        inputs, _ = self.subject.tokens()
        with torch.no_grad():
            if not self.subject.has_window:
                return model(inputs).float()
            return torch.stack([_logits(model, inputs, window) for window in WINDOWS])

    def mapping_of_open_sight(self) -> Mapping | None:
        """The Mapping with which logits agree where the mask hides nothing but the future: in one
        document, with a full window. None if there is none."""
        inputs, _ = self.subject.tokens()
        inputs = inputs.masked_fill(inputs == self.args.bos_id, 2)

        def seen(net, matrices, mapping):
            matrices.write(self.weights, mapping)
            with torch.no_grad():
                return [_logits(net, inputs, window) for window in (None, inputs.size(1))]

        theirs = seen(self.theirs, self.their_matrices, Mapping())
        return next((mapping for mapping in mappings(self.matrices)
                     if all(map(close, seen(self.model, self.matrices, mapping), theirs))), None)

    def _fits(self, mapping):
        self.matrices.write(self.weights, mapping)
        return close(self.outputs(self.model), self.expected)

    def like(self, arch, weights, mapping) -> bool:
        """Whether the learner's model with these weights has an architecture's logits."""
        inputs, _ = self.subject.tokens()
        args = self.subject.reference_args()
        calculate = partial(architecture.logits, arch, weights, inputs, args)
        if self.subject.has_window:
            theirs = torch.stack([calculate(window) for window in WINDOWS])
        else:
            theirs = calculate()
        return close(self._mine(weights, mapping), theirs)

    def _mine(self, weights, mapping):
        """The learner's logits, calculated once for the same weights and mapping."""
        key = id(weights), mapping
        if getattr(self, "_last", (None,))[0] != key:
            self.matrices.write(weights, mapping)
            self._last = key, self.outputs(self.model)
        return self._last[1]


WINDOWS = (None, 5)  # no window at all, and a short one
MASK = ("mask", "documents", "window")  # the switches that say who sees whom


def check_head(subject) -> Iterator[Outcome]:
    """Whether embedding and head are one table or two."""
    mine, theirs = (m.head is m.embed for m in (subject.model.matrices,
                                                subject.model.their_matrices))
    words = {True: "embedding and head are one table", False: "embedding and head are two tables"}
    yield verdict("untied head", mine == theirs, words[theirs], words[mine])


def check_features(subject) -> Iterator[Outcome]:
    """Compares logits, and finds out what the model does if they differ."""
    model = subject.model
    wanted = ARCHITECTURES[subject.milestone.id]
    if model.mapping is not None:
        for feature in FEATURES:
            if relevant(feature, subject):
                yield Outcome(feature.name)
        yield Outcome("logits")
        return

    parent = ARCHITECTURES[subject.milestone.parent or subject.milestone.id]
    quiet = {role: [1e-4 * w for w in ws] if role in ATTENTION else ws
             for role, ws in model.weights.items()}
    found = identify(partial(model.like, weights=quiet, mapping=Mapping()), wanted, parent, STREAM)
    if found is None:
        yield Outcome("logits", "the milestone's logits for given weights",
                      "other logits, even where attention is silent",
                      "Look at embedding, MLP, residual additions, final norm and head.")
        return
    yield from compare(wanted, found, STREAM, subject)
    yield from _attention_features(subject, wanted, found, parent)


def _attention_features(subject, wanted, found, parent) -> Iterator[Outcome]:
    """What the attention does, once the stream is known: `found`."""
    model, fixed = subject.model, () if subject.has_window else MASK[1:]
    tried = [Mapping(pairing=pairing) for pairing in range(4)]
    seeing = model.mapping_of_open_sight() if subject.has_window else None
    if seeing is not None:
        tried = [seeing]
        fixed = [f.switch for f in FEATURES if f.part == ATTENTION_PART and f.switch not in MASK]
    for mapping in tried:
        found_all = identify(partial(model.like, weights=model.weights, mapping=mapping),
                             found, parent, ATTENTION_PART, fixed)
        if found_all is not None:
            yield from compare(wanted, found_all, ATTENTION_PART, subject)
            return
    meaning = ("Look at queries, keys, values, their rotation and norm, the mask, and how the "
               "heads are split and put together.")
    if seeing is not None:
        meaning = ("With one document and a full window the logits agree: only the mask differs. "
                   "Is it the same in all layers, and each row's own?")
    elif (start := mixture_start(subject)) is not None:
        meaning = f"The mixture of the values starts at {start:g}, not 0.5."
    yield Outcome("logits", "the milestone's logits for given weights",
                  "other logits, and only where attention speaks", meaning)


def relevant(feature, subject) -> bool:
    """Whether a feature is worth a line: the milestone or its parent sets it apart."""
    wanted = ARCHITECTURES[subject.milestone.id]
    plain = architecture.Architecture()
    usual = getattr(plain, feature.switch) == getattr(wanted, feature.switch)
    return not usual or feature.name in ("positions", "activation", "causal mask")


def compare(wanted, found, part, subject) -> Iterator[Outcome]:
    """An Outcome for each feature of a part of the model."""
    for feature in FEATURES:
        want, have = getattr(wanted, feature.switch), getattr(found, feature.switch)
        if feature.part != part or have not in feature.words or want not in feature.words:
            continue
        if want != have or relevant(feature, subject):
            got, start = feature.words[have], None
            if feature.name == "value residual" and have == "none":
                start = mixture_start(subject)
            if start is not None:
                got = f"the mixture starts at {start:g}, not 0.5"
            yield verdict(feature.name, want == have, feature.words[want], got,
                          feature.meanings.get(have, ""))


def random_weights(matrices: Matrices) -> dict:
    """Weights by role with which every part of the model shows in the logits."""
    args = matrices.args
    C, generator = args.model_dim, torch.Generator().manual_seed(2)

    def normal(*shape, std):
        return std * torch.randn(shape, generator=generator)

    sizes = dict(q=((C, C), 1.8), k=((C, C), 1.8), v=((C, C), 1.2), o=((C, C), 1.2),
                 up=((4 * C, C), 1.0), down=((C, 4 * C), 1.0))
    weights = {role: [normal(*shape, std=gain * shape[1] ** -0.5) for _ in range(args.num_layers)]
               for role, (shape, gain) in sizes.items()}
    weights["embed"] = normal(args.vocab_size, C, std=1.5)
    untied = matrices.head is not matrices.embed
    weights["head"] = normal(args.vocab_size, C, std=1.5) if untied else weights["embed"]
    weights["positions"] = normal(args.seq_len, C, std=1.0)
    return weights


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree but for round-off; never with a NaN."""
    return a.shape == b.shape and ((a - b).abs().max() <= CLOSE * b.std()).item()


def _logits(model, inputs, window):
    if window is None:
        return model(inputs).float()
    return model(inputs, None, torch.tensor(window, dtype=torch.int32)).float()
