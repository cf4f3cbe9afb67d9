"""Check of the path through FlexAttention, which training on a CPU never takes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.nn.attention import flex_attention as library

from speedrun.checks.outcome import Outcome, verdict
from speedrun.checks.sizes import SIZES
from speedrun.checks.subject import explain

LENGTH, WINDOW = 160, 37  # more than one tile of 128 tokens
NAME = "flex attention"
EXPECTED = "with flex_attention=True the same logits as with the dense mask"
RULE = "The rule of create_block_mask is the dense mask's: q >= k, same document, q - k < window."
CALL = ("Where args.flex_attention is set, the mask comes from create_block_mask, and "
        "flex_attention(q, k, v, block_mask=mask) replaces scaled_dot_product_attention.")


def check_flex(subject) -> Iterator[Outcome]:
    """Compares the logits of both paths of the learner's model, without and with a window."""
    try:
        with torch.no_grad(), _watched(subject.module) as calls:
            dense, flex = _models(subject)
            inputs = _documents()
            window = torch.tensor(WINDOW, dtype=torch.int32)
            pairs = [[net(inputs, None, some) for net in (dense, flex)] for some in (None, window)]
    except Exception as error:
        yield Outcome(NAME, EXPECTED, f"it stops: {explain(error, subject.script)}", RULE)
        return
    if not calls:
        yield Outcome(NAME, EXPECTED, "flex_attention is never called", CALL)
        return
    good = all(((a - b).abs().max() <= 1e-3 * a.std()).item() for a, b in pairs)
    yield verdict(NAME, good, EXPECTED, "other logits", RULE)


def _models(subject):
    """Two models with equal random weights, the second with FlexAttention."""
    dense, flex = (
        subject.module.GPT(subject.args(seq_len=LENGTH, flex_attention=flag)).eval()
        for flag in (False, True))
    generator = torch.Generator().manual_seed(4)
    for p in dense.parameters():
        if p.ndim == 2:
            p.normal_(std=0.2, generator=generator)
    flex.load_state_dict(dense.state_dict())
    return dense, flex


def _documents():
    """Two sequences of random tokens in which documents begin at different places."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(2, SIZES["vocab_size"], (2, LENGTH), generator=generator)
    inputs[0, [30, 135]] = inputs[1, 70] = SIZES["bos_id"]
    return inputs


@contextmanager
def _watched(module):
    """A list that grows with each call of flex_attention, by whatever name the module knows it.

    The calls are not compiled, which on a CPU would take longer than the rest of the check.
    """
    original, calls = library.flex_attention, []

    def watched(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    names = [name for name, value in vars(module).items()
             if original in (value, getattr(value, "_torchdynamo_orig_callable", None))]
    with ExitStack() as patches:
        patch = mock.patch.object
        patches.enter_context(patch(library, "flex_attention", watched))
        patches.enter_context(
            patch(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, create=True))
        for name in names:
            patches.enter_context(patch(module, name, watched))
        yield calls
