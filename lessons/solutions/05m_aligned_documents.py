"""Exercises of lesson 05m: their checks, hints and solutions."""

from functools import cache

import numpy as np

# ---- 1: rows of a toy ----


def check_rows(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of rows, not {answer!r}") from None
    meanings = {
        6: "that is the number of documents; a row covers several, or the middle of one",
        5: "that is without skipping, 40 / 8",
        4: "after the row from 22 the next document would have to start at 30 or later; none does",
        2: "after the row from 9 to 16 comes the document at 22",
    }
    if value != 3:
        raise AssertionError(
            f"{value:g} rows is not right;"
            f" {meanings.get(value, 'begin at 0; then at the first start from 8 on; and so on')}")


# ---- 2: where rows begin ----

CASES = [([0, 5, 9, 14, 22, 25], 40, 8), ([0, 5, 9, 14, 22, 25], 33, 8), ([3, 4, 30], 39, 8),
         ([3, 4, 30], 38, 8), ([0, 8, 16], 25, 8), ([], 30, 8)]


def aligned(starts, length, T):
    rows, position = [], 0
    for start in starts:
        if start >= position and start + T + 1 <= length:
            rows.append(start)
            position = start + T
    return rows


def check_aligned(answer):
    assert callable(answer), f"expected the function aligned, not {answer!r}"
    for starts, length, T in CASES:
        result = answer(list(starts), length, T)
        assert result is not None, "the function returns nothing; return the list of positions"
        result, right = [int(start) for start in result], aligned(starts, length, T)
        if result == right:
            continue
        told = f"documents start at {starts}, {length} tokens, T = {T}: your rows begin at {result}"
        if [start for start in result if start not in starts]:
            why = "every row begins with a document"
        elif any(b - a < T for a, b in zip(result, result[1:], strict=False)):
            why = f"two of them overlap: the next row begins {T} tokens later at the earliest"
        elif result and result[-1] + T + 1 > length:
            why = "the last one has no target for its last token: a row needs T + 1 tokens"
        elif not result or result[0] != right[0]:
            why = "the first row begins with the first document, wherever that starts"
        elif result == right[: len(result)]:
            why = (f"the row at {right[len(result)]} is missing; it needs no document after it,"
                   " only start + T + 1 <= length")
        elif len(result) < len(right):
            why = ("a row is missing; the next row may begin exactly T tokens after the last one,"
                   " as its first token is only the target of the last")
        else:
            why = "take the first document at or after the end of the last row"
        raise AssertionError(f"{told}, not {right}; {why}")


# ---- 3: a rule in between ----

USED, MARGIN, ROW, TRAINED, READ = 0.55, 0.08, 256, 160, 2**18  # trained rows, read tokens


def choose(starts, length, T):
    """Waits for a document's start if it is within 512 tokens, else goes on where it is."""
    rows, position = [], 0
    while position + T + 1 <= length:
        rows.append(position)
        position += T
        following = np.searchsorted(starts, position)
        if following < len(starts) and starts[following] - position <= 512:
            position = int(starts[following])
    return rows


def any_start(starts, length, T):
    return range(0, length - T, T)


@cache
def document_starts():
    """Where documents start in the first READ tokens of the embedded corpus."""
    import lesson

    lesson.make_builtin()
    shard = lesson.snapshot("05m").open_shard(min(lesson.BUILTIN.glob("*_train_*.bin")))
    return np.flatnonzero(np.array(shard[:READ]) == 256)


def end_losses(begins):
    """The final losses of a micro 05m whose TRAINED rows begin at `begins`, three seeds."""
    import lesson

    module = lesson.snapshot("05m")
    aligned_rows = module.aligned_rows
    module.aligned_rows = lambda shard, T, args: (shard[begin : begin + T + 1] for begin in begins)
    sizes = lesson.MANIFEST.overrides(lesson.MANIFEST.get("05m"), "tiny") | dict(
        model_dim=32, num_layers=2, num_heads=1, total_batch_size=1024, micro_batch_size=4,
        train_steps=40, scheduled_steps=40, momentum_warmup_steps=8, val_tokens=8192,
        val_loss_every=0, window_pattern="LL", layer_without_attention=9, value_embed_pattern="00",
        kernel_warmup_steps=0)
    try:
        return [lesson.train_here(module, **sizes, seed=seed).val_curve[-1][1] for seed in range(3)]
    finally:
        module.aligned_rows = aligned_rows


@cache
def losses_of_any_start():
    return end_losses(any_start(None, READ, ROW))


def check_choice(answer):
    assert callable(answer), f"expected the function choose, not {answer!r}"
    starts = document_starts()
    rows = answer(starts.copy(), READ, ROW)
    assert rows is not None, "the function returns nothing; return the positions of the rows"
    rows = np.array([int(row) for row in rows])
    assert len(rows) > 0, "no row at all; return the positions of the rows"
    assert (np.diff(rows) >= ROW).all(), (
        f"rows overlap: one begins at {rows[:-1][np.diff(rows) < ROW][0]}, and the next less than"
        f" {ROW} tokens later; no token may be read twice")
    assert rows[0] >= 0 and rows[-1] + ROW + 1 <= READ, (
        f"the last row begins at {rows[-1]} of {READ} tokens; it needs {ROW} tokens and one more")
    rows = rows[:TRAINED]
    used = len(rows) * ROW / (rows[-1] + ROW if len(rows) == TRAINED else READ)
    assert used >= USED, (
        f"the {len(rows)} rows that are trained use {used:.0%} of the tokens up to their end; at"
        f" least {USED:.0%} are expected: do not wait for a document that is far away")
    free = set(starts.tolist()) | {int(row) + ROW for row in rows} | {0}
    odd = [int(row) for row in rows if int(row) not in free]
    assert not odd, (
        f"the row at {odd[0]} begins neither with a document nor where the last row ended")
    ours, theirs = end_losses(rows), losses_of_any_start()
    import lesson

    lesson.must_end_lower(
        ours, theirs, f"yours, with {used:.0%} of the tokens used,", "any start",
        "You skip too little to read from more documents; wait for a start that is a bit further"
        " away", MARGIN)


# ---- typical wrong answers: every check must refuse them ----


def _every_start(starts, length, T):
    return starts


def _one_later(starts, length, T):
    rows, position = [], 0
    for start in starts:
        if start >= position and start + T + 1 <= length:
            rows.append(start)
            position = start + T + 1
    return rows


def _not_at_zero(starts, length, T):
    rows, end = [], 0
    for start in starts:
        if start > end and start + T + 1 <= length:
            rows.append(start)
            end = start + T - 1
    return rows


def _needs_a_next(starts, length, T):
    """The snapshot's rule, which also needs a document after the row."""
    return [start for start in aligned(starts, length, T) if max(starts) >= start + T]


def _without_target(starts, length, T):
    return aligned(starts, length + 1, T)


def _not_aligned(starts, length, T):
    return list(range(0, length - T, T))


def _short_wait(starts, length, T):
    rows, position = [], 0
    while position + T + 1 <= length:
        rows.append(position)
        position += T
        following = np.searchsorted(starts, position)
        if following < len(starts) and starts[following] - position <= 128:
            position = int(starts[following])
    return rows


def _every_other(starts, length, T):
    return range(0, length - T, T + 100)


EXERCISES = {
    "1": dict(
        check=check_rows,
        hints=[
            "Where does the first row end, and which document starts at or after that position?",
            "A row that begins at s covers s to s + 7; the next begins at the first start that is"
            " at least s + 8.",
            "0, then 9 (8 or later), then 22 (17 or later), then a start of 30 or later.",
            "0, 9, ...",
        ],
        solution=3,
        wrong=[6, 5, 4, 2, "some"],
    ),
    "2": dict(
        check=check_aligned,
        hints=[
            "Which two conditions must a document's start fulfil to begin a row?",
            "start >= end of the last row (its beginning + T), and start + T + 1 <= length.",
            "Walk through the starts in order; keep the position where the last row ended,"
            " initially 0; append a start that fulfils both, and move the position.",
            "if start >= position and start + T + 1 <= length: rows.append(start);"
            " position = start + ...",
        ],
        solution=aligned,
        wrong=[_every_start, _one_later, _not_at_zero, _needs_a_next, _without_target,
               _not_aligned],
    ),
    "3": dict(
        check=check_choice,
        hints=[
            "The rule of 05m waits for a document however far away it is. What if it waits only a"
            " certain distance?",
            "At the end e of a row, let d be the distance to the next start. Begin there if d is at"
            " most some limit, else at e.",
            "np.searchsorted(starts, position) finds the next start. Try limits of 256, 512 and"
            " 1,024.",
            "if starts[following] - position <= ...: position = starts[following]",
        ],
        solution=choose,
        wrong=[any_start, aligned, _short_wait, _every_start, _every_other],
    ),
}
