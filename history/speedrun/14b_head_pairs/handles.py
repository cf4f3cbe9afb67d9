"""How to get hold of the parts that are new in 14b: two stacks, of Q's and K's pairs of heads, and
of V and the output."""


def matrices(attn):
    C = attn.c_qk.size(-1)
    return *attn.c_qk.detach().view(2, C, C), *attn.c_vo.detach()


def tensors(model):
    found = {}
    for name, param in model.named_parameters():
        name = name.removesuffix(".weight")
        name = name.replace("c_qk", "c_qkvo").replace("c_vo", "c_qkvo")  # it was one before
        found.setdefault(name, []).append(param)
    return found


def lr_factors(args):
    return dict(c_qk=args.attention_lr_factor, c_vo=args.attention_lr_factor,
                c_fc=args.mlp_in_lr_factor, c_proj=args.mlp_out_lr_factor)


def stack(name, tensor):
    return tensor.view(-1, *tensor.shape[-2:])
