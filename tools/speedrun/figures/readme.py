"""What README.md says that follows from history/: the claim, the stations, a piece of a diff."""

import io
from collections.abc import Sequence
from datetime import date
from textwrap import fill

from speedrun.base.text import UNKNOWN, markdown
from speedrun.figures.tables import cell, records_of
from speedrun.history.manifest import Manifest
from speedrun.history.records import Record

# The contest's last record, its minutes, and the day on which its README was read.
NEWEST = 92, 0.665, date(2026, 10, 3)
EXCERPT = "01", ("newton_schulz",)  # a milestone, and blocks that it changes


def claim(manifest: Manifest, records: Sequence[Record]) -> str:
    """Return the README's first paragraph: how far the record fell, how far the scripts follow it,
    and the newest record known."""
    first, last = records[0], records[-1]
    shown = min(m.minutes for m in manifest.milestones if m.minutes)
    end = "" if shown == last.minutes else f" down to {shown:.2f}"
    number, minutes, day = NEWEST
    return fill(
        f"**In {date.fromisoformat(first.date):%B %Y}, training a model to the validation loss of "
        f"llm.c's GPT-2 (124M), 3.28 on FineWeb, took {first.minutes:g} minutes on eight H100s. In "
        f"{date.fromisoformat(last.date):%B %Y}, record #{last.number} took {last.minutes:g}. "
        f"The {len(manifest.milestones)} scripts of the race retell the way there "
        f"step by step{end}: read them, compare them, run them.** By {day.day} {day:%B %Y} "
        f"[{number - last.number} more records](history/after.md) were accepted; the last, "
        f"#{number}, is {minutes:g} minutes.", 106)


def station_table(manifest: Manifest) -> str:
    """Return the table of the milestones without a letter."""
    head = ["id", "idea", "records", "minutes", "tokens", "parameters", "lesson"]
    return markdown(head, [[
        f"[{m.id}](history/{m.chain}/{m.name})",
        f"**{m.title}.** {m.idea}",
        records_of(m) or UNKNOWN,
        cell(m.minutes, "{:g}"),
        cell(m.tokens and m.tokens / 1e9, "{:.2f}B"),
        cell(m.parameters, "{:,d}"),
        f"[read]({m.lesson})" if m.lesson else UNKNOWN,
    ] for m in manifest.milestones if m.is_station], right=["minutes", "tokens", "parameters"])


def excerpt(manifest: Manifest) -> str:
    """Return the changes of some blocks, as diff_milestones.py prints them, as a Markdown block."""
    from speedrun.diff.difference import find_difference  # when there is something to compare
    from speedrun.diff.terminal import make_console, print_changes

    child = manifest.get(EXCERPT[0])
    texts = [m.script.read_text(encoding="utf-8") for m in (manifest.get(child.parent), child)]
    printed = io.StringIO()
    print_changes(make_console(printed), find_difference(*texts).only([*EXCERPT[1]]))
    return f"```diff\n{printed.getvalue().strip()}\n```"
