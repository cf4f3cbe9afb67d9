"""How to get hold of the parts that are new in 05r: windows are a few Python numbers."""

from functools import partial

WINDOW = "exact"


def mask(module, inputs, window, args):
    return module.attention_mask(inputs, window, args)


def set_window(model, window):
    model.forward = partial(type(model).forward, model, window=window)


def reach(window, args):
    short = max(1, window // args.tile_size // 2) * args.tile_size
    return [1 + (window if kind == "L" else short)  # 1: the token itself
            for layer, kind in enumerate(args.window_pattern[: args.num_layers])
            if layer != args.layer_without_attention]


def reach_tile(args):
    return 1
