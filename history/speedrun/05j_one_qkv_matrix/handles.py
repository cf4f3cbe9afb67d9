"""How to get hold of the parts that are new in 05j: one stack of three matrices."""


def matrices(attn):
    return *attn.c_qkv.detach(), attn.c_proj.weight.detach()
