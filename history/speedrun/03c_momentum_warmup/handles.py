"""How to get hold of the parts that are new in 03c: a momentum that rises."""


def momentum(module, step, args):
    return module.muon_momentum(step, args)


def constant_momentum(defaults):
    return dict(muon_momentum_start=defaults["muon_momentum"])
