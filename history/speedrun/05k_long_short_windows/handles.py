"""How to get hold of the parts that are new in 05k: long and short windows."""

KINDS = ("L", "S")


def reach(module, step, args):
    window, tile = module.window_size(step, args), args.tile_size
    short = max(1, window // tile // 2) * tile  # half as many tiles
    return [window if kind == "L" else short
            for layer, kind in enumerate(args.window_pattern[: args.num_layers])
            if layer != args.layer_without_attention]
