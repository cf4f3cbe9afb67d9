"""How to get hold of the parts that are new in 11b: several targets."""


def compiled_for(module, step, args):
    # only the number of the weights is compiled in
    return (module.window_sizes(step, args)[0], step <= module.last_tied_step(args),
            len(module.target_weights(step, args)))


def target_weights(module, step, args):
    return module.target_weights(step, args)


FEATURES = {
    "one, two and three targets occur": lambda module, args: (
        {len(module.target_weights(step, args)) for step in range(args.train_steps)} == {1, 2, 3}),
}
