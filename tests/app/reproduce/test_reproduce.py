"""`lmdp reproduce`: the grid, the verdicts and the page over made-up cells, and a small one for real."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lmdp.app import cli
from lmdp.app.cells.cell import HELD_OUT, IN_SAMPLE, PRINTED, STEP, TRAIN, estimate_for
from lmdp.app.cells.statistics import CANNOT_TELL, NOT_SUPPORTED, SUPPORTED
from lmdp.app.cells.store import Store
from lmdp.app.reproduce.figures import FIGURES, _smoothed
from lmdp.app.reproduce.grid import AS_PUBLISHED, COMPARED, CONTENDERS, LM, OPTIMAL, PARTS, SGD, Grid, cells_of
from lmdp.app.reproduce.page import ABOUT, TITLES, figures, render
from lmdp.app.reproduce.paper import EMPHASIS, EXPERIMENTS, METHODS, SHADOW_ERROR_RATES, error_rates
from lmdp.app.reproduce.rates import counted, rates_for
from lmdp.app.reproduce.results import Results, best
from lmdp.app.reproduce.run import Asked
from lmdp.app.reproduce.scales import SCALES, SHAPES
from lmdp.app.reproduce.tables import TABLES
from lmdp.app.reproduce.verdicts import JUDGES, Verdict, advice, verdicts
from lmdp.methods import METHODS as METHOD_TABLE
from lmdp.models import build
from tests.app.reproduce.made_up import LAYERS, grid, stored

# -- the paper --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_the_papers_rows_have_a_number_for_every_printed_layer(experiment) -> None:
    assert set(experiment.attacked) == set(METHODS) == set(experiment.seconds)
    assert {len(experiment.layers)} == {len(experiment.sgd), *map(len, experiment.attacked.values())}
    shares = [share for row in (experiment.sgd, *experiment.attacked.values()) for share in row]
    assert all(0.45 < share < 0.8 for share in shares)
    assert experiment.peak["lm"] < min(experiment.peak[name] for name in METHODS if name != "lm")
    assert 0 < experiment.gain < 0.03


def test_the_papers_ablations_agree_with_its_main_table() -> None:
    cifar = EXPERIMENTS["cifar10"]
    assert EMPHASIS[cifar.emphasis] == cifar.attacked["lm"]
    assert tuple(round(1 - rate, 3) for rate in SHADOW_ERROR_RATES["imagenet"]) == cifar.sgd


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_layer_gets_the_printed_rate_or_one_on_the_line_between(name: str) -> None:
    paper = EXPERIMENTS[name]
    size, channels = SHAPES[name]
    layers = counted(build(paper.model, (channels, size, size), 10))
    rates = error_rates(name, layers)
    assert list(rates) == [layer for layer, _ in layers]
    numbered = [rates[layer] for layer, counts in layers if counts]
    assert [numbered[at - 1] for at in paper.layers] == pytest.approx([1 - share for share in paper.sgd], abs=1e-3)
    assert numbered == sorted(numbered, reverse=True)  # ever leakier
    assert all(0.01 <= rate <= 0.5 for rate in rates.values())


# -- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_every_cell_of_every_scale_is_a_possible_configuration(scale) -> None:
    cells = cells_of(tuple(PARTS), Grid(scale, scale.experiments, 2))
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        if cell.kind != STEP:
            assert cell.config().seed == cell.seed
        if cell.kind == TRAIN:
            assert cell.config().canaries
            assert (cell.rates != "alike") == (cell["method"] == "lm")
    assert {cell.setting for cell in cells} == set(scale.experiments)


def test_every_part_has_a_title_a_judge_and_something_to_show() -> None:
    assert set(PARTS) == set(TITLES) == set(JUDGES) == set(TABLES) | set(FIGURES)
    assert set(ABOUT) <= set(PARTS)


def test_methods_are_compared_on_the_same_seeds_data_and_epsilon() -> None:
    cells = [cell for cell in grid("cpu").table2() if cell.kind == TRAIN and cell["method"] != "sgd"]
    free = {"method", "weights", "emphasis", "seed"}
    assert len({tuple((k, v) for k, v in cell.values if k not in free) for cell in cells}) == 1
    trained = {(cell["method"], cell["weights"] if METHOD_TABLE[cell["method"]].reweighted else "") for cell in cells}
    for method in ("lm", "lm-optimal"):
        assert {(method, source) for source in METHOD_TABLE[method].sources} <= trained
    assert {cell.seed for cell in cells} == {1, 2, 3}
    assert {cell.rates for cell in cells if cell["method"] == "lm"} == {PRINTED, HELD_OUT, IN_SAMPLE}


def test_full_has_the_papers_settings() -> None:
    for name, paper in EXPERIMENTS.items():
        (cell,) = Grid(SCALES["full"], (name,), 1).trained(name, LM)
        for key in ("model", "data", "epsilon", "delta", "sample_rate", "learning_rate", "clip_norm", "emphasis"):
            assert cell[key] == getattr(paper, key)


def test_parts_share_the_cells_that_both_need() -> None:
    both = cells_of(("table2", "fig2", "fig3", "fig4"), grid())
    assert set(both) == set(grid().table2())
    usual = [cell for cell in grid("cpu").emphasis() if cell in set(grid("cpu").table2())]
    assert len(usual) == 3  # the r of the paper, with each seed


def test_estimates_come_before_the_trainings_that_use_them(tmp_path: Path) -> None:
    cells = grid().table2()
    store = stored(tmp_path, [cell for cell in cells if cell.kind != TRAIN])
    for cell in cells:
        if cell.rates in (HELD_OUT, IN_SAMPLE):
            assert estimate_for(cell) in cells
            rates = rates_for(cell, store)
            assert rates is not None
            assert list(rates) == list(LAYERS)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def judged(out: Path, part: str, scale: str = "smoke") -> dict[tuple[str, str], Verdict]:
    told = verdicts(grid(scale), (part,), Store(out))
    return {(verdict.claim, verdict.tried): verdict for verdict in told}


def answers(out: Path, part: str, words: str, scale: str = "smoke") -> set[str]:
    told = judged(out, part, scale)
    assert any(words in " ".join(key) for key in told), list(told)
    return {verdict.answer for key, verdict in told.items() if words in " ".join(key)}


def train(out: Path, who, scale: str = "smoke", given: dict | None = None, **values: float) -> None:
    stored(out, grid(scale).trained("mnist", who, **(given or {})), **values)


@pytest.mark.parametrize("part", PARTS)
def test_without_cells_nothing_is_told_and_the_command_is(tmp_path: Path, part: str) -> None:
    for verdict in judged(tmp_path, part).values():
        assert verdict.answer == CANNOT_TELL
        assert verdict.command.startswith(f"lmdp reproduce {part} --scale smoke")
        assert cli.parser().parse_args(verdict.command.split()[1:]).what == part


@pytest.mark.parametrize("leak, expected", [(0.5, SUPPORTED), (0.55, NOT_SUPPORTED), (0.6, NOT_SUPPORTED)])
def test_a_lower_peak_than_every_baseline_is_supported_and_an_equal_one_is_not(
    tmp_path: Path, leak: float, expected: str
) -> None:
    for who in COMPARED:
        train(tmp_path, who, leak=0.55)
    train(tmp_path, LM, leak=leak)
    claim = f"{LM.label} has a lower peak risk"
    told = judged(tmp_path, "table2")
    found_answers = {v.answer for (c, how), v in told.items() if c.startswith(claim) and "held out" in how}
    assert found_answers == {expected}
    assert answers(tmp_path, "table2", f"{AS_PUBLISHED.label} has a lower peak") == {CANNOT_TELL}


@pytest.mark.parametrize("accuracy, expected", [(0.9, SUPPORTED), (0.89, SUPPORTED), (0.86, NOT_SUPPORTED)])
def test_utility_is_compared_with_the_best_baseline(tmp_path: Path, accuracy: float, expected: str) -> None:
    for who, value in zip(COMPARED, (0.8, 0.9, 0.85)):
        train(tmp_path, who, accuracy=value)
    train(tmp_path, LM, accuracy=accuracy)
    assert answers(tmp_path, "fig3", f"{LM.label} keeps") == {expected}


def test_bias_is_of_the_same_order_up_to_half_a_power_of_ten(tmp_path: Path) -> None:
    for who in (*COMPARED, LM):
        train(tmp_path, who, bias=1.0)
    assert answers(tmp_path, "fig4", f"bias of {LM.label} is of the same order") == {SUPPORTED}
    train(tmp_path, LM, bias=9.0)
    assert answers(tmp_path, "fig4", f"bias of {LM.label} is of the same order") == {NOT_SUPPORTED}
    train(tmp_path, OPTIMAL[0], bias=0.5)
    assert answers(tmp_path, "fig4", f"bias of {OPTIMAL[0].label} is lower") == {SUPPORTED}


def test_what_permuted_labels_reach_as_well_is_memory(tmp_path: Path) -> None:
    train(tmp_path, SGD)
    assert answers(tmp_path, "table2", f"attacks on {SGD.label}") == {SUPPORTED}
    told = answers(tmp_path, "fig2", "under the paper's protocol")
    assert told == {NOT_SUPPORTED}  # in-sample accuracy falls with depth in what was made up
    assert answers(tmp_path, "fig2", "held out, canaries") == {SUPPORTED}


def test_certified_weights_are_compared_with_the_published_ones(tmp_path: Path) -> None:
    train(tmp_path, AS_PUBLISHED, leak=0.55, accuracy=0.9)
    train(tmp_path, LM, leak=0.55, accuracy=0.9)
    assert answers(tmp_path, "table2", "certified weights") == {SUPPORTED}
    train(tmp_path, LM, leak=0.55, accuracy=0.88)
    assert answers(tmp_path, "table2", "certified weights") == {NOT_SUPPORTED}


def test_error_rates_transfer_if_all_layers_agree_on_all_shadow_sets(tmp_path: Path) -> None:
    stored(tmp_path, grid().shadow())
    assert answers(tmp_path, "shadow", "error rates agree") == {SUPPORTED}
    store = Store(tmp_path)
    for cell in grid().estimated("mnist", SCALES["smoke"].shadows["mnist"][1]):
        measured = store.get(cell)
        assert measured is not None
        measured.result["heldout"]["fc1"]["error_rate"] += 0.05  # type: ignore[index]
        store.put(cell, measured.result)
    told = judged(tmp_path, "shadow")
    assert {key[1].split(", ")[1]: v.answer for key, v in told.items()} == {
        "in-sample": SUPPORTED,
        "held out": NOT_SUPPORTED,
    }


@pytest.mark.parametrize("falls, expected", [(0.02, SUPPORTED), (-0.02, NOT_SUPPORTED)])
def test_trends_along_r(tmp_path: Path, falls: float, expected: str) -> None:
    for i, r in enumerate(SCALES["smoke"].emphases):
        train(tmp_path, LM, given={"emphasis": r}, leak=0.55 - falls * i, accuracy=0.9 - 0.05 * i)
    assert answers(tmp_path, "emphasis", "a larger r lowers") == {expected}


def test_a_frontier_compares_each_method_at_its_own_best_setting(tmp_path: Path) -> None:
    scale = SCALES["cpu"]
    base, epsilon = scale.base("mnist")["learning_rate"], scale.frontier_epsilons[0]
    low, high = (base * factor for factor in scale.frontier_rates)
    for who, rate, leak, accuracy in [
        *((COMPARED[0], low, 0.52, 0.80), (COMPARED[0], high, 0.60, 0.90)),
        *((LM, low, 0.51, 0.895), (LM, high, 0.60, 0.90)),
    ]:
        given = {"epsilon": epsilon, "learning_rate": rate}
        train(tmp_path, who, "cpu", given, leak=leak, accuracy=accuracy)
    results = Results(grid("cpu"), Store(tmp_path))
    assert best(results, "mnist", COMPARED[0], epsilon, 0.01) == high  # the other is much less accurate
    assert best(results, "mnist", LM, epsilon, 0.01) == low  # as accurate, and leaks less
    assert best(results, "mnist", LM, scale.frontier_epsilons[1], 0.01) is None
    assert answers(tmp_path, "frontier", f"epsilon {epsilon:g}", "cpu") == {SUPPORTED}
    told = verdicts(grid("cpu"), ("frontier",), Store(tmp_path))
    assert "names no method: LM-DP-SGD (private)" in advice(told)
    worse = [replace(verdict, answer=CANNOT_TELL) for verdict in told]
    assert "names no method: DP-SGD. " in advice(worse)  # in doubt
    assert advice([]) == ""


def test_time_and_memory_are_compared_with_dp_sgd_in_the_same_run(tmp_path: Path) -> None:
    stored(tmp_path, grid().step())
    assert {v.answer for v in judged(tmp_path, "time").values()} == {SUPPORTED}
    assert {v.answer for v in judged(tmp_path, "memory").values()} == {NOT_SUPPORTED}  # 1 % more is not more


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_rebuilds_every_part_and_fetches_nothing(tmp_path: Path) -> None:
    asked = grid()
    store = stored(tmp_path, cells_of(tuple(PARTS), asked))
    told = verdicts(asked, tuple(PARTS), store)
    page = render(asked, tuple(PARTS), store, told, "lmdp reproduce all <&>")
    for title in TITLES.values():
        assert f">{title}<" in page
    for who in CONTENDERS:
        assert who.label in page
    assert "cells were not run here" not in page
    assert "Not run here: D-CNN on CIFAR-10" in page
    assert "&lt;&amp;&gt;" in page
    assert not re.search(r"(?:src|href)=", page)
    drawn = figures(asked, tuple(PARTS), store)
    assert {name.partition("-")[0] for name in drawn} == set(FIGURES)
    for drawing in drawn.values():
        ElementTree.fromstring(drawing.split("\n", 1)[1])


def test_a_page_of_half_the_cells_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    asked = grid()
    store = stored(tmp_path, cells_of(("fig2",), asked))
    page = render(asked, ("table2", "frontier"), store, verdicts(asked, ("table2", "frontier"), store), "lmdp")
    there = len(asked.table2()) - 3
    assert f"{there} of {len(asked.table2())} cells were not run here" in page
    assert "lmdp reproduce frontier --scale smoke --experiments mnist --seeds 3 --data-folder DATA --out DIR" in page


def test_smoothing_keeps_a_parabola_and_short_curves_as_they_are() -> None:
    parabola = [(float(i), float(i * i)) for i in range(9)]
    assert [y for _, y in _smoothed([parabola, parabola])] == pytest.approx([y for _, y in parabola])
    assert _smoothed([[(1.0, 2.0)], [(1.0, 4.0)]]) == [(1.0, 3.0)]
    assert _smoothed([]) == _smoothed([[]]) == []


# -- the command ------------------------------------------------------------------------------------------------------


def test_what_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'table9': it must be one of fig2"):
        Asked.of("table9", "smoke")
    with pytest.raises(ValueError, match="--scale is 'huge'"):
        Asked.of("fig2", "huge")
    with pytest.raises(ValueError, match=r"'celeba'; at --scale cpu there are mnist, cifar10; --scale full has"):
        Asked.of("fig2", "cpu", experiments=["celeba"])
    with pytest.raises(ValueError, match="--seeds is 0"):
        Asked.of("fig2", "cpu", seeds=0)
    with pytest.raises(ValueError, match="choose it with --experiments"):
        Asked.of("fig2", "cpu", private="mnist-5k")
    with pytest.raises(ValueError, match="are halves of digits; choose --scale cpu or full"):
        Asked.of("fig2", "smoke", private="mnist-5k")
    asked = Asked.of("fig2", "cpu", experiments=["mnist"], private="mnist-5k", shadow="digits")
    assert asked.sources.specs == {"mnist": "mnist-5k", "fashion-mnist": "digits"}


def test_drawing_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, Grid(SCALES["smoke"], ("mnist",), 2).fig2())
    assert cli.main(["reproduce", "fig2", "--scale", "smoke", "--draw", "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdicts"] == json.loads((tmp_path / "verdicts.json").read_text())
    assert len(told["verdicts"]) == 3
    assert (tmp_path / "figures" / "fig2-mnist.svg").exists()
    assert len(list((tmp_path / "cells").iterdir())) == 2


@pytest.mark.slow
def test_a_small_table_2_is_measured_judged_and_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "table2", "--scale", "smoke", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    page = (tmp_path / "report.html").read_text()
    assert "cells were not run here" not in page
    files = sorted((tmp_path / "cells").iterdir())
    assert len(files) == len(Grid(SCALES["smoke"], ("mnist",), 2).table2())
    told = json.loads((tmp_path / "verdicts.json").read_text())
    assert all(verdict["evidence"] != "not measured here" for verdict in told)
    before = [file.stat().st_mtime_ns for file in files[1:]]
    content = json.loads(files[0].read_text())
    files[0].unlink()
    capsys.readouterr()
    assert cli.main(words) == 0
    assert f"{len(files) - 1} of {len(files)} cells are there already" in capsys.readouterr().err
    assert [file.stat().st_mtime_ns for file in files[1:]] == before
    again = json.loads(files[0].read_text())
    for each in (content, again):
        each["result"].pop("seconds")
    assert again == content  # the same seed, the same cell


PUBLISHED = Path(__file__).parents[3] / "docs" / "reproduction"


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the documentation is not here")
def test_published_verdicts_are_those_of_the_published_cells() -> None:
    asked = Asked.of("all", "cpu", experiments=["mnist"])
    told = [verdict.to_dict() for verdict in verdicts(asked.grid, asked.what, Store(PUBLISHED))]
    assert told == json.loads((PUBLISHED / "verdicts.json").read_text())
    names = {f"{cell.name}.json" for cell in cells_of(asked.what, asked.grid)}
    assert {path.name for path in (PUBLISHED / "cells").iterdir()} <= names
