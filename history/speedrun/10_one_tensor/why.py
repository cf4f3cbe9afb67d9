"""Draws why.svg: matrices that are copied into a stack and back, and matrices that are its parts."""

NAMES = "ABCD"


def draw(picture):
    picture.title("Four matrices that are updated together")
    picture.text(0, 38, "09: copied there and back")
    picture.text(220, 38, "10: views into one tensor", "own")
    for place, name in enumerate(NAMES):
        y = 50 + 30 * place
        picture.box(0, y, 34, 22, "quiet")
        picture.text(17, y + 16, name, "light", "middle")
        picture.arrow(40, y + 7, 104, y + 7)
        picture.arrow(104, y + 16, 40, y + 16)
        picture.box(110, 50 + 27 * place, 34, 26, "ink")
        picture.text(127, 68 + 27 * place, name, "light", "middle")
        picture.box(220, 50 + 27 * place, 34, 26, "own")
        picture.text(237, 68 + 27 * place, name, "light", "middle")
    picture.line([(264, 50), (270, 50), (270, 157), (264, 157)], "own")
    picture.text(278, 100, "updated where")
    picture.text(278, 117, "it lies")
    copying, = picture.printed(r"copying: ([\d.]+) ms")
    lying, = picture.printed(r"in place: ([\d.]+) ms")
    picture.number(184, f"{lying} ms", "take an update and its exchange in place, on a CPU; with"
                   f" copies there and back {copying} ms")
