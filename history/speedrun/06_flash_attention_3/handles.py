"""How to get hold of the parts that are new in 06: kernels that read the starts of documents."""

PATHS = {"dense": dict(attention_kernel="dense"), "FA2": dict(attention_kernel="FA2")}


def mask(module, inputs, window, args):
    return module.attention_masks(inputs, dict(L=window), True, args)["L"]


def replace_masks(module, replace, mask):
    replace(module, "attention_masks", lambda inputs, windows, training, args: {
        kind: mask(inputs, window) for kind, window in windows.items()})
