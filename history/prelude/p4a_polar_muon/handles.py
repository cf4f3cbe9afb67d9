"""How to get hold of the parts that are new in p4a: Muon, whose settings are hyperparameters."""

import torch

ORTHOGONALIZER = "polar_express"


def orthogonalize(module, matrices, dtype):
    return module.polar_express(matrices, dtype == torch.bfloat16)


def make_muon(module, params, lr, bf16=False):
    return module.Muon(params, module.Hyperparameters(muon_lr=lr, compile=False, bf16=bf16))
