"""SVG as text: elements, words that fit, marks that differ in shape and dash as well as colour."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Palette = Mapping[str, str]

_HEAT = ("#eef3f8", "#d3e1ee", "#b3cbe2", "#8fb2d4", "#6a97c3", "#477cb0", "#2b6198", "#15467c", "#062c5c")

PAPER: Palette = {
    "ink": "#1c1f24",
    "soft": "#5a626d",
    "line": "#d9dde2",
    "paper": "#ffffff",
    "m0": "#d55e00",
    "m1": "#0072b2",
    "m2": "#008f68",
    "m3": "#b8579a",
    "m4": "#8a6d00",
    "m5": "#4d4d4d",
    "d0": "#1d4e89",
    "d1": "#4a5196",
    "d2": "#7a5195",
    "d3": "#a05094",
    "d4": "#bc5090",
    "d5": "#cf4c6c",
    "d6": "#cc5a3a",
    "d7": "#b86e00",
    **{f"h{i}": shade for i, shade in enumerate(_HEAT)},
}
"""Okabe and Ito's hues, darkened to stand out from white: m for models, d for depth, h for heat."""

PAGE: Palette = {name: f"var(--{name})" for name in PAPER}
"""The same names left to the style sheet, which knows light from dark."""

DASHES = (None, "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2", "12 4")
SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5.4L5 3.6H-5z",
    "M0 -5.6L5.6 0L0 5.6L-5.6 0z",
    "M0 5.4L5 -3.6H-5z",
    "M-1.6 -5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
    "M-5 -3.2L-3.2 -5L0 -1.8L3.2 -5L5 -3.2L1.8 0L5 3.2L3.2 5L0 1.8L-3.2 5L-5 3.2L-1.8 0z",
)
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Style:
    """How one line or series looks: colour, shape and dash all differ, so that none is needed alone."""

    colour: str
    shape: str
    dash: str | None

    @classmethod
    def of_model(cls, index: int) -> Style:
        return cls(f"m{index % 6}", SHAPES[index % 7], DASHES[index % 6])

    @classmethod
    def of_depth(cls, index: int, layers: int) -> Style:
        return cls(f"d{round(7 * index / max(1, layers - 1))}", SHAPES[index % 7], DASHES[index % 6])


@dataclass(frozen=True)
class Sheet:
    """What a chart is drawn on: its width, its colours, and whether it stands alone as a file."""

    width: float
    ink: Palette
    key: str
    alone: bool = False

    @property
    def narrow(self) -> bool:
        return self.width < 400

    def svg(self, height: float, title: str, description: str, *parts: str) -> str:
        """The finished drawing, named for those who hear it."""
        named = (el("title", text(title), id=f"{self.key}-t"), el("desc", text(description), id=f"{self.key}-d"))
        size = {"xmlns": "http://www.w3.org/2000/svg", "width": self.width, "height": height} if self.alone else {}
        back = (el("rect", width=self.width, height=height, fill=self.ink["paper"]),) if self.alone else ()
        return el(
            "svg",
            *named,
            *back,
            *parts,
            **size,
            viewBox=f"0 0 {number(self.width)} {number(height)}",
            role="img",
            aria_labelledby=f"{self.key}-t {self.key}-d",
            font_family="Helvetica, Arial, sans-serif" if self.alone else None,
            font_size=12,
        )

    def words(
        self, x: float, y: float, words: str, *, room: float | None = None, halo: bool = False, **attributes: object
    ) -> str:
        """Text, shortened with an ellipsis where it would not fit into `room`; a halo keeps lines out of it."""
        shown = words if room is None else shorten(words, room)
        if halo:
            attributes |= {"stroke": self.ink["paper"], "stroke_width": 4, "paint_order": "stroke"}
        return el("text", text(shown), x=x, y=y, **{"fill": self.ink["soft"], **attributes})

    def mark(self, tip: str, *children: str) -> str:
        """A group that says what it is when pointed at."""
        return el("g", el("title", text(tip)), *children, class_="mark")

    def symbol(self, style: Style, x: float, y: float, scale: float = 1.0) -> str:
        hit = "" if self.alone else el("circle", cx=x, cy=y, r=9 if scale > 0.7 else 4, fill="transparent")
        sized = "" if scale == 1 else f" scale({scale:g})"
        return hit + el(
            "path",
            d=style.shape,
            transform=f"translate({number(x)} {number(y)}){sized}",
            fill=self.ink[style.colour],
            stroke=self.ink["paper"],
            stroke_width=1,
        )

    def legend(self, entries: Sequence[tuple[str, Style]], top: float, *, lines: bool) -> tuple[str, float]:
        """Entries in as many rows as they need, and where the next thing may start."""
        x, y, drawn = 0.0, top + 10, []
        for label, style in entries:
            shown = shorten(label, self.width - 40)
            needed = 32 + text_width(shown) + 18
            if x > 0 and x + needed - 18 > self.width:
                x, y = 0.0, y + 20
            if lines:
                drawn.append(self.stroke(f"M{number(x)} {number(y)}h26", style))
            drawn.append(self.symbol(style, x + 13, y).replace(' r="9"', ' r="0"'))
            drawn.append(self.words(x + 32, y + 4, shown, fill=self.ink["ink"]))
            x += needed
        return el("g", *drawn, class_="legend"), y + 16

    def stroke(self, d: str, style: Style, width: float = 2) -> str:
        return el(
            "path",
            d=d,
            fill="none",
            stroke=self.ink[style.colour],
            stroke_width=width,
            stroke_dasharray=style.dash,
            stroke_linejoin="round",
        )


def el(name: str, /, *children: str, **attributes: object) -> str:
    """One element. Attributes are escaped; children are markup already."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{number(value) if isinstance(value, float) else text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(children)}</{name}>" if children else f"<{name}{given}/>"


def text(words: str) -> str:
    """Escaped for elements and attributes; characters that XML has no place for become the replacement character."""
    return escape(_NOT_XML.sub("\ufffd", words), quote=True)


def number(value: float) -> str:
    """A coordinate: one decimal, no more zeros than needed."""
    return f"{value:.1f}".removesuffix(".0")


_NARROWEST = 0.4


def text_width(words: str, size: float = 12) -> float:
    """About how wide words come out; rather too wide than too narrow."""
    return size * sum(map(_em, words))


def shorten(words: str, room: float, size: float = 12) -> str:
    """Words that fit into `room`, cut in the middle: layer names differ at both ends."""
    if text_width(words, size) <= room:
        return words
    most = int(room / (_NARROWEST * size)) + 1
    for kept in range(min(len(words) - 1, most), 1, -1):
        shown = f"{words[: kept // 2]}…{words[-(kept - kept // 2) :]}"
        if text_width(shown, size) <= room:
            return shown
    return "…"


def _em(character: str) -> float:
    """Widths of the widest of the usual screen fonts."""
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    if character in "iljtfrI.,:;'|!()[] ":
        return _NARROWEST
    return 1.0 if character in "mwMW@%<>=+#~…" else 0.77 if character.isupper() else 0.64
