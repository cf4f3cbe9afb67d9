"""Every snapshot's CUDA path runs at record scale on devices that are not there, one of them as
torch.compile makes it, and faults that only CUDA would show are caught.

Run: .venv/bin/python -m pytest tests/test_predict.py
"""

import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import predict as command
from ranks import warm_context
from snapshots import MILESTONES, handles, known_values, load_snapshot, shapes_of
from speedrun import compat
from speedrun.base.errors import UserError
from speedrun.history.manifest import load_manifest
from speedrun.predict import runs
from speedrun.predict.attention import block_mask, fused, keys_per_query
from speedrun.predict.cards import CARDS
from speedrun.predict.fake_run import _shard, short_run
from speedrun.predict.observer import Observer, SilentKernel
from speedrun.predict.prediction import STEPS, Prediction
from speedrun.predict.runs import largest_micro_batch, observe, predict
from speedrun.run.fit_batch import MARGIN
from speedrun.scripts.find import find_script

# In another version of torch or triton these tests fail, and say so.
pytestmark = pytest.mark.skipif(bool(compat.missing()), reason=compat.missing() or "")
compiles = pytest.mark.skipif(
    bool(compat.missing(compiled=True)), reason=compat.missing(compiled=True) or "")

@pytest.fixture(scope="module", autouse=True)
def the_tests_server():
    """Runs are forks of the server that ranks are forks of. The first use starts it: begun here, it
    would lack what ranks import, and each rank of the files that follow would import it anew."""
    warm_context()


H100 = CARDS["h100"]
SMALL = dict(num_layers=2, micro_batch_size=8, total_batch_size=65_536)


# By default the last of the longest chain, which has most of what any has; each takes ten seconds.
LAST = load_manifest().of_chain().milestones[-1]
TRIED = [milestone for milestone in MILESTONES
         if os.environ.get("RUN_SLOW") or milestone == LAST]


@pytest.mark.parametrize("milestone", TRIED, ids=lambda m: m.id)
def test_a_snapshot_runs_on_eight_fake_gpus_as_in_its_record(milestone):
    found = predict(find_script(milestone.id), H100, 8, {})
    known = known_values(milestone.id)
    assert found.collectives == {
        f"{kind} {dtype}": size
        for kind, name in (("allreduce", "all_reduce"), ("allgather_base", "all_gather"),
                           ("reduce_scatter_base", "reduce_scatter"))
        for dtype, size in known.get(name, {}).items()}
    assert max(found.peaks.values()) > sum(found.memory.values())
    assert Observer().peak == found.memory["workspaces"] == 64 * 2**20
    assert {launch.phase for launch in found.launches} == {"forward", "backward", "optimizer"}
    assert 0 < found.saved < found.peaks["training"]
    # Products take 6 FLOPs for each weight of a linear map and token, and 12 for each number of the
    # width and score that an unfused attention computes; Newton-Schulz comes on top.
    module, tokens = load_snapshot(milestone), milestone.tokens_per_step / 8
    factors = handles(module).ROW_FACTORS  # two steps, with the smallest and the largest batch
    tokens *= (factors[0] + factors[-1]) / 2
    model = shapes_of(module, module.Hyperparameters())
    head = model.lm_head.weight.numel()
    weights = head + sum(param.numel() for param in model.blocks.parameters() if param.ndim >= 2)
    args = module.Hyperparameters()
    scores = args.num_layers * args.model_dim * args.seq_len if known.get("full_scores") else 0
    assert 1 <= sum(found.flops.values()) / ((6 * weights + 12 * scores) * tokens) < 1.1
    in_fp8 = {"float8_e4m3fn": 4 * head * tokens, "float8_e5m2": 2 * head * tokens}
    if known.get("fp8_mlp"):  # forward, the products of MLPs are in FP8, too
        in_fp8["float8_e4m3fn"] += 2 * tokens * sum(
            param.numel() for block in model.blocks for param in block.mlp.parameters())
    dtype = known.get("products", "bfloat16")
    assert found.flops == {dtype: found.flops[dtype],
                           **(in_fp8 if handles(module).HEAD_IN_FP8 else {})}


FAULTS = {
    "a table left on the CPU": (
        "02", "self.cos[: x.size(1)].to(x.dtype)", "self.cos[: x.size(1)].cpu().to(x.dtype)",
        "two devices"),
    "bfloat16 times float32": (
        "03e", "self.weight.to(x.dtype)", "self.weight", "bfloat16"),
    "an exit without a word": (
        "01", "    log, clock = Log(args), Clock(device)", "    os._exit(0)",
        "GPU ended with exit code 0 before its"),
    "a model beyond all memory": (
        "01", "    model_dim: int = 768", "    model_dim: int = 768 * 10**9", "Storage size"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_only_cuda_shows_is_caught(fault, tmp_path):
    id, right, wrong, words = FAULTS[fault]
    source = load_manifest().get(id).script.read_text(encoding="utf-8")
    assert source.count(right) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(source.replace(right, wrong), encoding="utf-8")
    with pytest.raises(UserError, match=words) as refused:
        predict(find_script(str(script)), H100, 8, SMALL)
    assert "\n" not in str(refused.value)


def test_muon_in_float32_is_seen(tmp_path):
    source = load_manifest().get("03").script.read_text(encoding="utf-8")
    right = "self.dtype = torch.bfloat16 if bf16 else torch.float32"
    assert source.count(right) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(source.replace(right, "self.dtype = torch.float32"), encoding="utf-8")
    found = predict(find_script(str(script)), H100, 8, SMALL)
    assert found.collectives.keys() == {"allreduce float32"}
    assert found.flops.keys() == {"bfloat16", "float32"}
    assert found.peaks == {
        "warm-up": 7_065_077_760, "training": 6_699_387_392, "validation": 4_126_281_216}
    assert found.memory["optimizer state"] == 313_786_372
    assert (found.saved, found.moved, len(found.launches)) == (2_598_339_584, 38_719_717_486, 378)


@pytest.mark.slow
def test_micro_steps_add_up():
    script, settings = find_script("01"), {**SMALL, "total_batch_size": 4 * 65_536}
    some, all_of_them = (way(script, H100, 8, settings) for way in (predict, observe))
    assert some.flops == all_of_them.flops and some.collectives == all_of_them.collectives
    assert some.moved == pytest.approx(all_of_them.moved, rel=1e-6)
    assert some.peaks == all_of_them.peaks


@pytest.mark.slow
def test_largest_micro_batch_fits_and_the_next_does_not():
    script, card = find_script("01"), CARDS["4090"]
    settings = dict(num_layers=2)
    largest = largest_micro_batch(script, card, 1, settings)
    assert largest.peak <= MARGIN * card.memory
    more = predict(script, card, 1, {**settings, "micro_batch_size": 2 * largest.micro_batch})
    assert more.peak > MARGIN * card.memory and not more.fits(card)


# ---- compiled ----


ASSEMBLED = bool(os.environ.get("RUN_SLOW"))  # takes as long again


@compiles
def test_a_compiled_step_is_counted_as_by_hand():
    settings = dict(num_layers=1, vocab_size=512, seq_len=1024, micro_batch_size=1,
                    total_batch_size=1024)
    found = observe(find_script("p4"), H100, 1, settings, True)
    assert (found.graphs, found.recompiled) == (2, 0)  # forward and backward
    assert "_fused_adamw_" in {launch.name for launch in found.launches}
    assert {launch.kind for launch in found.launches} == {"triton", "library", "eager"}
    flops = {group: sum(launch.flops for launch in found.launches if launch.group == group)
             for group in ("products", "attention")}
    assert flops["products"] == 6 * (12 * 768**2 + 512 * 768) * 1024  # of the layer, the head
    assert flops["attention"] == (2 + 5) * 2 * 768 * 1024 * 1024 / 2  # forward, backward; causal
    size = found.memory["parameters"]
    assert found.memory == {"workspaces": 2**26, "parameters": size, "gradients": size,
                            "optimizer state": 2 * size + 216}
    assert found.peaks == {
        "warm-up": 290_000_384, "training": 255_351_808, "validation": 213_609_472}
    assert (found.saved, found.moved, len(found.launches)) == (49_100_800, 782_523_784, 115)


@pytest.fixture(scope="module")
def compiled():
    """05a with two of its layers: FlexAttention forward and backward, a window that grows."""
    return observe(find_script("05a"), H100, 8, dict(num_layers=2), True, ASSEMBLED)


@pytest.mark.slow
@compiles
def test_nothing_is_compiled_again_as_the_window_grows(compiled):
    assert (compiled.graphs, compiled.recompiled) == (9, 0)  # DDP cuts the model into four pieces


@pytest.mark.slow
@compiles
def test_compiled_products_and_attention_are_counted_as_by_hand(compiled):
    tokens, model_dim = 65_536, 768
    weights = 2 * 12 * model_dim**2 + 50_304 * model_dim
    keys = 8 * 128  # tiles in which the window of 896 tokens lies, halfway to 1,792
    flops = {group: sum(launch.flops for launch in compiled.launches if launch.group == group)
             for group in ("products", "attention")}
    assert flops["products"] == 6 * weights * tokens
    assert flops["attention"] == 2 * (2 + 7) * 2 * tokens * model_dim * keys  # layers, products
    assert {launch.dtype for launch in compiled.launches if launch.flops} == {"bfloat16"}
    assert compiled.flops["bfloat16"] == sum(launch.flops for launch in compiled.launches)


@pytest.mark.slow
@compiles
def test_compiled_code_keeps_no_logits_in_float32(compiled):
    logits = 65_536 * 50_304 * 2  # bytes in bfloat16; their gradient has as many
    assert logits < compiled.peak < 2 * logits
    assert compiled.memory["parameters"] == 4 * 2 * 12 * 768**2 + (4 + 2) * 50_304 * 768 + 4 * 7


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small 06b with two layers and a warm-up that leaves out the later windows."""
    source = load_manifest().get("06b").script.read_text(encoding="utf-8")
    right = "step = (args.scheduled_steps - 1) * i // args.kernel_warmup_steps"
    assert source.count(right) == 1
    script = tmp_path_factory.mktemp("changed") / "train_gpt.py"
    script.write_text(source.replace(right, "step = 0"), encoding="utf-8")
    settings = dict(num_layers=2, layer_without_mlp=2, value_embed_pattern="..", vocab_size=512,
                    total_batch_size=1024, train_seq_len=1024, val_seq_len=2048)
    return observe(find_script(str(script)), H100, 1, settings, True, ASSEMBLED)


@pytest.mark.slow
@compiles
def test_a_window_that_the_warm_up_leaves_out_is_compiled_again(small):
    assert small.recompiled == 2  # forward and backward for the second step's window


@pytest.mark.slow
@compiles
def test_a_step_ends_with_its_optimizers(small):
    names = [launch.name for launch in small.launches]
    assert "_fused_adam_" in names
    assert "cos" not in names  # the last validation's window makes the rotary tables again


@pytest.mark.slow
@compiles
def test_flash_attention_is_counted_by_its_windows(small):
    pairs = sum(min(t, window) + 1 for window in (896, 384) for t in range(1024))  # a layer each
    attention = [launch for launch in small.launches if launch.group == "attention"]
    assert [launch.phase for launch in attention] == 2 * ["forward"] + 2 * ["backward"]
    assert sum(launch.flops for launch in attention) == (2 + 5) * 2 * 768 * pairs


@pytest.mark.slow
@compiles
def test_a_rotary_embedding_moves_each_byte_once(small):
    moved = [launch.moved for launch in small.launches
             if launch.phase == "forward" and "flip" in launch.name]
    # of a token: queries and keys read and written, cosines and sines, the scales of two norms
    assert moved == 2 * [1024 * (4 * 768 * 2 + 2 * 128 * 4 + 2 * 6 * 4)]


@pytest.mark.slow
@compiles
def test_a_head_in_fp8_is_compiled(small):
    products = [launch for launch in small.launches if launch.name == "_scaled_mm"]
    assert [(launch.kind, launch.phase, launch.dtype) for launch in products] == [
        ("library", "forward", "float8_e4m3fn"), ("library", "backward", "float8_e5m2"),
        ("library", "backward", "float8_e4m3fn")]
    assert {launch.flops for launch in products} == {2 * 1024 * 768 * 512}


@pytest.mark.slow
@compiles
def test_a_kernel_of_the_scripts_own_is_compiled(small):
    kernels = [launch for launch in small.launches if launch.name == "symmetric_kernel"]
    assert len(kernels) == 2 * 2 * 5  # attentions, MLPs; of each step of Newton-Schulz
    first, second = kernels[10:12]
    rows, columns, matrix = 768, 3072, 2 * 4 * 768 * 768  # of four matrices; bytes
    assert (first.flops, second.flops) == (4 * rows**2 * columns, 4 * rows**3)
    assert (first.moved, second.moved) == (
        2 * 4 * rows * columns + matrix, 3 * matrix + 8)  # and two factors


@compiles
@pytest.mark.slow
def test_every_kernel_that_is_launched_is_assembled(compiled, small):
    for found in (compiled, small):
        launched = {launch.name for launch in found.launches if launch.kind == "triton"}
        assert launched <= {kernel.name for kernel in found.kernels}
        for kernel in found.kernels:
            assert 0 < kernel.registers <= 255 and kernel.shared <= H100.shared
    assert sum("tem_fused" in kernel.name for kernel in compiled.kernels) >= 2  # FlexAttention's
    symmetric = [kernel for kernel in small.kernels if kernel.name == "symmetric_kernel"]
    # with a summand or without, for attentions or for MLPs
    assert len(symmetric) == 4 and all(kernel.shared > 0 for kernel in symmetric)


@pytest.mark.skipif(bool(compat.other_version()), reason=compat.other_version() or "")
def test_elements_that_a_kernel_touches():
    import sympy
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    x, y, row = sympy.symbols("x y tmp0", integer=True)

    def touched(*accesses):
        graph = SimpleNamespace(sizevars=SimpleNamespace(
            optimization_hint=lambda size, **_: int(size)))
        with V.set_graph_handler(graph):
            return compat._distinct_elements([
                MemoryDep("buffer", index, (x, y)[-len(size):], size) for index, *size in accesses])

    matrix = 8 * x + y, 4, 8
    assert touched(matrix) == touched(matrix, (x + 4 * y, 4, 8)) == 32  # in another order
    assert touched((y, 4, 8)) == touched((3 * y, 8)) == 8  # a row for all, every third
    assert touched((8 * x + y, 2, 8), (8 * x + y + 16, 2, 8)) == 32  # two halves
    assert touched((8 * row + y, 4, 8), (8 * row + y, 3, 8), matrix) == 24 + 32  # rows looked up


@pytest.mark.skipif(bool(compat.other_version()), reason=compat.other_version() or "")
def test_every_graph_is_compiled_here_and_now(monkeypatch):
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    told = [(inductor, dict(compile_threads=1, fx_graph_cache=False, force_shape_pad=True,
                            joint_graph_constant_folding=False, use_static_triton_launcher=False)),
            (functorch, dict(enable_autograd_cache=False))]
    for config, values in told:
        for name, value in values.items():
            monkeypatch.setattr(config, name, 2 if name == "compile_threads" else not value)
    compat._configure()
    assert all(getattr(config, name) == value for config, values in told
               for name, value in values.items())


@pytest.mark.skipif(bool(compat.other_version()), reason=compat.other_version() or "")
def test_a_kernel_is_assembled_in_the_first_form(monkeypatch):
    def assembled(form):
        return SimpleNamespace(kernel=SimpleNamespace(
            asm=dict(cubin=form.encode()), metadata=SimpleNamespace(shared=12)))

    def run(command, **options):
        assert Path(command[-1]).read_bytes() == b"first"
        return SimpleNamespace(stdout=" Function f:\n  REG:34 STACK:56 SHARED:0 LOCAL:0\n")

    tuner = SimpleNamespace(configs=["first", "second"], _precompile_config=assembled)
    monkeypatch.setattr("torch._inductor.codecache.PyCodeCache.load",
                        lambda source: SimpleNamespace(f=tuner))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__file__="/x/triton/__init__.py"))
    monkeypatch.setattr(subprocess, "run", run)
    assert compat.assemble("f", "def f(): ...") == (34, 56, 12)


@pytest.mark.parametrize(("milestone", "step", "keys"), [
    ("05", 0, 9 * 128),  # 1,024 tokens lie in nine tiles
    ("05a", 0, 2 * 128),  # 64 tokens in two
    ("05a", 1750, 15 * 128),  # 1,792 tokens in fifteen
])
def test_keys_per_query_are_those_of_the_tiles_that_the_mask_lists(milestone, step, keys):
    module = load_snapshot(load_manifest().get(milestone))
    args = module.Hyperparameters(
        seq_len=4096, num_layers=2, compile=True, use_flex_attention=True)
    assert keys_per_query(module, args, step) == keys


OTHERS = {"09": dict(backout_layer=1),
          "12c": dict(backout_layer=1, skip_from=0, skip_to=1, use_triton=True)}


@pytest.mark.parametrize("milestone", ["06", "06b", "09", "12c"])
def test_keys_per_query_of_flash_attention_are_those_of_its_windows(milestone):
    module = load_snapshot(load_manifest().get(milestone))
    args = module.Hyperparameters(
        train_seq_len=2000, num_layers=2, value_embed_pattern="0.", window_pattern="LS",
        attention_kernel="FA2", use_fp8=True, **OTHERS.get(milestone, {}))
    long, short = (sum(min(t, window) + 1 for t in range(2000)) / 2000 for window in (896, 384))
    assert keys_per_query(module, args, 800) == pytest.approx((long + short) / 2)


def test_a_fused_attention_keeps_no_scores(monkeypatch):
    q, k, v = (torch.empty(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    out = fused(q, k, v)
    assert [(x.shape, x.dtype) for x in out.grad_fn.saved_tensors] == [
        *((x.shape, torch.float32) for x in (q, k, v, out)), ((2, 3, 5), torch.float32)]
    out.sum().backward()
    assert [out.shape, *(x.grad.shape for x in (q, k, v))] == [x.shape for x in (q, q, k, v)]
    words = "^attention of torch.float32, torch.float16 and torch.float32$"
    with pytest.raises(TypeError, match=words):
        fused(q, k.half(), v)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert fused(q, k.bfloat16(), v).dtype == torch.get_autocast_dtype("cuda") == torch.float16


def test_a_mask_has_room_for_all_tiles_and_its_rule_is_tried():
    mask = block_mask(lambda b, h, q, k: q >= k, None, None, 300, 200, "cpu")
    assert (mask.kv_num_blocks.tolist(), mask.kv_indices.shape) == ([[[0, 0, 0]]], (1, 1, 3, 2))
    with pytest.raises(ZeroDivisionError):
        block_mask(lambda *_: 1 / 0, None, None, 300, 200, "cpu")


def test_documents_of_a_fake_shard(tmp_path):
    file = Path(_shard(tmp_path, "train", 10, 4, 7))
    header, tokens = file.read_bytes()[:1024], np.fromfile(file, "<u2", offset=1024)
    assert file.name == "train.bin" and header[:12] == np.array([20240520, 1, 10], "<i4").tobytes()
    assert tokens.tolist() == [7, 0, 0, 0, 7, 0, 0, 0, 7, 0]
    with pytest.raises(UserError, match="4,294,967,296 tokens, more than the 2"):
        _shard(tmp_path, "train", 2**32, 4, 7)


def test_a_fake_run_is_as_short_as_can_be():
    found = short_run(load_snapshot(LAST).Hyperparameters)
    assert found == dict(
        train_steps=2, kernel_warmup_steps=2, momentum_warmup_steps=2, momentum_cooldown_steps=2,
        fp8_settle_steps=2, scheduled_steps=1, val_loss_every=0, train_loss_every=0)


@pytest.mark.parametrize(("milestone", "window"), [
    ("05a", 896), ("05d", 896), ("05r", 896), ("06", 896), ("09", 896)])
def test_the_last_step_is_halfway_through_the_windows(milestone, window):
    module = load_snapshot(load_manifest().get(milestone))
    args = module.Hyperparameters(**short_run(module.Hyperparameters))
    assert handles(module).window_at(module, STEPS - 1, args)[0] == window


SOURCE = """
@triton_heuristics.pointwise(inductor_meta={'touched': {'in_out_ptr0': 40000, 'in_ptr0': 20000}})
@triton.jit
def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 10000
    tmp0 = tl.load(in_ptr0 + x0, None)
    tmp1 = tl.load(in_out_ptr0 + x0, None)
    tl.store(in_out_ptr0 + x0, tmp2, None)
"""


@pytest.mark.parametrize(("change", "moved"), [
    (("", ""), 140_000),  # the argument in place is read and written; out_ptr0 is not known
    (("tl.load(in_out_ptr0", "tl.load(in_ptr0"), 100_000),  # only its memory is taken over
    (("tl.store(in_out_ptr0", "tl.store(out_ptr0"), 100_000),  # its new value is not stored
    (("20000", "90000"), 160_000),  # no more than the argument
    (("xnumel = 10000", "pass"), 160_000),  # of another shape: the arguments
])
def test_bytes_of_a_kernel_are_those_that_it_touches(change, moved):
    observer = Observer()
    kernel = SilentKernel("triton_poi_fused_add_0", SOURCE.replace(*change), observer)
    kernel.run(*(torch.empty(10_000) for _pointer in range(3)), 10_000, stream=0)
    [launch] = observer.launches
    assert launch.kind == "triton" and launch.moved == pytest.approx(moved)


def test_memory_is_allocated_in_blocks_of_512_bytes():
    observer = Observer()
    before, seen = observer.live, []
    with FakeTensorMode(), observer:
        for numbers in (1, 128, 129, 256):  # of four bytes
            kept = torch.empty(numbers, device="cuda")
            seen.append(observer.live - before)
            del kept
            assert observer.live == before
    assert seen == [512, 512, 1024, 1024] and observer.peak - before == 1024


@pytest.mark.parametrize(("steps", "ran"), [
    (1, {1: (True, True)}), (2, {2: (True, True)}), (3, {1: (True, False), 2: (True, True)}),
    (5, {1: (True, False), 2: (True, True)})])
def test_of_many_micro_steps_two_are_run(steps, ran, monkeypatch):
    asked = {}

    def observed(script, card, world_size, settings, compiled, assembled):
        number = settings["total_batch_size"] // 65_536
        asked[number] = compiled, assembled
        return Prediction(micro_batch=8, micro_steps=number, peaks={}, memory={}, collectives={},
                          flops={"bfloat16": 7 * number, "float32": 1 + number},
                          moved=10 + 3 * number)

    monkeypatch.setattr(runs, "observe", observed)
    sizes = {**SMALL, "total_batch_size": steps * 65_536}
    assert predict(find_script("01"), H100, 8, sizes, True) == Prediction(
        8, steps, {}, {}, {"bfloat16": 7 * steps, "float32": 1 + steps}, 10 + 3 * steps, {})
    assert asked == ran


def test_a_card_without_bfloat16_computes_in_float32():
    script, t4, chosen = find_script("01"), CARDS["t4"], {"bf16": True, "seed": 1}
    assert [runs._for_card(script, *how) for how in ((t4, {"seed": 1}), (t4, chosen), (H100, {}))
            ] == [{"bf16": False, "seed": 1}, chosen, {}]
    assert runs._for_card(SimpleNamespace(hyperparameters={}), t4, {}) == {}


def test_bytes_and_products_of_operators_are_counted_as_by_hand():
    observer = Observer()
    with (mode := FakeTensorMode()), observer:
        row, a, b, c = (torch.empty(size, device="cuda")
                        for size in ((1, 7), (3, 5), (5, 7), (3, 7)))
        a.view(5, 3), a.detach(), torch.empty(9, device="cuda"), torch.ones(9)  # start nothing
        row.expand(3, 7) + c  # what is expanded is read once
        a @ b
        a.zero_(), a.fill_(1), a.mul_(2)
        observer.observed(lambda _: a.half() @ b.half())(None)
        q = torch.empty(2, 3, 11, 8, device="cuda")
        for causal in (False, True):
            torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, is_causal=causal)
    attention = "_scaled_dot_product_flash_attention"
    assert [(one.kind, one.name, one.moved, one.flops, one.dtype) for one in observer.launches] == [
        ("eager", "add", 28 + 84 + 84, 0, None), ("eager", "mm", 60 + 140 + 84, 210, "float32"),
        ("eager", "zero_", 60, 0, None), ("eager", "fill_", 60, 0, None),
        ("eager", "mul_", 2 * 60, 0, None), ("library", "_to_copy", 60 + 30, 0, None),
        ("library", "_to_copy", 140 + 70, 0, None),
        ("library", "mm", 30 + 70 + 42, 210, "float16"),
        *(("eager", attention, 4 * (2 * q.numel() + 2 * 3 * 11) + 24, flops, "float32")
          for flops in (2 * 2 * 11 * q.numel(), 2 * 11 * q.numel()))]  # with its random state
    assert observer.moved == sum(one.moved for one in observer.launches) and observer.graphs == 1
    with mode, observer, pytest.raises(TypeError, match=(
            r"^aten.mm.default of float32 \(3, 5\) and float16 \(5, 7\)$")):
        torch.mm(a, b.half())


def test_kernels_that_multiply_are_counted_as_by_hand():
    observer, x, q, k = Observer(), *map(torch.empty, ((2, 3, 5), (2, 3, 11, 4), (2, 3, 7, 4)))
    for name, given in (("symmetric_kernel", {"x": x}), ("attend", {"arg_Q": q, "arg_K": k}),
                        ("attend", {"arg_Q": q, "arg_K": k, "arg_DQ": q}), ("add", {"x": x})):
        SilentKernel(name, f"def {name}({', '.join(given)}):", observer).run(*given.values())
    observer.keys_per_query = 2.5
    SilentKernel("attend", "def attend(arg_Q, arg_K):", observer).run(q, k)
    pairs = 2 * 2 * 3 * 11 * 4
    assert [launch.flops for launch in observer.launches] == [
        2 * 3 * 3 * 5, 2 * 7 * pairs, 7 * 7 * pairs, 0, 2 * 2.5 * pairs]


@pytest.mark.parametrize(("milestone", "transposed"), [("12c", False), ("14i", True)])
def test_the_fused_mlps_kernel_is_a_product(milestone, transposed):
    source = load_manifest().get(milestone).script.read_text(encoding="utf-8")
    M, N, K = 3, 5, 7
    a, b, post, out = (torch.empty(shape).bfloat16() for shape in ((M, K), (K, N), (M, N), (M, N)))
    observer = Observer()
    for given in None, post:
        SilentKernel("relu2_kernel", source, observer).run(
            a, b.T if transposed else b, given, out, M, N, K, stream=0)
    assert [(launch.group, launch.flops, launch.moved) for launch in observer.launches] == [
        ("products", 2 * M * N * K, 2 * (M * K + K * N + count * M * N)) for count in (1, 2)]
    assert observer.flops == {"bfloat16": 4 * M * N * K}


def test_a_kernel_of_the_scripts_own_takes_no_float64():
    source = "{'signature': {'x': '*bf16', 'alpha': 'fp64'}}\ndef scale_kernel(x, alpha):"
    words = "^scale_kernel takes alpha as float64; use tl.constexpr or a tensor$"
    with pytest.raises(TypeError, match=words):
        Observer().kernel("scale_kernel", source)
    own, fused_one = source.replace("fp64", "fp32"), source.replace("scale_kernel", "triton_poi_0")
    observer = Observer()
    observer.kernel("scale_kernel", own), observer.kernel("triton_poi_0", fused_one)
    assert observer.sources == {own: "scale_kernel", fused_one: "triton_poi_0"}  # to be assembled


def test_without_triton_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(compat, "_triton", lambda: None)
    assert compat.reason_against() is None
    assert "is missing: pip install --no-deps triton==" in compat.reason_against(compiled=True)


# ---- where it cannot be ----


@pytest.mark.parametrize(("arguments", "words"), [
    ("05 --device-batch 3", r"total_batch_size=524288 is not a multiple of .* 3 \* 65536 \* 8"),
    ("05 --set seq_len=7000", r"total_batch_size=524288 is not a multiple of .* 1 \* 7000 \* 8"),
    ("05 --set seq_length=7", "05_flex_attention.* has no hyperparameter seq_length"),
    ("e0", "starts from a checkpoint, and fake GPUs have no weights; predict the milestone that"),
    (f"04 --device-batch {10**20}", "micro_batch_size=1[0]{20} is out of range"),
    (f"04 --nproc {10**11}", "524288 is not a multiple of .* = 64 [*] 1024 [*] 100000000000; "),
])
def test_sizes_that_no_run_takes_are_refused(arguments, words):
    with pytest.raises(UserError, match=words) as refused:
        command.main(arguments.split())
    assert "\n" not in str(refused.value)


def test_more_tokens_than_a_shard_counts_are_refused():
    sizes = dict(seq_len=2**28, micro_batch_size=1, total_batch_size=2**31, val_tokens=2**31)
    with pytest.raises(UserError, match="4,294,967,297 tokens, more than"):
        predict(find_script("01"), H100, 8, sizes)


def test_a_run_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(runs, "LONGEST", {False: 1})
    with pytest.raises(UserError, match="muon on the fake GPU has computed for 1 seconds and not"):
        predict(find_script("01"), H100, 8, SMALL)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("failed", [True, False])
def test_runs_side_by_side_end_where_one_fails(failed, monkeypatch):
    killed = []
    monkeypatch.setattr(runs.multiprocessing, "active_children", lambda: [
        SimpleNamespace(kill=lambda: killed.append("it"))])
    with pytest.raises(KeyError) if failed else nullcontext(), runs._side_by_side() as pool:
        [*pool.map({1: 2}.__getitem__, (1, 2 - (not failed)))]
    assert killed == ["it"] * failed


def test_another_torch_or_triton_is_refused(monkeypatch):
    assert compat.other_version(compiled=True) is None  # else all tests here fail
    monkeypatch.setattr(compat, "TORCH", "2.12.0")
    assert compat.reason_against() == (
        f"predictions need torch 2.12.0; this is {torch.__version__}")
    monkeypatch.undo()
    monkeypatch.setattr(compat, "TRITON", "0.0")
    found = "here it is" if compat._triton() else "which is missing"
    assert re.search(f"need triton 0.0[;,] {found}", compat.reason_against(compiled=True))


@pytest.mark.parametrize("version, fits", [("3.7.1", True), ("3.7.0", True), ("3.6.1", False),
                                           ("4.7.1", False), (None, True)])
def test_which_triton_fits(version, fits, monkeypatch):
    monkeypatch.setattr(compat, "TORCH", torch.__version__.partition("+")[0])
    monkeypatch.setattr(compat, "_triton", lambda: version)
    assert compat.other_version() is None
    assert compat.other_version(compiled=True) == (None if fits else (
        f"compiled predictions need triton 3.7.1; here it is {version}:"
        " pip install --no-deps triton==3.7.1"))


@pytest.mark.parametrize("known, answer, reason", [
    ("platform.machine", "arm64", "predictions need Linux on x86-64; this is linux arm64"),
    ("torch.cuda.is_available", True,
     "predictions are for machines without a GPU; run_milestone.py measures on this one"),
])
def test_a_machine_that_cannot_predict_is_told_why(known, answer, reason, monkeypatch):
    monkeypatch.setattr(known, lambda: answer)
    assert compat.reason_against() == compat.reason_against(compiled=True) == reason
