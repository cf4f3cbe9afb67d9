"""The milestones at the tiny scale: the committed runs, their table, and whether they are fresh.

history/tiny.json is what compare_milestones.py writes with --json; history/README.md has the line.
"""

from pathlib import Path

from speedrun.base.text import UNKNOWN, markdown
from speedrun.compare.plot import data_hash, draw_comparison
from speedrun.compare.results import Comparison, scores
from speedrun.compare.stats import crossing
from speedrun.history.manifest import Manifest
from speedrun.scripts.find import code_hash

SEEDS = 3
PANELS = ("tokens",)  # the clock of a laptop is not what these runs are for
MAY_DIFFER = ("val_loss_every",)  # from the manifest's


def load_ladder(path: Path) -> Comparison:
    """The Comparison in history/tiny.json. Raises OSError or ValueError, in one line."""
    return Comparison.from_json(Path(path).read_text(encoding="utf-8"))


def stale_entries(ladder: Comparison, manifest: Manifest) -> list[str]:
    """A line for each written milestone whose runs are missing or were of another code or other
    hyperparameters than today's."""
    entries = {entry.milestone: entry for entry in ladder.entries}
    stale = []
    for milestone in manifest.written():
        entry = entries.get(milestone.id)
        wanted = manifest.overrides(milestone, "tiny")
        if entry is None or len(entry.runs) < SEEDS:
            stale.append(f"{milestone.id}: fewer than {SEEDS} runs")
        elif entry.code != code_hash(milestone.script):
            stale.append(f"{milestone.id}: the script has changed since its runs")
        elif any(str(entry.options.get(name)) != str(value) for name, value in wanted.items()
                 if name not in MAY_DIFFER):
            stale.append(f"{milestone.id}: the tiny hyperparameters have changed since its runs")
    return stale


def ladder_table(ladder: Comparison, manifest: Manifest) -> str:
    """A Markdown table: tokens to the first milestone's final loss, beside the parent's; tokens to
    the parent's final loss; losses."""
    tokens, finals, lines = {}, {}, []
    for entry, row in zip(ladder.entries, scores(ladder), strict=True):
        milestone = manifest.get(entry.milestone)
        tokens[milestone.id], finals[milestone.id] = row.tokens_to_target, row.val_loss
        lines.append([
            milestone.name,
            UNKNOWN if row.tokens_to_target is None else f"{row.tokens_to_target:,.0f}",
            _against(milestone, tokens),
            _tokens_to(entry, finals.get(milestone.parent)),
            f"{row.val_loss:.4f} ± {row.val_loss_sd:.4f}",
            f"{row.runs}",
        ])
    head = ["milestone", f"tokens to {ladder.target:.4f}", "against its parent",
            "tokens to its parent's final loss", "final val loss", "runs"]
    return markdown(head, lines, right=head[1:])


def _tokens_to(entry, loss):
    """Tokens until the mean curve of an entry is down at a loss, in words."""
    step = None if loss is None else crossing(entry.curve, loss)
    return UNKNOWN if step is None else f"{step * entry.tokens_per_step:,.0f}"


def picture_hash(ladder: Comparison) -> str:
    """The hash of what the picture of the ladder shows."""
    return data_hash(ladder, {}, PANELS)


def draw_ladder(ladder: Comparison, path: Path) -> None:
    """Writes the PNG of the ladder: loss over tokens."""
    draw_comparison(ladder, path, {}, PANELS)


def _against(milestone, tokens):
    """Tokens to the target relative to the parent's, in words."""
    mine, parents = tokens[milestone.id], tokens.get(milestone.parent)
    if mine is None or parents is None:
        return UNKNOWN
    change = mine / parents - 1
    if milestone.kind == "systems":
        return f"{change:+.1%} (systems: the same losses)"
    return f"{change:+.1%}" + ("" if change < 0 else ": not fewer at this scale")
