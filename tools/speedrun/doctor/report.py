"""The lines of a report about a machine, and how they are shown."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

OK = "ok"
ABSENT = "none"  # not here, and not needed for what this machine would run
NOTE = "note"  # milestones run, but not as they could
FIX = "fix"  # milestones do not run until this is repaired
STYLES = {OK: "green", ABSENT: "dim", NOTE: "yellow", FIX: "bold red"}
WIDE = 64  # columns from which on names and texts stand side by side


@dataclass(frozen=True)
class Finding:
    """One line: a name, one of OK, ABSENT, NOTE and FIX, what was found, and what to do about it or
    None."""

    name: str
    status: str
    text: str
    do: str | None = None


@dataclass(frozen=True)
class MilestoneFinding(Finding):
    """The line of a milestone. switches: its hyperparameters that depend on the machine; why: what
    they depend on; shards_needed, shards_here: training shards of a full run at record scale."""

    switches: dict[str, bool] = field(default_factory=dict)
    why: str = ""
    shards_needed: int = 0
    shards_here: int = 0


@dataclass(frozen=True)
class Report:
    """All lines, and the scale that run_milestone.py chooses here."""

    scale: str
    checks: Sequence[Finding]
    milestones: Sequence[MilestoneFinding]

    @property
    def to_fix(self) -> list[str]:
        """Names of the lines without whose repair milestones do not run."""
        return [c.name for c in (*self.checks, *self.milestones) if c.status == FIX]

    @property
    def verdict(self) -> str:
        """One line for the end."""
        if self.to_fix:
            return f"to repair first: {', '.join(self.to_fix)}"
        return f"fine: every written milestone runs here at {self.scale} scale"


def to_json(report: Report) -> str:
    """The report as a JSON object."""
    content = dict(ok=not report.to_fix, verdict=report.verdict) | asdict(report)
    return json.dumps(content, indent=2)


def print_report(report: Report, stream) -> None:
    """Prints it to a text stream: with rich on a terminal that has it, else as plain lines."""
    checks = (*report.checks, *report.milestones)
    if stream.isatty():
        try:
            _print_rich(checks, report, stream)
            return
        except ImportError:
            pass  # that is one of the findings
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:<4}  {check.name:<{width}}  {check.text}", file=stream)
        if check.do:
            print(f"{'':<{width + 6}}  -> {check.do}", file=stream)
    print(report.verdict, file=stream)


def count(number: int, name: str) -> str:
    """A number and a noun, "2 cores", or a number and a product's name, "2 x NVIDIA L4"."""
    if not name[0].islower():
        return f"{number} x {name}"
    return f"{number} {name}" + "s" * (number != 1)


def group(names: Iterable[str]) -> str:
    """Names with their counts, equal ones together: "2 x NVIDIA L4, 1 x NVIDIA A10"."""
    names = list(names)
    return ", ".join(count(names.count(name), name) for name in dict.fromkeys(names))


def _print_rich(checks, report, stream):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    grid = Table.grid(padding=(0, 2, 0, 0))
    wide = console.width >= WIDE
    for _ in range(3 if wide else 2):
        grid.add_column(overflow="fold")
    for check in checks:
        text = Text(check.text)
        if check.do:
            text.append(f"\n→ {check.do}", style="cyan")
        status = Text(check.status, style=STYLES[check.status])
        name = Text.assemble((check.name, "bold"))
        grid.add_row(status, *((name, text) if wide else (Text("\n").join([name, text]),)))
    console.print(grid)
    style = STYLES[FIX] if report.to_fix else "bold"
    console.print(Text(report.verdict, style=style))
