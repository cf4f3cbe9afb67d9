"""Sets the observations of two scripts side by side and says in words where they differ."""

import json
import math
import re
from dataclasses import dataclass

import torch

NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?|nan|inf")


@dataclass(frozen=True)
class Difference:
    """What was looked at, what the milestone has there, and what the script has; `line` and
    `source` are those of an exception, 0 and "" where there is none."""

    what: str
    expected: str
    got: str
    line: int = 0
    source: str = ""


def differences(wanted: dict, seen: dict) -> list[Difference]:
    """Where the observations `seen` differ from the milestone's, in the milestone's order.

    What the milestone cannot show on this machine is left out, and so is what came after a fault
    that stopped the script: that fault comes first.
    """
    found = [Difference(what, "it runs to its end", f"it stops: {value[0]}", *value[1:])
             for what, (kind, *value) in seen.items()
             if kind == "error" and wanted.get(what, ("",))[0] != "error"]
    stopped = bool(found)
    for what, (kind, *rest) in wanted.items():
        if kind == "error" or any(d.what == what for d in found):
            continue
        value, tolerance = rest
        if what not in seen:
            if not stopped:
                found.append(Difference(what, _brief(value), "nothing of the kind"))
        elif seen[what][0] != "error":
            if words := KINDS[kind](value, seen[what][1], tolerance):
                found.append(Difference(what, *words))
    return found


def alike(first: dict, second: dict) -> bool:
    """Whether two scripts show the same, faults included."""
    errors = [{what: value[1] for what, value in seen.items() if value[0] == "error"}
              for seen in (first, second)]
    rest = [{what: value for what, value in seen.items() if value[0] != "error"}
            for seen in (first, second)]
    return (errors[0] == errors[1] and not differences(rest[0], second)
            and not differences(rest[1], first))


def _has(wanted, seen, _):
    lacks = [name for name in wanted if name not in seen]
    other = [name for name in wanted if name in seen and seen[name] != wanted[name]]
    if lacks or other:
        expected = [f"{name}{_colon(wanted[name])}" for name in [*lacks, *other][:4]]
        got = [f"no {name}" for name in lacks[:4]]
        got += [f"{name}{_colon(seen[name])}" for name in other[: 4 - len(got)]]
        return _listed(expected, lacks + other), _listed(got, lacks + other)


def _same(wanted, seen, _):
    extra = [name for name in seen if name not in wanted]
    words = _has(wanted, seen, 0) or ("", "")
    if extra:
        more = _listed([f"{name}{_colon(seen[name])}" for name in extra[:3]], extra)
        words = (words[0] or "nothing else"), "; ".join(filter(None, (words[1], f"also {more}")))
    return words if words[1] else None


def _in_common(wanted, seen, _):
    """Of the names in both: a part of the model that is never called returns nothing."""
    return _has({name: wanted[name] for name in wanted if name in seen}, seen, 0)


def _colon(value):
    value = str(value)
    return value if value.startswith("(") else f": {value}" if value else ""


def _listed(texts, every):
    more = len(every) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _fact(wanted, seen, _):
    return (str(wanted) or "none", str(seen) or "none") if wanted != seen else None


def _numbers(wanted, seen, tolerance):
    for i, (a, b) in enumerate(zip(wanted, seen, strict=False)):
        if not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance):
            return _number(a, b), _number(b, a) + (f", the {_nth(i)} of {len(seen)}"
                                                   if len(wanted) > 1 else "")
    if len(wanted) != len(seen):
        return f"{len(wanted)} of them", f"{len(seen)}"


def _nth(i):
    return ("first", "second", "third")[i] if i < 3 else f"{i + 1}th"


def _number(value, other):
    """Enough digits to tell it from the other."""
    for digits in (4, 6, 9):
        if f"{value:.{digits}g}" != f"{other:.{digits}g}":
            break
    return f"{value:.{digits}g}"


def _schedule(wanted, seen, tolerance):
    wrong = [k for k in wanted if k not in seen
             or not math.isclose(wanted[k], seen[k], rel_tol=tolerance, abs_tol=tolerance)]
    if wrong:
        k = wrong[0]
        if k not in seen:
            return f"{k} = {wanted[k]:.6g}", "no value"
        share = f" ({len(wrong)} of {len(wanted)} values differ)"
        return f"{k} = {_number(wanted[k], seen[k])}", _number(seen[k], wanted[k]) + share


def _tensors(wanted, seen, tolerance):
    lacks, extra = [n for n in wanted if n not in seen], [n for n in seen if n not in wanted]
    if lacks or extra:
        got = [f"none of {_listed(lacks[:3], lacks)}"] if lacks else []
        got += [f"also {_listed(extra[:3], extra)}"] if extra else []
        return _listed(list(wanted)[:3], wanted), "; ".join(got)
    largest = max((t.float().norm().item() for t in wanted.values()), default=0.0)
    wrong = []
    for name, a in wanted.items():
        b = seen[name]
        if a.shape != b.shape:
            return (f"{name} of shape {tuple(a.shape)}", f"shape {tuple(b.shape)}")
        a, b = a.float(), b.float()
        allowed = tolerance * (a.norm().item() + 1e-4 * largest + 1e-12)
        if not (a - b).norm().item() <= allowed:  # also where something is not a number
            wrong.append(name)
    if wrong:
        name = wrong[0]
        a, b = wanted[name].float().flatten(), seen[name].float().flatten()
        rms = [(t.square().mean().sqrt()).item() for t in (a, b)]
        told = f"RMS {_number(rms[1], rms[0])}"
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        if abs(cosine) > 0.9999 and rms[0] > 0:
            told += f", {rms[1] / rms[0] * (1 if cosine > 0 else -1):.3g} times the milestone's"
        elif rms[0] > 0:
            told += f", and differs by {(a - b).norm().item() / a.norm().item():.2%}"
        where = "" if len(wanted) == 1 else f" ({len(wrong)} of {len(wanted)} tensors differ)"
        return f"{name}: RMS {_number(rms[0], rms[1])}", told + where


def _spread(wanted, seen, tolerance):
    """Random values by their distribution: two scripts may draw them in another order."""
    lacks, extra = [n for n in wanted if n not in seen], [n for n in seen if n not in wanted]
    if lacks or extra:
        return _listed(list(wanted)[:3], wanted), f"lacks {lacks[:3]}, also has {extra[:3]}"
    levels = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])
    for name, a in wanted.items():
        b = seen[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return (f"{name}: {tuple(a.shape)}, {a.dtype}", f"{tuple(b.shape)}, {b.dtype}")
        if torch.equal(a, b):
            continue
        a, b = a.float().flatten(), b.float().flatten()
        deviation = a.std().item() if a.numel() > 1 else 0.0
        apart = (a.quantile(levels) - b.quantile(levels)).abs().max().item()
        if apart > tolerance * deviation + 1e-6:
            told = [f"from {t.min():.3g} to {t.max():.3g}, standard deviation "
                    f"{t.std(correction=0):.3g}" for t in (a, b)]
            return f"{name} {told[0]}", told[1]


def _log(wanted, seen, tolerance):
    for a, b in zip(wanted, seen, strict=False):
        if a.startswith(("environment:{", "hyperparameters:{")):  # more fields do no harm
            name, wants, sees = a.split(":")[0], *(_json(line) for line in (a, b))
            if not b.startswith(f"{name}:"):
                return f"the line `{name}: ...`", f"`{b[:90]}`"
            if words := _has(wants, sees, 0):
                return f"in the line `{name}:` {words[0]}", words[1]
            continue
        if NUMBER.split(a) != NUMBER.split(b):
            return f"the line `{a[:90]}`", f"`{b[:90]}`"
        for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True):
            close = math.isclose(float(x), float(y), rel_tol=4e-4, abs_tol=5e-4)
            if not close or len(x.partition(".")[2]) != len(y.partition(".")[2]):
                return f"the line `{a[:90]}`", f"`{b[:90]}`"
    if len(wanted) != len(seen):
        longer = wanted if len(wanted) > len(seen) else seen
        line = longer[min(len(wanted), len(seen))][:90]
        return ((f"{len(wanted)} lines", f"{len(seen)}, and not `{line}`") if longer is wanted
                else (f"{len(wanted)} lines", f"{len(seen)}, also `{line}`"))


def _json(line):
    try:
        found = json.loads(line.partition(":")[2])
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _at_most(wanted, seen, factor):
    if seen > wanted * factor + 64:
        return f"{wanted:,.0f}, or not much more", f"{seen:,.0f}"


def _at_least(wanted, seen, slack):
    if seen < wanted - slack:
        return f"{wanted:.0%}", f"{seen:.0%}"


def _share(wanted, seen, slack):
    if abs(wanted - seen) > slack:
        return f"{wanted:.0%}", f"{seen:.0%}"


def _own_state(wanted, seen, _):
    if seen < 0.8 * wanted:
        return (f"{wanted:,} numbers of which each rank keeps another share", f"{seen:,}; what all "
                "ranks keep alike is not shared")


def _brief(value):
    text = value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(
        value, (dict, list)) else str(value)
    return text if len(text) < 90 else text[:90] + " …"


KINDS = {"has": _has, "in common": _in_common, "same": _same, "fact": _fact, "numbers": _numbers,
         "schedule": _schedule, "tensors": _tensors, "spread": _spread, "log": _log,
         "at most": _at_most, "at least": _at_least, "share": _share, "own state": _own_state}
