"""Draws why.svg: when each message of an optimizer step is sent and when it is waited for."""


def draw(picture):
    picture.title("From sending a message to waiting for it")
    tall = 8
    for left, way, name, kind in ((0, "at once", "wait for each at once", "quiet"),
                                  (200, "overlapped", "07: compute meanwhile", "own")):
        (order,) = picture.printed(rf"(?m)^{way}, \+ launched, - waited for: (.+)$")
        events = order.split()  # +3 launches message 3, -3 waits for it
        wide = 176 / len(events)
        picture.text(left, 38, name, kind)
        for number in range(len(events) // 2):
            start, end = events.index(f"+{number}"), events.index(f"-{number}")
            picture.box(left + wide * start, 48 + tall * number, wide * (end - start), tall - 2,
                        kind)
        picture.line([(left, 48), (left, 50 + tall * number + tall)], "ink")
        picture.text(left, 72 + tall * number, "order of events →")
    once, overlapped = (picture.printed(rf"simulated link, {way}: (\d+) ms")[0]
                        for way in ("at once", "overlapped"))
    picture.number(210, f"{overlapped} ms", "take the optimizers' steps of two processes over a"
                   f" simulated link, not {once} ms")
