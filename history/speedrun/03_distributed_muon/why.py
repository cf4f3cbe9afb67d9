"""Draws why.svg: which matrices each of eight GPUs orthogonalises, before and in 03."""

import torch

GPUS = 8


def draw(picture):
    module = picture.snapshot
    with torch.device("meta"):  # shapes without data
        matrices = len([*module.GPT(module.Hyperparameters()).blocks.parameters()])
    wide, tall = picture.width / matrices, 9
    picture.title(f"{GPUS} GPUs (rows) and {matrices} matrices (columns)")
    for top, name, own, kind in (
            (42, "before: each GPU orthogonalises all of them", False, "quiet"),
            (146, "03: each GPU does every eighth, then they add up", True, "own")):
        picture.text(0, top - 8, name, kind)
        for gpu in range(GPUS):
            y = top + tall * gpu
            picture.box(0, y, picture.width, tall - 1, "faint" if own else "quiet")
            for matrix in range(gpu, matrices, GPUS) if own else ():
                picture.box(wide * matrix, y, wide, tall - 1, kind)
    repeated, different = picture.printed(r"(\d+) matrices orthogonalised, (\d+) different results")
    picture.number(230, repeated, f"matrices are orthogonalised by 8 GPUs in a step before 03, with"
                   f" {different} different results")
