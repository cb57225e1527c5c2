"""One page that opens offline: verdicts first, then each of the paper's tables and figures rebuilt."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence

from lmdp.app.cells.statistics import ANSWERS
from lmdp.app.cells.store import Store
from lmdp.app.reproduce.figures import FIGURES
from lmdp.app.reproduce.grid import PARTS, Grid
from lmdp.app.reproduce.paper import EXPERIMENTS
from lmdp.app.reproduce.results import Results
from lmdp.app.reproduce.tables import TABLES
from lmdp.app.reproduce.verdicts import Verdict, advice
from lmdp.report.charts import FIGURE_WIDTH
from lmdp.report.html import HALF, chart, document, paragraph, section
from lmdp.report.svg import PAPER, Sheet, el, text
from lmdp.report.tables import boxed

TITLES = {
    "fig2": "Figure 2: risk by layer under SGD",
    "table2": "Table 2: peak risk by method",
    "shadow": "Error rates across shadow sets",
    "fig3": "Figure 3: test accuracy over training",
    "fig4": "Figure 4: bias over training",
    "epsilon": "Ablation: epsilon",
    "clip": "Ablation: clip norm C",
    "emphasis": "Ablation: emphasis r",
    "time": "Seconds per step",
    "memory": "Peak memory",
    "frontier": "The frontier: canary leakage against accuracy",
}
ABOUT = {
    "fig2": "The paper's attack accuracies beside ours under its protocol (adversaries scored on their own training "
    "set), the same on permuted labels (its null), and AUC held out, on ordinary examples and on canaries. What the "
    "null reaches is memory of the adversary, not a leak of the model.",
    "table2": "Attack accuracy at the leakiest layer in the paper, in-sample, on permuted labels (the null) and held "
    "out; AUC held out, and on canaries; means over seeds, 95 % intervals below. Of LM-DP-SGD, batch is as published "
    "and not certified; the others are certified. Error rates are those that the paper prints, unless the row says "
    "otherwise. Epsilon is the same for all but SGD.",
    "shadow": "Of shadow models of the same architecture on different public data.",
    "fig3": "Means over seeds, smoothed by a Savitzky–Golay filter (5 points, order 2). The shaded band reaches 2 "
    "points below the baseline that ends highest.",
    "fig4": "‖mean of clipped − mean of raw gradients‖ over the batch, from un-noised gradients: not private, for "
    "experiments only. Means over seeds, smoothed likewise.",
    "frontier": "One point for each method, epsilon and learning rate; a ring marks each method's own best setting: "
    "of those within 1 point of its highest accuracy, the one that leaks least. Lower right is better.",
}


def render(grid: Grid, what: Sequence[str], store: Store, told: Sequence[Verdict], command: str) -> str:
    results = Results(grid, store)
    return document(
        "The paper, measured again",
        _head(grid, told),
        _verdicts(told),
        *(_part(part, results) for part in what),
        section("How to reproduce this", el("pre", el("code", text(command))), key="making"),
    )


def figures(grid: Grid, what: Sequence[str], store: Store) -> dict[str, str]:
    """File name → SVG that stands alone."""
    charts = {
        name: each for part in what if part in FIGURES for name, each in FIGURES[part](Results(grid, store)).items()
    }
    return {
        f"{name}.svg": f'<?xml version="1.0" encoding="UTF-8"?>\n{each(Sheet(FIGURE_WIDTH, PAPER, name, alone=True))}\n'
        for name, each in charts.items()
    }


def _head(grid: Grid, told: Sequence[Verdict]) -> str:
    from lmdp import __version__

    counts = Counter(verdict.answer for verdict in told)
    said = ", ".join(f"{counts[answer]} {answer}" for answer in ANSWERS)
    names = ", ".join(EXPERIMENTS[name].title for name in grid.experiments)
    return el(
        "header",
        paragraph(f"lmdp {__version__} · {datetime.date.today().isoformat()}", "over"),
        el("h1", "The paper, measured again"),
        paragraph(f"Of {len(told)} claims tried here: {said}." if told else "No claim was tried.", "verdict"),
        paragraph(text(advised), "verdict") if (advised := advice(told)) else "",
        paragraph(
            f"Scale {grid.scale.name}, {grid.seeds} seeds: {names}. Differences are paired over seeds; ranges are 95 % "
            "intervals. An attack that finds nothing is no proof.",
            "note",
        ),
    )


def _verdicts(told: Sequence[Verdict]) -> str:
    rows = [
        [
            el("div", text(v.claim), class_="long"),
            text(v.by),
            el("div", text(v.tried), class_="long"),
            el("b", text(v.answer)),
            el("div", text(v.evidence), *([el("code", text(f" {v.command}"))] if v.command else []), class_="long"),
        ]
        for v in told
    ]
    heads = ("claim", "by", "tried on", "verdict", "evidence")
    about = "A verdict is what the intervals support. Where cells are missing, the command measures them."
    return section("Verdicts", paragraph(about), boxed("Verdicts", heads, rows, {1, 2, 3, 4}), key="verdicts")


def _part(part: str, results: Results) -> str:
    cells = PARTS[part](results.grid)
    missing = results.store.missing(cells)
    body = [paragraph(ABOUT[part])] if part in ABOUT else []
    for title, table in TABLES[part](results) if part in TABLES else []:
        body += [el("h3", text(title)) if title else "", table] if table else []
    drawn = FIGURES[part](results) if part in FIGURES else {}
    halves = [chart(each, key, width=HALF) for key, each in drawn.items()]
    body += [el("div", *halves, class_="two")] if len(halves) > 1 else [chart(e, k) for k, e in drawn.items()]
    if missing:
        rest = f"{len(missing)} of {len(set(cells))} cells were not run here. To measure them:"
        body += [paragraph(rest, "note after"), el("pre", el("code", text(command_for(part, results.grid))))]
    absent = [name for name in EXPERIMENTS if name not in results.grid.experiments]
    for name in absent if part in ("table2", "fig2", "fig3", "fig4", "time", "memory") else ():
        scale = results.grid.scale.name if name in results.grid.scale.experiments else "full"
        command = f"lmdp reproduce {part} --scale {scale} --experiments {name} --data-folder DATA --out DIR"
        rest = f"Not run here: {EXPERIMENTS[name].title}."
        body += [paragraph(rest, "note after"), el("pre", el("code", text(command)))]
    return section(TITLES[part], *body, key=part)


def command_for(part: str, grid: Grid) -> str:
    return (
        f"lmdp reproduce {part} --scale {grid.scale.name} --experiments {','.join(grid.experiments)} "
        f"--seeds {grid.seeds} --data-folder DATA --out DIR"
    )
