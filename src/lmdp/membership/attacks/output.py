"""The model's own output: loss, confidence, margin. What a classifier leaks without showing any inner layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp

from lmdp.membership.attacks.summary import Measure
from lmdp.membership.evidence import Array, Evidence


def output_losses(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
    return output_statistics(evidence), output_statistics


def output_statistics(evidence: Evidence) -> Array:
    """Columns: −loss, confidence, −entropy, logit of the true class against the rest."""
    logs, true = _log_probabilities(evidence)
    entropy = -(np.exp(logs) * logs).sum(1)
    return np.column_stack([true, logs.max(1), -entropy, scaled_confidence(evidence)])


def scaled_confidence(evidence: Evidence) -> NDArray[np.float64]:
    """log p / (1 − p) of the true class (of the most likely class without labels): nearly normal, as LiRA wants it."""
    logs, true = _log_probabilities(evidence)
    at = logs.argmax(1) if evidence.labels is None else evidence.labels
    others = logs.copy()
    others[np.arange(len(logs)), at] = -np.inf
    logits = true - logsumexp(others, axis=1)
    return np.asarray(np.clip(logits, -60.0, 60.0), dtype=np.float64)  # of a single class, everything is certain


def _log_probabilities(evidence: Evidence) -> tuple[Array, NDArray[np.float64]]:
    assert evidence.outputs is not None
    logs = log_softmax(np.nan_to_num(evidence.outputs.astype(np.float64), posinf=1e6, neginf=-1e6), axis=1)
    logs = np.maximum(logs, -60.0)
    at = logs.argmax(1) if evidence.labels is None else evidence.labels
    return logs, logs[np.arange(len(logs)), at]
