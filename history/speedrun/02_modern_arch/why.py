"""Draws why.svg: how a query shares its attention among eight keys, without and with QK-norm."""

import torch

COSINES = 0.1, 0.5, 0.3, 0.6, 0.2, 0.65, 0.4, 0.0  # of the query with each key


def draw(picture):
    (largest,) = picture.printed(r"validation losses: [\d. ]+\nmeasured: ([\d.]+)\n")
    (bounded,) = picture.printed(r"version 3's largest score: ([\d.]+);")
    args = picture.snapshot.Hyperparameters()
    D = args.model_dim // args.num_heads
    directions = torch.zeros(len(COSINES) + 1, D)  # the query's, then the keys', of length 1
    directions[0, 0] = 1
    for place, cosine in enumerate(COSINES, start=1):
        directions[place, 0], directions[place, place] = cosine, (1 - cosine**2) ** 0.5
    long = directions * (float(largest) * D**0.5 / max(COSINES)) ** 0.5
    picture.title("How one query divides its attention among 8 keys")
    top, height = 50, 90
    for left, vectors, name, kind in (
            (0, long, "long vectors", "quiet"),
            (200, picture.snapshot.norm(long), "normalised, as in 02", "own")):
        query, *keys = vectors
        shares = (torch.stack(keys) @ query / D**0.5).softmax(0)
        picture.text(left, 38, name, kind)
        for place, share in enumerate(shares.tolist()):
            picture.box(left + 22 * place, top + height * (1 - share), 16, height * share, kind)
            picture.text(left + 22 * place + 8, top + height + 17, f"{place + 1}", anchor="middle")
        picture.line([(left, top + height), (left + 170, top + height)], "ink")
    picture.number(top + height + 30, largest, "is the largest score of a small model whose queries"
                   f" and keys grow at a high learning rate; with QK-norm {bounded}")
