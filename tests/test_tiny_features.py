"""Every feature of the record that its hyperparameters name occurs at the tiny scale, too.

Run: .venv/bin/python -m pytest tests/test_tiny_features.py
"""

import pytest

import builtin_corpus
from snapshots import MANIFEST, MILESTONES, by_id, handles, load_snapshot

SHAPED = [m for m in MILESTONES if handles(m).FEATURES]


def windows(module, args):
    """[(tokens of a row, long window, short window), ...] of every stage, of the steps after them,
    and of the last validation."""
    def short(window):
        return max(1, window // args.tile_size // 2) * args.tile_size

    sizes = handles(module).windows(module, args)
    factors = handles(module).ROW_FACTORS
    rows = [args.train_seq_len * factors[min(i, len(factors) - 1)] for i in range(len(sizes))]
    stages = [(row, size, short(size)) for row, size in zip(rows, sizes, strict=True)]
    return [*stages, (args.val_seq_len, args.long_window_end, short(sizes[-1]))]


def layers(args):
    """The layers' features, as sets of layer numbers."""
    count = range(args.num_layers)
    kinds = {kind: {i for i in count if args.window_pattern[i] == kind} for kind in "SLP"}
    tables = {name: {i for i in count if args.value_embed_pattern[i] == name}
              for name in set(args.value_embed_pattern) - {"."}}
    return set(count) - {args.layer_without_attention}, kinds, tables


def of_layers(module, args):
    """Features of the pattern of layers."""
    attending, kinds, tables = layers(args)
    yield "a layer has no attention", len(attending) == args.num_layers - 1
    for kind in "SL":
        yield f"several layers attend with the window {kind}", len(kinds[kind] & attending) > 1
    yield "the first layer has a short window, the last a long one", (
        0 in kinds["S"] | kinds["P"] and args.num_layers - 1 in kinds["L"])
    yield "some layers have no table", bool(attending - set().union(*tables.values()))
    yield "all layers with a table attend", set().union(*tables.values()) <= attending
    yield "gates read a part of the channels", args.gate_channels < args.model_dim
    yield "a layer has several heads", args.num_heads > 1


def of_windows(module, args):
    """Features of windows."""
    found = windows(module, args)
    yield "every stage has its window", len({long for _, long, _ in found[:-1]}) == len(found) - 1
    yield "the last validation's long window is another", found[-1][1] not in {
        long for _, long, _ in found[:-1]}
    yield "short windows are shorter", all(short < long for _, long, short in found)
    yield "they have several tiles", max(short for *_, short in found) > args.tile_size
    yield "windows hide tokens of a row", all(long < row for row, long, _ in found[:-1])
    yield "short windows hide tokens of a document", all(
        short < args.max_document_len for *_, short in found)


def of_rows(module, args):
    """Features of rows."""
    yield "rows hold several documents", max(
        row for row, *_ in windows(module, args)[:-1]) > args.max_document_len
    yield "a step has several rows", args.total_batch_size > args.train_seq_len
    yield "documents begin with a token of the vocabulary", args.bos_id < args.vocab_size


def of_steps(module, args):
    """Features of schedules."""
    steps = range(args.train_steps)
    rates = [module.lr_multiplier(step, args) for step in steps]
    momenta = [module.muon_momentum(step, args) for step in steps]
    yield "steps follow the scheduled ones", args.scheduled_steps < args.train_steps - 1
    yield "Adam waits", args.adam_every > 1
    yield "the rate rests, falls and rests", (
        rates[0] == rates[1] and len(set(rates)) > 10 and rates[-1] == rates[-2])
    yield "the momentum rises, rests and falls", (
        momenta[0] < momenta[1] and momenta.count(args.muon_momentum) > 10
        and momenta[-1] < momenta[-2])


def of_its_parts(module, args):
    """Features that milestones have brought, as their handles tell."""
    for what, occurs in handles(module).FEATURES.items():
        yield what, occurs(module, args)


FEATURES = [of_layers, of_windows, of_rows, of_steps, of_its_parts]


@pytest.mark.parametrize("milestone", SHAPED, ids=by_id)
def test_the_tiny_scale_has_every_feature_of_the_record(milestone):
    module = load_snapshot(milestone)
    record = module.Hyperparameters()
    tiny = module.Hyperparameters(**MANIFEST.overrides(milestone, "tiny"))
    assert tiny.max_document_len < builtin_corpus.DOCUMENT_BYTES[0]  # documents are cut
    for features in FEATURES:
        expected, found = (dict(features(module, args)) for args in (record, tiny))
        assert [name for name, has in expected.items() if not has] == []
        assert [name for name, has in found.items() if not has] == []
