"""How to get hold of the parts that are new in 12a: paired heads, whose tokens take two slots."""

from dataclasses import replace

SLOTS = 2
KINDS = ("L", "S", "P")


def countable(args):  # a slot of a pair sees as many keys as a token
    return replace(args, window_pattern=args.window_pattern.replace("P", "S"))


def replace_masks(module, replace, mask):
    replace(module, "attention_masks", lambda inputs, windows, training, args: {
        kind: mask(inputs.repeat_interleave(SLOTS if kind == "P" else 1, dim=1), window)
        for kind, window in windows.items()})


FEATURES = {
    "a layer pairs its heads, of which there are several pairs": lambda module, args: (
        any(kind == "P" and layer != args.layer_without_attention
            for layer, kind in enumerate(args.window_pattern[: args.num_layers]))
        and args.num_heads % 2 == 0 and args.num_heads > 2),
}
