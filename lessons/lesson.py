"""What every lesson uses: snapshots as modules, runs, diffs, a plot style and checked exercises."""

import contextlib
import difflib
import hashlib
import importlib.util
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tools"), str(REPOSITORY / "data")]

import matplotlib.pyplot as plt  # noqa: E402
from IPython.display import Markdown, display  # noqa: E402

from speedrun.base.text import markdown, number_ranges  # noqa: E402
from speedrun.compare.results import Comparison, Entry, scores  # noqa: E402
from speedrun.figures import ladder as ladders  # noqa: E402
from speedrun.history.blocks import changed_blocks  # noqa: E402
from speedrun.history.manifest import load_manifest  # noqa: E402
from speedrun.run.data import BUILTIN, fingerprint, make_builtin, patterns  # noqa: E402
from speedrun.run.execute import run  # noqa: E402
from speedrun.run.log import RunLog, read_log  # noqa: E402
from speedrun.run.plan import make_plan  # noqa: E402
from speedrun.scripts.find import code_hash  # noqa: E402
from speedrun.scripts.load import load_snapshot  # noqa: E402

MANIFEST = load_manifest()
CACHE = Path(__file__).parent / ".cache"
UNSOLVED = ...  # what an exercise's answer is before you write it

plt.rcParams.update({
    "figure.figsize": (7, 4), "figure.dpi": 110, "font.size": 11, "axes.grid": True,
    "grid.color": "0.92", "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True,
})


def snapshot(id: str) -> ModuleType:
    """The milestone's train_gpt.py as a module: its classes and functions, nothing runs."""
    return load_snapshot(MANIFEST.get(id).script)


def tiny_runs() -> Comparison:
    """The committed runs of all milestones at the tiny scale, three seeds each."""
    return ladders.load_ladder(REPOSITORY / "history" / "tiny.json")


def tiny_entries(*ids: str) -> dict[str, Entry]:
    """The committed tiny runs of these milestones by id. Says which have none, and skips them."""
    made = {entry.milestone: entry for entry in tiny_runs().entries}
    for id in ids:
        if id not in made:
            print(f"{MANIFEST.get(id).name}: no tiny runs in history/tiny.json yet")
    return {id: made[id] for id in ids if id in made}


def train(id: str, **overrides) -> RunLog:
    """Trains a milestone at the tiny scale, with hyperparameters of your own, and returns its log.

    A run that was made before, by the same code on the same corpus with the same hyperparameters,
    is read from lessons/.cache instead. Raises UserError if it fails.
    """
    make_builtin()
    script = MANIFEST.get(id).script
    what = [code_hash(script), fingerprint(BUILTIN), sorted(overrides.items()),
            sorted(MANIFEST.overrides(MANIFEST.get(id), "tiny").items())]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    out = CACHE / f"{MANIFEST.get(id).id}-{key}"
    if not (out / "summary.json").exists():  # the last file of a run
        settings = [f"{name}={value}" for name, value in overrides.items()]
        shutil.rmtree(out, ignore_errors=True)  # of a run that was cut short
        plan = make_plan(id, scale="tiny", settings=settings, out=out)
        run(plan, io.StringIO())
    return read_log(out / "log.txt")


def train_here(module: ModuleType, **hyperparameters) -> RunLog:
    """Trains a snapshot on the embedded corpus in this very process, without its output, and
    returns its log: for models so small that a process of their own would take longer."""
    make_builtin()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        what = {**patterns(BUILTIN), **hyperparameters, "log_dir": folder}
        module.main(module.Hyperparameters(**what))
        return read_log(Path(folder, "log.txt"))


def show_diff(parent: str, child: str, *blocks: str) -> None:
    """Shows how the named blocks (default: all) change from one milestone to the next."""
    sources = [MANIFEST.get(id).script.read_text(encoding="utf-8") for id in (parent, child)]
    changed = changed_blocks(*sources)
    for name in blocks or changed:
        old, new = (text.splitlines() for text in changed[name])
        lines = list(difflib.unified_diff(old, new, n=2, lineterm=""))[2:]
        body = "\n".join("…" if line.startswith("@@") else line for line in lines).lstrip("…\n")
        display(Markdown(f"**`{name}`**\n```diff\n{body}\n```"))


def plot_runs(axes, entry: Entry, **style) -> None:
    """Draws the validation loss of each run thinly and their mean thickly, over tokens."""
    scale = entry.tokens_per_step / 1e6
    (line,) = axes.plot(*zip(*[(step * scale, loss) for step, loss in entry.curve], strict=True),
                        label=entry.label, **style)
    for one in entry.runs:
        points = [(step * scale, loss) for step, loss in one.val_curve]
        axes.plot(*zip(*points, strict=True), color=line.get_color(), linewidth=0.6, alpha=0.6)
    axes.set(xlabel="million tokens", ylabel="validation loss, nats per token")


def plot_tiny(axes, *ids: str) -> dict[str, Entry]:
    """Draws and returns the committed tiny runs of these milestones, and prints how they end.

    The plot leaves out the first steps, in which the losses fall fastest.
    """
    entries = tiny_entries(*ids)
    for entry, style in zip(entries.values(), _styles(len(entries)), strict=True):
        plot_runs(axes, entry, **style)
        print(f"{entry.label} ends at", *(f"{loss:.4f}" for loss in entry.final_losses))
    tops = [entry.curve[len(entry.curve) // 4][1] for entry in entries.values()]
    axes.set(title="Tiny scale, three seeds", ylim=(None, max(tops, default=None)))
    axes.legend()
    return entries


def plot_official(axes, *ids: str) -> None:
    """Draws these milestones' official losses over tokens: a curve, or a cross at a lone end."""
    for id, style in zip(ids, _styles(len(ids)), strict=True):
        m = MANIFEST.get(id)
        curve = m.curve or [(m.train_steps, m.val_loss)]
        points = [(step * m.tokens_per_step / 1e9, loss) for step, loss in curve]
        if not m.curve:
            style |= dict(linestyle="", marker="x")
        label = f"{m.name} (#{m.records[-1]})" if m.curve else f"end of {m.name}"
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.axhline(3.28, color="0.6", linewidth=0.8)
    axes.set(title="Official; the thin line is the goal, 3.28", xlabel="billion tokens",
             ylabel="validation loss, nats per token", ylim=(3.2, 4.3))
    axes.legend()


def _styles(count: int) -> list[dict[str, object]]:
    """Line styles along the chain: broken lines from light to dark, and the last line black."""
    dashes = ("--", ":", "-.")
    broken = [dict(color=plt.cm.viridis_r(0.25 + 0.65 * k / count), linestyle=dashes[k % 3])
              for k in range(count - 1)]
    return [*broken, dict(color="black")][:count]


def progress_table(id: str) -> None:
    """Shows the milestones up to this one: official minutes and tokens, and the tiny runs' loss."""
    ends = {row.label: f"{row.val_loss:.3f} ± {row.val_loss_sd:.3f}" for row in scores(tiny_runs())}
    lines = []
    for m in MANIFEST.written():
        lines.append([m.name, number_ranges(m.records), f"{m.minutes:g}",
                      f"{m.train_steps * m.tokens_per_step / 1e9:.2f}B",
                      f"{m.val_loss:.4f}", ends.get(m.name, "not measured")])
        if m.id == MANIFEST.get(id).id:
            break
    head = ["milestone", "records", "minutes (8 H100)", "tokens", "val loss", "tiny val loss"]
    note = "00: the minutes are record #1's, tokens and loss what its commit's author quotes."
    ask = f"Has your own script got there? `python tools/check_train.py {m.id}` tells."
    display(Markdown(f"{markdown(head, lines, right=head[2:])}\n\n{note}\n\n{ask}"))


def check(exercise: str, answer) -> bool:
    """Says whether the answer to an exercise ("01.2") is right, and if not, what is wrong."""
    if answer is UNSOLVED:
        print(f"Exercise {exercise} waits for your answer. Stuck? lesson.hint({exercise!r}, 1)")
        return False
    try:
        _exercise(exercise)["check"](answer)
    except Exception as problem:  # the learner's own code runs in there
        print(f"Not yet: {problem or type(problem).__name__}. Stuck? lesson.hint({exercise!r}, 1)")
        return False
    print(f"Exercise {exercise} is right.")
    return True


def hint(exercise: str, level: int = 1) -> None:
    """Prints a hint: 1 nudges, 2 gives the mathematics, 3 the steps, 4 nearly all of it."""
    print(_exercise(exercise)["hints"][level - 1])


def _exercise(exercise: str) -> dict[str, Callable | list[str]]:
    """The entry {"check", "hints", "solution"} of an exercise in solutions/NN_slug.py."""
    lesson, _, number = exercise.partition(".")
    (file,) = (REPOSITORY / "lessons" / "solutions").glob(f"{lesson}_*.py")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXERCISES[number]
