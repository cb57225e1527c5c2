"""How well any attack can do on a mechanism: its trade-off curve, from the privacy profile that `dp-accounting` gives.

A mechanism that is (epsilon, delta)-private for many epsilons at once, each with its own delta, has a privacy profile.
Each pair limits TPR ≤ e^epsilon·FPR + delta, and the same with members and others exchanged. The least of all these
lines bounds the ROC of every attack from above, however few of the pairs are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmdp.accounting import MOST_STEPS

LINES, FAINTEST, LARGEST = 200, 1e-12, 700.0
"""How many pairs of a profile are kept, up to the epsilon whose delta is `FAINTEST`, or whose e^epsilon still fits."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Pairs (epsilon, delta) that hold at once. Concave and increasing in the rate of false positives."""

    epsilons: NDArray[np.float64]
    deltas: NDArray[np.float64]

    def __post_init__(self) -> None:
        if not (self.epsilons.min() >= 0 and self.epsilons.max() <= LARGEST):
            raise ValueError(f"epsilons must lie between 0 and {LARGEST:g}, beyond which nothing is limited")

    def most(self, fpr: float) -> float:
        """The true positive rate that no attack exceeds at this false positive rate."""
        lines = np.minimum(self._rise * fpr + self.deltas, 1 - (1 - self.deltas - fpr) / self._rise)
        return min(1.0, float(lines.min()))

    def least(self, tpr: float) -> float:
        """The false positive rate that every attack has at least, at this true positive rate: the inverse of `most`."""
        lines = np.maximum((tpr - self.deltas) / self._rise, (1 - self.deltas) - self._rise * (1 - tpr))
        return max(0.0, float(lines.max()))

    @cached_property
    def _rise(self) -> NDArray[np.float64]:
        return np.exp(self.epsilons)


@dataclass(frozen=True)
class GaussianSteps:
    """So many Poisson-subsampled Gaussian mechanisms, one after the other: what a private training is.

    With `sample_rate` 1 and one step this is the Gaussian mechanism, and its curve that of mu-GDP, mu = 1 / noise.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(f"noise_multiplier is {self.noise_multiplier}; it must be a finite number, 0 or more")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate is {self.sample_rate}; it must be above 0 and at most 1")
        if not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(f"steps is {self.steps}; it must be 1 to {MOST_STEPS}")

    def with_noise(self, noise_multiplier: float) -> GaussianSteps:
        return replace(self, noise_multiplier=noise_multiplier)

    def curve(self) -> Curve:
        """An upper bound on what any attack can do, for adding and removing one example alike."""
        return _curve(self)

    def epsilon(self, delta: float) -> float:
        """Of the same numbers that the curve is made of, and so consistent with it."""
        return _epsilon(self, delta)


@lru_cache(4096)
def _curve(steps: GaussianSteps) -> Curve:
    if steps.noise_multiplier == 0:
        return Curve(np.zeros(1), np.ones(1))
    losses = _losses(steps)
    last = min(LARGEST, max(1e-6, losses.get_epsilon_for_delta(FAINTEST)))
    epsilons = np.linspace(0, last, LINES)
    return Curve(epsilons, np.clip(losses.get_delta_for_epsilon(epsilons), 0, 1))


@lru_cache(4096)
def _epsilon(steps: GaussianSteps, delta: float) -> float:
    return math.inf if steps.noise_multiplier == 0 else float(_losses(steps).get_epsilon_for_delta(delta))


@lru_cache(2)
def _losses(steps: GaussianSteps) -> Any:
    """The privacy loss distribution, rounded so that no delta is understated. Epsilon is overstated, by below 0.1 %."""
    from dp_accounting.pld import privacy_loss_distribution

    one = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=steps.noise_multiplier,
        sampling_prob=steps.sample_rate,
        # A twentieth of what one step usually loses: rounding then adds little to the spread, however many steps.
        value_discretization_interval=max(1e-4, 0.05 * steps.sample_rate / steps.noise_multiplier),
    )
    return one.self_compose(steps.steps) if steps.steps > 1 else one
