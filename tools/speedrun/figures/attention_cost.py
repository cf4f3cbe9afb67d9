"""Counts the tiles of attention that a snapshot's block mask leaves to compute; needs torch."""

import functools
from types import ModuleType

from speedrun.base.text import markdown
from speedrun.history.manifest import Manifest
from speedrun.scripts.find import load_snapshot

LENGTHS = (1024, 2048, 4096, 8192)  # tokens; a mask is counted pair by pair, so no longer ones
WINDOW = 1024  # that of record #12


@functools.cache
def count_tiles(module: ModuleType, T: int, window: int) -> int:
    """Tiles of 128 x 128 pairs, full and partial ones, that FlexAttention computes per head for one
    document of T tokens under the window."""
    import torch  # takes seconds

    args = module.Hyperparameters(use_flex_attention=True, window=window)
    mask = module.attention_mask(torch.zeros(1, T, dtype=torch.int64), args)
    return int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())


def attention_table(manifest: Manifest) -> str:
    """A Markdown table of tiles over the sequence length: causal attention, which is a window as
    long as the sequence, and the first milestone with a mask, under the window of its record."""
    masked = next(m for m in manifest.milestones if "attention_mask" in m.changes)
    module = load_snapshot(masked.script)
    rows = []
    for T in LENGTHS:
        causal, windowed = count_tiles(module, T, T), count_tiles(module, T, WINDOW)
        rows.append([f"{T:,}", f"{causal:,}", f"{1024 * causal / T:.0f}",
                     f"{windowed:,}", f"{1024 * windowed / T:.0f}"])
    head = ["tokens in a sequence", f"causal, as in {masked.parent}", "per 1,024 tokens",
            f"window of {WINDOW:,}, as in {masked.id}", "per 1,024 tokens"]
    return markdown(head, rows, right=head)
