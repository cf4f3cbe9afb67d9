"""Draws why.svg: the share of each layer's output that the head reads, when training starts."""

import torch


def draw(picture):
    module = picture.snapshot
    args = module.Hyperparameters(bf16=False)
    with torch.device("meta"):  # shapes without data
        share = module.GPT(args).model_init["backout"]
    step, y, last = 29, 62, args.num_layers
    picture.title("Before the head, a part of the stream is removed")
    picture.line([(0, y), (step * last + 22, y)], "ink")
    for layer in range(last):
        early = layer <= args.backout_layer
        picture.box(step * layer, y - 11, 22, 22, "own" if early else "ink")
        picture.text(step * layer + 11, y + 5, f"{layer}", "light", "middle")
        read = 1 - share if early else 1
        picture.box(step * layer + 3, 178 - 40 * read, 16, 40 * read, "own" if early else "ink")
    x, head = step * args.backout_layer + 25, step * last + 10
    picture.line([(x, y), (x, 100), (head, 100)], "own")
    picture.arrow(head, 100, head, y + 12, "own")
    picture.text(x + 14, 94, f"– {share:g} × this", "own")
    picture.text(head, y - 12, "head", "bold", "middle")
    picture.text(0, 124, "what the head reads of each layer:")
    picture.line([(0, 178), (step * last, 178)], "ink")
    (seconds,) = picture.printed(r"09 backout +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)")
    picture.number(190, seconds, "seconds were saved by record #40, its other new settings"
                   " included")
