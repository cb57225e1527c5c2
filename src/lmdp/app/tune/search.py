"""A search over settings, one value after the other: every method has the same options, rule and number of tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lmdp.app.cells.choice import Point, least_leaky

Values = dict[str, Any]
Measure = Callable[[Sequence[Values]], list[Point]]


def searched(
    start: Values,
    options: Mapping[str, Sequence[Any]],
    measure: Measure,
    tolerance: float,
    finer: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Point, list[Point]]:
    """The best setting, and all that were tried.

    For each key in turn its options are tried with the best of all others so far; the first option of each key stands
    for it until then. `least_leaky` chooses. `finer` names a key that is then tried at so many values more, near its
    best: for a method that has one key less than another, so that both have as many tries.
    """
    values = {**start, **{key: tried[0] for key, tried in options.items()}}
    every: dict[tuple[tuple[str, Any], ...], Point] = {}
    best: Point | None = None
    for key, tried in (*options.items(), *((key, None) for key in finer)):
        near = about(values[key], finer[key]) if tried is None else tried
        points = measure([{**values, key: option} for option in near])
        every |= {point.values: point for point in points}
        best = least_leaky(points, tolerance)
        values = {**values, key: best[key]}
    if best is None:
        raise ValueError("there is nothing to search: no key has options")
    return best, list(every.values())


def about(value: float, number: int) -> list[float]:
    """The value, and so many others on either side of it: half way to its double and its half, then nearer."""
    steps = [sign * 0.5 ** (i + 1) for i in range(number) for sign in (1, -1)]
    return [value, *(float(f"{value * 2**step:.3g}") for step in steps[:number])]
