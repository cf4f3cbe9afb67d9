"""How to get hold of the parts that are new in 00."""


def matrices(attn):
    return *attn.c_qkv.weight.detach().chunk(3), attn.c_proj.weight.detach()
