"""How to get hold of the parts that are new in 05k: long and short windows."""

KINDS = ("L", "S")


def reach(window, args):
    short = max(1, window // args.tile_size // 2) * args.tile_size  # half as many tiles
    return [window if kind == "L" else short
            for layer, kind in enumerate(args.window_pattern[: args.num_layers])
            if layer != args.layer_without_attention]
