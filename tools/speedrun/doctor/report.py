"""The lines of a report about a machine, and how they are shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec

OK = "ok"
ABSENT = "none"  # not here, and not needed for what this machine would run
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
        """Names of the lines without whose repair milestones do not run."""
        return [line.name for line in (*self.checks, *self.milestones) if line.status == FIX]

    @property
    def verdict(self) -> str:
        """One line for the end."""
        if self.to_fix:
            return f"to repair first: {', '.join(self.to_fix)}"
        return f"fine: every milestone runs here at {self.scale} scale"


def to_json(report: Report) -> str:
    """The report as a JSON object."""
    content = dict(ok=not report.to_fix, verdict=report.verdict) | asdict(report)
    return json.dumps(content, indent=2)


def print_report(report: Report, stream) -> None:
    """Prints it to a text stream: with rich on a terminal that has it, else as plain lines."""
    lines = (*report.checks, *report.milestones)
    if stream.isatty() and find_spec("rich"):
        return _print_rich(lines, report, stream)
    width = max(len(line.name) for line in lines)
    for line in lines:
        print(f"{line.status:<4}  {line.name:<{width}}  {line.text}", file=stream)
        if line.do:
            print(f"{'':<{width + 6}}  -> {line.do}", file=stream)
    print(report.verdict, file=stream)


def _print_rich(lines, report, stream):
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    grid = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"),
                      padding=(0, 2, 0, 0))
    for line in lines:
        text = Text(line.text)
        if line.do:
            text.append(f"\n→ {line.do}", style="cyan")
        grid.add_row(Text(line.status, STYLES[line.status]), Text(line.name, "bold"), text)
    console.print(grid)
    console.print(Text(report.verdict, STYLES[FIX] if report.to_fix else "bold"))
