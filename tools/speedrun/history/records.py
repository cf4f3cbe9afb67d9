"""Read history/records.json: every record of the public list, as figures."""

import json
from dataclasses import dataclass
from pathlib import Path

from speedrun.history.manifest import REPOSITORY
from speedrun.history.schema import Day, Tables, Texts, build, is_list

RECORDS = REPOSITORY / "history" / "records.json"


@dataclass(frozen=True)
class Record:
    """One record: official minutes on 8 H100 GPUs, ISO date, what was new, who set it.

    `retimed` holds later timings of the same record, {minutes, date, why}, which are not records.
    """

    number: int
    minutes: float
    date: Day
    what: str
    people: Texts
    retimed: Tables = ()


def load_records(path: Path = RECORDS) -> tuple[Record, ...]:
    """Return the records in the order of the file at `path`.

    Raises ValueError, one line, for an entry that does not fit, OSError for an unreadable file.
    """
    name = Path(path).name
    entries = json.loads(Path(path).read_text(encoding="utf-8"))
    if not is_list(entries, lambda entry: isinstance(entry, dict)):
        raise ValueError(f"{name}: must be a list of records")
    return tuple(build(f"{name}: record {i}", Record, e) for i, e in enumerate(entries, start=1))
