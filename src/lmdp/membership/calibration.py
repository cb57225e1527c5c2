"""Per-example calibration with other models, of which it is known who was in them (LiRA, RMIA).

Some examples look like members to every model. With other models, some of which were trained on the example (online) or
none of which were (offline), its score under the attacked model can be compared with its own scores as a member and as
a non-member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import expit

from lmdp.membership.crossfit import splits
from lmdp.membership.metrics import Fold, Metrics, auc_and_variance, best_threshold, evaluate

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
OFFLINE_SLOPE = 0.3
"""RMIA without models that had the example: how far the mean over those that had not is trusted (its parameter a)."""
PRIOR_WEIGHT = 4.0
"""As many scores as the variance that all examples share weighs as much as."""


@dataclass(frozen=True)
class Calibration:
    """A way to judge an example's score by its scores under other models.

    calibrate   (scores under the attacked model [n], scores [K, n] under the others, who is a member of them [K, n],
                examples that are known not to be members of the attacked model [n]) → calibrated scores [n]
    online      whether it needs models that were trained on some of the examples
    """

    name: str
    help: str
    calibrate: Callable[[Floats, Floats, Bools, Bools], Floats]
    online: bool = False


def raw(target: Floats, scores: Floats, member: Bools, population: Bools) -> Floats:
    return target


def difference(target: Floats, scores: Floats, member: Bools, population: Bools) -> Floats:
    """By how much the score exceeds the average over the other models, those with the example and those without."""
    inside, outside = _means(scores, member)
    return target - ((inside + outside) / 2 if member.any() else outside)


def pairwise_ratio(target: Floats, scores: Floats, member: Bools, population: Bools) -> Floats:
    """RMIA: the share of the population that the example dominates.

    x dominates z if P(x | attacked) / P(x) ≥ P(z | attacked) / P(z). P(x) is the mean over the other models, half of it
    those that had x; where none had, that half is put between the mean of the others and 1. The population are
    non-members that the adversary has. For one model and one population the share grows with the ratio alone: what the
    population adds is its scale, one minus the false positive rate, on which folds and models can be compared.
    """
    inside, outside = _means(expit(scores), member)
    prior = (inside + outside) / 2 if member.any() else ((1 + OFFLINE_SLOPE) * outside + (1 - OFFLINE_SLOPE)) / 2
    ratio = expit(target) / np.maximum(prior, 1e-12)
    others = np.sort(ratio[population])
    return np.asarray(np.searchsorted(others, ratio, side="right") / max(1, len(others)), dtype=np.float64)


def likelihood_ratio(target: Floats, scores: Floats, member: Bools, population: Bools) -> Floats:
    """LiRA: two normal distributions per example, of its scores as member and as non-member; variances are shared."""
    inside, outside = _means(scores, member)
    spread_in = max(1e-6, float(np.sqrt(_pooled_variance(scores, member, inside))))
    spread_out = max(1e-6, float(np.sqrt(_pooled_variance(scores, ~member, outside))))
    log_in = -0.5 * ((target - inside) / spread_in) ** 2 - np.log(spread_in)
    log_out = -0.5 * ((target - outside) / spread_out) ** 2 - np.log(spread_out)
    return np.asarray(log_in - log_out)


def offline_ratio(target: Floats, scores: Floats, member: Bools, population: Bools) -> Floats:
    """LiRA offline: how far above its scores as a non-member it lies, in standard deviations, which are shared."""
    _, outside = _means(scores, member)
    return (target - outside) / max(1e-6, float(np.sqrt(_pooled_variance(scores, ~member, outside))))


def predictive_ratio(target: Floats, scores: Floats, member: Bools, population: Bools) -> Floats:
    """LiRA for few models: mean and variance of each example are themselves uncertain, and drawn to those of all.

    Normal scores with a normal-inverse-gamma prior, which is estimated from all examples: what is expected of a new
    score is then Student's t. Where no model had any example, the tail of its distribution as a non-member.
    """
    out = _predictive(scores, ~member)
    if not member.any():
        return np.asarray(-stats.t.logsf(target, *out))
    return np.asarray(stats.t.logpdf(target, *_predictive(scores, member)) - stats.t.logpdf(target, *out))


CALIBRATIONS: dict[str, Calibration] = {
    calibration.name: calibration
    for calibration in (
        Calibration("raw", "none: the attacked model's own score", raw),
        Calibration("difference", "by how much the score exceeds the average over the other models", difference),
        Calibration("rmia", "the share of known non-members that the example dominates", pairwise_ratio),
        Calibration("lira", "how likely the score is as a member's and as a non-member's", likelihood_ratio, True),
        Calibration("lira-offline", "how far it lies above its scores as a non-member", offline_ratio),
        Calibration("lira-bayes", "as lira, with means and variances drawn to those of all", predictive_ratio),
    )
}


@dataclass(frozen=True)
class Candidate:
    """One kind of score: of the examples under the attacked model [n], and under the others [K, n]."""

    name: str
    target: Floats
    others: Floats


@dataclass(frozen=True)
class CalibratedResult:
    """What the best calibrations achieved against one attacked model; which score and calibration won most often."""

    metrics: Metrics
    folds: list[Fold]
    calibration: str
    attack: str = ""


def calibrated(
    scores: Floats, member: Bools, seed: int, calibrations: Mapping[str, Calibration] = CALIBRATIONS
) -> list[CalibratedResult]:
    """Attack each of K models with the other K − 1 as references. `scores`, `member`: [K, n]."""
    results = []
    for k in range(len(scores)):
        others = np.arange(len(scores)) != k
        candidate = Candidate("", scores[k], scores[others])
        results.append(against(member[k], [candidate], member[others], seed, calibrations))
    return results


def against(
    member: Bools,
    candidates: list[Candidate],
    others: Bools,
    seed: int,
    calibrations: Mapping[str, Calibration] = CALIBRATIONS,
) -> CalibratedResult:
    """Attack one model, whose members [n] are to be found, with others that have theirs [K, n].

    Which score and calibration to use is chosen on the other folds' examples, never on those that are scored; among
    those are also the non-members that are compared with.
    """
    usable = [calibration for calibration in calibrations.values() if others.any() or not calibration.online]
    folds, wins = [], []
    for fit, choose, test in splits(member, seed):
        seen = np.concatenate([fit, choose])
        population = np.zeros(len(member), dtype=np.bool_)
        population[seen] = ~member[seen]
        variants = {
            (candidate.name, calibration.name): calibration.calibrate(
                candidate.target, candidate.others, others, population
            )
            for candidate in candidates
            for calibration in usable
        }
        best = max(variants, key=lambda names: auc_and_variance(variants[names][seen], member[seen])[0])
        threshold = best_threshold(variants[best][seen], member[seen])
        folds.append(Fold(variants[best][test], member[test], threshold))
        wins.append(best)
    attack, calibration = max(set(wins), key=lambda names: (wins.count(names), -wins.index(names)))
    return CalibratedResult(evaluate(folds), folds, calibration, attack)


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


def _predictive(scores: Floats, group: Bools) -> tuple[Floats, Floats, Floats]:
    """Degrees of freedom, centre and scale of what is expected of one more score of each example in the group."""
    count = group.sum(0)
    mean = np.where(count > 0, np.where(group, scores, 0.0).sum(0) / np.maximum(count, 1), 0.0)
    within = max(1e-12, _pooled_variance(scores, group, mean))
    met = count > 0
    overall = float(mean[met].mean()) if met.any() else 0.0
    # The means of examples spread by their own differences, and by what few scores leave uncertain.
    between = float(mean[met].var()) - within / float(count[met].mean()) if met.any() else 0.0
    weight = within / max(between, 1e-3 * within)
    squares = (np.where(group, scores - mean, 0.0) ** 2).sum(0)
    certainty, freedom = weight + count, PRIOR_WEIGHT + count
    centre = (weight * overall + count * mean) / certainty
    surprise = np.where(met, weight * count / certainty * (mean - overall) ** 2, 0.0)
    variance = (PRIOR_WEIGHT * within + squares + surprise) / freedom
    return freedom, centre, np.sqrt(variance * (1 + 1 / certainty))
