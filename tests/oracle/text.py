"""How close values must be, and values as toml."""

import json

# How far computed values may lie from stated ones: (relative to the largest number beside it, as it
# is); elsewhere half a unit of the last decimal, or 1.5e-6, for some were computed in float32.
BOUNDS = dict(small_moves=(4e-4, 1e-7), small_training=(0, 6e-6), small_training_end=(0, 6e-6),
              learning_rate=(0, 6e-7), yarn=(2e-5, 0))
DIGITS = dict(small_moves=5, small_training=6, small_training_end=6, yarn=9)  # significant


def compare(key, stated, found, place="", largest=0):
    """Yields a line for each place where two values differ by more than the key's bound."""
    if isinstance(stated, dict) and isinstance(found, dict) and stated.keys() == found.keys():
        for name in stated:
            yield from compare(key, stated[name], found[name], f"{place}.{name}")
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        largest = max((abs(x) for x in stated if isinstance(x, int | float)), default=0)
        for i, pair in enumerate(zip(stated, found, strict=True)):
            yield from compare(key, *pair, f"{place}[{i}]", largest)
    elif stated != found:
        decimals = len(f"{stated}".partition("e")[0].partition(".")[2])
        relative, absolute = BOUNDS.get(key, (0, max(1.5e-6, 0.6 * 10.0**-decimals)))
        both = isinstance(stated, int | float) and isinstance(found, int | float)
        if not both or abs(stated - found) > max(absolute, relative * max(largest, abs(stated))):
            yield f"{key}{place}: stated {stated}, computed {found}"


def written(found):
    """Toml of {key: value}: what is no table first."""
    lines = [f"{key} = {inline(key, value)}" for key, value in found.items()
             if not isinstance(value, dict)]
    for key, value in found.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]"]
            lines += [f"{name if name.isidentifier() else json.dumps(name)} = {inline(key, v)}"
                      for name, v in value.items()]
    return "\n".join(lines)


def inline(key, value, inner=False):
    """A value as toml; a long list takes several lines."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {inline(key, v, True)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        items, rows = [inline(key, item, True) for item in value], [""]
        if inner or len(", ".join(items)) < 80:
            return "[" + ", ".join(items) + "]"
        for item in items:
            rows += [""] if len(rows[-1]) + len(item) > 96 else []
            rows[-1] += f" {item},"
        return "[\n" + "".join(f" {row}\n" for row in rows if row) + "]"
    return f"{value:.{DIGITS.get(key, 7)}g}" if isinstance(value, float) else json.dumps(value)
