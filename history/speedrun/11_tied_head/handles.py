"""How to get hold of the parts that are new in 11: head and embedding are one table at first."""


def compiled_for(module, step, args):
    return module.window_sizes(step, args)[0], step <= module.last_tied_step(args)


FEATURES = {
    "the tables part within the run": lambda module, args: (
        0 < module.last_tied_step(args) < args.train_steps - args.adam_every),
}
