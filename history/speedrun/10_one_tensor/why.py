"""Draws why.svg: matrices that are copied into a stack and back; matrices that are its parts."""

NAMES = "ABCD"


def draw(picture):
    picture.title("Four matrices that are updated together")
    picture.text(0, 38, "09: copied there and back")
    picture.text(205, 38, "10: views into one tensor", "own")
    for place, name in enumerate(NAMES):
        y = 50 + 30 * place
        picture.box(0, y, 34, 22, "quiet")
        picture.text(17, y + 16, name, "light", "middle")
        picture.arrow(40, y + 7, 104, y + 7)
        picture.arrow(104, y + 16, 40, y + 16)
        picture.box(110, 50 + 27 * place, 34, 26, "ink")
        picture.text(127, 68 + 27 * place, name, "light", "middle")
        picture.box(205, 50 + 27 * place, 34, 26, "own")
        picture.text(222, 68 + 27 * place, name, "light", "middle")
    picture.line([(249, 50), (255, 50), (255, 157), (249, 157)], "own")
    picture.text(263, 100, "updated where")
    picture.text(263, 117, "it lies")
    for x, name in ((0, "model"), (110, "stack"), (205, "model = stack")):
        picture.text(x, 178, name, "own" if x > 110 else "")
    (copying,) = picture.printed(r"copying: ([\d.]+) ms")
    (lying,) = picture.printed(r"in place: ([\d.]+) ms")
    picture.number(188, f"{lying} ms", "take an update in place, on a CPU; with copies there and"
                   f" back {copying} ms")
