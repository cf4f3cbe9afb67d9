"""How to get hold of the parts that are new in 08d: Muon's groups have matrices of one shape."""


def make_muon(module, params, lr, bf16=False):
    return module.Muon(_groups(params), lr=lr, momentum=0.95, bf16=bf16, compiled=False,
                       use_triton=False)


def _groups(params):
    """Groups of one shape each, where parameters are no groups."""
    params = list(params)
    if isinstance(params[0], dict):
        return params
    shapes = dict.fromkeys(param.shape for param in params)
    return [dict(params=[p for p in params if p.shape == shape]) for shape in shapes]
