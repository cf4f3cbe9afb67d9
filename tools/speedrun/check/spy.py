"""What stands in a running script's way: it watches models, optimizers, messages and the clock.

Nothing here knows a milestone.
"""

import functools
import gc
import os
import threading
import time
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.attention import flex_attention

from speedrun.check.kernels import as_compiled, varlen_attn
from speedrun.check.meter import Message, Meter, eight_bits
from speedrun.check.weights import draw, dtype_name, fill, parameters_of
from speedrun.compat import is_in_backward, tree_leaves, tree_map_only

LATE = 12  # calls of the model, after which used batches are gone
# Every process group of this process. Nothing may free one: the destructor of a gloo group waits,
# with Python's lock, for a thread that may be waiting for that lock (pytorch issue 56297).
GROUPS = []


class Enough(BaseException):
    """Ends a run that has shown what it was started for."""


def _is_inner(name):
    """Whether a part of attention or MLP runs under autocast, which rounds it earlier or later."""
    return name.count(".") > 2 and torch.is_autocast_enabled("cpu")


class Spy:
    """Watches a run of a script's main, from when it is made to when another spy is.

    filled: the model gets the weights of `fill` when it is made. gradients: the optimizers get
    gradients from outside, of this size. stop: the run ends at the model's first call. metered: the
    meter counts in the optimizers' steps. inside: it follows which part of the model runs.
    """

    current: "Spy"

    def __init__(self, filled=True, gradients=None, stop=False, metered=False, inside=False):
        self.filled, self.gradients, self.stop = filled, gradients, stop
        self.metered, self.inside = metered, inside
        self.now = 1000.0  # seconds: only the model's work takes time, so that logs can be compared
        self.models, self.calls, self.losses, self.initial = [], [], [], None
        self.kinds = {"training pass": set(), "validation": set()}  # of the model's arguments
        self.modes = {phase: set() for phase in self.kinds}  # values of the model's `training`
        # of each call all numbers outside of tensors, the model's own and those that it is called
        # with, and its tensors' shapes: compiled code is made for them
        self.settings = {phase: [] for phase in self.kinds}
        self.places = defaultdict(set)  # {name of one of the model's tables: its addresses}
        self.kept = set()  # names of the model's numbers that a pass changes
        self.parts = []  # of the model, that run now: each is called by the one before it
        self.dtypes, self.epsilons = defaultdict(set), defaultdict(set)
        self.optimizer, self.compiling = None, set()  # that steps; those that call compiled code
        self.steps, self.before, self.moves = {}, {}, defaultdict(dict)  # of optimizers
        self.received = {}  # {weight: gradient in its optimizer's first step}
        self.sent = Counter()  # bytes, {(for what, dtype): so many}
        self.sent_in_backward = 0  # of these bytes, while gradients are computed
        # {(collective, bytes): number of optimizers' messages}: all; those beside computation.
        self.messages, self.accompanied = Counter(), Counter()
        # Bytes of updates from other ranks: all; those that arrive in the model's own tensors.
        self.received_bytes = self.in_place = 0
        self.blocking = 0  # bytes of those of them that the script stands still for
        self.under_way, self.forgotten = set(), 0  # messages; those for which no step has waited
        self.parallel = []  # models in DistributedDataParallel
        self.written = set()  # paths of files that are written
        self.threads = set()  # others than the main one, in which the script's code runs
        self.started_late = 0  # threads, after the first validation or training pass
        self.ready = []  # batches that waited for the model, or were kept, at two calls
        self.masks = []  # of each call of flex_attention
        self.tiles = 0  # that its mask lists
        self.launches = Counter()  # of kernels in Triton, {phase: so many}
        self.wide = Counter()  # tensors that these address in 64 bits
        self.forms = defaultdict(set)  # {phase: whether their forms agree}
        self.starts = 0  # how many starts of documents varlen_attn got last
        self.activated = []  # FlashAttention that takes the place of torch's own
        self.eight_bits = defaultdict(Counter)  # {phase: {dtypes of products: so many}}
        self.scales = {}  # of both factors of each of these products, by their place
        self.meter = Meter(self)
        self.given = defaultdict(set)  # {compiled function: numbers that it was called with}
        self.depth = self.compiled = self.compiled_calls = self.all_calls = 0
        self.phase = "backward pass"  # what the script is doing; so far nothing
        Spy.current = self

    # ---- each of these stands before a function ----

    def make(self, function, net, *args, **kwargs):
        """A model is made."""
        function(net, *args, **kwargs)
        if self.filled:
            fill(net)
        self.models.append(net)
        for name, part in net.named_modules() if self.inside else ():
            part.register_forward_pre_hook(functools.partial(self.saw_input, name))
            part.register_forward_hook(functools.partial(self.saw_output, name))

    def saw_input(self, name, part, inputs):
        """A part of the model is called."""
        self.parts.append(self.parts[-1] if self.parts and _is_inner(name) else name or "GPT")

    def saw_output(self, name, part, inputs, output):
        """A part of the model returns something."""
        self.parts.pop()
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and not _is_inner(name):
            self.dtypes[name or "GPT"].add(dtype_name(output.dtype))

    def call(self, function, net, *args, **kwargs):
        """The model is called."""
        buffers = dict(net.named_buffers())
        if self.initial is None:
            saved = net.state_dict()
            tables = {name: table for name, table in buffers.items() if name in saved}
            self.initial = {name: tensor.detach().clone()
                            for name, tensor in (parameters_of(net) | tables).items()}
            if self.stop:
                raise Enough
        training = torch.is_grad_enabled()
        self.now += 0.01 if training else 1.0
        before, self.phase = self.phase, "training pass" if training else "validation"
        given = *args, *kwargs.values()
        self.kinds[self.phase].add(", ".join(map(_kind, given)))
        self.modes[self.phase].add(net.training)
        if training:
            if len(self.calls) in (2, LATE) and threading.active_count() > 1:
                self.ready.append(self.batches_ready(*given))
            self.calls.append(tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs)))
        held = [value for part in net.modules() for value in vars(part).values()]
        numbers = [value for value in (*given, *held) if type(value) in (int, float, bool)]
        shapes = [value.shape for value in given if isinstance(value, torch.Tensor)]
        self.settings[self.phase].append((*numbers, *shapes))
        for name, table in buffers.items():
            if table.ndim > 1:
                self.places[name].add(table.data_ptr())
        self.all_calls += 1
        self.compiled_calls += self.compiled > 0
        single = {name: value.clone() for name, value in buffers.items() if not value.ndim}
        try:
            return function(net, *args, **kwargs)
        finally:
            self.phase = before
            if single:
                self.kept |= {name for name, value in net.named_buffers()
                              if name in single and value != single[name]}

    def batches_ready(self, inputs, *_):
        """How many batches wait besides that of these inputs, when threads have made all they will;
        a batch has its targets with it, or one token more."""
        used = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves([inputs, self.calls])
                if isinstance(tensor, torch.Tensor)}

        def waiting():
            return len({tensor.untyped_storage().data_ptr() for tensor in gc.get_objects()
                        if type(tensor) is torch.Tensor and tensor.dtype == inputs.dtype
                        and tensor.shape[:-1] == inputs.shape[:-1]
                        and tensor.size(-1) - inputs.size(-1) in (0, 1)} - used)

        before, now = -1, waiting()
        for _ in range(20):
            if now == before:
                break
            time.sleep(0.05)
            before, now = now, waiting()
        return now

    def call_compiled(self, function, *args, **kwargs):
        """What torch.compile has made is called."""
        self.compiled += 1
        self.given[function].add(tuple(v for v in tree_leaves((args, kwargs)) if type(v) is float))
        if self.depth:
            self.compiling.add(self.optimizer)
        try:
            return function(*args, **kwargs)
        finally:
            self.compiled -= 1

    def validate(self, function, *args, **kwargs):
        """validate is called."""
        self.losses.append(function(*args, **kwargs))
        return self.losses[-1]

    def start(self, function, *args, **kwargs):
        """A thread is started."""
        self.started_late += bool(self.calls or self.losses)
        function(*args, **kwargs)

    def saw_thread(self, frame, event, value):
        """Something is called in a thread."""
        if frame.f_code.co_filename == os.environ.get("CHECKED_SCRIPT"):
            self.threads.add(threading.get_ident())

    def norm(self, function, input, normalized_shape, weight=None, eps=None):
        """F.rms_norm is called; its default epsilon is that of the type in which it computes, at
        least float32 since torch 2.7 (pytorch PR 142848)."""
        if torch.is_autocast_enabled("cpu"):
            input = input.float()  # autocast does so on a GPU
        computes = torch.promote_types(input.dtype, torch.float32)
        used = torch.finfo(computes).eps if eps is None else eps
        self.epsilons[dtype_name(input.dtype)].add(f"{used:.3g}")
        return function(input, normalized_shape, weight, eps)

    def multiply(self, function, *args, **kwargs):
        """torch._scaled_mm is called."""
        if seen := eight_bits(args, kwargs):
            words, scales = seen
            self.eight_bits[self.phase][words] += 1
            part = self.parts[-1] if self.parts else self.phase
            number = self.eight_bits[self.phase].total()
            for factor, scale in zip(("first", "second"), scales, strict=True):
                self.scales[f"the {factor} factor's scale in product {number} of the {self.phase} "
                            f"({part})"] = scale
        return function(*args, **kwargs)

    def attend(self, function, *args, **kwargs):
        """flex_attention is called, which works eagerly on a CPU."""
        mask = kwargs.get("block_mask")
        self.masks.append("no block mask")
        if isinstance(mask, flex_attention.BlockMask):
            kwargs["block_mask"], self.tiles, twice = as_compiled(mask)
            rows, columns = mask.BLOCK_SIZE
            self.masks[-1] = (f"{mask.shape[0]}, tiles of {rows} by {columns}"
                              f"{', and some are listed twice' * twice}")
        return function(*args, **kwargs)

    def saw_kernel(self, same, wide):
        """A kernel in Triton was started; same, wide: see kernels.modules."""
        self.wide[self.phase] += wide
        self.launches[self.phase] += 1
        self.forms[self.phase].add(same)

    def attend_to_packs(self, function, q, k, v, starts, *args, **kwargs):
        """varlen_attn is called, which does not work on a CPU."""
        self.starts = len(starts)
        return varlen_attn(q, k, v, starts, *args, **kwargs)

    def activate(self, function, implementation):
        """A FlashAttention is activated, whose package is not here."""
        self.activated.append(implementation)

    def send(self, function, *args, **kwargs):
        """A collective is called; its largest tensor counts."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        size = 0
        if tensors:
            largest = max(tensors, key=torch.Tensor.numel)
            size = largest.numel() * largest.element_size()
            what = "optimizers" if self.depth else "gradients and losses"
            self.sent[what, dtype_name(largest.dtype)] += size
            if is_in_backward():
                self.sent_in_backward += size
        kind = function.__name__, size
        handle = function(*args, **kwargs)
        if not self.depth:
            return handle
        self.messages[kind] += 1
        if "gather" in function.__name__ or function.__name__ == "broadcast":
            self.saw_updates(next(iter((*args, *kwargs.values()))))
        if hasattr(handle, "wait"):
            return Message(self, handle, kind)
        self.blocking += size
        return handle

    def saw_updates(self, tensors):
        """Updates arrive in tensors."""
        own = {p.untyped_storage().data_ptr() for net in self.models for p in net.parameters()}
        for tensor in tree_leaves(tensors):
            size = tensor.numel() * tensor.element_size()
            self.received_bytes += size
            self.in_place += size * (tensor.untyped_storage().data_ptr() in own)

    def distribute(self, function, net, *args, **kwargs):
        """DistributedDataParallel is made; its messages go where collectives are counted."""
        function(net, *args, **kwargs)
        net.register_comm_hook(None, allreduce_hook)
        self.parallel.append(net)

    def save(self, function, value, file, *args, **kwargs):
        """torch.save is called."""
        self.written.add(str(file))
        return function(value, file, *args, **kwargs)

    def saw_event(self, event, values):
        """Python is about to do something that may be of interest to an audit."""
        if event == "open" and (values[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            self.written.add(str(values[0]))

    def meet(self, function, *args, **kwargs):
        """init_process_group is called; several ranks meet in a file."""
        if store := os.environ.get("CHECKED_STORE"):
            for key in ("init_method", "device_id"):
                kwargs.pop(key, None)
            world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
            file = dist.FileStore(f"{store}{len(GROUPS)}", world)
            kwargs |= dict(store=file, world_size=world, rank=rank)
        function(*args, **kwargs)
        GROUPS.append(dist.group.WORLD)

    # ---- optimizers ----

    def weights(self, optimizer):
        """[(name, weight)] of what an optimizer moves."""
        names = {id(p): name for net in self.models for name, p in parameters_of(net).items()}
        return [(names.get(id(p), "a tensor that is not a parameter of the model"), p)
                for group in optimizer.param_groups for p in group["params"]]

    def before_step(self, optimizer):
        """Puts gradients in, and remembers the weights."""
        self.depth += 1
        if self.depth > 1:
            return
        self.phase, self.optimizer = "optimizers", optimizer
        number = self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        for name, p in self.weights(optimizer):
            if self.gradients is not None:
                # Of another size in each step, rows and columns alike; nowhere zero, or everywhere.
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
                p.grad.copy_(self.gradients * number * draw(name, p, number))
            self.before[name] = p.detach().clone()
            if number == 1 and p.grad is not None:
                self.received[name] = p.grad.detach().clone()
        if self.metered:
            self.meter.__enter__()

    def after_step(self, optimizer):
        """Keeps how the weights have moved."""
        self.depth -= 1
        if not self.depth:
            if self.metered:
                self.meter.__exit__(None, None, None)
            self.phase = "backward pass"
            self.forgotten += len(self.under_way)
            self.under_way.clear()
            for name, p in self.weights(optimizer):
                self.moves[self.steps[optimizer]][name] = p.detach() - self.before[name]

    def sharing(self):
        """Names of the model's weights that are views into a tensor with other weights in it."""
        places = defaultdict(list)  # {address of a tensor: weights}
        for name, p in parameters_of(self.models[-1]).items():
            places[p.untyped_storage().data_ptr()].append(name)
        return [name for names in places.values() if len(names) > 1 for name in names]

    def with_bits(self):
        """Names of the weights for whose group an optimizer keeps integers, one per weight."""
        return [name for optimizer in self.steps for group in optimizer.param_groups
                if any(isinstance(value, torch.Tensor) and value.ndim
                       and not value.is_floating_point()
                       for p in group["params"] for value in optimizer.state.get(p, {}).values())
                for name, p in self.weights(optimizer) if any(p is q for q in group["params"])]

    def states(self):
        """[(name of a weight, tensor that an optimizer keeps for it or a rank's share of it)].

        What one weight keeps for all of its group has the first of their names by the alphabet.
        """
        ranks, found = int(os.environ.get("WORLD_SIZE", 1)), []
        for optimizer in self.steps:
            names = {id(p): name for name, p in self.weights(optimizer)}
            for group in optimizer.param_groups:
                params = group["params"]
                kept = [p for p in params if optimizer.state.get(p)]
                for p in kept:
                    name = names[id(p)] if len(kept) > 1 else min(names[id(q)] for q in params)
                    found += [(name, value) for value in optimizer.state[p].values()
                              if isinstance(value, torch.Tensor)
                              and value.numel() * ranks >= p.numel() > 8]
        return found


def _kind(value):
    if isinstance(value, torch.Tensor):
        # Whole numbers may have 32 bits or 64.
        whole = not (value.is_floating_point() or value.dtype == torch.bool)
        name = "whole-number" if whole else dtype_name(value.dtype)
        return f"{name} tensor of {value.ndim} dimensions"
    return type(value).__name__
