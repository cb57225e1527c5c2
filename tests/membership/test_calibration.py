"""With several models, an example's score is judged against its own scores in and out of training."""

from __future__ import annotations

import numpy as np
import pytest

from lmdp.membership.calibration import CALIBRATIONS, Calibration, Candidate, against, averaged, calibrated
from lmdp.risk.shadow import halves


def world(
    models: int, seed: int = 0, size: int = 600, lift: float = 1.0, spread: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Scores that depend mostly on the example, and a little on membership."""
    generator = np.random.default_rng(seed)
    member = halves(size, models, seed)
    difficulty = generator.normal(size=size) * spread
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
    for calibration in CALIBRATIONS.values():
        given = calibration.calibrate(scores[0], scores[1:], member[1:], ~member[0])
        assert np.isfinite(given).all(), calibration.name


@pytest.mark.parametrize("models", [2, 4, 8])
def test_who_is_in_the_reference_models_tells_nothing_about_the_attacked_one(models: int) -> None:
    """Without a leak no calibration may find one. Halves in opposite pairs fail this by far: where scores are noise, an
    example is far from its own score in the one reference, whose group is then known."""
    deviations = []
    for seed in range(12):
        scores, member = world(models, seed=seed, lift=0.0, spread=0.0)
        deviations += [(r.metrics.auc - 0.5) / r.metrics.auc_error for r in calibrated(scores, member, seed)[:1]]
    assert abs(np.mean(deviations)) < 3 / np.sqrt(12)
    assert np.abs(deviations).max() < 4


def test_a_calibration_that_is_added_to_the_table_is_tried_and_chosen_where_it_is_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, member = world(4)
    secret = Calibration("made-up", "knows the members", lambda target, *_: 10.0 * member[0] + target)
    monkeypatch.setitem(CALIBRATIONS, "made-up", secret)
    first, *_ = calibrated(scores, member, 0)
    assert first.calibration == "made-up"
    assert first.metrics.auc > 0.9


def test_halves_are_halves_drawn_independently() -> None:
    member = halves(2001, 6, 3)
    assert (member.sum(1) == 1000).all()
    assert np.abs(np.corrcoef(member) - np.eye(6)).max() < 0.1


@pytest.mark.parametrize("calibration", CALIBRATIONS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("models", [1, 2, 5])
def test_every_calibration_is_finite_and_favours_a_higher_score_whatever_the_references_had(
    calibration: Calibration, models: int
) -> None:
    """Of two examples alike under all references, the one with the higher score is at least as much a member."""
    scores, member = world(models + 1)
    for others in (member[1:], np.zeros_like(member[1:]), np.ones_like(member[1:])):
        if calibration.online and not (others.any(1) & ~others.all(1)).any():
            continue
        given = calibration.calibrate(scores[0], scores[1:], others, ~member[0])
        assert np.isfinite(given).all()
        if calibration.name not in ("lira", "lira-bayes"):  # a ratio of two densities need not grow
            higher = calibration.calibrate(scores[0] + 0.5, scores[1:], others, np.zeros_like(member[0]))
            lower = calibration.calibrate(scores[0], scores[1:], others, np.zeros_like(member[0]))
            assert (higher >= lower).all()


def test_rmia_is_the_share_of_known_non_members_that_an_example_dominates() -> None:
    """As the paper defines it, one pair of examples after the other."""
    scores, member = world(5, size=80)
    target, others, known = scores[0], member[1:], ~member[0]
    given = CALIBRATIONS["rmia"].calibrate(target, scores[1:], others, known)
    p = 1 / (1 + np.exp(-scores))
    for i in range(80):
        dominated = []
        for z in np.flatnonzero(known):
            ratios = []
            for example in (i, z):
                column, inside = p[1:, example], others[:, example]
                parts = [
                    column[g].mean() if g.any() else p[1:][groups].mean()
                    for g, groups in ((inside, others), (~inside, ~others))
                ]
                ratios.append(p[0, example] / np.mean(parts))
            dominated.append(ratios[0] >= ratios[1])
        assert given[i] == pytest.approx(np.mean(dominated))


def test_with_two_references_variances_that_are_drawn_to_those_of_all_beat_lira() -> None:
    assert auc(3, ["lira-bayes"]) > auc(3, ["lira"]) + 0.03
    assert abs(auc(33, ["lira-bayes"], size=200) - auc(33, ["lira"], size=200)) < 0.03  # type: ignore[arg-type]


def test_without_references_that_had_any_example_only_those_that_need_none_are_tried() -> None:
    scores, member = world(4)
    scores = scores - 1.0 * member
    nobody = np.zeros_like(member[1:])
    scores[0] += 1.0 * member[0]
    result = against(member[0], [Candidate("score", scores[0], scores[1:])], nobody, 0)
    assert result.metrics.auc > 0.8
    assert not CALIBRATIONS[result.calibration].online
    assert result.attack == "score"
