"""How to get hold of the parts that are new in 06b: the model and its rotation keep a window."""


def make_rotary(module, head_dim, seq_len):
    rotary, args = module.Rotary(head_dim, seq_len), module.Hyperparameters()
    rotary.set_window(args.window_start, args)
    return rotary


def set_window(model, window):
    model.set_window(window)


def windows(module, args):
    return module.all_windows(args)
