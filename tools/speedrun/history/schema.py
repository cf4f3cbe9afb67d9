"""Turn a parsed TOML or JSON table into a dataclass whose annotations are the schema."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from datetime import date
from typing import Annotated, get_args

Day = Annotated[str, "YYYY-MM-DD"]
Text = Annotated[str, "perhaps empty"]
Texts = tuple[str, ...]
Counts = tuple[int, ...]
Curve = tuple[tuple[int, float], ...]  # (step, loss)
Tables = tuple[dict, ...]
Pairs = tuple[tuple[str, str], ...]
FiguresOf = Annotated[int | str, "a record's number or none"]


def build(where: str, cls: type, table: dict):
    """Return an instance of the dataclass `cls` made from `table`, a parsed TOML or JSON table.

    A field without a default is required, `X | None` takes an X, and lists become tuples.
    Raises ValueError, one line that begins with `where` ("record 3: "), for what does not fit.
    """
    kinds = {f.name: f.type for f in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    check_keys(where, table, kinds, required)
    values = {}
    for key, value in table.items():
        kind = kinds[key]
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        words, is_right = TYPES[kind]
        if not is_right(value):
            raise ValueError(f'{where}"{key}" must be {words}, not {value!r}')
        values[key] = _frozen(value)
    return cls(**values)


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


def nearest(wanted: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `wanted` most likely meant, or None if none comes close."""
    from difflib import get_close_matches  # slow to import, and needed only to report a mistake

    return next(iter(get_close_matches(wanted, sorted(names), n=1, cutoff=0.5)), None)


def is_list(value, is_right) -> bool:
    """Return whether `value` is a list and `is_right(item)` holds for each of its items."""
    return isinstance(value, list) and all(map(is_right, value))


def _is_number(value) -> bool:
    return type(value) in (int, float)  # a bool is an int to isinstance, not to us


def _is_pair(value) -> bool:
    return is_list(value, _is_number) and len(value) == 2


def _is_pair_of_strings(value) -> bool:
    return is_list(value, lambda x: isinstance(x, str)) and len(value) == 2


def _is_day(value) -> bool:
    try:
        return date.fromisoformat(value).isoformat() == value
    except (TypeError, ValueError):
        return False


def _is_flat(value) -> bool:
    return isinstance(value, dict) and not any(isinstance(x, list | dict) for x in value.values())


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# Annotation: (what its value must be, in the words of the error message; the test of it).
TYPES = {
    str: ("a string", lambda v: isinstance(v, str) and v.strip()),
    Text: ("a string", lambda v: isinstance(v, str)),
    int: ("a whole number above 0", lambda v: type(v) is int and v > 0),
    float: ("a number above 0", lambda v: _is_number(v) and v > 0),
    Day: ("YYYY-MM-DD", _is_day),
    Texts: ("a list of strings", lambda v: is_list(v, lambda x: isinstance(x, str))),
    Counts: ("a list of whole numbers", lambda v: is_list(v, lambda x: type(x) is int)),
    Curve: ("a list of [step, loss] pairs", lambda v: is_list(v, _is_pair)),
    Tables: ("a list of tables", lambda v: is_list(v, _is_flat)),
    Pairs: ("a list of pairs of strings", lambda v: is_list(v, _is_pair_of_strings)),
    FiguresOf: ('a record\'s number or "none"', lambda v: v == "none" or type(v) is int),
    object: ("a plain value", lambda v: not isinstance(v, list | dict)),
    dict: ("a table of plain values", _is_flat),
}
