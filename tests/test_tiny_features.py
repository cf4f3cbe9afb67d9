"""Every feature of the record that its hyperparameters name occurs at the tiny scale, too.

Run: .venv/bin/python -m pytest tests/test_tiny_features.py
"""

import pytest

import builtin_corpus
from snapshots import MANIFEST, MILESTONES, by_id, load_snapshot, windows_of
from speedrun.history.fields import default_hyperparameters

SHAPED = [m for m in MILESTONES
          if {"backout_layer", "cached_layer"} & default_hyperparameters(m.script).keys()]


def windows(module, args):
    """[(tokens of a row, long window, short window), ...] of every stage, of the steps after them,
    and of the last validation."""
    def short(window):
        return max(1, window // args.tile_size // 2) * args.tile_size

    sizes = windows_of(module, args)
    rows = [row.seq_len for row in module.stages(args)] if hasattr(module, "stages") else (
        [args.train_seq_len] * len(sizes))
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
    if hasattr(module, "pair_heads"):
        yield "a layer pairs its heads, of which there are several pairs", (
            bool(kinds["P"] & attending) and args.num_heads % 2 == 0 and args.num_heads > 2)
    if hasattr(module, "ValueEmbeds"):
        yield "several tables serve a layer each, at both ends", all(
            len(found) == 1 for found in tables.values()) and len(tables) > 2 and (
            min(map(min, tables.values())) < args.num_layers // 2
            and args.num_layers - 1 in set().union(*tables.values()))
    else:
        yield "a table serves one layer, another two", set(map(len, tables.values())) == {1, 2}
        yield "a shared table serves both ends", any(
            len(found) == 2 and min(found) < args.num_layers // 2 <= max(found)
            for found in tables.values())
    if hasattr(args, "bigram_rows"):
        yield "bigrams have more rows than the vocabulary, and share them", (
            args.vocab_size < args.bigram_rows < args.vocab_size**2)
    yield "some layers have no table", bool(attending - set().union(*tables.values()))
    yield "all layers with a table attend", set().union(*tables.values()) <= attending
    if hasattr(args, "cached_layer"):
        yield "several attentions read the cached layer", len(
            {i for i in attending if i > args.cached_layer}) > 1
        yield "the layer without attention is not one of them", (
            args.cached_layer >= args.layer_without_attention)
    else:
        yield "layers follow the backout", args.backout_layer < args.num_layers - 1
        yield "it comes after the layer without attention", (
            args.backout_layer > args.layer_without_attention)
    if hasattr(args, "skip_from"):
        yield "a skip leads from a long window", args.skip_from in kinds["L"] & attending
        yield "it leads to the layer without attention", (
            args.skip_to == args.layer_without_attention)
        yield "it skips a layer", args.skip_to - args.skip_from > 1
    if hasattr(module, "offset_keys"):
        yield "channels rotate and stay", args.model_dim // args.num_heads >= 8
    if hasattr(module, "bigram_hashes"):
        yield "bigrams share rows", args.vocab_size < args.bigram_rows < args.vocab_size**2
    if hasattr(args, "coefficient_dim"):
        yield "coefficients come from fewer channels", args.coefficient_dim < args.model_dim
    if hasattr(args, "own_value_pattern"):
        yield from of_heads(args, attending, kinds["P"], set().union(*tables.values()))
    if hasattr(args, "sign_rows"):
        yield "rows of signs are shared", args.sign_rows < args.bigram_rows
    yield "gates read a part of the channels", args.gate_channels < args.model_dim
    yield "a layer has several heads", args.num_heads > 1


def of_heads(args, attending, paired, having_table):
    """Features of the patterns of 14d to 14g."""
    own, gated = ({i for i, letter in enumerate(getattr(args, name, "")) if letter != "."}
                  for name in ("own_value_pattern", "gate_pattern"))
    yield "several attentions return their own values, none with pairs", (
        len(own) > 1 and own <= attending - paired)
    yield "some of their values have a part from a table, some have not", bool(
        own & having_table) and bool(own - having_table)
    if hasattr(args, "late_layer"):
        for name, found in (("return their own values", own), ("have gates", gated)):
            yield f"early and late attentions {name}", found <= attending and (
                min(found) < args.late_layer <= max(found))
        yield "the last attention has gates", args.num_layers - 1 in gated
        yield "late layers begin within the skip", args.skip_from < args.late_layer <= args.skip_to
    if hasattr(args, "composed_window"):
        yield "the mixture of heads sees less than a block and a document", (
            1 < args.composed_window < min(args.composed_block, args.first_document_len))
        yield "a row has several blocks", 2 * args.composed_block < args.train_seq_len


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
    if hasattr(args, "first_document_len"):
        yield "documents are shorter in the first stage, which has several in a row", (
            args.first_document_len < min(args.train_seq_len, args.max_document_len))
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
    if hasattr(module, "stage"):
        stages = [module.stages(args).index(module.stage(step, args)) for step in steps]
        yield "there are three stages and an end", set(stages) == {0, 1, 2, 3}
        yield "a stage begins with a jump of the rate", (
            rates[stages.index(1)] > rates[stages.index(1) - 1])
    if hasattr(module, "last_tied_step"):
        yield "the tables part within the run", 0 < module.last_tied_step(args) < (
            args.train_steps - args.adam_every)
    if hasattr(module, "target_weights"):
        prefix = hasattr(args, "prefix_weight")
        yield "one, two and three targets occur", {
            len(module.target_weights(step, args)) - prefix for step in steps} == {1, 2, 3}
        if prefix:
            weights = [module.target_weights(step, args)[-1] for step in steps]
            yield "prefixes count, fade and do not count", (
                weights[0] == weights[1] > 0 == weights[-1] and len(set(weights)) > 10)


FEATURES = [of_layers, of_windows, of_rows, of_steps]


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
