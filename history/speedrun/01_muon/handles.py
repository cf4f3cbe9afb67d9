"""How to get hold of the parts that are new in 01: three matrices, Muon."""


def matrices(attn):
    layers = attn.c_q, attn.c_k, attn.c_v, attn.c_proj
    return tuple(layer.weight.detach() for layer in layers)


def make_muon(module, params, lr, bf16=False):
    return module.Muon(params, lr=lr, momentum=0.95, bf16=bf16, compiled=False)


def momentum(module, step, args):
    return args.muon_momentum
