"""Weights in bfloat16 since 12, whose lower 16 bits stay with the rank that updates them.

Run: .venv/bin/python -m pytest tests/test_bfloat16_weights.py
"""

import pytest
import torch

from snapshots import (
    MANIFEST,
    by_id,
    declaring,
    known_values,
    load_snapshot,
    micro_args,
    micro_sizes,
    train,
    tried,
    where,
)
from test_optimizers import World
from test_updates import having, matrices_of, optimizers_of_main

RUN = dict(bf16=True, total_batch_size=64, val_tokens=32, val_loss_every=1, train_steps=4)

IN_BFLOAT16 = having("", "join_bits", "GPT", "Muon", "make_optimizers")
in_bfloat16 = pytest.mark.parametrize("milestone", IN_BFLOAT16, ids=by_id)
in_halves = where("join_bits", "split_bits", "cautious_update", known="bits")


def hexadecimal(halves):
    """16-bit numbers as they are read, without a sign."""
    return [f"{bits & 0xFFFF:04X}" for bits in halves.view(torch.int16).flatten().tolist()]


# ---- the two halves ----


@in_halves
def test_known_bits(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["bits"]
    weights = torch.tensor([[known["weights"]]], dtype=torch.bfloat16)
    assert hexadecimal(weights) == [f"{bits:04X}" for bits in known["before"]]
    remainders = torch.zeros(1, 1, 4, dtype=torch.int16)
    place, updates = weights.data_ptr(), torch.tensor([[known["updates"]]])
    module.cautious_update(weights, updates, known["rate"], known["decay"], remainders)
    assert weights.data_ptr() == place and weights.dtype == torch.bfloat16  # in place
    assert hexadecimal(weights) == [f"{bits:04X}" for bits in known["weights_after"]]
    assert hexadecimal(remainders) == [f"{bits:04X}" for bits in known["remainders_after"]]
    joined = module.join_bits(weights, remainders)
    assert joined.dtype == torch.float32
    assert joined.flatten().tolist() == pytest.approx(known["after"], rel=1e-7, abs=5e-9)


@in_halves
def test_halves_join_to_the_same_bits(milestone):
    module = load_snapshot(milestone)
    bits = torch.randint(-(2**31), 2**31, (4, 6, 50), generator=torch.Generator().manual_seed(0))
    some = [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 1.0, -1.0, 3.4e38, 1 + 2**-23, 1 - 2**-24, 2**-7]
    for numbers in (bits.int().view(torch.float32), torch.tensor(some)):
        upper, lower = module.split_bits(numbers)
        assert upper.dtype == torch.bfloat16 and lower.element_size() == 2
        assert module.join_bits(upper, lower).view(torch.int32).equal(numbers.view(torch.int32))
        finite = numbers.isfinite()
        cut, exact = upper[finite].double(), numbers[finite].double()
        assert (cut.abs() <= exact.abs()).all()  # towards zero, by less than a unit
        normal = exact.abs() > 1.2e-38
        assert ((exact - cut).abs() < 2**-7 * exact.abs())[normal].all()
    assert upper[1].item() == 0 and upper[1].signbit()


@in_halves
def test_a_thousand_small_updates_are_lost_in_bfloat16_alone(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    weights = ((0.5 + torch.rand(2, 6, 9)) * torch.randn(2, 6, 9).sign()).bfloat16()
    weights[0, 0, :2] = torch.tensor([0.0, -0.0])  # near zero there are enough numbers
    large = weights != 0
    start, alone, exact = weights.clone(), weights.clone(), weights.float()
    remainders, lost = torch.zeros_like(weights, dtype=torch.int16), 0
    for _ in range(1000):
        updates = torch.randn(2, 6, 9) + start.sign()
        module.cautious_update(exact, updates, 1e-4, 0.05)
        module.cautious_update(weights, updates, 1e-4, 0.05, remainders)
        joined = module.join_bits(weights, remainders)
        assert joined.view(torch.int32).equal(exact.view(torch.int32))
        moved = alone.float()
        module.cautious_update(moved, updates, 1e-4, 0.05)
        lost += (alone == moved.bfloat16())[large].sum().item()
        alone = moved.bfloat16()
    assert exact.isfinite().all() and weights.equal(module.split_bits(exact)[0])
    assert lost == 1000 * large.sum()  # every update is below half a unit
    distance = (exact - start.float()).abs()[large]
    assert distance.min() > 0.08 and alone[large].equal(start[large])
    assert exact[~large].abs().min() > 0


# ---- Muon ----


def muon_of(module, dtype, world, bf16=True):
    """A micro model's matrices in this dtype, some of them -0, and their Muon; the products are
    those of bf16."""
    torch.manual_seed(0)
    model = module.GPT(args := micro_sizes(module, bf16=False))
    for block in model.blocks:
        block.bfloat16().to(dtype)  # alike, also where it is exact
        block.mlp.c_proj.data.neg_()
    args.bf16 = bf16
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "dist", world.dist)
        return module.make_optimizers(model, args)[1]


def steps_of(module, muon, world, count):
    """Takes steps with gradients that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "dist", world.dist)
        for _ in range(count):
            for param in matrices_of(muon):
                grad = torch.randn(param.shape, generator=generator).bfloat16()
                param.grad = grad.to(param.dtype)
            muon.step()


@where("join_bits", "split_bits", "cautious_update", "Muon", known="bits")
def test_a_rank_has_the_weights_of_a_run_in_float32(milestone):
    module = load_snapshot(milestone)
    for rank, world_size in ((0, 1), (1, 3)):
        worlds = World(rank, world_size), World(rank, world_size)
        halves, exact = (muon_of(module, dtype, world) for dtype, world in zip(
            (torch.bfloat16, torch.float32), worlds, strict=True))
        for muon, world in zip((halves, exact), worlds, strict=True):
            steps_of(module, muon, world, 5)
        for name in ("reduce_scatter", "all_gather"):  # half the bytes
            sizes, others = (world.sizes[name] for world in worlds)
            assert [2 * size for size in sizes] == others and sizes
        for group, weights, others in zip(
                halves.param_groups, halves.weights, exact.weights, strict=True):
            own, expected = (whole.chunk(world_size)[rank] for whole in (weights, others))
            state = halves.state[group["params"][0]]
            joined = module.join_bits(own, state["remainders"])
            assert joined.view(torch.int32).equal(expected.view(torch.int32))
            assert not own.equal(expected.bfloat16()), "some are cut where they would be rounded"
            if world_size == 1:
                params = torch.cat([param.detach().flatten() for param in group["params"]])
                assert params.equal(weights.flatten())


@where("join_bits", "split_bits", "cautious_update", "Muon", known="bits")
def test_momenta_and_means_stay_in_float32(milestone):
    module, world = load_snapshot(milestone), World()
    for dtype in (torch.bfloat16, torch.float32):
        muon = muon_of(module, dtype, world, bf16=dtype == torch.bfloat16)
        steps_of(module, muon, world, 2)
        for group in muon.param_groups:
            state, parts = muon.state[group["params"][0]], []
            for name, kept in state.items():
                if name != "remainders":
                    parts += [kept] if torch.is_tensor(kept) else kept
            assert {part.dtype for part in parts} == {torch.float32} and len(parts) >= 2
            if dtype == torch.bfloat16:
                assert state["remainders"].dtype == torch.int16
                assert state["remainders"].shape == state["momentum_buffer"].shape
            else:
                assert "remainders" not in state


# ---- runs ----


@in_bfloat16
def test_which_weights_are_bfloat16(milestone):
    module, models = load_snapshot(milestone), []
    for bf16 in (True, False):
        torch.manual_seed(0)
        models.append(dict(module.GPT(micro_sizes(module, bf16=bf16)).named_parameters()))
    halves, exact = models
    assert all(param.dtype == torch.float32 for param in exact.values())
    for name, param in halves.items():
        expected = torch.bfloat16 if "." in name else torch.float32  # gates and scalars
        assert param.dtype == expected, name
        assert param.equal(exact[name].to(param.dtype)), "initial weights are rounded once"


@pytest.mark.parametrize(
    "milestone", [IN_BFLOAT16[0], *tried(IN_BFLOAT16[1:])], ids=by_id)
def test_after_the_warm_up_no_remainder_is_left(milestone, shards, tmp_path, monkeypatch):
    module = load_snapshot(milestone)
    losses = [train(module, micro_args(
        milestone, shards, tmp_path / str(steps), **RUN, kernel_warmup_steps=steps))
        for steps in (0, 3)]
    assert losses[0] == losses[1] and len(set(losses[0])) > 2
    monkeypatch.setattr(module, "train", lambda *_: None)
    args = micro_args(milestone, shards, tmp_path / "log", **RUN, kernel_warmup_steps=3)
    model, muon, _ = optimizers_of_main(module, args)
    assert not muon.state
    torch.manual_seed(args.seed)
    for param, start in zip(model.parameters(), module.GPT(args).parameters(), strict=True):
        assert param.equal(start) and param.dtype == start.dtype


@pytest.mark.parametrize("milestone", declaring("join_bits")[:1], ids=by_id)
def test_without_bfloat16_it_is_the_parent(milestone, shards, tmp_path):
    parent = MANIFEST.get(milestone.parent)
    sizes = dict(total_batch_size=128, val_tokens=64, val_loss_every=5)
    memory = dict(head_beta1=0.65, value_embed_beta1=0.65, adam_eps=8e-8)  # the parent's
    expected = train(load_snapshot(parent), micro_args(
        parent, shards, tmp_path / "parent", **sizes))
    assert expected == train(load_snapshot(milestone), micro_args(
        milestone, shards, tmp_path / "log", **sizes, **memory))
    assert expected[0] - expected[-1] > 0.5
