"""The milestones at the tiny scale: the committed runs, their table, and whether they are fresh.

history/tiny.json is what compare_milestones.py writes with --json; history/README.md has the line.
"""

from pathlib import Path

from speedrun.base.text import UNKNOWN, markdown
from speedrun.compare.plot import HASH_KEY, data_hash
from speedrun.compare.results import Comparison, scores
from speedrun.compare.stats import crossing
from speedrun.figures.tables import cell
from speedrun.history.manifest import Manifest
from speedrun.scripts.find import code_hash

SEEDS = 3
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
        wanted = {name: str(value) for name, value in manifest.overrides(milestone, "tiny").items()
                  if name not in MAY_DIFFER}
        if entry is None or len(entry.runs) < SEEDS:
            stale.append(f"{milestone.id}: fewer than {SEEDS} runs")
        elif entry.code != code_hash(milestone.script):
            stale.append(f"{milestone.id}: the script has changed since its runs")
        elif wanted != {name: str(entry.options.get(name)) for name in wanted}:
            stale.append(f"{milestone.id}: the tiny hyperparameters have changed since its runs")
    return stale


def ladder_table(ladder: Comparison, manifest: Manifest) -> str:
    """A Markdown table: tokens to the first milestone's final loss, beside the parent's; tokens to
    the parent's final loss; losses. Below it the time that all runs took, by their own clocks."""
    rows, lines = {}, []
    for entry, row in zip(ladder.entries, scores(ladder), strict=True):
        milestone = manifest.get(entry.milestone)
        parent = rows.get(milestone.parent)
        rows[milestone.id] = row
        step = parent and parent.val_loss and crossing(entry.curve, parent.val_loss)
        lines.append([
            milestone.name,
            cell(row.tokens_to_target, "{:,.0f}"),
            _against(parent, row, milestone.kind),
            cell(step and step * entry.tokens_per_step, "{:,.0f}"),
            f"{cell(row.val_loss, '{:.4f}')} ± {cell(row.val_loss_sd, '{:.4f}')}",
            f"{row.runs}",
        ])
    head = ["milestone", f"tokens to {ladder.target:.4f}", "against its parent",
            "tokens to its parent's final loss", "final val loss", "runs"]
    clocks = [run.seconds[-1][1] for entry in ladder.entries for run in entry.runs if run.seconds]
    total = f"The clocks of these {len(clocks)} runs add up to {sum(clocks) / 3600:.1f} hours."
    return f"{markdown(head, lines, right=head[1:])}\n\n{total}"


def _against(parent, row, kind):
    """Tokens to the target relative to the parent's, in words."""
    if not (parent and parent.tokens_to_target and row.tokens_to_target):
        return UNKNOWN
    change = row.tokens_to_target / parent.tokens_to_target - 1
    if kind == "systems" and abs(row.val_loss - parent.val_loss) < 1e-4:
        return f"{change:+.1%} (systems: the same losses)"
    return f"{change:+.1%}" + ("" if change < 0 else ": not fewer at this scale")


def draw_ladder(ladder: Comparison, path: Path) -> None:
    """Writes a PNG: the final loss of every run, and of each milestone the mean.

    Raises OSError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 12, "font.family": "DejaVu Sans"})
    figure, panel = plt.subplots(figsize=(10, 4.5), dpi=160, facecolor="white",
                                 layout="constrained")
    for place, entry in enumerate(ladder.entries):
        losses = entry.final_losses
        panel.plot([place] * len(losses), losses, "o", color="0.6", markersize=4)
        if losses:
            panel.hlines(sum(losses) / len(losses), place - 0.35, place + 0.35, color="black")
    ids = [entry.milestone for entry in ladder.entries]
    panel.set_xticks(range(len(ids)), ids, rotation=90)
    panel.set(ylabel="final validation loss", xlabel="milestone", axisbelow=True)
    panel.margins(x=0.01)
    panel.grid(color="0.92", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={HASH_KEY: data_hash(ladder, {}), "Software": None})
    plt.close(figure)
