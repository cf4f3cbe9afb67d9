"""How to get hold of the parts that are new in 04: skips, whose weights the second half has."""


def set_skips(model, factors):
    model.skip_weights.copy_(factors[len(factors) // 2 :])
