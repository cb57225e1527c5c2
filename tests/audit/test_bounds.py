"""One-run bounds: never above the truth more often than stated, for mechanisms whose epsilon is known, and not idle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.stats import binom

from lmdp.audit import bounds
from lmdp.audit.bounds import OneRun, one_run, refutes
from lmdp.audit.curves import Curve, GaussianSteps

DELTA = 1e-5
GAUSSIAN = GaussianSteps(1.0)
TRAINING = GaussianSteps(0.8, 0.3, 10)
Rng = np.random.Generator
Scores = NDArray[np.float64]


# -- the tail ---------------------------------------------------------------------------------------------------------


def most_likely(curve: Curve, m: int, r: int, c: int) -> float:
    """The largest P[C ≥ c] under the constraints, all of which are linear: a linear program in P[C = 0 … r]."""
    count = np.arange(r + 1)
    rows, limits = [], []
    for j in range(1, r + 1):
        right, wrong = np.where(count >= j, count, 0) / m, np.where(count >= j - 1, r - count, 0) / m
        for e, d in zip(curve.epsilons, curve.deltas):
            rows += [right - math.exp(e) * wrong, right - math.exp(-e) * wrong]
            limits += [d, 1 - math.exp(-e) * (1 - d)]
    done = linprog(-(count >= c).astype(float), np.array(rows), limits, np.ones((1, r + 1)), [1.0])
    assert done.success
    return float(-done.fun)


@pytest.mark.parametrize(("m", "r", "c"), [(20, 20, 18), (40, 20, 16), (40, 12, 12), (30, 30, 20)])
@pytest.mark.parametrize(
    "curve",
    [
        Curve(np.array([1.0]), np.array([0.0])),
        Curve(np.array([0.5, 1.0, 2.0]), np.array([0.2, 0.1, 0.01])),
        Curve(np.linspace(0, 4, 9), 0.38 * np.exp(-1.5 * np.linspace(0, 4, 9))),
    ],
)
def test_going_down_from_the_count_agrees_with_a_linear_program(curve: Curve, m: int, r: int, c: int) -> None:
    largest = most_likely(curve, m, r, c)
    assert not refutes(curve, canaries=m, guesses=r, correct=c, level=largest * 0.999)
    assert largest > 0.99 or refutes(curve, canaries=m, guesses=r, correct=c, level=min(1.0, largest * 1.001))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_more_correct_guesses_and_a_larger_level_refute_more_and_a_higher_curve_less(data: st.DataObject) -> None:
    m = data.draw(st.integers(2, 60))
    r = data.draw(st.integers(1, m))
    c = data.draw(st.integers(0, r))
    level, epsilon = data.draw(st.floats(1e-4, 0.5)), data.draw(st.floats(0, 3))
    if not refutes(_pure(epsilon), canaries=m, guesses=r, correct=c, level=level):
        assert not refutes(_pure(epsilon), canaries=m, guesses=r, correct=max(0, c - 1), level=level)
        assert not refutes(_pure(epsilon), canaries=m, guesses=r, correct=c, level=level / 2)
        assert not refutes(_pure(epsilon + 0.3), canaries=m, guesses=r, correct=c, level=level)
        assert float(binom.sf(c - 1, r, 0.5)) > 0
    else:  # randomised response, the best that a mechanism of this epsilon can do, must agree
        assert float(binom.sf(c - 1, r, 1 / (1 + math.exp(-epsilon)))) <= level


def _pure(epsilon: float) -> Curve:
    return Curve(np.array([epsilon]), np.array([0.0]))


# -- mechanisms of known epsilon --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """A mechanism, as the scores of canaries that are in or out; `family` and `member` say what is true of it."""

    scores: Callable[[Rng, NDArray[np.bool_]], Scores]
    family: bounds.Family
    member: GaussianSteps | None = None
    epsilon: float = 0.0
    guesses: int | tuple[int, ...] | None = None

    @property
    def truth(self) -> float:
        return self.epsilon if self.member is None else self.member.epsilon(DELTA)


def gaussian(rng: Rng, present: NDArray[np.bool_]) -> Scores:
    return present + rng.normal(0, GAUSSIAN.noise_multiplier, len(present))


def subsampled(rng: Rng, present: NDArray[np.bool_]) -> Scores:
    """Orthogonal canaries in a training; an observer of every step, who knows sampling rate and noise."""
    q, s, t = TRAINING.sample_rate, TRAINING.noise_multiplier, TRAINING.steps
    drawn = present[:, None] & (rng.random((len(present), t)) < q)
    seen = drawn + rng.normal(0, s, drawn.shape)
    return np.asarray(np.log(1 - q + q * np.exp((seen - 0.5) / s**2)).sum(1))


def interfering(rng: Rng, present: NDArray[np.bool_]) -> Scores:
    """Unit canaries in a space too small for them: each is one of 50 directions, and twenty share it."""
    direction = np.arange(len(present)) % 50
    released = np.bincount(direction, present, 50) + rng.normal(0, 1, 50)
    return np.asarray(released[direction])


def responses(epsilon: float) -> Callable[[Rng, NDArray[np.bool_]], Scores]:
    def scores(rng: Rng, present: NDArray[np.bool_]) -> Scores:
        honest = rng.random(len(present)) < 1 / (1 + math.exp(-epsilon))
        return np.where(honest == present, 1.0, -1.0) + 1e-3 * rng.random(len(present))

    return scores


@cache
def share_of(epsilon: float) -> float:
    """How often a 1-GDP mechanism may answer about all canaries by randomised response, and else say nothing."""
    curve = GAUSSIAN.curve()
    response = (math.exp(epsilon) - np.exp(curve.epsilons)) / (1 + math.exp(epsilon))
    return float((curve.deltas[response > 0] / response[response > 0]).min())


def rarely(epsilon: float) -> Callable[[Rng, NDArray[np.bool_]], Scores]:
    def scores(rng: Rng, present: NDArray[np.bool_]) -> Scores:
        told = rng.random() < share_of(epsilon)
        return responses(epsilon)(rng, present) if told else rng.random(len(present))

    return scores


KNOWN = {
    "gaussian, of the gaussian family": Known(gaussian, "gaussian", GAUSSIAN),
    "gaussian, several numbers of guesses": Known(gaussian, "gaussian", GAUSSIAN, guesses=(40, 100, 250, 500)),
    "gaussian, of any family": Known(gaussian, "any", epsilon=GAUSSIAN.epsilon(DELTA)),
    "subsampled gaussian steps": Known(subsampled, "mechanism", TRAINING),
    "interfering canaries": Known(interfering, "gaussian", GAUSSIAN),
    "randomised response": Known(responses(1.5), "any", epsilon=1.5, guesses=500),
    "all canaries at once, in 16 % of runs": Known(rarely(2.0), "gaussian", GAUSSIAN, guesses=1000),
    "all canaries at once, in 4 % of runs": Known(rarely(2.65), "gaussian", GAUSSIAN, guesses=1000),
}


def play(known: Known, seed: int, *, confidence: float, canaries: int = 1000, delta: float = DELTA) -> OneRun:
    rng = np.random.default_rng(seed)
    present = rng.random(canaries) < 0.5
    return one_run(
        known.scores(rng, present),
        present,
        delta=delta,
        confidence=confidence,
        mechanism=known.member,
        family=known.family,
        guesses=known.guesses,
    )


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    ("confidence", "runs"),
    [(0.8, 200), pytest.param(0.8, 1000, marks=pytest.mark.slow), pytest.param(0.95, 1000, marks=pytest.mark.slow)],
)
def test_the_bound_is_above_the_truth_in_no_more_than_the_stated_share_of_runs(
    name: str, confidence: float, runs: int
) -> None:
    known = KNOWN[name]
    above = sum(play(known, seed, confidence=confidence).lower > known.truth for seed in range(runs))
    assert above <= binom.ppf(0.999, runs, 1 - confidence)


def test_the_share_is_used_up_by_the_worst_mechanisms() -> None:
    """Randomised response for any family; for curves, one that tells of all canaries at once, and rarely.

    The latter is 1-GDP. Counts as it gives them would be beyond belief if guesses were independent; at levels below
    their true probability they must not refute, just above it they do. So no valid bound from counts is tighter.
    """
    response = KNOWN["randomised response"]
    assert sum(play(response, seed, confidence=0.8, delta=0.0).lower > 1.5 for seed in range(300)) > 40
    share, often = share_of(2.0), round(1000 / (1 + math.exp(-2.0)))
    assert 0.1 < share < 0.2
    assert binom.sf(often, 1000, 0.6915) < 1e-30  # of independent guesses by 1-GDP, 69 % are right
    assert not refutes(GAUSSIAN.curve(), canaries=1000, guesses=1000, correct=often - 15, level=0.95 * share)
    assert refutes(GAUSSIAN.curve(), canaries=1000, guesses=1000, correct=often, level=1.05 * share)


def test_families_with_a_curve_show_more_and_come_closer_with_more_canaries() -> None:
    def middle(name: str, canaries: int) -> float:
        lowers = [play(KNOWN[name], seed, confidence=0.95, canaries=canaries).lower for seed in range(15)]
        return float(np.median(lowers))

    truth = GAUSSIAN.epsilon(DELTA)  # 4.38
    few, many = (middle("gaussian, of the gaussian family", m) for m in (1000, 10000))
    assert 0.5 * truth < few < many < truth
    assert few > 1.5 * middle("gaussian, of any family", 1000)
    assert middle("subsampled gaussian steps", 1000) > 0.3 * TRAINING.epsilon(DELTA)


def test_less_noise_than_stated_is_shown() -> None:
    """A third of the stated noise, in steps that are otherwise as stated: less than the stated noise is proved."""
    stated = TRAINING.with_noise(3 * TRAINING.noise_multiplier)
    rng = np.random.default_rng(0)
    present = rng.random(4000) < 0.5
    bound = one_run(subsampled(rng, present), present, delta=DELTA, confidence=0.99, mechanism=stated)
    assert bound.noise_multiplier is not None
    assert TRAINING.noise_multiplier < bound.noise_multiplier < stated.noise_multiplier
    assert stated.epsilon(DELTA) < bound.lower < TRAINING.epsilon(DELTA)


# -- the door ---------------------------------------------------------------------------------------------------------


def test_the_result_says_what_was_guessed_and_what_is_assumed() -> None:
    rng = np.random.default_rng(3)
    present = rng.random(400) < 0.5
    scores = gaussian(rng, present)
    plain = one_run(scores, present, delta=DELTA)
    assert (plain.family, plain.canaries, plain.guesses, plain.included) == ("any", 400, 100, int(present.sum()))
    order = np.argsort(scores)
    assert plain.correct == int(present[order[-50:]].sum() + (~present[order[:50]]).sum())
    assert plain.lower == bounds.from_guesses(
        canaries=400, guesses=100, correct=plain.correct, delta=DELTA, confidence=0.95
    )
    assert "any (epsilon, delta)" in plain.assumes
    own = one_run(list(scores), present.astype(int), delta=DELTA, mechanism=TRAINING)
    assert (own.family, own.correct) == ("mechanism", plain.correct)
    assert own.lower > plain.lower
    assert own == one_run(scores, present, delta=DELTA, mechanism=TRAINING.with_noise(5.0))  # the claim is not a guide


def test_several_numbers_of_guesses_share_the_risk() -> None:
    rng = np.random.default_rng(5)
    present = rng.random(400) < 0.5
    scores = gaussian(rng, present)

    def shown(guesses: int | list[int], confidence: float = 0.9) -> float:
        return one_run(scores, present, delta=DELTA, confidence=confidence, guesses=guesses).lower

    assert shown([60, 200]) == max(shown(60, 0.95), shown(200, 0.95)) < max(shown(60), shown(200))


def test_scores_that_tell_nothing_or_are_no_numbers_show_nothing() -> None:
    present = np.random.default_rng(1).random(200) < 0.5
    for scores in (np.full(200, np.nan), np.zeros(200), -present.astype(float)):
        for mechanism in (None, TRAINING):
            bound = one_run(scores, present, delta=DELTA, mechanism=mechanism)
            assert (bound.lower, bound.noise_multiplier) == (0, None)


def test_perfect_scores_have_a_finite_bound_and_more_than_sampling_allows_ends_at_the_least_noise() -> None:
    present = np.random.default_rng(1).random(400) < 0.5
    perfect = one_run(present, present, delta=DELTA, mechanism=TRAINING)
    assert TRAINING.epsilon(DELTA) / 2 < perfect.lower < 100
    seldom = one_run(present, present, delta=DELTA, mechanism=GaussianSteps(1.0, 0.05, 1), guesses=400)
    assert seldom.noise_multiplier == pytest.approx(bounds.LEAST_NOISE, rel=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scores": [1.0, 2.0]}, "same length"),
        ({"included": [0, 1, 2, 1]}, "true or false"),
        ({"guesses": 5}, "guesses is 5"),
        ({"guesses": []}, "guesses is"),
        ({"family": "mechanism"}, "needs mechanism"),
        ({"family": "gdp"}, "any, gaussian, mechanism"),
        ({"confidence": 1.0}, "confidence 1.0"),
        ({"family": "gaussian", "delta": 0.0}, "delta is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], told: str) -> None:
    usual: dict[str, object] = {"scores": [1.0, 2.0, 3.0, 4.0], "included": [0, 0, 1, 1], "delta": DELTA}
    arguments = usual | change
    with pytest.raises(ValueError, match=told):
        one_run(arguments.pop("scores"), arguments.pop("included"), **arguments)  # type: ignore[arg-type]
