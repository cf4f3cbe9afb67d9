"""Turn a parsed TOML or JSON table into a dataclass whose annotations are the schema."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from datetime import date
from functools import cache
from typing import Annotated, Literal, get_args, get_origin

Day = Annotated[str, "YYYY-MM-DD"]
Text = Annotated[str, "perhaps empty"]
Texts = tuple[str, ...]
Counts = tuple[int, ...]
Numbers = tuple[float, ...]
Curve = tuple[tuple[int, float], ...]  # (step, loss)
Tables = tuple[dict, ...]
Pairs = tuple[tuple[str, str], ...]
FiguresOf = Annotated[int | str, "a record's number or none"]
Borrows = Annotated[dict, "from and blocks"]
Flag = Annotated[bool, "true or false"]
Entries = Annotated[tuple, "tables that hold lists, which another schema checks"]
Table = Annotated[dict, "a table that another schema checks"]


def build(where: str, cls: type, table: dict):
    """Return an instance of the dataclass `cls` made from `table`, a parsed TOML or JSON table.

    A field without a default is required, `X | None` takes an X, and lists become tuples.
    Raises ValueError, one line that begins with `where` ("record 3: "), for what does not fit.
    """
    kinds, required = _kinds_of(cls)
    check_keys(where, table, kinds, required)
    for key, value in table.items():
        words, fits = kinds[key]
        if not fits(value):
            raise ValueError(f'{where}"{key}" must be {words}, not {value!r}')
    return cls(**{key: _frozen(value) for key, value in table.items()})


def check_keys(where: str, table: dict, known: Iterable[str], required: Iterable[str]) -> None:
    """Raise ValueError for the first key of `table` not in `known`, or in `required` and absent."""
    if not isinstance(table, dict):
        raise ValueError(f"{where}it must be a table, not {table!r}")
    for key in table:
        if key not in known:
            near = nearest(key, known)
            hint = f'; did you mean "{near}"?' if near else ""
            raise ValueError(f'{where}unknown key "{key}"{hint}')
    for key in sorted(set(required) - set(table)):
        raise ValueError(f'{where}missing key "{key}"')


@cache
def _kinds_of(cls):
    """{field: (what its value must be, in words; the test of it)}, and the required fields."""
    kinds = {}
    for f in fields(cls):
        kind = get_args(f.type)[0] if type(None) in get_args(f.type) else f.type
        kinds[f.name] = TYPES[kind] if get_origin(kind) is not Literal else (
            f"one of {', '.join(get_args(kind))}", get_args(kind).__contains__)
    return kinds, {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}


def nearest(wanted: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `wanted` most likely meant, or None if none comes close."""
    from difflib import get_close_matches  # slow to import, and needed only to report a mistake

    return next(iter(get_close_matches(wanted, sorted(names), n=1, cutoff=0.5)), None)


def _is_list(value, *types):
    return type(value) is list and all(type(item) in types for item in value)


def _is_pairs(value, *types):
    return _is_list(value, list) and all(_is_list(x, *types) and len(x) == 2 for x in value)


def _is_loan(value):
    return (type(value) is dict and value.keys() == {"from", "blocks"}
            and type(value["from"]) is str and _is_list(value["blocks"], str))


def _is_flat(value):
    return type(value) is dict and not any(type(x) in (list, dict) for x in value.values())


def _is_day(value):
    try:
        return date.fromisoformat(value).isoformat() == value
    except (TypeError, ValueError):
        return False


def _frozen(value):
    return tuple(map(_frozen, value)) if type(value) is list else value


# Annotation: (what its value must be, in the words of the error message; the test of it). The tests
# look at type(), because isinstance takes a bool for an int.
TYPES = {
    str: ("a string", lambda v: type(v) is str and v.strip()),
    Text: ("a string", lambda v: type(v) is str),
    int: ("a whole number above 0", lambda v: type(v) is int and v > 0),
    float: ("a number above 0", lambda v: type(v) in (int, float) and v > 0),
    Day: ("YYYY-MM-DD", _is_day),
    Texts: ("a list of strings", lambda v: _is_list(v, str)),
    Counts: ("a list of whole numbers", lambda v: _is_list(v, int)),
    Numbers: ("a list of numbers above 0",
              lambda v: _is_list(v, int, float) and v and min(v) > 0),
    Curve: ("a list of [step, loss] pairs", lambda v: _is_pairs(v, int, float)),
    Tables: ("a list of tables", lambda v: _is_list(v, dict) and all(map(_is_flat, v))),
    Pairs: ("a list of pairs of strings", lambda v: _is_pairs(v, str)),
    FiguresOf: ('a record\'s number or "none"', lambda v: v == "none" or type(v) is int),
    Borrows: ("a table with from, an id, and blocks, a list of strings", _is_loan),
    Flag: ("true or false", lambda v: type(v) is bool),
    Entries: ("a list of tables", lambda v: _is_list(v, dict)),
    Table: ("a table", lambda v: type(v) is dict),
    object: ("a plain value", lambda v: type(v) not in (list, dict)),
    dict: ("a table of plain values", _is_flat),
}
