#!/usr/bin/env python3
"""Rewrite every generated table and picture of the repository, or check that none is stale.

    python tools/make_figures.py              rewrite what is stale
    python tools/make_figures.py --check      change nothing; exit 1 with a line per stale item
    python tools/make_figures.py --predict    first predict again what is stale, minutes for each
    python tools/make_figures.py --tiny       first run again what is stale at tiny scale, likewise
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.cli import Parser, run_command
from speedrun.compare import plot
from speedrun.compare.results import Comparison
from speedrun.figures import (
    attention_cost,
    causes,
    ladder,
    predictions,
    readme,
    records_plot,
    tables,
)
from speedrun.history.manifest import REPOSITORY, Manifest, load_manifest
from speedrun.history.predictions import StoredPrediction, load_predictions
from speedrun.history.records import Record, load_records

RESULTS, TINY, PREDICTIONS = "history/results", "tiny.jsonl", "predictions.json"


@dataclass(frozen=True)
class Sources:
    """What everything is made from: the milestones and records of history/, and what
    history/results/ holds.

    Without one of the results its source is None: what is made from it stays as it is.
    """

    manifest: Manifest
    records: tuple[Record, ...]
    ladder: Comparison | None
    predictions: dict[str, StoredPrediction] | None


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
    """A PNG that holds the hash of its data; `file` is a path inside the repository; needs: as of
    a table."""

    file: str
    hash: Callable[[Sources], str]
    draw: Callable[[Sources, Path], None]
    needs: str = "manifest"


# To generate one more table: put the two markers into the file and a line in here.
TABLES = (
    Table("README.md", "claim", lambda s: readme.claim(s.manifest, s.records)),
    Table("README.md", "stations", lambda s: readme.station_table(s.manifest)),
    Table("README.md", "excerpt", lambda s: readme.excerpt(s.manifest)),
    Table("history/README.md", "milestones", lambda s: tables.milestone_table(s.manifest)),
    Table("history/README.md", "memory", lambda s: predictions.memory_table(
        s.predictions, s.manifest), needs="predictions"),
    Table("history/README.md", "tiny", lambda s: ladder.ladder_table(s.ladder, s.manifest),
          needs="ladder"),
    Table("history/README.md", "predictions", lambda s: predictions.official_table(
        s.predictions, s.manifest), needs="predictions"),
    Table("history/README.md", "attention", lambda s: attention_cost.attention_table(s.manifest)),
    Table("history/README.md", "records", lambda s: tables.record_table(s.records, s.manifest)),
    Table("lessons/README.md", "lessons", lambda s: tables.lesson_table(s.manifest, "lessons")),
    Table("data/README.md", "shards", lambda s: tables.shard_table(s.manifest)),
)
PICTURES = (
    Picture("history/records.png", lambda s: records_plot.data_hash(s.records, s.manifest),
            lambda s, path: records_plot.draw_records(s.records, s.manifest, path)),
    Picture("history/causes.png", lambda s: causes.data_hash(s.manifest),
            lambda s, path: causes.draw_causes(s.manifest, path)),
    Picture("history/tiny.png", lambda s: plot.data_hash(s.ladder, {}),
            lambda s, path: ladder.draw_ladder(s.ladder, path), needs="ladder"),
)


def update(root: Path, check: bool) -> tuple[list[str], list[str]]:
    """Bring all tables and pictures under `root` up to date, or only look if `check` is set.

    Returns (stale, errors), a line for each: what was stale, and what no rewriting can mend.
    Raises UserError, ValueError or OSError when the manifest or the records cannot be read.
    """
    manifest = load_manifest(root / "history")
    records = load_records(root / "history" / "records.json")
    stale, errors = [], []

    def read(name, option, load, stale_entries):
        try:
            source = load(root / RESULTS / name)
            faults = stale_entries(source, manifest)
        except FileNotFoundError:
            source, faults = None, ["the file is missing"]
        except (ValueError, OSError) as error:
            source, faults = None, [str(error)]
        errors.extend(f"{RESULTS}/{name}: {line}; make it again: python tools/make_figures.py "
                      f"{option}" for line in faults)
        return source

    sources = Sources(
        manifest, records,
        read(TINY, "--tiny", lambda path: ladder.load_ladder(path, manifest), ladder.stale_entries),
        read(PREDICTIONS, "--predict", load_predictions, predictions.stale_entries))
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
                path.write_text(new, encoding="utf-8")
    for picture in PICTURES:
        if getattr(sources, picture.needs) is None:
            continue
        path = root / picture.file
        if records_plot.stored_hash(path) != picture.hash(sources):
            stale.append(picture.file)
            if not check:
                picture.draw(sources, path)
    return stale, errors


def main(argv: list[str] | None = None, root: Path = REPOSITORY) -> int:
    """Run the command with the arguments `argv`; return its exit code."""
    parser = Parser(description="Rewrite every generated table and picture of the repository.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 with a line per stale item"
    )
    way.add_argument(
        "--predict", action="store_true", help="first predict the milestones whose scripts have "
        f"changed, for {RESULTS}/{PREDICTIONS}: minutes for each"
    )
    way.add_argument(
        "--tiny", action="store_true", help="first run the milestones whose scripts or tiny values "
        f"have changed, for {RESULTS}/{TINY}: three runs of a minute or two each (one of a systems "
        "step with its parent's losses)"
    )
    args = parser.parse_args(argv)
    if args.predict:
        predictions.predict_stale(root / RESULTS / PREDICTIONS)
    if args.tiny:
        ladder.run_stale(root / RESULTS / TINY, load_manifest(root / "history"), sys.stdout)
    stale, errors = update(root, args.check)
    for item in stale:
        print(f"stale: {item}" if args.check else f"wrote: {item}")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if args.check and stale:
        print("run: python tools/make_figures.py", file=sys.stderr)
    return 1 if errors or (args.check and stale) else 0


if __name__ == "__main__":
    run_command(main, ValueError)
