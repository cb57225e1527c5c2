"""A classifier of the adversary's own on top of the representation: it finds members easier.

The network was trained to make its members' classes separable; a linear head on any layer inherits some of that, and
the head's loss on an example, and on its augmented copies, gives it away.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from lmdp.membership.attacks.output import output_statistics
from lmdp.membership.attacks.summary import Measure
from lmdp.membership.evidence import Array, Evidence

STEPS = 60
Logits = Callable[[Array], NDArray[np.float32]]


def head_losses(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
    """Loss, confidence and margin under a softmax head; a fitted example is measured by a head that did not see it."""
    assert evidence.labels is not None
    labels = evidence.labels
    half = np.random.default_rng(seed).permutation(len(evidence)) % 2 == 0
    heads = [_fit_head(evidence, np.flatnonzero(part), int(labels.max()) + 1) for part in (half, ~half)]
    table = np.zeros((len(evidence), _measure(evidence.at(np.arange(1)), heads[0]).shape[1]))
    for part, head in ((~half, heads[0]), (half, heads[1])):
        table[part] = _measure(evidence.at(np.flatnonzero(part)), head)

    def measure(other: Evidence) -> Array:
        return np.asarray((_measure(other, heads[0]) + _measure(other, heads[1])) / 2)

    return table, measure


def _fit_head(evidence: Evidence, part: NDArray[np.int64], classes: int) -> Logits:
    """Multinomial logistic regression by full-batch Adam. A representation with one unit per class is its own head.

    Centre and scale are those of all examples; they tell nothing of any one of them.
    """
    assert evidence.labels is not None
    if evidence.features.shape[1] == classes:
        return lambda features: np.nan_to_num(features.astype(np.float32), posinf=1e6, neginf=-1e6)
    standardise = evidence.scale
    x = torch.from_numpy(evidence.standardised[part]).float()
    y = torch.from_numpy(evidence.labels[part])
    head = nn.utils.skip_init(nn.Linear, x.shape[1], classes)  # the usual beginning would draw from a generator of all
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05, weight_decay=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(head(x), y).backward()
        optimizer.step()

    def logits(features: Array) -> NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(head(torch.from_numpy(standardise(features)).float()).numpy())

    return logits


def _measure(evidence: Evidence, head: Logits) -> Array:
    columns = [_statistics(evidence, head(evidence.features))]
    if evidence.views is not None:
        views = [_statistics(evidence, head(evidence.views[:, i])) for i in range(evidence.views.shape[1])]
        columns += [np.mean(views, axis=0), np.min(views, axis=0)]
    return np.hstack(columns)


def _statistics(evidence: Evidence, logits: NDArray[np.float32]) -> Array:
    assert evidence.labels is not None
    labels = evidence.labels.clip(0, logits.shape[1] - 1)  # the head has no unit for a class that it was not fitted on
    return output_statistics(Evidence(evidence.features, labels, outputs=logits))
