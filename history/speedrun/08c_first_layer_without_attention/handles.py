"""How to get hold of the parts that are new in 08c: an odd number of layers, without halves."""


def for_layers(defaults, num_layers):
    return dict(value_embed_pattern="0".rjust(num_layers, "."))
