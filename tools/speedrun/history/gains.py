"""What each milestone gained by itself, from its effects, and what its whole record gained.

A figure against the parent is computed only where milestone.toml does not call it incomparable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from speedrun.history.effects import ESTIMATE, EVIDENCE, TIME, TOKENS, Effect
from speedrun.history.manifest import Manifest, Milestone

CAVEAT = "caveat: "  # begins the line below an effect's
OFFICIAL = "official minutes"  # the weakest evidence: those of a record and of the one before it


@dataclass(frozen=True)
class Gain:
    """What an idea alone does to a run's time, at a loss of 3.28.

    seconds: after less before, summed where it was measured in parts; ratio: time after over time
    before, at its time; tokens: tokens after over tokens before, None where they are not known;
    evidence: one of EVIDENCE or OFFICIAL, the weakest part's; runs: (before, after) of each part.
    """

    seconds: float
    ratio: float
    tokens: float | None
    evidence: str
    runs: tuple[tuple[int, ...], ...]

    @property
    def speed(self) -> float | None:
        """Time per token after over time per token before, where tokens are known."""
        return self.tokens and self.ratio / self.tokens


def comparable_base(manifest: Manifest, m: Milestone, what: str = TIME) -> Milestone | None:
    """The nearest ancestor with a time, if a milestone's official figures can be compared with its;
    what: TIME, or TOKENS, for which the ancestor is the parent."""
    if m.incomparable and what in m.incomparable.what:
        return None
    line = manifest.lineage(m)[1:]
    if what == TOKENS:
        return line[0] if line else None
    base = next((a for a in line if a.minutes), None)
    return base if base and m.minutes and m.record != base.record else None


def own_gain(manifest: Manifest, m: Milestone) -> Gain | None:
    """The Gain of a milestone's idea, None where nothing isolates its time.

    It is that of its effects in seconds; official minutes count only without any such effect.
    """
    if parts := timed_parts(m):
        ratios = [_tokens_ratio(manifest, m, e) for e in parts]
        return Gain(
            seconds=sum(e.after - e.before for e in parts),
            ratio=math.prod(e.after / e.before for e in parts),
            tokens=None if None in ratios else math.prod(ratios),
            evidence=max((e.how for e in parts), key=EVIDENCE.index),
            runs=tuple(e.runs for e in parts))
    if base := comparable_base(manifest, m):
        has_tokens = comparable_base(manifest, m, TOKENS) and base.tokens and m.tokens
        return Gain(60 * (m.minutes - base.minutes), m.minutes / base.minutes,
                    m.tokens / base.tokens if has_tokens else None, OFFICIAL, ())
    return None


def timed_parts(m: Milestone) -> list[Effect]:
    """The effects in seconds that its own gain is the sum of."""
    return [e for e in m.effect
            if e.quantity == "seconds" and e.counts and e.before and not e.whole]


def loss_effects(m: Milestone) -> list[Effect]:
    """Its own effects on the loss of runs of equal steps: those of an ablation."""
    return [e for e in m.effect
            if e.quantity == "val_loss" and e.how == EVIDENCE[0] and not e.whole]


def estimates(m: Milestone) -> list[Effect]:
    """Its effects that are no more than their author's estimate."""
    return [e for e in m.effect if e.how == ESTIMATE]


def whole_effects(manifest: Manifest, m: Milestone) -> list[Effect]:
    """The effects of the whole records that a milestone covers, perhaps in part."""
    numbers = {record.number for record in m.covered}
    return [e for other in manifest.milestones for e in other.effect if e.whole in numbers]


def whole_records(manifest: Manifest, m: Milestone) -> list[str]:
    """What the records of a milestone gained as a whole, and who shares them, in words; empty where
    an effect of its own is known, and for a root.

    "record #9, shared with 03b and 03c: 10.8 to 8.2 minutes"
    """
    if m.parent is None or any(not e.whole for e in m.effect):
        return []
    found = []
    for record in m.covered:
        others = [o.id for o in manifest.milestones if o is not m and record in o.covered]
        shared = f", shared with {_listed(others)}" if others else ""
        before = manifest.records[record.number - 1]
        minutes = before.retimed[-1]["minutes"] if before.retimed else before.minutes
        found.append(f"record #{record.number}{shared}: {minutes:g} to {record.minutes:g} minutes")
    return found


def runs_text(gain: Gain) -> str:
    """The runs behind a gain, part by part: "20 and 20; 5 and 10"; "?" where not stated."""
    return "; ".join(" and ".join(f"{n}" if n else "?" for n in runs or (0, 0))
                     for runs in gain.runs)


def _tokens_ratio(manifest, m, effect):
    """Tokens after over tokens before. Where the batch grows, the steps before are those of the
    parent's schedule, and those after of its own, made as long."""
    if effect.tokens:
        before, after = effect.tokens
        return after / before
    if not effect.steps:
        return None
    before, after = effect.steps
    if before == after or m.parent is None:
        return after / before
    tokens = manifest.get(m.parent).tokens_in(before), m.tokens_in(after)
    return tokens[1] / tokens[0] if m.grows else after / before


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def gain_words(gain: Gain) -> str:
    """A gain in a few words: "2.79 s less (-3.3%), the record's own before and after"."""
    return f"{_seconds(gain)}, {gain.evidence}"


def _seconds(gain):
    less = "less" if gain.seconds < 0 else "more"
    return f"{abs(gain.seconds):.2f} s {less} ({gain.ratio - 1:+.1%})"


def gain_parts(gain: Gain) -> str:
    """What a gain consists of: "tokens -4.4%, time per token +1.2%"; empty where that is not known,
    or all of it is time."""
    return (f"tokens {gain.tokens - 1:+.1%}, time per token {gain.speed - 1:+.1%}"
            if gain.tokens not in (None, 1) else "")


def gain_lines(manifest: Manifest, m: Milestone) -> list[str]:
    """What a milestone gained, line by line: in sum, where that says more than its parts; its own
    effects, the strongest evidence first, then those of its whole record, each before its caveat,
    then why its official figures are not comparable."""
    gain, lines = own_gain(manifest, m), []
    if gain and gain.evidence != OFFICIAL and (len(gain.runs) > 1 or gain_parts(gain)):
        sums = filter(None, (_seconds(gain), gain_parts(gain)))
        lines.append(f"{gain.evidence}: {'; '.join(sums)}")
    for e in (*(e for e in m.effect if not e.whole), *whole_effects(manifest, m)):
        whole = f"all of #{e.whole}, " if e.whole else ""
        lines.append(f"{whole}{e.measured}; {e.what} ({e.evidence})")
        lines += [f"{CAVEAT}{e.caveat}"] * bool(e.caveat)
    lines += [f"the whole {text}" for text in whole_records(manifest, m)]
    if gain and gain.evidence == OFFICIAL:
        lines.append(gain_words(gain))
    return lines + incomparable_lines(m)


def incomparable_lines(m: Milestone) -> list[str]:
    """Which official figures of a milestone are not comparable with its parent's, and why; one
    line, or none."""
    if not (m.incomparable and m.parent):
        return []
    what = " and ".join(m.incomparable.what)
    return [f"{what} not comparable with {m.parent}: {m.incomparable.why}"]
