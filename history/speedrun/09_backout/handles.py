"""How to get hold of the parts that are new in 09: a layer whose output is subtracted."""

SECOND_HALF = ("backout_layer",)


def _tables(args):
    """The layers of each table of value embeddings."""
    pattern = args.value_embed_pattern
    return [{i for i, letter in enumerate(pattern) if letter == table}
            for table in sorted(set(pattern) - {"."})]


FEATURES = {
    "a table serves one layer, another two": lambda module, args: (
        set(map(len, _tables(args))) == {1, 2}),
    "a shared table serves both ends": lambda module, args: any(
        len(layers) == 2 and min(layers) < args.num_layers // 2 <= max(layers)
        for layers in _tables(args)),
    "layers follow the backout": lambda module, args: args.backout_layer < args.num_layers - 1,
    "the backout follows the layer without attention": lambda module, args: (
        args.backout_layer > args.layer_without_attention),
}
