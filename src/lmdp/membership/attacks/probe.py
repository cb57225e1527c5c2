"""Probes: membership read off the representation itself, with the label beside it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import nn

from lmdp.membership.evidence import Array, Evidence, Score, Standardiser

HIDDEN, EPOCHS, DECAY, BATCH = 64, 12, 1e-2, 1024


def fit_probe(evidence: Evidence, member: NDArray[np.bool_], seed: int) -> Score:
    """Linear: strongly regularised logistic regression."""
    inputs = _Inputs(evidence)
    model = LogisticRegression(C=0.01, max_iter=200, random_state=seed).fit(inputs(evidence), member)
    return lambda other: np.asarray(model.decision_function(inputs(other)), dtype=np.float64)


def fit_mlp(
    evidence: Evidence,
    member: NDArray[np.bool_],
    seed: int,
    *,
    hidden: int = HIDDEN,
    epochs: int = EPOCHS,
    decay: float = DECAY,
) -> Score:
    """One hidden layer, trained by Adam for a fixed number of epochs."""
    inputs = _Inputs(evidence)
    x = torch.from_numpy(inputs(evidence)).float()
    y = torch.from_numpy(member.astype(np.float32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=decay)
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(model(x[batch]).squeeze(1), y[batch]).backward()
                optimizer.step()

    def score(other: Evidence) -> NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.from_numpy(inputs(other)).float()).squeeze(1)
        return np.asarray(logits.double().numpy())

    return score


class _Inputs:
    """Standardised representation, and the label as one column per class."""

    def __init__(self, evidence: Evidence) -> None:
        self._standardise = Standardiser.of(evidence.features)
        self._classes = None if evidence.labels is None else np.unique(evidence.labels)

    def __call__(self, evidence: Evidence) -> Array:
        features = self._standardise(evidence.features)
        if self._classes is None or evidence.labels is None:
            return features
        return np.hstack([features, evidence.labels[:, None] == self._classes])
