"""A search over settings, one value after the other: every method has the same options and the same rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmdp.app.cells.choice import Point, least_leaky

Values = dict[str, Any]
Measure = Callable[[Sequence[Values]], list[Point]]


def searched(
    start: Values, options: Mapping[str, Sequence[Any]], measure: Measure, tolerance: float
) -> tuple[Point, list[Point]]:
    """The best setting, and all that were tried.

    For each key in turn its options are tried with the best of all others so far; the first option of each key stands
    for it until then. `least_leaky` chooses.
    """
    values = {**start, **{key: tried[0] for key, tried in options.items()}}
    every: dict[tuple[tuple[str, Any], ...], Point] = {}
    best: Point | None = None
    for key, tried in options.items():
        wanted = [{**values, key: option} for option in tried]
        points = measure(wanted)
        every |= {point.values: point for point in points}
        best = least_leaky(points, tolerance)
        values = {**values, key: best[key]}
    if best is None:
        raise ValueError("there is nothing to search: no key has options")
    return best, list(every.values())
