"""What stands for a Triton kernel of Inductor's where there is no GPU to run it."""

import ast
import math
import re

import torch

from speedrun.predict.observer import Observer

SYMMETRIC = "symmetric_kernel"  # a snapshot's own: of x x' the tiles on one side of the diagonal


class SilentKernel:
    """Tells the observer of its launches and does nothing else."""

    def __init__(self, name: str, source: str, observer: Observer):
        self.name, self.observer = name, observer
        arguments = re.search(rf"def {name}\((.*?)\):", source, re.DOTALL)[1]
        self.arguments = [argument.split(":")[0].strip() for argument in arguments.split(",")]
        self.twice = {argument for argument in self.arguments if argument.startswith("in_out")
                      and (f"tl.load({argument} " in source) == (f"tl.store({argument} " in source)}
        touched = re.search(r"'touched': (\{.*?\})", source)
        fixed_shape = re.search(r"^ +\w+numel = \d+$", source, re.MULTILINE)
        self.touched = ast.literal_eval(touched[1]) if touched and fixed_shape else {}

    def run(self, *values, **kwargs):
        """A launch with these arguments of the kernel."""
        tensors = {name: value for name, value in zip(self.arguments, values, strict=False)
                   if isinstance(value, torch.Tensor)}
        self.observer.launched("triton", self.name, self._moved(tensors), *self._work(tensors))

    def _moved(self, tensors):
        """Bytes read and written: each argument's touched bytes, all of them where they are not
        known, as in FlexAttention and in kernels for changing shapes.

        An argument that is updated in place (in_out) counts twice, but not where it only takes over
        the memory of another buffer, which is not read, or where its new value is not stored.
        """
        return sum((1 + (name in self.twice)) * min(tensor.nbytes, self.touched.get(name, math.inf))
                   for name, tensor in tensors.items())

    def _work(self, tensors):
        """FLOPs of a kernel that multiplies, and their dtype.

        Of FlexAttention two products forward; backward computes the scores and their gradients once
        for queries and once for keys, seven products in all. Of 05o's kernel half a product.
        """
        if self.name == SYMMETRIC:
            batch, rows, columns = tensors["x"].shape
            return batch * rows * rows * columns, str(tensors["x"].dtype)[6:]
        if "arg_Q" not in tensors:
            return 0, None
        query, products = tensors["arg_Q"], 7 if "arg_DQ" in tensors else 2
        keys = self.observer.keys_per_query or tensors["arg_K"].size(-2)
        return products * 2 * query.numel() * keys, str(query.dtype)[6:]
