"""Draws why.svg: which tokens each token sees, in 04's short rows and in 05's long sequence."""

import torch

TOKENS, ROW, WINDOW = 20, 10, 6
STARTS = 0, 7, 13  # of three documents
SIZE = 8  # of a pair's cell


def draw(picture):
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    tokens[0, list(STARTS)] = 1  # opens a document

    def mask(window):
        args = picture.snapshot.Hyperparameters(bos_id=1, window=window, use_flex_attention=False)
        return picture.snapshot.attention_mask(tokens, args)[0, 0]

    t, same = torch.arange(TOKENS), mask(TOKENS)  # a pair of one document
    rows = (t[:, None] >= t) & (t[:, None] // ROW == t // ROW)  # each row is a sequence
    picture.title("Which tokens (columns) each token (row) sees")
    for left, name, seen in ((0, f"04: rows of {ROW} tokens", rows),
                             (200, f"05: a window of {WINDOW}", mask(WINDOW))):
        picture.text(left, 38, name, "own" if left else "")
        for q in range(TOKENS):
            for kind, document in (("own", same[q]), ("quiet", ~same[q])):
                if keys := (seen[q] & document).nonzero().flatten().tolist():
                    picture.box(left + SIZE * keys[0], 46 + SIZE * q, SIZE * len(keys), SIZE, kind)
        for k in range(TOKENS + 1):
            kind = "ink" if k in STARTS else "faint"
            picture.line([(left + SIZE * k, 46), (left + SIZE * k, 46 + SIZE * TOKENS)], kind)
    picture.box(0, 216, 10, 10, "own")
    picture.text(16, 226, "same document")
    picture.box(130, 216, 10, 10, "quiet")
    picture.text(146, 226, "another document")
    picture.line([(280, 214), (280, 228)], "ink")
    picture.text(287, 226, "one starts", "ink")
    (foreign,) = picture.printed(r"measured: ([\d.]+) percent of pairs")
    picture.number(238, foreign, "percent of the pairs in rows of 1,024 tokens join two documents"
                   " (of a small corpus)")
