"""Reads history/: a chain is a folder, a milestone is a folder in it, and their order is that of
their names. All tools and tests work from the Manifest that this makes of them.

Standard library only, so that a command can answer --help before anything heavy is imported.
"""

import itertools
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from speedrun.base.errors import UserError
from speedrun.base.files import REPOSITORY
from speedrun.history.effects import (
    Effect,
    Incomparable,
    Succession,
    read_effects,
    read_incomparable,
)
from speedrun.history.fields import default_hyperparameters
from speedrun.history.glossary import Glossary, load_glossary
from speedrun.history.records import Record, load_records
from speedrun.history.schema import (
    Borrows,
    Counts,
    Curve,
    Day,
    Entries,
    FiguresOf,
    Pairs,
    Table,
    Texts,
    build,
    nearest,
)
from speedrun.history.tokens import batch_settings, step_tokens, tokens_after

HISTORY = REPOSITORY / "history"
KINDS = ("optimizer", "architecture", "data", "systems")
ID = re.compile(r"[a-z]?\d+[a-z]?")  # a station's number and at most one letter
NAME = re.compile(ID.pattern + "_([a-z][a-z][a-z0-9_]*)")  # of a milestone's folder
HANDLES = "handles.py"  # in a folder, beside the script: see speedrun.history.handles
FIGURE = "why.py"  # likewise: see speedrun.figures.why
NONE = "none"  # as a parent, and as the record whose figures a milestone carries
# Keys that milestone.toml must not have, because they follow from something else.
DERIVED = {
    "id": "the folder's name", "slug": "the folder's name", "chain": "the folder that holds it",
    "program": "the script in the folder", "written": "the folder, which is there",
    "source": "the record, in records.json",
}


class ManifestError(UserError):
    """What is wrong in history/, or which milestone does not exist."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Declared:
    """What a milestone.toml says; CONTRIBUTING.md explains the keys. None: not recorded.

    The fields are also the schema: their types are checked, and no default means required.
    """

    title: str
    idea: str
    kind: Literal[KINDS]
    parent: str | None = None
    changes: Texts = ()
    shows: str | None = None
    exceeds: str = ""
    records: Counts = ()
    part_of: int | None = None
    figures_of: FiguresOf | None = None
    val_loss: float | None = None
    step_avg_ms: float | None = None
    peak_memory_mib: int | None = None
    parameters: int | None = None
    curve: Curve = ()
    runs: int = 1
    besides: Texts = ()
    lesson: str | None = None
    exercises: dict = field(default_factory=dict)
    ablate: str | None = None
    borrows: Borrows | None = None
    formerly: Texts = ()
    stated: Pairs = ()
    claimed: dict = field(default_factory=dict)
    incomparable: Table = field(default_factory=dict)
    effect: Entries = ()
    succession: Entries = ()
    tiny: dict = field(default_factory=dict)
    check: dict = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Those that a milestone.toml states where they differ from those that are derived."""

    minutes: float | None = None
    date: Day | None = None
    authors: Texts | None = None
    train_steps: int | None = None
    tokens_per_step: int | None = None
    tokens_read: int | None = None


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """What a document states of the same step, in its words; tokens_per_s over all GPUs."""

    tokens_per_s: int
    memory: str
    mfu: str


@dataclass(frozen=True)
class Borrowed:
    """Blocks of a root that are those of another chain's milestone, byte for byte; lender: its
    id."""

    lender: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Milestone(Declared):
    """A folder of a chain: what its milestone.toml says, and what follows from elsewhere.

    parent is the id of another milestone, None for a root. record: that whose figures it carries,
    if any; covered: all records that it covers, in part or whole. own: figures that are stated.
    """

    script: Path
    record: Record | None
    covered: tuple[Record, ...]
    own: Figures
    claimed: Claimed | None
    borrows: Borrowed | None
    incomparable: Incomparable | None
    effect: tuple[Effect, ...]
    succession: tuple[Succession, ...]

    @property
    def folder(self) -> Path:
        """Absolute path of the folder."""
        return self.script.parent

    @property
    def name(self) -> str:
        """The folder's name, `<id>_<slug>`."""
        return self.folder.name

    @property
    def id(self) -> str:
        """A station's number and at most one letter: the milestone's place in the chain today."""
        return self.name.partition("_")[0]

    @property
    def slug(self) -> str:
        """The rest of the folder's name, by which files know the milestone: it stays."""
        return self.name.partition("_")[2]

    @property
    def is_station(self) -> bool:
        """Whether it is a station, not a step between two of them."""
        return self.id[-1].isdigit()

    @property
    def chain(self) -> str:
        """The name of the folder that holds the chain."""
        return self.folder.parent.name

    @property
    def program(self) -> str:
        """The name of the script's file."""
        return self.script.name

    @property
    def minutes(self) -> float | None:
        """Official time of the record."""
        return self.own.minutes or (self.record and self.record.minutes)

    @property
    def date(self) -> str | None:
        """Day of the record, YYYY-MM-DD."""
        records = [record for record in (self.record, *reversed(self.covered)) if record]
        return self.own.date or (records[0].date if records else None)

    @property
    def authors(self) -> tuple[str, ...]:
        """Who set the records that it covers."""
        people = dict.fromkeys(person for record in self.covered for person in record.people)
        return self.own.authors or tuple(people)

    @property
    def train_steps(self) -> int | None:
        """Optimizer steps: the script's own, where the record's are not stated."""
        return self.own.train_steps or default_hyperparameters(self.script).get("train_steps")

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of the first optimizer step over all GPUs: the script's own, where not stated."""
        own = default_hyperparameters(self.script).get("total_batch_size")
        return self.own.tokens_per_step or own

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run."""
        return self.tokens_after(self.train_steps)

    def tokens_after(self, steps: int | None) -> int | None:
        """Tokens of the first `steps` steps."""
        return tokens_after(self._sizes, steps) if steps and self.tokens_per_step else None

    @property
    def grows(self) -> bool:
        """Whether the batch grows during a run."""
        return bool(batch_settings(default_hyperparameters(self.script)))

    def tokens_in(self, steps: int) -> int:
        """Tokens of a run of `steps` steps whose schedule is as much shorter as the run."""
        tail = self.train_steps - self._sizes["scheduled_steps"] if self.grows else 0
        return tokens_after(self._sizes | {"scheduled_steps": steps - tail}, steps)

    @property
    def step_tokens_read(self) -> list[int]:
        """Tokens that each step of the script takes from the shards; see tokens_read."""
        ratio, known = self.read_ratio, default_hyperparameters(self.script)
        return [round(tokens * ratio)
                for tokens in itertools.islice(step_tokens(known), known["train_steps"])]

    @property
    def _sizes(self):
        known = default_hyperparameters(self.script)
        sizes = known | {"total_batch_size": self.tokens_per_step}
        if "scheduled_steps" in known:  # a record's other steps are other scheduled ones
            sizes["scheduled_steps"] += self.train_steps - known["train_steps"]
        return sizes

    @property
    def tokens_read(self) -> int | None:
        """Tokens that the first step takes from the shards: more than it trains on where it leaves
        some of them out."""
        return self.own.tokens_read or self.tokens_per_step

    @property
    def read_ratio(self) -> float:
        """Tokens that a step takes from the shards for each that it trains on."""
        return self.tokens_read / self.tokens_per_step if self.own.tokens_read else 1.0


@dataclass(frozen=True)
class Manifest:
    """All milestones, chain by chain, each chain in its order; `history` is the folder."""

    milestones: tuple[Milestone, ...]
    history: Path = HISTORY

    @cached_property
    def glossary(self) -> Glossary:
        """What hyperparameters.toml says of every hyperparameter. Raises as load_glossary."""
        return load_glossary(self.history / "hyperparameters.toml")

    @cached_property
    def records(self) -> dict[int, Record]:
        """{number: Record} of all public records. Raises as load_records."""
        return {r.number: r for r in load_records(self.history / "records.json")}

    def get(self, id: str) -> Milestone:
        """Return the milestone called `id`: "01", "1", "muon" and "01_muon" are the same one.

        Raises ManifestError, which names the nearest milestone, when there is none.
        """
        wanted = id.strip().lower()
        if wanted in self._names:
            return self._names[wanted]
        near = nearest(wanted, self._names)
        if near and ID.fullmatch(wanted) and _station(wanted) != _station(self._names[near].id):
            near = None
        hint = f"; did you mean {self._names[near].name}?" if near else ""
        if not wanted or Path(id).is_file():
            kind = "that is a file" if wanted else "the name is empty"
            hint = f": {kind}; --help says what can be named here"
        elif ID.fullmatch(wanted):
            hint += f" (there is no folder {_shown(self.history)}/*/{wanted}_*)"
        raise ManifestError(f'no milestone "{id}"{hint}')

    @cached_property
    def _names(self):
        """{what a milestone can be called: the milestone}."""
        names = {}
        for m in self.milestones:
            names |= {m.slug: m, re.sub(r"^0(?=\d)", "", m.id): m}
            names |= {name: m for old in m.formerly for name in (old, f"{m.id}_{old}")}
        for m in self.milestones:  # the exact names win over a slug that looks like another's id
            names |= {m.id: m, m.name: m}
        return names

    def of_chain(self, chain: str | None = None) -> "Manifest":
        """Return the manifest of one chain alone; of the first, where none is named."""
        chain = chain or self.milestones[0].chain
        return replace(self, milestones=tuple(m for m in self.milestones if m.chain == chain))

    def of_program(self, program: str) -> "Manifest":
        """Return the manifest of the milestones whose script has this name."""
        return replace(self, milestones=tuple(m for m in self.milestones if m.program == program))

    def children(self, id: str) -> tuple[Milestone, ...]:
        """Return the milestones whose parent is `id` (any name `get` takes), in order."""
        parent = self.get(id).id
        return tuple(m for m in self.milestones if m.parent == parent)

    def lineage(self, milestone: Milestone) -> list[Milestone]:
        """Return the milestone and its ancestors, up to its root."""
        line = [milestone]
        while line[-1].parent is not None:
            line.append(self._names[line[-1].parent])
        return line

    def descendants(self, milestone: Milestone) -> list[Milestone]:
        """Return the milestones that come from this one, in order."""
        return [m for m in self.milestones if milestone in self.lineage(m)[1:]]

    def borrowers(self, milestone: Milestone) -> list[Milestone]:
        """Return the roots that borrow blocks from this milestone or one that comes from it."""
        return [m for m in self.milestones
                if m.borrows and milestone in self.lineage(self.get(m.borrows.lender))]

    def learners_script(self, milestone: Milestone | None = None) -> Path:
        """Return where the learner's script that is to become `milestone` (None: one of the first
        chain) belongs: in train/, and in a folder of the chain's name there for every chain but the
        first."""
        first = self.milestones[0]
        milestone = milestone or first
        chain = "" if milestone.chain == first.chain else milestone.chain
        return REPOSITORY / "train" / chain / milestone.program

    def overrides(self, milestone: Milestone, scale: str) -> dict:
        """Return the hyperparameters, {name: value}, that run `milestone` at `scale`.

        "record" is the snapshot's own defaults, so {}. At "tiny" the glossary's values come first,
        and the [tiny] of every ancestor and of the milestone replace them, as far as the script has
        hyperparameters of these names. Raises ManifestError for an unknown scale or name.
        """
        if scale == "record":
            return {}
        if scale != "tiny":
            raise ManifestError(f'no scale "{scale}"; one of record, tiny')
        known = default_hyperparameters(milestone.script)
        return {k: v for k, v in self.inherited(milestone, "tiny").items() if k in known}

    def inherited(self, milestone: Milestone, table: str) -> dict:
        """Return the values of a table, "tiny" or "check", for a milestone: the glossary's, each
        replaced by that of the nearest ancestor (or the milestone itself) whose table has one.

        Raises ManifestError for a name that is not in the glossary, or text that is no number.
        """
        values = self.glossary.column(table)
        for m in reversed(self.lineage(milestone)):
            for name, value in getattr(m, table).items():
                if name not in self.glossary:
                    near = nearest(name, self.glossary)
                    raise ManifestError(
                        f'{_shown(m.folder)}/milestone.toml: [{table}] unknown hyperparameter'
                        f' "{name}"' + (f'; did you mean "{near}"?' if near else ""))
                if self.glossary[name].refuses(value):
                    raise ManifestError(f"{_shown(m.folder)}/milestone.toml: [{table}] {name} is"
                                        f" not a number: {value!r}")
            values |= getattr(m, table)
        return values


def _station(id):
    """The chain's letter and the station's number of an id: 05z and 5 are at one station."""
    return re.sub(r"^([a-z]?)0*(\d+).*", r"\1\2", id)


def slug_in(name: str) -> str | None:
    """Return today's slug of what a file calls a milestone: "muon" or, in older files, "01_muon".
    None for an id alone, because ids change and it may mean another milestone now."""
    if ID.fullmatch(name):
        return None
    whole = NAME.fullmatch(name)
    slug = whole[1] if whole else name
    today = {old: m.slug for m in load_manifest().milestones for old in m.formerly}
    return today.get(slug, slug)


@cache
def load_manifest(history: Path = HISTORY) -> Manifest:
    """Read and check a history/, once in a process; ManifestError, one line with file and key, for
    any fault."""
    try:
        records = {r.number: r for r in load_records(history / "records.json")}
        chains = {}
        inside = [path for chain in history.iterdir() if chain.is_dir()  # glob would skip what is
                  for folder in chain.iterdir() if folder.is_dir()  # unreadable
                  for path in folder.iterdir()]
        for folder in sorted({path.parent for path in inside
                              if path.name == "milestone.toml" or path.suffix == ".py"}):
            chain = chains.setdefault(folder.parent, [])
            try:
                chain.append(_milestone(folder, chain, records))
            except ValueError as error:  # what is not TOML, not UTF-8, or does not fit
                raise ValueError(f"{_shown(folder)}/milestone.toml: {error}") from None
        if not chains:
            raise ValueError(f"{_shown(history)}: there is no milestone in it")
        ordered = sorted(chains.values(), key=lambda chain: chain[0].id)
        milestones = tuple(m for chain in ordered for m in chain)
        for key in ("id", "slug"):
            first = {}
            for m in milestones:
                other = first.setdefault(getattr(m, key), m)
                if other is not m:
                    raise ValueError(f"{_shown(m.folder)}: duplicate {key} \"{getattr(m, key)}\","
                                     f" as in {_shown(other.folder)}")
        for m in milestones:
            if m.borrows and m.borrows.lender not in {other.id for other in milestones}:
                raise ValueError(f"{_shown(m.folder)}/milestone.toml: borrows from"
                                 f' "{m.borrows.lender}", which does not exist')
    except OSError as error:
        raise ManifestError(f"{_shown(error.filename)}: {error.strerror}") from None
    except ValueError as error:
        raise ManifestError(str(error)) from None
    return Manifest(milestones, history)


def _milestone(folder, before, records):
    """The Milestone of a folder; before: those before it in its chain. ValueError for a fault."""
    if not NAME.fullmatch(folder.name):
        raise ValueError("its folder's name must be an id and a slug, such as 05a_window_warmup,"
                         f" not {folder.name}")
    scripts = sorted(set(folder.glob("*.py")) - {folder / HANDLES, folder / FIGURE})
    if len(scripts) != 1:
        names = ", ".join(script.name for script in scripts) or "none"
        raise ValueError(f"its folder must hold one script, not {names}")
    table = tomllib.loads((folder / "milestone.toml").read_text(encoding="utf-8-sig"))
    for key in (key for key in DERIVED if key in table):
        raise ValueError(f"{key} follows from {DERIVED[key]}; leave it out")
    keys = {f.name for f in fields(Figures)}
    own = build("", Figures, {key: table.pop(key) for key in keys & table.keys()})
    declared = build("", Declared, table)
    claimed = build("claimed: ", Claimed, declared.claimed) if declared.claimed else None
    successions = tuple(build(f"succession {number}: ", Succession, entry)
                        for number, entry in enumerate(declared.succession, start=1))
    parent = _parent(declared.parent, before, folder.parent)
    if parent and declared.parameters == parent.parameters is not None:
        raise ValueError(f"parameters = {declared.parameters} follows from the parent; leave it"
                         " out")
    if parent and not declared.changes:
        raise ValueError('missing key "changes"')
    if not parent and declared.changes:
        missing = "" if before else "; if it is none, the folder before it is missing"
        raise ValueError(f"changes: a root has none{missing}")
    named = [("exercises", name) for name in declared.exercises]
    named += [("succession", name) for pair in successions for name in (pair.block, pair.by)]
    named += [("shows", declared.shows)] if declared.shows and parent else []  # a root shows any
    for key, name in named:
        if name not in declared.changes:
            raise ValueError(f'{key}: "{name}" is none of its changes')
    if parent and declared.borrows:
        raise ValueError("borrows: only a root borrows blocks")
    borrows = declared.borrows and Borrowed(
        declared.borrows["from"], tuple(declared.borrows["blocks"]))
    part = [declared.part_of] if declared.part_of else []
    covered = [_record("part_of", number, records) for number in part]
    covered += [_record("records", number, records) for number in declared.records]
    record = covered[-1] if declared.records else None
    if declared.figures_of is not None:
        other = None if declared.figures_of == NONE else _record(
            "figures_of", declared.figures_of, records)
        if other == record:
            raise ValueError("figures_of follows from records; leave it out")
        record = other
    derived = Milestone(
        **{**vars(declared), "parent": parent and parent.id, "claimed": claimed,
           "borrows": borrows, "incomparable": read_incomparable(declared.incomparable),
           "effect": read_effects(declared.effect), "succession": successions,
           "parameters": declared.parameters or (parent and parent.parameters)},
        script=scripts[0], record=record, covered=tuple(covered), own=Figures())
    for key in ("minutes", "date", "authors"):  # the others follow from the script: a test compares
        value = getattr(own, key)
        if value is not None and value == getattr(derived, key):
            raise ValueError(f"{key} = {value!r} follows from the record; leave it out")
    return replace(derived, own=own)


def _parent(declared, before, chain):
    """The parent, one of the milestones before it in its chain (a folder), or None for a root."""
    usual = before[-1] if before else None
    if declared is None:
        return usual
    if declared == NONE and usual:
        return None
    if declared == (usual.id if usual else NONE):
        raise ValueError("parent follows from the folder before it; leave it out")
    for m in before:
        if m.id == declared:
            return m
    fault = "comes after it"
    if not any(chain.glob(f"{declared}_*")):
        fault = f"is missing: there is no folder {_shown(chain)}/{declared}_*"
    raise ValueError(f'parent "{declared}" {fault}; it must be a folder before this one')


def _record(key, number, records):
    if number not in records:
        raise ValueError(f"{key}: records.json has no record {number}")
    return records[number]


def _shown(path):
    """A path inside the repository, or absolute."""
    path = Path(path)
    return (path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path).as_posix()
