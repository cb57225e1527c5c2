"""What may be said of differences that are paired over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lmdp.app.cells.statistics import (
    ANSWERS,
    CANNOT_TELL,
    NOT_SUPPORTED,
    SUPPORTED,
    Difference,
    at_least,
    at_most,
    below_all,
    both,
    mean_of,
    paired,
    slope,
    within,
)

finite = st.floats(-1, 1)


@given(st.lists(finite, min_size=2, max_size=8))
def test_the_interval_is_that_of_a_paired_t_test(values: list[float]) -> None:
    told = mean_of(values)
    assert told is not None
    assert told.low <= told.mean <= told.high
    if np.std(values) > 1e-6:
        expected = stats.ttest_rel(values, [0.0] * len(values)).confidence_interval(0.95)
        assert (told.low, told.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_more_comparisons_make_wider_intervals() -> None:
    one, three = mean_of([0.1, 0.2, 0.4]), mean_of([0.1, 0.2, 0.4], comparisons=3)
    assert one is not None
    assert three is not None
    assert three.low < one.low < one.high < three.high


def test_only_seeds_that_both_have_are_compared() -> None:
    told = paired({1: 1.0, 2: 2.0, 7: 9.0}, {1: 0.5, 2: 1.5, 3: 0.0})
    assert told == Difference(0.5, 0.5, 0.5, 2)


@pytest.mark.parametrize("values", [[], [0.3], [0.1, math.nan], [0.1, math.inf]])
def test_nothing_is_told_of_one_seed_or_of_numbers_that_are_not_finite(values: list[float]) -> None:
    assert mean_of(values) is None
    assert at_least(None, 0.0) == at_most(None, 0.0) == within([None], 1.0) == CANNOT_TELL
    assert below_all({"a": None}, 0.01) == below_all({}, 0.01) == both() == CANNOT_TELL


def interval(low: float, high: float) -> Difference:
    return Difference((low + high) / 2, low, high, 3)


@pytest.mark.parametrize(
    "intervals, expected",
    [
        ([(-0.04, -0.02), (-0.03, -0.01)], SUPPORTED),
        ([(-0.04, -0.02), (-0.005, 0.02)], NOT_SUPPORTED),  # against one it is shown not to gain 0.01
        ([(-0.04, -0.02), (-0.05, 0.02)], CANNOT_TELL),
        ([(0.01, 0.02), (-0.05, -0.02)], NOT_SUPPORTED),
        ([(-0.004, -0.002)], SUPPORTED),  # lower beyond doubt, however little
    ],
)
def test_lower_than_all_needs_every_interval_below_zero(intervals: list[tuple[float, float]], expected: str) -> None:
    assert below_all({str(i): interval(*each) for i, each in enumerate(intervals)}, 0.01) == expected


@given(finite, finite, finite)
def test_a_bound_is_kept_broken_or_neither(one: float, other: float, bound: float) -> None:
    told = interval(min(one, other), max(one, other))
    up, down = at_least(told, bound), at_most(told, bound)
    assert (up, down) in {(SUPPORTED, NOT_SUPPORTED), (NOT_SUPPORTED, SUPPORTED), (CANNOT_TELL, CANNOT_TELL)}
    if told.low < bound < told.high:
        assert up == CANNOT_TELL


def test_within_is_refuted_by_one_and_shown_only_by_all() -> None:
    inside, across, beyond = interval(-0.01, 0.01), interval(0.01, 0.03), interval(0.021, 0.03)
    assert within([inside, inside], 0.02) == SUPPORTED
    assert within([inside, across], 0.02) == CANNOT_TELL
    assert within([inside, None], 0.02) == CANNOT_TELL
    assert within([inside, None, beyond], 0.02) == NOT_SUPPORTED


@given(st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=4))
def test_a_claim_of_several_parts_is_as_good_as_its_worst(answers: list[str]) -> None:
    expected = SUPPORTED if set(answers) == {SUPPORTED} else NOT_SUPPORTED if NOT_SUPPORTED in answers else CANNOT_TELL
    assert both(*answers) == expected


@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=8))
def test_the_slope_is_that_of_least_squares(points: list[tuple[float, float]]) -> None:
    x, y = np.array(points).T
    if np.ptp(x) == 0:
        assert slope(points) is None
    elif np.ptp(x) > 1e-3:
        assert slope(points) == pytest.approx(float(np.polyfit(x, y, 1)[0]), abs=1e-6, rel=1e-6)
