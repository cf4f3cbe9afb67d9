"""Says in a few words which paths a script takes on a machine, and why not the others."""

import re
from collections.abc import Container

from speedrun.history.glossary import load_glossary

# A hyperparameter whose default asks the machine, and the script's words beside it.
SWITCH = re.compile(r"^    (\w+): (?:bool = (?!True|False)|str = field\(default_factory=(?!lambda))"
                    r"[^#\n]+(?:# (.*))?$", re.MULTILINE)


def switches(source: str) -> dict[str, str]:
    """The switches of a script that follow the machine, {name: the script's words, or ""}."""
    return dict(SWITCH.findall(source))


def paths_taken(
    source: str, values: dict[str, object], on_gpu: bool, chosen: Container[str] = ()
) -> str:
    """What a script's switches come to, as in `CPU: float32, not compiled, no fp8 (as set)`.

    values: hyperparameters, {name: value}; chosen: names of those that were set by hand. The
    reason why a path is not taken is the device, or the words in brackets, which are the script's.
    """
    words, reasons, plain = [], switches(source), load_glossary().column("words")
    for name in dict.fromkeys([*(name for name in plain if name in reasons), *reasons]):
        part = name.removeprefix("use_")
        on, off = plain.get(name, (part, f"no {part}"))
        taken, by_hand = values.get(name), " (as set)" if name in chosen else ""
        if isinstance(taken, str):  # one of several paths, which the script's own words list
            words.append(f"{taken} {part.replace('_', ' ')}{by_hand}")
        else:
            reason = by_hand or (reasons[name] and f" ({reasons[name]})")
            words.append(on if taken else f"{off}{reason}")
    return f"{'CUDA' if on_gpu else 'CPU'}: {', '.join(words) or 'no switches'}"
