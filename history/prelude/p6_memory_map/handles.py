"""How to get hold of the parts that are new in p6: shards are read as hyperparameters say."""


def open_shard(module, file, args):
    return module.open_shard(file, args)
