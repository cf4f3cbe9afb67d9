"""Tables of a chain that nobody raced: what each rung counts, what it takes on a laptop, and what
others have claimed for it."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.text import UNKNOWN, markdown
from speedrun.figures.measured import rates
from speedrun.history.manifest import Manifest
from speedrun.history.measured import Measurement
from speedrun.history.predictions import StoredPrediction
from speedrun.predict.cards import CARDS
from speedrun.run.gpus import peak_flops
from speedrun.scripts.find import code_hash, find_script

WORLD_SIZE = 8  # GPUs, as the rungs' own sizes assume
H100 = CARDS["h100"].name
MB, GIB = 1e6, 2**30


@dataclass(frozen=True)
class Timings:
    """What compare_milestones.py --json wrote: the command; by slug the hash of each milestone's
    script and its tokens per step, without padding; and for each repeat milliseconds per step and
    the final loss, {(slug, its settings): values}."""

    command: str
    codes: dict[str, str]
    tokens: dict[str, int]
    times: dict[tuple[str, str], list[float]]
    losses: dict[tuple[str, str], list[float]]


def load_timings(path: Path) -> Timings:
    """The Timings in a file. Raises OSError or ValueError, in one line."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = {(e["milestone"], e["label"].partition(" ")[2]): e for e in found["entries"]}
        return Timings(
            found["command"], {slug: e["code"] for (slug, _), e in entries.items()},
            {slug: e["tokens_per_step"] for (slug, _), e in entries.items()},
            {key: [r["step_avg_ms"] for r in e["runs"]] for key, e in entries.items()},
            {key: [r["val_curve"][-1][1] for r in e["runs"]] for key, e in entries.items()})
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path.name} is not what compare_milestones.py --json writes:"
                         f" {error!r}") from None


def stale_timings(timings: Timings, manifest: Manifest) -> list[str]:
    """A line for each milestone whose script has changed since it was timed."""
    return [f"{m.id}: the script has changed since it was timed" for m in manifest.milestones
            if timings.codes.get(m.slug, code_hash(m.script)) != code_hash(m.script)]


def counted_table(stored: Mapping[str, StoredPrediction], manifest: Manifest) -> str:
    """A Markdown table: what a GPU, one of eight H100s, is predicted to need for each rung."""
    rows = []
    for m in manifest.milestones:
        p, own = stored.get(m.slug), find_script(m.id).hyperparameters
        rows_per_pass = own["micro_batch_size"]
        passes = own["total_batch_size"] // (rows_per_pass * own["seq_len"] * WORLD_SIZE)
        rows.append([m.name, *(["not predicted"] * 5 if p is None else [
            f"{p.saved / rows_per_pass / MB:,.0f}",
            f"{passes} x {p.pass_launches:,} + {p.optimizer_launches:,}",
            f"{p.optimizer_state / MB:,.1f}",
            f"{p.sent / MB:,.1f}",
            f"{p.peak / GIB:.1f} GiB"])])
    head = ["rung", "saved for backward, MB per row", "launches of a step",
            "optimizer state, MB", "sent, MB per step", "peak memory"]
    return markdown(head, rows, right=head[1:])


def timing_table(ladder: Timings, ablation: Timings, manifest: Manifest) -> str:
    """A Markdown table of step times at the tiny scale: each gain added to the ones before, and how
    many times as long the last rung takes without it. Ratios are of runs side by side."""
    rows, last = [], manifest.milestones[-1]
    for m in manifest.milestones:
        own = ladder.times[m.slug, ""]
        parent = m.parent and ladder.times[manifest.get(m.parent).slug, ""]
        without = ablation.times.get((last.slug, m.ablate or ""))
        rows.append([
            *_speed(ladder, m), _ratio(parent, own) if parent else UNKNOWN,
            UNKNOWN if not m.ablate else "off here" if without is None
            else _ratio(without, ablation.times[last.slug, ""])])
    head = ["rung", "ms per step", "tokens/s", "against its parent", f"{last.id} without it"]
    return markdown(head, rows, right=head[1:])


def speed_table(timings: Timings, manifest: Manifest) -> str:
    """A Markdown table of step times and of final losses with their standard deviation."""
    rows = []
    for m in manifest.milestones:
        losses = timings.losses[m.slug, ""]
        rows.append([*_speed(timings, m),
                     f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"])
    head = ["rung", "ms per step", "tokens/s without padding", "val loss"]
    return markdown(head, rows, right=head[1:])


def _speed(timings, milestone):
    """The first cells of a row: the name, milliseconds per step, tokens per second."""
    own = timings.times[milestone.slug, ""]
    rate = 1000 * timings.tokens[milestone.slug] / statistics.median(own)
    return milestone.name, _spread(own, "{:.0f}"), f"{rate:,.0f}"


def _spread(values, form):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{form.format(middle)} ({form.format(low)}–{form.format(high)})"


def _ratio(slow, fast):
    return _spread([a / b for a, b in zip(slow, fast, strict=True)], "{:.2f}") + "x"


def claims_table(manifest: Manifest, measured: Sequence[Measurement]) -> str:
    """A Markdown table: what the rungs' `claimed` quotes, and the MFU that follows from its tokens
    per second on eight H100s, with 6 FLOPs for each parameter and with the FLOPs counted."""
    from speedrun.scripts.flops import training_flops_per_token

    rows, peak = [], WORLD_SIZE * peak_flops(H100)
    for m in manifest.milestones:
        if m.claimed:
            rate = m.claimed.tokens_per_s
            counted = training_flops_per_token(m.script, find_script(m.id).hyperparameters)
            rows.append([m.name, f"{rate:,}", m.claimed.memory, m.claimed.mfu,
                         f"{6 * m.parameters * rate / peak:.1%}", f"{counted * rate / peak:.1%}",
                         rates(measured, m.slug, m.tokens_per_step)])
    head = ["rung", "stated tokens/s", "stated memory of a GPU", "stated MFU",
            "MFU by 6N", "MFU, counted", "measured tokens/s"]
    return markdown(head, rows, right=head[1:])
