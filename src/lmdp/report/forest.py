"""Estimates with their intervals, one row per layer, one mark per model: the chart that compares leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmdp.report.axes import Frame, across
from lmdp.report.scales import Linear, Scale, span
from lmdp.report.svg import Sheet, Style, el, number, text_width

TALL = 900  # where the eye cannot see the axis below any more, it is repeated above


@dataclass(frozen=True)
class Point:
    """One estimate: which series it belongs to, its value and interval, and what it says when pointed at."""

    series: int
    value: float
    interval: tuple[float, float] | None
    tip: str
    label: str = ""


@dataclass(frozen=True)
class Row:
    name: str
    points: tuple[Point, ...]
    aside: bool = False  # a reference or control: not a layer


@dataclass(frozen=True)
class _Place:
    """Where the rows go: names beside the plot, or above each row where the sheet is narrow."""

    step: float  # between the marks of one row
    head: float  # room for the name above the marks
    pad: float

    @classmethod
    def of(cls, sheet: Sheet, series: int, rows: int) -> _Place:
        step = 13.0 if rows * series <= 60 else 8.0 if rows * series <= 150 else 6.0
        return cls(step, 17.0 if sheet.narrow else 0.0, 7.0 if rows <= 24 else 4.0)

    def height(self, series: int) -> float:
        return max(14.0, self.step * series) + 2 * self.pad + self.head


def forest(
    sheet: Sheet,
    rows: Sequence[Row],
    series: Sequence[tuple[str, Style]],
    *,
    title: str,
    description: str,
    axis: str,
    chance: str = "0.5 = chance",
) -> str:
    """The chart. Rows that are not layers stand apart at the bottom."""
    place = _Place.of(sheet, len(series), len(rows))
    legend, top = sheet.legend(series, 0, lines=False) if len(series) > 1 else ("", 0.0)
    tall = place.height(len(series)) * len(rows) > TALL
    top += 40 if tall else 24
    gap = 26.0 if any(row.aside for row in rows) and not all(row.aside for row in rows) else 0.0
    bottom = top + gap + place.height(len(series)) * len(rows)
    left = 1.0 if sheet.narrow else min(0.3 * sheet.width, 14 + max(text_width(row.name) for row in rows))
    frame = Frame(left, top, sheet.width - 14, bottom)
    x = _scale(rows, frame, 5 if sheet.narrow else 8)
    parts = [frame.area(), across(sheet, frame, x, axis, repeat_on_top=tall)]
    parts.append(_chance_line(sheet, frame, x, chance, 24 if tall else 8))
    y, apart = top, False
    for row in rows:
        if row.aside and not apart and gap:
            parts.append(_divider(sheet, frame, y))
            y, apart = y + gap, True
        parts.append(_row(sheet, frame, x, row, series, place, y))
        y += place.height(len(series))
    return sheet.svg(bottom + 44, title, description, legend, *parts)


def _scale(rows: Sequence[Row], frame: Frame, wanted: int) -> Linear:
    points = [point for row in rows for point in row.points]
    values = [value for p in points for value in (p.value, *(p.interval or ()))]
    low, high = span([0.5, *values], least=0.12, floor=0.0, ceiling=1.0)
    return Linear(low, high, frame.left + 6, frame.right - 6, wanted)


def _chance_line(sheet: Sheet, frame: Frame, x: Scale, label: str, above: float) -> str:
    at = x(0.5)
    line = el(
        "path",
        d=f"M{number(at)} {number(frame.top)}V{number(frame.bottom)}",
        stroke=sheet.ink["ink"],
        stroke_width=1.2,
        stroke_dasharray="4 3",
    )
    end = "start" if at - frame.left < 40 else "end" if frame.right - at < 40 else "middle"
    return line + sheet.words(at, frame.top - above, label, text_anchor=end, fill=sheet.ink["ink"])


def _divider(sheet: Sheet, frame: Frame, y: float) -> str:
    line = el("path", d=f"M0 {number(y + 4)}H{number(frame.right)}", stroke=sheet.ink["soft"], stroke_width=0.8)
    return line + sheet.words(0, y + 20, "beside the layers", halo=True, font_style="italic")


def _row(
    sheet: Sheet, frame: Frame, x: Scale, row: Row, series: Sequence[tuple[str, Style]], place: _Place, y: float
) -> str:
    height = place.height(len(series))
    name_y = y + place.pad + 10 if place.head else y + height / 2 + 4
    room = sheet.width - 20 if place.head else frame.left - 12
    parts = [
        el("path", d=f"M0 {number(y + height)}H{number(frame.right)}", stroke=sheet.ink["line"]),
        sheet.words(0, name_y, row.name, room=room, halo=sheet.narrow, fill=sheet.ink["soft" if row.aside else "ink"]),
    ]
    centre = y + place.head + (height - place.head) / 2
    for point in row.points:
        at = centre + place.step * (point.series - (len(series) - 1) / 2)
        parts.append(_point(sheet, frame, x, point, series[point.series][1], at, place.step))
    return "".join(parts)


def _point(sheet: Sheet, frame: Frame, x: Scale, point: Point, style: Style, y: float, step: float) -> str:
    whisker, label = "", ""
    start = end = x(point.value)
    if point.interval:
        low, high = x(point.interval[0]), x(point.interval[1])
        start, end = min(start, low), max(end, high)
        bar = f"M{number(low)} {number(y)}H{number(high)}"
        caps = f"M{number(low)} {number(y - 3)}v6M{number(high)} {number(y - 3)}v6" if step >= 8 else ""
        whisker = el("path", d=bar + caps, stroke=sheet.ink[style.colour], stroke_width=1.6, fill="none")
    if point.label and step >= 12:
        at, anchor = (end + 7, "start") if frame.right - end > 44 else (start - 7, "end")
        ink = sheet.ink[style.colour]
        label = sheet.words(at, y + 4, point.label, halo=True, fill=ink, font_weight=600, text_anchor=anchor)
    return sheet.mark(point.tip, whisker, sheet.symbol(style, x(point.value), y, 1.0 if step >= 8 else 0.7)) + label
