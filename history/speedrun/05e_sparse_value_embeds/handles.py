"""How to get hold of the parts that are new in 05e: a layer without attention."""


def reach(window, args):
    attending = [i for i in range(args.num_layers) if i != args.layer_without_attention]
    return [window] * len(attending)
