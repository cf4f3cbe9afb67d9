"""Rewrite every generated table and picture of the repository, or check that none is stale.

    python tools/make_figures.py            rewrite what is stale
    python tools/make_figures.py --check    change nothing; exit 1 with a line per stale item
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speedrun import figures, tables
from speedrun.manifest import REPOSITORY, Manifest, load_manifest
from speedrun.records import Record, load_records


@dataclass(frozen=True)
class Table:
    """A table between the markers called `name` in `file`, a path inside the repository."""

    file: str
    name: str
    make: Callable[[Manifest, tuple[Record, ...]], str]


# To generate one more table: put the two markers into the file and a line in here.
TABLES = (
    Table("README.md", "milestones", lambda m, r: tables.milestone_table(
        m, folder="history/", written_only=True)),
    Table("history/README.md", "milestones", lambda m, r: tables.milestone_table(m)),
    Table("history/README.md", "records", lambda m, r: tables.record_table(r, m)),
    Table("data/README.md", "shards", lambda m, r: tables.shard_table(m)),
)
PICTURE = "history/records.png"


def update(root: Path, check: bool) -> tuple[list[str], list[str]]:
    """Bring all tables and the picture under `root` up to date, or only look if `check` is set.

    Returns (stale, errors), a line for each: what was stale, and what could not be looked at.
    Raises ValueError or OSError when the manifest or the records cannot be read.
    """
    manifest = load_manifest(root / "history" / "milestones.toml")
    records = load_records(root / "history" / "records.json")
    stale, errors = [], []
    for table in TABLES:
        path = root / table.file
        try:
            old = path.read_text(encoding="utf-8")
            new = tables.replace_between(old, table.name, table.make(manifest, records))
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
    picture = root / PICTURE
    shown = figures.stored_hash(picture) if picture.exists() else None
    if shown != figures.data_hash(records, manifest):
        stale.append(PICTURE)
        if not check:
            figures.draw_records(records, manifest, picture)
    return stale, errors


def main(argv: list[str] | None = None, root: Path = REPOSITORY) -> int:
    """Run the command with the arguments `argv`; return its exit code."""
    parser = argparse.ArgumentParser(
        description="Rewrite every generated table and picture of the repository."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 with a line per stale item"
    )
    args = parser.parse_args(argv)
    try:
        stale, errors = update(root, args.check)
    except (ValueError, OSError) as error:
        stale, errors = [], [str(error)]
    for item in stale:
        print(f"stale: {item}" if args.check else f"wrote: {item}")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if args.check and stale:
        print("run: python tools/make_figures.py", file=sys.stderr)
    return 1 if errors or (args.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
