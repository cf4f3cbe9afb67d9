"""The generated tables and pictures: what each is made from, and whether it is fresh."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.files import replace_file
from speedrun.compare.results import Comparison
from speedrun.figures import (
    attention_cost,
    causes,
    charts,
    ladder,
    measured,
    one_gpu,
    outside,
    predictions,
    prelude,
    readme,
    tables,
    why,
)
from speedrun.history.carries_over import CARRIES_OVER, Outside, load_outside
from speedrun.history.manifest import Manifest, load_manifest
from speedrun.history.measured import Measurement, load_measurements
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.history.records import Record, load_records
from speedrun.history.why import load_why

RESULTS, TINY, PREDICTIONS = "history/results", "tiny.jsonl", "predictions.json"
TIMINGS = {
    "timings": ("prelude_added.json", "prelude_taken_out.json"),  # gains added, then taken out
    "finetune_timings": ("encore_finetune.json",),
    "race": ("optimizers.json",),
}


@dataclass(frozen=True)
class Sources:
    """What everything is made from: the milestones of all chains and of the first, the records,
    what others found, and what history/results/ and history/measured/ hold, None where that is
    missing or unreadable."""

    history: Manifest
    manifest: Manifest
    records: tuple[Record, ...]
    ladder: Comparison | None
    predictions: dict[str, StoredPrediction] | None
    timings: tuple[prelude.Timings, prelude.Timings] | None
    finetune_timings: tuple[prelude.Timings] | None
    race: tuple[prelude.Timings] | None
    prelude: Manifest
    encore: Manifest
    prelude_ladder: Comparison | None
    measured: tuple[Measurement, ...] | None
    outside: Outside | None
    one_h100: one_gpu.Log


@dataclass(frozen=True)
class Table:
    """A table between the markers called `name` in `file`, a path inside the repository; needs: the
    source without which it stays as it is."""

    file: str
    name: str
    make: Callable[[Sources], str]
    needs: str = "manifest"


@dataclass(frozen=True)
class Picture:
    """An SVG; file and needs: as of a table; caption: what it says below its axes."""

    file: str
    caption: str
    make: Callable[[Sources], charts.Chart]
    needs: str = "manifest"


# To add a table, write markers into the file that shows it and a line in here.
TABLES = (
    Table("README.md", "claim", lambda s: readme.claim(s.manifest, s.records)),
    Table("README.md", "stations", lambda s: readme.station_table(s.manifest)),
    Table("README.md", "excerpt", lambda s: readme.excerpt(s.manifest)),
    Table("history/README.md", "milestones", lambda s: tables.milestone_table(s.manifest)),
    Table("history/README.md", "saved", lambda s: tables.saved_table(s.manifest)),
    Table("history/README.md", "public", lambda s: tables.public_table(s.manifest)),
    Table("history/prelude/README.md", "rungs", lambda s: tables.rung_table(s.prelude)),
    Table("history/prelude/README.md", "counted", lambda s: prelude.counted_table(
        s.predictions, s.prelude), needs="predictions"),
    Table("history/prelude/README.md", "timed", lambda s: prelude.timing_table(
        *s.timings, s.prelude), needs="timings"),
    Table("history/prelude/README.md", "tiny", lambda s: ladder.ladder_table(
        s.prelude_ladder, s.prelude), needs="prelude_ladder"),
    Table("history/prelude/README.md", "claims", lambda s: prelude.claims_table(
        s.prelude, s.measured), needs="measured"),
    Table("history/encore/README.md", "finetune", lambda s: tables.rung_table(
        s.encore.of_program("finetune.py"))),
    Table("history/encore/README.md", "timed", lambda s: prelude.speed_table(
        *s.finetune_timings, s.encore.of_program("finetune.py")), needs="finetune_timings"),
    Table("history/encore/README.md", "generate", lambda s: tables.rung_table(
        s.encore.of_program("generate.py"))),
    Table("history/encore/README.md", "stated", lambda s: tables.stated_table(s.encore)),
    Table("history/README.md", "memory", lambda s: predictions.memory_table(
        s.predictions, s.manifest), needs="predictions"),
    Table("history/README.md", "one-gpu", lambda s: one_gpu.one_gpu_table(
        s.predictions, s.manifest, s.one_h100), needs="predictions"),
    Table("history/README.md", "tiny", lambda s: ladder.ladder_table(s.ladder, s.manifest),
          needs="ladder"),
    Table("history/measured/README.md", "measured", lambda s: measured.measured_table(
        s.measured, s.predictions or {}, s.history), needs="measured"),
    Table("history/README.md", "attention", lambda s: attention_cost.attention_table(s.manifest)),
    Table("history/README.md", "records", lambda s: tables.record_table(s.records, s.manifest)),
    Table("lessons/README.md", "lessons", lambda s: tables.lesson_table(
        (*s.manifest.milestones, *s.prelude.milestones, *s.encore.milestones), "lessons")),
    Table("lessons/carries_over.md", "ideas", lambda s: outside.idea_table(s.outside, s.history),
          needs="outside"),
    Table("lessons/carries_over.md", "settings", lambda s: outside.setting_table(s.outside),
          needs="outside"),
    Table("lessons/carries_over.md", "findings", lambda s: outside.finding_sections(
        s.outside, s.history), needs="outside"),
    Table("history/after.md", "race", lambda s: outside.race_table(*s.race), needs="race"),
    Table("data/README.md", "shards", lambda s: tables.shard_table(s.manifest)),
)
PICTURES = (
    Picture("history/records.svg", "Minutes to 3.28 validation loss on eight H100s (logarithmic). "
            "Orange: records that a script here retells; large: stations.",
            lambda s: charts.record_chart(s.records, s.manifest, charts.FILE)),
    Picture("history/causes.svg", "Times less time for this reason (logarithmic); left of 1: "
            "more time.",
            lambda s: charts.causes_chart(causes.causes(s.manifest), charts.FILE)),
    Picture("history/tiny.svg", "Final validation loss. Grey: single runs; orange: the mean of a "
            "milestone's.", lambda s: charts.ladder_chart(s.ladder, s.manifest, charts.FILE),
            needs="ladder"),
)


def update(root: Path, check: bool) -> tuple[list[str], list[str]]:
    """Bring all tables and pictures under `root` up to date, or only look if `check` is set; also
    the figure of each why.md, and why.md's text in its lesson.

    Returns (stale, errors), a line for each: what was stale, and what no rewriting can fix.
    Raises UserError, ValueError or OSError when the manifest or the records cannot be read.
    """
    sources, errors = _read_sources(root)
    stale = []
    for table in TABLES:
        if getattr(sources, table.needs) is None:
            continue
        path = root / table.file
        try:
            old = path.read_text(encoding="utf-8")
            new = tables.replace_between(old, table.name, table.make(sources))
        except FileNotFoundError:
            errors.append(f"{table.file}: the file is missing")
            continue
        except ValueError as error:
            errors.append(f"{table.file}: {error}")
            continue
        if new != old:
            stale.append(f"{table.file}: table {table.name}")
            if not check:
                replace_file(path, new.encode())
    for picture in PICTURES:
        if getattr(sources, picture.needs) is None:
            continue
        path = root / picture.file
        drawn = charts.as_file(picture.make(sources), picture.caption,
                               lambda m: f"{m.chain}/{m.name}/{m.program}")
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(picture.file)
            if not check:
                replace_file(path, drawn.encode())
    for milestone in sources.history.milestones:
        try:
            part = load_why(milestone)
            files = why.made_of(part, milestone, root) if part else {}
        except (ValueError, OSError) as error:
            errors.append(f"{milestone.name}: {error}")
            continue
        for path, text in files.items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(path.relative_to(root).as_posix())
                if not check:
                    replace_file(path, text.encode())
    return stale, errors


def _read_sources(root):
    """The Sources under `root`, and a line for each of the results that has to be made again."""
    history = load_manifest(root / "history")
    manifest, prelude_chain = history.of_chain(), history.of_chain("prelude")
    records = load_records(root / "history" / "records.json")
    found, errors = {}, []
    for field, name, option, load, stale_entries in (
            ("ladder", TINY, "--tiny", lambda path: ladder.load_ladder(path, history),
             ladder.stale_entries),
            ("predictions", PREDICTIONS, "--predict", load_predictions, predictions.stale_entries)):
        remedy = f"make it again: python tools/make_figures.py {option}"
        try:
            found[field] = load(root / RESULTS / name)
            faults = stale_entries(found[field], history)
        except FileNotFoundError:
            faults = ["the file is missing"]
        except (ValueError, OSError) as error:
            faults = [str(error).removeprefix(f"{name}: ")]
            remedy = f"git restore {RESULTS}/{name}"
        errors += [f"{RESULTS}/{name}: {fault}; {remedy}" for fault in faults]
    for field, names in TIMINGS.items():
        timings = []
        for name in names:
            try:
                timings.append(one := prelude.load_timings(root / RESULTS / name))
                faults = [f"{fault}; make it again: {one.command}"
                          for fault in prelude.stale_timings(one, history)]
            except (ValueError, OSError) as error:
                faults = [str(error)]
            errors += [f"{RESULTS}/{name}: {fault}" for fault in faults]
        found[field] = tuple(timings) if len(timings) == len(names) else None
    try:
        found["measured"] = load_measurements(root / "history" / "measured")
    except (ValueError, OSError) as error:
        errors.append(f"history/measured/{error}")
    def in_chain(chain):
        """The ladder of one chain, which is compared with its own first milestone; None without."""
        ladder_of = found.get("ladder") and ladder.load_ladder(root / RESULTS / TINY, chain)
        return ladder_of if ladder_of and ladder_of.entries else None

    return Sources(history, manifest, records, in_chain(manifest), found.get("predictions"),
                   found["timings"], found["finetune_timings"], found["race"], prelude_chain,
                   history.of_chain("encore"), in_chain(prelude_chain),
                   found.get("measured"),
                   load_outside(root / "history" / CARRIES_OVER.name),
                   one_gpu.load_log(root / "history" / "one_h100.toml")), errors
