"""How to get hold of the parts that are new in 08f: another iteration."""

ORTHOGONALIZER = "polar_express"


def orthogonalize(module, matrices, dtype):
    return module.polar_express(matrices, dtype)
