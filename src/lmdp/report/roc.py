"""True against false positives on logarithmic axes, where the members that are surely recognised can be seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmdp.report.axes import Frame, across, room_for, upward
from lmdp.report.lines import thin
from lmdp.report.scales import Log
from lmdp.report.svg import Sheet, Style, el, number
from lmdp.report.values import small

MOST_MARKS, MOST_POINTS = 9, 120


@dataclass(frozen=True)
class Curve:
    name: str
    style: Style
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]


@dataclass(frozen=True)
class Limit:
    """What no attack on an (epsilon, delta)-private model can exceed."""

    epsilon: float
    delta: float

    def tpr(self, fpr: float) -> float:
        if self.epsilon > 700:
            return 1.0
        above = math.exp(self.epsilon) * fpr + self.delta
        return min(above, 1 - math.exp(-self.epsilon) * (1 - self.delta - fpr), 1.0)

    def visible(self, least: float) -> bool:
        """Whether it cuts off a part of the plot that an eye can see."""
        return self.tpr(least) < 0.5


def of_several(limit: Callable[[float], float], examples: int, fpr: float = 0.01) -> float:
    """What no attack exceeds on so many examples of one person at once, by the limit that holds for each of them.

    From the data without them to the data with all, one example at a time: what an attack reaches on the one is its
    rate of false alarms for the next. Of epsilon and delta alone that is k times the epsilon, at a larger delta.
    """
    rate = fpr
    for _ in range(examples):
        rate = min(1.0, max(rate, limit(rate)))
    return rate


def roc(
    sheet: Sheet, curves: Sequence[Curve], limits: Sequence[Limit], least: float, *, title: str, description: str
) -> str:
    """The chart, from a false positive rate of `least` to 1."""
    legend, top = sheet.legend([(curve.name, curve.style) for curve in curves], 0, lines=True)
    top += 26
    probe = Log(least, 1.0, 0.0, 1.0)
    left = room_for(probe)
    side = sheet.width - left - 14
    frame = Frame(left, top, sheet.width - 14, top + side)
    x, y = Log(least, 1.0, frame.left, frame.right), Log(least, 1.0, frame.bottom, frame.top)
    parts = [frame.area(), upward(sheet, frame, y), across(sheet, frame, x, "false positive rate")]
    parts += [_limit(sheet, limit, least, x, y) for limit in limits]
    parts.append(_diagonal(sheet, frame))
    parts += [_curve(sheet, curve, least, x, y) for curve in curves]
    for limit in limits:
        name = f"limit of ε = {limit.epsilon:.3g}"
        parts.append(sheet.words(x(least) + 10, y(limit.tpr(least)) + 13, name, halo=True))
    parts.append(sheet.words(0, top - 12, "true positive rate", fill=sheet.ink["ink"]))
    return sheet.svg(frame.bottom + 44, title, description, legend, *parts)


def _diagonal(sheet: Sheet, frame: Frame) -> str:
    d = f"M{number(frame.left)} {number(frame.bottom)}L{number(frame.right)} {number(frame.top)}"
    at = frame.left + 0.62 * (frame.right - frame.left)
    y = frame.bottom - 0.62 * (frame.bottom - frame.top) + 18
    turned = f"rotate(-45 {number(at)} {number(y)})"
    line = el("path", d=d, stroke=sheet.ink["ink"], stroke_width=1.2, stroke_dasharray="4 3")
    return line + sheet.words(at, y, "chance", transform=turned, text_anchor="middle", fill=sheet.ink["ink"])


def _curve(sheet: Sheet, curve: Curve, least: float, x: Log, y: Log) -> str:
    points = [(f, t) for f, t in zip(curve.fpr, curve.tpr) if f >= least and t >= least]
    if not points:
        return ""
    drawn = thin(points, MOST_POINTS)
    path = "M" + "L".join(f"{number(x(f))} {number(y(t))}" for f, t in drawn)
    marks = (
        sheet.mark(f"{curve.name}: TPR {t:.4f} at FPR {f:.4f}", sheet.symbol(curve.style, x(f), y(t), 0.8))
        for f, t in thin(points, MOST_MARKS)
    )
    return sheet.stroke(path, curve.style) + "".join(marks)


def _limit(sheet: Sheet, limit: Limit, least: float, x: Log, y: Log) -> str:
    rates = [least ** (1 - i / 60) for i in range(61)]
    path = "M" + "L".join(f"{number(x(f))} {number(y(limit.tpr(f)))}" for f in rates)
    line = el("path", d=path, fill="none", stroke=sheet.ink["soft"], stroke_width=3, opacity="0.55")
    tip = f"no attack on a model with epsilon {limit.epsilon:.3g}, delta {small(limit.delta)} can lie above this line"
    return sheet.mark(tip, line)
