"""What was tried and what was chosen, as a page with the frontier."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmdp.app.cells.choice import Point, frontier
from lmdp.app.cells.statistics import mean_of
from lmdp.methods import METHODS
from lmdp.report.charts import FIGURE_WIDTH, Chart
from lmdp.report.html import chart, document, paragraph, section
from lmdp.report.scatter import Place, Series, scatter
from lmdp.report.svg import PAPER, Sheet, Style, el, text
from lmdp.report.tables import boxed

if TYPE_CHECKING:
    from lmdp.app.tune.run import Tuned, Wanted


def figure(tuned: Tuned) -> str:
    """The frontier as a file that stands alone."""
    sheet = Sheet(FIGURE_WIDTH, PAPER, "frontier", alone=True)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_drawn(tuned)(sheet)}\n'


def render(wanted: Wanted, tuned: Tuned, command: str) -> str:
    from lmdp import __version__

    head = el(
        "header",
        paragraph(f"lmdp {__version__} · {datetime.date.today().isoformat()}", "over"),
        el("h1", f"Settings for {text(str(wanted.base['model']))}, tuned on public data"),
        paragraph(said(tuned), "verdict"),
        paragraph(
            f"Tuned on {wanted.public} at epsilon {wanted.base['epsilon']:g}, {wanted.seeds} seed(s). Of the settings "
            f"within {wanted.tolerance:g} of the highest test accuracy, the one whose canaries leak least. Public data "
            "only: it costs no privacy. What is best here need not be best on other data.",
            "note",
        ),
    )
    every = [point for points in tuned.tried.values() for point in points]
    best = frontier(every)
    keys = list(dict.fromkeys(key for point in every for key, _ in point.values))
    rows = [_row(point, keys, point in best, point == tuned.best) for point in sorted(every, key=lambda p: -p.accuracy)]
    heads = (*keys, "test accuracy", "AUC on canaries", "")
    return document(
        "Settings tuned on public data",
        head,
        section("Leakage against accuracy", chart(_drawn(tuned), "frontier", "Lower right is better."), key="frontier"),
        section("All settings", boxed("All settings", heads, rows, {len(heads) - 1}), key="settings"),
        section("How to reproduce this", el("pre", el("code", text(command))), key="making"),
    )


def said(tuned: Tuned) -> str:
    """The choice in a sentence, with what the other methods gave at their own best settings."""
    best = tuned.best
    chosen = ", ".join(f"{key.replace('_', ' ')} {_shown(value)}" for key, value in best.values if key != "method")
    others = "; ".join(
        f"{METHODS[method].label} {point.accuracy:.3f} and {point.leakage:.3f}"
        for method, point in tuned.own_best.items()
        if method != best["method"]
    )
    first = f"{METHODS[best['method']].label} with {chosen}: test accuracy {best.accuracy:.3f}, AUC on canaries "
    return f"{first}{best.leakage:.3f}." + (f" At their own best settings: {others}." if others else "")


def _drawn(tuned: Tuned) -> Chart:
    chosen = {id(point) for point in tuned.own_best.values()}
    series = [
        Series(METHODS[method].label, Style.of_model(i), tuple(_place(p, id(p) in chosen) for p in points))
        for i, (method, points) in enumerate(tuned.tried.items())
    ]
    return lambda sheet: scatter(
        sheet,
        series,
        title="Canary leakage against test accuracy",
        description="One point for each setting; means over seeds, with 95 % intervals where there are two or more.",
        axis="AUC on canaries at the leakiest layer",
        along="test accuracy (rings: each method's choice)",
    )


def _place(point: Point, chosen: bool) -> Place:
    ranges = [_range(values) for values in (point.accuracies, point.leakages)]
    named = ", ".join(f"{key} {_shown(value)}" for key, value in point.values)
    tip = f"{named}: accuracy {point.accuracy:.3f}, AUC on canaries {point.leakage:.3f}"
    return Place(point.accuracy, point.leakage, ranges[0], ranges[1], tip, chosen)


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    told = mean_of(values)
    return None if told is None else (told.low, told.high)


def _row(point: Point, keys: Sequence[str], undominated: bool, best: bool) -> list[str]:
    values = dict(point.values)
    mark = "chosen" if best else "on the frontier" if undominated else ""
    cells = [text(_shown(values[key])) if key in values else "–" for key in keys]
    return [*cells, f"{point.accuracy:.3f}", f"{point.leakage:.3f}", mark]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
