"""Values over steps: lines with bands for their intervals, and a heat map where there are too many lines to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmdp.report.axes import Frame, across, room_for, upward
from lmdp.report.scales import Interval, Linear, Scale
from lmdp.report.svg import Sheet, Style, el, number, text_width

T = TypeVar("T")
MOST_MARKS, MOST_POINTS, MOST_COLUMNS = 16, 240, 40
SHADES = 9
BOLD = 1.12  # how much wider heavy type runs


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    interval: tuple[float, float] | None
    tip: str


@dataclass(frozen=True)
class Line:
    name: str
    style: Style
    dots: tuple[Dot, ...]


def lines(
    sheet: Sheet,
    drawn: Sequence[Line],
    y_range: Interval,
    *,
    title: str,
    description: str,
    axis: str,
    along: str = "step",
    name_ends: bool = False,
) -> str:
    """Lines over steps, or `along` another value; `axis` names what goes up. With `name_ends` each line carries its
    name instead of a legend."""
    legend, top = ("", 0.0) if name_ends else sheet.legend([(line.name, line.style) for line in drawn], 0, lines=True)
    top += 26
    ends = min(0.34 * sheet.width, 14 + BOLD * max(text_width(line.name) for line in drawn)) if name_ends else 12
    bottom = top + (230 if sheet.narrow else 250)
    probe = Linear(*y_range, bottom - 4, top + 4)
    frame = Frame(room_for(probe), top, sheet.width - ends, bottom)
    steps = [dot.x for line in drawn for dot in line.dots]
    x = Linear(min(0.0, *steps), max(1.0, *steps), frame.left + 8, frame.right - 8, wanted=4)
    parts = [frame.area(), upward(sheet, frame, probe), across(sheet, frame, x, along)]
    parts += [_band(sheet, line, x, probe) for line in drawn]
    parts += [_line(sheet, line, x, probe, 0 if name_ends else k) for k, line in enumerate(drawn)]
    if name_ends:
        parts.append(_names(sheet, drawn, frame, probe))
    parts.append(sheet.words(0, top - 12, axis, fill=sheet.ink["ink"]))
    return sheet.svg(bottom + 44, title, description, legend, *parts)


def _line(sheet: Sheet, line: Line, x: Scale, y: Scale, order: int) -> str:
    """Later lines are drawn finer, so that one that coincides with an earlier one does not hide it."""
    dots = thin(line.dots, MOST_POINTS)
    path = "M" + "L".join(f"{number(x(dot.x))} {number(y(dot.y))}" for dot in dots)
    size = max(0.65, 1.1 - 0.15 * order)
    marks = (
        sheet.mark(dot.tip, sheet.symbol(line.style, x(dot.x), y(dot.y), size)) for dot in thin(line.dots, MOST_MARKS)
    )
    return sheet.stroke(path, line.style, max(1.4, 2.6 - 0.3 * order)) + "".join(marks)


def _band(sheet: Sheet, line: Line, x: Scale, y: Scale) -> str:
    edges = [(dot.x, dot.interval) for dot in thin(line.dots, MOST_POINTS) if dot.interval]
    if len(edges) < 2:
        return ""
    there = [f"{number(x(at))} {number(y(interval[1]))}" for at, interval in edges]
    back = [f"{number(x(at))} {number(y(interval[0]))}" for at, interval in reversed(edges)]
    return el("path", d="M" + "L".join(there + back) + "Z", fill=sheet.ink[line.style.colour], opacity="0.14")


def _names(sheet: Sheet, drawn: Sequence[Line], frame: Frame, y: Scale) -> str:
    """Names beside the ends of their lines, pushed apart where they would overlap."""
    wanted = sorted((y(line.dots[-1].y), i) for i, line in enumerate(drawn))
    places: list[float] = []
    for at, _ in wanted:
        places.append(max(at, places[-1] + 14) if places else at)
    excess = max(0.0, places[-1] - frame.bottom)
    places = [max(frame.top + 14 * k, at - excess) for k, at in enumerate(places)]
    named = []
    for place, (at, index) in zip(places, wanted):
        line = drawn[index]
        hair = f"M{number(frame.right - 8)} {number(at)}L{number(frame.right + 4)} {number(place)}"
        named.append(el("path", d=hair, stroke=sheet.ink[line.style.colour], fill="none", stroke_width=0.8))
        named.append(
            sheet.words(
                frame.right + 7,
                place + 4,
                line.name,
                room=(sheet.width - frame.right - 8) / BOLD,
                fill=sheet.ink[line.style.colour],
                font_weight=600,
            )
        )
    return "".join(named)


@dataclass(frozen=True)
class HeatRow:
    name: str
    values: tuple[float | None, ...]


def heat(
    sheet: Sheet, rows: Sequence[HeatRow], steps: Sequence[float], *, title: str, description: str, axis: str
) -> str:
    """One row per layer, one column per step, darker where the value is higher."""
    columns = thin(tuple(range(len(steps))), MOST_COLUMNS)
    values = [value for row in rows for value in row.values if value is not None]
    low, high = min(values), max(values)
    tall, top = 15.0, 52.0
    left = min(0.36 * sheet.width, 12 + max(text_width(row.name) for row in rows))
    frame = Frame(left, top, sheet.width - 2, top + tall * len(rows))
    wide = (frame.right - frame.left) / len(columns)
    parts = [frame.area(), _shades(sheet, axis, low, high)]
    for i, row in enumerate(rows):
        y = top + tall * i
        cells: dict[int, list[str]] = {}
        for k, column in enumerate(columns):
            value = row.values[column] if column < len(row.values) else None
            if value is not None:
                shade = min(SHADES - 1, int(SHADES * (value - low) / (high - low))) if high > low else SHADES // 2
                cell = f"M{number(left + wide * k)} {number(y)}h{wide:.2f}v{number(tall - 1)}h-{wide:.2f}z"
                cells.setdefault(shade, []).append(cell)
        filled = (el("path", d="".join(paths), fill=sheet.ink[f"h{shade}"]) for shade, paths in sorted(cells.items()))
        parts.append(sheet.words(0, y + 11, row.name, room=left - 8, fill=sheet.ink["ink"], font_size=11))
        parts.append(sheet.mark(_change(row), *filled))
    ends = ((frame.left, "start", steps[0]), (frame.right, "end", steps[-1]))
    parts += [sheet.words(x, frame.bottom + 16, f"step {at:g}", text_anchor=anchor) for x, anchor, at in ends]
    return sheet.svg(frame.bottom + 24, title, description, *parts)


def _shades(sheet: Sheet, axis: str, low: float, high: float) -> str:
    boxes = (el("rect", x=14.0 * i, y=18, width=14, height=10, fill=sheet.ink[f"h{i}"]) for i in range(SHADES))
    words = sheet.words(0, 12, axis, fill=sheet.ink["ink"])
    return words + "".join(boxes) + sheet.words(14 * SHADES + 8, 27, f"{low:.3g} to {high:.3g}")


def _change(row: HeatRow) -> str:
    values = [value for value in row.values if value is not None]
    return f"{row.name}: {values[0]:.3g} at first, {values[-1]:.3g} at last" if values else f"{row.name}: no values"


def thin(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
