"""Draws why.svg: a batch of four conversations: questions, the answers' targets, padding."""

CONVERSATIONS = (("2+2?", "four"), ("a red fruit?", "an apple"), ("hi", "hello"),
                 ("who wrote Emma?", "Austen"))
WIDE, TALL = 14, 20  # of a slot


def draw(picture):
    module = picture.snapshot
    args = module.Hyperparameters(vocab_size=260, bos_id=256)
    rows = [[module.tokenize([dict(role="user", content=question),
                              dict(role="assistant", content=answer)], args)]
            for question, answer in CONVERSATIONS]
    inputs, targets = module.pad(rows, args)
    picture.title("A batch: the places that teach something")
    for row, (own, wanted) in enumerate(zip(inputs.tolist(), targets.tolist(), strict=True)):
        length, y = len(rows[row][0][0]), 34 + 27 * row
        for slot, (token, target) in enumerate(zip(own, wanted, strict=True)):
            kind = "own" if target != module.IGNORED else "faint" if slot < length else "empty"
            picture.box(WIDE * slot, y, WIDE - 1, TALL, kind)
            if slot < length and token < 256:
                colour = "light" if kind == "own" else "ink"
                picture.text(WIDE * slot + 6.5, y + 15, chr(token), colour, "middle")
    for left, kind, name in ((0, "own", "its next token counts"), (178, "faint", "question"),
                             (272, "empty", "padding")):
        picture.box(left, 146, 10, 10, kind)
        picture.text(left + 16, 156, name)
    slots, counted = picture.printed(r"e0: +([\d,]+) slots, [\d,]+ tokens, ([\d,]+) targets")
    picture.number(168, counted, f"of {slots} places count in one pass over the lesson's"
                   " conversations")
