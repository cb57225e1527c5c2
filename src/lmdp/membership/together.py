"""An adversary who has the whole model: what is measured of all layers, together, and the gradients of an example.

A layer's own leak is about one representation. Here the numbers of all layers stand side by side; in a white box also
the length of the example's own gradient in every layer, which tells most of all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from lmdp.gradients import Capture
from lmdp.gradients.attach import is_attached
from lmdp.layers import LayerMap
from lmdp.membership.attacks import summaries_of
from lmdp.membership.attacks.summary import Measure, Summary, attack_on
from lmdp.membership.crossfit import Result, cross_fit
from lmdp.membership.evidence import Array, Evidence
from lmdp.membership.examples import Examples, count, take
from lmdp.models import evaluation, main_tensor, run

ALL_LAYERS, WHITE_BOX = "(all layers)", "(white box)"
BATCH = 64
Views = dict[str, tuple[Evidence, dict[str, Summary]]]
"""What is looked at, by name, and what is measured of it."""


def gradient_norms(model: torch.nn.Module, examples: Examples) -> NDArray[np.float64] | None:
    """[n, L + 1]: logarithms of the squared length of each example's gradient, of every layer and of all together.

    Of the cross-entropy of its label; None where there are no labels, or the output is not one score per class.
    """
    if examples.labels is None:
        return None
    if is_attached(model):
        raise ValueError(
            "the model is still attached to a privacy engine; call engine.detach() before a white-box audit"
        )
    layers = LayerMap.of(model)
    was = {name: parameter.grad for name, parameter in model.named_parameters()}
    capture = Capture(model, layers)
    rows = []
    try:
        with evaluation(model), torch.enable_grad():
            for start in range(0, count(examples.inputs), BATCH):
                labels = examples.labels[start : start + BATCH].long()
                output = main_tensor(run(model, take(examples.inputs, slice(start, start + BATCH))))
                if output is None or output.dim() != 2 or int(labels.max()) >= output.shape[1]:
                    return None
                F.cross_entropy(output, labels.to(output.device), reduction="sum").backward()
                squared = capture.take().squared_norms(layers)
                rows.append(torch.cat([squared, squared.sum(1, keepdim=True)], dim=1).cpu())
                model.zero_grad()
    finally:
        capture.detach()
        for name, parameter in model.named_parameters():
            parameter.grad = was[name]
    return np.asarray(torch.log(torch.cat(rows).clamp(1e-30, 1e30)).nan_to_num().numpy())


def views_of(collected: Mapping[str, Evidence], gradients: NDArray[np.float64] | None) -> Views:
    """All layers, and all of them with the gradients; examples stand in them by their number."""
    size = len(next(iter(collected.values())))
    numbered = Evidence(np.arange(size, dtype=np.float64)[:, None])
    views: Views = {ALL_LAYERS: (numbered, {"jointly": _joint(collected, None)})}
    if gradients is not None:
        views[WHITE_BOX] = (numbered, {"jointly": _joint(collected, gradients)})
    return views


def attack_views(views: Views, member: NDArray[np.bool_], seed: int) -> dict[str, Result]:
    """Held out and cross-fitted, as layers are."""
    return {
        name: cross_fit(evidence, member, {"jointly": attack_on(*summaries.values())}, seed)
        for name, (evidence, summaries) in views.items()
    }


def _joint(collected: Mapping[str, Evidence], gradients: NDArray[np.float64] | None) -> Summary:
    def summary(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
        rows = _numbers(evidence)
        measured = [
            (layer, *each(layer.at(rows), seed))
            for layer in collected.values()
            for each in summaries_of(layer).values()
        ]
        beside = [] if gradients is None else [gradients]

        def measure(other: Evidence) -> Array:
            there = _numbers(other)
            return np.hstack([*(of(layer.at(there)) for layer, _, of in measured), *(each[there] for each in beside)])

        return np.hstack([*(table for _, table, _ in measured), *(each[rows] for each in beside)]), measure

    return summary


def _numbers(evidence: Evidence) -> NDArray[np.int64]:
    return evidence.features[:, 0].astype(np.int64)
