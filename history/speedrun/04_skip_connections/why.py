"""Draws why.svg: the skips of a U-net of eight layers, and each layer's paths to the head."""


def draw(picture):
    (counts,) = picture.printed(r"paths from each of 8 layers to the head: \[([\d, ]+)\]")
    paths = counts.split(", ")
    step, y = 42, 118
    picture.title("Skips over the middle, and paths to the head")
    for layer in range(len(paths) // 2):
        to = len(paths) - 1 - layer
        x, end = step * layer + 22, step * to + 4
        picture.arc(x, end, y - 12, 76 - 20 * layer, "own")
        picture.line([(end - 4, y - 20), (end, y - 12), (end + 3, y - 20)], "own")
    picture.line([(0, y), (step * len(paths), y)], "ink")
    for layer, count in enumerate(paths):
        x = step * layer
        picture.box(x, y - 11, 26, 22, "ink")
        picture.text(x + 13, y + 5, f"{layer}", "light", "middle")
        picture.text(x + 13, y + 34, count, "own", "middle")
    picture.text(step * len(paths) + 4, y + 5, "head", "bold")
    picture.text(0, y + 52, "paths on which what a layer adds reaches the head")
    picture.number(y + 64, paths[0], f"paths lead from layer 0 of {len(paths)} to the head; without"
                   " skips there is one")
