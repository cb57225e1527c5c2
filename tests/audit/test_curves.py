"""Trade-off curves of Gaussian steps: never below what an attack can do, close to it, and higher with less noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from lmdp.accounting import epsilon_spent
from lmdp.audit.curves import Curve, GaussianSteps
from lmdp.report.roc import Limit

TRAINING = GaussianSteps(1.2, 0.2, 20)
RATES = (1e-6, 1e-4, 0.01, 0.1, 0.5, 0.9, 0.999)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_the_gaussian_mechanism_has_the_curve_of_gdp(mu: float) -> None:
    curve = GaussianSteps(1 / mu).curve()
    for rate in RATES:
        exact = float(norm.cdf(norm.ppf(rate) + mu))
        assert exact - 1e-12 <= curve.most(rate) <= 1.003 * exact


@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.05), (1.0, 0.3), (2.0, 0.9)])
def test_no_threshold_on_one_subsampled_step_lies_above_the_curve_and_the_best_lie_on_it(
    noise: float, rate: float
) -> None:
    """Scores above a threshold name members, those below it the others: the two directions have different curves."""
    curve = GaussianSteps(noise, rate).curve()
    for threshold in np.linspace(-3 * noise, 1 + 4 * noise, 30):
        out = float(norm.sf(threshold / noise))
        member = (1 - rate) * out + rate * float(norm.sf((threshold - 1) / noise))
        assert member <= curve.most(out) * (1 + 1e-9)
        assert 1 - out <= curve.most(1 - member) * (1 + 1e-9)
        if threshold > 0.5:  # beyond the point where the two directions change places
            assert member >= curve.most(out) / 1.01


@given(rate=st.floats(1e-4, 1 - 1e-4))
@settings(max_examples=50, deadline=None)
def test_the_least_false_positive_rate_is_the_inverse_of_the_most_true_positives(rate: float) -> None:
    curve = TRAINING.curve()
    assert curve.least(curve.most(rate)) == pytest.approx(rate, rel=1e-6)
    assert curve.most(rate) >= rate


@given(epsilon=st.floats(0, 20), delta=st.floats(0, 0.5), rate=st.floats(0, 1))
def test_one_pair_alone_is_the_limit_that_reports_draw(epsilon: float, delta: float, rate: float) -> None:
    curve = Curve(np.array([epsilon]), np.array([delta]))
    assert curve.most(rate) == pytest.approx(min(1.0, Limit(epsilon, delta).tpr(rate)))


def test_less_noise_and_more_steps_raise_the_curve() -> None:
    for rate in RATES:
        by_noise = [TRAINING.with_noise(2.0 ** (k / 128)).curve().most(rate) for k in range(-64, 65, 32)]
        assert by_noise == sorted(by_noise, reverse=True)
        by_steps = [GaussianSteps(1.0, 0.1, steps).curve().most(rate) for steps in (1, 10, 100)]
        assert by_steps == sorted(by_steps)


def test_the_curve_lies_below_the_limit_of_any_epsilon_that_is_claimed() -> None:
    for delta in (1e-3, 1e-6):
        for accountant in ("rdp", "pld"):
            claimed = epsilon_spent(1.2, 0.2, steps=20, delta=delta, accountant=accountant)
            assert TRAINING.epsilon(delta) <= claimed * 1.001
            assert all(TRAINING.curve().most(rate) <= Limit(claimed, delta).tpr(rate) * 1.001 for rate in RATES)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.01, 2000), (1.0, 0.9, 4), (8.0, 0.05, 2000)])
def test_epsilon_is_that_of_the_accountant(noise: float, rate: float, steps: int) -> None:
    expected = epsilon_spent(noise, rate, steps=steps, delta=1e-5, accountant="pld")
    assert GaussianSteps(noise, rate, steps).epsilon(1e-5) == pytest.approx(expected, rel=1e-3)


def test_without_noise_nothing_is_limited() -> None:
    silent = GaussianSteps(0.0, 0.5, 3)
    assert silent.curve().most(0.001) == 1
    assert silent.curve().least(0.999) == 0
    assert math.isinf(silent.epsilon(1e-5))
    smallest = GaussianSteps(2.0**-4, 0.9, 4).curve()  # whose epsilons would not fit
    assert smallest.most(0.01) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [((-1.0,), "noise_multiplier is -1"), ((1.0, 0.0), "sample_rate is 0"), ((1.0, 0.5, 0), "steps is 0")],
)
def test_impossible_steps_are_refused(arguments: tuple[float, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GaussianSteps(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="between 0 and 700"):
        Curve(np.array([800.0]), np.array([0.0]))
