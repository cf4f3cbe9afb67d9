"""How to get hold of the parts that are new in 14h: a token's prefix is a target."""

import torch

EMPTY_FILES = {"prefix_file": "none"}


def compiled_for(module, step, args):
    return (module.window_sizes(step, args)[0], step <= module.last_tied_step(args),
            len(module.target_weights(step, args)), True)  # True: it is given prefixes


def warm_up(module, model, optimizers, batches, args):
    prefixes = torch.full((args.vocab_size,), -1)
    module.warm_up(model, optimizers, batches, prefixes, args)


def _prefix_weights(module, args):
    return [module.target_weights(step, args)[-1] for step in range(args.train_steps)]


FEATURES = {
    "one, two and three targets occur": lambda module, args: {
        len(module.target_weights(step, args)) - 1 for step in range(args.train_steps)} == {
        1, 2, 3},
    "prefixes count, fade and do not count": lambda module, args: (
        (weights := _prefix_weights(module, args))[0] == weights[1] > 0 == weights[-1]
        and len(set(weights)) > 10),
}
