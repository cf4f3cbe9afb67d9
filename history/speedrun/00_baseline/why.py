"""Draws why.svg: how far AdamW moves a weight while its gradient shrinks, plain and unit-norm."""

import torch
from torch import nn

STEPS = 8


def draw(picture):
    picture.title("One weight, while its gradient halves at every step")
    picture.text(0, 40, "gradient")
    for step in range(STEPS):
        size = 24 * 0.5**step
        picture.box(80 + 36 * step, 46 - size, 20, size, "quiet")
    picture.line([(80, 46), (80 + 36 * STEPS - 16, 46)], "faint")
    unit = 280 / STEPS
    for row, (optimizer, name, kind) in enumerate((
            (torch.optim.AdamW, "AdamW", "quiet"),
            (picture.snapshot.NormalizedAdamW, "in 00", "own"))):
        y, x = 66 + 34 * row, 80
        picture.text(0, y + 14, name, kind)
        for move in moves_of(optimizer):
            picture.box(x, y, unit * move - 2, 18, kind)
            x += unit * move
    picture.text(80, 144, "how far the weight moves, step by step →")
    (last,) = picture.printed(r"(?m)^AdamW: .* (\d\.\d+)$")
    picture.number(156, last, "of a full step is AdamW's eighth; in 00 all eight are full steps")


def moves_of(optimizer):
    """How far an optimizer of rate 1 moves a weight in each step."""
    weight, moves = nn.Parameter(torch.zeros(1)), []
    optimizer = optimizer([weight], lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        before, weight.grad = weight.item(), torch.full((1,), 0.5**step)
        optimizer.step()
        moves.append(before - weight.item())
    return moves
