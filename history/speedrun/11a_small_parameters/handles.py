"""How to get hold of the parts that are new in 11a: a tensor of its own for the weights of x0."""


def scalars(model):
    width, L = len(model.layer_scalars), len(model.blocks)
    values = model.scalars
    rows = values[: width * L].view(L, width)
    named = dict(zip(model.layer_scalars, rows.unbind(1), strict=True))
    named |= dict(zip(model.model_scalars, values[width * L :], strict=True))
    return named | dict(x0=model.x0_weights)
