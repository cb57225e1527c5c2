"""Charts are honest geometry: marks lie inside the plot and where the values say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdp.report import Story, figures
from lmdp.report.lines import thin
from lmdp.report.roc import Limit
from lmdp.report.scales import Linear, Log, span
from lmdp.report.svg import SHAPES, Style, shorten, text_width
from tests.report import sample

SVG = "{http://www.w3.org/2000/svg}"
STORIES = {
    "realistic": sample.story(),
    "crowd": sample.crowd(12, 6),
    "one layer": sample.story(
        layers=("embedding",), trained=(replace(sample.sgd(), audit=sample.audit({"embedding": 1.0})),)
    ),
    "extreme": sample.story(
        trained=(replace(sample.sgd(), audit=sample.audit({"a": 0.0, "b": 1.0})), sample.dpsgd(1e-3))
    ),
}


def drawn(story: Story) -> dict[str, ElementTree.Element]:
    return {name: ElementTree.fromstring(svg) for name, svg in figures(story).items()}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_marks_lie_inside_the_plot(story: Story) -> None:
    for name, svg in drawn(story).items():
        plot = svg.find(f".//{SVG}rect[@class='plot']")
        assert plot is not None
        x, y, width, height = (float(plot.attrib[key]) for key in ("x", "y", "width", "height"))
        marks = svg.findall(f".//{SVG}g[@class='mark']")
        assert marks, name
        spots = [path.attrib.get("transform", "") for mark in marks for path in mark.iter(f"{SVG}path")]
        for spot in filter(None, spots):
            at = re.match(r"translate\((\S+) (\S+)\)", spot)
            assert at is not None
            assert x - 0.1 <= float(at[1]) <= x + width + 0.1, name
            assert y - 0.1 <= float(at[2]) <= y + height + 0.1, name


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_every_chart_and_every_mark_can_be_heard(story: Story) -> None:
    for svg in drawn(story).values():
        ids = {node.attrib["id"] for node in svg.iter() if "id" in node.attrib}
        assert svg.attrib["role"] == "img"
        assert set(svg.attrib["aria-labelledby"].split()) <= ids
        for mark in svg.findall(f".//{SVG}g[@class='mark']"):
            assert (mark.findtext(f"{SVG}title") or "").strip()


def test_figures_stand_alone_without_style_sheets() -> None:
    files = figures(sample.story())
    assert {"mia-by-layer.svg", "accuracy.svg", "epsilon.svg", "weights.svg", "roc.svg", "risk.svg"} <= set(files)
    for svg in files.values():
        assert "var(" not in svg
        assert "<style" not in svg


def test_a_chart_without_data_is_not_drawn() -> None:
    assert set(figures(sample.story(trained=()))) == {"risk.svg", "risk-in-sample.svg"}
    assert not figures(sample.story(trained=(), risk=None))
    assert "weights.svg" not in figures(sample.story(trained=(sample.sgd(), sample.dpsgd())))


def test_an_interval_is_drawn_as_wide_as_it_is() -> None:
    svg = drawn(sample.story())["mia-by-layer.svg"]
    ends = []
    for mark in svg.findall(f".//{SVG}g[@class='mark']"):
        bar = re.match(r"M(\S+) \S+H(\d+\.?\d*)", mark.find(f"{SVG}path").attrib["d"])  # type: ignore[union-attr]
        stated = re.search(r"interval (\S+) to (\S+);", mark.findtext(f"{SVG}title") or "")
        assert bar is not None
        assert stated is not None
        ends += [(float(stated[i]), float(bar[i])) for i in (1, 2)]
    (v0, x0), (v1, x1) = min(ends), max(ends)
    for value, x in ends:
        assert x == pytest.approx(x0 + (x1 - x0) * (value - v0) / (v1 - v0), abs=1.5)


def test_the_limit_is_drawn_for_certified_runs_whose_epsilon_can_be_seen() -> None:
    def shows(epsilon: float, reasons: tuple[str, ...] = ()) -> bool:
        story = sample.story(trained=(sample.lm(epsilon, reasons=reasons),))
        return "limit of" in figures(story)["roc.svg"]

    assert shows(1.0)
    assert not shows(8.0)
    assert not shows(1.0, ("no reason to trust it",))


@given(st.floats(0, 30), st.floats(0, 0.1), st.floats(0, 1))
def test_the_limit_bounds_what_epsilon_and_delta_allow(epsilon: float, delta: float, fpr: float) -> None:
    tpr = Limit(epsilon, delta).tpr(fpr)
    assert min(fpr, 1 - 1e-12) <= tpr + 1e-9
    assert tpr <= 1
    assert tpr <= math.exp(epsilon) * fpr + delta + 1e-9
    assert 1 - fpr <= math.exp(epsilon) * (1 - tpr) + delta + 1e-6 * math.exp(epsilon)


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=20), st.floats(1e-3, 10))
def test_a_linear_scale_keeps_everything_inside_and_in_order(values: list[float], least: float) -> None:
    scale = Linear(*span(values, least), 10.0, 200.0)
    spots = [scale(value) for value in sorted(values)]
    assert all(10 <= spot <= 200 for spot in [*spots, scale(1e300), scale(-1e300)])
    assert spots == sorted(spots)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert len({label for _, label in ticks}) == len(ticks)


def test_a_log_scale_gives_each_decade_the_same_room() -> None:
    scale = Log(1e-3, 1.0, 0.0, 300.0)
    assert [round(scale(10.0**-k)) for k in range(4)] == [300, 200, 100, 0]
    assert scale(0.0) == 0.0


def test_models_differ_in_shape_and_dash_not_in_colour_alone() -> None:
    styles = [Style.of_model(i) for i in range(6)]
    assert len({s.colour for s in styles}) == len({s.shape for s in styles}) == len({s.dash for s in styles}) == 6
    assert len({(Style.of_model(i).colour, Style.of_model(i).shape) for i in range(42)}) == 6 * len(SHAPES)


@given(st.text(max_size=80), st.floats(10, 300))
def test_shortened_words_fit(words: str, room: float) -> None:
    assert text_width(shorten(words, room)) <= max(room, text_width("…"))


@given(st.lists(st.integers(), max_size=100), st.integers(2, 20))
def test_thinning_keeps_both_ends(items: list[int], most: int) -> None:
    kept = thin(items, most)
    assert len(kept) <= max(most, 0)
    if items:
        assert (kept[0], kept[-1]) == (items[0], items[-1])
