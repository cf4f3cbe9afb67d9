"""Read history/carries_over.toml: what others found when they tried the ideas elsewhere."""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from speedrun.base.files import REPOSITORY
from speedrun.history.schema import Day, Tables, Texts, build, check_keys

CARRIES_OVER = REPOSITORY / "history" / "carries_over.toml"
VERDICTS = ("helps", "none", "hurts", "unclear", "unknown")
DATE = re.compile(r"20\d\d(-(0[1-9]|1[0-2])(-([0-2]\d|3[01]))?)?")
ADDRESS = re.compile(
    r"https://(arxiv\.org/abs/\d{4}\.\d{5}"
    r"|github\.com/[\w.-]+/[\w.-]+(/(issues|pull)/\d+|/blob/[0-9a-f]{7,40}/[\w./-]+\.md)?)")


@dataclass(frozen=True)
class Setting:
    """A setting that several findings share: a name, what is trained and judged there, and an
    address."""

    who: str
    what: str
    url: str


@dataclass(frozen=True)
class Finding:
    """One result of others: where, on what size and tokens, what came of it, and a verdict on this
    result alone. of: whether another form of the idea was tested, or its proposers tested it; read:
    how much of the source was read, if not the passage itself."""

    who: str
    what: str
    effect: str
    verdict: Literal["helps", "none", "hurts", "unclear", "unknown"]
    date: str
    url: str
    size: str
    tokens: str | None = None
    of: Literal["a relative", "its proposers"] | None = None
    read: Literal["abstract"] | None = None
    setting: str | None = None


@dataclass(frozen=True)
class Idea:
    """An idea, the ids of the milestones that bring it, what is unknown about it, and its findings:
    tables in the file, Findings once they are read."""

    name: str
    milestones: Texts
    unknown: str | None = None
    finding: Tables = ()

    def by_verdict(self) -> dict[str, list[Finding]]:
        """{verdict: findings} of the verdicts that occur, in the order of VERDICTS."""
        found = {v: [f for f in self.finding if f.verdict == v] for v in VERDICTS}
        return {verdict: findings for verdict, findings in found.items() if findings}


@dataclass(frozen=True)
class Outside:
    """All that the file holds; as_of: the day on which its addresses were last read."""

    as_of: Day
    settings: dict[str, Setting]
    ideas: tuple[Idea, ...]

    def of(self, id: str) -> list[Idea]:
        """The ideas of a milestone, by its id."""
        return [idea for idea in self.ideas if id in idea.milestones]


def load_outside(path: Path = CARRIES_OVER) -> Outside:
    """Return what the file at `path` holds, in its order; nothing if there is no such file.

    Raises ValueError, one line, for an entry that does not fit.
    """
    name = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        return Outside("", {}, ())
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    check_keys(f"{name}: ", table, ("as_of", "setting", "idea"), ("as_of", "setting", "idea"))
    settings = {key: build(f"{name}: setting {key}: ", Setting, found)
                for key, found in table["setting"].items()}
    for key, setting in settings.items():
        _check(f"{name}: setting {key}: ", "url", setting.url, ADDRESS)
    ideas = []
    for entry in table["idea"]:
        where = f"{name}: {entry.get('name', 'an idea')}: "
        idea = build(where, Idea, entry)
        idea = replace(idea, finding=tuple(_finding(where, f, settings) for f in idea.finding))
        if not idea.finding and not idea.unknown:
            raise ValueError(f'{where}give a finding, or say in "unknown" what was not found')
        if idea.name in {other.name for other in ideas}:
            raise ValueError(f"{where}there are two ideas of this name")
        ideas.append(idea)
    return Outside(table["as_of"], settings, tuple(ideas))


def _finding(where, table, settings):
    """The Finding of a table, in which `setting` may stand for who, what and url."""
    key = table.get("setting")
    if key is not None:
        if key not in settings:
            raise ValueError(f'{where}there is no setting "{key}"')
        if {"who", "what"} & table.keys():
            raise ValueError(f'{where}a finding has either "setting" or "who" and "what"')
        shared = settings[key]
        table = {"who": shared.who, "what": shared.what, "url": shared.url, **table}
    found = build(f"{where}finding: ", Finding, table)
    where = f"{where}{found.who}, {found.date}: "
    _check(where, "url", found.url, ADDRESS)
    _check(where, "date", found.date, DATE)
    return found


def _check(where, key, value, pattern):
    if not pattern.fullmatch(value):
        raise ValueError(f'{where}"{key}" has not the form that is needed: {value}')
