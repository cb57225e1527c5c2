"""Lower bounds on epsilon from guesses about membership. Pure statistics: counts in, a number out.

    from_rates    repeated runs: error rates of one test, each bounded by Clopper and Pearson
    from_guesses  one run with many canaries: Steinke, Nasr and Jagielski (arXiv 2305.08846), Theorem 5.2

Both say: a mechanism that is (epsilon, delta)-private for an epsilon below the bound would show such a result with
probability at most 1 − confidence.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import bdtr, bdtrc

from lmdp.membership.metrics import clopper_pearson


def from_rates(
    *, false_positives: int, negatives: int, false_negatives: int, positives: int, delta: float, confidence: float
) -> float:
    """The epsilon that a test with these errors refutes, at this confidence. Choose the test on other runs than these.

    (epsilon, delta)-privacy forces 1 − FNR ≤ e^epsilon · FPR + delta, and the same with the two exchanged.
    """
    for errors, trials in ((false_positives, negatives), (false_negatives, positives)):
        if not 0 <= errors <= trials or trials < 1:
            raise ValueError(
                f"{errors} errors in {trials} trials; errors must lie between 0 and a number of trials above 0"
            )
    _, fpr = clopper_pearson(false_positives, negatives, confidence)
    _, fnr = clopper_pearson(false_negatives, positives, confidence)  # half of the risk each: both hold at once
    return max(0.0, _log_ratio(1 - delta - fnr, fpr), _log_ratio(1 - delta - fpr, fnr))


def p_value(*, canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely an (epsilon, delta)-private mechanism is to allow so many correct guesses, at most.

    Each of `canaries` was included with probability 1/2; `guesses` of them were guessed about, the rest abstained from.
    With delta = 0 a private mechanism does no better than randomised response: a binomial tail. Delta may add to the
    number of correct guesses rarely and much: at most 2·m·delta·max_i P[v − i ≤ binomial < v] / i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} correct of {guesses} guesses about {canaries} canaries; each must not exceed the next"
        )
    if guesses == 0 or correct == 0:
        return 1.0
    m, r, v = canaries, guesses, correct
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(bdtrc(v - 1, r, accuracy))
    if delta == 0:
        return tail
    i = np.arange(1, v + 1)
    below_v = bdtr(v - 1, r, accuracy)
    below_start = np.where(v - i - 1 >= 0, bdtr(np.maximum(v - i - 1, 0), r, accuracy), 0.0)
    worst = float(((below_v - below_start) / i).max())
    return min(1.0, tail + 2 * m * delta * worst)


def from_guesses(*, canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """The largest epsilon that this many correct guesses refute, at this confidence."""

    def refuted(epsilon: float) -> bool:
        p = p_value(canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta)
        return p < 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low  # refuted itself, so rounding never raises the bound


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 and below > 0 else -math.inf
