"""Trains a script for a few steps with gradients from outside and records how parameters move.

Optimizers are watched through torch's own hooks, so neither their classes nor where they are made
matters.
"""

from collections import Counter
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from speedrun.checks.matrices import Matrices, find_matrices
from speedrun.checks.outcome import NotThere

# Of the gradients, step by step: what divides a gradient by its norm shows.
SCALES = (1.0, 0.1, 10.0, 1.0)


class Probe:
    """A run of main with chosen gradients.

    model: that main made; weights (before the step), gradients and moves: {id(parameter): one
    tensor per step}; losses: what main returned; `args` are those of the run. All matrices start
    with random weights, so that a weight decay shows. Raises what main raises, and NotThere if it
    makes no model or steps no optimizer.
    """

    def __init__(self, module, args):
        self.args = args
        self.weights, self.gradients, self.moves = {}, {}, {}
        steps = {}  # id(optimizer): steps so far

        def pre(optimizer):
            step = steps.setdefault(id(optimizer), 0)
            numbers = {id(p): i for i, p in enumerate(models[0].parameters())} if models else {}
            for p in _parameters(optimizer):
                generator = torch.Generator().manual_seed(100 * numbers.get(id(p), 0) + step)
                scale = SCALES[step % len(SCALES)]
                p.grad = scale * gradient(p.shape, generator).to(p.dtype)
                if len(self.weights.setdefault(id(p), [])) == step:  # else one in another
                    self.weights[id(p)].append(p.detach().clone())
                    self.gradients.setdefault(id(p), []).append(p.grad.clone())

        def post(optimizer):
            step = steps[id(optimizer)]
            steps[id(optimizer)] += 1
            for p in _parameters(optimizer):
                self.moves.setdefault(id(p), {})[step] = p.detach() - self.weights[id(p)][step]

        with models_of(module, _randomise) as models, stepping(pre, post), one_process_group():
            self.losses = module.main(args)
        if not models or not steps:
            raise NotThere("main makes a GPT and steps optimizers of class torch.optim.Optimizer",
                           "it steps none" if models else "it makes none")
        self.model = models[0]
        self.moves = {key: [moves[i] for i in sorted(moves)] for key, moves in self.moves.items()}

    @cached_property
    def matrices(self) -> Matrices:
        """The model's. Raises Unfamiliar if its shapes do not fit."""
        return find_matrices(self.model, self.args)

    def moves_of(self, p: torch.Tensor) -> list[torch.Tensor]:
        """How the parameter moved in each step; [] if no optimizer has it."""
        return self.moves.get(id(p), [])


def gradient(shape, generator: torch.Generator) -> torch.Tensor:
    """Random. Singular values of a matrix are not near zero, where round-off would be amplified;
    matrices that are stacked on each other are of different size."""
    if len(shape) < 2 or min(shape) <= 8:
        return torch.randn(shape, generator=generator)
    m, n = shape
    if m in (2 * n, 3 * n):
        return torch.cat([10.0**i * gradient((n, n), generator) for i in range(m // n)])
    left, right = (torch.linalg.qr(torch.randn(size, min(shape), generator=generator))[0]
                   for size in shape)
    return left * torch.linspace(0.15, 1.0, min(shape)) @ right.T


@torch.no_grad()
def _randomise(model):
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.ndim == 2:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))


def _parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def models_of(module, ready=lambda model: None):
    """A list that fills with the GPTs that the module makes; `ready` is called with each."""
    models, init = [], module.GPT.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        models.append(self)
        ready(self)

    module.GPT.__init__ = noted
    try:
        yield models
    finally:
        module.GPT.__init__ = init


@contextmanager
def stepping(pre, post):
    """Calls pre(optimizer) and post(optimizer) around every step of any optimizer, once for a step
    that calls the step of its base class."""
    depth = Counter()

    def enter(optimizer, *_):
        depth[id(optimizer)] += 1
        if depth[id(optimizer)] == 1:
            pre(optimizer)

    def leave(optimizer, *_):
        depth[id(optimizer)] -= 1
        if depth[id(optimizer)] == 0:
            post(optimizer)

    handles = register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def one_process_group():
    """Leaves no process group behind, also when main ends halfway."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
