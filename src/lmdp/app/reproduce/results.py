"""What tables, figures and verdicts read out of measured cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmdp.app.cells.cell import Cell, Measured
from lmdp.app.cells.choice import Point, least_leaky
from lmdp.app.cells.statistics import BySeed
from lmdp.app.cells.store import Store
from lmdp.app.reproduce.grid import Contender, Grid

Result = Mapping[str, Any]
Value = Callable[[Result], float | None]
HELD_OUT, CANARIES, IN_SAMPLE = "heldout", "canaries", "in_sample"


def accuracy(result: Result) -> float | None:
    value = result.get("accuracy")
    return None if value is None else float(value)


def by_layer(kind: str) -> Callable[[Result], dict[str, float]]:
    """Layer → AUC, held out or on canaries; or the accuracy of an adversary on its own training set."""

    def read(result: Result) -> dict[str, float]:
        told = result.get(kind) or {}
        return {name: leak[0] if kind == IN_SAMPLE else leak["auc"] for name, leak in told.items()}

    return read


def peak(kind: str) -> Value:
    """At the leakiest layer."""
    return lambda result: max(by_layer(kind)(result).values(), default=None)


def last(kind: str) -> Value:
    """At the deepest layer."""
    return lambda result: next(reversed(by_layer(kind)(result).values()), None)


def null_peak(result: Result) -> float | None:
    """Of the paper's protocol on permuted labels, at its highest layer."""
    return max((pair[1] for pair in (result.get(IN_SAMPLE) or {}).values()), default=None)


def peak_accuracy(result: Result) -> float | None:
    """Attack accuracy, held out, at the layer where it is highest."""
    return max((leak["accuracy"] for leak in (result.get(HELD_OUT) or {}).values()), default=None)


def memorised(result: Result) -> float | None:
    """How much of what the paper's protocol finds above chance it finds on permuted labels too, over all layers."""
    pairs = list((result.get(IN_SAMPLE) or {}).values())
    above = sum(pair[0] - 0.5 for pair in pairs)
    return sum(pair[1] - 0.5 for pair in pairs) / above if above > 0 else None


def bias(result: Result) -> float | None:
    """The mean of ‖b_t‖ over training."""
    curve = result.get("bias") or []
    return sum(value for _, value in curve) / len(curve) if curve else None


def log_bias(result: Result) -> float | None:
    """In powers of ten."""
    value = bias(result)
    return math.log10(value) if value else None


@dataclass(frozen=True)
class Results:
    """A grid, and what has been measured of it."""

    grid: Grid
    store: Store

    def measured(self, cells: Iterable[Cell]) -> list[Measured]:
        return self.store.measured(cells)

    def values(self, cells: Iterable[Cell], value: Value) -> dict[int, float]:
        """By seed, for the cells that are there and have it."""
        pairs = ((m.cell.seed, value(m.result)) for m in self.measured(cells))
        return {seed: number for seed, number in pairs if number is not None}

    def of(self, experiment: str, contender: Contender, value: Value, **changed: Any) -> BySeed:
        return self.values(self.grid.trained(experiment, contender, **changed), value)


def best(results: Results, experiment: str, contender: Contender, epsilon: float, tolerance: float) -> float | None:
    """The learning rate of a method's own best setting (`least_leaky`); None where one has not been measured."""
    base = float(results.grid.scale.base(experiment)["learning_rate"])
    points = []
    for factor in results.grid.scale.frontier_rates:
        given = {"epsilon": epsilon, "learning_rate": base * factor}
        sides = [results.of(experiment, contender, value, **given) for value in (accuracy, peak(CANARIES))]
        if not all(sides):
            return None
        points.append(Point(tuple(given.items()), *(tuple(side.values()) for side in sides)))
    return float(least_leaky(points, tolerance)["learning_rate"])
