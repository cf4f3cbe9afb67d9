"""What every lesson uses: snapshots as modules, runs, diffs, a plot style and checked exercises."""

import difflib
import hashlib
import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tools"), str(REPOSITORY / "data")]

import matplotlib.pyplot as plt  # noqa: E402
from IPython.display import Markdown, display  # noqa: E402

from speedrun import ladder as ladders  # noqa: E402
from speedrun.blocks import changed_blocks  # noqa: E402
from speedrun.comparison import Comparison, Entry, rows  # noqa: E402
from speedrun.dataset import BUILTIN, fingerprint, make_builtin  # noqa: E402
from speedrun.manifest import load_manifest  # noqa: E402
from speedrun.plan import make_plan  # noqa: E402
from speedrun.runlog import RunLog, read_log  # noqa: E402
from speedrun.runner import run  # noqa: E402
from speedrun.script import code_hash  # noqa: E402
from speedrun.snapshot import load_snapshot  # noqa: E402
from speedrun.tables import markdown, number_ranges  # noqa: E402

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


def tiny_entry(id: str) -> Entry:
    """The committed tiny runs of one milestone."""
    return next(entry for entry in tiny_runs().entries if entry.milestone == MANIFEST.get(id).id)


def train(id: str, **overrides) -> RunLog:
    """Trains a milestone at the tiny scale, with hyperparameters of your own, and returns its log.

    A run that was made before, by the same code on the same corpus with the same hyperparameters,
    is read from lessons/.cache instead. Raises RunError if it fails.
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


def progress_table(id: str) -> None:
    """Shows the milestones up to this one: official minutes and tokens, and the tiny runs' loss."""
    figures = {row.label: row for row in rows(tiny_runs())}
    lines = []
    for m in MANIFEST.written():
        tiny = figures[m.name]
        lines.append([m.name, number_ranges(m.records), f"{m.minutes:g}",
                      f"{m.train_steps * m.tokens_per_step / 1e9:.2f}B",
                      f"{m.val_loss:.4f}", f"{tiny.val_loss:.3f} ± {tiny.val_loss_sd:.3f}"])
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
