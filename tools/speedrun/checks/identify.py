"""Finds the architecture whose logits a model has, the likeliest first."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from speedrun.checks.architecture import Architecture, differing
from speedrun.checks.features import FEATURES


def identify(
    matches: Callable[[Architecture], bool], start: Architecture, parent: Architecture, part: str,
    fixed: tuple[str, ...] = (),
) -> Architecture | None:
    """The first architecture for which `matches` holds, or None.

    Tried are, in the switches of one part of the model but those `fixed`: `start`; everything
    between it and `parent`; one slip beside each of those, then two beside `start`.
    """
    seen = set()
    for candidate in _candidates(start, parent, part, fixed):
        if candidate not in seen:
            seen.add(candidate)
            if matches(candidate):
                return candidate
    return None


def _candidates(start, parent, part, fixed) -> Iterator[Architecture]:
    values = {}
    for feature in FEATURES:
        if feature.part == part and feature.switch not in fixed:
            values.setdefault(feature.switch, []).extend(feature.words)
    way = [name for name in differing(start, parent) if name in values]
    between = [
        replace(start, **{name: getattr(parent, name) for name in names})
        for n in range(len(way) + 1) for names in itertools.combinations(way, n)
    ]
    slips = [(name, value) for name, some in values.items() for value in some]
    yield from between
    for base in between:
        for name, value in slips:
            yield replace(base, **{name: value})
    for (a, x), (b, y) in itertools.combinations(slips, 2):
        if a != b:
            yield replace(start, **{a: x, b: y})
