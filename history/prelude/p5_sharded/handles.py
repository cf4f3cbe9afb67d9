"""How to get hold of the parts that are new in p5: an optimizer of shares holds others."""


def parts_of(optimizer):
    return getattr(optimizer, "optimizers", [optimizer])
