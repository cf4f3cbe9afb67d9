"""How to get hold of the parts that are new in p4d: stacks of matrices."""


def make_muon(module, params, lr, bf16=False):
    args = module.Hyperparameters(muon_lr=lr, compile=False, bf16=bf16)
    return module.Muon(module.stacks_of(params, args), args)
