"""Draws why.svg: one table until two thirds of the run, then two; the angle of its gradients."""

import math


def draw(picture):
    args = picture.snapshot.Hyperparameters()
    last, end = picture.snapshot.last_tied_step(args), args.scheduled_steps
    parting = picture.width * last / end
    picture.title("One table for two jobs, for part of the run")
    picture.box(0, 30, parting, 46, "own")
    picture.text(parting / 2, 57, "embedding = head", "light", "middle")
    for y, name in ((30, "embedding"), (55, "head")):
        picture.box(parting + 4, y, picture.width - parting - 4, 21, "ink")
        picture.text((parting + 4 + picture.width) / 2, y + 15, name, "light", "middle")
    picture.text(0, 94, "step 0")
    picture.text(parting, 94, f"{last:,}", anchor="middle")
    picture.text(picture.width, 94, f"{end:,}", anchor="end")
    (angle,) = picture.printed(r"measured: ([\d.]+) degrees")
    turn, x, y = math.radians(float(angle)), 60, 190
    picture.arrow(x, y, x + 66, y, "ink")
    picture.arrow(x, y, x + 66 * math.cos(turn), y - 66 * math.sin(turn), "own")
    picture.text(x + 78, y + 4, "its gradient as head", "ink")
    picture.text(x + 12, y - 54, "its gradient as embedding", "own")
    picture.number(206, angle, "degrees lie on average between the table's two gradients in a"
                   " small model; unrelated vectors give 90")
