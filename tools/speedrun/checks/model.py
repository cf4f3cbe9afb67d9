"""Checks of the model as a whole: its logits and gradients with given weights, its start."""

from collections.abc import Iterator
from functools import partial

import torch

from speedrun.checks import architecture
from speedrun.checks.architecture import ARCHITECTURES
from speedrun.checks.features import ATTENTION as ATTENTION_PART
from speedrun.checks.features import FEATURES, STREAM
from speedrun.checks.identify import identify
from speedrun.checks.matrices import (
    ATTENTION,
    Mapping,
    Matrices,
    find_matrices,
    mappings,
)
from speedrun.checks.outcome import Outcome, verdict

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
    fixed = () if subject.has_window else ("documents", "window")
    for mapping in (Mapping(pairing=pairing) for pairing in range(4)):
        found_all = identify(partial(model.like, weights=model.weights, mapping=mapping),
                             found, parent, ATTENTION_PART, fixed)
        if found_all is not None:
            yield from compare(wanted, found_all, ATTENTION_PART, subject)
            return
    yield Outcome("logits", "the milestone's logits for given weights",
                  "other logits, and only where attention speaks",
                  "Look at queries, keys, values, their rotation and norm, the mask, and how the "
                  "heads are split and put together.")


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
            yield verdict(feature.name, want == have, feature.words[want], feature.words[have],
                          feature.meanings.get(have, ""))


def check_gradients(subject) -> Iterator[Outcome]:
    """Compares the gradients of all matrices; equal logits do not promise equal gradients."""
    model = subject.model
    if model.mapping is None:
        return
    inputs, targets = subject.tokens()
    both = []
    for net, matrices, mapping in ((model.model, model.matrices, model.mapping),
                                   (model.theirs, model.their_matrices, Mapping())):
        matrices.write(model.weights, mapping)
        net.zero_grad(set_to_none=True)
        net(inputs, targets).backward()
        both.append(matrices.read(mapping, of=_gradient))
    wrong = [role for role in both[1] if not _all_close(both[0][role], both[1][role])]
    names = dict(q="queries", k="keys", v="values", o="attention output", up="MLP up",
                 down="MLP down", embed="embedding", head="head", positions="position table")
    yield verdict("gradients", not wrong, "the milestone's gradients for given weights",
                  "others for " + ", ".join(names[role] for role in wrong),
                  "Logits agree, so something is cut off from the gradient: detach, no_grad, "
                  ".data or item()?")


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


def _gradient(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _all_close(mine, theirs):
    if not isinstance(mine, list):
        mine, theirs = [mine], [theirs]
    scale = max(t.abs().max() for t in theirs) or 1.0
    return all((a - b).abs().max() <= CLOSE * scale for a, b in zip(mine, theirs, strict=True))
