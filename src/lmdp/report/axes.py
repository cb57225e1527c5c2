"""The plot area and its axes."""

from __future__ import annotations

from dataclasses import dataclass

from lmdp.report.scales import Scale
from lmdp.report.svg import Sheet, el, number, text_width


@dataclass(frozen=True)
class Frame:
    """The rectangle that marks are drawn in."""

    left: float
    top: float
    right: float
    bottom: float

    def area(self) -> str:
        """The rectangle itself, invisible; it tells where the marks may be."""
        return el(
            "rect",
            class_="plot",
            x=self.left,
            y=self.top,
            width=self.right - self.left,
            height=self.bottom - self.top,
            fill="none",
        )


def across(sheet: Sheet, frame: Frame, x: Scale, title: str, *, repeat_on_top: bool = False) -> str:
    """Vertical grid lines with their values below."""
    grid, labels = [], []
    for value, label in x.ticks():
        at = number(x(value))
        grid.append(f"M{at} {number(frame.top)}V{number(frame.bottom)}")
        labels.append(sheet.words(x(value), frame.bottom + 17, label, text_anchor="middle"))
        if repeat_on_top:
            labels.append(sheet.words(x(value), frame.top - 7, label, text_anchor="middle"))
    middle = (frame.left + frame.right) / 2
    named = sheet.words(middle, frame.bottom + 36, title, text_anchor="middle", fill=sheet.ink["ink"])
    return el("path", d="".join(grid) or "M0 0", stroke=sheet.ink["line"], fill="none") + "".join(labels) + named


def upward(sheet: Sheet, frame: Frame, y: Scale) -> str:
    """Horizontal grid lines with their values at the left. The name of the axis stands above the chart."""
    grid, labels = [], []
    for value, label in y.ticks():
        grid.append(f"M{number(frame.left)} {number(y(value))}H{number(frame.right)}")
        labels.append(sheet.words(frame.left - 8, y(value) + 4, label, text_anchor="end"))
    return el("path", d="".join(grid) or "M0 0", stroke=sheet.ink["line"], fill="none") + "".join(labels)


def room_for(scale: Scale) -> float:
    """How much space the values of an axis need beside it."""
    return max((text_width(label) for _, label in scale.ticks()), default=0.0) + 12
