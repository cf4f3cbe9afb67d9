"""Models, layers and schedules of the snapshots against the values of known.toml.

Run: .venv/bin/python -m pytest tests/test_parts.py
"""

import itertools
import math
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from snapshots import (
    MANIFEST,
    MILESTONES,
    known_values,
    load_snapshot,
    micro_args,
    micro_layers,
    micro_sizes,
    record_layers,
    set_window,
    sized,
    train,
    where,
)
from speedrun.scripts.sizes import length_names

# ---- whole models ----


@where("Model")
def test_parameter_count(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)
    with torch.device("meta"):
        parameters = list(module.GPT(module.Hyperparameters()).parameters())
    assert sum(p.numel() for p in parameters) == known["parameters"] == milestone.parameters
    assert len(parameters) == known["tensors"]


@where("Hyperparameters")
def test_defaults_are_the_records(milestone):
    known, args = known_values(milestone.id), load_snapshot(milestone).Hyperparameters()
    assert known["record"].items() <= asdict(args).items()
    rates = {name for name in asdict(args) if name.endswith(("_lr", "_decay", "_beta1", "_beta2"))
             or "steps" in name or "momentum" in name or "window" in name}
    assert rates - {"kernel_warmup_steps"} <= known["record"].keys()
    assert args.total_batch_size == milestone.tokens_per_step
    assert args.train_steps == milestone.train_steps
    length, val_length = (getattr(args, name) for name in length_names(vars(args)))
    assert args.total_batch_size == 8 * args.micro_batch_size * length  # 8 GPUs, one go each
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
        **{name: getattr(micro, name) for name in kept if hasattr(micro, name)},
        **sized(dict(seq_len=1024), vars(micro)), micro_batch_size=1, total_batch_size=1024,
        val_tokens=1024, train_steps=2, kernel_warmup_steps=0, compile=False, bf16=False))
    assert losses[-1] < losses[0] - 0.1


# ---- the small deterministic model, which the known.toml of 00 describes ----

TOKENS = torch.tensor([(5 * i * i + 3 * i + 1) % 64 for i in range(17)])
INPUTS, TARGETS = TOKENS[:-1].view(2, 8), TOKENS[1:].view(2, 8)
SMALL = dict(vocab_size=64, num_layers=2, num_heads=2, model_dim=16, seq_len=8, compile=False,
             bf16=False)


def weights_of(model, name):
    """The matrices called `name`; c_qkv is three from 01 on, until it is a stack of three."""
    parameters = dict(model.named_parameters())
    if name in parameters:  # a stack of matrices
        return [parameters[name]]
    names = [name]
    if name.endswith("c_qkv") and f"{name}.weight" not in parameters:
        names = [name.replace("c_qkv", part) for part in ("c_q", "c_k", "c_v")]
    return [parameters[f"{name}.weight"] for name in names]


@torch.no_grad()
def fill(model, amplitude, fused_qkv=False):
    """Fills tensor k with amplitude * sin(0.37 i + k)."""
    names = [name.removesuffix(".weight") for name, param in model.named_parameters()
             if param.ndim >= 2]
    for table in ("lm_head", "embed"):  # these come first, embed before the head
        if table in names:
            names.insert(0, names.pop(names.index(table)))
    if fused_qkv:
        names = [name.replace("c_q", "c_qkv") for name in names if name[-3:] not in ("c_k", "c_v")]
    for k, name in enumerate(names):
        weights = weights_of(model, name)
        index = torch.arange(sum(map(torch.numel, weights)), dtype=torch.float64)
        values = amplitude * torch.sin(0.37 * index + k)
        for weight, part in zip(weights, values.chunk(len(weights)), strict=True):
            weight.copy_(part.view_as(weight))


def hyperparameters(module, sizes):
    """Those of a model or run of these sizes."""
    return module.Hyperparameters(**sized(sizes, vars(module.Hyperparameters)))


def small_model(milestone, amplitude, bf16=False, **more):
    """The small model, filled."""
    module, known = load_snapshot(milestone), known_values(milestone.id)
    sizes = SMALL | known.get("small_sizes", {}) | dict(bf16=bf16) | more
    model = module.GPT(hyperparameters(module, sizes))
    fill(model, amplitude, **known.get("small_model", {}))
    return model


def train_small(milestone, train_steps, log_dir, **more):
    """Trains the small model on its one batch through the milestone's own `main`, at the record's
    rates, without a schedule; returns the loss before each step and after the last, the weights
    before and those after, {name: tensor}."""
    module, known = load_snapshot(milestone), known_values(milestone.id)
    models, before = [], {}

    class Filled(module.GPT):
        def __init__(self, args):
            super().__init__(args)
            fill(self, 0.5, **known.get("small_model", {}))
            models.append(self)
            before.update({name: p.detach().clone() for name, p in self.named_parameters()})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "GPT", Filled)
        patched.setattr(module, "lr_multiplier", lambda step, args: 1.0)
        patched.setattr(module, "token_batches",
                        lambda *args, **kwargs: itertools.repeat((INPUTS, TARGETS)))
        losses = train(module, hyperparameters(module, SMALL | dict(
            **known.get("small_sizes", {}), **known.get("small_training_rates", {}),
            micro_batch_size=2, total_batch_size=16, val_tokens=16, train_steps=train_steps,
            val_loss_every=1, kernel_warmup_steps=0, log_dir=str(log_dir), **more)))
    return losses, before, models[0]


@where("Model")
def test_small_loss(milestone):
    known = known_values(milestone.id)
    for case in [*known["small_loss"], *known.get("small_windows", [])]:
        chosen = {name: case[name] for name in ("bos_id", "tile_size") if name in case}
        model = small_model(milestone, case["amplitude"], **chosen)
        if "window" in case:
            set_window(model, case["window"])
        with torch.no_grad():
            if case.get("tables") == "bfloat16":
                for name, buffer in model.named_buffers():
                    if "rotary" in name:
                        buffer.copy_(buffer.bfloat16())
            if case.get("moved_scalars"):
                for name, param in model.named_parameters():
                    if param.ndim < 2:
                        param.copy_(torch.tensor(known["moved_scalars"][name.split(".")[-1]]))
            for block in model.blocks:
                if "attn_scale" in case:
                    block.attn_scale = case["attn_scale"]
            digits = len(str(case["loss"]).split(".")[1])
            loss = model(INPUTS, TARGETS).item()
        # float32 adds an ulp or two to half a unit of the last digit
        assert loss == pytest.approx(case["loss"], abs=max(0.6 * 10**-digits, 1.5e-6)), case


@where("Model", known="small_gradients")
def test_small_gradients(milestone):
    model = small_model(milestone, 0.5)
    model(INPUTS, TARGETS).backward()
    for name, expected in known_values(milestone.id)["small_gradients"].items():
        gradients = torch.cat([weight.grad.flatten() for weight in weights_of(model, name)])
        assert gradients.norm().item() == pytest.approx(expected, rel=3e-6, abs=1.5e-6), name


@where("Model", "Optimizer", "make_optimizers")
def test_small_training(milestone, tmp_path):
    expected = known_values(milestone.id)["small_training"]
    losses, _, _ = train_small(milestone, len(expected) - 1, tmp_path / "log")
    assert losses == pytest.approx(expected, abs=6e-6)


@where("Model", "Optimizer", "make_optimizers", known="small_moves")
def test_small_first_moves(milestone, tmp_path):
    _, before, model = train_small(milestone, 1, tmp_path / "log")
    for name, expected in known_values(milestone.id)["small_moves"].items():
        weight = weights_of(model, name)[0]
        (full,) = [full for full, p in model.named_parameters() if p is weight]
        moves = (weight - before[full]).flatten()[:3].tolist()
        largest = max(map(abs, expected))
        assert moves == pytest.approx(expected, abs=max(largest * 3e-4, 1e-7)), name


# ---- init ----


@where("Model", known="init")
def test_init(milestone):
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    model = module.GPT(hyperparameters(module, dict(
        micro_layers(module), num_layers=2, vocab_size=2000, seq_len=1024, bf16=False)))
    for name, expected in known_values(milestone.id)["init"].items():
        (weight,) = weights_of(model, name)
        if "max" in expected:
            assert weight.abs().max().item() == pytest.approx(expected["max"], rel=1e-3), name
        if "std" in expected:
            assert weight.std().item() == pytest.approx(expected["std"], rel=0.01), name
    assert (model.lm_head.weight is model.embed.weight) != ("lm_head" in dict_of_parents(model))


def dict_of_parents(model):
    """The names of the modules that own a parameter."""
    return {name.rpartition(".")[0] for name, _ in model.named_parameters()}


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
        c_fc = getattr(mlp.c_fc, "weight", mlp.c_fc)  # or a parameter, stored transposed
        c_fc.copy_(torch.tensor([1.0, 0, 0, 0]).view_as(c_fc))
        c_proj = getattr(mlp.c_proj, "weight", mlp.c_proj)
        c_proj.copy_(torch.tensor([[1.0, 0, 0, 0]]))
        values = mlp(torch.tensor([[-1.0], [-0.5], [0.5], [1.0], [2.0]])).flatten().tolist()
    assert values == pytest.approx(known_values(milestone.id)["activation"], abs=1e-6)


@where("Linear")
def test_linear_casts_its_weight(milestone):
    linear = load_snapshot(milestone).Linear(3, 2)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    torch.testing.assert_close(linear(x), x @ linear.weight.T)
    y = linear(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert linear.weight.dtype == linear.weight.grad.dtype == torch.float32


def make_rotary(module, head_dim, seq_len):
    """The module's Rotary; for the first window, where windows matter."""
    rotary = module.Rotary(head_dim, seq_len)
    if hasattr(rotary, "set_window"):
        args = module.Hyperparameters()
        rotary.set_window(args.window_start, args)
    return rotary


@where("Rotary")
def test_rotary_values(milestone):
    module = load_snapshot(milestone)
    for case in known_values(milestone.id)["rotary"]:
        D = case["head_dim"]
        vector = torch.tensor(case.get("vector", [j / D for j in range(D)]), dtype=torch.float32)
        length = 1 + max(position for position, _ in case["turned"])
        turned = make_rotary(module, D, length)(vector.expand(1, length, 1, D))[0, :, 0]
        for position, values in case["turned"]:
            found = turned[position][case.get("entries", range(D))]
            assert found.tolist() == pytest.approx(values, abs=2e-5)


@where("Rotary", known="rotary_in_float32")
def test_rotary_turns_bfloat16_in_float32(milestone):
    torch.manual_seed(0)
    x, rotary = torch.randn(1, 8, 1, 16), make_rotary(load_snapshot(milestone), 16, 8)
    assert rotary(x.bfloat16()).equal(rotary(x.bfloat16().float()).bfloat16())


@where("Rotary")
def test_rotary_is_the_usual_form_in_two_halves(milestone):
    torch.manual_seed(0)
    in_float32 = known_values(milestone.id).get("rotary_in_float32")
    for dtype in (torch.float32, torch.bfloat16):
        rotary = make_rotary(load_snapshot(milestone), 16, 50)
        rotary.to(torch.float32 if in_float32 else dtype)
        x = torch.randn(2, 50, 3, 16).to(dtype)
        x1, x2 = x.chunk(2, dim=-1)
        cos, sin = (table[..., :8] for table in (rotary.cos, rotary.sin))
        expected = torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).to(dtype)
        assert rotary(x).equal(expected)


@where("Rotary")
def test_rotary_is_relative(milestone):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 64)
    rotary = make_rotary(load_snapshot(milestone), 64, 50)
    queries, keys = rotary(query.expand(1, 50, 1, 64)), rotary(key.expand(1, 50, 1, 64))
    scores = torch.einsum("bthd,bshd->ts", queries, keys)
    torch.testing.assert_close(scores[7:, 7:], scores[:-7, :-7], rtol=0, atol=2e-4)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(1, 50, 1))
    assert rotary.bfloat16()(query.bfloat16()).dtype == torch.bfloat16  # as tables are stored then


@where("Rotary", "GPT", known="rotary")
def test_all_layers_share_one_rotary_table_that_is_not_saved(milestone):
    module = load_snapshot(milestone)
    model = module.GPT(micro_sizes(module, num_layers=4))
    tables = [tuple(buffer.shape) for name, buffer in model.named_buffers() if "rotary" in name]
    assert tables == 2 * [(32, 1, 16)]  # cos and sin
    assert model.state_dict().keys() == dict(model.named_parameters(remove_duplicate=False)).keys()


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


def scalars_of(model):
    """Of a model with one vector of scalars a row for each layer: skip, x, x0, both of values."""
    return model.scalars[: 5 * len(model.blocks)].view(-1, 5)


def projections(attn):
    """The weights of queries, keys and values, and of the output if they are stored together."""
    for name in ("c_qkv", "c_qkvo"):
        if hasattr(attn, name):
            weights = getattr(attn, name)
            width = min(weights.shape[-2:])
            return weights.view(-1, width, width)  # one after the other, in whatever shape
    return [attn.c_q.weight, attn.c_k.weight, attn.c_v.weight]


@where("Model", known="moving")
def test_gradients_arrive_one_layer_after_the_other(milestone, fresh):
    module, model, inputs, targets = fresh
    expected, arrived = known_values(milestone.id)["moving"], []
    for ends in expected:
        arrived += [tuple(ends)]
        model.zero_grad()
        model(inputs, targets).backward()
        named = {name.removesuffix(".weight"): p for name, p in model.named_parameters()}
        matrices = {name for name, p in named.items() if p.ndim >= 2}
        matrices -= set(known_values(milestone.id).get("behind_scalars", ()))
        moving = {name for name, p in named.items() if p.grad.abs().max() > 1e-7} & matrices
        assert moving == {n for n in matrices if n.endswith(tuple(itertools.chain(*arrived)))}
        with torch.no_grad():  # what an optimizer would make of round-off is not the subject
            for param in model.parameters():
                if param.grad.abs().max() > 1e-7 and param.ndim >= 2:
                    param.sub_(param.grad / param.grad.norm())
    assert moving == matrices
    model.zero_grad()
    model(inputs, targets).backward()
    still = {name for name, p in named.items() if p.ndim < 2 and p.grad.abs().min() < 1e-6}
    assert still == set(known_values(milestone.id).get("still", ()))


@where("Model", known="moving")
def test_it_starts_as_the_identity(milestone, fresh):
    module, model, inputs, targets = fresh
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)  # it may be zero
    logits = module.norm(model.embed(inputs)) @ model.lm_head.weight.T  # as if there were no blocks
    if cap := known_values(milestone.id).get("softcap_at"):
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(model(inputs), logits)
    assert model.embed.weight.requires_grad and inputs.max() < 60
    model(inputs, targets).backward()
    unseen = model.lm_head.weight.grad[60:]  # rows of no token, as padding: in the denominator
    assert unseen.any(dim=1).all()


@where("CausalSelfAttention", known="moving")
def test_attention_scores_are_bounded(milestone, fresh, monkeypatch):
    module, model, inputs, targets = fresh
    seen = []

    def spy(q, k, v, **kwargs):
        seen.append((q, k))
        return v

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        for attn in attentions(model):
            projections(attn)[0].mul_(1e3)
        model(inputs)
    assert len(seen) == len(attentions(model)) >= 3
    for q, k in seen:  # (B, H, T, D), each of unit RMS
        assert q.shape == (2, 2, 8, 16)
        for x in (q, k):
            rms = x.square().mean(-1).sqrt()
            torch.testing.assert_close(rms, torch.ones_like(rms), rtol=0, atol=1e-5)


# ---- from 03b on ----


@where("CausalSelfAttention", "Block", "GPT", known="softcap")
def test_scalars_do_not_matter_at_first(milestone, fresh):
    module, model, inputs, targets = fresh
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    before = model(inputs, targets)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim < 2:
                param.uniform_(0.2, 2)
        if hasattr(model, "smear_gate"):
            model.scalars[5 * len(model.blocks) :] = 0  # what follows the layers' does matter
    torch.testing.assert_close(model(inputs, targets), before)


@where("CausalSelfAttention", "Block", "GPT", known="values_from")
def test_what_values_are_mixed_with(milestone, fresh, monkeypatch):
    module, model, inputs, targets = fresh
    mixed = []

    def spy(q, k, v, **kwargs):
        mixed.append(v.transpose(1, 2))
        return v

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        for attn in attentions(model):
            if hasattr(attn, "value_lambda"):
                attn.value_lambda.fill_(0.25)
            elif hasattr(attn, "value_lambdas"):
                attn.value_lambdas.copy_(torch.tensor([0.75, 0.25]))
            else:
                scalars_of(model)[:, 3:] = torch.tensor([0.75, 0.25])
        model(inputs)
    x = module.norm(module.norm(model.embed(inputs)))  # all that a block sees at init
    raw = [(x @ projections(attn)[2].T).view(2, 8, 2, 16) for attn in attentions(model)]
    others = dict(first=raw[0], nowhere=torch.zeros(()))
    others |= {i: table(inputs).view_as(raw[0])
               for i, table in enumerate(getattr(model, "value_embeds", {}).values())}
    for own, found, source in zip(raw, mixed, known_values(milestone.id)["values_from"],
                                  strict=True):
        torch.testing.assert_close(found, 0.75 * own + 0.25 * others[source])


@where("GPT", known="softcap")
@torch.no_grad()
def test_softcap(milestone, fresh, monkeypatch):
    module, model, inputs, targets = fresh
    model.eval()
    for x, y in known_values(milestone.id)["softcap"]:
        monkeypatch.setattr(model.lm_head, "forward", lambda _, x=x: torch.tensor([float(x)]))
        assert model(inputs).item() == pytest.approx(y, abs=1e-5)
    # It is written with a sigmoid: the same function as cap * tanh(z / cap).
    cap, z = known_values(milestone.id)["softcap_at"], torch.linspace(-200, 200, 40_001)
    for some in (z, z.bfloat16()):
        monkeypatch.setattr(model.lm_head, "forward", lambda x, some=some: some)
        found = model(inputs)
        assert found.dtype == torch.float32
        assert (found - cap * torch.tanh(some.double() / cap)).abs().max() / cap < 1e-6


@where("GPT", known="softcap")
def test_the_capped_loss_has_the_gradient_of_cross_entropy(milestone, fresh, monkeypatch):
    module, model, inputs, targets = fresh
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # logits stay in float64
    z = (5 * torch.randn(2, 8, 64, dtype=torch.float64)).requires_grad_()
    monkeypatch.setattr(model.lm_head, "forward", lambda x: z)
    losses = (model(inputs, targets),
              torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
    found, expected = (torch.autograd.grad(loss, z)[0] for loss in losses)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)


# ---- from 03e on ----


@where("Linear", "GPT", known="bfloat16_tensors")
def test_what_is_stored_in_bfloat16(milestone):
    module = load_snapshot(milestone)
    with torch.device("meta"):
        model = module.GPT(module.Hyperparameters(bf16=True))
    stored = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(stored) == known_values(milestone.id)["bfloat16_tensors"]
    tables = {name for name, _ in model.named_parameters() if "embed" in name}
    assert stored in (tables, tables | {"lm_head.weight"})
    others = {p.dtype for name, p in model.named_parameters() if name not in stored}
    assert others == {torch.float32}


@where("Linear", "GPT", known="bfloat16_tensors")
def test_small_loss_in_bfloat16(milestone):
    model = small_model(milestone, 0.5, bf16=True).eval()
    dtypes = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: dtypes.append(out[0].dtype))
    with torch.no_grad():
        loss = model(INPUTS, TARGETS)
    assert set(dtypes) == {torch.bfloat16} and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(known_values(milestone.id)["small_loss_in_bfloat16"],
                                        abs=1e-3)


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


# ---- from 04 on ----


@where("GPT", known="skips")
def test_skips_are_last_in_first_out(milestone, fresh):
    module, model, inputs, targets = fresh
    seen = []  # the input and the output of each block

    def count(number):
        def hook(block, inputs, output):
            x, *others = output if isinstance(output, tuple) else (output,)
            seen.append((inputs[0], x + number))
            return (x + number, *others) if others else x + number
        return hook

    for number, block in enumerate(model.blocks, start=1):
        block.register_forward_hook(count(10.0**number))
    with torch.no_grad():
        weights = torch.tensor([0.5, 0.25])
        if hasattr(model, "skip_weights"):
            model.skip_weights.copy_(weights)
        else:  # before a sigmoid, unless they are 1 at first
            scalars = scalars_of(model)
            scalars[2:, 0] = weights if scalars[2, 0] == 1 else weights.logit()
        model(inputs)
    for weight, (to, above, source) in zip((0.5, 0.25), known_values(milestone.id)["skips"],
                                           strict=True):
        torch.testing.assert_close(seen[to][0], seen[above][1] + weight * seen[source][1])


# ---- from 05i on: eight bits ----


@where("quantize")
def test_quantized_numbers(milestone):
    quantize = load_snapshot(milestone).quantize
    for case in known_values(milestone.id)["quantized"]:
        numbers, expected = torch.tensor(case["numbers"]).T
        codes = quantize(numbers, case["scale"], getattr(torch, case["dtype"]))
        assert str(codes.dtype) == f"torch.{case['dtype']}"
        torch.testing.assert_close(codes.float() / case["scale"], expected, rtol=1e-6, atol=0)


@where("quantize", "fp8_product", "FP8Linear")
def test_fp8_linear(milestone):
    known = known_values(milestone.id)["fp8_product"]
    x = torch.tensor([[1, -0.3, 2.5, 0.07], [0.11, 0.9, -1.7, 3.3]]).repeat(1, 4).bfloat16()
    row = torch.tensor([0.05, -0.021, 0.0013, 0.3, 0.875, 1.2, -2, 0]).repeat(2)
    row[8:] *= 0.1
    weight = row[:, None] * (1 + 0.1 * torch.arange(16))
    grad = ((torch.arange(32).view(2, 16) - 13) * 1e-6).bfloat16()
    x.requires_grad_(), weight.requires_grad_()
    z = load_snapshot(milestone).FP8Linear.apply(x, weight, *known["scales"])
    z.backward(grad)
    assert z.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    assert z[0, :4].tolist() == known["z"]
    assert x.grad[0, 0].item() == pytest.approx(known["grad_x"], rel=1e-6)
    assert weight.grad[0, :4].tolist() == pytest.approx(known["grad_weight"], rel=1e-6)


@where("Head")
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


# ---- from 05n on ----


@where("CausalSelfAttention", "MLP", known="mlp_shapes")
def test_parameters_and_gradients_are_contiguous(milestone, fresh):
    module, model, inputs, targets = fresh
    model(inputs, targets).backward()
    for name, param in model.named_parameters():  # NCCL refuses others
        assert param.is_contiguous() and param.grad.is_contiguous(), name


def parents_args(milestone, args):
    """The parent's hyperparameters: those of the same names as in `args`, else its defaults."""
    module = load_snapshot(MANIFEST.get(milestone.parent))
    names = {field.name for field in fields(module.Hyperparameters)} & vars(args).keys()
    return module.Hyperparameters(**{name: getattr(args, name) for name in names})


@where("CausalSelfAttention", "MLP", known="stored_as")
@torch.no_grad()
def test_the_parents_loss_with_the_same_weights(milestone, fresh):
    module, model, inputs, targets = fresh
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    parent = load_snapshot(MANIFEST.get(milestone.parent)).GPT(
        parents_args(milestone, model.args))
    weights, its_weights = model.state_dict(), parent.state_dict()
    for name in [*weights]:
        if name in its_weights:  # in another shape, perhaps
            weights[name] = weights[name].view_as(its_weights[name])
        elif name.endswith("attn.c_qkvo"):
            stack = weights.pop(name)
            weights[name.replace("c_qkvo", "c_qkv")] = stack[:3]
            weights[name.replace("c_qkvo", "c_proj.weight")] = stack[3]
        elif name.endswith("mlp.c_fc"):
            weights[f"{name}.weight"] = weights.pop(name).T
        elif name.endswith("mlp.c_proj"):
            weights[f"{name}.weight"] = weights.pop(name)
    parent.load_state_dict(weights)
    torch.testing.assert_close(model(inputs, targets), parent(inputs, targets))


@where("CausalSelfAttention", known="stored_as")
def test_of_four_matrices_the_output_has_the_first_gradient(milestone, fresh):
    module, model, inputs, targets = fresh
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    model(inputs, targets).backward()
    for attn in attentions(model):
        *qkv, output = attn.c_qkvo.grad.view_as(projections(attn))
        assert not torch.stack(qkv).any() and output.any()


# ---- from 05p on ----


@where("CausalSelfAttention", known="gate")
@torch.no_grad()
def test_gates(milestone, fresh):
    module, model, *_ = fresh
    attn, x, value_embed = model.blocks[0].attn, torch.randn(2, 8, 32), torch.randn(2, 8, 32)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    projections(attn)[3] = torch.eye(32)  # heads one beside the other
    parent = load_snapshot(MANIFEST.get(milestone.parent)).CausalSelfAttention(
        parents_args(milestone, model.args), attn.rotary)
    parent.c_qkvo.copy_(attn.c_qkvo.view_as(parent.c_qkvo))
    if hasattr(model, "set_window"):
        model.set_window(model.args.window_start)  # in which the scale is the hyperparameter

    def attend(attn):
        own = hasattr(attn, "value_lambdas")
        scalars = [] if own else [dict(value=torch.tensor(0.5), value_embed=torch.tensor(0.5))]
        return attn(x, value_embed, *scalars, mask)

    known, at_first = known_values(milestone.id)["gate"], attend(attn)
    ungated = at_first / known["at_first"]
    torch.testing.assert_close(attend(parent), at_first if hasattr(parent, "gate") else ungated)
    attn.gate.normal_()
    gates = torch.sigmoid(x[..., : known["channels"]] @ attn.gate.T)  # (B, T, H)
    expected = (ungated.view(2, 8, 2, 16) * gates[..., None]).flatten(2)
    torch.testing.assert_close(attend(attn), expected)


# ---- from 06b on: rotary angles that follow the window, one vector of scalars ----


@where("Rotary", "all_windows", known="yarn")
def test_turns_and_scale_in_each_window(milestone):
    module, known = load_snapshot(milestone), known_values(milestone.id)["yarn"]
    rotary, args, turns = module.Rotary(head_dim=128, seq_len=2), module.Hyperparameters(), {}

    def set_window(window, args=args):
        rotary.set_window(window, args)
        return torch.atan2(rotary.sin[1, 0], rotary.cos[1, 0])[:64]  # of position 1

    for window, scale, expected in known["windows"]:
        turns[window] = set_window(window)
        assert rotary.scale == pytest.approx(scale, abs=1e-9)
        assert turns[window][known["pairs"]].tolist() == pytest.approx(expected, rel=2e-5)
        assert not turns[window][32:].any()
    slowed = known["slowed"]
    for (old, new), kept in zip(itertools.pairwise(turns), known["kept"], strict=True):
        ratios = (turns[new] / turns[old])[:32]
        assert ratios[:kept].tolist() == [1] * kept
        assert ratios[slowed:].tolist() == pytest.approx([old / new] * (32 - slowed), rel=1e-5)
        between = ratios[kept:slowed]
        assert between.max() < 1 - 1e-4 and between.min() > old / new + 1e-4
    args.window_stages = 1  # from the first window to the last in one step
    jump = set_window(known["windows"][-1][0])[known["pairs"]]
    assert jump.tolist() == pytest.approx(known["jump"], rel=1e-5)


@where("Rotary", known="yarn")
def test_rotary_tables_stay_where_they_are(milestone):
    module = load_snapshot(milestone)
    rotary = make_rotary(module, 16, 8)
    first, addresses = rotary.cos.clone(), [rotary.cos.data_ptr(), rotary.sin.data_ptr()]
    windows = module.all_windows(args := module.Hyperparameters())
    for window in (windows[-1], windows[-1], windows[0]):  # also back, as warming up does
        rotary.set_window(window, args)
        assert [rotary.cos.data_ptr(), rotary.sin.data_ptr()] == addresses
        assert rotary.cos.equal(first) == (window == windows[0])


@where("GPT", known="yarn")
def test_all_layers_attend_with_the_scale_of_the_window(milestone, fresh, monkeypatch):
    module, model, inputs, _ = fresh
    seen = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, attn_mask, scale):
        seen.append(scale)
        return sdpa(q, k, v, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    for window, scale, _ in known_values(milestone.id)["yarn"]["windows"]:
        model.set_window(window)
        seen.clear()
        model(inputs)
        assert seen == pytest.approx([scale] * len(attentions(model)), abs=1e-9)


def random_model_of_the_records_layers(milestone):
    """A narrow model with the record's layers and random weights, but for its scalars."""
    torch.manual_seed(0)
    module = load_snapshot(milestone)
    model = module.GPT(micro_sizes(module, **record_layers(module)))
    for param in model.parameters():
        if param.ndim >= 2:
            torch.nn.init.normal_(param, std=0.2)
    return model


@where("GPT", known="unread")
def test_which_scalars_are_never_read(milestone):
    model = random_model_of_the_records_layers(milestone)
    inputs, targets = torch.randint(64, (2, 2, 32))
    model(inputs, targets).backward()
    unread = (model.scalars.grad == 0).nonzero().flatten().tolist()
    assert unread == sorted(known_values(milestone.id)["unread"])


@where("GPT", known="residual_at_init")
@torch.no_grad()
def test_what_skips_make_of_the_embeddings_at_first(milestone, monkeypatch):
    model, module = random_model_of_the_records_layers(milestone), load_snapshot(milestone)
    norm, seen = module.norm, []
    monkeypatch.setattr(module, "norm", lambda x: seen.append(x) or norm(x))
    for block in model.blocks:
        if block.attn is not None:
            projections(block.attn)[3] = 0  # the outputs, as at first
        if block.mlp is not None:
            block.mlp.c_proj.zero_()
    model(torch.randint(64, (2, 32)))
    torch.testing.assert_close(
        seen[-1], known_values(milestone.id)["residual_at_init"] * norm(seen[0]))


@where("Rotary", "GPT", known="yarn")
def test_angles_are_rounded_as_tables_alone(milestone):
    module, in_float32 = load_snapshot(milestone), known_values(milestone.id)["rotary_in_float32"]
    exact, stored = (module.GPT(micro_sizes(module, bf16=bf16, seq_len=2000)).rotary
                     for bf16 in (False, True))
    for rotary in (exact, stored):
        rotary.set_window(1408, module.Hyperparameters())
    for table, expected in ((stored.cos, exact.cos), (stored.sin, exact.sin)):
        assert table.equal(expected.to(torch.float32 if in_float32 else torch.bfloat16))


# ---- from 08b on: a look at the token before, an odd number of layers ----


@where("smear")
def test_smear(milestone):
    torch.manual_seed(0)
    smear, x = load_snapshot(milestone).smear, torch.randn(2, 5, 16)
    weight, gate = torch.tensor(0.6), torch.zeros(1, 12)
    assert smear(x, 0 * weight, gate).equal(x)
    half = torch.cat((x[:, :1], x[:, 1:] + 0.3 * x[:, :-1]), dim=1)  # at first all gates are
    torch.testing.assert_close(smear(x, weight, gate), half)
    gate.normal_()
    expected = x.clone()  # the first token has none before it
    for t in range(1, 5):
        own = torch.sigmoid((x[:, t, :12] * gate).sum(1, keepdim=True))  # of its own channels
        expected[:, t] += 0.6 * own * x[:, t - 1]
    torch.testing.assert_close(smear(x, weight, gate), expected)
    assert smear(x.bfloat16(), weight, gate).dtype == torch.bfloat16


@where("smear", "GPT", known="behind_scalars")
@torch.no_grad()
def test_smear_mixes_raw_embeddings_also_of_two_documents(milestone, fresh):
    module, model, inputs, _ = fresh
    model.args.bos_id = inputs[0, 3] = 5
    model.scalars[5 * len(model.blocks)], seen = 0.6, []
    model.smear_gate.normal_()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append((args[0], args[2])))
    model(inputs)
    expected = module.norm(
        module.smear(model.embed(inputs), torch.tensor(0.6), model.smear_gate))
    torch.testing.assert_close(seen[0][0], expected)
    for _, x0 in seen:
        torch.testing.assert_close(x0, expected)


@where("smear", "GPT", known="behind_scalars")
def test_a_gate_has_a_gradient_once_its_weight_is_not_zero(milestone, fresh):
    module, model, inputs, targets = fresh
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    place = 5 * len(model.blocks)
    model(inputs, targets).backward()
    assert not model.smear_gate.grad.any() and model.scalars.grad[place].abs() > 1e-4
    assert not model.scalars.grad[:place].view(-1, 5)[:, 3:].any()  # values: the outputs are zero
    model.scalars.data[place] = 0.1
    model(inputs, targets).backward()
    assert model.smear_gate.grad.abs().min() > 1e-7


@where("GPT", known="skip_pairs")
@torch.no_grad()
def test_which_layers_skips_pair(milestone):
    model, seen = random_model_of_the_records_layers(milestone), []
    scalars_of(model)[:, 0] = 20  # in float32 a sigmoid of 1
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: seen.append((args[0], out)))
    model(torch.randint(64, (2, 32)))
    pairs = []
    for to in range(1, len(seen)):
        added = seen[to][0] - seen[to - 1][1]
        pairs += [[to, source] for source, (_, out) in enumerate(seen[:to])
                  if torch.allclose(added, out, rtol=1e-3, atol=1e-3)]
    assert pairs == known_values(milestone.id)["skip_pairs"]


@where("GPT", known="backout")
@torch.no_grad()
def test_a_middle_layers_output_is_subtracted_before_the_head(milestone, monkeypatch):
    model, module = random_model_of_the_records_layers(milestone), load_snapshot(milestone)
    norm, outputs, normed = module.norm, [], []
    monkeypatch.setattr(module, "norm", lambda x: normed.append(x) or norm(x))
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: outputs.append(out))
    for weight in (model.scalars[5 * len(model.blocks) + 1].item(), -0.3):
        model.scalars[5 * len(model.blocks) + 1] = weight
        outputs.clear()
        model(torch.randint(64, (2, 32)))
        torch.testing.assert_close(
            normed[-1], outputs[-1] - weight * outputs[known_values(milestone.id)["backout"]])


# ---- schedules ----


@where("lr_multiplier", "Hyperparameters")
def test_learning_rate_table(milestone):
    module = load_snapshot(milestone)
    args = module.Hyperparameters()
    table = known_values(milestone.id)["learning_rate"]
    found = [module.lr_multiplier(step, args) for step, _ in table]
    assert found == pytest.approx([factor for _, factor in table], rel=1e-5, abs=5e-7)
    rates = [module.lr_multiplier(step, args) for step in range(args.train_steps)]
    assert 0 < min(rates) and max(rates) == 1


@where("muon_momentum", "Hyperparameters", known="momentum")
def test_momentum_table(milestone):
    module, table = load_snapshot(milestone), known_values(milestone.id)["momentum"]
    for step, expected in table:
        momentum = module.muon_momentum(step, module.Hyperparameters())
        assert momentum == pytest.approx(expected, rel=1e-6)


@where("set_hyperparameters", "lr_multiplier", "train")
def test_a_step_has_the_rate_and_the_momentum_of_its_schedule(
        milestone, shards, tmp_path, monkeypatch):
    module, seen, running = load_snapshot(milestone), [], []
    set_hyperparameters = module.set_hyperparameters

    def next_step(*arguments):
        seen.append([])
        set_hyperparameters(*arguments)

    def begin(optimizer, *_):
        if not running:  # a step may call its parent class's
            seen[-1].extend(dict(group) for group in optimizer.param_groups)
        running.append(optimizer)

    monkeypatch.setattr(module, "set_hyperparameters", next_step)

    args = micro_args(milestone, shards, tmp_path / "log", train_steps=12, val_loss_every=0,
                      total_batch_size=64, val_tokens=64, kernel_warmup_steps=0)
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
        adam_due = (step + 1) % getattr(args, "adam_every", 1) == 0
        initial = [getattr(args, name) for name in vars(args)
                   if name.endswith("_lr") and (adam_due or name == "muon_lr")]
        found = sorted({group["lr"] for group in at_step})
        assert found == pytest.approx(sorted(lr * factor for lr in initial))
        if hasattr(module, "muon_momentum"):
            momenta = {group["momentum"] for group in at_step if "momentum" in group}
            assert momenta == {module.muon_momentum(step, args)}


@where("train", known="first_moves")
def test_what_moves_in_each_of_the_first_steps(milestone, shards, tmp_path, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["first_moves"]
    states = []  # before each step and after the last

    def validate(model, *_):
        states.append({name: param.detach().clone() for name, param in model.named_parameters()})
        return 0.0

    monkeypatch.setattr(module, "validate", validate)
    module.main(micro_args(
        milestone, shards, tmp_path / "log", train_steps=len(known["ends"]), kernel_warmup_steps=0,
        scheduled_steps=100, momentum_cooldown_steps=1, embed_lr=0.6, head_lr=0.008,
        scalar_lr=0.04, adam_eps=1e-20))
    moves = [{name: (after[name] - before[name]).abs() for name in after}
             for before, after in itertools.pairwise(states)]
    for step, (move, ends) in enumerate(zip(moves, known["ends"], strict=True)):
        moved = {name for name, size in move.items() if size.any()}
        assert moved == {name for name in move if name.endswith(tuple(ends))}, step
    for step, name, size in known["sizes"]:
        found = moves[step][name]
        torch.testing.assert_close(found[found > 0].median().item(), size, rtol=1e-3, atol=0)
        assert found.max() < 1.001 * size


def test_known_values_are_finite():
    for milestone in MILESTONES:
        values = known_values(milestone.id)
        assert all(math.isfinite(loss) for loss in values["small_training"])
        assert np.diff(values["small_training"]).max() < 0  # it learns
