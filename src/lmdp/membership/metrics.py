"""How well scores tell members from non-members, with intervals that say how sure that is.

Scores are higher for examples that look like members. Every number is computed on examples that the adversary was not
fitted on; the callers see to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import betaincinv

from lmdp.data.records import Must, Share

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Interval = Annotated[tuple[Share, Share], Must("two numbers")]

ENOUGH_FOR_PERMILLE = 10_000
"""TPR at 0.1 % FPR is reported only with at least this many non-members: below, it rests on a handful of them."""

FOLD_DEPENDENCE = 1.15
"""Adversaries of different folds share most of their fitted examples and err alike. On exchangeable data the mean AUC
over folds spreads by 1.02 (Gaussian) to 1.11 (digits) times what independent folds would give."""


@dataclass(frozen=True)
class Fold:
    """Scores of the examples of one fold, by an adversary that saw none of them, and its threshold for "member"."""

    scores: Floats
    member: Bools
    threshold: float


@dataclass(frozen=True)
class Metrics:
    """What an adversary achieves. `error_rate` is 1 − `accuracy`; both are balanced over the two groups."""

    accuracy: float
    accuracy_interval: Interval
    auc: float
    auc_interval: Interval
    auc_error: float
    tpr_at_1pct: float
    tpr_at_1pct_interval: Interval
    tpr_at_01pct: float | None
    members: int
    nonmembers: int

    @property
    def error_rate(self) -> float:
        return 1 - self.accuracy

    @property
    def error_rate_interval(self) -> Interval:
        low, high = self.accuracy_interval
        return 1 - high, 1 - low


def evaluate(folds: Sequence[Fold], level: float = 0.95) -> Metrics:
    """Metrics over all folds. The AUC is the mean over folds, because each fold has its own adversary and scale."""
    member = np.concatenate([fold.member for fold in folds])
    pooled = np.concatenate([_standardised(fold.scores) for fold in folds])
    positive, negative = int(member.sum()), int((~member).sum())
    hits = sum(int((fold.scores[fold.member] > fold.threshold).sum()) for fold in folds)
    passes = sum(int((fold.scores[~fold.member] <= fold.threshold).sum()) for fold in folds)
    accuracy = (hits / positive + passes / negative) / 2
    spread = math.sqrt(_proportion_variance(hits, positive) + _proportion_variance(passes, negative)) / 2
    area, error = mean_auc(folds)
    at_1pct = tpr_at(pooled, member, 0.01)
    return Metrics(
        accuracy=accuracy,
        accuracy_interval=around(accuracy, spread, level),
        auc=area,
        auc_interval=around(area, error, level),
        auc_error=error,
        tpr_at_1pct=at_1pct,
        tpr_at_1pct_interval=clopper_pearson(round(at_1pct * positive), positive, level),
        tpr_at_01pct=tpr_at(pooled, member, 0.001) if negative >= ENOUGH_FOR_PERMILLE else None,
        members=positive,
        nonmembers=negative,
    )


def mean_auc(folds: Sequence[Fold]) -> tuple[float, float]:
    """Mean over folds of the area under the ROC curve, and its standard error (DeLong's, widened for dependence)."""
    areas, variances = zip(*(auc_and_variance(fold.scores, fold.member) for fold in folds))
    widened = FOLD_DEPENDENCE if len(folds) > 1 else 1.0
    return float(np.mean(areas)), widened * math.sqrt(sum(variances)) / len(folds)


def auc_and_variance(scores: Floats, member: Bools) -> tuple[float, float]:
    """Area under the ROC curve (ties count half) and DeLong's variance of it."""
    positive, negative = scores[member], scores[~member]
    m, n = len(positive), len(negative)
    ranks = stats.rankdata(scores)
    above = (ranks[member] - stats.rankdata(positive)) / n  # share of non-members below each member
    below = 1 - (ranks[~member] - stats.rankdata(negative)) / m  # share of members above each non-member
    variance = above.var(ddof=1) / m + below.var(ddof=1) / n
    return float(above.mean()), float(variance)


def tpr_at(scores: Floats, member: Bools, fpr: float) -> float:
    """Share of members above the threshold that at most a share `fpr` of non-members pass."""
    negative = np.sort(scores[~member])[::-1]
    allowed = math.floor(fpr * len(negative))
    threshold = negative[allowed] if allowed < len(negative) else -math.inf
    return float((scores[member] > threshold).mean())


def roc(folds: Sequence[Fold], points: int = 200) -> tuple[list[float], list[float]]:
    """(FPR, TPR) at thresholds spread over the pooled scores; enough points to draw on log axes."""
    member = np.concatenate([fold.member for fold in folds])
    scores = np.concatenate([_standardised(fold.scores) for fold in folds])
    order = np.argsort(-scores, kind="stable")
    tpr = np.cumsum(member[order]) / member.sum()
    fpr = np.cumsum(~member[order]) / (~member).sum()
    at = np.unique(np.geomspace(1, len(order), points).astype(int)) - 1
    return [0.0, *fpr[at].tolist()], [0.0, *tpr[at].tolist()]


def best_threshold(scores: Floats, member: Bools) -> float:
    """The threshold of highest balanced accuracy on these scores (members are above it)."""
    order = np.argsort(scores, kind="stable")
    sorted_member = member[order]
    passed = np.concatenate([[0.0], np.cumsum(~sorted_member) / max(1, (~member).sum())])
    missed = np.concatenate([[0.0], np.cumsum(sorted_member) / max(1, member.sum())])
    cut = int(np.argmax(passed - missed))
    ordered = scores[order]
    if cut == 0:
        return float(ordered[0]) - 1.0
    if cut == len(ordered):
        return float(ordered[-1])
    return float((ordered[cut - 1] + ordered[cut]) / 2)


def _standardised(scores: Floats) -> Floats:
    """Without a fold's own location and scale; labels are not used."""
    spread = float(scores.std())
    centred: Floats = scores - scores.mean()
    return centred / (spread if spread > 0 else 1.0)


def around(centre: float, error: float, level: float) -> Interval:
    """The normal interval of this level, within 0 and 1."""
    reach = float(stats.norm.ppf((1 + level) / 2)) * error
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _proportion_variance(count: int, total: int) -> float:
    """Agresti–Coull, so that 0 of n and n of n are not certain."""
    p = (count + 2) / (total + 4)
    return p * (1 - p) / (total + 4)


def clopper_pearson(count: int, total: int, level: float) -> Interval:
    """The shares that are compatible with `count` of `total`: at most (1 − level) / 2 is risked on either side."""
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, total - count + 1, tail))
    high = 1.0 if count == total else float(betaincinv(count + 1, total - count, 1 - tail))
    return low, high
