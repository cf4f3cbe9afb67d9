"""The small model: its tensors as they are filled, and its loss on two rows of eight tokens."""

import math

import torch

from oracle import mathematics as m
from oracle import schedules

LAYER_NETS = "early_net", "late_net"

TOKENS = torch.tensor([(5 * i * i + 3 * i + 1) % 64 for i in range(17)])
INPUTS, TARGETS = TOKENS[:-1].view(2, 8), TOKENS[1:].view(2, 8)
PREFIXES = torch.tensor([v // 2 if v > 1 and v % 3 else -1 for v in range(64)])


class Model:
    """The small model of a milestone's features and numbers f."""

    def __init__(self, f):
        self.f, self.L, self.C, self.H, self.V = f, f.num_layers, f.model_dim, f.num_heads, 64
        self.D, self.last, self.tied = self.C // self.H, self.L - 1, bool(f.tied_at_first)
        self.tables = (f.value_embed_pattern or "") if f.values_from == "tables" else ""
        self.kinds = f.window_pattern if f.long_short else "L" * self.L
        self.attending = [i for i in range(self.L) if i != f.layer_without_attention]
        self.tabled = [i for i, table in enumerate(self.tables) if table != "."]
        self.own = [i for i, kind in enumerate(f.own_value_pattern or "") if kind == "V"]
        self.networks = self.layout_of_networks()
        self.shapes = {name: shape for name, *shape in filter(None, self.layout())}
        self.scalars = self.first_scalars()
        self.largest = {}  # of an MLP's activations, by layer: what FP8's next scale depends on

    # ---- tensors ----

    def layout(self):
        """(name, *shape) of what is filled, in that order: embedding, head, then what else a model
        has, as it lists it."""
        f, L, C, H, V = self.f, self.L, self.C, self.H, self.V
        tables = 1 + max((int(self.tables[i]) for i in self.tabled), default=-1)
        yield "embed", V, C
        yield f.untied and ("lm_head", V, C)
        yield f.positions == "table" and ("pos_embed", 8, C)
        yield f.smear and ("smear_gate", 1, 12)
        yield f.attention_gates == "one" and ("attention_gates", len(self.attending), H, 12)
        yield f.own_values == "weights" and ("own_values", len(self.own), H)
        yield f.value_gates and ("value_gates", len(self.tabled), H, 12)
        yield f.value_gates and not f.stream_gates and ("skip_gate", 1, 12)
        if f.one_value_table:
            yield "value_embeds", tables * V, C
        else:
            yield from ((f"value_embeds.{k}", V, C) for k in range(tables))
        yield f.bigrams and ("bigram_embed", f.bigram_rows, C)
        rows = [row for i in range(L) for row in self.layout_of_block(f"blocks.{i}.", i) if row]
        for row in [*rows, f.norm == "layer" and ("norm", C)]:
            yield row
            yield f.biases and row and (f"{row[0]}.bias", row[1])
        for name, outputs in self.networks.items():  # record #81: W2 gelu(W1 x) + b
            yield f"{name}.c_fc", f.coefficient_dim, C
            yield f"{name}.c_proj", sum(width for _, width, _ in outputs), f.coefficient_dim

    def layout_of_block(self, block, i):
        """A layer's matrices, as they are stored: outputs by inputs, but for the MLP's from 05n."""
        f, C = self.f, self.C
        if i in self.attending:
            yield f.norm == "layer" and (f"{block}attn_norm", C)
            for part in {"three": ["c_q", "c_k", "c_v", "c_proj"], "qkv": ["c_qkv", "c_proj"],
                         "qkvo": ["c_qkvo"]}[f.attention]:
                yield f"{block}attn.{part}", C * {"c_qkv": 3, "c_qkvo": 4}.get(part, 1), C
            yield f.attention_gates == "blocks" and (f"{block}attn.gate", self.H, 12)
        if self.has_mlp(i):
            yield f.norm == "layer" and (f"{block}mlp_norm", C)
            yield f"{block}mlp.c_fc", *((C, 4 * C) if f.mlp_transposed else (4 * C, C))
            yield f"{block}mlp.c_proj", C, 4 * C

    def has_mlp(self, i):
        return i > 0 or self.f.first_mlp is not False

    def layout_of_networks(self):
        """{network: [(output's name, width, initial value)]} of records #81 and #85."""
        f, H, found = self.f, self.H, {}
        if f.mixes:
            found[f"blocks.{self.last}.mix_net"] = [(f"mu{k}", 1, first) for k, first in enumerate(
                [0, 0, 0, 0, 0, 0, 2, 2, 1.1**0.5, 1, 0, 0.05, 1.1**0.5, 1])]
            found["final_mix_net"] = [(f"nu{k}", 1, -0.5 * (k == 1)) for k in range(5)]
        for name in LAYER_NETS if f.stream_gates else ():
            late = name == "late_net"
            here = [i for i in range(self.L) if (i >= f.late_layer) == late]
            mixed = [i for i in here if i in self.attending and i != self.last]
            found[name] = [
                *((f"own {i}", H, 0) for i in here if i in self.own),
                *((f"gate {i}", H, f.head_gate_init) for i in here if f.gate_pattern[i] == "G"),
                *([("mixture", H, 1), ("composed", H, 0)] if f.composed and late else []),
                *((f"x0 {i}", 1, 0) for i in mixed),
                *((f"bigram {i}", 1, f.bigram_scale) for i in mixed),
                *([("skip", 1, f.skip_factor_init)] if late else [])]
        return found

    def first_scalars(self):
        """{name: first value} of what is not filled; self.places: what record #32's bank holds."""
        f, L, found = self.f, self.L, {}
        first = dict(skip=1 if f.skips == "linear" else -1.5, x=f.x_init or 1, x0=0, value=0.5,
                     table=0.5, qkv=0.5, out=1, bigram=f.bigram_scale, smear=0, backout=0.5)
        self.places = [f"{name} {i}" for i in range(L) for name in f.bank or ()]
        self.places += f.after_bank or ()
        if f.bank:
            found["scalars"] = [first[place.split()[0]] for place in self.places]
        else:
            found |= {"skip_weights": [1.0] * (L // 2)} if f.skips else {}
            for i in range(L) if f.residual else ():
                found[f"blocks.{i}.lambdas"] = [1.0, 0.0]
                if i in self.attending:
                    many = f.values_from == "tables"
                    found[f"blocks.{i}.attn.value_lambda" + "s" * many] = [0.5] * 2 if many else 0.5
        if f.x0_weights and not f.stream_gates:
            found["x0_weights"] = [0.0] * L
            found |= {"bigram_weights": [f.bigram_scale] * L} if f.late_injections else {}
        if f.sublayers:
            found |= {"keep_weights": [[1.1**0.5] * 2] * L, "add_weights": [[1.0] * 2] * L}
        for name, outputs in self.networks.items():
            scale = f.layer_net_scale if name in LAYER_NETS else f.mix_scale
            found[f"{name}.bias"] = [v / scale for _, width, v in outputs for _ in range(width)]
        return found | ({"layer_net_scale": f.layer_net_scale} if f.stream_gates else {})

    def filled(self, amplitude, moved=None):
        """Tensor k holds amplitude * sin(0.37 i + k), and 1 more in norms; scalars have their first
        values or those of `moved`, by name or by the name's end."""
        P, moved = {}, moved or {}
        for k, (name, shape) in enumerate(self.shapes.items()):
            P[name] = amplitude * torch.sin(0.37 * torch.arange(math.prod(shape)).double() + k)
            P[name] = P[name].view(shape) + name.endswith("norm")
        for name, first in self.scalars.items():
            first, value = m.tensor(first), moved.get(name, moved.get(name.split(".")[-1], first))
            if name == "scalars":  # padded in some milestones
                value = value[: len(first)]
            P[name] = m.tensor(value).expand(first.shape).clone() if value is not first else first
        return {name: value.requires_grad_() for name, value in P.items()}

    # ---- the forward pass ----

    def loss(self, P, weights=None, summed=False, inputs=INPUTS, targets=TARGETS, counted=None,
             **seen):
        """The mean or the sum of the tokens' losses, or of those `counted`. weights: of further
        targets; seen: as in `logits`."""
        z = self.logits(P, inputs, **seen)
        prefixes = PREFIXES if self.f.prefixes and weights else None
        losses = m.token_losses(z, targets, weights or (1.0,), prefixes)
        losses = losses if counted is None else losses[counted]
        return losses.sum() if summed else losses.mean()

    def logits(self, P, inputs=INPUTS, window=None, tables=None, bos_id=50_256, tile_size=128,
               attn_scale=None, eight_bits=False):
        """Capped logits. window: tokens that long layers see, None for all, at the angles of the
        last window; tables: "bfloat16" rounds cosines and sines; tile_size: what short windows are
        multiples of; attn_scale: of what attention writes; eight_bits: of the head's product and,
        since record #84, of MLPs."""
        f, self.P, self.inputs, self.rounded = self.f, P, inputs, tables == "bfloat16"
        self.branch = attn_scale or ((2 * self.L) ** -0.5 if f.branch_factor else 1)
        self.documents = (inputs == bos_id).cumsum(1) * bool(f.documents)
        self.mlps_in_eight_bits = eight_bits and bool(f.fp8_mlp_act_headroom)
        self.long = 10**6 if window is None else window
        self.short = max(1, self.long // (2 * tile_size)) * tile_size
        self.turns = m.frequencies(self.D, f.half_rotation)
        self.scale = f.attention_scale if f.scale == "stated" else self.D**-0.5
        if f.scale == "yarn":
            passed = [w for w in schedules.stage_windows(f) if w <= self.long]
            self.turns, self.scale = m.yarn(self.turns, passed)
        self.scalar = dict(zip(self.places, P["scalars"], strict=True)) if f.bank else {}
        x, W = self.normed(self.stream(), "norm"), P["lm_head" if f.untied else "embed"]
        z = m.EightBitProduct.apply(x, W) if eight_bits else x @ W.T
        constants = (f.cap_height, f.cap_shift, f.cap_width) if f.cap == "stated" else f.cap
        return m.cap(z, *constants) if f.cap else z

    def normed(self, x, name=None):
        if self.f.norm == "layer":
            return m.layer_norm(x, self.P[name], self.P[f"{name}.bias"])
        return m.norm(x, self.f.norm_eps)

    def linear(self, x, name):
        return x @ self.P[name].T + self.P.get(f"{name}.bias", 0)

    def gate(self, x, weight):
        """sigmoid of a product with the first channels. Record #28."""
        return torch.sigmoid(x[..., :12] @ weight.T)

    def stream(self):
        """The residual stream after the last layer."""
        f, P, s, ids = self.f, self.P, self.scalar, self.inputs
        x = P["lm_head" if self.tied else "embed"][ids]
        x = x + P["pos_embed"][: ids.size(1)] if f.positions == "table" else x
        if f.smear:  # record #34
            amount = s["smear"] * self.gate(x[:, 1:], P["smear_gate"])
            x = torch.cat([x[:, :1], x[:, 1:] + amount * x[:, :-1]], 1)
        self.x0 = x = self.normed(x) if f.embed_norm else x
        self.outputs, self.first_values = [], None
        if f.bigrams:  # record #62
            self.B = P["bigram_embed"][m.bigram_rows(ids, f.bigram_rows)]
        if f.signs:
            signs = (2.2 * torch.arange(f.sign_rows * self.C).double()).cos().sign()
            self.B = self.B * signs.view(-1, self.C)[m.sign_rows(ids, f.sign_rows)]
        self.gates = self.coefficients("early_net", x) if f.stream_gates else {}
        self.h0 = x = x + self.injected(0, "bigram") * self.B if f.late_injections else x
        for i in range(self.L):
            if f.stream_gates and i == f.late_layer:
                self.gates |= self.coefficients("late_net", x)
            layer = (self.last_layer if f.mixes and i == self.last
                     else self.injecting if f.late_injections else self.layer)
            x = layer(i, x)
            self.outputs.append(x)
        depth = f.cached_layer if f.cached else f.backout_layer
        return x - s["backout"] * self.outputs[depth] if f.backout else x  # record #40

    def skip(self, i):
        """What is added before layer i: U-net, arXiv 1505.04597, then one skip (record #45)."""
        f, s, half = self.f, self.scalar, self.L // 2
        if f.skips == "one" and i == f.skip_to:
            amount = torch.sigmoid(s["skip"])
            if f.stream_gates:
                amount = amount * self.gates["skip"]
            elif f.value_gates:
                amount = amount * 2 * self.gate(self.x0, self.P["skip_gate"])
            return amount * self.outputs[f.skip_from]
        if f.skips in ("linear", "sigmoid") and half <= i < 2 * half:
            weight = s[f"skip {i}"] if f.bank else self.P["skip_weights"][i - half]
            weight = torch.sigmoid(weight) if f.skips == "sigmoid" else weight
            return weight * self.outputs[2 * half - 1 - i]
        return 0

    def layer(self, i, x):
        """x <- a x + b x0 (+ c B); x <- x + attention; x <- x + MLP. Record #9."""
        f, s, block = self.f, self.scalar, f"blocks.{i}."
        x = x + self.skip(i)
        if f.bank:
            x0 = self.P["x0_weights"][i] if f.x0_weights else s[f"x0 {i}"]
            x = s[f"x {i}"] * x + x0 * self.x0 + (s[f"bigram {i}"] * self.B if f.bigrams else 0)
        elif f.residual:
            a, b = self.P[f"{block}lambdas"]
            x = a * x + b * self.x0
        if i in self.attending:
            x = x + self.branch * self.attention(i, self.normed(x, f"{block}attn_norm"))
        return x + self.mlp(i, self.normed(x, f"{block}mlp_norm")) if self.has_mlp(i) else x

    def injected(self, i, name):
        """The weight of x0 or of the bigrams in layer i."""
        gates = self.f.stream_gates
        return self.gates[f"{name} {i}"] if gates else self.P[f"{name}_weights"][i]

    def injecting(self, i, x):
        """x <- r x + p attention + a x0 + b B; x <- r' x + p' MLP. Records #73, #74 and #77. In 13g
        r and p are 1, and one factor multiplies x before attention reads it."""
        f, r, p = self.f, (1, 1), (1, 1)
        if f.sublayers:
            r, p = self.P["keep_weights"][i], self.P["add_weights"][i]
        else:
            x = self.scalar[f"x {i}"] * x
        x = x + self.skip(i)
        if i in self.attending:
            y = self.attention(i, self.normed(
                self.outputs[f.cached_layer] if f.cached and i > f.cached_layer else x))
            x = r[0] * x + p[0] * y + self.injected(i, "x0") * self.x0
            x = x + self.injected(i, "bigram") * self.B if i > 0 else x
        return r[1] * x + p[1] * self.mlp(i, self.normed(x))

    def coefficients(self, name, x):
        """{output: (B, T, width)} of scale * (W2 gelu(W1 x) + b). Record #81."""
        P, widths = self.P, [width for _, width, _ in self.networks[name]]
        scale = P["layer_net_scale"] if name in LAYER_NETS else self.f.mix_scale
        found = m.gelu(x @ P[f"{name}.c_fc"].T) @ P[f"{name}.c_proj"].T + P[f"{name}.bias"]
        names = [output for output, _, _ in self.networks[name]]
        return dict(zip(names, (scale * found).split(widths, -1), strict=True))

    def last_layer(self, i, x):
        """The last layer and what follows it, mixed by coefficients of the stream. MUDDFormer,
        arXiv 2502.12170, in the form of record #81."""
        f, h0, cached, source = self.f, self.h0, self.outputs[self.f.cached_layer], x
        mu = [*self.coefficients(f"blocks.{i}.mix_net", x).values()]
        values = mu[0] * h0 + mu[1] * cached + mu[2] * x
        gate = torch.cat([mu[6], mu[7]], -1).repeat_interleave(self.H // 2, -1)
        x = (1 + mu[5]) * x + mu[3] * h0 + mu[4] * cached
        y = self.attention(i, self.normed(cached), values, gate)
        x = mu[8] * x + mu[9] * y + mu[10] * h0 + mu[11] * self.B
        x = mu[12] * x + mu[13] * self.mlp(i, self.normed(x))
        nu = [*self.coefficients("final_mix_net", x).values()]
        return (x + nu[0] * h0 + nu[1] * cached + nu[2] * source + nu[3] * self.table(0)
                + nu[4] * self.outputs[f.skip_from])

    def mlp(self, i, x):
        f, name = self.f, f"blocks.{i}.mlp."
        if self.mlps_in_eight_bits:  # with room above the largest number of the pass before
            room = f.fp8_mlp_act_headroom * self.largest.get(i, 448 / f.fp8_mlp_act_headroom)
            y, self.largest[i] = m.EightBitMLP.apply(
                x, self.P[f"{name}c_fc"], self.P[f"{name}c_proj"], 448 / room)
            return y
        hidden = (x @ self.P[f"{name}c_fc"] if f.mlp_transposed
                  else self.linear(x, f"{name}c_fc"))
        if f.activation == "gelu":
            return self.linear(m.gelu(hidden), f"{name}c_proj")
        return self.linear(hidden.clamp(min=0).square(), f"{name}c_proj")  # arXiv 2109.08668

    # ---- attention ----

    def table(self, k):
        """A value table's rows (B, T, C)."""
        if self.f.one_value_table:
            return self.P["value_embeds"][k * self.V + self.inputs]
        return self.P[f"value_embeds.{k}"][self.inputs]

    def attention(self, i, x, mixed=None, table_gate=None):
        """What attention writes, from its normed input x. mixed: more values (B, T, C); table_gate:
        of the value table (B, T, H)."""
        f, s, name = self.f, self.scalar, f"blocks.{i}.attn."
        heads = (*x.shape[:2], self.H, self.D)
        if f.attention == "three":
            q, k, v = (self.linear(x, f"{name}c_{part}") for part in "qkv")
        else:
            matrices = self.P[f"{name}c_{f.attention}"].split(self.C)
            q, k, v = (x @ W.T for W in matrices[:3])
        if f.scalars_on_weights:  # record #47
            v = s[f"qkv {i}"] * v
            if not f.head_pairs:  # here 14b leaves it out: the norm undoes it, but for its epsilon
                q, k = s[f"qkv {i}"] * q, s[f"qkv {i}"] * k
        q, k, v = (part.view(heads) for part in (q, k, v))
        if f.qk_norm:  # arXiv 2010.04245
            q, k = m.norm(q, f.norm_eps), m.norm(k, f.norm_eps)
        v = self.values(i, x, v, table_gate) + (0 if mixed is None else mixed.view(heads))
        y = self.paired(q, k, v) if self.kinds[i] == "P" else self.attended(i, q, k, v)
        if f.own_values and i in self.own:  # record #82
            share = (self.gates[f"own {i}"] if f.stream_gates
                     else self.P["own_values"][self.own.index(i)].expand(y.shape[:3]))
            y = m.without_own(y, v, torch.tanh(share))
        if f.attention_gates in ("blocks", "one"):  # record #28
            weight = (self.P[f"{name}gate"] if f.attention_gates == "blocks"
                      else self.P["attention_gates"][self.attending.index(i)])
            y = self.gate(x, weight)[..., None] * y
        elif f"gate {i}" in self.gates:
            y = self.gates[f"gate {i}"][..., None] * y
        y = y.flatten(2)
        y = y @ matrices[3].T if f.attention == "qkvo" else self.linear(y, f"{name}c_proj")
        return s[f"out {i}"] * y if f.scalars_on_weights else y

    def values(self, i, x, v, table_gate):
        """v (B, T, H, D) with what the first layer (arXiv 2410.17897) or a table adds to it."""
        f, s, name = self.f, self.scalar, f"blocks.{i}.attn."
        if f.values_from == "first layer":
            self.first_values = v if self.first_values is None else self.first_values
            return torch.lerp(v, self.first_values, self.P[f"{name}value_lambda"])
        b = 1
        if f.values_from == "tables" and not f.scalars_on_weights:  # records #14 and #15
            a, b = ((s[f"value {i}"], s[f"table {i}"]) if f.bank
                    else self.P[f"{name}value_lambdas"])
            v = a * v
        if i not in self.tabled:
            return v
        rows = self.table(int(self.tables[i]))
        if f.value_gates and table_gate is None:  # records #55 and #70
            seen = x if f.value_gates == "stream" else torch.cat([x[..., :6], rows[..., :6]], -1)
            table_gate = 2 * self.gate(seen, self.P["value_gates"][self.tabled.index(i)])
        return v + (b if table_gate is None else table_gate[..., None]) * rows.view(v.shape)

    def rotated(self, x):
        return m.rotate(x, self.turns, torch.arange(x.size(1)), self.rounded)

    def paired(self, q, k, v):
        """The heads of a pair compete in one softmax; a window counts slots. Record #58."""
        q, k, v = self.rotated(m.paired(q)), self.rotated(m.paired(k)), m.paired(v)
        visible = m.visible_keys(self.documents.repeat_interleave(2, 1), self.short)
        return m.unpaired(m.attend(q, k, v, self.scale, visible))

    def attended(self, i, q, k, v):
        """Every head's own softmax; in 14g's last layer, also a mixture of all heads'."""
        f, long = self.f, self.kinds[i] == "L"
        q, k = (q, k) if f.positions == "table" else (self.rotated(q), self.rotated(k))
        k = m.offset(k) if f.key_offset and long else k
        visible = m.visible_keys(self.documents, self.long if long else self.short)
        y = m.attend(q, k, v, self.scale, visible)
        if f.composed and i == self.last:
            near = m.visible_keys(self.documents, f.composed_window - 1)
            P = m.weights_of_attention(q, k, self.scale, near)
            y = m.composed(y, v, P, self.gates["mixture"], self.gates["composed"])
        return y
