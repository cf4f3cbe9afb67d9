"""The pages of the site: which there are, what each is about, and the addresses that they share."""

import ast
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path

from speedrun.base.text import UNKNOWN
from speedrun.compare.results import scores
from speedrun.compare.table import loss_text
from speedrun.diff.arrange import arrange
from speedrun.diff.difference import find_difference
from speedrun.diff.facts import changed_hyperparameters, side_of
from speedrun.diff.origin import Version, line_origins, read_script
from speedrun.figures import charts
from speedrun.figures.generated import PREDICTIONS, RESULTS, TABLES, TINY
from speedrun.figures.ladder import load_ladder
from speedrun.figures.outside import anchor_of, finding_table
from speedrun.figures.readme import EXCERPT, NEWEST
from speedrun.figures.tables import records_of
from speedrun.history.blocks import FREE, split_blocks
from speedrun.history.carries_over import CARRIES_OVER, Outside, load_outside
from speedrun.history.effects import TIME, TOKENS
from speedrun.history.fields import read_fields
from speedrun.history.gains import (
    comparable_base,
    estimates,
    loss_effects,
    own_gain,
    runs_text,
    whole_effects,
    whole_records,
)
from speedrun.history.manifest import Manifest, Milestone, load_manifest
from speedrun.history.measured import Measurement, load_measurements
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.history.records import Record, load_records
from speedrun.history.threads import THREADS, Thread, load_threads, number_name
from speedrun.history.why import load_why
from speedrun.run.data import shards_read
from speedrun.scripts.find import code_hash
from speedrun.site.interactive import figures_of
from speedrun.site.lessons import claims_of, lesson_minutes, lesson_title, make_lesson
from speedrun.site.models import compared_with
from speedrun.site.text import (
    anchor,
    make_html,
    make_inline,
    resolve,
    section,
    section_at,
    svg_size,
    without_unmeasured,
)
from speedrun.site.threads import shown_steps

NAME = "Fast training, step by step"
RECORD_FOLDERS = "https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_1_short/"
# Tables that have no pages of their own.
OTHERS = {t.name for t in TABLES} - {
    "memory", "milestones", "one-gpu", "records", "rungs", "saved", "tiny"}
SECTIONS = {  # of history/README.md that have a page of their own: {anchor: its path}
    "all-records": "records.html", "on-your-laptop": "laptop.html", "run-a-milestone": "run.html",
    "one-gpu": "run.html#one-gpu", "what-saved-most": "saved.html"}
FIRST = "start_here.ipynb"  # of all lessons
AFTER = "history/after.md"
TEXTS = {  # Markdown files that have a page of their own: its path, title and description
    "lessons/carries_over.md": ("outside.html", "Outside the speedrun: does it carry over?",
                                "What others found when they tried the ideas elsewhere"),
    AFTER: ("after.html", "After record #89: the race goes on",
                         "What was submitted since then, and which rule each submission tests")}
MIB = 2**20
MOST = 16  # versions of a block on a page: the largest so far takes 17 kB of a page's 300


@dataclass(frozen=True)
class Page:
    """A page: its path in the site, its template, title and description, what the template needs
    when it is made, and the pages before and after it in its chain."""

    path: str
    template: str
    title: str
    about: str
    what: Callable[[], dict] = dict
    previous: "Page | None" = None
    next: "Page | None" = None


@dataclass(frozen=True)
class Figure:
    """A figure of a milestone beside that of the ancestor that it is compared with, as text.
    change: as a share, where the two can be compared; difference: in the figure's own unit."""

    name: str
    before: str
    now: str
    change: float | None = None
    difference: str = ""


@dataclass
class Site:
    """All that is in the site of a repository."""

    root: Path
    files: dict[str, bytes] = field(default_factory=dict)  # other files, by their paths
    models: dict[Milestone, Callable] = field(default_factory=dict)  # see models.drawn

    @cached_property
    def manifest(self) -> Manifest:
        return load_manifest(self.root / "history")

    @cached_property
    def records(self) -> tuple[Record, ...]:
        return load_records(self.root / "history" / "records.json")

    @cached_property
    def outside(self) -> Outside:
        """What others found when they tried the ideas elsewhere."""
        return load_outside(self.root / "history" / CARRIES_OVER.name)

    @cached_property
    def chains(self) -> dict[str, list[Milestone]]:
        """{name: its milestones}; last come chains that borrow blocks from others."""
        found = {}
        for m in self.manifest.milestones:
            found.setdefault(m.chain, []).append(m)
        return dict(sorted(found.items(), key=lambda item: any(m.borrows for m in item[1])))

    @cached_property
    def lesson_groups(self) -> list[tuple[str, list[Path]]]:
        """[(the chain, or "" for lessons of none, its lessons)] in the order of reading: the first
        lesson; each chain's, what prepares the race before it; then all others."""
        paths = sorted((self.root / "lessons").glob("*.ipynb"))
        chains = sorted(self.chains.items(), key=lambda item: (
            any(m.borrows for m in item[1]), any(m.record for m in item[1])))
        groups = [("", [path for path in paths if path.name == FIRST])]
        for chain, milestones in chains:
            covered = dict.fromkeys(self.root / m.lesson for m in milestones if m.lesson)
            groups.append((chain, [path for path in covered if path in paths]))
        known = {path for _, some in groups for path in some}
        groups.append(("", [path for path in paths if path not in known]))
        return [group for group in groups if group[1]]

    @cached_property
    def notebooks(self) -> list[Path]:
        """The lessons, in the order of reading."""
        return [path for _, some in self.lesson_groups for path in some]

    @cached_property
    def threads(self) -> tuple[Thread, ...]:
        """The ideas that run through several milestones."""
        return load_threads(self.manifest, self.root / "history" / THREADS.name)

    @cached_property
    def measured(self) -> tuple[Measurement, ...]:
        """What owners of GPUs measured."""
        folder = self.root / "history" / "measured"
        return load_measurements(folder) if folder.is_dir() else ()

    @cached_property
    def predictions(self) -> dict[str, StoredPrediction]:
        """{slug: what is predicted} of the scripts that have not changed since."""
        path = self.root / RESULTS / PREDICTIONS
        stored = load_predictions(path) if path.is_file() else {}
        return {m.slug: stored[m.slug] for m in self.manifest.milestones
                if m.slug in stored and stored[m.slug].code == code_hash(m.script)}

    @cached_property
    def laptop_losses(self) -> dict[str, str]:
        """{slug: the final loss at the tiny scale, and its spread}."""
        path = self.root / RESULTS / TINY
        if not path.is_file():
            return {}
        ladder = load_ladder(path, self.manifest)
        return {entry.milestone: loss_text(row) for entry, row in zip(
            ladder.entries, scores(ladder), strict=True) if row.val_loss is not None}

    @cached_property
    def lives(self) -> dict[str, list[Version]]:
        """{block: its versions} of those that have more than one, by name, without cards and
        imports, which are every file's own, and without section headings."""
        names = {}
        for m in self.manifest.milestones:
            texts = [read_script(x) if x else "" for x in (self._parent(m), m)]
            for change in find_difference(*texts).changes:
                name, words = change.name, [word for word in change.words if word != "moved"]
                is_same = change.old and change.new and change.old.text == change.new.text
                if name not in FREE and not name.startswith("heading: ") and not is_same:
                    names.setdefault(name, []).append(Version(m, replace(change, words=words)))
        return {name: names[name] for name in sorted(names, key=lambda n: (n.lower(), n))
                if len(names[name]) > 1}

    @cached_property
    def block_paths(self) -> dict[str, str]:
        """{block: the path of its life's first page}; no two differ in case alone, as some disks
        need it."""
        paths, taken = {}, set()
        for name in self.lives:
            short = re.sub(r"\W+", "-", name, flags=re.A).strip("-")[:60] or "block"
            path = short
            while path.lower() in taken:
                path = f"{short}-{len(taken)}"
            taken.add(path.lower())
            paths[name] = f"blocks/{path}.html"
        return paths

    def parts(self, name: str) -> list[tuple[str, list[Version]]]:
        """(path, versions) of each page of a block's life: at most MOST versions, evenly."""
        versions, path = self.lives[name], self.block_paths[name]
        size = -(-len(versions) // -(-len(versions) // MOST))
        return [(path if not start else path.replace(".html", f".{start // size + 1}.html"),
                 versions[start : start + size]) for start in range(0, len(versions), size)]

    # ---- addresses

    @cached_property
    def _versions(self):
        """{block: {milestone: the address of its version}}."""
        return {name: {v.milestone: f"{path}#v{v.milestone.id}" for path, versions
                       in self.parts(name) for v in versions} for name in self.block_paths}

    def version_of(self, name: str, m: Milestone) -> str:
        """Where the life of a block shows the version that a milestone has, its own or that of the
        nearest ancestor with one; where the life begins, if there is none."""
        known = self._versions[name]
        return next((known[a] for a in self.manifest.lineage(m) if a in known),
                    self.block_paths[name])

    def life_of(self, m: Milestone, page: str = "") -> Callable[[str], str | None]:
        """What gives, on a page (by default the milestone's), the address of a block's version;
        None for a block that has one version only."""
        return lambda name: name in self.block_paths and self.relative(
            self.version_of(name, m), page or self.path_of(m)) or None

    def path_of(self, m: Milestone) -> str:
        return f"{m.chain}/{m.slug}.html"

    def script_of(self, m: Milestone) -> str:
        return f"{m.chain}/{m.slug}-script.html"

    def raw_of(self, m: Milestone) -> str:
        return f"{m.chain}/{m.slug}/{m.program}"

    def lesson_of(self, m: Milestone) -> str | None:
        path = m.lesson and self.root / m.lesson
        return f"lessons/{path.stem}.html" if path in self.notebooks else None

    def target(self, folder: str, page: str) -> Callable[[str], str | None]:
        """What makes a link in a file of a folder one from a page of the site; None for a file that
        has no page."""
        milestones = {f"history/{m.chain}/{m.name}": m for m in self.manifest.milestones}

        def found(link):
            path, at = resolve(folder, link)
            if link.startswith("#") and folder == "history" and at in SECTIONS:
                return self.relative(SECTIONS[at], page)
            if not path or link.startswith("#"):
                return link
            if path in milestones:
                return self.relative(self.path_of(milestones[path]), page)
            owner, name = posixpath.split(path)
            if owner in milestones and name == milestones[owner].program:
                return self.relative(self.script_of(milestones[owner]), page)
            if owner == "lessons" and self.root / path in self.notebooks:
                return self.relative(f"lessons/{Path(name).stem}.html", page)
            pages = {"lessons/README.md": "lessons/index.html", "README.md": "index.html",
                     "history/README.md": f"{next(iter(self.chains))}/index.html"}
            pages |= {f"history/{chain}{end}": f"{chain}/index.html"
                      for chain in self.chains for end in ("", "/README.md")}
            pages |= {file: page for file, (page, *_) in TEXTS.items()}
            if path in ("history/README.md", "history") and at in SECTIONS:
                return self.relative(SECTIONS[at], page)
            if path in TEXTS and at:
                return f"{self.relative(pages[path], page)}#{at}"
            return self.relative(pages[path], page) if path in pages else None
        return found

    @staticmethod
    def relative(path: str, page: str) -> str:
        """The address of a path in the site, or of its root (""), on a page."""
        up = posixpath.relpath(path or ".", posixpath.dirname(page) or ".")
        return up + "/" if not path else up

    # ---- pages

    def pages(self) -> Iterator[Page]:
        """All pages, in the order of reading."""
        first = next(iter(self.chains))
        yield Page("index.html", "start.html", NAME, "The NanoGPT speedrun retold as scripts that "
                   "differ by one idea each", self._start)
        for chain, milestones in self.chains.items():
            yield Page(f"{chain}/index.html", "chain.html", chain.capitalize(),
                       f"All milestones of the {chain}", lambda chain=chain: self._chain(chain))
            pages = [Page(self.path_of(m), "milestone.html", f"{m.id} {m.title}", m.idea,
                          partial(self._milestone, m, number))
                     for number, m in enumerate(milestones, start=1)]
            for m, page in zip(milestones, _in_a_row(pages), strict=True):
                yield page
                yield Page(self.script_of(m), "script.html", f"{page.title}: every line",
                           f"Each line of {m.name} and the milestone that it is from",
                           lambda m=m: {"milestone": m, "origins": line_origins(self.manifest, m),
                                        "blocks": [b for b in split_blocks(read_script(m))
                                                   if b.name != FREE[0]]})
        for name, versions in self.lives.items():
            parts = self.parts(name)
            spans = [span_of(some) for _, some in parts]
            around = {"name": name, "count": len(versions), "parts": [
                (span, path) for span, (path, _) in zip(spans, parts, strict=True)],
                "successors": [(m, s.by) for m in self.manifest.milestones for s in m.succession
                               if s.block == name and s.by in self.lives]}
            yield from _in_a_row([
                Page(path, "block.html",
                     f"The life of {name}" + (f", {span}" if len(parts) > 1 else ""),
                     f"{len(versions)} versions of {name}",
                     partial(dict, around, versions=some))
                for span, (path, some) in zip(spans, parts, strict=True)])
        yield Page("blocks/index.html", "blocks.html", "Blocks",
                   "All blocks that have more than one version",
                   lambda: {"blocks": [
                       (name, path, len(self.lives[name]), span_of(self.lives[name]))
                       for name, path in self.block_paths.items()]})
        yield from _in_a_row([
            Page(self.thread_path(thread), "thread.html", thread.title,
                 f"A thread: {thread.title}, step by step", partial(self._thread, thread))
            for thread in self.threads])
        yield Page("run.html", "run.html", "Run", "GPUs, memory, data, and the command of each "
                   "milestone", self._run)
        yield Page("reference.html", "reference.html", "Reference",
                   "Tables of everything, ideas that run through many milestones, commands",
                   self._reference)
        yield Page("records.html", "records.html", "All records",
                   f"The {len(self.records)} records of the speedrun",
                   lambda: {"chart": charts.both(partial(charts.record_chart, by_date=False),
                                                 self.records, self.manifest.of_chain(first)),
                            "covering": self._covering()})
        if any(m.effect for m in self.manifest.milestones):
            yield Page("saved.html", "saved.html", "What saved most",
                       "What each idea saved by itself, and how it is known", self._saved)
        if self._tables({"tiny"}):
            yield Page("laptop.html", "laptop.html", "On your laptop",
                       "Every milestone at the tiny scale, on a CPU", self._laptop)
        if self._tables(OTHERS):
            yield Page("predicted.html", "predicted.html", "Predicted and measured",
                       "What a step needs, predicted, and what was measured", self._predicted)
        for file, path, title, about in self.texts():
            yield Page(path, "text.html", title, about, partial(self._text, file, path))
        yield Page("hyperparameters.html", "hyperparameters.html", "Hyperparameters",
                   "Every hyperparameter and its values through the chain", self._hyperparameters)
        yield Page("lessons/index.html", "lessons.html", "Lessons",
                   "Notebooks that take the milestones apart",
                   self._lessons)
        yield from _in_a_row([
            Page(f"lessons/{path.stem}.html", "lesson.html", lesson_title(path),
                 "A notebook to read", partial(self._lesson, path)) for path in self.notebooks])

    # ---- what the templates need

    def _start(self):
        first = self.manifest.of_chain()
        begun, last = self.records[0], self.records[-1]
        shown = next((m for m in first.milestones if m.id == EXCERPT[0]), first.milestones[-1])
        return {"begun": begun, "last": last, "since": date.fromisoformat(begun.date),
                "ended": date.fromisoformat(last.date),
                "newest": NEWEST if any(file == AFTER for file, *_ in self.texts()) else None,
                "first": next(iter(self.chains)), "shown": shown,
                "chart": charts.both(partial(charts.record_chart, by_date=False), self.records,
                                     first),
                "stations": [m for m in first.milestones if m.is_station],
                "count": len(first.milestones), "chains": self.chains,
                "minutes": [lesson_minutes(path) for path in self.notebooks],
                "first_lesson": next(
                    (f"lessons/{path.stem}.html" for path in self.notebooks), None),
                "clone": clone_address(), "measured": self.measured,
                "has_effects": any(m.effect for m in self.manifest.milestones),
                "one_gpu": self._one_gpu("index.html", whole=False),
                "intros": {chain: self._intro(chain, "index.html", 2) for chain in self.chains}}

    def thread_path(self, thread: Thread) -> str:
        return f"threads/{thread.name}.html"

    def _thread(self, thread):
        return {"thread": thread, "shown": shown_steps(self.manifest, thread),
                "number": number_name(thread)}

    def _reference(self):
        known = {"hyperparameters.html", "blocks/index.html", "records.html", "saved.html",
                 "predicted.html", "laptop.html", *(path for _, path, *_ in self.texts())}
        tables = [(p.title, p.path, p.about) for p in self.pages() if p.path in known]
        commands = [(path.stem, first_line(path))
                    for path in sorted((self.root / "tools").glob("*.py"))]
        threads = [(thread, self.thread_path(thread),
                    [self.manifest.get(step.milestone) for step in thread.step])
                   for thread in self.threads]
        return {"tables": tables, "commands": commands, "threads": threads}

    def _run(self):
        rows = []
        for chain, milestones in self.chains.items():
            rows.append((chain, [(m, self._shards(m), self.predictions.get(m.slug))
                                 for m in milestones if m.program == self.first_program]))
        readme = self._file("history/README.md")
        text = section_at(readme, "run-a-milestone")
        return {"rows": [row for row in rows if row[1]], "clone": clone_address(),
                "has_predictions": bool(self.predictions),
                "one_gpu": self._one_gpu("run.html"), "text": make_html(
                    without_unmeasured(text), self.target("history", "run.html"))}

    @property
    def first_program(self) -> str:
        """The name of the scripts that train from nothing."""
        return self.manifest.milestones[0].program

    def _shards(self, m):
        """How many training shards a milestone reads; None where that is not known."""
        return shards_read(m.step_tokens_read) if m.train_steps and m.tokens_read else None

    def _one_gpu(self, page, whole=True):
        """What history/README.md says of one GPU; not whole: its first two sentences."""
        text = section_at(self._file("history/README.md"), "one-gpu")
        if not whole:
            first = re.sub(r"^\*\*[^*]+\*\*\s*", "", text.strip()).split("\n\n")[0]
            text = " ".join(re.split(r"(?<=[.])\s", first)[:2])
        make = make_html if whole else make_inline
        return make(without_unmeasured(text), self.target("history", page))

    def _file(self, file):
        path = self.root / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def _lessons(self):
        return {"groups": [(chain, self._intro(chain, "lessons/index.html", 1) if chain else "", [
            (lesson_title(path), f"lessons/{path.stem}.html", self._covered(path),
             lesson_minutes(path)) for path in paths]) for chain, paths in self.lesson_groups]}

    def texts(self) -> list[tuple[str, str, str, str]]:
        """(file, path of its page, title, description) of the texts that are there."""
        return [(file, *page) for file, page in TEXTS.items() if (self.root / file).is_file()]

    def _text(self, file, path):
        """A Markdown file of the repository as a page."""
        text = (self.root / file).read_text(encoding="utf-8")
        return {"html": make_html(text, self.target(posixpath.dirname(file), path))}

    def _chain(self, chain):
        manifest = self.manifest.of_chain(chain)
        gains = {m: own_gain(self.manifest, m) for m in manifest.milestones}
        return {"milestones": manifest.milestones, "gains": gains,
                "others": [name for name in self.chains if name != chain],
                "has_effects": any(m.effect for m in self.manifest.milestones),
                "intro": self._intro(chain, f"{chain}/index.html"),
                "raced": any(m.record for m in manifest.milestones)}

    def _intro(self, chain, page, sentences=None):
        """The first paragraph of a chain's README, or only its first sentences."""
        readme = self.root / "history" / chain / "README.md"
        if not readme.is_file():
            return ""
        words = readme.read_text(encoding="utf-8").split("\n\n")[1]
        words = " ".join(re.split(r"(?<=[.])\s", words)[:sentences])
        return make_inline(words, self.target(f"history/{chain}", page))

    def _milestone(self, m, number):
        parent = self._parent(m)
        base = comparable_base(self.manifest, m) or parent
        drawn = next((a for a in self.manifest.lineage(m)[1:] if a.curve), None)
        change, arranged, values, in_model = None, None, None, []
        picture, removed = self.models[m]() if m in self.models else (None, [])
        if parent:
            sides = side_of(parent), side_of(m)
            change = find_difference(*(side.text for side in sides))
            arranged, values = arrange(*sides, change), changed_hyperparameters(*sides)
            known = _model_blocks(parent, m)
            in_model = [c.name for c in change.changes if c.name in known]
        return {
            "m": m, "parent": parent, "base": base, "drawn": drawn, "number": number,
            "count": len(self.chains[m.chain]), "figures": self._figures(m, base),
            "gain": own_gain(self.manifest, m), "whole": whole_effects(self.manifest, m),
            "whole_records": whole_records(self.manifest, m), "records": records_of(m),
            "arranged": arranged,
            "picture": picture, "removed": removed,
            "marked": compared_with(self.manifest, m),
            "in_model": in_model, "first_program": self.first_program,
            "interactive": figures_of(self.manifest, [m]),
            "curve": charts.both(charts.curve_chart, m, drawn), "change": change,
            "why": self._why(m), "claims": self._claims(m),
            "threads": [(thread, self.thread_path(thread)) for thread in self.threads
                        if any(step.milestone == m.slug for step in thread.step)],
            "laptop": self.laptop_losses.get(m.slug),
            "laptop_before": parent and self.laptop_losses.get(parent.slug),
            "outside": [(idea.name, f"outside.html#{anchor_of(idea)}",
                         make_html(finding_table(idea), str)) for idea in self.outside.of(m.id)],
            "quoted": self._quoted(m) if m.stated or m.claimed else None,
            "inline": partial(make_inline, target=self.target(
                f"history/{m.chain}/{m.name}", self.path_of(m))),
            "lender": self.manifest.get(m.borrows.lender) if m.borrows else None,
            "values": values, "lines": read_script(m).count("\n"),
            "names": [b.name for b in split_blocks(read_script(m)) if b.name in self.lives]}

    def _why(self, m):
        """(text, the figure's address and size, what it shows) of a milestone's why.md; None
        without one."""
        part = load_why(m)
        if part is None:
            return None
        html = make_html(part.text, self.target(f"history/{m.chain}/{m.name}", self.path_of(m)))
        drawn = part.figure.read_bytes()
        address = f"{m.chain}/{m.slug}/{part.figure.name}"
        self.files[address] = drawn
        return html, address, svg_size(drawn.decode()), part.shown

    def _claims(self, m):
        """What the lesson measures of a milestone: (printed text, picture) of its claim cells."""
        path = m.lesson and self.root / m.lesson
        if path not in self.notebooks:
            return None
        claims = claims_of(path, m.id, path.stem == m.name)
        for claim in claims:
            self.files |= claim.files
        return claims

    def _quoted(self, m):
        """Where predicted.html shows what others have stated of a chain's steps: an anchor."""
        for file, name in self._tables({"claims", "stated"}):
            if file == f"history/{m.chain}/README.md":
                return anchor(f"{section(self._readme(file, name), name)[0]} {name}")

    def _parent(self, m):
        return self.manifest.get(m.parent) if m.parent else None

    def _figures(self, m, base):
        """The figures that are known of a milestone, and how they change where that can be told."""
        def row(name, form, of, what=None):
            now, before = of(m), base and of(base)
            told = now and before and (not what or comparable_base(self.manifest, m, what))
            return Figure(name, form.format(before) if before else UNKNOWN,
                          form.format(now) if now else UNKNOWN, now / before - 1 if told else None,
                          _with_sign(form, now - before) if now and before else "")

        rows = [
            row("minutes", "{:g}", lambda m: m.minutes, TIME),
            row("steps", "{:,}", lambda m: m.train_steps, TOKENS),
            row("tokens", "{:,}", lambda m: m.tokens, TOKENS),
            row("milliseconds per step", "{:.1f}", lambda m: m.step_avg_ms, TIME),
            row("validation loss", "{:.4f}", lambda m: m.val_loss, TIME),
            row("parameters", "{:,}", lambda m: m.parameters),
            row("peak memory, MiB", "{:,}", lambda m: m.peak_memory_mib, TIME),
            row("peak memory, MiB, predicted", "{:,.0f}", lambda m: m.slug in self.predictions and
                self.predictions[m.slug].peak / MIB or None)]
        return [r for r in rows if r.now != UNKNOWN or (m.record and r.before != UNKNOWN)]

    def _saved(self):
        """(milestone, its Gain, effects on the loss, estimates, whole records) of each milestone
        that has one of them, the largest gain first."""
        manifest = self.manifest
        rows = [(m, own_gain(manifest, m), loss_effects(m), estimates(m),
                 whole_records(manifest, m)) for m in manifest.of_chain(
                     next(m.chain for m in manifest.milestones if m.effect)).milestones]
        rows = [row for row in rows if any(row[1:])]
        return {"rows": sorted(rows, key=lambda row: row[1].seconds if row[1] else 0),
                "runs_text": runs_text}

    def _covering(self):
        return [(r, [m for m in self.manifest.milestones if r in m.covered]) for r in self.records]

    def _covered(self, path):
        return [m for m in self.manifest.milestones if m.lesson and self.root / m.lesson == path]

    def _readme(self, file, name):
        text = self._file(file)
        return text if f"<!-- begin {name} -->" in text else ""

    def _section(self, file, name, page):
        heading, text = section(self._readme(file, name), name)
        for m in self.manifest.milestones:  # the tables name milestones by their folders
            folder = posixpath.relpath(f"history/{m.chain}/{m.name}", posixpath.dirname(file))
            text = text.replace(f"| {m.name} |", f"| [{m.id} {m.title}]({folder}) |")
        text = without_unmeasured(text)
        owner = posixpath.basename(posixpath.dirname(file))
        title = f"{owner.capitalize()}: {heading}" if owner in self.chains else heading
        return title, anchor(f"{heading} {name}"), make_html(
            text, self.target(posixpath.dirname(file), page))

    def _laptop(self):
        path, drawn = self.root / RESULTS / TINY, []
        for chain in self.chains:
            own = self.manifest.of_chain(chain)
            drawn.append((chain, charts.both(charts.ladder_chart, load_ladder(path, own), own)))
        return {"charts": [(chain, chart) for chain, chart in drawn if chart],
                "sections": self._sections({"tiny"}, "laptop.html")}

    def _predicted(self):
        return {"sections": self._sections(OTHERS, "predicted.html")}

    def _tables(self, names):
        """(file, name) of the tables of these names that the files in history/ show."""
        found = [(t.file, t.name) for t in TABLES if t.name in names
                 and t.file.startswith("history/") and self._readme(t.file, t.name)]
        return sorted(found, key=lambda table: table[0] != "history/README.md")

    def _sections(self, names, page):
        """Those of the tables with these names; one that holds two tables comes once."""
        found = {}
        for file, name in self._tables(names):
            section = self._section(file, name, page)
            found.setdefault((file, section[0]), section)
        return list(found.values())

    def _hyperparameters(self):
        """{name: (entry, [(milestone, value)] where the value differs from the parent's)}."""
        found = {name: (entry, []) for name, entry in self.manifest.glossary.items()}
        for m in self.manifest.milestones:
            parent = self._parent(m)
            before = read_fields(parent.script) if parent else {}
            now = read_fields(m.script)
            for name, (_, values) in found.items():
                old, new = (fields[name].written if name in fields else None
                            for fields in (before, now))
                if old != new:
                    values.append((m, new))
        return {"entries": found}

    @cached_property
    def _from_lessons(self):
        return self.target("lessons", "lessons/index.html")

    def _lesson(self, path):
        lesson = make_lesson(path, self._from_lessons)
        for name, data in lesson.pictures.items():
            self.files[f"lessons/{path.stem}_files/{name}"] = data
        covered = self._covered(path)
        return {"lesson": lesson, "covered": covered,
                "interactive": figures_of(self.manifest, covered)}


def span_of(versions: list[Version]) -> str:
    """From which milestone to which a block's versions go, chain by chain: "14b to 14g, e0"."""
    ids = {}
    for v in versions:
        ids.setdefault(v.milestone.chain, []).append(v.milestone.id)
    return ", ".join(some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}"
                     for some in ids.values())


def clone_address() -> str | None:
    """Where the repository can be cloned from, as GitHub's workflows tell it; None elsewhere."""
    server, name = (os.environ.get(key) for key in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    return f"{server}/{name}" if server and name else None


def first_line(path: Path) -> str:
    """The first sentence of a program's docstring, without its end."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n\n")[0]


def _with_sign(form, value):
    text = form.format(abs(value))
    return "±0" if not re.search("[1-9]", text) else ("−" if value < 0 else "+") + text


def _model_blocks(*milestones):
    """The names of the blocks in the section Model of these milestones' scripts."""
    found, heading = set(), ""
    for block in (block for m in milestones for block in split_blocks(read_script(m))):
        heading = block.name if block.name.startswith("heading: ") else heading
        found |= {block.name} if heading == "heading: Model" else set()
    return found


def _in_a_row(pages):
    """The pages, each with the one before it and the one after it."""
    return [replace(page, previous=before, next=after) for before, page, after
            in zip([None, *pages], pages, [*pages[1:], None], strict=False)]
