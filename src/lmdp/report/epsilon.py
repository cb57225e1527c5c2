"""Claimed epsilon beside its lower bound from canaries, one row for each audited training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmdp.report.axes import Frame, across
from lmdp.report.scales import Linear
from lmdp.report.svg import PAPER, Sheet, Style, el, number, text_width

if TYPE_CHECKING:
    from lmdp.report.drawn import Bound

ROW, WIDTH = 28.0, 640.0
CLAIMED, LOWER, REFUTED = Style.of_model(5), Style.of_model(1), Style.of_model(0)


def figure(bounds: Sequence[Bound]) -> str:
    """The chart as a file of its own."""
    return epsilon_bounds(Sheet(WIDTH, PAPER, "epsilon", alone=True), bounds)


def epsilon_bounds(sheet: Sheet, bounds: Sequence[Bound]) -> str:
    """A bar at what is claimed, a mark at what canaries show; a mark beyond the bar refutes the claim."""
    if not bounds:
        raise ValueError("there is no epsilon bound to draw; pass at least 1")
    series = [("claimed", CLAIMED), ("shown by canaries, at least", LOWER)]
    if any(bound.exceeded for bound in bounds):
        series.append(("shown, and more than claimed", REFUTED))
    legend, top = sheet.legend(series, 0, lines=False)
    top += 12
    names = [f"{bound.training} · {bound.canary}" for bound in bounds]
    left = min(0.45 * sheet.width, 14 + max(map(text_width, names)))
    frame = Frame(left, top, sheet.width - 14, top + ROW * len(bounds))
    most = max(value for b in bounds for value in (b.claimed, b.lower, 1.0) if math.isfinite(value))
    x = Linear(0.0, 1.1 * most, frame.left + 6, frame.right - 6, 6)
    parts = [frame.area(), across(sheet, frame, x, "epsilon")]
    for i, (name, bound) in enumerate(zip(names, bounds)):
        parts.append(_row(sheet, frame, x, name, bound, top + ROW * (i + 0.5)))
    confidence = min(bound.confidence for bound in bounds)
    description = (
        f"Lower bounds on epsilon ({confidence:.0%} confidence) beside the claimed epsilon. A bound below the claim is "
        "not a proof of it."
    )
    return sheet.svg(frame.bottom + 44, "Claimed epsilon and lower bounds", description, legend, *parts)


def _row(sheet: Sheet, frame: Frame, x: Linear, name: str, bound: Bound, y: float) -> str:
    style = REFUTED if bound.exceeded else LOWER
    between = f"M{number(x(bound.lower))} {number(y)}H{number(x(bound.claimed))}"
    claimed = sheet.symbol(CLAIMED, x(bound.claimed), y, 1.0)
    parts = [
        sheet.words(0, y + 4, name, room=frame.left - 12, fill=sheet.ink["ink"]),
        el("path", d=between, stroke=sheet.ink["line"], stroke_width=2),
        sheet.mark(f"claimed epsilon {bound.claimed:.3g} (delta {bound.delta:g})", claimed),
        sheet.mark(bound.verdict, sheet.symbol(style, x(bound.lower), y, 1.0)),
    ]
    return "".join(parts)
