"""How to get hold of the parts that are new in 05o: Muon's kernel."""


def make_muon(module, params, lr, bf16=False):
    return module.Muon(params, lr=lr, momentum=0.95, bf16=bf16, compiled=False, use_triton=False)
