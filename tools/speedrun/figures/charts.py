"""What the charts show, in the units of their pictures: those of the site, and those that READMEs
show as files. site/charts.html draws both; site/chart.css has their colours."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date

from speedrun.compare.results import Comparison
from speedrun.figures.causes import Cause
from speedrun.history.manifest import Manifest, Milestone
from speedrun.history.records import Record

WIDE, NARROW = 1024, 380
FILE = 880  # width of a picture that is a file of its own, about that of a README's column
LETTER, LINE = 7.2, 16  # a label's size: width of a letter, height
MINUTES = (1, 1.5, 2, 3, 5, 10, 20, 45)
FACTORS = (0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5)
GOAL = 3.28  # the loss that ends a run of the race
ROW = 16  # height of a cause's row, which has two bars


@dataclass(frozen=True)
class Point:
    """A point with its text; milestone: where it leads, if anywhere; own: in the accent colour."""

    x: float
    y: float
    text: str
    milestone: Milestone | None = None
    label: str = ""
    place: tuple[float, float, str] | None = None  # of the label: x, y, text-anchor


@dataclass(frozen=True)
class Bar:
    """A bar; part: the class of its colour."""

    x: float
    y: float
    width: float
    height: float
    part: str


@dataclass(frozen=True)
class Chart:
    """A picture: its size, labelled ticks, lines as (class, points), points, bars, texts as
    (x, y, text), a title in words. upright: the grid's lines are those of the x ticks."""

    width: float
    height: float
    left: float
    bottom: float
    title: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    lines: Sequence[tuple[str, str]] = ()
    points: Sequence[Point] = ()
    bars: Sequence[Bar] = ()
    texts: Sequence[tuple[float, float, str]] = ()
    upright: bool = False


class Frame:
    """Places data in a picture; x and y: (lowest, highest) of the data; log: a logarithmic y."""

    def __init__(self, width, height, x, y, log=False, left=44, right=16, top=14, bottom=30):
        self.width, self.height, self.left, self.bottom = width, height, left, height - bottom
        self.scale = math.log if log else float
        self.ends = (x[0], x[1] if x[1] > x[0] else x[0] + 1), tuple(map(self.scale, y))
        self.right, self.top = width - right, top

    def x(self, value: float) -> float:
        low, high = self.ends[0]
        return round(self.left + (value - low) / (high - low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        low, high = self.ends[1]
        share = (self.scale(value) - low) / (high - low)
        return round(self.bottom - share * (self.bottom - self.top), 1)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """The points of a line, those above the picture left out."""
        return " ".join(f"{x:g},{y:g}" for x, y in ((self.x(a), self.y(b)) for a, b in points)
                        if y >= self.top - 1)

    def chart(self, **what) -> Chart:
        return Chart(self.width, self.height, self.left, self.bottom, **what)


def record_chart(
    records: Sequence[Record], manifest: Manifest, width: float, by_date: bool = True
) -> Chart:
    """The record time over the days, or, so that no point covers another, over the records in their
    order: a point for each record, which leads to its milestone."""
    days = [date.fromisoformat(r.date).toordinal() for r in records]
    if not by_date:
        return _record_chart(records, manifest, width, list(range(len(records))), _first_of_halves(
            records, width), "in their order")
    years = range(date.fromordinal(min(days)).year, date.fromordinal(max(days)).year + 1)
    months = [date(year, month, 1) for year in years for month in (1, 7)]
    return _record_chart(records, manifest, width, days, [
        (day.toordinal(), f"{day:%b %Y}") for day in months
        if min(days) <= day.toordinal() <= max(days)], "by date")


def _first_of_halves(records, width):
    """(place, month) of the first record of each half year, as far as their names do not touch."""
    ticks, known = [], set()
    for place, r in enumerate(records):
        day = date.fromisoformat(r.date)
        half = (day.year, day.month > 6)
        apart = (place - ticks[-1][0]) * width / len(records) if ticks else width
        if half not in known and apart > 11 * LETTER:
            ticks.append((place, f"{day:%b %Y}"))
            known.add(half)
    return ticks


def _record_chart(records, manifest, width, days, ticks, order):
    shortest, longest = min(r.minutes for r in records), max(r.minutes for r in records)
    frame = Frame(width, 460 if width > 600 else 380, (min(days), max(days)),
                  (shortest / 1.12, longest * 1.12), log=True, left=34)
    stair = []
    for day, record in zip(days, records, strict=True):
        stair += [(day, stair[-1][1]), (day, record.minutes)] if stair else [(day, record.minutes)]
    telling = {}  # {record's number: its milestones, a station last}
    for m in sorted(manifest.milestones, key=lambda m: m.is_station):
        if m.record:
            telling.setdefault(m.record.number, []).append(m)
    points = []
    for day, r in zip(days, records, strict=True):
        milestones = telling.get(r.number, [])
        text = f"#{r.number}, {r.date}: {r.minutes:g} minutes, {r.what}"
        m = milestones[-1] if milestones else None
        label = ""
        if m and m.is_station:
            text = f"{m.id} {m.title} · {text}"
            label = f"{m.id} {m.title}" if width > 600 else m.id
        elif m:
            text = f"{', '.join(sorted(m.id for m in milestones))} · {text}"
        points.append(Point(frame.x(day), frame.y(r.minutes), text, m, label))
    return frame.chart(
        title=f"Record time in minutes, on a logarithmic scale, {order}: {records[0].minutes:g} in "
        f"{records[0].date[:4]}, {records[-1].minutes:g} in {records[-1].date[:4]}",
        x_ticks=[(frame.x(place), label) for place, label in ticks],
        y_ticks=[(frame.y(tick), f"{tick:g}") for tick in MINUTES if tick > shortest / 1.12],
        lines=[("stair", frame.path(stair))], points=_labelled(points, frame))


def _labelled(points, frame):
    """The points, each label at the nearest free place beside its point: on the right and upwards,
    else on the left and downwards."""
    taken = [(p.x - 6, p.y - 6, p.x + 6, p.y + 6) for p in points]

    def is_free(box):
        inside = frame.left < box[0] and box[2] < frame.width and frame.top < box[3] < frame.bottom
        return inside and all(box[2] < a or c < box[0] or box[3] < b or d < box[1]
                              for a, b, c, d in taken)

    placed = []
    for p in sorted(points, key=lambda p: -p.y):
        width = len(p.label) * LETTER
        for step in range(40 if p.label else 0):
            shift, side = 6 * (step // 2), step % 2
            x, y = (p.x + 12 + shift / 4, p.y - shift) if not side else (p.x - 12, p.y + shift)
            box = (x - width * side, y - LINE / 2, x + width * (1 - side), y + LINE / 2)
            if is_free(box):
                taken.append(box)
                p = Point(p.x, p.y, p.text, p.milestone, p.label, (
                    round(x, 1), round(y + 4.5, 1), "end" if side else "start"))
                break
        placed.append(p)
    return sorted(placed, key=lambda p: p.x)


def curve_chart(milestone: Milestone, parent: Milestone | None, width: float) -> Chart | None:
    """The official losses of a milestone over its tokens, beside those of `parent`, over steps
    where tokens are not known; None if there are none."""
    if not milestone.curve:
        return None
    shown = [m for m in (parent, milestone) if m and m.curve]
    in_tokens = all(m.tokens for m in shown)
    curves = [[(m.tokens_after(step) or 0 if in_tokens else step, loss) for step, loss in m.curve]
              for m in shown]
    end = max(curve[-1][0] for curve in curves)
    late = [loss for curve in curves for x, loss in curve if x > 0.12 * end]
    low, high = min(*late, GOAL), max(late)
    frame = Frame(width, 320 if width > 600 else 260, (0, end),
                  (low - 0.04 * (high - low), high + 0.04 * (high - low)))
    place = "{:.2f}B tokens" if in_tokens else "step {:,.0f}"
    size, letter = (1e9, "B") if in_tokens else (1, "")
    points = [Point(frame.x(x), y, f"{m.id}: {loss:.4f} at {place.format(x / size)}",
                    m if m is milestone else None)
              for m, curve in zip(shown, curves, strict=True) for x, loss in curve
              if (y := frame.y(loss)) >= frame.top - 1]
    words = " and ".join(f"{m.id} {m.title}" for m in shown)
    unit = "tokens" if in_tokens else "steps"
    goal = frame.y(GOAL)
    return frame.chart(
        title=f"Official validation loss of {words} over {unit}",
        texts=[(frame.left, frame.top - 3, f"validation loss over {unit}"),
               (frame.left + 4, goal - 4, f"{GOAL:g}")],
        x_ticks=[(frame.x(x), f"{x / size:g}{letter}" if x else "0")
                 for x in _round(0, end, width / 140)],
        y_ticks=[(frame.y(y), f"{y:.2f}") for y in _round(low, high, 5)],
        lines=[("goal", f"{frame.left},{goal} {frame.right},{goal}"), *(
            ("line" if m is milestone else "line before", frame.path(curve))
            for m, curve in zip(shown, curves, strict=True))], points=points)


def ladder_chart(ladder: Comparison, manifest: Manifest, width: float) -> Chart | None:
    """The final loss of every tiny run, milestone by milestone; a mean leads to its milestone. None
    if there are none."""
    entries = [entry for entry in ladder.entries if entry.final_losses]
    if not entries:
        return None
    losses = [loss for entry in entries for loss in entry.final_losses]
    room = 0.06 * (max(losses) - min(losses)) or 0.01  # all may be equal
    frame = Frame(width, 300, (-0.5, len(entries) - 0.5), (min(losses) - room, max(losses) + room))
    points, ticks, every = [], [], max(1, round(len(entries) * 36 / width))
    for place, entry in enumerate(entries):
        m, own = manifest.get(entry.milestone), entry.final_losses
        points += [Point(frame.x(place), frame.y(loss), f"{loss:.4f}") for loss in own]
        mean = sum(own) / len(own)
        points.append(Point(frame.x(place), frame.y(mean), f"{m.id} {m.title}: {mean:.4f}", m))
        far = not ticks or frame.x(place) - ticks[-1][0] > 3 * LETTER  # else two ids would overlap
        if far and (m.is_station or every == 1):
            ticks.append((frame.x(place), m.id))
    return frame.chart(
        title="Final validation loss of each milestone at the tiny scale", x_ticks=ticks,
        texts=[(frame.left, frame.top - 3, "final validation loss, by milestone")],
        y_ticks=[(frame.y(y), f"{y:.2f}") for y in _round(min(losses), max(losses), 5)],
        points=points)


def causes_chart(found: Sequence[Cause], width: float) -> Chart:
    """Two bars for each cause, fewer tokens and faster tokens, or one where it is not split, on a
    logarithmic axis of factors, and the seconds that it saved."""
    lengths = [length for cause in found for length in cause[2:] if length is not None]
    left = 16 + LETTER * max(len(cause.label) for cause in found)
    frame = Frame(width, ROW * len(found) + 58, (min(lengths), max(lengths)), (0, 1),
                  left=left, right=70, top=20)
    bars, rows, texts = [], [], [(width - 58, frame.top - 6, "seconds")]

    def bar(part, length, y, height):
        start, end = sorted((frame.x(0), frame.x(length)))
        bars.append(Bar(start, y, round(end - start, 1), height, part))

    for row, cause in enumerate(found):
        y = frame.top + ROW * row
        rows.append((y + ROW / 2, cause.label))
        texts.append((width - 58, y + ROW / 2 + 4, f"{cause.seconds:.1f}"))
        if cause.tokens is None:
            bar("whole", cause.whole, y + 2, ROW - 4)
        else:
            bar("tokens", cause.tokens, y + 2, ROW / 2 - 2)
            bar("speed", cause.speed, y + ROW / 2, ROW / 2 - 2)
    place = frame.top + ROW * (len(found) - 6)  # where the bars are short
    names = ("tokens", "fewer tokens"), ("speed", "faster tokens"), ("whole", "not split")
    for row, (part, name) in enumerate(names):
        bars.append(Bar(width - 250, place + (ROW + 4) * row, 20, 10, part))
        texts.append((width - 220, place + (ROW + 4) * row + 10, name))
    return Chart(
        width, frame.height, frame.left, frame.bottom,
        "What each idea gained by itself, by fewer tokens and by faster tokens", upright=True,
        x_ticks=[(frame.x(math.log(tick)), f"{tick:g}") for tick in FACTORS
                 if min(lengths) <= math.log(tick) <= max(lengths)],
        y_ticks=rows, bars=bars, texts=texts)


def as_file(chart: Chart, caption: str, href: Callable[[Milestone], str | None]) -> str:
    """A chart as an SVG that is a file of its own, with a line of text below it; href: where a
    milestone's point leads, from the file."""
    from speedrun.diff.html import TEMPLATES, templates  # jinja2, which --help does not need

    style = (TEMPLATES / "chart.css").read_text(encoding="utf-8")
    return templates().get_template("chart.svg").render(
        chart=chart, caption=caption, href=href, style=style) + "\n"


def _round(low: float, high: float, count: float) -> list[float]:
    """Round numbers from low to high, about as many as `count`."""
    step = 10 ** math.floor(math.log10((high - low) / count or 1))
    step *= next((factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= count), 10)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def both(make: Callable[..., Chart | None], *what) -> list[Chart]:
    """A chart for wide screens and one for narrow ones; none if there is nothing to show."""
    return [chart for width in (WIDE, NARROW) if (chart := make(*what, width))]
