"""How to get hold of the parts that are new in 13d: the loss has a derivative of its own."""


def loss(module, x, weight, targets, weights, cap, scales=None, use_triton=False):
    return module.CappedLoss.apply(x @ weight.T, targets, weights, cap, use_triton)
