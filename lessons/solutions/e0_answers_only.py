"""Checks, hints and solutions of the exercises in lessons/e0_answers_only.ipynb."""

import math
from collections import Counter
from functools import cache, partial

import torch
import torch.nn.functional as F

from speedrun.history.manifest import load_manifest
from speedrun.run import conversations
from speedrun.run.data import BUILTIN
from speedrun.scripts.find import load_snapshot

e2, e2a = (load_snapshot(load_manifest().get(id).script) for id in ("e2", "e2a"))

# ---- 1: the loss of a step ----


def check_step_loss(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of nats per token, not {answer!r}") from None
    assert not math.isnan(value), (
        "the third micro-batch's own mean is 0 / 0, which is NaN, but its sum is 0 and its count is"
        " 0: add sums and counts before you divide")
    meanings = {
        3.5: "that is the mean of two means, 2 and 5, where 20 targets weigh as much as 80",
        2.33: "that is the mean of three means, with 0 for the empty micro-batch, which is still a"
             " mean of means",
        260: "that is the sum of the losses; a loss per token is divided by the targets",
        86.67: "that is the loss per micro-batch; divide by targets, not by micro-batches",
        2: "that is the first micro-batch's mean; the second one's losses and targets count, too",
        5: "that is the second micro-batch's mean; the first one's losses and targets count, too",
        7: "those are two means added up; add sums, then divide once",
    }
    why = meanings.get(round(value, 2), "add up all losses, and divide by all targets")
    assert abs(value - 2.6) < 1e-3, f"{value:g} nats per token is not right; {why}"


# ---- 2: packing ----

CASES = [([6, 5, 4, 3, 2], 10), ([6, 4], 10), ([4, 4, 6, 6], 10), ([8, 6, 5, 1, 1, 3, 4, 2], 10),
         ([7, 6, 5, 5, 4, 3], 10), ([10, 1, 9, 2, 8], 10)]


def pack(lengths, capacity):
    rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


def fit(lengths, capacity, choose):
    """Puts each length into the row that `choose` takes from those with room, else a new one."""
    rows = []
    for length in lengths:
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if not fitting:
            rows.append([])
            fitting = rows[-1:]
        choose(fitting).append(length)
    return rows


def next_fit(lengths, capacity):
    rows = [[]]
    for length in lengths:
        if sum(rows[-1]) + length > capacity:
            rows.append([])
        rows[-1].append(length)
    return rows


def _next_fit_sorted(lengths, capacity):
    return next_fit(sorted(lengths, reverse=True), capacity)


def _as_they_come(lengths, capacity):
    return fit(lengths, capacity, partial(max, key=sum))


def _shortest_first(lengths, capacity):
    return fit(sorted(lengths), capacity, partial(max, key=sum))


def _emptiest(lengths, capacity):
    return fit(sorted(lengths, reverse=True), capacity, partial(min, key=sum))


def _never_full(lengths, capacity):
    return pack(lengths, capacity - 1)


def _too_full(lengths, capacity):
    return pack(lengths, capacity + 1)


def _drops_the_last(lengths, capacity):
    return pack(lengths, capacity)[:-1]


def _alone(lengths, capacity):
    return [[length] for length in lengths]


def _places(lengths, capacity):
    left, rows = list(range(len(lengths))), []
    for row in pack(lengths, capacity):
        rows.append([next(i for i in left if lengths[i] == length) for length in row])
        left = [i for i in left if i not in rows[-1]]
    return rows


def _number_of_rows(lengths, capacity):
    return len(pack(lengths, capacity))


CAUSES = {
    next_fit: "you only ever look at the last row, but earlier rows have room, too",
    _next_fit_sorted: "you sort, but then only look at the last row; earlier rows have room, too",
    _as_they_come: "you take the lengths in the order given; the longest should come first",
    _shortest_first: "you begin with the shortest; then nothing is left to fill the gaps of the"
                     " long ones. The longest should come first",
    _emptiest: "you choose the emptiest row with room; choose the fullest, so that large gaps stay"
               " whole",
    _never_full: "your rows never become quite full; a length that fits exactly does fit",
    _alone: "each of your rows has one length; put a length into a row that has room for it",
}


def check_rows(answer, lengths, capacity):
    """Returns the answer's rows, if they are right."""
    found = answer(list(lengths), capacity)
    assert found is not None, "the function returns nothing; return the list of rows"
    lists = isinstance(found, list | tuple) and all(isinstance(row, list | tuple) for row in found)
    assert lists, (
        f"expected rows, a list of lists of lengths, got {found!r:.60}")
    rows = [list(row) for row in found]
    places = sum(rows, [])
    assert sorted(places) != list(range(len(lengths))) or sorted(places) == sorted(lengths), (
        "your rows hold the places 0, 1, 2 ... of the lengths; return the lengths themselves")
    shown = lengths if len(lengths) < 10 else f"the {len(lengths)} validation conversations"
    told = f"Packing {shown} into rows of {capacity}"
    full = [row for row in rows if sum(row) > capacity]
    assert not full, (
        f"{told}: your row {full[0]} adds up to {sum(full[0])}, more than the {capacity} slots of a"
        " row")
    missing, extra = (Counter(lengths) - Counter(sum(rows, [])),
                      Counter(sum(rows, [])) - Counter(lengths))
    assert not missing and not extra, (
        f"{told}: the lengths {sorted(missing)[:5]} are missing and {sorted(extra)[:5]} are too"
        " many; each length belongs into exactly one row")
    fewest = len(pack(lengths, capacity))
    assert len(rows) <= fewest, (
        f"{told}: you need {len(rows)} rows, best-fit decreasing {fewest}; {cause_of(answer)}")
    return rows


def cause_of(answer):
    """What is wrong with an answer that needs too many rows: the rule that packs as it does."""
    def packed(rule):
        return [sorted(map(sorted, rule(list(lengths), capacity))) for lengths, capacity in CASES]

    return next((cause for rule, cause in CAUSES.items() if packed(rule) == packed(answer)),
                "take the longest first, and look at every row that has room")


@cache
def some_conversations():
    """Conversations to train on and to validate on, and a micro model's hyperparameters."""
    conversations.make_builtin()
    args = e2a.Hyperparameters(
        val_file=conversations.files_in(BUILTIN)["val_file"], vocab_size=260, bos_id=256,
        num_layers=2, num_heads=2, model_dim=32, seq_len=256, micro_batch_size=4, bf16=False,
        compile=False)
    found, _counts = e2a.read_conversations(args.val_file, args)
    return found[::2], found[1::4], args


def end_loss(rows, steps):
    """The loss of a micro model after training on as many micro-batches of four rows."""
    _train, held_out, args = some_conversations()
    torch.manual_seed(0)
    model = e2a.GPT(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    order = torch.randperm(len(rows)).tolist()
    for step in range(steps):
        batch = [rows[i] for i in order[4 * step : 4 * step + 4]]
        loss = e2a.summed_loss(model, *e2a.pad(batch, args)) / e2a.count_targets(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        tests = e2a.pack(held_out, args.seq_len)
        batches = [e2a.pad(tests[i : i + 4], args) for i in range(0, len(tests), 4)]
        losses = [e2a.summed_loss(model, *batch).item() for batch in batches]
    return sum(losses) / e2a.count_targets(tests)


def check_pack(answer):
    assert callable(answer), f"expected the function pack, not {answer!r}"
    for lengths, capacity in CASES:
        check_rows(answer, lengths, capacity)
    found, _held_out, args = some_conversations()
    rows = check_rows(answer, [len(inputs) for inputs, _targets in found], args.seq_len)
    by_length = {}
    for one in found:
        by_length.setdefault(len(one[0]), []).append(one)
    packed = [[by_length[length].pop() for length in row] for row in rows]
    steps = len(packed) // 4
    ours, alone = end_loss(packed, steps), end_loss([[one] for one in found], steps)
    print(f"{len(found)} conversations in {len(rows)} rows. After {steps} micro-batches of four"
          f" rows each: loss {ours:.3f} with your rows, {alone:.3f} with a row for each one")


# ---- 3: a test for leaks ----


def leaks(model, inputs):
    number = (inputs == 256).cumsum(1)
    before = model(inputs)
    for one in number.unique():
        changed = torch.where((number == one) & (inputs < 256), (inputs + 1) % 256, inputs)
        moved = (model(changed) != before).any(-1)
        if moved[number != one].any():
            return True
    return False


def row_of_four():
    """A packed row of four conversations without padding, (1, T)."""
    texts = [(b"a question", b"an answer"), (b"hi", b"yo"), (b"def f(x):", b"Returns x."),
             (b"why", b"so")]
    ids = [i for question, answer in texts for i in (256, 257, *question, 258, *answer)]
    return torch.tensor([ids])


@cache
def models():
    """{name: (model, whether it leaks, what a wrong verdict shows)}; each maps (1, T) to logits."""
    args = e2a.Hyperparameters(vocab_size=260, bos_id=256, num_layers=2, num_heads=2, model_dim=16,
                               seq_len=64, bf16=False, compile=False)
    torch.manual_seed(0)
    apart, open_to_all = e2a.GPT(args), e2.GPT(args)
    for param in apart.parameters():
        if param.ndim > 1:
            torch.nn.init.normal_(param, std=0.3)
    open_to_all.load_state_dict(apart.state_dict())
    positions, signal = torch.randn(64, 260), torch.randn(256, 260)

    def each_alone(inputs):
        starts = (inputs[0] == 256).nonzero().flatten().tolist()
        parts = torch.tensor_split(inputs, starts[1:], dim=1)
        return torch.cat([open_to_all(part) for part in parts], 1)

    def with_signal(inputs, source, target, size):
        """One byte of the source moves the logits of conversation `target`."""
        number = (inputs == 256).cumsum(1)
        byte = inputs[(number == source[0]) & (inputs < 256)][source[1]]
        return apart(inputs) + size * signal[byte] * (number == target)[..., None]  # each logit

    sound = "this model is sound: no logit depends on a byte of another conversation"
    return {
        "e2a": (apart, False, sound),
        "e2": (
            open_to_all, True,
            "this model has no mask at all: a token sees all earlier ones. Compare the logits"
            " themselves; a mean loss hides it"),
        "e2a with learned positions": (
            lambda inputs: apart(inputs) + positions[: inputs.size(1)], False,
            f"{sound}; it only knows its slot"),
        "each conversation by itself": (each_alone, False, sound),
        "a backward leak": (
            partial(with_signal, source=(3, 0), target=1, size=0.5), True,
            "the first conversation's logits depend on the third's bytes; look at the slots before"
            " the change, too"),
        "a late leak": (
            partial(with_signal, source=(3, -1), target=4, size=0.5), True,
            "the fourth conversation's logits depend on the last byte of the third; change each"
            " conversation in turn, and all its bytes"),
        "a small leak": (
            partial(with_signal, source=(1, 2), target=2, size=1e-4), True,
            "one byte of the first conversation moves the second's logits by about 0.0001; sound"
            " ones move by exactly 0, so compare the logits themselves, without a tolerance"),
    }


def check_leaks(answer):
    assert callable(answer), f"expected the function leaks, not {answer!r}"
    inputs = row_of_four()
    for name, (model, leaking, shown) in models().items():
        seen = []

        def spy(ids, model=model, seen=seen):
            assert torch.is_tensor(ids) and ids.ndim == 2, (
                f"the model takes ids (1, T), not {getattr(ids, 'shape', ids)!r}")
            seen.append(ids.clone())
            with torch.no_grad():
                return model(ids)

        found = answer(spy, inputs.clone())
        assert found is not None, "the function returns nothing; return True or False"
        if bool(found) == leaking:
            continue
        why = ""
        if not leaking:
            why = "; the logits of the conversation that you change may move: leave them out"
            if any(ids.size(1) != inputs.size(1) for ids in seen):
                why = ("; you compare with a conversation that is alone, which stands in other"
                       " slots. Change bytes, and leave all else where it is")
            elif any(((ids != inputs) & (inputs > 255)).any() for ids in seen):
                why = ("; you changed markers, too, which changes what a conversation is: change"
                       " only ids below 256")
        elif len(seen) < 2:
            why = "; you never ran it on changed bytes and the row itself"
        raise AssertionError(f"{name}: you return {bool(found)}, but {shown}{why}")
    print(f"{len(models())} models judged right, leaks: "
          + ", ".join(name for name, (_model, leaking, _shown) in models().items() if leaking))


# ---- typical wrong answers: every check must refuse them ----


def _always(model, inputs):
    return True


def _never(model, inputs):
    return False


def _compare(model, inputs, changed_of, differ, numbers=None):
    """A test that changes each conversation by changed_of(inputs, its slots)."""
    number = (inputs == 256).cumsum(1)
    before = model(inputs)
    for one in numbers or number.unique().tolist():
        after = model(changed_of(inputs, number == one))
        if differ(before, after, number, one):
            return True
    return False


def _bytes(inputs, own):
    return torch.where(own & (inputs < 256), (inputs + 1) % 256, inputs)


def _first_byte(inputs, own):
    changed = inputs.clone()
    slot = (own & (inputs < 256))[0].nonzero()[0]
    changed[0, slot] = (changed[0, slot] + 1) % 256
    return changed


def _elsewhere(before, after, number, one):
    return (before != after).any(-1)[number != one].any()


def _later(before, after, number, one):
    return (before != after).any(-1)[number > one].any()


def _most_likely(before, after, number, one):
    return (before.argmax(-1) != after.argmax(-1))[number != one].any()


def _roughly(before, after, number, one):
    return not torch.allclose(before[number != one], after[number != one], atol=1e-2)


def _markers_too(model, inputs):
    return _compare(model, inputs, lambda ids, own: torch.where(own, (ids + 1) % 256, ids),
                    _elsewhere)


def _own_too(model, inputs):
    return _compare(model, inputs, _bytes, lambda before, after, *_: (before != after).any())


def _alone_against_row(model, inputs):
    starts = (inputs[0] == 256).nonzero().flatten().tolist()
    parts = torch.tensor_split(inputs, starts[1:], dim=1)
    return not torch.allclose(torch.cat([model(part) for part in parts], 1), model(inputs),
                              atol=1e-3)


def _by_loss(model, inputs):
    """Compares mean losses, as the notebook says not to."""
    number = (inputs == 256).cumsum(1)
    losses = []
    for ids in (inputs, _bytes(inputs, number == 1)):
        logits = model(ids)[0, :-1]
        later = number[0, 1:] > 1
        losses.append(F.cross_entropy(logits[later], ids[0, 1:][later]).item())
    return abs(losses[0] / losses[1] - 1) > 0.5


EXERCISES = {
    "1": dict(
        check=check_step_loss,
        hints=[
            "Every target that counts should weigh the same. How many are there in the step?",
            "Loss = sum of all losses / number of all targets, over all micro-batches.",
            "Add 160, 100 and 0. Add 80, 20 and 0. Then divide once.",
            "260 / 100",
        ],
        solution=2.6,
        wrong=[2, 5, 3.5, 7 / 3, 260, 260 / 3, 7, float("nan"), "many"],
    ),
    "2": dict(
        check=check_pack,
        hints=[
            "Which lengths are hard to place late, long or short ones?",
            "A row with `sum(row) + length <= capacity` has room. Among these the fullest leaves"
            " the smallest gap.",
            "1. Sort, longest first. 2. For each length list the rows with room. 3. None? Append a"
            " new row. 4. Else append the length to the row with the largest sum.",
            "fitting = [row for row in rows if sum(row) + length <= capacity];"
            " max(fitting, key=sum).append(length) if fitting else rows.append([length])",
        ],
        solution=pack,
        wrong=[next_fit, _next_fit_sorted, _as_they_come, _shortest_first, _emptiest, _never_full,
               _too_full, _drops_the_last, _alone, _places, _number_of_rows],
    ),
    "3": dict(
        check=check_leaks,
        hints=[
            "If you change the bytes of one conversation, whose logits may move?",
            "Sound: for every conversation d, logits outside d are equal before and after d's bytes"
            " change. One d with a difference is a leak.",
            "1. number = (inputs == 256).cumsum(1). 2. For each number, change all ids below 256"
            " that have it. 3. Compare the logits where the number is another one.",
            "changed = torch.where((number == one) & (inputs < 256), (inputs + 1) % 256, inputs);"
            " moved = (model(changed) != model(inputs)).any(-1); moved[number != one].any()",
        ],
        solution=leaks,
        wrong=[_always, _never, _markers_too, _own_too, _alone_against_row, _by_loss,
               partial(_compare, changed_of=_bytes, differ=_later),
               partial(_compare, changed_of=_bytes, differ=_roughly),
               partial(_compare, changed_of=_bytes, differ=_most_likely),
               partial(_compare, changed_of=_bytes, differ=_elsewhere, numbers=[1, 2]),
               partial(_compare, changed_of=_first_byte, differ=_elsewhere)],
    ),
}
