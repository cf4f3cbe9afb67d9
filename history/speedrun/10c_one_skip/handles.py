"""How to get hold of the parts that are new in 10c: one skip, with a scalar of the model."""


def set_skips(model, factors):
    of_layers = len(model.layer_init) * len(model.blocks)
    place = of_layers + [*model.model_init].index("skip")
    model.scalars.detach()[place] = factors[model.args.skip_to].logit()


FEATURES = {
    "a skip leads from a long window": lambda module, args: (
        args.window_pattern[args.skip_from] == "L"
        and args.skip_from != args.layer_without_attention),
    "it leads to the layer without attention": lambda module, args: (
        args.skip_to == args.layer_without_attention),
    "it skips a layer": lambda module, args: args.skip_to - args.skip_from > 1,
}
