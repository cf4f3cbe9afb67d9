"""Steps of the small model on its one batch, at the record's rates without their schedule."""

import math
import re

import torch

from oracle import mathematics as m
from oracle import schedules
from oracle.model import LAYER_NETS, Model

HIDDEN = re.compile(r"\.attn\.c_\w+$|\.mlp\.c_\w+$")  # the matrices of layers


class Training:
    """A small model that is trained for `steps`, with the states of its optimizers; with a head in
    eight bits, if asked for. `train_losses`: a token's mean, of each step."""

    def __init__(self, f, steps, eight_bits=False):
        self.f, self.steps, self.eight_bits = f.but(train_steps=steps), steps, eight_bits
        self.train_losses = []
        self.model = Model(f)
        self.P, self.states, self.sums = self.model.filled(0.5), {}, {}

    def run(self):
        """Losses of the validations before each step and after the last, and how far every tensor
        moves in the first step."""
        losses, before = [], {name: p.detach().clone() for name, p in self.P.items()}
        for s in range(self.steps):
            if self.f.further_targets and not self.eight_bits:
                losses.append(self.validated(s))
            self.step(s)
            if s == 0:
                moves = {name: p.detach() - before[name] for name, p in self.P.items()}
        return [*(losses or self.train_losses), self.validated(self.steps)], moves

    @torch.no_grad()
    def validated(self, s):
        """The loss of next tokens before step s; without further targets, that of training."""
        return self.model.loss(self.P, window=self.window(s)).item()

    def window(self, s):
        """Before 05r no window is short enough to matter."""
        return schedules.window(self.f, s) if self.f.windows == "stages" else None

    def step(self, s):
        """One step: gradients, Muon, Adam where it is due."""
        f, P = self.f, self.P
        weights = schedules.target_weights(f, s) if f.further_targets else None
        loss = self.model.loss(P, weights, f.summed, window=self.window(s),
                               eight_bits=self.eight_bits)
        self.train_losses.append(loss.item() / (16 if f.summed else 1))
        gradients = torch.autograd.grad(loss, list(P.values()), allow_unused=True)
        with torch.no_grad():
            for (name, p), g in zip(P.items(), gradients, strict=True):
                if f.muon and self.is_muons(name):
                    self.muon(name, p, torch.zeros_like(p) if g is None else g, s)
                elif g is not None:
                    self.sums[name] = self.sums.get(name, 0) + g
            for name in [*self.sums] if (s + 1) % (f.adam_every or 1) == 0 else ():
                self.adam(name, P[name], self.sums.pop(name))
            if f.tied_at_first and s == schedules.last_tied_step(f):  # with Adam's memory
                P["embed"].copy_(P["lm_head"])
                self.states["embed"], self.model.tied = dict(self.states["lm_head"]), False

    def is_muons(self, name):
        """Whether a tensor is a matrix of a layer, or a gate until gates are one tensor."""
        gate = name.endswith(("attn.gate", "smear_gate")) and self.f.attention_gates == "blocks"
        return gate or HIDDEN.search(name)

    def muon(self, name, p, g, s):
        """A step against the orthogonalized momentum, matrix by matrix. Keller Jordan's Muon."""
        f, state = self.f, self.states.setdefault(name, {})
        momentum = schedules.muon_momentum(f, s)
        memory = state.get("momentum", torch.zeros_like(p))
        if f.averaged_momentum:  # record #15
            memory = memory + (1 - momentum) * (g - memory)
            u = g + momentum * (memory - g)
        else:
            memory = momentum * memory + g
            u = g + momentum * memory
        state["momentum"], rows = memory, self.rows(name, p)
        for k, (W, update) in enumerate(zip(p.split(rows), u.split(rows), strict=True)):
            V, rate = m.orthogonalize(update, f.polar), f.muon_lr * self.factor(name, W)
            if f.neurons and HIDDEN.search(name):
                dim = int(f.neurons == "shorter side" and len(W) >= W.size(1))
                V, state[k] = m.even_out(V, state.get(k, 0), f.neuron_beta, dim)
            if f.muon_decay == "plain":
                W.mul_(1 - rate * f.weight_decay)
            decay = {"twice by rate": f.muon_lr * (f.muon_weight_decay or 0),
                     "cautious": f.weight_decay}.get(f.muon_decay, 0)
            W.copy_(m.cautious(W, V, rate, decay))

    def rows(self, name, p):
        """Rows of the matrices that are orthogonalized one by one."""
        C, pair = self.f.model_dim, 2 * self.f.model_dim // self.f.num_heads
        if self.f.head_pairs and name.endswith("c_qkvo"):  # record #80
            return [pair] * (2 * C // pair) + [C] * 2
        return [C] * (len(p) // C) if name.endswith(("c_qkv", "c_qkvo")) else [len(p)]

    def factor(self, name, W):
        """What multiplies Muon's rate."""
        f, (rows, columns) = self.f, W.shape
        if f.attention_lr_factor and HIDDEN.search(name):  # record #42
            return (f.attention_lr_factor if ".attn." in name else
                    f.mlp_in_lr_factor if name.endswith("c_fc") else f.mlp_out_lr_factor)
        by_rms = f.muon == "by rms"  # record #4; then record #8
        return math.sqrt(max(rows, columns) if by_rms else max(1, rows / columns))

    def adam(self, name, p, g):
        """Adam, or AdamW (arXiv 1711.05101) in 00 to 00b and in the prelude."""
        f = self.f
        rate, betas, factor = self.group(name, p.ndim)
        decay = rate * rate * (f.adam_weight_decay or 0) * factor
        if f.adam in ("unit gradients", "decayed"):
            g = g / (g.norm() + 1e-6) if f.adam == "unit gradients" else g
            p.mul_(1 - rate * f.weight_decay * factor)
        state = self.states.setdefault(name, {})
        p.copy_(m.adam(p, g, state, rate, betas, f.adam_eps, decay, f.adam == "early eps"))

    def group(self, name, ndim):
        """Rate, betas and the factor of the decay of a tensor; biases of networks do not decay."""
        f, small = self.f, (self.f.small_beta1, self.f.small_beta2)
        usual, head, table = ((b, f.adam_beta2) for b in (
            f.adam_beta1, f.betas and f.head_beta1 or f.adam_beta1,
            f.betas and f.value_embed_beta1 or f.adam_beta1))
        if f.adam_lr:
            return f.adam_lr, usual, f.adam == "unit gradients" or ndim > 1
        if name in ("embed", "lm_head"):
            rate = f.head_lr if f.tied_at_first or name == "lm_head" else f.embed_lr
            return rate, head, f.head_decay_factor or 1
        if name.startswith(("value_embeds", "bigram_embed")):
            rate = f.value_embed_lr if f.tied_at_first else f.embed_lr
            return rate, table, f.value_embed_decay_factor or 1
        if "mix_net." in name:
            return f.mix_lr, small, ndim > 1
        if name.startswith((*LAYER_NETS, "layer_net_scale")):
            return f.layer_net_lr, small, ndim > 1
        if f.attention_gates in (None, "blocks"):
            return f.scalar_lr, usual, 0
        return dict(  # records #52, #55, #77 and #82
            smear_gate=(f.smear_gate_lr, small, 0), skip_gate=(f.skip_gate_lr, small, 0),
            attention_gates=(f.gate_lr, small, 1), value_gates=(f.gate_lr, small, 1),
            own_values=(f.gate_lr, small, 0), scalars=(f.scalar_lr, small, 0),
            x0_weights=((f.add_lr, (0.9, 0.95), 0) if f.late_injections
                        else (f.scalar_lr, usual, 0)),
            keep_weights=(f.scalar_lr, (0.9, 0.95), 0), add_weights=(f.add_lr, (0.9, 0.95), 0),
            bigram_weights=(f.add_lr, (0.9, 0.95), 0))[name]
