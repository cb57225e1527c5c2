"""Layers are told apart by what leaks, and not by the noise of its measurement."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdp.private.weights import risk_factors, unit
from lmdp.risk.apart import RISKED, told_apart

ERROR, TRIALS = 0.012, 300
"""The standard error of an error rate with 850 members and as many non-members, as digits have."""


def measured(truth: list[float], correlation: float, seed: int = 0) -> np.ndarray:
    """[TRIALS, layers]: error rates, each with noise of its own and some that all layers share."""
    generator = np.random.default_rng(seed)
    alone, common = generator.normal(size=(TRIALS, len(truth))), generator.normal(size=(TRIALS, 1))
    noise = np.sqrt(1 - correlation) * alone + np.sqrt(correlation) * common
    return np.asarray(np.array(truth) + ERROR * noise)


def grouped(rates: np.ndarray) -> np.ndarray:
    return np.array([told_apart(row.tolist(), [ERROR] * len(row)) for row in rates])


def weights(rates: np.ndarray, emphasis: float = 5) -> np.ndarray:
    """As training makes them, for fixed weights."""
    return np.array([unit(risk_factors(row, emphasis)).tolist() for row in rates.clip(0, 1)])


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("layers", [2, 4, 12, 60])
def test_layers_that_leak_alike_are_told_apart_one_time_in_twenty_at_most(layers: int, correlation: float) -> None:
    rates = grouped(measured([0.45] * layers, correlation))
    told = float((np.ptp(rates, axis=1) > 0).mean())
    assert told <= RISKED + 3 * np.sqrt(RISKED * (1 - RISKED) / TRIALS)
    assert np.abs(weights(rates) * layers**0.5 - 1).mean() < 0.02


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_layers_far_apart_keep_what_was_measured(correlation: float) -> None:
    rates = measured([0.5, 0.42, 0.34, 0.26, 0.18], correlation)
    kept = (grouped(rates) == rates).all(axis=1).mean()
    assert kept > 0.97


def test_of_many_layers_the_one_that_leaks_is_told_from_all_others_and_these_count_alike() -> None:
    """And weights come nearer to those of the truth than the measured rates would bring them."""
    truth = [0.49] * 17 + [0.38]
    rates = measured(truth, 0.5)
    shared = grouped(rates)
    assert (shared[:, 17] < shared[:, :17].min(axis=1)).all()
    assert (np.ptp(shared[:, :17], axis=1) == 0).mean() > 0.95
    right = weights(np.array([truth]))
    assert np.abs(weights(shared) - right).mean() < 0.3 * np.abs(weights(rates) - right).mean()


@pytest.mark.parametrize("leaking", [1, 3, 5])
def test_two_kinds_of_layers_become_two_groups(leaking: int) -> None:
    shared = grouped(measured([0.38] * leaking + [0.49] * (6 - leaking), 0.5))
    assert np.mean([len(set(row)) == 2 and len(set(row[:leaking])) == 1 for row in shared]) > 0.95


def test_a_precise_measurement_counts_more_than_a_vague_one() -> None:
    assert told_apart([0.40, 0.50], [0.01, 0.10]) == pytest.approx([0.401, 0.401], abs=1e-4)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30), st.randoms())
def test_order_is_kept_whatever_the_numbers_and_layers_may_come_in_any_order(layers: list, random: object) -> None:
    rates, errors = zip(*layers)
    shared = told_apart(rates, errors)
    assert min(rates) - 1e-12 <= min(shared) <= max(shared) <= max(rates) + 1e-12
    assert len(set(zip(rates, shared))) == len(set(rates))  # what is the same stays the same
    ranked = [rate for _, rate in sorted(zip(rates, shared))]
    assert all(high - low >= -1e-12 for low, high in pairwise(ranked))
    order = list(range(len(rates)))
    random.shuffle(order)  # type: ignore[attr-defined]
    again = told_apart([rates[i] for i in order], [errors[i] for i in order])
    assert sorted(again) == pytest.approx(sorted(shared), abs=1e-9)
