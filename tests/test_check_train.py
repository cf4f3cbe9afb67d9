"""The learner's path: right is told from wrong and pinned to a block, and nothing is ever lost.

Run: .venv/bin/python -m pytest tests/test_check_train.py
"""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from speedrun.base.errors import UserError  # noqa: E402
from speedrun.check import command as commands  # noqa: E402
from speedrun.check import hints, progress  # noqa: E402
from speedrun.check.command import open_learner  # noqa: E402
from speedrun.check.differences import Difference  # noqa: E402
from speedrun.check.hints import find_hint, load_guide, slips_of  # noqa: E402
from speedrun.check.screen import (
    Outcome,  # noqa: E402
    Screen,  # noqa: E402
)
from speedrun.check.transplant import Mixture, judge  # noqa: E402
from speedrun.check.values import odd_values  # noqa: E402
from speedrun.history.blocks import split_blocks  # noqa: E402
from speedrun.history.fields import default_hyperparameters  # noqa: E402
from speedrun.history.manifest import REPOSITORY, load_manifest  # noqa: E402
from speedrun.scripts.find import find_script  # noqa: E402

COMMAND = REPOSITORY / "tools" / "check_train.py"
MANIFEST = load_manifest()
MILESTONES = MANIFEST.milestones
IDS = [milestone.id for milestone in MILESTONES]
LISTED = MANIFEST.of_chain().milestones  # to a learner of the first chain
ROOT = IDS[0]
SAMPLE = 25  # every 25th slip is tried in the default run


def source_of(id):
    """The text of a milestone's snapshot."""
    return MANIFEST.get(id).script.read_text(encoding="utf-8")


def edited(id, *edits):
    """A snapshot's text with each (old, new) replaced, wherever it stands; old must occur."""
    text = source_of(id)
    for old, new in edits:
        assert old in text, f"{id}: no {old!r}"
        text = text.replace(old, new)
    return text


CASES = [(milestone, slip) for milestone in MILESTONES for slip in load_guide(milestone).slips]


# ---- one process for all examinations: torch is imported once ----


def serve(folder):
    """Answers requests, a line of JSON each, until there are no more."""
    from speedrun.check import trace
    from speedrun.check.examine import Examination, examine, in_words

    known = {}
    for line in sys.stdin:
        request = json.loads(line)
        id = request["id"]
        if id not in known:
            known[id] = Examination(Path(folder), time.monotonic() + 7200, MANIFEST.get(id))
        if "text" in request:
            answer = [asdict(outcome) for outcome in examine(request["text"].encode(), known[id])]
        elif "texts" in request:
            jobs = request.get("jobs", known[id].jobs)
            found = known[id].first_differences(request["texts"], jobs)
            answer = [seen and [seen[1], *in_words(seen[0])] for seen in found]
        else:
            answer = [job for job, seen in known[id].wanted.items()
                      if seen.get(trace.ALL[job].what, [""])[0] == "error"]
        print(json.dumps(answer), flush=True)


@pytest.fixture(scope="module")
def ask():
    """ask(id=..., text=...): the outcomes of a script; with texts=[...]: for each the first thing
    in which it differs from the milestone, or None (jobs=[...]: in these jobs); with id alone: the
    jobs in which the milestone's own script stops, so that nothing is compared in them."""
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, __file__, folder], env=environment, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        def request(**what):
            print(json.dumps(what), file=server.stdin, flush=True)
            answer = json.loads(server.stdout.readline())
            return [Outcome(**some) for some in answer] if "text" in what else answer

        try:
            yield request
        finally:
            server.stdin.close()
            server.wait(30)


def failures(outcomes):
    """{block or look: all that is said of it} of what did not pass."""
    return {o.key: f"{o.name} | {o.expected} | {o.got} | {o.meaning}" for o in outcomes
            if not o.passed}


# ---- right and wrong ----


# Differently written, and right: (milestone, blocks in another wording, edits).
OTHER_MUON = '''
def whiten(m, dtype, rounds=5):
    m = m.to(dtype) / (m.to(dtype).norm() + 1e-7)
    for _ in range(rounds):
        if m.shape[0] <= m.shape[1]:
            gram = torch.einsum("ij,kj->ik", m, m)
            m = 3.4445 * m - 4.7750 * gram @ m + 2.0315 * gram @ (gram @ m)
        else:
            gram = torch.einsum("ji,jk->ik", m, m)
            m = 3.4445 * m - 4.7750 * m @ gram + 2.0315 * (m @ gram) @ gram
    return m


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum, bf16, compiled):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})
        self.bf16 = bf16
        self.whiten = torch.compile(whiten) if compiled else whiten

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            mu = group["momentum"]
            for weight in group["params"]:
                memory = self.state[weight]
                if "mean" not in memory:
                    memory["mean"] = weight.grad * (1 - mu)
                else:
                    memory["mean"].mul_(mu).add_(weight.grad, alpha=1 - mu)
                ahead = torch.lerp(weight.grad, memory["mean"], mu)
                white = self.whiten(ahead, torch.bfloat16 if self.bf16 else torch.float32)
                weight.sub_(group["lr"] * max(weight.shape) ** 0.5 * white)
'''
# Each of the first layers' matrices belongs to rank 0, the next to rank 1; owners send to everyone.
OTHER_SHARES = '''
class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum, bf16, compiled):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.dtype = (torch.float32, torch.bfloat16)[bf16]
        self.orthogonal = torch.compile(newton_schulz, disable=not compiled)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            sent = []
            for i, p in enumerate(group["params"]):
                owner = i * dist.get_world_size() // len(group["params"])
                update = torch.empty_like(p, dtype=self.dtype)
                if owner == dist.get_rank():
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    update = nesterov_update(p.grad, buffer, group["momentum"])
                    update = self.orthogonal(update[None], self.dtype)[0]
                    update = (update * max(p.shape) ** 0.5).contiguous()
                sent.append((p, update, dist.broadcast(update, owner, async_op=True)))
            for p, update, handle in sent:
                handle.wait()
                p.sub_(group["lr"] * update)
'''
# Rounds of one matrix for each rank, each sent while the next round is computed.
OTHER_ROUNDS = '''
class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum, bf16, compiled):
        params = sorted(params, key=torch.numel)
        groups = [dict(params=list(some)) for _, some in itertools.groupby(params, torch.numel)]
        super().__init__(groups, dict(lr=lr, momentum=momentum))
        self.dtype = (torch.float32, torch.bfloat16)[bf16]
        self.orthogonal = torch.compile(newton_schulz, disable=not compiled)

    @torch.no_grad()
    def step(self):
        last = []
        for group in self.param_groups:
            for i in range(0, len(group["params"]), dist.get_world_size()):
                some = group["params"][i : i + dist.get_world_size()]
                update = torch.zeros_like(wide(some[0]), dtype=self.dtype).contiguous()
                if dist.get_rank() < len(some):
                    p = some[dist.get_rank()]
                    buffer = self.state[p].setdefault("mean", torch.zeros_like(p))
                    update = nesterov_update(p.grad, buffer, group["momentum"])
                    update = self.orthogonal(wide(update)[None], self.dtype)[0].contiguous()
                self.apply(*last)
                parts = [torch.empty_like(update) for _ in range(dist.get_world_size())]
                last = group["lr"], some, parts, dist.all_gather(parts, update, async_op=True)
        self.apply(*last)

    def apply(self, lr=0, some=(), parts=(), handle=None):
        if handle:
            handle.wait()
        for p, update in zip(some, parts):
            p.sub_(lr * max(1, p.size(0) / p.size(1)) ** 0.5 * (
                update if p.size(0) <= p.size(1) else update.mT))
'''
ONE_MESSAGE = '''
        params = list(model.parameters())
        message = torch.cat([p.grad.float().flatten() for p in params])
        dist.all_reduce(message)
        for p, part in zip(params, message.split([p.numel() for p in params])):
            p.grad.copy_(part.view_as(p) / dist.get_world_size())
'''
OTHER_ROTARY = '''
class Rotary(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        speed = 10000.0 ** (-torch.arange(width // 2) / (width // 2))
        turns = torch.outer(torch.arange(length), speed)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x):
        angles = self.turns[: x.size(1), None].float()
        pairs = torch.complex(*x.float().chunk(2, dim=-1)) * torch.polar(
            torch.ones_like(angles), -angles)
        return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)
'''
EINSUM = '''
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.head_dim**-0.5
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        y = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
'''
SDPA = ("        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
        "  # scale 1 / sqrt(head_dim)\n")
OTHER_MASK = '''
def attention_mask(inputs, window, args):
    B, T = inputs.shape
    if T > 16_384 and not (args.use_flex_attention and args.compile):
        raise AssertionError("a dense mask would be too large")
    time = torch.arange(T, device=inputs.device)
    starts = torch.where(inputs == args.bos_id, time, 0).cummax(1).values  # (B, T)
    oldest = torch.maximum(starts, time - window + 1)
    if args.use_flex_attention:
        return create_block_mask(lambda b, h, q, k: (k <= q) & (k >= oldest[b, q]), B, None, T, T,
                                 device=inputs.device)
    hidden = (time > time[:, None]) | (time < oldest[:, None, :, None])
    return torch.zeros(hidden.shape, device=inputs.device).masked_fill(hidden, float("-inf"))
'''
OTHER_VALIDATE = '''
def validate(net, stream, count):
    net.eval()
    total = 0.0
    with torch.no_grad():
        for number, (inputs, targets) in enumerate(stream, start=1):
            total += net(inputs, targets)
            if number == count:
                break
    net.train()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size() / count
'''
OTHER_WARM_UP = '''
def warm_up(model, optimizers, batches, args):
    """Compiles."""
    def copy(parts):
        return [{k: v.clone() for k, v in part.state_dict().items()} if part is model
                else deepcopy(part.state_dict()) for part in parts]

    parts = [model] + list(optimizers)
    kept = copy(parts)
    for step in range(args.kernel_warmup_steps):
        inputs, targets = next(batches)
        loss = model(inputs, targets)
        loss.backward()
        [optimizer.step() for optimizer in optimizers]
        model.zero_grad(set_to_none=True)
    for part, state in zip(parts, kept):
        part.load_state_dict(state)
'''
# Frequencies that go on from where they are, and start again where the window is smaller.
OTHER_YARN = '''
class Rotary(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        first = [1024 ** (-i / (width // 4 - 1)) for i in range(width // 4)] + [0.0] * (width // 4)
        self.first, self.grown = torch.tensor(first, dtype=torch.float64), []
        self.register_buffer("turned", torch.zeros(2, length, width // 2), persistent=False)

    def set_window(self, window, args):
        if not self.grown or self.grown[-1] > window:
            self.grown, self.speeds = [args.window_start], self.first
            self.scale = args.attention_scale
        for new in all_windows(args):
            if self.grown[-1] < new <= window:
                old, pi = self.grown[-1], 3.141592653589793
                between = (self.speeds * old / (2 * pi) - 1).div(31).clamp(min=0, max=1)
                self.speeds = torch.lerp(self.speeds * old / new, self.speeds, between)
                self.scale = self.scale + self.scale / 5 * math.log(new / old)
                self.grown.append(new)
        angles = torch.arange(self.turned.size(1))[:, None] * self.speeds
        self.turned[:] = torch.stack((angles.cos(), angles.sin()))

    def forward(self, x):
        cos, sin = self.turned[:, : x.size(1), None]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).to(x.dtype)
'''
# One class sends for both optimizers; of Muon the updates travel, not the matrices.
SHARING_ADAM = '''
class Sharing(torch.optim.Optimizer):
    def scatter(self, rows):
        own = torch.empty_like(rows[: len(rows) // dist.get_world_size()])
        return own, dist.reduce_scatter_tensor(own, rows, async_op=True)

    def gather(self, own):
        rows = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
        return rows, dist.all_gather_into_tensor(rows, own, async_op=True)


class ShardedAdam(Sharing):
    def __init__(self, groups, betas, eps, compiled):
        super().__init__(groups, dict(betas=betas, eps=eps))
        self.update = torch.compile(adam_update, disable=not compiled)

    @torch.no_grad()
    def step(self):
        arriving = [(group, p, *self.scatter(p.grad)) for group in self.param_groups
                    for p in group["params"]]
        leaving = []
        for group, p, grad, message in arriving:
            message.wait()
            own = p.view(dist.get_world_size(), -1, *p.shape[1:])[dist.get_rank()].clone()
            state = self.state[p]
            t = state["t"] = state.get("t", 0) + 1
            means = [state.setdefault(name, torch.zeros_like(own)) for name in ("first", "second")]
            b1, b2 = group["betas"]
            rate = group["lr"] * math.sqrt(1 - b2**t) / (1 - b1**t)
            self.update(own, grad, *means, rate, b1, b2, group["eps"])
            leaving.append((p, *self.gather(own)))
        for p, rows, message in leaving:
            message.wait()
            p.copy_(rows)
'''
SHARING_MUON = '''
class Muon(Sharing):
    def __init__(self, params, lr, momentum, bf16, compiled, use_triton):
        shapes = dict.fromkeys(p.shape for p in params)
        groups = [dict(params=[p for p in params if p.shape == shape]) for shape in shapes]
        super().__init__(groups, dict(lr=lr, momentum=momentum))
        self.dtype, self.use_triton = (torch.float32, torch.bfloat16)[bf16], use_triton
        self.orthogonal = torch.compile(newton_schulz, disable=not compiled)

    @torch.no_grad()
    def step(self):
        arriving, leaving = [], []
        for group in self.param_groups:
            grads = [p.grad for p in group["params"]]
            filler = [torch.zeros_like(grads[0])] * (-len(grads) % dist.get_world_size())
            arriving.append((group, *self.scatter(torch.stack(grads + filler))))
        for group, grads, message in arriving:
            message.wait()
            mean = self.state[group["params"][0]].setdefault("mean", torch.zeros_like(grads))
            ahead = nesterov_update(grads, mean, group["momentum"])
            updates = self.orthogonal(ahead, self.dtype, self.use_triton)
            leaving.append((group, *self.gather(updates)))
        for group, updates, message in leaving:
            message.wait()
            for p, update in zip(group["params"], updates):
                p.sub_(group["lr"] * update)
'''
QUEUE = '''
def prefetched(batches, args, device):
    ready = queue.Queue(args.prefetched_batches)

    def fill():
        try:
            for batch in batches:
                ready.put((batch, None))
        except BaseException as error:
            ready.put((None, error))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        batch, error = ready.get()
        if error:
            raise error
        yield batch
'''
GATHER = """            gathered = [all_updates.clone() for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, all_updates)
            all_updates.copy_(torch.stack(gathered).sum(0))
"""
RIGHT = {
    "targets by view": (ROOT, {}, [("targets.flatten()", "targets.view(-1)")]),
    "a norm by hand": (ROOT, {}, [("F.rms_norm(x, (x.size(-1),), eps=1e-6)",
                                   "x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()")]),
    "attention by einsum": (ROOT, {}, [(SDPA, EINSUM.strip("\n") + "\n")]),
    "another validation": (ROOT, {"validate": OTHER_VALIDATE}, []),
    "another warm-up": (ROOT, {"warm_up": OTHER_WARM_UP}, []),
    "other names in main": (ROOT, {}, [("raw_model", "net"), ("micro_step ", "part "),
                                       ("optimized", "all_of_them")]),
    "the GPU's clock only": (ROOT, {}, [
        ("synchronize = torch.get_device_module().synchronize",
         "synchronize = lambda: torch.cuda.is_available() and torch.cuda.synchronize()")]),
    "the loss divided later": (ROOT, {}, [
        ("loss = model(inputs, targets)\n            (loss / grad_accum_steps).backward()\n"
         "            train_loss += loss.detach() / grad_accum_steps",
         "loss = model(inputs, targets).div(grad_accum_steps)\n            loss.backward()\n"
         "            train_loss += loss.detach()")]),
    "layers made in another order": (ROOT, {}, [
        ("        self.attn = CausalSelfAttention(args)\n        self.mlp = MLP(args)\n",
         "        self.mlp = MLP(args)\n        self.attn = CausalSelfAttention(args)\n")]),
    "a field of one's own": (ROOT, {}, [
        ("    seed: int = 0\n", "    seed: int = 0\n    my_own: float = 1.0\n"),
        ("self.c_proj(F.gelu(self.c_fc(x)))", "self.c_proj(F.gelu(self.c_fc(x)) * 1.0)")]),
    "Windows' line ends": (ROOT, {}, [("\n", "\r\n")]),
    "another Muon, matrix by matrix": ("01", {"Muon": OTHER_MUON, "newton_schulz": "",
                                              "nesterov_update": ""}, []),
    "another rotary arithmetic": ("01", {"Rotary": OTHER_ROTARY}, []),
    "a loop over the matrices": ("01", {}, [
        ("self.orthogonalise(torch.stack(list(batch.values())), self.dtype)",
         "torch.cat([self.orthogonalise(m[None], self.dtype) for m in batch.values()])")]),
    "norm after the rotation": ("02", {}, [("self.rotary(norm(q)), self.rotary(norm(k))",
                                            "norm(self.rotary(q)), norm(self.rotary(k))")]),
    "a square by power": ("02", {}, [("F.relu(self.c_fc(x)).square()",
                                      "self.c_fc(x).clamp(min=0).pow(2)")]),
    "owners that broadcast": ("03", {"Muon": OTHER_SHARES}, []),
    "gather instead of a sum": ("03", {}, [("            dist.all_reduce(all_updates)", GATHER)]),
    "buffers of updates kept": ("03", {}, [
        ("            dist.all_reduce(all_updates)",
         "            self.kept = [part.clone() for part in update_of.values()]\n"
         "            dist.all_reduce(all_updates)")]),
    "values by lerp": ("03b", {}, [
        ("(1 - self.value_lambda) * v + self.value_lambda * first_v",
         "v + self.value_lambda * (first_v - v)")]),
    "a softcap by tanh": ("03d", {}, [("60 * torch.sigmoid(logits / 15) - 30",
                                       "30 * torch.tanh(logits / 30)")]),
    "PyTorch's cross-entropy": ("03d", {}, [
        ("(logits.exp().sum(-1).log() - target_logits).mean()",
         "F.cross_entropy(logits.flatten(0, 1), targets.flatten())")]),
    "skips by index": ("04", {}, [
        ("weight * skips.pop()  #", "weight * skips[-1]; del skips[-1]  #")]),
    "rounds of updates": ("05c", {"Muon": OTHER_ROUNDS}, []),
    "one message for all gradients": ("05h", {}, [
        ("        for param in model.parameters():\n"
         "            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)\n", ONE_MESSAGE)]),
    "queries, keys and values one by one": ("05k", {}, [
        ("        qkv = F.linear(x, self.c_qkv.flatten(0, 1).to(x.dtype))\n"
         "        q, k, v = qkv.view(B, T, 3, self.num_heads, -1).unbind(2)\n",
         "        q, k, v = (F.linear(x, w.to(x.dtype)).view(B, T, self.num_heads, -1)\n"
         "                   for w in self.c_qkv)\n")]),
    "stacks one by one": ("05k", {}, [
        ("self.orthogonalise(torch.stack(momenta), self.dtype)",
         "torch.stack([self.orthogonalise(m[None], self.dtype)[0] for m in momenta])")]),
    "frequencies that go on": ("06b", {"Rotary": OTHER_YARN}, []),
    "one class for messages": ("06f", {"ShardedAdam": SHARING_ADAM}, []),
    "one class for both optimizers' messages": (
        "07", {"ShardedAdam": SHARING_ADAM, "Muon": SHARING_MUON}, []),
    "a queue and a thread": ("08", {"prefetched": QUEUE}, [
        ("import platform\n", "import platform\nimport queue\nimport threading\n")]),
    "another mask": ("05a", {"attention_mask": OTHER_MASK}, []),
    "FlexAttention by its module's name": ("05a", {}, [
        ("import create_block_mask, flex_attention\n",
         "import create_block_mask\n"
         "from torch.nn.attention import flex_attention as flex\n"),
        ("y = flex_attention(q", "y = flex.flex_attention(q")]),
    "another line in the log": ("09", {}, [
        ("    log.clock_start = log.now()\n",
         "    log.clock_start = log.now()\n    log.print0(f'batches:{args.total_batch_size}')\n")]),
    "the head's gradient from a product the other way round": ("09", {}, [
        ("x8.T.contiguous(), x_scale, grad8.T.contiguous(), grad_scale, torch.float32).T",
         "grad8.T.contiguous(), grad_scale, x8.T.contiguous(), x_scale, torch.float32)")]),
    "the window's schedule in other words": ("05a", {}, [
        ("(args.window_start + growth) // args.window_start * args.window_start",
         "args.window_start + growth - (args.window_start + growth) % args.window_start")]),
}


def tried_of(ids):
    """By default the last of each chain; with the slow tests all."""
    return pytest.mark.parametrize("id", [
        id if not MANIFEST.children(id)
        else pytest.param(id, marks=pytest.mark.slow) for id in ids])


tried = tried_of(IDS)
tried_training = tried_of([id for id in IDS if not find_script(id).generates])


def variants(id):
    """[(names of variants, a script that has them all)]: the milestone's variants in as few scripts
    as they fit into, or the milestone itself."""
    scripts = []
    for name, (_, blocks, edits) in ((n, what) for n, what in RIGHT.items() if what[0] == id):
        for i, (names, text) in enumerate([*scripts, ([], source_of(id))]):
            if all(old in text for old, _ in edits) and all(
                    whole_block(id, block) in text for block in blocks):
                for old, new in (*edits, *((whole_block(id, b), new.strip("\n"))
                                           for b, new in blocks.items())):
                    text = text.replace(old, new)
                scripts[i : i + 1] = [([*names, name], text)]
                break
    return scripts or [(["itself"], source_of(id))]


def whole_block(id, name):
    """The text of a block of a snapshot."""
    return next(block.text for block in split_blocks(source_of(id)) if block.name == name)


@tried
def test_what_is_right_in_another_way_passes_and_the_parent_does_not(id, ask):
    scripts, parent = variants(id), MANIFEST.get(id).parent
    texts = [text for _, text in scripts] + ([source_of(parent)] if parent else [])
    assert ask(id=id) == []
    found = ask(id=id, texts=texts)
    for (names, _), seen in zip(scripts, found, strict=False):
        assert seen is None, names
    assert not parent or found[-1] is not None


def test_a_switch_without_its_kernel_is_not_enough(ask):
    field = "    use_triton: bool = torch.cuda.is_available()\n"
    script = edited("05n", ("    compile: bool", f"{field}    compile: bool"))
    forgotten = edited("05o", ("symmetric_product(A, A, alpha=c, beta=b, use_triton=use_triton)",
                               "symmetric_product(A, A, alpha=c, beta=b)"))
    found = ask(id="05o", texts=[script, forgotten, source_of("05o")], jobs=["precision"])
    launches = "launches of Triton's kernels by the optimizers with use_triton=True: 20"
    assert found == [["precision", launches, "nothing of the kind"],
                     ["precision", f"{launches}, or not much less", "10"], None]


def test_a_validation_in_training_mode_shows_as_such_and_in_eight_bits(ask):
    script = edited("05i", ("    model.eval()\n", ""))
    (found,) = ask(id="05i", texts=[script], jobs=["updates"])
    assert found == ["updates", "model.training in the validation: False", "True"]
    (found,) = ask(id="05i", texts=[script], jobs=["precision"])
    assert found[1].startswith("products of eight bits in the validation with use_fp8=True: none")


def test_a_warm_up_of_all_windows_is_right_and_one_of_fewer_is_not(ask):
    some = "window_size(step, args)).backward()"
    every = "args.window_start + (i - 1) * args.window_growth).backward()"
    found = ask(id="05r", jobs=["training"], texts=[
        edited("05r", (some, other)) for other in (every, "args.window_start).backward()")])
    words = "sets of numbers in the model's calls that training has and the warm-up has not"
    assert found == [None, ["training", f"{words}: 0", "3"]]


# What only one look shows: (milestone, job, edits, the start of what is said).
SEEN_BY_ONE_LOOK = [
    ("01", "two ranks", [("    model.broadcast_buffers = False  # every rank computes the same "
                          "buffers\n", "")],
     "buffers that DistributedDataParallel sends from rank 0 before a pass"),
    ("01", "two ranks", [("if args.save_checkpoint and rank == 0:", "if args.save_checkpoint:"),
                         ('"checkpoint.partial"', 'f"checkpoint{rank}.partial"')],
     "files that rank 1 writes"),
    ("01", "training", [("model=raw_model.state_dict()", "model={name: value.half().float() for "
                          "name, value in raw_model.state_dict().items()}")],
     "the weights in the checkpoint are those of the run's end, bit for bit"),
    ("01", "model", [("torch.outer(torch.arange(seq_len)",
                      "torch.outer(torch.arange(seq_len).bfloat16().float()")],
     "the tables at the record's lengths, without signs"),
    ("09", "two ranks", [("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)")],
     "all ranks begin with the same weights"),
    ("09", "updates", [("return ready.popleft().result()",
                        "kept.append(ready.popleft())\n        return kept[-1].result()"),
                       ("    def next_batch():", "    kept = []\n\n    def next_batch():")],
     "batches that wait, or are kept, after 12"),
    ("09", "precision", [("            (loss * targets.numel()).backward()",
                          "            assert loss.isfinite()\n"
                          "            (loss * targets.numel()).backward()")],
     "numbers read from tensors between the model's calls"),
    ("05i", "training", [("bound = 0.5 * (3", "bound = 0.55 * (3")], "the initial weights"),
    ("05i", "model", [("dtype, fast=False)", "dtype, fast=True)")],
     "products of eight bits in call 1 of the model with use_fp8=True"),
    ("05i", "model", [("weight8.T.contiguous()", "weight8.T")],
     "products of eight bits in call 1 of the model with use_fp8=True"),
    ("05i", "model", [(".clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)", "")],
     "the gradient in call 1 of the model with use_fp8=True, out of the range of eight bits"),
    ("05o", "precision", [("if row + ROWS <= column:", "if row < column:")],
     "results of Triton's kernels by the optimizers with use_triton=True"),
    ("09", "training", [('torch.tensor(group["lr"] * correction)', 'group["lr"] * correction')],
     "sets of Python numbers in calls of compiled functions, each compiled by itself"),
    ("09", "more ranks", [("rank * len(grads), len(grads)))", "min(rank, 1) * len(grads), "
                           "len(grads)))")], "the weights after two steps on 4 ranks, rank 0"),
    ("09", "training", [(".astype(np.int64))", ".astype(np.int16).astype(np.int64))")],
     "a run with the record's token ids"),
]


def test_names_do_not_depend_on_the_order_in_which_parts_are_made():
    import torch

    from speedrun.check import spy

    def made(*names):
        net = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in names})
        net["head"].weight = net["embed"].weight
        spy.fill(net)
        watched = spy.Spy()
        watched.models = [net]
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        first = optimizer.param_groups[0]["params"][0]
        optimizer.state[first]["momentum"] = torch.zeros(2, 4, 4)  # of the whole group
        watched.steps[optimizer] = 1
        return spy.parameters_of(net), [name for name, _ in watched.states()]

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
                            ).stdout for seed in range(8)}
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


@pytest.mark.parametrize("id", dict.fromkeys(id for id, *_ in SEEN_BY_ONE_LOOK))
def test_what_one_look_shows(id, ask):
    cases = [(job, edited(id, *edits), words)
             for some, job, edits, words in SEEN_BY_ONE_LOOK if some == id]
    for job, text, words in cases:
        (found,) = ask(id=id, texts=[text], jobs=[job])
        assert found and found[1].startswith(f"{words}: "), found


@tried_training
def test_weights_are_judged_by_their_distribution(id, ask):
    texts = [edited(id, ("torch.manual_seed(args.seed)", f"torch.manual_seed(args.seed + {more})"))
             for more in (100, 200, 300)]
    assert ask(id=id, texts=texts, jobs=["training"]) == [None] * len(texts)


def test_few_numbers_that_differ_are_told_as_such():
    import torch

    from speedrun.check.differences import differences

    wanted, seen = torch.ones(1000), torch.ones(1000)
    seen[7] = 1.2
    (found,) = differences({"gate": ["tensors", {"weight": wanted}, 1e-3]},
                           {"gate": ["tensors", {"weight": seen}, 1e-3]})
    assert found.got == "RMS 1.00022, and differs by 0.63%"
    (found,) = differences({"gate": ["tensors", {"weight": wanted}, 1e-3]},
                           {"gate": ["tensors", {"weight": wanted * 1.2}, 1e-3]})
    assert found.got == "RMS 1.2, 1.2 times the milestone's"


def caught(id, some, ask):
    """Asserts that each slip of a milestone is seen, and that its block alone differs."""
    text = source_of(id)
    for slip in some:
        assert Mixture(text, slip.apply(text)).candidates() == [slip.block], slip.name
    seen = ask(id=id, texts=[slip.apply(text) for slip in some])
    assert [slip.name for slip, what in zip(some, seen, strict=True) if what is None] == []


@tried
def test_slips_are_caught(id, ask):
    some = [slip for number, (milestone, slip) in enumerate(CASES)
            if milestone.id == id and number % SAMPLE == 0]
    caught(id, some, ask)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason="RUN_SLOW=1 tries every slip")
@pytest.mark.parametrize("id", IDS)
def test_every_slip_is_caught(id, ask):
    caught(id, [slip for milestone, slip in CASES if milestone.id == id], ask)


@pytest.mark.parametrize("id", IDS)
def test_a_guide_is_about_what_its_milestone_changes(id):
    milestone, guide, text = MANIFEST.get(id), load_guide(MANIFEST.get(id)), source_of(id)
    about = {entry.block for entry in (*guide.hints, *guide.slips)}
    if milestone.parent:
        assert about <= set(milestone.changes)
    assert len({hint.block for hint in guide.hints}) == len(guide.hints)
    for slip in guide.slips:
        assert slip.apply(text), slip.name
        assert slip in slips_of(slip.block, milestone)


def test_slips_have_names_and_most_of_them_words():
    assert len({(milestone.id, slip.name) for milestone, slip in CASES}) == len(CASES)
    assert sum(bool(slip.words) for _, slip in CASES) > 0.8 * len(CASES)


def test_help_holds_until_a_descendant_changes_the_block(monkeypatch):
    monkeypatch.setattr("speedrun.check.hints.load_manifest", lambda: MANIFEST)  # once
    for child in MILESTONES:
        for block in (b.name for b in split_blocks(source_of(child.id)) if child.parent):
            parent = MANIFEST.get(child.parent)
            own = [slip for slip in load_guide(child).slips if slip.block == block]
            if block in child.changes:
                assert list(slips_of(block, child)) == own
            else:
                assert slips_of(block, child) == slips_of(block, parent)
                assert find_hint(block, child) is find_hint(block, parent)


def test_a_fault_in_a_guide_is_one_line(tmp_path, monkeypatch):
    milestone = MANIFEST.get(ROOT)
    monkeypatch.setattr(type(milestone), "folder", tmp_path)
    for text, message in (
            ("[[hints]]", 'unknown key "hints"; did you mean "hint"?'),
            ('[[hint]]\nblock = "x"\nnudges = "y"', 'hint 1: unknown key "nudges"; did you mean'),
            ('[[slip]]\nname = "x"', 'slip 1: missing key "block"'), ("[[slip", "Expected")):
        load_guide.cache_clear()
        (tmp_path / "guide.toml").write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as error:
            load_guide(milestone)
        assert message in str(error.value) and "guide.toml: " in str(error.value)
        assert "\n" not in str(error.value)
    load_guide.cache_clear()


def test_several_faults_get_several_verdicts(ask):
    text = edited("02", ("F.relu(self.c_fc(x)).square()", "self.c_fc(x) ** 2"),
                  ("X.norm(dim=(-2, -1), keepdim=True)", "X.norm()"),
                  ("(args.train_steps - step)", "(args.train_steps)"),
                  ("F.scaled_dot_product_attention(q, k, v, is", "F.scaled_dot_product_attention"
                   "(query=q, key=k, value=v, is"))
    outcomes = ask(id="02", text=text)
    found = failures(outcomes)
    assert list(found) == ["newton_schulz", "MLP", "lr_multiplier"]
    line = text[: text.index("self.c_fc(x) **")].count("\n") + 1
    first, last = map(int, re.search(r"MLP \(lines (\d+)-(\d+)\)", found["MLP"]).groups())
    assert first < line <= last
    assert found["MLP"].endswith("Your activation squares negative inputs too; apply F.relu first.")
    assert found["newton_schulz"].endswith("each matrix should be divided by its own norm.")
    assert "lr_multiplier(4) of 7 steps" in found["lr_multiplier"]
    assert "CausalSelfAttention" in [o.name for o in outcomes if o.passed]


def test_a_slip_in_other_words_gets_its_words(ask):
    text = edited("01", ("X.norm(dim=(-2, -1), keepdim=True)", "torch.linalg.vector_norm(X)"))
    found = failures(ask(id="01", text=text))
    assert list(found) == ["newton_schulz"] and "its own norm" in found["newton_schulz"]


def test_blocks_that_fit_only_together_are_right_beside_a_fault(ask):
    text = edited("01", ("raw_model", "net"), ("def __init__(self, args, rotary)",
                                               "def __init__(self, rotary, args)"),
                  ("Block(args, rotary)", "Block(rotary, args)"),
                  ("CausalSelfAttention(args, rotary)", "CausalSelfAttention(rotary, args)"),
                  ("F.gelu", "F.relu"))
    outcomes = ask(id="01", text=text)
    assert list(failures(outcomes)) == ["MLP"]
    right = {o.name for o in outcomes if o.passed}
    assert {"CausalSelfAttention", "Block", "GPT", "main"} <= right


def test_a_pair_that_is_right_together_is_not_blamed_for_another_block():
    text = edited("01", ("[: x.size(1)].to(x.dtype)", "[: x.size(2)].to(x.dtype)"),
                  ("q, k = self.rotary(q), self.rotary(k)", "q, k = map(self.rotary, (q, k))"),
                  ("X.norm(dim=(-2, -1), keepdim=True)", "X.norm()"))
    tried = []

    def look(groups):  # as if the rotation and its use had moved behind the transpose
        tried.extend(map(tuple, groups))
        return [None if {*names} == {"Rotary", "CausalSelfAttention"}
                else (Difference("a loss", "1", "2"), "model", {}) for names in groups]

    verdicts = judge(Mixture(source_of("01"), text), look)
    assert [v.names for v in verdicts if v.difference] == [("newton_schulz",)]
    assert ("newton_schulz", "Rotary", "CausalSelfAttention") in tried


def test_blocks_that_stop_alone_and_are_wrong_together_are_named_together(ask):
    text = edited("01", ("def __init__(self, args, rotary)", "def __init__(self, rotary, args)"),
                  ("Block(args, rotary)", "Block(rotary, args)"),
                  ("CausalSelfAttention(args, rotary)", "CausalSelfAttention(rotary, args)"),
                  ("v, is_causal=True", "v, is_causal=False"))
    found = failures(ask(id="01", text=text))
    assert list(found) == ["CausalSelfAttention"]
    assert found["CausalSelfAttention"].startswith("CausalSelfAttention and Block and GPT (lines ")
    assert "Only together do they show this" in found["CausalSelfAttention"]


def test_blocks_that_are_wrong_only_together_are_named_together(ask):
    # Each helper is right by itself; the second hands a view on that the first then changes.
    text = edited("01", ("momentum_buffer.mul_(momentum).add_(grad)\n    return grad.add("
                         "momentum_buffer, alpha=momentum)",
                         "momentum_buffer.mul_(momentum).add_(grad)\n"
                         "    return momentum_buffer.mul_(momentum).add_(grad)"
                         " if KEEP else grad.add(momentum_buffer, alpha=momentum)"),
                  ("class Muon(", "KEEP = False\n\n\nclass Muon("))
    text = text.replace("state = self.state[param]\n", "state = self.state[param]\n"
                        "                globals().update(KEEP=True)\n")
    found = failures(ask(id="01", text=text))
    assert list(found) == ["nesterov_update"]
    assert found["nesterov_update"].startswith("nesterov_update and Muon (lines ")
    assert "Only together do they show this" in found["nesterov_update"]


def test_an_import_that_is_missing_is_told_with_its_line(ask):
    text = edited(ROOT, ("import gc\n", ""))
    found = failures(ask(id=ROOT, text=text))
    line = text[: text.index("gc.collect")].count("\n") + 1
    assert any(f"line {line}: NameError" in said for said in found.values()), found


def test_a_name_of_the_contract_that_is_missing(ask):
    text = edited(ROOT, ("def lr_multiplier(", "def lr_factor("),
                  ("* lr_multiplier(", "* lr_factor("))
    found = failures(ask(id=ROOT, text=text))
    assert "lr_multiplier(step, args), which tools call by this name" in found["lr_multiplier"]


def test_a_name_that_is_defined_twice(ask):
    text = source_of(ROOT) + "\n\ndef norm(x):\n    return x\n"
    assert "two blocks are called norm" in failures(ask(id=ROOT, text=text))["blocks"]


@pytest.mark.parametrize("text, check, words", [
    ("def f(:\n", "syntax", "line 1: invalid syntax"),
    ("x = 1\0", "syntax", "null bytes"),
    ("import sys\nsys.exit(3)\n", "sys.exit(3)", "line 2: it ends the process: sys.exit(3)"),
    ("import no_such_thing\n", "imports", "line 1: ModuleNotFoundError"),
    ("", "Hyperparameters", "no such name in the script"),
])
def test_a_script_that_cannot_be_used(text, check, words, ask):
    found = failures(ask(id=ROOT, text=text))
    assert words in found.get(check, ""), found


def test_what_is_not_utf_8(tmp_path):
    from speedrun.check.examine import check_syntax

    told = check_syntax(b"x = 1\n# caf\xe9\n")
    assert told.got == "line 2: byte 0xe9 is not UTF-8" and "Save the file as UTF-8" in told.meaning


# ---- scripts that do harm ----


@pytest.fixture
def script(tmp_path):
    """A learner's script, a copy of the root."""
    file = tmp_path / "train_gpt.py"
    file.write_text(source_of(ROOT), encoding="utf-8")
    return file


def test_the_command_outlives_what_the_script_does(script, tmp_path):
    script.write_text(source_of(ROOT) + f"""
if True:
    import pathlib, subprocess, sys
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])
    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))
    print('x' * 10_000_000)
    sys.stderr.write('y' * 10_000_000 + '\\nlast words\\n')
    sys.stderr.flush()
    open('stray.txt', 'w').close()
    os.kill(os.getpid(), 11)
""", encoding="utf-8")
    ended = command(ROOT, "--script", script)
    assert ended.returncode == 1 and ended.stderr == ""
    told = " ".join(ended.stdout.split())
    assert "was killed by SIGSEGV; the last line that it wrote: last words" in told
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)
    assert sorted(p.name for p in tmp_path.iterdir()) == [progress.FILE, "pid", "train_gpt.py"]


def test_a_script_without_end_is_stopped(script):
    script.write_text(edited(ROOT, ("    for step in range(args.train_steps + 1):\n",
                                    "    for step in range(args.train_steps + 1):\n"
                                    "        while step == 2: time.sleep(1)\n")), encoding="utf-8")
    before = time.monotonic()
    ended = command(ROOT, "--script", script, "--timeout", "6")
    assert time.monotonic() - before < 60
    assert "  FAIL  time\n        expected an answer within 6 s\n" in ended.stdout
    assert "--timeout gives it more time." in ended.stdout


def _runs(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- taking a milestone ----


def command(*arguments, **options):
    """Runs the command to its end."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, str(COMMAND), *map(str, arguments)], env=environment,
                          capture_output=True, encoding="utf-8", timeout=300, **options)


def test_take_keeps_every_version(script):
    mine = source_of(ROOT) + "# an idea of my own\n"
    script.write_text(mine, encoding="utf-8")
    script.chmod(0o640)
    for id in ("01", "02"):
        ended = command(id, "--take", "--script", script)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert script.read_text(encoding="utf-8") == source_of(id)
    first, second = (script.with_name(f"train_gpt.{n}.py") for n in (1, 2))
    assert first.read_text(encoding="utf-8") == mine
    assert second.read_text(encoding="utf-8") == source_of("01")
    assert f"is 02_modern_arch now; yours is kept: {second}" in ended.stdout.replace("\n  ", " ")
    assert script.stat().st_mode & 0o777 == 0o640
    again = command("02", "--take", "--script", script)
    assert "nothing to do" in again.stdout
    assert len(list(script.parent.glob("*.py"))) == 3


def test_take_fills_gaps_and_never_overwrites(script):
    script.with_name("train_gpt.1.py").write_text("kept before")
    assert progress.take(script, MANIFEST.get("01")).name == "train_gpt.2.py"
    assert script.with_name("train_gpt.1.py").read_text() == "kept before"


def test_take_without_a_script_makes_one(script):
    script.unlink()
    assert progress.take(script, MANIFEST.get("01")) is None
    assert script.read_text(encoding="utf-8") == source_of("01")


def at_call(number, act, monkeypatch):
    """Lets something happen at the first or second write of a take: the copy, then the script."""
    replace, calls = progress.replace_file, []

    def replace_and_act(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            act()
        replace(*arguments)

    monkeypatch.setattr(progress, "replace_file", replace_and_act)


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupted_take_loses_nothing(number, script, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    at_call(number, interrupted, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        progress.take(script, MANIFEST.get("01"))
    assert script.read_text(encoding="utf-8") == source_of(ROOT)


def test_a_half_written_copy_is_removed(script, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speedrun.base.files.os.fsync", full)
    with pytest.raises(UserError, match="No space left"):
        progress.take(script, MANIFEST.get("01"))
    assert [p.name for p in script.parent.iterdir()] == ["train_gpt.py"]
    assert script.read_text(encoding="utf-8") == source_of(ROOT)


def test_take_notices_an_edit_meanwhile(script, monkeypatch):
    at_call(1, lambda: script.write_text("saved by an editor just now"), monkeypatch)
    with pytest.raises(UserError, match="changed while it was being kept"):
        progress.take(script, MANIFEST.get("01"))
    assert script.read_text() == "saved by an editor just now"


def test_kept_scripts_and_progress_are_not_committed():
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"train/**/.progress.json", "train/.traces/",
            "train/**/*.[0-9]*.py"} <= set(ignored)


# ---- progress and hints ----


@pytest.fixture
def answers(monkeypatch):
    """Outcomes that stand in for those of an examination; and how often they were asked for."""
    found = [Outcome("model"), Outcome("nesterov_update (lines 3-5)", "this", "that", "so",
                                       block="nesterov_update")]
    asked = []

    def check(script, milestone, limit):
        asked.append(milestone.id)
        yield from found

    monkeypatch.setattr(commands, "check", check)
    return found, asked


def learner_of(script):
    """The learner as the command opens it, and what it prints."""
    learner = open_learner(script)
    out = io.StringIO()
    learner.screen = Screen(out)
    return learner, out


def level_given(script, capsys, level=None, name=None):
    """The level of the hint that comes."""
    commands.give_hint(learner_of(script)[0], MANIFEST.get("01"), level, name, 1)
    return int(re.search(r"hint (\d) of 4", capsys.readouterr().out)[1])


def edit(script):
    """Changes the script, so that it is checked again."""
    script.write_text(script.read_text(encoding="utf-8") + "#\n", encoding="utf-8")


def test_hints_go_one_level_further_each_time(script, answers, capsys):
    assert [level_given(script, capsys) for _ in range(5)] == [1, 2, 3, 4, 4]
    assert answers[1] == ["01"], "an unchanged script need not be checked again"
    commands.give_hint(learner_of(script)[0], MANIFEST.get("01"), 2, None, 1)
    assert "M <- mu M + G" in capsys.readouterr().out
    edit(script)
    level_given(script, capsys)
    assert answers[1] == ["01", "01"]


def test_hints_begin_anew_when_the_block_shows_something_else(script, answers, capsys):
    assert [level_given(script, capsys) for _ in range(2)] == [1, 2]
    edit(script)  # the same message
    assert level_given(script, capsys) == 3
    answers[0][1] = Outcome("nesterov_update", "this", "something else", "so")
    edit(script)
    assert [level_given(script, capsys) for _ in range(2)] == [1, 2]
    failing, answers[0][1] = answers[0][1], Outcome("nesterov_update")
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    answers[0][1] = failing
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    assert level_given(script, capsys) == 1
    assert learner_of(script)[0].progress.of(MANIFEST.get("01")).given == 6


def test_a_check_that_no_hint_belongs_to_says_so(script, answers):
    answers[0][1] = Outcome("time", "an answer within 6 s", "none: the script was stopped")
    learner, out = learner_of(script)
    commands.give_hint(learner, MANIFEST.get("01"), None, None, 1)
    assert out.getvalue().startswith('No hint belongs to "time": the lines of the check')
    assert learner.progress.of(MANIFEST.get("01")).given == 0


@pytest.mark.parametrize("late", ["wanted", "judged"])
def test_whose_time_ran_out_is_told(late, script, monkeypatch):
    from speedrun.check.examine import Examination

    def stopped(*_):
        raise TimeoutError

    if late == "wanted":  # as on a machine that is too slow for the milestone's own script
        monkeypatch.setattr("speedrun.check.kept.load", lambda file: None)
        monkeypatch.setattr(Examination, "_run", stopped)
    else:
        monkeypatch.setattr("speedrun.check.examine._judged", stopped)
        monkeypatch.setattr(Examination, "wanted", {})
        monkeypatch.setattr(Examination, "differing", lambda self, text: {
            "model": [Difference("a loss", "1", "2")]})
    *others, last = commands.check(script, MANIFEST.get(ROOT), 5)
    assert last.name == "time" and last.meaning == "--timeout gives it more time."
    if late == "wanted":
        assert last.got == "none: the milestone's own script was stopped"
    else:
        assert others[-1].name == "model" and last.expected == "which block is at fault"


def test_a_script_that_deletes_the_files_of_its_run_is_told(script, monkeypatch):
    def examine(source, examination):
        yield Outcome("syntax")
        raise FileNotFoundError(2, "No such file or directory", str(examination.folder / "output0"))

    monkeypatch.setattr("speedrun.check.examine.examine", examine)
    syntax, files = commands.check(script, MANIFEST.get(ROOT), 5)
    assert syntax.passed and (files.name, files.got) == ("files", "output0 is missing")


def test_a_verdict_outlives_a_read_only_disk(script, answers, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    learner, out = learner_of(script)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert not commands.check_once(learner, MANIFEST.get("01"), 1)
    assert "1 of 2 checks pass. Stuck?" in out.getvalue()
    assert capsys.readouterr().err.endswith("cannot be written: Read-only file system\n")


def test_a_verdict_outlives_its_folder(script, answers, monkeypatch, capsys):
    answers[0].pop()
    learner, out = learner_of(script)
    monkeypatch.chdir(script.parent)
    shutil.rmtree(script.parent)
    monkeypatch.setattr(commands, "hash_of", lambda _: "")
    monkeypatch.setattr(learner, "existing", lambda: script)
    assert commands.check_once(learner, MANIFEST.get("01"), 1)
    assert "All 1 checks pass: this is 01_muon. Next: 02" in out.getvalue()
    assert capsys.readouterr().err == (
        f"note: progress was not kept: {script.with_name(progress.FILE)} cannot be written:"
        " No such file or directory\n")


def test_no_hint_where_none_is_needed(script, answers):
    answers[0].pop()
    learner, out = learner_of(script)
    commands.give_hint(learner, MANIFEST.get("01"), None, None, 1)
    assert "no hint is needed" in out.getvalue()


def test_a_hint_to_a_block_by_its_name(script, answers, capsys):
    assert level_given(script, capsys, name="newton_schulz") == 1
    assert level_given(script, capsys, name="Newton_Schulz") == 2
    assert answers[1] == [], "no check is needed for it"
    assert level_given(script, capsys) == 1, "the failing one has levels of its own"
    assert level_given(script, capsys, name="newton_schulz") == 3
    with pytest.raises(UserError, match="has no block \"window_sise\"; it has: .*Muon, ") as error:
        level_given(script, capsys, name="window_sise")
    assert error.value.status == 2 and "\n" not in str(error.value)


@pytest.mark.parametrize("id", IDS)
def test_every_block_that_changes_has_hints_of_four_levels(id, capsys):
    milestone = MANIFEST.get(id)
    names = milestone.changes or [b.name for b in split_blocks(source_of(id))
                                  if not b.name.startswith("heading: ") and b.name != "card"]
    for name in names:
        if name not in hints._blocks(source_of(id)):
            continue  # this milestone removes it
        hint = hints.hint_of(name, milestone)
        assert hint.nudge and hint.steps, name
        for level in (1, hints.next_level(hint, 2), 3, 4):
            hints.print_hint(hint, milestone, level)
        shown = capsys.readouterr().out
        if milestone.parent:
            assert f"{MANIFEST.get(milestone.parent).name} → {milestone.name}" in shown, name


def test_the_list_shows_progress(script, answers):
    learner, out = learner_of(script)
    assert not commands.check_once(learner, MANIFEST.get("01"), 1)
    answers[0].pop()
    assert commands.check_once(learner, MANIFEST.get(ROOT), 1)
    learner, out = learner_of(script)
    commands.show_list(learner)
    lines = out.getvalue().splitlines()
    assert len(lines) == len(LISTED)
    assert lines[0].startswith(f"x {ROOT}") and lines[0].endswith("passed")
    assert "1 of 2 checks, next: nesterov_update" in out.getvalue()


def test_what_passed_once_stays_on_the_list(script, answers):
    failing = answers[0].pop()
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    answers[0].append(failing)
    commands.check_once(learner_of(script)[0], MANIFEST.get("01"), 1)
    learner, out = learner_of(script)
    assert learner.progress.of(MANIFEST.get("01")).done
    commands.show_list(learner)
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("x 01")]
    assert line.endswith("  passed; last check stopped at nesterov_update")


@pytest.mark.parametrize("content", [
    "", "{", "[]", "null", '{"muon": 3}', '{"muon": {"unknown": 1}}', "\udcff",
])
def test_broken_progress_starts_anew(content, script, capsys):
    file = script.parent / progress.FILE
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    learner, out = learner_of(script)
    commands.show_list(learner)
    assert len(out.getvalue().splitlines()) == len(LISTED)
    assert capsys.readouterr().err == (
        "note: .progress.json could not be read; progress starts over\n")
    learner.progress.of(MANIFEST.get("01")).passed = 3
    learner.progress.save()
    assert json.loads(file.read_text())["muon"]["passed"] == 3


def test_progress_that_is_keyed_by_names_is_read_and_by_ids_refused(script):
    file = script.with_name(progress.FILE)
    file.write_text('{"05e_fp8_head": {"passed": 3}, "muon": {"passed": 4}}', encoding="utf-8")
    kept = learner_of(script)[0].progress  # the FP8 head had another id once
    assert [kept.of(MANIFEST.get(slug)).passed for slug in ("fp8_head", "muon")] == [3, 4]
    file.write_text('{"muon": {"passed": 4}, "05e": {"passed": 3}}', encoding="utf-8")
    ended = command("--list", "--script", script)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch("error: .*progress.json names milestones by ids such as 05e, which may mean"
                        " another one now; delete it, and progress starts over\n", ended.stderr)


def test_a_folder_for_progress_is_one_line(script):
    script.with_name(progress.FILE).mkdir()
    ended = command("--list", "--script", script)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: .*progress.json: Is a directory\n", ended.stderr)


def test_progress_is_written_whole_or_not_at_all(script, monkeypatch, capsys):
    learner, _ = learner_of(script)
    learner.progress.of(MANIFEST.get("01")).passed = 3
    learner.progress.save()
    learner.progress.of(MANIFEST.get("01")).passed = 4
    monkeypatch.setattr("speedrun.base.files.os.fsync",
                        lambda _: (_ for _ in ()).throw(OSError("full")))
    learner.progress.save()
    assert capsys.readouterr().err.endswith("progress.json cannot be written: full\n")
    assert learner_of(script)[0].progress.of(MANIFEST.get("01")).passed == 3
    assert len(list(script.parent.iterdir())) == 2


# ---- the command ----


def test_the_code_names_no_milestone():
    for file in sorted((REPOSITORY / "tools" / "speedrun" / "check").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        for id in IDS:
            assert f'"{id}"' not in text, f"{file.name} names {id}"
        for name in ("Muon", "NormalizedAdamW", "newton_schulz", "attention_mask", "Rotary"):
            assert not re.search(rf"\b{name}\b", text), f"{file.name} names {name}"


@pytest.mark.parametrize("arguments, code, message", [
    ([], 2, "give a milestone, or --list; see --help"),
    (["01", "--hint", "5"], 2, "5 is not a level from 1 to 4"),
    (["--hint", "01"], 2, "01 is not a level from 1 to 4"),
    (["01", "--timeout", "soon"], 2, "soon is not a number"),
    (["01", "--timeout", "0"], 2, "0 is no time"),
    (["01", "--block", "Muon"], 2, "--block NAME goes with --hint"),
    (["01", "--hint", "--block", "x"], 2, '01 has no block "x"; it has: card, imports,'),
    (["01", "--take", "--watch"], 2, "not allowed with argument"),
    ([""], 1, 'no milestone "": the name is empty; --help says what can be named here'),
    (["muom"], 1, 'no milestone "muom"; did you mean 01_muon?\n'),
    (["01", "--script", "nowhere.py"], 1, "there is no nowhere.py; --take makes one: "
     "python tools/check_train.py 00 --take --script nowhere.py\n"),
    (["01", "--hint", "--script", "nowhere.py"], 1, "there is no nowhere.py"),
    (["01", "--take", "--script", "nowhere/x.py"], 1,
     "nowhere/x.py cannot be written: No such file or directory\n"),
    (["01", "--script", "."], 1, " is a folder, not a script; name the file in it\n"),
    (["02", "--take", "--script", MANIFEST.get("01").script], 1, "is a milestone itself"),
])
def test_a_wrong_command_line_is_one_line(arguments, code, message, tmp_path):
    ended = command(*arguments, cwd=tmp_path)
    assert ended.returncode == code and ended.stdout == ""
    assert ended.stderr.startswith("error: ") and message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_milestone_itself_passes_by_the_command():
    script = MANIFEST.get(ROOT).script
    ended = command(ROOT, "--script", script)
    assert ended.returncode == 0, ended.stdout
    assert "FAIL" not in ended.stdout and ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert "  pass  two ranks" in lines
    assert f"All {ended.stdout.count('  pass  ')} checks pass" in lines[-1]
    assert not (script.parent / progress.FILE).exists()


def test_what_a_milestone_shows_is_kept_until_something_changes(tmp_path, monkeypatch):
    from speedrun.check import examine, kept

    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    ran = []
    monkeypatch.setattr(examine.Examination, "_choose_options", lambda *_: None)
    monkeypatch.setattr(examine.Examination, "_find_wanted", lambda self: ran.append(
        self.text) or dict(seen={"contract": {}}, seconds={"contract": 1.0}, run={}))

    def look(number, milestone, more=""):
        (tmp_path / str(number)).mkdir()
        examination = examine.Examination(tmp_path / str(number), time.monotonic() + 9, milestone)
        examination.text += more
        assert examination.wanted == {"contract": {}}
        assert examination.limits["contract"] > examine.LIMIT_S

    root, other = MILESTONES[:2]
    look(0, root), look(1, root), look(2, root, "# more"), look(3, other), look(4, other)
    assert len(ran) == 3 and len(list(kept.FOLDER.iterdir())) == 3
    next(kept.FOLDER.glob(f"{other.slug}-*")).write_bytes(b"half a file")
    look(5, other)
    assert len(ran) == 4


def test_a_failing_check_is_told_in_plain_lines(script):
    script.write_text("def f(:\n", encoding="utf-8")
    ended = command("01", "--script", script)
    assert ended.returncode == 1 and ended.stderr == ""
    lines = ended.stdout.splitlines()
    start = lines.index("  FAIL  syntax")
    assert lines[start : start + 5] == [
        "  FAIL  syntax", "        expected a Python file",
        "        got      line 1: invalid syntax",
        "0 of 1 checks pass. Stuck?",
        f"    python tools/check_train.py 01 --hint --script {script}"]


def test_watch_checks_again_when_the_file_changes_and_ends_with_ctrl_c(script):
    script.write_text("def f(:\n", encoding="utf-8")
    watcher = subprocess.Popen(
        [sys.executable, "-u", str(COMMAND), "01", "--watch", "--script", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    seen = []
    try:
        for text in ("def g(:\n", None):
            for line in watcher.stdout:
                seen.append(line)
                if line.startswith("Watching"):
                    break
            if text:
                replacement = script.with_name("new")  # as editors save
                replacement.write_text(text + text, encoding="utf-8")
                os.replace(replacement, script)
        watcher.send_signal(signal.SIGINT)
        rest, errors = watcher.communicate(timeout=60)
    finally:
        watcher.kill()
    assert sum("FAIL  syntax" in line for line in seen) == 2
    assert (watcher.returncode, errors) == (0, "")
    assert rest.endswith("stopped watching\n")


def test_watch_waits_for_a_file_that_is_being_replaced(script, answers, monkeypatch):
    changes = iter([script.unlink, lambda: script.write_text("x"), None])

    def sleep(seconds):
        change = next(changes)
        if change is None:
            raise KeyboardInterrupt
        change()

    monkeypatch.setattr(commands.time, "sleep", sleep)
    commands.watch(learner_of(script)[0], MANIFEST.get("01"), 1)
    assert answers[1] == ["01", "01"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_checks_too(signum, script, tmp_path):
    script.write_text("import os, pathlib, time\n"
                      f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
                      "time.sleep(300)\n", encoding="utf-8")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    started = subprocess.Popen([sys.executable, str(COMMAND), "01", "--script", str(script)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
                               env=dict(os.environ, TMPDIR=str(temporary)))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        started.send_signal(signum)
        _, errors = started.communicate(timeout=30)
    finally:
        started.kill()
    assert started.returncode == 128 + signum
    assert errors == ("error: interrupted\n" if signum == signal.SIGINT else "")
    time.sleep(0.2)
    assert not _runs(int((tmp_path / "pid").read_text()))
    assert list(temporary.iterdir()) == []


def test_lines_fit_a_narrow_terminal(script, answers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    answers[0].append(Outcome("Muon", "long " * 20, "\x1b[2Jgot " * 20, "so " * 30))
    learner, _ = learner_of(script)
    out = Terminal()
    learner.screen = Screen(out)
    learner.script = Path("train_gpt.py")
    learner.screen.line("a name with \x1b[2J")
    learner.screen.outcome(Outcome("passed \x1b[2J"))
    monkeypatch.chdir(script.parent)
    commands.check_once(learner, MANIFEST.get("01"), 1)
    commands.show_list(learner)
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert "\x1b" not in plain and "␛[2J" in plain
    long = [line for line in plain.splitlines() if len(line) > 40]
    assert long == ["    python tools/check_train.py 01 --hint --script train_gpt.py"]


if __name__ == "__main__":
    serve(sys.argv[1])
