"""Parts of the snapshots against tables of known values: models, optimizers, schedules, loader.

Run: .venv/bin/python -m pytest tests/test_parts.py
"""

import json
import math
import os
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.distributed as dist

from snapshots import WRITTEN, by_id, load_snapshot, micro_args, micro_overrides, run_ranks

BY_ID = {milestone.id: milestone for milestone in WRITTEN}
snapshots = pytest.mark.parametrize("milestone", WRITTEN, ids=by_id)


@pytest.fixture
def m00():
    return load_snapshot(BY_ID["00"])


@pytest.fixture
def m01():
    return load_snapshot(BY_ID["01"])


# ---- whole models ----

TENSORS = {"00": 50, "01": 49, "02": 73, "03": 73, "04": 99, "05": 99}
# Of the records' init at full size, on uniform tokens. From 02 on the blocks are identities at
# first and the logit of the input token is sqrt(768) |E[token]| = 16, all others are N(0, 1/3).
INITIAL_LOSS = {
    "00": (10.94, 11.05), "01": (10.90, 11.03), "02": (15.95, 16.05), "03": (15.95, 16.05),
    **dict.fromkeys(("04", "05"), (10.8258, 10.8259)),  # ln 50304: the head is zero
}


@snapshots
def test_parameter_count(milestone):
    module = load_snapshot(milestone)
    with torch.device("meta"):
        model = module.GPT(module.Hyperparameters())
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == milestone.parameters
    assert len(parameters) == TENSORS[milestone.id]


@snapshots
def test_initial_loss_at_full_size(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    model = module.GPT(module.Hyperparameters(compile=False, bf16=False)).eval()
    tokens = torch.randint(50257, (1025,))
    with torch.no_grad():
        loss = model(tokens[None, :-1], tokens[None, 1:]).item()
    low, high = INITIAL_LOSS[milestone.id]
    assert low < loss < high


@snapshots
def test_defaults_are_the_records(milestone):
    args = load_snapshot(milestone).Hyperparameters()
    assert args.total_batch_size == milestone.tokens_per_step
    assert args.train_steps == milestone.train_steps
    assert args.total_batch_size == 8 * args.micro_batch_size * args.seq_len  # 8 GPUs, one go each
    assert args.val_tokens == 10_485_760


BETAS = dict(adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
MUON = dict(muon_lr=3.6e-4, muon_momentum=0.95, adam_lr=3.6e-3, weight_decay=0.0, **BETAS)
UNTIED = dict(muon_lr=0.04, muon_momentum_start=0.85, muon_momentum=0.95, embed_lr=0.6,
              head_lr=0.008, scalar_lr=0.04, cooldown_steps=900, momentum_warmup_steps=500, **BETAS)
RATES = {
    "00": dict(adam_lr=1.5e-3, weight_decay=0.1, warmup_steps=256, **BETAS),
    "01": dict(cooldown_steps=1800, **MUON),
    **dict.fromkeys(("02", "03"), dict(cooldown_steps=1450, **MUON)),
    "04": UNTIED,
    "05": {**UNTIED, "muon_lr": 0.05, "adam_beta1": 0.8, "cooldown_steps": 640,
           "momentum_warmup_steps": 300, "window_start": 64, "window_end": 1792},
}


@snapshots
def test_rates_are_the_records(milestone):
    args = asdict(load_snapshot(milestone).Hyperparameters())
    assert RATES[milestone.id].items() <= args.items()
    rates = {name for name in args if name.endswith(("_lr", "_steps", "beta1", "beta2", "decay"))}
    assert rates - {"train_steps", "kernel_warmup_steps"} <= RATES[milestone.id].keys()


@pytest.mark.slow
@pytest.mark.skipif("RUN_SLOW" not in os.environ, reason="a minute each; set RUN_SLOW=1 to run it")
@snapshots
def test_full_size_trains(milestone, shards, tmp_path):
    module = load_snapshot(milestone)
    overrides = micro_overrides(milestone, shards, tmp_path)
    kept = ("train_files", "val_files", "log_dir", "warmup_steps", "cooldown_steps")
    losses = module.main(module.Hyperparameters(
        **{name: value for name, value in overrides.items() if name in kept},
        seq_len=1024, micro_batch_size=1, total_batch_size=1024, val_tokens=1024, train_steps=2,
        kernel_warmup_steps=0, compile=False, bf16=False,
    ))
    assert losses[-1][1] < losses[0][1] - 0.1


# ---- the small deterministic model; its values come from the records' own arithmetic ----


def small_model(module, amplitude):
    """Two layers of width 16; tensor k holds amplitude * sin(0.37 i + k). Returns the model and a
    batch of 2 x 8 tokens."""
    args = module.Hyperparameters(
        vocab_size=64, num_layers=2, num_heads=2, model_dim=16, seq_len=8, compile=False, bf16=False
    )
    model = module.GPT(args)
    with torch.no_grad():
        matrices = [param for param in model.parameters() if param.ndim == 2]
        if model.lm_head.weight is not model.embed.weight:  # the head comes second
            matrices.insert(1, matrices.pop())
        for k, param in enumerate(matrices):
            index = torch.arange(param.numel(), dtype=torch.float64)
            param.copy_((amplitude * torch.sin(0.37 * index + k)).view_as(param))
    tokens = torch.tensor([(5 * i * i + 3 * i + 1) % 64 for i in range(17)])
    return model, tokens[:-1].view(2, 8), tokens[1:].view(2, 8)


def small_optimizers(module, model):
    """The milestone's optimizers at the record's learning rates, without a schedule."""
    betas = (0.9, 0.95)
    if hasattr(module, "NormalizedAdamW"):
        adamw = module.NormalizedAdamW
        return [adamw(model.parameters(), lr=1.5e-3, betas=betas, eps=1e-8, weight_decay=0.1)]
    if not dist.is_initialized():  # from 03 on Muon asks for its rank; conftest.py cleans up
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if hasattr(module, "muon_momentum"):
        scalars = [param for param in model.parameters() if param.ndim < 2]
        adam = torch.optim.Adam([
            dict(params=[model.embed.weight], lr=0.6), dict(params=scalars, lr=0.04),
            dict(params=[model.lm_head.weight], lr=0.008),
        ], betas=betas)
        muon_lr = 0.04
    else:
        adam = torch.optim.AdamW([model.embed.weight], lr=3.6e-3, betas=betas, weight_decay=0.0)
        muon_lr = 3.6e-4
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    return [adam, module.Muon(matrices, lr=muon_lr, momentum=0.95, bf16=False, compile=False)]


SMALL_LOSS = {
    "00": {0.1: 4.190855, 0.5: 4.410321}, "01": {0.1: 4.178563, 0.5: 4.389413},
    "02": {0.5: 4.17032}, "03": {0.5: 4.17032},
    **dict.fromkeys(("04", "05"), {0.5: 4.53226}),  # no document begins among the tokens
}
SMALL_TRAINING = {
    **dict.fromkeys(("02", "03"), [4.17032, 4.11120, 4.05333, 3.99674, 3.94143, 3.88739, 3.83460]),
    "00": [4.41032, 4.36508, 4.32142, 4.27922, 4.23839, 4.19881, 4.16040],
    **dict.fromkeys(("04", "05"), [4.53226, 4.08818, 3.89353, 3.75444, 3.62450, 3.47965, 3.37756]),
    "01": [4.38941, 4.32751, 4.26684, 4.20763, 4.14999, 4.09395, 4.03954],
}
# Q (or QKV), attention out, MLP up, MLP down of layer 0, and the tied table
SMALL_GRADIENTS = {
    **dict.fromkeys(("02", "03"), [0.073948, 0.040525, 0.022987, 0.233198, 0.942402]),
    **dict.fromkeys(("04", "05"), [0.043586, 0.063554, 0.068352, 0.410978, 0.072631]),
    "00": [0.070062, 0.040204, 0.033690, 0.348524, 0.975286],
    "01": [0.457269, 0.134459, 0.083626, 0.310217, 1.097911],
}


@snapshots
def test_small_loss(milestone):
    for amplitude, expected in SMALL_LOSS[milestone.id].items():
        model, inputs, targets = small_model(load_snapshot(milestone), amplitude)
        assert model(inputs, targets).item() == pytest.approx(expected, abs=6e-6)


@snapshots
def test_small_gradients(milestone):
    model, inputs, targets = small_model(load_snapshot(milestone), 0.5)
    model(inputs, targets).backward()
    block = model.blocks[0]
    attention_in = block.attn.c_qkv if hasattr(block.attn, "c_qkv") else block.attn.c_q
    weights = [attention_in, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj, model.embed]
    norms = [layer.weight.grad.norm().item() for layer in weights]
    assert norms == pytest.approx(SMALL_GRADIENTS[milestone.id], abs=2e-6)


@snapshots
def test_small_training(milestone):
    module = load_snapshot(milestone)
    model, inputs, targets = small_model(module, 0.5)
    optimizers, losses = small_optimizers(module, model), []
    for step in range(len(SMALL_TRAINING[milestone.id])):
        if hasattr(module, "muon_momentum"):
            args = module.Hyperparameters(momentum_warmup_steps=500)  # of 04
            momentum = module.muon_momentum(step, args)
            optimizers[1].param_groups[0]["momentum"] = momentum
        loss = model(inputs, targets)
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    assert losses == pytest.approx(SMALL_TRAINING[milestone.id], abs=1e-5)


def test_00_attention_factor_is_a_literal(m00):
    model, inputs, targets = small_model(m00, 0.5)
    assert {block.attn_scale for block in model.blocks} == {1 / math.sqrt(24)}
    for block in model.blocks:
        block.attn_scale = 1 / math.sqrt(2 * 2)
    assert model(inputs, targets).item() == pytest.approx(4.674772, abs=2e-6)


def test_01_first_moves(m01):
    model, inputs, targets = small_model(m01, 0.5)
    block = model.blocks[0]
    weights = [block.attn.c_qkv.weight, block.mlp.c_proj.weight, model.embed.weight]
    before = [weight.detach().clone() for weight in weights]
    model(inputs, targets).backward()
    for optimizer in small_optimizers(m01, model):
        optimizer.step()
    moves = [(w - b).flatten()[:3].tolist() for w, b in zip(weights, before, strict=True)]
    assert moves[0] == pytest.approx([1.633e-4, 1.261e-4, 7.17e-5], abs=1e-7)
    assert moves[1] == pytest.approx([-5.11e-5, 1.127e-4, 9.72e-5], abs=1e-7)
    assert moves[2] == pytest.approx([-3.6e-3, 3.6e-3, 3.6e-3], abs=1e-6)


# ---- init ----


def test_00_init(m00):
    torch.manual_seed(0)
    model = m00.GPT(m00.Hyperparameters(num_layers=1))
    assert model.lm_head.weight is model.embed.weight
    for table in (model.embed, model.pos_embed):
        assert table.weight.std().item() == pytest.approx(0.02, rel=0.01)
    check_linear_init(model.blocks[0])


def test_01_init(m01):
    torch.manual_seed(0)
    model = m01.GPT(m01.Hyperparameters(num_layers=1))
    assert model.lm_head.weight is model.embed.weight
    assert model.embed.weight.abs().max().item() == pytest.approx(0.0360844, rel=1e-3)
    assert model.embed.weight.std().item() == pytest.approx(0.0208333, rel=0.01)
    check_linear_init(model.blocks[0])


def check_linear_init(block):
    """Uniform within 1 / sqrt(fan_in): 0.0360844 for a width of 768, 0.0180422 for 3072."""
    for layer in (block.attn.c_qkv, block.attn.c_proj, block.mlp.c_fc):
        assert layer.weight.abs().max().item() == pytest.approx(0.0360844, rel=1e-3)
    assert block.mlp.c_proj.weight.abs().max().item() == pytest.approx(0.0180422, rel=1e-3)


# ---- layers ----


@snapshots
def test_norm(milestone):
    norm = load_snapshot(milestone).norm
    epsilon = 1e-6 if milestone.id in ("00", "01") else 2.0**-23
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 1e-3]])
    expected = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


GELU = [-0.158655, -0.154269, 0.345731, 0.841345, 1.954500]
ACTIVATION = {"00": GELU, "01": GELU}  # at -1, -0.5, 0.5, 1, 2; from 02 on squared ReLU


@snapshots
def test_activation(milestone):
    module = load_snapshot(milestone)
    mlp = module.MLP(module.Hyperparameters(model_dim=1))
    with torch.no_grad():
        mlp.c_fc.weight.copy_(torch.tensor([[1.0], [0], [0], [0]]))
        mlp.c_proj.weight.copy_(torch.tensor([[1.0, 0, 0, 0]]))
        values = mlp(torch.tensor([[-1.0], [-0.5], [0.5], [1.0], [2.0]])).flatten().tolist()
    expected = ACTIVATION.get(milestone.id, [0, 0, 0.25, 1, 4])
    assert values == pytest.approx(expected, abs=1e-6)


def test_01_rotary_values(m01):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 101, 1, 4)
    rotated = m01.Rotary(head_dim=4, seq_len=101)(x)[0, :, 0]
    known = {
        0: [1.0, 2.0, 3.0, 4.0],
        1: [3.064715, 2.039899, 0.779436, 3.979800],
        2: [2.311745, 2.079595, -2.157738, 3.959203],
        100: [-0.656778, 4.446489, 3.093322, 0.478267],
    }
    for position, values in known.items():
        assert rotated[position].tolist() == pytest.approx(values, abs=2e-5)


def test_01_rotary_is_relative(m01):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 64)
    rotary = m01.Rotary(head_dim=64, seq_len=50)
    queries, keys = rotary(query.expand(1, 50, 1, 64)), rotary(key.expand(1, 50, 1, 64))
    scores = torch.einsum("bthd,bshd->ts", queries, keys)
    torch.testing.assert_close(scores[7:, 7:], scores[:-7, :-7], rtol=0, atol=2e-4)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(1, 50, 1))


def test_01_tables_are_not_saved(m01):
    model = m01.GPT(m01.Hyperparameters(num_layers=1))
    assert not [name for name in model.state_dict() if "rotary" in name]


@pytest.fixture
def fresh02():
    """Milestone 02's small model as it is initialised, and a batch of 2 x 8 tokens."""
    torch.manual_seed(0)
    module = load_snapshot(BY_ID["02"])
    args = module.Hyperparameters(
        vocab_size=64, num_layers=2, num_heads=2, model_dim=32, seq_len=8, compile=False, bf16=False
    )
    tokens = torch.randint(60, (2, 9))
    return module, module.GPT(args), tokens[:, :-1], tokens[:, 1:]


def test_02_starts_as_the_identity(fresh02):
    module, model, inputs, targets = fresh02
    logits = model(inputs)
    expected = module.norm(model.embed(inputs)) @ model.embed.weight.T  # as if there were no blocks
    torch.testing.assert_close(logits, expected)


def test_02_first_gradients(fresh02):
    module, model, inputs, targets = fresh02
    model(inputs, targets).backward()
    for block in model.blocks:
        for layer in (block.attn.c_q, block.attn.c_k, block.attn.c_v, block.mlp.c_fc):
            assert not layer.weight.grad.any()
        for layer in (block.attn.c_proj, block.mlp.c_proj):
            assert layer.weight.grad.any()
    assert model.embed.weight.grad[60:].any(dim=1).all()  # rows of no token: in the denominator


def test_02_attention_scores_are_bounded(fresh02, monkeypatch):
    module, model, inputs, targets = fresh02
    seen = []

    def spy(q, k, v, **kwargs):
        seen.append((q, k))
        return v

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.c_q.weight.mul_(1e3)
            model(inputs)
    for q, k in seen:  # (B, H, T, D), each of unit RMS
        assert q.shape == (2, 2, 8, 16)
        for x in (q, k):
            rms = x.square().mean(-1).sqrt()
            torch.testing.assert_close(rms, torch.ones_like(rms), rtol=0, atol=1e-5)


def test_02_norm_and_rotation_commute():
    module = load_snapshot(BY_ID["02"])
    torch.manual_seed(0)
    rotary, q = module.Rotary(head_dim=128, seq_len=100), torch.randn(1, 100, 2, 128)
    difference = rotary(module.norm(q)) - module.norm(rotary(q))
    assert difference.abs().max() < 1e-6


@pytest.fixture(params=["04", "05"])
def fresh04(request):
    """The small model of 04 or a descendant as it is initialised, and a batch of 2 x 8 tokens."""
    torch.manual_seed(0)
    module = load_snapshot(BY_ID[request.param])
    args = module.Hyperparameters(
        vocab_size=64, num_layers=4, num_heads=2, model_dim=32, seq_len=8, compile=False, bf16=False
    )
    tokens = torch.randint(64, (2, 9))
    return module, module.GPT(args), tokens[:, :-1], tokens[:, 1:]


def test_04_gradients_arrive_one_layer_after_the_other(fresh04):
    module, model, inputs, targets = fresh04
    optimizers = small_optimizers(module, model)
    names = {
        "head": ["lm_head.weight"],
        "out": ["embed.weight"] + [f"blocks.{i}.{part}.c_proj.weight"
                                   for i in range(4) for part in ("attn", "mlp")],
    }
    moved = []
    for _ in range(3):
        model.zero_grad()
        model(inputs, targets).backward()
        # what Adam or Muon would make of round-off is not what this test is about
        moved.append({n for n, p in model.named_parameters() if p.grad.abs().max() > 1e-7})
        for optimizer in optimizers:
            optimizer.step()
    assert moved[0] == set(names["head"])
    matrices = {name for name, param in model.named_parameters() if param.ndim == 2}
    assert moved[1] & matrices == {*names["head"], *names["out"]}
    assert moved[2] & matrices == matrices
    assert model.blocks[0].attn.value_lambda.grad.abs() < 1e-7  # mixes a value with itself
    assert model.blocks[1].attn.value_lambda.grad.abs() > 1e-7


def test_04_scalars_do_not_matter_at_first(fresh04):
    module, model, inputs, targets = fresh04
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    before = model(inputs, targets)
    with torch.no_grad():
        for block in model.blocks:
            block.lambdas.copy_(torch.tensor([0.7, 0.4]))
            block.attn.value_lambda.fill_(0.2)
        model.skip_weights.copy_(torch.tensor([0.3, 2.0]))
    torch.testing.assert_close(model(inputs, targets), before)


def test_04_skips_are_last_in_first_out(fresh04):
    module, model, inputs, targets = fresh04
    seen = []  # the input and the output of each block

    def count(number):
        def forward(x, first_v, x0, *mask):
            seen.append((x.clone(), x + number))
            return x + number, "the first values"
        return forward

    for number, block in enumerate(model.blocks, start=1):
        block.forward = count(10.0**number)
    with torch.no_grad():
        model.skip_weights.copy_(torch.tensor([0.5, 0.25]))
        model(inputs)
    torch.testing.assert_close(seen[2][0], seen[1][1] + 0.5 * seen[1][1])
    torch.testing.assert_close(seen[3][0], seen[2][1] + 0.25 * seen[0][1])


def test_04_values_are_mixed_with_the_first_layers(fresh04, monkeypatch):
    module, model, inputs, targets = fresh04
    mixed = []

    def spy(q, k, v, **kwargs):
        mixed.append(v.transpose(1, 2))
        return v

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.value_lambda.fill_(0.25)
        model(inputs)
    x = module.norm(module.norm(model.embed(inputs)))  # all that a block sees at init
    raw = [block.attn.c_v(x).view(2, 8, 2, 16) for block in model.blocks]
    for layer in range(4):
        torch.testing.assert_close(mixed[layer], 0.75 * raw[layer] + 0.25 * raw[0])


def test_04_softcap(fresh04, monkeypatch):
    module, model, inputs, targets = fresh04
    values = torch.tensor([0.0, 1, -1, 5, 10, 15, 30, 40, 60])
    monkeypatch.setattr(model.lm_head, "forward", lambda x: values)
    expected = [0, 0.999630, -0.999630, 4.954212, 9.645383, 13.863515, 22.847825, 26.101849,
                28.920827]
    assert model(inputs).tolist() == pytest.approx(expected, abs=1e-5)


def test_04_dtypes():
    module = load_snapshot(BY_ID["04"])
    with torch.device("meta"):
        model = module.GPT(module.Hyperparameters(bf16=True))
    stored = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(stored) == 26
    assert all(name.split(".")[-1] in ("value_lambda", "lambdas", "skip_weights") for name in
               stored - {"embed.weight"})
    others = {p.dtype for name, p in model.named_parameters() if name not in stored}
    assert others == {torch.float32}


@pytest.mark.parametrize("shape, rms", [
    ((768, 768), 1.333e-3), ((3072, 768), 1.374e-3), ((768, 3072), 6.868e-4),
])
def test_04_muon_moves(shape, rms):
    module = load_snapshot(BY_ID["04"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(shape))
    param.grad = torch.randn(shape)
    module.Muon([param], lr=0.04, momentum=0.95, bf16=True, compile=False).step()
    assert param.square().mean().sqrt().item() == pytest.approx(rms, rel=0.01)


# ---- optimizers ----


def test_00_gradients_have_unit_norm(m00):
    def moved(scale):
        param = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = m00.NormalizedAdamW([param], lr=1e-2, eps=1e-8, weight_decay=0.1)
        param.grad = scale * torch.arange(12.0).view(3, 4)
        optimizer.step()
        norm = param.grad.norm().item()
        return param.detach(), norm

    for scale in (1e-2, 1.0, 1e3):
        param, norm = moved(scale)
        assert norm == pytest.approx(1, abs=1e-4)
        torch.testing.assert_close(param, moved(1.0)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(moved(0.0)[0], torch.full((3, 4), 1 - 1e-3))  # decay alone, no NaN


def exact(m01, matrix):
    return m01.newton_schulz(torch.as_tensor(matrix, dtype=torch.float64), dtype=torch.float64)


def test_01_newton_schulz_known_matrix(m01):
    matrix = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    expected = torch.tensor([[-0.568290, 0.057742, 0.683774], [0.563355, 0.405613, 0.247871]])
    torch.testing.assert_close(exact(m01, matrix), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(exact(m01, matrix.T), expected.T, rtol=0, atol=2e-6)
    torch.testing.assert_close(m01.newton_schulz(matrix), expected, rtol=0, atol=1e-5)
    rounded = m01.newton_schulz(matrix, dtype=torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - expected).abs().max() < 0.03
    singular_values = torch.linalg.svdvals(exact(m01, matrix)).tolist()
    assert singular_values == pytest.approx([0.920395, 0.700027], abs=2e-6)
    torch.testing.assert_close(
        exact(m01, torch.diag(torch.tensor([3.0, 1.0]))).diag(),
        torch.tensor([0.753033, 1.133706]), rtol=0, atol=2e-6,
    )


@pytest.mark.parametrize("start, end", [
    (1e-4, 0.048473), (0.01, 0.698917), (0.1, 0.712120), (0.5, 0.765439),
])
def test_01_newton_schulz_on_one_singular_value(m01, start, end):
    matrix = torch.diag(torch.tensor([start, math.sqrt(1 - start**2)], dtype=torch.float64))
    assert exact(m01, matrix)[0, 0].item() == pytest.approx(end, abs=2e-6)


def test_01_newton_schulz_band(m01):
    # What is above 0.003 after the division by the Frobenius norm must land in the band, whatever
    # the shape; 0.0041 lands at its upper end.
    torch.manual_seed(0)
    values = torch.cat([torch.linspace(0.003, 0.15, 59, dtype=torch.float64), torch.ones(1)])
    values[1] = 0.0041
    values[-1] = (1 - values[:-1].square().sum()).sqrt()
    left, right = (torch.linalg.qr(torch.randn(n, 60, dtype=torch.float64))[0] for n in (60, 90))
    for matrix in (left @ values.diag() @ right.T, right @ values.diag() @ left.T):
        found = torch.linalg.svdvals(exact(m01, matrix))
        assert found.min() > 0.6818 - 1e-4
        assert 1.2 < found.max() < 1.2024 + 1e-4
        # the singular vectors stay: left' X right is diagonal
        rotated = left.T.float() @ (exact(m01, matrix) if matrix.shape[0] == 60 else
                                    exact(m01, matrix).T) @ right.float()
        torch.testing.assert_close(rotated, rotated.diag().diag(), rtol=0, atol=1e-4)


def test_01_newton_schulz_ignores_scale_and_survives_zero(m01):
    torch.manual_seed(0)
    matrix = torch.randn(8, 5)
    torch.testing.assert_close(m01.newton_schulz(1e3 * matrix), m01.newton_schulz(matrix))
    assert m01.newton_schulz(torch.zeros(4, 6)).equal(torch.zeros(4, 6))


def test_01_nesterov_momentum(m01):
    buffer = torch.zeros(2, 2)
    m01.nesterov_update(torch.diag(torch.tensor([3.0, 1.0])), buffer, momentum=0.95)
    update = m01.nesterov_update(torch.tensor([[0.0, 1], [1, 0]]), buffer, momentum=0.95)
    torch.testing.assert_close(buffer, torch.tensor([[2.85, 1], [1, 0.95]]))
    torch.testing.assert_close(update, torch.tensor([[2.7075, 1.95], [1.95, 0.9025]]))
    expected = torch.tensor([[0.277594, 0.661848], [0.661848, -0.335039]])
    torch.testing.assert_close(exact(m01, update), expected, rtol=0, atol=2e-6)


# RMS of a full-rank update relative to the learning rate, on random gradients
@pytest.mark.parametrize("shape, rms", [
    ((768, 768), 0.924), ((3072, 768), 0.951), ((768, 3072), 0.952), ((2304, 768), 0.925),
])
def test_01_muon_moves_by_unit_rms(m01, shape, rms):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(shape))
    param.grad = torch.randn(shape)
    m01.Muon([param], lr=0.5, momentum=0.95, bf16=True, compile=False).step()
    assert param.square().mean().sqrt().item() == pytest.approx(0.5 * rms, rel=0.01)


def test_01_muon_treats_q_k_v_apart(m01):
    torch.manual_seed(0)
    fused = torch.nn.Parameter(torch.zeros(24, 8))
    fused.grad = torch.randn(24, 8) * torch.tensor([1.0, 100.0, 0.01]).repeat_interleave(8)[:, None]
    thirds = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    for third, grad in zip(thirds, fused.grad.split(8), strict=True):
        third.grad = grad.clone()
    for params in ([fused], thirds):
        m01.Muon(params, lr=0.1, momentum=0.95, bf16=False, compile=False).step()
    torch.testing.assert_close(fused.detach(), torch.cat(thirds).detach())


def test_03_worked_example(tmp_path):
    # Two ranks, three matrices: what each rank writes and what both apply.
    source = tmp_path / "example.py"
    source.write_text(WORKED_EXAMPLE.format(script=BY_ID["03"].script), encoding="utf-8")
    ended = run_ranks(2, source, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    files = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    moves = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    wide = [-0.984307, 0.100012, 1.184331, 0.975759, 0.702542, 0.429325]
    tall = [-0.984307, 0.975759, 0.100012, 0.702542, 1.184331, 0.429325]
    for move in moves:
        assert move == pytest.approx([1.064950, 0, 0, 1.603303, *wide, *tall], abs=1e-4)


WORKED_EXAMPLE = """
import importlib.util, json, sys, torch, torch.distributed as dist
from pathlib import Path
spec = importlib.util.spec_from_file_location("train_gpt", r"{script}")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
dist.init_process_group("gloo")
grads = [torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([[1.0, 2, 3], [4, 5, 6]])]
grads.append(grads[1].T)
params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
for param, grad in zip(params, grads):
    param.grad = grad.clone()
module.Muon(params, lr=1.0, momentum=0.95, bf16=False, compile=False).step()
moves = json.dumps([-x for param in params for x in param.flatten().tolist()])
Path(sys.argv[1], f"rank{{dist.get_rank()}}.json").write_text(moves, encoding="utf-8")
dist.barrier()
dist.destroy_process_group()
"""


def test_01_muon_has_the_matrices_of_the_blocks(m01, shards, tmp_path, monkeypatch):
    groups = []
    init = m01.Muon.__init__

    def spy(self, params, **kwargs):
        groups.append(params)
        init(self, params, **kwargs)

    monkeypatch.setattr(m01.Muon, "__init__", spy)
    m01.main(micro_args(BY_ID["01"], shards, tmp_path / "log", train_steps=1))
    shapes = sorted(tuple(param.shape) for param in groups[0])
    assert shapes == sorted(2 * [(96, 32), (32, 32), (128, 32), (32, 128)])


# ---- schedules ----

LR_TABLE = {
    "00": {0: 5.859e-6 / 1.5e-3, 127: 0.5, 255: 1.0, 256: 1.0, 1000: 1.45828 / 1.5,
           12416: 0.81818 / 1.5, 24575: 0.136420 / 1.5},
    "01": {0: 1.0, 4399: 1.0, 4400: 1.0, 4401: 0.999444, 5300: 0.5, 6199: 1 / 1800},
    "04": {0: 1.0, 2100: 1.0, 2101: 0.998889, 2550: 0.5, 2999: 0.001111},
    "05": {0: 1.0, 1110: 1.0, 1111: 0.9984375, 1430: 0.5, 1749: 0.0015625},
    **dict.fromkeys(("02", "03"), {0: 1.0, 3650: 1.0, 3651: 0.999310, 4375: 0.5, 5099: 0.000690}),
}


@snapshots
def test_learning_rate_table(milestone):
    module = load_snapshot(milestone)
    args = module.Hyperparameters()
    for step, expected in LR_TABLE[milestone.id].items():
        assert module.lr_multiplier(step, args) == pytest.approx(expected, rel=1e-4, abs=5e-7)


def test_04_momentum_table():
    module = load_snapshot(BY_ID["04"])
    table = {0: 0.85, 1: 0.8502, 100: 0.87, 250: 0.90, 499: 0.9498, 500: 0.95, 2999: 0.95}
    for step, expected in table.items():
        assert module.muon_momentum(step, module.Hyperparameters()) == pytest.approx(expected)


def test_schedules_without_warmup_or_cooldown(m00, m01):
    assert m00.lr_multiplier(0, m00.Hyperparameters(warmup_steps=0, train_steps=10)) == 1
    args = m01.Hyperparameters(cooldown_steps=0, train_steps=10)
    assert [m01.lr_multiplier(step, args) for step in (0, 9)] == [1, 1]


# ---- data ----


def stream(module, lengths, step_tokens, world_size, count):
    """The first `count` blocks of every rank over shards of consecutive numbers."""
    first, shards = 0, []
    for length in lengths:
        shards.append(np.arange(first, first + length, dtype=np.uint16))
        first += length
    args = module.Hyperparameters(micro_batch_size=2, seq_len=4, vocab_size=1000)
    streams = [
        module.token_batches(shards, step_tokens, args, rank, world_size, "cpu")
        for rank in range(world_size)
    ]
    return [[next(one) for one in streams] for _ in range(count)]


@snapshots
def test_steps_are_cut_before_they_are_dealt(milestone):
    module = load_snapshot(milestone)
    # 65 tokens hold two steps of 32 and the last target; 64 hold one (the second lacks a target).
    alone = [batches[0] for batches in stream(module, (65, 64), 32, world_size=1, count=14)]
    starts = [inputs[0, 0].item() for inputs, _ in alone]
    assert starts == [0, 8, 16, 24, 32, 40, 48, 56, 65, 73, 81, 89, 0, 8]
    for inputs, targets in alone:
        assert inputs.shape == targets.shape == (2, 4) and inputs.dtype == torch.int64
        assert inputs.flatten().tolist() == list(range(inputs[0, 0], inputs[0, 0] + 8))
        assert (targets - inputs).unique().tolist() == [1]
    dealt = [b for batches in stream(module, (65, 64), 32, world_size=2, count=7) for b in batches]
    assert [inputs[0, 0].item() for inputs, _ in dealt] == starts


@snapshots
def test_shards_are_mapped_not_read(milestone, shards):
    opened = load_snapshot(milestone).open_shards(f"{shards}/*_train_*.bin", 1024)
    assert [len(shard) for shard in opened] == [7_000, 9_500]
    assert all(isinstance(shard, np.memmap) for shard in opened)


@snapshots
def test_no_rank_drifts_at_the_end_of_a_shard(milestone):
    # 381 steps of 262,144 tokens come out of a shard of 100,000,000 and 190 of 524,288, on every
    # rank alike: the first shard holds zeros, the second ones.
    module = load_snapshot(milestone)
    args = module.Hyperparameters()
    shards = [np.broadcast_to(np.uint16(token), 100_000_000) for token in (0, 1)]
    for rank in (0, 7):
        batches = module.token_batches(shards, args.total_batch_size, args, rank, 8, "cpu")
        steps = 0
        while next(batches)[0][0, 0] == 0:
            steps += 1
        assert steps == {"00": 381}.get(milestone.id, 190)
