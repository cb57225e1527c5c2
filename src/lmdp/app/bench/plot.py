"""Bars of step times, as an SVG written by hand."""

from __future__ import annotations

from html import escape
from typing import Any

LABEL, BAR, ROW, GAP = 190, 420, 16, 34
OURS, THEIRS, BASE = "#2b6cb0", "#b7791f", "#718096"


def bars(models: dict[str, dict[str, Any]]) -> str:
    """One group of horizontal bars per model: time as a ratio to non-private SGD, a line at 1."""
    parts, y = [], 24.0
    longest = max((row["time"] for model in models.values() for row in model["rows"].values()), default=1.0)
    scale = BAR / max(longest, 1.0)
    for model in models.values():
        parts.append(_text(0, y, model["title"], weight="bold"))
        top = y + 6
        for name, row in model["rows"].items():
            y += ROW
            colour = OURS if name.startswith("lmdp") else BASE if row["time"] == 1.0 else THEIRS
            width = row["time"] * scale
            parts.append(_text(LABEL - 6, y + 4, name, anchor="end"))
            parts.append(f'<rect x="{LABEL}" y="{y - 6:.0f}" width="{width:.1f}" height="11" fill="{colour}"/>')
            parts.append(_text(LABEL + width + 5, y + 4, f"{row['time']:.2f}"))
        one = LABEL + scale
        parts.append(f'<line x1="{one:.1f}" y1="{top:.0f}" x2="{one:.1f}" y2="{y + 8:.0f}" stroke="#000" />')
        y += GAP
    size = f'width="{LABEL + BAR + 60}" height="{y:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    title = "<title>Time of one training step, as a ratio to non-private SGD</title>"
    return "\n".join([head, title, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
