"""What further eyes add to the attacks on a layer: python benchmarks/eyes.py FILE.npz --case cifar|fashion|canaries

Each eye is put beside the families of the table, alone and in their combination; the best is chosen on validation data
as always. FILE.npz has x_train and y_train: bytes, [N, H, W] or [N, H, W, 3]. Trained models are kept in --models.

    cifar      D-CNN, 10,000 examples, half of them members, trained without noise until it fits them
    fashion    S-CNN, 4,000 examples, the same
    canaries   S-CNN, 5,000 examples, half of them members; 1,000 have a wrong label, and only these are audited
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from lmdp.gradients import Capture
from lmdp.layers import LayerMap
from lmdp.membership import instrument
from lmdp.membership.attacks import attacks_on, summaries_of
from lmdp.membership.attacks.head import head_losses
from lmdp.membership.attacks.summary import Measure, Summary, attack_on, remembered
from lmdp.membership.crossfit import Result, cross_fit
from lmdp.membership.evidence import Array, Evidence, Fit, Score
from lmdp.membership.examples import Examples
from lmdp.models import build, evaluation, fresh
from lmdp.risk.shadow import Schedule, halves, train_shadow

ANCHORS = 4000


@dataclass(frozen=True)
class Case:
    model: str
    size: int
    wrong: int
    layers: tuple[str, ...]


CASES = {
    "cifar": Case("d-cnn", 10_000, 0, ("convs.5", "convs.6", "head")),
    "fashion": Case("s-cnn", 4000, 0, ("conv2", "fc1", "fc2")),
    "canaries": Case("s-cnn", 5000, 1000, ("conv2", "fc1", "fc2")),
}


def cosines(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
    """EncoderMI: how alike all pairs of an example's augmented copies are, in order."""

    def measure(other: Evidence) -> Array:
        assert other.views is not None
        rows = np.concatenate([other.features[:, None], other.views], axis=1)
        rows = rows / (np.linalg.norm(rows, axis=2, keepdims=True) + 1e-12)
        pairs = combinations(range(rows.shape[1]), 2)
        each = np.stack([np.log(1 - (rows[:, i] * rows[:, j]).sum(1) + 1e-6) for i, j in pairs], axis=1)
        return np.column_stack([np.sort(each, axis=1), each.mean(1), each.std(1)])

    return measure(evidence), measure


def density(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
    """Distances to the nearest of the fitted examples, whatever their labels; a fitted one does not count itself."""
    chosen = np.random.default_rng(seed).permutation(len(evidence))[:ANCHORS]
    anchors = evidence.standardised[chosen]

    def nearest(rows: Array) -> Array:
        squared = (rows**2).sum(1)[:, None] - 2 * rows @ anchors.T + (anchors**2).sum(1)
        return np.sqrt(np.maximum(np.partition(squared, 21, axis=1)[:, :22], 0))

    def numbers(close: Array) -> Array:
        close = np.sort(close, axis=1)
        return np.log(close[:, [0, 4, 20]] + 1e-6)

    def measure(other: Evidence) -> Array:
        return numbers(nearest(evidence.scale(other.features))[:, :21])

    close = np.sort(nearest(evidence.standardised), axis=1)
    itself = np.isin(np.arange(len(evidence)), chosen)
    return numbers(np.where(itself[:, None], close[:, 1:22], close[:, :21])), measure


def gradient_norms(norms: NDArray[np.float64], rows_of: Callable[[Evidence], Any]) -> Summary:
    """Length of the example's own gradient in every layer."""

    def summary(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
        def measure(other: Evidence) -> Array:
            return norms[rows_of(other)]

        return measure(evidence), measure

    return summary


def fit_quantiles(evidence: Evidence, member: NDArray[np.bool_], seed: int) -> Score:
    """How far the confidence lies above what non-members with such a representation have, in their own spread."""
    table, measure = head_losses(evidence, seed)
    confidence = table[:, 3]
    out = ~member
    centre = Ridge(alpha=100.0).fit(evidence.standardised[out], confidence[out])
    off = np.log(np.abs(confidence[out] - centre.predict(evidence.standardised[out])) + 1e-3)
    spread = Ridge(alpha=100.0).fit(evidence.standardised[out], off)

    def score(other: Evidence) -> NDArray[np.float64]:
        rows = evidence.scale(other.features)
        return np.asarray(
            (measure(other)[:, 3] - centre.predict(rows)) / np.exp(spread.predict(rows)), dtype=np.float64
        )

    return score


def norms_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> NDArray[np.float64]:
    layers = LayerMap.of(model)
    capture = Capture(model, layers)
    parts = []
    with evaluation(model):
        for x, y in zip(inputs.split(64), labels.split(64)):
            F.cross_entropy(model(x), y, reduction="sum").backward()
            squared = capture.take().squared_norms(layers)
            parts.append(torch.log(torch.cat([squared, squared.sum(1, keepdim=True)], dim=1) + 1e-12).numpy())
            model.zero_grad()
    capture.detach()
    return np.concatenate(parts)


def prepared(case: Case, name: str, data: Path, folder: Path) -> tuple[nn.Module, Tensor, Tensor, NDArray[np.bool_]]:
    """The trained model, and the examples that are audited."""
    arrays = np.load(data)
    pixels = torch.from_numpy(arrays["x_train"][: case.size])
    pixels = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
    x, y = pixels.float().div(255).sub(0.5).div(0.5), torch.from_numpy(arrays["y_train"][: case.size]).long()
    y[: case.wrong] = (y[: case.wrong] + 1) % 10
    member = halves(len(x), 5 if name == "cifar" else 1, 0)[0]
    model = fresh(lambda: build(case.model, tuple(x.shape[1:]), 10), 0)
    path = folder / f"{name}0.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
    else:
        train_shadow(model, x, y, member, Schedule(), 0, print)
        torch.save(model.state_dict(), path)
    audited = slice(case.wrong) if case.wrong else slice(None)
    return model, x[audited], y[audited], member[audited]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("data", type=Path)
    options.add_argument("--case", choices=CASES, required=True)
    options.add_argument("--models", type=Path, default=Path())
    given = options.parse_args()
    case = CASES[given.case]
    model, x, y, member = prepared(case, given.case, given.data, given.models)
    inside, outside = np.flatnonzero(member), np.flatnonzero(~member)
    size = min(len(inside), len(outside))
    kept = np.sort(np.concatenate([inside[:size], outside[:size]]))
    x, y, member = x[torch.from_numpy(kept)], y[torch.from_numpy(kept)], member[kept]
    start = time.process_time()
    collected = instrument.collect(model, Examples(x, y, member, 0), layers=list(case.layers), seed=0, views=True)
    # The number of an example stands in its outputs, so that what is measured outside can be looked up.
    norms = norms_of(model, x, y)
    numbered = {name: replace(e, outputs=np.arange(len(y), dtype=np.float64)[:, None]) for name, e in collected.items()}
    gradients = gradient_norms(norms, lambda evidence: evidence.outputs[:, 0].astype(int))
    summaries: dict[str, Summary] = {"cosine": cosines, "density": density, "gradient": gradients}
    print(f"{given.case}: {size} members and as many others; peak of {', '.join(case.layers)}")

    def show(eye: str, results: dict[str, Result]) -> None:
        best = max(results, key=lambda name: results[name].metrics.auc)
        tpr = max(results, key=lambda name: results[name].metrics.tpr_at_1pct)
        a, t = results[best].metrics.auc, results[tpr].metrics.tpr_at_1pct
        print(f"{eye:22} AUC {a:.3f} ({best}: {results[best].attack})  TPR at 1 % {t:.3f} ({tpr})", flush=True)

    def crossed(change: Callable[[Evidence, dict[str, Fit]], dict[str, Fit]]) -> dict[str, Result]:
        return {
            name: cross_fit(evidence, member, lambda e: change(e, attacks_on(e)), 0)
            for name, evidence in numbered.items()
        }

    def beside(eyes: list[Summary]) -> Callable[[Evidence, dict[str, Fit]], dict[str, Fit]]:
        def change(evidence: Evidence, fits: dict[str, Fit]) -> dict[str, Fit]:
            new = [remembered(eye) for eye in eyes]
            usual = [remembered(summary) for summary in summaries_of(evidence).values()]
            return {**fits, "eye": attack_on(*new), "with eye": attack_on(*usual, *new)}

        return change

    show("as it is", crossed(lambda _, fits: fits))
    for name, eye in summaries.items():
        show(f"{name}, alone", crossed(lambda _, fits, eye=eye: {"eye": attack_on(eye)}))
        show(f"with {name}", crossed(beside([eye])))
    show("quantile, alone", crossed(lambda _, fits: {"quantile": fit_quantiles}))
    show("with quantile", crossed(lambda _, fits: {**fits, "quantile": fit_quantiles}))
    show("all layers jointly", {"all": cross_fit(numbered[case.layers[-1]], member, lambda _: jointly(numbered), 0)})
    show(
        "jointly, and gradient",
        {"all": cross_fit(numbered[case.layers[-1]], member, lambda _: jointly(numbered, gradients), 0)},
    )
    print(f"{time.process_time() - start:.0f} s of processor time")


def jointly(collected: dict[str, Evidence], *eyes: Summary) -> dict[str, Fit]:
    """Everything that is measured of every layer, in one combination."""

    def of_layer(layer: Evidence, summary: Summary) -> Summary:
        def joint(evidence: Evidence, seed: int) -> tuple[Array, Measure]:
            def rows(other: Evidence) -> Evidence:
                assert other.outputs is not None
                return layer.at(other.outputs[:, 0].astype(np.int64))

            table, measure = summary(rows(evidence), seed)
            return table, lambda other: measure(rows(other))

        return joint

    every = [of_layer(layer, summary) for layer in collected.values() for summary in summaries_of(layer).values()]
    return {"jointly": attack_on(*every, *eyes)}


if __name__ == "__main__":
    main()
