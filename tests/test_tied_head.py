"""Embedding and head as one table that parts, small parameters, and a loss with further targets,
since 11.

Run: .venv/bin/python -m pytest tests/test_tied_head.py
"""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

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
from speedrun.run.log import read_log
from test_optimizers import World, make_adam
from test_updates import having

SIZES = dict(total_batch_size=64, val_tokens=32)


def random_model(module):
    """A micro model with random weights, and a batch."""
    torch.manual_seed(0)
    model = module.GPT(micro_sizes(module))
    for param in model.parameters():
        if param.ndim >= 2:
            torch.nn.init.normal_(param, std=0.2)
    tokens = torch.randint(60, (2, 17))
    return model, tokens[:, :-1], tokens[:, 1:]


# ---- 11: one table, then two ----


@where("last_tied_step", "Hyperparameters", known="tied")
def test_when_the_tables_part(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["tied"]
    assert module.last_tied_step(module.Hyperparameters()) == known["last_step"]
    for scheduled in range(30, 60):  # the first step from two thirds on at which Adam moves
        args = module.Hyperparameters(scheduled_steps=scheduled)
        assert module.last_tied_step(args) == math.ceil(2 * scheduled / 3) | 1


@where("GPT", "Head", known="tied")
def test_the_gradient_of_the_table_is_the_sum_of_both(milestone):
    model, inputs, targets = random_model(load_snapshot(milestone))
    model.double()
    head, embed = model.lm_head.weight, model.embed.weight
    embed.data = torch.randn_like(embed)  # is not read while tied
    tied = model(inputs, targets, tied=True)
    tied.backward()
    assert embed.grad is None
    found, head.grad = head.grad, None
    embed.data = head.detach().clone()
    loss = model(inputs, targets)
    loss.backward()
    torch.testing.assert_close(loss, tied)
    torch.testing.assert_close(found, head.grad + embed.grad)
    assert head.grad.any() and embed.grad.any()


@where("GPT", "Head", known="tied")
def test_both_tables_start_equal_and_small(milestone):
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    model = module.GPT(micro_sizes(module, vocab_size=2000))
    head, embed = model.lm_head.weight, model.embed.weight
    assert head.equal(embed) and head.data_ptr() != embed.data_ptr()
    assert head.std().item() == pytest.approx(0.005, rel=0.01)


@where("ShardedAdam", known="tied")
def test_a_duplicate_moves_as_its_source(milestone, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "dist", World().dist)
    source, target = (torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    adam = make_adam(module, [source, target], lr=0.1)
    for _ in range(3):
        source.grad = torch.randn(4, 3)
        adam.step()  # the target has no gradient
    assert target not in adam.state
    adam.duplicate(source, target)
    assert source.equal(target)
    for _ in range(3):
        source.grad = torch.randn(4, 3)
        target.grad = source.grad.clone()
        adam.step()
        assert source.equal(target)
    target.grad = -source.grad
    adam.step()
    assert not adam.state[source]["mean"].equal(adam.state[target]["mean"])
    assert not source.equal(target)


@where("train", "validate", "GPT", "ShardedAdam", known="tied")
def test_a_run_parts_the_tables_after_its_last_tied_step(
        milestone, shards, tmp_path, monkeypatch):
    module, models, steps, given = load_snapshot(milestone), [], [], []
    set_schedules = module.set_schedules

    class Noted(module.GPT):
        def forward(self, inputs, targets=None, tied=False, *more):
            given.append((self.training, tied))
            return super().forward(inputs, targets, tied, *more)

    def noted(optimizers, step, args):  # before the step
        head, embed = models[0].lm_head.weight, models[0].embed.weight
        states = [deepcopy(optimizers[0].state.get(table)) for table in (head, embed)]
        steps.append((embed.grad is not None, head.equal(embed), states))
        set_schedules(optimizers, step, args)

    monkeypatch.setattr(module, "GPT", lambda args: models.append(Noted(args)) or models[0])
    monkeypatch.setattr(module, "set_schedules", noted)
    args = micro_args(milestone, shards, tmp_path / "log", **SIZES, val_loss_every=1,
                      scheduled_steps=6, train_steps=9, kernel_warmup_steps=0)
    train(module, args)
    assert module.last_tied_step(args) == 5
    read, equal, states = zip(*steps, strict=True)
    assert read == 6 * (False,) + 3 * (True,)
    # Adam moves the head at steps 1, 3 and 5, then both at step 7.
    assert equal == 2 * (True,) + 4 * (False,) + 2 * (True,) + (False,)
    assert [state[1] is None for state in states] == 6 * [True] + 3 * [False]
    head, embed = states[6]
    assert head["step"] == embed["step"] == 3
    assert head["mean"].equal(embed["mean"]) and head["mean"].any()
    assert head["mean_square"].equal(embed["mean_square"])
    assert not states[8][0]["mean"].equal(states[8][1]["mean"])
    for training in (False, True):  # the validation before step 6 reads the duplicate already
        tied = [tied for other, tied in given if other == training]
        assert tied == 6 * [True] + (4 - training) * [False]


@where("warm_up", "GPT", known="tied")
def test_the_warm_up_visits_one_table_and_two(milestone, shards, tmp_path, monkeypatch):
    module, models, given = load_snapshot(milestone), [], set()

    class Noted(module.GPT):
        def forward(self, inputs, targets=None, tied=False, *more):
            weights, *prefixes = more or [[1.0]]
            given.add((tied, len(weights) - len(prefixes)))
            return super().forward(inputs, targets, tied, *more)

    monkeypatch.setattr(module, "GPT", lambda args: models.append(Noted(args)) or models[0])
    monkeypatch.setattr(module, "train", lambda *_: None)
    steps = module.Hyperparameters().kernel_warmup_steps
    module.main(micro_args(milestone, shards, tmp_path / "log", **SIZES, kernel_warmup_steps=steps,
                           scheduled_steps=60))
    several = "target_weights" in known_values(milestone.id)
    stages = {(True, 3), (True, 2), (False, 1)} if several else {(True, 1), (False, 1)}
    assert stages <= given
    assert models[0].lm_head.weight.equal(models[0].embed.weight)  # all is restored


# ---- 11a: small parameters under Adam ----

small = where("make_optimizers", "ShardedAdam", known="adam_groups")


@small
def test_which_memory_rate_and_decay_a_parameter_has(milestone, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "dist", World().dist)
    model = module.GPT(args := micro_sizes(module))
    adam, _ = module.make_optimizers(model, args)
    expected = known_values(milestone.id)["adam_groups"]
    names, seen = {id(param): name for name, param in model.named_parameters()}, set()
    for group in adam.param_groups:
        for param in group["params"]:
            first, *_, last = (name := names[id(param)]).split(".") * 2
            rate, betas, decay = expected[first]
            seen.add(name)
            found = group["lr"], group["betas"], group["weight_decay"] / 0.005
            decay = 0 if last == "bias" else decay
            assert found == (rate, tuple(betas), pytest.approx(decay)), name
            assert group["replicated"] == ("embed" not in first and first != "lm_head")
    assert seen == {name for name in names.values() if "blocks." not in name or ".mix_net." in name}
    assert {name.split(".")[0] for name in seen} == expected.keys()


@small
def test_adam_moves_by_the_rate_and_a_longer_memory_ignores_more_noise(milestone, monkeypatch):
    module = load_snapshot(milestone)
    monkeypatch.setattr(module, "dist", World().dist)
    for betas, noise in (((0.65, 0.95), 0.46), ((0.9, 0.99), 0.23)):
        steady = torch.nn.Parameter(torch.zeros(8))
        adam = make_adam(module, [steady], lr=0.1, betas=betas)
        for step in range(1, 6):
            steady.grad = torch.tensor([1e-3, 1, -1, 5, 1e3, -7, 2, 3])
            adam.step()
            torch.testing.assert_close(steady.detach(), -0.1 * step * steady.grad.sign())
        torch.manual_seed(0)
        noisy = torch.nn.Parameter(torch.zeros(4000))
        adam = make_adam(module, [noisy], lr=1.0, betas=betas)
        for _ in range(60):
            before, noisy.grad = noisy.detach().clone(), torch.randn(4000)
            adam.step()
        assert (noisy - before).std().item() == pytest.approx(noise, abs=0.03)


def small_parameters(id, overrides):
    """A rank's parameters after a run, and how far those that all ranks compute have moved."""
    module, models = load_snapshot(MANIFEST.get(id)), []
    GPT = module.GPT
    module.GPT = lambda args: models.append(GPT(args)) or models[0]
    train(module, module.Hyperparameters(**overrides))
    torch.manual_seed(overrides.get("seed", 0))
    start = dict(GPT(models[0].args).named_parameters())
    return {name: (param.detach().numpy().tobytes(), (param - start[name]).abs().max().item())
            for name, param in models[0].named_parameters()}


@pytest.mark.parametrize(
    "milestone", declaring("ShardedAdam", known="adam_groups")[:1], ids=by_id)
def test_copies_of_two_ranks_stay_equal_to_the_last_bit(milestone, shards, tmp_path):
    overrides = micro_overrides(
        milestone, shards, tmp_path / "log", total_batch_size=128, val_tokens=64, train_steps=8,
        val_loss_every=0, scalar_lr=0.04, gate_lr=0.008, smear_gate_lr=8e-5)
    (first, _), (second, _) = start_ranks(2, small_parameters, milestone.id, overrides)
    assert first == second
    for name in ("scalars", "x0_weights", "smear_gate", "attention_gates"):
        assert first[name][1] > 0, name


# ---- 11b: further targets; 11c: a cap of another shape ----

losing = where("GPT", "cross_entropy", known="toy")


@losing
def test_known_losses_and_gradients(milestone, monkeypatch):
    module, toy = load_snapshot(milestone), known_values(milestone.id)["toy"]
    model, inputs, _ = random_model(module)
    logits = torch.tensor(toy["logits"], requires_grad=True, dtype=torch.float32)
    targets = torch.tensor(toy["targets"])

    def loss_of(rows, targets):
        if known_values(milestone.id).get("head_in_loss"):
            K, V = len(toy["weights"]), rows.size(-1)
            return handles(module).loss(
                module, rows.flatten(0, 1), torch.eye(V), module.next_targets(targets, K),
                torch.tensor(toy["weights"]), model.cap)
        monkeypatch.setattr(model.lm_head, "forward", lambda x: rows)
        mean = model(inputs[: len(targets), : targets.size(1)], targets,
                     target_weights=torch.tensor(toy["weights"]))
        return mean * targets.numel()

    model.train()
    for start in range(3):  # a row that begins later has the same losses of its tokens
        loss = loss_of(logits[None, start:], targets[None, start:])
        # up to six logarithms near 20, whose last digit in float32 is 2e-6
        assert loss.item() == pytest.approx(sum(toy["losses"][start:]), abs=6e-6)
    (gradient,) = torch.autograd.grad(loss_of(logits[None], targets[None]), logits)
    torch.testing.assert_close(gradient, torch.tensor(toy["gradients"]), rtol=0, atol=2e-6)
    two = loss_of(torch.stack((logits, logits)), torch.stack((targets, targets)))
    assert two.item() == pytest.approx(2 * sum(toy["losses"]), abs=1.2e-5)


@where("GPT", known="cap")
@torch.no_grad()
def test_the_cap(milestone, monkeypatch):
    module = load_snapshot(milestone)
    logits, capped = torch.tensor(known_values(milestone.id)["cap"]["capped"]).T
    model, inputs, _ = random_model(module)
    monkeypatch.setattr(model.lm_head, "forward", lambda x: logits.expand(*x.shape[:2], -1))
    for training in (True, False):
        found = model.train(training)(inputs)
        torch.testing.assert_close(found, capped.expand_as(found), rtol=0, atol=2e-6)


@losing
@torch.no_grad()
def test_one_target_is_the_usual_cross_entropy(milestone):
    model, inputs, targets = random_model(load_snapshot(milestone))
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(inputs, targets), expected)
    torch.testing.assert_close(
        model(inputs, targets, target_weights=torch.tensor([1.0])), expected)


@where("target_weights", "Hyperparameters", known="target_weights")
def test_weights_of_targets(milestone):
    module = load_snapshot(milestone)
    args, known = module.Hyperparameters(), known_values(milestone.id)["target_weights"]
    some = module.Hyperparameters(**known["run"])  # for which they are known
    for step, expected in known["steps"]:
        assert module.target_weights(step, some) == pytest.approx(expected, abs=1e-8)
    totals = [sum(module.target_weights(step, args)) for step in range(args.train_steps)]
    assert totals == sorted(totals, reverse=True)
    assert (totals[0], totals[-1]) == (known["total"], 1)


@pytest.mark.parametrize(
    "milestone", having("target_weights(step", "train", "validate", "GPT"), ids=by_id)
def test_the_log_has_the_loss_that_is_trained_and_validation_the_next_tokens(
        milestone, shards, tmp_path, monkeypatch):
    module, trained, plain, validated = load_snapshot(milestone), [], [], []

    class Noted(module.GPT):
        def forward(self, inputs, targets, *more):
            loss = super().forward(inputs, targets, *more)
            with torch.no_grad():
                logits = super().forward(inputs, None, more[0])
            usual = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
            (plain if self.training else validated).append(usual)
            trained.extend([loss.item()] * self.training)
            return loss

    monkeypatch.setattr(module, "GPT", Noted)
    losses = train(module, micro_args(
        milestone, shards, tmp_path / "log", total_batch_size=64, val_tokens=32, train_steps=9,
        scheduled_steps=9, kernel_warmup_steps=0))
    assert losses == pytest.approx(validated, abs=1e-5)
    logged = [loss for _step, loss in read_log(tmp_path / "log" / "log.txt").train_curve]
    assert logged == pytest.approx(trained, abs=6e-5)
    ratios = [loss / usual for loss, usual in zip(trained, plain, strict=True)]
    assert ratios[0] == pytest.approx(1.75, abs=0.1)  # a few targets lie beyond their rows
    assert ratios[3] == pytest.approx(1.5, abs=0.1) and ratios[6:] == pytest.approx(3 * [1.0])
