"""Counts the arithmetic of a training step from the model itself; needs torch."""

import sys
from itertools import islice
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from speedrun.compat import FakeTensorMode
from speedrun.history.glossary import load_glossary
from speedrun.history.tokens import step_tokens
from speedrun.scripts.find import handles_for, load_snapshot
from speedrun.scripts.sizes import length_names, longest_dense


def training_flops_per_token(script: Path, hyperparameters: dict[str, object]) -> float:
    """FLOPs per token of forward and backward, averaged over the run that `hyperparameters`
    describe; the backward pass takes twice the forward's (arXiv 2001.08361, section 2.1).

    The forward pass is counted on tensors without data, at two lengths T: a T are the products with
    weights, b T^2 those between pairs of tokens. Only pairs that causality and the window of each
    step allow are counted. The ends of documents are not known here, so the result is an upper
    bound for scripts that mask documents. Raises what the script raises for hyperparameters that do
    not fit it.
    """
    module, handles = load_snapshot(script), handles_for(script)
    args = module.Hyperparameters(**_plain(hyperparameters))
    T = getattr(args, length_names(vars(args))[0])
    half = min(T, longest_dense(vars(module.Hyperparameters()))) // 2
    counted = _forward_flops(module, handles.countable(args), half, 2 * half)
    per_token, per_pair = _solve(half, 2 * half, *counted)
    return 3 * (per_token + per_pair * _mean_visible(module, handles, args, T))


def flops_if_countable(script: Path, hyperparameters: dict[str, object]) -> float | None:
    """As training_flops_per_token, but for any script: None, and a line on stderr, if the count
    fails."""
    try:
        return training_flops_per_token(script, hyperparameters)
    except Exception as error:  # any error of the script
        print(f"MFU is not known: counting the FLOPs of {script} failed, {type(error).__name__}:"
              f" {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return None


def visible_pairs(T: int, window: int, tile: int = 1) -> int:
    """Pairs (query, key) of a sequence of T tokens with 0 <= query - key < window. With a tile, the
    window starts at a tile's first token; window and T are multiples of the tile."""
    window = min(window, T)
    cut = (T - window) // tile * tile * (tile - 1) // 2  # a triangle of each row's last tile
    return window * T - window * (window - 1) // 2 - cut


def _plain(hyperparameters):
    """The hyperparameters, without paths that only a GPU can take."""
    on_a_cpu = load_glossary().column("cpu")
    return {name: on_a_cpu.get(name, value) for name, value in hyperparameters.items()}


def _forward_flops(module, args, *lengths):
    math = sdpa_kernel(SDPBackend.MATH)  # matrix products, which the counter knows
    with FakeTensorMode(), torch.no_grad(), math:
        model, found = module.GPT(args).requires_grad_(False), []  # the counter examines it
        for T in lengths:
            tokens = torch.zeros(1, T, dtype=torch.int64)
            with FlopCounterMode(display=False) as counter:
                model(tokens, tokens)
            found.append(counter.get_total_flops())
    return found


def _solve(T1, T2, flops1, flops2):
    """a and b of a T + b T^2 from its values at two lengths."""
    b = (flops2 / T2 - flops1 / T1) / (T2 - T1)
    return flops1 / T1 - b * T1, b


def _mean_visible(module, handles, args, T):
    """Keys that a query sees: the mean over the layers with attention and the run's tokens, where
    T is the length of the first step's sequences, which grow as its batch does."""
    steps = max(args.train_steps, 1)
    lengths = [T * tokens // args.total_batch_size
               for tokens in islice(step_tokens(vars(args)), steps)]
    tile, reach = handles.reach_tile(args), []
    for step, length in enumerate(lengths):
        window = next(iter(handles.window_at(module, step, args)), None)
        reach += [(length, T if keys is None else keys) for keys in handles.reach(window, args)]
    # each step has the same number of sequences
    return sum(visible_pairs(*pair, tile) for pair in reach) / sum(length for length, _ in reach)
