"""How to get hold of the parts that are new in 10: every matrix of a group has a factor."""


def make_muon(module, params, lr, bf16=False):
    return module.Muon(_groups(params), lr=lr, momentum=0.95, bf16=bf16, compiled=False,
                       use_triton=False)


def lr_factors(args):
    return dict(c_qkvo=args.attention_lr_factor, c_fc=args.mlp_in_lr_factor,
                c_proj=args.mlp_out_lr_factor)


def _groups(params):
    """Groups of one shape each, where parameters are no groups, without factors."""
    params = list(params)
    if not isinstance(params[0], dict):
        shapes = dict.fromkeys(param.shape for param in params)
        params = [dict(params=[p for p in params if p.shape == shape]) for shape in shapes]
    return [dict(lr_factors=[1.0] * len(group["params"])) | group for group in params]
