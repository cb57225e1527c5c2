"""The page around the contents: one file, no outside resource, no script or style but its own."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from lmdp.report.charts import Chart
from lmdp.report.svg import PAGE, Sheet, Style, el, text

FULL, HALF, NARROW = 880.0, 430.0, 358.0


def document(title: str, *parts: str) -> str:
    """A whole page. Its policy lets in nothing but the style and script written here, by their hashes."""
    style, script = _resource("page.css"), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = (
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", text(title)),
        el("style", style),
    )
    body = el("main", *parts) + el("script", script, id="marks")
    return f"<!doctype html>\n{el('html', el('head', *head), el('body', body), lang='en')}\n"


def chart(drawing: Chart, key: str, caption: str = "", *, width: float = FULL) -> str:
    """A figure drawn twice, for wide and for narrow screens; the style sheet shows the one that fits."""
    wide = el("div", drawing(Sheet(width, PAGE, f"{key}-w")), class_="wide")
    narrow = el("div", drawing(Sheet(NARROW, PAGE, f"{key}-n")), class_="narrow")
    return el("figure", wide, narrow, el("figcaption", text(caption)) if caption else "", id=key)


def section(title: str, *parts: str, key: str) -> str:
    return el("section", el("h2", text(title), id=f"{key}-h"), *parts, id=f"{key}-s", aria_labelledby=f"{key}-h")


def paragraph(words: str, class_: str | None = None) -> str:
    return el("p", text(words), class_=class_)


def pairs(entries: list[tuple[str, str]]) -> str:
    """Names and values; the values are markup."""
    return el("dl", *(el("dt", text(name)) + el("dd", value) for name, value in entries)) if entries else ""


def listing(items: list[str]) -> str:
    return el("ul", *(el("li", text(item)) for item in items)) if items else ""


def folded(summary: str, *parts: str) -> str:
    return el("details", el("summary", text(summary)), *parts)


def warning(words: str) -> str:
    said = el("strong", "Handle this page as private data.")
    return el("aside", el("p", said, " " + text(words[:1].upper() + words[1:])), class_="warning", role="note")


def named(name: str, style: Style) -> str:
    """A model's name beside the mark it has in the charts."""
    shape = el("path", d=style.shape, fill=PAGE[style.colour])
    return el("svg", shape, class_="key", viewBox="-7 -7 14 14", aria_hidden="true") + el("span", text(name))


@cache
def _resource(name: str) -> str:
    return resources.files("lmdp.report").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
