"""How to get hold of the parts that are new in 08b: the vector has scalars of the model as well."""


def scalars(model):
    width, L = len(model.layer_init), len(model.blocks)
    values = model.scalars
    rows = values[: width * L].view(L, width)
    named = dict(zip(model.layer_init, rows.unbind(1), strict=True))
    return named | dict(zip(model.model_init, values[width * L :], strict=False))  # then padding
