"""Metrics agree with independent implementations, and intervals cover what they claim to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binomtest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from lmdp.membership.metrics import Fold, auc_and_variance, best_threshold, clopper_pearson, evaluate, roc, tpr_at


def sample(seed: int, size: int = 200, shift: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    member = np.arange(size) % 2 == 0
    return generator.normal(size=size) + shift * member, member


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(4, 60), levels=st.integers(1, 20))
def test_auc_is_that_of_scikit_learn_with_ties(seed: int, size: int, levels: int) -> None:
    scores, member = sample(seed, size)
    scores = np.round(scores * levels) / levels
    assert auc_and_variance(scores, member)[0] == pytest.approx(roc_auc_score(member, scores))


def test_the_standard_error_of_the_auc_is_its_spread_over_samples() -> None:
    aucs, variances = zip(*(auc_and_variance(*sample(seed)) for seed in range(400)))
    assert np.mean(np.sqrt(variances)) == pytest.approx(np.std(aucs), rel=0.12)


@pytest.mark.parametrize(("count", "total"), [(0, 50), (3, 50), (49, 50), (50, 50), (0, 1), (700, 1750)])
def test_clopper_pearson_is_the_quantile_of_a_beta_and_scipys_exact_interval(count: int, total: int) -> None:
    low, high = clopper_pearson(count, total, 0.95)
    exact = binomtest(count, total).proportion_ci(0.95, "exact")
    assert (low, high) == pytest.approx((exact.low, exact.high), abs=1e-12)
    if count < total:
        assert high == pytest.approx(float(beta.ppf(0.975, count + 1, total - count)), abs=1e-12)
    assert (low == 0.0) is (count == 0)
    assert (high == 1.0) is (count == total)


def test_intervals_cover_the_truth_at_their_level() -> None:
    truth = 0.638163  # of two unit normals 0.5 apart
    inside = 0
    for seed in range(300):
        metrics = evaluate([Fold(*sample(seed), threshold=0.25)])
        inside += metrics.auc_interval[0] <= truth <= metrics.auc_interval[1]
    assert 0.91 <= inside / 300 <= 0.985


def test_accuracy_is_balanced_and_its_error_rate_the_rest() -> None:
    scores, member = sample(1)
    metrics = evaluate([Fold(scores, member, 0.25)])
    assert metrics.accuracy == pytest.approx(balanced_accuracy_score(member, scores > 0.25))
    assert metrics.error_rate == pytest.approx(1 - metrics.accuracy)
    assert metrics.error_rate_interval[0] < metrics.error_rate < metrics.error_rate_interval[1]


def test_the_best_threshold_is_the_best_of_all() -> None:
    scores, member = sample(2, 60)
    best = best_threshold(scores, member)
    candidates = [*scores, scores.min() - 1]
    assert balanced_accuracy_score(member, scores > best) == pytest.approx(
        max(balanced_accuracy_score(member, scores > c) for c in candidates)
    )


def test_tpr_at_a_false_positive_rate_lets_no_more_non_members_pass() -> None:
    scores = np.concatenate([np.arange(100.0), np.arange(95.0, 195.0)])
    member = np.arange(200) >= 100
    assert tpr_at(scores, member, 0.01) == pytest.approx(np.mean(scores[member] > 98))
    assert tpr_at(scores, member, 0.0) == pytest.approx(np.mean(scores[member] > 99))
    assert tpr_at(scores, member, 1.0) == 1.0


def test_the_roc_runs_from_corner_to_corner_and_never_falls() -> None:
    fpr, tpr = roc([Fold(*sample(3), threshold=0.0)])
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    assert all(a <= b for a, b in itertools.pairwise(fpr))
    assert all(a <= b for a, b in itertools.pairwise(tpr))


def test_the_permille_rate_is_only_given_with_enough_non_members() -> None:
    assert evaluate([Fold(*sample(0), threshold=0.0)]).tpr_at_01pct is None
    assert evaluate([Fold(*sample(0, 20_000), threshold=0.0)]).tpr_at_01pct is not None
