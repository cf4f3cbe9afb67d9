"""Checks, hints and solutions of the exercises in lessons/03_distributed_muon.ipynb."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from speedrun.history.manifest import load_manifest
from speedrun.scripts.find import load_snapshot

m03 = load_snapshot(load_manifest().get("03").script)

# ---- 1: six ranks ----


def check_busiest(answer):
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise AssertionError(f"expected one number of even shares, not {answer!r}") from None
    if abs(value - 1) < 0.02:
        raise AssertionError(
            f"expected the share of work, got {value:g}: every rank does own 12 matrices, but an"
            " MLP matrix costs three times a square one"
        )
    if abs(value - 3) < 0.02:
        raise AssertionError(
            f"expected the busiest rank against an even share, got {value:g}: that is the busiest"
            " rank against the idlest"
        )
    if abs(value - 2) < 0.02:
        raise AssertionError(
            "2 even shares are right where an MLP matrix costs four times a square one, as in"
            " record #6; with the snapshot's products it costs three times"
        )
    if abs(value - 0.3) < 0.01:
        raise AssertionError(
            f"expected a multiple of an even share, got {value:.3g}: that is the busiest rank's"
            " part of all the work, and an even share is a sixth"
        )
    assert abs(value - 1.8) < 0.02, (
        f"expected how many even shares the busiest of six ranks does, got {value:g}; write down"
        " which kinds rank 4 owns"
    )


# ---- 2: a step with an all-gather, trained ----


def gather_step(rank, world_size, weights, make_update, all_gather, lr):
    sizes = [weight.numel() for weight in weights]
    chunk = torch.zeros(max(sum(sizes[r::world_size]) for r in range(world_size)))
    place = 0
    for i in range(rank, len(weights), world_size):
        chunk[place : place + sizes[i]] = make_update(i).reshape(-1)
        place += sizes[i]
    for r, part in enumerate(all_gather(chunk)):
        place = 0
        for i in range(r, len(weights), world_size):
            weights[i].sub_(lr * part[place : place + sizes[i]].view_as(weights[i]))
            place += sizes[i]


def _chunks_of_own_length(rank, world_size, weights, make_update, all_gather, lr):
    own = [make_update(i).reshape(-1) for i in range(rank, len(weights), world_size)]
    for r, part in enumerate(all_gather(torch.cat(own) if own else torch.zeros(0))):
        for weight in weights[r::world_size]:
            update, part = part.split([weight.numel(), len(part) - weight.numel()])
            weight.sub_(lr * update.view_as(weight))


def _only_its_own(rank, world_size, weights, make_update, all_gather, lr):
    sizes = [weight.numel() for weight in weights]
    all_gather(torch.zeros(max(sum(sizes[r::world_size]) for r in range(world_size))))
    for i in range(rank, len(weights), world_size):
        weights[i].sub_(lr * make_update(i))


def _in_model_order(rank, world_size, weights, make_update, all_gather, lr):
    sizes = [weight.numel() for weight in weights]
    longest = max(sum(sizes[r::world_size]) for r in range(world_size))
    own = [make_update(i).reshape(-1) for i in range(rank, len(weights), world_size)]
    chunk = torch.cat([*own, torch.zeros(longest - sum(map(len, own)))])
    place, everything = 0, torch.cat(list(all_gather(chunk)))
    for weight in weights:
        weight.sub_(lr * everything[place : place + weight.numel()].view_as(weight))
        place += weight.numel()


def _makes_all(rank, world_size, weights, make_update, all_gather, lr):
    all_gather(torch.zeros(1))
    for i, weight in enumerate(weights):
        weight.sub_(lr * make_update(i))


def _whole_buffer(rank, world_size, weights, make_update, all_gather, lr):
    flat, place = torch.zeros(sum(weight.numel() for weight in weights)), 0
    for i, weight in enumerate(weights):
        if i % world_size == rank:
            flat[place : place + weight.numel()] = make_update(i).reshape(-1)
        place += weight.numel()
    place, total = 0, sum(all_gather(flat))
    for weight in weights:
        weight.sub_(lr * total[place : place + weight.numel()].view_as(weight))
        place += weight.numel()


def _one_gather_per_matrix(rank, world_size, weights, make_update, all_gather, lr):
    for i, weight in enumerate(weights):
        own = i % world_size == rank
        chunk = make_update(i).reshape(-1) if own else torch.zeros(weight.numel())
        weight.sub_(lr * all_gather(chunk)[i % world_size].view_as(weight))


def _place_runs_on(rank, world_size, weights, make_update, all_gather, lr):
    sizes = [weight.numel() for weight in weights]
    own = [make_update(i).reshape(-1) for i in range(rank, len(weights), world_size)]
    longest, place = max(sum(sizes[r::world_size]) for r in range(world_size)), 0
    chunk = torch.cat([*own, torch.zeros(longest - sum(map(len, own)))])
    for r, part in enumerate(all_gather(chunk)):
        for i in range(r, len(weights), world_size):
            weights[i].sub_(lr * part[place : place + sizes[i]].view_as(weights[i]))
            place += sizes[i]


def _new_tensors(rank, world_size, weights, make_update, all_gather, lr):
    new = [weight.clone() for weight in weights]
    gather_step(rank, world_size, new, make_update, all_gather, lr)
    weights[:] = new


def _upwards(rank, world_size, weights, make_update, all_gather, lr):
    gather_step(rank, world_size, weights, make_update, all_gather, -lr)


def _stays_away(rank, world_size, weights, make_update, all_gather, lr):
    if rank < len(weights):
        gather_step(rank, world_size, weights, make_update, all_gather, lr)


class Ranks:
    """Threads that stand in for ranks, and the all-gather in which they meet."""

    def __init__(self, world_size):
        self.barrier = threading.Barrier(world_size, timeout=5)
        self.chunks = [None] * world_size

    def all_gather(self, rank, chunk):
        assert isinstance(chunk, torch.Tensor) and chunk.ndim == 1, (
            f"rank {rank} brings {type(chunk).__name__} to all_gather; it takes one flat vector")
        self.chunks[rank] = chunk.detach().clone()
        self.barrier.wait()
        lengths = [len(each) for each in self.chunks]
        assert len(set(lengths)) == 1, (
            f"the ranks brought chunks of {lengths} entries; an all-gather takes equal chunks, so"
            " each rank pads its own with zeros to the length of the longest")
        gathered = [each.clone() for each in self.chunks]
        self.barrier.wait()
        return gathered

    def run(self, work):
        """Runs work(rank) in all threads and raises the first real fault."""
        faults, absent = {}, []

        def start(rank):
            self.chunks[rank] = None
            try:
                with torch.no_grad():
                    work(rank)
                if self.chunks[rank] is None:
                    absent.append(rank)
                    self.barrier.abort()  # or the others would wait for it
            except Exception as fault:
                faults[rank] = fault
                self.barrier.abort()

        with ThreadPoolExecutor(len(self.chunks)) as pool:
            list(pool.map(start, range(len(self.chunks))))
        for fault in faults.values():
            if not isinstance(fault, threading.BrokenBarrierError):
                raise fault
        assert not absent, (
            f"rank {absent[0]} of {len(self.chunks)} ended its step without all_gather, and the"
            " others wait for ever; a rank that owns no matrix must come too")
        assert not faults, (
            "the ranks call all_gather different numbers of times; each calls it once per step")


def new_model():
    """A micro model, the same for each call."""
    torch.manual_seed(0)
    args = m03.Hyperparameters(vocab_size=61, num_layers=2, num_heads=2, model_dim=24, seq_len=32)
    return m03.GPT(args)


def batches(world_size, steps):
    """The tokens of each step, a batch for each rank."""
    generator = torch.Generator().manual_seed(1)
    for _step in range(steps):
        starts = torch.randint(61, (world_size, 4, 1), generator=generator)
        yield (starts + 3 * torch.arange(33)) % 61  # each token is its neighbour's plus three


def mean_gradient(losses, params):
    """The mean over ranks of the gradients of their losses, each of its own parameters."""
    grads = map(torch.autograd.grad, losses, params)
    return [sum(each) / len(losses) for each in zip(*grads, strict=True)]


def make_update(grads, momenta, i):
    """The update of matrix i, by its gradient and its momentum."""
    mixed = m03.nesterov_update(grads[i], momenta[i], 0.95)
    return max(mixed.shape) ** 0.5 * m03.newton_schulz(mixed[None], torch.float32)[0]


@cache
def losses_of_one(world_size, steps, lr):
    """The losses (step, rank) of the parent: whole updates, from the batches of all ranks."""
    model, losses = new_model(), []
    weights = list(model.blocks.parameters())
    momenta = [torch.zeros_like(weight) for weight in weights]
    for tokens in batches(world_size, steps):
        found = [model(batch[:, :-1], batch[:, 1:]) for batch in tokens]
        losses.append([loss.item() for loss in found])
        mean = mean_gradient(found, [weights] * world_size)
        with torch.no_grad():
            for i, weight in enumerate(weights):
                weight.sub_(lr * make_update(mean, momenta, i))
    return losses


def train_sharded(answer, world_size, steps, lr=0.01):
    """Trains by `answer` on simulated ranks. Returns the losses, (step, rank), those of the
    parent, and how many entries each rank sent per step."""
    models = [new_model() for _ in range(world_size)]
    params = [list(model.blocks.parameters()) for model in models]
    momenta = [[torch.zeros_like(weight) for weight in weights] for weights in params]
    ranks, lengths, losses = Ranks(world_size), set(), []
    for tokens in batches(world_size, steps):
        found = [model(batch[:, :-1], batch[:, 1:])
                 for model, batch in zip(models, tokens, strict=True)]
        losses.append([loss.item() for loss in found])
        mean = mean_gradient(found, params)

        def work(rank, mean=mean):
            made, calls, weights = [], [], list(params[rank])

            def own_update(index):
                owner = index % world_size
                assert owner == rank, (
                    f"rank {rank} of {world_size} asks for the update of matrix {index}, which"
                    f" belongs to rank {owner}; each rank makes its own updates only")
                made.append(index)
                return make_update(mean, momenta[rank], index)

            def all_gather(chunk):
                calls.append(len(chunk))
                return ranks.all_gather(rank, chunk)

            try:
                answer(rank, world_size, weights, own_update, all_gather, lr)
            except (RuntimeError, IndexError) as problem:
                if isinstance(problem, threading.BrokenBarrierError):
                    raise
                why = "" if "view size" in str(problem) else (
                    "; the chunk of each rank holds that rank's updates only, the first at place 0")
                raise AssertionError(
                    f"your step fails on rank {rank} of {world_size} ({problem}){why}") from None
            lengths.update(calls)
            assert len(calls) <= 1, (
                f"rank {rank} of {world_size} called all_gather {len(calls)} times in a step; one"
                " chunk should carry all of its updates, because each message costs a start")
            assert all(new is old for new, old in zip(weights, params[rank], strict=True)), (
                "your step puts new tensors into `weights`, but the model keeps the old ones;"
                " change each in place: weights[i].sub_(...)")
            assert made == list(range(rank, len(mean), world_size)), (
                f"rank {rank} of {world_size} made the updates {made}; it owns"
                f" {list(range(rank, len(mean), world_size))}, each to be made once")

        ranks.run(work)
    return losses, losses_of_one(world_size, steps, lr), lengths


def check_gather_step(answer):
    sizes = [weight.numel() for weight in new_model().blocks.parameters()]
    for world_size, steps in ((1, 2), (13, 1), (3, 16)):
        losses, expected, lengths = train_sharded(answer, world_size, steps)
        for step, (came, wanted) in enumerate(zip(losses, expected, strict=True)):
            for rank in range(world_size):
                why = ("every rank must move every matrix, by the part of its owner's chunk that"
                       " holds it" if world_size > 1 else
                       "a single rank owns every matrix, so look at the subtraction itself:"
                       " weight - lr * update, once, with the update in its matrix's shape")
                assert abs(came[rank] - wanted[rank]) < 1e-5, (
                    f"in a world of {world_size}, after {step} steps, rank {rank} has loss"
                    f" {came[rank]:.4f}, the parent {wanted[rank]:.4f} on the same tokens; {why}")
        longest = max(sum(sizes[rank::world_size]) for rank in range(world_size))
        assert max(lengths) <= longest, (
            f"right losses, but the chunks of {world_size} ranks have {max(lengths)} entries; the"
            f" rank that owns most has {longest}, and no chunk need be longer")
    first, last = sum(losses[0]) / 3, sum(losses[-1]) / 3
    print(f"3 ranks trained for 16 steps: loss {first:.3f} -> {last:.3f}, as the parent's. Each\n"
          f"sent {2 * longest} entries a step; a ring that sums sends {4 * sum(sizes) // 3}.")


# ---- 3: even shares ----


def owners(costs, world_size):
    load = [0] * world_size
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


def _in_turn(costs, world_size):
    return [i % world_size for i in range(len(costs))]


def _in_a_row(costs, world_size):
    return [i * world_size // len(costs) for i in range(len(costs))]


def _light_ones_too_early(costs, world_size):
    load, owner = [0] * world_size, []
    for cost in costs:
        owner.append(load.index(min(load)))
        load[owner[-1]] += cost
    return owner


def _in_sorted_order(costs, world_size):
    return owners(sorted(costs, reverse=True), world_size)


def check_owners(answer):
    layer = [1, 1, 1, 1, 3, 3]  # relative cost of Q, K, V, O, up and down
    for world_size in (8, 6, 5, 7, 12):
        costs = 12 * layer
        try:
            owner = [int(rank) for rank in answer(list(costs), world_size)]
        except TypeError:
            raise AssertionError("expected a list with one rank per matrix, as a number") from None
        assert len(owner) == len(costs), (
            f"expected an owner for each of {len(costs)} matrices, got {len(owner)}"
        )
        assert set(owner) <= set(range(world_size)), (
            f"expected ranks from 0 to {world_size - 1}, got {sorted(set(owner))}"
        )
        load = [0] * world_size
        for rank, cost in zip(owner, costs, strict=True):
            load[rank] += cost
        share = max(load) * world_size / sum(costs)
        assert share < 1.051, (
            f"expected no rank above 1.05 even shares with {world_size} ranks, got {share:.2f}:"
            f" rank {load.index(max(load))} has matrices of cost {max(load)}, an even share is"
            f" {sum(costs) / world_size:.1f} (owners[i] is the owner of costs[i])"
        )
    again = [int(rank) for rank in answer(list(costs), world_size)]
    assert again == owner, (
        "expected the same owners on every call, got others; ranks that disagree about an owner"
        " lose a matrix or count it twice"
    )


EXERCISES = {
    "1": dict(
        check=check_busiest,
        hints=[
            "Each layer has six matrices. What does that do to i mod 6?",
            "Work per layer is 1 + 1 + 1 + 1 + 3 + 3 = 10 in units of a square matrix.",
            "Find the kind that rank 4 owns in every layer, and its cost; then a sixth of 10.",
            "Rank 4 does 3 units per layer. An even share is 10 / 6 units. Divide.",
        ],
        solution=1.8,
        wrong=[1, 2, 3.0, 0.3, 12],
    ),
    "2": dict(
        check=check_gather_step,
        hints=[
            "Every rank knows the owner and the size of every matrix. So each can tell what stands"
            " where in the chunk of another rank.",
            "chunk_r = the updates i with i mod R = r, one behind the other, then zeros up to"
            " max over r of the sum of n_i with i mod R = r; n_i is the number of entries of"
            " matrix i.",
            "Sizes; the longest chunk; zeros; fill in your own with a running place (reshape(-1)"
            " flattens a transposed view too); gather; for each rank's chunk walk over its"
            " matrices with a running place from zero, and subtract lr times the part.",
            "for r, part in enumerate(all_gather(chunk)):\n    place = 0\n"
            "    for i in range(r, len(weights), world_size):\n"
            "        weights[i].sub_(lr * part[place : place + sizes[i]].view_as(weights[i]))\n"
            "        place += sizes[i]",
        ],
        solution=gather_step,
        wrong=[_chunks_of_own_length, _only_its_own, _in_model_order, _makes_all, _whole_buffer,
               _one_gather_per_matrix, _place_runs_on, _new_tensors, _upwards, _stays_away],
    ),
    "3": dict(
        check=check_owners,
        hints=[
            "If you hand out the heavy matrices last, can light ones still even out the loads?",
            "Largest first, always to the least loaded: at most 4/3 - 1/(3R) of the best possible"
            " (R. L. Graham, 1969).",
            "Sort the indices by falling cost; keep a list of loads; give each matrix to the rank"
            " with the smallest load, and add its cost there.",
            "for i in sorted(range(len(costs)), key=lambda i: -costs[i]):\n"
            "    owner[i] = load.index(min(load))\n    load[owner[i]] += costs[i]",
        ],
        solution=owners,
        wrong=[_in_turn, _in_a_row, _light_ones_too_early, _in_sorted_order],
    ),
}
