"""How to get hold of the parts that are new in 13a: one tensor has all value tables."""


def value_tables(model):
    return [*model.value_embeds.weight.unflatten(0, (-1, model.args.vocab_size))]


def _a_table_each(module, args):
    having = [layer for layer, letter in enumerate(args.value_embed_pattern) if letter != "."]
    letters = {args.value_embed_pattern[layer] for layer in having}
    return len(having) == len(letters) > 2 and (
        having[0] < args.num_layers // 2 and having[-1] == args.num_layers - 1)


FEATURES = {
    "a table serves one layer, another two": None, "a shared table serves both ends": None,
    "several tables serve a layer each, at both ends": _a_table_each,
}
