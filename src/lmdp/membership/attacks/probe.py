"""Probes: membership read off the representation itself, with the label beside it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import nn

from lmdp.membership.evidence import Array, Evidence, Score

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
    generator = torch.Generator().manual_seed(seed)  # its own: adversaries are fitted side by side
    model = nn.Sequential(_linear(x.shape[1], hidden, generator), nn.ReLU(), _linear(hidden, 1, generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=decay)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for rows, wanted in zip(x[order].split(BATCH), y[order].split(BATCH)):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(rows).squeeze(1), wanted).backward()
            optimizer.step()

    def score(other: Evidence) -> NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.from_numpy(inputs(other)).float()).squeeze(1)
        return np.asarray(logits.double().numpy())

    return score


def _linear(width: int, out: int, generator: torch.Generator) -> nn.Linear:
    """As torch begins one, from a generator of one's own."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width, out)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-(width**-0.5), width**-0.5, generator=generator)
    return layer


class _Inputs:
    """Standardised representation, and the label as one column per class."""

    def __init__(self, evidence: Evidence) -> None:
        self._fitted = evidence
        self._classes = None if evidence.labels is None else np.unique(evidence.labels)

    def __call__(self, evidence: Evidence) -> Array:
        features = evidence.standardised if evidence is self._fitted else self._fitted.scale(evidence.features)
        if self._classes is None or evidence.labels is None:
            return features
        return np.hstack([features, (evidence.labels[:, None] == self._classes).astype(features.dtype)])
