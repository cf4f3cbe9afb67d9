"""Draws why.svg: pairs of neighbouring bytes, and the rows of a small table that a hash selects."""

import torch

PAIRS, ROWS = ("th", "he", "in", "er", "qu", "ng", "of"), 6


def draw(picture):
    picture.title("A pair of neighbours selects a row of a table")
    picture.text(0, 38, "pair")
    picture.text(150, 38, "row", "own")
    ids = torch.tensor([[ord(letter) for letter in pair] for pair in PAIRS])
    rows = picture.snapshot.bigram_hashes(ids, ROWS)[:, 1].tolist()  # of each second letter
    for row in range(ROWS):
        picture.box(150, 46 + 27 * row, 90, 20, "own" if row in rows else "faint")
    for place, (pair, row) in enumerate(zip(PAIRS, rows, strict=True)):
        y = 56 + 23 * place
        picture.text(0, y + 4, f"{pair[0]} {pair[1]}", "bold")
        picture.arrow(30, y, 146, 56 + 27 * row, "ink")
    picture.text(248, 62, "a vector for the")
    picture.text(248, 79, "pair, added to")
    picture.text(248, 96, "every layer's input")
    picture.text(248, 130, "pairs that share")
    picture.text(248, 147, "a row share")
    picture.text(248, 164, "its vector")
    (gain,) = picture.printed(r"13 with bigrams ends ([\d.]+) below")
    picture.number(220, gain, "is how much lower a small model's loss ends with the table"
                   " (in nats, mean of three seeds)")
