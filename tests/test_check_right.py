"""Right is told from wrong: other wordings of a milestone pass, and each fault is seen by a look.

Run: .venv/bin/python -m pytest tests/test_check_right.py
"""

import os
import subprocess
import sys
import zlib
from collections import Counter

import numpy as np
import pytest

from examinations import IDS, MANIFEST, edited, failures, source_of
from speedrun import compat
from speedrun.check.transplant import Mixture
from speedrun.check.values import odd_values
from speedrun.history.fields import default_hyperparameters
from speedrun.history.guide import load_guide
from speedrun.scripts.find import find_script

MILESTONES = MANIFEST.milestones
FAST = ("00", "e4b")  # those that are tried whole in the default run: the most other wordings
SAMPLE = 2  # slips of the first that are tried
LAST = MANIFEST.of_chain().milestones[-1].id
NEWEST = "the newest milestone that has the text"
CASES = [(milestone, slip) for milestone in MILESTONES for slip in load_guide(milestone).slips]

# ---- other wordings ----


def tried_of(ids, fast):
    """By default some; with the slow tests all."""
    return pytest.mark.parametrize("id", [
        id if id in fast else pytest.param(id, marks=pytest.mark.slow) for id in ids])


tried_whole = tried_of(IDS, FAST)
tried_training = tried_of([id for id in IDS if not find_script(id).generates], [LAST])


def variants(id):
    """[(names of variants, a script that has them all)]: the milestone's variants in as few scripts
    as they fit into, or the milestone itself."""
    scripts = []
    for right in load_guide(MANIFEST.get(id)).rights:
        for i, (names, text) in enumerate([*scripts, ([], source_of(id))]):
            if made := right.apply(text, source_of(id)):
                scripts[i : i + 1] = [([*names, right.name], made)]
                break
    return scripts or [(["itself"], source_of(id))]


@tried_whole
def test_what_is_right_in_another_way_passes_and_the_parent_does_not(id, ask):
    scripts, parent = variants(id), MANIFEST.get(id).parent
    assert ask(id=id) == []
    looks = {"syntax", "contract", "tokens" if find_script(id).generates else "two ranks"}
    for names, text in scripts:
        outcomes = ask(id=id, text=text)
        assert failures(outcomes) == {}, names
        assert looks < {outcome.name for outcome in outcomes}
    assert not parent or ask(id=id, texts=[source_of(parent)]) != [None]


# A checksum of what a job observes of a milestone, how closely, and in which form. So a change
# that nobody meant shows, even if it hides faults. A failing test prints the lines and their sum.
OBSERVED = {
    "00": {"contract": 1503622205, "schedules": 1847143698, "model": 3570499119,
           "initial weights": 100526082, "updates": 32570703, "training": 3760316759,
           "record tokens": 3302687266, "two ranks": 3367429108, "more ranks": 1990016065,
           "model on a GPU": 1398771407, "precision": 1726710658, "kernels": 804179600,
           "refusals": 2352479268},
    "e4b": {"contract": 1715265313, "logits": 3383273441, "prompts": 2921693283,
            "tokens": 2938606191, "printing": 2685727160, "refused answers": 2646825302},
    "e2a": {"updates": 520370735},
    "05o": {"model": 907963843, "updates": 2236192505, "model on a GPU": 290184539,
            "kernels": 605640941},
    "03": {"more ranks": 3404245133},
    "08g": {"contract": 2730219868, "precision": 1201413820},
    "p6d": {"record tokens": 1027728300},
    LAST: {"initial weights": 3119906310, "updates": 4290395049, "two ranks": 2254293873,
           "model on a GPU": 3498157813, "precision": 2915937592},
}


@pytest.mark.skipif(bool(compat.other_version()), reason=compat.other_version() or "")
@pytest.mark.parametrize("id", OBSERVED)
def test_what_jobs_observe_is_what_they_are_meant_to(id, ask):
    lines = ask(id=id, lines=True, jobs=[*OBSERVED[id]])
    found = {job: (zlib.crc32(lines[job].encode()), lines[job]) for job in OBSERVED[id]}
    assert {job: seen for job, seen in found.items() if seen[0] != OBSERVED[id][job]} == {}


@pytest.mark.slow
def test_a_switch_without_its_kernel_is_not_enough(ask):
    without = edited("05o", ("momentum), dtype, use_triton)", "momentum), dtype)"))
    forgotten = edited("05o", ("symmetric_product(A, A, alpha=c, beta=b, use_triton=use_triton)",
                               "symmetric_product(A, A, alpha=c, beta=b)"))
    found = ask(id="05o", texts=[without, forgotten], jobs=["kernels"])
    launches = "launches of Triton's kernels by the optimizers with use_triton=True: 20"
    assert found == [["kernels", launches, "nothing of the kind"],
                     ["kernels", f"{launches}, or not much less", "10"]]


def test_a_validation_in_training_mode_shows_as_such_and_in_eight_bits(ask):
    script = edited("05o", ("    model.eval()\n", ""))
    (found,) = ask(id="05o", texts=[script], jobs=["updates"])
    assert found == ["updates", "model.training in the validation: False", "True"]
    (found,) = ask(id="05o", texts=[script], jobs=["kernels"])
    assert found[1].startswith("products of eight bits in the validation with use_fp8=True: none")


@pytest.mark.slow
def test_a_warm_up_of_all_windows_is_right_and_one_of_fewer_is_not(ask):
    some = "set_window(*window_sizes(step, args))\n"
    found = ask(id="08g", jobs=["training"], texts=[
        edited("08g", (some, f"set_window(*2 * [all_windows(args)[{which}]])\n"))
        for which in ("i - 1", "0")])
    words = "sets of numbers in the model's calls that training has and the warm-up has not"
    assert found == [None, ["training", f"{words}: 0", "3"]]


# What only one look shows: (milestone, job, edits, the start of what is said).
SEEN_BY_ONE_LOOK = [
    ("e2a", "two ranks", [("model.broadcast_buffers = False", "pass")],
     "buffers that DistributedDataParallel sends from rank 0 before a pass"),
    ("e2a", "two ranks", [("if args.save_checkpoint and rank == 0:", "if args.save_checkpoint:"),
                         ('"checkpoint.partial"', 'f"checkpoint{rank}.partial"')],
     "files that rank 1 writes"),
    ("e2a", "training", [("model=raw_model.state_dict()", "model={name: value.half().float() for "
                          "name, value in raw_model.state_dict().items()}")],
     "the weights in the checkpoint are those of the run's end, bit for bit"),
    ("e2a", "model", [("torch.outer(torch.arange(seq_len)",
                      "torch.outer(torch.arange(seq_len).bfloat16().float()")],
     "the tables at the record's lengths, without signs"),
    (NEWEST, "two ranks", [("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)")],
     "all ranks begin with the same weights"),
    ("09", "updates", [("return ready.popleft().result()",
                        "kept.append(ready.popleft())\n        return kept[-1].result()"),
                       ("    def next_batch():", "    kept = []\n\n    def next_batch():")],
     "batches that wait, or are kept, after 12"),
    ("09", "precision", [("            (loss * targets.numel()).backward()",
                          "            assert loss.isfinite()\n"
                          "            (loss * targets.numel()).backward()")],
     "numbers read from tensors between the model's calls"),
    ("09", "initial weights", [("bound = 0.5 * (3", "bound = 0.55 * (3")], "the initial weights"),
    ("09", "model on a GPU", [("dtype, fast=False)", "dtype, fast=True)")],
     "products of eight bits in call 1 of the model with use_fp8=True"),
    ("09", "model on a GPU", [("weight8.T.contiguous()", "weight8.T")],
     "products of eight bits in call 1 of the model with use_fp8=True"),
    ("09", "model on a GPU", [(".clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)", "")],
     "the gradient in call 1 of the model with use_fp8=True, out of the range of eight bits"),
    ("05o", "kernels", [("if row + ROWS <= column:", "if row < column:")],
     "results of Triton's kernels by the optimizers with use_triton=True"),
    ("05o", "kernels", [("k[None, :], mask=k[None, :] < K, other=0.0", "k[None, :] % K"),
                        ("k[:, None], mask=k[:, None] < K, other=0.0", "k[:, None] % K")],
     "results of Triton's kernels by the optimizers with use_triton=True"),
    ("09", "training", [('torch.tensor(group["lr"] * correction)', 'group["lr"] * correction')],
     "sets of Python numbers in calls of compiled functions, each compiled by itself"),
    (NEWEST, "precision", [("(upper | (remainders.int() & 0xFFFF))", "(upper + remainders.int())")],
     "the sum of 12 small moves with bf16=True"),
    (NEWEST, "precision", [("decay * exact * agree", "decay * weights * agree")],
     "how uneven the decay of all bits of weights is"),
    (NEWEST, "kernels", [("tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)",
                           "total")],
     "the gradients with use_triton=True"),
    (NEWEST, "model", [("ctx.save_for_backward(x, w_in, w_out, post)",
                      "ctx.save_for_backward(x, w_in, w_out, post, F.relu(x @ w_in))"),
                     ("x, w_in, w_out, post = ctx", "x, w_in, w_out, post, _ = ctx")],
     "bytes that the MLPs keep for the backward pass of call 1 of the model"),
    (NEWEST, "initial weights", [("init_uniform(weights[:3], args.qkv_init)",
                                "weights[:3] = init_uniform("
                                "torch.empty_like(weights[0]), args.qkv_init)")],
     "numbers that the initial weights have, each counted once"),
    (NEWEST, "more ranks", [("slice(rank * len(grads), (rank + 1)",
                           "slice(min(rank, 1) * len(grads), (min(rank, 1) + 1)")],
     "the sum of two moves on 4 ranks, rank 0"),
    ("03", "more ranks", [("params[dist.get_rank() :: dist.get_world_size()]",
                           "params[: len(params) // dist.get_world_size() * dist.get_world_size()]"
                           "[dist.get_rank() :: dist.get_world_size()]")],
     "the sum of two moves on 5 ranks, rank 0"),
    ("08g", "updates", [
        ("    def next_batch():\n        ready", "    while True:\n        ready"),
        ("return ready.popleft().result()  # an", "yield ready.popleft().result()  # an"),
        ("    return iter(next_batch, None)  # endless;", "    # endless;")],
     "a thread starts after the first validation"),
    ("08g", "precision", [("(logits.float().exp()", "(logits.exp()")],
     "exponentials and the like in the model's parts with bf16=True"),
    ("08g", "precision", [
        ("mean=torch.zeros_like(rows), mean_square=torch.zeros_like(rows)",
         "mean=torch.zeros_like(rows).float(), mean_square=torch.zeros_like(rows).float()"),
        ("    mean.lerp_(grad, ", "    grad = grad.float()\n    mean.lerp_(grad, ")],
     "dtypes of the optimizers' state with bf16=True"),
    (NEWEST, "two ranks", [
        ("gathers.append(dist.all_gather_into_tensor(weights, weights[share], async_op=True))\n"
         "        for gather in gathers:\n            gather.wait()\n",
         "copy = torch.empty_like(weights)\n            handle = dist.all_gather_into_tensor(copy, "
         "weights[share], async_op=True)\n            gathers.append((handle, weights, copy))\n"
         "        for gather, weights, copy in gathers:\n            gather.wait()\n"
         "            weights.copy_(copy)\n")],
     "share of received updates that arrive in the model's own tensors, rank 0"),
    ("e2a", "training", [("bisect_left(space, (size, 0))",
                         "min((row for left, row in space if left >= size), default=-1)\n        "
                         "fullest = next((i for i, (_, row) in enumerate(space) if row == fullest),"
                         " len(space))")],
     "the log of a run after a kernel warm-up"),
    ("p6d", "record tokens", [('mode="r", offset=1024)', 'mode="r", offset=1024).astype(int)')],
     "bytes of memory that a run with a large shard takes"),
    ("p6d", "record tokens", [("if args.memory_map:", "if False:")],
     "bytes that are read from files in a run with a large shard"),
    ("p6d", "record tokens", [(".astype(np.int64)", ".astype(np.int16).astype(np.int64)")],
     "a run with the record's token ids"),
]


def tried_at(id, edits):
    """The id, or that of the newest milestone whose text has what these edits replace."""
    return id if id != NEWEST else next(
        m.id for m in reversed(MANIFEST.of_chain().milestones)
        if all(old in source_of(m.id) for old, _ in edits))


def test_each_look_edits_a_snapshot():
    for id, _job, edits, _words in SEEN_BY_ONE_LOOK:
        edited(tried_at(id, edits), *edits)


def test_names_do_not_depend_on_the_order_in_which_parts_are_made():
    import torch

    from speedrun.check.spy import Spy
    from speedrun.check.weights import fill, parameters_of

    def made(*names):
        net = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in names})
        net["head"].weight = net["embed"].weight
        fill(net)
        watched = Spy()
        watched.models = [net]
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        first = optimizer.param_groups[0]["params"][0]
        optimizer.state[first]["momentum"] = torch.zeros(2, 4, 4)  # of the whole group
        watched.steps[optimizer] = 1
        return parameters_of(net), [name for name, _ in watched.states()]

    names = ("embed", "mlp", "head")
    (wanted, states), (seen, others) = made(*names), made(*reversed(names))
    assert sorted(wanted) == sorted(seen) == ["embed.weight", "mlp.weight"]
    assert all(torch.equal(wanted[name], seen[name]) for name in wanted)
    assert states == others == ["embed.weight"]


def test_values_are_the_same_for_every_hash_seed():
    code = ("from speedrun.check.values import odd_values\n"
            "from speedrun.history.manifest import load_manifest\n"
            "print([odd_values(milestone) for milestone in load_manifest().milestones])")
    found = {subprocess.run([sys.executable, "-c", code], encoding="utf-8", capture_output=True,
                            check=True, env=os.environ | dict(
                                PYTHONHASHSEED=str(seed), PYTHONPATH=os.pathsep.join(sys.path))
                            ).stdout for seed in range(3)}
    assert len(found) == 1 and "num_layers" in found.pop()


@pytest.mark.parametrize("id", [m.id for m in MILESTONES if "window_size" in source_of(m.id)])
def test_values_exercise_every_window(id, tmp_path):
    from speedrun.check.worker import write_shards

    milestone = MANIFEST.get(id)
    values = default_hyperparameters(milestone.script) | odd_values(milestone)
    kinds = values.get("window_pattern", "")[: values["num_layers"]]
    without = values.get("layer_without_attention")
    assert set(kinds) == {kind for layer, kind in enumerate(kinds) if layer != without}
    staged = values.get("window_growth", 0) * (values.get("window_stages", 1) - 1)
    widest = max(values.get("window_start", 0) + staged, values.get("window_end", 0),
                 values.get("long_window_end", 0))
    write_shards(tmp_path)
    tokens = np.fromfile(tmp_path / "val_0.bin", "<u2")[512:]
    row = values.get("val_seq_len") or values["seq_len"]
    begins = np.arange(len(tokens)) % row == 0
    starts = np.flatnonzero(begins | (tokens == values.get("bos_id", 1)))
    lengths = np.diff(starts)[starts[:-1] < values["val_tokens"]]
    assert lengths.max() > min(widest, row - 3)


@pytest.mark.parametrize("id", [
    pytest.param(id, marks=pytest.mark.slow) if looks > 3 else id
    for id, looks in Counter(tried_at(id, edits) for id, _, edits, _ in SEEN_BY_ONE_LOOK).items()])
def test_what_one_look_shows(id, ask):
    cases = [(job, edited(id, *edits), words)
             for some, job, edits, words in SEEN_BY_ONE_LOOK if tried_at(some, edits) == id]
    found = [ask(id=id, texts=[text], jobs=[job])[0] for job, text, _ in cases]
    assert [(words, seen) for (_, _, words), seen in zip(cases, found, strict=True)
            if seen is None or not seen[1].startswith(f"{words}: ")] == []


@tried_training
def test_weights_are_judged_by_their_distribution(id, ask):
    texts = [edited(id, ("torch.manual_seed(args.seed)", f"torch.manual_seed(args.seed + {more})"))
             for more in ((100, 200, 300) if os.environ.get("RUN_SLOW") else (100,))]
    assert ask(id=id, texts=texts, jobs=["initial weights"]) == [None] * len(texts)


def caught(id, some, ask):
    """Asserts that each slip of a milestone is seen, and that its block alone differs."""
    text = source_of(id)
    for slip in some:
        assert Mixture(text, slip.apply(text)).candidates() == [slip.block], slip.name
    seen = ask(id=id, texts=[slip.apply(text) for slip in some])
    assert [slip.name for slip, what in zip(some, seen, strict=True) if what is None] == []


def test_slips_are_caught(ask):
    id = FAST[0]
    caught(id, [slip for milestone, slip in CASES if milestone.id == id][:SAMPLE], ask)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason="RUN_SLOW=1 tries every slip")
@pytest.mark.parametrize("id", IDS)
def test_every_slip_is_caught(id, ask):
    caught(id, [slip for milestone, slip in CASES if milestone.id == id], ask)


def test_slips_have_names():
    assert len({(milestone.id, slip.name) for milestone, slip in CASES}) == len(CASES)
