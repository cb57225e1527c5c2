"""The page in a real browser: it fits, it answers, it runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lmdp.report import Story, render
from tests.report import sample

BROWSER = os.environ.get("LMDP_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH and LMDP_CHROMIUM is not set")

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'

PROBE = """
function look() {
  function seen(what) {
    return Array.from(document.querySelectorAll(what)).filter(function (s) { return s.getClientRects().length; });
  }
  function height(what) { return what.getBoundingClientRect().height; }
  var shown = seen("figure svg");
  var clipped = [];
  shown.forEach(function (svg) {
    var box = svg.getBoundingClientRect();
    svg.querySelectorAll("text").forEach(function (t) {
      var r = t.getBoundingClientRect();
      if (r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1)
        clipped.push(t.textContent);
    });
  });
  var tip = document.getElementById("tip");
  function said(mark, event) { mark.dispatchEvent(event); return tip.hidden ? null : tip.textContent; }
  var marks = shown.length ? shown[0].querySelectorAll(".mark") : [];
  var answers = {};
  if (marks.length > 1) {
    answers.label = marks[0].getAttribute("aria-label");
    answers.pointer = said(marks[0], new PointerEvent("pointerover", { bubbles: true }));
    answers.left = said(marks[0], new PointerEvent("pointerout", { bubbles: true }));
    marks[0].focus();
    answers.focus = tip.hidden ? null : tip.textContent;
    marks[0].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
    answers.second = marks[1].getAttribute("aria-label");
    answers.arrow = tip.hidden ? null : tip.textContent;
    marks[1].dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    answers.escape = tip.hidden ? null : tip.textContent;
  }
  parent.postMessage(JSON.stringify({
    charts: shown.length, clipped: clipped, answers: answers, hacked: typeof window.hacked,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    smallest: Math.min.apply(null, seen("figure svg text").map(height).concat([99])),
    background: getComputedStyle(document.body).backgroundColor
  }), "*");
}
window.addEventListener("load", look);
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


def looked_at(story: Story, folder: Path, width: int, *options: str) -> dict[str, Any]:
    """What a script inside the page sees at this width. The page's policy is kept; only the probe's hash is added."""
    page = render(story)
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    (folder / "page.html").write_text(page.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    (folder / "frame.html").write_text(
        "<!doctype html><pre id='seen'></pre><script>window.onmessage = function (event) {"
        "document.getElementById('seen').textContent = event.data; };</script>"
        f"<iframe src='page.html' style='border:0;width:{width}px;height:3000px'></iframe>"
    )
    shown = run(
        folder, "--window-size=1400,3000", *options, "--virtual-time-budget=4000", "--dump-dom", uri(folder, "frame")
    )
    seen = re.search(r'<pre id="seen">(.+?)</pre>', shown.stdout, re.S)
    assert seen is not None, shown.stdout[:500]
    answers: dict[str, Any] = json.loads(unescape(seen[1]))
    return answers


def uri(folder: Path, name: str) -> str:
    return (folder / f"{name}.html").as_uri()


STORIES = {
    "realistic": sample.story(),
    "crowd": sample.crowd(60, 6),
    "hostile": sample.story(
        title=HOSTILE,
        layers=(HOSTILE, "层" * 60),
        trained=(
            replace(sample.sgd(), name=HOSTILE, audit=sample.audit({HOSTILE: 0.6, "层" * 60: 0.5})),
            replace(sample.lm(3.0, reasons=[HOSTILE]), name="W" * 90),
        ),
        command=HOSTILE * 9,
        config={HOSTILE: HOSTILE},
    ),
}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", STORIES)
def test_the_page_fits_its_screen_and_nothing_is_clipped(tmp_path: Path, name: str, width: int) -> None:
    seen = looked_at(STORIES[name], tmp_path, width)
    assert seen["charts"] >= 5
    assert seen["overflow"] <= 0
    assert seen["clipped"] == []
    assert seen["smallest"] >= 11, "words on charts stay legible"
    assert seen["hacked"] == "undefined"


def test_a_mark_answers_to_pointer_focus_and_arrow_keys(tmp_path: Path) -> None:
    answers = looked_at(sample.story(), tmp_path, 1280)["answers"]
    assert answers["label"].startswith("SGD, conv1: AUC 0.512")
    assert answers["pointer"] == answers["focus"] == answers["label"]
    assert answers["arrow"] == answers["second"] != answers["label"]
    assert answers["left"] is answers["escape"] is None


def test_the_page_follows_the_colour_scheme(tmp_path: Path) -> None:
    light, dark = (
        looked_at(sample.story(), tmp_path, 1280, f"--blink-settings=preferredColorScheme={scheme}")["background"]
        for scheme in (1, 0)
    )
    assert light == "rgb(255, 255, 255)"
    assert dark != light


def test_the_page_alone_runs_without_complaint_and_is_not_blank(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render(STORIES["hostile"]), encoding="utf-8")
    run(tmp_path, "--window-size=1280,2400", f"--screenshot={tmp_path / 'page.png'}", uri(tmp_path, "page"))
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).reshape(-1, 3)
    inked = (pixels < 200).any(axis=1).mean()
    assert 0.01 < inked < 0.5
    assert len(np.unique(pixels // 16, axis=0)) > 30


def test_it_prints(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render(sample.story()), encoding="utf-8")
    run(tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", uri(tmp_path, "page"))
    pages = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes()))
    assert 3 <= pages <= 12
