"""How to get hold of the parts that are new in e4: a stream of random numbers for each sample."""


def random_source(generators):
    return generators
