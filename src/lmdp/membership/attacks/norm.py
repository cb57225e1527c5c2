"""Length of the representation: training changes how strongly a network responds to what it has seen."""

from __future__ import annotations

import numpy as np

from lmdp.membership.attacks.summary import Measure
from lmdp.membership.evidence import Array, Evidence


def lengths(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
    """Largest entry, Euclidean length, mean size, and evenness; logarithms, so that scale does not matter."""
    return _lengths(evidence), _lengths


def _lengths(evidence: Evidence) -> Array:
    sizes = np.abs(np.nan_to_num(evidence.features.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30))
    largest = sizes.max(1)
    relative = sizes / np.maximum(largest, 1e-300)[:, None]
    euclid, mean = np.sqrt((relative**2).sum(1)), relative.mean(1)
    logs = [np.log(np.maximum(v, 1e-300)) for v in (largest, euclid, mean)]
    return np.column_stack([logs[0], logs[0] + logs[1], logs[0] + logs[2], logs[2] - logs[1]])
