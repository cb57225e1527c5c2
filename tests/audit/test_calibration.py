"""With several models, an example's score is judged against its own scores in and out of training."""

from __future__ import annotations

import numpy as np

from lmdp.audit.calibration import CALIBRATIONS, averaged, calibrated, likelihood_ratio, relative
from lmdp.risk.shadow import halves


def world(models: int, seed: int = 0, size: int = 600, lift: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores that depend mostly on the example, and a little on membership."""
    generator = np.random.default_rng(seed)
    member = halves(size, models, seed)
    difficulty = generator.normal(size=size) * 3
    return difficulty + lift * member + generator.normal(size=(models, size)) * 0.5, member


def auc(models: int, names: list[str], **options: float) -> float:
    scores, member = world(models, **options)  # type: ignore[arg-type]
    return averaged([r.metrics for r in calibrated(scores, member, 0, {n: CALIBRATIONS[n] for n in names})]).auc


def test_calibration_finds_membership_that_raw_scores_hide() -> None:
    raw = auc(8, ["raw"])
    assert raw < 0.65
    assert auc(8, ["rmia"]) > raw + 0.15
    assert auc(8, ["lira"]) > raw + 0.15
    assert auc(8, ["raw", "rmia", "lira"]) > raw + 0.15


def test_more_models_calibrate_better() -> None:
    assert auc(4, ["rmia"]) < auc(16, ["rmia"])


def test_without_a_leak_calibration_finds_none() -> None:
    scores, member = world(8, lift=0.0)
    low, high = averaged([r.metrics for r in calibrated(scores, member, 0)]).auc_interval
    assert low <= 0.5 <= high


def test_two_models_are_enough_to_calibrate_at_all() -> None:
    scores, member = world(2)
    for method in (relative, likelihood_ratio):
        assert np.isfinite(method(scores[0], scores[1:], member[1:])).all()


def test_halves_come_in_opposite_pairs() -> None:
    member = halves(101, 5, 3)
    assert member.shape == (5, 101)
    assert np.array_equal(member[0], ~member[1])
    assert np.array_equal(member[2], ~member[3])
    assert member[0].sum() == 50
