"""What stands for a Triton kernel of Inductor's where there is no GPU to run it."""

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
        self.unread = {argument for argument in self.arguments
                       if argument.startswith("in_out") and f"tl.load({argument}" not in source}
        estimate = re.search(r"'kernel_num_gb': ([\d.e+-]+)", source)
        fixed_shape = re.search(r"^ +\w+numel = \d+$", source, re.MULTILINE)
        self.estimate = 1e9 * float(estimate[1]) if estimate and fixed_shape else None

    def run(self, *values, **kwargs):
        """A launch with these arguments of the kernel."""
        tensors = {name: value for name, value in zip(self.arguments, values, strict=False)
                   if isinstance(value, torch.Tensor)}
        self.observer.launched("triton", self.name, self._moved(tensors), *self._work(tensors))

    def _moved(self, tensors):
        """Bytes read and written: Inductor's own estimate with three corrections.

        A buffer that only takes over the memory of another (in_out) is not read; slices of one
        buffer that overlap do not make more than the buffer; a kernel for changing shapes moves
        what its arguments hold, for the estimate is of the first shape. A kernel without an
        estimate (FlexAttention) reads or writes each argument once.
        """
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        most = sum(size * (2 if name.startswith("in_out") and name not in self.unread else 1)
                   for name, size in sizes.items())
        if self.estimate is None:
            return most
        unread = sum(sizes[name] for name in self.unread)
        return min(most, max(self.estimate - unread, self.estimate / 2))

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
