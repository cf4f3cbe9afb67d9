"""A script's hyperparameters, and weights that follow from their names."""

import dataclasses
import zlib

import torch


def arguments(module, values):
    """The script's Hyperparameters with these values, as far as it has fields of their names."""
    known = {field.name for field in dataclasses.fields(module.Hyperparameters)}
    return module.Hyperparameters(**{name: v for name, v in values.items() if name in known})


def draw(name, like, number=0):
    """Random values for the tensor called `name`: the same in every script."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
    return torch.randn(like.shape, generator=generator).to(like.dtype)


@torch.no_grad()
def fill(model, scale=1.0):
    """Gives every weight of a model values that follow from its name; none is zero. scale: that of
    the matrices."""
    for name, tensor in sorted(model.state_dict().items()):  # tied ones have one value in any order
        if tensor.is_floating_point():
            centre, spread = 0.6, 0.3
            if tensor.ndim > 1:
                centre, spread = 0.0, scale * 1.2 / tensor.shape[-1] ** 0.5
            tensor.copy_(centre + spread * draw(name, tensor.float()))


def parameters_of(model):
    """{name: parameter} of a model; a tied one has the first of its names by the alphabet."""
    names = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return {min(some): param for param, some in names.items()}


def dtype_name(dtype):
    """A dtype in short, as in `bfloat16`."""
    return str(dtype).removeprefix("torch.")
