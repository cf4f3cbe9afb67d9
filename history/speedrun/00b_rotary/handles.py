"""How to get hold of the parts that are new in 00b: one table rotates all layers' queries."""


def rotaries(model):
    return {block.attn.rotary for block in model.blocks if block.attn is not None}
