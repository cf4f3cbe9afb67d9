"""Draw the fall of the record time, with the milestones' names."""

from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

from speedrun.compare.plot import new_figure
from speedrun.history.manifest import Manifest
from speedrun.history.records import Record

# Labels are in columns beside the staircase: those of the records up to a day are at another day,
# from a time in minutes on upwards to the right of their points or downwards to their left.
COLUMNS = (
    ("2025-06-30", "2025-02-10", 3.4, "right"),
    ("2025-10-31", "2025-11-12", 2.75, "right"),
    ("9999-12-31", "2025-11-01", 1.95, "left"),
)
LINE = 1.15  # from one label to the next, as a factor of the time: the axis is logarithmic


class Mark(NamedTuple):
    """A milestone in the picture: its point is the last of its records; a station has a label."""

    id: str
    text: str  # "" for a step between two stations
    date: str
    minutes: float
    label_date: str
    label_minutes: float
    side: str  # "right" or "left" of the point; "above" where there is room beside it


def marks(manifest: Manifest) -> list[Mark]:
    """Return the milestones that have figures, with the stations' labels placed in columns.

    A column is filled from its end, so that no two labels overlap and their lines do not cross.
    """
    shown = [(m.record, m) for m in manifest.milestones if m.record]
    found, after = [], ""
    for until, day, minutes, side in COLUMNS:
        upwards = side == "right"
        column = [(r, m) for r, m in shown if after < r.date <= until]
        if upwards:
            column.reverse()  # so that of one record's milestones the first is above
        for r, m in sorted(column, key=lambda pair: pair[0].minutes, reverse=not upwards):
            if not m.is_station:
                found.append(Mark(m.id, "", r.date, r.minutes, r.date, r.minutes, "above"))
                continue
            place = (day, minutes, side)
            if upwards and r.minutes > minutes:
                minutes = r.minutes
                place = (r.date, minutes, "above")
            text = f"{m.id} {m.slug.replace('_', ' ')}"
            found.append(Mark(m.id, text, r.date, r.minutes, *place))
            minutes *= LINE if upwards else 1 / LINE
        after = until
    return found


def shown_in(records: Sequence[Record], manifest: Manifest) -> list:
    """Return all that the picture shows."""
    return [[(r.number, r.date, r.minutes) for r in records], marks(manifest)]


def draw_records(records: Sequence[Record], manifest: Manifest):
    """Draw the record time in minutes over the date; return the figure, 1600 pixels wide."""
    figure, (axes,) = new_figure((8, 6))
    from matplotlib.dates import DateFormatter, MonthLocator

    days = [date.fromisoformat(r.date) for r in records]
    minutes = [r.minutes for r in records]
    axes.step(days, minutes, where="post", color="0.75", linewidth=1.5, zorder=1)
    axes.scatter(days, minutes, s=10, color="0.6", zorder=2, label="a record")
    for mark in marks(manifest):
        _draw_mark(axes, mark)
    for size, label in ((42, "a station"), (18, "a step between two stations")):
        axes.scatter([], [], s=size, color="black", label=label)
    axes.annotate(f"{minutes[-1]:g} min", xy=(days[-1], minutes[-1]), xytext=(0, 9),
                  textcoords="offset points", ha="center", fontsize=9)

    axes.set(yscale="log", ylim=(0.95, 60), xlabel="date of the record",
             ylabel="minutes to 3.28 validation loss on 8 H100 (log scale)")
    ticks = [1, 1.5, 2, 3, 5, 10, 20, 45]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.xaxis.set_major_locator(MonthLocator(bymonth=(1, 7)))
    axes.xaxis.set_major_formatter(DateFormatter("%b %Y"))
    axes.legend(loc="upper right", frameon=False)
    return figure


def _draw_mark(axes, mark):
    """Draw a milestone's point and a station's label, with a line to a label further away."""
    point = (date.fromisoformat(mark.date), mark.minutes)
    axes.scatter(*point, s=42 if mark.text else 18, color="black", linewidth=1, zorder=4)
    if not mark.text:
        return
    text = dict(text=mark.text, xy=point, fontsize=10)
    if mark.side == "above":
        axes.annotate(**text, xytext=(8, 3), textcoords="offset points")
        return
    left = mark.side == "left"
    axes.annotate(
        **text, xytext=(date.fromisoformat(mark.label_date), mark.label_minutes),
        ha="right" if left else "left", va="center", zorder=3,
        arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkB": 2,
                    "relpos": (1 if left else 0, 0.5)},
    )
