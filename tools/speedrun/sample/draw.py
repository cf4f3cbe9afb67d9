"""Draws tokens from a trained model."""

from collections.abc import Iterator

import numpy as np
import torch

from speedrun.base.errors import UserError
from speedrun.sample.checkpoint import Trained


def random_stream(seed: int, sample: int) -> torch.Generator:
    """The random numbers of one sample: those of different samples or seeds are independent.

    seed and sample: whole numbers from 0 on.
    """
    mixed = np.random.SeedSequence(seed, spawn_key=(sample,)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


def next_token(logits: torch.Tensor, temperature: float, top_k: int,
               stream: torch.Generator) -> int:
    """An id drawn with the probabilities softmax(logits / temperature); logits are (V,), on a CPU.

    temperature 0: the most probable one. top_k: draws from this many most probable ones; 0 or more
    than there are: from all. Raises UserError if a logit is not finite.
    """
    if not logits.isfinite().all():
        raise UserError("the model's logits are not finite; its training has diverged")
    if temperature == 0:
        return int(logits.argmax())
    logits, ids = logits.double().topk(min(top_k or len(logits), len(logits)))
    # Relative to the largest, so that no temperature, however small, makes an infinity of it.
    probabilities = ((logits - logits[0]) / temperature).softmax(0)
    return int(ids[torch.multinomial(probabilities, 1, generator=stream)])


def generate(trained: Trained, prompt: list[int], size: int, temperature: float, top_k: int,
             stream: torch.Generator) -> Iterator[int]:
    """Yields ids that continue the prompt (at least one id), without end.

    The model sees the last `trained.context` tokens. size: ids from here on are padding and never
    drawn; temperature, top_k and stream: see next_token.
    """
    tokens = list(prompt)
    while True:
        tokens = tokens[-trained.context :]
        with torch.inference_mode():
            logits = trained.model(torch.tensor([tokens], device=trained.device))  # (1, T, V)
        tokens.append(next_token(logits[0, -1, :size].cpu(), temperature, top_k, stream))
        yield tokens[-1]
