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
        if not last or last[0][0] is not evidence:
            last[:] = [(evidence, summary(evidence, seed))]
        return last[0][1]

    return recall


def attack_on(*summaries: Summary) -> Fit:
    """Logistic regression on the numbers and their squares: the log-likelihood ratio of two normal distributions."""

    def fit(evidence: Evidence, member: NDArray[np.bool_], seed: int) -> Score:
        tables, measures = zip(*(summary(evidence, seed) for summary in summaries))
        scale = Standardiser.of(np.hstack(tables))

        def terms(table: Array) -> Array:
            values = scale(table)
            return np.hstack([values, values**2])

        model = LogisticRegression(C=0.1, max_iter=300, random_state=seed).fit(terms(np.hstack(tables)), member)

        def score(other: Evidence) -> NDArray[np.float64]:
            table = np.hstack([measure(other) for measure in measures])
            return np.asarray(model.decision_function(terms(table)), dtype=np.float64)

        return score

    return fit
