"""How to get hold of the parts that are new in 14a: later attentions read one layer's input."""

SECOND_HALF = ("cached_layer",)

FEATURES = {
    "layers follow the backout": None, "the backout follows the layer without attention": None,
    "several attentions read the cached layer": lambda module, args: sum(
        layer > args.cached_layer and layer != args.layer_without_attention
        for layer in range(args.num_layers)) > 1,
    "the layer without attention is not one of them": lambda module, args: (
        args.cached_layer >= args.layer_without_attention),
}


def attention_source(args, layer):
    return args.cached_layer if layer > args.cached_layer else None
