"""How to get hold of the parts that are new in 05: masks of documents and of a window."""

ATTENTION = ("x", "first_v", "mask")
READS_DOCUMENTS = True
PATHS = {"dense": dict(use_flex_attention=False), "flex": dict(use_flex_attention=True)}
WINDOW = "tokens"


def first_token(args):
    return args.bos_id


def mask(module, inputs, window, args):
    args.window = window
    return module.attention_mask(inputs, args)


def replace_masks(module, replace, mask):
    replace(module, "attention_mask", lambda inputs, args: mask(inputs, args.window))


def window_at(module, step, args):
    return (args.window,)


def set_window(model, window):
    model.args.window = window


def reach(window, args):
    return [window] * args.num_layers
