"""The paper's tables: its numbers, ours under its protocol with the null, ours held out, ours on canaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmdp.app.cells.statistics import mean_of
from lmdp.app.reproduce import results as read
from lmdp.app.reproduce.grid import AS_PUBLISHED, CONTENDERS, LM, SGD, Contender
from lmdp.app.reproduce.paper import EMPHASIS, EXPERIMENTS, METHODS, SHADOW_ERROR_RATES
from lmdp.app.reproduce.results import CANARIES, HELD_OUT, IN_SAMPLE, Results
from lmdp.app.reproduce.verdicts import rates_by_layer
from lmdp.report.svg import el, text
from lmdp.report.tables import boxed

NONE = "–"


def number(values: Sequence[float], digits: int = 3) -> str:
    """The mean over seeds, and its interval below it where there are two seeds or more."""
    if not values:
        return NONE
    told = mean_of(list(values))
    shown = f"{sum(values) / len(values):.{digits}f}"
    if told is None:
        return shown + el("span", "1 seed", class_="range")
    return shown + el("span", f"{told.low:.{digits}f}–{told.high:.{digits}f}", class_="range")


def attacks(results: Results, name: str) -> str:
    """Table 2: the peak over layers, four ways."""
    heads = (
        *("method", "paper", "in-sample", "its null"),
        *("held out", "AUC", "canaries, AUC", "test accuracy", "seeds"),
    )
    return boxed("Table 2", heads, (_attacked(results, name, who) for who in CONTENDERS), wordy=set())


def _attacked(results: Results, name: str, who: Contender) -> list[str]:
    paper = EXPERIMENTS[name]
    printed = max(paper.sgd) if who == SGD else paper.peak.get(who.method) if who in _PRINTED else None

    def cell(value: read.Value) -> str:
        return number(list(results.of(name, who, value).values()))

    return [
        el("div", text(who.label), class_="long"),
        NONE if printed is None else f"{printed:.3f}",
        cell(read.peak(IN_SAMPLE)),
        cell(read.null_peak),
        cell(read.peak_accuracy),
        cell(read.peak(HELD_OUT)),
        cell(read.peak(CANARIES)),
        cell(read.accuracy),
        str(len(results.of(name, who, read.accuracy))),
    ]


_PRINTED = (*(Contender(method) for method in METHODS if method != "lm"), AS_PUBLISHED)


def layers(results: Results, name: str) -> str:
    """Every layer of the methods in the paper's table, in means over seeds."""
    rows = []
    for who in (SGD, *_PRINTED, LM):
        measured = [m.result for m in results.measured(results.grid.trained(name, who))]
        paper = EXPERIMENTS[name]
        printed = paper.sgd if who == SGD else paper.attacked.get(who.method, ()) if who in _PRINTED else ()
        by_index = dict(zip(paper.layers, printed))
        for index, layer in enumerate(measured[0].get(HELD_OUT, {}) if measured else (), 1):
            pairs = [r[IN_SAMPLE][layer] for r in measured if r.get(IN_SAMPLE)]
            rows.append(
                [
                    text(who.label),
                    text(layer),
                    f"{by_index[index]:.3f}" if index in by_index else NONE,
                    number([pair[0] for pair in pairs]),
                    number([pair[1] for pair in pairs]),
                    number([r[HELD_OUT][layer]["accuracy"] for r in measured]),
                    number([r[HELD_OUT][layer]["auc"] for r in measured]),
                    number([r[CANARIES][layer]["auc"] for r in measured if CANARIES in r]),
                ]
            )
    heads = (
        *("method", "layer", "paper: accuracy", "in-sample: accuracy", "its null"),
        *("held out: accuracy", "held out: AUC", "canaries: AUC"),
    )
    return boxed("Every layer", heads, rows, wordy={1}) if rows else ""


def shadows(results: Results, name: str) -> str:
    """Error rates by layer and shadow set."""
    rows = []
    printed_at = {at: i for i, at in enumerate(EXPERIMENTS["cifar10"].layers)}
    for shadow in results.grid.scale.shadows[name]:
        kinds = {kind: rates_by_layer(results, name, shadow, kind) for kind in (IN_SAMPLE, HELD_OUT)}
        for index, layer in enumerate(kinds[HELD_OUT], 1):
            paper = SHADOW_ERROR_RATES.get(shadow) if name == "cifar10" and index in printed_at else None
            rows.append(
                [
                    text(shadow),
                    text(layer),
                    f"{paper[printed_at[index]]:.3f}" if paper else NONE,
                    number(list(kinds[IN_SAMPLE][layer].values())),
                    number(list(kinds[HELD_OUT][layer].values())),
                ]
            )
    heads = ("shadow set", "layer", "paper: error rate", "in-sample: error rate", "held out: error rate")
    return boxed("Error rates by shadow set", heads, rows, wordy={1}) if rows else ""


def emphasis(results: Results, name: str) -> str:
    """By r: the paper's deepest layer and ours."""
    rows = []
    for r in results.grid.scale.emphases:
        printed = EMPHASIS.get(r) if name == "cifar10" else None
        cells = [
            number(list(results.of(name, LM, value, emphasis=r).values()))
            for value in (read.last(HELD_OUT), read.last(CANARIES), read.peak(CANARIES), read.accuracy)
        ]
        rows.append([f"{r:g}", f"{printed[-1]:.3f}" if printed else NONE, *cells])
    heads = (
        *("r", "paper: accuracy, deepest layer", "held out: AUC, deepest layer", "canaries: AUC, deepest layer"),
        *("canaries: AUC, leakiest layer", "test accuracy"),
    )
    return boxed("By r", heads, rows, wordy=set()) if any(c != NONE for row in rows for c in row[2:]) else ""


def costs(results: Results, part: str) -> str:
    """Seconds of a step, or peak memory: each over DP-SGD's, in the paper and here."""
    rows = []
    for m in results.measured(results.grid.step()):
        paper = EXPERIMENTS[m.cell.setting]
        printed = paper.seconds if part == "time" else paper.mebibytes
        measured = m.result["turns"] if part == "time" else m.result["peak_bytes"]
        base = "lmdp dpsgd"
        for contender, value in measured.items():
            if not contender.startswith("lmdp") or base not in measured:
                continue
            method = contender.removeprefix("lmdp ").split()[0]
            theirs, first = printed.get(method), printed["dpsgd"]
            ratio = (
                _median([a / b for a, b in zip(value, measured[base])]) if part == "time" else value / measured[base]
            )
            shown = f"{1000 * _median(value):.0f} ms" if part == "time" else f"{value / 2**20:.0f} MiB"
            rows.append(
                [
                    text(paper.title),
                    text(contender.removeprefix("lmdp ")),
                    f"{theirs / first:.2f}" if theirs and first else NONE,
                    f"{ratio:.2f}",
                    shown,
                ]
            )
    heads = ("experiment", "method", "paper: over DP-SGD", "ours: over DP-SGD", "ours")
    return boxed(part, heads, rows, wordy={1}) if rows else ""


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


TABLES: dict[str, Callable[[Results], list[tuple[str, str]]]] = {
    "table2": lambda r: [(EXPERIMENTS[n].title, attacks(r, n) + layers_folded(r, n)) for n in r.grid.experiments],
    "shadow": lambda r: [(EXPERIMENTS[n].title, shadows(r, n)) for n in r.grid.ablated],
    "emphasis": lambda r: [(EXPERIMENTS[n].title, emphasis(r, n)) for n in r.grid.ablated],
    "time": lambda r: [("", costs(r, "time"))],
    "memory": lambda r: [("", costs(r, "memory"))],
}
"""Part → (title, table), the table empty where there are no cells."""


def layers_folded(results: Results, name: str) -> str:
    from lmdp.report.html import folded

    every = layers(results, name)
    return folded("Every layer, with every number", every) if every else ""
