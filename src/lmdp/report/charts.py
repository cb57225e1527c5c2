"""From a story to its charts. Each function draws on the sheet it is given, or returns None where there is no data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lmdp.membership.leak import Leak
from lmdp.report.drawn import Vulnerable
from lmdp.report.epsilon import epsilon_bounds
from lmdp.report.forest import Point, Row, forest
from lmdp.report.lines import Dot, HeatRow, Line, heat, lines
from lmdp.report.roc import Curve, Limit, roc
from lmdp.report.scales import span
from lmdp.report.svg import PAPER, Sheet, Style
from lmdp.report.values import (
    at_peak,
    beyond_layers,
    epsilon,
    finite,
    is_certified,
    over_steps,
    peak_leak,
    share,
    shown_names,
    small,
    weights_over_steps,
)

if TYPE_CHECKING:
    from lmdp.report.drawn import Audit
    from lmdp.report.story import Story, Trained
    from lmdp.risk.profile import RiskProfile

Chart = Callable[[Sheet], str]
MOST_LINES = 8
FIGURE_WIDTH = 640.0

Audited = tuple[str, Style, "Audit"]


def audited(story: Story) -> list[Audited]:
    """The models that were audited, each with the look it has in every chart."""
    return [(t.name, Style.of_model(i), t.audit) for i, t in enumerate(story.trained) if t.audit is not None]


def most_vulnerable(models: Sequence[Audited]) -> list[Audited]:
    """The same models as attacks on their canaries see them: those in which some were planted."""
    sides = ((name, style, Vulnerable.of(audit)) for name, style, audit in models)
    return [(name, style, side) for name, style, side in sides if side is not None]


def mia_by_layer(models: Sequence[Audited], layers: Sequence[str], who: str = "") -> Chart | None:
    """AUC of the best membership attack on each layer of each model, controls and the model's output beside them."""
    rows: dict[tuple[bool, str], list[Point]] = {(False, name): [] for name in layers}
    for i, (model, _, audit) in enumerate(models):
        for leak in audit.layers:
            rows.setdefault((False, leak.name), []).extend(
                _auc(i, model, at_peak(leak, audit), leak.name == audit.peak.name)
            )
        for role, leak in beyond_layers(audit):
            rows.setdefault((True, leak.name), []).extend(_auc(i, f"{model}, {role}", leak, False))
    return _forest(
        rows,
        [(model, style) for model, style, _ in models],
        title=f"Membership inference by layer{who and f': {who}'}",
        description="Area under the ROC curve of the best attack on each layer, with 95 % intervals; 0.5 is chance.",
        axis="AUC of the membership attack (95 % interval)",
        by=next((audit.by for _, _, audit in models), ""),
    )


def risk_by_layer(profile: RiskProfile) -> Chart | None:
    """AUC on public data, held out, with the controls."""
    rows: dict[tuple[bool, str], list[Point]] = {}
    reference = [profile.reference] if profile.reference else []
    for aside, entries in ((False, profile.together), (True, [*reference, *profile.controls])):
        for entry in entries:
            is_peak = not aside and entry.name == profile.peak.name
            rows.setdefault((aside, entry.name), []).extend(_auc(0, "shadow model", entry, is_peak))
    return _forest(
        rows,
        [("shadow model", Style.of_model(1))],
        title="Risk profile on public data",
        description="Area under the ROC curve of the best attack on each layer of the shadow model, held out.",
        axis="AUC, held out (95 % interval)",
        by=profile.by,
    )


def in_sample_by_layer(profile: RiskProfile) -> Chart | None:
    """The paper's number, the adversary's accuracy on its own training set, beside the same on permuted labels."""
    rows: dict[tuple[bool, str], list[Point]] = {}
    kinds = ("in-sample accuracy", "null: the same on permuted labels")
    for layer in profile.layers:
        for i, value in enumerate((finite(layer.in_sample), finite(layer.null))):
            if value is not None:
                point = Point(i, value, None, f"{layer.name}: {kinds[i]} {value:.3f}", f"{value:.3f}")
                rows.setdefault((False, layer.name), []).append(point)
    return _forest(
        rows,
        [(kinds[0], Style.of_model(0)), (kinds[1], Style.of_model(5))],
        title="In-sample accuracy beside its null",
        description="What the adversary scores on its own training set, with true and with permuted membership labels.",
        axis="accuracy on the adversary's own training set",
        by=profile.by,
    )


def accuracy_over_steps(story: Story) -> Chart | None:
    """Test accuracy with its Wilson interval."""

    def dots(trained: Trained) -> Iterable[Dot]:
        for step, value in over_steps(trained, "test_accuracy"):
            estimate = share(value, trained.test_examples)
            yield Dot(step, value, estimate.interval, f"{trained.name}, step {step:g}: test accuracy {estimate}")

    drawn = _lines(story, dots)
    if not drawn:
        return None
    edges = [edge for line in drawn for dot in line.dots for edge in (dot.y, *(dot.interval or ()))]
    reach = span(edges, least=0.05, floor=min(0.0, *edges), ceiling=max(1.0, *edges))
    return lambda sheet: lines(
        sheet,
        drawn,
        reach,
        title="Test accuracy over steps",
        description="Test accuracy of each model during training; the band is the 95 % interval.",
        axis="test accuracy (95 % interval)",
    )


def epsilon_over_steps(story: Story) -> Chart | None:
    """The epsilon spent so far, of the models that spend any."""

    def dots(trained: Trained) -> Iterable[Dot]:
        if trained.privacy is not None:
            delta = small(finite(trained.privacy.get("delta")))
            for step, value in over_steps(trained, "epsilon"):
                yield Dot(step, value, None, f"{trained.name}, step {step:g}: epsilon {value:.3g} (delta {delta})")

    drawn = _merged(_lines(story, dots))
    if not drawn:
        return None
    top = max(dot.y for line in drawn for dot in line.dots)
    deltas = dict.fromkeys(small(finite(t.privacy.get("delta"))) for t in story.trained if t.privacy is not None)
    return lambda sheet: lines(
        sheet,
        drawn,
        (0.0, max(1.08 * top, 1e-3)),
        title="Epsilon over steps",
        description="The privacy budget each model has spent after each step.",
        axis=f"epsilon spent (delta {', '.join(deltas)})",
    )


def weights(story: Story) -> list[tuple[Trained, Chart]]:
    """For each model with layer weights, those weights over steps: lines, or a heat map of many layers."""
    return [(t, chart) for t in story.trained if (chart := _weights(t, story)) is not None]


def roc_at_peak(models: Sequence[Audited], limits: Sequence[Limit]) -> Chart | None:
    """ROC of each model's leakiest layer, with the limits that can be seen."""
    curves, sizes = [], []
    for model, style, audit in models:
        leak = peak_leak(audit)
        points = [(f, t) for f, t in zip(*leak.roc) if finite(f) is not None and finite(t) is not None] if leak else []
        if len(points) > 1:
            fpr, tpr = zip(*points)
            curves.append(Curve(f"{model}: {audit.peak.name}", style, fpr, tpr))
            sizes.append(audit.nonmembers)
    if not curves:
        return None
    least = least_rate(sizes)
    return lambda sheet: roc(
        sheet,
        curves,
        [limit for limit in limits if limit.visible(least)],
        least,
        title="ROC of the leakiest layer",
        description="True against false positive rate on logarithmic axes; the diagonal is guessing.",
    )


def least_rate(nonmembers: Sequence[int]) -> float:
    """The lowest false positive rate that the number of non-members can show, as a power of ten."""
    return min(1e-2, max(1e-4, 10.0 ** math.ceil(-math.log10(max(1, *nonmembers, 1)))))


def limits(story: Story) -> list[Limit]:
    """The guarantees to draw: certified ones only, each once."""
    drawn: dict[Limit, None] = {}
    for trained in story.trained:
        if trained.privacy is not None and is_certified(trained.privacy) and trained.audit is not None:
            spent, delta = finite(epsilon(trained.privacy)), finite(trained.privacy.get("delta"))
            if spent is not None and delta is not None and spent >= 0 and 0 <= delta < 1:
                drawn.setdefault(Limit(float(f"{spent:.3g}"), delta))
    return list(drawn)


def figures(story: Story) -> dict[str, str]:
    """File name → SVG that stands alone, on white, for papers: those that the data allow."""
    models = audited(story)
    planted = most_vulnerable(models)
    charts: dict[str, Chart | None] = {
        "canaries-by-layer": mia_by_layer(planted, story.layers, "canaries") if planted else None,
        "canaries-roc": roc_at_peak(planted, limits(story)) if planted else None,
        "mia-by-layer": mia_by_layer(models, story.layers),
        "accuracy": accuracy_over_steps(story),
        "epsilon": epsilon_over_steps(story),
        "roc": roc_at_peak(models, limits(story)),
    }
    if story.risk is not None:
        charts["risk"] = risk_by_layer(story.risk)
        charts["risk-in-sample"] = in_sample_by_layer(story.risk)
    if story.bounds:
        charts["epsilon-bounds"] = lambda sheet: epsilon_bounds(sheet, story.bounds)
    weighted = weights(story)
    for i, (_, chart) in enumerate(weighted, 1):
        charts["weights" if len(weighted) == 1 else f"weights-{i}"] = chart
    narrow = {"roc": 440.0, "canaries-roc": 440.0, "accuracy": 480.0, "epsilon": 480.0}
    return {
        f"{name}.svg": '<?xml version="1.0" encoding="UTF-8"?>\n'
        + chart(Sheet(narrow.get(name, FIGURE_WIDTH), PAPER, name, alone=True))
        + "\n"
        for name, chart in charts.items()
        if chart is not None
    }


def _auc(series: int, who: str, leak: Leak, is_peak: bool) -> list[Point]:
    value, low, high = finite(leak.auc), finite(leak.interval[0]), finite(leak.interval[1])
    if value is None:
        return []
    interval = (low, high) if low is not None and high is not None else None
    tip = f"{who}, {leak.name}: AUC {value:.3f}"
    tip += f", 95 % interval {low:.3f} to {high:.3f}" if interval else ""
    return [Point(series, value, interval, f"{tip}; best attack: {leak.attack}", f"{value:.3f}" if is_peak else "")]


def _forest(
    rows: dict[tuple[bool, str], list[Point]],
    series: Sequence[tuple[str, Style]],
    *,
    title: str,
    description: str,
    axis: str,
    by: str,
) -> Chart | None:
    called = shown_names((name for aside, name in rows if not aside), by)
    drawn = [
        Row(name if aside else called[name], tuple(points), aside)
        for (aside, name), points in sorted(rows.items(), key=lambda item: item[0][0])
        if points
    ]
    if not drawn:
        return None
    return lambda sheet: forest(sheet, drawn, series, title=title, description=description, axis=axis)


def _lines(story: Story, dots: Callable[[Trained], Iterable[Dot]]) -> list[Line]:
    drawn = (Line(t.name, Style.of_model(i), tuple(dots(t))) for i, t in enumerate(story.trained))
    return [line for line in drawn if line.dots]


def _merged(drawn: Sequence[Line]) -> list[Line]:
    """Lines that lie on each other are one line, of the first, with the names of all."""
    same: dict[tuple[tuple[float, str], ...], list[Line]] = {}
    for line in drawn:
        same.setdefault(tuple((dot.x, f"{dot.y:.3g}") for dot in line.dots), []).append(line)
    return [replace(lines[0], name=", ".join(line.name for line in lines)) for lines in same.values()]


def _weights(trained: Trained, story: Story) -> Chart | None:
    rows = weights_over_steps(trained)
    if not rows:
        return None
    count = max(len(values) for _, values in rows)
    layers = story.layers
    if story.risk is not None and len(story.risk.layers) == count:  # an audit also reads layers that are not trained
        layers = tuple(layer.name for layer in story.risk.layers)
    called = shown_names(layers, trained.audit.by if trained.audit else story.risk.by if story.risk else "")
    names = [called[layers[i]] if i < len(layers) else f"layer {i + 1}" for i in range(count)]
    title = f"Layer weights over steps: {trained.name}"
    description = "Weight of each layer during training; a layer of smaller weight gets a smaller share of the update."
    if count > MOST_LINES:
        heats = [HeatRow(name, tuple(w[i] if i < len(w) else None for _, w in rows)) for i, name in enumerate(names)]
        steps = [step for step, _ in rows]
        return lambda sheet: heat(sheet, heats, steps, title=title, description=description, axis="layer weight")
    drawn = []
    for i, name in enumerate(names):
        history = [(step, w[i]) for step, w in rows if i < len(w)]
        dots = tuple(Dot(s, w, None, f"{name}, step {s:g}: weight {w:.3g}") for s, w in history if w is not None)
        if dots:
            drawn.append(Line(name, Style.of_depth(i, count), dots))
    reach = span([dot.y for line in drawn for dot in line.dots], least=1e-3)
    return lambda sheet: lines(
        sheet, drawn, reach, title=title, description=description, axis="layer weight", name_ends=True
    )
