"""
e2 packing: several conversations fill a row, so few slots hold padding

Pretraining gave a model that continues text. This script fine-tunes it on conversations of a user
and an assistant, so that it answers; it is the first of two programs that use a trained model.

Parent:  e1 one shape
Changed: an epoch's conversations are packed into rows, best-fit decreasing; a step has half the
         rows, but more conversations. A token also sees its row's earlier conversations, which is a
         fault
Record:  none; a report on a vision-language model states 1.8 to 2 times the speed
Run:     python tools/run_milestone.py 04 --scale tiny --save-checkpoint    (a model to start from)
         python tools/run_milestone.py ID --from RUN     (RUN is the folder that this printed)
         torchrun --standalone --nproc_per_node=8 path/to/this/finetune.py --checkpoint=FILE
"""

import argparse
import gc
import itertools
import json
import os
import platform
import time
from bisect import bisect_left, insort
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


# ---------------------------------------- Hyperparameters ----------------------------------------
@dataclass
class Hyperparameters:
    """Every setting you may want to change; the defaults fit a model of the record's size."""
    # data
    checkpoint: str = ""  # file of the model to start from
    train_file: str = "data/builtin/chat_train.jsonl"  # one conversation per line
    val_file: str = "data/builtin/chat_val.jsonl"
    total_batch_size: int = 16_384  # slots per optimizer step, all ranks; padding fills some
    seq_len: int = 1024  # slots per row; longer conversations are cut
    micro_batch_size: int = 2  # rows per forward pass per rank
    # model
    vocab_size: int = 50304  # GPT-2's 50257 tokens and three markers, padded to a multiple of 128
    bos_id: int = 50256  # starts a conversation; the next three ids are user, assistant, end
    num_layers: int = 12
    num_heads: int = 6
    model_dim: int = 768
    # optimizer and schedule
    adam_lr: float = 3e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    train_steps: int = 38  # one epoch of the built-in conversations
    cooldown_steps: int = 38  # all steps: the learning rate falls from the first one on
    # run
    val_loss_every: int = 50  # steps between validations; 0 = only after the last step
    train_loss_every: int = 0  # steps between logged train losses; each waits for the GPU; 0 = none
    log_dir: str = field(default_factory=lambda: time.strftime(f"logs/%Y%m%d-%H%M%S-{os.getpid()}"))
    save_checkpoint: bool = True
    seed: int = 0
    kernel_warmup_steps: int = 3  # untimed micro-batches that compile the kernels; weights stay
    compile: bool = torch.cuda.is_available()
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


# ------------------------------------------- Schedules -------------------------------------------
def lr_multiplier(step, args):
    """Constant at 1, then linear decay to 0 over the last cooldown_steps (arXiv 2405.18392)."""
    return min(1.0, (args.train_steps - step) / args.cooldown_steps)


# ---------------------------------------------- Data ----------------------------------------------
IGNORED = -100  # stands for a target that does not count; F.cross_entropy skips it by default


def encode(text, args):
    """Token ids of a text: its UTF-8 bytes, or GPT-2's tokens; no text can contain a marker."""
    if args.bos_id == 256:  # the vocabulary is bytes
        return list(text.encode())
    import tiktoken
    return tiktoken.get_encoding("gpt2").encode_ordinary(text)


def tokenize(messages, args):
    """A conversation's inputs and targets, each (T,) int64. The tokens are start, then `user` and
    text, or `assistant`, text and `end`, for each turn; only an answer's text and `end` count."""
    start, user, assistant, end = range(args.bos_id, args.bos_id + 4)
    ids, counts, system = [start], [False], ""
    for message in messages:
        if message["role"] == "system":
            system = message["content"] + "\n\n"  # is put before the first question
            continue
        is_answer = message["role"] == "assistant"
        tokens = encode(system + message["content"], args) + [end] * is_answer
        ids += [assistant if is_answer else user, *tokens]
        counts += [False, *[is_answer] * len(tokens)]
        system = ""
    ids, counts = torch.tensor(ids), torch.tensor(counts)
    return ids[:-1], torch.where(counts, ids, IGNORED)[1:]


def read_conversations(file, args):
    """The conversations of a JSONL file, each (inputs, targets) cut to seq_len tokens, and how many
    were read, cut, and dropped because the cut left no target that counts."""
    found = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            messages = json.loads(line)["messages"]
            roles = [message["role"] for message in messages if message["role"] != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2), (
                f"{file}:{number}: the roles must alternate, user first and assistant last")
            found.append(tokenize(messages, args))
    cut = [(inputs[: args.seq_len], targets[: args.seq_len]) for inputs, targets in found]
    kept = [conversation for conversation in cut if count_targets([[conversation]])]
    return kept, dict(read=len(found), cut=sum(len(inputs) > args.seq_len for inputs, _ in found),
                      dropped=len(found) - len(kept))


def count_targets(rows):
    """The number of targets that count in rows, each a list of conversations."""
    return sum(int((targets != IGNORED).sum()) for row in rows for _, targets in row)


def pack(conversations, capacity):
    """Packs conversations into rows of at most `capacity` tokens, by best-fit decreasing: longest
    first, each into the fullest row that still has room for it."""
    rows, space = [], []  # space: (slots left, number of the row), ascending
    for conversation in sorted(conversations, key=lambda c: len(c[0]), reverse=True):
        size = len(conversation[0])
        fullest = bisect_left(space, (size, 0))
        if fullest == len(space):
            space.append((capacity, len(rows)))
            rows.append([])
        left, row = space.pop(fullest)
        rows[row].append(conversation)
        insort(space, (left - size, row))
    return rows


def epoch_rows(conversations, args, epoch=0):
    """The rows of an epoch in random order, each a list of conversations."""
    rng = np.random.default_rng((args.seed, epoch))
    rows = pack([conversations[i] for i in rng.permutation(len(conversations))], args.seq_len)
    rng.shuffle(rows)
    return rows


def pad(rows, args):
    """Inputs and targets (B, T) of the rows, padded at the end. Padding has no effect: causal
    attention hides it from the tokens before it, and its targets do not count."""
    shape = args.micro_batch_size, args.seq_len  # always, so that the model is compiled once
    inputs, targets = torch.full(shape, args.bos_id), torch.full(shape, IGNORED)
    for i, row in enumerate(rows):
        own_inputs, own_targets = map(torch.cat, zip(*row, strict=True))
        inputs[i, : len(own_inputs)] = own_inputs
        targets[i, : len(own_targets)] = own_targets
    return inputs, targets


def row_batches(rows, args, device):
    """Yields this rank's micro-batches of the rows: blocks of rows go to the ranks round-robin, so
    a step has the same rows for any number of ranks."""
    B = args.micro_batch_size
    for start in range(dist.get_rank() * B, len(rows), dist.get_world_size() * B):
        tokens = torch.stack(pad(rows[start : start + B], args))  # (2, B, T): inputs, targets
        if device.type == "cuda":
            tokens = tokens.pin_memory()  # lets the copy be asynchronous
        yield tokens.to(device, non_blocking=True).unbind()


def step_rows(conversations, args):
    """Yields the rows of each optimizer step without end; an epoch's tail that is too short for a
    step is skipped."""
    micro_slots = args.micro_batch_size * args.seq_len * dist.get_world_size()
    assert args.total_batch_size % micro_slots == 0, (
        f"total_batch_size is not a multiple of {micro_slots}, a micro-batch on each rank")
    count = args.total_batch_size // args.seq_len
    for epoch in itertools.count():
        rows = epoch_rows(conversations, args, epoch)
        assert len(rows) >= count, f"{len(rows)} rows are too few for a step of {count}"
        for start in range(0, len(rows) - count + 1, count):
            yield rows[start : start + count]


def count_slots(rows, args):
    """Counts what the slots of rows hold. waste is the share of padding; waste_alone is the share
    of padding if each conversation had a row of seq_len slots to itself."""
    B, lengths = args.micro_batch_size, [len(inputs) for row in rows for inputs, _ in row]
    batches = [rows[i : i + B] for i in range(0, len(rows), B)]
    slots = sum(len(batch) * pad(batch, args)[0].size(1) for batch in batches)
    return dict(tokens=sum(lengths), answer_tokens=count_targets(rows), rows=len(rows), slots=slots,
                waste=round(1 - sum(lengths) / slots, 4),
                waste_alone=round(1 - sum(lengths) / (len(lengths) * args.seq_len), 4))


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

    def forward(self, x):  # (B, T, H, D)
        cos, sin = self.cos[: x.size(1)].to(x.dtype), self.sin[: x.size(1)].to(x.dtype)
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # halves (x1, x2) become (x2, x1)
        return x * cos + swapped * sin  # (x1 cos + x2 sin, x2 cos - x1 sin)


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

    def forward(self, x, first_v):
        B, T, C = x.shape
        q, k, v = (linear(x).view(B, T, self.num_heads, -1)
                   for linear in (self.c_q, self.c_k, self.c_v))  # (B, T, H, D)
        # Value residual (arXiv 2410.17897): each layer mixes in the first layer's values.
        if first_v is None:  # this is the first layer
            first_v = v
        v = (1 - self.value_lambda) * v + self.value_lambda * first_v
        q, k = self.rotary(norm(q)), self.rotary(norm(k))  # unit RMS: |scores| <= sqrt(head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D), as the kernels need
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale 1 / sqrt(head_dim)
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

    def forward(self, x, first_v, x0):
        x_weight, embed_weight = self.lambdas
        x = x_weight * x + embed_weight * x0  # a learned shortcut from the embedding
        y, first_v = self.attn(norm(x), first_v)
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

    def forward(self, inputs, targets=None):
        x = x0 = norm(self.embed(inputs))  # (B, T, C)
        first_v, skips = None, []
        # A U-net (arXiv 1505.04597): the first half pushes its outputs, the second half pops them.
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x, first_v = block(x, first_v, x0)
            skips.append(x)
        for block, weight in zip(self.blocks[half:], self.skip_weights, strict=True):
            x = x + weight * skips.pop()  # the first pop returns x itself, as in the record
            x, first_v = block(x, first_v, x0)
        logits = self.lm_head(norm(x)).float()  # (B, T, V)
        # Softcap (arXiv 2408.00118): 30 tanh(z / 30) of logits z, written as a faster sigmoid.
        logits = 60 * torch.sigmoid(logits / 15) - 30
        if targets is None:
            return logits
        # Cross-entropy. The cap keeps exp finite; unlike gather, a masked sum fuses with exp's sum.
        is_target = torch.arange(logits.size(-1), device=logits.device) == targets[..., None]
        target_logits = torch.where(is_target, logits, 0).sum(-1)  # (B, T)
        return (logits.exp().sum(-1).log() - target_logits).mean()


def load_start(model, args):
    """Loads the checkpoint's weights; the rows of markers that it lacks stay as initialised."""
    assert os.path.isfile(args.checkpoint), (
        f"no checkpoint {args.checkpoint!r}; make one: run_milestone.py 04 --save-checkpoint")
    checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    trained, weights, own = checkpoint["hyperparameters"], checkpoint["model"], model.state_dict()
    for name in ("num_layers", "num_heads", "model_dim"):
        assert trained[name] == vars(args)[name], f"the checkpoint needs --{name}={trained[name]}"
    assert weights.keys() == own.keys(), f"{args.checkpoint} is not of 04's model; start from 04"
    rows = trained["vocab_size"]
    assert rows <= args.vocab_size, f"vocab_size is below the checkpoint's {rows}; raise it"
    for name in ("embed.weight", "lm_head.weight"):
        weights[name] = torch.cat((weights[name].to(own[name]), own[name][rows:]))
    if "checkpoint" not in trained:  # pretraining lowered the logits of ids that never occur
        weights["lm_head.weight"][args.bos_id + 1 : args.bos_id + 4] = 0  # as initialised
    model.load_state_dict(weights)


# -------------------------------------------- Training --------------------------------------------
class Log:
    """Rank 0's log: the script's text, then lines that also appear on the screen."""
    def __init__(self, args):
        self.train_steps = args.train_steps
        self.file = None  # for all ranks but 0
        if dist.get_rank() == 0:
            os.makedirs(args.log_dir, exist_ok=True)
            self.file = open(Path(args.log_dir, "log.txt"), "x", encoding="utf-8")  # x: must be new
            print(Path(__file__).read_text(encoding="utf-8") + "=" * 100, file=self.file)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        environment = dict(python=platform.python_version(), torch=torch.__version__,
                           cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(),
                           world_size=dist.get_world_size(), device=name)
        self.print0(f"environment:{json.dumps(environment)}")
        self.print0(f"hyperparameters:{json.dumps(asdict(args))}\n" + "=" * 100)

    def print0(self, line):
        if self.file:
            print(line, flush=True)
            print(line, file=self.file, flush=True)

    def step(self, step, training_time_ms, loss_text):
        self.print0(f"step:{step}/{self.train_steps} {loss_text}train_time:{training_time_ms:.0f}ms"
                    f" step_avg:{training_time_ms / max(step, 1):.2f}ms")


class Clock:
    """The training time: it starts after the kernels' warm-up and pauses during validations."""
    def __init__(self, device):
        self.synchronize = torch.get_device_module(device).synchronize

    def start(self, elapsed_ms=0.0):
        self.synchronize()  # waits for the device to finish all queued work
        self.start_time = time.perf_counter() - elapsed_ms / 1000

    def elapsed_ms(self):  # does not wait for the device: exact only right after synchronize()
        return 1000 * (time.perf_counter() - self.start_time)

    @contextmanager
    def paused(self):
        self.synchronize()  # steps may still be running
        elapsed_ms = self.elapsed_ms()
        yield
        self.start(elapsed_ms)


def summed_loss(model, inputs, targets):
    """The sum of the losses of all targets that count, so that batches can be added up."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


def warm_up(model, batches, args):
    """Compiles the kernels with a few forward and backward passes; the weights do not change."""
    for inputs, targets in itertools.islice(itertools.cycle(batches), args.kernel_warmup_steps):
        summed_loss(model, inputs, targets).backward()
    model.zero_grad()


@torch.no_grad()
def validate(model, batches):
    """The mean loss over all targets that count in the batches of every rank."""
    model.eval()
    # The sum of the losses and the number of targets.
    totals = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for inputs, targets in batches:
        totals += torch.stack((summed_loss(model, inputs, targets), (targets != IGNORED).sum()))
    model.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def train(model, optimizer, steps, load, val_rows, log, clock, args):
    """Takes train_steps optimizer steps; load(rows) yields this rank's micro-batches."""
    clock.start()
    for step in range(args.train_steps + 1):
        last_step = step == args.train_steps
        if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
            with clock.paused():
                val_loss = validate(model, load(val_rows))
            log.step(step, clock.elapsed_ms(), f"val_loss:{val_loss:.4f} ")
        if last_step:
            break

        rows, train_loss = next(steps), 0.0
        step_targets = count_targets(rows)  # of all ranks and micro-steps
        batches = list(load(rows))
        for micro_step, (inputs, targets) in enumerate(batches):
            # Gradients accumulate locally; only the last micro-step averages them over the ranks.
            model.require_backward_grad_sync = micro_step == len(batches) - 1
            # All targets of a step weigh the same: their losses are summed and divided once.
            loss = summed_loss(model, inputs, targets) / step_targets
            (loss * dist.get_world_size()).backward()  # DDP's average is then the ranks' sum
            train_loss += loss.detach()
        optimizer.param_groups[0]["lr"] = args.adam_lr * lr_multiplier(step, args)
        optimizer.step()
        optimizer.zero_grad()
        loss_due = args.train_loss_every > 0 and (step + 1) % args.train_loss_every == 0
        if loss_due:
            dist.all_reduce(train_loss)
        log.step(step + 1, clock.elapsed_ms(), f"train_loss:{train_loss:.4f} " if loss_due else "")


def init_distributed():
    """Joins the ranks that torchrun started, or a world of one; returns this rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu")
    torch.get_device_module(device).set_device(device)
    rendezvous = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None,
                            timeout=timedelta(minutes=30), **rendezvous)  # compilation is slow
    return device


def main(args):
    """Fine-tunes the checkpoint's model and logs its losses; one process per GPU."""
    device = init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log, clock = Log(args), Clock(device)
    torch.manual_seed(args.seed)
    model = raw_model = GPT(args)
    load_start(model, args)
    model.to(device)
    if args.compile:
        torch._dynamo.config.optimize_ddp = world_size > 1  # splits graphs to send gradients early
        model = torch.compile(model, dynamic=False)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # averages gradients
    model.broadcast_buffers = False  # buffers are equal on all ranks; DDP's argument is deprecated
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.adam_lr, betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps, weight_decay=0.0, fused=True)
    conversations, counts = read_conversations(args.train_file, args)
    slots = count_slots(epoch_rows(conversations, args), args)
    log.print0(f"rows:{json.dumps(counts | slots)}")
    val_rows = epoch_rows(read_conversations(args.val_file, args)[0], args)
    load = partial(row_batches, args=args, device=device)
    longest = max(conversations, key=lambda conversation: len(conversation[0]))
    warm_up(model, load([[longest]] * args.micro_batch_size * world_size), args)
    gc.collect()
    gc.freeze()  # garbage collections in the timed run skip the compiler's objects
    train(model, optimizer, step_rows(conversations, args), load, val_rows, log, clock, args)
    if device.type == "cuda":
        log.print0(f"peak_memory:{torch.cuda.max_memory_allocated() // 2**20}MiB")
    if args.save_checkpoint and rank == 0:
        checkpoint = dict(step=args.train_steps, hyperparameters=asdict(args),
                          model=raw_model.state_dict())
        torch.save(checkpoint, Path(args.log_dir, "checkpoint.partial"))
        os.replace(Path(args.log_dir, "checkpoint.partial"), Path(args.log_dir, "checkpoint.pt"))
    del model
    gc.unfreeze()  # so that collect() frees DDP's reference cycle, too:
    gc.collect()  # the threads that it keeps alive could crash the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
