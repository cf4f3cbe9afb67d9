"""Checks, hints and solutions of the exercises in lessons/07_gradient_communication.ipynb."""

from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

# ---- 1: bytes that a rank sends ----


def check_bytes(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected a number of bytes, not {answer!r}") from None
    meanings = {
        30_000: "that is right for five matrices, but four ranks take equal shares of whole"
                " matrices: how many places do they fill?",
        24_000: "that is one of the two halves; gradients go out, parameters come back",
        64_000: "that counts a rank's own part too, which it need not send",
        42_000: "that is the parent's: an all-reduce of five matrices and a gather in bfloat16",
        36_000: "parameters come back in float32, not in bfloat16 as the parent's updates do",
        40_000: "that is all five matrices, there and back; a rank sends shares, of padded stacks",
        16_000: "that is one rank's share, there and back; in a ring it passes on others' as well",
    }
    if value != 48_000:
        raise AssertionError(
            f"expected the bytes that a rank sends in both halves of the ring, got {value:g};"
            f" {meanings.get(value, 'a ring of p ranks sends (p - 1) / p of the bytes each way')}")


# ---- 2: Adam by rows, trained ----

ROWS, WIDTH, LR, BETAS, EPS = 12, 8, 0.1, (0.8, 0.95), 1e-8
m07 = load_snapshot(load_manifest().get("07").script)


def sharded_step(rank, world_size, params, grads, states, scatter, gather, update):
    scatters = [scatter(grad) for grad in grads]
    gathers = []
    for param, state, mean in zip(params, states, scatters, strict=True):
        rows = param.chunk(world_size)[rank]
        update(rows, mean.wait(), state)
        gathers.append(gather(rows))
    for param, whole in zip(params, gathers, strict=True):
        param.copy_(whole.wait())


def _waits_at_once(rank, world_size, params, grads, states, scatter, gather, update):
    for param, grad, state in zip(params, grads, states, strict=True):
        rows = param.chunk(world_size)[rank]
        update(rows, scatter(grad).wait(), state)
        param.copy_(gather(rows).wait())


def _gathers_at_the_end(rank, world_size, params, grads, states, scatter, gather, update):
    scatters = [scatter(grad) for grad in grads]
    for param, state, mean in zip(params, states, scatters, strict=True):
        update(param.chunk(world_size)[rank], mean.wait(), state)
    for param in params:
        param.copy_(gather(param.chunk(world_size)[rank]).wait())


def _backwards(rank, world_size, params, grads, states, scatter, gather, update):
    scatters = [scatter(grad) for grad in grads]
    gathers = []
    for param, state, mean in list(zip(params, states, scatters, strict=True))[::-1]:
        rows = param.chunk(world_size)[rank]
        update(rows, mean.wait(), state)
        gathers.append((param, gather(rows)))
    for param, whole in gathers:
        param.copy_(whole.wait())


def _keeps_its_rows(rank, world_size, params, grads, states, scatter, gather, update):
    scatters = [scatter(grad) for grad in grads]
    gathers = []
    for param, state, mean in zip(params, states, scatters, strict=True):
        rows = param.chunk(world_size)[rank]
        update(rows, mean.wait(), state)
        gathers.append(gather(rows))
    for whole in gathers:
        whole.wait()


def _other_tensors(rank, world_size, params, grads, states, scatter, gather, update):
    scatters = [scatter(grad) for grad in grads]
    gathers = []
    for param, state, mean in zip(params, states, scatters, strict=True):
        rows = param.chunk(world_size)[rank]
        update(rows, mean.wait(), state)
        gathers.append(gather(rows))
    params[:] = [whole.wait() for whole in gathers]


def _first_rows(rank, world_size, *rest):
    params, grads, states, scatter, gather, update = rest
    shifted = [param.roll(len(param) // world_size * rank, 0) for param in params]
    sharded_step(rank, world_size, shifted, grads, states, scatter, gather, update)
    for param, moved in zip(params, shifted, strict=True):
        param.copy_(moved)


def _sends_parameters(rank, world_size, params, grads, states, scatter, gather, update):
    sharded_step(rank, world_size, params, [param.clone() for param in params], states, scatter,
                 gather, update)


def _own_gradients(rank, world_size, params, grads, states, scatter, gather, update):
    scatters = [scatter(grad) for grad in grads]
    gathers = []
    for param, grad, state, mean in zip(params, grads, states, scatters, strict=True):
        mean.wait()
        rows = param.chunk(world_size)[rank]
        update(rows, grad.chunk(world_size)[rank], state)
        gathers.append(gather(rows))
    for param, whole in zip(params, gathers, strict=True):
        param.copy_(whole.wait())


def _forgets(rank, world_size, params, grads, states, scatter, gather, update):
    sharded_step(rank, world_size, params, grads, [{} for _ in states], scatter, gather, update)


def _whole_parameters(rank, world_size, params, grads, states, scatter, gather, update):
    scatters = [scatter(grad) for grad in grads]
    for param, state, mean in zip(params, states, scatters, strict=True):
        update(param, mean.wait().repeat(world_size, 1), state)


def adam(rows, grad, state):
    """Adam on the rows, in place; `state` is empty at first."""
    if not state:
        state.update(mean=torch.zeros_like(rows), mean_square=torch.zeros_like(rows), step=0)
    state["step"] += 1
    rate = LR * (1 - BETAS[1] ** state["step"]) ** 0.5 / (1 - BETAS[0] ** state["step"])
    m07.adam_update(rows, grad, state["mean"], state["mean_square"], rate, *BETAS, EPS)


class Rank:
    """One rank's step, among others that do it right: what it sends, and in which order."""

    def __init__(self, rank, world_size, grads, means, updated):
        self.rank, self.world_size, self.grads = rank, world_size, grads  # the rank's own
        self.means, self.updated = means, updated  # of each whole parameter, by its number
        self.events = []

    def handle(self, what, number, result):
        """Something to wait for, which notes when it is launched and first waited for."""
        self.events.append(f"launch {what} {number}")
        return type("Handle", (), {"wait": lambda _self: (
            self.events.append(f"wait {what} {number}"), result)[1]})()

    def scatter(self, grad):
        launched = sum(event.startswith("launch scatter") for event in self.events)
        assert launched < len(self.means), "more scatters than parameters; each gradient goes once"
        assert grad.shape == self.means[launched].shape, (
            f"scatter takes a whole gradient, {tuple(self.means[launched].shape)}, and got"
            f" {tuple(grad.shape)}; the cutting is its work")
        number = next((n for n, own in enumerate(self.grads) if own.equal(grad)), None)
        assert number is not None, (
            f"scatter {launched} sends a tensor that is none of this rank's gradients")
        return self.handle("scatter", number, self.means[number].chunk(self.world_size)[self.rank])

    def gather(self, rows):
        left = [number for number in range(len(self.updated))
                if f"launch gather {number}" not in self.events]
        assert left, "more gathers than parameters; each goes out once"
        right = [self.updated[number].chunk(self.world_size)[self.rank] for number in left]
        number = next((number for number, own in zip(left, right, strict=True)
                       if own.shape == rows.shape and own.allclose(rows)), left[0])
        whole = self.updated[number].clone()
        own = whole.chunk(self.world_size)[self.rank]
        assert rows.shape == own.shape, (
            f"rank {self.rank} of {self.world_size} sends rows of shape {tuple(rows.shape)};"
            f" its share has {tuple(own.shape)}")
        own.copy_(rows)
        return self.handle("gather", number, whole)

    def check_order(self):
        """Raises if something was forgotten, or waits that need not."""
        count, when = len(self.means), {event: i for i, event in enumerate(self.events)}
        for what in ("scatter", "gather"):
            for number in range(count):
                for event in (f"launch {what} {number}", f"wait {what} {number}"):
                    assert event in when, (
                        f"`{event}` never happens (parameters count from 0); a rank that does not"
                        " take part makes the others wait for ever")
        order = sorted(range(count), key=lambda number: when[f"wait scatter {number}"])  # its own
        launched = max(when[f"launch scatter {number}"] for number in range(count))
        assert launched < when[f"wait scatter {order[0]}"], (
            "right numbers, but the first wait comes before the last scatter is launched: the link"
            " idles while you compute; launch all of them first")
        for number, following in pairwise(order):
            assert when[f"launch gather {number}"] < when[f"wait scatter {following}"], (
                f"right numbers, but the gather of parameter {number} could travel while parameter"
                f" {following} is computed; launch it before you wait for the next scatter")
            assert when[f"wait gather {number}"] > when[f"wait scatter {order[-1]}"], (
                f"right numbers, but you wait for the gather of parameter {number} while there is"
                " still something to compute; wait for gathers at the very end")


def train_by_rows(answer, world_size, steps):
    """Trains a table and a head on simulated ranks; returns the losses of plain Adam."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(ROWS, WIDTH, generator=generator), torch.zeros(ROWS, WIDTH)]
    theirs = [[param.clone() for param in params] for _rank in range(world_size)]
    states, whole_states = [[{}, {}] for _rank in range(world_size)], [{}, {}]
    losses = []
    for step in range(steps):
        leaves = [param.clone().requires_grad_() for param in params]
        tokens = torch.randint(ROWS, (world_size, 32), generator=generator)
        of_ranks = [F.cross_entropy(leaves[0][own] @ leaves[1].T, (own + 5) % ROWS)
                    for own in tokens]
        grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in of_ranks]
        losses.append(sum(of_ranks).item() / world_size)
        means = [sum(each) / world_size for each in zip(*grads, strict=True)]
        for param, mean, state in zip(params, means, whole_states, strict=True):
            adam(param, mean, state)
        for rank in range(world_size):
            link = Rank(rank, world_size, grads[rank], means, params)
            given = list(theirs[rank])
            answer(rank, world_size, given, [grad.clone() for grad in grads[rank]],
                   states[rank], link.scatter, link.gather, adam)
            where = f"rank {rank} of {world_size}, step {step + 1}"
            assert all(new is old for new, old in zip(given, theirs[rank], strict=True)), (
                f"{where}: you put other tensors into the list; the model still holds the old ones:"
                " copy the gathered values into them, with param.copy_")
            for number, (ours, right) in enumerate(zip(theirs[rank], params, strict=True)):
                wrong = [row for row in range(ROWS) if not ours[row].allclose(right[row])]
                assert not wrong, (
                    f"{where}: of parameter {number} the rows {wrong} are not what plain Adam makes"
                    " of the mean gradient; own rows come from `update` with rows, mean and the"
                    " kept state, all others from the gather")
            link.check_order()
            sizes = {len(value) for state in states[rank] for value in state.values()
                     if isinstance(value, torch.Tensor)}
            assert sizes == {ROWS // world_size}, (
                f"{where}: its state has {sizes or 'no'} rows; it needs {ROWS // world_size}, those"
                " that it owns")
    return losses


def check_sharded_step(answer):
    assert callable(answer), f"expected the function sharded_step, not {answer!r}"
    for world_size, steps in ((1, 2), (4, 3), (3, 40)):
        losses = train_by_rows(answer, world_size, steps)
    print(f"3 ranks trained for {len(losses)} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f},"
          f" as plain Adam's, with a third of its state each")


# ---- 3: rounds without a race ----


def rounds(rank, world_size, grads, scatter, use):
    messages = []
    for first in range(0, len(grads), world_size):
        inputs = grads[first : first + world_size]
        inputs += [torch.zeros_like(grads[0])] * (world_size - len(inputs))
        own = first + rank < len(grads)
        output = grads[first + rank] if own else torch.empty_like(grads[0])
        messages.append((scatter(output, inputs), first + rank, output))
    for message, number, output in messages:
        message.wait()
        if number < len(grads):
            use(number, output)


def _as_in_the_records(rank, world_size, grads, scatter, use):
    messages = []
    for first in range(0, len(grads), world_size):
        inputs = grads[first : first + world_size]
        inputs += [torch.zeros_like(grads[0])] * (world_size - len(inputs))
        if first + rank < len(grads):
            output = grads[first + rank]
        messages.append((scatter(output, inputs), first + rank, output))
    for message, number, output in messages:
        message.wait()
        if number < len(grads):
            use(number, output)


def _waits_for_each(rank, world_size, grads, scatter, use):
    for first in range(0, len(grads), world_size):
        inputs = grads[first : first + world_size]
        inputs += [torch.zeros_like(grads[0])] * (world_size - len(inputs))
        own = first + rank < len(grads)
        output = grads[first + rank] if own else torch.empty_like(grads[0])
        scatter(output, inputs).wait()
        if own:
            use(first + rank, output)


def _tail_stays_away(rank, world_size, grads, scatter, use):
    messages = []
    for number in range(rank, len(grads), world_size):
        inputs = grads[number - rank : number - rank + world_size]
        inputs += [torch.zeros_like(grads[0])] * (world_size - len(inputs))
        messages.append((scatter(grads[number], inputs), number))
    for message, number in messages:
        message.wait()
        use(number, grads[number])


def _one_scratch(rank, world_size, grads, scatter, use):
    scratch, messages = torch.empty_like(grads[0]), []
    for first in range(0, len(grads), world_size):
        inputs = grads[first : first + world_size]
        inputs += [torch.zeros_like(grads[0])] * (world_size - len(inputs))
        messages.append((scatter(scratch, inputs), first + rank))
    for message, number in messages:
        message.wait()
        if number < len(grads):
            use(number, scratch)


def _never_waits(rank, world_size, grads, scatter, use):
    rounds(rank, world_size, grads,
           lambda *message: scatter(*message) and SimpleNamespace(wait=lambda: None), use)


def _uses_its_own(rank, world_size, grads, scatter, use):
    rounds(rank, world_size, grads, lambda output, inputs: scatter(output.clone(), inputs), use)


def _uses_filler(rank, world_size, grads, scatter, use):
    padded = grads + [torch.zeros_like(grads[0]) for _ in range(-len(grads) % world_size)]
    messages = []
    for number in range(rank, len(padded), world_size):
        inputs = padded[number - rank : number - rank + world_size]
        messages.append((scatter(padded[number], inputs), number))
    for message, number in messages:
        message.wait()
        use(number, padded[number])


def run_rounds(answer, count, world_size, rank, early):
    """What the rank used, {matrix: number}, where its own gradient of matrix i is i + 1 and the
    mean of all ranks' i + 1.5; `early` messages are there as soon as they are launched, others when
    they are waited for."""
    grads = [torch.full((2, 2), i + 1.0) for i in range(count)]
    before, events, used = [grad.clone() for grad in grads], [], {}
    waited = set()  # matrices whose message was waited for

    def scatter(output, inputs):
        first = world_size * sum(event == "launch" for event in events)
        events.append("launch")
        wanted = before[first : first + world_size]
        assert len(inputs) == world_size, (
            f"scatter takes a matrix for each of {world_size} ranks and got {len(inputs)}; where"
            " matrices are missing, zeros stand in")
        for slot, each in enumerate(inputs):
            right = wanted[slot] if slot < len(wanted) else torch.zeros(2, 2)
            assert each.equal(right), (
                f"round {first // world_size} sends {each[0, 0]:g} to rank {slot}, whose gradient"
                f" is {right[0, 0]:g}")
        result = inputs[rank] + 0.5
        if early:
            output.copy_(result)

        def wait():
            events.append("wait")
            waited.add(first + rank)
            if not early:
                output.copy_(result)

        return type("Handle", (), {"wait": staticmethod(wait)})()

    def use(number, grad):
        assert number not in used, f"matrix {number} is used twice"
        assert number in waited or number >= count, (
            f"matrix {number} is used before you wait for its message; until then its result may"
            " not be there")
        used[number] = grad[0, 0].item()

    answer(rank, world_size, grads, scatter, use)
    turns = -(-count // world_size)
    assert events.count("launch") == turns, (
        f"{count} matrices, {world_size} ranks: rank {rank} takes part in {events.count('launch')}"
        f" of {turns} rounds, and the others wait for it for ever; who owns nothing must come too")
    assert events[:turns] == ["launch"] * turns, (
        "no race, but also no overlap: the first wait comes before the last launch; launch all"
        " rounds, then wait for them in turn")
    return used


def check_rounds(answer):
    assert callable(answer), f"expected the function rounds, not {answer!r}"
    for count, world_size in ((3, 2), (4, 2), (11, 8), (5, 1)):
        for rank in range(world_size):
            own = {i: i + 1.5 for i in range(rank, count, world_size)}
            for early in (False, True):
                used = run_rounds(answer, count, world_size, rank, early)
                when = "as soon as it is launched" if early else "only when it is waited for"
                assert used.keys() == own.keys(), (
                    f"{count} matrices, {world_size} ranks: rank {rank} uses matrices"
                    f" {sorted(used)}; it owns {sorted(own)}")
                assert used != {i: i + 1.0 for i in own} or not own, (
                    f"{count} matrices, {world_size} ranks: rank {rank} uses its own gradients; the"
                    " mean of all ranks' is in the output that you passed to scatter")
                assert used == own, (
                    f"{count} matrices, {world_size} ranks: where each message is there {when},"
                    f" rank {rank} uses the gradients {list(used.values())} instead of"
                    f" {list(own.values())}; a launch writes where an earlier result still waits"
                    " to be used")


EXERCISES = {
    "1": dict(
        check=check_bytes,
        hints=[
            "Four ranks have the same number of places for whole matrices. How many do five need?",
            "A reduce-scatter sends (p - 1) / p of the bytes of all places; so does an all-gather.",
            "Two places per rank, so eight places of 4,000 bytes. Three quarters of that, twice.",
            "2 * 3 / 4 * 32,000.",
        ],
        solution=48_000,
        wrong=[30_000, 24_000, 64_000, 42_000, 36_000, 16_000, "many"],
    ),
    "2": dict(
        check=check_sharded_step,
        hints=[
            "Three loops: launch; compute and send; collect. What can you compute while the second"
            " scatter is under way?",
            "Rank r owns rows r n / p up to (r + 1) n / p: the r-th of p equal chunks, a view of"
            " the parameter. The mean of all ranks' gradients for these rows comes from the wait.",
            "Launch a scatter for every gradient. Then for each parameter: wait, update the rows,"
            " launch their gather. Then for each gather: wait, copy into the parameter.",
            "scatters = [scatter(grad) for grad in grads]\n"
            "for param, state, mean in zip(params, states, scatters):\n"
            "    rows = param.chunk(world_size)[rank]\n"
            "    update(rows, mean.wait(), state)\n"
            "    gathers.append(gather(rows))",
        ],
        solution=sharded_step,
        right=[_backwards],
        wrong=[_waits_at_once, _gathers_at_the_end, _keeps_its_rows, _other_tensors, _first_rows,
               _own_gradients, _forgets, _whole_parameters, _sends_parameters],
    ),
    "3": dict(
        check=check_rounds,
        hints=[
            "3 matrices, 2 ranks: which output does rank 1 pass in the second round?",
            "A tensor belongs to the network from the launch until the wait. A result that waits to"
            " be used belongs to nobody else either.",
            "Give a rank that owns no matrix in a round an output that nobody reads.",
            "output = grads[first + rank] if first + rank < len(grads) else torch.empty_like(...)",
        ],
        solution=rounds,
        wrong=[_as_in_the_records, _waits_for_each, _tail_stays_away, _one_scratch, _uses_filler,
               _never_waits, _uses_its_own],
    ),
}
