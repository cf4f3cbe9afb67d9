"""How to get hold of the parts that are new in 12c: the MLP's kernel."""


def mlp_function(module, x, w_in, w_out, use_triton=False):
    return module.SquaredReLUMLP.apply(x, w_in, w_out, use_triton)
