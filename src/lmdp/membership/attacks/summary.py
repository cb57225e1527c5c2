"""Attacks that look at a few telling numbers of an example instead of its whole representation.

A summary measures numbers in which members may differ: lengths, distances, losses. Fitted examples are measured as if
they were new (leaving themselves out where they would pull a statistic towards themselves), so that what is learnt on
them holds for examples never seen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from lmdp.membership.evidence import Array, Evidence, Fit, Score, Standardiser

Measure = Callable[[Evidence], Array]
Summary = Callable[[Evidence, int], tuple[Array, Measure]]
"""(evidence, seed) → the numbers of the fitted examples, and a function that measures others."""


def remembered(summary: Summary) -> Summary:
    """The same summary, which several attacks may ask for in turn about the same evidence."""
    last: list[tuple[Evidence, tuple[Array, Measure]]] = []

    def recall(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
        kept = last[0] if last else None  # read once: folds are fitted side by side
        if kept is None or kept[0] is not evidence:
            table, measure = summary(evidence, seed)
            kept = (evidence, (table, _remembered_measure(measure)))
            last[:] = [kept]
        return kept[1]

    return recall


def _remembered_measure(measure: Measure) -> Measure:
    last: list[tuple[Evidence, Array]] = []

    def recall(other: Evidence) -> Array:
        kept = last[0] if last else None
        if kept is None or kept[0] is not other:
            kept = (other, measure(other))
            last[:] = [kept]
        return kept[1]

    return recall


def attack_on(*summaries: Summary) -> Fit:
    """Logistic regression on the numbers and their squares: the log-likelihood ratio of two normal distributions."""

    def fit(evidence: Evidence, member: NDArray[np.bool_], seed: int) -> Score:
        tables, measures = zip(*(summary(evidence, seed) for summary in summaries))
        judge = judge_of(np.hstack(tables), member, seed)
        return lambda other: judge(np.hstack([measure(other) for measure in measures]))

    return fit


def judge_of(table: Array, member: NDArray[np.bool_], seed: int) -> Callable[[Array], NDArray[np.float64]]:
    """From numbers of examples whose membership is known: how much other numbers look like a member's."""
    scale = Standardiser.of(table)

    def terms(numbers: Array) -> Array:
        values = scale(numbers)
        return np.hstack([values, values**2])

    model = LogisticRegression(C=0.1, tol=1e-3, max_iter=1000, random_state=seed).fit(terms(table), member)
    return lambda numbers: np.asarray(model.decision_function(terms(numbers)), dtype=np.float64)
