"""Models, layers and schedules of the snapshots against known.toml, whose values tests/oracle
computes in float64.

Run: .venv/bin/python -m pytest tests/test_parts.py
"""

import itertools
from dataclasses import asdict

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from snapshots import (
    MILESTONES,
    by_id,
    declaring,
    handles,
    known_values,
    load_snapshot,
    micro_args,
    micro_layers,
    micro_sizes,
    own_values,
    record_layers,
    shapes_of,
    sized,
    train,
    where,
)
from speedrun.history.fields import default_hyperparameters
from speedrun.scripts.sizes import fitting, length_names

# ---- whole models ----


@where("Model")
def test_parameter_count(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)
    parameters = list(shapes_of(module, module.Hyperparameters()).parameters())
    assert sum(p.numel() for p in parameters) == milestone.parameters
    assert len(parameters) == known["tensors"]


@where("Hyperparameters")
def test_defaults_are_the_records(milestone):
    known, args = known_values(milestone.id), load_snapshot(milestone).Hyperparameters()
    missing = object()
    assert {name: value for name, value in known["record"].items()
            if asdict(args).get(name, missing) != value} == {}
    rates = {name for name, value in asdict(args).items() if not isinstance(value, bool) and (
        name.endswith(("_lr", "_decay", "_beta1", "_beta2"))
        or "steps" in name or "momentum" in name or "window" in name)}
    assert rates - {"kernel_warmup_steps"} - known["record"].keys() == set()
    assert args.total_batch_size == milestone.tokens_per_step
    length, val_length = (getattr(args, name) for name in length_names(vars(args)))
    micro_steps = known.get("micro_steps", 1)  # of each of 8 GPUs
    assert args.total_batch_size == micro_steps * 8 * args.micro_batch_size * length
    assert args.val_tokens == 10_485_760 and args.val_tokens % (8 * val_length) == 0


@pytest.mark.slow
@where("Model")
def test_initial_loss_at_full_size(milestone):
    module = load_snapshot(milestone)
    torch.manual_seed(0)
    model = module.GPT(module.Hyperparameters(compile=False, bf16=False))
    tokens = torch.randint(50257, (1025,))
    with torch.no_grad():
        loss = model(tokens[None, :-1], tokens[None, 1:]).item()
    low, high = known_values(milestone.id)["initial_loss"]
    assert low < loss < high


@pytest.mark.slow
@where("Model", "Optimizer")
def test_full_size_trains(milestone, shards, tmp_path):
    module = load_snapshot(milestone)
    micro = micro_args(milestone, shards, tmp_path / "log")
    kept = ("train_files", "val_files", "log_dir", "bos_id", "warmup_steps", "cooldown_steps")
    losses = train(module, module.Hyperparameters(
        **fitting(vars(micro), kept), **sized(dict(seq_len=1024), vars(micro), handles(module)),
        micro_batch_size=1, total_batch_size=1024,
        val_tokens=1024, train_steps=2, kernel_warmup_steps=0, compile=False, bf16=False))
    assert losses[-1] < losses[0] - 0.1


# ---- the small deterministic model, which the known.toml of 00 describes ----

TOKENS = torch.tensor([(5 * i * i + 3 * i + 1) % 64 for i in range(17)])
INPUTS, TARGETS = TOKENS[:-1].view(2, 8), TOKENS[1:].view(2, 8)
SMALL = dict(vocab_size=64, num_layers=2, num_heads=2, model_dim=16, seq_len=8, compile=False,
             bf16=False)
PREFIXES = torch.tensor([v // 2 if v > 1 and v % 3 else -1 for v in range(64)])  # from 14h on


def tensors_of(model, fused_qkv=False):
    """{name: parameters} as known.toml names them; fused_qkv: c_q, c_k and c_v count as one."""
    found = {}
    for name, params in handles(model).tensors(model).items():
        if fused_qkv and name.endswith(("c_q", "c_k", "c_v")):
            name = name[:-3] + "c_qkv"
        found.setdefault(name, []).extend(params)
    return found


def weights_of(model, name):
    """The parameters called `name`."""
    found = tensors_of(model)
    return found[name] if name in found else tensors_of(model, fused_qkv=True)[name]


MOVED = {name for milestone in MILESTONES
         for name in known_values(milestone.id).get("moved_scalars", {})}


def is_scalar(name, param):
    """Whether a parameter is scalars, which keep their first values: it has one dimension, or known
    values move it as such (of a layer's sublayers or heads, say)."""
    return param.ndim < 2 or name in MOVED


@torch.no_grad()
def fill(model, amplitude, fused_qkv=False, vectors=False):
    """Fills tensor k with amplitude * sin(0.37 i + k); vectors: all tensors count, not only the
    matrices, and weights of norms, of one dimension, become 1 more. Bigrams' signs are those of
    cos(2.2 i)."""
    found = {name: params for name, params in tensors_of(model, fused_qkv).items()
             if vectors or not is_scalar(name, params[0])}
    # These come first, embed before the head.
    names = [name for name in ("embed", "lm_head") if name in found]
    for k, name in enumerate(dict.fromkeys([*names, *found])):
        weights = found[name]
        index = torch.arange(sum(map(torch.numel, weights)), dtype=torch.float64)
        values = amplitude * torch.sin(0.37 * index + k)
        for weight, part in zip(weights, values.chunk(len(weights)), strict=True):
            weight.copy_(part.view_as(weight))
            if name.endswith("norm"):
                weight.add_(1)
    for name, buffer in model.named_buffers():
        if name.endswith("signs"):
            buffer.copy_(torch.arange(buffer.numel()).mul(2.2).cos().sign().view_as(buffer))


def hyperparameters(module, sizes):
    """Those of a model or run of these sizes; before there are switches, they are off."""
    fields = vars(module.Hyperparameters)
    off = {name for name in ("compile", "bf16") if not sizes.get(name) and name not in fields}
    return module.Hyperparameters(
        **sized({k: v for k, v in sizes.items() if k not in off}, fields, handles(module)))


def small_model(milestone, amplitude, bf16=False, **more):
    """The small model, filled."""
    module, known = load_snapshot(milestone), known_values(milestone.id)
    sizes = SMALL | known.get("small_sizes", {}) | dict(bf16=bf16) | more
    model = module.GPT(hyperparameters(module, sizes))
    fill(model, amplitude, **known.get("small_model", {}))
    return model


def train_small(milestone, train_steps, log_dir, **more):
    """Trains the small model on its one batch through the milestone's own `main`, at the record's
    rates, without a schedule; returns the loss before each step and after the last, and the weights
    that had each of the first two losses, {name: the first matrix of that name}."""
    module, known = load_snapshot(milestone), known_values(milestone.id)
    models, weights, validate = [], [], module.validate

    class Filled(module.GPT):
        def __init__(self, args):
            super().__init__(args)
            fill(self, 0.5, **known.get("small_model", {}))
            models.append(self)

    def noted(*arguments):
        if len(weights) < 2:
            weights.append({name: weights_of(models[0], name)[0].detach().clone()
                            for name in known["small_moves"]})
        return validate(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "GPT", Filled)
        patched.setattr(module, "validate", noted)
        patched.setattr(module, "lr_multiplier", lambda step, args: 1.0)
        patched.setattr(module, "load_prefixes", lambda args: PREFIXES, raising=False)
        patched.setattr(module, "token_batches",
                        lambda *args, **kwargs: itertools.repeat((INPUTS, TARGETS)))
        losses = train(module, hyperparameters(module, SMALL | dict(
            **known.get("small_sizes", {}), **known.get("small_training_rates", {}),
            micro_batch_size=2, total_batch_size=16, val_tokens=16, train_steps=train_steps,
            val_loss_every=1, kernel_warmup_steps=0, log_dir=str(log_dir)) | more))
    return losses, weights


@where("Model")
def test_small_loss(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)
    for case in [*known["small_loss"], *known.get("small_windows", [])]:
        chosen = {name: case[name] for name in ("bos_id", "tile_size") if name in case}
        model = small_model(milestone, case["amplitude"], **chosen).double()
        if "window" in case:
            handles(module).set_window(model, case["window"])
        with torch.no_grad():
            if case.get("tables") == "bfloat16":
                for name, buffer in model.named_buffers():
                    if "rotary" in name:
                        buffer.copy_(buffer.bfloat16())
            if case.get("moved_scalars"):
                for name, param in model.named_parameters():
                    if is_scalar(name, param):
                        moved = known["moved_scalars"]  # some have a name that others have, too
                        moved = moved[name if name in moved else name.split(".")[-1]]
                        param.copy_(torch.tensor(moved))
            for block in model.blocks:
                if "attn_scale" in case:
                    block.attn_scale = case["attn_scale"]
            digits = len(str(case["loss"]).split(".")[1])
            loss = model(INPUTS, TARGETS).item()
        # Logits in float32 add an ulp or two to half a unit of the last digit.
        assert loss == pytest.approx(case["loss"], abs=max(0.6 * 10**-digits, 1.5e-6)), case


@where("Model", "Optimizer", "make_optimizers", "train")
def test_small_training(milestone, tmp_path):
    known = known_values(milestone.id)
    losses, (before, after) = train_small(
        milestone, len(known["small_training"]) - 1, tmp_path / "log")
    # Where signs decide, a CPU's rounding may flip one.
    signs = {"cautious_decay", "muon_weight_decay"} & default_hyperparameters(
        milestone.script).keys()
    within = own_values(milestone.id).get("small_training_within", 3e-5 if signs else 6e-6)
    expected = known["small_training"]
    assert losses[:-1] == pytest.approx(expected[:-1], abs=within)
    # Rounding, which differs between CPUs, has grown most in the last step.
    assert losses[-1] == pytest.approx(expected[-1], abs=1.5e-4 if signs else within)
    for name, expected in known["small_moves"].items():
        moves = (after[name] - before[name]).flatten()[:3].tolist()
        largest = max(map(abs, expected))
        within = largest * (1e-3 if signs else 4e-4)
        assert moves == pytest.approx(expected, abs=max(within, 1e-7)), name


@pytest.mark.parametrize("milestone", [
    m for m in declaring("Model") if known_values(m.id).get("products") != "float32"], ids=by_id)
@torch.no_grad()
def test_small_loss_in_bfloat16(milestone):
    exact, model = (small_model(milestone, 0.5, bf16=bf16).eval() for bf16 in (False, True))
    expected = known_values(milestone.id).get("small_loss_in_bfloat16")
    dtypes = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: dtypes.append(out[0].dtype))
    loss = model(INPUTS, TARGETS)
    assert loss.dtype == torch.float32
    assert 0 < abs(loss - exact(INPUTS, TARGETS)) < 0.05
    if expected:  # so is the residual stream, from 03e on; CPUs round at different places
        within = known_values(milestone.id).get("small_loss_in_bfloat16_within", 4e-3)
        assert set(dtypes) == {torch.bfloat16}
        assert loss.item() == pytest.approx(expected, abs=within)


# ---- init ----


@where("Model", known="init")
def test_init(milestone):
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    known = known_values(milestone.id)
    sizes = dict(micro_layers(module), num_layers=known.get("init_layers", 2), vocab_size=2000,
                 seq_len=1024, bf16=False)
    sizes |= fitting(dict(bigram_rows=2000), vars(module.Hyperparameters))
    model = module.GPT(hyperparameters(module, sizes))
    for name, expected in known["init"].items():
        weight = torch.cat([matrix.flatten() for matrix in weights_of(model, name)])
        if "max" in expected:
            assert weight.abs().max().item() == pytest.approx(expected["max"], rel=1e-3), name
        if "std" in expected:
            assert weight.std().item() == pytest.approx(expected["std"], rel=0.01), name
    for attn in attentions(model):
        assert [bool(matrix.any()) for matrix in handles(attn).matrices(attn)] == [
            True, True, True, known["attention_writes"]]


# ---- layers ----


@where("norm")
def test_norm(milestone):
    norm, epsilon = load_snapshot(milestone).norm, known_values(milestone.id)["norm_epsilon"]
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 1e-3]])
    expected = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    torch.testing.assert_close(norm(x), expected)
    # also of bfloat16, whose own epsilon would be 2^-7
    small = torch.full((1, 4), 0.01, dtype=torch.bfloat16)
    assert norm(small).dtype == torch.bfloat16
    assert norm(small)[0, 0].item() == pytest.approx(1, abs=0.01)


@where("MLP")
def test_activation(milestone):
    module = load_snapshot(milestone)
    mlp = module.MLP(module.Hyperparameters(model_dim=1))
    with torch.no_grad():
        for param in mlp.parameters():
            param.zero_()  # also biases
        c_fc, c_proj = handles(mlp).mlp_matrices(mlp)
        c_fc.copy_(torch.tensor([1.0, 0, 0, 0])[:, None])
        c_proj.copy_(torch.tensor([[1.0, 0, 0, 0]]))
        values = mlp(torch.tensor([[-1.0], [-0.5], [0.5], [1.0], [2.0]])).flatten().tolist()
    assert values == pytest.approx(known_values(milestone.id)["activation"], abs=1e-6)


@where("Rotary")
def test_rotary_values(milestone):
    module = load_snapshot(milestone)
    for case in known_values(milestone.id)["rotary"]:
        D = case["head_dim"]
        vector = torch.tensor(case.get("vector", [j / D for j in range(D)]), dtype=torch.float32)
        length = 1 + max(position for position, _ in case["turned"])
        rotary = handles(module).make_rotary(module, D, length)
        turned = rotary(vector.expand(1, length, 1, D))[0, :, 0]
        for position, values in case["turned"]:
            found = turned[position][case.get("entries", range(D))]
            assert found.tolist() == pytest.approx(values, abs=2e-5)


@where("Rotary")
def test_rotary_is_the_usual_form_in_two_halves(milestone):
    torch.manual_seed(0)
    in_float32 = known_values(milestone.id).get("rotary_in_float32")
    for dtype in (torch.float32, torch.bfloat16):
        rotary = handles(milestone).make_rotary(load_snapshot(milestone), 16, 50)
        rotary.to(torch.float32 if in_float32 else dtype)
        x = torch.randn(2, 50, 3, 16).to(dtype)
        x1, x2 = x.chunk(2, dim=-1)
        cos, sin = (table[..., :8] for table in (rotary.cos, rotary.sin))
        expected = torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).to(dtype)
        assert rotary(x).equal(expected)


@where("Rotary", "GPT", known="rotary")
def test_all_layers_share_one_rotary_table_that_is_not_saved(milestone):
    module = load_snapshot(milestone)
    model = module.GPT(micro_sizes(module, num_layers=4))
    tables = [tuple(buffer.shape) for name, buffer in model.named_buffers() if "rotary" in name]
    rows = 32 * max(handles(module).ROW_FACTORS)  # of the longest sequence
    rows *= handles(module).SLOTS  # a token of paired heads has two positions
    assert tables == 2 * [(rows, 1, 16)]  # cos and sin
    kept = {name for name, _ in model.named_buffers() if name.endswith((".signs", ".post_limit"))}
    assert model.state_dict().keys() == kept | dict(
        model.named_parameters(remove_duplicate=False)).keys()


# ---- from 02 on ----


@pytest.fixture
def fresh(milestone):
    """The module, a model of four layers as it is initialised, and a batch of 2 x 8 tokens."""
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    args = hyperparameters(module, dict(
        micro_layers(module), vocab_size=64, num_layers=4, num_heads=2, model_dim=32, seq_len=8,
        compile=False, bf16=False))
    tokens = torch.randint(60, (2, 9))
    return module, module.GPT(args), tokens[:, :-1], tokens[:, 1:]


def attentions(model):
    """The attention of each layer that has one."""
    return [block.attn for block in model.blocks if block.attn is not None]


# ---- from 03b on ----


@pytest.mark.parametrize("milestone", [
    m for m in declaring("CausalSelfAttention", "Block", "GPT", known="values_from")
    if "layers" not in known_values(m.id)], ids=by_id)  # where test_masks.py finds the tables
def test_what_values_are_mixed_with(milestone, fresh, monkeypatch):
    module, model, inputs, targets = fresh
    mixed = []

    def spy(q, k, v, **kwargs):
        mixed.append(v.transpose(1, 2))
        return v

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        for attn in attentions(model):
            handles(attn).mix_values(attn, 0.75, 0.25)
        model(inputs)
    x = module.norm(module.norm(model.embed(inputs)))  # all that a block sees at init
    raw = [(x @ handles(attn).matrices(attn)[2].T).view(2, 8, 2, 16) for attn in attentions(model)]
    others = dict(first=raw[0], nowhere=torch.zeros(()))
    others |= {i: table[inputs].view_as(raw[0])
               for i, table in enumerate(handles(model).value_tables(model))}
    for own, found, source in zip(raw, mixed, known_values(milestone.id)["values_from"],
                                  strict=True):
        torch.testing.assert_close(found, 0.75 * own + 0.25 * others[source])


@where("GPT", known="softcap_at")
@torch.no_grad()
def test_softcap(milestone, fresh, monkeypatch):
    module, model, inputs, targets = fresh
    model.eval()
    # It is written with a sigmoid: the same function as cap * tanh(z / cap), until it is shifted.
    known, z = known_values(milestone.id), torch.linspace(-200, 200, 40_001)
    cap = known["softcap_at"]
    height, shift, width, below = 2 * cap, 0, cap / 2, cap
    if shifted := known.get("cap"):
        height, shift, width, below = shifted["shape"]
    some_capped = (shifted or dict(capped=[[0, 0]]))["capped"]
    known_z, known_capped = torch.tensor(some_capped).T
    for some in (z, z.bfloat16(), known_z):
        monkeypatch.setattr(model.lm_head, "forward", lambda x, some=some: some)
        found = model(inputs)
        assert found.dtype == torch.float32
        expected = height / (1 + torch.exp(-(some.double() + shift) / width)) - below
        assert (found - expected).abs().max() / cap < 1e-6
    assert found.tolist() == pytest.approx(known_capped.tolist(), abs=2e-6)


# ---- from 03e on ----


@where("Linear", "GPT", known="bfloat16_tensors")
def test_what_is_stored_in_bfloat16(milestone):
    module = load_snapshot(milestone)
    model = shapes_of(module, module.Hyperparameters(bf16=True))
    stored = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(stored) == known_values(milestone.id)["bfloat16_tensors"]
    tables = {name for name, _ in model.named_parameters() if "embed" in name}
    others = tuple(known_values(milestone.id).get("bfloat16_parts", []))
    tables |= {name for name, _ in model.named_parameters() if name.startswith(others)}
    assert stored in (tables, tables | {"lm_head.weight"})
    others = {p.dtype for name, p in model.named_parameters() if name not in stored}
    assert others == {torch.float32}


@where("GPT", known="softcap_in_training")
def test_the_training_loss_is_in_bfloat16(milestone, fresh, monkeypatch):
    module, model, inputs, targets = fresh
    z, expected = torch.tensor(known_values(milestone.id)["softcap_in_training"]).T.bfloat16()
    monkeypatch.setattr(model.lm_head, "forward", lambda x: z.expand(*x.shape[:2], -1))
    logits = model(inputs)
    assert logits.dtype == torch.bfloat16 and logits[0, 0].equal(expected)
    targets = targets % len(z)
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    loss = model(inputs, targets)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=2**-6)


# ---- from 05i on: eight bits ----


@where("quantize")
def test_quantized_numbers(milestone):
    quantize = load_snapshot(milestone).quantize
    for case in known_values(milestone.id)["quantized"]:
        numbers, expected = torch.tensor(case["numbers"]).T
        codes = quantize(numbers, case["scale"], getattr(torch, case["dtype"]))
        assert str(codes.dtype) == f"torch.{case['dtype']}"
        torch.testing.assert_close(codes.float() / case["scale"], expected, rtol=1e-6, atol=0)


@where("Head", block="FP8Linear")
def test_the_head_has_eight_bits_only_in_training(milestone, fresh):
    module, model, inputs, targets = fresh
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    x = torch.randn(2, 8, 32)
    exact = x @ model.lm_head.weight.T
    torch.testing.assert_close(model.lm_head(x), exact)
    model.lm_head.use_fp8 = True
    apart = (model.lm_head(x) - exact).norm() / exact.norm()
    assert 0.02 < apart < 0.06  # the card measures 3.9%
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(x), exact)


@where("CausalSelfAttention", "MLP")
def test_parameters_and_gradients_are_contiguous(milestone, fresh):
    module, model, inputs, targets = fresh
    model(inputs, targets).backward()
    unused = known_values(milestone.id).get("unused_in_small", [])
    for name, param in model.named_parameters():  # NCCL refuses others
        assert param.is_contiguous() and (
            param.grad is None if name in unused else param.grad.is_contiguous()), name


# ---- from 06b on: rotary angles that follow the window, one vector of scalars ----


@where("Rotary", "stages", "all_windows", known="yarn")
def test_turns_and_scale_in_each_window(milestone, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["yarn"]
    rotary, args = module.Rotary(head_dim=128, seq_len=2), module.Hyperparameters()

    def set_window(window):
        rotary.set_window(window, args)
        return torch.atan2(rotary.sin[1, 0], rotary.cos[1, 0])[:64]  # of position 1

    for window, scale, expected in known["windows"]:
        turns = set_window(window)
        assert rotary.scale == pytest.approx(scale, abs=1e-9)
        assert turns[known["pairs"]].tolist() == pytest.approx(expected, rel=2e-5)
        assert not turns[32:].any()
    # from the first window to the last in one step, and equal ones after it
    args.window_growth = args.window_end - args.window_start
    jump = set_window(known["windows"][-1][0])[known["pairs"]]
    assert jump.tolist() == pytest.approx(known["jump"], rel=1e-5)


@where("Rotary", known="yarn")
def test_rotary_tables_stay_where_they_are(milestone):
    module = load_snapshot(milestone)
    rotary = handles(module).make_rotary(module, 16, 8)
    first, addresses = rotary.cos.clone(), [rotary.cos.data_ptr(), rotary.sin.data_ptr()]
    windows = handles(module).windows(module, args := module.Hyperparameters())
    for window in (windows[-1], windows[-1], windows[0]):  # also back, as warming up does
        rotary.set_window(window, args)
        assert [rotary.cos.data_ptr(), rotary.sin.data_ptr()] == addresses
        assert rotary.cos.equal(first) == (window == windows[0])


def random_model_of_the_records_layers(milestone):
    """A narrow model with the record's layers and random weights, but for its scalars."""
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    model = module.GPT(micro_sizes(module, **record_layers(module)))
    for param in model.parameters():
        if param.ndim >= 2:
            torch.nn.init.normal_(param, std=0.2)
    return model


@where("Rotary", "GPT", known="yarn")
def test_angles_are_rounded_as_tables_alone(milestone):
    module, in_float32 = load_snapshot(milestone), known_values(milestone.id)["rotary_in_float32"]
    exact, stored = (module.GPT(micro_sizes(module, bf16=bf16, seq_len=2000)).rotary
                     for bf16 in (False, True))
    for rotary in (exact, stored):
        rotary.set_window(1408, module.Hyperparameters())
    for table, expected in ((stored.cos, exact.cos), (stored.sin, exact.sin)):
        assert table.equal(expected.to(torch.float32 if in_float32 else torch.bfloat16))


@pytest.mark.parametrize("milestone", declaring("GPT", known="skip_pairs"), ids=by_id)
@torch.no_grad()
def test_which_layers_skips_pair(milestone):
    model, seen = random_model_of_the_records_layers(milestone), []
    weights = torch.linspace(0.4, 0.9, len(model.blocks))
    handles(model).set_skips(model, weights)
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: seen.append(
            (args[0], out[0] if isinstance(out, tuple) else out)))
    model(torch.randint(64, (2, 32)))
    pairs = []
    for to in range(1, len(seen)):
        added = seen[to][0] - seen[to - 1][1]
        pairs += [[to, source] for source, (_, out) in enumerate(seen[:to])
                  if torch.allclose(added, weights[to] * out, rtol=1e-3, atol=1e-3)]
    assert pairs == known_values(milestone.id)["skip_pairs"]


# ---- schedules ----


@where("lr_multiplier", "Hyperparameters")
def test_learning_rate_table(milestone):
    module = load_snapshot(milestone)
    args = module.Hyperparameters()
    table = known_values(milestone.id)["learning_rate"]
    found = [module.lr_multiplier(step, args) for step, _ in table]
    assert found == pytest.approx([factor for _, factor in table], rel=1e-5, abs=5e-7)
    rates = [module.lr_multiplier(step, args) for step in range(args.train_steps)]
    assert 0 < min(rates) and max(rates) == max(factor for _, factor in table)


@where("muon_momentum", "Hyperparameters", known="momentum")
def test_momentum_table(milestone):
    module, table = load_snapshot(milestone), known_values(milestone.id)["momentum"]
    for step, expected in table:
        momentum = module.muon_momentum(step, module.Hyperparameters())
        assert momentum == pytest.approx(expected, rel=1e-6)


@where("set_schedules", "lr_multiplier", "train")
def test_a_step_has_the_rate_and_the_momentum_of_its_schedule(
        milestone, shards, tmp_path, monkeypatch):
    module, seen, running = load_snapshot(milestone), [], []
    set_schedules = module.set_schedules

    def next_step(*arguments):
        seen.append([])
        set_schedules(*arguments)

    def begin(optimizer, *_):
        if not running:  # a step may call its parent class's
            seen[-1].extend(dict(group) for group in optimizer.param_groups)
        running.append(optimizer)

    monkeypatch.setattr(module, "set_schedules", next_step)

    names = [name for name in default_hyperparameters(milestone.script) if name.endswith("_lr")
             and not name.endswith("_stage_lr")]
    rates = {name: 1e-3 * i for i, name in enumerate(names, start=1)}
    args = micro_args(milestone, shards, tmp_path / "log", train_steps=12, val_loss_every=0,
                      total_batch_size=64, val_tokens=64, kernel_warmup_steps=0, **rates)
    hooks = [register_optimizer_step_pre_hook(begin),
             register_optimizer_step_post_hook(lambda *_: running.pop() and None)]
    try:
        module.main(args)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == 12
    for step, at_step in enumerate(seen):
        factor = module.lr_multiplier(step, args)
        adam_due = handles(module).adam_due(step, args)
        initial = [lr for name, lr in rates.items() if adam_due or name == "muon_lr"]
        found = sorted({group["lr"] for group in at_step})
        assert found == pytest.approx([lr * factor for lr in initial])
        momenta = {group["momentum"] for group in at_step if "momentum" in group}
        assert momenta == {handles(module).momentum(module, step, args)} - {None}
