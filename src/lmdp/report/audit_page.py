"""An audit alone as one page, in the style and with the charts of a whole report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmdp.report.html import document, paragraph, section, warning
from lmdp.report.page import leakage
from lmdp.report.svg import Style, el

if TYPE_CHECKING:
    from lmdp.report.drawn import Audit


def render(report: Audit) -> str:
    """HTML that opens offline. Names are escaped: a layer may be called anything."""
    layers = tuple(leak.name for leak in report.layers)
    head = el(
        "header",
        el("h1", "Membership audit"),
        paragraph(report.verdict, "verdict"),
        *(paragraph(note, "note") for note in report.notes),
        warning(report.warning),
    )
    parts = leakage([("this model", Style.of_model(0), report)], layers, [], report.verdict)
    return document("Membership audit", head, section("Leakage by layer", *parts, key="mia"))
