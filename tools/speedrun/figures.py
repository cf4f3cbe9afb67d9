"""Draw the fall of the record time, and tell whether a committed picture still shows its data."""

import hashlib
import json
import struct
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from speedrun.manifest import Manifest
from speedrun.records import Record

HASH_KEY = "Data-SHA256"  # the name of the PNG text chunk that holds data_hash

# Where a label begins, (date, minutes): right of the steep first year, and stacked above the
# crowded autumn of 2025. The order keeps the lines to the points from crossing.
LABEL_AT = {
    "00": ("2024-06-15", 45), "01": ("2024-11-01", 24), "02": ("2024-11-08", 17.2),
    "03": ("2024-11-08", 13.1), "04": ("2024-11-28", 7.4), "05": ("2024-12-12", 5.3),
    "05a": ("2025-01-10", 4.2), "05b": ("2025-02-15", 3.35), "05c": ("2025-11-10", 6.9),
    "06": ("2025-11-10", 5.6), "07": ("2025-11-10", 4.55), "08": ("2025-11-10", 3.7),
    "09": ("2025-11-10", 3.0),
}  # fmt: skip


def marks(records: Sequence[Record], manifest: Manifest) -> list[tuple[str, Record]]:
    """Return (label, last record) for every milestone that has a place in LABEL_AT."""
    by_number = {r.number: r for r in records}
    return [
        (f"{m.id} {m.slug.replace('_', ' ')}", by_number[m.records[-1]])
        for m in manifest.milestones
        if m.id in LABEL_AT and m.records
    ]


def data_hash(records: Sequence[Record], manifest: Manifest) -> str:
    """Return the hexadecimal SHA-256 of all that the picture shows."""
    points = [(r.number, r.date, r.minutes) for r in records]
    labels = [(label, r.number) for label, r in marks(records, manifest)]
    return hashlib.sha256(json.dumps([points, labels]).encode()).hexdigest()


def stored_hash(path: Path) -> str | None:
    """Return the hash in the PNG file at `path`, or None if it has none or is no whole PNG.

    Raises OSError when the file cannot be read.
    """
    png = Path(path).read_bytes()
    if b"IEND" not in png[-8:]:
        return None
    at = 8  # after the signature come chunks: length, type, data, checksum
    while at + 8 <= len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        key, _, value = png[at + 8 : at + 8 + length].partition(b"\0")
        if kind == b"tEXt" and key == HASH_KEY.encode():
            return value.decode("latin-1")
        at += 12 + length
    return None


def draw_records(records: Sequence[Record], manifest: Manifest, path: Path) -> None:
    """Write to `path` a PNG, 1600 pixels wide, of the record time in minutes over the date."""
    import matplotlib  # takes a second: only when there is something to draw

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.dates import DateFormatter, MonthLocator
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    plt.rcParams.update({"font.size": 12, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(8, 6), dpi=200, facecolor="white", layout="constrained")
    days = [date.fromisoformat(r.date) for r in records]
    minutes = [r.minutes for r in records]
    axes.step(days, minutes, where="post", color="0.7", linewidth=1.5, zorder=1)
    axes.scatter(days, minutes, s=14, color="0.55", zorder=2, label="a record")

    chosen = marks(records, manifest)
    axes.scatter(
        [date.fromisoformat(r.date) for _, r in chosen], [r.minutes for _, r in chosen],
        s=42, color="black", zorder=3, label="a milestone",
    )  # fmt: skip
    for label, r in chosen:
        label_date, label_minutes = LABEL_AT[label.split()[0]]
        axes.annotate(
            label, xy=(date.fromisoformat(r.date), r.minutes), va="center",
            xytext=(date.fromisoformat(label_date), label_minutes),
            arrowprops={"arrowstyle": "-", "color": "0.4", "linewidth": 0.8, "relpos": (0, 0.5)},
        )  # fmt: skip
    axes.annotate(
        f"record #{records[-1].number}: {minutes[-1]:g} min", xy=(days[-1], minutes[-1]),
        xytext=(4, -18), textcoords="offset points", ha="right",
    )  # fmt: skip

    axes.set_yscale("log")
    axes.set_ylim(0.95, 60)
    axes.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 5, 10, 20, 45]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MonthLocator(bymonth=(1, 7)))
    axes.xaxis.set_major_formatter(DateFormatter("%b %Y"))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("date of the record")
    axes.set_ylabel("minutes to 3.28 validation loss on 8 H100 (log scale)")
    axes.legend(loc="upper right", frameon=False)
    metadata = {HASH_KEY: data_hash(records, manifest), "Software": None}
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
