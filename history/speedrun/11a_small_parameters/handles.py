"""How to get hold of the parts that are new in 11a: a tensor of its own for the weights of x0."""


def scalars(model):
    width, L = len(model.layer_init), len(model.blocks)
    values = model.scalars
    rows = values[: width * L].view(L, width)
    named = dict(zip(model.layer_init, rows.unbind(1), strict=True))
    named |= dict(zip(model.model_init, values[width * L :], strict=True))
    return named | dict(x0=model.x0_weights)
