"""The lines of a report about a machine, and how they are shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from textwrap import shorten

OK = "ok"
ABSENT = "none"  # not here, and not needed for the scale that this machine would run
NOTE = "note"  # milestones run, but not as they could
FIX = "fix"  # milestones do not run until this is repaired
STYLES = {OK: "green", ABSENT: "dim", NOTE: "yellow", FIX: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line: a name, OK, ABSENT, NOTE or FIX, what was found, and what to do or None."""

    name: str
    status: str
    text: str
    do: str | None = None


@dataclass(frozen=True)
class MilestoneFinding(Finding):
    """The line of a milestone. switches: its hyperparameters that depend on the machine;
    shards_needed: training shards of a full run at record scale."""

    switches: dict[str, bool] = field(default_factory=dict)
    shards_needed: int = 0


@dataclass(frozen=True)
class Report:
    """All lines, and the scale that run_milestone.py chooses here."""

    scale: str
    checks: Sequence[Finding]
    milestones: Sequence[MilestoneFinding]

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
        for status in STYLES:
            if some := [line for line in self.milestones if line.status == status]:
                text = f"{len(some)} in all chains; the first, {some[0].name}: {some[0].text}"
                lines.append(Finding("milestones", status, text, some[0].do))
        return lines


def to_json(report: Report) -> str:
    """The report as a JSON object."""
    content = dict(ok=not report.to_fix, verdict=report.verdict) | asdict(report)
    return json.dumps(content, indent=2)


def print_report(report: Report, stream, whole: bool) -> None:
    """Prints it, the whole or in brief, to a text stream: with rich on a terminal that has it, else
    as plain lines."""
    lines = (*report.checks, *report.milestones) if whole else report.brief
    verdict = report.verdict
    if not whole:
        verdict = shorten(verdict, 150, placeholder=" …") + "; --all shows each milestone"
    if stream.isatty() and find_spec("rich"):
        return _print_rich(lines, verdict, STYLES[FIX] if report.to_fix else "bold", stream)
    width = max(len(line.name) for line in lines)
    for line in lines:
        print(f"{line.status:<4}  {line.name:<{width}}  {line.text}", file=stream)
        if line.do:
            print(f"{'':<{width + 6}}  -> {line.do}", file=stream)
    print(verdict, file=stream)


def _print_rich(lines, verdict, style, stream):
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    grid = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"),
                      padding=(0, 2, 0, 0))
    for line in lines:
        do = (f"\n→ {line.do}", "cyan") if line.do else ""
        grid.add_row(Text(line.status, STYLES[line.status]), Text(line.name, "bold"),
                     Text.assemble(line.text, do))
    console.print(grid, Text(verdict, style))
