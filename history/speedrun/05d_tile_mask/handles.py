"""How to get hold of the parts that are new in 05d: a window of whole tiles."""

WINDOW = "tiles"


def reach_tile(args):
    return args.tile_size
