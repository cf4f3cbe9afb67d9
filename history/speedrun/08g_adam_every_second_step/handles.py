"""How to get hold of the parts that are new in 08g: Adam waits."""


def adam_due(step, args):
    return (step + 1) % args.adam_every == 0
