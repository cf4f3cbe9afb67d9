"""How to get hold of the parts that are new in 05b: tables of value embeddings."""

ATTENTION = ("x", "values", "mask")


def value_tables(model):
    return [table.weight for table in model.value_embeds.values()]


def for_layers(defaults, num_layers):  # tables alike in both halves, as in the record
    half = "0".ljust(num_layers // 2, "." if "." in defaults["value_embed_pattern"] else "1")
    return dict(value_embed_pattern=half + half[::-1])


def mix_values(attn, own, other):
    attn.value_lambdas.copy_(attn.value_lambdas.new_tensor([own, other]))
