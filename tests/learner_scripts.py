"""Scripts as learners may write them, made from the snapshots: right in another way, or wrong."""

from speedrun.blocks import split_blocks
from speedrun.manifest import load_manifest


def source_of(id):
    """The text of a milestone's snapshot."""
    return load_manifest().get(id).script.read_text(encoding="utf-8")


def edited(id, *edits):
    """A snapshot's text with each (old, new) replaced; every old text must occur just once."""
    text = source_of(id)
    for old, new in edits:
        assert text.count(old) == 1, f"{id}: {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    return text


def with_blocks(id, blocks, *edits):
    """A snapshot's text with whole blocks in another wording, "" for none, and edits on top."""
    text = edited(id, *edits)
    for name, new in blocks.items():
        (old,) = [block.text for block in split_blocks(text) if block.name == name]
        text = text.replace(old, new.strip("\n"))
    return text


# ---- right, but written differently ----

# Another name and structure: Newton-Schulz is a method that works on a batch of equal shapes, the
# momentum is a running mean (the same direction), and the gradient's matrices stay on the left.
OTHER_MUON = '''
class SpectralDescent(torch.optim.Optimizer):
    def __init__(self, matrices, rate, beta, rounds=5):
        super().__init__(list(matrices), {"lr": rate})
        self.beta, self.rounds = beta, rounds

    def whiten(self, batch):  # (n, rows, cols)
        batch = batch / (batch.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
        for _ in range(self.rounds):
            if batch.shape[1] <= batch.shape[2]:
                gram = torch.einsum("nij,nkj->nik", batch, batch)
                cubed = gram.bmm(batch)
                batch = 3.4445 * batch - 4.7750 * cubed + 2.0315 * gram.bmm(cubed)
            else:
                gram = torch.einsum("nji,njk->nik", batch, batch)
                cubed = batch.bmm(gram)
                batch = 3.4445 * batch - 4.7750 * cubed + 2.0315 * cubed.bmm(gram)
        return batch

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                memory = self.state[weight]
                if "mean" not in memory:
                    memory["mean"] = weight.grad * (1 - self.beta)
                else:
                    memory["mean"].lerp_(weight.grad, 1 - self.beta)
                ahead = torch.lerp(weight.grad, memory["mean"], self.beta)
                out, width = weight.shape
                pieces = 3 if out == 3 * width else 1
                white = self.whiten(ahead.view(pieces, out // pieces, width))
                size = group["lr"] * math.sqrt(max(out // pieces, width))
                weight.sub_(size * white.reshape(out, width))
'''


def other_muon():
    """01 with OTHER_MUON."""
    return with_blocks(
        "01", {"newton_schulz": "", "nesterov_update": "", "Muon": OTHER_MUON},
        ("""        Muon(hidden_matrix_params, lr=args.muon_lr, momentum=args.muon_momentum,
             bf16=args.bf16, compile=args.compile),""",
         "        SpectralDescent(hidden_matrix_params, args.muon_lr, beta=args.muon_momentum),"),
    )


# Complex numbers for the rotation (pairs are neighbours, and they turn the other way), one stacked
# matrix of keys, queries and values, the norm on both at once, and a softmax of its own.
OTHER_ATTENTION = '''
class CausalSelfAttention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads = args.num_heads
        width = args.model_dim
        self.out = nn.Linear(width, width, bias=False)
        self.out.weight.data.zero_()
        self.into = nn.Linear(width, 3 * width, bias=False)
        pairs = width // self.heads // 2
        speed = 10000.0 ** (-torch.arange(pairs) / pairs)
        turns = torch.outer(torch.arange(args.seq_len), speed)
        self.register_buffer("turns", torch.polar(torch.ones_like(turns), turns), persistent=False)

    def forward(self, stream):
        batch, time, width = stream.shape
        k, q, v = self.into(stream).view(batch, time, 3, self.heads, -1).unbind(2)
        kq = torch.stack((k, q))
        kq = kq * torch.rsqrt(kq.pow(2).mean(-1, keepdim=True) + 1e-6)
        pairs = torch.view_as_complex(kq.unflatten(-1, (-1, 2)).contiguous())
        kq = torch.view_as_real(pairs * self.turns[:time, None]).flatten(-2)
        scores = torch.einsum("bqhd,bkhd->bhqk", kq[1], kq[0]) / kq.size(-1) ** 0.5
        later = torch.ones(time, time, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(mixed.reshape(batch, time, width))
'''


def other_attention():
    """02 with OTHER_ATTENTION; Muon takes the stack apart as 01 did."""
    muon = next(b.text for b in split_blocks(source_of("01")) if b.name == "Muon")
    return with_blocks("02", {"CausalSelfAttention": OTHER_ATTENTION, "Rotary": "", "Muon": muon})


# The first layers belong to rank 0, the next to rank 1; owners send theirs to everyone.
OTHER_SHARES = '''
class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum, bf16, compile):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    def owner(self, number, count):
        return number * dist.get_world_size() // count

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            sent = []
            for i, p in enumerate(group["params"]):
                owner = self.owner(i, len(group["params"]))
                update = torch.empty_like(p)
                if owner == dist.get_rank():
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    update = newton_schulz(nesterov_update(p.grad, buffer, group["momentum"]))
                    update = (update * max(p.shape) ** 0.5).contiguous()
                sent.append((p, update, dist.broadcast(update, owner, async_op=True)))
            for p, update, handle in sent:
                handle.wait()
                p.sub_(group["lr"] * update)
'''


def other_shares():
    """03 with OTHER_SHARES."""
    return with_blocks("03", {"Muon": OTHER_SHARES})


# All scalars in two tensors of GPT, encoder and decoder as two loops, the head registered first.
OTHER_SHORTCUTS = '''
class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.lm_head = Linear(args.model_dim, args.vocab_size)
        nn.init.zeros_(self.lm_head.weight)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.half = args.num_layers // 2
        mixes = torch.tensor([[1.0, 0.0]]).repeat(args.num_layers, 1)
        self.mixes = nn.Parameter(mixes)  # of stream and embedding
        self.others = nn.Parameter(torch.cat((torch.full((args.num_layers,), 0.5),
                                              torch.ones(self.half))))  # of values, of skips
        self.tokens = nn.Embedding(args.vocab_size, args.model_dim)
        if args.bf16:
            self.bfloat16()
            for module in self.modules():
                if isinstance(module, Linear):
                    module.float()

    def layer(self, number, x, x0, first_v):
        mix = self.mixes[number]
        x = mix[0] * x + mix[1] * x0
        return self.blocks[number](x, first_v, self.others[number])

    def forward(self, inputs, targets=None):
        x0 = norm(self.tokens(inputs))
        x, first_v, outputs = x0, None, []
        for number in range(self.half):
            x, first_v = self.layer(number, x, x0, first_v)
            outputs.append(x)
        layers = len(self.blocks)
        for number in range(self.half, layers):
            skip = self.others[layers + number - self.half] * outputs[layers - 1 - number]
            x, first_v = self.layer(number, x + skip, x0, first_v)
        logits = 30 * torch.tanh(self.lm_head(norm(x)).float() / 30)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1),
                                                              targets.flatten())
'''
OTHER_BLOCK = '''
class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.mlp = MLP(args)
        self.attn = CausalSelfAttention(args)

    def forward(self, x, first_v, value_lambda):
        y, first_v = self.attn(norm(x), first_v, value_lambda)
        x = x + y
        return x + self.mlp(norm(x)), first_v
'''


def other_shortcuts():
    """04 with OTHER_SHORTCUTS."""
    return with_blocks(
        "04", {"GPT": OTHER_SHORTCUTS, "Block": OTHER_BLOCK},
        ("        self.value_lambda = nn.Parameter(torch.tensor(0.5))\n", ""),
        ("def forward(self, x, first_v):", "def forward(self, x, first_v, value_lambda):"),
        ("v = (1 - self.value_lambda) * v + self.value_lambda * first_v",
         "v = v + value_lambda * (first_v - v)"),
        ("[raw_model.embed.weight], [raw_model", "[raw_model.tokens.weight], [raw_model"),
        ("[param for param in raw_model.parameters() if param.ndim < 2]",
         "[raw_model.mixes, raw_model.others]"),
    )


# A mask of numbers to be added to the scores, with the start of each token's document by cummax.
OTHER_MASK = '''
def attention_mask(inputs, window, args):
    B, T = inputs.shape
    time = torch.arange(T, device=inputs.device)
    starts = torch.where(inputs == args.bos_id, time, 0).cummax(1).values  # (B, T)
    oldest = torch.maximum(starts, time - window + 1)
    if args.flex_attention:
        return create_block_mask(lambda b, h, q, k: (k <= q) & (k >= oldest[b, q]), B, None, T, T,
                                 device=inputs.device)
    hidden = (time > time[:, None]) | (time < oldest[:, None, :, None])
    return torch.zeros(hidden.shape, device=inputs.device).masked_fill(hidden, float("-inf"))
'''


def other_mask():
    """05 with OTHER_MASK."""
    return with_blocks("05", {"attention_mask": OTHER_MASK})


# Queries, keys and values on top of each other, which Muon takes apart.
STACKED = [
    ("""        self.c_q = Linear(args.model_dim, args.model_dim)
        self.c_k = Linear(args.model_dim, args.model_dim)
        self.c_v = Linear(args.model_dim, args.model_dim)
""", "        self.into = Linear(args.model_dim, 3 * args.model_dim)\n"),
    ("""        q = self.c_q(x).view(B, T, self.num_heads, self.head_dim)
        k = self.c_k(x).view(B, T, self.num_heads, self.head_dim)
        v = self.c_v(x).view(B, T, self.num_heads, self.head_dim)
""", "        q, k, v = self.into(x).view(B, T, 3, self.num_heads, self.head_dim).unbind(2)\n"),
    ("                update = self.newton_schulz(update, self.dtype)\n",
     "                parts = update.chunk(3 if update.size(0) == 3 * update.size(1) else 1)\n"
     "                update = torch.cat([self.newton_schulz(m, self.dtype) for m in parts])\n"),
    ("scale = max(1, update.size(0) / update.size(1)) ** 0.5",
     "scale = max(1, parts[0].size(0) / parts[0].size(1)) ** 0.5"),
]

RIGHT = {"01": other_muon, "02": other_attention, "03": other_shares, "04": other_shortcuts,
         "05": other_mask}

# ---- subtly wrong: (milestone, name, edits, check that must fail, words of its message) ----

ALL_REDUCE = ("            dist.all_reduce(flat)  # a sum with one term that is not zero, so it is "
              "exact\n")
DECAYING = '                param.mul_(1 - 0.1 * group["lr"])\n'
OWN = "            for i in range(dist.get_rank(), len(params), dist.get_world_size()):\n"
FLAT = "torch.zeros(sum(sizes), dtype=self.dtype, device=params[0].device)"
ADD_SKIP = """            if decoder_layer >= 0:
                x = x + self.skip_weights[decoder_layer] * skips.pop()
"""
BLOCK = "            x, first_v = block(x, first_v, x0)\n"
SET_WINDOW = "window.fill_(window_size(step, args))"
VALIDATE = "val_loss += model(inputs, targets, window) /"
NORMALIZED = next(b.text for b in split_blocks(source_of("00")) if b.name == "NormalizedAdamW")
WRONG = [
    ("01", "the factor of a whole stack",
     [("max(matrices[0].shape) ** 0.5", "max(param.shape) ** 0.5")],
     "update of a square matrix", "queries, keys, values of every layer: RMS"),
    ("01", "the stacks with Adam",
     [("    hidden_matrix_params = list(raw_model.blocks.parameters())\n",
       "    others = [block.attn.c_qkv.weight for block in raw_model.blocks]\n"
       "    hidden_matrix_params = [param for param in raw_model.blocks.parameters()\n"
       "                            if not any(param is other for other in others)]\n"),
      ("torch.optim.AdamW(embed_params, lr", "torch.optim.AdamW(embed_params + others, lr")],
     "orthogonal updates", "queries, keys, values of every layer: moved by Adam"),
    ("01", "one layer with Muon",
     [("list(raw_model.blocks.parameters())", "list(raw_model.blocks[0].parameters())"),
      ("torch.optim.AdamW(embed_params, lr",
       "torch.optim.AdamW(embed_params + list(raw_model.blocks[1:].parameters()), lr")],
     "orthogonal updates", "all matrices of layers 1, 2, 3: moved by Adam"),
    ("01", "a matrix that never moves",
     [('            for param in group["params"]:\n                state',
       '            for param in group["params"][:-1]:\n                state')],
     "orthogonal updates", "layer 3 MLP down: no move"),
    ("01", "the wrong sign", [("alpha=-group", "alpha=group")],
     "orthogonal updates", "the wrong sign | The weights move against the update: subtract"),
    ("01", "weight decay before the update",
     [("                param.add_(", DECAYING + "                param.add_(")],
     "orthogonal updates", "shrink by 0.0011 of themselves in a step | Muon has no weight decay"),
    ("01", "weight decay after the update",
     [('alpha=-group["lr"] * scale)\n', 'alpha=-group["lr"] * scale)\n' + DECAYING)],
     "orthogonal updates", "shrink by 0.0011 of themselves in a step | Muon has no weight decay"),
    ("01", "a momentum of 0.9", [("momentum=args.muon_momentum", "momentum=0.9")],
     "momentum", "0.9 in every step, whatever the hyperparameters say"),
    ("01", "another momentum",
     [("return grad + momentum * momentum_buffer", "return grad + 2 * momentum_buffer")],
     "momentum", "Or a momentum other than args.muon_momentum?"),
    ("01", "gradients of unit norm for the table",
     [("torch.optim.AdamW(embed_params", "NormalizedAdamW(embed_params"),
      ("class Muon(", NORMALIZED + "\n\n\nclass Muon(")],
     "Adam", "NormalizedAdamW"),
    ("01", "torch's own weight decay", [(", weight_decay=args.weight_decay", "")],
     "Adam", "weight_decay 0.01 (torch's own"),
    ("01", "a weight decay of 0.1", [("weight_decay=args.weight_decay", "weight_decay=0.1")],
     "Adam", "the rate is right, and the weights also shrink: weight_decay 0.1 "),
    ("01", "a weight decay of the gradient",
     [("torch.optim.AdamW(embed_params", "torch.optim.Adam(embed_params"),
      ("weight_decay=args.weight_decay", "weight_decay=0.1")],
     "Adam", "% of the entries move otherwise | What else"),
    ("01", "torch's own betas",
     [("fused=True,\n                          betas=(args.adam_beta1, args.adam_beta2), ", "")],
     "Adam", "betas 0.9, 0.999"),
    ("01", "a rate that ends at 1/11",
     [("(args.train_steps - step) / max(args.cooldown_steps, 1)",
       "1 - 10 / 11 * (1 - (args.train_steps - step) / args.cooldown_steps)")],
     "learning rate", "lr_multiplier(6199) = 0.0005556 of 6200 steps | 0.09141"),
    ("01", "no Nesterov", [("return grad + momentum * momentum_buffer", "return momentum_buffer")],
     "momentum", "without looking ahead"),
    ("01", "scale upside down",
     [("max(matrices[0].shape) ** 0.5", "min(matrices[0].shape) ** 0.5")],
     "update of a tall matrix", "sqrt(min(rows, cols))"),
    ("01", "four iterations", [("for _ in range(5)", "for _ in range(4)")],
     "orthogonal updates", "four Newton-Schulz steps"),
    ("01", "a wrong coefficient", [("3.4445, -4.7750, 2.0315", "3.4445, -4.7750, 2.0115")],
     "orthogonal updates", "three coefficients"),
    ("01", "Q, K and V as one matrix",
     [("update.split(cols) if rows == 3 * cols else [update]", "[update]")],
     "stacked matrices", "made orthogonal as one"),
    ("01", "Adam on the hidden matrices",
     [("""        Muon(hidden_matrix_params, lr=args.muon_lr, momentum=args.muon_momentum,
             bf16=args.bf16, compile=args.compile),""",
       "        torch.optim.Adam(hidden_matrix_params, lr=args.muon_lr),")],
     "orthogonal updates", "moved by Adam"),
    ("01", "bfloat16 whatever is asked for",
     [("X = matrix.to(dtype) /", "X = matrix.to(torch.bfloat16) /")],
     "orthogonal updates", "bf16=False"),
    ("01", "no rotation", [("q, k = self.rotary(q), self.rotary(k)", "pass")],
     "positions", "no trace of positions"),
    ("01", "rates never set", [('group["lr"] = group["initial_lr"] * lr_multiplier(step, args)',
                                "pass")], "rates in the loop", "lr_multiplier"),
    ("01", "momentum that the warm-up's end does not put back",
     [("lr=lr, momentum=momentum))\n        self.dtype",
       "lr=lr, momentum=momentum))\n        self.buffers = {}\n        self.dtype"),
      ("state = self.state[param]", "state = self.buffers.setdefault(param, {})")],
     "training losses", "warm-up before the clock is not undone"),
    ("01", "the loss of a micro-step not divided",
     [("loss = model(inputs, targets) / grad_accum_steps", "loss = model(inputs, targets)")],
     "train_loss in the log", "divide each loss by grad_accum_steps"),
    ("02", "rotated values",
     [("        q, k, v = (x.transpose(1, 2) for x in (q, k, v))",
       "        v = self.rotary(v)\n        q, k, v = (x.transpose(1, 2) for x in (q, k, v))")],
     "rotation", "values are rotated too"),
    ("02", "no QK-norm", [("self.rotary(norm(q)), self.rotary(norm(k))",
                           "self.rotary(q), self.rotary(k)")],
     "normalised queries and keys", "no norm on queries and keys"),
    ("02", "ReLU not squared", [("F.relu(self.c_fc(x)).square()", "F.relu(self.c_fc(x))")],
     "activation", "not squared"),
    ("02", "projections not zero",
     [("        self.c_proj = nn.Linear(args.model_dim, args.model_dim, bias=False)\n"
       "        nn.init.zeros_(self.c_proj.weight)\n",
       "        self.c_proj = nn.Linear(args.model_dim, args.model_dim, bias=False)\n")],
     "zeroed matrices", "not zero: attention output"),
    ("02", "vocabulary not padded", [("vocab_size: int = 50304", "vocab_size: int = 50257")],
     "parameter count", "123,532,032"),
    ("02", "a bias", [("self.c_fc = nn.Linear(args.model_dim, hidden_dim, bias=False)",
                       "self.c_fc = nn.Linear(args.model_dim, hidden_dim)")],
     "matrices", "Biases and norm weights"),
    ("02", "a wide MLP", [("hidden_dim = 4 * args.model_dim", "hidden_dim = 5 * args.model_dim")],
     "matrices", "yours has 0, 0, and blocks.0.mlp.c_fc.weight 160 x 32"),
    ("03", "no sum over the ranks", [(ALL_REDUCE, "")], "two ranks", "all_reduce"),
    ("03", "scale applied twice",
     [("updates[i].copy_(update * scale)", "updates[i].copy_(update * scale * scale)")],
     "update of a tall matrix", "applied twice"),
    ("04", "a value weight that is not learned",
     [("self.value_lambda = nn.Parameter(torch.tensor(0.5))",
       'self.register_buffer("value_lambda", torch.tensor(0.5))')],
     "learned scalars", "nn.Parameter"),
    ("04", "first in, first out", [("skips.pop()", "skips.pop(0)")],
     "skip connections", "the first one first"),
    ("04", "no norm on the embedding",
     [("x = x0 = norm(self.embed(inputs))", "x = x0 = self.embed(inputs)")],
     "embedding norm", "the embedding as it is"),
    ("04", "softcap 15", [("softcap = 30 ", "softcap = 15 ")], "logit softcap", "15 tanh"),
    ("04", "no momentum warm-up",
     [('                if "momentum" in group:\n'
       '                    group["momentum"] = muon_momentum(step, args)\n', "")],
     "momentum schedule", "muon_momentum in every step"),
    ("04", "embedding and stream swapped",
     [("self.lambdas[0] * x + self.lambdas[1] * x0", "self.lambdas[0] * x0 + self.lambdas[1] * x")],
     "embedding shortcut", "the 1 belongs to the stream"),
    ("04", "mixed values handed on",
     [("self.value_lambda * first_v\n",
       "self.value_lambda * first_v\n        first_v = v\n")],
     "value residual", "the layer before"),
    ("04", "weights of the values swapped",
     [("(1 - self.value_lambda) * v + self.value_lambda * first_v",
       "self.value_lambda * v + (1 - self.value_lambda) * first_v")],
     "what the scalars do", "attn.value_lambda"),
    ("04", "first values detached", [("first_v = v if first_v is None else first_v",
                                      "first_v = v.detach() if first_v is None else first_v")],
     "gradients", "values"),
    ("04", "one rate for head and embedding",
     [("dict(params=head_params, lr=args.head_lr)", "dict(params=head_params, lr=args.embed_lr)")],
     "Adam", "which is embed_lr"),
    ("05", "window off by one", [("(q - k < window)", "(q - k <= window)")],
     "window", "window + 1 tokens"),
    ("05", "documents not apart", [("(q >= k) & same_document & (q", "(q >= k) & (q")],
     "documents", "tokens see other documents"),
    ("05", "no window in validation",
     [("val_loss += model(inputs, targets, window) /", "val_loss += model(inputs, targets) /")],
     "training losses", "pass the window of the step there too"),
    ("05", "exclusive cumulative sum",
     [("documents = (inputs == args.bos_id).cumsum(1)",
       "documents = (inputs == args.bos_id).cumsum(1) - (inputs == args.bos_id).long()")],
     "documents", "not its own"),
    ("05", "a window that never grows",
     [("        window.fill_(window_size(step, args))\n", "")],
     "training losses", "set it in every step"),
    ("01", "logits in bfloat16", [(".float()  # (B, T, V)", "")],
     "bfloat16 forward", "bfloat16 logits | Products under torch.autocast"),
    ("03", "blocks of matrices without the remainder",
     [(OWN, """            per = len(params) // dist.get_world_size()
            for i in range(dist.get_rank() * per, (dist.get_rank() + 1) * per):
""")], "five ranks", "with 5 ranks these matrices never move: layer 3 values, attention output, "
     "MLP up, MLP down | 24 matrices on 5 ranks leave a remainder"),
    ("03", "the first ranks own as many as there are ranks",
     [(OWN, """            for i in range(len(params)):
                if i // dist.get_world_size() != dist.get_rank():
                    continue
""")], "orthogonal updates", "With one rank, rank 0 owns all matrices."),
    ("03", "a mean over the ranks",
     [(ALL_REDUCE, ALL_REDUCE + "            flat.div_(dist.get_world_size())\n")],
     "two ranks", "You average; sum instead."),
    ("03", "a buffer that is never zero again",
     [(FLAT, f'self.state[params[0]].setdefault("flat", {FLAT})'),
      ("if not state:", 'if "momentum_buffer" not in state:')],
     "two ranks", "start from zeros in every step"),
    ("04", "weights that are not cast", [("self.weight.to(x.dtype)", "self.weight")],
     "bfloat16 forward", ", at `return F.linear(x, self.weight)` | Cast the float32 weight"),
    ("04", "embedding and head of the wrong dtypes",
     [("                    module.float()\n", "                    module.float()\n"
       "            self.lm_head.bfloat16()\n            self.embed.float()\n")],
     "bfloat16 storage", "| the embedding is float32, not bfloat16; the head is bfloat16, not "),
    ("04", "a mixture that starts without the first values",
     [("nn.Parameter(torch.tensor(0.5))", "nn.Parameter(torch.tensor(0.0))")],
     "learned scalars", "in each of 4 blocks lambdas 1, 0 and value_lambda 0.5; 2 skip weights of "
     "1 | the mixture starts at 0, not 0.5"),
    ("04", "a skip behind its block", [(ADD_SKIP, ""), (BLOCK, BLOCK + ADD_SKIP)],
     "skip connections", "A skip is added before the block, before its mixture with x0."),
    ("04", "the decay of AdamW", [("optim.Adam(adam_groups", "optim.AdamW(adam_groups")],
     "Adam", "Pass weight_decay=0, or use torch.optim.Adam."),
    ("05", "no FlexAttention", [("    if args.flex_attention:\n", "    if False:\n")],
     "flex attention", "flex_attention is never called"),
    ("05", "documents in the dense mask only",
     [("create_block_mask(visible, B",
       "create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < window), B")],
     "flex attention", "other logits | The rule of create_block_mask is the dense mask's"),
    ("05", "the block mask as score_mod",
     [("flex_attention(q, k, v, block_mask=mask)", "flex_attention(q, k, v, mask)")],
     "flex attention", "it stops: line"),
    ("05", "a window that is one short", [("(q - k < window)", "(q - k < window - 1)")],
     "window", "a token sees window - 1 tokens, itself included"),
    ("05", "half a window", [("(q - k < window)", "(q - k < window // 2)")],
     "window", "half as many"),
    ("05", "documents counted over the rows", [(".cumsum(1)  # (B, T)", ".cumsum(0)  # (B, T)")],
     "documents", "cumsum(1): dimension 0 is the batch"),
    ("05", "the documents of the first row",
     [("documents[b, q] == documents[b, k]", "documents[0, q] == documents[0, k]")],
     "documents", "not documents[0, q]"),
    ("05", "a window in both directions",
     [("(q >= k) & same_document & (q - k < window)",
       "same_document & ((q - k).abs() < window)")], "causal mask", "A window alone is not causal"),
    ("05", "a window in some layers only",
     [("block(x, first_v, x0, mask)", "block(x, first_v, x0, mask if i % 2 else "
       "attention_mask(inputs, inputs.size(1), self.args))")],
     "logits", "With one document and a full window the logits agree: only the mask differs."),
    ("05", "a window that is a Python number",
     [(SET_WINDOW, "window = window_size(step, args)")],
     "window in main", "forward got the window as int | Compiled code is made anew"),
    ("05", "a warm-up without the window",
     [("model(inputs, targets, window).backward()", "model(inputs, targets).backward()")],
     "window in main", "the warm-up calls the model without the window | That compiles another"),
    ("05", "windows of two types",
     [(VALIDATE, "val_loss += model(inputs, targets, window.long()) /")],
     "window in main", "now int32 Tensor, now int64 Tensor | Each of them compiles"),
    ("05", "the window of the next step", [(SET_WINDOW, SET_WINDOW.replace("step,", "step + 1,"))],
     "training losses", "The window is one step early."),
    ("05", "the last window in all steps", [(SET_WINDOW, "window.fill_(args.window_end)")],
     "training losses", "The window is window_end from the start."),
    ("05", "the last window in validation",
     [(VALIDATE, "val_loss += model(inputs, targets, torch.full_like(window, args.window_end)) /")],
     "training losses", "Validation sees window_end tokens"),
]
