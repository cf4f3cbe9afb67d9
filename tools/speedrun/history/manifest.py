"""Read and check history/milestones.toml, the one list that every tool and test works from.

Standard library only, so that a command can answer --help before anything heavy is imported.
"""

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from speedrun.base.errors import UserError
from speedrun.history.schema import Counts, Curve, Day, Texts, build, check_keys, is_list, nearest

REPOSITORY = Path(__file__).resolve().parents[3]
MANIFEST = REPOSITORY / "history" / "milestones.toml"
KINDS = ("optimizer", "architecture", "data", "systems")


class ManifestError(UserError):
    """What is wrong in the manifest, or which milestone does not exist."""


@dataclass(frozen=True)
class Budget:
    """How large a snapshot and its diff may be; a root has no diff, so only `lines`."""

    lines: int
    diff_lines: int | None = None
    diff_blocks: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Milestone:
    """One `[[milestone]]` entry; milestones.toml explains the keys. None means "not recorded".

    The fields are also the schema: their types are checked, and no default means required.
    """

    id: str
    slug: str
    title: str
    idea: str
    kind: str
    written: bool
    parent: str | None = None
    chain: str = ""
    program: str = ""
    changes: Texts = ()
    records: Counts = ()
    minutes: float | None = None
    date: Day | None = None
    authors: Texts = ()
    source: Texts = ()
    val_loss: float | None = None
    train_steps: int | None = None
    tokens_per_step: int | None = None
    tokens_read: int | None = None
    step_avg_ms: float | None = None
    peak_memory_mib: int | None = None
    parameters: int | None = None
    curve: Curve = ()
    besides: Texts = ()
    lesson: str | None = None
    budget: Budget | None = None
    tiny: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Folder name, `<id>_<slug>`."""
        return f"{self.id}_{self.slug}"

    @property
    def read_ratio(self) -> float:
        """Tokens that a step takes from the shards for each that it trains on."""
        return self.tokens_read / self.tokens_per_step if self.tokens_read else 1.0

    @property
    def script(self) -> Path:
        """Absolute path of the snapshot; the file exists when `written` is true."""
        return REPOSITORY / "history" / self.name / self.program


@dataclass(frozen=True)
class Manifest:
    """All milestones in file order, and the overrides of every scale smaller than the record's."""

    milestones: tuple[Milestone, ...]
    scales: dict[str, dict]

    def get(self, id: str) -> Milestone:
        """Return the milestone called `id`: "01", "1", "muon" and "01_muon" are the same one.

        Raises ManifestError, which names the nearest milestone, when there is none.
        """
        names = {}
        for m in self.milestones:
            names |= {m.slug: m, m.id.lstrip("0") or "0": m}
        for m in self.milestones:  # the exact names win over a slug that looks like another's id
            names |= {m.id: m, m.name: m}
        wanted = id.strip().lower()
        if wanted in names:
            return names[wanted]
        near = nearest(wanted, names)
        hint = f"; did you mean {names[near].name}?" if near else ""
        raise ManifestError(f'no milestone "{id}"{hint}')

    def written(self) -> tuple[Milestone, ...]:
        """Return the milestones whose snapshot is in the repository, in file order."""
        return tuple(m for m in self.milestones if m.written)

    def children(self, id: str) -> tuple[Milestone, ...]:
        """Return the milestones whose parent is `id` (any name `get` takes), in file order."""
        parent = self.get(id).id
        return tuple(m for m in self.milestones if m.parent == parent)

    def lineage(self, milestone: Milestone) -> list[Milestone]:
        """Return the milestone and its ancestors, up to the root of its chain."""
        line = [milestone]
        while line[-1].parent is not None:
            line.append(self.get(line[-1].parent))
        return line

    def of_chain(self, chain: str | None = None) -> tuple[Milestone, ...]:
        """Return the written milestones of a chain (None: the first one), the root first."""
        chain = chain or self.milestones[0].chain
        return tuple(m for m in self.written() if m.chain == chain)

    def learners_script(self, chain: str | None = None) -> Path:
        """Return where the learner's script of a chain (None: the first one) belongs: in train/,
        and in a folder of the chain's name there for every chain but the first."""
        root, first = self.of_chain(chain)[0], self.milestones[0].chain
        return REPOSITORY / "train" / ("" if root.chain == first else root.chain) / root.program

    def overrides(self, milestone: Milestone, scale: str) -> dict:
        """Return the hyperparameters, {name: value}, that run `milestone` at `scale`.

        "record" is the snapshot's own defaults, so {}. Elsewhere the scale's common values come
        first and the milestone's own replace them; a length of training sequences replaces that of
        all. Raises ManifestError for an unknown scale.
        """
        if scale == "record":
            return {}
        if scale not in self.scales:
            known = ", ".join(["record", *self.scales])
            raise ManifestError(f'no scale "{scale}"; one of {known}')
        values = {**self.scales[scale], **getattr(milestone, scale)}
        if "train_seq_len" in values:
            values.pop("seq_len", None)
        return values


@dataclass(frozen=True)
class _Scales:
    tiny: dict = field(default_factory=dict)


def load_manifest(path: Path = MANIFEST) -> Manifest:
    """Read and validate a manifest; ManifestError, one line, for any fault in the file."""
    try:
        return _manifest(Path(path).read_bytes())
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # what is not TOML, not UTF-8, or does not fit
        raise ManifestError(f"{Path(path).name}: {error}") from None


@cache  # a command asks for the manifest in many places, and building it takes long
def _manifest(content: bytes) -> Manifest:
    raw = tomllib.loads(content.decode("utf-8"))
    check_keys("the file", raw, {"milestone", "scales"}, {"milestone", "scales"})
    scales = vars(build("scales", _Scales, raw["scales"]))
    if not is_list(raw["milestone"], lambda entry: isinstance(entry, dict)):
        raise ValueError("milestones are written as [[milestone]], with two brackets")
    milestones = [_milestone(i, entry) for i, entry in enumerate(raw["milestone"], start=1)]
    for key in ("id", "slug"):
        values = [getattr(m, key) for m in milestones]
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f'duplicate {key} "{value}"')
    return Manifest(_with_chains(milestones), scales)


def _with_chains(milestones):
    """The milestones with the chain and the program of their roots, which alone declare them."""
    of_id, chains = {m.id: m for m in milestones}, set()
    for m in milestones:
        if m.parent is not None and m.parent not in of_id:
            raise ValueError(f'milestone "{m.id}": parent "{m.parent}" does not exist')
    try:
        graph = TopologicalSorter({m.id: [m.parent] if m.parent else [] for m in milestones})
        parents_first = list(graph.static_order())
    except CycleError as error:
        raise ValueError("parents form a cycle: " + " -> ".join(error.args[1])) from None
    for id in parents_first:
        m, parent = of_id[id], of_id.get(of_id[id].parent)
        for key in ("chain", "program"):
            if parent is None and not getattr(m, key):
                raise ValueError(f'milestone "{id}": missing key "{key}"')
            if parent is not None and getattr(m, key):
                raise ValueError(f'milestone "{id}": "{key}" is that of its root')
        if parent is not None:
            of_id[id] = replace(m, chain=parent.chain, program=parent.program)
        elif m.chain in chains:
            raise ValueError(f'milestone "{id}": chain "{m.chain}" has a root already')
        else:
            chains.add(m.chain)
    return tuple(of_id.values())


def _milestone(number: int, entry: dict) -> Milestone:
    where = f'milestone "{entry.get("id", f"number {number}")}"'
    milestone = build(where, Milestone, entry)
    if milestone.kind not in KINDS:
        raise ValueError(f'{where}: unknown kind "{milestone.kind}"; one of {", ".join(KINDS)}')
    if milestone.written:
        check_keys(where, entry, set(entry), {"changes", "budget"})
    return milestone
