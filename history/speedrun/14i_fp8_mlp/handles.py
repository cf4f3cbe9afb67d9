"""How to get hold of the parts that are new in 14i: the MLP also returns a maximum."""


def mlp_function(module, x, w_in, w_out, use_triton=False):
    return module.SquaredReLUMLP.apply(x, w_in, w_out, use_triton)[0]
