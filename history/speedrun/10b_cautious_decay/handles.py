"""How to get hold of the parts that are new in 10b: Muon decays weights."""

from functools import partial
from unittest.mock import patch


def make_muon(module, params, lr, bf16=False):
    muon = module.Muon(_groups(params), lr=lr, momentum=0.95, neuron_beta=0.95, weight_decay=0.0,
                       bf16=bf16, compiled=False, use_triton=False)
    muon.muon_update = partial(_without_even_out, module, muon.muon_update)
    return muon


def _without_even_out(module, update, *args):
    """The module's update by plain Muon."""
    with patch.object(module, "even_out", lambda updates, *_: updates):
        return update(*args)


def _groups(params):
    """Groups of one shape each, where parameters are no groups, without factors."""
    params = list(params)
    if not isinstance(params[0], dict):
        shapes = dict.fromkeys(param.shape for param in params)
        params = [dict(params=[p for p in params if p.shape == shape]) for shape in shapes]
    return [dict(lr_factors=[1.0] * len(group["params"])) | group for group in params]
