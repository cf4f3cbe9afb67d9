"""How to get hold of the parts that are new in 08a: long windows have an end of their own."""


def window_at(module, step, args):
    return module.window_sizes(step, args)


def compiled_for(module, step, args):
    window, _ = module.window_sizes(step, args)  # the other is equal in training
    return (window,)


def set_window(model, window, long_window=None):
    if long_window is None:
        is_last = window == model.args.window_end
        long_window = model.args.long_window_end if is_last else window
    model.set_window(window, long_window)


def last_windows(args):
    return args.window_end, args.long_window_end
