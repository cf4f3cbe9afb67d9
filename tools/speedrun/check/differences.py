"""Sets the observations of two scripts side by side and says in words where they differ."""

import json
import math
import re
from dataclasses import dataclass
from itertools import zip_longest

import torch

NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?|nan|inf")
SIGMAS = 5.5  # of a sampling error: in ten thousand checks of right scripts one is refused
LOSS = "the loss of "  # so begins what the model's job calls it; its gradients: see differences
FEW = 6  # names that differ in one way and are told one by one
LEVELS = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])  # of quantiles


@dataclass(frozen=True)
class Deviation:
    """What was looked at, what the milestone has there, and what the script has; `line` and
    `source` are those of an exception, 0 and "" where there is none; milestone_line: its line where
    the milestone's part of a mixed script raised it."""

    what: str
    expected: str
    got: str
    line: int = 0
    source: str = ""
    milestone_line: int = 0


def differences(wanted: dict, seen: dict) -> list[Deviation]:
    """Where the observations `seen` differ from the milestone's: in the milestone's order, then
    losses, then gradients where the loss differs too, since all of them follow from it.

    What the milestone cannot show on this machine is left out, and so is what came after a fault
    that stopped the script: that fault comes first. A clue is no difference by itself, but comes
    before all others, which may follow from it.
    """
    clues = [Deviation(what, *words) for what, (kind, *rest) in wanted.items() if kind == "clue"
             and seen.get(what, [""])[0] == "clue" and (words := _clue(rest[0], seen[what][1]))]
    found = [Deviation(what, "it runs to its end", f"it stops: {value[0]}", *value[1:])
             for what, (kind, *value) in seen.items()
             if kind == "error" and wanted.get(what, ("",))[0] != "error"]
    stopped, others = bool(found), []
    for what, (kind, *rest) in wanted.items():
        if kind in ("error", "clue") or what in seen and seen[what][0] == "error":
            continue
        value, tolerance = rest
        if what in seen:
            if words := KINDS[kind](value, seen[what][1], tolerance):
                others.append((_is_result(kind, *words), Deviation(what, *words)))
        elif not stopped:
            text = ", ".join(value) if isinstance(value, dict | list) else str(value)
            others.append((False, Deviation(what, _cut(text), "nothing of the kind")))
    losses = {f"the gradient in {difference.what.removeprefix(LOSS)}" for _, difference in others
              if difference.what.startswith(LOSS)}
    others = [(2 if difference.what in losses else rank, difference)
              for rank, difference in others]
    others = [difference for _, difference in sorted(others, key=lambda other: other[0])]
    return found + (clues if found or others else []) + others


def further_signs(found: list[Deviation], wanted: dict) -> str:
    """What else differs, in words: the first difference of each of two kinds that the first one of
    all is not, or ""."""
    kinds, signs = {wanted.get(found[0].what, ("",))[0]}, []
    for difference in found[1:]:
        kind = wanted.get(difference.what, ("",))[0]
        if kind not in kinds and len(signs) < 2:
            kinds.add(kind)
            signs.append(f"{difference.what}: {difference.got}, not {difference.expected}")
    return "; ".join(signs)


def _is_result(kind, expected, got):
    """Whether a difference is one of losses, which any fault shows: others say more."""
    return kind == "numbers" or kind == "log" and NUMBER.split(expected.removeprefix(
        "the line ")) == NUMBER.split(got)


def alike(first: dict, second: dict) -> bool:
    """Whether two scripts show the same, faults included."""
    errors = [{what: value[1] for what, value in seen.items() if value[0] == "error"}
              for seen in (first, second)]
    return (errors[0] == errors[1] and not differences(first, second)
            and not differences(second, first))


# ---- the kinds: each gives (expected, got) for people, or None where nothing is wrong ----


def _fact(wanted, seen, _):
    if wanted != seen:
        return wanted or "none", seen or "none"


def _has(wanted, seen, _):
    """All that is wanted, {name: text}; more does no harm. Of many names that differ in one way the
    first is told."""
    alike = {}  # {how they differ: names}
    for name, value in wanted.items():
        if seen.get(name) != value:
            alike.setdefault((value, seen[name]) if name in seen else name, []).append(name)
    expected, got = [], []
    for names in alike.values():
        told = names if len(names) <= FEW else [f"{names[0]} and {len(names) - 1} others"]
        for name, words in zip(names, told, strict=False):
            expected.append(_named(words, wanted[name]))
            got.append(_named(words, seen[name]) if name in seen else f"no {name}")
    if expected:
        return _listed(expected), _listed(got)


def _same(wanted, seen, _):
    extra = [name for name in seen if name not in wanted]
    expected, got = _has(wanted, seen, 0) or ("nothing else", "")
    also = "also " + _listed([_named(name, seen[name]) for name in extra]) if extra else ""
    if got or also:
        return expected, "; ".join(filter(None, (got, also)))


def _in_common(wanted, seen, _):
    """Of the names in both: a part of the model that is never called returns nothing."""
    return _has({name: wanted[name] for name in wanted if name in seen}, seen, 0)


def _as_precise(wanted, seen, _):
    """{name: dtype}, as before; more precision does no harm."""
    precise = {name: dtype for name, dtype in wanted.items() if dtype == "float32"}
    return _in_common(precise, seen, 0)


def _named(name, value):
    if not value:
        return name
    return f"{name}{value}" if value.startswith("(") else f"{name}: {value}"


def _listed(texts, most=12):  # all fields that a milestone adds, say
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _cut(text):
    return text if len(text) <= 90 else f"{text[:90]} …"


def _numbers(wanted, seen, tolerance):
    """{name: number}; the name of a single one is ""."""
    wrong = [name for name, number in wanted.items() if name not in seen
             or not math.isclose(number, seen[name], rel_tol=tolerance, abs_tol=tolerance)
             and not (math.isnan(number) and math.isnan(seen[name]))]
    if wrong:
        name = wrong[0]
        a, b = wanted[name], seen.get(name, math.nan)
        share = f" ({len(wrong)} of {len(wanted)} values differ)" if len(wanted) > 1 else ""
        got = _number(b, a) if name in seen else "no value"
        return (f"{name} = " if name else "") + _number(a, b), got + share
    if len(seen) > len(wanted):
        return f"{len(wanted)} of them", str(len(seen))


def _number(value, other):
    """Enough digits to tell it from the other."""
    digits = next((n for n in (4, 6) if f"{value:.{n}g}" != f"{other:.{n}g}"), 9)
    return f"{value:.{digits}g}"


def _other_names(wanted, seen):
    lacks, extra = [n for n in wanted if n not in seen], [n for n in seen if n not in wanted]
    if lacks or extra:
        got = [f"none of {_listed(lacks)}"] if lacks else []
        got += [f"also {_listed(extra)}"] if extra else []
        return _listed(list(wanted)), "; ".join(got)
    for name, a in wanted.items():
        b = seen[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name}: {tuple(a.shape)}, {a.dtype}", f"{tuple(b.shape)}, {b.dtype}"


def _tensors(wanted, seen, tolerance):
    """{name: tensor}, by the norm of the difference; tolerance: for all, or {name: its own}."""
    if words := _other_names(wanted, seen):
        return words
    within = tolerance if isinstance(tolerance, dict) else dict.fromkeys(wanted, tolerance)
    pairs = {name: (a.float().flatten(), seen[name].float().flatten())
             for name, a in wanted.items()}
    largest = max((a.nan_to_num().norm().item() for a, _ in pairs.values()), default=0.0)
    wrong = [name for name, (a, b) in pairs.items()  # `not` also where only one is no number
             if not (a - b).where((a != b) & ~(a.isnan() & b.isnan()), 0).norm()
             <= within[name] * (a.nan_to_num().norm() + 1e-4 * largest + 1e-12)]
    if wrong:
        off = {name: _distance(*pairs[name]) for name in wrong}
        worst = next(name for name in wrong if off[name] >= 0.98 * max(off.values()))
        a, b = pairs[worst]
        rms = [t.square().mean().sqrt().item() for t in (a, b)]
        told = f"RMS {_number(rms[1], rms[0])}"
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        times = f"{math.copysign(rms[1] / max(rms[0], 1e-38), cosine):.3g}"
        if abs(cosine) > 0.9999 and rms[0] > 0 and times != "1":
            told += f", {times} times the milestone's"
        elif rms[0] > 0 and math.isfinite(rms[1]):
            told += f", and differs by {((a - b).norm() / a.norm()).item():.2%}"
        if len(wanted) > 1:
            told += f" ({len(wrong)} of {len(wanted)} tensors differ)"
        return f"{worst}: RMS {_number(*rms)}", told


def _distance(a, b):
    """How far apart two tensors are, as a share of the first one's norm; 1e9 where one has no
    norm."""
    share = ((a - b).norm() / a.norm()).item()
    return share if math.isfinite(share) else 1e9


def _tables(wanted, seen, tolerance):
    """{name: tensor} of those in both that have one shape: other code keeps other tables."""
    names = [name for name in wanted if name in seen and wanted[name].shape == seen[name].shape]
    return _tensors(*({name: some[name] for name in names} for some in (wanted, seen)), tolerance)


def _spread(wanted, seen, counts):
    """{name: quantiles of random values, evenly spaced}, by their distribution: two scripts may
    draw them in another order. A share of values may be off by its sampling error; counts: {name:
    how many values there are}."""
    if words := _other_names(wanted, seen):
        return words
    for name, a in wanted.items():
        b, steps = seen[name], len(a) - 1
        cuts = a[(LEVELS * steps).round().long()]
        error = SIGMAS * (2 * LEVELS * (1 - LEVELS) / counts[name]).sqrt() + 4 / counts[name]
        below = (torch.searchsorted(b, cuts) - 1) / steps
        up_to = torch.searchsorted(b, cuts, right=True) / steps
        if not ((below <= LEVELS + error) & (up_to >= LEVELS - error)).all():
            told = [f"from {t[0]:.3g} to {t[-1]:.3g}, half of them from {t[steps // 4]:.3g} to "
                    f"{t[3 * steps // 4]:.3g}" for t in (a, b)]
            return f"{name} {told[0]}", told[1]


def _log(wanted, seen, _):
    """Lines of a log; further lines that begin with another word do no harm."""
    kinds = {_json(line)[0] for line in wanted}
    seen = [line for line in seen if _json(line)[0] in kinds]
    for a, b in zip_longest(wanted, seen):
        if a is None or b is None:
            return tuple("no more lines" if line is None else f"the line `{_cut(line)}`"
                         for line in (a, b))
        name, fields = _json(a)
        if fields and _json(b)[0] == name:  # more fields do no harm
            if words := _has(fields, _json(b)[1], 0):
                return f"in the line `{name}:` {words[0]}", words[1]
        elif NUMBER.split(a) != NUMBER.split(b) or not all(map(
                _close, NUMBER.findall(a), NUMBER.findall(b))):
            return f"the line `{_cut(a)}`", f"`{_cut(b)}`"


def _json(line):
    """The name of a line such as `hyperparameters:{...}`, and its fields as texts."""
    name, _, text = line.partition(":")
    try:
        return name, {key: repr(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return name, {}


def _close(a, b):
    """Whether two texts are about the same number, with as many decimals; nan is nan."""
    return a == b or (math.isclose(float(a), float(b), rel_tol=4e-4, abs_tol=5e-4)
                      and len(a.partition(".")[2]) == len(b.partition(".")[2]))


def _at_most(wanted, seen, tolerance):
    factor, more = tolerance
    if seen > wanted * factor + more:
        return f"{wanted:,}, or not much more", f"{seen:,}"


def _at_least(wanted, seen, factor):
    if seen < wanted * factor:
        return f"{wanted:,}, or not much less", f"{seen:,}"


def _clue(wanted, seen):
    """Tokens, of which another order or number in a pass may be right."""
    if len(wanted) == len(seen) and wanted != seen:
        at = next(i for i, (a, b) in enumerate(zip(wanted, seen, strict=True)) if a != b)
        end = at + 6
        return (f"token {at} and those after it are {_listed([*map(str, wanted[at:end])])} ...",
                f"{_listed([*map(str, seen[at:end])])} ...")


def _unexercised(wanted, seen, _):
    """What a run did not try, by name: a fault of the checker if it is the milestone's, for which
    a test looks, and none of the learner's."""


KINDS = {"fact": _fact, "has": _has, "same": _same, "in common": _in_common,
         "as precise": _as_precise, "numbers": _numbers, "tensors": _tensors, "tables": _tables,
         "spread": _spread, "log": _log, "at most": _at_most, "at least": _at_least,
         "unexercised": _unexercised}
