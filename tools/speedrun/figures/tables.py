"""Markdown tables made from the manifest, and the markers in a file between which they stand.

    <!-- begin milestones -->
    (whatever stands here is replaced)
    <!-- end milestones -->
"""

import posixpath
import re
from collections.abc import Sequence

from speedrun.base.text import UNKNOWN, markdown, number_ranges
from speedrun.history.manifest import Manifest
from speedrun.history.records import Record
from speedrun.run.data import shards_read, steps_per_shard


def replace_between(text: str, name: str, content: str) -> str:
    """Return `text` with everything between the markers called `name` replaced by `content`.

    Raises ValueError unless both markers stand there once, the beginning first.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pieces = re.split(f"({begin}|{end})", text)
    if pieces[1::2] != [begin, end]:
        raise ValueError(f"{begin} and {end} must stand there once each, in this order")
    return f"{pieces[0]}{begin}\n{content}\n{end}{pieces[-1]}"


def milestone_table(manifest: Manifest, folder: str = ".", written_only: bool = False) -> str:
    """Return the table of the milestones; `folder` holds its file, as seen from the root.

    written_only: leave out the milestones that have no snapshot yet, and say how many they are.
    """
    def link(text, path):
        return f"[{text}]({posixpath.relpath(path, folder)})"

    head = ["id", "idea", "records", "minutes", "steps", "tokens", "val loss", "kind", "lesson"]
    rows = []
    for m in manifest.written() if written_only else manifest.milestones:
        known = m.train_steps and m.tokens_per_step
        tokens = m.train_steps * m.tokens_per_step / 1e9 if known else None
        rows.append([
            link(m.id, f"history/{m.name}") if m.written else m.id,
            f"**{m.title}.** {m.idea}" + ("" if m.written else " *Not yet written.*"),
            number_ranges(m.records) or UNKNOWN,
            cell(m.minutes, "{:g}"),
            cell(m.train_steps, "{:,d}"),
            cell(tokens, "{:.2f}B"),
            cell(m.val_loss, "{:.4f}"),
            m.kind,
            link("read", m.lesson) if m.written and m.lesson else UNKNOWN,
        ])  # fmt: skip
    table = markdown(head, rows, right=["minutes", "steps", "tokens"])
    if written_only:
        table += (f"\n\n{len(rows)} of the {len(manifest.milestones)} milestones are written; the"
                  f" others, down to {min(m.minutes for m in manifest.milestones):g} minutes,"
                  f" are in {link('the history', 'history/README.md')} with their figures.")
    return table


def shard_table(manifest: Manifest) -> str:
    """Return the table of how many training shards each written milestone reads."""
    head = ["milestone", "steps", "tokens a step reads", "steps per shard", "shards"]
    rows = []
    for m in manifest.written():
        steps, tokens = m.train_steps, m.tokens_read or m.tokens_per_step
        if steps and tokens:
            rows.append([m.name, f"{steps:,}", f"{tokens:,}", f"{steps_per_shard(tokens)}",
                         f"{shards_read(steps, tokens)}"])
    return markdown(head, rows, right=head[1:])


def record_table(records: Sequence[Record], manifest: Manifest) -> str:
    """Return the table of all public records, each with the milestones that tell it."""
    rows = []
    for r in records:
        told = [m.id for m in manifest.milestones if r.number in m.records]
        what = r.what + "".join(f"; re-timed at {t['minutes']:g} ({t['why']})" for t in r.retimed)
        people = ", ".join(r.people) or UNKNOWN
        rows.append([f"{r.number}", f"{r.minutes:g}", r.date, what, people,
                     ", ".join(told) or UNKNOWN])  # fmt: skip
    head = ["record", "minutes", "date", "what was new", "who", "milestone"]
    return markdown(head, rows, right=head[:2])


def cell(value: float | None, form: str) -> str:
    """Return a number in a form like "{:.2f}", or the sign for what is not known."""
    return UNKNOWN if value is None else form.format(value)
