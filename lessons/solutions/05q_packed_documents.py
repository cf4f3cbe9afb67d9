"""Checks, hints and solutions of the exercises in lessons/05q_packed_documents.ipynb."""

from functools import cache
from itertools import combinations

import numpy as np

# ---- 1: tokens that are cut off ----


def check_cut(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of tokens, not {answer!r}") from None
    meanings = {
        6744: "those are the tokens that are read",
        15_100: "those are all tokens",
        952: "that is the first document's; two others are longer than 2,048, too",
        6952: "that is the third document's; two others are longer than 2,048, too",
        7404: "that leaves out the first document, which loses 952",
        7904: "the last document is cut as well: it has 2,500 tokens",
        14_500: "a document of more than 2,048 tokens is cut, not left out",
        3: "that is the number of documents that are cut; how many tokens do they lose?",
    }
    if value != 8356:
        raise AssertionError(
            f"{value:g} tokens is not right;"
            f" {meanings.get(value, 'subtract 2,048 from each document that is longer, and add')}")


# ---- 2: packs of documents ----

MARGIN = 0.04


def pack(documents, T, longest):
    row, lacking = [], T + 1
    for document in documents:
        piece = document[: min(longest, lacking)]
        row.append(piece)
        lacking -= len(piece)
        if lacking == 0:
            yield np.concatenate(row)
            row, lacking = [], T + 1


def end_losses(pack, longest):
    """Trains a micro 05r on such packs, each document cut to `longest` tokens, three seeds; returns
    the final losses."""
    import lesson

    module = lesson.snapshot("05r")
    packed_rows = module.packed_rows

    def rows(shard, T, args):
        tokens = np.array(shard)
        documents = np.split(tokens, np.flatnonzero(tokens == args.bos_id))[1:]
        return iter(pack(documents, T, longest))  # a list of rows serves, too

    module.packed_rows = rows
    try:
        settings = lesson.MANIFEST.overrides(lesson.MANIFEST.get("05r"), "tiny") | dict(
            model_dim=32, num_layers=2, num_heads=1, train_seq_len=512, val_seq_len=512,
            micro_batch_size=2, total_batch_size=1024, train_steps=40, scheduled_steps=40,
            momentum_warmup_steps=8, val_tokens=8192, val_loss_every=0, value_embed_pattern="00",
            window_pattern="LL", layer_without_attention=9, window_start=512, window_growth=0,
            kernel_warmup_steps=0)
        return [lesson.train_here(module, **settings, seed=seed).val_curve[-1][1]
                for seed in range(3)]
    finally:
        module.packed_rows = packed_rows


@cache
def losses_of_whole_documents():
    return end_losses(pack, 10_000)


def check_pack(answer):
    import lesson

    assert callable(answer), f"expected the function pack, not {answer!r}"
    documents = np.split(np.arange(60), [3, 9, 12, 20, 22, 31, 40, 47, 55])
    result = answer(documents, 16, 6)
    assert result is not None, "the function returns nothing; yield the rows"
    rows = [np.asarray(row).tolist() for row in result]
    right = [[*range(17)], [*range(20, 28), *range(31, 37), *range(40, 43)]]
    told = "Documents begin at tokens 0, 3, 9, 12, 20, 22, 31, 40, 47, 55; T is 16, longest 6"
    for number, row in enumerate(rows):
        assert len(row) == 17, (
            f"row {number} has {len(row)} tokens, not T + 1 = 17: a row's last document is cut to"
            " what the row still needs, and a row that stays incomplete is dropped")
        pieces = np.split(row, np.flatnonzero(np.diff(row) != 1) + 1)
        has = ", ".join(f"{piece[0]} to {piece[-1]}" for piece in pieces)
        starts = {document[0] for document in documents}
        torn = [piece for piece in pieces if piece[0] not in starts]
        why = "Each document is used once, in order, and fills the row as far as it goes"
        if torn:
            why = (f"No document begins at {torn[0][0]}: what is cut off, by `longest` or by a"
                   " row's end, is never read")
        elif max(len({*document} & {*row}) for document in documents) > 6:
            why = "A document gives a row at most `longest` tokens"
        assert number < 2 and row == right[number], (
            f"row {number} has the tokens {has}. {told}. {why}")
    assert len(rows) == 2, f"expected 2 whole rows, got {len(rows)}. {told}"
    lesson.must_end_lower(end_losses(answer, 128), losses_of_whole_documents(),
                          "your rows, cut at 128,", "whole documents",
                          "Do your rows hold more documents?", MARGIN)


# ---- 3: few windows ----

EXAMPLES = [([1, 2, 3, 4, 5, 6], 2), ([1, 1, 1, 1, 5, 6], 2), ([2, 2, 2], 3), ([1, 4, 5, 9, 10], 1),
            ([1, 1, 2, 6, 7, 7, 7, 12, 13], 3), ([1, 2, 3, 4, 5, 20], 2)]


def stages(wanted, count):
    """Tries every choice of the windows; the largest is always one of them."""
    sizes = sorted(set(wanted))
    others = combinations(sizes[:-1], min(count, len(sizes)) - 1)
    plans = ([min(size for size in (*chosen, sizes[-1]) if size >= want) for want in wanted]
             for chosen in others)
    return min(plans, key=sum)


def check_stages(answer):
    assert callable(answer), f"expected the function stages, not {answer!r}"
    for wanted, count in EXAMPLES:
        given = list(wanted)
        plan = answer(given, count)
        assert plan is not None, "the function returns nothing; return the window of each step"
        plan, told = list(plan), f"scheduled {wanted}, at most {count} windows"
        assert len(plan) == len(wanted), (
            f"{told}: you return {len(plan)} windows; return one for each of the {len(wanted)}"
            " steps, not the list of stages")
        small = [step for step, want in enumerate(wanted) if plan[step] < want]
        assert not small, (
            f"{told}: at step {small[0]} your window is {plan[small[0]]}, smaller than the"
            f" {wanted[small[0]]} scheduled; a stage is as wide as its last step needs")
        values = len(set(plan))
        assert values <= count, (
            f"{told}: your plan {plan} has {values} different windows, so it is compiled"
            f" {values} times; give neighbouring steps the same window")
        best = stages(wanted, count)
        why = ("no rule (equal lengths, equal sizes, the largest jumps) is always best: try every"
               " set of windows"
               if values > 1 else f"you use one window, where {count} are allowed")
        assert sum(plan) <= sum(best), (
            f"{told}: your plan {plan} adds up to {sum(plan)}, but the windows {sorted(set(best))}"
            f" give {sum(best)}; {why}")


# ---- typical wrong answers: every check must refuse them ----


def _without_target(documents, T, longest):
    return pack(documents, T - 1, longest)


def _not_cut(documents, T, longest):
    return pack(documents, T, T + 1)


def _goes_on(documents, T, longest):
    """What a document has beyond the cut comes as another document."""
    pieces = (document[i : i + longest] for document in documents
              for i in range(0, len(document), longest))
    return pack(pieces, T, longest)


def _rest_in_the_next_row(documents, T, longest):
    tokens = np.concatenate([document[:longest] for document in documents])
    for start in range(0, len(tokens) - T, T + 1):
        yield tokens[start : start + T + 1]


def _keeps_the_last(documents, T, longest):
    documents = list(documents)
    yield from pack(documents, T, longest)
    yield documents[-1][:longest]


def _row_by_row(documents, T, longest):
    """Throws away the document that does not fit whole."""
    row = []
    for document in documents:
        if sum(map(len, row)) + min(longest, len(document)) > T + 1:
            yield np.concatenate(row)
            row = []
        row.append(document[:longest])


def _as_wanted(wanted, count):
    return wanted


def _equal_thirds(wanted, count):
    size = -(-len(wanted) // count)
    return [wanted[min(len(wanted), (step // size + 1) * size) - 1] for step in range(len(wanted))]


def _widest(wanted, count):
    return [max(wanted)] * len(wanted)


def _stage_starts(wanted, count):
    size = -(-len(wanted) // count)
    return [wanted[step // size * size] for step in range(len(wanted))]


def _largest_jumps(wanted, count):
    sizes = sorted(set(wanted))
    jumps = sorted(range(len(sizes) - 1), key=lambda i: sizes[i] - sizes[i + 1])[: count - 1]
    chosen = [*sorted(sizes[i] for i in jumps), sizes[-1]]
    return [min(size for size in chosen if size >= want) for want in wanted]


def _evenly_chosen(wanted, count):
    sizes = sorted(set(wanted))
    chosen = {sizes[max(0, len(sizes) * i // count - 1)] for i in range(1, count + 1)}
    return [min(size for size in chosen if size >= want) for want in wanted]


def _stage_list(wanted, count):
    return sorted(set(stages(wanted, count)))


EXERCISES = {
    "1": dict(
        check=check_cut,
        hints=[
            "Which of the five documents are longer than the cut?",
            "A document of n tokens loses max(0, n - 2,048).",
            "Three documents are cut: those of 3,000, 9,000 and 2,500 tokens.",
            "952 + 6,952 + ...",
        ],
        solution=8356,
        wrong=[6744, 15_100, 952, 7904, 3, "many"],
    ),
    "2": dict(
        check=check_pack,
        hints=[
            "What must you remember from one document to the next? Two things.",
            "A row that needs n more tokens takes min(longest, n) of the next document, or all of"
            " it.",
            "Keep the pieces of the row and how many tokens it still needs, initially T + 1. Append"
            " a piece and count down; at 0 yield the row and start over.",
            "piece = document[: min(longest, lacking)]; row.append(piece); lacking -= len(piece);"
            " if lacking == 0: yield np.concatenate(row); ...",
        ],
        solution=pack,
        wrong=[_without_target, _not_cut, _goes_on, _rest_in_the_next_row, _keeps_the_last,
               _row_by_row],
    ),
    "3": dict(
        check=check_stages,
        hints=[
            "Each stage is as wide as its last step needs. So which values can a window have at"
            " all, and which of them must be one of yours?",
            "The windows are among the wanted values, and the largest is always needed. A step gets"
            " the smallest chosen window that is not below its own.",
            "1. sizes = sorted(set(wanted)). 2. itertools.combinations gives every choice of"
            " count - 1 of the others. 3. For each, make the plan. 4. Keep the smallest sum.",
            "[min(size for size in (*chosen, sizes[-1]) if size >= want) for want in wanted] is one"
            " plan; min(plans, key=sum) the best.",
        ],
        solution=stages,
        wrong=[_as_wanted, _equal_thirds, _largest_jumps, _widest, _stage_starts, _stage_list,
               _evenly_chosen],
    ),
}
