"""Unit-norm gradients, Newton-Schulz and Muon against the values of known.toml (tests/oracle).

Run: .venv/bin/python -m pytest tests/test_optimizers.py
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ranks import start_ranks
from snapshots import (
    MANIFEST,
    by_id,
    declaring,
    handles,
    known_values,
    load_snapshot,
    micro_args,
    record_layers,
    shapes_of,
    where,
)

# ---- unit-norm gradients ----


@where("NormalizedAdamW")
def test_gradients_have_unit_norm(milestone):
    def moved(scale):
        param = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = load_snapshot(milestone).NormalizedAdamW(
            [param], lr=1e-2, eps=1e-8, weight_decay=0.1)
        param.grad = scale * torch.arange(12.0).view(3, 4)
        optimizer.step()
        return param.detach(), param.grad.norm().item()

    for scale in (1e-2, 1.0, 1e3):
        param, norm = moved(scale)
        assert norm == pytest.approx(1, abs=1e-4)
        torch.testing.assert_close(param, moved(1.0)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(moved(0.0)[0], torch.full((3, 4), 1 - 1e-3))  # decay alone, no NaN


# ---- Newton-Schulz, and from 08f on Polar Express ----

orthogonalizing = partial(where, "newton_schulz", "polar_express")


def orthogonalize(module):
    """The function that does it: of matrices and the dtype of its products."""
    return partial(handles(module).orthogonalize, module)


def watch(monkeypatch, module, note):
    """Calls note(matrices) each time that the module orthogonalizes."""
    function = getattr(module, handles(module).ORTHOGONALIZER)

    def spy(matrices, *how, **named):
        note(matrices)
        return function(matrices, *how, **named)

    monkeypatch.setattr(module, handles(module).ORTHOGONALIZER, spy)


def orthogonalized(milestone, matrix, dtype=torch.float64):
    """One matrix, orthogonalized."""
    matrix = torch.as_tensor(matrix, dtype=torch.promote_types(dtype, torch.float32))
    return orthogonalize(load_snapshot(milestone))(matrix[None], dtype)[0]


@orthogonalizing()
def test_known_matrices(milestone):
    known = known_values(milestone.id)["orthogonalized"]
    for pair in known["pairs"]:
        matrix, expected = torch.tensor(pair["input"]), torch.tensor(pair["output"])
        for dtype, atol in ((torch.float64, 2e-6), (torch.float32, known["within_in_float32"]),
                            (torch.bfloat16, known["within_in_bfloat16"])):
            for x, y in ((matrix, expected), (matrix.T, expected.T)):
                found = orthogonalized(milestone, x, dtype)
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), y.double(), rtol=0, atol=atol)
    found = orthogonalized(milestone, known["pairs"][0]["input"])
    singular_values = torch.linalg.svdvals(found).tolist()
    assert singular_values == pytest.approx(known["singular_values"], abs=2e-6)


@orthogonalizing()
def test_one_singular_value(milestone):
    for start, end in known_values(milestone.id)["orthogonalized"]["scalars"]:
        matrix = torch.diag(torch.tensor([start, (1 - start**2) ** 0.5], dtype=torch.float64))
        found = orthogonalized(milestone, 1000 * matrix)  # beside which an epsilon is nothing
        assert found[0, 0].item() == pytest.approx(end, abs=2e-6)


@orthogonalizing()
def test_orthogonalizing_ignores_scale_and_survives_zero(milestone):
    torch.manual_seed(0)
    function, matrices = orthogonalize(load_snapshot(milestone)), torch.randn(3, 8, 5)
    scaled = matrices * torch.tensor([1.0, 1e3, 10]).view(3, 1, 1)  # each by its own norm
    torch.testing.assert_close(function(scaled, torch.float32),
                               function(matrices, torch.float32))
    assert function(torch.zeros(2, 4, 6), torch.float32).equal(torch.zeros(2, 4, 6))


# ---- Muon ----


class World:
    """One of several ranks, alone: the others send zeros."""

    def __init__(self, rank=0, world_size=1):
        self.dist = SimpleNamespace(
            get_rank=lambda: rank, get_world_size=lambda: world_size, all_reduce=self.all_reduce,
            all_gather_into_tensor=self.all_gather_into_tensor, ReduceOp=torch.distributed.ReduceOp,
            reduce_scatter_tensor=self.reduce_scatter_tensor)
        self.rank, self.events = rank, []
        self.reduced, self.gathered = [], []  # the tensors at the end of each exchange
        self.sizes = dict(reduce_scatter=[], all_gather=[], all_reduce=[])  # bytes of the whole

    def all_reduce(self, tensor, async_op=False):
        self.reduced.append(tensor.clone())
        self.sizes["all_reduce"].append(tensor.nbytes)
        return SimpleNamespace(wait=lambda: None) if async_op else None

    def reduce_scatter_tensor(self, own, tensor, async_op):
        world_size = self.dist.get_world_size()
        own.copy_(tensor.chunk(world_size)[self.rank])
        self.sizes["reduce_scatter"].append(tensor.nbytes)
        self.events.append("scattered")
        return SimpleNamespace(wait=lambda: self.events.append("arrived"))

    def all_gather_into_tensor(self, gathered, tensor, async_op):
        tensor = tensor.clone()  # which may be a part of `gathered`
        gathered.zero_()[self.rank * len(tensor) : (self.rank + 1) * len(tensor)] = tensor
        self.gathered.append(gathered.clone())
        self.sizes["all_gather"].append(gathered.nbytes)
        self.events.append("sent")
        return SimpleNamespace(wait=lambda: self.events.append("awaited"))


def step_of_muon(milestone, gradients, lr=1.0, bf16=False, world=None, **group):
    """One step of Muon from zero; returns the parameters and the optimizer. group: what else the
    group of all of them has."""
    module = load_snapshot(milestone)
    params = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "dist", (world or World()).dist)
        some = [dict(params=params, **group)] if group else params
        muon = handles(module).make_muon(module, some, lr, bf16)
        muon.step()
    return [param.detach() for param in params], muon


@where("Muon")
def test_muon_orthogonalizes_matrices_of_one_shape_in_one_batch(milestone, monkeypatch):
    batches = []
    watch(monkeypatch, load_snapshot(milestone), lambda matrices: batches.append([*matrices.shape]))
    step_of_muon(milestone, [torch.ones(shape) for shape in ((4, 4), (8, 4), (4, 4), (4, 8))])
    assert sorted(batches) == known_values(milestone.id)["muon_batches"]


@where("Muon", known="muon_events")
def test_updates_travel_while_the_next_are_computed(milestone, monkeypatch):
    world = World()
    watch(monkeypatch, load_snapshot(milestone), lambda _: world.events.append("computed"))
    step_of_muon(milestone, [torch.ones(4, 4), torch.ones(8, 4)], world=world)
    assert world.events == known_values(milestone.id)["muon_events"]


@orthogonalizing("Muon")
def test_muon_multiplies_by_the_smaller_gram_matrix(milestone):
    def flops(*shape):
        with FlopCounterMode(display=False) as counter:
            step_of_muon(milestone, 3 * [torch.ones(shape)])
        return counter.get_total_flops()

    m, n = 4, 32
    each = 2 * m * m * n + 2 * m**3 + 2 * m * m * n  # XX', AA and BX
    assert flops(m, n) == 3 * 5 * each
    if known_values(milestone.id)["tall"]:
        assert flops(n, m) == 3 * 5 * each


def muon_of_main(milestone, args):
    """What the milestone's main gives to Muon: of each group the names of its parameters and how
    many of them are four matrices; and the shape of every parameter by its name."""
    module, models, given = load_snapshot(milestone), [], []
    init = module.Muon.__init__

    def spy(self, params, **kwargs):
        given.extend(params)
        init(self, params, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module.Muon, "__init__", spy)
        patched.setattr(module, "GPT", lambda args, GPT=module.GPT: models.append(GPT(args)) or
                        models[0])
        module.main(args)
    names = {id(param): name for name, param in models[0].named_parameters()}
    groups = given if isinstance(given[0], dict) else [dict(params=given)]
    return ([([names[id(param)] for param in group["params"]], group.get("num_attentions", 0))
             for group in groups],
            {name: list(param.shape) for name, param in models[0].named_parameters()})


# ---- from 03 on: who orthogonalizes what ----

DISTRIBUTED = declaring("Muon", known="owners")


def remembered(muon):
    """The number of matrices, or of stacks, of which a Muon keeps the momentum."""
    buffers = {param: state["momentum_buffer"] for param, state in muon.state.items()
               if "momentum_buffer" in state}
    return sum(len(buffer) if buffer.ndim > param.ndim else 1 for param, buffer in buffers.items())


@pytest.mark.parametrize("milestone", DISTRIBUTED, ids=by_id)
def test_owners(milestone, monkeypatch):
    entries = []  # that this rank orthogonalizes
    watch(monkeypatch, load_snapshot(milestone), lambda matrices: entries.append(matrices.numel()))
    owners = np.array(known_values(milestone.id)["owners"])
    owners = np.tile(owners, (12 // len(owners), 1)).flatten()  # of 12 layers
    shapes = 12 * known_values(milestone.id)["owned_shapes"]
    gradients = [torch.randn(shape) for shape in shapes]
    filled = 0
    for rank in range(8):
        world = World(rank, 8)
        params, muon = step_of_muon(milestone, gradients, world=world)
        owned = [i for i, move in enumerate(params) if move.any()]
        assert owned == np.flatnonzero(owners == rank).tolist()
        assert remembered(muon) == len(owned)  # it keeps no other momentum
        assert sum(entries) == sum(gradients[i].numel() for i in owned)
        entries.clear()
        updates = world.gathered or world.reduced  # 06f reduces gradients before it gathers
        flat = torch.cat([tensor.flatten() for tensor in updates])
        assert flat.count_nonzero() == flat.numel() // 8  # equal shares, the rest stays zero
        filled = filled + (flat != 0).int()
    assert (filled == 1).all()


@pytest.mark.parametrize("milestone", DISTRIBUTED, ids=by_id)
def test_two_ranks_apply_all_updates(milestone):
    exchange = known_values(milestone.id)["exchange"]
    for moves, _ in start_ranks(2, exchange_updates, milestone.id):
        for move, matrix in zip(moves, exchange, strict=True):
            np.testing.assert_allclose(move, matrix["update"], rtol=0, atol=1e-4)


def exchange_updates(milestone_id):
    """A rank's moves, at a learning rate of 1."""
    module = load_snapshot(MANIFEST.get(milestone_id))
    module.dist.init_process_group("gloo")
    gradients = [torch.tensor(matrix["gradient"], dtype=torch.float32)
                 for matrix in known_values(milestone_id)["exchange"]]
    params = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    handles(module).make_muon(module, params, lr=1.0).step()
    module.dist.destroy_process_group()
    return [(-param).tolist() for param in params]


# ---- from 06f on: gradients that are scattered ----


def make_adam(module, params, lr, betas=(0.8, 0.95), eps=1e-20):
    """The module's ShardedAdam without compiled code, a group for each parameter."""
    return module.ShardedAdam([dict(params=[param], lr=lr) for param in params], betas=betas,
                              eps=eps, compiled=False)


@where("ShardedAdam", "adam_update")
def test_steps_of_adam(milestone, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["adam"]
    monkeypatch.setattr(module, "dist", World().dist)
    for eps, expected in known["cases"]:
        param, found = torch.nn.Parameter(torch.zeros(1)), []
        adam = make_adam(module, [param], known["rate"], known["betas"], eps)
        for gradient in known["gradients"]:
            param.grad = torch.tensor([float(gradient)])
            adam.step()
            found.append(param.item())
        assert found == pytest.approx(expected, abs=6e-7)


@where("ShardedAdam")
def test_rows_of_adam_are_dealt_to_all_ranks(milestone, monkeypatch):
    module, found = load_snapshot(milestone), torch.zeros(16, 3)
    start = torch.arange(10.0, 58).view(16, 3)
    for rank in range(8):
        world, param = World(rank, 8), torch.nn.Parameter(start.clone())
        monkeypatch.setattr(module, "dist", world.dist)
        adam, param.grad = make_adam(module, [param], lr=1), torch.arange(1.0, 49).view(16, 3)
        adam.step()
        (state,) = adam.state.values()
        assert state["mean"].shape == state["mean_square"].shape == (2, 3)
        assert param.any(dim=1).nonzero().flatten().tolist() == [2 * rank, 2 * rank + 1]
        found += param.detach()
    torch.testing.assert_close(found, start - 1)
    param.data = param.data[:15]
    param.grad = torch.ones(15, 3)
    with pytest.raises(AssertionError, match="8 ranks cannot share 15 rows"):
        adam.step()


@where("ShardedAdam", "Muon", "make_optimizers", "coefficient_layout", known="traffic")
def test_what_a_rank_of_eight_exchanges_and_keeps(milestone, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["traffic"]
    args = module.Hyperparameters(bf16=True, compile=False)
    kept = dict(adam_state=0, muon_state=0)
    for rank in (0, 7):
        world = World(rank, 8)
        monkeypatch.setattr(module, "dist", world.dist)
        model = shapes_of(module, args)
        optimizers = module.make_optimizers(model, args)
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        for name, optimizer in zip(kept, optimizers, strict=True):
            optimizer.step()
            tensors = [value for state in optimizer.state.values() for value in state.values()
                       if torch.is_tensor(value)]
            kept[name] = max(kept[name], sum(tensor.nbytes for tensor in tensors))
        assert {name: sizes for name, sizes in world.sizes.items() if name in known} == {
            name: sizes for name, sizes in known.items() if name in world.sizes}
    assert kept == {name: known[name] for name in kept}


@where("Muon", known="filler")
def test_a_rank_without_a_matrix_spoils_no_gradient(milestone):
    for found, _ in start_ranks(2, three_matrices, milestone.id):
        assert found == [-2, -4, -6]


def three_matrices(milestone_id):
    """What a rank's three parameters become in a step of 1 without momentum, orthogonalization and
    waiting: whatever is sent is there at once."""
    module = load_snapshot(MANIFEST.get(milestone_id))
    dist = module.dist
    dist.init_process_group("gloo")

    def at_once(send):
        def sent(*args, async_op=False, **named):
            send(*args, **named)
            return SimpleNamespace(wait=lambda: None)
        return sent

    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, at_once(getattr(dist, name)))
    setattr(module, handles(module).ORTHOGONALIZER, lambda matrices, *_, **__: matrices.clone())
    params = [torch.nn.Parameter(torch.zeros(1, 1)) for _ in range(3)]
    for mean, param in enumerate(params, start=1):
        param.grad = torch.full((1, 1), mean + (dist.get_rank() - 0.5))  # of two ranks
    muon = handles(module).make_muon(module, params, 1.0)
    for group in muon.param_groups:
        group["momentum"] = 0.0
    muon.step()
    dist.destroy_process_group()
    return [param.item() for param in params]


# ---- from 08d on: attention's four matrices in the shape of an MLP's ----


def having_attentions(*subjects):
    """Those with such groups; from 14b on test_updates.py compares matrices of stacks."""
    return [m for m in declaring(*subjects, known="owned_layers")
            if "self.c_qkvo" in m.script.read_text(encoding="utf-8")]


@pytest.fixture
def groups_of_the_record(milestone, shards, tmp_path):
    """Muon's groups for the record's layers, as muon_of_main has them."""
    layers = record_layers(load_snapshot(milestone))
    return muon_of_main(milestone, micro_args(
        milestone, shards, tmp_path / "log", **layers, train_steps=1, total_batch_size=64,
        val_tokens=32, kernel_warmup_steps=0))[0]


@pytest.mark.parametrize("milestone", having_attentions("Muon"), ids=by_id)
def test_shares_of_both_kinds_have_the_same_updates_on_any_number_of_ranks(milestone):
    torch.manual_seed(0)
    module, attentions, gradients = load_snapshot(milestone), 3, 100 * torch.randn(7, 8, 32)
    apart = [matrix for gradient in gradients[:attentions] for matrix in gradient.view(4, 8, 8)]
    expected = torch.cat(
        [orthogonalize(module)(matrix[None], torch.float32).flatten() for matrix in apart]
        + [orthogonalize(module)(gradients[attentions:], torch.float32).flatten()])
    for world_size in (1, 2, 4, 8):  # of which the first three have a rank with both
        worlds = [World(rank, world_size) for rank in range(world_size)]
        moves = [step_of_muon(milestone, gradients, world=world, num_attentions=attentions)[0]
                 for world in worlds]
        found = -torch.stack([torch.stack(some) for some in moves]).sum(0)
        torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("milestone", having_attentions("Muon", "make_optimizers"), ids=by_id)
def test_what_each_of_eight_ranks_owns(milestone, groups_of_the_record):
    names = [name for some, _ in groups_of_the_record for name in some]
    for rank, expected in enumerate(known_values(milestone.id)["owned_layers"]):
        world, owned = World(rank, 8), set()
        for some, attentions in groups_of_the_record:
            params, _ = step_of_muon(
                milestone, torch.ones(len(some), 2, 8), world=world, num_attentions=attentions)
            owned |= {name for name, param in zip(some, params, strict=True) if param.any()}
        assert owned == {name for name in names for part, layers in expected.items()
                         for layer in layers if name.startswith(f"blocks.{layer}.{part}")
                         or name == part}
        # so many parameters have gone through, with filler in the groups of gates alone
        found = [size // (4 * 2 * 8) for size in world.sizes["all_gather"]]
        assert found == [8, 16, 16, 16][-len(groups_of_the_record) :]
