"""Cross-fitting: every example is scored once, by an adversary that was neither fitted nor chosen on it.

The examples are cut into folds. For each fold in turn, the others are split into a part to fit every attack family on
and a part to choose the best family and its threshold on; the winner then scores the fold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lmdp.membership.evidence import Evidence, Fit, Score
from lmdp.membership.leak import Leak, leak_of
from lmdp.membership.metrics import Fold, Metrics, auc_and_variance, best_threshold, evaluate
from lmdp.membership.workers import Share, side_by_side

Indices = NDArray[np.int64]
FOLDS = 5
VALIDATION = 0.25
MOST_FITTED = 30_000
CHUNK = 20_000
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


@dataclass(frozen=True)
class Scored:
    """One fold: its examples, what the chosen adversary makes of them, and which family that was."""

    test: Indices
    fold: Fold
    attack: str


Attacks = Callable[[Evidence], Mapping[str, Fit]]
"""The families to be tried on evidence; asked anew for every fold, since families remember what they measured."""


def cross_fit(
    evidence: Evidence,
    member: NDArray[np.bool_],
    attacks: Mapping[str, Fit] | Attacks,
    seed: int,
    share: Share = side_by_side,
) -> Result:
    """Balanced members and non-members are expected; too few are refused. Of equal families the first is chosen."""
    return joined(list(share(fold_tasks(evidence, member, attacks, seed))))


def fold_tasks(
    evidence: Evidence, member: NDArray[np.bool_], attacks: Mapping[str, Fit] | Attacks, seed: int
) -> list[Callable[[], Scored]]:
    """One task for every fold, which may run side by side."""
    require_enough(member)
    return [
        partial(_score_fold, evidence, member, attacks, split, seed * FOLDS + number)
        for number, split in enumerate(splits(member, seed))
    ]


def joined(parts: Sequence[Scored]) -> Result:
    """All folds of one kind of evidence."""
    scores = np.zeros(sum(len(part.test) for part in parts))
    for part in parts:
        scores[part.test] = part.fold.scores
    folds = [part.fold for part in parts]
    wins = Counter(part.attack for part in parts)
    return Result(evaluate(folds), folds, scores, wins.most_common(1)[0][0], dict(wins))


def _score_fold(
    evidence: Evidence,
    member: NDArray[np.bool_],
    attacks: Mapping[str, Fit] | Attacks,
    split: tuple[Indices, Indices, Indices],
    seed: int,
) -> Scored:
    fit, choose, test = split
    fitted, validation = evidence.at(fit), evidence.at(choose)
    families = attacks if isinstance(attacks, Mapping) else attacks(evidence)
    adversaries = {name: fit_on(fitted, member[fit], seed) for name, fit_on in families.items()}
    tried = {name: score(validation) for name, score in adversaries.items()}
    aucs = {name: auc_and_variance(each, member[choose])[0] for name, each in tried.items()}
    best = max(aucs, key=aucs.__getitem__)
    threshold = best_threshold(tried[best], member[choose])
    return Scored(test, Fold(_scores(adversaries[best], evidence, test), member[test], threshold), best)


def _scores(score: Score, evidence: Evidence, index: Indices) -> NDArray[np.float64]:
    """A part at a time, so that memory is bounded however many there are."""
    parts = [score(evidence.at(index[start : start + CHUNK])) for start in range(0, len(index), CHUNK)]
    return np.concatenate(parts)


def in_sample(evidence: Evidence, member: NDArray[np.bool_], attack: Fit, seed: int) -> float:
    """The paper's protocol: balanced accuracy of an adversary on the very examples it was fitted on."""
    scores = attack(evidence, member, seed)(evidence)
    threshold = best_threshold(scores, member)
    return float(((scores[member] > threshold).mean() + (scores[~member] <= threshold).mean()) / 2)


def splits(member: NDArray[np.bool_], seed: int) -> Iterator[tuple[Indices, Indices, Indices]]:
    """(fit, choose, test) for every fold, each with its share of members and non-members.

    Beyond `MOST_FITTED` no more are fitted on, nor chosen on: they would hardly make an adversary stronger.
    """
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
            choose.append(rest[: min(cut, MOST_FITTED // 2)])
            fit.append(rest[cut : cut + MOST_FITTED // 2])
        yield np.sort(np.concatenate(fit)), np.sort(np.concatenate(choose)), np.flatnonzero(fold == number)


def require_enough(member: NDArray[np.bool_]) -> None:
    fewest = min(int(member.sum()), int((~member).sum()))
    if fewest < FEWEST:
        raise ValueError(
            f"there are {int(member.sum())} members and {int((~member).sum())} non-members; an estimate with an "
            f"interval needs at least {FEWEST} of each"
        )
