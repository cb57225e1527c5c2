"""Differences that are paired over seeds, with intervals, and what may be said of them. Pure functions of numbers.

Two seeds or more make an interval (Student's t of the differences); with fewer nothing can be told. Where a claim is
about several comparisons at once, each interval is widened so that all hold together at 95 % (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SUPPORTED, NOT_SUPPORTED, CANNOT_TELL = "supported", "not supported", "cannot tell"
ANSWERS = (SUPPORTED, NOT_SUPPORTED, CANNOT_TELL)
LEVEL = 0.95
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Difference:
    """A mean over seeds, and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def mean_of(values: Sequence[float], comparisons: int = 1) -> Difference | None:
    """None with fewer than two values, or with one that is not finite."""
    from scipy import stats

    given = np.asarray(values, dtype=np.float64)
    if len(given) < 2 or not np.isfinite(given).all():
        return None
    mean, error = float(given.mean()), float(stats.sem(given))
    if error == 0:
        return Difference(mean, mean, mean, len(given))
    low, high = stats.t.interval(1 - (1 - LEVEL) / comparisons, len(given) - 1, mean, error)
    return Difference(mean, float(low), float(high), len(given))


def paired(one: BySeed, other: BySeed, comparisons: int = 1) -> Difference | None:
    """one − other over the seeds that both have."""
    return mean_of([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())], comparisons)


def below_all(differences: Mapping[str, Difference | None], worthwhile: float) -> str:
    """Whether something is lower than everything it is compared with.

    Supported: every interval lies below 0. Not supported: against one of them, it is shown not to be lower by
    `worthwhile`. Between the two, or without an interval, it cannot be told.
    """
    told = list(differences.values())
    if not told:
        return CANNOT_TELL
    if all(each is not None and each.high < 0 for each in told):
        return SUPPORTED
    refuted = any(each is not None and each.low > -worthwhile for each in told)
    return NOT_SUPPORTED if refuted else CANNOT_TELL


def at_least(difference: Difference | None, bound: float) -> str:
    """Whether it is above the bound, below it, or neither."""
    if difference is None:
        return CANNOT_TELL
    return SUPPORTED if difference.low > bound else NOT_SUPPORTED if difference.high < bound else CANNOT_TELL


def at_most(difference: Difference | None, bound: float) -> str:
    if difference is None:
        return CANNOT_TELL
    return SUPPORTED if difference.high < bound else NOT_SUPPORTED if difference.low > bound else CANNOT_TELL


def within(differences: Sequence[Difference | None], margin: float) -> str:
    """Whether all lie within ± margin: shown of all, refuted of one, or neither."""
    if any(each is not None and (each.low > margin or each.high < -margin) for each in differences):
        return NOT_SUPPORTED
    shown = bool(differences) and all(
        each is not None and -margin < each.low and each.high < margin for each in differences
    )
    return SUPPORTED if shown else CANNOT_TELL


def both(*answers: str) -> str:
    """Of a claim with several parts: supported if all are, not if one is not."""
    if NOT_SUPPORTED in answers:
        return NOT_SUPPORTED
    return SUPPORTED if answers and set(answers) == {SUPPORTED} else CANNOT_TELL


def slope(values: Sequence[tuple[float, float]]) -> float | None:
    """Of the straight line nearest to (x, y); None with fewer than two different x."""
    x, y = np.array(values, dtype=np.float64).reshape(-1, 2).T
    if len(set(x.tolist())) < 2:
        return None
    centred = x - x.mean()
    return float((centred * (y - y.mean())).sum() / (centred**2).sum())
