"""Layers that a measurement cannot tell apart count alike.

Attacks on layers that leak alike give error rates that differ by noise, and an emphasis of 5 would make weights of it.
So layers form groups, and a group shares one error rate, the mean of its layers weighted by how precise each is. A
group is split only where two of its layers differ by more than the largest difference that noise alone makes between
so many layers (Tukey and Kramer's range test); it is cut where the two sides are each as uniform as can be, and the
sides are looked at in turn. Layers far apart therefore keep what was measured, and their order is kept always.

All layers are attacked on the same examples, so that their errors rise and fall together and differences are less
noisy than is assumed here: layers are kept together too often, never told apart too often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import studentized_range

Floats = NDArray[np.float64]
RISKED = 0.05
"""How often layers that leak alike are told apart, at most."""
SMALLEST = 1e-6
"""A standard error is taken to be at least this: files may hold intervals of no width."""


def told_apart(rates: Sequence[float], errors: Sequence[float]) -> list[float]:
    """For each rate, measured with this standard error, the mean of the group that it cannot be told apart from."""
    measured, spread = np.asarray(rates, dtype=np.float64), np.maximum(np.asarray(errors, dtype=np.float64), SMALLEST)
    order = np.lexsort((spread, measured))
    shared = np.empty_like(measured)
    for start, stop in _groups(measured[order], spread[order]):
        group = order[start:stop]
        alone = stop - start == 1  # keeps its rate to the last bit
        shared[group] = measured[group] if alone else np.average(measured[group], weights=spread[group] ** -2.0)
    return [float(rate) for rate in shared]


def _groups(rates: Floats, errors: Floats) -> Iterator[tuple[int, int]]:
    """(start, stop) of the groups among ascending rates."""
    waiting = [(0, len(rates))]
    while waiting:
        start, stop = waiting.pop()
        if stop - start > 1 and _differ(rates[start:stop], errors[start:stop]):
            cut = start + _best_cut(rates[start:stop], errors[start:stop])
            waiting += [(start, cut), (cut, stop)]
        else:
            yield start, stop


def _differ(rates: Floats, errors: Floats) -> bool:
    """Whether any two differ by more than noise makes the most different of so many differ."""
    apart = np.abs(rates[:, None] - rates) / np.sqrt((errors[:, None] ** 2 + errors**2) / 2)
    return bool(apart.max() > _reach_of_noise(len(rates)))


@lru_cache(maxsize=1024)
def _reach_of_noise(count: int) -> float:
    """How many standard errors the most different of so many alike lie apart, but for one time in twenty."""
    return float(studentized_range.ppf(1 - RISKED, count, np.inf))


def _best_cut(rates: Floats, errors: Floats) -> int:
    """How many of the lowest to part from the others, so that the least spread is left within the two sides.

    Never between layers of the same rate.
    """
    weights = errors**-2.0
    left = _spread(weights, rates)[:-1]
    right = _spread(weights[::-1], rates[::-1])[::-1][1:]
    return 1 + int(np.argmin(np.where(np.diff(rates) > 0, left + right, np.inf)))


def _spread(weights: Floats, rates: Floats) -> Floats:
    """Of the first, the first two, the first three …: the weighted sum of squares about their mean."""
    total, first, second = (np.cumsum(weights * rates**power) for power in (0, 1, 2))
    return np.asarray(second - first**2 / total)
