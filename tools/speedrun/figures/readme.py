"""What README.md says that follows from history/: the claim, the stations, a piece of a diff."""

import io
from collections.abc import Sequence
from datetime import date
from textwrap import fill

from speedrun.base.text import UNKNOWN, markdown
from speedrun.figures.tables import cell, records_of
from speedrun.history.manifest import Manifest
from speedrun.history.records import Record

AS_OF = date(2026, 8, 1)  # of the contest's README: the records accepted by then are all known here
EXCERPT = "01", ("newton_schulz",)  # a milestone, and blocks that it changes


def claim(manifest: Manifest, records: Sequence[Record]) -> str:
    """Return the README's first paragraph, in bold: how far the record fell, and how far the
    scripts follow it."""
    first, last = records[0], records[-1]
    shown = min(m.minutes for m in manifest.milestones if m.minutes)
    end = "" if shown == last.minutes else f" down to {shown:.2f}"
    return fill(
        f"**In {date.fromisoformat(first.date):%B %Y}, training a model to the validation loss of "
        f"llm.c's GPT-2 (124M), 3.28 on FineWeb, took {first.minutes:g} minutes on eight H100s. "
        f"The record is now {last.minutes:g} minutes (accepted, as of {AS_OF.day} {AS_OF:%B %Y}). "
        f"The {len(manifest.milestones)} scripts of "
        f"the race retell it step by step{end}: read them, compare them, run them.**", 106)


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
