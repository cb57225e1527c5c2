"""Cross-fitting: every example is scored once, by an adversary that was neither fitted nor chosen on it.

The examples are cut into folds. For each fold in turn, the others are split into a part to fit every attack family on
and a part to choose the best family and its threshold on; the winner then scores the fold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from lmdp.membership.evidence import Evidence, Fit
from lmdp.membership.leak import Leak, leak_of
from lmdp.membership.metrics import Fold, Metrics, auc_and_variance, best_threshold, evaluate

Indices = NDArray[np.int64]
FOLDS = 5
VALIDATION = 0.25
FEWEST = 100
"""Members, and non-members, that an estimate needs at least: 20 of each in every fold."""


@dataclass(frozen=True)
class Result:
    """What the best adversaries achieved, their scores in the order of the examples, and which families they were."""

    metrics: Metrics
    folds: list[Fold]
    scores: NDArray[np.float64]
    attack: str
    wins: dict[str, int]

    def leak(self, name: str) -> Leak:
        return leak_of(name, self.metrics, self.attack, self.folds)


def cross_fit(evidence: Evidence, member: NDArray[np.bool_], attacks: Mapping[str, Fit], seed: int) -> Result:
    """Balanced members and non-members are expected; too few are refused. Of equal families the first is chosen."""
    require_enough(member)
    folds: list[Fold] = []
    scores = np.zeros(len(member))
    wins: Counter[str] = Counter()
    with threadpool_limits(1, "blas"):  # the matrices are so small that threads only wait for each other
        for number, (fit, choose, test) in enumerate(splits(member, seed)):
            fitted, validation = evidence.at(fit), evidence.at(choose)
            adversaries = {name: fit_on(fitted, member[fit], seed * FOLDS + number) for name, fit_on in attacks.items()}
            tried = {name: score(validation) for name, score in adversaries.items()}
            aucs = {name: auc_and_variance(each, member[choose])[0] for name, each in tried.items()}
            best = max(aucs, key=aucs.__getitem__)
            scores[test] = adversaries[best](evidence.at(test))
            folds.append(Fold(scores[test], member[test], best_threshold(tried[best], member[choose])))
            wins[best] += 1
    return Result(evaluate(folds), folds, scores, wins.most_common(1)[0][0], dict(wins))


def in_sample(evidence: Evidence, member: NDArray[np.bool_], attack: Fit, seed: int) -> float:
    """The paper's protocol: balanced accuracy of an adversary on the very examples it was fitted on."""
    scores = attack(evidence, member, seed)(evidence)
    threshold = best_threshold(scores, member)
    return float(((scores[member] > threshold).mean() + (scores[~member] <= threshold).mean()) / 2)


def splits(member: NDArray[np.bool_], seed: int) -> Iterator[tuple[Indices, Indices, Indices]]:
    """(fit, choose, test) for every fold, each with its share of members and non-members."""
    generator = np.random.default_rng(seed)
    fold = np.zeros(len(member), dtype=np.int64)
    for group in (member, ~member):
        index = np.flatnonzero(group)
        fold[generator.permutation(index)] = np.arange(len(index)) % FOLDS
    for number in range(FOLDS):
        fit, choose = [], []
        for group in (member, ~member):
            rest = generator.permutation(np.flatnonzero(group & (fold != number)))
            cut = round(len(rest) * VALIDATION)
            choose.append(rest[:cut])
            fit.append(rest[cut:])
        yield np.sort(np.concatenate(fit)), np.sort(np.concatenate(choose)), np.flatnonzero(fold == number)


def require_enough(member: NDArray[np.bool_]) -> None:
    fewest = min(int(member.sum()), int((~member).sum()))
    if fewest < FEWEST:
        raise ValueError(
            f"there are {int(member.sum())} members and {int((~member).sum())} non-members; an estimate with an "
            f"interval needs at least {FEWEST} of each"
        )
