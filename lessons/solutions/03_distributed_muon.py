"""Checks, hints and solutions of the exercises in lessons/03_distributed_muon.ipynb."""

import torch

# ---- 1: six ranks ----


def check_busiest(answer):
    value = float(answer)
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


# ---- 2: the flat buffer ----


def flat_buffer(rank, world_size, grads, orthogonalize):
    flat = torch.zeros(sum(grad.numel() for grad in grads))
    offset = 0
    for i, grad in enumerate(grads):
        if i % world_size == rank:
            flat[offset : offset + grad.numel()] = orthogonalize(grad).reshape(-1)
        offset += grad.numel()
    return flat


def _offset_of_owned_only(rank, world_size, grads, orthogonalize):
    flat = torch.zeros(sum(grad.numel() for grad in grads))
    offset = 0
    for i, grad in enumerate(grads):
        if i % world_size == rank:
            flat[offset : offset + grad.numel()] = orthogonalize(grad).reshape(-1)
            offset += grad.numel()
    return flat


def _every_rank_does_all(rank, world_size, grads, orthogonalize):
    return torch.cat([orthogonalize(grad).reshape(-1) for grad in grads])


def _own_updates_only(rank, world_size, grads, orthogonalize):
    owned = [orthogonalize(grad).reshape(-1) for grad in grads[rank::world_size]]
    return torch.cat(owned) if owned else torch.zeros(0)


def _orthogonalizes_all(rank, world_size, grads, orthogonalize):
    done = [orthogonalize(grad).reshape(-1) for grad in grads]
    return torch.cat([x if i % world_size == rank else torch.zeros_like(x)
                      for i, x in enumerate(done)])


def check_flat_buffer(answer):
    shapes = [(2, 3), (3, 2), (1, 4), (2, 2), (4, 1)]
    ends = torch.tensor([rows * columns for rows, columns in shapes]).cumsum(0).tolist()
    grads = [(torch.arange(rows * columns) + 10.0 * i + 1).view(rows, columns)
             for i, (rows, columns) in enumerate(shapes)]
    size = ends[-1]
    for world_size in (1, 2, 3, 7):
        for rank in range(world_size):
            seen = []

            def transposed_view(grad, seen=seen):
                seen.append(int(grad.flatten()[0]) // 10)
                return (-grad.T.contiguous()).T  # like Newton-Schulz of a tall matrix

            flat = answer(rank, world_size, grads, transposed_view)
            where = f"rank {rank} of {world_size}"
            assert isinstance(flat, torch.Tensor) and flat.shape == (size,), (
                f"expected a vector of {size} entries from {where}, got"
                f" {tuple(getattr(flat, 'shape', ())) or type(flat).__name__}; the buffer covers"
                " all matrices on every rank, also on one that owns none"
            )
            owned = list(range(rank, len(grads), world_size))
            assert sorted(seen) == owned, (
                f"expected {where} to orthogonalize the matrices {owned}, got {sorted(seen)};"
                " matrix i belongs to rank i mod world_size, and to no other"
            )
            places = [(i, end - grads[i].numel(), end) for i, end in enumerate(ends)]
            for i, start, end in places[rank::world_size]:
                part = flat[start:end].float()
                assert torch.equal(part, -grads[i].flatten()), (
                    f"expected matrix {i} row by row from place {start} in the buffer of {where},"
                    f" got {part.tolist()}; the offset must advance for every matrix, owned or not"
                )
                flat = flat.index_fill(0, torch.arange(start, end), 0)
            assert not flat.any(), (
                f"expected zeros where other ranks' matrices lie in the buffer of {where}, got"
                f" {flat.tolist()} beside its own; the sum would count them once more"
            )


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


def check_owners(answer):
    layer = [1, 1, 1, 1, 3, 3]  # relative cost of Q, K, V, O, up and down
    for world_size in (8, 6, 5, 7, 12):
        costs = 12 * layer
        owner = [int(rank) for rank in answer(list(costs), world_size)]
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
            f"expected no rank above 1.05 even shares with {world_size} ranks, got {share:.2f};"
            " hand out the heavy matrices first, each to the rank with the least work so far"
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
            "Rank 4 does 3 units a layer. An even share is 10 / 6 units. Divide.",
        ],
        solution=1.8,
        wrong=[1, 2, 3.0, 0.3, 12],
    ),
    "2": dict(
        check=check_flat_buffer,
        hints=[
            "Think of a train with one carriage per matrix. You load only your own carriages.",
            "u[o_i : o_i + n_i] = NS(G_i) where i mod R = r, else 0; o_i = n_0 + … + n_(i-1).",
            "Make zeros for all; walk over all matrices with a running offset; fill in your own,"
            " flattened with reshape (a transposed view has no view(-1)); advance the offset"
            " always.",
            "for i, grad in enumerate(grads):\n    if i % world_size == rank:\n"
            "        flat[offset : offset + grad.numel()] = orthogonalize(grad).reshape(-1)\n"
            "    offset += grad.numel()",
        ],
        solution=flat_buffer,
        wrong=[_offset_of_owned_only, _every_rank_does_all, _own_updates_only,
               _orthogonalizes_all],
    ),
    "3": dict(
        check=check_owners,
        hints=[
            "You load boxes into vans. Which boxes do you load first?",
            "Largest first, always to the least loaded: at most 4/3 - 1/(3R) of the best possible"
            " (R. L. Graham, 1969).",
            "Sort the indices by falling cost; keep a list of loads; give each matrix to the rank"
            " with the smallest load, and add its cost there.",
            "for i in sorted(range(len(costs)), key=lambda i: -costs[i]):\n"
            "    owner[i] = load.index(min(load))\n    load[owner[i]] += costs[i]",
        ],
        solution=owners,
        wrong=[_in_turn, _in_a_row, _light_ones_too_early],
    ),
}
