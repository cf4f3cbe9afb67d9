"""Draws why.svg: six steps of a training loop that waits for batches prepared ahead by a thread."""

COMPUTE = 10  # milliseconds of a step


def draw(picture):
    picture.title("Six steps, of which the fourth needs a slow batch")
    unit, left = 3.2, 64
    for row, ahead in enumerate((0, 1, 2, 3)):
        (waits,) = picture.printed(rf"(?m)^{ahead} ahead: waits ([\d ]+)$")
        y, x = 44 + 27 * row, left
        picture.text(0, y + 13, f"{ahead} ahead", "own" if ahead else "")
        for wait in map(int, waits.split()):
            picture.box(x, y, unit * wait, 18, "quiet")
            picture.box(x + unit * wait, y, unit * COMPUTE - 1.5, 18, "own")
            x += unit * (wait + COMPUTE)
    picture.box(left, 158, 10, 10, "own")
    picture.text(left + 16, 168, "computes")
    picture.box(left + 96, 158, 10, 10, "quiet")
    picture.text(left + 112, 168, "waits for the batch")
    (alone,) = picture.printed(r"no thread: the longest waits are .* ([\d.]+) ms")
    (queued,) = picture.printed(r"8 ahead: the longest waits are .* ([\d.]+) ms")
    picture.number(180, f"{queued} ms", "is the longest wait with 8 batches prepared ahead, on a"
                   f" simulated slow disk; without a thread {alone} ms")
