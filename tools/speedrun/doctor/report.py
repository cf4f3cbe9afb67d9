"""The lines of a report about a machine, and how they are shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import shorten

OK = "ok"
ABSENT = "none"  # not here, and not needed for the scale that this machine would run
NOTE = "note"  # milestones run, but not as they could
FIX = "fix"  # milestones do not run until this is repaired


@dataclass(frozen=True)
class Finding:
    """One line: a name, OK, ABSENT, NOTE or FIX, what was found, and what to do or None."""

    name: str
    status: str
    text: str
    do: str | None = None


@dataclass(frozen=True)
class Report:
    """All lines, and the scale that run_milestone.py chooses here."""

    scale: str
    checks: Sequence[Finding]
    milestones: Sequence[Finding]

    @property
    def to_fix(self) -> list[str]:
        """Names of the lines that must be repaired before milestones run."""
        return [line.name for line in (*self.checks, *self.milestones) if line.status == FIX]

    @property
    def verdict(self) -> str:
        """One line for the end."""
        if self.to_fix:
            return f"to repair first: {', '.join(self.to_fix)}"
        return f"fine: every milestone runs here at {self.scale} scale"

    @property
    def brief(self) -> list[Finding]:
        """The checks without those that are ABSENT, and one line for the milestones of each
        status, with the text of the first."""
        lines = [line for line in self.checks if line.status != ABSENT]
        for status in (OK, ABSENT, NOTE, FIX):
            if some := [line for line in self.milestones if line.status == status]:
                text = f"{len(some)} in all chains; the first, {some[0].name}: {some[0].text}"
                lines.append(Finding("milestones", status, text, some[0].do))
        return lines


def to_json(report: Report) -> str:
    """The report as a JSON object."""
    content = dict(ok=not report.to_fix, verdict=report.verdict) | asdict(report)
    return json.dumps(content, indent=2)


def print_report(report: Report, stream, whole: bool) -> None:
    """Prints it, the whole or in brief, to a text stream, as plain lines: rich may be missing."""
    lines = (*report.checks, *report.milestones) if whole else report.brief
    verdict = report.verdict
    if not whole:
        verdict = shorten(verdict, 150, placeholder=" …") + "; --all shows each milestone"
    width = max(len(line.name) for line in lines)
    for line in lines:
        print(f"{line.status:<4}  {line.name:<{width}}  {line.text}", file=stream)
        if line.do:
            print(f"{'':<{width + 6}}  -> {line.do}", file=stream)
    print(verdict, file=stream)
