"""How to get hold of the parts that are new in 05n: four matrices in one tensor, of any shape; the
first matrix of an MLP is stored transposed."""


def matrices(attn):
    C = min(attn.c_qkvo.shape[-2:])
    return attn.c_qkvo.detach().view(4, C, C).unbind()


def mlp_matrices(mlp):
    return mlp.c_fc.detach().T, mlp.c_proj.detach()


def stack(name, tensor):
    C = min(tensor.shape[-2:])
    return tensor.view(4, C, C) if name == "c_qkvo" else tensor[None]
