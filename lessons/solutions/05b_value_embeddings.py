"""Exercises of lesson 05b: their checks, hints and solutions."""

import time
from functools import cache

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# ---- 1: Adam for the rows that occur ----

ROWS, COLUMNS, STEPS = 4096, 8, 3


def row_adam(weight, m, v, step, tokens, grads, lr=0.6, beta1=0.8, beta2=0.95, eps=1e-8):
    """One step of Adam for the rows that `tokens` name; all others stay as they are."""
    rows, place = tokens.unique(return_inverse=True)
    grad = torch.zeros(len(rows), grads.size(1)).index_add_(0, place, grads)
    m[rows] = beta1 * m[rows] + (1 - beta1) * grad
    v[rows] = beta2 * v[rows] + (1 - beta2) * grad**2
    mean, square = m[rows] / (1 - beta1**step), v[rows] / (1 - beta2**step)
    weight[rows] -= lr * mean / (square.sqrt() + eps)


class _NoTable(TorchDispatchMode):
    """Refuses new tensors as large as the table."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (isinstance(result, torch.Tensor) and result.numel() >= ROWS * COLUMNS
                and result.untyped_storage().data_ptr() not in self.known):
            raise AssertionError(
                f"{func} made a new tensor of {result.numel():,} entries, as many as the table has;"
                " work on weight[rows], m[rows] and v[rows], for the rows that occur")
        return result


def check_row_adam(answer):
    assert callable(answer), f"expected the function row_adam, not {answer!r}"
    torch.manual_seed(0)
    start = torch.randn(ROWS, COLUMNS)
    table = nn.Parameter(start.clone())
    reference = torch.optim.SparseAdam([table], lr=0.6, betas=(0.8, 0.95), eps=1e-8)
    weight, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    batches = []
    for step in range(1, STEPS + 1):
        tokens = torch.randint(20 * step, 20 * step + 40, (64,))  # with repetitions
        grads = torch.randn(64, COLUMNS)
        batches.append((tokens, grads))
        before = [tensor.clone() for tensor in (weight, m, v)]
        with _NoTable(weight, m, v):
            answer(weight, m, v, step, tokens, grads)
        table.grad = torch.sparse_coo_tensor(tokens[None], grads, table.shape,
                                             check_invariants=True)
        reference.step()
        absent = torch.ones(ROWS, dtype=torch.bool)
        absent[tokens] = False
        for name, now, old in zip(("weight", "m", "v"), (weight, m, v), before, strict=True):
            changed = (now != old).any(1) & absent
            assert not changed.any(), (
                f"in step {step} row {int(changed.nonzero()[0])} of {name} changes, though its"
                " token does not occur; leave such rows as they are, their moments too")
        if torch.allclose(weight, table.detach(), atol=1e-4):
            continue
        _explain(weight, before[0], table.detach(), step, tokens, start, batches)
    _clock(answer)


def _clock(answer):
    """Prints how long a step takes on a table of the record's number of rows."""
    table = nn.Parameter(torch.zeros(50_304, 64))
    table.grad = torch.zeros_like(table)
    dense = torch.optim.Adam([table], fused=True)
    weight, m, v = torch.zeros(3, 50_304, 64)
    tokens, grads = torch.randint(50_304, (1024,)), torch.randn(1024, 64)
    times = {"yours": [], "torch.optim.Adam": []}
    for step in range(1, 6):
        for each, work in zip(times.values(), (
                lambda step=step: answer(weight, m, v, step, tokens, grads), dense.step),
                strict=True):
            begin = time.perf_counter()
            work()
            each.append(1000 * (time.perf_counter() - begin))
    print("a step with 1,024 tokens and 50,304 rows of 64:",
          ", ".join(f"{name} {sorted(each)[2]:.2f} ms" for name, each in times.items()))


def _faulty(fault):
    """row_adam with one of the FAULTS."""
    def step_with(weight, m, v, step, tokens, grads, lr=0.6, beta1=0.8, beta2=0.95, eps=1e-8):
        rows, place = tokens.unique(return_inverse=True)
        grad = torch.zeros(len(rows), grads.size(1)).index_add_(0, place, grads)
        if fault == "mean":
            grad /= torch.bincount(place)[:, None]
        first, second = 1 - beta1**step, 1 - beta2**step
        square = grad if fault == "not squared" else grad**2
        mean = beta1 * m[rows] + (1 - beta1) * grad
        size = beta2 * v[rows] + (1 - beta2) * square
        if fault != "forgotten":
            m[rows], v[rows] = mean, size
        mean = mean if fault in ("only v", "neither") else mean / first
        size = size if fault in ("only m", "neither") else size / second
        change = mean / ((size if fault == "no root" else size.sqrt()) + eps)
        change *= {"uphill": -lr, "no lr": 1.0}.get(fault, lr)
        weight[rows] -= change
    return step_with


FAULTS = {
    "mean": "you average the gradients of a token that occurs several times; sum them",
    "not squared": "v is a mean of squared gradients: grad**2",
    "only m": "divide v by 1 - beta2**step too (bias correction)",
    "only v": "divide m by 1 - beta1**step too (bias correction)",
    "neither": "divide m by 1 - beta1**step and v by 1 - beta2**step (bias correction)",
    "no root": "divide by the root of v, v.sqrt() + eps",
    "uphill": "the rows move the wrong way: subtract the step",
    "no lr": "the learning rate is missing: multiply the step by lr",
    "forgotten": "m and v are not kept: write the new moments into m[rows] and v[rows]",
}


def _explain(weight, old, expected, step, tokens, start, batches):
    """Raises what is wrong with a step, after these batches from the table `start`."""
    for fault, why in FAULTS.items():
        replay, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for number, batch in enumerate(batches, 1):
            _faulty(fault)(replay, m, v, number, *batch)
        assert not torch.allclose(weight, replay, atol=1e-4, equal_nan=True), f"step {step}: {why}"
    assert not weight.equal(old), (
        f"in step {step} no row of weight changes; write into it in place, as in"
        " weight[rows] -= ..., and do not make a new tensor")
    counts = torch.bincount(tokens, minlength=ROWS)
    wrong = ((weight - expected).abs() > 1e-4).any(1)
    if not wrong[counts == 1].any():
        raise AssertionError(
            f"in step {step} the rows of tokens that occur once are right, but not those of tokens"
            " that occur several times: sum their gradients first, and step once")
    row = int(wrong.nonzero()[0])
    ratio = ((weight - old)[row].norm() / (expected - old)[row].norm()).item()
    why = ("divide m by 1 - beta1**step and v by 1 - beta2**step (bias correction)"
           if step == 1 else
           "in step 1 all was right; how does `step` enter, and are m and v kept?")
    raise AssertionError(
        f"in step {step} row {row} moves by {ratio:.3f} times the right distance; {why}")


def _dense(weight, m, v, step, tokens, grads, lr=0.6, beta1=0.8, beta2=0.95, eps=1e-8):
    grad = torch.zeros_like(weight).index_add_(0, tokens, grads)
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad**2, 1 - beta2)
    weight -= lr * m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)


def _last_wins(weight, m, v, step, tokens, grads, lr=0.6, beta1=0.8, beta2=0.95, eps=1e-8):
    m[tokens] = beta1 * m[tokens] + (1 - beta1) * grads
    v[tokens] = beta2 * v[tokens] + (1 - beta2) * grads**2
    mean, square = m[tokens] / (1 - beta1**step), v[tokens] / (1 - beta2**step)
    weight[tokens] -= lr * mean / (square.sqrt() + eps)


def _uncorrected(weight, m, v, step, tokens, grads, **settings):
    row_adam(weight, m, v, 1000, tokens, grads, **settings)


def _always_first(weight, m, v, step, tokens, grads, **settings):
    row_adam(weight, m, v, 1, tokens, grads, **settings)


def _not_in_place(weight, m, v, step, tokens, grads, **settings):
    rows = weight[tokens]
    rows -= 0.6 * grads.sign()


def _moments_decay(weight, m, v, step, tokens, grads, lr=0.6, beta1=0.8, beta2=0.95, eps=1e-8):
    m.mul_(beta1)
    v.mul_(beta2)
    rows, place = tokens.unique(return_inverse=True)
    grad = torch.zeros(len(rows), grads.size(1)).index_add_(0, place, grads)
    m[rows] += (1 - beta1) * grad
    v[rows] += (1 - beta2) * grad**2
    weight[rows] -= (lr * m[rows] / (1 - beta1**step)
                     / ((v[rows] / (1 - beta2**step)).sqrt() + eps))


# ---- 2: a message that waits for the link ----


def check_wait(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of ms, not {answer!r}") from None
    meanings = {
        6: "that would be so if the link were free when the third size is ready; the second is"
           " still on its way then",
        28: "that is when the last one arrives, counted from the start; the rank computes until 20",
        18: "those are the three messages one after the other; two of them begin while the rank"
            " computes",
        2: "that is when the second one has arrived; the third follows it",
        20: "that is how long the rank computes; the question begins then",
        38: "that is the whole step if each message is waited for at once",
        12: "the first message is there before the second size is ready, but the third has to wait",
    }
    if value != 8:
        raise AssertionError(
            f"{value:g} ms is not right;"
            f" {meanings.get(value, 'write down when each size is ready, when its message ends')}")


# ---- 3: rows for pairs of tokens ----

TABLE_ROWS, MARGIN = 4096, 0.09  # sums of two tokens gain about 0.05


def choose_rows(tokens, num_rows):
    """A row for each token and the one before it; pairs share rows, as there are too few."""
    before = tokens.roll(1, 1)
    before[:, 0] = 256
    return (257 * before + tokens) % num_rows


def own_rows(tokens, num_rows):
    return tokens


def end_losses(rows):
    """Trains a micro 05b whose tables have TABLE_ROWS rows and are read at rows(tokens), three
    seeds; returns the final losses."""
    import lesson

    module = lesson.snapshot("05b")
    parent = module.GPT

    class Indexed(parent):
        def __init__(self, args):
            super().__init__(args)
            self.value_embeds = nn.ModuleDict(
                {name: nn.Embedding(TABLE_ROWS, args.model_dim) for name in self.value_embeds})
            for table in self.value_embeds.values():
                table.register_forward_pre_hook(
                    lambda table, tokens: (rows(tokens[0].clone(), TABLE_ROWS),))

    module.GPT = Indexed
    try:
        settings = {**lesson.MANIFEST.overrides(lesson.MANIFEST.get("05b"), "tiny"), **dict(
            model_dim=32, num_layers=2, num_heads=1, seq_len=64, window_end=64, micro_batch_size=8,
            total_batch_size=512, train_steps=40, cooldown_steps=16, momentum_warmup_steps=10,
            val_tokens=8192, val_loss_every=0, kernel_warmup_steps=0, use_flex_attention=False,
            value_embed_pattern="00", attention_scale=32**-0.5)}
        return [lesson.train_here(module, **settings, seed=seed).val_curve[-1][1]
                for seed in range(3)]
    finally:
        module.GPT = parent


@cache
def losses_of_own_rows():
    return end_losses(own_rows)


def check_rows(answer):
    import lesson

    assert callable(answer), f"expected the function choose_rows, not {answer!r}"
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(257, (4, 64), generator=generator)
    given = tokens.clone()
    rows = answer(given, TABLE_ROWS)
    assert isinstance(rows, torch.Tensor) and rows.shape == tokens.shape, (
        "expected a tensor of the shape of tokens, (B, T), with a row for each position, got"
        f" {getattr(rows, 'shape', rows)!r}")
    assert given.equal(tokens), (
        "the function changes its argument; the tables would read other tokens than the model."
        " Write into a copy: roll and clone make one")
    assert not rows.is_floating_point() and 0 <= rows.min() and rows.max() < TABLE_ROWS, (
        f"rows must be whole numbers from 0 to {TABLE_ROWS - 1}, yours go from {rows.min():g} to"
        f" {rows.max():g}; `% num_rows` brings any whole number there")
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 257
    early = (answer(changed.clone(), TABLE_ROWS) != rows)[:, :40].any(0)
    assert not early.any(), (
        f"the row at position {int(early.nonzero()[-1])} depends on tokens from position 40 on: the"
        " model would see what it has to predict; use earlier tokens, and note that roll brings the"
        " last ones to the first positions")
    lesson.must_end_lower(end_losses(answer), losses_of_own_rows(), "your rows", "a row per token",
                          _why_rows(answer), MARGIN)


def _why_rows(answer):
    """What is wrong with rows that gain too little."""
    pairs = torch.cartesian_prod(torch.arange(257), torch.arange(257))
    rows = answer(pairs, TABLE_ROWS)[:, 1].view(257, 257)  # (token before, token)
    if rows.equal(rows[:, :1].expand_as(rows)):
        return "your rows ignore the token itself; number the pair of both tokens"
    if rows.equal(rows[:1].expand_as(rows)):
        return "what else than the token itself tells which one comes next?"
    tokens = torch.randint(257, (64, 64), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, :-2] = (changed[:, :-2] + 1) % 257
    if not answer(tokens, TABLE_ROWS)[:, -1].equal(answer(changed, TABLE_ROWS)[:, -1]):
        return ("your rows depend on more than the last two tokens, so in 40 steps each is met too"
                " rarely to learn; number the pair only")
    shares = torch.bincount(rows.flatten(), minlength=TABLE_ROWS) / len(pairs)
    return ("your rows depend on both tokens, but too many pairs share a row, as if there were only"
            f" {1 / shares.square().sum():.0f} rows, not {TABLE_ROWS}; number the pairs first, each"
            " differently, then take % num_rows")


def _looks_ahead(tokens, num_rows):
    return (257 * tokens.roll(-1, 1) + tokens) % num_rows


def _previous_only(tokens, num_rows):
    before = tokens.roll(1, 1)
    before[:, 0] = 256
    return before


def _sums(tokens, num_rows):
    return (_previous_only(tokens, num_rows) + tokens) % num_rows


def _of_three(tokens, num_rows):
    before = _previous_only(tokens, num_rows)
    return (257 * 257 * _previous_only(before, num_rows) + 257 * before + tokens) % num_rows


def _too_many_rows(tokens, num_rows):
    return 257 * tokens.roll(1, 1) + tokens


def _by_position(tokens, num_rows):
    return torch.arange(tokens.size(1)).expand_as(tokens)


def _in_place(tokens, num_rows):
    tokens[:, 1:] += 257 * tokens[:, :-1].clone()
    return tokens % num_rows


EXERCISES = {
    "1": dict(
        check=check_row_adam,
        hints=[
            "Which rows occur, and how do several gradients of one row become one?",
            "For the rows r that occur, with g their summed gradients: m <- b1 m + (1 - b1) g,"
            " v <- b2 v + (1 - b2) g^2, w <- w - lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step))"
            " + eps).",
            "tokens.unique(return_inverse=True) gives the rows and, for each position, which of"
            " them it is. index_add_ sums the positions' gradients into a tensor with a line for"
            " each of these rows. Then read, change and write m[rows], v[rows], weight[rows].",
            "rows, place = tokens.unique(return_inverse=True); grad = torch.zeros(len(rows),"
            " grads.size(1)).index_add_(0, place, grads); m[rows] = beta1 * m[rows] + ...; the same"
            " for v with grad**2; weight[rows] -= lr * ... / (... .sqrt() + eps).",
        ],
        solution=row_adam,
        wrong=[_dense, _last_wins, _uncorrected, _always_first, _not_in_place, _moments_decay, 3,
               *map(_faulty, FAULTS)],
    ),
    "2": dict(
        check=check_wait,
        hints=[
            "When does each message begin: when its updates are ready, or when the link is free?",
            "Message i begins at max(its updates are ready, message i - 1 has ended) and takes 6.",
            "The sizes are ready at 10, 14 and 20 ms. The first message is sent from 10 to 16.",
            "10 to 16, 16 to 22, 22 to ...; the rank computes until 20.",
        ],
        solution=8,
        wrong=[6, 28, 18, 2, 38, 12, "none"],
    ),
    "3": dict(
        check=check_rows,
        hints=[
            "A table's row can tell more if it knows more: which earlier token says most about the"
            " next one, beside the token itself?",
            "Number the pairs: 257 x (token before) + token. There are 257 x 257 of them, so take"
            " the number modulo num_rows.",
            "Shift the tokens by one place, let the first position have some fixed token before"
            " it, number the pairs, and take the remainder.",
            "before = tokens.roll(1, 1); before[:, 0] = 256; return (257 * before + ...) % ...",
        ],
        solution=choose_rows,
        wrong=[own_rows, _previous_only, _sums, _of_three, _looks_ahead, _too_many_rows,
               _by_position, _in_place],
    ),
}
