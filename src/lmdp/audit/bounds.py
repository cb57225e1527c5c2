"""Lower bounds on epsilon from guesses about membership. Pure statistics: counts in, a number out.

    from_rates    repeated runs: error rates of one test, each bounded by Clopper and Pearson
    from_guesses  one run with many canaries: Steinke, Nasr and Jagielski (arXiv 2305.08846), Theorem 5.2
    from_curves   the same run, and a family of trade-off curves: after Mahloujifar, Melis and Chaudhuri (2410.22235)
    one_run       scores and coins of one run → guesses → the bound that one of these families gives

The first two say: a mechanism that is (epsilon, delta)-private for an epsilon below the bound would show such a result
with probability at most 1 − confidence. The third says it only of mechanisms whose whole curve is one of the family,
and says more of those: a bound under an assumption is another claim than one without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc

from lmdp.audit.curves import Curve, GaussianSteps
from lmdp.membership.metrics import clopper_pearson

Family = Literal["any", "gaussian", "mechanism"]
FAMILIES: dict[str, str] = {
    "any": "any (epsilon, delta)-private mechanism",
    "gaussian": "a mu-GDP mechanism, for some mu",
    "mechanism": "the stated steps and sampling rate, with some noise multiplier",
}
"""What a one-run bound speaks of: which mechanisms of a smaller epsilon it refutes."""

FINENESS, LEAST_NOISE, MOST_NOISE = 128, 0.25, 4096.0
"""Noise multipliers are tried on a grid with so many to an octave, and the bound is rounded down to it."""


@dataclass(frozen=True)
class OneRun:
    """What guesses about the canaries of one run refute: every member of the family with a smaller epsilon.

    If the training were a member with `lower` or less, such a result would have a probability of at most
    1 − `confidence`. `noise_multiplier` is the least of the family that is refuted (1 / mu for "gaussian"), None where
    none is or the family has none.
    """

    lower: float
    family: str
    delta: float
    confidence: float
    canaries: int
    included: int
    guesses: int
    correct: int
    noise_multiplier: float | None = None

    @property
    def assumes(self) -> str:
        return FAMILIES[self.family]


def one_run(
    scores: Sequence[float] | NDArray[Any],
    included: Sequence[bool] | NDArray[Any],
    *,
    delta: float,
    confidence: float = 0.95,
    mechanism: GaussianSteps | None = None,
    family: Family | None = None,
    guesses: int | Sequence[int] | None = None,
) -> OneRun:
    """Guess about the canaries with the highest and lowest scores, and bound epsilon by how many guesses are right.

    scores      of each canary, higher where it seems to have been in; computed without looking at `included`
    included    whether it was in: fair coins, thrown independently of each other and of all else
    mechanism   the noise multiplier, sampling rate and steps of the training; needed by the family "mechanism"
    family      which mechanisms are refuted (`FAMILIES`); "mechanism" where that is given, else "any". Not a choice to
                make by the result
    guesses     how many canaries are guessed about, half as in and half as out; a quarter unless given. Decided before
                the scores are seen, or else all the numbers that are tried: each is then held to its share of the risk
    """
    value, coin = np.asarray(scores, dtype=float), np.asarray(included)
    family = family or ("any" if mechanism is None else "mechanism")
    tried = _tried(value, coin, guesses)
    _check(family, mechanism, delta, confidence)
    order = np.argsort(np.nan_to_num(value, nan=0.0), kind="stable")
    level = (1 - confidence) / len(tried)
    results = [_bound(order, coin.astype(bool), number, family, mechanism, delta, level) for number in tried]
    lower, number, correct, noise = max(results, key=lambda result: result[0])
    return OneRun(lower, family, delta, confidence, len(value), int(coin.sum()), number, correct, noise)


def usual_guesses(canaries: int) -> int:
    """A quarter of the canaries, and an even number: near the best for 200 to 5,000 canaries and mu from 0.3 to 3."""
    return min(canaries, 2 * max(1, canaries // 8))


def _bound(
    order: NDArray[np.int64],
    included: NDArray[np.bool_],
    guesses: int,
    family: str,
    mechanism: GaussianSteps | None,
    delta: float,
    level: float,
) -> tuple[float, int, int, float | None]:
    """(lower bound, guesses, correct guesses, least refuted noise)."""
    as_out, as_in = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    correct = int(included[as_in].sum() + (~included[as_out]).sum())
    counts = {"canaries": len(order), "guesses": guesses, "correct": correct}
    if family == "any":
        return from_guesses(**counts, delta=delta, confidence=1 - level), guesses, correct, None
    member = GaussianSteps(1.0) if family == "gaussian" or mechanism is None else mechanism
    noise = from_curves(**counts, family=member.with_noise(1.0), level=level)
    lower = 0.0 if noise is None else member.with_noise(noise).epsilon(delta)
    return lower, guesses, correct, noise


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


@lru_cache(4096)
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


@lru_cache(4096)
def from_curves(*, canaries: int, guesses: int, correct: int, family: GaussianSteps, level: float) -> float | None:
    """The least noise multiplier at which the family's steps are refuted at this level of error, None if there is none.

    The curve rises as noise falls, so that more noise is refuted too, and the steps must have less than this.
    """

    def refuted(power: int) -> bool:
        curve = family.with_noise(2.0 ** (power / FINENESS)).curve()
        return refutes(curve, canaries=canaries, guesses=guesses, correct=correct, level=level)

    if correct <= guesses / 2:
        return None
    start = max(0.5, family.sample_rate * math.sqrt(family.steps))  # where an attack can do something, but not all
    high = math.ceil(FINENESS * math.log2(start))
    while not refuted(high):
        high += FINENESS
        if high > FINENESS * math.log2(MOST_NOISE):
            return None
    low = high - FINENESS
    while refuted(low):
        high, low = low, low - FINENESS
        if low < FINENESS * math.log2(LEAST_NOISE):
            return float(2.0 ** (high / FINENESS))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return float(2.0 ** (high / FINENESS))


def refutes(curve: Curve, *, canaries: int, guesses: int, correct: int, level: float) -> bool:
    """Whether a mechanism with this trade-off curve has so many correct guesses with a probability below `level`.

    Let C be the number of correct guesses among r about m canaries. For canary i and b = in or out, take the event that
    b is guessed of it and at least j − 1 guesses about others are right. If it has probability x where b is false, it
    has at most most(x) where b is true. Averaged over i and b (the curve is concave), for every j

        E[C; C ≥ j] / m  ≤  most(E[r − C; C ≥ j − 1] / m).

    With S_j = P[C ≥ j] the left side is (j·S_j + sum_{i>j} S_i) / m, that on the right
    ((r − j + 1)·S_{j−1} − sum_{i≥j} S_i) / m: a bound on S_{j−1} from below that increases with all S_i, i ≥ j. So the
    least S_0 for a given S_c is found going down from c with nothing above, and if it passes 1, S_c was impossible.
    """
    m, r = canaries, guesses
    tail, above = level, 0.0  # S_j, and the sum of S_i for i > j
    for j in range(correct, 0, -1):
        least = curve.least((j * tail + above) / m)
        above += tail
        tail = max(tail, (above + m * least) / (r - j + 1))
        if tail > 1:
            return True
    return False


def _tried(scores: NDArray[np.float64], included: NDArray[Any], guesses: int | Sequence[int] | None) -> list[int]:
    if scores.ndim != 1 or scores.shape != included.shape or len(scores) == 0:
        raise ValueError(
            f"scores have the shape {scores.shape} and included {included.shape}; both must be lists of the same "
            "length, with 1 or more canaries"
        )
    if not np.isin(included, (0, 1)).all():
        raise ValueError("included must hold true or false for each canary")
    one = usual_guesses(len(scores)) if guesses is None else guesses
    tried = [one] if isinstance(one, int) else list(one)
    if not tried or not all(1 <= number <= len(scores) for number in tried):
        raise ValueError(f"guesses is {guesses}; it must lie between 1 and the {len(scores)} canaries")
    return tried


def _check(family: str, mechanism: GaussianSteps | None, delta: float, confidence: float) -> None:
    if family not in get_args(Family):
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(FAMILIES)}")
    if family == "mechanism" and mechanism is None:
        raise ValueError("family 'mechanism' needs mechanism=GaussianSteps(noise multiplier, sampling rate, steps)")
    if not 0 <= delta < 1 or not 0 < confidence < 1:
        raise ValueError(f"delta is {delta} and confidence {confidence}; both must lie between 0 and 1")
    if family != "any" and delta == 0:
        raise ValueError(f"delta is 0, at which no member of family {family!r} has an epsilon; give one above 0")


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 and below > 0 else -math.inf
