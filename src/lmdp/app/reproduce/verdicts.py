"""Each claim of the paper, and each of ours, with a verdict: supported, not supported or cannot tell.

Verdicts are computed from cells alone. Differences are paired over seeds: the same network, canaries and draws of the
same seed, trained in two ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmdp.app.cells.statistics import (
    CANNOT_TELL,
    SUPPORTED,
    Difference,
    at_least,
    at_most,
    below_all,
    both,
    mean_of,
    paired,
    slope,
    within,
)
from lmdp.app.cells.store import Store
from lmdp.app.reproduce import results as read
from lmdp.app.reproduce.grid import AS_PUBLISHED, COMPARED, DPSGD, LM, OPTIMAL, PARTS, SGD, Contender, Grid
from lmdp.app.reproduce.paper import EXPERIMENTS, UTILITY_BAND
from lmdp.app.reproduce.results import CANARIES, HELD_OUT, IN_SAMPLE, Results

PAPER, OURS = "paper", "ours"
NOT_MEASURED = "not measured here"
SAME_ORDER = 0.5
"""In powers of ten: closer than that, two numbers are of the same order of magnitude."""
TRANSFER = 0.02
"""Error rates of shadow sets that differ by less agree; the paper's differ by 0.009 at most."""
TOLERANCE = 0.01
"""Of accuracy, for choosing a method's own best settings on the frontier."""
KINDS = {
    IN_SAMPLE: ("under the paper's protocol", "accuracy in-sample"),
    HELD_OUT: ("held out, ordinary examples", "AUC"),
    CANARIES: ("held out, canaries", "AUC"),
}


@dataclass(frozen=True)
class Verdict:
    """What was claimed, by whom, on what it was tried, and what the intervals say."""

    claim: str
    by: str
    tried: str
    answer: str
    evidence: str
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdicts(grid: Grid, what: Sequence[str], store: Store) -> list[Verdict]:
    """All that the parts asked for can say. A claim without cells is there too, with the command that measures it."""
    results = Results(grid, store)
    told = [v for part in what for v in JUDGES[part](results)]
    return list(dict.fromkeys(told))


def _verdict(
    results: Results, part: str, experiment: str, claim: str, answer: str, evidence: str, by: str = PAPER, how: str = ""
) -> Verdict:
    title = EXPERIMENTS[experiment].title
    command = f"lmdp reproduce {part} --scale {results.grid.scale.name} --experiments {experiment} --out DIR"
    missing = results.store.missing(PARTS[part](results.grid)) if answer == CANNOT_TELL else []
    tried = f"{title}{how and f', {how}'}"
    return Verdict(claim, by, tried, answer, evidence or _why_not(results, part), command if missing else "")


def _why_not(results: Results, part: str) -> str:
    there = results.measured(PARTS[part](results.grid))
    return "there is no interval: fewer than two seeds of what is compared were measured" if there else NOT_MEASURED


def _said(differences: Mapping[str, Difference | None]) -> str:
    """Each with its interval; those without are not mentioned."""
    told = {name: each for name, each in differences.items() if each is not None}
    seeds = min((each.seeds for each in told.values()), default=0)
    return "; ".join(f"{name} {each}" for name, each in told.items()) + (f" ({seeds} paired seeds)" if told else "")


def _against(
    results: Results, experiment: str, who: Contender, others: Sequence[Contender], value: read.Value
) -> dict[str, Difference | None]:
    mine = results.of(experiment, who, value)
    pairs = {other.label: results.of(experiment, other, value) for other in others}
    return {f"to {label}": paired(mine, theirs, len(others)) for label, theirs in pairs.items()}


# -- Table 2 ----------------------------------------------------------------------------------------------------------


def _peak_risk(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.experiments:
        for who in (AS_PUBLISHED, LM):
            for kind, (how, unit) in KINDS.items():
                differences = _against(results, name, who, COMPARED, read.peak(kind))
                told.append(
                    _verdict(
                        results,
                        "table2",
                        name,
                        f"{who.label} has a lower peak risk than every baseline at equal epsilon",
                        below_all(differences, EXPERIMENTS[name].gain),
                        f"{unit} at the leakiest layer, difference {_said(differences)}" if _any(differences) else "",
                        how=how,
                    )
                )
    return told


def _any(differences: Mapping[str, Difference | None]) -> bool:
    return any(each is not None for each in differences.values())


def _utility(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.experiments:
        baselines = {each.label: results.of(name, each, read.accuracy) for each in COMPARED}
        there = {label: sum(v.values()) / len(v) for label, v in baselines.items() if v}
        top = max(there, key=there.__getitem__) if there else ""
        for who in (AS_PUBLISHED, LM):
            gap = paired(results.of(name, who, read.accuracy), baselines.get(top, {}))
            said = f"accuracy, difference {_said({f'to the best baseline, {top},': gap})}" if gap else ""
            claim = f"{who.label} keeps the accuracy within 2 points of the best baseline"
            told.append(_verdict(results, "fig3", name, claim, at_least(gap, -UTILITY_BAND), said))
    return told


def _bias(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.experiments:
        for who in (AS_PUBLISHED, LM):
            ratios = _against(results, name, who, COMPARED, read.log_bias)
            said = f"log10 of the mean of ‖b‖, difference {_said(ratios)}" if _any(ratios) else ""
            claim = f"the bias of {who.label} is of the same order as that of every baseline"
            told.append(_verdict(results, "fig4", name, claim, within(list(ratios.values()), SAME_ORDER), said))
        for who in OPTIMAL:
            ratios = _against(results, name, who, (*COMPARED, LM), read.log_bias)
            said = f"log10 of the mean of ‖b‖, difference {_said(ratios)}" if _any(ratios) else ""
            claim = f"the bias of {who.label} is lower than that of every other method"
            told.append(_verdict(results, "fig4", name, claim, below_all(ratios, 0.0), said))
    return told


def _certified(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.experiments:
        gap = {
            "accuracy": paired(
                results.of(name, LM, read.accuracy), results.of(name, AS_PUBLISHED, read.accuracy), comparisons=2
            ),
            "AUC on canaries": paired(
                results.of(name, LM, read.peak(CANARIES)), results.of(name, AS_PUBLISHED, read.peak(CANARIES)), 2
            ),
        }
        answer = both(at_least(gap["accuracy"], -0.01), at_most(gap["AUC on canaries"], 0.02))
        claim = "certified weights cost at most 1 point of accuracy, and 0.02 of AUC, against the published ones"
        said = f"difference in {_said(gap)}" if _any(gap) else ""
        told.append(_verdict(results, "table2", name, claim, answer, said, OURS))
    return told


def _in_sample(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.experiments:
        for who in (SGD, LM):
            share = mean_of(list(results.of(name, who, read.memorised).values()))
            said = f"share of it that permuted labels give as well: {share}, {share.seeds} seeds" if share else ""
            claim = "in-sample error rates measure what an adversary can memorise, and hardly the leak"
            how = f"attacks on {who.label}"
            told.append(_verdict(results, "table2", name, claim, at_least(share, 0.5), said, OURS, how))
    return told


# -- Figure 2, shadow sets, ablations ---------------------------------------------------------------------------------


def _depth(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.experiments:
        for kind, (how, unit) in KINDS.items():

            def rises(result: read.Result, kind: str = kind) -> float | None:
                values = list(read.by_layer(kind)(result).values())
                return slope([(float(i), value) for i, value in enumerate(values)]) if values else None

            steepness = mean_of(list(results.of(name, SGD, rises).values()))
            said = f"{unit} for each layer further: {steepness}, {steepness.seeds} seeds" if steepness else ""
            claim = "risk rises with depth under SGD"
            told.append(_verdict(results, "fig2", name, claim, at_least(steepness, 0.0), said, how=how))
    return told


def _transfer(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.ablated:
        first, *others = results.grid.scale.shadows[name]
        for kind, how in ((IN_SAMPLE, "in-sample"), (HELD_OUT, "held out")):
            differences: dict[str, Difference | None] = {}
            base = rates_by_layer(results, name, first, kind)
            for shadow in others:
                other = rates_by_layer(results, name, shadow, kind)
                for layer in base:
                    number = len(base) * len(others)
                    differences[f"{shadow} {layer}"] = paired(other.get(layer, {}), base[layer], number)
            widest = sorted(
                ((k, d) for k, d in differences.items() if d is not None), key=lambda item: -abs(item[1].mean)
            )
            said = f"largest difference of error rates to {first}: {_said(dict(widest[:1]))}" if widest else ""
            answer = within(list(differences.values()), TRANSFER) if differences else CANNOT_TELL
            claim = "error rates agree across shadow sets"
            told.append(_verdict(results, "shadow", name, claim, answer, said, how=how))
    return told


def rates_by_layer(results: Results, experiment: str, shadow: str, kind: str) -> dict[str, dict[int, float]]:
    """Layer → seed → error rate."""
    rates: dict[str, dict[int, float]] = {}
    for m in results.measured(results.grid.estimated(experiment, shadow)):
        for layer, leak in m.result[kind].items():
            rates.setdefault(layer, {})[m.cell.seed] = 1 - leak[0] if kind == IN_SAMPLE else leak["error_rate"]
    return rates


def _trend(
    results: Results, experiment: str, who: Contender, key: str, values: Sequence[float], value: read.Value
) -> Difference | None:
    """The mean over seeds of what a tenfold value adds."""
    points: dict[int, list[tuple[float, float]]] = {}
    for at in values:
        for seed, number in results.of(experiment, who, value, **{key: at}).items():
            points.setdefault(seed, []).append((math.log10(at), number))
    slopes = [slope(each) for each in points.values() if len(each) == len(values)]
    return mean_of([each for each in slopes if each is not None], comparisons=2)


def _emphasis(results: Results) -> list[Verdict]:
    told = []
    for name in results.grid.ablated:
        values = results.grid.scale.emphases
        utility = _trend(results, name, LM, "emphasis", values, read.accuracy)
        for kind in (HELD_OUT, CANARIES):
            leak = _trend(results, name, LM, "emphasis", values, read.last(kind))
            answer = both(at_most(leak, 0.0), at_most(utility, 0.0))
            said = _said({"AUC of the deepest layer at ten times r": leak, "accuracy": utility})
            claim = "a larger r lowers the risk of deep layers, and utility"
            told.append(_verdict(results, "emphasis", name, claim, answer, said, how=KINDS[kind][0]))
    return told


def _varied(part: str, key: str, values: Callable[[Grid], Sequence[float]], name: str) -> Callable[..., list[Verdict]]:
    def judge(results: Results) -> list[Verdict]:
        told = []
        for experiment in results.grid.ablated:
            utility = _trend(results, experiment, LM, key, values(results.grid), read.accuracy)
            size = _trend(results, experiment, LM, key, values(results.grid), read.log_bias)
            answer = both(at_least(utility, 0.0), at_most(size, 0.0))
            said = _said({f"accuracy at ten times {name}": utility, "log10 of the mean of ‖b‖": size})
            claim = f"a larger {name} raises accuracy and lowers the bias"
            told.append(_verdict(results, part, experiment, claim, answer, said))
        return told

    return judge


# -- time, memory, frontier -------------------------------------------------------------------------------------------


def _time(results: Results) -> list[Verdict]:
    told = []
    for m in results.measured(results.grid.step()):
        seconds, name = m.result["turns"], m.cell.setting
        turns = [a / b - 1 for a, b in zip(seconds["lmdp lm (private)"], seconds["lmdp dpsgd"])]
        ratio = mean_of(sorted(turns)[len(turns) // 5 : len(turns) - len(turns) // 5])  # a turn may meet another load
        printed = EXPERIMENTS[name].seconds["lm"] / EXPERIMENTS[name].seconds["dpsgd"] - 1
        said = f"seconds of a step over DP-SGD's: {ratio}, the paper {printed:+.3f}"
        claim = "a step takes at most a tenth longer than one of DP-SGD"
        told.append(_verdict(results, "time", name, claim, at_most(ratio, 0.1), said))
    return told


def _memory(results: Results) -> list[Verdict]:
    told = []
    for m in results.measured(results.grid.step()):
        peaks, name = m.result["peak_bytes"], m.cell.setting
        if not {"lmdp lm (private)", "lmdp dpsgd"} <= set(peaks):
            continue
        ratio = peaks["lmdp lm (private)"] / peaks["lmdp dpsgd"] - 1
        paper = EXPERIMENTS[name].mebibytes
        printed = (paper["lm"] or 0) / (paper["dpsgd"] or 1) - 1
        said = f"peak memory over DP-SGD's: {ratio:+.3f}, measured once in fresh processes; the paper {printed:+.3f}"
        claim = f"peak memory is higher than DP-SGD's: by {printed:.0%} in the paper, by half of that or more here"
        answer = at_least(Difference(ratio, ratio, ratio, 1), printed / 2)
        told.append(_verdict(results, "memory", name, claim, answer, said))
    return told


def _frontier(results: Results) -> list[Verdict]:
    """Each method at its own best settings, by the same rule."""
    told = []
    for name in results.grid.ablated:
        for epsilon in results.grid.scale.frontier_epsilons:
            rates = {who: read.best(results, name, who, epsilon, TOLERANCE) for who in (DPSGD, LM)}
            gaps: dict[str, Difference | None] = {}
            for label, value in (("AUC on canaries", read.peak(CANARIES)), ("accuracy", read.accuracy)):
                sides = [
                    results.of(name, who, value, epsilon=epsilon, learning_rate=rate) if rate is not None else {}
                    for who, rate in rates.items()
                ]
                gaps[label] = paired(sides[1], sides[0], comparisons=2)
            leak, utility = gaps["AUC on canaries"], gaps["accuracy"]
            answer = both(at_most(leak, 0.0), at_least(utility, -TOLERANCE))
            chosen = ", ".join(f"{who.label} at learning rate {rate:g}" for who, rate in rates.items() if rate)
            said = f"{chosen}: difference in {_said(gaps)}" if _any(gaps) else ""
            how = f"epsilon {epsilon:g}"
            told.append(_verdict(results, "frontier", name, ON_THE_FRONTIER, answer, said, OURS, how))
    return told


ON_THE_FRONTIER = f"at its own best rate {LM.label} leaks less of canaries than DP-SGD at its own, as accurate"


def advice(told: Sequence[Verdict]) -> str:
    """What the frontier says to somebody who names no method; "" where it was not measured.

    LM-DP-SGD only where it is supported at every epsilon that was tried: in doubt it is the simpler of the two.
    """
    tried = [v for v in told if v.claim == ON_THE_FRONTIER and "paired seeds" in v.evidence]
    if not tried:
        return ""
    held = sum(v.answer == SUPPORTED for v in tried)
    chosen = LM.label if held == len(tried) else DPSGD.label
    return (
        f"To somebody who names no method: {chosen}. That {LM.label} does better on the frontier is supported at "
        f"{held} of {len(tried)} epsilons that were tried."
    )


JUDGES: dict[str, Callable[[Results], list[Verdict]]] = {
    "fig2": _depth,
    "table2": lambda results: [*_peak_risk(results), *_certified(results), *_in_sample(results)],
    "shadow": _transfer,
    "fig3": _utility,
    "fig4": _bias,
    "epsilon": _varied("epsilon", "epsilon", lambda grid: grid.scale.epsilons, "epsilon"),
    "clip": _varied("clip", "clip_norm", lambda grid: grid.scale.clip_norms, "C"),
    "emphasis": _emphasis,
    "time": _time,
    "memory": _memory,
    "frontier": _frontier,
}
"""Part → the verdicts on what it shows."""
