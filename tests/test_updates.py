"""What Muon does to an update since 10: one tensor for all of a group's matrices, neurons that move
alike, a decay that waits for the update's sign, stacks of matrices (14b).

Run: .venv/bin/python -m pytest tests/test_updates.py
"""

import pytest
import torch

from ranks import start_ranks
from snapshots import (
    MANIFEST,
    by_id,
    declaring,
    handles,
    known_values,
    load_snapshot,
    micro_args,
    micro_overrides,
    micro_sizes,
    train,
    where,
)
from speedrun.history.blocks import split_blocks
from test_optimizers import World, make_adam, orthogonalize

SIZES = dict(total_batch_size=128, val_tokens=64, val_loss_every=5)


def having(words, block, *subjects):
    """The milestones at which the block or one of the subjects changed and in whose block of this
    name the words occur."""
    return [milestone for milestone in declaring(block, *subjects) if any(
        found.name == block and words in found.text
        for found in split_blocks(milestone.script.read_text(encoding="utf-8")))]


def optimizers_of_main(module, args):
    """Runs the module's main; returns its model, Muon and the validation losses."""
    made, make_optimizers = [], module.make_optimizers

    def noted(model, args):
        optimizers = make_optimizers(model, args)
        made.extend((model, optimizers[-1]))
        return optimizers

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "make_optimizers", noted)
        losses = train(module, args)
    return *made, losses


def fresh_muon(module, monkeypatch, world=None, **group):
    """A micro model with the record's factors, and its Muon; group: what each of its groups is
    given. Without ranks: `world` stands for the others."""
    monkeypatch.setattr(module, "dist", (world or World()).dist)
    torch.manual_seed(0)
    model = module.GPT(args := micro_sizes(module))
    _, muon = module.make_optimizers(model, args)
    for settings in muon.param_groups:
        settings.update(group)
    return model, args, muon


def matrices_of(muon):
    """The parameters of Muon."""
    return [param for group in muon.param_groups for param in group["params"]]


# ---- 10: a group's matrices are views into one tensor ----


SHARING = having("param.data =", "Muon", "warm_up", "main")
one_tensor = pytest.mark.parametrize("milestone", SHARING, ids=by_id)


def strays(muon):
    """The places of parameters, (group, number), that are no views of their group's tensor, one
    after the other."""
    found = []
    for number, (group, whole) in enumerate(zip(muon.param_groups, muon.weights, strict=True)):
        size = group["params"][0].nbytes
        found += [(number, i) for i, param in enumerate(group["params"])
                  if param.data_ptr() != whole.data_ptr() + i * size or not param.is_contiguous()]
    return found


@one_tensor
def test_after_the_warm_up_matrices_are_views_and_states_are_empty(
        milestone, shards, tmp_path, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "train", lambda *_: None)
    model, muon, _ = optimizers_of_main(module, micro_args(
        milestone, shards, tmp_path / "log", kernel_warmup_steps=2, **SIZES))
    assert strays(muon) == [] and not muon.state
    before = [param.detach().clone() for param in matrices_of(muon)]
    for whole in muon.weights:
        whole.add_(1)
    for param, old in zip(matrices_of(muon), before, strict=True):
        assert param.equal(old + 1)
    assert {id(param) for param in matrices_of(muon)} <= set(map(id, model.parameters()))


@where("warm_up", "optimizers_due")
def test_the_warm_up_leaves_no_gradients(milestone, shards, tmp_path, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "train", lambda *_: None)
    model, *_ = optimizers_of_main(module, micro_args(
        milestone, shards, tmp_path / "log", kernel_warmup_steps=3, **SIZES))
    assert [name for name, param in model.named_parameters() if param.grad is not None] == []


@one_tensor
def test_padding_stays_zero(milestone, monkeypatch):
    module = load_snapshot(milestone)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for rank in range(3):
            _, _, muon = fresh_muon(module, monkeypatch, World(rank, 3))
            for _ in range(2):
                for param in matrices_of(muon):
                    param.grad = torch.randn_like(param)
                muon.step()
            padding = [whole.flatten()[sum(map(torch.numel, group["params"])) :] for group, whole
                       in zip(muon.param_groups, muon.weights, strict=True)]
            assert any(map(len, padding)) and not any(part.any() for part in padding)
            assert all(whole.isfinite().all() for whole in muon.weights)
    finally:
        torch.use_deterministic_algorithms(False)


def train_and_look(id, overrides):
    """A rank's losses and strays after a run."""
    module = load_snapshot(MANIFEST.get(id))
    _, muon, losses = optimizers_of_main(module, module.Hyperparameters(**overrides))
    return losses, strays(muon)


@pytest.mark.parametrize("milestone", SHARING[:1], ids=by_id)
def test_one_tensor_trains_as_many_did(milestone, shards, tmp_path):
    parent = MANIFEST.get(milestone.parent)
    expected = train(load_snapshot(parent), micro_args(
        parent, shards, tmp_path / "parent", **SIZES))
    assert expected[0] - expected[-1] > 0.5
    for world_size in (1, 2):
        overrides = micro_overrides(milestone, shards, tmp_path / str(world_size), **SIZES,
                                    save_checkpoint=True)
        for (losses, found), _ in start_ranks(
                world_size, train_and_look, milestone.id, overrides):
            assert losses == pytest.approx(expected, abs=1e-5) and found == []
    # The checkpoint loads in a model whose matrices never were views: the parent's.
    checkpoint = torch.load(tmp_path / "2" / "checkpoint.pt", weights_only=True)
    plain = load_snapshot(parent).GPT(micro_args(parent, shards, tmp_path))
    plain.load_state_dict(checkpoint["model"])
    assert all(param.isfinite().all() for param in plain.parameters())


# ---- 10a: neurons move alike ----

evening = where("even_out", known="even_out")


@evening
def test_known_updates(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["even_out"]
    state = torch.zeros(1, 1, 2, dtype=torch.float64)  # neurons are columns
    for update, square, evened in zip(
            known["updates"], known["mean_squares"], known["evened"], strict=True):
        found = module.even_out(torch.tensor([update], dtype=torch.float64).mT, state, 0.95)
        assert state.flatten().tolist() == pytest.approx(square, abs=4e-7)
        torch.testing.assert_close(found[0].mT.float(), torch.tensor(evened), rtol=0, atol=6e-7)


@evening
def test_a_matrix_keeps_its_norm_and_its_neurons_become_alike(milestone):
    even_out = load_snapshot(milestone).even_out
    torch.manual_seed(0)
    spread = torch.linspace(0.1, 2, 9)
    updates = torch.randn(3, 5, 9) * spread * torch.tensor([1e-3, 1, 30]).view(3, 1, 1)
    norms = updates.norm(dim=(1, 2))
    for size in (0, 1e-9, 1, 1e4):  # of what is remembered
        state = size * torch.rand(3, 1, 9)
        found = even_out(updates, state, 0.95)
        torch.testing.assert_close(found.norm(dim=(1, 2)), norms)
        if size == 0:  # at the first step all neurons move equally far
            lengths = found.norm(dim=1)
            torch.testing.assert_close(lengths, lengths[:, :1].expand(3, 9))
    state = torch.zeros(3, 1, 9)
    for _ in range(20):  # later only about, as updates differ from the mean
        noisy = updates * (0.9 + 0.2 * torch.rand(3, 1, 9))
        found = even_out(noisy, state, 0.95)
    for after, before in zip(found.norm(dim=1), noisy.norm(dim=1), strict=True):
        assert after.std() / after.mean() < 0.3 * before.std() / before.mean()


@evening
def test_updates_of_zero_and_of_one_neuron_stay_as_they_are(milestone):
    even_out = load_snapshot(milestone).even_out
    state = torch.zeros(2, 1, 4)
    for _ in range(2):
        assert even_out(torch.zeros(2, 3, 4), state, 0.95).equal(torch.zeros(2, 3, 4))
        assert not state.any()
    alone = torch.tensor([[[3.0], [-4.0], [0.5]]])
    torch.testing.assert_close(even_out(alone, torch.tensor([[[0.7]]]), 0.95), alone)
    half = torch.randn(2, 3, 4).bfloat16()  # as Muon's are on a GPU; the memory is exact
    assert even_out(half, state, 0.95).dtype == torch.bfloat16 and state.dtype == torch.float32


def evened(update):
    """A first update (m, n) whose columns got one length, by the definition."""
    columns = update.norm(dim=0)
    return update / columns * (columns.square().mean()).sqrt()


@where("Muon", "make_optimizers", known="even_out")
def test_each_matrix_moves_as_far_as_muon_says_and_its_columns_alike(milestone, monkeypatch):
    module = load_snapshot(milestone)
    model, args, muon = fresh_muon(module, monkeypatch, momentum=0.0, lr=0.1, weight_decay=0.0)
    factors = handles(module).lr_factors(args)
    named = {name: param for name, param in model.named_parameters()
             if any(param is other for other in matrices_of(muon))}
    before = {name: param.detach().clone() for name, param in named.items()}
    for param in named.values():
        param.grad = torch.randn_like(param) * (0.05 + torch.rand(param.size(-1)))
    muon.step()
    for name, param in named.items():
        part = name.split(".")[-1]
        blocks = handles(module).stack(part, param.grad)
        expected = [orthogonalize(module)(block[None], torch.float32)[0] for block in blocks]
        if part in factors:  # gates are left as they are
            expected = [evened(block) for block in expected]
        moved = (before[name] - param.detach()).view(-1, *blocks.shape[1:])
        for found, block in zip(moved, expected, strict=True):
            torch.testing.assert_close(found, 0.1 * factors.get(part, 1) * block,
                                       rtol=1e-3, atol=1e-5)


# ---- 10b: a decay that waits for the update's sign ----


@where("cautious_update", known="cautious_update")
def test_known_weights(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["cautious_update"]
    start, updates = (torch.tensor(known[name], dtype=torch.float64)
                      for name in ("weights", "updates"))
    weights, undecayed = start.clone(), start.clone()
    module.cautious_update(weights, updates, known["rate"], known["decay"])
    assert weights.tolist() == pytest.approx(known["updated"], abs=4e-8)
    module.cautious_update(undecayed, updates, known["rate"], 0.0)
    assert undecayed.equal(start - known["rate"] * updates)
    outward = start * updates < 0  # there it moves exactly as without decay
    assert outward.any() and weights[outward].equal(undecayed[outward])


@where("Muon", "make_optimizers", known="cautious_update")
def test_matrices_without_a_gradient_shrink_by_the_square_of_the_rate(milestone, monkeypatch):
    module = load_snapshot(milestone)
    model, args, muon = fresh_muon(module, monkeypatch)
    rate = 0.7 * args.muon_lr  # the schedule's; it counts twice, the factor once
    strengths = handles(module).lr_factors(args)
    before = {}
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param)
        before[name], param.grad = param.detach().clone(), torch.zeros_like(param)
    for group in muon.param_groups:
        group["lr"] = rate
    muon.step()
    for name, param in model.named_parameters():
        part = name.split(".")[-1]
        if any(param is other for other in matrices_of(muon)):
            strength = rate**2 * strengths.get(part, 1) * args.muon_weight_decay
            moved = (1 - param / before[name]).detach()
            torch.testing.assert_close(
                moved, torch.full_like(moved, strength), rtol=1e-3, atol=2e-7)
        else:
            assert param.equal(before[name])


@where("ShardedAdam", "adam_update", known="cautious_update")
def test_adam_decays_only_where_its_update_leads_to_zero(milestone, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "dist", World().dist)
    start = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, 0.0])
    gradients = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0])
    param = torch.nn.Parameter(start.clone())
    adam, param.grad = make_adam(module, [param], lr=0.1), gradients.clone()
    adam.param_groups[0]["weight_decay"] = 0.5
    adam.step()  # the first step of Adam is as long as the rate
    decay = 0.1**2 * 0.5 * start
    expected = start - 0.1 * gradients - decay * torch.tensor([1, 0, 0, 1, 0, 0])
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=4e-7)


@pytest.mark.parametrize("milestone", declaring("cautious_update")[:1], ids=by_id)
def test_without_decay_it_is_the_parent(milestone, shards, tmp_path):
    parent = MANIFEST.get(milestone.parent)
    parents, undecayed, decayed = (train(load_snapshot(m), micro_args(
        m, shards, tmp_path / str(number), **SIZES, **more)) for number, (m, more) in enumerate((
            (parent, {}), (milestone, dict(muon_weight_decay=0.0)), (milestone, {}))))
    assert undecayed == pytest.approx(parents, abs=1e-5)
    assert decayed != pytest.approx(parents, abs=1e-3)


@pytest.mark.parametrize("milestone", declaring("cautious_update")[:1], ids=by_id)
def test_the_first_two_steps_only_shrink(milestone, shards, tmp_path):
    # The head is zero until Adam's first step, the second: no matrix has a gradient before it.
    module, weights = load_snapshot(milestone), []
    rate = module.Hyperparameters().muon_lr
    for steps in (0, 2):
        model, _, _ = optimizers_of_main(module, micro_args(
            milestone, shards, tmp_path / str(steps), **{**SIZES, "train_steps": steps},
            scheduled_steps=100, muon_lr=rate, muon_weight_decay=1.2))
        weights.append({name: param.detach() for name, param in model.blocks.named_parameters()})
    for name, start in weights[0].items():
        shrunk = {"c_qkvo": 1 - 1.08e-3, "c_fc": 1 - 2.16e-3}.get(name.split(".")[-1], 1)
        torch.testing.assert_close(weights[1][name], start * shrunk**2, rtol=0, atol=4e-7)


# ---- 14b: a group's parameters are stacks of matrices, one of them pairs of heads ----

PAIRED = having("attn.c_qk for", "muon_groups", "Muon")
STACKED = having("cautious_update", "Muon", "muon_groups")  # since 10, which has no decay yet


@pytest.mark.parametrize("milestone", PAIRED[:1], ids=by_id)
@torch.no_grad()
def test_the_parts_are_those_of_the_parents_matrix(milestone):
    module, parent = load_snapshot(milestone), load_snapshot(MANIFEST.get(milestone.parent))
    torch.manual_seed(0)
    model, plain = (one.GPT(micro_sizes(one, num_heads=6, model_dim=48))
                    for one in (module, parent))
    plain.lm_head.weight.normal_()
    weights = plain.state_dict()
    for layer, block in enumerate(plain.blocks):
        if block.attn is not None:
            q, k, v, o = handles(block.attn).matrices(block.attn)
            del weights[f"blocks.{layer}.attn.c_qkvo"]
            weights[f"blocks.{layer}.attn.c_qk"] = torch.stack([  # by pairs (0, 1), (2, 3), (4, 5)
                matrix[first * 8 : (first + 2) * 8] for matrix in (q, k) for first in (0, 2, 4)])
            weights[f"blocks.{layer}.attn.c_vo"] = torch.stack([v, o])
    model.load_state_dict(weights)
    tokens = torch.randint(60, (2, 16))
    torch.testing.assert_close(model(tokens), plain(tokens))


@pytest.mark.parametrize("milestone", PAIRED, ids=by_id)
def test_a_pair_of_heads_is_orthogonal_and_all_six_are_not(milestone, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "dist", World().dist)
    torch.manual_seed(0)
    model = module.GPT(args := micro_sizes(module, num_heads=6, model_dim=96))
    _, muon = module.make_optimizers(model, args)
    for group in muon.param_groups:
        group.update(momentum=0.0, lr=1.0, weight_decay=0.0)
    monkeypatch.setattr(module, "even_out", lambda updates, *_: updates)  # plain Muon
    param = model.blocks[0].attn.c_qk
    assert list(param.shape) == [6, 32, 96]
    before = param.detach().clone()
    for other in matrices_of(muon):
        other.grad = torch.randn_like(other)
    muon.step()
    moved = (before - param.detach()) / args.attention_lr_factor
    values = torch.linalg.svdvals(moved)
    assert values.min() > 0.85 and values.max() < 1.15
    whole = torch.linalg.svdvals(moved.view(2, 96, 96))
    assert whole.min() < 0.5 and whole.max() > 1.5
    torch.testing.assert_close(moved[:3].norm(), torch.tensor(96.0).sqrt(), rtol=0.05, atol=0)


COUNTS = (3, 0, 2, 5)  # matrices of each parameter; 0: it is no stack
RATES = dict(lr=0.1, momentum=0.9, neuron_beta=0.9, weight_decay=0.5)


def stacks_and_gradients():
    """Parameters (4, 8), or stacks of these, and three gradients of each."""
    torch.manual_seed(0)
    shapes = [(count, 4, 8) if count else (4, 8) for count in COUNTS]
    return [torch.randn(shape) for shape in shapes], [
        [torch.randn(shape) for shape in shapes] for _ in range(3)]


def steps_of_stacks(id):
    """A rank's parameters after three steps; ranks have different shares of the gradients."""
    module = load_snapshot(MANIFEST.get(id))
    module.init_distributed()
    rank, world_size = module.dist.get_rank(), module.dist.get_world_size()
    share = (rank + 1) / sum(range(1, world_size + 1))
    weights, gradients = stacks_and_gradients()
    params = [torch.nn.Parameter(weight) for weight in weights]
    factors = [1.0 + i for i in range(len(params))]
    muon = module.Muon([dict(params=params, lr_factors=factors)], bf16=False, compiled=False,
                       use_triton=False, **RATES)
    for some in gradients:
        for param, gradient in zip(params, some, strict=True):
            param.grad = share * gradient
        muon.step()
    module.dist.destroy_process_group()
    return [param.detach().numpy() for param in params]


@pytest.mark.parametrize("milestone", STACKED, ids=by_id)
def test_matrices_of_stacks_move_as_if_alone_on_any_number_of_ranks(milestone):
    module = load_snapshot(milestone)
    weights, gradients = stacks_and_gradients()
    expected = [weight.view(-1, 4, 8) for weight in weights]
    for i, stack in enumerate(expected):
        for j, weight in enumerate(stack):
            momentum, square = torch.zeros(4, 8), torch.zeros(1, 1, 8)
            for some in gradients:
                grad = some[i].view(-1, 4, 8)[j]
                momentum.lerp_(grad, 0.1)
                update = grad.lerp(momentum, 0.9)[None]
                update = orthogonalize(module)(update, torch.float32)
                update = module.even_out(update, square, 0.9)[0]
                module.cautious_update(weight, update, 0.1 * (1 + i), 0.1 * 0.5)
    for world_size in (1, 2, 4):  # shares of 11, 6 and 3 of the 11 matrices
        for found, _ in start_ranks(world_size, steps_of_stacks, milestone.id):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    torch.from_numpy(one).view(-1, 4, 8), other, rtol=0, atol=1e-4)
