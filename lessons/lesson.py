"""What every lesson uses: snapshots as modules, runs, diffs, pictures, clocks and exercises."""

import ast
import contextlib
import difflib
import gc
import hashlib
import importlib.util
import inspect
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ.pop("RANK", None)  # left by a launcher: what trains here is a world of one
sys.path[:0] = [str(REPOSITORY / name) for name in ("tools", "data", "lessons")]
# Collectives whose new names an older torch lacks.
warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from IPython.display import SVG, Markdown, display  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator  # noqa: E402

from speedrun.anatomy.picture import model_svg, strip_svg  # noqa: E402
from speedrun.base.errors import UserError  # noqa: E402
from speedrun.base.files import locked  # noqa: E402
from speedrun.base.text import markdown  # noqa: E402
from speedrun.compare.results import Comparison, Entry, scores  # noqa: E402
from speedrun.compare.table import loss_text  # noqa: E402
from speedrun.figures import ladder as ladders  # noqa: E402
from speedrun.figures.tables import cell, records_of  # noqa: E402
from speedrun.figures.themed import FLIPPED, themed_svg  # noqa: E402
from speedrun.history.blocks import changed_blocks  # noqa: E402
from speedrun.history.guide import whys  # noqa: E402
from speedrun.history.manifest import load_manifest  # noqa: E402
from speedrun.run.data import BUILTIN, fingerprint, make_builtin, patterns  # noqa: E402
from speedrun.run.execute import run  # noqa: E402
from speedrun.run.log import SCRIPT, RunLog, read_log  # noqa: E402
from speedrun.run.plan import make_plan  # noqa: E402
from speedrun.sample import generate, load_run, random_stream, vocabulary_of  # noqa: E402
from speedrun.scripts.find import code_hash, load_snapshot  # noqa: E402

MANIFEST = load_manifest()
CACHE = Path(__file__).parent / ".cache"
OPENED = "LESSONS_OPENED"  # set by tools/open_lessons.py: somebody runs the notebook
UNSOLVED = ...  # what an exercise's answer, or a guess, is before you write it
MISSING = object()
make_builtin = cache(make_builtin)  # checking that the corpus is there takes half a second
LEAST = 1e-9  # a smaller difference of losses is float64's rounding
Panel = Callable[[Axes], None]
_verdicts: list[str] = []  # on this notebook's guesses so far

torch.set_num_threads(1)  # models as small as the lessons' gain nothing from more

plt.rcParams.update({
    "font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.color": "0.92",
    "axes.axisbelow": True, "axes.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True,
})


def snapshot(id: str) -> ModuleType:
    """The milestone's train_gpt.py as a module: its classes and functions, nothing runs."""
    return load_snapshot(MANIFEST.get(id).script)


def tiny_runs() -> Comparison:
    """The committed runs of all milestones at the tiny scale."""
    return ladders.load_ladder(REPOSITORY / "history" / "results" / "tiny.jsonl", MANIFEST)


def tiny_entries(*ids: str) -> dict[str, Entry]:
    """The committed tiny runs of these milestones by id. Says which have none, and skips them."""
    made = {MANIFEST.get(entry.milestone).id: entry for entry in tiny_runs().entries}
    for id in ids:
        if id not in made:
            print(f"{MANIFEST.get(id).name}: no tiny runs in history/results/tiny.jsonl yet")
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
    out = CACHE / f"{MANIFEST.get(id).slug}-{key}"
    CACHE.mkdir(exist_ok=True)
    with locked(out):  # another notebook may train the same
        if (out / "summary.json").exists():  # the last file of a run
            return read_log(out / "log.txt")
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
        gc.freeze()  # main's collections skip what was there before it, most of all PyTorch
        try:
            module.main(module.Hyperparameters(**what))
        finally:
            gc.unfreeze()
        return read_log(Path(folder, "log.txt"))


def show_diff(parent: str, child: str, *blocks: str, why: bool = True) -> None:
    """Shows how the named blocks (default: all) change from one milestone to the next, and why,
    where the guide says it; why=False before an exercise that asks for it."""
    sources = [MANIFEST.get(id).script.read_text(encoding="utf-8") for id in (parent, child)]
    changed = changed_blocks(*sources)
    reasons = whys(MANIFEST.get(child)) if why else {}
    for name in blocks or changed:
        old, new = (text.splitlines() for text in changed[name])
        lines = list(difflib.unified_diff(old, new, n=2, lineterm=""))[2:]
        body = "\n".join("…" if line.startswith("@@") else line for line in lines).lstrip("…\n")
        reason = f"\n\n{reasons[name]}\n" if name in reasons else ""
        display(Markdown(f"**`{name}`**{reason}\n```diff\n{body}\n```"))


def progress_table(id: str) -> None:
    """Shows the milestones up to this one: official minutes and tokens, and the tiny runs' loss."""
    ends = {row.label: loss_text(row) for row in scores(tiny_runs())}
    lineage = MANIFEST.lineage(MANIFEST.get(id))
    ask = f"Has your own script got there? `python tools/check_train.py {id}` checks it."
    if not any(m.minutes for m in lineage):  # a chain without records
        columns = {"milestone": [m.name for m in lineage], "idea": [m.idea for m in lineage]}
        if any(m.ablate for m in lineage):
            columns["taken out by"] = [f"`{m.ablate}`" if m.ablate else "" for m in lineage]
        if any(m.name in ends for m in lineage):
            columns["tiny val loss"] = [ends.get(m.name, "not measured") for m in lineage]
        lines = [*zip(*columns.values(), strict=True)][::-1]
        table = markdown([*columns], lines, right=["tiny val loss"])
        display(Markdown(f"{table}\n\n{ask}"))
        return
    lines = []
    for m in reversed(lineage):
        lines.append([m.name, records_of(m), cell(m.minutes, "{:g}"),
                      f"{m.tokens / 1e9:.2f}B", cell(m.val_loss, "{:.4f}"),
                      ends.get(m.name, "not measured")])
    head = ["milestone", "records", "minutes (8 H100)", "tokens", "val loss", "tiny val loss"]
    note = "00: the minutes are record #1's, tokens and loss what its commit's author quotes."
    display(Markdown(f"{markdown(head, lines, right=head[2:])}\n\n{note}\n\n{ask}"))


def walk(*lessons: str) -> None:
    """Shows these lessons ("05d" for lessons/05d_*.ipynb), all without names, as a checklist with
    the minutes to read and to solve that each states, and how many hours they take together."""
    files = sorted(Path(__file__).parent.glob("[!s]*_*.ipynb"))
    if lessons:
        files = [file for name in lessons for file in files if file.stem.startswith(f"{name}_")]
    lines, whole = [], np.zeros(2)
    for file in files:
        opening = "".join(json.loads(file.read_text(encoding="utf-8"))["cells"][0]["source"])
        title = re.search(r"^# (.+)$", opening, re.MULTILINE)[1]
        minutes = [int(one) for one in re.search(
            r"^\| Time \| (\d+) minutes to read, (\d+)", opening, re.MULTILINE).groups()]
        whole += minutes
        lines.append([f"☐ [{title}]({file.name})", *map(str, minutes)])
    lines.append(["together", *(f"{one / 60:.1f} hours" for one in whole)])
    display(Markdown(markdown(["lesson", "minutes to read", "minutes to solve"], lines,
                              right=["minutes to read", "minutes to solve"])))


# ------------------------------------------- Pictures -------------------------------------------
# A panel is a function that draws on the axes it is given. `draw` makes a picture of each.


def draw(*panels: Panel, size: tuple[float, float] = (4.7, 3.5)) -> None:
    """Shows a picture of each panel; size: of one, in inches. A phone shows 4.7 inches whole.

    A title is centred on the picture, where 45 letters fit, not on the axes. A legend that covers
    a line moves below the axes, and the picture grows by its height.
    """
    for panel in panels:
        figure, axes = plt.subplots(figsize=size)
        panel(axes)
        title = textwrap.fill(axes.get_title(), int(9.6 * size[0]))
        words = f"{title}: {axes.get_ylabel()}, {axes.get_xlabel()}".rstrip(", ")
        axes.set_title("")
        figure.suptitle(title, fontsize=plt.rcParams["axes.titlesize"])
        legend = axes.get_legend()
        if legend and _covers_a_line(axes, legend):
            legend.remove()
            height = _legend_below(axes).get_window_extent().height
            figure.set_figheight(size[1] + height / figure.dpi)
        display(SVG(themed_svg(figure, " ".join(words.split()))))
        plt.close(figure)


def _covers_a_line(axes, legend):
    """Whether a legend of the axes lies on one of their lines."""
    axes.figure.draw_without_rendering()
    box = legend.get_window_extent()
    return any(line.get_transform().transform_path(line.get_path()).intersects_bbox(
        box, filled=False) for line in axes.lines)


def _legend_below(axes, **settings):
    """A legend below the axes, in as many columns, at most three, as the picture has room for."""
    figure = axes.figure
    handles, labels = axes.get_legend_handles_labels()
    for columns in (3, 2, 1):
        legend = figure.legend(**{"handles": handles, "labels": labels} | settings, ncols=columns,
                               loc="outside lower center", columnspacing=1.2)
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            return legend
        legend.remove()


def curves(series: dict[str, Sequence], title: str, xlabel: str, ylabel: str, *, log: str = "",
           marker: str = "", **settings) -> Panel:
    """Lines by name: a name's values are y, (x, y), or (x, [y of each run]).

    Several runs are drawn thinly and their mean thickly. The lines go from light and broken to
    black. log is "", "x", "y" or "xy"; settings go to Axes.set.
    """
    def panel(axes):
        for (name, values), style in zip(series.items(), _styles(len(series)), strict=True):
            x, y = values if isinstance(values, tuple) else (range(len(values)), values)
            y = np.asarray(y, dtype=float)
            if y.ndim == 2:
                axes.plot(x, y.T, color=style["color"], linewidth=0.6, alpha=0.6)
                y = y.mean(0)
            axes.plot(x, y, marker=marker, label=name, **style)
        for letter, axis, low, high in zip("xy", (axes.xaxis, axes.yaxis), axes.dataLim.minpos,
                                           axes.dataLim.max, strict=True):
            if letter in log:
                axes.set(**{f"{letter}scale": "log"})
                if math.floor(math.log10(high)) >= math.floor(math.log10(low)) + 2:
                    axis.set_minor_formatter(NullFormatter())  # two powers of ten are enough
                elif letter == "x" and len(x) <= 6:
                    axis.set_minor_locator(NullLocator())
                    axes.set_xticks(x, [f"{each:,g}" for each in x])
                elif high > 4 * low:
                    axis.set_minor_locator(LogLocator(subs=(2, 5)))
                    for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
                        set_formatter("{x:,g}")
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
        if len(series) > 1:
            axes.legend()
    return panel


def slider(panel_of: Callable[[object], Panel], name: str, values: Sequence, start,
           size: tuple[float, float] = (4.7, 3.5)) -> None:
    """Draws panel_of(start); in a notebook that `make lessons` opened, with a slider over `values`.

    Everywhere else, on the web for one, nothing would answer to a slider.
    """
    if not os.environ.get(OPENED):
        draw(panel_of(start), size=size)
        return
    import ipywidgets

    ipywidgets.interact(
        lambda value: draw(panel_of(value), size=size), value=ipywidgets.SelectionSlider(
            options=list(values), value=start, description=name, continuous_update=False))


def draw_model(id: str, changed: str | Sequence[str] = ()) -> None:
    """Shows the model of a milestone, drawn from the snapshot as it runs.

    changed: what is in colour: the id of an earlier milestone, from whose model the parts differ,
    or names of parts, such as "attn" or "mlp 3".
    """
    display(SVG(model_svg(MANIFEST, id, changed, background="white")))


def draw_models(*ids: str) -> None:
    """Shows the models of these milestones below each other; what differs from the last is in
    colour."""
    display(SVG(strip_svg(MANIFEST, ids, background="white")))


ROOM = 38  # letters below the bars of a picture of the usual size


def bars(values: dict[str, float | Sequence[float]], title: str, ylabel: str, **settings) -> Panel:
    """A bar for each name; of several values the mean, and a line from least to largest. Bars lie
    where their names are too long to stand side by side; settings such as ylim follow them."""
    longest = max(len(line) for name in values for line in f"{name}".split("\n"))
    flat = longest * len(values) > ROOM
    turn = {"xlim": "ylim", "ylim": "xlim", "yscale": "xscale", "xlabel": "ylabel"} if flat else {}

    def panel(axes):
        bar, line = (axes.barh, axes.hlines) if flat else (axes.bar, axes.vlines)
        for name, value in values.items():
            runs = np.atleast_1d(np.asarray(value, dtype=float))
            name = textwrap.fill(f"{name}", 18) if flat else name
            bar(name, runs.mean(), 0.6, color="0.7")
            line(name, runs.min(), runs.max(), color="black")
        axes.set(title=title, **{turn.get(name, name): value for name, value in settings.items()})
        if flat:
            axes.set_xlabel(ylabel)
            axes.set_ylim(len(values) - 0.5, -0.5)
            if "yscale" not in settings:
                axes.xaxis.set_major_locator(MaxNLocator(5))
        else:
            axes.set_ylabel(ylabel)
        if settings.get("ylim", (None, 0))[1] is None:  # bars from 0 would leave much room
            low = settings["ylim"][0] or 0
            most = max(np.max(np.asarray(each)) for each in values.values())
            axes.set(**{turn.get("ylim", "ylim"): (low, most + 0.05 * (most - low))})
        axes.grid(False, axis="y" if flat else "x")
    return panel


def cells(matrix, title: str, xlabel: str, ylabel: str, *, colors: dict[str, str] | None = None,
          numbers: bool = False, **settings) -> Panel:
    """A matrix as a picture. colors {meaning: colour} names what 0, 1, 2 ... stand for; without
    it the picture is grey with a scale. numbers=True writes each entry into its cell."""
    def panel(axes):
        entries = np.asarray(matrix)
        if colors:
            picture = axes.imshow(entries, cmap=ListedColormap(list(colors.values())), vmin=0,
                                  vmax=len(colors) - 1, aspect="auto", interpolation="nearest")
            patches = [Patch(facecolor=color, edgecolor="0.5", label=name)
                       for name, color in colors.items()]
            _legend_below(axes, handles=patches, labels=[*colors]).set_gid(FLIPPED)
        else:
            # The largest entry is a light grey where numbers have to stay readable on it.
            top = entries.max() * (2 if numbers else 1)
            picture = axes.imshow(entries, cmap="Greys", vmax=top, aspect="auto")
            if not numbers:
                axes.figure.colorbar(picture, ax=axes)
        if numbers:
            for (row, column), entry in np.ndenumerate(entries):
                axes.text(column, row, f"{entry:g}", ha="center", va="center")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
        axes.grid(False)
    return panel


def timeline(rows: dict[str, list[tuple[str, float]]], title: str, xlabel: str = "milliseconds",
             **settings) -> Panel:
    """Spans one after the other, (name, length) each, in a row for each name; "" is a gap."""
    def panel(axes):
        names = list(dict.fromkeys(name for spans in rows.values() for name, _length in spans))
        names = [name for name in names if name]
        shades = dict(zip(names, np.linspace(0.8, 0.2, len(names)).astype(str), strict=True))
        for row, spans in rows.items():
            left = 0.0
            for name, length in spans:
                if name:
                    axes.barh(row, length, left=left, color=shades[name], edgecolor="white")
                left += length
        for name, shade in shades.items():
            axes.barh(next(iter(rows)), 0, label=name, color=shade)
        axes.invert_yaxis()
        axes.set(title=title, xlabel=xlabel, **settings)
        axes.grid(False, axis="y")
        _legend_below(axes)
    return panel


def tiny_curves(*ids: str) -> Panel:
    """The committed tiny runs of these milestones over tokens, a thin line for each run; prints how
    they end. The first steps, in which the losses fall fastest, are left out."""
    def panel(axes):
        entries = tiny_entries(*ids)
        for entry, style in zip(entries.values(), _styles(len(entries)), strict=True):
            for one in entry.runs:
                points = [(entry.tokens(step) / 1e6, loss) for step, loss in one.val_curve]
                axes.plot(*zip(*points, strict=True), color=style["color"], lw=0.6, alpha=0.6)
            points = [(entry.tokens(step) / 1e6, loss) for step, loss in entry.curve]
            axes.plot(*zip(*points, strict=True), label=entry.label, **style)
            print(f"{entry.label} ends at", *(f"{loss:.4f}" for loss in entry.final_losses))
        tops = [entry.curve[len(entry.curve) // 4][1] for entry in entries.values()]
        runs = " or ".join(map(str, sorted({len(entry.runs) for entry in entries.values()})))
        title = "one run each" if runs == "1" else f"{runs} seeds each"
        axes.set(title=f"Tiny scale, {title}", ylim=(None, max(tops, default=None)),
                 xlabel="million tokens", ylabel="validation loss, nats per token")
        axes.legend()
    return panel


def official_curves(*ids: str) -> Panel:
    """These milestones' official losses over tokens: a curve, or a cross at a lone end; nothing of
    one that has no figures."""
    def panel(axes):
        for id, style in zip(ids, _styles(len(ids)), strict=True):
            m = MANIFEST.get(id)
            if not m.val_loss:
                continue
            curve = m.curve or [(m.train_steps, m.val_loss)]
            points = [(m.tokens_after(step) / 1e9 if step else 0, loss) for step, loss in curve]
            if not m.curve:
                style |= dict(linestyle="", marker="x")
            label = f"{m.name} (#{m.record.number})" if m.curve else f"end of {m.name}"
            axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.axhline(3.28, color="0.6", linewidth=0.8)
        axes.set(title="Official; the thin line is the goal, 3.28", xlabel="billion tokens",
                 ylabel="validation loss, nats per token", ylim=(3.2, 4.3))
        axes.legend()
    return panel


def _styles(count: int) -> list[dict[str, object]]:
    """Line styles along the chain: broken lines from light to dark, and the last line black."""
    dashes = ("--", ":", "-.")
    broken = [dict(color=plt.cm.viridis_r(0.25 + 0.65 * k / count), linestyle=dashes[k % 3])
              for k in range(count - 1)]
    return [*broken, dict(color="black")][:count]


# -------------------------------------------- Clocks --------------------------------------------
def clock(functions: dict[str, Callable[[], object]], rounds: int = 15,
          shortest: bool = False) -> dict[str, float]:
    """Runs the functions in turn, A B A B, and returns each one's median time in milliseconds, or
    its shortest, where other programs disturb and only ever add time.

    Prints these and the middle half of the times. A first round is not counted.
    """
    times = {name: [] for name in functions}
    for _round in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(1000 * (time.perf_counter() - start))
    chosen = {}
    for name, all_times in times.items():
        least, low, median, high = np.percentile(all_times[1:], (0, 25, 50, 75))
        chosen[name] = least if shortest else median
        word = "at least " if shortest else ""
        print(f"{name}: {word}{chosen[name]:.2f} ms (middle half {low:.2f} to {high:.2f},"
              f" n = {rounds})")
    return chosen


def on_ranks(world_size: int, work: Callable, *args) -> list:
    """Runs work(rank, *args) in `world_size` new processes of one thread each, joined in a gloo
    group, and returns what each of them returned.

    The processes see nothing of the notebook: `work` imports what it needs in its own body.
    Raises what a process has raised; the others end then, too.
    """
    source = textwrap.dedent(inspect.getsource(work))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world_size, context) as pool:
        jobs = [pool.submit(_one_rank, source, work.__name__, rank, world_size, folder, args)
                for rank in range(world_size)]
        errors = [error for error in (job.exception() for job in jobs) if error is not None]
        for error in sorted(errors, key=lambda error: "gloo" in str(error)):  # a left rank's last
            raise error
        return [job.result() for job in jobs]


def _one_rank(source: str, name: str, rank: int, world_size: int, folder: str, args: tuple):
    """What each process of `on_ranks` does."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    space = {}
    exec(source, space)
    try:
        result = space[name](rank, *args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()  # ends whoever waits for this rank


class Message:
    """A collective under way, as LoggedDist launches it.

    name, nbytes (of its larger tensor); launched, returned, asked, came: when its launch began,
    when that call returned, when it was first waited for, and when it was there, in seconds of
    time.perf_counter.
    """

    def __init__(self, name: str, nbytes: int):
        self.name, self.nbytes, self.launched = name, nbytes, time.perf_counter()
        self.returned = self.asked = self.came = self.due = 0.0
        self.handle = None  # PyTorch's, until it is there

    def wait(self) -> None:
        """Waits until it is there, on a simulated link not before it is due."""
        if not self.came:
            self.asked = time.perf_counter()
            self.handle.wait()
            time.sleep(max(0.0, self.due - time.perf_counter()))
            self.came = time.perf_counter()
            self.handle = None  # the rest can travel between processes


class LoggedDist:
    """torch.distributed for a snapshot (`module.dist = LoggedDist()`) that keeps its `messages`.

    at_once: waits for each right after its launch. link (seconds of latency, bytes per second):
    simulates a link that carries one message at a time, in order of launch.
    """

    def __init__(self, at_once: bool = False, link: tuple[float, float] | None = None):
        self.at_once, self.link, self.messages = at_once, link, []

    def __getattr__(self, name: str):
        found = getattr(dist, name)
        kinds = ("all_reduce", "all_gather", "reduce_scatter")
        return partial(self._launch, name, found) if name.startswith(kinds) else found

    def _launch(self, name, collective, *tensors, async_op=False, **options):
        message = Message(name, max(tensor.nbytes for tensor in tensors))
        if self.link:
            free = max([message.launched, *(earlier.due for earlier in self.messages[-1:])])
            message.due = free + self.link[0] + message.nbytes / self.link[1]
        self.messages.append(message)
        message.handle = collective(*tensors, async_op=True, **options)
        message.returned = time.perf_counter()
        if self.at_once or not async_op:
            message.wait()
        return message


# ------------------------------------- Guesses and exercises -------------------------------------
def reveal(guess, measured: float | str, unit: str = "", word: str = "measured") -> None:
    """Prints what was measured beside the reader's guess, and how far apart they are; word:
    "computed" where nothing was measured.

    A measured size has a right size, a factor of two, unless it is 0. A string has none: a name,
    or the number that names a choice ("512"), is right or not.
    """
    shown = f"{measured:.4g}" if isinstance(measured, float) else f"{measured}"
    said = f"{word}: {shown} {unit}".rstrip()
    if guess is UNSOLVED:
        print(said + (". You have not guessed" if os.environ.get(OPENED) else ""))
        return
    number = _number(guess)
    if not isinstance(measured, str) and (number is None or not math.isfinite(number)):
        print(f"Your guess {guess!r} is not a finite number: change it, run its cell and this one")
        return
    if isinstance(measured, str):
        same = str(guess).strip().lower() == measured.lower()
        verdict = "right" if same or number == _number(measured) is not None else "a surprise"
    elif measured == 0:
        verdict = "right" if number == 0 else "a surprise"
    else:
        far = abs(number - measured) / abs(measured)
        low, high = sorted((measured / 2, measured * 2))  # a factor of two
        verdict = ("close" if far <= 0.2 else "the right size" if low <= number <= high
                   else "a surprise")
    _verdicts.append(verdict)
    good = sum(verdict != "a surprise" for verdict in _verdicts)
    print(f"{said}. You guessed {guess}: {verdict}. Good so far: {good} of {len(_verdicts)}")


def reveal_largest(guess, gains: dict[str, Sequence[float]]) -> None:
    """Reveals the name with the largest mean of paired gains, {name: one per seed}, and grades the
    guess, if `grade` calls them shown above 0 and above every other's; else says what is not."""
    _reveal_first(guess, gains, "largest", "above", gain=True)


def reveal_lowest(guess, losses: dict[object, Sequence[float]]) -> None:
    """Reveals the name with the lowest mean of paired losses, {name: one per seed}, and grades the
    guess, if `grade` calls them shown below every other's; else says what is not."""
    scores = {name: -np.asarray(each, dtype=float) for name, each in losses.items()}
    _reveal_first(guess, scores, "lowest", "below")


def _reveal_first(guess, scores: dict[object, Sequence[float]], word: str, side: str,
                  gain: bool = False) -> None:
    """Reveals the name of the best scores, or what the seeds do not show; gain: also above 0."""
    scores = {f"{name}": np.asarray(each, dtype=float) for name, each in scores.items()}
    best, *ranked = sorted(scores, key=lambda name: -scores[name].mean())
    missing = [f"{side} {name}" for name in ranked if grade(scores[best], scores[name]) != "shown"]
    if gain and grade(scores[best], np.zeros_like(scores[best])) != "shown":
        missing.append("to be a gain")
    if missing:
        print(f"measured: {best} has the {word} mean, but {len(scores[best])} seeds do not show it"
              f" {' or '.join(missing)}. So they cannot say which is {word}; no guess is graded")
    else:
        reveal(guess, best)


def grade(change: Sequence[float], parent: Sequence[float]) -> str:
    """What paired losses show: "shown", if all seeds agree in sign and the mean difference exceeds
    two standard errors; "not shown", if only the sign agrees; else "no difference seen"."""
    gaps = differences(parent, change)
    if not ((gaps > 0).all() or (gaps < 0).all()):
        return "no difference seen"
    return "shown" if abs(gaps.mean()) > 2 * standard_error(gaps) else "not shown"


def differences(losses: Sequence[float], others: Sequence[float]) -> np.ndarray:
    """Paired differences, seed by seed, to nine decimals: float64 makes equal ones unequal."""
    return (np.asarray(losses, dtype=float) - np.asarray(others, dtype=float)).round(9)


def standard_error(gaps: Sequence[float]) -> float:
    """The standard error of the mean of a difference per seed."""
    return float(np.std(gaps, ddof=1) / len(gaps) ** 0.5)


def verdict(change: Sequence[float], parent: Sequence[float], change_name: str = "your change",
            parent_name: str = "its parent", verb: str = "ends") -> None:
    """Prints in one line what a change's losses show against its parent's: see `evidence`."""
    print(evidence(change, parent, change_name, parent_name, verb))


def evidence(change: Sequence[float], parent: Sequence[float], change_name: str = "your change",
             parent_name: str = "its parent", verb: str = "ends") -> str:
    """The grade of a change's losses against its parent's, and their differences by seed; where
    they show nothing, also the smallest mean difference that they could have shown. verb: "is"
    for a figure that is not a loss."""
    gaps = differences(parent, change)
    if not gaps.any():
        return f"No difference seen: {change_name} {verb} exactly as {parent_name}, in every seed"
    mean, error, found = abs(gaps.mean()), standard_error(gaps), grade(change, parent)
    side, sign = ("below", 1) if gaps.mean() > 0 else ("above", -1)
    n = _decimals(mean, error)
    seeds = ", ".join(f"{sign * gap:z.{n}f}" for gap in gaps)
    said = (f"{found.capitalize()}: {change_name} {verb} {mean:.{n}f} {side}"
            f" {parent_name} (by seed {seeds};"
            f" standard error {f'{error:.{n}f}' if error > LEAST else 0})")
    if found == "no difference seen" and mean > 2 * error - LEAST:
        said += ". Not all seeds have that sign"
    elif found != "shown":
        said += f". At this spread {len(gaps)} seeds could show {2 * error:.{n}f} or more"
    return said


def _decimals(mean: float, error: float) -> int:
    """How many decimals, 4 to 9 (1 to 9 for a mean of 10 or more), keep a standard error from
    looking like zero and a mean difference from looking like the smallest that could be shown."""
    least = 4 if mean < 10 else 1  # a mean of 10 or more is a percentage
    for n in range(least, 9):
        seen = round(error if error > LEAST else mean, max(least, n - 1)) > 0
        if seen and (round(mean, n) != round(2 * error, n) or abs(mean - 2 * error) < LEAST):
            return n
    return 9


def must_end_lower(change: Sequence[float], parent: Sequence[float], change_name: str,
                   parent_name: str, why: str, margin: float = 0.0) -> None:
    """Prints the evidence of an exercise's losses.

    Raises AssertionError, with it and `why`, unless it is shown that they end lower, on average by
    at least `margin`.
    """
    told = evidence(change, parent, change_name, parent_name)
    gain = differences(parent, change).mean()
    wanted = f"{margin:g} lower on average is expected, and shown" if margin else (
        "lower in every seed, by two standard errors on average, is expected")
    assert grade(change, parent) == "shown" and gain >= margin and gain > 0, (
        f"{told}; {wanted}. {why}")
    print(told)


def check(exercise: str, answer=MISSING):
    """Says whether the answer to an exercise ("01.2") is right, and if not, what is wrong.

    Returns whether it is right. Without an answer it is a decorator, `@check("01.2")`, for the
    function or class below it, which it checks and leaves as it is.
    """
    if answer is MISSING:
        def decorator(definition):
            check(exercise, UNSOLVED if _is_empty(definition) else definition)
            return definition
        return decorator
    if answer is UNSOLVED:
        print(f"Exercise {exercise} waits for your answer. Stuck? lesson.hint({exercise!r}, 1)")
        return False
    try:
        its_check = _exercise(exercise)["check"]
    except UserError as missing:
        print(missing)
        return False
    try:
        number = _number(answer)
        assert number is None or math.isfinite(number), (
            f"{answer!r} is not a finite number; no comparison finds it too large or too small")
        its_check(answer)
    except Exception as problem:  # the learner's own code runs in there
        said = f"{problem}" or type(problem).__name__
        if not isinstance(problem, AssertionError):
            said = f"{_line_of(answer, problem)} raises {type(problem).__name__}: {said}"
        stop = "" if said.endswith(("?", ".")) else "."
        print(f"Not yet: {said}{stop} Stuck? lesson.hint({exercise!r}, 1)")
        return False
    print(f"Exercise {exercise} is right.")
    return True


def _number(value) -> float | None:
    """A value as a number, also one in quotes; None if it is none, or too large for one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _line_of(answer, problem: Exception) -> str:
    """The answer's line in which a problem arose, in words."""
    functions = [answer, *vars(answer).values()] if isinstance(answer, type) else [answer]
    files = {function.__code__.co_filename for function in functions
             if inspect.isfunction(function)}
    lines = [frame.line for frame in traceback.extract_tb(problem.__traceback__)
             if frame.filename in files and frame.line]
    return f"your line `{lines[-1]}`" if lines else "your answer"


def _is_empty(definition) -> bool:
    """Whether a function, or a function of a class, still has no body but `...`."""
    if getattr(definition, "__name__", "") == "<lambda>":  # an expression is never empty
        return False
    functions = [definition]
    if isinstance(definition, type):  # in a notebook a class's own source is not to be had
        functions = [inspect.unwrap(value) for value in vars(definition).values()]
    sources = [inspect.getsource(function) for function in functions
               if inspect.isfunction(function)]
    for source in sources:
        try:
            function = ast.parse(textwrap.dedent(source)).body[0]
        except SyntaxError:  # the end of a call, which holds a lambda
            continue
        if not isinstance(function, ast.FunctionDef):  # a statement with a lambda, which has a body
            continue
        if all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
               for node in function.body):
            return True
    return False


def hint(exercise: str, level: int = 1) -> None:
    """Prints a hint: 1 nudges, 2 gives the mathematics, 3 the steps, 4 nearly all of it."""
    try:
        hints = _exercise(exercise)["hints"]
    except UserError as missing:
        print(missing)
        return
    print(hints[level - 1] if level in range(1, 5) else f"Hints have levels 1 to 4, not {level!r}")


def _exercise(exercise: str) -> dict[str, Callable | list[str]]:
    """The entry {"check", "hints", "solution"} of an exercise in solutions/NN_slug.py.

    Raises UserError if the file or the exercise does not exist.
    """
    lesson, _, number = str(exercise).partition(".")
    file = next((REPOSITORY / "lessons" / "solutions").glob(f"{lesson}_*.py"), None)
    if file is None:
        raise UserError(f"The checks of exercise {exercise} were not found: there is no file"
                        f" lessons/solutions/{lesson}_*.py. Try: git restore lessons/solutions")
    exercises = _exercises(file)
    if number not in exercises:
        has = ", ".join(f"{lesson}.{one}" for one in exercises)
        raise UserError(f"There is no exercise {exercise}; this lesson has {has}")
    return exercises[number]


@cache
def _exercises(file: Path) -> dict[str, dict]:
    """The exercises in a file of solutions/, loaded once: so its checks keep what they trained."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXERCISES


# ------------------------------------------- Sampling -------------------------------------------
def train_and_write(module: ModuleType, prompt: str, *, letters: int = 200,
                    temperature: float = 0.7, **hyperparameters) -> tuple[RunLog, str]:
    """Trains a snapshot like `train_here`, then lets it continue the prompt.

    Returns the log, and the prompt with so many letters (bytes) more. The draws have a fixed seed.
    """
    make_builtin()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        what = dict(patterns(BUILTIN), log_dir=folder, save_checkpoint=True)
        module.main(module.Hyperparameters(**{**what, **hyperparameters}))
        shutil.copy(module.__file__, Path(folder, SCRIPT))
        log, trained = read_log(Path(folder, "log.txt")), load_run(Path(folder))
    vocabulary = vocabulary_of(trained.args.vocab_size, trained.first_token)
    start = vocabulary.encode(prompt.encode())
    drawn = generate(trained, [vocabulary.bos, *start], vocabulary.size, temperature, 0,
                     random_stream(0, 0))
    ids = [*start, *(next(drawn) for _letter in range(letters))]
    return log, b"".join(map(vocabulary.spell, ids)).decode("utf-8", "replace")
