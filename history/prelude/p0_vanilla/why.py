"""Draws why.svg: the bytes that attention's stored scores take, for rows of three lengths."""

LENGTHS = 256, 512, 1024  # tokens in a row


def draw(picture):
    a, b = (int(each.replace(",", "")) for each in picture.printed(
        r"p0 +([\d,]+) \+ (\d+) T bytes per token"))  # T: tokens in a row
    picture.title("What a training step keeps for one row of text")
    unit = 120 / LENGTHS[-1]
    floor, left = 160, 0
    for T in LENGTHS:
        side = T * unit
        picture.box(left, floor - side, side, side, "own")
        picture.text(left, floor + 18, f"{T:,} tokens", "bold")
        picture.text(left, floor + 35, f"scores {b * T**2 / 1e6:.0f} MB", "own")
        picture.text(left, floor + 52, f"the rest {a * T / 1e6:.0f} MB")
        left += 128
    picture.text(0, 42, "every token scores every token:")
    picture.text(0, 59, "twice the row, four times the square")
    picture.number(floor + 66, f"{b}", "bytes are kept for each pair of tokens, over all layers and"
                   " heads")
