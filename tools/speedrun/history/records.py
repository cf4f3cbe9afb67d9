"""Read history/records.json: every record of the public list, as figures."""

import json
from dataclasses import dataclass
from pathlib import Path

from speedrun.base.files import REPOSITORY
from speedrun.history.schema import Day, Tables, Texts, build

RECORDS = REPOSITORY / "history" / "records.json"


@dataclass(frozen=True)
class Record:
    """One record: official minutes on 8 H100 GPUs, ISO date, what was new, who set it, and its
    folder below records/track_1_short/ of KellerJordan/modded-nanogpt, if it has one.

    `retimed` holds later timings of the same record, {minutes, date, why, source}, which are no
    records.
    """

    number: int
    minutes: float
    date: Day
    what: str
    people: Texts
    source: str | None = None
    retimed: Tables = ()


def load_records(path: Path = RECORDS) -> tuple[Record, ...]:
    """Return the records in the order of the file at `path`.

    Raises ValueError, one line, for an entry that does not fit, OSError for an unreadable file.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{name}: must be a list of records")
    return tuple(build(f"{name}: record {i}: ", Record, e) for i, e in enumerate(entries, start=1))
