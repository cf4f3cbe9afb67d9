"""
e4b stream: text appears while it is drawn, in whole characters

Fine-tuning gave a model that answers. This script draws its answers, token by token; it is the
second of two programs that use a trained model.

Parent:  e4a stop
Changed: the first sample's text is printed token by token, and the other samples' texts follow in
         order; a character is printed once all of its bytes are there
Record:  none; a nanochat report calls it possible
Run:     python tools/run_milestone.py e2a --from RUN   (a model that answers; RUN trained 04)
         python tools/run_milestone.py ID --from RUN    (RUN is the folder that this printed)
         python path/to/this/generate.py --checkpoint=FILE --prompt='def add(a, b): return a + b'
"""

import argparse
import codecs
import os
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


# ---------------------------------------- Hyperparameters ----------------------------------------
@dataclass
class Hyperparameters:
    """Every setting you may want to change; the model's own sizes come with its checkpoint."""
    checkpoint: str = ""  # file of the fine-tuned model
    prompt: str = "def add(a, b):\n    return a + b"  # what the user says
    num_samples: int = 4  # answers, drawn in one batch
    max_new_tokens: int = 100  # tokens per answer, at most
    temperature: float = 0.8  # divides the logits; 0 = always the most probable token
    top_k: int = 0  # draws from the k most probable tokens; 0 = from all
    seed: int = 0
    bf16: bool = torch.cuda.is_available()


def parse_args(argv=None):
    """Hyperparameters from the command line: `--name=value` for any field of the dataclass."""
    def boolean(text):
        return ("False", "True").index(text) == 1  # argparse reports the ValueError of other texts
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in asdict(Hyperparameters()).items():
        kind = type(default)
        parser.add_argument(f"--{name}", type=boolean if kind is bool else kind, default=default,
                            metavar=kind.__name__, help=f"default: {default}")
    return Hyperparameters(**vars(parser.parse_args(argv)))


# ---------------------------------------------- Data ----------------------------------------------
def encode(text, config):
    """Token ids of a text: its UTF-8 bytes, or GPT-2's tokens; no text can contain a marker."""
    if config.bos_id == 256:  # the vocabulary is bytes
        return list(text.encode())
    import tiktoken
    return tiktoken.get_encoding("gpt2").encode_ordinary(text)


def encode_prompt(text, config):
    """Ids (T,) of a conversation for the assistant to continue: start, user, text, assistant."""
    start, user, assistant = range(config.bos_id, config.bos_id + 3)
    return torch.tensor([start, user, *encode(text, config), assistant])


def token_bytes(id, config):
    """The bytes of a token, which may be part of a character; a marker has none."""
    if id >= config.bos_id:
        return b""
    if config.bos_id == 256:
        return bytes([id])
    import tiktoken
    return tiktoken.get_encoding("gpt2").decode_single_token_bytes(id)


class Writer:
    """Prints the answers in order: the first unfinished one while it is drawn; later ones wait."""
    def __init__(self, config, num_samples):
        self.config = config
        decoder = codecs.getincrementaldecoder("utf-8")  # keeps an unfinished character's bytes
        self.decoders = [decoder(errors="replace") for _ in range(num_samples)]
        self.waiting, self.ended = [""] * num_samples, [False] * num_samples

    def add(self, sample, id, ended):
        piece = self.decoders[sample].decode(token_bytes(id, self.config), final=ended)
        self.waiting[sample] += piece + "\n" * ended
        self.ended[sample] = ended
        for first, text in enumerate(self.waiting):
            print(text, end="", flush=True)
            self.waiting[first] = ""
            if not self.ended[first]:
                break


# --------------------------------------------- Model ---------------------------------------------
def norm(x):
    """RMS norm over the last dimension, without parameters (arXiv 1910.07467)."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)  # for bfloat16 x, too


class Linear(nn.Linear):
    """nn.Linear that casts its float32 weight to the dtype of its input."""
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Rotary(nn.Module):
    """Rotary positions (arXiv 2104.09864): scores depend on positions only through distances."""
    def __init__(self, head_dim, seq_len):
        super().__init__()
        # At position t the pair of dimensions (i, i + D/2) rotates by t / 10000^(2i/D).
        frequencies = 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)  # (D/2,)
        frequencies = torch.cat((frequencies, -frequencies))  # (D,); negates sines, not cosines
        angles = torch.outer(torch.arange(seq_len), frequencies)[:, None]  # (T, 1, D)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, start):  # (B, T, H, D), at positions from `start` on
        end = start + x.size(1)
        cos, sin = self.cos[start:end].to(x.dtype), self.sin[start:end].to(x.dtype)
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # halves (x1, x2) become (x2, x1)
        return x * cos + swapped * sin  # (x1 cos + x2 sin, x2 cos - x1 sin)


class KVCache:
    """One layer's keys and values of the tokens so far: slots [0, filled) of (B, H, length, D)."""
    def __init__(self, config, length, like):
        heads, width = config.num_heads, config.model_dim // config.num_heads
        self.keys, self.values = like.new_empty(2, 1, heads, length, width)  # (1, H, length, D)
        self.filled = 0

    def append(self, k, v):
        """Stores k and v (B, H, T, D) of new tokens; returns the keys and values of all tokens."""
        start, self.filled = self.filled, self.filled + k.size(2)
        self.keys[:, :, start : self.filled] = k
        self.values[:, :, start : self.filled] = v
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]

    def take(self, rows):
        """Replaces the rows, one per sample, by copies of those with these numbers, in order."""
        self.keys, self.values = self.keys[rows], self.values[rows]


class CausalSelfAttention(nn.Module):
    """Causal multi-head attention: each token attends to itself and to earlier tokens."""
    def __init__(self, args, rotary):
        super().__init__()
        assert args.model_dim % args.num_heads == 0, "model_dim is not a multiple of num_heads"
        self.num_heads = args.num_heads
        # Three matrices, because Muon orthogonalises each by itself.
        self.c_q = Linear(args.model_dim, args.model_dim, bias=False)
        self.c_k = Linear(args.model_dim, args.model_dim, bias=False)
        self.c_v = Linear(args.model_dim, args.model_dim, bias=False)
        self.c_proj = Linear(args.model_dim, args.model_dim, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # other weights keep Linear's init
        self.rotary = rotary
        self.value_lambda = nn.Parameter(torch.tensor(0.5))  # the first layer's share of v

    def forward(self, x, first_v, cache=None):
        B, T, C = x.shape
        q, k, v = (linear(x).view(B, T, self.num_heads, -1)
                   for linear in (self.c_q, self.c_k, self.c_v))  # (B, T, H, D)
        # Value residual (arXiv 2410.17897): each layer mixes in the first layer's values.
        if first_v is None:  # this is the first layer
            first_v = v
        v = (1 - self.value_lambda) * v + self.value_lambda * first_v
        start = cache.filled if cache else 0
        assert start == 0 or T == 1, "a filled cache takes one token at a time: more need a mask"
        q, k = (self.rotary(norm(t), start) for t in (q, k))  # unit RMS: |scores| <= sqrt(head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D), as the kernels need
        if cache:
            k, v = cache.append(k, v)
        # One new token sees all keys; is_causal would show it only the first.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)  # scale 1 / sqrt(head_dim)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C)), first_v


class MLP(nn.Module):
    """Linear map to four times the width, squared ReLU (arXiv 2109.08668), linear map back."""
    def __init__(self, args):
        super().__init__()
        hidden_dim = 4 * args.model_dim
        self.c_fc = Linear(args.model_dim, hidden_dim, bias=False)
        self.c_proj = Linear(hidden_dim, args.model_dim, bias=False)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """One transformer layer; its branches add nothing initially: both output maps start at zero."""
    def __init__(self, args, rotary):
        super().__init__()
        self.attn = CausalSelfAttention(args, rotary)
        self.mlp = MLP(args)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # weights of x and the embedding x0

    def forward(self, x, first_v, x0, cache=None):
        x_weight, embed_weight = self.lambdas
        x = x_weight * x + embed_weight * x0  # a learned shortcut from the embedding
        y, first_v = self.attn(norm(x), first_v, cache)
        x = x + y
        x = x + self.mlp(norm(x))
        return x, first_v


class GPT(nn.Module):
    """Token ids to next-token logits, or to the mean loss if targets are given."""
    def __init__(self, args):
        super().__init__()
        assert args.num_layers % 2 == 0, "num_layers must be even: skips pair up its two halves"
        self.embed = nn.Embedding(args.vocab_size, args.model_dim)  # starts as N(0, 1)
        rotary = Rotary(args.model_dim // args.num_heads, args.seq_len)  # one for all layers
        self.blocks = nn.ModuleList(Block(args, rotary) for _ in range(args.num_layers))
        self.skip_weights = nn.Parameter(torch.ones(args.num_layers // 2))
        self.lm_head = Linear(args.model_dim, args.vocab_size, bias=False)
        nn.init.zeros_(self.lm_head.weight)  # uniform predictions: a loss of ln(vocab_size)
        if args.bf16:
            self.embed.bfloat16()  # the residual stream takes its dtype

    def forward(self, inputs, targets=None, caches=None):
        caches = iter(caches or [None] * len(self.blocks))  # one per layer
        x = x0 = norm(self.embed(inputs))  # (B, T, C)
        first_v, skips = None, []
        # A U-net (arXiv 1505.04597): the first half pushes its outputs, the second half pops them.
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x, first_v = block(x, first_v, x0, next(caches))
            skips.append(x)
        for block, weight in zip(self.blocks[half:], self.skip_weights, strict=True):
            x = x + weight * skips.pop()  # the first pop returns x itself, as in the record
            x, first_v = block(x, first_v, x0, next(caches))
        logits = self.lm_head(norm(x)).float()  # (B, T, V)
        # Softcap (arXiv 2408.00118): 30 tanh(z / 30) of logits z, written as a faster sigmoid.
        logits = 60 * torch.sigmoid(logits / 15) - 30
        if targets is None:
            return logits
        # Cross-entropy. The cap keeps exp finite; unlike gather, a masked sum fuses with exp's sum.
        is_target = torch.arange(logits.size(-1), device=logits.device) == targets[..., None]
        target_logits = torch.where(is_target, logits, 0).sum(-1)  # (B, T)
        return (logits.exp().sum(-1).log() - target_logits).mean()


# ------------------------------------------- Generation -------------------------------------------
def load_model(args, device):
    """The checkpoint's model on the device, in evaluation mode, and its run's hyperparameters."""
    assert os.path.isfile(args.checkpoint), (
        f"no checkpoint {args.checkpoint!r}; make one: run_milestone.py e2a --from RUN")
    checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    config = argparse.Namespace(**checkpoint["hyperparameters"] | dict(bf16=args.bf16))
    assert "checkpoint" in config, (
        f"{args.checkpoint} has no markers: fine-tune it first (run_milestone.py e2a)")
    model = GPT(config)
    model.load_state_dict(checkpoint["model"])
    return model.to(device).eval(), config


def random_stream(seed, sample):
    """A sample's random generator, independent of other samples' and other seeds' generators."""
    mixed = np.random.SeedSequence(seed, spawn_key=(sample,)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


def draw(logits, streams, args):
    """Token ids (B,), one for each row of logits (B, V), drawn by softmax(logits / temperature)
    from the row's own random stream."""
    assert logits.isfinite().all(), "logits are not finite: the model's training has diverged"
    if args.temperature == 0:
        return logits.argmax(-1).cpu()
    ids = torch.arange(logits.size(1), device=logits.device)
    if args.top_k:  # only ids that are among the k most probable of a row need to be sorted
        least = logits.topk(min(args.top_k, len(ids))).values[:, -1:]  # (B, 1), the k-th largest
        ids = ids[(logits >= least).any(0)]
    logits, order = logits[:, ids].sort(descending=True, stable=True)  # equal ones: lower id first
    # Exactly k, even where logits are equal. They are drawn on the CPU and in float64, so that a
    # seed gives the same tokens on every device.
    logits, ids = logits[:, : args.top_k or None].cpu().double(), ids[order].cpu()
    probabilities = ((logits - logits[:, :1]) / args.temperature).softmax(-1)
    ranks = [torch.multinomial(row, 1, generator=stream)
             for row, stream in zip(probabilities, streams, strict=True)]
    return ids.gather(1, torch.stack(ranks))[:, 0]


@torch.inference_mode()
def generate(model, prompt, config, args, show=lambda sample, id, ended: None):
    """Each sample's ids that continue the prompt (T,), up to a marker or max_new_tokens.

    show(sample, id, ended) is called for every token as soon as it is drawn.
    """
    length = len(prompt) + args.max_new_tokens
    assert length <= config.seq_len, (
        f"prompt and answer take {length} tokens, the model {config.seq_len}: shorten one")
    device = model.embed.weight.device
    streams = [random_stream(args.seed, sample) for sample in range(args.num_samples)]
    num_ids = config.bos_id + 4  # ids from here on are padding
    caches = [KVCache(config, length, model.embed.weight) for _ in model.blocks]
    # active: the number of the sample in each row of tokens
    answers, active = [None] * args.num_samples, list(range(args.num_samples))
    tokens = prompt[None]  # (1, T): the samples share the prompt, which is read once
    while active:
        unread = tokens[:, caches[0].filled :]  # the prompt, later one token per sample
        logits = model(unread.to(device), caches=caches)[:, -1, :num_ids]
        if len(unread) < len(active):  # the prompt was one row; now each sample has its own
            for cache in caches:
                cache.take([0] * len(active))
        logits, tokens = (t.expand(len(active), -1) for t in (logits, tokens))
        new = draw(logits, [streams[sample] for sample in active], args)
        tokens = torch.cat((tokens, new[:, None]), 1)
        ended = (new >= config.bos_id) | (tokens.size(1) == length)
        for drawn in zip(active, new.tolist(), ended.tolist(), strict=True):
            show(*drawn)
        for row in ended.nonzero()[:, 0].tolist():
            answers[active[row]] = tokens[row, len(prompt) :].tolist()
        if ended.any():
            rows = (~ended).nonzero()[:, 0].tolist()
            tokens, active = tokens[rows], [active[row] for row in rows]
            for cache in caches:
                cache.take(rows)
    return answers


def main(args):
    """Prints each sample's answer, then the tokens per second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, config = load_model(args, device)
    prompt = encode_prompt(args.prompt, config)
    start = time.perf_counter()
    writer = Writer(config, args.num_samples)
    answers = generate(model, prompt, config, args, show=writer.add)
    seconds = time.perf_counter() - start
    count = sum(map(len, answers))
    cut = sum(answer[-1] < config.bos_id for answer in answers)
    print(f"tokens:{count} time:{1000 * seconds:.0f}ms tokens_per_second:{count / seconds:.1f} "
          f"cut_at_max_new_tokens:{cut}")


if __name__ == "__main__":
    main(parse_args())
