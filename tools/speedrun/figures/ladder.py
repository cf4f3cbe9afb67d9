"""The milestones at the tiny scale: the committed runs, their table, and whether they are fresh.

history/results/tiny.jsonl holds a run a line, a JSON object with the fields of TinyRun.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from speedrun.base.errors import UserError
from speedrun.base.files import locked, replace_file
from speedrun.base.text import UNKNOWN, json_text, markdown
from speedrun.compare.collect import collect
from speedrun.compare.results import OWN_TARGET, Comparison, Entry, Run, crossing, scores
from speedrun.compare.table import loss_text
from speedrun.figures.tables import cell
from speedrun.history.fields import default_hyperparameters
from speedrun.history.manifest import Manifest
from speedrun.history.schema import Curve, build
from speedrun.history.tokens import batch_settings
from speedrun.scripts.find import code_hash, find_script

SEEDS = 3
FEW = f"fewer than {SEEDS} runs"
SAME = 1.5e-4  # between losses of two logs that are equal but for their last digit
SHARDS = {"train_files", "val_files"}  # hyperparameters of what trains from nothing
MAY_DIFFER = {"val_loss_every": 20}  # from the tiny scale's: the curves are drawn


@dataclass(frozen=True)
class TinyRun:
    """A run of a milestone, by its slug; code: the script's hash then, without kernels; options:
    hyperparameters that differed from the script's; corpus: the fingerprint of the embedded one;
    the rest as in compare.results."""

    milestone: str
    code: str
    seed: object
    corpus: str
    device: str
    tokens_per_step: int
    steps: int
    step_avg_ms: float
    options: dict
    val_curve: Curve
    seconds: Curve


def load_ladder(path: Path, manifest: Manifest) -> Comparison:
    """The Comparison of the runs in the file, in the manifest's order, without those of milestones
    that no longer exist. Where a systems step's runs have its parent's losses, the parent's fill in
    for missing seeds, without a clock.

    Raises OSError or ValueError, in one line.
    """
    return _compare(_read(Path(path)), manifest)


def _read(path):
    """{slug: its TinyRuns}."""
    runs = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path.name}: line {number}: "
        try:
            table = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        run = build(where, TinyRun, table)
        if run.seed in {other.seed for other in runs.setdefault(run.milestone, [])}:
            raise ValueError(f"{where}a second run of {run.milestone} with seed {run.seed}")
        runs[run.milestone].append(run)
    if not runs:
        raise ValueError(f"{path.name}: there is no run in it")
    return runs


def _compare(runs, manifest):
    """The Comparison of {slug: TinyRuns}, see load_ladder."""
    entries = {}
    for m in manifest.milestones:
        if m.slug in runs:
            entries[m.id] = entry = _entry(m, runs[m.slug])
            if m.kind == "systems" and m.parent in entries:
                entry.runs += _borrowed(entry.runs, entries[m.parent].runs)
    first = next(iter(entries.values()), None)
    corpora = {run.corpus for some in runs.values() for run in some}
    return Comparison(
        [*entries.values()], first and first.curve[-1][1], f"{OWN_TARGET} {first and first.label}",
        data_fingerprint=min(corpora, default=None), mixed=len(corpora) > 1)


def _entry(milestone, runs):
    codes, first = {run.code for run in runs}, runs[0]
    return Entry(
        milestone.name, milestone.slug, codes.pop() if len(codes) == 1 else None, first.options,
        first.options.get("vocab_size"), first.tokens_per_step,
        batch_settings(default_hyperparameters(milestone.script) | first.options),
        device=first.device,
        runs=[Run("", run.steps, list(run.val_curve), list(run.seconds), run.seed, run.step_avg_ms)
              for run in runs])


def _borrowed(runs, parents):
    """The parent's runs of other seeds, if those of the same seeds have the same losses."""
    own, others = ({run.seed: run for run in some} for some in (runs, parents))
    if not all(seed in others and _same(run.val_curve, others[seed].val_curve)
               for seed, run in own.items()):
        return []
    return [replace(run, seconds=[], step_avg_ms=None)
            for seed, run in others.items() if seed not in own]


def _same(curve, other):
    return len(curve) == len(other) and all(
        step == other_step and abs(loss - other_loss) < SAME
        for (step, loss), (other_step, other_loss) in zip(curve, other, strict=True))


def run_stale(path: Path, manifest: Manifest, stream: TextIO) -> None:
    """Makes the runs that are missing or stale, of all chains, and keeps those of each milestone as
    soon as they are whole. A systems step is run once where its losses are its parent's; a program
    that does not train on shards is not run. Raises as `collect`, Stopped for a signal, and
    UserError for a run that fails."""
    runs = _read(path) if path.exists() else {}
    for milestone in manifest.milestones:
        if not SHARDS <= default_hyperparameters(milestone.script).keys():
            continue
        if not (fault := _fault(milestone, _compare(runs, manifest), manifest)):
            continue
        print(f"running {milestone.id}: {fault}", file=stream, flush=True)
        kept = runs.get(milestone.slug, []) if fault == FEW else []
        seeds = [seed for seed in range(SEEDS) if seed not in {run.seed for run in kept}]
        first = 1 if milestone.kind == "systems" and not kept else SEEDS
        for some in filter(None, (seeds[:first], seeds[first:])):
            kept = kept + _run(milestone, some, manifest, stream)
            with locked(path):  # another call may have kept others meanwhile
                runs = _read(path) if path.exists() else {}
                runs[milestone.slug] = kept
                text = "".join(f"{json_text(asdict(run))}\n" for m in manifest.milestones
                               for run in runs.get(m.slug, []))
                replace_file(path, text.encode())
            if not _fault(milestone, _compare(runs, manifest), manifest):
                break


def _run(milestone, seeds, manifest, stream):
    """The TinyRuns of a milestone, one per seed, newly made."""
    made, stopped = collect(
        [milestone.slug], seeds, f"tiny-{milestone.slug}", stream,
        scale="tiny", settings=[f"{name}={value}" for name, value in MAY_DIFFER.items()])
    (entry,) = made.entries
    if stopped:
        raise stopped
    if entry.failures:
        raise UserError(f"{milestone.name}: {entry.failures[0]}")
    script = find_script(milestone.id)
    options = {name: script.typed(name, value) for name, value in entry.options.items()
               if name not in manifest.glossary.of_kind("files")}
    options = {name: value for name, value in options.items()
               if script.hyperparameters[name] != value}
    code = code_hash(milestone.script, kernels=False)
    return [TinyRun(entry.milestone, code, run.seed, made.data_fingerprint, entry.device,
                    entry.tokens_per_step, run.steps, run.step_avg_ms, options, run.val_curve,
                    run.seconds) for run in entry.runs]


def stale_entries(ladder: Comparison, manifest: Manifest) -> list[str]:
    """A line for each milestone whose runs were of another code or other hyperparameters than
    today's. A missing run is not stale: the table shows how many there are."""
    faults = {m.id: _fault(m, ladder, manifest) for m in manifest.milestones}
    return [f"{id}: {fault}" for id, fault in faults.items() if fault not in (None, FEW)]


def _fault(milestone, ladder, manifest):
    """What is wrong with a milestone's runs, or None."""
    entry = next((e for e in ladder.entries if e.milestone == milestone.slug), None)
    if entry is None:
        return FEW
    if entry.code != code_hash(milestone.script, kernels=False):
        return "the script has changed since its runs"
    own = default_hyperparameters(milestone.script)
    for name, value in manifest.overrides(milestone, "tiny").items():
        if name not in MAY_DIFFER and str(value) != str(entry.options.get(name, own[name])):
            return "the tiny hyperparameters have changed since its runs"
    return FEW if len(entry.runs) < SEEDS else None


def ladder_table(ladder: Comparison, manifest: Manifest) -> str:
    """A Markdown table: tokens to the first milestone's final loss, beside the parent's; tokens to
    the parent's final loss; losses. Below it the time that all runs took, by their own clocks."""
    rows, lines = {}, []
    for entry, row in zip(ladder.entries, scores(ladder), strict=True):
        milestone = manifest.get(entry.milestone)
        ancestors = (rows.get(m.id) for m in manifest.lineage(milestone)[1:])
        parent = next(filter(None, ancestors), None)  # the nearest that has runs
        rows[milestone.id] = row
        step = parent and parent.val_loss and crossing(entry.curve, parent.val_loss)
        lines.append([
            milestone.name,
            cell(row.tokens_to_target, "{:,.0f}"),
            _against(parent, row, milestone.kind),
            cell(step and entry.tokens(step), "{:,.0f}"),
            loss_text(row),
            f"{sum(bool(run.seconds) for run in entry.runs)}",
        ])
    head = ["milestone", f"tokens to {ladder.target:.4f}", "against its parent",
            "tokens to its parent's final loss", "final val loss", "runs"]
    clocks = [run.seconds[-1][1] for entry in ladder.entries for run in entry.runs if run.seconds]
    total = (f"These {len(clocks)} runs took {sum(clocks) / 3600:.1f} hours by their own clocks, "
             "which include waits on a busy machine.")
    return f"{markdown(head, lines, right=head[1:])}\n\n{total}"


def _against(parent, row, kind):
    """Tokens to the target relative to the parent's, in words."""
    if not (parent and parent.tokens_to_target and row.tokens_to_target):
        return UNKNOWN
    change = row.tokens_to_target / parent.tokens_to_target - 1
    if kind == "systems" and abs(row.val_loss - parent.val_loss) < 1e-4:
        return f"{change:+.1%} (systems: the same losses)"
    return f"{change:+.1%}" + ("" if change < 0 else ": not fewer at this scale")
