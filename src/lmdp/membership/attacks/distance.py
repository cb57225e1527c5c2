"""Distance to class-conditional statistics: members sit closer to the centre of their class."""

from __future__ import annotations

import numpy as np
from sklearn.covariance import ledoit_wolf_shrinkage

from lmdp.membership.attacks.summary import Measure
from lmdp.membership.evidence import Array, Evidence


def distances(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
    """Mahalanobis distances to the own and the nearest other class centre; centres and spread from the fitted part."""
    assert evidence.labels is not None
    standardise, features = evidence.scale, evidence.standardised
    classes, place = np.unique(evidence.labels, return_inverse=True)
    raw_centres = np.stack([features[place == k].mean(axis=0) for k in range(len(classes))])
    whiten = _whitener(features - raw_centres[place])
    centres = raw_centres @ whiten

    def measure(other: Evidence, pull: Array | None = None) -> Array:
        assert other.labels is not None
        points = standardise(other.features) @ whiten
        squared = (points**2).sum(1)[:, None] - 2 * points @ centres.T + (centres**2).sum(1)
        each = np.sqrt(np.maximum(squared, 0))
        rows, home = np.arange(len(points)), np.searchsorted(classes, other.labels).clip(0, len(classes) - 1)
        to_home = each[rows, home] if pull is None else each[rows, home] * pull
        each[rows, home] = np.inf
        to_nearest = each.min(1) if len(classes) > 1 else to_home
        return np.column_stack([to_home, to_nearest, to_home - to_nearest, np.log1p(to_home)])

    # A fitted example pulls its own centre towards itself by 1/count; this is its distance with itself left out.
    counts = np.bincount(place)[place].astype(np.float64)
    return measure(evidence, np.where(counts > 1, counts / np.maximum(counts - 1, 1), 1.0)), measure


def _whitener(residuals: Array) -> Array:
    """A matrix that makes the within-class spread round, shrunk so that it exists for any sample."""
    shrinkage = float(ledoit_wolf_shrinkage(residuals, assume_centered=True)) if residuals.shape[1] > 1 else 0.0
    covariance = residuals.T @ residuals / max(1, len(residuals))
    mean_variance = float(np.trace(covariance)) / len(covariance)
    covariance = (1 - shrinkage) * covariance + (shrinkage * mean_variance + 1e-6) * np.eye(len(covariance))
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors / np.sqrt(np.maximum(values, 1e-9)))
