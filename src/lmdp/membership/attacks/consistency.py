"""Augmentation consistency: a member's representation moves differently when its input is altered."""

from __future__ import annotations

import numpy as np

from lmdp.membership.attacks.summary import Measure
from lmdp.membership.evidence import Array, Evidence


def movements(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
    """How far each augmented copy lies from the original, and how unevenly."""
    standardise = evidence.scale

    def measure(other: Evidence) -> Array:
        assert other.views is not None
        original = standardise(other.features)
        each = []
        for copy in range(other.views.shape[1]):
            view = standardise(other.views[:, copy])
            each.append(np.sqrt(((view - original) ** 2).mean(1)))
        moved = np.log(np.column_stack(each) + 1e-6)
        return np.column_stack([moved, moved.mean(1), moved.max(1), moved.min(1), moved.std(1)])

    return measure(evidence), measure
