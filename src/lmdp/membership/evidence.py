"""What an adversary is shown of each example: its representation at one layer, and what goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
LIMIT = 8.0
"""Standardised features are cut off here, so that one wild value cannot run an adversary."""
ROWS = 4096
"""Examples that centre and scale are computed from, at most: an adversary gains nothing from knowing them better."""


@dataclass(frozen=True)
class Evidence:
    """n examples. `views`: of augmented copies, [n, copies, width]; `outputs`: the model's own, [n, classes]."""

    features: Array
    labels: NDArray[np.int64] | None = None
    views: Array | None = None
    outputs: Array | None = None

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def scale(self) -> Standardiser:
        """Fitted on these examples, once for all adversaries that are."""
        return Standardiser.of(self.features)

    @cached_property
    def standardised(self) -> Array:
        """These examples on their own scale."""
        return self.scale(self.features)

    def at(self, index: NDArray[np.int64]) -> Evidence:
        return Evidence(
            self.features[index],
            None if self.labels is None else self.labels[index],
            None if self.views is None else self.views[index],
            None if self.outputs is None else self.outputs[index],
        )


Score = Callable[[Evidence], NDArray[np.float64]]
"""How much each example looks like a member."""
Fit = Callable[[Evidence, NDArray[np.bool_], int], Score]
"""(evidence, which examples are members, seed) → an adversary."""


@dataclass(frozen=True)
class Standardiser:
    """Centre and scale from the examples it was fitted on. Constant, dead, missing and wild values become harmless."""

    centre: Array
    scale: Array

    @classmethod
    def of(cls, features: Array) -> Standardiser:
        sample = features[:: -(-len(features) // ROWS)] if len(features) > ROWS else features
        finite = np.where(np.isfinite(sample), sample, np.nan)
        alive = np.isfinite(finite).any(axis=0)
        whole = np.isfinite(finite).all()
        quantile = np.quantile if whole else np.nanquantile  # the latter is many times slower
        # Robust: one value of 1e30 must not flatten the rest of its column.
        low, middle, high = np.zeros((3, finite.shape[1]))
        if alive.any():
            low[alive], middle[alive], high[alive] = quantile(finite[:, alive], [0.05, 0.5, 0.95], axis=0)
        centre, spread = middle, (high - low) / 3.29
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 1e-12 * (1 + np.abs(centre)))
        return cls(centre.astype(features.dtype), scale.astype(features.dtype))

    def __call__(self, features: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (features - self.centre) * self.scale
        np.nan_to_num(scaled, copy=False, nan=0.0, posinf=LIMIT, neginf=-LIMIT)
        return np.clip(scaled, -LIMIT, LIMIT, out=scaled)
