"""How to get hold of the parts that are new in 14d: a layer's pattern of own values."""


def _having(pattern):
    """The layers that have a letter in a pattern."""
    return {layer for layer, letter in enumerate(pattern) if letter != "."}


def _without_pairs(module, args):
    own = _having(args.own_value_pattern)
    without = {i for i, kind in enumerate(args.window_pattern[: args.num_layers]) if kind == "P"}
    return len(own) > 1 and not own & (without | {args.layer_without_attention})


def _tables_differ(module, args):
    own, tables = _having(args.own_value_pattern), _having(args.value_embed_pattern)
    return bool(own & tables) and bool(own - tables)


FEATURES = {
    "several attentions return their own values, none with pairs": _without_pairs,
    "some of their values have a part from a table, some have not": _tables_differ,
}
