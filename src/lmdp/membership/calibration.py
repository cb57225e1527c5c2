"""Per-example calibration with several models trained on different halves of the same data (LiRA, RMIA).

Some examples look like members to every model. With other models, half of which were trained on the example, its score
under the attacked model can be compared with its own scores as a member and as a non-member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmdp.membership.crossfit import splits
from lmdp.membership.metrics import Fold, Metrics, auc_and_variance, best_threshold, evaluate

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Calibration:
    """A way to judge an example's score by its scores under other models.

    calibrate   (scores under the attacked model [n], scores [K, n] under the others, who is a member of them [K, n]) →
                calibrated scores [n]
    """

    name: str
    help: str
    calibrate: Callable[[Floats, Floats, Bools], Floats]


def relative(target: Floats, scores: Floats, member: Bools) -> Floats:
    """RMIA-style: by how much the score exceeds the average over the other models, half of them out-models."""
    inside, outside = _means(scores, member)
    return target - (inside + outside) / 2


def likelihood_ratio(target: Floats, scores: Floats, member: Bools) -> Floats:
    """LiRA: two normal distributions per example, of its scores as member and as non-member; variances are shared."""
    inside, outside = _means(scores, member)
    spread_in = max(1e-6, float(np.sqrt(_pooled_variance(scores, member, inside))))
    spread_out = max(1e-6, float(np.sqrt(_pooled_variance(scores, ~member, outside))))
    log_in = -0.5 * ((target - inside) / spread_in) ** 2 - np.log(spread_in)
    log_out = -0.5 * ((target - outside) / spread_out) ** 2 - np.log(spread_out)
    return np.asarray(log_in - log_out)


CALIBRATIONS: dict[str, Calibration] = {
    calibration.name: calibration
    for calibration in (
        Calibration("raw", "none: the attacked model's own score", lambda target, scores, member: target),
        Calibration("rmia", "by how much the score exceeds the average over the other models", relative),
        Calibration("lira", "how likely the score is as a member's and as a non-member's", likelihood_ratio),
    )
}


@dataclass(frozen=True)
class CalibratedResult:
    """What the best calibrations achieved against one attacked model, and which won most often."""

    metrics: Metrics
    folds: list[Fold]
    calibration: str


def calibrated(
    scores: Floats, member: Bools, seed: int, calibrations: Mapping[str, Calibration] = CALIBRATIONS
) -> list[CalibratedResult]:
    """Attack each of K models with the other K − 1 as references. `scores`, `member`: [K, n].

    Which calibration to use is chosen on the other folds' examples, never on those that are scored.
    """
    results = []
    for k in range(len(scores)):
        others = np.arange(len(scores)) != k
        variants = {c.name: c.calibrate(scores[k], scores[others], member[others]) for c in calibrations.values()}
        folds, wins = [], []
        for fit, choose, test in splits(member[k], seed):
            seen = np.concatenate([fit, choose])
            best = max(variants, key=lambda name: auc_and_variance(variants[name][seen], member[k][seen])[0])
            threshold = best_threshold(variants[best][seen], member[k][seen])
            folds.append(Fold(variants[best][test], member[k][test], threshold))
            wins.append(best)
        results.append(CalibratedResult(evaluate(folds), folds, max(set(wins), key=wins.count)))
    return results


def averaged(parts: list[Metrics]) -> Metrics:
    """Mean over attacked models. They share their examples, so the intervals stay as wide as one model's."""

    def mean(name: str) -> float:
        return float(np.mean([getattr(part, name) for part in parts]))

    def interval(name: str) -> tuple[float, float]:
        low, high = np.mean([getattr(part, name) for part in parts], axis=0)
        return float(low), float(high)

    permille = [part.tpr_at_01pct for part in parts if part.tpr_at_01pct is not None]
    return Metrics(
        accuracy=mean("accuracy"),
        accuracy_interval=interval("accuracy_interval"),
        auc=mean("auc"),
        auc_interval=interval("auc_interval"),
        auc_error=mean("auc_error"),
        tpr_at_1pct=mean("tpr_at_1pct"),
        tpr_at_1pct_interval=interval("tpr_at_1pct_interval"),
        tpr_at_01pct=float(np.mean(permille)) if permille else None,
        members=parts[0].members,
        nonmembers=parts[0].nonmembers,
    )


def _means(scores: Floats, member: Bools) -> tuple[Floats, Floats]:
    """Per example: mean score over models that had it, and over models that had not; the overall mean where none."""
    means = []
    for group in (member, ~member):
        count = group.sum(0)
        overall = float(scores[group].mean()) if group.any() else float(scores.mean())
        total = np.where(group, scores, 0.0).sum(0)
        means.append(np.where(count > 0, total / np.maximum(count, 1), overall))
    return means[0], means[1]


def _pooled_variance(scores: Floats, group: Bools, mean: Floats) -> float:
    """Variance around the per-example means, over all examples; of the scores themselves where no example has two."""
    spare = np.maximum(group.sum(0) - 1, 0).sum()
    if spare == 0:
        return float(scores[group].var()) if group.any() else 1.0
    return float((np.where(group, scores - mean, 0.0) ** 2).sum() / spare)
