"""Draws why.svg: three documents in a row, as a mask and as a list of starts."""

import torch

BEGINS, TOKENS = (0, 5, 8, 16), 20
SIZE = 7  # of a token, or of a pair's cell


def draw(picture):
    module = picture.snapshot
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    tokens[0, list(BEGINS)] = 1
    args = module.Hyperparameters(bos_id=1)
    ends = module.document_starts(tokens, args).unique().tolist()  # without its padding
    picture.title("A row of four documents, for the kernel")
    picture.text(0, 38, "as a mask: all pairs")
    picture.text(204, 38, "as a list of starts", "own")
    picture.box(0, 46, SIZE * TOKENS, SIZE * TOKENS, "faint")
    for start, end in zip(ends, ends[1:], strict=False):
        for q in range(start, end):
            picture.box(SIZE * start, 46 + SIZE * q, SIZE * (q - start + 1), SIZE, "quiet")
    for start in ends:
        x = 208 + 8 * start
        picture.line([(x, 62), (x, 92)], "own")
        picture.text(x, 112, f"{start}", "own", "middle")
    picture.line([(208, 77), (368, 77)], "ink")
    picture.text(204, 140, "A token sees back to its")
    picture.text(204, 157, "document's start, at most")
    picture.text(204, 174, "as far as its window.")
    huge, size, starts = picture.printed(
        r"at 49,152 tokens: a dense mask has ([\d.]+ GB), (\d+) starts (\d+) bytes")
    picture.number(200, starts, f"bytes of starts ({size} numbers) stand for a mask of {huge}, for"
                   " a row of 49,152 tokens")
