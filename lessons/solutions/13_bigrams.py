"""Exercises of lesson 13: their checks, hints and solutions."""

import torch
import torch.nn.functional as F

# ---- 1: rows of one's own ----


def check_share(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of percent, not {answer!r}") from None
    meanings = {
        77.0: "that is the share of pairs that share a row; the question is about the others",
        0.230: "that is a fraction; answer in percent",
        20.1: "that is the share of rows that stay empty: all 12 pairs miss such a row. A pair has"
              " its row to itself if the 11 others miss it",
        22.3: "that is exp(-12 / 8), which comes close for many rows; with 8, multiply the"
              " probabilities to miss",
        34.5: "that is the share of rows with exactly one pair; the question counts pairs, of which"
              " there are more than rows",
        53.2: "that is rows in use per pair; most of these rows hold several pairs",
        66.7: "that is rows per pair, as if the hash filled every row before it used one twice; a"
              " hash does not know which rows are taken",
        0.0: "one other pair misses a row with probability 7 / 8; 11 misses are possible",
        150.0: "that is the mean number of pairs in a row, in percent",
        87.5: "that is the probability that one other pair misses the row; there are 11",
    }
    if abs(value - 100 * (7 / 8) ** 11) > 0.1:
        near = min(meanings, key=lambda known: abs(known - value))
        why = meanings[near] if abs(near - value) < 0.1 else (
            "each of the other 11 pairs must miss one row of 8; multiply their probabilities to"
            " miss")
        raise AssertionError(f"{value:g} percent is not the share with a row of its own: {why}")


# ---- 2: the hash ----


def bigram_rows(inputs, rows):
    hashes = (36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1]) % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _wraps(inputs, rows):
    return (36313 * inputs ^ 27191 * inputs.roll(1, 1)) % (rows - 1)


def _flat(inputs, rows):
    return bigram_rows(inputs.flatten()[None], rows).view_as(inputs)


def _next(inputs, rows):
    hashes = (36313 * inputs[:, :-1] ^ 27191 * inputs[:, 1:]) % (rows - 1)
    return F.pad(hashes, (0, 1), value=rows - 1)


def _swapped(inputs, rows):
    hashes = (27191 * inputs[:, 1:] ^ 36313 * inputs[:, :-1]) % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _added(inputs, rows):
    hashes = (36313 * inputs[:, 1:] + 27191 * inputs[:, :-1]) % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _all_rows(inputs, rows):
    hashes = (36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1]) % rows
    return F.pad(hashes, (1, 0), value=rows - 1)


def _zero_before(inputs, rows):
    return (36313 * inputs ^ 27191 * F.pad(inputs, (1, -1))) % (rows - 1)


def _row_0(inputs, rows):
    return F.pad(bigram_rows(inputs, rows)[:, 1:], (1, 0))


def _overwritten(inputs, rows):
    inputs = inputs.clone()
    inputs[:, 0] = rows - 1
    return bigram_rows(inputs, rows)


def _without_brackets(inputs, rows):
    hashes = 36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1] % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


def _row_as_token(inputs, rows):
    before = inputs.roll(1, 1)
    before[:, 0] = rows - 1
    return (36313 * inputs ^ 27191 * before) % (rows - 1)


def _row_too_far(inputs, rows):
    return F.pad(bigram_rows(inputs, rows)[:, 1:], (1, 0), value=rows)


def _needs_a_pair(inputs, rows):
    previous, token = inputs.unfold(1, 2, 1).unbind(-1)
    return F.pad((36313 * token ^ 27191 * previous) % (rows - 1), (1, 0), value=rows - 1)


def _too_short(inputs, rows):
    return bigram_rows(inputs, rows)[:, 1:]


def check_rows(answer):
    assert callable(answer), f"expected the function bigram_rows, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    cases = [(torch.tensor([[50256, 464, 3290, 318, 257]]), 251_520),
             (torch.randint(264, (3, 7), generator=draw), 64), (torch.tensor([[5], [7]]), 64)]
    names = {
        "a row's first token is paired with the row's last one, which the model should not see yet;"
        " it has no previous token, so use the last row of the table": _wraps,
        "a first token is paired with the end of the row above, another text; all first tokens"
        " should use the last row of the table": _flat,
        "each token is paired with the next one, which it should predict; pair it with the previous"
        " one": _next,
        "the factors are swapped: the token's is 36313, the previous token's 27191": _swapped,
        "the products are added; they should be combined by XOR, ^": _added,
        "hashes go up to the last row, which is kept for tokens without a previous one; the modulus"
        " is rows - 1": _all_rows,
        "a first token is hashed as if token 0 were before it; it should use the last row":
            _zero_before,
        "first tokens use row 0, which is also some pairs' row; they should use the last row":
            _row_0,
        "without brackets % belongs to the previous token's product only: in Python ^ binds less"
        " than %. Put the XOR into brackets": _without_brackets,
        "a first token is hashed as if token rows - 1 were before it; rows - 1 is its row, not its"
        " predecessor": _row_as_token,
        "your first tokens use row number `rows`, which is one too many: rows count from 0":
            _row_too_far,
        "your first token is overwritten before the second one is hashed, as in the record; the"
        " second token should see its true predecessor": _overwritten,
    }
    for inputs, rows in cases:
        given = inputs.clone()
        result = answer(given, rows)
        assert torch.equal(given, inputs), (
            "your function changes the tokens; the embedding still needs them afterwards")
        right = bigram_rows(inputs, rows)
        assert isinstance(result, torch.Tensor) and result.shape == right.shape, (
            f"return a tensor of shape {tuple(right.shape)}, one row of the table for each token;"
            f" yours is {getattr(result, 'shape', result)!r}")
        if torch.equal(result, right):
            continue
        for why, slip in names.items():
            wrong = slip(inputs, rows)
            assert not torch.equal(result, wrong) or torch.equal(wrong, right), why
        raise AssertionError(
            f"tokens {inputs[0].tolist()} and {rows:,} rows should give {right[0].tolist()}, not"
            f" {result[0].tolist()}: (36313 token XOR 27191 previous token) mod (rows - 1)")


# ---- 3: triples ----

LETTERS, ROWS, STEPS, BATCH = 264, 32_768, 40, 4096


def trigram_rows(inputs, rows):
    token, previous, before = inputs[:, 2:], inputs[:, 1:-1], inputs[:, :-2]
    hashes = (36313 * token ^ 27191 * previous ^ 51647 * before) % (rows - 1)
    return F.pad(hashes, (2, 0), value=rows - 1)


def _pairs_only(inputs, rows):
    return F.pad(bigram_rows(inputs, rows)[:, 2:], (2, 0), value=rows - 1)


def _around_the_row(inputs, rows):
    before, first = inputs.roll(1, 1), inputs.roll(2, 1)
    return (36313 * inputs ^ 27191 * before ^ 51647 * first) % (rows - 1)


def _any_order(inputs, rows):
    hashes = (inputs[:, 2:] + inputs[:, 1:-1] + inputs[:, :-2]) * 36313 % (rows - 1)
    return F.pad(hashes, (2, 0), value=rows - 1)


def _blind_to_the_last_two(inputs, rows):
    hashes = (36313 * (inputs[:, 2:] + inputs[:, 1:-1]) ^ 51647 * inputs[:, :-2]) % (rows - 1)
    return F.pad(hashes, (2, 0), value=rows - 1)


def _all_rows_of_triples(inputs, rows):
    hashes = 36313 * inputs[:, 2:] ^ 27191 * inputs[:, 1:-1] ^ 51647 * inputs[:, :-2]
    return F.pad(hashes % rows, (2, 0), value=rows - 1)


def _the_next_token(inputs, rows):
    hashes = (36313 * inputs[:, 2:] ^ 27191 * inputs[:, 1:-1] ^ 51647 * inputs[:, :-2]) % (rows - 1)
    return F.pad(hashes, (1, 1), value=rows - 1)


def _beyond_the_table(inputs, rows):
    return F.pad(trigram_rows(inputs, rows)[:, 2:], (2, 0), value=rows)


def piece_of_text(number, count):
    """Bytes number * count on of the embedded corpus."""
    import lesson

    lesson.make_builtin()
    shard = lesson.snapshot("13").open_shard(min(lesson.BUILTIN.glob("*_train_*.bin")))
    return torch.from_numpy(shard[number * count :][:count].astype("int64"))


def table_loss(row_functions, number):
    """The loss on new bytes of tables of logits, one per function, that are added and trained by
    SparseAdam on a piece of the text."""
    text = piece_of_text(number, STEPS * BATCH + 2 * BATCH)
    tables = [torch.nn.Embedding(ROWS, LETTERS, sparse=True) for _function in row_functions]
    for table in tables:
        torch.nn.init.zeros_(table.weight)
    adam = torch.optim.SparseAdam([table.weight for table in tables], lr=0.3)
    for step in range(STEPS + 1):
        inputs = text[step * BATCH :][:BATCH].view(1, -1)
        targets = text[step * BATCH + 1 :][:BATCH]
        logits = sum(table(rows(inputs, ROWS)) for table, rows in
                     zip(tables, row_functions, strict=True))[0]
        loss = F.cross_entropy(logits, targets)
        if step < STEPS:
            adam.zero_grad()
            loss.backward()
            adam.step()
    return loss.item()


def check_triples(answer):
    assert callable(answer), f"expected the function trigram_rows, not {answer!r}"
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randint(LETTERS, (8, 500), generator=draw)
    given = inputs.clone()
    result = answer(given, 512)
    assert torch.equal(given, inputs), (
        "your function changes the tokens; the embedding still needs them afterwards")
    assert isinstance(result, torch.Tensor) and result.shape == inputs.shape, (
        f"return a tensor of shape {tuple(inputs.shape)}, one row of the table for each token;"
        f" yours is {getattr(result, 'shape', result)!r}")
    assert 0 <= result.min() and result.max() < 512, (
        f"row numbers should lie between 0 and rows - 1; yours go from {result.min()} to"
        f" {result.max()} with 512 rows")
    assert (result[:, :2] == 511).all(), (
        "a row's first two tokens have no two predecessors, so they should get the last row, rows -"
        f" 1 = 511; yours get {result[0, :2].tolist()}. Do they look at the end of the row?")
    for place, what in enumerate(("the token itself", "the previous token",
                                  "the token before the previous one")):
        changed = inputs.clone()
        changed[:, 250 - place] = (changed[:, 250 - place] + 1) % LETTERS
        same = (answer(changed, 512)[:, 250] == result[:, 250]).double().mean()
        assert same < 0.5, f"your row numbers do not depend on {what}; a triple has three tokens"
    later = inputs.clone()
    later[:, 251] = (later[:, 251] + 1) % LETTERS
    assert torch.equal(answer(later, 512)[:, 250], result[:, 250]), (
        "a token's row changes with the next token, which the model should predict; use only the"
        " token and the two before it")
    assert (result[:, 2:] < 511).all(), (
        "some triples get the last row, which is for tokens without two predecessors; the modulus"
        " is rows - 1")
    triples = inputs[:, :498].reshape(-1, 3)
    row = answer(triples, 512)[:, 2]
    for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0)):
        same = answer(triples[:, order], 512)[:, 2] == row
        assert same.double().mean() < 0.5, (
            "a triple keeps its row when two of its tokens change places; multiply each place by"
            " another odd number before you combine them")
    used, chance = len(result[:, 2:].unique()), 511 * (1 - (1 - 1 / 511) ** (8 * 498))
    assert used > 0.9 * chance, (
        f"{8 * 498:,} random triples reach only {used} of 511 rows, where chance reaches"
        f" {chance:.0f}: multiply by larger numbers, so that the remainder spreads")
    import lesson

    triples, pairs = ([table_loss(functions, number) for number in range(3)]
                      for functions in ((bigram_rows, answer), (bigram_rows,)))
    lesson.must_end_lower(triples, pairs, "pairs with your triples", "pairs only",
                          "Triples should lower the loss here")


EXERCISES = {
    "1": dict(
        check=check_share,
        hints=[
            "With which probability does one other pair fall into another row than yours?",
            "All others must miss: (1 - 1 / R) to the power n - 1, for n pairs and R rows.",
            "R = 8, n = 12: 7 / 8, eleven times.",
            "100 (7 / 8)^11 = ...",
        ],
        solution=23.0,
        wrong=[53.2, 77.0, 0.230, 100 * (7 / 8) ** 12, 100 * 2.71828**-1.5, 34.5, 66.7, 0, 150,
               60.5, 87.5, "few"],
    ),
    "2": dict(
        check=check_rows,
        hints=[
            "Which tokens of a row have a previous one, and what do the others get?",
            "h = (36313 t XOR 27191 p) mod (rows - 1) for a token t and the previous token p; a"
            " row's first token has no previous one and gets the last row's number, rows - 1.",
            "t is inputs[:, 1:], p is inputs[:, :-1]. In Python ^ binds less than * and %, so put"
            " brackets around the XOR; then % (rows - 1), then pad with one column in front.",
            "hashes = (36313 * inputs[:, 1:] ^ 27191 * inputs[:, :-1]) % (rows - 1), then pad ...",
        ],
        solution=bigram_rows,
        wrong=[_wraps, _flat, _next, _swapped, _added, _all_rows, _zero_before, _row_0,
               _overwritten, _too_short, _without_brackets, _row_as_token, _row_too_far,
               _needs_a_pair, lambda inputs, rows: None],
    ),
    "3": dict(
        check=check_triples,
        hints=[
            "Three tokens choose a row. Which tokens of a sequence have two predecessors?",
            "Multiply each of the three places by another odd number, combine the products by XOR,"
            " and take the remainder modulo rows - 1.",
            "token, previous, before = inputs[:, 2:], inputs[:, 1:-1], inputs[:, :-2]; the first"
            " two columns get rows - 1.",
            "hashes = (36313 * token ^ 27191 * previous ^ ... * before) % (rows - 1);"
            " return F.pad(hashes, (2, 0), value=...)",
        ],
        solution=trigram_rows,
        wrong=[_pairs_only, _around_the_row, _any_order, _blind_to_the_last_two,
               _all_rows_of_triples, _the_next_token, _beyond_the_table,
               lambda inputs, rows: None],
    ),
}
