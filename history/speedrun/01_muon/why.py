"""Draws why.svg: singular values of an update before and after Muon's orthogonalisation."""

import torch

COUNT = 16  # singular values: 1, then each the same factor smaller, down to 0.01


def draw(picture):
    before = torch.logspace(0, -2, COUNT)
    after = picture.snapshot.newton_schulz(torch.diag(before)[None], torch.float32)[0]
    picture.title("How far an update moves each of 16 directions")
    top, height = 46, 110
    for left, name, sizes, kind in ((0, "the averaged gradient", before / before[0], ""),
                                    (200, "after Muon", after.diag(), "own")):
        picture.text(left, top - 8, name, kind)
        for place, size in enumerate(sizes.tolist()):
            tall = height * size / 1.2
            picture.box(left + 11 * place, top + height - tall, 9, tall, kind or "quiet")
        picture.line([(left, top + height), (left + 11 * COUNT, top + height)], "ink")
    picture.text(0, top + height + 18, "common → rare")
    picture.text(200, top + height + 18, "common → rare")
    (few,) = picture.printed(r"AdamW's move .* (\d+) of 64 directions hold 90 %")
    picture.number(top + height + 32, f"{few} of 64", "directions hold 90 % of AdamW's update of a"
                   " small model's matrix")
