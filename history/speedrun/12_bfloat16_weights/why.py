"""Draws why.svg: the 32 bits of a weight, cut into the 16 that are stored and 16 that are kept."""

import torch

WEIGHT = 1.0115


def draw(picture):
    upper, lower = picture.snapshot.split_bits(torch.tensor([WEIGHT]))
    halves = [f"{half.view(torch.int16).item() & 0xFFFF:016b}" for half in (upper, lower)]
    wide = picture.width / 32
    picture.title(f"The 32 bits of one weight, {WEIGHT}")
    for half, (digits, kind) in enumerate(zip(halves, ("own", "quiet"), strict=True)):
        left = 16 * wide * half
        picture.box(left, 32, 16 * wide - 2, 26, kind)
        for place, digit in enumerate(digits):
            picture.text(left + wide * (place + 0.5), 50, digit, "light", "middle")
    for left, kind, lines in (
            (0, "own", ("the weight, in bfloat16:", "the model reads it,", "GPUs exchange it")),
            (16 * wide, "quiet", ("the remainder: only the", "GPU that updates it", "keeps it"))):
        for row, words in enumerate(lines):
            picture.text(left, 78 + 17 * row, words, kind)
    picture.text(0, 138, f"The model reads {upper.item():g}; an update adds to {WEIGHT}.", "ink")
    (stalled,) = picture.printed(r"16 bits: .*\nmeasured: ([\d.]+) percent")
    picture.number(150, stalled, "percent of a small model's weights do not move in its last step,"
                   " if they are stored without remainders")
