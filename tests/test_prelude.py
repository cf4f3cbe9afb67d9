"""The second chain: its first script against mathematics, every gain against its flag, and what
each later script counts.

Run: .venv/bin/python -m pytest tests/test_prelude.py
"""

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from ranks import start_ranks
from snapshots import (
    MANIFEST,
    by_id,
    handles,
    known_values,
    load_snapshot,
    micro_args,
    micro_overrides,
    micro_sizes,
    open_shard,
    shapes_of,
    train,
    where,
)
from speedrun.figures.prelude import (
    counted_table,
    load_timings,
    speed_table,
    stale_timings,
    timing_table,
)
from speedrun.history.fields import default_hyperparameters
from speedrun.history.predictions import StoredPrediction
from speedrun.scripts.find import code_hash
from test_optimizers import orthogonalize
from test_parts import INPUTS, TARGETS, fill, hyperparameters, small_model, train_small

RUNGS = MANIFEST.of_chain("prelude").milestones
STEPS = 20 if "RUN_SLOW" in os.environ else 3


# ---- the first script, and the losses of all ----


def reference_loss(weights, inputs, targets, num_heads):
    """The loss of a model of one layer, {name: tensor}, from the formulas alone."""
    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    T, block = inputs.size(1), "blocks.0."
    x = weights["embed.weight"][inputs] + weights["pos_embed.weight"][:T]
    normed, heads = norm(x, block + "attn_norm"), []
    for q, k, v in zip(*(linear(normed, f"{block}attn.{name}").chunk(num_heads, -1)
                         for name in ("c_q", "c_k", "c_v")), strict=True):
        weight = (q @ k.mT / q.size(-1) ** 0.5).exp().tril()
        heads.append(weight / weight.sum(-1, keepdim=True) @ v)
    x = x + linear(torch.cat(heads, -1), block + "attn.c_proj")
    hidden = linear(norm(x, block + "mlp_norm"), block + "mlp.c_fc")
    hidden = hidden / 2 * (1 + torch.erf(hidden / 2**0.5))
    x = x + linear(hidden, block + "mlp.c_proj")
    logits = norm(x, "norm") @ weights["embed.weight"].T
    right = logits.gather(-1, targets[..., None])[..., 0]
    return (logits.exp().sum(-1).log() - right).mean()


def test_the_first_script_is_the_mathematics():
    module = load_snapshot(RUNGS[0])
    model = module.GPT(module.Hyperparameters(
        num_layers=1, num_heads=2, model_dim=16, vocab_size=64, seq_len=8)).double()
    fill(model, 0.5, vectors=True)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected, loss = reference_loss(weights, INPUTS, TARGETS, 2), model(INPUTS, TARGETS)
    assert abs(loss - expected) < 1e-12
    loss.backward()
    expected.backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, weights[name].grad, rtol=0, atol=1e-12)


@where("Model", known="small_gradients")
def test_small_gradients(milestone):
    model = small_model(milestone, 0.5)
    model(INPUTS, TARGETS).backward()
    expected = known_values(milestone.id)["small_gradients"]
    found = {name: model.get_parameter(f"{name}.weight").grad.norm().item() for name in expected}
    assert found == pytest.approx(expected, abs=2e-6)


@where("Model", "Optimizer", known="small_training_end")
def test_where_small_training_ends(milestone, tmp_path):
    losses, _ = train_small(milestone, 20, tmp_path / "log")
    assert losses[20] == pytest.approx(known_values(milestone.id)["small_training_end"], abs=3e-5)


# ---- flags: the last script is every other one ----


def flags_after(milestone):
    """The settings, {name: value}, that take the later gains out of the last script."""
    later = [rung.ablate for rung in RUNGS[RUNGS.index(milestone) + 1 :]]
    args = load_snapshot(RUNGS[-1]).parse_args([f"--{setting}" for setting in later])
    return {name: getattr(args, name) for name, _ in (setting.split("=") for setting in later)}


@pytest.mark.parametrize("milestone", RUNGS, ids=by_id)
def test_the_last_script_without_the_later_gains_is_this_one(milestone, shards, tmp_path):
    losses = []
    for rung, flags in ((milestone, {}), (RUNGS[-1], flags_after(milestone))):
        own = default_hyperparameters(rung.script)
        rows = flags.get("micro_batch_size", own["micro_batch_size"])  # those of the record
        settings = dict(
            vocab_size=70, total_batch_size=2048, val_tokens=2048, train_steps=STEPS,
            kernel_warmup_steps=1, **{**flags, "micro_batch_size": rows})
        losses.append(train(load_snapshot(rung), micro_args(
            rung, shards, tmp_path / rung.id / "log" / str(len(losses)), **settings)))
    singly = "stacked_muon" in flags and flags.get("muon", True)  # matrices, or stacks of one
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-5 if singly else 0)
    assert len(losses[0]) == STEPS + 1 and losses[0][0] - losses[0][-1] > 0.02


def test_every_rung_but_the_first_has_a_flag_that_changes_something():
    assert [rung.ablate is None for rung in RUNGS] == [True] + [False] * (len(RUNGS) - 1)
    off = flags_after(RUNGS[0])
    own = default_hyperparameters(RUNGS[-1].script)
    assert len(off) == len(RUNGS) - 1 and off.keys() <= own.keys()
    assert [n for n, value in off.items() if value == own[n]] == []


# ---- p2: no scores are stored ----


def saved_by(milestone, T):
    """The tensors that one row of T tokens saves for the backward pass, without parameters: a size
    in bytes for each storage, and all shapes."""
    module = load_snapshot(milestone)
    model = module.GPT(hyperparameters(module, dict(
        vocab_size=257, num_layers=4, num_heads=4, model_dim=128, seq_len=T, compile=False,
        bf16=False)))
    owned = {param.untyped_storage().data_ptr() for param in model.parameters()}
    storages, shapes = {}, set()

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in owned:
            storages[tensor.untyped_storage().data_ptr()] = tensor  # kept: no address comes twice
            shapes.add(tuple(tensor.shape))
        return tensor

    tokens = torch.zeros(1, T, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(tokens, tokens)
    del loss
    return sum(t.untyped_storage().nbytes() for t in storages.values()), shapes


def test_saved_bytes_grow_with_the_square_only_before_attention_is_fused():
    first, fused = MANIFEST.get("p0"), MANIFEST.get("p2")
    assert any(shape[-2:] == (96, 96) for shape in saved_by(first, 96)[1])
    assert not any(shape[-2:] == (96, 96) for shape in saved_by(fused, 96)[1])
    per_token = {T: [saved_by(rung, T)[0] / T for rung in (first, fused)] for T in (64, 512)}
    slope = (per_token[512][0] - per_token[64][0]) / (512 - 64)
    assert slope == pytest.approx(4 * (4 * 4 + 1), abs=0.1)  # layers, bytes of heads, one mask
    assert per_token[64][1] == pytest.approx(per_token[512][1], abs=16)
    assert per_token[512][0] == pytest.approx(69_724, rel=1e-3)
    assert per_token[512][1] == pytest.approx(34_972, rel=1e-3)


# ---- p4: implementations of AdamW ----


def moved_by(module, backend, steps=20):
    """Parameters of two groups after some steps by this backend."""
    generator = torch.Generator().manual_seed(0)
    groups = [dict(params=[torch.nn.Parameter(torch.randn(5, 7, generator=generator))
                           for _ in range(3)], weight_decay=decay) for decay in (0.1, 0.0)]
    params = [param for group in groups for param in group["params"]]
    optimizer = module.adamw_of(backend, groups, module.Hyperparameters(adam_lr=0.01))
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(5, 7, generator=generator)
        optimizer.step()
    return torch.stack(params).detach()


@where("adamw_of")
def test_backends_take_the_same_steps(milestone):
    module = load_snapshot(milestone)
    loop, foreach, fused = (moved_by(module, name) for name in ("loop", "foreach", "fused"))
    assert foreach.equal(loop) and not loop.equal(moved_by(module, "loop", 19))
    torch.testing.assert_close(fused, loop, rtol=0, atol=1e-5)


@where("find_adam_backend")
def test_the_first_backend_that_takes_a_step_is_used(milestone, monkeypatch):
    module, cpu = load_snapshot(milestone), torch.device("cpu")

    def found(name="auto"):
        return module.find_adam_backend(cpu, module.Hyperparameters(adam_backend=name))

    def no_apex(name):
        raise RuntimeError("apex has no CUDA extension\nsecond line")

    monkeypatch.setattr(module.importlib, "import_module", no_apex)
    assert found() == ("fused", " (not apex: apex has no CUDA extension)")
    assert found("loop") == ("loop", "")
    with pytest.raises(AssertionError, match="^no AdamW backend works here .not apex: apex has no"
                       " CUDA extension.; leave adam_backend=auto"):
        found("apex")
    with pytest.raises(AssertionError, match="^adam_backend=Fused: choose auto, apex, fused"):
        found("Fused")
    adamw_of = module.adamw_of

    def broken(backend, *arguments):  # fused is built, but cannot take a step
        optimizer = adamw_of(backend, *arguments)
        if backend == "fused":
            optimizer.step = lambda: no_apex(None)
        return optimizer

    monkeypatch.setattr(module, "adamw_of", broken)
    assert found()[0] == "foreach" and found()[1].count("(not ") == 2


# ---- p4a to p4d: Muon ----


@where("polar_express")
@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24)])
def test_polar_express_makes_each_matrix_of_a_stack_orthogonal(milestone, shape):
    polar_express = orthogonalize(load_snapshot(milestone))
    torch.manual_seed(0)
    scales = torch.tensor([1e-3, 1, 1e3]).view(3, 1, 1)
    matrices = scales * torch.randn(3, *shape)
    stack = polar_express(matrices, torch.float32)
    for matrix, found in zip(matrices, stack, strict=True):
        values = torch.linalg.svdvals(found)
        assert 0.85 < values.min() and values.max() < 1.15
        alone = polar_express(matrix[None], torch.float32)[0]
        torch.testing.assert_close(alone, found, rtol=0, atol=1e-5)


@where("muon_update", known="masked_update")
@pytest.mark.parametrize("tall", [False, True])
def test_one_update_by_hand(milestone, tall):
    module, known = load_snapshot(milestone), known_values(milestone.id)["masked_update"]
    W, G, expected = (torch.tensor(known[name], dtype=torch.float32)
                      for name in ("matrix", "gradient", "moved"))
    if tall:
        W, G, expected = W.mT, G.mT, expected.mT
    param = torch.nn.Parameter(W.contiguous())
    param.grad = G.contiguous()
    # A tall matrix has the larger rate.
    muon = handles(module).make_muon(module, [param], lr=0.02 / math.sqrt(1.5) if tall else 0.02)
    muon.step()
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=2e-6)
    (state,) = muon.state.values()
    assert state["second_moment"].flatten().tolist() == pytest.approx(
        known["second_moment"], abs=2e-6)


# ---- p5: shares ----


class NotedDist:
    """torch.distributed, whose messages are noted as they are sent and awaited."""

    def __init__(self):
        self.events, self.sent = [], {}

    def __getattr__(self, name):
        return getattr(dist, name)

    def _noted(self, name, arguments, named):
        number = self.sent[name] = self.sent.get(name, -1) + 1
        self.events.append(f"{name} {number}")
        work = getattr(dist, name)(*arguments, **named)

        def wait():
            self.events.append(f"wait {name} {number}")
            work.wait()

        return SimpleNamespace(wait=wait)

    def reduce_scatter_tensor(self, *arguments, **named):
        return self._noted("reduce_scatter_tensor", arguments, named)

    def all_gather_into_tensor(self, *arguments, **named):
        return self._noted("all_gather_into_tensor", arguments, named)

    def all_reduce(self, *arguments, **named):
        self.events.append("all_reduce")
        return dist.all_reduce(*arguments, **named)


def events_of_a_step(id, overrides):
    """What one training step and the validation after it send, on this rank."""
    module = load_snapshot(MANIFEST.get(id))
    module.dist = NotedDist()
    module.main(module.Hyperparameters(**overrides))
    return module.dist.events


@where("Sharded")
def test_all_gradients_leave_before_one_is_awaited(milestone, shards, tmp_path):
    overrides = micro_overrides(
        milestone, shards, tmp_path / "log", train_steps=1, kernel_warmup_steps=0,
        val_loss_every=0, train_loss_every=0)
    scatter, gather = "reduce_scatter_tensor", "all_gather_into_tensor"
    expected = [f"{scatter} {i}" for i in range(5)]
    for i in range(5):
        expected += [f"wait {scatter} {i}", f"{gather} {i}"]
    expected += [f"wait {gather} {i}" for i in range(5)]
    for events, _ in start_ranks(2, events_of_a_step, milestone.id, overrides):
        assert events == [*expected, "all_reduce"]  # this one is the validation's


@where("Sharded", known="state_bytes")
def test_state_of_the_busiest_rank(milestone, monkeypatch):
    module, known = load_snapshot(milestone), known_values(milestone.id)["state_bytes"]
    args = module.Hyperparameters(compile=False, bf16=False, adam_backend="foreach")
    sent = SimpleNamespace(wait=lambda: None)
    for world_size, expected in known.items():
        monkeypatch.setattr(module, "dist", SimpleNamespace(
            get_world_size=lambda n=int(world_size): n, get_rank=lambda: 0, ReduceOp=dist.ReduceOp,
            reduce_scatter_tensor=lambda *_, **__: sent,
            all_gather_into_tensor=lambda *_, **__: sent))
        model = shapes_of(module, args)
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        optimizers = module.make_optimizers(model, args)
        for optimizer in optimizers:
            optimizer.step()
        parts = [part for optimizer in optimizers
                 for part in handles(module).parts_of(optimizer)]
        kept = sum(tensor.nbytes for part in parts for state in part.state.values()
                   for tensor in state.values() if tensor.ndim)  # no step counters
        assert kept == expected, world_size


# ---- p3: one graph ----


def test_training_is_one_graph_and_validation_another():
    module, counter = load_snapshot(MANIFEST.get("p3")), CompileCounter()
    model = small_model(MANIFEST.get("p3"), 0.5)
    compiled = torch.compile(model, backend=counter, dynamic=False, fullgraph=True)
    optimizers = module.make_optimizers(model, micro_sizes(module))
    for _step in range(20):
        compiled(INPUTS, TARGETS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == 1
    with torch.no_grad():
        compiled(INPUTS, TARGETS)
    assert counter.frame_count == 2
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("id", ["p3", "p6d"])
def test_compiled_runs_have_the_same_losses(id, shards, tmp_path):
    milestone = MANIFEST.get(id)
    eager, compiled = (train(load_snapshot(milestone), micro_args(
        milestone, shards, tmp_path / str(compile), compile=compile, vocab_size=70,
        total_batch_size=2048, val_tokens=2048, train_steps=20, kernel_warmup_steps=1,
        val_loss_every=1)) for compile in (False, True))
    assert len(eager) == 21 and eager[0] - eager[-1] > 0.02
    assert compiled == pytest.approx(eager, rel=0, abs=1e-5)


# ---- p6 and p6d ----


def test_the_map_has_the_same_tokens(shards):
    module = load_snapshot(MANIFEST.get("p6"))
    file = next(shards.glob("*_train_*"))
    mapped, read = (module.open_shard(file, module.Hyperparameters(memory_map=on))
                    for on in (True, False))
    assert type(mapped) is not type(read) and mapped.tolist() == read.tolist()
    assert open_shard(load_snapshot(RUNGS[0]), file).tolist() == mapped.tolist()


def padded(vocab_multiple):
    """The last script's small model of 50 tokens, as the first script has it otherwise."""
    model = small_model(RUNGS[-1], 0.5, vocab_size=50, vocab_multiple=vocab_multiple,
                        rms_norm=False, qk_norm=False)
    with torch.no_grad():
        model.embed.weight[50:] = 0
    return model


def test_padding_changes_no_loss_and_stays_zero():
    module = load_snapshot(RUNGS[-1])
    inputs, targets = INPUTS % 50, TARGETS % 50
    for multiple, rows in ((1, 50), (64, 64)):
        model = padded(multiple)
        assert model.embed.weight.shape == model.lm_head.weight.shape == (rows, 16)
        assert model(inputs).shape == (2, 8, 50)
        assert model(inputs, targets).item() == pytest.approx(5.370687, abs=1.5e-6)
    args = micro_sizes(module, adam_backend="loop")
    for start in (model, module.GPT(micro_sizes(module, vocab_size=50))):
        assert not start.embed.weight[50:].any() and start.embed.weight[:50].any(1).all()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "dist", SimpleNamespace(get_world_size=lambda: 1))
        optimizers = module.make_optimizers(model, args)
    before = model.embed.weight.detach().clone()
    for _ in range(3):
        model(inputs, targets).backward()
        assert not model.embed.weight.grad[50:].any()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not model.embed.weight[50:].any() and (model.embed.weight != before)[:50].any(1).all()


# ---- the tables ----


def cells(table):
    """{a row's first cell: its other cells} of a Markdown table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {first: others for first, *others in rows[2:]}


def test_stated_speeds_are_far_from_their_stated_mfu():
    """In the page's table, with which test_tools.py compares all rungs as it counts them again."""
    page = (MANIFEST.history / "prelude" / "README.md").read_text(encoding="utf-8")
    table = cells(page.partition("<!-- begin claims -->\n")[2].partition("<!-- end claims")[0])
    assert table["p0_vanilla"] == ["50,000", "45 GB", "~8%", "0.5%", "0.5%", "not measured"]
    assert table["p6d_padded_vocab"][3:5] == ["12.1%", "12.9%"]


def test_counts_are_of_a_step():
    some = replace(MANIFEST, milestones=(MANIFEST.get("p0"), MANIFEST.get("p6a"), RUNGS[-1]))
    found = StoredPrediction("x", 2**30, 0, 0, saved=16 * 10**8, pass_launches=1000,
                             optimizer_launches=50, optimizer_state=10**8, sent=2 * 10**9)
    table = cells(counted_table({"vanilla": found, "micro_batches": found}, some))
    assert table["p0_vanilla"] == ["100", "4 x 1,000 + 50", "100.0", "2,000.0", "1.0 GiB"]
    assert table["p6a_micro_batches"][:2] == ["25", "1 x 1,000 + 50"]
    assert set(table["p6d_padded_vocab"]) == {"not predicted"}


def timings(path, **times):
    """Timings of entries called by their labels, read from a file."""
    entries = [dict(label=label, milestone=MANIFEST.get(label.partition(" ")[0]).slug, code="old",
                    tokens_per_step=4096, runs=[
                        dict(step_avg_ms=ms, val_curve=[[0, 9], [2, ms / 100]]) for ms in some])
               for label, some in times.items()]
    path.write_text(json.dumps(dict(command="typed", entries=entries)), encoding="utf-8")
    return load_timings(path)


def test_gains_are_ratios_of_runs_side_by_side(tmp_path):
    some = replace(MANIFEST, milestones=(MANIFEST.get("p0"), MANIFEST.get("p1")))
    added = timings(tmp_path / "a", p0_vanilla=[100, 200, 300], p1_autocast=[50, 200, 100])
    without = timings(tmp_path / "b", **{"p1_autocast": [10, 10, 10]})
    table = cells(timing_table(added, without, some))
    assert table["p1_autocast"] == [
        "100 (50–200)", "40,960", "2.00 (1.00–3.00)x", "off here"]
    without = timings(tmp_path / "b", **{
        "p1_autocast": [10, 10, 10], "p1_autocast bf16=False": [20, 15, 5]})
    assert cells(timing_table(added, without, some))["p1_autocast"][-1] == "1.50 (0.50–2.00)x"
    assert cells(speed_table(added, some))["p1_autocast"] == [
        "100 (50–200)", "40,960", "1.1667 ± 0.7638"]
    assert stale_timings(added, some) == [
        f"{id}: the script has changed since it was timed" for id in ("p0", "p1")]
    fresh = replace(added, codes={m.slug: code_hash(m.script) for m in some.milestones})
    assert stale_timings(fresh, some) == []
    (tmp_path / "a").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="a is not what compare_milestones.py --json writes: Key"):
        load_timings(tmp_path / "a")
