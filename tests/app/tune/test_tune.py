"""`lmdp tune`: the rule of choice, the search, and the recipe that comes out of it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdp.app import cli
from lmdp.app.arguments import TUNED
from lmdp.app.cells import run as cells_run
from lmdp.app.cells.cell import Cell
from lmdp.app.cells.choice import Point, frontier, least_leaky
from lmdp.app.config import SETTINGS, Config
from lmdp.app.tune.run import Wanted
from lmdp.app.tune.search import Values, searched

shares = st.floats(0, 1)
points = st.lists(st.tuples(shares, shares), min_size=1, max_size=8).map(
    lambda pairs: [Point((("n", i),), (a,), (b,)) for i, (a, b) in enumerate(pairs)]
)


@given(points, st.floats(0, 0.5))
def test_the_choice_is_nearly_the_most_accurate_and_none_such_leaks_less(tried: list[Point], tolerance: float) -> None:
    best = least_leaky(tried, tolerance)
    highest = max(point.accuracy for point in tried)
    near = [point for point in tried if point.accuracy >= highest - tolerance]
    assert best in near
    assert best.leakage == min(point.leakage for point in near)


@given(points)
def test_nothing_on_the_frontier_is_beaten_and_everything_else_is(tried: list[Point]) -> None:
    best = frontier(tried)
    assert max(tried, key=lambda p: (p.accuracy, -p.leakage)) in best
    for point in tried:
        beaten = any(
            o.accuracy >= point.accuracy
            and o.leakage <= point.leakage
            and (o.accuracy > point.accuracy or o.leakage < point.leakage)
            for o in tried
        )
        assert (point in best) == (not beaten)


def test_each_value_is_searched_at_the_best_of_those_before_it() -> None:
    asked: list[Values] = []

    def measure(settings: Any) -> list[Point]:
        asked.extend(settings)
        return [Point(tuple(v.items()), (1 - abs(v["a"] - 2) / 10 - abs(v["b"] - 3) / 10,), (0.5,)) for v in settings]

    best, tried = searched({"method": "m"}, {"a": (1, 2, 3), "b": (1, 3)}, measure, 0.01)
    assert dict(best.values) == {"method": "m", "a": 2, "b": 3}
    assert [(v["a"], v["b"]) for v in asked] == [(1, 1), (2, 1), (3, 1), (2, 1), (2, 3)]
    assert len(tried) == 4


def test_a_method_with_one_key_less_has_as_many_tries() -> None:
    def measure(settings: Any) -> list[Point]:
        return [Point(tuple(v.items()), (1 - abs(v["a"] - 2.8) / 10,), (0.5,)) for v in settings]

    rates, emphases = (1.0, 2.0, 4.0), (1, 0, 3, 5)
    weighed, tried = searched({}, {"a": rates, "r": emphases}, measure, 0.0)
    plain, also_tried = searched({}, {"a": rates}, measure, 0.0, {"a": len(emphases) - 1})
    assert len(tried) == len(also_tried) == 6
    assert weighed["a"] == 2.0
    assert plain["a"] == 2.83  # between two of the rates


def test_what_cannot_be_tuned_is_refused_by_name() -> None:
    told: dict[str, Any] = {
        "methods": ["dpsgd"],
        "options": {"epochs": [1.0]},
        "seeds": 1,
        "tolerance": 0.0,
        "examples": 0,
    }
    config = Config(shadow="digits")
    for changed, words in [
        ({"methods": ["sgd"]}, "'sgd', which is not private"),
        ({"options": {"epochs": []}}, "is empty"),
        ({"seeds": 0}, "--seeds is 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            Wanted.of(config, **{**told, **changed})
    with pytest.raises(ValueError, match="leave half= out"):
        Wanted.of(Config(shadow="digits?half=1"), **told)
    with pytest.raises(ValueError, match="--shadow SPEC"):
        Wanted.of(Config(method="dpsgd"), **told)


WORDS = ["tune", "--model", "s-cnn", "--shadow", "digits", "--size", "28", "--epsilon", "8", "--delta", "1e-4"]


def test_a_tuning_ends_with_a_recipe_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Cell] = []

    def measure(cell: Cell, *_: Any) -> dict[str, Any]:
        measured.append(cell)
        good = 0.9 - 0.1 * abs(cell["learning_rate"] - 1) - (cell["method"] == "autos") * 0.2 + 0.001 * cell.seed
        return {"accuracy": good, "canaries": {"fc": {"auc": 0.5 + 0.01 * cell["clip_norm"]}}}

    monkeypatch.setattr(cells_run, "_measured", measure)
    words = [*WORDS, "--methods", "dpsgd,autos", "--jobs", "1", "--out", str(tmp_path), "--quiet"]
    assert cli.main(words) == 0
    assert "lmdp train --recipe" in capsys.readouterr().out
    best = tomllib.loads((tmp_path / "best.toml").read_text())
    assert best["method"] == "dpsgd"
    assert (best["learning_rate"], best["clip_norm"], best["unit_clip"], best["epsilon"]) == (1.0, 0.5, True, 8.0)
    tried = json.loads((tmp_path / "tune.json").read_text())["tried"]
    assert len(tried["dpsgd"]) == len(tried["autos"]) == 5 + 2 + 2 + 3
    assert "data" not in best
    Config.load(tmp_path / "best.toml")
    assert {cell["data"] for cell in measured} == {"digits?half=1&limit=6000"}
    assert {cell["shadow"] for cell in measured} == {"digits?half=2&limit=6000"}
    assert {cell.seed for cell in measured} == {1, 2}
    ElementTree.fromstring((tmp_path / "frontier.svg").read_text().split("\n", 1)[1])
    page = (tmp_path / "report.html").read_text()
    assert "Auto-S" in page
    assert "chosen" in page
    number = len(measured)
    assert cli.main(words) == 0
    assert len(measured) == number  # all were there


def test_everything_that_is_tuned_is_a_setting_with_possible_values() -> None:
    for key, (_, tried) in TUNED.items():
        for value in tried.split(","):
            SETTINGS[key].parse(key, value)


def test_values_that_are_no_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--learning-rates", "fast", "--out", str(tmp_path / "out")]) == 2
    assert "--learning-rates is 'fast'" in capsys.readouterr().err
    few = ["--examples", "500", "--out", str(tmp_path / "out")]
    assert cli.main([*WORDS, *few]) == 2
    assert "has 500 training examples; tuning needs at least 600" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_small_tuning_for_real_whose_recipe_trains(tmp_path: Path) -> None:
    few = ["--sample-rate", "0.2", "--shadow-epochs", "2", "--learning-rates", "0.2,0.5", "--clip-norms", "1"]
    few += ["--epochs", "2", "--emphases", "1", "--seeds", "1", "--examples", "0", "--methods", "dpsgd,lm"]
    assert cli.main([*WORDS, *few, "--out", str(tmp_path / "tuned")]) == 0
    tried = json.loads((tmp_path / "tuned" / "tune.json").read_text())["tried"]
    assert {method: len(points) for method, points in tried.items()} == {"dpsgd": 2, "lm": 2}
    recipe = str(tmp_path / "tuned" / "best.toml")
    assert cli.main(["train", "--recipe", recipe, "--data", "digits", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    told = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert told["epsilon"] <= 8
