"""The paper's figures, drawn from cells: charts by name, none where there are no cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lmdp.app.cells.cell import Measured
from lmdp.app.cells.statistics import mean_of
from lmdp.app.reproduce import results as read
from lmdp.app.reproduce.grid import COMPARED, DPSGD, FRONTIER, LM, REWEIGHTED, SGD, Contender
from lmdp.app.reproduce.paper import EXPERIMENTS, UTILITY_BAND
from lmdp.app.reproduce.results import CANARIES, HELD_OUT, IN_SAMPLE, Results
from lmdp.app.reproduce.verdicts import TOLERANCE
from lmdp.report.charts import Chart
from lmdp.report.lines import Dot, Line, lines
from lmdp.report.scales import span
from lmdp.report.scatter import Place, Series, scatter
from lmdp.report.svg import Style

Charts = dict[str, Chart]
WINDOW, ORDER = 5, 2
"""Of the Savitzky–Golay filter, in points; the paper states neither."""
ON_CURVES = (
    *COMPARED,
    *(each for each in REWEIGHTED if each.weights != "fixed" and each.rates in ("printed", "alike")),
)


def risk_by_layer(results: Results) -> Charts:
    """Figure 2: what attacks find in each layer under SGD, by every protocol and in the paper."""
    charts: Charts = {}
    for name in results.grid.experiments:
        measured = results.measured(results.grid.trained(name, SGD))
        if not measured:
            continue
        drawn = _protocols(name, measured)
        charts[f"fig2-{name}"] = _lines(
            drawn,
            title=f"Risk by layer under SGD: {EXPERIMENTS[name].title}",
            description="Accuracy of attacks in-sample and on permuted labels; AUC held out; by layer.",
            axis="attack accuracy in-sample, AUC held out (95 % interval over seeds)",
            along="layer",
        )
    return charts


def _protocols(name: str, measured: Sequence[Measured]) -> list[Line]:
    paper = EXPERIMENTS[name]
    printed = [Dot(x, y, None, f"paper, layer {x}: {y:.3f}") for x, y in zip(paper.layers, paper.sgd)]
    drawn = [Line("paper", Style.of_model(0), tuple(printed))]
    kinds: list[tuple[str, Callable[[read.Result], list[float]]]] = [
        ("ours in-sample", lambda r: [pair[0] for pair in r.get(IN_SAMPLE, {}).values()]),
        ("its null: permuted labels", lambda r: [pair[1] for pair in r.get(IN_SAMPLE, {}).values()]),
        ("ours held out", lambda r: list(read.by_layer(HELD_OUT)(r).values())),
        ("ours on canaries", lambda r: list(read.by_layer(CANARIES)(r).values())),
    ]
    for index, (label, values) in enumerate(kinds, 1):
        columns = list(zip(*(values(m.result) for m in measured)))
        dots = tuple(_dot(i + 1, column, f"{label}, layer {i + 1}") for i, column in enumerate(columns))
        drawn += [Line(label, Style.of_model(index), dots)] if dots else []
    return drawn


def _dot(x: float, values: Sequence[float], tip: str) -> Dot:
    """The mean over seeds, with its interval where there are two or more."""
    told = mean_of(list(values))
    middle = sum(values) / len(values)
    interval = None if told is None else (told.low, told.high)
    return Dot(x, middle, interval, f"{tip}: {middle:.3f}" + (f" [{told.low:.3f}, {told.high:.3f}]" if told else ""))


def over_training(results: Results, key: str) -> Charts:
    """Figures 3 and 4: test accuracy (`curve`) or ‖b‖ (`bias`) over training, smoothed, with the 2 % band."""
    charts: Charts = {}
    words = {"curve": ("fig3", "Test accuracy", "test accuracy"), "bias": ("fig4", "Bias", "‖b‖, not private")}
    figure, title, axis = words[key]
    for name in results.grid.experiments:
        drawn = []
        for index, who in enumerate(ON_CURVES):
            points = _smoothed([m.result[key] for m in results.measured(results.grid.trained(name, who))])
            if points:
                dots = tuple(Dot(x, y, None, f"{who.label}, step {x:g}: {y:.3f}") for x, y in points)
                drawn.append(Line(who.label, Style.of_model(index), dots))
        if not drawn:
            continue
        if key == "curve":
            drawn += _band(drawn)
        charts[f"{figure}-{name}"] = _lines(
            drawn,
            title=f"{title} over training: {EXPERIMENTS[name].title}",
            description="Means over seeds, smoothed by a Savitzky–Golay filter.",
            axis=f"{axis}, mean over seeds, smoothed",
            along="step",
        )
    return charts


def _band(drawn: Sequence[Line]) -> list[Line]:
    """Two points below the baseline that ends highest."""
    baselines = [line for line in drawn if line.name in {each.label for each in COMPARED}]
    if not baselines:
        return []
    top = max(baselines, key=lambda line: line.dots[-1].y)
    dots = tuple(Dot(d.x, d.y - UTILITY_BAND, (d.y - UTILITY_BAND, d.y), "2 points below the best") for d in top.dots)
    return [Line("2 points below the best baseline", Style.of_model(5), dots)]


def _smoothed(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    from scipy.signal import savgol_filter

    if not curves or len({len(curve) for curve in curves}) != 1 or not curves[0]:
        return []
    means = np.mean(np.array(curves, dtype=np.float64), axis=0)
    if len(means) >= WINDOW:
        means[:, 1] = savgol_filter(means[:, 1], WINDOW, ORDER)
    return [(float(x), float(y)) for x, y in means]


def ablations(results: Results, part: str) -> Charts:
    """Accuracy and leakage along epsilon, C or r."""
    scale = results.grid.scale
    ways: dict[str, tuple[str, Sequence[float], tuple[Contender, ...]]] = {
        "epsilon": ("epsilon", scale.epsilons, (DPSGD, LM)),
        "clip": ("clip_norm", scale.clip_norms, (DPSGD, LM)),
        "emphasis": ("emphasis", scale.emphases, (LM,)),
    }
    key, values, contenders = ways[part]
    measures: dict[str, read.Value] = {
        "accuracy": read.accuracy,
        "canaries": read.peak(CANARIES),
        "ordinary": read.peak(HELD_OUT),
        "bias": read.bias,
    }
    charts: Charts = {}
    for name in results.grid.ablated:
        for label, value in measures.items():
            drawn = []
            for index, who in enumerate(contenders):
                columns = [(at, list(results.of(name, who, value, **{key: at}).values())) for at in values]
                dots = tuple(_dot(at, c, f"{who.label}, {key} {at:g}") for at, c in columns if c)
                drawn += [Line(who.label, Style.of_model(index), dots)] if dots else []
            if drawn:
                charts[f"{part}-{label}-{name}"] = _lines(
                    drawn,
                    title=f"{label} by {key}: {EXPERIMENTS[name].title}",
                    description="Means over seeds with 95 % intervals.",
                    axis={
                        "accuracy": "test accuracy",
                        "bias": "mean of ‖b‖, not private",
                    }.get(label, f"AUC at the leakiest layer, {label}"),
                    along=key,
                )
    return charts


def frontier(results: Results) -> Charts:
    """Leakage of canaries against accuracy: one point for each method, epsilon and learning rate."""
    charts: Charts = {}
    for name in results.grid.ablated:
        base = results.grid.scale.base(name)["learning_rate"]
        for epsilon in results.grid.scale.frontier_epsilons:
            series = []
            for index, who in enumerate(FRONTIER):
                preferred = read.best(results, name, who, epsilon, TOLERANCE)
                places = []
                for factor in results.grid.scale.frontier_rates:
                    given = {"epsilon": epsilon, "learning_rate": base * factor}
                    sides = [results.of(name, who, value, **given) for value in (read.accuracy, read.peak(CANARIES))]
                    if all(sides):
                        values = [list(side.values()) for side in sides]
                        places.append(_place(who, base * factor, values[0], values[1], preferred))
                series += [Series(who.label, Style.of_model(index), tuple(places))] if places else []
            if series:
                charts[f"frontier-{epsilon:g}-{name}"] = _scatter(series, epsilon, EXPERIMENTS[name].title)
    return charts


def _place(who: Contender, rate: float, utility: list[float], leakage: list[float], preferred: float | None) -> Place:
    told = [mean_of(values) for values in (utility, leakage)]
    ranges = [None if each is None else (each.low, each.high) for each in told]
    x, y = (sum(values) / len(values) for values in (utility, leakage))
    tip = f"{who.label}, learning rate {rate:g}: accuracy {x:.3f}, AUC on canaries {y:.3f}"
    return Place(x, y, ranges[0], ranges[1], tip, rate == preferred)


def _scatter(series: Sequence[Series], epsilon: float, title: str) -> Chart:
    return lambda sheet: scatter(
        sheet,
        series,
        title=f"Frontier at epsilon {epsilon:g}: {title}",
        description="Canary leakage against test accuracy; means over seeds, 95 % intervals; lower right is better.",
        axis="AUC on canaries at the leakiest layer",
        along="test accuracy",
    )


def _lines(drawn: Sequence[Line], *, title: str, description: str, axis: str, along: str) -> Chart:
    edges = [edge for line in drawn for dot in line.dots for edge in (dot.y, *(dot.interval or ()))]
    reach = span(edges, least=0.02)
    return lambda sheet: lines(
        sheet, drawn, reach, title=title, description=description, axis=axis, along=along, name_ends=False
    )


FIGURES: dict[str, Callable[[Results], Charts]] = {
    "fig2": risk_by_layer,
    "fig3": lambda results: over_training(results, "curve"),
    "fig4": lambda results: over_training(results, "bias"),
    "epsilon": lambda results: ablations(results, "epsilon"),
    "clip": lambda results: ablations(results, "clip"),
    "emphasis": lambda results: ablations(results, "emphasis"),
    "frontier": frontier,
}
"""Part → its charts by name."""
