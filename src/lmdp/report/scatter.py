"""One value against another, with the doubt of both: what one pays, and what one gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmdp.report.axes import Frame, across, room_for, upward
from lmdp.report.scales import Interval, Linear, span
from lmdp.report.svg import Sheet, Style, el, number


@dataclass(frozen=True)
class Place:
    """A point, by how much it may be off either way, and what it says when pointed at."""

    x: float
    y: float
    x_range: Interval | None
    y_range: Interval | None
    tip: str
    chosen: bool = False


@dataclass(frozen=True)
class Series:
    name: str
    style: Style
    places: tuple[Place, ...]


def scatter(sheet: Sheet, series: Sequence[Series], *, title: str, description: str, axis: str, along: str) -> str:
    """`axis` names what goes up, `along` what goes to the right. Chosen points have a ring."""
    legend, top = sheet.legend([(each.name, each.style) for each in series], 0, lines=False)
    top += 26
    bottom = top + (240 if sheet.narrow else 300)
    every = [place for each in series for place in each.places]
    ups = [edge for place in every for edge in (place.y, *(place.y_range or ()))]
    sides = [edge for place in every for edge in (place.x, *(place.x_range or ()))]
    y = Linear(*span(ups, least=0.02), bottom - 4, top + 4)
    frame = Frame(room_for(y), top, sheet.width - 12, bottom)
    x = Linear(*span(sides, least=0.02), frame.left + 8, frame.right - 8, wanted=4)
    parts = [frame.area(), upward(sheet, frame, y), across(sheet, frame, x, along)]
    parts += [_place(sheet, place, each.style, x, y) for each in series for place in each.places]
    parts.append(sheet.words(0, top - 12, axis, fill=sheet.ink["ink"]))
    return sheet.svg(bottom + 44, title, description, legend, *parts)


def _place(sheet: Sheet, place: Place, style: Style, x: Linear, y: Linear) -> str:
    at, up = x(place.x), y(place.y)
    bars = []
    if place.x_range:
        bars.append(f"M{number(x(place.x_range[0]))} {number(up)}H{number(x(place.x_range[1]))}")
    if place.y_range:
        bars.append(f"M{number(at)} {number(y(place.y_range[0]))}V{number(y(place.y_range[1]))}")
    ink = sheet.ink[style.colour]
    drawn = el("path", d="".join(bars), stroke=ink, opacity="0.45", fill="none") if bars else ""
    ring = el("circle", cx=at, cy=up, r=9.0, fill="none", stroke=ink, stroke_width=1.6) if place.chosen else ""
    return sheet.mark(place.tip, drawn, ring, sheet.symbol(style, at, up))
