"""Rows of training: which tokens of a shard each has, by walks over them."""

from oracle.table import milestones


def rows_of(id, tokens, lengths, num_rows, bos_id, longest):
    """The rows on which a milestone trains, lists of T + 1 tokens, in order.

    tokens: a shard's, a list; lengths: an iterator over the steps' T, which only packs may vary;
    num_rows: rows of a step; longest(T): how many tokens of a document a row of T holds at most.
    Rows at the end, too few for a step, may be there or not.
    """
    chain = next(chain for chain in ("speedrun", "prelude") if id in milestones(chain))
    rule = milestones(chain)[id].features.get("rows", "stream")
    return RULES[rule](tokens, lengths, num_rows, bos_id, longest)


def stream(tokens, lengths, *_):
    """Each row starts where the previous one ends."""
    T = next(lengths)
    return [tokens[start : start + T + 1] for start in range(0, len(tokens) - T, T)]


def aligned(tokens, lengths, _num_rows, bos_id, _longest):
    """Each row starts with a document, and the next at the last start within T tokens.

    It is taken as soon as another start is found that lies T tokens later or more, which is next.
    """
    T, rows, candidate = next(lengths), [], None
    for position in (i for i, token in enumerate(tokens) if token == bos_id):
        if candidate is None:
            candidate = position
        elif position - candidate >= T:
            rows.append(tokens[candidate : candidate + T + 1])
            candidate = position
    return rows


def packed(tokens, lengths, num_rows, bos_id, longest):
    """A row takes a token if its document began in it and fewer than longest(T) of it are there."""
    by_row = (T for T in lengths for _ in range(num_rows))
    rows, row, taken, T = [], [], None, next(by_row)
    for token in tokens:
        if token == bos_id:
            taken = 0
        if taken is not None and taken < longest(T):
            row.append(token)
            taken += 1
        if len(row) == T + 1:
            rows.append(row)
            row, taken, T = [], None, next(by_row)
    return rows


RULES = {"stream": stream, "aligned": aligned, "packed": packed}
