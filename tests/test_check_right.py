"""Right is told from wrong: other wordings of a milestone pass, and each fault is seen by a look.

Run: .venv/bin/python -m pytest tests/test_check_right.py
"""

import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from examinations import IDS, MANIFEST, ROOT, edited, source_of
from speedrun.check.hints import load_guide
from speedrun.check.transplant import Mixture
from speedrun.check.values import odd_values
from speedrun.history.blocks import split_blocks
from speedrun.history.fields import default_hyperparameters
from speedrun.scripts.find import find_script

MILESTONES = MANIFEST.milestones
SAMPLE = 25  # every 25th slip is tried in the default run
LAST = MANIFEST.of_chain().milestones[-1].id
CASES = [(milestone, slip) for milestone in MILESTONES for slip in load_guide(milestone).slips]

# ---- other wordings ----


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
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    update = p.grad.lerp(buffer, group["momentum"])
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
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.size(-1) ** -0.5
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        y = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
'''
SDPA = ("        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
        "  # scale 1 / sqrt(head_dim)\n")
OWNERS = '''
class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum, bf16, compiled, use_triton):
        shapes = dict.fromkeys(param.shape for param in params)
        super().__init__([dict(params=[p for p in params if p.shape == shape]) for shape in shapes],
                         dict(lr=lr, momentum=momentum))
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.muon_update = torch.compile(
            partial(muon_update, use_triton=use_triton), dynamic=False, disable=not compiled)

    @torch.no_grad()
    def step(self):
        rank, owned = dist.get_rank(), []
        for group in self.param_groups:
            share = math.ceil(len(group["params"]) / dist.get_world_size())
            owned.append([(p, i // share) for i, p in enumerate(group["params"])])
        reductions = [[dist.reduce(p.grad, owner, async_op=True) for p, owner in pairs]
                      for pairs in owned]
        sent = []
        for group, pairs, works in zip(self.param_groups, owned, reductions, strict=True):
            for work in works:
                work.wait()
            for param in (p for p, owner in pairs if owner == rank):
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                momentum = torch.tensor(group["momentum"])
                update = self.muon_update(param.grad[None], state["momentum_buffer"][None],
                                          momentum, self.dtype)[0]
                param.add_(update, alpha=-group["lr"])
            sent += [dist.broadcast(p.detach(), owner, async_op=True) for p, owner in pairs]
        for work in sent:
            work.wait()
'''
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
            rate = torch.tensor(group["lr"] * math.sqrt(1 - b2**t) / (1 - b1**t))
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
            mean.lerp_(grads, 1 - group["momentum"])
            ahead = grads.lerp(mean, group["momentum"])
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
# Without blocks: all queries with all keys.
DENSE_MIXTURE = '''
def composed_heads(q, k, v, documents, mix, scale, window, block):
    t = torch.arange(q.size(1), device=q.device)
    hidden = (t > t[:, None]) | (t <= t[:, None] - window)
    hidden = hidden | (documents[:, :, None] != documents[:, None])
    scores = torch.einsum("bihd,bjhd->bijh", q, k).float() * scale
    shares = scores.masked_fill(hidden[..., None], float("-inf")).softmax(2)
    mix = mix.float() / (mix.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return torch.einsum("bij,bjhd->bihd", (shares * mix[:, :, None]).sum(-1).to(v.dtype), v)
'''
OTHER_PREFIXES = '''
def load_prefixes(args):
    some = [] if args.prefix_file == "none" else np.fromfile(args.prefix_file, "<i4").tolist()
    return torch.tensor(some + [-1] * (args.vocab_size - len(some)))
'''
GATHER = """            gathered = [flat.clone() for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, flat)
            flat.copy_(torch.stack(gathered).sum(0))
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
        ("synchronize = torch.get_device_module(device).synchronize",
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
    "a whole number as the flat rate": ("01", {}, [("min(1.0, (args.train", "min(1, (args.train")]),
    "another Muon, matrix by matrix": ("01", {"Muon": OTHER_MUON, "newton_schulz": "",
                                              "nesterov_update": ""}, []),
    "another rotary arithmetic": ("01", {"Rotary": OTHER_ROTARY}, []),
    "a loop over the matrices": ("01", {}, [
        ("self.orthogonalise(momenta, self.dtype)",
         "torch.cat([self.orthogonalise(m[None], self.dtype) for m in momenta])")]),
    "norm after the rotation": ("03e", {}, [("self.rotary(norm(q)), self.rotary(norm(k))",
                                            "norm(self.rotary(q)), norm(self.rotary(k))")]),
    "a square by power": ("02", {}, [("F.relu(self.c_fc(x)).square()",
                                      "self.c_fc(x).clamp(min=0).pow(2)")]),
    "a norm in float32": ("02", {}, [
        ("F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)"
         "  # not bfloat16's 0.0078",
         "x.float() * (x.float().square().mean(-1, keepdim=True) + 1.19e-7).rsqrt()")]),
    "a norm after the rotation, which autocast leaves in bfloat16": ("02", {}, [
        ("F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)"
         "  # not bfloat16's 0.0078",
         "(x.float() * (x.float().square().mean(-1, keepdim=True) + 1.19e-7).rsqrt()).type_as(x)"),
        ("self.rotary(norm(q)), self.rotary(norm(k))",
         "norm(self.rotary(q)), norm(self.rotary(k))")]),
    "zeros from the model": ("02", {}, [
        ("        nn.init.zeros_(self.c_proj.weight)  # other weights keep Linear's init\n", ""),
        ("        nn.init.zeros_(self.c_proj.weight)\n", ""),
        ("        self.lm_head = nn.Linear(",
         "        for block in self.blocks:\n"
         "            nn.init.zeros_(block.attn.c_proj.weight)\n"
         "            nn.init.zeros_(block.mlp.c_proj.weight)\n"
         "        self.lm_head = nn.Linear(")]),
    "owners that broadcast": ("03", {"Muon": OTHER_SHARES}, []),
    "gather instead of a sum": ("03", {}, [("            dist.all_reduce(flat)", GATHER)]),
    "buffers of updates kept": ("03", {}, [
        ("            dist.all_reduce(flat)",
         "            self.kept = [part.clone() for part in slots.values()]\n"
         "            dist.all_reduce(flat)")]),
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
        ("        for param in model.parameters():  # by hand: DDP's buckets would split the "
         "compiled graph\n            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)\n",
         ONE_MESSAGE)]),
    "queries, keys and values one by one": ("05k", {}, [
        ("        qkv = F.linear(x, self.c_qkv.flatten(0, 1).to(x.dtype))  # (B, T, 3 C)\n"
         "        q, k, v = qkv.view(B, T, 3, self.num_heads, -1).unbind(2)  # (B, T, H, D)\n",
         "        q, k, v = (F.linear(x, w.to(x.dtype)).view(B, T, self.num_heads, -1)\n"
         "                   for w in self.c_qkv)\n")]),
    "a letter for each layer": ("05k", {}, [
        ("        half = len(self.blocks) // 2\n",
         "        assert len(self.args.window_pattern) == len(self.blocks)\n"
         "        half = len(self.blocks) // 2\n")]),
    "stacks one by one": ("05k", {}, [
        ("self.muon_update(\n"
         "                    grads, state[\"momentum_buffer\"], momentum, self.dtype)",
         "torch.cat([self.muon_update(grad[None], buffer[None], momentum, self.dtype)\n"
         "    for grad, buffer in zip(grads, state[\"momentum_buffer\"])])")]),
    "frequencies that go on": ("06b", {"Rotary": OTHER_YARN}, []),
    "one class for messages": ("06f", {"ShardedAdam": SHARING_ADAM}, []),
    "one class for both optimizers' messages": (
        "07", {"ShardedAdam": SHARING_ADAM, "Muon": SHARING_MUON}, []),
    "owners that receive each gradient": ("07", {"Muon": OWNERS}, []),
    "a queue and a thread": ("08", {"prefetched": QUEUE}, [
        ("import platform\n", "import platform\nimport queue\nimport threading\n")]),
    "another mask": ("05a", {"attention_mask": OTHER_MASK}, []),
    "FlexAttention by its module's name": ("05a", {}, [
        ("import create_block_mask, flex_attention\n",
         "import create_block_mask\n"
         "from torch.nn.attention import flex_attention as flex\n"),
        ("y = flex_attention(q", "y = flex.flex_attention(q")]),
    "another line in the log": ("09", {}, [
        ("    clock.start()\n",
         "    clock.start()\n    log.print0(f'batches:{args.total_batch_size}')\n")]),
    "the head's gradient from a product the other way round": ("09", {}, [
        ("x8.T.contiguous(), x_scale, grad8.T.contiguous(), grad_scale, torch.float32).T",
         "grad8.T.contiguous(), grad_scale, x8.T.contiguous(), x_scale, torch.float32)")]),
    "shares in another order": ("11d", {}, [
        ("torch.cat((x[:, :1], x[:, 1:] + weight * gates(x[:, 1:], gate) * x[:, :-1]), dim=1)",
         "x + weight * gates(x, gate) * F.pad(x, (0, 0, 1, -1))"),
        ("skip = 2 * gates(x0, self.skip_gate) * outputs[self.args.skip_from]",
         "share = scalars[\"skip\"].sigmoid() * 2 * gates(x0, self.skip_gate)"),
        ("x = x + scalars[\"skip\"].sigmoid() * skip",
         "x = x + share * outputs[self.args.skip_from]")]),
    "a mixture of heads without blocks": ("14h", {"composed_heads": DENSE_MIXTURE}, []),
    "signs by coins": ("14h", {}, [
        ("torch.randn(args.sign_rows, args.model_dim).sign()",
         "1.0 - 2.0 * torch.randint(2, (args.sign_rows, args.model_dim))")]),
    "prefixes in other words": ("14h", {"load_prefixes": OTHER_PREFIXES}, [
        ("            targets = next_targets(targets, len(weights) - 1)\n"
         "            targets = torch.cat((targets, prefixes.reshape(-1, 1)), dim=1)\n",
         "            further = next_targets(targets, len(weights))[:, :-1]\n"
         "            targets = torch.hstack((further, prefixes.flatten()[:, None]))\n")]),
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
tried_in_short_chains = pytest.mark.parametrize("id", [  # a minute each in the first chain
    pytest.param(id, marks=pytest.mark.slow)
    if MANIFEST.children(id) or MANIFEST.get(id) in MANIFEST.of_chain().milestones else id
    for id in IDS])
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


@tried_in_short_chains
def test_what_is_right_in_another_way_passes_and_the_parent_does_not(id, ask):
    scripts, parent = variants(id), MANIFEST.get(id).parent
    texts = [text for _, text in scripts] + ([source_of(parent)] if parent else [])
    assert ask(id=id) == []
    found = ask(id=id, texts=texts)
    for (names, _), seen in zip(scripts, found, strict=False):
        assert seen is None, names
    assert not parent or found[-1] is not None


def test_a_switch_without_its_kernel_is_not_enough(ask):
    without = edited("09", ("momentum), dtype, use_triton)", "momentum), dtype)"))
    forgotten = edited("09", ("symmetric_product(A, A, alpha=c, beta=b, use_triton=use_triton)",
                              "symmetric_product(A, A, alpha=c, beta=b)"))
    found = ask(id="09", texts=[without, forgotten], jobs=["precision"])
    launches = "launches of Triton's kernels by the optimizers with use_triton=True: 30"
    assert found == [["precision", launches, "nothing of the kind"],
                     ["precision", f"{launches}, or not much less", "15"]]


def test_a_validation_in_training_mode_shows_as_such_and_in_eight_bits(ask):
    script = edited("09", ("    model.eval()\n", ""))
    (found,) = ask(id="09", texts=[script], jobs=["updates"])
    assert found == ["updates", "model.training in the validation: False", "True"]
    (found,) = ask(id="09", texts=[script], jobs=["precision"])
    assert found[1].startswith("products of eight bits in the validation with use_fp8=True: none")


def test_a_warm_up_of_all_windows_is_right_and_one_of_fewer_is_not(ask):
    some = "set_window(window_size(step, args), long_window_size(step, args))\n"
    found = ask(id="09", jobs=["training"], texts=[
        edited("09", (some, f"set_window(*2 * [all_windows(args)[{which}]])\n"))
        for which in ("i - 1", "0")])
    words = "sets of numbers in the model's calls that training has and the warm-up has not"
    assert found == [None, ["training", f"{words}: 0", "3"]]


# What only one look shows: (milestone, job, edits, the start of what is said).
SEEN_BY_ONE_LOOK = [
    ("e2a", "two ranks", [("    model.broadcast_buffers = False  # equal on all ranks; the "
                          "argument is deprecated\n", "")],
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
    (LAST, "two ranks", [("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)")],
     "all ranks begin with the same weights"),
    ("09", "updates", [("return ready.popleft().result()",
                        "kept.append(ready.popleft())\n        return kept[-1].result()"),
                       ("    def next_batch():", "    kept = []\n\n    def next_batch():")],
     "batches that wait, or are kept, after 12"),
    ("09", "precision", [("            (loss * targets.numel()).backward()",
                          "            assert loss.isfinite()\n"
                          "            (loss * targets.numel()).backward()")],
     "numbers read from tensors between the model's calls"),
    ("09", "training", [("bound = 0.5 * (3", "bound = 0.55 * (3")], "the initial weights"),
    ("09", "model", [("dtype, fast=False)", "dtype, fast=True)")],
     "products of eight bits in call 1 of the model with use_fp8=True"),
    ("09", "model", [("weight8.T.contiguous()", "weight8.T")],
     "products of eight bits in call 1 of the model with use_fp8=True"),
    ("09", "model", [(".clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)", "")],
     "the gradient in call 1 of the model with use_fp8=True, out of the range of eight bits"),
    ("05o", "precision", [("if row + ROWS <= column:", "if row < column:")],
     "results of Triton's kernels by the optimizers with use_triton=True"),
    ("09", "training", [('torch.tensor(group["lr"] * correction)', 'group["lr"] * correction')],
     "sets of Python numbers in calls of compiled functions, each compiled by itself"),
    (LAST, "precision", [("(upper | remainders.int() & 0xFFFF)", "(upper + remainders.int())")],
     "the sum of 12 small moves with bf16=True"),
    (LAST, "precision", [("tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)",
                           "total")],
     "the gradients with use_triton=True"),
    (LAST, "model", [("ctx.save_for_backward(x, w_in, w_out, post)",
                      "ctx.save_for_backward(x, w_in, w_out, post, F.relu(x @ w_in))"),
                     ("x, w_in, w_out, post = ctx", "x, w_in, w_out, post, _ = ctx")],
     "bytes that the MLPs keep for the backward pass of call 1 of the model"),
    (LAST, "training", [("init_uniform(weights[:3], args.qkv_init)", "weights[:3] = init_uniform("
                         "torch.empty_like(weights[0]), args.qkv_init)")],
     "numbers that the initial weights have, each counted once"),
    (LAST, "more ranks", [("slice(rank * len(grads), (rank + 1)",
                           "slice(min(rank, 1) * len(grads), (min(rank, 1) + 1)")],
     "the sum of two moves on 4 ranks, rank 0"),
    ("03", "more ranks", [("params[dist.get_rank() :: dist.get_world_size()]",
                           "params[: len(params) // dist.get_world_size() * dist.get_world_size()]"
                           "[dist.get_rank() :: dist.get_world_size()]")],
     "the sum of two moves on 5 ranks, rank 0"),
    ("p6d", "training", [(".astype(np.int64)", ".astype(np.int16).astype(np.int64)")],
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
    pytest.param(id, marks=pytest.mark.slow) if looks > 6 else id
    for id, looks in Counter(id for id, *_ in SEEN_BY_ONE_LOOK).items()])
def test_what_one_look_shows(id, ask):
    cases = [(job, edited(id, *edits), words)
             for some, job, edits, words in SEEN_BY_ONE_LOOK if some == id]
    found = [ask(id=id, texts=[text], jobs=[job])[0] for job, text, _ in cases]
    assert [(words, seen) for (_, _, words), seen in zip(cases, found, strict=True)
            if seen is None or not seen[1].startswith(f"{words}: ")] == []


@tried_training
def test_weights_are_judged_by_their_distribution(id, ask):
    texts = [edited(id, ("torch.manual_seed(args.seed)", f"torch.manual_seed(args.seed + {more})"))
             for more in ((100, 200, 300) if os.environ.get("RUN_SLOW") else (100,))]
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
    assert not differences({"gate": ["tensors", {"weight": wanted}, {"weight": 0.3}]},
                           {"gate": ["tensors", {"weight": wanted * 1.2}, 0]})  # its own tolerance
    log = {"the log": ["log", ["step:1/1 train_loss:nan"], 0]}
    assert not differences(log, log)


def test_the_stand_in_for_triton_has_what_the_kernels_use():
    from speedrun.check.kernels import modules

    used = {name for id in IDS for name in re.findall(r"\btl\.(\w+)", source_of(id))}
    assert len(used) > 20 and used <= vars(modules(print)["triton.language"]).keys()


def test_zeros_do_not_show_whether_they_were_rounded():
    import torch

    from speedrun.check.trace_model import precision_of

    assert precision_of(torch.zeros(2)) == precision_of(torch.tensor([0.1])) == "float32"
    assert precision_of(torch.tensor([0.5])) == "float32, holding what bfloat16 can"


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


def test_slips_have_names_and_most_of_them_words():
    assert len({(milestone.id, slip.name) for milestone, slip in CASES}) == len(CASES)
    assert sum(bool(slip.words) for _, slip in CASES) > 0.8 * len(CASES)
